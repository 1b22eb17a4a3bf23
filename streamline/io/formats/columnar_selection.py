"""What is wanted of a file of columns, and as Python's values. Imports pyarrow: keep it out of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import acero

from streamline.core.lazy_numpy import np
from streamline.errors import DataError

ROW = "streamline: row"
"""The column in which rows keep their number while they are filtered."""

SHOWN_NAMES = 20
"""Names of columns that a message lists."""


@dataclass(frozen=True)
class Selection:
    """What becomes of a decoded batch.

    Attributes:
      read: what is decoded: dotted names of columns, those that the filter looks at included.
      schema: of what comes out.
      expression: rows for which it isn't true are left out; None: all are wanted.
    """

    read: tuple[str, ...]
    schema: Any
    expression: Any = None

    def of(self, batch: Any, first: int) -> tuple[Any, Sequence[int]]:
        """Return what is wanted of a batch that begins at row `first`, and the row number after each of its rows."""
        after: Sequence[int] = range(first + 1, first + 1 + batch.num_rows)
        if self.expression is not None:
            batch, rows = _filter(batch, self.expression)
            after = [after[row] for row in rows]
        if batch.schema.names != self.schema.names:
            batch = batch.select(self.schema.names)
        if not batch.schema.equals(self.schema):
            batch = batch.cast(self.schema)  # structs without the fields that only the filter looks at
        return batch, after


def selection_of(
    path: str,
    schema: Any,
    project: Callable[[list[str]], Any],
    columns: Sequence[str] | None,
    expression: Any,
    leaves: Sequence[str] = (),
) -> Selection:
    """Return what is wanted of a file.

    Args:
      project: returns the schema of some of its columns.
      leaves: dotted names of all that can be asked for, where not only whole columns can be decoded.
    """
    tops = top_columns(path, schema, leaves or schema.names, columns)
    read = list(columns) if leaves and columns is not None else tops
    found = project(read)
    wanted = pa.schema([found.field(name) for name in tops])
    if expression is not None:
        read = [*dict.fromkeys([*read, *filter_columns(path, schema, expression)])]
    return Selection(tuple(read), wanted, expression)


def _filter(batch: Any, expression: Any) -> tuple[Any, list[int]]:
    numbered = batch.append_column(ROW, pa.array(np.arange(batch.num_rows)))
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([numbered]))),
            acero.Declaration("filter", acero.FilterNodeOptions(expression)),
        ]
    )
    table = plan.to_table(use_threads=False)
    rows = table.column(ROW).to_numpy().tolist()
    if len(rows) == batch.num_rows:
        return batch, rows
    found = table.drop_columns([ROW]).combine_chunks().to_batches()
    return (found[0] if found else batch.slice(0, 0)), rows


def python_rows(data: Any) -> list[Any]:
    """Return a record batch, a table or an array as `to_pylist()` does, with values as `python_values`."""
    if not hasattr(data, "schema"):
        return python_values(data)
    names, columns = data.schema.names, map(python_values, data.columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or data.to_pylist()


def python_values(array: Any) -> list[Any]:
    """Return a pyarrow array as `to_pylist()` does, but for nanoseconds, whose types there depend on pandas.

    Whole microseconds are a `datetime`, `timedelta` or `time`; else it is a `numpy.datetime64` (of UTC, if it has a
    zone) or a `numpy.timedelta64` (of a time of day, since midnight).
    """
    kind = array.type
    if "[ns" not in str(getattr(kind, "storage_type", kind)):
        return array.to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_struct(kind):
        names, columns = [field.name for field in kind], map(python_values, array.flatten())
        rows = zip(array.is_valid().to_pylist(), zip(*columns, strict=True), strict=True)
        return [dict(zip(names, row, strict=True)) if valid else None for valid, row in rows]
    if getattr(kind, "unit", None) != "ns":
        return [_of_container(value) for value in array]
    moments = pa.types.is_timestamp(kind)
    spans = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
    whole, exact = (pa.timestamp("us", kind.tz), np.datetime64) if moments else (spans, np.timedelta64)
    both = zip(array.cast(pa.int64()).to_pylist(), array.cast(whole, safe=False).to_pylist(), strict=True)
    return [exact(number, "ns") if number is not None and number % 1000 else short for number, short in both]


def _of_container(scalar: Any) -> Any:
    if isinstance(scalar, pa.MapScalar) and scalar.is_valid:
        return list(zip(*map(python_values, scalar.values.flatten()), strict=True))
    if isinstance(scalar, pa.ListScalar) and scalar.is_valid:
        return python_values(scalar.values)
    value = getattr(scalar, "value", None)  # of a dictionary, an extension type
    return python_values(pa.array([value], value.type))[0] if isinstance(value, pa.Scalar) else scalar.as_py()


def top_columns(path: str, schema: Any, leaves: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    """Return the names of the top columns that are wanted, in the order in which they are to come.

    Args:
      leaves: dotted names of all that can be asked for, but for what they begin with.
      columns: dotted names; None: all.
    """
    names: list[str] = schema.names
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has {names.count(double)} columns that are called {double!r}: expected one of a name")
    if columns is None:
        return list(names)
    known = {name for leaf in leaves for name in within(leaf)}
    order = {name: index for index, name in enumerate(names)}
    found: dict[str, None] = {}
    for column in columns:
        if column not in known:
            raise DataError(f"{path} has no column {column!r}: it has {_names_text(names)}")
        found[min((name for name in within(column) if name in order), key=order.__getitem__)] = None
    return list(found)


def within(name: str) -> Iterator[str]:
    """Yield what a dotted name lies in: "a.b" in "a" and in itself, which may be the name of one column."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)
    yield name


def filter_columns(path: str, schema: Any, expression: Any) -> list[str]:
    """Return the top columns that a filter looks at."""
    text = str(expression)
    near = [name for name in schema.names if name in text]
    error = _unfit(schema, near, expression)
    if error is not None:
        whole = _unfit(schema, schema.names, expression)
        raise DataError(
            f"{path}: the filter {text} can't be applied to its columns {_names_text(schema.names)}: {error}"
        ) from (whole or error)
    for name in list(near):
        without = [other for other in near if other != name]
        if _unfit(schema, without, expression) is None:
            near = without
    return near


def _unfit(schema: Any, names: Sequence[str], expression: Any) -> Exception | None:
    """Return why a filter can't be applied to a table of these columns; None: it can."""
    empty = pa.schema([schema.field(name) for name in names]).empty_table()
    try:
        empty.append_column(ROW, pa.array([], pa.int64())).filter(expression)
    except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
        return error
    return None


def schema_difference(first: Any, other: Any) -> str | None:
    """Return how the columns of `other` differ from those of `first`, for a person; None: they don't."""
    for field in first:
        if other.get_field_index(field.name) < 0:
            return f"column {field.name!r} ({field.type}) is missing"
        if not (now := other.field(field.name)).type.equals(field.type):
            return f"column {field.name!r} is {now.type}, expected {field.type}"
    for field in other:
        if first.get_field_index(field.name) < 0:
            return f"column {field.name!r} ({field.type}) is not expected"
    if first.names != other.names:
        return f"its columns are in another order: {_names_text(other.names)}, expected {_names_text(first.names)}"
    return None


def _names_text(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:SHOWN_NAMES]))
    return f"{shown} and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else shown or "none"
