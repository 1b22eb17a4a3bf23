"""Maps whose calls are limited together: never more than the limit, on each backend, whatever happens to the calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import cloudpickle
import pytest

import streamline as sl
from streamline.backends.hosts.host_server import Spec
from streamline.backends.hosts.plan_shipping import ship
from streamline.backends.hosts.pool import may_share_workers
from streamline.backends.ipc.pickling import load
from streamline.core.tasks import Session
from streamline.errors import PlanError, PlanTypeError
from streamline.pipeline import Pipeline
from streamline.runtime.pause import QUIESCE_S
from streamline.transforms import retry
from tests.copying_backend import Copying
from tests.kit import in_virtual_time
from tests.laws.profile import covering

LENGTH = 60

BACKENDS: dict[str, Any] = {
    "inline": sl.Inline(),
    "hosts that copy": Copying(3),
    "threads": sl.Threads(3),
}


class Calls:
    """Counts the calls that run at once, in all threads. The first ones wait until `full` of them do."""

    def __init__(self, full: int = 1) -> None:
        self._lock = threading.Lock()
        self._full = threading.Event()
        self._wanted = full
        self.now = self.most = self.made = 0

    def begin(self) -> None:
        with self._lock:
            self.made += 1
            self.now += 1
            self.most = max(self.most, self.now)
            if self.most >= self._wanted:
                self._full.set()

    def end(self) -> None:
        with self._lock:
            self.now -= 1

    async def task(self, item: int) -> int:
        self.begin()
        try:
            while not self._full.is_set():
                await anyio.lowlevel.checkpoint()
            for _ in range(item % 5):
                await anyio.lowlevel.checkpoint()
        finally:
            self.end()
        return item

    def thread(self, item: int) -> int:
        self.begin()
        self._full.wait()
        time.sleep(item % 3 / 10_000)
        self.end()
        return item


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("backend", "kind", "concurrency"), covering(BACKENDS, ["tasks", "threads", "both"], [1, 7]))
def test_as_many_calls_as_the_limit_and_no_more(backend: str, kind: str, concurrency: int) -> None:
    """8 shards of two stages, of up to 16 calls each: `full` would never come if fewer ran."""
    calls, limit = Calls(full=concurrency), sl.Limit(concurrency)
    ways: dict[str, list[dict[str, Any]]] = {"tasks": [{"fn": calls.task}], "threads": [threaded(calls)]}
    ways["both"] = [*ways["tasks"], *ways["threads"]]
    first, second = ways[kind][0], ways[kind][-1]
    pipe = sl.from_items(range(LENGTH)).shard(8)
    pipe = pipe.map(**first, name="first", concurrency=16, limit=limit)
    pipe = pipe.map(**second, name="second", concurrency=16, ordered=False, limit=limit).merge()
    after = pipe.map(**first, name="after", concurrency=16, limit=limit)
    with after.open(backend=BACKENDS[backend]) as stream:
        assert sorted(stream) == list(range(LENGTH))
    assert calls.most == concurrency
    assert calls.made == 3 * LENGTH


def threaded(calls: Calls) -> dict[str, Any]:
    return {"fn": calls.thread, "executor": "thread"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("backend", "ordered", "burst"), covering(BACKENDS, [True, False], [None, 1]))
def test_threads_that_wait_for_both_permits_and_tokens_get_them(
    backend: str, ordered: bool, burst: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A permit comes back in a callback of the event loop, where no task runs."""
    calls, limit = Calls(), sl.Limit(1, per_second=2000, burst=burst)
    pipe = sl.from_items(range(30)).shard(3)
    pipe = pipe.map(**threaded(calls), name="call", concurrency=8, ordered=ordered, limit=limit)
    with pipe.open(backend=BACKENDS[backend]) as stream:
        assert sorted(stream) == list(range(30))
    assert calls.most == 1
    assert not caplog.records


# Failures, retries, closes --------------------------------------------------------------------------------------------


def test_a_call_that_waits_for_its_next_try_has_no_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_jitter", SimpleNamespace(uniform=lambda least, most: most))
    made: list[tuple[int, float]] = []

    async def call(item: int) -> int:
        made.append((item, anyio.current_time()))
        if item == 0 and len(made) == 1:
            raise ConnectionError("busy")
        return item

    async def work() -> list[int]:
        pipe = sl.from_items(range(4)).map(call, concurrency=4, retries=1, backoff=60.0, limit=limit)
        async with pipe.open() as stream:
            return [item async for item in stream]

    limit = sl.Limit(1, per_second=1, burst=1)
    assert in_virtual_time(work) == [0, 1, 2, 3]
    begun = made[0][1]
    assert [(item, round(at - begun, 3)) for item, at in made] == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 60)]


