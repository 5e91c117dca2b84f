"""Mixtures: training pairs of several tasks, or of several data sets by stages."""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import datasets
import numpy as np
from pydantic import BaseModel, Field, ValidationError, create_model
from torch.utils.data import Dataset

from metaphrase.data.pairs import SPLITS, TASK_COLUMN
from metaphrase.data.token_budget import TokenBudgetSampler, form_round
from metaphrase.errors import MetaphraseError
from metaphrase.storage.hints import did_you_mean, explain_error
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.corpora import TRAINING_LIMITS, PairCorpus
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Fields that tasks and data sets take from the recipe, unless they have their own.
_SHARED_FIELDS = ("data_dir", *TRAINING_LIMITS, "too_long", "empty", "malformed", "invalid_utf8")
_SHARED_FIELDS += ("max_line_characters", "subword_sampling", "augmentation")


class _PartedCorpus(PairCorpus):
    """Pairs of several `parts`: a corpus for each name."""

    kind = "Task"

    def _check(self) -> None:
        recipe = self.recipe
        # A task has a prefix and columns of its own.
        names = _SHARED_FIELDS if recipe.tasks else (*_SHARED_FIELDS, "source_prefix", "source_column", "target_column")
        shared = {name: getattr(recipe, name) for name in names if recipe.is_set(name)}

        def make(fields: Mapping[str, Any]) -> PairCorpus:
            fields = {name: value for name, value in fields.items() if name != "weight"}
            part = Recipe.from_mapping(shared | fields, "this part of the recipe")
            return PairCorpus(part, self.arguments, self.longest)

        self.parts: dict[str, PairCorpus] = self._map(make, recipe.tasks or recipe.datasets)
        for name, part in self.parts.items():
            part.label = f"{name}, "

    def _map(self, function: Callable[[Any], Any], parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the result of a function for each part, with the name of the part before an error."""
        results = {}
        for name, part in (parts or self.parts).items():
            try:
                results[name] = function(part)
            except ValueError as error:
                raise MetaphraseError(f"{self.kind} {name!r}: {error}") from error
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


class TaskCorpus(_PartedCorpus):
    """Pairs of several tasks, each with a prefix. Training mixes them; validation and test hold all pairs, with a task column.

    Source: Raffel et al. 2020, section 2.4, arXiv 1910.10683.
    """

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


class StagedCorpus(_PartedCorpus):
    """Pairs of several data sets, which stages of training read by shares. Validation and test are those of the recipe."""

    kind = "Data set"

    def load(self) -> None:
        super().load()
        self._map(PairCorpus.load)
        self.splits["train"] = datasets.concatenate_datasets([part.splits["train"] for part in self.parts.values()])

    def encode(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        encoded = super().encode(tokenizers)
        sizes = {name: corpus.sizes()["num_train"] for name, corpus in self.parts.items()}
        stages = parse_stages(self.recipe.stages, list(self.recipe.datasets))
        return encoded | {"train": StagedPairs(encoded["train"], sizes, stages)}

    def _encode_splits(self, tokenizers: TokenizerPair) -> dict[str, Any]:
        train = self._map(lambda part: part._encode("train", tokenizers))
        scored = {split: self._encode(split, tokenizers) for split in SPLITS[1:] if split in self.splits}
        return {"train": datasets.concatenate_datasets(list(train.values()))} | scored


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


# Stages: shares of several data sets until one was read so often, then the next stage

_Numbers = dict[str, Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]]


class Stage(BaseModel, extra="forbid"):
    """A stage: `shares` of the data sets, by name, until the one data set of `until` was read so often."""

    shares: _Numbers
    until: _Numbers = Field(min_length=1, max_length=1)


_Stages = create_model("_Stages", stages=dict[str, Stage])


def parse_stages(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Stage]:
    """Check the field `stages` of a recipe and return its stages.

    Raises:
        MetaphraseError: If a stage has another form, or the data sets are not those of `names`.
    """
    try:
        stages = _Stages(stages=fields).stages
    except ValidationError as error:
        raise MetaphraseError(explain_error(error)) from None
    for stage, parsed in stages.items():
        for field, shares, known in (("shares", parsed.shares, names), ("until", parsed.until, [*parsed.shares])):
            for name in (name for name in shares if name not in known):
                what = "`datasets`" if field == "shares" else "a data set of its `shares`"
                raise MetaphraseError(
                    f"`stages.{stage}.{field}` must name {what}, got {name!r}.{did_you_mean(name, known)}"
                )
    if unused := [name for name in names if not any(name in stage.shares for stage in stages.values())]:
        raise MetaphraseError(f"`datasets` must each have a share in `stages`, got none for {', '.join(unused)}.")
    return stages


class StagedSampler(TokenBudgetSampler):
    """Batches of all stages within a token budget, in random order, for one of several processes.

    A stage has a round for each reading of its data set `until`. A round is shuffled and cut into batches by itself. A data set
    is read in a new random order each time, and its reading continues in the next stage. The order depends on the seed alone.

    An index is the row of a pair, plus the number of all pairs for each earlier reading. If a round has too few pairs for all
    processes, one occurs several times.
    """

    def __init__(self, sizes: Mapping[str, int], stages: Mapping[str, Stage], *options: Any, **more: Any):
        """Take the number of pairs of each data set, the stages in order, and the arguments of `TokenBudgetSampler`."""
        self._sizes, self._stages = dict(sizes), stages
        # For each round, the first and the last pair in the endless reading of each data set.
        self._rounds: list[dict[str, tuple[int, int]]] = []
        super().__init__(*options, **more)

    def _count_batches(self) -> int:
        num_steps, position = 0, dict.fromkeys(self._sizes, 0)
        for name, stage in self._stages.items():
            earlier_steps, [(last, times)] = num_steps, stage.until.items()
            total = times * self._sizes[last] / stage.shares[last]
            counts = {part: round(total * stage.shares.get(part, 0)) for part in self._sizes}
            ends = [min(number, times) / times for number in range(1, math.ceil(times) + 1)]
            for start, end in itertools.pairwise([0.0, *ends]):
                self._rounds.append(
                    {
                        part: (position[part] + round(start * count), position[part] + round(end * count))
                        for part, count in counts.items()
                    }
                )
                num_steps += len(self._form_round(len(self._rounds) - 1)) // self.num_processes
            position = {part: position[part] + count for part, count in counts.items()}
            readings = [f"{part} {counts[part] / size:.2f} times" for part, size in self._sizes.items() if counts[part]]
            logger.info(
                "Stage %s: %d pairs in %d steps of a batch, up to step %d. It reads %s.",
                *(name, sum(counts.values()), num_steps - earlier_steps, num_steps, ", ".join(readings)),
            )
        return num_steps

    def epoch_batches(self, epoch: int) -> Iterator[list[int]]:
        """Yield the batches of all stages and processes, which are one epoch."""
        return itertools.chain.from_iterable(map(self._form_round, range(len(self._rounds))))

    def _form_round(self, number: int) -> list[list[int]]:
        indices = np.concatenate([self._indices(name, *span) for name, span in self._rounds[number].items()])
        if not len(indices):
            return []
        lengths = self.lengths[indices % len(self.lengths)]
        seed = (self.seed * 1_000_003 + number) * 1_000_003 + 1
        batches = form_round(lengths, self.max_tokens_per_batch, seed, self.num_processes, self.pairs_per_chunk)
        return [indices[np.array(batch) % len(indices)].tolist() for batch in batches]

    def _indices(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return the pairs from `begin` to `end` in the endless reading of a data set."""
        size, number = self._sizes[name], list(self._sizes).index(name)
        start, parts = sum(list(self._sizes.values())[:number]), [np.zeros(0, dtype=np.int64)]
        for reading in range(begin // size, -(-end // size)):
            order = np.random.default_rng((self.seed, number, reading)).permutation(size)
            offset = reading * size
            rows = order[max(0, begin - offset) : end - offset]
            parts.append(reading * len(self.lengths) + start + rows)
        return np.concatenate(parts)


class StagedPairs(Dataset):
    """Training pairs of several data sets one after the other, with the order in which stages read them."""

    def __init__(self, pairs: datasets.Dataset | Dataset, sizes: Mapping[str, int], stages: Mapping[str, Stage]):
        """Take the pairs of all data sets in order, the number of pairs of each, and the stages in order."""
        self._pairs, self._sizes, self._stages = pairs, sizes, stages
        self.pairs = getattr(pairs, "pairs", pairs)
        self.column_names = pairs.column_names

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: int | str) -> Any:
        return self._pairs[key] if isinstance(key, str) else self.__getitems__([key])[0]

    def __getitems__(self, indices: list[int]) -> list[Mapping[str, Any]]:
        # Pairs that are augmented differ in each reading.
        if isinstance(self._pairs, datasets.Dataset):
            indices = [index % len(self) for index in indices]
        return self._pairs.__getitems__(indices)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._pairs, "set_epoch"):
            self._pairs.set_epoch(epoch)

    def sampler(self, *options: Any, **more: Any) -> StagedSampler:
        """Return the batches of all stages. The arguments are those of `TokenBudgetSampler`."""
        return StagedSampler(self._sizes, self._stages, *options, **more)
