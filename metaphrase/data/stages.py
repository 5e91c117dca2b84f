"""Stages of training: shares of several data sets until one was read so often, then the next stage."""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import datasets
import numpy as np
from pydantic import BaseModel, Field, ValidationError, create_model
from torch.utils.data import Dataset

from metaphrase.data.token_budget import TokenBudgetSampler, form_round
from metaphrase.storage.hints import did_you_mean, explain_error

logger = logging.getLogger(__name__)

_Numbers = dict[str, Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]]


class Stage(BaseModel, extra="forbid"):
    """A stage: `shares` of the data sets, by name, until the one data set of `until` was read so often."""

    shares: _Numbers
    until: _Numbers = Field(min_length=1, max_length=1)

    def num_pairs(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the number of pairs that the stage reads of each data set."""
        [(name, times)] = self.until.items()
        total = times * sizes[name] / self.shares[name]
        return {name: round(total * self.shares.get(name, 0)) for name in sizes}


_Stages = create_model("_Stages", stages=dict[str, Stage])


def parse_stages(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Stage]:
    """Check the field `stages` of a recipe and return its stages.

    Raises:
        ValueError: If a stage has another form, or the data sets are not those of `names`.
    """
    try:
        stages = _Stages(stages=fields).stages
    except ValidationError as error:
        raise ValueError(explain_error(error)) from None
    for stage, parsed in stages.items():
        for field, given, known in (("shares", parsed.shares, names), ("until", parsed.until, [*parsed.shares])):
            for name in (name for name in given if name not in known):
                what = "`datasets`" if field == "shares" else "a data set of its `shares`"
                raise ValueError(f"`stages.{stage}.{field}` must name {what}, got {name!r}.{did_you_mean(name, known)}")
    if unused := [name for name in names if not any(name in stage.shares for stage in stages.values())]:
        raise ValueError(f"`datasets` must each have a share in `stages`, got none for {', '.join(unused)}.")
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
            earlier_steps, counts = num_steps, stage.num_pairs(self._sizes)
            [times] = stage.until.values()
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
        """Return the pairs of a batch, by the indices of a `StagedSampler`."""
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
