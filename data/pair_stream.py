"""Streamed pairs: read, filtered and encoded when they are needed, never all at once."""

import logging
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import get_worker_info

from metaphrase.data.encoding import OUTCOMES, PairEncoder
from metaphrase.data.fingerprints import file_fingerprint
from metaphrase.data.pair_files import read_arrow
from metaphrase.data.pairs import PairSource, generate_records
from metaphrase.data.reports import DROP_REASONS, DataReport
from metaphrase.tokenization import TokenizerPair

logger = logging.getLogger(__name__)

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
            for record in read_arrow(table, self.columns, self.name, row):
                yield self.to_row(record)
            row += table.num_rows

    def side(self, index: int) -> Iterator[str]:
        """Yield the sources (0), without prefix, or the targets (1)."""
        start = len(self.source_prefix or "") if index == 0 else 0
        return (pair[index][start:] for pair in self.pairs())


class PairStream:
    """Encoded pairs of a text stream, the same in each pass. Pairs are dropped and counted as by `encode_pairs`."""

    def __init__(self, texts: TextStream, tokenizers: TokenizerPair, **rules: Any):
        """Args:
        texts: The pairs of text.
        tokenizers: Source and target tokenizer.
        **rules: The other fields of `PairEncoder`.
        """
        self.texts, self.encode = texts, PairEncoder(tokenizers, **rules)
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

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield `input_ids` and `labels` of each pair of a pass."""
        report = DataReport()
        pairs, row = self.texts.pairs(report), count()
        while batch := list(islice(pairs, _ROWS_PER_READ)):
            sources, targets = zip(*batch, strict=True)
            columns = self.encode(list(sources), list(targets), list(islice(row, len(batch))))
            report.source_truncated += sum(columns["source_truncated"])
            report.target_truncated += sum(columns["target_truncated"])
            outcomes = columns["outcome"]
            for outcome, reason in enumerate(OUTCOMES[1:], start=1):
                setattr(report, reason, getattr(report, reason) + outcomes.count(outcome))
            self._publish(report)
            for outcome, input_ids, labels in zip(outcomes, columns["input_ids"], columns["labels"], strict=True):
                if outcome == 0:
                    yield {"input_ids": input_ids, "labels": labels}
        self._publish(report)
        logger.info("Pass %d: %s", number + 1, report)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the fingerprint of the files, or None for a data set of the Hub.

        A resumed run compares fingerprints. Length limits do not count, because they may leave the same pairs.
        """
        texts = self.texts
        return file_fingerprint(texts.paths, (texts.columns, texts.source_prefix or "")) if texts.paths else None

    def to_dict(self) -> dict[str, Any]:
        """Return `report` as plain values."""
        return self.report.to_dict()
