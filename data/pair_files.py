"""Text files of raw pairs: each reader walks one layout and yields a pair or says what is wrong with it.

Lines end at LF or CRLF and nowhere else: U+2028, U+0085 and the like are ordinary characters of a sentence.
A byte-order mark at the start of a file is not part of its text. Files may be compressed (`.gz`).
A blank line holds no record in .csv and .jsonl files, as other readers of them have it; elsewhere it counts as a pair.

Raw pairs in Arrow tables: of Parquet files and of data sets.
"""

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaphrase.tokenization.texts import open_bytes

Column = str | int | None
DEFAULT_COLUMNS = ("source", "target")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PairProblem:
    """Stands in the place of a pair that cannot be used. `kind` is "invalid_utf8" or "malformed"."""

    kind: str
    message: str


Record = tuple[str, str] | PairProblem


class Line(NamedTuple):
    """One line of a file: 1-based number, offset of its first byte in the (decompressed) file, bytes with the ending."""

    number: int
    offset: int
    content: bytes


def read_lines(path: str) -> Iterator[Line]:
    """Yields the lines of a file with their endings."""
    offset = 0
    with open_bytes(path) as file:
        for number, content in enumerate(file, start=1):
            start = offset
            offset += len(content)
            if number == 1 and content.startswith(BYTE_ORDER_MARK):
                start, content = len(BYTE_ORDER_MARK), content.removeprefix(BYTE_ORDER_MARK)
            yield Line(number, start, content)


def count_lines(path: str) -> int:
    """Returns the number of lines; a last line without an ending counts."""
    with open_bytes(path) as file:
        return sum(1 for _ in file)


def without_ending(content: bytes) -> bytes:
    """Removes one LF or CRLF from the end of a line."""
    return content.removesuffix(b"\n").removesuffix(b"\r") if content.endswith(b"\n") else content


def _decode(path: str, line: Line) -> str | PairProblem:
    try:
        return without_ending(line.content).decode("utf-8")
    except UnicodeDecodeError as error:
        return _not_utf8(path, line.number, line.offset + error.start)


def _not_utf8(path: str, number: int, offset: int) -> PairProblem:
    return PairProblem(
        "invalid_utf8", f"{path} must be UTF-8 text, got an invalid byte in line {number} at byte offset {offset}."
    )


def read_parallel(source_file: str, target_file: str) -> Iterator[Record]:
    """Yields the pairs of two text files with one sentence per line.

    Raises:
        ValueError: If the files differ in their number of lines.
    """
    counts = count_lines(source_file), count_lines(target_file)
    if counts[0] != counts[1]:
        raise ValueError(
            "Parallel files must have the same number of lines, "
            f"got {counts[0]} in {source_file} and {counts[1]} in {target_file}."
        )
    for source_line, target_line in zip(read_lines(source_file), read_lines(target_file), strict=True):
        source, target = _decode(source_file, source_line), _decode(target_file, target_line)
        problem = next((side for side in (source, target) if isinstance(side, PairProblem)), None)
        yield problem or (source, target)


def read_tsv(path: str, source_column: Column, target_column: Column) -> Iterator[Record]:
    """Yields the pairs of a tab-separated file, in which a quote is a character like any other.

    The first line is a header when it holds both column names; columns given by number say that there is none.

    Raises:
        ValueError: If the columns asked for are not in the file.
    """
    wanted = (source_column, target_column)
    by_number = all(isinstance(column, int) for column in wanted)
    places, width = wanted, 2
    for line in read_lines(path):
        text = _decode(path, line)
        fields = without_ending(line.content).decode("utf-8", errors="replace").split("\t")
        if line.number == 1:
            names = tuple(
                default if name is None else name for name, default in zip(wanted, DEFAULT_COLUMNS, strict=True)
            )
            has_header = not by_number and all(name in fields for name in names)
            places = _tsv_places(path, fields, names, wanted, has_header)
            width = len(fields) if has_header or by_number else 2
            if has_header:
                continue
        if isinstance(text, PairProblem):
            yield text
        elif len(fields) != width:
            yield PairProblem(
                "malformed", f"{path} must have {width} tab-separated columns, got {len(fields)} in line {line.number}."
            )
        else:
            yield fields[places[0]], fields[places[1]]