def test_a_try_takes_a_permit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    async def call(item: int) -> int:
        made.append(anyio.current_time())
        if len(made) < 4:
            raise ConnectionError("busy")
        return item

    async def work() -> list[int]:
        pipe = sl.from_items([7]).map(call, retries=5, backoff=0.0, limit=sl.Limit(per_second=0.5, burst=1))
        async with pipe.open() as stream:
            return [item async for item in stream]

    assert in_virtual_time(work) == [7]
    assert [round(at - made[0], 3) for at in made] == [0, 2, 4, 6]


@pytest.mark.parametrize("options", [{"concurrency": 5}, {"concurrency": 5, "executor": "thread"}], ids=str)
@pytest.mark.parametrize("ordered", [True, False])
def test_calls_that_fail_give_their_permits_back(options: dict[str, Any], ordered: bool) -> None:
    calls = Calls()

    def fail(item: int) -> int:
        calls.begin()
        try:
            if item % 3 == 1:
                raise ValueError(item)
        finally:
            calls.end()
        return item

    async def fail_later(item: int) -> int:
        return fail(item)

    fn: Any = fail if "executor" in options else fail_later
    pipe = sl.from_items(range(60)).shard(3).map(fn, ordered=ordered, limit=sl.Limit(2), **options)
    with pipe.open(on_error="skip", max_errors=None) as stream:
        assert sorted(stream) == [item for item in range(60) if item % 3 != 1]
    assert calls.most <= 2
    retried = sl.from_items(range(9)).map(fn, ordered=ordered, retries=2, backoff=0.0, limit=sl.Limit(2), **options)
    with retried.open(on_error="skip", max_errors=None) as stream:
        assert sorted(stream) == [item for item in range(9) if item % 3 != 1]


@pytest.mark.parametrize("ordered", [True, False])
def test_calls_that_wait_when_one_before_them_fails_are_not_made(ordered: bool) -> None:
    made: list[int] = []

    async def fail(item: int) -> int:
        made.append(item)
        await anyio.lowlevel.checkpoint()
        if item == 3:
            raise ValueError(item)
        return item

    pipe = sl.from_items(range(40)).map(fail, concurrency=40, ordered=ordered, limit=sl.Limit(1))
    with pipe.open() as stream, pytest.raises(ValueError, match="3"):
        list(stream)
    assert made == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["tasks", "threads"])
def test_calls_of_a_pass_that_was_left_count_until_they_are_over(kind: str) -> None:
    """`.take` leaves calls behind, which in threads go on while the next pass begins."""
    calls = Calls()
    way: dict[str, Any] = threaded(calls) if kind == "threads" else {"fn": calls.task}
    pipe = sl.from_items(range(50)).shard(2).map(**way, name="call", concurrency=8, limit=sl.Limit(3))
    assert len(list(pipe.take(5).repeat(6))) == 60
    assert calls.most <= 3


@pytest.mark.parametrize("kind", ["tasks", "threads"])
def test_a_pause_does_not_wait_for_calls_that_wait(kind: str, run: Callable[..., None]) -> None:
    begun = anyio.Event()
    go_on = threading.Event()

    async def task(item: int) -> int:
        begun.set()
        while not go_on.is_set():
            await anyio.lowlevel.checkpoint()
        return item

    def thread(item: int) -> int:
        go_on.wait()
        return item

    async def test() -> None:
        way: dict[str, Any] = {"fn": thread, "executor": "thread"} if kind == "threads" else {"fn": task}
        pipe = sl.from_items(range(20)).map(**way, name="call", concurrency=10, limit=sl.Limit(1))
        async with pipe.open() as stream, anyio.create_task_group() as group:
            group.start_soon(anext, stream)
            await anyio.wait_all_tasks_blocked() if kind == "threads" else await begun.wait()
            go_on.set()
            with anyio.fail_after(QUIESCE_S / 2):  # after that, what is still at work is named
                async with stream.paused():
                    pass
            group.cancel_scope.cancel()

    run(test)


