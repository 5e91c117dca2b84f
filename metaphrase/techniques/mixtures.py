"""Mixtures: training pairs of several tasks."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np

from metaphrase.data.pairs import SPLITS, TASK_COLUMN
from metaphrase.errors import MetaphraseError
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.corpora import TRAINING_LIMITS, PairCorpus
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Fields that tasks take from the recipe, unless they have their own.
_SHARED_FIELDS = ("data_dir", *TRAINING_LIMITS, "too_long", "empty", "malformed", "invalid_utf8")
_SHARED_FIELDS += ("max_line_characters", "subword_sampling", "augmentation")


class TaskCorpus(PairCorpus):
    """Pairs of several tasks, each with a prefix. Training mixes them; validation and test hold all pairs, with a task column.

    Source: Raffel et al. 2020, section 2.4, arXiv 1910.10683.
    """

    def _check(self) -> None:
        recipe = self.recipe
        # A task has a prefix and columns of its own.
        shared = {name: getattr(recipe, name) for name in _SHARED_FIELDS if recipe.is_set(name)}

        def make(fields: Mapping[str, Any]) -> PairCorpus:
            fields = {name: value for name, value in fields.items() if name != "weight"}
            part = Recipe.from_mapping(shared | fields, "this part of the recipe")
            return PairCorpus(part, self.arguments, self.longest)

        self.parts: dict[str, PairCorpus] = self._map(make, recipe.tasks)
        for name, part in self.parts.items():
            part.label = f"{name}, "

    def _map(self, function: Callable[[Any], Any], parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the result of a function for each part, with the name of the part before an error."""
        results = {}
        for name, part in (parts or self.parts).items():
            try:
                results[name] = function(part)
            except ValueError as error:
                raise MetaphraseError(f"Task {name!r}: {error}") from error
        return results

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        sides = [corpus.sides() for corpus in self.parts.values()]
        return tuple(itertools.chain.from_iterable(texts) for texts in zip(*sides, strict=True))

    def encode(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        encoded = super().encode(tokenizers)
        for name, part in self.parts.items():
            self.reports |= {f"{name}/{split}": report for split, report in part.reports.items()}
        return encoded

    @property
    def prefixes(self) -> list[str]:
        return [prefix for corpus in self.parts.values() for prefix in corpus.prefixes]

    @property
    def limits(self) -> tuple[int, int]:
        sources, targets = zip(*(corpus.limits for corpus in self.parts.values()), strict=True)
        return max(sources), max(targets)

    def sizes(self) -> dict[str, int]:
        scored = {f"num_{split}": self.reports[split].kept for split in self.splits if split in self.reports}
        return dict(sum((Counter(part.sizes()) for part in self.parts.values()), Counter()) + Counter(scored))

    def load(self) -> None:
        self._map(PairCorpus.load)
        for split in SPLITS:
            if parts := {name: part.splits[split] for name, part in self.parts.items() if split in part.splits}:
                self.splits[split] = _joined(parts)
        scored = self.scored_split()
        for name, corpus in self.parts.items():
            if scored is not None and scored not in corpus.splits:
                logger.warning("Task %r has no %s pairs: it is not scored.", name, scored)

    def _encode_splits(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        encoded, recipe = self._map(lambda part: part._encode_splits(tokenizers)), self.recipe
        train = [splits["train"] for splits in encoded.values()]
        sizes, weights = list(map(len, train)), [float(fields.get("weight", 1.0)) for fields in recipe.tasks.values()]
        rates = mixing_rates(sizes, weights, recipe.task_mixing, recipe.mixing_temperature, recipe.mixing_limit)
        # The shortest epoch that has every row at least once, and rows of favoured tasks more often.
        length = max(size / rate for size, rate in zip(sizes, rates, strict=True))
        generator, start, rows = np.random.default_rng(self.seed), 0, []
        for name, size, rate in zip(encoded, sizes, rates, strict=True):
            repetitions, rest = divmod(round(length * rate), size)
            # Random rows fill up what is not a whole number of repetitions.
            chosen = np.concatenate((np.tile(np.arange(size), repetitions), generator.permutation(size)[:rest]))
            rows.append(start + np.sort(chosen))
            start += size
            times = len(chosen) / size
            logger.info("%s: %.1f %% of training, %d pairs read %.2f times.", name, 100 * rate, size, times)
        mixed = {"train": datasets.concatenate_datasets(train).select(np.concatenate(rows))}
        validation = {name: splits["validation"] for name, splits in encoded.items() if "validation" in splits}
        return mixed | ({"validation": _joined(validation)} if validation else {})

    def data_name(self, split: str) -> str:
        names = [corpus.data_name(split) for corpus in self.parts.values() if split in corpus.splits]
        return ", ".join(dict.fromkeys(names))


def _joined(parts: dict[str, datasets.Dataset]) -> datasets.Dataset:
    named = [part.add_column(TASK_COLUMN, [name] * len(part)) for name, part in parts.items()]
    return datasets.concatenate_datasets(named)


def mixing_rates(
    sizes: Sequence[int],
    weights: Sequence[float],
    mixing: str = "proportional",
    temperature: float = 2.0,
    limit: int | None = None,
) -> np.ndarray:
    """Return the share of each task among the examples of a run.

    Source: Raffel et al. 2020, section 3.5.2, arXiv 1910.10683. `limit` is the paper's K.

    Args:
        sizes: Training examples of each task.
        weights: Factors on top of the sizes.
        mixing: `proportional` to the sizes, `temperature` (to their root of that degree), or `equal`.
    """
    counted = np.minimum(sizes, np.inf if limit is None else limit).astype(np.float64)
    exponent = {"proportional": 1.0, "temperature": 1 / temperature, "equal": 0.0}[mixing]
    rates = counted**exponent * np.asarray(weights, dtype=np.float64)
    return rates / rates.sum()
