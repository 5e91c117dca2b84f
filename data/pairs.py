"""Raw pairs: from files, the Hub or a folder to a data set with the text columns `source` and `target`."""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from metaphrase.data.pair_files import (
    Column,
    PairProblem,
    Record,
    column_names,
    read_arrow,
    read_csv,
    read_json,
    read_parallel,
    read_parquet,
    read_tsv,
)
from metaphrase.data.reports import DataReport

logger = logging.getLogger(__name__)

Policy = Literal["error", "skip"]
# Name of the task of a pair, where a run has several.
TASK_COLUMN = "task"
READERS = {".tsv": read_tsv, ".csv": read_csv, ".jsonl": read_json, ".json": read_json, ".parquet": read_parquet}
RECORD_FEATURES = datasets.Features({name: datasets.Value("string") for name in ("source", "target", "problem")})
# Part of every cache key: raise it whenever the same file would be read into other pairs.
CACHE_VERSION = 2
# Row by row, `datasets` takes more than a hundred times as long.
_ROWS_PER_READ = 5000


def load_pairs(
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
    report: DataReport | None = None,
    cache_dir: str | Path | None = None,
) -> datasets.Dataset:
    """Reads the raw pairs of one split from exactly one place.

    Args:
        file: A `.tsv`, `.csv`, `.jsonl`, `.json` or `.parquet` file; all but Parquet may end in `.gz`.
        source_file: A text file with one source per line, read together with `target_file`.
        target_file: A text file with one target per line.
        dataset_name: A data set on the Hub, or a folder that `datasets.load_dataset` understands.
        dataset_config_name: Its configuration.
        dataset_split: Its split.
        source_column: Name of the source column, or its number from 0 in a `.tsv` file without a header. By default
            `source`, and the first of two columns of a `.tsv` file without a header.
        target_column: Likewise for the target.
        source_prefix: Text put before each source, such as `summarize: `. An empty source stays empty, so that it is
            still recognized as such.
        max_samples: The number of good pairs to take, from the beginning.
        invalid_utf8: What to do with a pair that is not UTF-8 text: "error", or "skip" and count.
        malformed: What to do with a line of a wrong number of columns or a missing value: "error", or "skip" and count.
        report: Receives the counts, in addition to what it holds.
        cache_dir: Where `datasets` keeps what was read; its own choice by default. A changed file is read again.

    Raises:
        ValueError: If not exactly one place is named, an argument is out of range, the file is broken, or it holds
            no good pair.
        FileNotFoundError: If a file does not exist.
    """
    check_place(file, source_file, target_file, dataset_name, max_samples, invalid_utf8, malformed)
    policies = {"invalid_utf8": invalid_utf8, "malformed": malformed}
    if dataset_name is not None:
        where = f"{dataset_name} ({dataset_split})"
        dataset = datasets.load_dataset(
            dataset_name, dataset_config_name, split=dataset_split, cache_dir=_as_text(cache_dir)
        )
        records = _records_of_dataset(dataset, column_names(source_column, target_column), where, policies)
    else:
        paths = tuple(str(path) for path in (file, source_file, target_file) if path is not None)
        where = " and ".join(paths)
        records = _records_of_files(paths, (source_column, target_column), policies, _as_text(cache_dir))
    report = report if report is not None else DataReport()
    pairs = _good_pairs(records, where, report)
    if max_samples is not None and max_samples < len(pairs):
        report.beyond_max_samples += len(pairs) - max_samples
        pairs = pairs.select(range(max_samples))
    return _with_prefix(pairs, source_prefix) if source_prefix else pairs


def column_texts(dataset: datasets.Dataset, name: str) -> Iterator[str]:
    """Yields the texts of a column, of which a few thousand are in memory at a time."""
    column = dataset[name]
    for start in range(0, len(dataset), _ROWS_PER_READ):
        yield from column[start : start + _ROWS_PER_READ]


def _as_text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def check_place(
    file: str | Path | None,
    source_file: str | Path | None,
    target_file: str | Path | None,
    dataset_name: str | None,
    max_samples: int | None,
    invalid_utf8: str,
    malformed: str,
) -> None:
    if (source_file is None) != (target_file is None):
        raise ValueError(
            f"`source_file` and `target_file` must be given together, got {source_file} and {target_file}."
        )
    places = {"file": file, "source_file": source_file, "dataset_name": dataset_name}
    given = [name for name, value in places.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            "Pairs must come from exactly one of `file`, `source_file` with `target_file`, and `dataset_name`, "
            f"got {' and '.join(given) or 'none'}."
        )
    for name, policy in (("invalid_utf8", invalid_utf8), ("malformed", malformed)):
        if policy not in ("error", "skip"):
            raise ValueError(f"`{name}` must be 'error' or 'skip', got {policy!r}.")
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"`max_samples` must be at least 1, got {max_samples}.")
    for path in (file, source_file, target_file):
        if path is not None and not Path(path).is_file():
            raise FileNotFoundError(f"There is no file {path}.")
    if file is not None and _layout(str(file)) not in READERS:
        raise ValueError(f"`file` must end in one of {', '.join(READERS)} (or with .gz after it), got {file}.")


def _layout(path: str) -> str:
    suffix = Path(path.removesuffix(".gz")).suffix
    return "" if suffix == ".parquet" and path.endswith(".gz") else suffix


