"""`read_parquet`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from streamline.core.options import check_int, given
from streamline.errors import PlanError, PlanTypeError
from streamline.io.formats.columnar import Predicate, require_pyarrow
from streamline.io.formats.parquet import ParquetFormat
from streamline.io.storage.options import AccessOptions
from streamline.io.storage.paths import Paths
from streamline.pipeline import Pipeline
from streamline.reading.files import pipeline_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

__all__ = ["read_parquet", "selecting"]


@overload
def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: None = None,
    name: str = "read_parquet",
    **access: Unpack[AccessOptions],
) -> Pipeline[dict[str, Any]]: ...


@overload
def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: int,
    name: str = "read_parquet",
    **access: Unpack[AccessOptions],
) -> Pipeline[pa.RecordBatch]: ...


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: int | None = None,
    name: str = "read_parquet",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    """Read the rows of Parquet files as dicts, or as record batches. Needs `pip install 'streamline[arrow]'`.

    Fetched are the footer, and then the wanted columns of the wanted row groups; a resume fetches one row group again.
    One file is split over shards by row groups.

    Args:
      paths: as `read_lines`.
      columns: the columns that are wanted, in the order in which they are to come; dotted names mean parts of structs:
        "image.width". None: all.
      filter: rows for which this isn't true are left out: `pc.field("year") > 2020`. Row groups in which it can't be
        true, as their statistics say, aren't fetched. It may look at columns that aren't wanted.
      batch_rows: items are `pyarrow.RecordBatch`es of at most so many rows, each of one row group and >= 1, so the last
        ones of a row group may be fewer; a filter takes rows out of them. None: items are rows, as `to_pylist()` of
        pyarrow gives them.
      name: its part of a state is kept under it.
      access: as `read_lines`.

    Raises:
      PlanError, PlanTypeError: an option that can't be; pyarrow isn't installed.
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for what can't be read,
      DataError for what is damaged, lacks a column, or differs in its columns from the file before, each with the file,
      and the row group where it is in one.
    """
    options = selecting("read_parquet", columns, filter, batch_rows)
    return pipeline_of(ParquetFormat(**options), paths, name, **access)


def selecting(function: str, columns: object, filter: object, batch_rows: object) -> dict[str, Any]:
    """Return the options of a `Columnar` format, checked.

    Raises:
      As `read_parquet`.
    """
    require_pyarrow(function)
    if batch_rows is not None:
        batch_rows = check_int(f"{function}(batch_rows=)", batch_rows, 1)
    return {
        "columns": _columns(f"{function}(columns=)", columns),
        "predicate": _predicate(f"{function}(filter=)", filter),
        "batch_rows": batch_rows,
    }


def _columns(option: str, columns: object) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if not isinstance(columns, Sequence) or isinstance(columns, str | bytes):
        raise PlanTypeError(f"{option} is a list of names, got {given(columns)}")
    if not all(isinstance(column, str) for column in columns):
        raise PlanTypeError(f"{option} is a list of names, got {given(columns)}")
    if not columns:
        raise PlanError(f"{option} is at least one name, got none; None means all columns")
    if len(set(columns)) < len(columns):
        raise PlanError(f"{option} has a name twice: {list(columns)}")
    return tuple(columns)


def _predicate(option: str, expression: object) -> Predicate | None:
    if expression is None:
        return None
    import pyarrow.compute as pc  # whoever has an expression has imported it

    if not isinstance(expression, pc.Expression):
        hint = "; pyarrow.parquet.filters_to_expression makes one of a list" if isinstance(expression, list) else ""
        raise PlanTypeError(f"{option} is a pyarrow.compute.Expression, got {given(expression)}{hint}")
    if "FieldPath(" in str(expression):
        raise PlanError(f"{option} names its columns, got {expression}: a number is of another column elsewhere")
    return Predicate.of(expression)
