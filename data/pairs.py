"""Raw pairs: read files or Hub data sets into a data set with the text columns `source` and `target`, and report the use."""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from metaphrase.data.pair_files import READERS, SIDES, Column, PairProblem, Record, read_arrow, read_parallel
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS

logger = logging.getLogger(__name__)

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
        invalid_utf8: "error", or "skip" to drop and count pairs that are not UTF-8.
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
