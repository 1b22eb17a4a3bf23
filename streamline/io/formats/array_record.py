"""ArrayRecord files: records of bytes, any of which can be read. array_record is an extra, and imported late."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from streamline.errors import DataError, StreamlineError
from streamline.io.fetch.file import File
from streamline.io.formats.base import InThread
from streamline.io.formats.columnar import Unchanged
from streamline.io.formats.rows import BLOCK_BYTES, BLOCK_ROWS, RowFormat, RowTable

OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""As array_record advises for random access: threads of its own gain nothing for blocks of whole groups."""

GROUP = re.compile(r"group_size:(\d+)")
"""What a file says of how it was written: so many records are compressed together."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecordFormat(RowFormat):
    """ArrayRecord files, whose items are bytes."""

    kind: ClassVar[str] = "read_array_record"
    reread: ClassVar[str] = "reads its group of records again"

    async def table(self, file: File, in_thread: InThread[Any]) -> RecordTable:
        def opened() -> RecordTable:
            unchanged = Unchanged(file.path, file.part.found.size)
            reader = _open_reader(file.path)
            group = GROUP.search(reader.writer_options_string())
            size = int(group[1]) if group else 1
            return RecordTable(file.path, [reader], unchanged, in_thread, size, rows=reader.num_records())

        table: RecordTable = await in_thread(opened)
        return table


def _open_reader(path: str) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path, OPTIONS)
    if not reader.ok():
        raise DataError("it is no ArrayRecord file, is damaged, or was cut short: array_record can't open it")
    return reader


@dataclass(frozen=True)
class RecordTable(RowTable):
    """The records of a file. array_record opens none that was cut short.

    Attributes:
      readers: array_record's, one; it closes the file when it is dropped. None where it has to be opened again.
      group: records that are compressed together, and so are read together.
    """

    path: str
    readers: list[Any]
    unchanged: Unchanged
    in_thread: InThread[Any]
    group: int

    async def blocks(self, start: int, stop: int) -> AsyncGenerator[Sequence[Sequence[Any]], None]:
        groups = 1
        try:
            while start < stop:
                span = start, min(stop, (start // self.group + groups) * self.group, start + BLOCK_ROWS)
                try:
                    records, size = await self.in_thread(partial(self._read, *span))
                except DataError:
                    if groups == 1:
                        raise
                    groups = 1  # those before the damaged one are read
                    continue
                yield [records]
                most = min(BLOCK_ROWS, BLOCK_BYTES * len(records) // max(1, size)) // self.group
                start, groups = span[1], max(1, min(2 * groups, most))
        finally:
            self.readers.clear()  # an error's frames would keep it open

    def _read(self, start: int, stop: int) -> tuple[list[bytes], int]:
        """Return records, and how many bytes they have."""
        if not self.readers:
            self.readers.append(_open_reader(self.path))
        reader = self.readers[0]
        try:
            records, failure = reader.read(start, stop), None
        except Exception as error:  # of array_record, on damage: RuntimeError, IndexError, ...
            records, failure = [], error
        try:
            self.unchanged.check()
            if failure is not None:
                raise DataError(f"array_record can't read it: {failure}") from failure
        except StreamlineError:
            self.readers.clear()
            reader.close()  # likewise
            raise
        return records, sum(map(len, records))

    def following(self, row: int) -> int:
        return (row // self.group + 1) * self.group

    def items(self, block: Sequence[Sequence[Any]]) -> list[Any]:
        return list(block[0])
