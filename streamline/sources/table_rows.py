"""The rows of other libraries' tables: pandas, polars, pyarrow and datasets, none of which is imported here.

A row is what is at a position: a dict of Python values by column, as of `read_parquet`; of a single column, the value.
(A table's own `[i]` is a column, a row by its label, or a table of one row; its iterator gives names or columns.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from streamline.core.lazy_numpy import np
from streamline.errors import PlanError, PlanTypeError


class TableRows:
    """Reads a `table`, which it never changes, by position, as a map-style dataset is read."""

    def __init__(self, table: Any, kind: tuple[str, str]) -> None:
        self.table = table
        self._kind = kind
        _check_names(table)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the rows at these positions, in this order."""
        whole = isinstance(indices, range) and indices.step == 1
        found: list[Any] = self.rows(slice(indices[0], indices[-1] + 1) if whole and indices else list(indices))
        return found

    def rows(self, wanted: Any) -> Any:
        """Return a list of the rows of a slice, or at these positions."""
        return KINDS[self._kind][1](self.table, wanted)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.table, self._kind)


class _ArrowRows(TableRows):
    """Reads chunk by chunk: pyarrow's own `take` of a chunked column may copy all of it first."""

    def __init__(self, table: Any, kind: tuple[str, str]) -> None:
        super().__init__(table, kind)
        cut = getattr(table, "to_batches", None)
        self._chunks = cut() if cut is not None else getattr(table, "chunks", [table])
        self._starts = np.cumsum([0, *map(len, self._chunks)])

    def rows(self, wanted: Any) -> Any:
        from streamline.io.formats.columnar_selection import python_rows  # imports pyarrow

        positions = np.arange(wanted.start, wanted.stop) if isinstance(wanted, slice) else np.asarray(wanted, np.int64)
        places = np.searchsorted(self._starts, positions, side="right") - 1
        rows: list[Any] = [None] * len(positions)
        for place in np.unique(places).tolist():
            inside = np.flatnonzero(places == place)
            chunk, local = self._chunks[place], positions[inside] - self._starts[place]
            found = chunk.slice(local[0], len(local)) if (np.diff(local) == 1).all() else chunk.take(local)
            for at, row in zip(inside.tolist(), python_rows(found), strict=True):
                rows[at] = row
        return rows


KINDS: dict[tuple[str, str], tuple[str, Callable[[Any, Any], Any]]] = {
    ("pandas", "DataFrame"): (".to_dict('records')", lambda table, wanted: _records(table.iloc[wanted])),
    ("pandas", "Series"): (".tolist()", lambda column, wanted: column.iloc[wanted].tolist()),
    ("polars", "DataFrame"): (".to_dicts()", lambda table, wanted: _of_polars(table[wanted])),
    ("datasets", "Dataset"): (".to_list()", lambda dataset, wanted: _rows_of_columns(dataset[wanted])),
    ("polars", "Series"): (".to_list()", lambda column, wanted: _of_polars(column[wanted])),
}
"""By library and class, a base class's, too: the call that makes a list of all rows, for a message, and what returns
those that are wanted. All others are pyarrow's."""


