"""Raw pairs as a stream: read, filtered and turned into token ids as they are needed, never all at once."""

import logging
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import get_worker_info

from metaphrase.data.encoding import OUTCOMES, Empty, PairEncoder, TooLong, encode_batch, find_frames
from metaphrase.data.pair_files import Column, column_names, read_arrow
from metaphrase.data.pairs import Policy, as_row, check_place, generate_records
from metaphrase.data.reports import DROP_REASONS, DataReport, file_fingerprint

logger = logging.getLogger(__name__)

_ROWS_PER_READ = 1000
# What a report counts, in the order in which processes share it.
_COUNTS = ("read", *DROP_REASONS, "source_truncated", "target_truncated")


class TextStream:
    """The good pairs of text of one place, read anew each time that they are asked for.

    The arguments are those of `load_pairs`; a data set of the Hub is streamed from there.
    """

    def __init__(
        self,
        *,
        file: str | Path | None = None,
        source_file: str | Path | None = None,
        target_file: str | Path | None = None,
        dataset_name: str | None = None,
        dataset_config_name: str | None = None,
        dataset_split: str = "train",
        source_column: Column = None,
        target_column: Column = None,
        source_prefix: str | None = None,
        max_samples: int | None = None,
        invalid_utf8: Policy = "error",
        malformed: Policy = "error",
    ):
        check_place(file, source_file, target_file, dataset_name, max_samples, invalid_utf8, malformed)
        self.paths = tuple(str(path) for path in (file, source_file, target_file) if path is not None)
        self.dataset = (dataset_name, dataset_config_name, dataset_split)
        self.columns = (source_column, target_column)
        self.source_prefix = source_prefix or ""
        self.max_samples = max_samples
        self.policies = {"invalid_utf8": invalid_utf8, "malformed": malformed}

    def pairs(self, report: DataReport | None = None) -> Iterator[tuple[str, str]]:
        """Yields source and target of each good pair, and counts all of them in the report."""
        report = DataReport() if report is None else report
        num_good = 0
        for record in self._records():
            report.read += 1
            if record["problem"]:
                setattr(report, record["problem"], getattr(report, record["problem"]) + 1)
                continue
            num_good += 1
            source = record["source"]
            yield (self.source_prefix + source if source.strip() else source), record["target"]
            if num_good == self.max_samples:
                return

    def _records(self) -> Iterator[dict[str, str]]:
        name, config, split = self.dataset
        if name is None:
            yield from generate_records(self.paths, self.columns, self.policies, stamps=None, version=0)
            return
        rows, where, row = datasets.load_dataset(name, config, split=split, streaming=True), f"{name} ({split})", 0
        for table in rows.with_format("arrow").iter(_ROWS_PER_READ):
            for record in read_arrow(table, column_names(*self.columns), where, row):
                yield as_row(record, self.policies)
            row += table.num_rows

    def side(self, index: int) -> Iterator[str]:
        """Yields the sources (0), without their prefix, or the targets (1)."""
        prefix = len(self.source_prefix) if index == 0 else 0
        return (pair[index][prefix:] for pair in self.pairs())


class PairStream:
    """Encoded pairs of a stream of text, the same in each pass. Pairs are left out, and counted, as by `encode_pairs`."""

    def __init__(
        self,
        texts: TextStream,
        tokenizers: PairEncoder,
        *,
        max_source_length: int | None,
        max_target_length: int | None,
        too_long: TooLong = "skip",
        empty: Empty = "skip",
    ):
        """Args:
        texts: The pairs of text.
        tokenizers: The source and target tokenizer.
        max_source_length: The most tokens of a source, end-of-sequence token included; None for no limit.
        max_target_length: Likewise of a target.
        too_long: What to do with a pair that has a side over its limit.
        empty: What to do with a pair that has an empty side.
        """
        self.texts, self.tokenizers = texts, tokenizers
        self.rules = {
            "tokenizers": tokenizers,
            "limits": (max_source_length, max_target_length),
            "frames": find_frames(tokenizers),
            "too_long": too_long,
            "empty": empty,
        }
        # Shared: where a loader has workers, it is they who read, each a copy of this stream.
        self._counts = torch.zeros(len(_COUNTS), dtype=torch.int64).share_memory_()

    @property
    def report(self) -> DataReport:
        """The account of the pass that goes on, or was the last; a pass that is over was logged."""
        return DataReport(**dict(zip(_COUNTS, self._counts.tolist(), strict=True)))

    def _publish(self, report: DataReport) -> None:
        # All workers read all pairs, one sooner than another: the first speaks for all of them.
        if (worker := get_worker_info()) is None or worker.id == 0:
            self._counts.copy_(torch.tensor([getattr(report, name) for name in _COUNTS]))

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        """Yields `input_ids` and `labels` of each pair of a pass."""
        report = DataReport()
        pairs, row = self.texts.pairs(report), count()
        while batch := list(islice(pairs, _ROWS_PER_READ)):
            sources, targets = zip(*batch, strict=True)
            columns = encode_batch(list(sources), list(targets), list(islice(row, len(batch))), **self.rules)
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
        """By what a resumed run knows that it reads the same files; a data set of the Hub has nothing of the kind.

        Limits do not count: they may leave the same pairs as before.
        """
        texts = self.texts
        return file_fingerprint(texts.paths, (texts.columns, texts.source_prefix)) if texts.paths else None

    def to_dict(self) -> dict[str, Any]:
        """The counts of the pass that goes on, or was the last."""
        return self.report.to_dict()
