"""Batches within a token budget from a stream of pairs, through a bounded buffer."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from metaphrase.data.token_budget import as_padded, fill_to_count, form_batches, seeded_generator, uncounted

logger = logging.getLogger(__name__)

Pair = Mapping[str, Sequence[int]]


class TokenBudgetStream(IterableDataset):
    """Endless batches, as lists of pairs, for one of several processes.

    Pairs are read into a buffer, which is shuffled, sorted by both lengths and cut into batches. The batches come in random
    order. Each pair occurs in one batch of one process in each pass, and each buffer gives all processes the same number of
    batches. If the pairs do not suffice, some processes get a repeated pair with ignored labels. The batches depend on the
    seed and the pairs alone, so that a resumed run skips the batches it had.

    Attributes:
        length_multiple: Multiple to which the collator rounds up widths.
    """

    length_multiple: int = 1

    def __init__(
        self,
        read: Callable[[int], Iterable[Pair]],
        max_tokens_per_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        pairs_in_buffer: int = 20_000,
    ):
        """Args:
        read: Returns the pairs of a pass, with `input_ids` and `labels`, by the number of the pass from 0.
        max_tokens_per_batch: Bound of the padded tokens of both sides of a batch.
        seed: Seed of the order.
        num_processes: Number of processes that share the batches. Each reads all pairs.
        process_index: Index of this process.
        pairs_in_buffer: Pairs in the buffer. More of them means less padding, more mixing, more memory.
        """
        self.read = read
        self.max_tokens_per_batch = max_tokens_per_batch
        self.seed = seed
        self.num_processes, self.process_index = num_processes, process_index
        self.pairs_in_buffer = pairs_in_buffer

    def __iter__(self) -> Iterator[list[Pair]]:
        """Yield the batches of this process. Each worker of a loader yields its share.

        Raises:
            ValueError: If a pair exceeds the budget, or a pass or the buffer holds fewer pairs than there are processes.
        """
        worker = get_worker_info()
        count, index = (1, 0) if worker is None else (worker.num_workers, worker.id)
        # The loader takes from its workers in turn, so that together they give the order of one.
        yield from islice(self._batches(), index, None, count)

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
                # Too few for a buffer with a pair for each process.
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
        # The filler has the index `len(buffer)`.
        pairs = [*buffer, uncounted(buffer[int(lengths.sum(axis=1).argmin())])]
        for step in torch.randperm(steps, generator=generator).tolist():
            yield [pairs[index] for index in batches[step * self.num_processes + self.process_index]]
