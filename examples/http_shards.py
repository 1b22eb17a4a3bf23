"""Shards over HTTP from a server that drops a connection half-way: the read goes on at its byte."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

import streamline as sl

FILES = {
    f"part-{part:03}.jsonl": "".join(json.dumps({"id": 1000 * part + row}) + "\n" for row in range(1000)).encode()
    for part in range(4)
}
ranges: list[str] = []  # what was asked for, beyond whole files


async def serve(request: web.Request) -> web.StreamResponse:
    """Answer with a file, or the rest of one; the first answer for part-002 breaks off in the middle."""
    body = FILES[request.match_info["name"]]
    asked = request.headers.get("Range")
    start = 0 if asked is None else int(asked.removeprefix("bytes=").partition("-")[0])
    first = not any(request.path in entry for entry in ranges)
    if start:
        ranges.append(f"{request.path} from byte {start:,}")
    headers = {"Content-Length": str(len(body) - start), "Accept-Ranges": "bytes", "ETag": '"1"'}
    if start:
        headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
    response = web.StreamResponse(status=206 if start else 200, headers=headers)
    await response.prepare(request)
    if "part-002" in request.path and not start and first:
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()  # in the middle of a line, most likely
        return response
    await response.write(body[start:])
    return response


async def main() -> None:
    app = web.Application()
    app.router.add_get("/{name}", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    pipe = sl.read_jsonl(f"http://{address[0]}:{address[1]}/part-{{000..003}}.jsonl").shard(2).merge()
    async with pipe.open() as stream:
        ids = [row["id"] async for row in stream]
    await runner.cleanup()
    print(f"{len(ids):,} rows, each exactly once: {sorted(ids) == list(range(4000))}")
    print("dropped on the way, and asked for again:", *ranges, sep="\n  ")


if __name__ == "__main__":
    asyncio.run(main())
