"""A loopback HTTP server that does what a test's script says, and a way to read a source to its end."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, cast
from urllib.parse import unquote

import anyio
import pytest

import streamline as sl
from streamline.core.flow import Site
from streamline.core.knobs import KnobValues
from streamline.core.state import Tree
from streamline.core.tasks import Session, Tasks, supervise
from streamline.io.fetch.fetcher import OpenStorages
from streamline.io.storage import retry as attempts
from streamline.io.storage.base import FoundObject
from streamline.io.storage.paths import braces, is_url
from streamline.sources.base import Part
from streamline.sources.files import Files


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]

    @property
    def start(self) -> int:
        match = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        return int(match[1]) if match else 0


Behaviour = Callable[["Server", Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """Serves `objects`; request number i is answered by `script[i]`, those after the script by `otherwise`.

    Attributes:
      otherwise: None: as they should be.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    script: list[Behaviour] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    otherwise: Behaviour | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    base: str = ""

    def url(self, path: str) -> str:
        return f"{self.base}/{path}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            request = Request(unquote(head[0].split(" ")[1]).lstrip("/"), headers)
            self.requests.append(request)
            self.arrived.set()
            answer = self.script.pop(0) if self.script else self.otherwise or self.serve
            await answer(self, request, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @staticmethod
    async def serve(
        server: Server,
        request: Request,
        writer: asyncio.StreamWriter,
        *,
        etag: str | None = '"v1"',
        cut: int | None = None,
        ranges: bool = True,
        content: bytes | None = None,
        told: int | None = None,
        chunked: bool = False,
        chunks: int | None = None,
        length: bool = True,
        total: str | None = None,
        at_most: int | None = None,
        extra: bytes = b"",
        headers: tuple[str, ...] = (),
    ) -> None:
        """Answer as a server should, except for what the options say.

        cut: bytes of the body that are sent before the connection breaks. told: the Content-Length that is claimed.
        chunks: of one byte each, after which a chunked body ends as one does.
        at_most: bytes of a range that are given. extra: what is sent after the body.
        """
        data = server.objects.get(request.path) if content is None else content
        if data is None:
            await Server.status(server, request, writer, code="404 Not FoundObject")
            return
        asked = re.match(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")) if ranges else None
        if asked and request.headers.get("if-range", etag) != etag:
            asked = None
        head = [*headers]
        start, stop, status = 0, len(data), "200 OK"
        if asked and int(asked[1]) >= len(data):
            head.append(f"Content-Range: bytes */{len(data)}")
            start, stop, status = 0, 0, "416 Range Not Satisfiable"
        elif asked:
            start = int(asked[1])
            stop = min(len(data), int(asked[2] or len(data)) + 1, start + (at_most or len(data)))
            head.append(f"Content-Range: bytes {start}-{stop - 1}/{total or len(data)}")
            status = "206 Partial Content"
        if etag:
            head.append(f"ETag: {etag}")
        if chunked:
            head.append("Transfer-Encoding: chunked")
        elif length:
            head.append(f"Content-Length: {stop - start if told is None else told}")
        body = data[start:stop]
        if chunked:
            body = b"".join(b"%x\r\n%s\r\n" % (1, body[i : i + 1]) for i in range(len(body))[:chunks]) + b"0\r\n\r\n"
        writer.write("\r\n".join([f"HTTP/1.1 {status}", *head, "Connection: close", "", ""]).encode())
        writer.write(body[:cut] + extra)

    @staticmethod
    async def status(
        server: Server, request: Request, writer: asyncio.StreamWriter, *, code: str, headers: tuple[str, ...] = ()
    ) -> None:
        """Answer with a status and no content."""
        head = [f"HTTP/1.1 {code}", *headers, "Content-Length: 0", "Connection: close", "", ""]
        writer.write("\r\n".join(head).encode())

    @staticmethod
    async def stall(server: Server, request: Request, writer: asyncio.StreamWriter, *, sent: int = 0) -> None:
        """Send the first bytes of the body, then nothing until the client has gone."""
        data = server.objects[request.path]
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[:sent])
        await writer.drain()
        await writer.wait_closed()

    @staticmethod
    async def drip(server: Server, request: Request, writer: asyncio.StreamWriter) -> None:
        """Send byte by byte, each in a packet of its own."""
        data = server.objects[request.path]
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
        for index in range(len(data)):
            writer.write(data[index : index + 1])
            await writer.drain()
            for _ in range(3):
                await asyncio.sleep(0)

    @staticmethod
    async def reset(server: Server, request: Request, writer: asyncio.StreamWriter, **options: Any) -> None:
        """Answer as `serve`, then reset the connection (RST)."""
        await server.serve(server, request, writer, **options)
        await writer.drain()
        made = writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    def faulty(self, kind: str = "serve", **options: Any) -> Behaviour:
        """Return a behaviour by name."""
        return partial(getattr(self, kind), **options)


@asynccontextmanager
async def listening() -> AsyncIterator[Server]:
    """Serve in the running loop."""
    made = Server()
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(made.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    open_for = await asyncio.start_server(connected, "127.0.0.1", 0)
    made.base = f"http://127.0.0.1:{open_for.sockets[0].getsockname()[1]}"
    yield made
    open_for.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    async with listening() as made:
        yield made


@contextmanager
def serving() -> Iterator[Server]:
    """Serve in a thread with a loop of its own: any event loop, thread and process may ask."""
    ready = threading.Event()
    made: list[tuple[Server, Callable[[], object]]] = []

    async def serve() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        async with listening() as server:
            made.append((server, lambda: loop.call_soon_threadsafe(over.set)))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="scripted server")
    thread.start()
    ready.wait()
    server, end = made[0]
    try:
        yield server
    finally:
        end()
        thread.join()


def named(source: Any) -> Any:
    """Return a source of URLs with its files named, and nothing else known of them.

    To be looked at, as `resolved` does, they would need a server in another thread than the test's own.
    """
    if not isinstance(source, Files) or source.found is not None or not any(map(is_url, source.paths)):
        return source
    return replace(source, found=tuple(FoundObject(url) for path in source.paths for url in braces(path)))


@dataclass
class Reading:
    """What came out of a source: items, the state after each (through `json`), and what it failed with."""

    items: list[Any]
    states: list[Tree]
    wheres: list[str]
    begin: Tree
    failure: Exception | None
    end: Tree


@pytest.fixture
def read() -> Callable[..., Awaitable[Reading]]:
    """Read one shard of a source to its end, or to its failure."""

    async def read_(
        source: Any,
        state: Tree | None = None,
        *,
        mode: str | None = None,
        shard: int = 0,
        num_shards: int = 1,
        widths: KnobValues | None = None,
        **part: Any,
    ) -> Reading:
        source = named(source)
        session = Session()
        if widths is not None:
            session.services.add(KnobValues, widths)
        stop, ready = anyio.Event(), anyio.Event()
        owner: list[Tasks] = []

        def begun(tasks: Tasks) -> None:
            owner.append(tasks)
            ready.set()

        supervisor = asyncio.ensure_future(supervise(begun, stop, session))
        await ready.wait()
        try:
            site = Site(owner[0], shard, num_shards)
            flow = source.open(site, Part(mode=cast(Any, mode or source.default_mode), **part), state)
            made = Reading([], [], [], flow.state.json(), None, {})
            async with aclosing(flow):
                try:
                    async for item in flow:
                        made.items.append(item)
                        made.states.append(flow.state.json())
                        made.wheres.append(flow.state.where())
                except Exception as failure:
                    made.failure = failure
                    with pytest.raises(type(failure)):
                        await anext(flow)
                made.end = flow.state.json()
            assert session.budget.held == 0
            assert not session.services.get(OpenStorages)
        finally:
            stop.set()
            await supervisor
        return made

    return read_


PATIENT = sl.HttpOptions(retries=30)
"""Of two answers one is broken: so many in a row are no accident."""


def breaking(seed: int, share: float) -> Behaviour:
    """Return what breaks that share of the answers: cut off or reset anywhere, busy, without ranges, in chunks."""
    dice = Random(seed)

    async def answer(server: Server, request: Request, writer: asyncio.StreamWriter) -> None:
        if dice.random() >= share:
            await server.serve(server, request, writer)
            return
        cut = dice.randrange(len(server.objects.get(request.path, b"")) + 1)
        kind = dice.randrange(6)
        if kind == 0:
            await server.status(server, request, writer, code=dice.choice(["503 Busy", "500 Broken", "429 Slow"]))
        elif kind == 1:
            await server.reset(server, request, writer, cut=cut)
        elif kind == 2:
            await server.serve(server, request, writer, ranges=False, cut=dice.choice([cut, None]))
        elif kind == 3:
            await server.serve(server, request, writer, at_most=1 + cut)
        elif kind == 4:
            await server.serve(server, request, writer, chunked=True)
        else:
            await server.serve(server, request, writer, cut=cut)

    return answer


class _ObjectHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = self.server.objects.get(self.path)  # type: ignore[attr-defined]
        if data is None:
            self.send_error(404)
            return
        first, status = 0, 200
        if asked := self.headers.get("Range"):
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            first, data, total = int(start), data[int(start) : int(stop) + 1 if stop else None], len(data)
            status = 206 if data else 416
        self.send_response(status)
        if status != 200:
            told = f"{first}-{first + len(data) - 1}" if data else "*"
            self.send_header("Content-Range", f"bytes {told}/{total}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"v1"')
        self.end_headers()
        self.wfile.write(data)
        self.server.sent.append(len(data))  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def serving_objects(objects: dict[str, bytes]) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _ObjectHandler)
    server.objects, server.sent = objects, []
    server.base = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
