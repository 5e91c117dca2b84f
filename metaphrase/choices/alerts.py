"""Alerts: warnings of pairs, settings and outputs with which a run fails, while they can still be mended."""

import logging
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset

from metaphrase.data.pairs import SPLITS, column_texts
from metaphrase.evaluation.evaluate import spread
from metaphrase.inference.batches import target_limits
from metaphrase.storage.generation_options import length_limits
from metaphrase.training.corpora import PairCorpus
from metaphrase.training.recipe.recipe import Recipe, learning_rate

logger = logging.getLogger(__name__)

# Evenly spread pairs whose texts are compared. More change the shares little.
_COMPARED_PAIRS, _MIN_PAIRS = 5000, 20
# Half of the pairs of a text normalizer may be equal on both sides, and all targets of a classifier are a few words.
_QUOTED, _EQUAL_SIDES, _ONE_TARGET, _ONE_TARGET_OF_MANY, _FEW_TARGETS = 0.95, 0.95, 0.8, 0.5, 20
# Public corpora of code share up to 9 % of their sources.
_SHARED_SOURCES = 0.1
_LONG_REFERENCES, _UNFINISHED = 0.01, 0.02


def warn(occasion: str, *arguments: Any) -> None:
    """Log the alerts of an occasion: `data`, `run` or `outputs`. The arguments are those of its function below."""
    functions = {"data": data_alerts, "run": run_alerts, "outputs": output_alerts}
    for alert in functions[occasion](*arguments):
        logger.warning("%s", alert)


# Pairs


def data_alerts(corpus: Any) -> Iterator[str]:
    """Yield alerts of the pairs of a corpus that is loaded; of a stream, those of its sample."""
    parts = corpus.parts.values() if corpus.recipe.tasks else (corpus,)
    for part in parts if corpus.recipe.objective == "pairs" else ():
        yield from _pair_alerts(part)
        sources = {
            split: map(str.strip, column_texts(part.splits[split], "source"))
            for split in SPLITS
            if split in part.splits
        }
        train, counts = sources.pop("train"), {split: Counter(texts) for split, texts in sources.items()}
        held_out = set().union(*counts.values())
        shared = held_out.intersection(train) if held_out else set()
        for split, texts in counts.items():
            number = sum(count for text, count in texts.items() if text in shared)
            if number > _SHARED_SOURCES * texts.total():
                yield (
                    f"{part.label}{split}: {number:,} of {texts.total():,} sources occur in training too, so the scores are "
                    f"too high. Remove these pairs from training, or hold pairs out by `num_{split}`, which keeps equal "
                    "sources together."
                )


def _pair_alerts(corpus: PairCorpus) -> Iterator[str]:
    """Look for quotes, equal sides and equal targets in a sample."""
    pairs, prefix = corpus.splits["train"], len(corpus.recipe.source_prefix or "")
    if len(pairs) < _MIN_PAIRS:
        return
    sample = pairs.select(spread(len(pairs), _COMPARED_PAIRS))
    sources = [source[prefix:].strip() for source in sample["source"][:]]
    targets = [target.strip() for target in sample["target"][:]]
    equal = sum(map(str.__eq__, sources, targets)) / len(targets)
    texts = sources + targets
    if sum(len(text) > 1 and text[0] == text[-1] == '"' for text in texts) >= _QUOTED * len(texts):
        yield f"{corpus.label}train: quotes stand around nearly all texts. Remove them: only a .csv file may quote its texts."
    counts = Counter(targets)
    text, most = counts.most_common(1)[0]
    if equal >= _EQUAL_SIDES:
        yield (
            f"{corpus.label}train: source and target are the same text in {100 * equal:.0f} % of the pairs, so the network "
            "learns to copy. Check the columns or files of both sides."
        )
    elif most >= (_ONE_TARGET if len(counts) <= _FEW_TARGETS else _ONE_TARGET_OF_MANY) * len(targets):
        yield (
            f"{corpus.label}train: {100 * most / len(targets):.0f} % of the targets are the same text, {text[:50]!r}, so the "
            "network learns to write it for every source. Check the column or file of the targets."
        )


# Settings


def run_alerts(recipe: Recipe, arguments: Any, encoded: Mapping, model: Any) -> Iterator[str]:
    """Yield alerts of a complete recipe with its training arguments, encoded corpus and model, before training."""
    width = model.config.hidden_size
    rate, usual = arguments.learning_rate, learning_rate(max(128, width))
    kind, lowest, highest, advice = "a new network", usual / 10, 2.5 * usual, f"{usual:.1g}"
    if recipe.lora_rank is not None:
        kind, lowest, highest, advice = "an adapter", 1e-5, 10 * usual, "1e-4 to 1e-3"
    elif recipe.model_name_or_path is not None:
        kind, lowest, highest, advice = "fine-tuning", 1e-6, 1.25 * usual, "2e-5 to 5e-4"
    if arguments.optim.value.startswith("adamw") and not lowest <= rate <= highest:
        direction = "low" if rate < lowest else "high"
        yield f"`learning_rate` {rate:g} is far too {direction} for {kind} of width {width}. Usual is about {advice}."
    limit = length_limit(model)
    for split, pairs in encoded.items():
        if split == "train" or not isinstance(pairs, Dataset):
            continue
        limits = target_limits(model, {}, pairs["source_length"][:])
        number = sum(map(operator.gt, pairs["target_length"][:], ((most or limit + 1) - 1 for most in limits)))
        if number > _LONG_REFERENCES * len(pairs):
            yield (
                f"{split}: {number:,} of {len(pairs):,} references are longer than the length limit of outputs ({limit}), so "
                "their outputs are cut. Raise `generation_max_length`."
            )


def length_limit(model: Any) -> int:
    """Return the maximum tokens of an output, end of sequence included. By default, `generate()` ends at 20."""
    return (length_limits(model, {})[1] or 21) - 1


# Outputs


def output_alerts(unfinished: int, outputs: int, model: Any) -> Iterator[str]:
    """Yield an alert of final outputs that met the length limit."""
    if unfinished > _UNFINISHED * outputs:
        yield (
            f"{unfinished:,} of {outputs:,} outputs met the length limit ({length_limit(model)}) before their end. If references "
            "are longer, raise `generation_max_length`. Otherwise the network repeats itself because it is trained too little: "
            "train longer, or on more pairs, and check `learning_rate`. `num_beams: 4` or `no_repeat_ngram_size` may help."
        )
