"""Raw pairs in Arrow tables: of Parquet files and of data sets."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaphrase.training.pair_files import Column, PairProblem, Record, check_columns, column_names


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
