"""Streamed pairs: read, filtered and encoded when they are needed, and cut into batches through a bounded buffer."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from metaphrase.data.augmentation import Augmenter
from metaphrase.data.encoding import OUTCOMES, PairEncoder
from metaphrase.data.fingerprints import file_fingerprint
from metaphrase.data.pair_files import read_arrow
from metaphrase.data.pairs import DROP_REASONS, DataReport, PairSource, generate_records
from metaphrase.data.token_budget import as_padded, fill_to_count, form_batches, seeded_generator, uncounted
from metaphrase.tokenization import TokenizerPair

logger = logging.getLogger(__name__)

Pair = Mapping[str, Sequence[int]]
_ROWS_PER_READ = 1000
# The counts of a report, in the order of the shared tensor.
_COUNTS = ("read", *DROP_REASONS, "source_truncated", "target_truncated")


class TextStream(PairSource):
    """Good pairs of text, read again for each pass. A data set of the Hub is streamed."""

    def pairs(self, report: DataReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield source and target of each good pair, and count all pairs in the report."""
        report = DataReport() if report is None else report
        num_good = 0
        for record in self._records():
            report.read += 1
            if record["problem"]:
                setattr(report, record["problem"], getattr(report, record["problem"]) + 1)
                continue
            num_good += 1
            yield record["source"], record["target"]
            if num_good == self.max_samples:
                return

    def _records(self) -> Iterator[dict[str, str]]:
        if self.paths:
            yield from generate_records(self)
            return
        row = 0
        for table in self.load_dataset(streaming=True).with_format("arrow").iter(_ROWS_PER_READ):
            for record in read_arrow(table, self.columns, self.name, row, self.max_line_characters):
                yield self.to_row(record)
            row += table.num_rows

    def side(self, index: int) -> Iterator[str]:
        """Yield the sources (0), without prefix, or the targets (1)."""
        start = len(self.source_prefix or "") if index == 0 else 0
        return (pair[index][start:] for pair in self.pairs())


class PairStream:
    """Encoded pairs of a text stream, the same in each pass. Pairs are dropped and counted as by `encode_pairs`.

    An augmenter changes the remaining pairs in each pass.
    """

    def __init__(self, texts: TextStream, tokenizers: TokenizerPair, augmenter: Augmenter | None = None, **rules: Any):
        """Args:
        texts: The pairs of text.
        tokenizers: Source and target tokenizer.
        augmenter: Changes the pairs of a pass.
        **rules: The other fields of `PairEncoder`.
        """
        self.texts, self.encode, self.augmenter = texts, PairEncoder(tokenizers, **rules), augmenter
        # Shared memory: the workers of a loader read, each with a copy of this stream.
        self._counts = torch.zeros(len(_COUNTS), dtype=torch.int64).share_memory_()

    @property
    def report(self) -> DataReport:
        """Counts of the present pass, or of the last one."""
        return DataReport(**dict(zip(_COUNTS, self._counts.tolist(), strict=True)))

    def _publish(self, report: DataReport) -> None:
        # Every worker reads all pairs: the first one counts for all.
        if (worker := get_worker_info()) is None or worker.id == 0:
            self._counts.copy_(torch.tensor([getattr(report, name) for name in _COUNTS]))

    def __call__(self, pass_number: int) -> Iterator[dict[str, Any]]:
        """Yield `input_ids` and `labels` of each pair of a pass."""
        report = DataReport()
        pairs, row = self.texts.pairs(report), count()
        while batch := list(islice(pairs, _ROWS_PER_READ)):
            sources, targets = zip(*batch, strict=True)
            rows = list(islice(row, len(batch)))
            columns = self.encode(list(sources), list(targets), rows)
            report.source_truncated += sum(columns["source_truncated"])
            report.target_truncated += sum(columns["target_truncated"])
            outcomes = columns["outcome"]
            for outcome, reason in enumerate(OUTCOMES[1:], start=1):
                setattr(report, reason, getattr(report, reason) + outcomes.count(outcome))
            self._publish(report)
            pairs_of_ids = zip(columns["input_ids"], columns["labels"], strict=True)
            encoded = [{"input_ids": input_ids, "labels": labels} for input_ids, labels in pairs_of_ids]
            remaining = [number for number, outcome in enumerate(outcomes) if outcome == 0]
            if self.augmenter is None:
                yield from (encoded[number] for number in remaining)
            elif remaining:
                texts = [
                    {"source": sources[number], "target": targets[number], **encoded[number]} for number in remaining
                ]
                yield from self.augmenter(texts, pass_number, [rows[number] for number in remaining])
        self._publish(report)
        logger.info("Pass %d: %s", pass_number + 1, report)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the fingerprint of the files, or None for a data set of the Hub.

        A resumed run compares fingerprints. Length limits do not count, because they may leave the same pairs.
        """
        texts = self.texts
        return file_fingerprint(texts.paths, (texts.columns, texts.source_prefix or "")) if texts.paths else None

    def to_dict(self) -> dict[str, Any]:
        """Return `report` as plain values."""
        return self.report.to_dict()


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
