"""Corpora of several parts, each with files and fields of its own: tasks with their shares, and data sets of stages."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import datasets
import numpy as np

from metaphrase.data.pairs import SPLITS, TASK_COLUMN
from metaphrase.data.stages import StagedPairs, parse_stages
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.corpora import PairCorpus
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)


class _PartedCorpus(PairCorpus):
    """Pairs of several parts.

    Attributes:
        parts: A corpus for each name.
    """

    parts: dict[str, PairCorpus]

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        sides = [corpus.sides() for corpus in self.parts.values()]
        return chain.from_iterable(side[0] for side in sides), chain.from_iterable(side[1] for side in sides)

    def _prefixes(self) -> list[str]:
        return [prefix for corpus in self.parts.values() for prefix in corpus._prefixes()]

    @property
    def max_source_length(self) -> int:
        return max(corpus.max_source_length for corpus in self.parts.values())

    @property
    def max_target_length(self) -> int:
        return max(corpus.max_target_length for corpus in self.parts.values())


class TaskCorpus(_PartedCorpus):
    """Pairs of several tasks, each with a prefix. Training mixes them; validation and test hold all pairs, with a task column.

    Source: Raffel et al. 2020, section 2.4, arXiv 1910.10683.
    """

    def _check(self) -> None:
        recipe = self.recipe
        self.weights = {name: float(fields.get("weight", 1.0)) for name, fields in recipe.tasks.items()}
        self.parts = {}
        for name in recipe.tasks:
            with _named(name):
                self.parts[name] = PairCorpus(part_recipe(recipe, recipe.tasks[name]), self.arguments, self.longest)
            self.parts[name].label = f"{name}, "

    def load(self) -> None:
        for name, corpus in self.parts.items():
            with _named(name):
                corpus.load()
        for split in SPLITS:
            parts = {name: corpus.splits[split] for name, corpus in self.parts.items() if split in corpus.splits}
            if parts:
                self.splits[split] = _joined(parts)
        scored = self.scored_split()
        for name, corpus in self.parts.items():
            if scored is not None and scored not in corpus.splits:
                logger.warning("Task %r has no %s pairs: it is not scored.", name, scored)

    def _encode_plain(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        self._check_prefixes(tokenizers)
        encoded = {}
        for name, corpus in self.parts.items():
            with _named(name):
                encoded[name] = corpus._encode_plain(tokenizers)
            self.reports |= {f"{name}/{split}": report for split, report in corpus.reports.items()}
        parts = {"train": self._mixed({name: splits["train"] for name, splits in encoded.items()})}
        validation = {name: splits["validation"] for name, splits in encoded.items() if "validation" in splits}
        return parts | ({"validation": _joined(validation)} if validation else {})

    def data_name(self, split: str) -> str:
        names = [corpus.data_name(split) for corpus in self.parts.values() if split in corpus.splits]
        return ", ".join(dict.fromkeys(names))

    def sizes(self) -> dict[str, int]:
        return dict(sum((Counter(corpus.sizes()) for corpus in self.parts.values()), Counter()))

    def _check_prefixes(self, tokenizers: TokenizerPair) -> None:
        """Refuse prefixes with equal tokens, such as two that are unknown to the vocabulary."""
        prefixes = {name: corpus.recipe.source_prefix or "" for name, corpus in self.parts.items()}
        names: dict[tuple[int, ...], str] = {}
        for (name, prefix), ids in zip(prefixes.items(), tokenizers.encode_sources([*prefixes.values()]), strict=True):
            other = names.setdefault(tuple(ids), name)
            if prefixes[other] != prefix:
                raise ValueError(
                    f"`source_prefix` must tell tasks apart, got {prefixes[other]!r} for {other!r} and {prefix!r} for {name!r}, "
                    "which have the same tokens. Give them tokens with `additional_special_tokens`."
                )

    def _mixed(self, parts: dict[str, datasets.Dataset]) -> datasets.Dataset:
        recipe, sizes = self.recipe, [len(part) for part in parts.values()]
        options = (recipe.task_mixing, recipe.mixing_temperature, recipe.mixing_limit)
        rates = mixing_rates(sizes, list(self.weights.values()), *options)
        rows = mixed_rows(sizes, rates, self.seed)
        for name, size, rate, chosen in zip(parts, sizes, rates, rows, strict=True):
            times = len(chosen) / size
            logger.info("%s: %.1f %% of training, %d pairs read %.2f times.", name, 100 * rate, size, times)
        starts = np.cumsum([0, *sizes[:-1]])
        pairs = datasets.concatenate_datasets(list(parts.values()))
        return pairs.select(np.concatenate([start + chosen for start, chosen in zip(starts, rows, strict=True)]))


class StagedCorpus(_PartedCorpus):
    """Pairs of several data sets, which stages of training read by shares. Validation and test are those of the recipe."""

    def _check(self) -> None:
        recipe, shared = self.recipe, ("source_prefix", "source_column", "target_column")
        self.stages = parse_stages(recipe.stages, list(recipe.datasets))
        self.parts = {}
        for name, part in recipe.datasets.items():
            with _named(name, "Data set"):
                self.parts[name] = PairCorpus(part_recipe(recipe, part, *shared), self.arguments, self.longest)
            self.parts[name].label = f"{name}, "

    def load(self) -> None:
        super().load()
        for name, corpus in self.parts.items():
            with _named(name, "Data set"):
                corpus.load()
        self.splits["train"] = datasets.concatenate_datasets([part.splits["train"] for part in self.parts.values()])

    def encode(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        encoded = super().encode(tokenizers)
        sizes = {name: corpus.sizes()["num_train"] for name, corpus in self.parts.items()}
        return encoded | {"train": StagedPairs(encoded["train"], sizes, self.stages)}

    def _encode_plain(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        encoded = []
        for name, corpus in self.parts.items():
            with _named(name, "Data set"):
                encoded.append(corpus._encode("train", tokenizers))
            self.reports[f"{name}/train"] = corpus.reports["train"]
        scored = {split: self._encode(split, tokenizers) for split in SPLITS[1:] if split in self.splits}
        return {"train": datasets.concatenate_datasets(encoded)} | scored

    def sizes(self) -> dict[str, int]:
        sizes = {f"num_{split}": self.reports[split].kept for split in self.splits if split != "train"}
        return {"num_train": sum(corpus.sizes()["num_train"] for corpus in self.parts.values()), **sizes}


def part_recipe(recipe: Recipe, part: Mapping[str, Any], *names: str) -> Recipe:
    """Return the recipe of one part: its fields over those of all parts, of which `names` are some more.

    Raises:
        ValueError: If a field of it is unknown, of a wrong type or out of range, or contradicts another.
    """
    shared = ("data_dir", "max_source_length", "max_target_length", "too_long", "empty", "malformed", "invalid_utf8")
    shared += ("max_line_characters", "subword_sampling", "augmentation")
    fields = {field: getattr(recipe, field) for field in (*shared, *names) if recipe.is_set(field)}
    part_fields = {field: value for field, value in part.items() if field != "weight"}
    return Recipe.from_mapping(fields | part_fields, "this part of the recipe")


@contextlib.contextmanager
def _named(name: str, kind: str = "Task") -> Iterator[None]:
    """Put the name of the part before an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error


