"""Requests that are late are sent once more; the first to answer wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core.meters import Traffic
from streamline.errors import PlanError, ReadError
from streamline.io.storage import resolve as finding
from streamline.io.storage.http import HttpStorage
from streamline.io.storage.options import HttpOptions


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for nothing when a pipeline is opened: what is scripted here are the requests of the reading."""
    monkeypatch.setattr(finding, "MOST_ASKED", 0)


class Stalling:
    """Says nothing to some requests until the client has gone, which it counts."""

    def __init__(self) -> None:
        self.gone = asyncio.Semaphore(0)
        self.numbers = 0

    async def one_in_ten(self, server: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        self.numbers += 1
        if self.numbers % 10:
            await server.serve(server, request, writer)
        else:
            await self.silence(server, request, writer)

    async def silence(self, server: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        reader = writer.transport.get_protocol()._stream_reader  # type: ignore[attr-defined]
        await reader.read()
        self.gone.release()


@asynccontextmanager
async def reading(**options: Any) -> AsyncIterator[tuple[HttpStorage, Traffic]]:
    traffic = Traffic()
    storage = HttpStorage(HttpOptions(**options), traffic)
    try:
        yield storage, traffic
    finally:
        await storage.aclose()


async def test_one_silent_answer_in_ten_holds_nothing_up(server: Any) -> None:
    server.objects = {f"{number:03d}": b"%d" % number for number in range(60)}
    stalling = Stalling()
    server.script = [stalling.one_in_ten] * 1000
    urls = [server.url(path) for path in server.objects]
    http = sl.HttpOptions(hedge_after_s=0.2, timeout_s=1000)  # after which a request would be made again
    with anyio.fail_after(200):
        async with sl.read_files(urls, http=http, concurrency=4).open() as stream:
            assert [item.data async for item in stream] == list(server.objects.values())
            (read,) = stream.stats().reads
    assert read.hedged >= 6
    assert read.requests == 60 + read.hedged
    assert read.retries == 0
    with anyio.fail_after(200):
        for _ in range(read.hedged):  # the losers' connections are closed
            await stalling.gone.acquire()


async def test_answers_in_time_are_asked_for_once(server: Any) -> None:
    server.objects = {"a": b"abc"}
    async with reading(hedge_after_s=30) as (storage, traffic):
        assert await storage.read(server.url("a"), 0, 3) == b"abc"
    assert (traffic.requests, traffic.hedged) == (1, 0)


async def test_a_first_answer_that_is_late_may_still_win(server: Any) -> None:
    server.objects = {"a": b"abc"}
    second, stalling = asyncio.Event(), Stalling()

    async def late(server: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        await second.wait()
        await server.serve(server, request, writer)

    async def silent(server: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        second.set()
        await stalling.silence(server, request, writer)

    server.script = [late, silent]
    async with reading(hedge_after_s=0.05) as (storage, traffic):
        assert await storage.read(server.url("a"), 0, 3) == b"abc"
        assert (traffic.requests, traffic.hedged) == (2, 1)
        with anyio.fail_after(200):
            await stalling.gone.acquire()


async def test_one_of_two_that_fails_leaves_it_to_the_other(server: Any) -> None:
    server.objects = {"a": b"abc"}
    failed = asyncio.Event()

    async def late(server: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        await failed.wait()
        await server.serve(server, request, writer)

    async def broken(server: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        failed.set()

    server.script = [late, broken, broken]  # aiohttp itself asks once more where a connection is closed
    async with reading(hedge_after_s=0.05, retries=0) as (storage, _):
        assert await storage.read(server.url("a"), 0, 3) == b"abc"


async def test_a_refusal_is_told_as_without_hedging(server: Any) -> None:
    async with reading(hedge_after_s=5) as (storage, _):
        with pytest.raises(ReadError, match="404"):
            await storage.read(server.url("a"), 0, 3)


async def test_two_that_are_silent_time_out(server: Any) -> None:
    server.objects = {"a": b"abc"}
    stalling = Stalling()
    server.script = [stalling.silence] * 20
    async with reading(hedge_after_s=0.05, timeout_s=1, retries=1) as (storage, traffic):
        with pytest.raises(ReadError, match="the server stalled"):
            await storage.read(server.url("a"), 0, 3)
        assert traffic.hedged == 2


async def test_streams_and_more_than_8_mib_are_not_hedged(server: Any) -> None:
    server.objects = {"a": b"abc"}

    async def late(server: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        await server.serve(server, request, writer)

    server.script = [late, late]
    async with reading(hedge_after_s=0.01) as (storage, traffic):
        assert await storage.read(server.url("a"), 0, None) == b"abc"
        with pytest.raises(ReadError):
            await storage.read(server.url("a"), 0, 8 * 2**20 + 1)
        assert traffic.hedged == 0


async def test_leaving_while_both_are_on_their_way_leaves_nothing(server: Any) -> None:
    server.objects = {"a": b"abc"}
    stalling = Stalling()
    server.script = [stalling.silence] * 4
    async with reading(hedge_after_s=0.02) as (storage, traffic):
        async with anyio.create_task_group() as group:
            group.start_soon(storage.read, server.url("a"), 0, 3)
            while len(server.requests) < 2:  # noqa: ASYNC110 - the server runs in this loop, and tells nobody
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
        with anyio.fail_after(200):
            await stalling.gone.acquire()
            await stalling.gone.acquire()
        assert traffic.hedged == 1


@pytest.mark.parametrize("given", [0, -1, float("nan")])
def test_seconds_that_are_none_are_refused(given: float) -> None:
    with pytest.raises(PlanError, match="hedge_after_s"):
        HttpOptions(hedge_after_s=given)
