"""Batches by a budget of tokens from a stream: a bounded buffer of pairs takes the place of the whole data set."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from metaphrase.data.token_budget import as_padded, fill_to_count, form_batches, seeded_generator, uncounted

logger = logging.getLogger(__name__)

Pair = Mapping[str, Sequence[int]]
DEFAULT_PAIRS_IN_BUFFER = 20_000


class TokenBudgetStream(IterableDataset):
    """Lists of pairs, each a batch, for one of several processes; it never ends, but begins the pairs anew.

    Pairs are read into a buffer, which is shuffled, sorted by both lengths and cut into batches; these come in random order. Each
    pair stands in one batch of one process in each pass, and each buffer gives all processes the same number of batches: where
    the pairs do not suffice for that, some get a repeated pair whose labels are ignored. What comes depends on the seed and the
    pairs alone, so that a run is resumed by skipping the batches it had.

    Attributes:
        length_multiple: What the collator rounds the widths of a batch up to a multiple of.
    """

    length_multiple: int = 1

    def __init__(
        self,
        read: Callable[[int], Iterable[Pair]],
        max_tokens_per_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        pairs_in_buffer: int = DEFAULT_PAIRS_IN_BUFFER,
    ):
        """Args:
        read: Gives the pairs of a pass, with `input_ids` and `labels`; it is told the number of the pass, from 0.
        max_tokens_per_batch: Bound of the padded tokens of both sides of a batch.
        seed: Of the order.
        num_processes: How many share the batches; each reads all pairs.
        process_index: Which of them this is.
        pairs_in_buffer: More pad less and mix more, and take more memory.

        Raises:
            ValueError: If the buffer cannot give each process a pair.
        """
        if pairs_in_buffer < num_processes:
            raise ValueError(
                f"`pairs_in_buffer` must be at least the number of processes, got {pairs_in_buffer} and {num_processes}."
            )
        self.read = read
        self.max_tokens_per_batch = max_tokens_per_batch
        self.seed = seed
        self.num_processes, self.process_index = num_processes, process_index
        self.pairs_in_buffer = pairs_in_buffer

    def __iter__(self) -> Iterator[list[Pair]]:
        """Yields the batches of this process; of several workers of a loader, each yields its share.

        Raises:
            ValueError: If the budget cannot hold a pair that comes, or a pass holds fewer pairs than there are processes.
        """
        worker = get_worker_info()
        count, place = (1, 0) if worker is None else (worker.num_workers, worker.id)
        # The loader asks its workers in turn, so that together they give the order of one.
        yield from islice(self._batches(), place, None, count)

    def _batches(self) -> Iterator[list[Pair]]:
        number = 0
        while True:
            num_read = 0
            for buffer in self._buffers(number):
                yield from self._cut(buffer, number, num_read)
                num_read += len(buffer)
            if num_read == 0:
                raise ValueError(f"A stream must hold at least one pair, got none in pass {number}.")
            logger.info("Pass %d over the stream: %d pairs.", number + 1, num_read)
            number += 1

    def _buffers(self, number: int) -> Iterator[list[Pair]]:
        pairs, ahead = iter(self.read(number)), []
        while buffer := ahead + list(islice(pairs, self.pairs_in_buffer - len(ahead))):
            ahead = list(islice(pairs, self.num_processes))
            if len(ahead) < self.num_processes:
                # Too few for a buffer of their own, in which each process would find a pair.
                buffer, ahead = buffer + ahead, []
            yield buffer

    def _cut(self, buffer: list[Pair], number: int, num_read: int) -> Iterator[list[Pair]]:
        lengths = np.array([[len(pair["input_ids"]), len(pair["labels"])] for pair in buffer])
        lengths = as_padded(lengths, self.max_tokens_per_batch, self.length_multiple, num_read)
        generator = seeded_generator((self.seed * 1_000_003 + number) * 1_000_003 + num_read)
        batches = form_batches(lengths, self.max_tokens_per_batch, generator)
        steps = -(-len(batches) // self.num_processes)
        count = steps * self.num_processes
        batches = fill_to_count(batches, count, self.num_processes, len(buffer))
        if count > len(buffer):
            logger.info("%d batches hold a repeated pair alone, which does not count.", count - len(buffer))
        # What `len(buffer)` stands for.
        pairs = [*buffer, uncounted(buffer[int(lengths.sum(axis=1).argmin())])]
        for step in torch.randperm(steps, generator=generator).tolist():
            yield [pairs[index] for index in batches[step * self.num_processes + self.process_index]]


def pairs_of(dataset: Any) -> Callable[[int], Iterable[Pair]]:
    """How a stream reads a data set of `datasets` again and again, shuffled anew if it shuffles."""

    def read(number: int) -> Iterable[Pair]:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(number)
        return dataset

    return read
