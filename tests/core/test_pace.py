"""Slices of user code: how long they are, and what an exception that looks like an end does inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import streamline.core.pace
from streamline.core.gate import Gate
from streamline.core.pace import HANDOVER_S, LIST_S, MOST_CALLS_UNTIMED, SLICE_S, Pace, call_all


class Clock:
    """Time that goes on only when a function takes some."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    def taking(self, seconds: float) -> Callable[[int], int]:
        def fn(item: int) -> int:
            self.now += seconds
            return -item

        return fn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(streamline.core.pace, "perf_counter", clock)
    return clock


def apply_all(pace: Pace, fn: Callable[[int], int], items: list[int]) -> list[int]:
    """Return the lengths of the slices in which `items` were done."""
    lengths: list[int] = []
    done: list[int] = []
    while len(done) < len(items):
        before = len(done)
        pace.apply(fn, items, before, done)
        lengths.append(len(done) - before)
    assert done == [-item for item in items]
    return lengths


def _to_the_end(step: Callable[[], object]) -> None:
    for _ in range(1000):
        step()


def test_quick_calls_fill_a_list_with_few_looks_at_the_clock(clock: Clock) -> None:
    lengths = apply_all(Pace(), clock.taking(1e-7), list(range(1000)))
    assert lengths == [1000]
    assert clock.looks < 30


def test_a_slow_call_is_a_slice_of_its_own(clock: Clock) -> None:
    assert apply_all(Pace(), clock.taking(2 * SLICE_S), list(range(5))) == [1, 1, 1, 1, 1]


def test_the_first_result_of_a_slow_function_is_not_late(clock: Clock) -> None:
    """▲ The first item after a 200 µs sync map arrives within 5 ms."""
    pace, done = Pace(), list[int]()
    pace.apply(clock.taking(200e-6), list(range(256)), 0, done)
    assert clock.now < 5e-3
    assert 1 <= len(done) <= 25


def test_a_function_that_becomes_slow_is_noticed(clock: Clock) -> None:
    pace = Pace()
    apply_all(pace, clock.taking(1e-7), list(range(1000)))  # many calls between two looks by now
    before, done = clock.now, list[int]()
    pace.apply(clock.taking(200e-6), list(range(256)), 0, done)
    assert len(done) <= MOST_CALLS_UNTIMED
    assert clock.now - before <= 200e-6 * MOST_CALLS_UNTIMED + SLICE_S
    lengths = apply_all(pace, clock.taking(200e-6), list(range(256)))
    assert lengths[-2] <= 10, "it has not adapted"


def test_it_quickens_again(clock: Clock) -> None:
    pace = Pace()
    apply_all(pace, clock.taking(2 * SLICE_S), list(range(20)))
    assert apply_all(pace, clock.taking(1e-7), list(range(1000)))[-1] > 900


@pytest.mark.parametrize("at", [0, 1, 63, 64, 133])
def test_an_exception_leaves_the_results_before_it(at: int) -> None:
    def fails(item: int) -> int:
        if item == at:
            raise LookupError(item)
        return item

    pace, done = Pace(), list[int]()
    with pytest.raises(LookupError):
        _to_the_end(lambda: pace.apply(fails, range(200), len(done), done))
    assert done == list(range(at))


@pytest.mark.parametrize("at", [0, 1, 63, 64, 133])
def test_stop_iteration_is_never_an_end(at: int) -> None:
    """`map` and `list.extend` take it for one."""

    def stops(item: int) -> int:
        if item == at:
            raise StopIteration(item)
        return item

    pace, done = Pace(), list[int]()
    with pytest.raises(StopIteration):
        _to_the_end(lambda: pace.apply(stops, range(200), len(done), done))
    assert done == list(range(at))


@pytest.mark.parametrize("limit", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("length", [0, 1, 64, 65, 199])
def test_drawing_ends_where_the_iterator_does(length: int, limit: int) -> None:
    pace, drawn, iterator = Pace(), list[int](), iter(range(length))
    for _ in range(10_000):
        before = len(drawn)
        ended = pace.draw(iterator, limit, drawn)
        assert len(drawn) - before <= limit
        if ended:
            break
    assert drawn == list(range(length))


def test_drawing_stops_when_its_slice_is_over(clock: Clock) -> None:
    def slow() -> Iterator[int]:
        for item in range(10):
            clock.now += 2 * SLICE_S
            yield item

    pace, drawn = Pace(), list[int]()
    assert not pace.draw(slow(), 10, drawn)
    assert drawn == [0]


def test_an_exception_while_drawing_leaves_the_items_before_it() -> None:
    def fails() -> Iterator[int]:
        yield from range(5)
        raise LookupError

    pace, drawn, iterator = Pace(), list[int](), fails()
    with pytest.raises(LookupError):
        _to_the_end(lambda: pace.draw(iterator, 3, drawn))
    assert drawn == list(range(5))


# In a thread


def test_a_call_in_a_thread_returns_results_and_the_failure() -> None:
    error = LookupError()

    def fails(item: int) -> int:
        if item == 3:
            raise error
        return -item

    assert call_all(fails, range(9)) == ([0, -1, -2], error)
    assert call_all(fails, range(3)) == ([0, -1, -2], None)
    assert call_all(fails, ()) == ([], None)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_call_in_a_thread_never_raises(kind: type[BaseException]) -> None:
    def fails(item: int) -> int:
        raise kind

    results, failure = call_all(fails, range(3))
    assert results == []
    assert isinstance(failure, kind)


def test_a_call_in_a_thread_returns_early_when_items_take_long(clock: Clock) -> None:
    assert call_all(clock.taking(LIST_S / 2), range(100)) == ([0, -1, -2], None)
    assert call_all(clock.taking(2 * LIST_S), range(100)) == ([0], None)


# Giving way


async def test_it_gives_way_once_a_slice(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    async def checkpoint() -> None:
        given.append(clock.now)

    pace = Pace()
    monkeypatch.setattr(streamline.core.pace, "checkpoint", checkpoint)
    for step in range(1, 41):
        clock.now = step * SLICE_S / 4
        await pace.maybe_yield()
    assert len(given) == 8  # each time more than a slice has passed
    await pace.yield_after(after_s=100.0)
    assert len(given) == 8


async def test_the_stages_of_a_chain_give_way_once_a_slice_together(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    async def checkpoint() -> None:
        given.append(clock.now)

    async def chain() -> None:
        stages, driver = [Pace(), Pace(), Pace()], Pace()
        for step in range(1, 41):
            clock.now = step * SLICE_S / 4
            for pace in stages:
                await pace.maybe_yield()
        assert len(given) == 8
        clock.now += SLICE_S / 2
        await driver.yield_after(HANDOVER_S)  # what it has sent is later than what they have given away
        assert len(given) == 9
        for pace in stages:
            await pace.maybe_yield()
        assert len(given) == 9

    monkeypatch.setattr(streamline.core.pace, "checkpoint", checkpoint)
    await Gate().participate("chain", chain)