def _joined(parts: dict[str, datasets.Dataset]) -> datasets.Dataset:
    return datasets.concatenate_datasets(
        [part.add_column(TASK_COLUMN, [name] * len(part)) for name, part in parts.items()]
    )


def mixing_rates(
    sizes: Sequence[int],
    weights: Sequence[float],
    mixing: str = "proportional",
    temperature: float = 2.0,
    limit: int | None = None,
) -> np.ndarray:
    """Return the share of each task among the examples of a run.

    Args:
        sizes: Training examples of each task.
        weights: Factors on top of the sizes.
        mixing: `proportional` to the sizes, `temperature` (to their root of that degree), or `equal`.
        temperature: 1 is proportional. Higher values are more equal.
        limit: Most examples that a task counts (the paper's K).

    Returns:
        Shares `(tasks,)`, whose sum is 1.

    Source: Raffel et al. 2020, section 3.5.2, arXiv 1910.10683: examples-proportional mixing with a limit, temperature-scaled
    mixing, and equal mixing.
    """
    counted = np.minimum(sizes, np.inf if limit is None else limit).astype(np.float64)
    exponent = {"proportional": 1.0, "temperature": 1 / temperature, "equal": 0.0}[mixing]
    rates = counted**exponent * np.asarray(weights, dtype=np.float64)
    return rates / rates.sum()


def mixed_rows(sizes: Sequence[int], rates: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return the rows of each task in an epoch: every row at least once, rows of favoured tasks more often.

    The epoch is as short as possible. Random rows fill up what is not a whole number of repetitions.

    Args:
        sizes: Rows of each task.
        rates: Shares of the tasks (see `mixing_rates`).
        seed: Seed of the random rows.

    Returns:
        Rows of each task in ascending order, repetitions side by side.
    """
    length = max(size / rate for size, rate in zip(sizes, rates, strict=True))
    generator = np.random.default_rng(seed)
    rows = []
    for size, rate in zip(sizes, rates, strict=True):
        repetitions, rest = divmod(round(length * rate), size)
        extra = generator.permutation(size)[:rest]
        rows.append(np.sort(np.concatenate((np.tile(np.arange(size), repetitions), extra))))
    return rows
