"""Corpora: what a recipe trains, validates and tests on, from files to data sets of token ids."""

import logging
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import numpy as np
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.denoising.dataset import DenoisingDataset, longest_block, make_objective, objective_tokens
from metaphrase.data.denoising.span_corruption import MIN_BLOCK_LENGTH
from metaphrase.data.encoding import encode_pairs
from metaphrase.data.pair_stream import PairStream, TextStream
from metaphrase.data.pairs import SPLITS, column_texts, data_seed, load_pairs, split_pairs
from metaphrase.data.reports import DataReport
from metaphrase.data.text_blocks import load_texts, text_blocks
from metaphrase.data.token_stream import TokenBudgetStream
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.recipe.length_limits import fit_budget, fit_limits
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)


class PairCorpus:
    """Pairs of source and target, read as a whole.

    Attributes:
        splits: For each split its pairs of text.
        reports: For each split the account of its pairs, once they are read.
        special_tokens: What a tokenizer must hold beside the recipe's own.
        label: Stands before the names of splits in what is logged.
        longest: The most tokens of a side that the model can read; `None` if there is no end.
    """

    special_tokens: tuple[str, ...] = ()
    label = ""

    def __init__(self, recipe: Recipe, arguments: Seq2SeqTrainingArguments, longest: int | None = None):
        """Checks that there is something to train on; `load` reads it.

        Args:
            recipe: What to read; its limits that are beyond `longest` by default become that.
            arguments: Of the training.
            longest: The most tokens of a side that the model can read; `None` if there is no end.

        Raises:
            ValueError: If the recipe names no training pairs, or gives limits beyond `longest`.
        """
        self.recipe, self.arguments, self.longest = recipe, arguments, longest
        self.splits: dict[str, Any] = {}
        self.reports: dict[str, Any] = {}
        self._check()
        fit_limits(recipe, longest)

    def _check(self) -> None:
        if self.recipe.pairs_options("train") is None:
            raise ValueError(
                "A recipe must name its training pairs: `train_file`, or `train_source_file` and `train_target_file`, "
                "or `dataset_name`, got none of them."
            )

    @property
    def seed(self) -> int:
        """That of everything drawn from the data."""
        return data_seed(self.arguments)

    def load(self) -> None:
        """Reads all splits."""
        recipe = self.recipe
        for split in SPLITS:
            options = recipe.pairs_options(split)
            if options is not None:
                self.splits[split] = self._read(split, options)
        if recipe.num_validation or recipe.num_test:
            train, seed = self.splits["train"], self.arguments.seed
            self.splits.update(split_pairs(train, recipe.num_validation, recipe.num_test, seed))

    def _read(self, split: str, options: dict[str, Any]) -> Any:
        self.reports[split] = DataReport()
        return load_pairs(**options, report=self.reports[split])

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        """Sources (without prefix) and targets of the training pairs, to train tokenizers on."""
        train, prefix = self.splits["train"], len(self.recipe.source_prefix or "")
        return (text[prefix:] for text in column_texts(train, "source")), column_texts(train, "target")

    def encode(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        """Token ids of all splits. Only training leaves pairs out, the empty and the long ones: a score is of all pairs.

        Raises:
            ValueError: If a pair is refused, or one to be scored is too long for the model and `too_long` is not truncate.
        """
        return {name: self._encode(name, tokenizers) for name in SPLITS if name in self.splits}

    def _encode(self, split: str, tokenizers: TokenizerPair) -> Any:
        recipe, is_train = self.recipe, split == "train"
        limits = (recipe.max_source_length, recipe.max_target_length) if is_train else (self.longest, self.longest)
        encoded, self.reports[split] = encode_pairs(
            self.splits[split],
            tokenizers,
            max_source_length=limits[0],
            max_target_length=limits[1],
            too_long=recipe.too_long if is_train else "truncate",
            empty=recipe.empty if is_train or recipe.empty == "error" else "keep",
            keep_text=not is_train,
            report=self.reports.get(split),
        )
        logger.info("%s%s: %s", self.label, split, self.reports[split])
        if not is_train:
            self._check_scored(split)
        elif (column := self.arguments.length_column_name) not in encoded.column_names:
            lengths = sum(np.asarray(encoded[f"{side}_length"][:]) for side in ("source", "target"))
            encoded = encoded.add_column(column, lengths)
        return encoded

    def _check_scored(self, split: str) -> None:
        """Looks, before any training, at the lengths of pairs to be scored, which the limits of training do not bound."""
        recipe, report = self.recipe, self.reports[split]
        if recipe.too_long != "truncate" and (report.source_truncated or report.target_truncated):
            raise ValueError(
                f"The {split} pairs must be within the {self.longest} tokens of `max_position_embeddings`, since none is left "
                f"out of a score, got {report.source_truncated} sources and {report.target_truncated} targets that are longer. "
                "`too_long: truncate` lets the model read the beginning of them; references are scored as they are."
            )
        longest = (report.source_lengths.longest, report.target_lengths.longest)
        if longest[0] > recipe.max_source_length or longest[1] > recipe.max_target_length:
            logger.warning(
                "%s%s: pairs of up to %d source and %d target tokens are scored too, beyond `max_source_length` %d and "
                "`max_target_length` %d, which are limits of training.",
                self.label,
                split,
                *longest,
                recipe.max_source_length,
                recipe.max_target_length,
            )

    def sources(self, split: str) -> list[str]:
        """The sources of a split, with their prefix."""
        return self.splits[split]["source"][:]

    @property
    def max_target_length(self) -> int:
        """The most tokens of a target to train on."""
        return self.recipe.max_target_length

    def data_name(self, split: str) -> str:
        """What a split comes from: the name of a data set, or of a file without its folder."""
        recipe = self.recipe
        if recipe.dataset_name is not None:
            name = PurePath(recipe.dataset_name)
            return name.name if name.is_absolute() else recipe.dataset_name
        places = [f"{name}{kind}" for name in (split, "train") for kind in ("_file", "_source_file")]
        return next(PurePath(value).name for place in places if (value := getattr(recipe, place)) is not None)

    def scored_split(self) -> str | None:
        """The split that the finished model is scored on."""
        return next((name for name in ("test", "validation") if name in self.splits), None)

    def sizes(self) -> dict[str, int]:
        """For each split how many of its pairs are used, once they are encoded; a stream does not know."""
        return {
            f"num_{name}": self.reports[name].kept for name, split in self.splits.items() if hasattr(split, "__len__")
        }


class StreamedPairCorpus(PairCorpus):
    """Pairs whose training split is read as it is needed."""

    def _check(self) -> None:
        super()._check()
        fit_budget(self.recipe, self.longest)

    def _read(self, split: str, options: dict[str, Any]) -> Any:
        return TextStream(**options) if split == "train" else super()._read(split, options)

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        return self.splits["train"].side(0), self.splits["train"].side(1)

    def _encode(self, split: str, tokenizers: TokenizerPair) -> Any:
        if split != "train":
            return super()._encode(split, tokenizers)
        recipe, arguments = self.recipe, self.arguments
        pairs = PairStream(
            self.splits["train"],
            tokenizers,
            max_source_length=recipe.max_source_length,
            max_target_length=recipe.max_target_length,
            too_long=recipe.too_long,
            empty=recipe.empty,
        )
        # Its counts grow while it is read.
        self.reports["train"] = pairs
        shares = (arguments.world_size, arguments.process_index)
        return TokenBudgetStream(pairs, recipe.max_tokens_per_batch, self.seed, *shares, recipe.pairs_in_buffer)


class TextCorpus(PairCorpus):
    """Plain text, whose pairs a denoising objective makes: the damaged text and what was hidden in it."""

    def _check(self) -> None:
        if self.recipe.train_text_file is None:
            raise ValueError(f"`objective` {self.recipe.objective} must come with `train_text_file`, got none.")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return objective_tokens(self.recipe.objective, self.recipe.num_sentinels)

    def load(self) -> None:
        for split in ("train", "validation"):
            if getattr(self.recipe, f"{split}_text_file") is not None:
                path = self.recipe.data_path(f"{split}_text_file")
                max_samples = getattr(self.recipe, f"max_{split}_samples")
                self.splits[split] = load_texts(path, max_samples, invalid_utf8=self.recipe.invalid_utf8)

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        texts = self.splits["train"]
        if self.recipe.invalid_utf8 == "skip":
            texts = texts.filter(lambda text: text is not None, input_columns=["text"], desc="Finding what is UTF-8")
        return column_texts(texts, "text"), ()

    def _encode(self, split: str, tokenizers: TokenizerPair) -> DenoisingDataset:
        recipe = self.recipe
        objective = make_objective(
            recipe.objective, tokenizers.source, recipe.noise_density, recipe.mean_span_length, recipe.spans_anywhere
        )
        length = longest_block(objective, recipe.max_source_length, recipe.max_target_length)
        blocks, self.reports[split] = text_blocks(
            self.splits[split],
            tokenizers,
            length,
            end_documents=recipe.end_documents,
            remainder=recipe.remainder,
            least_length=1 if recipe.objective == "text_infilling" else MIN_BLOCK_LENGTH,
        )
        logger.info("%s: %s", split, self.reports[split])
        return DenoisingDataset(blocks, objective, self.seed)

    def scored_split(self) -> None:
        return None

    def sizes(self) -> dict[str, int]:
        return {f"num_{name}_documents": len(split) for name, split in self.splits.items()}