# Plans ----------------------------------------------------------------------------------------------------------------


async def fetch(item: int) -> int:
    return item


def two_stages(limit: sl.Limit | None, other: sl.Limit | None) -> Pipeline[int]:
    pipe = sl.from_items(range(6)).shard(2).map(fetch, concurrency=64, limit=limit)
    return pipe.map(fetch, name="store", concurrency=8, limit=other)


def test_the_plan_shows_what_a_limit_is_of() -> None:
    shared = sl.Limit(16, per_second=100, burst=20)
    text = str(two_stages(shared, shared))
    line = "limits      Limit(16, per_second=100, burst=20) for map(fetch) and map(store), all 2 shards together"
    assert line in text.splitlines()
    assert "map(fetch, concurrency=64, limit=Limit(16, per_second=100, burst=20)): up to 128 calls, as many" in text
    apart = str(two_stages(sl.Limit(16), sl.Limit(16)))
    assert "Limit(16) for map(fetch), all" in apart
    assert "Limit(16) for map(store), all" in apart
    assert "64 calls, of Limit(16)" in apart
    assert "of Limit(16)" in two_stages(sl.Limit(16), None).draw().mermaid
    one = sl.from_items(range(3)).map(fetch, limit=sl.Limit(2))
    assert "limits      Limit(2) for map(fetch)\n" in str(one)


def test_a_pickled_plan_keeps_which_stages_share_a_limit() -> None:
    shared = sl.Limit(2)
    mixed = sl.mix([sl.from_items(range(3)).map(fetch, limit=shared), sl.from_items(range(3)).map(fetch)])
    for pipe, count in (
        (two_stages(shared, shared), 1),
        (two_stages(sl.Limit(2), sl.Limit(2)), 2),
        (mixed.shard(2).map(fetch, name="next", limit=shared).merge().map(fetch, name="last", limit=sl.Limit(2)), 2),
    ):
        assert [len(copy.plan.limits) for copy in (pipe, cloudpickle.loads(cloudpickle.dumps(pipe)))] == [count] * 2
    shipped = ship(Spec.of(pipe.plan, Session()))
    of_hosts = load(os.dup(shipped.fileno())).plan
    assert of_hosts.limits == pipe.plan.limits[:1]
    assert of_hosts.worker[-1].call_limit is of_hosts.source.components[0][1].plan.worker[-1].call_limit


def test_a_limit_of_two_streams_is_counted_in_each() -> None:
    """Each would wait for ever for the other's permit."""
    first, second = Calls(), Calls()
    limit = sl.Limit(1)
    pipes = [sl.from_items(range(9)).map(calls.task, concurrency=4, limit=limit) for calls in (first, second)]
    with pipes[0].open() as one, pipes[1].open() as other:
        assert [(next(one), next(other)) for _ in range(9)] == [(item, item) for item in range(9)]
    assert (first.most, second.most) == (1, 1)


def test_a_limit_is_no_part_of_a_snapshot() -> None:
    with two_stages(sl.Limit(2), sl.Limit(3)).open() as stream:
        first = [next(stream) for _ in range(2)]
        snapshot = stream.snapshot()
    with two_stages(None, sl.Limit(per_second=1e6)).open(resume=snapshot) as stream:
        assert first + list(stream) == list(range(6))


def test_how_long_calls_have_waited_is_counted() -> None:
    with two_stages(sl.Limit(1), None).open() as stream:
        list(stream)
        first, second = stream.stats().stages[1:3]
    assert first.detail("limited_s") >= 0
    assert [detail.name for detail in second.details] == []


def test_workers_that_share_a_host_with_a_peer_have_their_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.backends.hosts.pool.in_a_job", lambda _: True)
    site: Any = SimpleNamespace(num_shards=1, tasks=SimpleNamespace(session=Session()))
    assert may_share_workers(two_stages(None, None).plan, site)
    assert not may_share_workers(two_stages(sl.Limit(2), None).plan, site)


def test_what_waits_for_nothing_has_no_limit() -> None:
    with pytest.raises(PlanError, match=r"limit=\) are for async functions and executor='thread'"):
        sl.from_items(range(3)).map(abs, limit=sl.Limit(2))
    with pytest.raises(PlanTypeError, match=r"\.map\(limit=\) is a sl\.Limit"):
        sl.from_items(range(3)).map(fetch, limit=16)  # type: ignore[call-overload]
