"""Endless HTTP responses: connected again after every end, nothing lost or doubled where the server goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.meters import Traffic
from streamline.errors import DataError, PlanError, PlanTypeError, ReadError
from streamline.io.formats.line_decoding import BOM
from streamline.pipeline import Pipeline
from streamline.sources import disk_journal as directory
from streamline.sources import http_stream as http_reader
from streamline.sources.framing import framer_of
from streamline.sources.http_stream import EndlessRequest
from tests.laws.profile import in_turn
from tests.servers.nginx import Nginx
from tests.serving import Behaviour, Request, Server

from .live_kit import rest, some


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_reader, "PAUSE_S", 0.0)


def sse(first: int, last: int) -> bytes:
    """Return events of every form; event i has the id and the data i."""
    forms = ("id: {0}\ndata: {0}\n\n", "data: {0}\r\nid: {0}\r\n\r\n", ": comment\nevent: x\nid:{0}\ndata:{0}\r\r")
    return "".join(forms[i % 3].format(i) for i in range(first, last)).encode()


def answer(
    body: bytes,
    *,
    cut: int | None = None,
    kind: str = "text/event-stream",
    chunked: bool = True,
    hold: bool = False,
    headers: tuple[str, ...] = (),
) -> Behaviour:
    """Return a behaviour: a body, of which `cut` bytes come before the connection breaks; or it is held open."""

    async def behave(server: Server, request: Request, writer: asyncio.StreamWriter) -> None:
        head = ["HTTP/1.1 200 OK", f"Content-Type: {kind}", *headers, "Connection: close"]
        if chunked:
            head.append("Transfer-Encoding: chunked")
        sent = body[:cut]
        writer.write("\r\n".join([*head, "", ""]).encode())
        writer.write(b"%x\r\n%s\r\n" % (len(sent), sent) if chunked and sent else sent)
        if hold:
            await writer.drain()
            await writer.wait_closed()
        elif chunked and cut is None:
            writer.write(b"0\r\n\r\n")

    return behave


def served(count: int, at_most: int = 1000) -> Behaviour:
    """Return a behaviour: the events after the one that the client names, `at_most`; 204 after the last one."""

    async def behave(server: Server, request: Request, writer: asyncio.StreamWriter) -> None:
        first = int(request.headers.get("last-event-id", -1)) + 1
        if first == count:
            await Server.status(server, request, writer, code="204 No Content")
        else:
            await answer(sse(first, min(count, first + at_most)))(server, request, writer)

    return behave


def numbers(items: list[Any]) -> list[int]:
    assert all(item.id == item.data for item in items)
    return [int(item.data) for item in items]


async def gather(pipe: Pipeline[Any], into: list[Any]) -> None:
    """Read to the end or the failure; what came is in `into`."""
    async with pipe.open() as opened:
        async for item in opened:
            into.append(item)  # noqa: PERF401 - what came before a failure stays


def always(server: Server, behaviour: Behaviour) -> None:
    """Let every request after the script be answered so."""
    server.serve = behaviour  # type: ignore[method-assign,assignment]


def stream(server: Server, framing: Any = "sse", **options: Any) -> Pipeline[Any]:
    return sl.stream_http(server.url("feed"), framing=framing, **options)


@pytest.mark.long
async def test_cut_at_every_byte_events_come_exactly_once(server: Server) -> None:
    body = sse(0, 6)
    always(server, served(6))
    for cut, chunked in in_turn(range(len(body) + 1), [True, False]):
        server.script = [answer(body, cut=cut, chunked=chunked)]
        assert numbers([item async for item in stream(server)]) == list(range(6)), (cut, chunked)


async def test_cut_at_every_byte_lines_are_whole_or_not_there(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = [{"a": 1}, "two", [3], 4]
    body = b"\n".join(json.dumps(line).encode() for line in lines) + b"\n\n"
    for cut in range(len(body) + 1):
        caplog.clear()
        server.script = [answer(body, cut=cut), answer(b'"behind"\n', hold=True)]
        whole = body[:cut].count(b"\n") if cut < len(body) else len(lines)
        async with stream(server, "jsonl").open() as opened:
            items = [await anext(opened) for _ in range(whole + 1)]
        assert items == [*lines[:whole], "behind"]
        left = cut - (body.rfind(b"\n", 0, cut) + 1)
        assert (f"; {left} bytes of an unfinished line were dropped; connecting again" in caplog.text) == (left > 0)


async def test_the_last_line_of_a_whole_answer_may_lack_its_end(server: Server) -> None:
    server.script = [answer(b"a\nb"), answer(b"c\nd", chunked=False), answer(b"e\n", hold=True)]
    async with stream(server, "lines", idle_timeout_s=math.inf, give_up_s=math.inf).open() as opened:
        assert [await anext(opened) for _ in range(4)] == ["a", "b", "c", "e"]


@pytest.mark.parametrize(("framing", "first", "second"), [("lines", "1", "\ufeff2"), ("jsonl", 1, 2)])
async def test_a_byte_order_mark_at_the_start_of_an_answer_is_no_part_of_its_first_line(
    server: Server, framing: Any, first: Any, second: Any
) -> None:
    body = BOM + b"1\n" + (BOM if framing == "lines" else b"") + b"2\n"
    for size in (1, 100):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        framer = framer_of(framing, len(str(second).encode()), "")
        assert [item for piece in pieces for item in framer.feed(piece)] == [first, second]
    server.script = [answer(body), answer(BOM), answer(body, hold=True)]
    async with stream(server, framing, idle_timeout_s=math.inf, give_up_s=math.inf).open() as opened:
        assert [await anext(opened) for _ in range(4)] == [first, second, first, second]


async def test_bytes_are_what_came_in_order(server: Server) -> None:
    server.script = [answer(b"abc" * 200_000), answer(b"x", hold=True)]
    seen = b""
    async with stream(server, "bytes").open() as opened:
        while not seen.endswith(b"x"):
            seen += await anext(opened)
    assert seen == b"abc" * 200_000 + b"x"


async def test_trouble_that_passes_is_endured(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def reset(server: Server, request: Request, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def drip(server: Server, request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for byte in sse(4, 6):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    always(server, served(10, at_most=2))
    busy = server.faulty("status", code="503 Service Unavailable", headers=("Retry-After: 0",))
    server.script = [reset, busy, busy, answer(sse(0, 3), cut=20), answer(sse(1, 4), hold=True), busy, reset, drip]
    seen = [item async for item in stream(server, idle_timeout_s=0.2)]
    assert numbers(seen) == list(range(10))
    assert "503 Service Unavailable; connecting again" in caplog.text
    assert "nothing came for idle_timeout_s; connecting again" in caplog.text
    asked = [request.headers.get("last-event-id") for request in server.requests]
    assert asked == [None, None, None, None, "0", "3", "3", "3", "5", "7", "9"]
    assert server.requests[0].headers["accept"] == "text/event-stream"


@pytest.mark.parametrize(
    ("code", "headers", "says"),
    [
        ("401 Unauthorized", (), "401 Unauthorized: give credentials"),
        ("403 Forbidden", (), "403 Forbidden: check the credentials"),
        ("404 Not Found", (), "404 Not Found: check the URL"),
        ("206 Partial Content", (), "expected an endless answer, got 206"),
        ("302 Found", ("Location: /feed",), "redirected .* a loop"),
    ],
)
async def test_what_is_refused_fails_at_once(server: Server, code: str, headers: tuple[str, ...], says: str) -> None:
    always(server, server.faulty("status", code=code, headers=headers))
    with pytest.raises(ReadError, match=says):
        await rest(stream(server), None)
    assert len(server.requests) <= 11


async def test_a_page_that_is_no_stream_of_events_is_refused(server: Server) -> None:
    always(server, answer(b"<html>log in</html>", kind="text/html; charset=utf-8"))
    with pytest.raises(
        ReadError, match=r"expected server-sent events \(text/event-stream\), the server sends text/html"
    ):
        await rest(stream(server), None)


async def test_a_server_that_has_never_answered_is_given_up_soon(server: Server) -> None:
    always(server, server.faulty("status", code="503 Service Unavailable"))
    with pytest.raises(ReadError, match="failed 3 times, and has never answered: the server answered 503"):
        await rest(stream(server, http=sl.HttpOptions(retries=2)), None)
    assert len(server.requests) == 3


async def test_a_server_that_is_gone_is_given_up_after_give_up_s_with_all_that_came(server: Server) -> None:
    server.script = [answer(sse(0, 3))]
    always(server, server.faulty("status", code="500 Internal Server Error"))
    seen: list[Any] = []
    with pytest.raises(ReadError, match=r"no answer for 0 s, \d+ attempts, the last one: .* 500 .*raise give_up_s"):
        await gather(stream(server, http=sl.HttpOptions(retries=1), give_up_s=0.05), seen)
    assert numbers(seen) == [0, 1, 2]


async def test_the_server_says_how_long_to_wait(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    busy = server.faulty("status", code="429 Too Many Requests", headers=("Retry-After: 1",))
    server.script = [answer(b"retry: 40\ndata: 1\nid: 1\n\n"), busy, answer(b"id: 2\ndata: 2\n\n", cut=16)]
    always(server, server.faulty("status", code="204 No Content"))
    assert numbers([item async for item in stream(server)]) == [1, 2]
    pauses = [float(told) for told in re.findall(r"again in ([\d.]+) s", caplog.text)]
    assert 0.04 <= pauses[0] <= 0.06
    assert pauses[1] == 1.0
    assert 0.04 <= pauses[2] <= 0.06


def test_pauses_double_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(http_reader, "PAUSE_S", 0.5)
    monkeypatch.setattr(anyio, "sleep", sleep)

    async def main() -> None:
        request = EndlessRequest(url="http://host/", framing="lines")
        reader = http_reader._FeedReader(request, None, Traffic(), 5, "")  # type: ignore[arg-type]
        for _ in range(9):
            await reader.pause()

    asyncio.run(main())
    for pause_s, least in zip(slept, (0.5, 1, 2, 4, 8, 16, 30, 30, 30), strict=True):
        assert least <= pause_s <= least * 1.5


async def test_an_empty_answer_ends_events_and_nothing_else(server: Server) -> None:
    empty = server.faulty("status", code="204 No Content")
    server.script = [empty, empty, answer(b"a\n", hold=True)]
    async with stream(server, "lines").open() as opened:
        assert await anext(opened) == "a"
    server.script = [empty]
    assert await rest(stream(server), None) == []


async def test_what_is_no_item_fails_after_the_items_before_it(server: Server) -> None:
    server.script = [answer(b'{"a": 1}\n{"b": \n')]
    seen: list[Any] = []
    with pytest.raises(DataError, match=r"feed, after byte 0 .*line 2 .*expected one JSON value.*framing=\"lines\""):
        await gather(stream(server, "jsonl"), seen)
    assert seen == [{"a": 1}]
    server.script = [answer(b"data: " + b"x" * 200)]
    with pytest.raises(DataError, match="an event of at most 100 bytes"):
        await rest(stream(server, max_item_bytes=100), None)


async def test_compressed_on_the_wire(server: Server) -> None:
    server.script = [answer(gzip.compress(sse(0, 500)), headers=("Content-Encoding: gzip",))]
    always(server, served(500))
    assert numbers(await rest(stream(server), None)) == list(range(500))
    assert "gzip" in server.requests[0].headers["accept-encoding"]


async def test_resumed_at_every_event_the_server_is_told_the_last_one_that_was_read(server: Server) -> None:
    always(server, served(9, at_most=4))
    for shards in (1, 2):
        for count in range(10):
            pipe = stream(server).shard(shards).merge()
            seen, snapshot = await some(pipe, count)
            read = (snapshot.journal or {}).get("read", 0)
            del server.requests[:]
            assert numbers(seen + await rest(pipe, snapshot)) == list(range(9))
            assert server.requests[0].headers.get("last-event-id") == (str(read - 1) if read else None)


async def test_interrupted_five_times_with_windows_nothing_is_lost_or_doubled(server: Server, tmp_path: Path) -> None:
    always(server, served(60, at_most=7))
    for journal in (None, tmp_path / "journal"):
        pipe = stream(server, journal=journal).shard(3).shuffle(window=5).merge().batch(4, collate=None).unbatch()
        seen: list[Any] = []
        snapshot = None
        for count in (0, 5, 11, 1, 20):
            more, snapshot = await some(pipe, count, snapshot)
            seen += more
            if journal is not None:
                snapshot.save(tmp_path / "snapshot.json")
        assert sorted(numbers(seen + await rest(pipe, snapshot))) == list(range(60))


async def test_a_journal_whose_files_are_all_trimmed_still_knows_the_last_event(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "SEGMENT_BYTES", 1)
    always(server, served(8))
    seen, snapshot = await some(stream(server, journal=tmp_path / "journal"), 5)
    snapshot.save(tmp_path / "snapshot.json")
    for _ in range(2):
        del server.requests[:]
        more, snapshot = await some(stream(server, journal=tmp_path / "journal"), 0, snapshot)
        assert more == []
    assert numbers(seen + await rest(stream(server, journal=tmp_path / "journal"), snapshot)) == list(range(8))


@pytest.mark.one_in(2, 1)
async def test_the_same_on_every_backend(server: Server, backend: Backend) -> None:
    always(server, served(40, at_most=9))
    pipe = stream(server).shard(4).map(lambda event: int(event.data)).merge()
    async with pipe.open(backend=backend) as opened:
        seen = [await anext(opened) for _ in range(13)]
    snapshot = opened.snapshot()
    async with pipe.open(backend=backend, resume=snapshot) as opened:
        seen += [item async for item in opened]
    assert seen == list(range(40))


async def test_leaving_while_the_server_is_silent(server: Server) -> None:
    """In every way; the fixture `no_leaks` looks for what is left."""
    always(server, answer(b"a\nb\n", hold=True))
    pipe = stream(server, "lines")

    async def broken() -> None:
        async for item in pipe:
            if item == "b":
                break

    async def raising() -> None:
        async with pipe.open() as opened:
            async for _ in opened:
                raise KeyError

    async def timed_out() -> None:
        with anyio.move_on_after(0.1):
            await rest(pipe, None)

    def plain() -> None:
        for item in pipe:
            if item == "b":
                break

    await broken()
    with pytest.raises(KeyError):
        await raising()
    await timed_out()
    await anyio.to_thread.run_sync(plain)
    assert len(server.requests) == 4


async def test_paused_and_gone_on(server: Server) -> None:
    always(server, served(30, at_most=10))
    async with stream(server).shard(2).merge().open() as opened:
        seen = [await anext(opened) for _ in range(3)]
        async with opened.paused():
            await anyio.wait_all_tasks_blocked()
        seen += [item async for item in opened]
    assert numbers(seen) == list(range(30))


async def test_a_loop_that_stops_stops_the_server(server: Server) -> None:
    sent = 0

    async def flood(server: Server, request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while sent < 2**30:
            writer.write(bytes(2**16))
            await writer.drain()
            sent += 2**16

    server.script = [flood]
    async with stream(server, "bytes", max_ahead_bytes=2**20).open() as opened:
        await anext(opened)
        before = -1
        while sent != before:
            before = sent
            await anyio.sleep(0.05)
        assert sent < 2**26  # what waits for the worker, and the buffers of two sockets
        await opened.aclose()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"url": "part.jsonl"}, PlanError, "one http"),
        ({"url": "https://me:secret@x/feed"}, PlanError, r"write https://x/feed and http=HttpOptions\(auth="),
        ({"url": ["http://a/"]}, PlanTypeError, "one http"),
        ({"framing": "xml"}, PlanError, "one of lines, jsonl, sse, bytes, got str 'xml'"),
        ({"http": {}}, PlanTypeError, "HttpOptions"),
        ({"idle_timeout_s": 0}, PlanError, "idle_timeout_s"),
        ({"give_up_s": "1"}, PlanTypeError, "give_up_s"),
        ({"max_item_bytes": 0}, PlanError, "max_item_bytes"),
        ({"max_ahead": 0}, PlanError, r"stream_http\(max_ahead=\)"),
        ({"journal": 1}, PlanTypeError, r"stream_http\(journal=\)"),
        ({"partitioned": 1}, PlanTypeError, r"stream_http\(partitioned=\)"),
    ],
)
def test_options_are_checked_where_they_are_written(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        sl.stream_http(**{"url": "http://host/", "framing": "sse", **options})


def test_it_prints_as_what_it_is() -> None:
    pipe = sl.stream_http("http://host/feed", framing="sse", idle_timeout_s=math.inf, give_up_s=math.inf)
    assert "stream_http 'http://host/feed' (sse)" in str(pipe)


def test_another_framing_is_another_plan() -> None:
    pipes = [sl.stream_http("http://host/", framing=framing) for framing in ("lines", "jsonl")]
    assert pipes[0] != pipes[1]


async def test_through_nginx_that_is_cut_off_by_its_server(server: Server, nginx: Nginx) -> None:
    port = server.base.rpartition(":")[2]
    body = sse(0, 6)
    always(server, served(6))
    for cut in range(0, len(body), 7):
        server.script = [answer(body, cut=cut)]
        pipe: Any = sl.stream_http(nginx.url(f"through/{port}/feed"), framing="sse")
        assert numbers([item async for item in pipe]) == list(range(6))


async def test_what_was_asked_of_the_server_is_counted(server: Server) -> None:
    server.script = [server.faulty("status", code="503 Service Unavailable"), answer(sse(0, 3))]
    always(server, served(3))
    async with stream(server).open() as opened:
        assert numbers([item async for item in opened]) == [0, 1, 2]
        (reads,) = opened.stats().reads
    assert (reads.requests, reads.retries, reads.bytes) == (3, 1, len(sse(0, 3)))
