"""A file format outside the package: records of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from streamline.core.flow import Chunk, Lists, StageContext
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import Format, IndexedStates, Place


@dataclass(frozen=True, kw_only=True)
class Records(Format[bytes]):
    """`size` bytes each. Place: {"file": path, "record": number of the next one}."""

    kind: ClassVar[str] = "read_records"
    reread: ClassVar[str] = "seeks to its record"
    sequential: ClassVar[bool] = False
    counts: ClassVar[tuple[str, ...]] = ("record",)

    size: int

    async def chunks(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[bytes]:
        count, rest = divmod((await file.found()).size or 0, self.size)
        if rest:
            raise DataError(f"{file.path} ends within a record: {rest} of {self.size} bytes")
        for first in range(begin["record"], count, context.max_items):
            stop = min(first + context.max_items, count)
            data = await file.read(first * self.size, stop * self.size)
            items = [data[at : at + self.size] for at in range(0, len(data), self.size)]
            last = after if stop == count else None
            yield Chunk(items, IndexedStates(name, begin, {"record": range(first + 1, first + 1 + len(items))}, last))
