"""Readers of raw pairs: text, TSV, CSV, JSON and Parquet files, and Arrow tables.

Each reader yields a pair or the problem with it. Lines end at LF or CRLF only: U+2028, U+0085 and the like are characters of a
sentence. A byte-order mark at the start of a file is skipped. Files may be compressed (`.gz`). Blank lines are skipped in .csv
and .jsonl files; in other files a blank line counts as a pair.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS, count_lines, read_lines

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
            source, target, width = 0, 1, 2
            if all(name in fields for name in names):
                check_columns(path, names, fields)
                source, target, width = *map(fields.index, names), len(fields)
                continue
            _check_no_header(path, fields, names, columns)
            if columns != (None, None):
                source, target, width = *columns, len(fields)
        if line.problem:
            yield PairProblem(line.kind, line.problem)
        elif len(fields) != width:
            yield PairProblem(
                "malformed", f"{path} must have {width} tab-separated columns, got {len(fields)} in line {line.number}."
            )
        else:
            yield fields[source], fields[target]


def _check_no_header(path: str, fields: list[str], names: Columns, columns: Columns) -> None:
    if all(isinstance(column, int) for column in columns):
        if not all(0 <= column < len(fields) for column in columns):
            raise ValueError(f"Columns {columns} must exist in {path}, got {len(fields)} column(s) in its first line.")
    elif any(column is not None for column in columns):
        raise ValueError(
            f"The first line of {path} must be a header with the columns {names[0]!r} and {names[1]!r}, got {fields}. "
            "Give columns by number, from 0, if the file has no header."
        )
    elif len(fields) > 2:
        raise ValueError(
            f"{path} must have two columns, got {len(fields)} in its first line. Set `source_column` and `target_column` to "
            "names in its header, or to numbers from 0."
        )


def read_csv(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a comma-separated file (RFC 4180) whose first row names the columns. Blank lines are skipped.

    Raises:
        ValueError: If a column is not in the header, or the quoting is broken or a text too long: no later row could be
            trusted.
    """
    problems: list[str] = []  # of the lines of the present row

    def lines() -> Iterator[str]:
        for line in read_lines(path, limit):
            if line.kind == "line_too_long":
                raise ValueError(line.problem)
            if line.problem:
                problems.append(line.problem)
            yield line.text

    names, header = column_names(columns), None
    reader = csv.reader(lines(), strict=True)
    # A quoted text may have many lines.
    previous_limit = csv.field_size_limit(min(limit, sys.maxsize))
    try:
        for row in reader:
            if not row:
                continue
            if header is None:
                check_columns(path, names, header := row)
                source, target = map(header.index, names)
            elif problems:
                yield PairProblem("invalid_utf8", problems[0])
            elif len(row) != len(header):
                message = f"{path} must have {len(header)} columns, got {len(row)} in line {reader.line_num}."
                yield PairProblem("malformed", message)
            else:
                yield row[source], row[target]
            problems.clear()
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
    if missing := [name for name in names if name not in present]:
        raise ValueError(
            f"`source_column` and `target_column` must name columns of {where}, got {missing[0]!r}; it has {present}."
        )
    if repeated := [name for name in names if present.count(name) > 1]:
        raise ValueError(f"Column {repeated[0]!r} must occur once in {where}, got {present}.")


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
            yield from _read_json_array(path, names, limit)
            return
    for line in read_lines(path, limit):
        if line.problem:
            yield PairProblem(line.kind, line.problem)
            continue
        if not line.text.strip():
            continue
        try:
            record = json.loads(line.text)
        except (ValueError, RecursionError) as error:  # Also for integers of thousands of digits.
            yield PairProblem(
                "malformed", f"{path} must hold one JSON object per line, got in line {line.number}: {error}"
            )
            continue
        yield _from_mapping(record, names, f"{path}, line {line.number}", limit)


def _read_json_array(path: str, names: tuple[str, str], limit: int) -> Iterator[Record]:
    try:
        # Invalid bytes are lone surrogates, which `_from_mapping` detects.
        records = json.loads("".join(line.text for line in read_lines(path, sys.maxsize)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON array of objects, got: {error}") from error
    for number, record in enumerate(records, start=1):
        yield _from_mapping(record, names, f"{path}, record {number}", limit)


def _from_mapping(record: Any, names: tuple[str, str], where: str, limit: int) -> Record:
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
            return PairProblem("invalid_utf8", f"{where} must hold valid Unicode, got {value!a} as {name!r}.")
        values.append(value)
    return _check_lengths(values, where, limit)


def _check_lengths(values: Sequence[str], where: str, limit: int) -> Record:
    if max(map(len, values)) <= limit:
        return values[0], values[1]
    text = (
        f"{where} must hold texts of at most {limit} characters, got more. Set `max_line_characters` higher to read it."
    )
    return PairProblem("line_too_long", text)


def read_parquet(path: str, columns: Columns, limit: int = MAX_LINE_CHARACTERS) -> Iterator[Record]:
    """Yield the pairs of a Parquet file, with flat columns or a `translation` struct.

    Raises:
        ValueError: If the file is broken, or a column is missing, occurs twice or holds no text.
    """
    names, row = column_names(columns), 0
    try:
        file = pq.ParquetFile(path)
        top_names = _columns_with_pairs(file.schema_arrow, names)
        check_columns(path, top_names, file.schema_arrow.names)
        for batch in file.iter_batches(columns=list(top_names)):
            yield from read_arrow(batch, columns, path, row, limit)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # An error of the file system already names the file.
            raise
        raise ValueError(f"{path} must be a whole Parquet file, got: {error}") from error


def _columns_with_pairs(schema: pa.Schema, names: tuple[str, str]) -> tuple[str, ...]:
    """Return `names`, or the struct `translation` if the columns are inside it."""
    is_flat = set(names) <= set(schema.names) or "translation" not in schema.names
    return names if is_flat or not pa.types.is_struct(schema.field("translation").type) else ("translation",)


def read_arrow(
    table: pa.Table | pa.RecordBatch, columns: Columns, where: str, first_row: int, limit: int = MAX_LINE_CHARACTERS
) -> Iterator[Record]:
    """Yield the pairs of an Arrow table, with flat columns or a `translation` struct.

    Raises:
        ValueError: If a column is missing, occurs twice or holds no text.
    """
    names = column_names(columns)
    top_names = _columns_with_pairs(table.schema, names)
    check_columns(where, top_names, table.schema.names)
    sides = [table.column(name) for name in top_names]
    if top_names != names:
        [nested] = sides
        check_columns(where, names, [field.name for field in nested.type])
        sides = [pc.struct_field(nested, name) for name in names]
    sides = [_as_bytes(column, name, where) for column, name in zip(sides, names, strict=True)]
    for row, values in enumerate(zip(*sides, strict=True), start=first_row):
        if None in values:
            missing = names[values.index(None)]
            yield PairProblem("malformed", f"{where}, row {row} must hold a text {missing!r}, got none.")
            continue
        try:
            yield _check_lengths([value.decode("utf-8") for value in values], f"{where}, row {row}", limit)
        except UnicodeDecodeError as error:
            yield PairProblem("invalid_utf8", f"{where}, row {row} must be UTF-8 text, got an {error.reason}.")


def _as_bytes(column: pa.Array | pa.ChunkedArray, name: str, where: str) -> list[bytes | None]:
    # Arrow accepts strings that are not UTF-8.
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_kind(column.type) for is_kind in kinds):
        raise ValueError(f"Column {name!r} of {where} must hold text, got {column.type}.")
    return column.cast(pa.large_binary()).to_pylist()


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
