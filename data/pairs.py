"""Pairs of source and target from files and data sets: rows of text, a report on what was skipped, splits, and a profile."""

import csv
import hashlib
import json
import logging
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS, count_lines, read_lines

logger = logging.getLogger(__name__)

Column = str | int | None
Columns = tuple[Column, Column]
SIDES = ("source", "target")
_TSV_BREAKS = str.maketrans("\t\r\n", "   ")


@dataclass(frozen=True)
class PairProblem:
    """A pair that cannot be used. `kind` is "invalid_utf8", "malformed" or "line_too_long"."""

    kind: str
    message: str


Record = tuple[str, str] | PairProblem


def read_parallel(source_file: str, target_file: str, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of two text files with one sentence per line.

    Raises:
        ValueError: If the files differ in their number of lines.
    """
    counts = [count_lines(path) for path in (source_file, target_file)]
    if counts[0] != counts[1]:
        raise ValueError(
            "Parallel files must have the same number of lines, "
            f"got {counts[0]} in {source_file} and {counts[1]} in {target_file}."
        )
    for source, target in zip(read_lines(source_file, limit), read_lines(target_file, limit), strict=True):
        line = source if source.problem else target
        yield PairProblem(line.kind, line.problem) if line.problem else (source.content, target.content)


def read_tsv(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a tab-separated file. Quotes are ordinary characters.

    The first line is a header if it holds both column names. Columns given by number mean that there is no header.

    Raises:
        ValueError: If the file does not have the columns.
    """
    names = _with_defaults(columns)
    for line in read_lines(path, limit):
        fields = line.content.split("\t")
        if line.number == 1:
            if all(name in fields for name in names):
                check_columns(path, names, fields)
                source, target, width = *map(fields.index, names), len(fields)
                continue
            source, target = (0, 1) if columns == (None, None) else columns
            width = 2 if columns == (None, None) else len(fields)
            has_columns = all(isinstance(column, int) and 0 <= column < width for column in (source, target))
            if not has_columns or (columns == (None, None) and len(fields) > 2):
                raise ValueError(
                    f"`source_column` and `target_column` must name columns in the first line of {path}, or be numbers from 0 of "
                    f"columns without a header, got {columns}; it has {fields}."
                )
        if line.problem:
            yield PairProblem(line.kind, line.problem)
        elif len(fields) != width:
            yield PairProblem(
                "malformed", f"{path} must have {width} tab-separated columns, got {len(fields)} in line {line.number}."
            )
        else:
            yield fields[source], fields[target]


def read_csv(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a comma-separated file (RFC 4180) whose first row names the columns. Blank lines are skipped.

    Raises:
        ValueError: If a column is not in the header, or the quoting is broken or a text too long: no later row could be
            trusted.
    """

    def lines() -> Iterator[str]:
        for line in read_lines(path, limit):
            if line.kind == "line_too_long":
                raise ValueError(line.problem)
            # Invalid bytes are lone surrogates, which `_from_mapping` detects.
            yield line.text

    names, header = column_names(columns), None
    reader = csv.reader(lines(), strict=True)
    # A quoted text may have many lines.
    previous_limit = csv.field_size_limit(min(limit, sys.maxsize))
    try:
        for row in filter(None, reader):
            if header is None:
                check_columns(path, names, header := row)
            elif len(row) != len(header):
                message = f"{path} must have {len(header)} columns, got {len(row)} in line {reader.line_num}."
                yield PairProblem("malformed", message)
            else:
                yield _from_mapping(
                    dict(zip(header, row, strict=True)), names, f"{path}, line {reader.line_num}", limit
                )
    except csv.Error as error:
        raise ValueError(
            f"{path} must be quoted as RFC 4180 says, with texts of at most `max_line_characters` {limit}, got in line "
            f"{reader.line_num}: {error}."
        ) from error
    finally:
        csv.field_size_limit(previous_limit)


def column_names(columns: Columns) -> tuple[str, str]:
    """Return both column names, with defaults. Raise a `ValueError` for a number."""
    names = _with_defaults(columns)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"`source_column` and `target_column` must be names except in a .tsv file, got {columns}.")
    return names


def _with_defaults(columns: Columns) -> tuple[str | int, str | int]:
    return tuple(default if name is None else name for name, default in zip(columns, SIDES, strict=True))


def check_columns(where: str, names: tuple[str, ...], present: list[str]) -> None:
    """Raise a `ValueError` if a column is missing or occurs twice."""
    for name in names:
        if present.count(name) != 1:
            raise ValueError(
                f"`source_column` and `target_column` must name columns that {where} has once, got {name!r}; it has {present}."
            )


def read_json(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a file with one JSON object per line, or with one JSON array of objects.

    An object holds the columns itself, or under the key `translation` with language codes as column names. An array is in
    memory as a whole, often as one line: the limit holds for its texts.

    Raises:
        ValueError: If a JSON array cannot be parsed.
    """
    names = column_names(columns)
    if path.removesuffix(".gz").endswith(".json"):
        first = next((line.text.lstrip() for line in read_lines(path, limit) if line.text.strip()), "")
        if first.startswith("["):
            try:
                records = json.loads("".join(line.text for line in read_lines(path, sys.maxsize)))
            except ValueError as error:
                raise ValueError(f"{path} must be a JSON array of objects, got: {error}") from error
            for number, record in enumerate(records, start=1):
                yield _from_mapping(record, names, f"{path}, record {number}", limit)
            return
    for line in read_lines(path, limit):
        if line.problem:
            yield PairProblem(line.kind, line.problem)
        elif line.text.strip():
            try:
                record = json.loads(line.text)
            except (ValueError, RecursionError) as error:  # Also for integers of thousands of digits.
                message = f"{path} must hold one JSON object per line, got in line {line.number}: {error}"
                yield PairProblem("malformed", message)
                continue
            yield _from_mapping(record, names, f"{path}, line {line.number}", limit)


def _from_mapping(record: Any, names: tuple[str, str], where: str, limit: int) -> Record:
    """Return the pair of a row: its columns, or those of a mapping `translation` in it."""
    if not isinstance(record, dict):
        return PairProblem("malformed", f"{where} must be a JSON object, got {type(record).__name__}.")
    nested = record.get("translation")
    row = nested if isinstance(nested, dict) and not all(name in record for name in names) else record
    values = []
    for name in names:
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
            hint = "Set `max_line_characters` higher to read it."
            message = f"{where} must hold texts of at most {limit} characters, got more. {hint}"
            return PairProblem("line_too_long", message)
        values.append(value)
    return values[0], values[1]


def read_parquet(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a Parquet file, with flat columns or a `translation` struct.

    Raises:
        ValueError: If the file is broken or holds text that is not UTF-8, or a column is missing or occurs twice.
    """
    row, names = 0, column_names(columns)
    try:
        file = pq.ParquetFile(path)
        present = file.schema_arrow.names
        if "translation" not in present:
            check_columns(path, names, present)
        read = [name for name in present if name in (*names, "translation")]
        for batch in file.iter_batches(columns=read):
            yield from read_arrow(batch, columns, path, row, limit)
            row += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a whole Parquet file, got: {error}") from error


def read_arrow(
    table: pa.Table | pa.RecordBatch, columns: Columns, where: str, first_row: int, limit: int = MAX_LINE_CHARACTERS
) -> Iterator[Record]:
    """Yield the pairs of an Arrow table, with flat columns or a `translation` struct.

    Raises:
        ValueError: If a column is missing or occurs twice.
    """
    names, present = column_names(columns), table.schema.names
    if "translation" in present and not set(names) <= set(present):
        table = table.select(["translation"])
    else:
        check_columns(where, names, present)
        table = table.select(list(names))
    for row, record in enumerate(table.to_pylist(), start=first_row):
        yield _from_mapping(record, names, f"{where}, row {row}", limit)


READERS = {".tsv": read_tsv, ".csv": read_csv, ".jsonl": read_json, ".json": read_json, ".parquet": read_parquet}


def tsv_line(*texts: str) -> str:
    """Return a line of a .tsv file. Tabs and line breaks inside a text become spaces."""
    return "\t".join(text.translate(_TSV_BREAKS) for text in texts) + "\n"


def json_line(source: str, target: str) -> str:
    """Return a line of a .jsonl file."""
    return json.dumps(dict(zip(SIDES, (source, target), strict=True)), ensure_ascii=False) + "\n"


def pair_formatter(output: str | None) -> Callable[[str, str], str]:
    """Return the function that formats a pair for a file; `None` is standard output, which takes tabs.

    Raises:
        ValueError: If the name of the file does not end in .tsv or .jsonl.
    """
    if output is not None and not output.endswith((".tsv", ".jsonl")):
        raise ValueError(f"`output` must end in .tsv or .jsonl, got {output!r}.")
    return tsv_line if output is None or output.endswith(".tsv") else json_line


SPLITS = ("train", "validation", "test")
LENGTH_COLUMNS = ("source_length", "target_length")

Policy = Literal["error", "skip"]
# Name of the task of a pair, where a run has several.
TASK_COLUMN = "task"
RECORD_FEATURES = datasets.Features({name: datasets.Value("string") for name in (*SIDES, "problem")})
# Part of every cache key. Raise it when the same file would be read into other pairs.
CACHE_VERSION = 3
# `datasets` takes more than a hundred times as long row by row.
_ROWS_PER_READ = 5000
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


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of one side in tokens, with end-of-sequence tokens."""

    mean: float
    percentile_95: float
    longest: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> "LengthStatistics":
        """Summarize the lengths of at least one sequence."""
        return cls(float(np.mean(lengths)), float(np.percentile(lengths, 95)), int(np.max(lengths)))

    def __str__(self) -> str:
        return f"mean {self.mean:.1f}, 95% within {self.percentile_95:.0f}, longest {self.longest}"


@dataclass
class DataReport:
    """Counts of pairs. `read` equals `kept` plus the counts of all `DROP_REASONS`.

    Truncated pairs are kept. A pair cut on both sides counts on both.
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
    source_lengths: LengthStatistics | None = None
    target_lengths: LengthStatistics | None = None

    @property
    def dropped(self) -> int:
        """Number of unused pairs."""
        return sum(getattr(self, reason) for reason in DROP_REASONS)

    @property
    def kept(self) -> int:
        """Number of used pairs."""
        return self.read - self.dropped

    def to_dict(self) -> dict[str, Any]:
        """Return all counts and statistics as plain values for JSON."""
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
        for side in ("source", "target"):
            if (statistics := getattr(self, f"{side}_lengths")) is not None:
                parts.append(f"{side} tokens: {statistics}")
        return "; ".join(parts) + "."


@dataclass(frozen=True, kw_only=True)
class PairSource:
    """The pairs of one split: a file, two parallel files, or a data set.

    Attributes:
        file: A `.tsv`, `.csv`, `.jsonl`, `.json` or `.parquet` file. All but Parquet may end in `.gz`.
        source_file: A text file with one source per line. Needs `target_file`.
        target_file: A text file with one target per line.
        dataset_name: A data set on the Hub, or a folder that `datasets.load_dataset` understands.
        dataset_config_name: Configuration of the data set.
        dataset_split: Split of the data set.
        source_column: Name of the source column, by default `source`. In a `.tsv` file without a header, its number from
            0; by default the first of two columns.
        target_column: The same for the target.
        source_prefix: Text before each source that is not empty, such as `summarize: `.
        max_samples: Number of good pairs to take from the beginning.
        invalid_utf8: "error", or "skip" to drop and count pairs that are not UTF-8. In a Parquet file it is always an error.
        malformed: "error", or "skip" to drop and count lines with a wrong number of columns or a missing value.
        line_too_long: "error", or "skip" to drop and count pairs over `max_line_characters`.
        max_line_characters: Maximum characters of a line, or of a text where a pair has no line of its own.

    Raises:
        ValueError: If the pairs come from none or several of the three origins, or the file has another ending.
        FileNotFoundError: If a file does not exist.
    """

    file: str | Path | None = None
    source_file: str | Path | None = None
    target_file: str | Path | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_split: str = "train"
    source_column: Column = None
    target_column: Column = None
    source_prefix: str | None = None
    max_samples: int | None = None
    invalid_utf8: Policy = "error"
    malformed: Policy = "error"
    line_too_long: Policy = "error"
    max_line_characters: int = MAX_LINE_CHARACTERS

    def __post_init__(self) -> None:
        if (self.source_file is None) != (self.target_file is None):
            raise ValueError(
                f"`source_file` and `target_file` must be given together, got {self.source_file} and {self.target_file}."
            )
        origins = [name for name in ("file", "source_file", "dataset_name") if getattr(self, name) is not None]
        if len(origins) != 1:
            raise ValueError(
                "Pairs must come from exactly one of `file`, `source_file` with `target_file`, and `dataset_name`, "
                f"got {' and '.join(origins) or 'none'}."
            )
        check_files(self.paths)
        if self.file is not None and _suffix(self.paths[0]) not in READERS:
            raise ValueError(f"`file` must end in one of {', '.join(READERS)} (or with .gz after it), got {self.file}.")

    @property
    def paths(self) -> tuple[str, ...]:
        """The files: none, one, or source and target."""
        return tuple(str(path) for path in (self.file, self.source_file, self.target_file) if path is not None)

    @property
    def columns(self) -> tuple[Column, Column]:
        return self.source_column, self.target_column

    @property
    def name(self) -> str:
        """The name for messages."""
        return " and ".join(self.paths) or f"{self.dataset_name} ({self.dataset_split})"

    def load_dataset(self, **options: Any) -> Any:
        """Return the data set called `dataset_name`."""
        return datasets.load_dataset(self.dataset_name, self.dataset_config_name, split=self.dataset_split, **options)

    def read_files(self) -> Iterator[Record]:
        """Yield the pairs of the files, or the problem with a pair, one by one."""
        first, *other = self.paths
        if other:
            return read_parallel(first, *other, self.max_line_characters)
        return READERS[_suffix(first)](first, self.columns, self.max_line_characters)

    def to_row(self, record: Record) -> dict[str, str]:
        """Return a row of `RECORD_FEATURES`, with the prefix. Raise a `ValueError` for a bad pair that is not skipped."""
        if isinstance(record, PairProblem):
            if getattr(self, record.kind) == "error":
                hint = "" if record.kind == "line_too_long" else f" `{record.kind}: skip` drops and counts such pairs."
                raise ValueError(record.message + hint)
            return {"source": "", "target": "", "problem": record.kind}
        source, target = record
        prefix = self.source_prefix if self.source_prefix and source.strip() else ""
        return {"source": prefix + source, "target": target, "problem": ""}


def load_pairs(
    *, report: DataReport | None = None, cache_dir: str | Path | None = None, **fields: Any
) -> datasets.Dataset:
    """Read the raw pairs of one split, as in `load_pairs(file="pairs.tsv")`.

    Args:
        report: Receives the counts, added to its present ones.
        cache_dir: Cache folder of `datasets`. A changed file is read again.
        **fields: Fields of `PairSource`.

    Returns:
        The text columns `source` and `target`.

    Raises:
        ValueError: If a field of `PairSource` is wrong, the file is broken, or there is no good pair.
        FileNotFoundError: If a file does not exist.
    """
    source = PairSource(**fields)
    if source.paths:
        # All pairs are cached, so that another number of samples needs no new reading.
        arguments = {"source": replace(source, max_samples=None)}
        records = read_cached(generate_records, source.paths, RECORD_FEATURES, CACHE_VERSION, cache_dir, arguments)
    else:
        records = _read_dataset(source, cache_dir)
    report = report if report is not None else DataReport()
    pairs = _select_good_pairs(records, source.name, report)
    if source.max_samples is not None and source.max_samples < len(pairs):
        report.beyond_max_samples += len(pairs) - source.max_samples
        pairs = pairs.select(range(source.max_samples))
    return pairs


def column_texts(dataset: datasets.Dataset, name: str) -> Iterator[str]:
    """Yield the texts of a column, with a few thousand in memory at a time."""
    column = dataset[name]
    for start in range(0, len(dataset), _ROWS_PER_READ):
        yield from column[start : start + _ROWS_PER_READ]


def data_seed(arguments: Any) -> int:
    """Return the seed of the data order: `data_seed` of training arguments, or else `seed`."""
    return arguments.seed if arguments.data_seed is None else arguments.data_seed


def check_files(paths: tuple[str, ...]) -> None:
    """Raise a `FileNotFoundError` for the first missing file."""
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no file {path}.")


def _suffix(path: str) -> str:
    suffix = Path(path.removesuffix(".gz")).suffix
    return "" if suffix == ".parquet" and path.endswith(".gz") else suffix


def read_cached(
    generate: Callable[..., Iterator[dict]],
    paths: tuple[str, ...],
    features: datasets.Features,
    version: int,
    cache_dir: str | Path | None,
    arguments: dict[str, Any],
) -> datasets.Dataset:
    """Return the rows of `generate(cache_key=..., **arguments)`, cached until an argument or a file changes.

    Args:
        generate: A generator function.
        paths: Its files.
        features: The columns.
        version: Part of the cache key.
        cache_dir: Cache folder of `datasets`.
        arguments: Other arguments of the generator.
    """
    stats = [(str(Path(path).resolve()), Path(path).stat()) for path in paths]
    key = (version, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    try:
        return datasets.Dataset.from_generator(
            generate, features=features, cache_dir=cache_dir, gen_kwargs={"cache_key": key, **arguments}
        )
    except DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ValueError | OSError | EOFError):
            raise cause from None
        raise


def generate_records(source: PairSource, cache_key: Any = None) -> Iterator[dict[str, str]]:
    """Yield the records of one file or of two parallel files. The cache key is not read.

    Raises:
        ValueError: At the first bad pair that is not skipped, or if there is no pair at all.
    """
    is_empty = True
    for record in source.read_files():
        is_empty = False
        yield source.to_row(record)
    if is_empty:
        raise ValueError(f"{source.name} must hold at least one pair, got none.")


def _read_dataset(source: PairSource, cache_dir: str | Path | None) -> datasets.Dataset:
    dataset = source.load_dataset(cache_dir=cache_dir)

    def to_records(table: pa.Table, rows: list[int]) -> pa.Table:
        pairs = read_arrow(table, source.columns, source.name, rows[0], source.max_line_characters)
        records = [source.to_row(record) for record in pairs]
        return pa.Table.from_pylist(records, schema=RECORD_FEATURES.arrow_schema)

    return (
        dataset.with_format("arrow")
        .map(
            to_records,
            batched=True,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=RECORD_FEATURES,
            new_fingerprint=Hasher.hash((dataset._fingerprint, replace(source, max_samples=None), CACHE_VERSION)),
            desc="Reading pairs",
        )
        .with_format(None)
    )


def _select_good_pairs(records: datasets.Dataset, name: str, report: DataReport) -> datasets.Dataset:
    problems = records.with_format("numpy")["problem"][:]
    counts = Counter(problems.tolist())
    report.read += len(records)
    for kind in PROBLEMS:
        setattr(report, kind, getattr(report, kind) + counts[kind])
    if not counts[""]:
        raise ValueError(f"{name} must hold at least one good pair, got none. {report}")
    if counts[""] < len(records):
        reasons = ", ".join(f"{counts[kind]} {DROP_REASONS[kind]}" for kind in PROBLEMS if counts[kind])
        logger.warning("%s: skipped pairs that cannot be used: %s.", name, reasons)
        records = records.select((problems == "").nonzero()[0])
    return records.remove_columns("problem")


def split_pairs(
    dataset: datasets.Dataset, num_validation: int, num_test: int = 0, seed: int = 42
) -> datasets.DatasetDict:
    """Hold out validation and test pairs, so that no source text occurs in two splits.

    Pairs with the same source (except for white space around it) stay together. The choice depends on the seed and the
    source texts alone, not on the order of the pairs or on library versions.

    Returns:
        `train`, and `validation` and `test` if their number is not 0. Each keeps the order of the pairs.

    Raises:
        ValueError: If a number is negative, no pair would be left for training, or no groups of pairs add up to a number.
    """
    if num_validation < 0 or num_test < 0 or num_validation + num_test >= len(dataset):
        raise ValueError(
            f"`num_validation` and `num_test` must be at least 0 and leave some of the {len(dataset)} pairs for training, "
            f"got {num_validation} and {num_test}."
        )
    sizes = {"validation": num_validation, "test": num_test}
    splits = _rows_of_splits(dataset, sizes, seed)
    for name, size in sizes.items():
        if len(splits[name]) != size:
            raise ValueError(
                f"`num_{name}` must be the sum of whole groups of pairs with one source, got {size}. "
                f"{len(splits[name])} is possible."
            )
    return datasets.DatasetDict({name: dataset.select(sorted(rows)) for name, rows in splits.items() if rows})


def possible_validation(dataset: datasets.Dataset, most: int, num_test: int = 0, seed: int = 42) -> int:
    """Return the largest `num_validation` up to `most` with which `split_pairs` succeeds."""
    return len(_rows_of_splits(dataset, {"validation": most, "test": num_test}, seed)["validation"])


def _rows_of_splits(dataset: datasets.Dataset, sizes: dict[str, int], seed: int) -> dict[str, list[int]]:
    """Return the rows of each split, with at most `sizes` rows. All other rows are for training."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, source in enumerate(column_texts(dataset, "source")):
        groups[source.strip()].append(row)
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for source in sorted(groups, key=lambda source: hashlib.blake2b(f"{seed}\t{source}".encode()).digest()):
        rows = groups[source]
        split = next((name for name, size in sizes.items() if len(splits[name]) + len(rows) <= size), "train")
        splits[split].extend(rows)
    return splits


# Profile

# More pairs change the numbers little.
SAMPLE_PAIRS = 50_000
# Words of a closed set are symbols, such as phonemes or commands: the next word of unseen text is hardly ever new.
_MAX_NEW_SYMBOLS, _MAX_SYMBOLS = 1e-3, 1000
# Share of texts that are not longer than `long_letters` and `long_words`.
_LONG = 0.999


@dataclass(frozen=True)
class SideProfile:
    """Texts of one side. Words are split at white space.

    Attributes:
        repetitions: Mean number of times that a text occurs.
        mean_characters: Mean length of a text.
        long_letters: Length that 1 text of 1,000 exceeds, in characters that Unicode has taken apart (NFD).
        long_bytes: The same in bytes of UTF-8.
        mean_words: Mean number of words of a text.
        long_words: Number of words that 1 text of 1,000 exceeds.
        alphabet: Different characters.
        num_letters: Number of different characters that Unicode has taken apart.
        is_decomposed: True if no text has a character that Unicode can take apart.
        num_words: Number of different words.
        new_words: Probability that the next word is new: the share of words that occurred once (Good 1953).
    """

    repetitions: float
    mean_characters: float
    long_letters: int
    long_bytes: int
    mean_words: float
    long_words: int
    alphabet: frozenset[str]
    num_letters: int
    is_decomposed: bool
    num_words: int
    new_words: float

    @property
    def is_closed(self) -> bool:
        """True if the words are symbols of a closed set."""
        return self.new_words < _MAX_NEW_SYMBOLS and self.num_words <= _MAX_SYMBOLS

    @classmethod
    def of(cls, texts: Sequence[str]) -> "SideProfile":
        """Measure the texts of one side."""
        words = [text.split() for text in texts]
        counts = Counter(word for line in words for word in line)
        letters = [unicodedata.normalize("NFD", text) for text in texts]
        characters, lengths = [len(text) for text in texts], [len(line) for line in words]
        return cls(
            repetitions=len(texts) / len(set(texts)),
            mean_characters=float(np.mean(characters)),
            long_letters=int(np.quantile([len(text) for text in letters], _LONG)),
            long_bytes=int(np.quantile([len(text.encode()) for text in texts], _LONG)),
            mean_words=float(np.mean(lengths)),
            long_words=int(np.quantile(lengths, _LONG)),
            alphabet=frozenset().union(*texts),
            num_letters=len(frozenset().union(*letters)),
            is_decomposed=letters == list(texts),
            num_words=len(counts),
            new_words=sum(count == 1 for count in counts.values()) / max(1, counts.total()),
        )


@dataclass(frozen=True)
class CorpusProfile:
    """Training pairs.

    Attributes:
        pairs: Number of pairs.
        source: The sources.
        target: The targets.
        shared_characters: Share of the targets' visible characters that occur in the sources too.
    """

    pairs: int
    source: SideProfile
    target: SideProfile
    shared_characters: float

    @classmethod
    def of(cls, train: datasets.Dataset) -> "CorpusProfile":
        """Measure training pairs; of many pairs, those at regular distances."""
        sample = train.select(range(0, len(train), -(-len(train) // SAMPLE_PAIRS)))
        source, target = (SideProfile.of(sample[side][:]) for side in SIDES)
        counts = Counter(character for text in sample["target"][:] for character in text if not character.isspace())
        shared = sum(count for character, count in counts.items() if character in source.alphabet)
        return cls(len(train), source, target, shared / max(1, counts.total()))
