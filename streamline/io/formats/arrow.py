"""Arrow IPC files, and streams in files: the formats that pyarrow calls "feather" and "stream"."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from streamline.core.counters import Working
from streamline.core.flow import Chunk, Demand, Lists
from streamline.core.state import At
from streamline.core.threads import in_thread
from streamline.errors import DataError, PlanError, StreamlineError
from streamline.io.fetch.file import File
from streamline.io.formats.arrow_messages import (
    CONTINUATION,
    DICTIONARY,
    MAGIC,
    PREFIX_BYTES,
    RECORD_BATCH,
    SCHEMA,
    Message,
    blocks,
)
from streamline.io.formats.base import Place
from streamline.io.formats.columnar import Columnar, GroupedTable, GroupPosition, RowGroup, check_schema, watched
from streamline.io.formats.parquet import FOOTER_BYTES
from streamline.io.formats.sparse_file import from_start

TAIL_BYTES = 4 + len(MAGIC)
"""The footer's length, little-endian, and the magic."""

MOST_METADATA_BYTES = 256 * 1024 * 1024
"""A message's metadata beyond this are damaged: a schema of a million columns takes 100 MB."""


@dataclass(frozen=True, kw_only=True)
class ArrowFormat(Columnar):
    """Reads Arrow files. Place: see `columnar`."""

    kind: ClassVar[str] = "read_arrow"
    reread: ClassVar[str] = "reads its record batch again (a stream: all that is before it)"
    same_columns: ClassVar[bool] = True
    unit: ClassVar[str] = "record batch"

    async def chunks(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[Any]:
        with Working(demand.meter):
            unchanged = await watched(file, demand)
            size = await file.size("reading a file from its end")
            tail = await _tail(file, size)
            table = await self._opened(file, size, tail, begin, demand) if tail.endswith(MAGIC) else None
        if table is None:
            read = self._stream(file, begin, after, name, demand)
        else:
            read = self.read(file, table, unchanged, begin, after, name, demand)
        async with aclosing(read) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _opened(self, file: File, size: int, data: bytes, begin: Place, demand: Demand) -> GroupedTable:
        """Return the file, opened; `data`: its end."""
        length = int.from_bytes(data[-TAIL_BYTES : -len(MAGIC)], "little") + TAIL_BYTES
        if length > size - len(MAGIC):
            raise DataError(f"{file.path} is damaged: expected a footer of {length:,} bytes in a file of {size:,}")
        if length > len(data):
            data = await file.read(size - length, size - len(data)) + data
        try:
            dictionaries, batches = blocks(data[len(data) - length : -TAIL_BYTES])
        except ValueError as error:
            raise DataError(f"{file.path}: the footer can't be read: {error}") from error
        for number, block in enumerate([*dictionaries, *batches]):
            if not 0 <= block.start + PREFIX_BYTES <= block.stop <= size:
                raise DataError(
                    f"{file.path}: block {number} is said to be bytes {block.start:,} to {block.stop:,} of {size:,}, "
                    "so the footer is damaged, or the file was cut short"
                )
        away = [block for block in dictionaries if block.start < size - len(data) and not file.local]
        starts = [from_start(block.start) if number == 0 else block.start for number, block in enumerate(away)]
        held = [(start, await file.read(start, block.stop)) for start, block in zip(starts, away, strict=True)]

        def open_() -> GroupedTable:
            from streamline.io.formats.arrow_table import FileTable  # imports pyarrow

            return FileTable(self, file, size, data, held, batches, begin["group"])

        return await in_thread(demand.site.tasks.threads, open_)

    async def _stream(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[Any]:
        """Yield the items of a stream. One batch is kept back, to know whether it is the last."""
        if file.part.num_shards > 1:
            raise PlanError(
                f"{file.path} is an Arrow stream, which can only be read from its start, so it can't be split into "
                f"{file.part.num_shards} shards: write it as an Arrow file, or as several"
            )
        reading = _ArrowStreamReader(self, file, begin, name, demand)
        async with aclosing(_messages(file)) as messages:
            failure: StreamlineError | None = None
            while failure is None:
                try:
                    with Working(demand.meter):
                        message = await anext(messages, None)
                        following = None if message is None else await reading.takes(*message)
                except StreamlineError as error:
                    message, following, failure = None, None, error
                if message is None or following is not None:
                    last = failure is None and following is None
                    async with aclosing(reading.given(following, after if last else None)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                if message is None:
                    break
        if failure is not None:
            raise failure
        if not reading.gave:
            yield Chunk((), (), At(name, after))


class _ArrowStreamReader:
    """The state of reading a stream.

    Attributes:
      gave: whether any of its record batches was wanted.
    """

    def __init__(self, format: ArrowFormat, file: File, begin: Place, name: str, demand: Demand) -> None:
        self.gave = False
        self._batches = 0
        self._format, self._file, self._begin, self._name, self._demand = format, file, begin, name, demand
        self._table: Any = None
        self._pending: tuple[RowGroup, bytes] | None = None

    async def takes(self, message: Message, data: bytes) -> tuple[RowGroup, bytes] | None:
        """Take a message; return a record batch that is wanted, and its bytes."""
        threads, path = self._demand.site.tasks.threads, self._file.path
        if self._table is None:
            if message.kind != SCHEMA:
                raise DataError(f"{path} is not an Arrow stream, or damaged: expected a schema first")

            def open_() -> Any:
                from streamline.io.formats.arrow_table import StreamTable  # imports pyarrow

                return StreamTable(self._format, path, data)

            self._table = await in_thread(threads, open_)
            await in_thread(threads, partial(check_schema, path, self._table.schema, self._demand))
        elif message.kind == DICTIONARY:
            if self._pending is not None:
                self._table.later.append(data)
            else:
                self._table.learn(data)
        elif message.kind == RECORD_BATCH:
            self._batches += 1
            if self._batches > self._begin["group"]:
                return RowGroup(self._batches - 1, message.rows, (), 0), data
        return None

    async def given(
        self, following: tuple[RowGroup, bytes] | None, after: Place | None
    ) -> AsyncGenerator[Chunk[Any], None]:
        """Yield the items of the batch that was kept back, and keep another one back."""
        pending, self._pending = self._pending, following
        if pending is None:
            return
        self.gave = True
        (group, data), path = pending, self._file.path
        start = self._begin["row"] if group.index == self._begin["group"] else 0
        end = after or {"file": path, "group": group.index + 1, "row": 0}
        where = GroupPosition(path, self._format.unit, group, end, start, None)
        async with aclosing(self._format.items(self._table, [data], where, self._name, self._demand)) as chunks:
            async for chunk in chunks:
                yield chunk
        self._table.catch_up()


async def _tail(file: File, size: int) -> bytes:
    if not size:
        raise DataError(f"{file.path} is not an Arrow file: it is empty")
    return await file.read(max(0, size - FOOTER_BYTES), size)


async def _messages(file: File) -> AsyncGenerator[tuple[Message, bytes], None]:
    """Yield the messages of a stream, each with all of its bytes."""
    path, at = file.path, 0
    async with aclosing(file.blocks()) as incoming:
        buffer = bytearray()

        async def whole(size: int) -> bool:
            while len(buffer) < size:
                if (block := await anext(incoming, None)) is None:
                    return False
                buffer.extend(block)
            return True

        while await whole(PREFIX_BYTES):
            length = int.from_bytes(buffer[4:PREFIX_BYTES], "little")
            if buffer[:4] != CONTINUATION or length > MOST_METADATA_BYTES:
                what = (
                    "an Arrow file that was cut short" if buffer.startswith(MAGIC) else "not an Arrow file, or damaged"
                )
                raise DataError(f"{path} is {what}: expected a message at byte {at:,}, got {bytes(buffer[:8])!r}")
            if not length:
                return
            end = PREFIX_BYTES + length
            if await whole(end):
                try:
                    message = Message.of(bytes(buffer[PREFIX_BYTES:end]))
                except ValueError as error:
                    raise DataError(f"{path} is damaged in the message at byte {at:,}: {error}") from error
                if await whole(end + message.body):
                    yield message, bytes(buffer[: end + message.body])
                    at += end + message.body
                    del buffer[: end + message.body]
                    continue
            break
        raise DataError(f"{path} was cut short: it ends at byte {at + len(buffer):,}, without an end of the stream")
