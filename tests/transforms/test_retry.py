"""Calls that are made again. Where times matter they are virtual: they pass when nothing else can happen."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from multidict import CIMultiDict

import streamline as sl
from streamline.core.gate import Gate
from streamline.errors import PlanError, PlanTypeError, WorkerDied
from streamline.pipeline import Pipeline
from streamline.runtime.pause import QUIESCE_S
from streamline.transforms import retry
from streamline.transforms.retry import RetriedCalls, Retry, Tries
from tests.copying_backend import Copying
from tests.kit import in_virtual_time

WAYS: dict[str, dict[str, Any]] = {
    "tasks": {"concurrency": 3},
    "tasks in no order": {"concurrency": 3, "ordered": False},
    "a thread": {"executor": "thread"},
    "threads": {"executor": "thread", "concurrency": 3},
    "threads in no order": {"executor": "thread", "concurrency": 3, "ordered": False},
}


class BusyError(ConnectionError):
    pass


class Busy:
    """Fails at an item as many times as `times` says, then passes. Counts its calls."""

    def __init__(self, times: Callable[[int], int]) -> None:
        self._times = times
        self.calls: Counter[int] = Counter()

    def __call__(self, item: int) -> int:
        self.calls[item] += 1
        if self.calls[item] <= self._times(item):
            raise BusyError(f"busy with {item}, call {self.calls[item]}")
        return -item


def mapped(fn: Callable[[int], int], way: dict[str, Any], length: int = 30, **options: Any) -> Pipeline[Any]:
    async def task(item: int) -> int:
        await anyio.lowlevel.checkpoint()
        return fn(item)

    given: Any = fn if "executor" in way else task
    return sl.from_items(range(length)).shard(1).map(given, name="call", **way, **options)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_call_that_fails_is_made_again(way: dict[str, Any]) -> None:
    busy = Busy(lambda item: item % 4)
    with mapped(busy, way, retries=3, backoff=0.0).open() as stream:
        found = list(stream)
        stats = stream.stats()
    assert found == [-item for item in range(30)] or (not way.get("ordered", True) and sorted(found) == sorted(found))
    assert sorted(found) == sorted(-item for item in range(30))
    assert busy.calls == {item: 1 + item % 4 for item in range(30)}
    assert stats.stages[1].detail("retries") == sum(item % 4 for item in range(30))
    assert "retries" in str(stats)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_that_fails_too_often_says_how_often(way: dict[str, Any]) -> None:
    busy = Busy(lambda item: 99 if item == 7 else 0)
    with mapped(busy, way, retries=2, backoff=0.0).open() as stream, pytest.raises(BusyError) as failure:
        list(stream)
    assert busy.calls[7] == 3
    assert str(failure.value) == "busy with 7, call 3"
    (note,) = [note for note in failure.value.__notes__ if "times" in note]
    assert note.startswith("the call failed 3 times within ")
    assert note.endswith(" s, before this with BusyError: busy with 7, call 2")
    assert sl.replay(failure.value, fn=lambda item: item) == 7
    with pytest.raises(BusyError, match="call 4"):
        sl.replay(failure.value)
    assert busy.calls[7] == 4  # once, without retries


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_item_is_skipped_after_its_last_try(way: dict[str, Any]) -> None:
    busy = Busy(lambda item: 99 if item % 10 == 7 else item % 2)
    pipe = mapped(busy, way, retries=2, backoff=0.0)
    with pipe.open(on_error="skip", max_errors=None) as stream:
        assert sorted(stream) == sorted(-item for item in range(30) if item % 10 != 7)
        assert stream.errors.total == 3
    assert busy.calls == {item: 3 if item % 10 == 7 else 1 + item % 2 for item in range(30)}


def refuses(error: Exception) -> bool:
    return "refused" not in str(error)


@pytest.mark.parametrize("retry_on", [ConnectionError, (TimeoutError, OSError), refuses], ids=["one", "two", "fn"])
def test_only_chosen_errors_are_followed_by_another_call(retry_on: Any) -> None:
    def fail(item: int) -> int:
        calls.append(item)
        raise (ValueError("refused") if len(calls) == 2 else BusyError("busy"))

    calls: list[int] = []
    with pytest.raises(ValueError, match="refused"):
        list(mapped(fail, WAYS["a thread"], length=1, retries=9, backoff=0.0, retry_on=retry_on))
    assert len(calls) == 2


@pytest.mark.parametrize("error", [PlanTypeError("no awaitable"), WorkerDied("it has ended a process")], ids=type)
def test_what_no_retry_can_mend_is_raised_at_once(error: Exception) -> None:
    assert not Retry.of(retries=3).applies(error)  # type: ignore[union-attr]


# Pauses ---------------------------------------------------------------------------------------------------------------


def retried(fn: Callable[[Any], Any], **options: Any) -> RetriedCalls[Any, Any]:
    chosen = Retry.of(**options)
    assert chosen is not None
    return RetriedCalls(fn, chosen, Gate())


def test_pauses_double_up_to_a_minute_and_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(least: float, most: float) -> float:
        drawn.append((least, most))
        return most

    monkeypatch.setattr(retry, "_jitter", SimpleNamespace(uniform=uniform))

    async def fail(_: None) -> None:
        raise BusyError

    async def work() -> float:
        begun = anyio.current_time()
        with pytest.raises(BusyError):
            await retried(fail, retries=10, backoff=0.5).acall(None)
        return anyio.current_time() - begun

    longest = [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert in_virtual_time(work) == pytest.approx(sum(longest))
    assert drawn == [(0.0, each) for each in longest]
    chosen = Tries(Retry.of(retries=5000, backoff=0.5))  # type: ignore[arg-type]
    assert [chosen.pause_s(BusyError()) for _ in range(3000)][-1] == 60  # 2 ** 3000 is no float


class HttpError(Exception):
    """As those of aiohttp (`headers`) and httpx or requests (`response`) are."""

    def __init__(self, headers: Any = None, response: Any = None, retry_after: Any = None) -> None:
        self.headers, self.response, self.retry_after = headers, response, retry_after


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (HttpError({"Retry-After": "7"}), 7),
        (HttpError(CIMultiDict({"retry-after": "7"})), 7),
        (HttpError(response=SimpleNamespace(headers={"retry-after": "12"})), 12),
        (HttpError(response=SimpleNamespace(headers={"Retry-After": "Fri, 01 Jan 1999 00:00:00 GMT"})), 0),
        (HttpError(retry_after=2.5), 2.5),
        (HttpError(retry_after=-1), 0),
        (HttpError(retry_after=math.nan), 0),
        (HttpError(retry_after="soon"), 0),
        (HttpError({"Retry-After": "soon"}), 0),
        (HttpError(headers="none"), 0),
        (HttpError(), 0),
        (BusyError(), 0),
    ],
    ids=str,
)
def test_what_a_server_asks_for_is_added_to_the_pause(error: Exception, seconds: float) -> None:
    async def fail(_: None) -> None:
        calls.append(anyio.current_time())
        raise error

    async def work() -> None:
        with pytest.raises(type(error)):
            await retried(fail, retries=1, backoff=0.0).acall(None)

    calls: list[float] = []
    in_virtual_time(work)
    assert calls[1] - calls[0] == pytest.approx(seconds)


def test_a_server_that_asks_for_too_long_is_not_waited_for() -> None:
    tries = Tries(Retry.of(retries=5))  # type: ignore[arg-type]
    with pytest.raises(HttpError) as failure:
        tries.pause_s(HttpError({"Retry-After": "3600"}))
    assert failure.value.__notes__ == ["the call is not made again; it asks to wait 3,600 s, which is too long"]


def test_a_call_has_its_time_each_try_anew() -> None:
    async def slow(item: int) -> int:
        calls.append(item)
        await anyio.sleep(5 if len(calls) < 3 else 1)
        return item

    async def work() -> tuple[int, float]:
        return await retried(slow, retries=2, timeout_s=2.0, backoff=0.0).acall(4), anyio.current_time()

    calls: list[int] = []
    began = in_virtual_time(lambda: _now())
    result, ended = in_virtual_time(work)
    assert (result, len(calls)) == (4, 3)
    assert ended - began == pytest.approx(2 + 2 + 1)


async def _now() -> float:
    return anyio.current_time()


def test_a_timeout_is_an_error_that_names_it() -> None:
    pipe = sl.from_items(range(3)).map(lambda _: anyio.sleep_forever(), name="call", concurrency=2, timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"no result within timeout_s=0\.01 s"):
        list(pipe)


@pytest.mark.parametrize("backoff", [60.0, 0.0], ids=["a long one", "none"])
def test_while_a_stream_is_paused_no_call_is_made_again(backoff: float, run: Callable[..., None]) -> None:
    async def fail(item: int) -> int:
        calls.append(item)
        raise BusyError

    async def test() -> None:
        pipe = sl.from_items(range(5)).shard(1).map(fail, retries=10**6, backoff=backoff)
        async with pipe.open() as stream, anyio.create_task_group() as group:
            group.start_soon(anext, stream)
            while not calls:
                await anyio.lowlevel.checkpoint()
            with anyio.fail_after(QUIESCE_S / 2):  # after that, what is still at work is named
                async with stream.paused():
                    before = len(calls)
                    for _ in range(100):
                        await anyio.lowlevel.checkpoint()
                    assert before == len(calls)
            group.cancel_scope.cancel()

    calls: list[int] = []
    run(test)


def test_a_thread_waits_as_long_as_a_task() -> None:
    def fail(_: None) -> None:
        raise HttpError({"Retry-After": "7"})

    waits: list[float] = []
    calls = retried(fail, retries=2, backoff=0.0)
    calls._stopped = SimpleNamespace(wait=waits.append)  # type: ignore[assignment]
    with pytest.raises(HttpError):
        calls.call(None)
    assert waits == [7, 7]


def test_a_thread_that_waits_ends_with_the_stream(run: Callable[..., None]) -> None:
    def fail(item: int) -> int:
        failing.set()
        raise BusyError

    async def test() -> None:
        pipe = sl.from_items(range(5)).shard(1).map(fail, executor="thread", retries=9, backoff=1e6)
        async with pipe.open() as stream, anyio.create_task_group() as group:
            group.start_soon(anext, stream)
            while not failing.is_set():
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        # `no_leaks` waits for the thread's end

    failing = threading.Event()
    run(test)


# Options --------------------------------------------------------------------------------------------------------------


def test_a_seeded_call_is_given_the_same_numbers_again() -> None:
    async def draw(item: int, *, rng: np.random.Generator) -> float:
        drawn.setdefault(item, []).append(float(rng.random()))
        if len(drawn[item]) < 3:
            raise BusyError
        return drawn[item][-1]

    drawn: dict[int, list[float]] = {}
    found = list(sl.from_items(range(5)).map(draw, seed=1, concurrency=2, retries=2, backoff=0.0))
    assert [len(set(numbers)) for numbers in drawn.values()] == [1] * 5
    drawn = {item: [0.0, 0.0] for item in range(5)}
    assert found == list(sl.from_items(range(5)).map(draw, seed=1))


def test_copies_of_the_pipeline_in_processes_retry_too() -> None:
    pipe = mapped(Busy(lambda item: item % 3), WAYS["threads"], retries=2, backoff=0.0)
    with pipe.open(backend=Copying(1)) as stream:
        assert list(stream) == [-item for item in range(30)]
        assert stream.stats().stages[1].detail("retries") == sum(item % 3 for item in range(30))


def test_the_plan_shows_them_and_a_snapshot_does_not_know_of_them() -> None:
    busy = Busy(lambda item: item % 2)
    pipe = mapped(busy, WAYS["tasks"], retries=2, backoff=0.0, timeout_s=30.0)
    assert "retries=2, timeout_s=30" in str(pipe)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(7)]
        snapshot = stream.snapshot()
    busy.calls.update(dict.fromkeys(range(30), 1))
    with mapped(busy, WAYS["tasks"]).open(resume=snapshot) as stream:
        assert first + list(stream) == [-item for item in range(30)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"retries": -1, "concurrency": 2}, PlanError, r"\.map\(retries=\) is at least 0"),
        ({"retries": 1.5, "concurrency": 2}, PlanTypeError, r"\.map\(retries=\) is an integer"),
        ({"timeout_s": 0, "concurrency": 2}, PlanError, r"\.map\(timeout_s=\) is a finite number of seconds"),
        ({"retries": 1, "backoff": -1.0, "concurrency": 2}, PlanError, r"\.map\(backoff=\) is a finite number"),
        ({"retries": 1, "backoff": "1", "concurrency": 2}, PlanTypeError, r"\.map\(backoff=\) is a number of seconds"),
        ({"retry_on": OSError, "concurrency": 2}, PlanError, r"add retries=3"),
        ({"retries": 1, "retry_on": (), "concurrency": 2}, PlanTypeError, "a class of exceptions"),
        ({"retries": 1, "retry_on": (OSError, 3), "concurrency": 2}, PlanTypeError, "a class of exceptions"),
        ({"retries": 1, "retry_on": KeyboardInterrupt, "concurrency": 2}, PlanTypeError, "a class of exceptions"),
        ({"retries": 1, "retry_on": 429, "concurrency": 2}, PlanTypeError, r"\.map\(retry_on=\) is a function"),
        ({"retries": 1}, PlanError, r"async functions and executor='thread'.*awaits what a lambda returns"),
        ({"timeout_s": 1.0, "executor": "thread"}, PlanError, "a thread can't be ended from outside"),
        ({"retry": 1, "concurrency": 2}, PlanTypeError, r"\.map has no retry=: did you mean retry_on=\?"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sl.from_items(range(3)).map(lambda item: item, **options)


def test_calls_that_pass_are_not_slower_by_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_jitter", None)  # every pause is drawn of it
    with mapped(lambda item: item, WAYS["tasks"], retries=9, backoff=60.0).open() as stream:
        assert len(list(stream)) == 30
        assert stream.stats().stages[1].detail("retries") == 0