def _records(frame: Any) -> list[dict[Any, Any]]:
    """Return what `frame.to_dict("records")` does, column by column: in a third of the time."""
    columns = dict(frame.items())
    if not columns:
        return frame.to_dict("records")  # type: ignore[no-any-return]
    values = zip(*map(_values, columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def _values(column: Any) -> list[Any]:
    """Return the values of a column as pandas' records have them: Python's own, and None in place of NA."""
    if (isinstance(column.dtype, np.dtype) and column.dtype.kind in "biufmM") or str(column.dtype) == "str":
        return column.tolist()  # type: ignore[no-any-return]
    return [row[0] for row in column.to_frame(0).to_dict("records")]


def _of_polars(data: Any) -> list[Any]:
    """Return the rows of a frame, or the values of a series: of nanoseconds, its own would be cut to microseconds."""
    frame = hasattr(data, "to_dicts")
    if not re.search(r"time_unit='ns'|\bTime\b", str(getattr(data, "schema" if frame else "dtype", ""))):
        return data.to_dicts() if frame else data.to_list()  # type: ignore[no-any-return]
    from streamline.io.formats.columnar_selection import python_rows  # imports pyarrow

    return python_rows(data.to_arrow())


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = len(next(iter(columns.values()), ()))
    return [{name: values[at] for name, values in columns.items()} for at in range(count)]


ARROW = ("Table", "RecordBatch", "ChunkedArray", "Array")

KNOWN_TYPES = {*KINDS, *(("pyarrow", name) for name in ARROW)}

LIBRARIES = {library for library, _ in KNOWN_TYPES}

TABLES = ("DataFrame", "Table", "RecordBatch")


def rows_of(data: Any) -> Any:
    """Return what reads `data` by row if it is a table, else `data` itself.

    Raises:
      PlanTypeError: it isn't read by position: a dict, a query that has not run, an unknown table.
      PlanError: a table that has a column twice.
    """
    known = _library_type(data)
    if known is None or known[0] == "datasets":
        _check_positions(data)
    if known is None:
        return data
    return (TableRows if known in KINDS else _ArrowRows)(data, known)


def check_not_table(what: str, iterable: object) -> None:
    """Raise a PlanTypeError if it is a table, whose iterator gives names or columns; `what`: "the factory returned"."""
    known = _library_type(iterable)
    check_rows("from_iterable", iterable)
    if known is not None and known[1] in TABLES:
        raise PlanTypeError(
            f"{what} a {_type_name(iterable)}, whose iterator gives columns: to have its rows, read it with "
            f"sl.from_items(table), or return table{KINDS[known][0] if known in KINDS else '.to_pylist()'}"
        )


def check_rows(reader: str, data: Any) -> None:
    """Raise a PlanTypeError if it is a Hugging Face dataset in a format whose rows are tables."""
    if type(data).__module__.partition(".")[0] != "datasets":
        return
    found = getattr(getattr(data, "_formatting", None), "format_type", None)  # of an IterableDataset
    style = data.format["type"] if found is None and type(data).__name__ == "Dataset" else found
    if style in ("arrow", "pandas", "polars"):
        raise PlanTypeError(
            f"this Hugging Face dataset has the format {style!r}, in which rows are a table: "
            f"sl.{reader}(dataset.with_format(None)), or 'numpy', 'torch', 'jax'"
        )


def _library_type(data: object) -> tuple[str, str] | None:
    for base in type(data).__mro__:
        library = base.__module__.partition(".")[0]
        if library in LIBRARIES and (library, base.__name__) in KNOWN_TYPES:
            return library, base.__name__
    return None


def _type_name(data: object) -> str:
    return f"{type(data).__module__.partition('.')[0]} {type(data).__name__}"


def _check_names(table: Any) -> None:
    names: Iterable[Any] = getattr(table, "column_names", getattr(table, "columns", ()))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError(
            f"the {_type_name(table)} has more than one column {twice[0]!r}, and a row is a dict, which has each key "
            "once: rename them, or leave all but one out"
        )


def _check_positions(data: Any) -> None:
    """Check that `data[i]` is item i, as far as its type shows."""
    library, name = type(data).__module__.partition(".")[0], type(data).__name__
    if library == "pandas" and name.endswith("GroupBy"):
        raise PlanTypeError(f"a pandas {name} is read by key, not by position: sl.from_items(list(groups))")
    check_rows("from_items", data)
    if isinstance(data, Mapping) and len(data) and not (0 in data and len(data) - 1 in data):
        raise PlanTypeError(
            f"from_items reads by position, and a {name} is read by key, as {next(iter(data))!r}. "
            f"Of one of its values: sl.from_items(data[{next(iter(data))!r}]). Of all of them, each an item: "
            "sl.from_items(list(data.values())). Of rows, where the values are columns: "
            "sl.zip(*map(sl.from_items, data.values())).map(lambda row: dict(zip(data, row)))"
        )
    if not hasattr(data, "__getitems__") and (hasattr(data, "__arrow_c_stream__") or hasattr(data, "__dataframe__")):
        raise PlanTypeError(
            f"from_items doesn't know how a {_type_name(data)} is read by row: sl.from_items(pyarrow.table(data)), or "
            "a list of its rows"
        )
    if hasattr(data, "shape"):
        try:
            len(data)
        except TypeError as error:
            raise PlanTypeError(f"from_items needs a length, and this {_type_name(data)} has none: {error}") from error
