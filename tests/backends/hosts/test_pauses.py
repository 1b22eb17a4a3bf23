"""`paused()` over hosts: nothing moves in any of them, and what doesn't rest is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.gate import Phase
from streamline.testing.subjects import settle
from tests.backends.hosts.disturbing import connections_of
from tests.backends.hosts.kit import on_each
from tests.copying_backend import Copying, HostDeath
from tests.laws.profile import sampled

BACKENDS: list[Backend] = [sl.Threads(2), Copying(2)]
HERE: list[Backend] = [sl.Inline(), Copying(2)]
"""Whose functions run in the test's own event loop, so that what they wait for can be an event of it."""

COUNT = 40


class Calls:
    """An async function that notes its calls, and holds those from the fifth item on until it is released."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.open = anyio.Event()

    async def __call__(self, item: int) -> int:
        self.started.append(item)
        if item >= 4:
            await self.open.wait()
        self.ended.append(item)
        return item


class Held:
    """A sync function that stands still at one item until it is released."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.called: list[int] = []
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, item: int) -> int:
        self.called.append(item)
        if item == self.at:
            self.entered.set()
            assert self.go.wait(200)
        return item


@on_each(BACKENDS)
def test_nothing_is_called_inside_and_nothing_is_lost(backend: Backend) -> None:
    called: list[int] = []

    def note(item: int) -> int:
        called.append(item)
        return item

    pipe = sl.from_items(range(5_000)).shard(3).map(note)
    found: list[int] = []
    with pipe.open(backend=backend) as stream:
        for item in stream:
            found.append(item)
            if len(found) in (1, 7, 1_000, 4_000):
                with stream.paused() as at_work:
                    assert at_work == ()
                    before = len(called), stream.snapshot().to_json()
                    for _ in range(20):
                        stream._loop_thread.signal(anyio.Event())
                    assert (len(called), stream.snapshot().to_json()) == before
    assert found == list(range(5_000))


@pytest.mark.anyio
@on_each(HERE)
async def test_calls_at_work_end_and_no_new_one_starts(backend: Backend) -> None:
    calls = Calls()
    pipe = sl.from_items(range(COUNT)).shard(2).map(calls, concurrency=2, name="ask")
    async with pipe.open(backend=backend) as stream:
        found = [await anext(stream)]
        await settle()
        async with anyio.create_task_group() as group:

            async def enter() -> None:
                async with stream.paused() as at_work:
                    assert at_work == ()
                    assert stream._session.gate.phase is Phase.PAUSED
                    assert len(calls.ended) == len(calls.started) == running
                    await settle()
                    assert len(calls.started) == running

            running = len(calls.started)
            group.start_soon(enter)
            await settle()
            assert stream._session.gate.phase is Phase.QUIESCING
            calls.open.set()
        found += [item async for item in stream]
    assert found == list(range(COUNT))


@pytest.mark.anyio
async def test_what_does_not_rest_is_named_with_its_host() -> None:
    calls = Calls()
    pipe = sl.from_items(range(COUNT)).shard(2).map(calls, concurrency=2, name="ask")
    async with pipe.open(backend=Copying(2)) as stream:
        found = [await anext(stream)]
        await settle()
        async with stream.paused(quiesce_timeout=0.01) as at_work:
            assert at_work == (
                "map(ask) of shard 0 (2 calls) in copying host 0",
                "map(ask) of shard 1 (2 calls) in copying host 1",
            )
            started = len(calls.started)
            calls.open.set()
            await settle()
            assert len(calls.started) == started
            stream.snapshot().to_json()
        found += [item async for item in stream]
    assert sorted(found) == list(range(COUNT))


@contextmanager
def paused_but_for_one(stream: sl.SyncStream[Any]) -> Iterator[tuple[str, ...]]:
    """Pause; where the machine does much else, what isn't stuck may need longer to come to rest, or to be told of."""
    for timeout_s in (0.2, 2, 20):
        with stream.paused(quiesce_timeout=timeout_s) as at_work:
            if len(at_work) == 1 and at_work[0].startswith("map("):
                yield at_work
                return
    with stream.paused(quiesce_timeout=200) as at_work:
        yield at_work


def test_a_function_that_is_stuck_in_a_thread_is_named() -> None:
    held = Held(at=10)
    with sl.from_items(range(COUNT)).shard(2).map(held).open(backend=sl.Threads(2)) as stream:
        found = [next(stream)]
        assert held.entered.wait(200)
        with paused_but_for_one(stream) as at_work:
            assert at_work == ("map(Held) of shard 0 in thread 0",)  # as its meter says: it can't answer itself
            held.go.set()
        found += list(stream)
    assert found == list(range(COUNT))


@pytest.mark.anyio
@pytest.mark.parametrize("received", sampled(range(2, 14), 4))
async def test_a_host_that_dies_takes_no_pause_along(received: int) -> None:
    """It is replaced after the pause: during it, nothing is started."""
    backend = Copying(1, (HostDeath(0, received=received),), max_restarts=10)
    called: list[int] = []

    def note(item: int) -> int:
        called.append(item)
        return item

    found: list[int] = []
    async with sl.from_items(range(600)).map(note).open(backend=backend) as stream:
        async for item in stream:
            found.append(item)
            if item % 50 == 0:
                async with stream.paused() as at_work:
                    assert at_work == ()
                    before = len(called), backend.runs[0].links
                    await settle()
                    assert (len(called), backend.runs[0].links) == before
    assert found == list(range(600))


@pytest.mark.anyio
async def test_a_stream_is_closed_inside_a_pause_in_which_its_host_died() -> None:
    backend = Copying(1, (HostDeath(0, sent=6),), max_restarts=10)
    with anyio.fail_after(200):
        async with sl.from_items(range(5_000)).map(abs).open(backend=backend) as stream:
            await anext(stream)
            async with stream.paused():
                for link in [connection._link for connection in connections_of(stream)]:
                    if link is not None:
                        link.close()
                await settle()
                await stream.aclose()


@on_each(BACKENDS)
def test_a_pause_before_the_first_item_lets_nothing_start(backend: Backend) -> None:
    called: list[int] = []

    def note(item: int) -> int:
        called.append(item)
        return item

    with sl.from_items(range(COUNT)).shard(2).map(note).open(backend=backend) as stream:
        with stream.paused() as at_work:
            assert at_work == ()
            before = len(called)
            for _ in range(20):
                stream._loop_thread.signal(anyio.Event())
            assert len(called) == before
        assert list(stream) == list(range(COUNT))


def test_in_processes_nothing_is_called_inside_and_what_is_stuck_is_named(tmp_path: Path, processes: Backend) -> None:
    called, go = tmp_path / "called", tmp_path / "go"
    called.touch()

    def note(item: int) -> int:
        with called.open("a") as file:
            file.write(f"{item}\n")
        while item == 2_100 and not go.exists():
            time.sleep(0.01)
        return item

    with sl.from_items(range(2_200)).shard(2).map(note).open(backend=processes) as stream:
        found = [next(stream)]
        with stream.paused() as at_work:
            assert at_work == ()
            before = called.stat().st_size
            stream.snapshot()
            stream.stats()
            assert called.stat().st_size == before
        while "2100\n" not in called.read_text():
            found.append(next(stream))
        with paused_but_for_one(stream) as at_work:
            (name,) = at_work
            assert name.startswith("map(note) of shard 0 in process 0, pid ")
            go.touch()
        found += list(stream)
    assert found == list(range(2_200))
