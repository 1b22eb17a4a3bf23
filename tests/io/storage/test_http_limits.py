"""Servers that keep a request waiting in every way there is: `timeout_s` and `deadline_s` end each of them."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import streamline as sl
from streamline.errors import ReadError
from streamline.io.storage import retry as attempts
from streamline.io.storage.http import HttpStorage
from streamline.io.storage.object_store import ObjectStorage
from streamline.io.storage.options import HttpOptions
from streamline.sources import http_stream as http_reader
from tests.laws.profile import sampled

PAUSE_S = 0.004
"""Between two bytes that drip: a fifteenth of the limits."""

TURNS = 5
"""Of the loop, from a connection that is accepted to its handler."""

HEAD = b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nETag: "v1"\r\nLast-Modified: x\r\n'

Say = Callable[[bytes], Awaitable[None]]
Script = Callable[[Say], Awaitable[None]]
"""What a server does after a request, with what sends; afterwards it is silent."""


def said(*texts: bytes) -> Script:
    async def script(say: Say) -> None:
        for text in texts:
            await say(text)

    return script


def dripping(before: bytes, text: bytes) -> Script:
    """Say something at once, and then a text byte by byte, again and again."""

    async def script(say: Say) -> None:
        await say(before)
        while True:
            for index in range(len(text)):
                await say(text[index : index + 1])
                await asyncio.sleep(PAUSE_S)

    return script


HEADER = "the server stalled: no whole header of an answer came from 127.0.0.1:{port} within {limit}"
BODY = "the server stalled: nothing came for {limit}"
SLOW = "too slow: "
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

HEADERS: dict[str, tuple[Script, str]] = {
    "nothing": (said(), HEADER),
    "100 and silence": (said(b"HTTP/1.1 100 Continue\r\n\r\n"), HEADER),
    "102 and 103 and silence": (said(b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 103 X\r\n\r\n"), HEADER),
    "103 for ever": (dripping(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), HEADER),
    "a status that drips": (dripping(b"HTTP/1.1 200 ", b"O"), HEADER),
    "lines that drip": (dripping(HEAD, b"X-Y: z\r\n"), HEADER),
    "half a header": (said(HEAD + b"X-Y"), HEADER),
}  # fmt: skip
BODIES: dict[str, tuple[Script, str]] = {
    "half a body": (said(HEAD + b"Content-Length: 9\r\n\r\nabc"), BODY),
    "no body": (said(HEAD + b"Content-Length: 9\r\n\r\n"), BODY),
    "the size of a chunk that drips": (dripping(CHUNKED, b"0"), BODY),
    "the extension of a chunk that drips": (dripping(CHUNKED + b"5;", b"x"), BODY),
    "trailers that drip": (dripping(CHUNKED + b"3\r\nabc\r\n0\r\n", b"X-Y: z\r\n"), BODY),
}


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[int]:
    """Serve in this loop, and give the port. Each connection has one request."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say(text: bytes) -> None:
            writer.write(text)
            await writer.drain()

        try:
            with suppress(OSError, EOFError):  # the client has gone
                await reader.readuntil(b"\r\n\r\n")
                await script(say)
                await reader.read()
        finally:
            writer.transport.abort()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(answer(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(TURNS):
            await asyncio.sleep(0)  # what was just accepted is connected
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the connections are lost


async def fails(url: str, **options: Any) -> str:
    """Read an object, and return what that fails with."""
    storage = HttpStorage(HttpOptions(**{"retries": 0, "timeout_s": math.inf, "deadline_s": math.inf, **options}))
    try:
        with pytest.raises(ReadError) as caught:
            [block async for block in storage.blocks(url)]
    finally:
        await storage.aclose()
    return str(caught.value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*HEADERS, *BODIES])
async def test_timeout_s_bounds_each_wait(name: str) -> None:
    script, says = (HEADERS | BODIES)[name]
    async with serving(script) as port:
        message = await fails(f"http://127.0.0.1:{port}/x", timeout_s=0.4)
    assert says.format(port=port, limit="timeout_s=0.4 s") in message
    assert message.startswith(f"http://127.0.0.1:{port}/x: failed once at byte ")
    assert "<" not in message


@pytest.mark.parametrize("name", [*sampled([*HEADERS], 3), *sampled([*BODIES], 3), "a body that drips"])
async def test_deadline_s_bounds_a_request_as_a_whole(name: str) -> None:
    drip = dripping(HEAD + b"Content-Length: 999999\r\n\r\n", b"x")
    script, says = {**HEADERS, **BODIES, "a body that drips": (drip, SLOW)}[name]
    async with serving(script) as port:
        message = await fails(f"http://127.0.0.1:{port}/x", deadline_s=0.4, timeout_s=50, retries=9)
    ended = "deadline_s=0.4 leaves 0.0 s: " if name in HEADERS else "bytes in deadline_s=0.4 s, expected a MiB"
    assert ended in message
    assert name not in HEADERS or says.partition(" within")[0].format(port=port) in message
    assert "<" not in message


@pytest.mark.parametrize("limit", ["timeout_s", "connect_timeout_s", "deadline_s"])
@pytest.mark.parametrize("way", ["TLS", "proxy"])
async def test_a_connection_that_does_not_come_about_is_left(limit: str, way: str) -> None:
    """Who listens says nothing to the first bytes of TLS, or to CONNECT."""
    async with serving(said()) as port:
        proxy = f"http://127.0.0.1:{port}" if way == "proxy" else None
        url = f"https://127.0.0.1:{port if proxy is None else 9}/x"
        message = await fails(url, **{limit: 0.06}, proxy=proxy)
    assert ("no connection " if limit == "connect_timeout_s" else "connecting included") in message
    assert limit in message
    assert "<" not in message


async def test_redirects_come_out_of_the_same_deadline() -> None:
    async def script(say: Say) -> None:
        await asyncio.sleep(0.02)
        await say(b"HTTP/1.1 302 Found\r\nLocation: /y\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    async with serving(script) as port:
        message = await fails(f"http://127.0.0.1:{port}/x", deadline_s=0.06)
    assert re.search(r"failed once .* came from 127.0.0.1:\d+ within the 0.0\d+ s that deadline_s left", message)


async def test_what_stalled_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    names = ["100 and silence", "lines that drip", "no body", "half a body", "nothing", "half a body"]
    scripts = iter([(HEADERS | BODIES)[name][0] for name in names])
    whole = said(HEAD + b"Content-Length: 9\r\n\r\nabcdefghi")

    async with serving(lambda say: next(scripts, whole)(say)) as port:
        storage = HttpStorage(HttpOptions(retries=20, timeout_s=0.06))
        try:
            blocks = [block async for block in storage.blocks(f"http://127.0.0.1:{port}/x")]
        finally:
            await storage.aclose()
    assert b"".join(blocks) == b"abcdefghi"


@pytest.mark.parametrize("name", ["100 and silence", "lines that drip", "no event", "the size of a chunk that drips"])
async def test_idle_timeout_s_bounds_each_wait_for_a_feed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_reader, "PAUSE_S", 0.0)
    script, _ = {**HEADERS, **BODIES, "no event": (said(CHUNKED), BODY)}[name]
    scripts = iter([script])
    event = said(CHUNKED + b"9\r\ndata: 1\n\n\r\n", b"0\r\n\r\n")

    async with serving(lambda say: next(scripts, event)(say)) as port:
        pipe = sl.stream_http(f"http://127.0.0.1:{port}/x", framing="sse", idle_timeout_s=0.06)
        async with pipe.open() as opened:
            assert (await anext(opened)).data == "1"
    assert "idle_timeout_s" in caplog.messages[0]
    assert "timeout on reading" not in caplog.text.lower()


@pytest.mark.parametrize("name", ["nothing", "half a body"])
@pytest.mark.parametrize("limit", [{"timeout_s": 0.1}, {"deadline_s": 0.1, "timeout_s": 50}], ids=str)
async def test_object_stores_keep_the_same_limits(name: str, limit: dict[str, Any], obstore_is_warm: None) -> None:
    script, _ = (HEADERS | BODIES)[name]
    async with serving(script) as port:
        options = {"endpoint": f"http://127.0.0.1:{port}", "region": "r", "skip_signature": True, "allow_http": True}
        storage = ObjectStorage(options, HttpOptions(**{"retries": 0, **limit}))
        try:
            with pytest.raises(ReadError, match="s3://b/x: "):
                [block async for block in storage.blocks("s3://b/x")]
            for pattern in ("s3://b/x/*", "s3://b/x/**"):
                with pytest.raises(ReadError, match="s3://b/x"):
                    await storage.list(pattern)
        finally:
            await storage.aclose()
