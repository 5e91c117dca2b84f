"""Alerts: warnings of pairs, settings and scores with which a run fails, while they can still be mended."""

import logging
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from metaphrase.data.pairs import SIDES, SPLITS, column_texts
from metaphrase.evaluation.evaluate import spread
from metaphrase.inference.batches import target_limits
from metaphrase.plugins import plugin
from metaphrase.storage.generation_options import length_limits
from metaphrase.training.corpora import PairCorpus
from metaphrase.training.recipe.recipe import Recipe, learning_rate

logger = logging.getLogger(__name__)

# Evenly spread pairs whose texts are compared. More change the shares little.
_COMPARED_PAIRS, _MIN_PAIRS = 5000, 20
# Half of the pairs of a text normalizer may be equal on both sides, and all targets of a classifier are a few words.
_QUOTED, _EQUAL_SIDES, _ONE_TARGET, _ONE_TARGET_OF_MANY, _FEW_TARGETS = 0.95, 0.95, 0.8, 0.5, 20
# Public corpora of code share up to 9 % of their sources.
_SHARED_SOURCES = _REPEATED_PAIRS = 0.1
# Beside names and codes of languages.
_COLUMN_NAMES = {"src", "tgt", "trg", "input", "output", "text", "summary", *SIDES}
_LONG_REFERENCES, _UNFINISHED = 0.01, 0.02
# Scores above which outputs have something in common with the references; error rates below which they have.
_ALIVE = {"bleu": 0.5, "rouge": 0.5, "chrf": 15.0, "chrf++": 15.0, "exact_match": 0.0}
_DEAD_ERROR_RATE = 95.0


def warn(occasion: str, *arguments: Any) -> None:
    """Log the alerts of an occasion: `data`, `run` or `outputs`. The arguments are those of its function below."""
    functions = {"data": data_alerts, "run": run_alerts, "outputs": output_alerts}
    for alert in functions[occasion](*arguments):
        logger.warning("%s", alert)


def data_alerts(corpus: Any) -> Iterator[str]:
    """Yield alerts of the pairs of a corpus that is loaded; of a stream, those of its sample."""
    parts = corpus.parts.values() if corpus.recipe.tasks else (corpus,)
    for part in parts if corpus.recipe.objective == "pairs" else ():
        yield from _pair_alerts(part)
        splits = [split for split in SPLITS if split in part.splits]
        sources = {split: map(str.strip, column_texts(part.splits[split], "source")) for split in splits}
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
    """Look for repeated pairs, names of columns in the first pair, and quotes, equal sides and equal targets in a sample."""
    pairs, prefix = corpus.splits["train"], len(corpus.recipe.source_prefix or "")
    columns = (column_texts(pairs, side) for side in SIDES)
    hashes = np.fromiter(map(hash, zip(*columns, strict=True)), np.int64, len(pairs))
    number = len(pairs) - len(np.unique(hashes))
    if number > _REPEATED_PAIRS * len(pairs):
        shown = f"{corpus.label}train: {number:,} of {len(pairs):,} pairs"
        yield f"{shown} repeat an earlier one, and weigh more in training. `metaphrase filter` drops them."
    if len(pairs) < _MIN_PAIRS:
        return
    first = pairs["source"][0][prefix:].strip(), pairs["target"][0].strip()
    names = _COLUMN_NAMES.union(TO_LANGUAGE_CODE, TO_LANGUAGE_CODE.values())
    if names.issuperset(map(str.lower, first)):
        yield (
            f"{corpus.label}train: the first pair is {first[0]!r} and {first[1]!r}. If these are names of columns, remove the "
            "line, or name them by `source_column` and `target_column`."
        )
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
    is_half = arguments.bf16 and arguments.device.type == "cpu"
    if is_half and (slow_bfloat16_alerts := plugin("slow_bfloat16")) is not None:
        yield from slow_bfloat16_alerts()
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


def output_alerts(unfinished: int, outputs: int, model: Any) -> Iterator[str]:
    """Yield an alert of final outputs that met the length limit."""
    if unfinished > _UNFINISHED * outputs:
        yield (
            f"{unfinished:,} of {outputs:,} outputs met the length limit ({length_limit(model)}) before their end. If references "
            "are longer, raise `generation_max_length`. Otherwise the network repeats itself because it is trained too little: "
            "train longer, or on more pairs, and check `learning_rate`. `num_beams: 4` or `no_repeat_ngram_size` may help."
        )


class TrainingAlerts(TrainerCallback):
    """Callback that warns once of `metrics` that stay at zero."""

    def __init__(self, metrics: Sequence[str]):
        self.metrics, self.has_warned = list(metrics), False

    def on_evaluate(self, args, state, control, **kwargs):
        entries = [entry for entry in state.log_history if any(f"eval_{name}" in entry for name in self.metrics)][-3:]
        is_early = len(entries) < 3 or entries[0]["step"] < 0.2 * state.max_steps
        # Few outputs are right as a whole at first.
        if self.has_warned or is_early or self.metrics == ["exact_match"] or not state.is_world_process_zero:
            return
        scores = {name: [entry.get(f"eval_{name}", math.nan) for entry in entries] for name in self.metrics}
        # An error rate is the other way round.
        if any(
            value > _ALIVE[name] if name in _ALIVE else value < _DEAD_ERROR_RATE
            for name, values in scores.items()
            for value in values
        ):
            return
        self.has_warned = True
        advice = "Check that each target belongs to its source, and that `learning_rate` suits the network."
        if "bleu" in scores:
            advice += " BLEU of fewer than four words is always 0: then set `metrics: [exact_match, cer]`."
        shown = ", ".join(f"{name} {values[-1]:.1f}" for name, values in scores.items())
        logger.warning("Scores stay at zero: %s after %s updates. %s", shown, f"{state.global_step:,}", advice)
