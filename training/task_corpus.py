"""Corpora of several tasks in one run, each with a prefix, as in T5 (Raffel et al. 2020, section 2.4, arXiv 1910.10683)."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import datasets
import numpy as np

from metaphrase.data.pairs import SPLITS, TASK_COLUMN
from metaphrase.data.task_mixture import mixed_rows, mixing_rates
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.corpora import PairCorpus
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)


class TaskCorpus(PairCorpus):
    """Pairs of several tasks. Training mixes them; validation and test hold all pairs of all tasks, with a task column."""

    def _check(self) -> None:
        recipe = self.recipe
        self.weights = {name: float(fields.get("weight", 1.0)) for name, fields in recipe.tasks.items()}
        self.tasks: dict[str, PairCorpus] = {}
        for name in recipe.tasks:
            with _named(name):
                self.tasks[name] = PairCorpus(task_recipe(recipe, name), self.arguments, self.longest)
            self.tasks[name].label = f"{name}, "

    def load(self) -> None:
        for name, corpus in self.tasks.items():
            with _named(name):
                corpus.load()
        for split in SPLITS:
            parts = {name: corpus.splits[split] for name, corpus in self.tasks.items() if split in corpus.splits}
            if parts:
                self.splits[split] = _joined(parts)
        scored = self.scored_split()
        for name, corpus in self.tasks.items():
            if scored is not None and scored not in corpus.splits:
                logger.warning("Task %r has no %s pairs: it is not scored.", name, scored)

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        sides = [corpus.sides() for corpus in self.tasks.values()]
        return chain.from_iterable(side[0] for side in sides), chain.from_iterable(side[1] for side in sides)

    def encode(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        self._check_prefixes(tokenizers)
        encoded = {}
        for name, corpus in self.tasks.items():
            with _named(name):
                encoded[name] = corpus.encode(tokenizers)
            self.reports |= {f"{name}/{split}": report for split, report in corpus.reports.items()}
        parts = {"train": self._mixed({name: splits["train"] for name, splits in encoded.items()})}
        validation = {name: splits["validation"] for name, splits in encoded.items() if "validation" in splits}
        return parts | ({"validation": _joined(validation)} if validation else {})

    @property
    def max_target_length(self) -> int:
        return max(corpus.max_target_length for corpus in self.tasks.values())

    def data_name(self, split: str) -> str:
        names = [corpus.data_name(split) for corpus in self.tasks.values() if split in corpus.splits]
        return ", ".join(dict.fromkeys(names))

    def sizes(self) -> dict[str, int]:
        return dict(sum((Counter(corpus.sizes()) for corpus in self.tasks.values()), Counter()))

    def _check_prefixes(self, tokenizers: TokenizerPair) -> None:
        """Refuse prefixes with equal tokens, such as two that are unknown to the vocabulary.

        Raises:
            ValueError: Naming two tasks.
        """
        prefixes = {name: corpus.recipe.source_prefix or "" for name, corpus in self.tasks.items()}
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
        rates = mixing_rates(
            sizes, list(self.weights.values()), recipe.task_mixing, recipe.mixing_temperature, recipe.mixing_limit
        )
        rows = mixed_rows(sizes, rates, self.seed)
        for name, size, rate, chosen in zip(parts, sizes, rates, rows, strict=True):
            logger.info(
                "%s: %.1f %% of training, %d pairs read %.2f times.", name, 100 * rate, size, len(chosen) / size
            )
        starts = np.cumsum([0, *sizes[:-1]])
        pairs = datasets.concatenate_datasets(list(parts.values()))
        return pairs.select(np.concatenate([start + chosen for start, chosen in zip(starts, rows, strict=True)]))


def task_recipe(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe of one task: its fields over those of all tasks.

    Raises:
        ValueError: If a field of it is unknown, of a wrong type or out of range, or contradicts another.
    """
    shared = ("data_dir", "max_source_length", "max_target_length", "too_long", "empty", "malformed", "invalid_utf8")
    fields = {field: getattr(recipe, field) for field in shared if recipe.is_set(field)}
    task_fields = {field: value for field, value in recipe.tasks[name].items() if field != "weight"}
    return Recipe.from_mapping(fields | task_fields, f"the task {name!r}")


@contextlib.contextmanager
def _named(task: str) -> Iterator[None]:
    """Put the name of the task before an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Task {task!r}: {error}") from error


def _joined(parts: dict[str, datasets.Dataset]) -> datasets.Dataset:
    return datasets.concatenate_datasets(
        [part.add_column(TASK_COLUMN, [name] * len(part)) for name, part in parts.items()]
    )
