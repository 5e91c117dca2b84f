"""Alerts: warnings of pairs, settings and scores with which a run fails, while they can still be mended."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from transformers import TrainerCallback

from metaphrase.data.pairs import SPLITS, column_texts
from metaphrase.data.profile import SideProfile
from metaphrase.evaluation.evaluate import ValidationSample, spread
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.corpora import PairCorpus, TaskCorpus
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Evenly spread pairs whose texts are compared, and whose tokens are counted. More change the shares little.
_COMPARED_PAIRS, _COUNTED_PAIRS, _DENOISED_PAIRS = 5000, 200_000, 2000
_MIN_PAIRS = 20
# Half of the pairs of a text normalizer may be equal on both sides, and all targets of a classifier are a few words.
_EQUAL_SIDES, _ONE_TARGET, _ONE_TARGET_OF_MANY, _FEW_TARGETS = 0.95, 0.8, 0.5, 20
# Public corpora of code share up to 9 % of their sources.
_SHARED_SOURCES = 0.1
# In nats for a character. Java and C# differ by 0.026.
_SWAPPED = 0.015
_RARE, _KINDS_WITHOUT_SIZE = 5, ("char", "byte")
_LONG_REFERENCES, _UNFINISHED, _UNFINISHED_IN_TRAINING = 0.01, 0.02, 0.1
# Scores above which outputs have something in common with the references; error rates below which they have.
_ALIVE = {"bleu": 0.5, "rouge": 0.5, "chrf": 15.0, "chrf++": 15.0, "exact_match": 0.0}
_DEAD_ERROR_RATE = 95.0
# In characters. An exact match of short targets is above 0 early.
_SHORT_TARGETS, _WORDS_OF_BLEU = 30, 4
_MIN_BLEU, _FLATTERING = 40.0, 0.4
_NO_LEARNING, _MIN_UPDATES = 0.98, 100
_RUNAWAY = (
    "A network that is trained too little repeats itself: train longer, or on more pairs, and check `learning_rate`. "
    "`num_beams: 4` or `no_repeat_ngram_size` may help."
)


def warn(alerts: Iterable[str]) -> None:
    """Log alerts as warnings."""
    for alert in alerts:
        logger.warning("%s", alert)


# Pairs and vocabulary


def data_alerts(corpus: PairCorpus, tokenizers: TokenizerPair, train: Any) -> Iterator[str]:
    """Yield alerts of pairs, before training.

    Args:
        corpus: A corpus that is loaded. Pairs that are streamed are not read.
        tokenizers: Tokenizers of the model.
        train: The encoded training pairs.
    """
    if corpus.recipe.objective != "pairs":
        return
    for part in corpus.parts.values() if isinstance(corpus, TaskCorpus) else (corpus,):
        yield from _language_alerts(part)
        if hasattr(part.splits["train"], "__len__"):
            yield from _side_alerts(part)
            yield from _shared_source_alerts(part)
    train = getattr(train, "pairs", train)
    if corpus.recipe.model_name_or_path is None and isinstance(train, Dataset):
        yield from _vocabulary_alerts(corpus.recipe, tokenizers, train)


def _language_alerts(corpus: PairCorpus) -> Iterator[str]:
    """Compare the languages of a recipe with the endings of files, or the names of columns: `train.de`, `en`."""
    recipe = corpus.recipe
    files = recipe.train_source_file, recipe.train_target_file
    columns = recipe.source_column, recipe.target_column
    names = [Path(file.removesuffix(".gz")).suffix[1:] for file in files] if all(files) else [*map(str, columns)]
    languages = recipe.source_language, recipe.target_language
    if languages[0] != languages[1] and tuple(reversed(names)) == languages:
        yield (
            f"{corpus.label}train: sources are read from `{names[0]}` and targets from `{names[1]}`, but `source_language` is "
            f"{languages[0]} and `target_language` is {languages[1]}. Exchange the sides, or the languages."
        )


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


def _vocabulary_alerts(recipe: Recipe, tokenizers: TokenizerPair, train: Dataset) -> Iterator[str]:
    counts = [count_ids(train, name) for name in ("input_ids", "labels")]
    kinds = recipe.tokenizer_kind, recipe.target_tokenizer_kind or recipe.tokenizer_kind
    if tokenizers.is_joint:
        counts = [np.sum([np.pad(side, (0, max(map(len, counts)) - len(side))) for side in counts], axis=0)]
    sizes = len(tokenizers.source), len(tokenizers.target)
    for ids, kind, size, field in zip(counts, kinds, sizes, ("vocab_size", "target_vocab_size"), strict=False):
        rare = np.mean(ids[ids > 0] < _RARE)
        # Suitable is a number that grows with the root of the characters, about 3 for a token.
        suitable = 500 * max(1, round(3 * math.sqrt(3 * ids.sum()) / 500))
        if rare > 0.5 and size >= 2 * suitable and kind not in _KINDS_WITHOUT_SIZE:
            yield (
                f"The vocabulary of {size:,} entries is too large for the training pairs: {100 * rare:.0f} % of those in use "
                f"occur fewer than {_RARE} times. Set `{field}` to about {suitable}, with a `tokenizer_kind` such as byte_bpe."
            )


def count_ids(pairs: Any, column: str) -> np.ndarray:
    """Return the count of each id in a column of evenly spread pairs, (V,) or shorter."""
    if isinstance(pairs, Dataset):
        rows = pairs.select_columns(column).select(spread(len(pairs), _COUNTED_PAIRS))
        ids = pc.list_flatten(rows.with_format("arrow")[:][column]).to_numpy()
    else:
        # Denoised text is made pair by pair.
        ids = np.concatenate([pairs[row][column] for row in spread(len(pairs), _DENOISED_PAIRS)])
    return np.bincount(ids)


# Settings


def run_alerts(recipe: Recipe, arguments: Any, corpus: PairCorpus, encoded: Mapping, model: Any) -> Iterator[str]:
    """Yield alerts of a complete recipe with its training arguments, encoded corpus and model, before training."""
    yield from rate_alerts(recipe, arguments, model.config.hidden_size)
    is_evaluated = arguments.eval_strategy != "no" or arguments.eval_on_start
    if "validation" in corpus.splits and not is_evaluated and corpus.scored_split() != "validation":
        yield (
            "The validation pairs are never scored: `eval_strategy` is no, and they do not score the finished model either. "
            "Set `eval_strategy: steps` and `eval_steps`."
        )
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


def target_profile(corpus: PairCorpus) -> SideProfile | None:
    """Return the profile of evenly spread targets; None without pairs in memory."""
    is_readable = corpus.recipe.objective == "pairs" and hasattr(corpus.splits["train"], "__len__")
    return SideProfile.of(_texts(corpus, "train")[1]) if is_readable else None


def frequency_loss(counts: np.ndarray, vocab_size: int, smoothing: float) -> float:
    """Return the least label-smoothed loss of a network that knows the frequencies of the labels and nothing else."""
    shares = np.zeros(max(vocab_size, len(counts)))
    shares[: len(counts)] = (1 - smoothing) * counts / counts.sum()
    shares += smoothing / len(shares)
    return float(-np.sum(shares * np.log(shares, where=shares > 0, out=np.zeros_like(shares))))


def score_alerts(bleu: float | None, exact: float, targets: SideProfile | None) -> Iterator[str]:
    """Yield an alert of BLEU that flatters: the targets are symbols, and nearly right is wrong.

    Args:
        bleu: BLEU, in percent; None if it is not computed.
        exact: Outputs that equal their reference, in percent.
        targets: Profile of the targets.
    """
    is_symbols = targets is not None and targets.is_closed
    if is_symbols and bleu is not None and bleu >= _MIN_BLEU and exact < _FLATTERING * bleu:
        yield (
            f"BLEU flatters: it is {bleu:.0f}, but only {exact:.0f} % of the outputs are exactly right. The targets have "
            f"{targets.num_words:,} different words: symbols rather than text. Judge by `metrics: [exact_match, wer]` and "
            "`metric_for_best_model: exact_match`, and train longer."
        )


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
        targets: Profile of the targets; None if it is unknown.
        loss: `frequency_loss` of the labels; None if it is unknown, or the logged loss is of another kind.
    """

    def __init__(
        self, metrics: Sequence[str], sample: ValidationSample | None, targets: SideProfile | None, loss: float | None
    ):
        self.metrics, self.sample, self.targets, self.frequency_loss = list(metrics), sample, targets, loss
        self.unfinished: list[float] = []
        self.topics: set[str] = set()

    @classmethod
    def of_run(
        cls,
        corpus: PairCorpus,
        arguments: Any,
        metrics: Sequence[str],
        tokenizers: TokenizerPair,
        train: Any,
        sample: ValidationSample | None,
    ) -> "TrainingAlerts":
        """Return the callback for a loaded corpus, its training arguments and its encoded training pairs."""
        loss = None
        # R-Drop adds to the loss, and a stream has no frequencies before it is read.
        if not corpus.recipe.r_drop_alpha and hasattr(train, "__len__"):
            counts = count_ids(train, "labels")
            loss = frequency_loss(counts, len(tokenizers.target), arguments.label_smoothing_factor)
        return cls(metrics, sample, target_profile(corpus), loss)

    def _warn(self, state: Any, topic: str, alerts: Iterable[str]) -> None:
        alerts = list(alerts)
        if alerts and topic not in self.topics and state.is_world_process_zero:
            warn(alerts)
            self.topics.add(topic)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}) and self.frequency_loss is not None:
            self._warn(state, "loss", self._loss_alerts(args, state))

    def _loss_alerts(self, args: Any, state: Any) -> Iterator[str]:
        # Evaluations stand between the losses.
        losses = [entry["loss"] for entry in state.log_history[-50:] if "loss" in entry]
        begin = max(_MIN_UPDATES, args.get_warmup_steps(state.max_steps), 0.1 * state.max_steps)
        loss = sum(losses[-3:]) / 3
        # A loss that is not a number is not below either.
        if len(losses) >= 5 and state.global_step >= begin and not loss < _NO_LEARNING * self.frequency_loss:
            yield (
                f"The loss does not fall: it is {loss:.2f} after {state.global_step:,} updates, and a model that only "
                f"knows how often each token occurs has {self.frequency_loss:.2f}. Set `learning_rate` 3 to 10 times lower if "
                "the loss was lower before, else higher."
            )

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._warn(state, "zero", self._zero_alerts(args, state))
        if self.sample is None or self.sample.exact is None:
            return
        self.unfinished.append(self.sample.unfinished)
        if state.global_step >= 0.5 * state.max_steps:
            bleu = (metrics or {}).get("eval_bleu")
            self._warn(state, "flatter", score_alerts(bleu, 100 * self.sample.exact, self.targets))
            if len(self.unfinished) > 1 and min(self.unfinished[-2:]) >= _UNFINISHED_IN_TRAINING:
                share = f"{100 * self.unfinished[-1]:.0f} % of the validation outputs run to the length limit and do not end."
                self._warn(state, "unfinished", [f"{share} {_RUNAWAY}"])

    def _zero_alerts(self, args: Any, state: Any) -> Iterator[str]:
        entries = [entry for entry in state.log_history if any(f"eval_{name}" in entry for name in self.metrics)][-3:]
        if len(entries) < 3 or entries[0]["step"] < 0.2 * state.max_steps:
            return
        scores = {name: [entry.get(f"eval_{name}", math.nan) for entry in entries] for name in self.metrics}
        dead = [name for name, values in scores.items() if not any(_is_alive(name, value) for value in values)]
        targets, best = self.targets, (args.metric_for_best_model or "").removeprefix("eval_")
        is_short = targets is not None and targets.mean_characters <= _SHORT_TARGETS
        # Other scores rise first.
        is_late = state.global_step >= max(_MIN_UPDATES, 0.5 * state.max_steps)
        is_all = ("exact_match" in dead and is_short and is_late) or (
            len(dead) == len(scores) and dead != ["exact_match"]
        )
        if is_all or (best in dead and best != "exact_match"):
            shown = ", ".join(f"{name} {scores[name][-1]:.1f}" for name in dead)
            advice = "Check that each target belongs to its source, and that `learning_rate` suits the network."
            if "bleu" in dead and targets is not None and targets.mean_words < _WORDS_OF_BLEU:
                advice = "BLEU of fewer than four words is always 0: set `metrics: [exact_match, cer]`."
            elif not is_all:
                advice = "The others do not: set one of them as `metric_for_best_model`."
            yield f"Scores stay at zero: {shown} after {state.global_step:,} updates. {advice}"


def _is_alive(name: str, score: float) -> bool:
    return score > _ALIVE[name] if name in _ALIVE else score < _DEAD_ERROR_RATE
