"""`read_arrow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from streamline.io.formats.arrow import ArrowFormat
from streamline.io.storage.options import AccessOptions
from streamline.io.storage.paths import Paths
from streamline.pipeline import Pipeline
from streamline.reading.files import pipeline_of
from streamline.reading.parquet import selecting

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

__all__ = ["read_arrow"]


@overload
def read_arrow(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: None = None,
    name: str = "read_arrow",
    **access: Unpack[AccessOptions],
) -> Pipeline[dict[str, Any]]: ...


@overload
def read_arrow(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: int,
    name: str = "read_arrow",
    **access: Unpack[AccessOptions],
) -> Pipeline[pa.RecordBatch]: ...


def read_arrow(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    batch_rows: int | None = None,
    name: str = "read_arrow",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    """Read the rows of Arrow IPC files ("feather") as dicts, or as record batches. Needs the extra `arrow`.

    Fetched are the footer, and then whole record batches; a resume fetches one again, and one file is split over shards
    by them. Files in the stream format are known by their first bytes, and read from the start: a resume reads again
    what is before its record batch, and they can't be split.

    Args:
      paths: as `read_lines`.
      columns: names of top columns, otherwise as `read_parquet`; the others are fetched along with them, but in a local
        file.
      filter: as `read_parquet`, but nothing says beforehand which record batches have no such rows.
      batch_rows: as `read_parquet`; no batch is larger than it is in the file.
      name: its part of a state is kept under it.
      access: as `read_lines`.

    Raises:
      As `read_parquet`.
    """
    return pipeline_of(ArrowFormat(**selecting("read_arrow", columns, filter, batch_rows)), paths, name, **access)
