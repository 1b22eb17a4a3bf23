"""A feed that can't be read again: a server forgets a record once it is acknowledged. The trainer stops twice.

With `journal=` a record is on disk before it is acknowledged, so the crash loses none. A server can only send again
what was kept, but not yet acknowledged, when the connection was lost: at most one record a stop.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import streamline as sl

RECORDS = list(range(300))
forgotten: list[int] = []


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(EOFError, ConnectionError):  # the trainer has gone, perhaps with a record unread
        while len(forgotten) < len(RECORDS):
            writer.write(json.dumps(RECORDS[len(forgotten)]).encode() + b"\n")
            await reader.readuntil()
            forgotten.append(RECORDS[len(forgotten)])
    writer.close()


async def main() -> None:
    folder = Path(tempfile.mkdtemp())
    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    async def feed() -> AsyncIterator[int]:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            while line := await reader.readline():
                yield json.loads(line)
                writer.write(b"kept\n")  # asked for the next one: this one is in the journal
        finally:
            writer.close()

    pipe = sl.from_stream(feed, journal=folder / "journal").shard(4).shuffle(window=8).merge().batch(10, collate=None)
    print(pipe)
    seen: list[int] = []
    for stop, end in ((5, "a snapshot"), (7, "a crash"), (100, "a snapshot")):
        async with pipe.open(resume=sl.Snapshot.load(folder / "ckpt/", missing_ok=True)) as stream:
            batches = [batch for _ in range(stop) if (batch := await anext(stream, None))]
        if end == "a snapshot":  # a crash takes what the model has learned with it
            stream.snapshot().save(folder / "ckpt/")
            seen += [record for batch in batches for record in batch]
        print(f"{len(batches)} batches, then {end}; the server has forgotten {len(forgotten)}")
    print("every record:", set(seen) == set(RECORDS))
    print("sent twice, and so twice here:", len(seen) - len(set(seen)))
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