def _tsv_places(
    path: str, fields: list[str], names: tuple[Column, ...], wanted: tuple[Column, ...], has_header: bool
) -> tuple[int, int]:
    if has_header:
        check_columns(path, names, fields)
        return fields.index(names[0]), fields.index(names[1])
    if all(isinstance(column, int) for column in wanted):
        if not all(0 <= place < len(fields) for place in wanted):
            raise ValueError(f"Columns {wanted} must exist in {path}, got {len(fields)} column(s) in its first line.")
        return wanted
    if any(column is not None for column in wanted):
        raise ValueError(
            f"The first line of {path} must be a header with the columns {names[0]!r} and {names[1]!r}, got {fields}. "
            "In a file without a header, columns are given by number, from 0."
        )
    if len(fields) > 2:
        raise ValueError(
            f"{path} has {len(fields)} columns in its first line: "
            "`source_column` and `target_column` must say which two to take."
        )
    return 0, 1


@contextmanager
def _unlimited_csv_fields() -> Iterator[None]:
    # The csv module refuses fields above 128 KiB, which a document to be summarized can exceed.
    previous = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(previous)


def read_csv(path: str, source_column: Column, target_column: Column) -> Iterator[Record]:
    """Yields the pairs of a comma-separated file (RFC 4180) whose first row names the columns. Blank lines are no rows.

    Raises:
        ValueError: If a column is not in the header, or the quoting is broken, after which no row can be trusted.
    """
    undecodable: list[PairProblem] = []

    def decoded_lines() -> Iterator[str]:
        for line in read_lines(path):
            try:
                yield line.content.decode("utf-8")
            except UnicodeDecodeError as error:
                undecodable.append(_not_utf8(path, line.number, line.offset + error.start))
                yield line.content.decode("utf-8", errors="surrogateescape")

    reader = csv.reader(decoded_lines(), strict=True)
    places, width = None, 0
    try:
        with _unlimited_csv_fields():
            for row in reader:
                if not row:  # A blank line; one with an empty field would be quoted.
                    continue
                if places is None:
                    names = column_names(source_column, target_column)
                    check_columns(path, names, row)
                    places, width = (row.index(names[0]), row.index(names[1])), len(row)
                elif undecodable:
                    yield undecodable[0]
                elif len(row) != width:
                    message = f"{path} must have {width} columns, got {len(row)} in line {reader.line_num}."
                    yield PairProblem("malformed", message)
                else:
                    yield row[places[0]], row[places[1]]
                undecodable.clear()
    except csv.Error as error:
        raise ValueError(f"{path} must be quoted as RFC 4180 says, got in line {reader.line_num}: {error}.") from error


def column_names(source_column: Column, target_column: Column) -> tuple[str, str]:
    given = (source_column, target_column)
    names = tuple(default if name is None else name for name, default in zip(given, DEFAULT_COLUMNS, strict=True))
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"`source_column` and `target_column` must be names but for a .tsv file, got {given}.")
    return names


def check_columns(where: str, names: tuple[str, ...], present: list[str]) -> None:
    if missing := [name for name in names if name not in present]:
        raise ValueError(
            f"`source_column` and `target_column` must name columns of {where}, got {missing[0]!r}; it has {present}."
        )
    if repeated := [name for name in names if present.count(name) > 1]:
        raise ValueError(f"Column {repeated[0]!r} must occur once in {where}, got {present}.")


def read_json(path: str, source_column: Column, target_column: Column) -> Iterator[Record]:
    """Yields the pairs of a file with one JSON object per line, blank lines aside, or with one JSON array of objects.

    An object holds the columns itself, or below the key `translation` with language codes as column names.

    Raises:
        ValueError: If a JSON array cannot be parsed.
    """
    names = column_names(source_column, target_column)
    if path.removesuffix(".gz").endswith(".json") and _starts_with_bracket(path):
        yield from _read_json_array(path, names)
        return
    for line in read_lines(path):
        text = _decode(path, line)
        if isinstance(text, PairProblem):
            yield text
            continue
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:  # Python refuses integers of thousands of digits too.
            yield PairProblem(
                "malformed", f"{path} must hold one JSON object per line, got in line {line.number}: {error}"
            )
            continue
        yield _from_mapping(record, names, f"{path}, line {line.number}")


def _starts_with_bracket(path: str) -> bool:
    return next((line.content.lstrip()[:1] for line in read_lines(path) if line.content.strip()), b"") == b"["


