"""Parquet files: finding and fetching the footer; `parquet_table` decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import InThread
from streamline.io.formats.columnar import FOOTER_BYTES, Columnar, GroupedTable, footer_of

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
"""How a file ends, after the length of its footer (parquet-format, "File format")."""


@dataclass(frozen=True, kw_only=True)
class ParquetFormat(Columnar):
    """Reads Parquet files. Place: see `columnar`."""

    kind: ClassVar[str] = "read_parquet"
    reread: ClassVar[str] = "reads its row group again"
    unit: ClassVar[str] = "row group"

    async def table(self, file: File, first: int, in_thread: InThread[Any]) -> GroupedTable:
        def open_() -> GroupedTable:
            from streamline.io.formats.parquet_table import ParquetTable  # imports pyarrow

            return ParquetTable(self, file, size, footer, first)

        size = await file.size("reading a file from its end")
        footer = await _footer(file, size)
        table: GroupedTable = await in_thread(open_)
        return table


async def _footer(file: File, size: int) -> bytes:
    """Return the end of a file, from the start of its footer on or before."""
    if size < 4 + 2 * len(MAGIC):
        raise DataError(f"{file.path} is not a Parquet file, or was cut short: it has {size:,} bytes")
    data = await file.read(max(0, size - FOOTER_BYTES), size)
    magic = data[-len(MAGIC) :]
    if magic == ENCRYPTED:
        raise DataError(f"{file.path} is an encrypted Parquet file, which can't be read")
    if magic != MAGIC:
        raise DataError(
            f"{file.path} is not a Parquet file, or was cut short: expected {MAGIC!r} at its end, got {magic!r}"
        )
    return (await footer_of(file, size, data, MAGIC))[0]
