"""Arrow IPC files, and streams in files: the formats that pyarrow calls "feather" and "stream"."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from streamline.core.flow import Chunk, Lists, StageContext
from streamline.core.meters import Working
from streamline.core.state import At
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
from streamline.io.formats.base import InThread, Place
from streamline.io.formats.columnar import (
    FOOTER_BYTES,
    Columnar,
    GroupedTable,
    GroupReader,
    RowGroup,
    check_schema,
    footer_of,
)
from streamline.io.formats.sparse_file import from_start

MOST_METADATA_BYTES = 256 * 1024 * 1024
"""A message's metadata beyond this are damaged: a schema of a million columns takes 100 MB."""

SIZE_NEED = "reading a file from its end"


@dataclass(frozen=True, kw_only=True)
class ArrowFormat(Columnar):
    """Reads Arrow files. Place: see `columnar`."""

    kind: ClassVar[str] = "read_arrow"
    reread: ClassVar[str] = "reads its record batch again (a stream: all that is before it)"
    unit: ClassVar[str] = "record batch"

    async def table(self, file: File, first: int, in_thread: InThread[Any]) -> GroupedTable | None:
        size = await file.size(SIZE_NEED)
        if not size:
            raise DataError(f"{file.path} is not an Arrow file: it is empty")
        data = await file.read(max(0, size - FOOTER_BYTES), size)
        if not data.endswith(MAGIC):
            return None
        data, length = await footer_of(file, size, data, MAGIC)
        try:
            dictionaries, batches = blocks(data[len(data) - length : -4 - len(MAGIC)])
        except ValueError as error:
            raise DataError(f"{file.path}: the footer can't be read: {error}") from error
        for number, block in enumerate([*dictionaries, *batches]):
            if not 0 <= block.start + PREFIX_BYTES <= block.stop <= size:
                raise DataError(
                    f"{file.path}: block {number} is said to be bytes {block.start:,} to {block.stop:,} of {size:,}, "
                    "so the footer is damaged, or the file was cut short"
                )
        if sum(block.stop - block.start for block in dictionaries) > size:
            raise DataError(f"{file.path} is damaged: it says that its dictionaries take more than its {size:,} bytes")
        away = [block for block in dictionaries if block.start < size - len(data) and not file.local]
        starts = [from_start(block.start) if number == 0 else block.start for number, block in enumerate(away)]
        held = [(start, await file.read(start, block.stop)) for start, block in zip(starts, away, strict=True)]

        def open_() -> GroupedTable:
            from streamline.io.formats.arrow_table import FileTable  # imports pyarrow

            return FileTable(self, file, size, data, held, batches, first)

        table: GroupedTable = await in_thread(open_)
        return table

    async def stream(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[Any]:
        """One batch is kept back, to know whether it is the last."""
        if file.part.num_shards > 1:
            raise PlanError(
                f"{file.path} is an Arrow stream, which can only be read from its start, so it can't be split into "
                f"{file.part.num_shards} shards: write it as an Arrow file, or as several"
            )
        pending: tuple[GroupedTable, RowGroup, list[bytes]] | None = None
        failure: StreamlineError | None = None
        size = await file.size(SIZE_NEED)
        async with aclosing(self._batches(file, size, begin, context)) as batches:
            more = True
            while more:
                try:
                    with Working(context.meter):
                        following = await anext(batches, None)
                except StreamlineError as error:
                    following, failure = None, error
                more, last = following is not None, following is None and failure is None
                if pending is not None:
                    table, group, data = pending
                    start = begin["row"] if group.index == begin["group"] else 0
                    end = after if last else {"file": file.path, "group": group.index + 1, "row": 0}
                    reader = GroupReader(self, file.path, group, end, start, None, name, context)
                    async with aclosing(reader.chunks(table, data)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                elif last:
                    yield Chunk((), (), At(name, after))
                pending = following
        if failure is not None:
            raise failure

    async def _batches(
        self, file: File, size: int, begin: Place, context: StageContext
    ) -> AsyncGenerator[tuple[GroupedTable, RowGroup, list[bytes]], None]:
        """Yield the record batches of a stream that are wanted, each with all messages that it is decoded with."""

        def opened() -> GroupedTable:
            from streamline.io.formats.arrow_table import StreamTable  # imports pyarrow

            table = StreamTable(self, file.path, head[0])
            check_schema(file.path, table.selection.schema, context)
            return table

        table: GroupedTable | None = None
        head: list[bytes] = []  # the schema, and the dictionaries so far
        number = 0
        async with aclosing(_messages(file, size)) as messages:
            async for message, data in messages:
                if table is None:
                    if message.kind != SCHEMA:
                        raise DataError(f"{file.path} is not an Arrow stream, or damaged: expected a schema first")
                    head.append(data)
                    table = await context.site.tasks.threads.run(opened, file.path)
                elif message.kind == DICTIONARY:
                    head.append(data)
                elif message.kind == RECORD_BATCH:
                    if number >= begin["group"]:
                        yield table, RowGroup(number, message.rows, (), 0), [*head, data]
                    number += 1


async def _messages(file: File, size: int) -> AsyncGenerator[tuple[Message, bytes], None]:
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
                if at + end + message.body <= size and await whole(end + message.body):
                    yield message, bytes(buffer[: end + message.body])
                    at += end + message.body
                    del buffer[: end + message.body]
                    continue
            break
        raise DataError(f"{path} was cut short: it ends at byte {size:,}, without an end of the stream")