def _read_json_array(path: str, names: tuple[str, str]) -> Iterator[Record]:
    with open_bytes(path) as file:
        content = file.read().removeprefix(BYTE_ORDER_MARK)
    try:
        # Undecodable bytes become lone surrogates, which the check of each value finds.
        records = json.loads(content.decode("utf-8", errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON array of objects, got: {error}") from error
    for number, record in enumerate(records, start=1):
        yield _from_mapping(record, names, f"{path}, record {number}")


def _from_mapping(record: Any, names: tuple[str, str], where: str) -> Record:
    if not isinstance(record, dict):
        return PairProblem("malformed", f"{where} must be a JSON object, got {type(record).__name__}.")
    nested = record.get("translation")
    row = nested if isinstance(nested, dict) and not all(name in record for name in names) else record
    values = []
    for name in names:
        value = row.get(name)
        if not isinstance(value, str):
            given = f"one of type {type(value).__name__}" if name in row else f"the keys {list(row)}"
            return PairProblem("malformed", f"{where} must hold a text {name!r}, got {given}.")
        if not _is_encodable(value):
            return PairProblem(
                "invalid_utf8", f"{where} must hold text that UTF-8 can hold, got {value!a} as {name!r}."
            )
        values.append(value)
    return values[0], values[1]


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def read_parquet(path: str, source_column: Column, target_column: Column) -> Iterator[Record]:
    """Yields the pairs of a Parquet file, with flat columns or a `translation` struct.

    Raises:
        ValueError: If the file is broken, or a column is missing, occurs twice or holds no text.
    """
    names = column_names(source_column, target_column)
    row = 0
    for batch in _parquet_batches(path, names):
        yield from read_arrow(batch, names, path, row)
        row += batch.num_rows


def _parquet_batches(path: str, names: tuple[str, str]) -> Iterator[pa.RecordBatch]:
    """Reads the columns that hold the pairs, and no others."""
    try:
        file = pq.ParquetFile(path)
        columns = _columns_with_pairs(file.schema_arrow, names)
        check_columns(path, columns, file.schema_arrow.names)
        yield from file.iter_batches(columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # Of the file system, which names the file.
            raise
        raise ValueError(f"{path} must be a whole Parquet file, got: {error}") from error


def _columns_with_pairs(schema: pa.Schema, names: tuple[str, str]) -> tuple[str, ...]:
    """Those asked for, or the struct `translation` that may hold them."""
    present = schema.names
    if all(name in present for name in names) or "translation" not in present:
        return names
    is_struct = pa.types.is_struct(schema.field(present.index("translation")).type)
    return ("translation",) if is_struct else names


def read_arrow(
    table: pa.Table | pa.RecordBatch, names: tuple[str, str], where: str, first_row: int
) -> Iterator[Record]:
    """Yields the pairs of an Arrow table, with flat columns or a `translation` struct.

    Raises:
        ValueError: If a column is missing, occurs twice or holds no text.
    """
    present, found = table.schema.names, _columns_with_pairs(table.schema, names)
    check_columns(where, found, present)
    # By number, since names that are not asked for may occur twice.
    columns = [table.column(present.index(name)) for name in found]
    if found != names:
        nested = columns[0]
        fields = [field.name for field in nested.type]
        check_columns(where, names, fields)
        columns = [pc.struct_field(nested, [fields.index(name)]) for name in names]
    sides = [_as_bytes(column, name, where) for column, name in zip(columns, names, strict=True)]
    for row, values in enumerate(zip(*sides, strict=True), start=first_row):
        if None in values:
            missing = names[values.index(None)]
            yield PairProblem("malformed", f"{where}, row {row} must hold a text {missing!r}, got none.")
            continue
        try:
            yield values[0].decode("utf-8"), values[1].decode("utf-8")
        except UnicodeDecodeError as error:
            yield PairProblem("invalid_utf8", f"{where}, row {row} must be UTF-8 text, got an {error.reason}.")


def _as_bytes(column: pa.Array | pa.ChunkedArray, name: str, where: str) -> list[bytes | None]:
    # As bytes, because Arrow lets strings through that are not UTF-8.
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_kind(column.type) for is_kind in kinds):
        raise ValueError(f"Column {name!r} of {where} must hold text, got {column.type}.")
    return column.cast(pa.large_binary()).to_pylist()