def _records_of_files(
    paths: tuple[str, ...], columns: tuple[Column, Column], policies: dict[str, str], cache_dir: str | None
) -> datasets.Dataset:
    # Size and time of change are part of the arguments and so of the cache key: a changed file is read again.
    stamps = tuple(
        (str(Path(path).resolve()), Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in paths
    )
    arguments = {"paths": paths, "columns": columns, "policies": policies, "stamps": stamps, "version": CACHE_VERSION}
    try:
        return datasets.Dataset.from_generator(
            generate_records, features=RECORD_FEATURES, cache_dir=cache_dir, gen_kwargs=arguments
        )
    except DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ValueError | OSError | EOFError):
            raise cause from None
        raise


def generate_records(
    paths: tuple[str, ...], columns: tuple[Column, Column], policies: dict[str, str], stamps: Any, version: int
) -> Iterator[dict[str, str]]:
    """Yields the records of one file, or of two parallel ones. `stamps` and `version` only make the cache key.

    Raises:
        ValueError: At the first bad pair that `policies` does not allow to skip, or if there is no pair at all.
    """
    records = read_parallel(*paths) if len(paths) == 2 else READERS[_layout(paths[0])](paths[0], *columns)
    is_empty = True
    for record in records:
        is_empty = False
        yield as_row(record, policies)
    if is_empty:
        raise ValueError(f"{' and '.join(paths)} must hold at least one pair, got none.")


def as_row(record: Record, policies: dict[str, str]) -> dict[str, str]:
    if not isinstance(record, PairProblem):
        return {"source": record[0], "target": record[1], "problem": ""}
    if policies[record.kind] == "error":
        raise ValueError(f"{record.message} `{record.kind}: skip` drops and counts such pairs.")
    return {"source": "", "target": "", "problem": record.kind}


def _records_of_dataset(
    dataset: datasets.Dataset, names: tuple[str, str], where: str, policies: dict[str, str]
) -> datasets.Dataset:
    def to_records(table: pa.Table, rows: list[int]) -> pa.Table:
        records = [as_row(record, policies) for record in read_arrow(table, names, where, rows[0])]
        return pa.Table.from_pylist(records, schema=RECORD_FEATURES.arrow_schema)

    fingerprint = Hasher.hash((dataset._fingerprint, names, where, sorted(policies.items()), CACHE_VERSION))
    return (
        dataset.with_format("arrow")
        .map(
            to_records,
            batched=True,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=RECORD_FEATURES,
            new_fingerprint=fingerprint,
            desc="Reading pairs",
        )
        .with_format(None)
    )


def _good_pairs(records: datasets.Dataset, where: str, report: DataReport) -> datasets.Dataset:
    problems = records.with_format("numpy")["problem"][:]
    counts = Counter(problems.tolist())
    report.read += len(records)
    report.malformed += counts["malformed"]
    report.invalid_utf8 += counts["invalid_utf8"]
    if not counts[""]:
        raise ValueError(f"{where} must hold at least one good pair, got none. {report}")
    if counts[""] < len(records):
        logger.warning(
            "%s: skipped %d malformed pairs and %d that are not UTF-8.",
            where,
            counts["malformed"],
            counts["invalid_utf8"],
        )
        records = records.select((problems == "").nonzero()[0])
    return records.remove_columns("problem")


def _with_prefix(pairs: datasets.Dataset, prefix: str) -> datasets.Dataset:
    def prepend(sources: list[str]) -> dict[str, list[str]]:
        return {"source": [prefix + source if source.strip() else source for source in sources]}

    return pairs.map(
        prepend,
        batched=True,
        input_columns="source",
        new_fingerprint=Hasher.hash((pairs._fingerprint, prefix, CACHE_VERSION)),
        desc="Adding source_prefix",
    )


def split_pairs(
    dataset: datasets.Dataset, num_validation: int, num_test: int = 0, seed: int = 42
) -> datasets.DatasetDict:
    """Takes a validation and a test set out of one data set, so that no source text stands in two of them.

    Pairs with the same source (but for white space around it) move together. Which sources are held out depends on the
    seed and their text alone: neither the order of the pairs nor a new version of a library changes it.

    Returns:
        `train`, and `validation` and `test` where their number is not 0; each keeps the order of the pairs.

    Raises:
        ValueError: If a number is negative, nothing would be left for training, or the groups cannot make up exactly
            the numbers asked for.
    """
    if num_validation < 0 or num_test < 0 or num_validation + num_test >= len(dataset):
        raise ValueError(
            f"`num_validation` and `num_test` must be at least 0 and leave some of the {len(dataset)} pairs for training, "
            f"got {num_validation} and {num_test}."
        )
    groups: dict[str, list[int]] = defaultdict(list)
    for row, source in enumerate(column_texts(dataset, "source")):
        groups[source.strip()].append(row)
    order = sorted(groups, key=lambda source: hashlib.blake2b(f"{seed}\t{source}".encode()).digest())
    held_out: dict[str, list[int]] = {"validation": [], "test": []}
    train: list[int] = []
    sizes = {"validation": num_validation, "test": num_test}
    for source in order:
        rows = groups[source]
        fitting = [name for name in held_out if len(held_out[name]) + len(rows) <= sizes[name]]
        (held_out[fitting[0]] if fitting else train).extend(rows)
    for name, rows in held_out.items():
        if len(rows) != sizes[name]:
            raise ValueError(
                f"`num_{name}` must be a number that whole groups of pairs with one source can make up, "
                f"got {sizes[name]}; {len(rows)} is possible."
            )
    splits = {"train": train, **{name: rows for name, rows in held_out.items() if rows}}
    return datasets.DatasetDict({name: dataset.select(sorted(rows)) for name, rows in splits.items()})
