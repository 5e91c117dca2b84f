"""Pairs of source and target from files and data sets: rows of text, a report on what was skipped, and splits."""

import csv
import gzip
import hashlib
import json
import logging
import math
import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.fingerprint import Hasher
from filelock import FileLock

from metaphrase.errors import MetaphraseError
from metaphrase.storage.folders import file_in_one_step
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS, count_lines, join_columns, line_offsets, read_lines

logger = logging.getLogger(__name__)


class Rejected(NamedTuple):
    """Column of rejected targets. It stands in the place of the column of weights."""

    column: str | int


Column = str | int | Sequence[int] | Rejected | None
Columns = tuple[Column, ...]
# First byte of a part of a file, and the one behind it.
Span = tuple[int, int]
WHOLE = (0, sys.maxsize)
SIDES = ("source", "target")
# Factor of a pair in the loss of training, at least 0.
WEIGHT_COLUMN = "weight"
# A worse target for the source of a pair.
REJECTED_COLUMN = "rejected"
_FIELDS = "`source_column`, `target_column` and, if given, `weight_column` or `rejected_column`"
COLUMN_TYPES = {"source": "string", "target": "string", WEIGHT_COLUMN: "float64", REJECTED_COLUMN: "string"}


class PairProblem(NamedTuple):
    """A pair that cannot be used. `kind` is one of `PROBLEMS`."""

    kind: str
    message: str


# Source, target and, if there is a column of them, a weight or a rejected target.
Record = tuple[Any, ...] | PairProblem

# Readers of files. Those of pandas and pyarrow would read broken rows as nulls, or refuse a whole file without naming a line.


def read_parallel(
    source_file: str, target_file: str, limit: int = MAX_LINE_CHARACTERS, spans: Sequence[Span] = (WHOLE, WHOLE)
) -> Iterator[Record]:
    """Yield the pairs of two text files with one sentence per line and equally many lines, or of a span of each."""
    if spans[0] == WHOLE:
        paths = source_file, target_file
        check_parallel(paths, [count_lines(path) for path in paths])
    sides = (read_lines(path, limit, span=span) for path, span in zip((source_file, target_file), spans, strict=True))
    for source, target in zip(*sides, strict=True):
        line = source if source.problem else target
        yield PairProblem(line.kind, line.problem) if line.problem else (source.text, target.text)


def check_parallel(paths: Sequence[str], counts: Sequence[int | None]) -> None:
    """Raise a `MetaphraseError` if two parallel files do not have the same number of lines."""
    if counts[0] != counts[1]:
        shown = " and ".join(f"{count} in {path}" for count, path in zip(counts, paths, strict=True))
        raise MetaphraseError(f"Parallel files must have the same number of lines, got {shown}.")


def read_tsv(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS, span: Span = WHOLE) -> Iterator[Record]:
    """Yield the pairs of a tab-separated file, or of a span of it. Quotes are ordinary characters.

    The first line is a header if it holds both column names. Numbers mean that there is none. Several are those of a text and its
    features (see `join_columns`).
    """
    first = next(read_lines(path, limit), None)
    fields, names, width = first.text.split("\t") if first else [], column_names(columns), 2
    has_header = all(name in fields for name in names)
    sides: list[Any] = [number if columns[number] is None else name for number, name in enumerate(names)]
    if has_header:
        check_columns(path, names, fields)
        sides, width = [*map(fields.index, names)], len(fields)
    elif first is not None:
        width = 2 if columns == (None, None) else len(fields)
        numbers = [number for side in sides for number in ((isinstance(side, tuple) and side) or [side])]
        has_columns = all(isinstance(number, int) and 0 <= number < width for number in numbers)
        if not has_columns or len(fields) > width:
            raise MetaphraseError(
                f"{_FIELDS} must name columns in the first line of {path}, or be numbers from 0 of columns without a header, "
                f"got {columns}; it has {fields}."
            )
    source, target = map(_column_reader, sides[:2])
    for line in read_lines(path, limit, span=span):
        if has_header and line.number == 1 and not span[0]:
            continue
        fields = line.text.split("\t")
        if line.problem:
            yield PairProblem(line.kind, line.problem)
        elif len(fields) != width:
            message = f"{path} must have {width} tab-separated columns, got {len(fields)} in line {line.number}."
            yield PairProblem("malformed", message)
        else:
            pair = source(fields), target(fields)
            if len(sides) > 2 and isinstance(columns[2], Rejected):
                yield *pair, fields[sides[2]]
            else:
                yield _add_weight(pair, fields[sides[2]], f"{path}, line {line.number}") if len(sides) > 2 else pair


