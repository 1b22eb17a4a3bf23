"""A loopback HTTP server with the latency of an object store, in a process of its own: it outlives a killed trainer.

Run as `python -m streamline.demo.server DIRECTORY`. Its first line on stdout is its port. It ends when its stdin
closes, so it never outlives the process that started it, however that one ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import click
from aiohttp import web


def application(directory: Path, latency_s: float) -> web.Application:
    """Return an application that serves the files of one directory, each request after `latency_s` seconds."""
    files = {path.name: path for path in directory.iterdir() if path.is_file()}

    async def serve_file(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(latency_s)
        path = files.get(request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound
        # FileResponse answers Range, and sends Content-Length and an ETag. Any ETag in If-Range it takes for a match,
        # which is right here: the files never change. An object store sends a .gz as the bytes it is; with
        # `Content-Encoding: gzip` clients would unpack it, and ranges would count other bytes.
        return web.FileResponse(path, headers={"Content-Type": "application/gzip"})

    app = web.Application()
    app.router.add_get("/{name}", serve_file)  # HEAD too
    return app


async def wait_stdin_closed() -> None:
    """Return when stdin is at its end."""
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()

    def read_to_end() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(closed.set)

    # A thread, because a loop can't watch every kind of stdin (/dev/null, a file); os.read rather than sys.stdin,
    # whose lock a daemon thread would still hold at the interpreter's end.
    threading.Thread(target=read_to_end, name="stdin", daemon=True).start()
    await closed.wait()


async def serve(directory: Path, latency_s: float) -> None:
    """Serve `directory` on a free loopback port, print the port, and return when stdin closes."""
    # shutdown_timeout: whoever closed stdin no longer reads what is under way.
    runner = web.AppRunner(application(directory, latency_s), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        click.echo(runner.addresses[0][1])  # echo flushes
        await wait_stdin_closed()
    finally:
        await runner.cleanup()


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--latency-ms", default=20.0, show_default=True, help="Wait before each answer.")
def main(directory: Path, latency_ms: float) -> None:
    """Serve DIRECTORY's files on a free loopback port until stdin closes."""
    asyncio.run(serve(directory, latency_ms / 1000))


if __name__ == "__main__":
    main()
