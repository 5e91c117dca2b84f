"""Corpora: training, validation and test data of a recipe, from files to data sets of token ids."""

import copy
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import datasets
import numpy as np
from transformers import Seq2SeqTrainingArguments

from metaphrase.data import pairs
from metaphrase.data.encoding import encode_pairs
from metaphrase.data.token_budget import PairStream, TokenBudgetStream
from metaphrase.errors import MetaphraseError
from metaphrase.plugins import needed_plugin
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Pairs of a stream from which fields are chosen and a tokenizer is trained.
SAMPLED_PAIRS = 100_000
# Length of a short pair in a file.
_LEAST_BYTES = 10
TRAINING_LIMITS = ("max_source_length", "max_target_length")


class PairCorpus:
    """Pairs of source and target.

    Attributes:
        recipe: The recipe, with length limits that the model can read.
        splits: Pairs of text by split. Of a stream, the training pairs are a sample.
        stream: The source of training pairs that are read during training, or None.
        num_pairs: Number of pairs of the stream, estimated from the sample.
        reports: Reports on the pairs by split, once they are read.
        special_tokens: Tokens that a new tokenizer needs beside those of the recipe.
        label: Prefix of split names in log lines.
        longest: Maximum tokens per side that the model can read; None if there is no end.
        seed: Seed of all random choices in the data.
    """

    special_tokens: tuple[str, ...] = ()
    label = ""
    stream: pairs.PairSource | None = None
    num_pairs = 0

    def __init__(
        self, recipe: Recipe, arguments: Seq2SeqTrainingArguments, longest: tuple[int | None, int | None] = (None, None)
    ):
        """Check that there is training data; `load` reads it. Default length limits above `longest` are lowered.

        Raises:
            MetaphraseError: If the recipe names no training pairs, or gives limits above `longest`.
        """
        self.arguments, self.longest = arguments, longest
        # A decoded sequence has a start token, which labels lack, and its last token is never read.
        limits = (*longest, longest[1] and longest[1] + 1)
        lowered = {}
        for name, limit in zip((*TRAINING_LIMITS, "generation_max_length"), limits, strict=True):
            if limit is not None and (value := getattr(recipe, name) or 0) > limit:
                if recipe.is_set(name):
                    raise MetaphraseError(f"`{name}` must be at most {limit}, the limit of the model, got {value}.")
                logger.info("`%s` is lowered from %d to %d, the most that the model can read.", name, value, limit)
                lowered[name] = limit
        self.recipe = recipe.choose("the model reads no more", **lowered)
        self.seed = pairs.data_seed(arguments)
        self.splits: dict[str, Any] = {}
        self.reports: dict[str, Any] = {}
        # Parts of the training pairs that augmentation learns.
        self.learned: dict[str, Any] = {}
        self._check()

    def _check(self) -> None:
        recipe = self.recipe
        if recipe.pairs_options("train") is None:
            raise MetaphraseError("A recipe must name its training pairs, such as a `train_file`, got none.")

    def read(self, most: float = math.inf) -> None:
        """Read all splits that the recipe names. More than `most` training pairs in files become a stream."""
        for split in pairs.SPLITS:
            if (options := self.recipe.pairs_options(split)) is None:
                continue
            source = pairs.PairSource(**options)
            if split == "train" and (self.recipe.streaming or source.num_bytes > _LEAST_BYTES * most):
                logger.info("Reading a sample of %s.", source.name)
                self.splits[split], self.num_pairs = source.sample(SAMPLED_PAIRS, self.seed)
                if self.recipe.streaming or self.num_pairs > most:
                    self.stream = source
                    continue
            self.reports[split] = pairs.DataReport()
            self.splits[split] = pairs.load_pairs(**options, report=self.reports[split])

    def with_recipe(self, recipe: Recipe) -> "PairCorpus":
        """Return a corpus with the texts that were read and other choices."""
        other = copy.copy(self)
        other.recipe, other.splits, other.reports = recipe, dict(self.splits), dict(self.reports)
        return other

    def load(self) -> None:
        """Read all splits, unless they are read, and take validation and test pairs out of training."""
        if not self.splits:
            self.read()
        sizes = self.recipe.num_validation, self.recipe.num_test
        if any(size and split not in self.splits for size, split in zip(sizes, ("validation", "test"), strict=True)):
            self.splits.update(pairs.split_pairs(self.splits["train"], *sizes, self.seed, self.recipe.keep_rare_words))

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the sources, without prefix, and the targets of training."""
        train, prefix = self.splits["train"], len(self.recipe.source_prefix or "")
        return (text[prefix:] for text in pairs.column_texts(train, "source")), pairs.column_texts(train, "target")

    def encode(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        """Return the token ids of all splits. Empty and long pairs are left out in training only, never in scoring.

        The training pairs of a stream are a `TokenBudgetStream`.

        Raises:
            MetaphraseError: If a pair is refused, or a scored pair is too long for the model and `too_long` is not truncate.
        """
        encoded = self._encode_splits(tokenizers)
        # A stream augments its pairs itself.
        if isinstance(encoded["train"], datasets.Dataset) and (augmenter := self._augmenter(tokenizers)) is not None:
            encoded["train"] = augmenter.augment(encoded["train"])
        return encoded

    def _encode_splits(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        return {name: self._encode(name, tokenizers) for name in pairs.SPLITS if name in self.splits}

    def _augmenter(self, tokenizers: TokenizerPair) -> Any:
        """Return the `Augmenter` of the training pairs, or None if they stay as they are."""
        if not self.recipe.is_augmented:
            return None
        option = "augmentation" if self.recipe.augmentation else "subword_sampling"
        return needed_plugin("augmentation", option)(self, tokenizers)

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of the sources."""
        return [self.recipe.source_prefix] if self.recipe.source_prefix else []

    def _encode(self, split: str, tokenizers: TokenizerPair) -> Any:
        recipe, arguments, is_train = self.recipe, self.arguments, split == "train"
        limits = self.limits if is_train else self.longest
        if is_train and recipe.streaming:
            return self.stream_batches(tokenizers)
        rules = {
            "max_source_length": limits[0],
            "max_target_length": limits[1],
            "too_long": recipe.too_long if is_train else "truncate",
            "empty": recipe.empty if is_train or recipe.empty == "error" else "keep",
        }
        texts = self.splits[split]
        if not is_train and pairs.REJECTED_COLUMN in texts.column_names:
            texts = texts.remove_columns(pairs.REJECTED_COLUMN)
        encoded, report = encode_pairs(
            texts, tokenizers, keep_text=not is_train or recipe.is_augmented, report=self.reports.get(split), **rules
        )
        self.reports[split] = report
        logger.info("%s%s: %s", self.label, split, report)
        if not is_train and recipe.too_long != "truncate" and (report.source_truncated or report.target_truncated):
            most = " and ".join(map(str, dict.fromkeys(self.longest)))
            raise MetaphraseError(
                f"The {split} pairs must be within the {most} tokens of `max_position_embeddings`, since all are scored, "
                f"got {report.source_truncated} sources and {report.target_truncated} targets that are longer. Set "
                "`too_long: truncate` to let the model read the beginning of them; references are not truncated."
            )
        if is_train and (column := arguments.length_column_name) not in encoded.column_names:
            lengths = sum(np.asarray(encoded[name][:]) for name in pairs.LENGTH_COLUMNS)
            encoded = encoded.add_column(column, lengths)
        return encoded

    def stream_batches(self, tokenizers: TokenizerPair) -> TokenBudgetStream:
        """Return batches of the pairs that are read during training, without those that were held out of the sample."""
        recipe, arguments = self.recipe, self.arguments
        if sum(self.limits) > (recipe.max_tokens_per_batch or 0) or recipe.max_steps < 1:
            raise MetaphraseError(
                "`streaming` must come with `max_steps`, since it has no end, and with a `max_tokens_per_batch` of at least "
                "`max_source_length` and `max_target_length` together, since pairs of these lengths may come, got "
                f"{recipe.max_steps}, {recipe.max_tokens_per_batch}, {self.limits[0]} and {self.limits[1]}."
            )
        sizes = {"validation": recipe.num_validation, "test": recipe.num_test}
        held_out = {text.strip() for split in sizes if sizes[split] for text in self.splits[split]["source"][:]}
        rules = dict(zip(TRAINING_LIMITS, self.limits, strict=True), too_long=recipe.too_long, empty=recipe.empty)
        stream = replace(self.stream, malformed=recipe.malformed, invalid_utf8=recipe.invalid_utf8)
        # The counts of a stream grow while it is read.
        read = PairStream(stream, tokenizers, self._augmenter(tokenizers), held_out, self.seed, **rules)
        self.reports["train"] = read
        shares = (arguments.world_size, arguments.process_index)
        return TokenBudgetStream(read, recipe.max_tokens_per_batch, self.seed, *shares, recipe.pairs_in_buffer)

    @property
    def scale(self) -> float:
        """Number of training pairs for each of `splits`, which of a stream holds a sample."""
        return self.num_pairs / len(self.splits["train"]) if self.stream is not None else 1.0

    @property
    def limits(self) -> tuple[int, int]:
        """Maximum tokens of a training source and of its target."""
        return self.recipe.max_source_length, self.recipe.max_target_length

    def share_counts(self, accelerator: Any) -> None:
        """Make the report on a stream that of all processes, which must all call this."""
        if isinstance(report := self.reports.get("train"), PairStream):
            report.share_counts(accelerator.reduce, accelerator.device)

    def data_name(self, split: str) -> str:
        """Return the data set or file that a split comes from, without its folder."""
        recipe = self.recipe
        if recipe.dataset_name is not None:
            name = PurePath(recipe.dataset_name)
            return name.name if name.is_absolute() else recipe.dataset_name
        fields = [f"{name}{kind}" for name in (split, "train") for kind in ("_file", "_source_file")]
        return next(PurePath(value).name for field in fields if (value := getattr(recipe, field)) is not None)

    def scored_split(self) -> str | None:
        """Return the split that the finished model is scored on; None if there is none."""
        return next((name for name in ("test", "validation") if name in self.splits), None)

    def sizes(self) -> dict[str, int]:
        """Return the number of pairs used in each split. Call it after `encode`; a stream has no size."""
        reports = {name: self.reports[name] for name in self.splits}
        return {f"num_{name}": report.kept for name, report in reports.items() if isinstance(report, pairs.DataReport)}


def open_corpus(
    recipe: Recipe, arguments: Seq2SeqTrainingArguments, longest: tuple[int | None, int | None]
) -> PairCorpus:
    """Return the corpus of a recipe (see `PairCorpus`)."""
    if recipe.tasks:
        kind = needed_plugin("tasks", "tasks")
    elif recipe.objective != "pairs":
        kind = needed_plugin("objective", "objective")
    else:
        kind = PairCorpus
    return kind(recipe, arguments, longest)