def _column_reader(column: int | tuple[int, ...]) -> Callable[[list[str]], str]:
    if isinstance(column, int):
        return operator.itemgetter(column)
    return lambda fields: join_columns(*(fields[number] for number in column))


def read_csv(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a comma-separated file (RFC 4180) whose first row names the columns. Blank lines are skipped.

    Broken quoting and a line that is too long are errors: no later row could be trusted.
    """

    def lines() -> Iterator[str]:
        for line in read_lines(path, limit, keepends=True):
            if line.kind == "line_too_long":
                raise MetaphraseError(line.problem)
            # Invalid bytes are lone surrogates, which `_from_mapping` detects.
            yield line.text

    names, header = column_names(columns), None
    reader = csv.reader(lines(), strict=True)
    # A quoted text may have many lines.
    csv.field_size_limit(min(limit, sys.maxsize))
    try:
        for row in filter(None, reader):
            if header is None:
                check_columns(path, names, header := row)
            elif len(row) != len(header):
                message = f"{path} must have {len(header)} columns, got {len(row)} in line {reader.line_num}."
                yield PairProblem("malformed", message)
            else:
                record = dict(zip(header, row, strict=True))
                yield _from_mapping(record, columns, names, f"{path}, line {reader.line_num}", limit)
    except csv.Error as error:
        raise MetaphraseError(
            f"{path} must be quoted as RFC 4180 says, with texts of at most `max_line_characters` {limit}, got in line "
            f"{reader.line_num}: {error}."
        ) from error


def column_names(columns: Columns) -> list[Any]:
    """Return the names of columns, with defaults. Numbers, which only a .tsv file may have, stay numbers."""
    names = [default if name is None else name for name, default in zip(columns, COLUMN_TYPES, strict=False)]
    return [name.column if isinstance(name, Rejected) else name for name in names]


def check_columns(where: str, names: list[str], present: list[str]) -> None:
    """Raise a `MetaphraseError` if a column is missing or occurs twice."""
    for name in names:
        if present.count(name) != 1:
            raise MetaphraseError(f"{_FIELDS} must name columns that {where} has once, got {name!r}; it has {present}.")


def read_json(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS, span: Span = WHOLE) -> Iterator[Record]:
    """Yield the pairs of a file with one JSON object per line, or of a span of it, or with one JSON array of objects.

    An object holds the columns itself, or under the key `translation` with language codes as column names. An array is in
    memory as a whole, often as one line: the limit holds for its texts.
    """
    names = column_names(columns)
    if path.removesuffix(".gz").endswith(".json"):
        first = next((line.text.lstrip() for line in read_lines(path, limit) if line.text.strip()), "")
        if first.startswith("["):
            try:
                records = json.loads("".join(line.text for line in read_lines(path, sys.maxsize, keepends=True)))
            except ValueError as error:
                raise MetaphraseError(f"{path} must be a JSON array of objects, got: {error}") from error
            for number, record in enumerate(records, start=1):
                yield _from_mapping(record, columns, names, f"{path}, record {number}", limit)
            return
    for line in read_lines(path, limit, span=span):
        if line.problem:
            yield PairProblem(line.kind, line.problem)
        elif line.text.strip():
            try:
                record = json.loads(line.text)
            except (ValueError, RecursionError) as error:  # Also for integers of thousands of digits.
                message = f"{path} must hold one JSON object per line, got in line {line.number}: {error}"
                yield PairProblem("malformed", message)
            else:
                yield _from_mapping(record, columns, names, f"{path}, line {line.number}", limit)


def _from_mapping(record: Any, columns: Columns, names: list[str], where: str, limit: int) -> Record:
    """Return the pair of a row: its columns, or those of a mapping `translation` in it."""
    if not isinstance(record, dict):
        return PairProblem("malformed", f"{where} must be a JSON object, got {type(record).__name__}.")
    nested = record.get("translation")
    row = nested if isinstance(nested, dict) and not all(name in record for name in names[:2]) else record
    texts = names if isinstance(columns[-1], Rejected) else names[:2]
    for name in texts:
        value = row.get(name)
        if not isinstance(value, str):
            actual = f"type {type(value).__name__}."
            if name not in row:
                actual = f"the keys {list(row)}. Set `source_column` and `target_column` to two of its keys."
            return PairProblem("malformed", f"{where} must hold a text {name!r}, got {actual}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate
            return PairProblem("invalid_utf8", f"{where} must hold valid UTF-8, got {value!a} as {name!r}.")
        if len(value) > limit:
            message = f"{where} must hold texts of at most {limit} characters, got more."
            return PairProblem("line_too_long", f"{message} Set `max_line_characters` higher to read it.")
    pair = tuple(row[name] for name in texts)
    return _add_weight(pair, record.get(names[2]), where) if len(names) > len(texts) else pair


def _add_weight(pair: tuple[str, ...], value: Any, where: str) -> Record:
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if 0 <= weight < math.inf:
        return *pair, weight
    return PairProblem(
        "malformed", f"{where} must hold a finite number of at least 0 in `weight_column`, got {value!r}."
    )


def read_parquet(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a Parquet file, with flat columns or a `translation` struct. Text must be UTF-8."""
    try:
        file = pq.ParquetFile(path)
        read = _select_columns(column_names(columns), path, file.schema_arrow.names)
        yield from read_arrow(file.iter_batches(columns=read), columns, path, limit)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise MetaphraseError(f"{path} must be a whole Parquet file, got: {error}") from error


def read_arrow(
    tables: Iterable[pa.Table | pa.RecordBatch], columns: Columns, where: str, limit: int = MAX_LINE_CHARACTERS
) -> Iterator[Record]:
    """Yield the pairs of successive Arrow tables, with flat columns or a `translation` struct."""
    names, row = column_names(columns), 0
    for table in tables:
        for record in table.select(_select_columns(names, where, table.schema.names)).to_pylist():
            yield _from_mapping(record, columns, names, f"{where}, row {row}", limit)
            row += 1


def _select_columns(names: list[str], where: str, present: list[str]) -> list[str]:
    if "translation" in present and not set(names[:2]) <= set(present):
        return [name for name in ("translation", *names[2:]) if name in present]
    check_columns(where, names, present)
    return names


# A reader of each ending. All files but Parquet may have `.gz` behind it.
READERS = {".tsv": read_tsv, ".csv": read_csv, ".jsonl": read_json, ".json": read_json, ".parquet": read_parquet}


SPLITS = ("train", "validation", "test")
LENGTH_COLUMNS = ("source_length", "target_length")
# Changes of training pairs that a recipe may ask for.
AUGMENTATIONS = ("uppercase", "titlecase", "missing_punctuation", "typos", "terms", "rare_words", "recombination")

Policy = Literal["error", "skip"]
# Name of the task of a pair, where a run has several.
TASK_COLUMN = "task"
# Part of every cache key. Raise it when the same file would be read into other pairs.
CACHE_VERSION = 4
# `datasets` takes more than a hundred times as long row by row.
_ROWS_PER_READ = 5000
# Parts of a file that a stream reads in random order. A buffer mixes pairs of many places if they are small.
BLOCK_BYTES, _BLOCK_LINES = 2**16, 256
# Number taken for a data set that does not tell.
_UNKNOWN_PAIRS = 1_000_000
# Kinds of `PairProblem`.
PROBLEMS = ("malformed", "invalid_utf8", "line_too_long")
# An unused pair counts under exactly one reason.
DROP_REASONS = {
    "malformed": "malformed",
    "invalid_utf8": "invalid UTF-8",
    "line_too_long": "line too long",
    "beyond_max_samples": "beyond max_samples",
    "other_splits": "taken out for validation or test",
    "empty_source": "empty source",
    "empty_target": "empty target",
    "source_too_long": "source too long",
    "target_too_long": "target too long",
}


@dataclass
class DataReport:
    """Counts of pairs. `read` equals `kept` plus the counts of all `DROP_REASONS`.

    Truncated pairs are kept. A pair cut on both sides counts on both. Lengths are in tokens, with end-of-sequence tokens.
    """

    read: int = 0
    malformed: int = 0
    invalid_utf8: int = 0
    line_too_long: int = 0
    beyond_max_samples: int = 0
    other_splits: int = 0
    empty_source: int = 0
    empty_target: int = 0
    source_too_long: int = 0
    target_too_long: int = 0
    source_truncated: int = 0
    target_truncated: int = 0
    source_lengths: dict[str, float] | None = None
    target_lengths: dict[str, float] | None = None

    @property
    def dropped(self) -> int:
        return sum(getattr(self, reason) for reason in DROP_REASONS)

    @property
    def kept(self) -> int:
        return self.read - self.dropped

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kept": self.kept, "dropped": self.dropped}

    def __str__(self) -> str:
        parts = [f"{self.kept} of {self.read} pairs kept"]
        reasons = {name: f"{getattr(self, name)} {text}" for name, text in DROP_REASONS.items() if getattr(self, name)}
        if "other_splits" in reasons:
            parts.append(reasons.pop("other_splits"))
        if reasons:
            parts.append(f"not used: {', '.join(reasons.values())}")
        if self.source_truncated or self.target_truncated:
            parts.append(f"truncated: {self.source_truncated} sources, {self.target_truncated} targets")
        text = "tokens: mean {mean:.1f}, 95% within {percentile_95:.0f}, longest {longest}"
        for side in SIDES:
            if lengths := getattr(self, f"{side}_lengths"):
                parts.append(f"{side} {text.format(**lengths)}")
        return "; ".join(parts) + "."


@dataclass(frozen=True, kw_only=True)
class PairSource:
    """The pairs of one split: a file, two parallel files, or a data set on the Hub or in a folder.

    Attributes:
        file: A `.tsv`, `.csv`, `.jsonl`, `.json` or `.parquet` file. All but Parquet may end in `.gz`.
        source_column: Name of the source column, by default `source`. In a `.tsv` file without a header, its number from
            0, or the numbers of a text and its features; by default the first of two columns.
        weight_column: Name or number of a column with the weight of each pair; None for no weights.
        rejected_column: Name or number of a column with a worse target for each source, without a `weight_column`.
        source_prefix: Text before each source that is not empty, such as `summarize: `.
        max_samples: Number of good pairs to take from the beginning.
        invalid_utf8: "error", or "skip" to drop and count pairs that are not UTF-8. In a Parquet file it is always an error.
        malformed: "error", or "skip" to drop and count lines with a wrong number of columns or a missing value.
        line_too_long: "error", or "skip" to drop and count pairs over `max_line_characters`.
        max_line_characters: Maximum characters of a line, or of a text where a pair has no line of its own.
    """

    file: str | Path | None = None
    source_file: str | Path | None = None
    target_file: str | Path | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_split: str = "train"
    source_column: Column = None
    target_column: Column = None
    weight_column: str | int | None = None
    rejected_column: str | int | None = None
    source_prefix: str | None = None
    max_samples: int | None = None
    invalid_utf8: Policy = "error"
    malformed: Policy = "error"
    line_too_long: Policy = "error"
    max_line_characters: int = MAX_LINE_CHARACTERS

    def __post_init__(self) -> None:
        names = ("file", "source_file", "target_file", "dataset_name")
        origins = [name for name in names if getattr(self, name) is not None]
        if origins not in (["file"], ["source_file", "target_file"], ["dataset_name"]):
            known = "`file`, `source_file` with `target_file`, and `dataset_name`"
            raise MetaphraseError(f"Pairs must come from one of {known}, got {' and '.join(origins) or 'none'}.")
        endings = (*READERS, *(f"{ending}.gz" for ending in READERS if ending != ".parquet"))
        if self.file is not None and not self.paths[0].endswith(endings):
            raise MetaphraseError(f"`file` must end in one of {', '.join(READERS)}, or .gz after it, got {self.file}.")

    @property
    def paths(self) -> tuple[str, ...]:
        """The files: none, one, or source and target."""
        return tuple(str(path) for path in (self.file, self.source_file, self.target_file) if path is not None)

    @property
    def columns(self) -> Columns:
        third = self.weight_column if self.rejected_column is None else Rejected(self.rejected_column)
        columns = (self.source_column, self.target_column, third)[: 2 + (third is not None)]
        return tuple(tuple(column) if isinstance(column, list) else column for column in columns)

    @property
    def column_types(self) -> dict[str, str]:
        """Types of the columns that are read, by their names in a data set."""
        third = WEIGHT_COLUMN if self.rejected_column is None else REJECTED_COLUMN
        return {name: COLUMN_TYPES[name] for name in (*SIDES, third)[: len(self.columns)]}

    @property
    def name(self) -> str:
        return " and ".join(self.paths) or f"{self.dataset_name} ({self.dataset_split})"

    def load_dataset(self, streaming: bool = False) -> Any:
        place = self.dataset_name, self.dataset_config_name
        return datasets.load_dataset(*place, split=self.dataset_split, streaming=streaming)

    @cached_property
    def offsets(self) -> np.ndarray | None:
        """Bytes of each file where a block begins, and the end, shape (blocks + 1, files); None if only the whole can be read.

        Blocks of parallel files have equally many lines, and those of one file equally many bytes.
        """
        endings = {Path(path).suffix for path in self.paths}
        is_whole = self.max_samples is not None or (self.file is not None and not endings <= {".tsv", ".jsonl"})
        if not endings or ".gz" in endings or is_whole:
            return None
        sizes = [Path(path).stat().st_size for path in self.paths]
        if self.file is not None:
            return np.append(np.arange(0, max(1, sizes[0]), BLOCK_BYTES), sizes[0])[:, None]
        offsets, counts = zip(*(line_offsets(path, _BLOCK_LINES) for path in self.paths), strict=True)
        check_parallel(self.paths, counts)
        starts = [[*offset[: -(-counts[0] // _BLOCK_LINES)], size] for offset, size in zip(offsets, sizes, strict=True)]
        return np.array(starts).T

    def records(self, block: int | None = None, streaming: bool = False) -> Iterator[Record]:
        """Yield the pairs, or the problem with a pair, one by one: all, or those of a block of `offsets`."""
        limit, spans = self.max_line_characters, [WHOLE] * len(self.paths)
        if block is not None:
            spans = [*zip(*self.offsets[block : block + 2].tolist(), strict=True)]
        if not self.paths:
            tables = self.load_dataset(streaming).with_format("arrow").iter(_ROWS_PER_READ)
            return read_arrow(tables, self.columns, self.name, limit)
        if self.file is None:
            return read_parallel(self.paths[0], self.paths[1], limit, spans)
        [path] = self.paths
        reader = READERS[Path(path.removesuffix(".gz")).suffix]
        return reader(path, self.columns, limit, *(() if block is None else spans))

    def rows(self, block: int | None = None, streaming: bool = False) -> Iterator[tuple[Any, ...]]:
        """Yield source with prefix, target, weight or rejected target, and problem of each record, empty for a good pair.

        A bad pair that is not skipped is a `MetaphraseError`.
        """
        for record in self.records(block, streaming):
            if isinstance(record, PairProblem):
                if getattr(self, record.kind) == "error":
                    can_skip, start = record.kind != "line_too_long", self.offsets[block] if block else []
                    hint = f" `{record.kind}: skip` drops and counts such pairs." if can_skip else ""
                    # A block knows no lines before it.
                    where = f" Lines are counted from byte {' and '.join(map(str, start))}." if block else ""
                    raise MetaphraseError(record.message + where + hint)
                yield *("" if kind == "string" else 0.0 for kind in self.column_types.values()), record.kind
            elif self.source_prefix and record[0].strip():
                yield self.source_prefix + record[0], *record[1:], ""
            else:
                yield *record, ""

    def pairs(self, report: "DataReport | None" = None, block: int | None = None) -> Iterator[tuple[Any, ...]]:
        """Stream the good pairs, with weights if there are any, and count all pairs in the report. Each call reads anew."""
        report, num_good = DataReport() if report is None else report, 0
        for row in self.rows(block, streaming=True):
            report.read += 1
            if row[-1]:
                report.add(**{row[-1]: 1})
                continue
            num_good += 1
            yield row[:-1]
            if num_good == self.max_samples:
                return

    def sample(self, most: int, seed: int = 0) -> tuple[datasets.Dataset, int]:
        """Return good pairs of blocks at random places, or else the first ones, and an estimate of the number of all good pairs.

        A source with fewer pairs than `most` is read as a whole, and its number is exact.
        """
        pairs, offsets = [], self.offsets
        if offsets is not None:
            num_read = 0
            for block in np.random.default_rng(seed).permutation(len(offsets) - 1).tolist():
                pairs += self.pairs(block=block)
                num_read += int((offsets[block + 1] - offsets[block]).sum())
                if len(pairs) >= most:
                    break
            return _as_dataset(pairs), len(pairs) * self.num_bytes // max(1, num_read)
        rows = self.pairs()
        pairs = list(islice(rows, most))
        if next(rows, None) is None:
            return _as_dataset(pairs), len(pairs)
        text = "".join("\t".join(map(str, pair)) + "\n" for pair in pairs).encode()
        num_read = len(gzip.compress(text)) if all(path.endswith(".gz") for path in self.paths) else len(text)
        number = max(most, most * self.num_bytes // num_read) if self.paths else _UNKNOWN_PAIRS
        return _as_dataset(pairs), min(number, self.max_samples or number)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files; 0 without files."""
        return sum(Path(path).stat().st_size for path in self.paths)


def _as_dataset(pairs: list[tuple[Any, ...]]) -> datasets.Dataset:
    columns = zip(*pairs, strict=True) if pairs else ((), ())
    return datasets.Dataset.from_dict(dict(zip(COLUMN_TYPES, columns, strict=False)))


def load_pairs(*, report: DataReport | None = None, **fields: Any) -> datasets.Dataset:
    """Read the pairs of one split by the fields of `PairSource`, as in `load_pairs(file="pairs.tsv")`.

    The columns are `source` and `target`, and `weight` or `rejected` if the fields name a column of them. The counts are added
    to the report. A changed file is read again.
    """
    source, report = PairSource(**fields), DataReport() if report is None else report
    # All pairs are cached, so that another number of samples needs no new reading.
    key = [repr(replace(source, max_samples=None)), CACHE_VERSION]
    key += [] if source.paths else [source.load_dataset()._fingerprint]
    types = source.column_types | {"problem": "string"}
    features = datasets.Features({name: datasets.Value(kind) for name, kind in types.items()})
    pairs = read_cached(source.rows, features, key, source.paths)
    problems = pairs.with_format("numpy")["problem"][:]
    counts = Counter(problems.tolist())
    report.add(read=len(pairs), **{kind: counts[kind] for kind in PROBLEMS})
    if not counts[""]:
        raise MetaphraseError(f"{source.name} must hold at least one good pair, got none. {report}")
    if counts[""] < len(pairs):
        reasons = ", ".join(f"{counts[kind]} {DROP_REASONS[kind]}" for kind in PROBLEMS if counts[kind])
        logger.warning("%s: skipped pairs that cannot be used: %s.", source.name, reasons)
        pairs = pairs.select((problems == "").nonzero()[0])
    pairs = pairs.remove_columns("problem")
    if source.max_samples is not None and source.max_samples < len(pairs):
        report.beyond_max_samples += len(pairs) - source.max_samples
        pairs = pairs.select(range(source.max_samples))
    return pairs


def read_cached(
    read: Callable[[], Iterable[tuple]], features: datasets.Features, key: Any, paths: Iterable[str]
) -> datasets.Dataset:
    """Return the rows that `read` yields, from a file written once for each key and each state of the files in `paths`."""
    # `Dataset.from_generator` takes five times as long, since it writes row by row.
    stats = [(str(Path(path).resolve()), Path(path).stat()) for path in paths]
    fingerprint = Hasher.hash((key, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)))
    cached = Path(datasets.config.HF_DATASETS_CACHE) / "metaphrase" / f"{fingerprint}.arrow"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Machines may share the folder.
        with FileLock(cached.with_suffix(".lock")):
            # Another process may have written it.
            if not cached.exists():
                _write_rows(cached, iter(read()), features.arrow_schema)
    dataset = datasets.Dataset.from_file(str(cached))
    # Results of `map` are cached by it, also by other processes.
    dataset._fingerprint = fingerprint
    return dataset


def _write_rows(cached: Path, rows: Iterator[tuple], schema: pa.Schema) -> None:
    with (
        file_in_one_step(cached) as partial,
        pa.ipc.new_stream(str(partial), schema) as writer,
        datasets.utils.tqdm(desc="Reading", unit=" rows") as progress,
    ):
        while batch := list(islice(rows, _ROWS_PER_READ)):
            progress.update(len(batch))
            writer.write(pa.record_batch([*zip(*batch, strict=True)], schema=schema))


def column_texts(dataset: datasets.Dataset, name: str) -> Iterator[str]:
    """Yield the texts of a column, with a few thousand in memory at a time."""
    # Slices of a column would search the file anew each time.
    batches, total = dataset.select_columns([name]).iter(_ROWS_PER_READ), -(-len(dataset) // _ROWS_PER_READ)
    for batch in datasets.utils.tqdm(batches, f"Texts ({name})", total, leave=False, delay=1):
        yield from batch[name]


def data_seed(arguments: Any) -> int:
    """Return the seed of splits and order of the data: `data_seed` of a recipe or training arguments, or else `seed`."""
    return arguments.seed if arguments.data_seed is None else arguments.data_seed


def split_pairs(
    dataset: datasets.Dataset, num_validation: int, num_test: int = 0, seed: int = 42, keep_rare_words: bool = False
) -> datasets.DatasetDict:
    """Hold out validation and test pairs, so that no source text occurs in two splits. Each split keeps the order of the pairs.

    Pairs with the same source (except for white space around it) stay together, so that a split may have fewer pairs than its
    number. The choice depends on the seed and the source texts alone, not on the order of the pairs or on library versions.
    `keep_rare_words` leaves a source in training that has a word of no other source.

    Raises:
        MetaphraseError: If a number is negative, or no pair would be left for training.
    """
    sizes = {"validation": num_validation, "test": num_test}
    groups: dict[str, list[int]] = defaultdict(list)
    for row, source in enumerate(column_texts(dataset, "source")):
        groups[source.strip()].append(row)
    counts = Counter(word for source in groups for word in set(source.split())) if keep_rare_words else Counter()
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for source in sorted(groups, key=lambda source: hashlib.blake2b(f"{seed}\t{source}".encode()).digest()):
        rows = groups[source]
        free = (name for name, size in sizes.items() if len(splits[name]) + len(rows) <= size)
        split = "train" if any(counts.get(word) == 1 for word in source.split()) else next(free, "train")
        splits[split].extend(rows)
    if num_validation < 0 or num_test < 0 or not splits["train"]:
        shown = f"{num_validation} and {num_test} of {len(dataset)}"
        raise MetaphraseError(f"`num_validation` and `num_test` must leave pairs for training, got {shown}.")
    for name, size in sizes.items():
        if len(splits[name]) < size:
            text = "`num_%s` is %d, and %d pairs are taken out of training: pairs with the same source stay together."
            logger.info(text, name, size, len(splits[name]))
    return datasets.DatasetDict({name: dataset.select(sorted(rows)) for name, rows in splits.items() if rows})
