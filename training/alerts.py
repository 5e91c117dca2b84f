"""Alerts: warnings of pairs, settings and scores with which a run fails, while they can still be mended."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback

from metaphrase.data.pairs import SPLITS, column_texts
from metaphrase.evaluation.evaluate import ValidationSample, spread
from metaphrase.training.corpora import PairCorpus, TaskCorpus
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Evenly spread pairs whose texts are compared. More change the shares little.
_COMPARED_PAIRS, _MIN_PAIRS = 5000, 20
# Half of the pairs of a text normalizer may be equal on both sides, and all targets of a classifier are a few words.
_EQUAL_SIDES, _ONE_TARGET, _ONE_TARGET_OF_MANY, _FEW_TARGETS = 0.95, 0.8, 0.5, 20
# Public corpora of code share up to 9 % of their sources.
_SHARED_SOURCES = 0.1
# In nats for a character. Java and C# differ by 0.026.
_SWAPPED = 0.015
_LONG_REFERENCES, _UNFINISHED, _UNFINISHED_IN_TRAINING = 0.01, 0.02, 0.1
# Scores above which outputs have something in common with the references; error rates below which they have.
_ALIVE = {"bleu": 0.5, "rouge": 0.5, "chrf": 15.0, "chrf++": 15.0, "exact_match": 0.0}
_DEAD_ERROR_RATE = 95.0
_RUNAWAY = (
    "A network that is trained too little repeats itself: train longer, or on more pairs, and check `learning_rate`. "
    "`num_beams: 4` or `no_repeat_ngram_size` may help."
)


def warn(alerts: Iterable[str]) -> None:
    """Log alerts as warnings."""
    for alert in alerts:
        logger.warning("%s", alert)


# Pairs


def data_alerts(corpus: PairCorpus) -> Iterator[str]:
    """Yield alerts of the pairs of a corpus that is loaded. Pairs that are streamed are not read."""
    if corpus.recipe.objective == "pairs":
        for part in corpus.parts.values() if isinstance(corpus, TaskCorpus) else (corpus,):
            if hasattr(part.splits["train"], "__len__"):
                yield from _side_alerts(part)
                yield from _shared_source_alerts(part)


def _texts(corpus: PairCorpus, split: str) -> tuple[list[str], list[str]]:
    """Return sources without prefix, and targets, of evenly spread pairs."""
    pairs = corpus.splits[split]
    sample, prefix = pairs.select(spread(len(pairs), _COMPARED_PAIRS)), len(corpus.recipe.source_prefix or "")
    return [source[prefix:].strip() for source in sample["source"][:]], [text.strip() for text in sample["target"][:]]


def _side_alerts(corpus: PairCorpus) -> Iterator[str]:
    """Look for equal sides, equal targets, and sides of validation or test that are swapped."""
    train = _texts(corpus, "train")
    if (count := len(train[0])) < _MIN_PAIRS:
        return
    equal = sum(map(str.__eq__, *train)) / count
    if equal >= _EQUAL_SIDES:
        yield (
            f"{corpus.label}train: source and target are the same text in {100 * equal:.0f} % of the pairs, so the network "
            "learns to copy. Check the columns or files of both sides."
        )
        return
    targets = Counter(train[1])
    text, most = targets.most_common(1)[0]
    if most >= (_ONE_TARGET if len(targets) <= _FEW_TARGETS else _ONE_TARGET_OF_MANY) * count:
        yield (
            f"{corpus.label}train: {100 * most / count:.0f} % of the targets are the same text, {text[:50]!r}, so the network "
            "learns to write it for every source. Check the column or file of the targets."
        )
    characters = [Counter("".join(texts)) for texts in train]
    for split in SPLITS[1:]:
        if split in corpus.splits and _are_swapped(characters, [Counter("".join(s)) for s in _texts(corpus, split)]):
            yield (
                f"{corpus.label}{split}: sides seem swapped. The sources resemble the targets of training, and the targets "
                f"its sources. Exchange the columns or files of the {split} pairs."
            )


def _are_swapped(train: Sequence[Counter], other: Sequence[Counter]) -> bool:
    """Return True if the characters of both sides are better predicted by the other side of training."""
    straight = (_surprise(text, side) for text, side in zip(other, train, strict=True))
    swapped = (_surprise(text, side) for text, side in zip(other, train[::-1], strict=True))
    return all(first - second > _SWAPPED for first, second in zip(straight, swapped, strict=True))


def _surprise(text: Counter, side: Counter) -> float:
    """Return the nats for a character of `text` under the frequencies of the characters of `side`."""
    total = side.total() + 0.5 * len(text.keys() | side.keys())
    return -sum(count * math.log((side[key] + 0.5) / total) for key, count in text.items()) / max(1, text.total())


def _shared_source_alerts(corpus: PairCorpus) -> Iterator[str]:
    def sources(split: str) -> Iterator[str]:
        return map(str.strip, column_texts(corpus.splits[split], "source"))

    counts = {split: Counter(sources(split)) for split in SPLITS[1:] if split in corpus.splits}
    held_out = set().union(*counts.values())
    shared = held_out.intersection(sources("train")) if held_out else set()
    for split, texts in counts.items():
        number = sum(count for text, count in texts.items() if text in shared)
        if number > _SHARED_SOURCES * texts.total():
            yield (
                f"{corpus.label}{split}: {number:,} of {texts.total():,} sources occur in training too, so the scores are too "
                f"high. Remove these pairs from training, or hold pairs out by `num_{split}`, which keeps equal sources together."
            )


# Settings


def run_alerts(recipe: Recipe, arguments: Any, encoded: Mapping, model: Any) -> Iterator[str]:
    """Yield alerts of a complete recipe with its training arguments, encoded corpus and model, before training."""
    yield from rate_alerts(recipe, arguments, model.config.hidden_size)
    limit = length_limit(model)
    for split, number in count_long_references(encoded, limit).items():
        if number > _LONG_REFERENCES * len(encoded[split]):
            yield (
                f"{split}: {number:,} of {len(encoded[split]):,} references are longer than the length limit of outputs "
                f"({limit}), so their outputs are cut. Raise `generation_max_length`."
            )


def rate_alerts(recipe: Recipe, arguments: Any, width: int) -> Iterator[str]:
    """Yield an alert of a peak learning rate of AdamW that is far from usual for this hidden size."""
    rate, usual = arguments.learning_rate, 2e-3 * (256 / max(128, width)) ** 0.75
    if not arguments.optim.value.startswith("adamw"):
        return
    kind, lowest, highest, advice = "a new network", usual / 10, 2.5 * usual, f"{usual:.1g}"
    if recipe.lora_rank is not None:
        kind, lowest, highest, advice = "an adapter", 1e-5, 10 * usual, "1e-4 to 1e-3"
    elif recipe.model_name_or_path is not None:
        kind, lowest, highest, advice = "fine-tuning", 1e-6, 1.25 * usual, "2e-5 to 5e-4"
    if not lowest <= rate <= highest:
        direction = "low" if rate < lowest else "high"
        yield f"`learning_rate` {rate:g} is far too {direction} for {kind} of width {width}. Usual is about {advice}."


def length_limit(model: Any) -> int:
    """Return the maximum tokens of an output, end of sequence included."""
    config = model.generation_config
    # Without both, `generate()` ends at 20 tokens.
    return config.max_new_tokens or (config.max_length or 21) - 1


def count_long_references(encoded: Mapping, limit: int) -> dict[str, int]:
    """Return the number of references beyond the length limit, by split."""
    splits = {name: pairs for name, pairs in encoded.items() if name != "train" and isinstance(pairs, Dataset)}
    return {name: int(np.sum(np.asarray(pairs["target_length"][:]) > limit)) for name, pairs in splits.items()}


# Training and scores


def unfinished_alerts(unfinished: int, outputs: int, long_references: int, limit: int) -> Iterator[str]:
    """Yield an alert of final outputs that met the length limit."""
    if unfinished <= _UNFINISHED * outputs:
        return
    head = f"{unfinished:,} of {outputs:,} outputs met the length limit ({limit}) before their end"
    if 2 * long_references >= unfinished:
        yield f"{head}, and {long_references:,} references are longer. Raise `generation_max_length`."
    else:
        yield f"{head}: they repeat themselves; a higher limit does not help. {_RUNAWAY}"


class TrainingAlerts(TrainerCallback):
    """Callback that warns of training that fails: each alert once, in the main process.

    Args:
        metrics: Names of the scores that an evaluation logs.
        sample: The validation sample, which keeps shares of its last outputs; None if nothing is decoded.
    """

    def __init__(self, metrics: Sequence[str], sample: ValidationSample | None):
        self.metrics, self.sample = list(metrics), sample
        self.unfinished: list[float] = []
        self.topics: set[str] = set()

    def _warn(self, state: Any, topic: str, alert: str) -> None:
        if topic not in self.topics and state.is_world_process_zero:
            self.topics.add(topic)
            logger.warning("%s", alert)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._look_for_zeros(args, state)
        if self.sample is not None:
            self.unfinished.append(self.sample.unfinished)
            is_late = state.global_step >= 0.5 * state.max_steps
            if is_late and len(self.unfinished) > 1 and min(self.unfinished[-2:]) >= _UNFINISHED_IN_TRAINING:
                share = 100 * self.unfinished[-1]
                text = f"{share:.0f} % of the validation outputs run to the length limit and do not end. {_RUNAWAY}"
                self._warn(state, "unfinished", text)

    def _look_for_zeros(self, args: Any, state: Any) -> None:
        entries = [entry for entry in state.log_history if any(f"eval_{name}" in entry for name in self.metrics)][-3:]
        if len(entries) < 3 or entries[0]["step"] < 0.2 * state.max_steps:
            return
        scores = {name: [entry.get(f"eval_{name}", math.nan) for entry in entries] for name in self.metrics}
        dead = [name for name, values in scores.items() if not any(_is_alive(name, value) for value in values)]
        best = (args.metric_for_best_model or "").removeprefix("eval_")
        # Few outputs are right as a whole at first.
        if dead != ["exact_match"] and (len(dead) == len(scores) or (best in dead and best != "exact_match")):
            advice = "Check that each target belongs to its source, and that `learning_rate` suits the network."
            if "bleu" in dead:
                advice += " BLEU of fewer than four words is always 0: then set `metrics: [exact_match, cer]`."
            shown = ", ".join(f"{name} {scores[name][-1]:.1f}" for name in dead)
            self._warn(state, "zero", f"Scores stay at zero: {shown} after {state.global_step:,} updates. {advice}")


def _is_alive(name: str, score: float) -> bool:
    return score > _ALIVE[name] if name in _ALIVE else score < _DEAD_ERROR_RATE
