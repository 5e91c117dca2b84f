"""Stages of training: shares of several data sets until one was read so often, then the next stage."""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from torch.utils.data import Dataset, Sampler

from metaphrase.data.augmentation import AugmentedPairs
from metaphrase.data.token_budget import as_padded, form_batches, seeded_generator, shuffle_steps, split_to_count
from metaphrase.storage.hints import did_you_mean

logger = logging.getLogger(__name__)

# Batches of a sorted chunk of pairs.
_BATCHES_PER_CHUNK = 200


@dataclass(frozen=True)
class Stage:
    """A stage: `shares` of the data sets, by name, until the data set `until` was read `times` times."""

    name: str
    shares: dict[str, float]
    until: str
    times: float

    def num_pairs(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the number of pairs that the stage reads of each data set."""
        total = self.times * sizes[self.until] / self.shares[self.until]
        return {name: round(total * self.shares.get(name, 0)) for name in sizes}


def parse_stages(stages: Mapping[str, Any], names: Sequence[str]) -> list[Stage]:
    """Check the field `stages` of a recipe and return its stages.

    Args:
        stages: For each stage, `shares` with a number for each data set, and `until` with a data set and a number.
        names: Names of the data sets.

    Raises:
        ValueError: If a stage has another form, or a data set is in no stage.
    """
    parsed = []
    for stage, fields in stages.items():
        where = f"`stages.{stage}`"
        shares, until = (fields.get(name) for name in ("shares", "until")) if isinstance(fields, dict) else (None, None)
        if not isinstance(shares, dict) or not isinstance(until, dict) or len(until) != 1 or len(fields) != 2:
            raise ValueError(
                f"{where} must hold `shares` of data sets and `until` with one, such as {{clean: 5}}, got {fields!r}."
            )
        for name, number in [*shares.items(), *until.items()]:
            if name not in names:
                raise ValueError(f"{where} must name `datasets`, got {name!r}.{did_you_mean(name, names)}")
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ValueError(f"{where} must hold numbers above 0, got {number!r} for {name!r}.")
        [(last, times)] = until.items()
        if last not in shares:
            raise ValueError(f"`stages.{stage}.until` must name a data set of its `shares`, got {last!r}.")
        parsed.append(Stage(stage, shares, last, times))
    if unused := [name for name in names if not any(name in stage.shares for stage in parsed)]:
        raise ValueError(f"`datasets` must each have a share in `stages`, got none for {', '.join(unused)}.")
    return parsed


class StagedSampler(Sampler[list[int]]):
    """Batches of all stages within a token budget, in random order, for one of several processes.

    A stage has a round for each reading of its data set `until`. A round is shuffled and cut into batches by itself. A data set
    is read in a new random order each time, and its reading continues in the next stage. The order depends on the seed alone.

    An index is the row of a pair, plus the number of all pairs for each earlier reading. If a round has too few pairs for all
    processes, some occur twice.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        sizes: Mapping[str, int],
        stages: Sequence[Stage],
        max_tokens_per_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        length_multiple: int = 1,
    ):
        """Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`, of all data sets in order.
        sizes: Number of pairs of each data set.
        stages: The stages in order.
        max_tokens_per_batch: Bound of the padded tokens of both sides of a batch.
        seed: Seed of the order.
        num_processes: Number of processes that share the batches.
        process_index: Index of this process.
        length_multiple: Multiple to which the collator rounds up widths.

        Raises:
            ValueError: If the budget cannot hold the longest pair.
        """
        self.lengths = as_padded(np.asarray(lengths, dtype=np.int64), max_tokens_per_batch, length_multiple)
        self.sizes, self.seed, self.max_tokens_per_batch = dict(sizes), seed, max_tokens_per_batch
        self.num_processes, self.process_index = num_processes, process_index
        mean = self.lengths.sum(axis=1).mean()
        self._pairs_per_chunk = max(1, int(_BATCHES_PER_CHUNK * max_tokens_per_batch / mean))
        self._rounds: list[dict[str, tuple[int, int]]] = []
        num_steps, position = [], dict.fromkeys(sizes, 0)
        for stage in stages:
            first, counts = len(self._rounds), stage.num_pairs(sizes)
            ends = [min(number, stage.times) / stage.times for number in range(1, math.ceil(stage.times) + 1)]
            for start, end in itertools.pairwise([0.0, *ends]):
                self._rounds.append(
                    {
                        name: (position[name] + round(start * count), position[name] + round(end * count))
                        for name, count in counts.items()
                    }
                )
            position = {name: position[name] + count for name, count in counts.items()}
            num_steps += [len(self._form(number)) // num_processes for number in range(first, len(self._rounds))]
            readings = [f"{name} {counts[name] / size:.2f} times" for name, size in sizes.items() if counts[name]]
            logger.info(
                "Stage %s: %d pairs in %d steps of a batch, up to step %d. It reads %s.",
                *(stage.name, sum(counts.values()), sum(num_steps[first:]), sum(num_steps), ", ".join(readings)),
            )
        self._length = sum(num_steps)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        yield from itertools.islice(self.batches(), self.process_index, None, self.num_processes)

    def batches(self) -> Iterator[list[int]]:
        """Yield the batches of all processes."""
        for number in range(len(self._rounds)):
            yield from self._form(number)

    def _form(self, number: int) -> list[list[int]]:
        """Return the batches of a round."""
        indices = np.concatenate([self._indices(name, *span) for name, span in self._rounds[number].items()])
        if not len(indices):
            return []
        generator = seeded_generator((self.seed * 1_000_003 + number) * 1_000_003 + 1)
        lengths = self.lengths[indices % len(self.lengths)]
        batches = form_batches(lengths, self.max_tokens_per_batch, generator, self._pairs_per_chunk)
        count = math.ceil(len(batches) / self.num_processes) * self.num_processes
        is_enough = count <= len(indices)
        batches = split_to_count(batches, count) if is_enough else [[row % len(indices)] for row in range(count)]
        return [indices[batch].tolist() for batch in shuffle_steps(batches, self.num_processes, generator)]

    def _indices(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return the pairs from `begin` to `end` in the endless reading of a data set."""
        size, number = self.sizes[name], list(self.sizes).index(name)
        start, parts = sum(list(self.sizes.values())[:number]), [np.zeros(0, dtype=np.int64)]
        for reading in range(begin // size, -(-end // size)):
            order = np.random.default_rng((self.seed, number, reading)).permutation(size)
            offset = reading * size
            rows = order[max(0, begin - offset) : end - offset]
            parts.append(reading * len(self.lengths) + start + rows)
        return np.concatenate(parts)


class StagedPairs(Dataset):
    """Training pairs of several data sets one after the other, with the order in which stages read them.

    Attributes:
        pairs: The plain pairs.
        column_names: Names of `dataset[name]`, and the fields of a pair.
    """

    def __init__(self, pairs: datasets.Dataset | AugmentedPairs, sizes: Mapping[str, int], stages: Sequence[Stage]):
        """Args:
        pairs: The pairs of all data sets in order.
        sizes: Number of pairs of each data set.
        stages: The stages in order.
        """
        self._pairs, self._sizes, self._stages = pairs, dict(sizes), list(stages)
        self.pairs = getattr(pairs, "pairs", pairs)
        self.column_names = pairs.column_names

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: int | str) -> Any:
        return self._pairs[key] if isinstance(key, str) else self.__getitems__([key])[0]

    def __getitems__(self, indices: list[int]) -> list[Mapping[str, Any]]:
        """Return the pairs of a batch, by the indices of a `StagedSampler`. Loaders of torch call this method."""
        if not isinstance(self._pairs, AugmentedPairs):
            indices = [index % len(self) for index in indices]
        return self._pairs.__getitems__(indices)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on, if the pairs take one."""
        if hasattr(self._pairs, "set_epoch"):
            self._pairs.set_epoch(epoch)

    def sampler(self, lengths: np.ndarray, *options: Any, **more: Any) -> StagedSampler:
        """Return the batches of all stages. The arguments are those of `StagedSampler` without sizes and stages."""
        return StagedSampler(lengths, self._sizes, self._stages, *options, **more)
