"""A failure is not an end: every item before it, then the user's own exception, for ever."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.errors import ClosedError, StageError
from tests.kit import CONSUMERS, AsyncTest, Counting, Pipe, drain_plain

AT = 12
LENGTH = 40


class Fatal(BaseException):
    """An exception that `except Exception` doesn't catch."""


class OddError(Exception):
    """An exception that can't be made from its message alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad sample"),
    "OddError": lambda: OddError(7, "bad sample"),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "Fatal": Fatal,
    "TimeoutError": TimeoutError,
    "EndOfStream": anyio.EndOfStream,
    "ClosedResourceError": anyio.ClosedResourceError,
}
ENDS = ("StopIteration", "StopAsyncIteration", "CancelledError", "GeneratorExit")


@dataclass
class Trap:
    """Raises at one item, while it is armed."""

    error: BaseException | None

    def __call__(self, item: Any) -> Any:
        if item == AT and self.error is not None:
            raise self.error
        return item

    async def later(self, item: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return self(item)

    def keep(self, item: Any) -> bool:
        self(item)
        return True

    def many(self, item: Any) -> list[Any]:
        return [self(item)]

    def lazily(self, item: Any) -> Iterator[Any]:
        yield self(item)

    def collated(self, items: list[Any]) -> list[Any]:
        return [self(item) for item in items]


@dataclass
class Broken:
    """A dataset with one item that can't be read."""

    trap: Trap

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return self.trap(index)  # type: ignore[no-any-return]


@sl.stage(stateless=True)
async def declared(items: AsyncIterator[int], *, trap: Trap) -> AsyncIterator[int]:
    async for item in items:
        yield trap(item)


async def undeclared(items: AsyncIterator[int], *, trap: Trap) -> AsyncIterator[int]:
    async for item in items:
        yield trap(item)


@sl.stage(stateless=True)
async def swallows(items: AsyncIterator[int]) -> AsyncIterator[int]:
    try:
        async for item in items:
            yield item
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            raise


def source() -> sl.Pipeline[int]:
    return sl.from_items(range(LENGTH))


def iterates(trap: Trap) -> Iterator[int]:
    for item in range(LENGTH):
        yield trap(item)


async def iterates_async(trap: Trap) -> AsyncIterator[int]:
    for item in range(LENGTH):
        yield trap(item)


PLACES: dict[str, Callable[[Trap], Pipe]] = {
    "map": lambda trap: source().map(trap, name="load"),
    "map behind the merge": lambda trap: source().merge().map(trap, name="load"),
    "async map": lambda trap: source().map(trap.later, name="load"),
    "async map of 8": lambda trap: source().map(trap.later, concurrency=8, name="load"),
    "unordered map of 8": lambda trap: source().map(trap.later, concurrency=8, ordered=False, name="load"),
    "map in threads": lambda trap: source().map(trap, executor="thread", concurrency=3, name="load"),
    "unordered map in threads": lambda trap: source().map(
        trap, executor="thread", concurrency=3, ordered=False, name="load"
    ),
    "filter": lambda trap: source().filter(trap.keep, name="load"),
    "flat_map": lambda trap: source().flat_map(trap.many, name="load"),
    "generator in flat_map": lambda trap: source().flat_map(trap.lazily, name="load"),
    "collate": lambda trap: source().batch(4, collate=trap.collated, name="load").unbatch(),
    "declared stage": lambda trap: source().through(declared, trap=trap, name="load"),
    "undeclared stage": lambda trap: source().through(undeclared, trap=trap, name="load"),
    "map before a stage that swallows": lambda trap: source().map(trap, name="load").through(swallows),
    "map before a batch": lambda trap: source().map(trap, name="load").batch(3, collate=None).unbatch(),
    "map before a shuffle": lambda trap: source().map(trap, name="load").shuffle(window=1),
    "map before a prefetch": lambda trap: source().map(trap, name="load").prefetch(3),
    "map before an async map": lambda trap: source().map(trap, name="load").map(Trap(None).later, concurrency=4),
    "from_items": lambda trap: sl.from_items(Broken(trap)),
    "from_items in blocks": lambda trap: sl.from_items(Broken(trap)).shard(1, "contiguous"),
    "iterator": lambda trap: sl.from_iterable(lambda: iterates(trap)),
    "async iterator": lambda trap: sl.from_iterable(lambda: iterates_async(trap)),
    "iterator of a function": lambda trap: sl.from_iterable(_bound(trap)),
}


def _bound(trap: Trap) -> Callable[[], AsyncIterator[int]]:
    async def iterates() -> AsyncIterator[int]:
        for item in range(LENGTH):
            yield trap(item)

    return iterates


SOME = [
    (place, kind)
    for at, place in enumerate(PLACES)
    for number, kind in enumerate(ERRORS)
    if kind == "ValueError" or (at + number) % 6 == 0
]
"""Every place and every error, each place with two or three of them."""


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("ignore:a resume will run:UserWarning")
@pytest.mark.parametrize(("place", "kind"), SOME)
def test_a_failure_comes_behind_every_item_before_it_and_again_for_ever(place: str, kind: str) -> None:
    for consumer, consume in CONSUMERS.items():
        error = ERRORS[kind]()
        seen = consume(PLACES[place](Trap(error)))
        what = f"consumed by {consumer}: {seen.items} then {seen.ends!r}"
        if "unordered" in place:
            assert sorted(seen.items)[:AT] == list(range(AT)), what
            assert len(set(seen.items)) == len(seen.items), what
            assert AT not in seen.items, what
        else:
            assert seen.items == list(range(AT)), what
        first = seen.ends[0]
        assert first is not None, what
        assert all(end is first for end in seen.ends), what
        assert_own(first, error, kind, what)
        assert_noted(first, place, what)


def assert_own(seen: BaseException, error: BaseException, kind: str, what: str) -> None:
    """Insist on the user's own exception; what Python reads as an end comes as the cause of a StageError.

    (Python itself makes a RuntimeError of some of those, in generators and coroutines.)
    """
    if kind in ENDS:
        assert isinstance(seen, RuntimeError), what
        # Calls of a list at a time take a StopIteration for the list's end: what comes is another of its kind.
        assert seen.__cause__ is error or (kind == "StopIteration" and isinstance(seen.__cause__, StopIteration)), what
    else:
        assert seen is error, what


def assert_noted(seen: BaseException, place: str, what: str) -> None:
    notes = getattr(seen, "__notes__", [])
    assert len(notes) == 1, (what, notes)
    assert f"pid {os.getpid()}" in notes[0], what
    assert "shard 0 of 1" in notes[0], what
    stage = "items" if "from_items" in place else "iterable" if "iterator" in place else "load"
    assert stage in notes[0], (what, notes)
    at = 15 if place == "collate" else AT
    assert f"index {at} of items" in notes[0] or f"item {at + 1} of iterable" in notes[0], (what, notes)


@pytest.mark.parametrize("place", [place for place in PLACES if "unordered" not in place])
@pytest.mark.filterwarnings("ignore:a resume will run:UserWarning")
def test_a_snapshot_behind_a_failure_resumes_behind_a_fix(place: str) -> None:
    for consumer in ("async with", "for"):
        trap = Trap(ValueError("bad sample"))
        pipe = PLACES[place](trap)
        seen = CONSUMERS[consumer](pipe)
        assert seen.snapshot is not None
        trap.error = None
        assert list(resumed(pipe, seen.snapshot)) == list(range(AT, LENGTH)), consumer


@pytest.mark.parametrize("place", [place for place in PLACES if "unordered" in place])
def test_a_snapshot_after_a_failed_unordered_map_resumes_with_all_that_is_missing(place: str) -> None:
    trap = Trap(ValueError("bad sample"))
    pipe = PLACES[place](trap)
    seen = CONSUMERS["async with"](pipe)
    assert seen.snapshot is not None
    trap.error = None
    assert sorted(seen.items + list(resumed(pipe, seen.snapshot))) == list(range(LENGTH))


def resumed(pipe: Pipe, snapshot: sl.Snapshot) -> list[Any]:
    with pipe.open(resume=sl.Snapshot.from_json(snapshot.to_json())) as stream:
        return list(stream)


@pytest.mark.parametrize("kind", ERRORS)
def test_a_failure_of_one_worker_comes_at_its_place_in_strict_order(kind: str) -> None:
    for consumer, consume in CONSUMERS.items():
        error = ERRORS[kind]()
        seen = consume(sl.from_items(range(LENGTH)).shard(4).map(Trap(error), name="load").merge())
        assert seen.items == list(range(AT)), consumer
        first = seen.ends[0]
        assert first is not None
        assert all(end is first for end in seen.ends), consumer
        assert_own(first, error, kind, consumer)
        assert "shard 0 of 4" in first.__notes__[0]


@pytest.mark.parametrize("skips", [0, 1, 3])
def test_a_workers_failure_comes_out_of_a_best_effort_merge_after_its_good_items(skips: int) -> None:
    for consumer, consume in CONSUMERS.items():
        error = ValueError("bad sample")
        pipe = sl.from_items(range(LENGTH)).shard(4).map(Trap(error), name="load")
        seen = consume(pipe.merge("best_effort", max_skips_per_round=skips))
        assert [item for item in seen.items if item % 4 == 0] == [0, 4, 8], consumer
        for shard in (1, 2, 3):
            mine = [item for item in seen.items if item % 4 == shard]
            assert mine == list(range(shard, LENGTH, 4))[: len(mine)], consumer
        assert seen.ends == [error] * 3, consumer


def test_items_that_strict_order_puts_first_are_delivered_before_an_earlier_failure() -> None:
    async def slow(item: int) -> int:
        if item % 2:
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
        elif item == AT:
            raise ValueError("bad sample")
        return item

    seen = CONSUMERS["async with"](sl.from_items(range(LENGTH)).shard(2).map(slow).merge())
    assert seen.items == list(range(AT))


def test_the_items_before_a_failure_arrive_even_if_the_consumer_is_slow(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        items = []
        async with sl.from_items(range(LENGTH)).map(Trap(ValueError("bad"))).prefetch(4).open() as stream:
            with suppress(ValueError):
                while True:
                    items.append(await anext(stream))
                    await anyio.wait_all_tasks_blocked()
        assert items == list(range(AT))

    run(test)


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_asking_a_failed_stream_again_and_again_does_not_grow_the_traceback(consumer: str) -> None:
    lengths: list[int] = []

    def consume_async() -> None:
        async def main() -> None:
            async with sl.from_items(range(LENGTH)).map(Trap(ValueError("bad"))).open() as stream:
                for _ in range(6):
                    try:
                        [item async for item in stream]
                    except ValueError as error:
                        lengths.append(len(traceback.extract_tb(error.__traceback__)))

        anyio.run(main)

    def consume_plain() -> None:
        with sl.from_items(range(LENGTH)).map(Trap(ValueError("bad"))).open() as stream:
            for _ in range(6):
                try:
                    list(stream)
                except ValueError as error:
                    lengths.append(len(traceback.extract_tb(error.__traceback__)))

    consume_async() if "async" in consumer else consume_plain()
    assert max(lengths[1:]) <= min(lengths[1:]) + 1, lengths


# What the consumer itself raises ------------------------------------------------------------------------------------


class MineError(Exception):
    """The consumer's own."""


PIPES: dict[str, Callable[[], Pipe]] = {
    "source": lambda: sl.from_items(range(10_000)),
    "four workers": lambda: sl.from_items(range(10_000)).shard(4).map(abs).merge(),
    "best effort": lambda: sl.from_items(range(10_000)).shard(4).map(abs).merge("best_effort"),
    "async map": lambda: sl.from_items(range(10_000)).map(Trap(None).later, concurrency=8),
    "threads": lambda: sl.from_items(range(10_000)).map(abs, executor="thread", concurrency=2),
    "custom stage": lambda: sl.from_items(range(10_000)).through(swallows),
    "behind the merge": lambda: sl.from_items(range(10_000)).shard(2).merge().batch(2),
}


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("shape", PIPES)
def test_the_consumers_own_exception_comes_out_of_an_async_loop_as_itself(
    shape: str, bare: bool, run: Callable[[AsyncTest], None]
) -> None:
    mine = MineError("in the loop body")

    async def loop() -> None:
        if bare:
            async for _ in PIPES[shape]():
                raise mine
        else:
            async with PIPES[shape]().open() as stream:
                async for _ in stream:
                    raise mine

    async def test() -> None:
        seen: list[BaseException] = []
        try:
            await loop()
        except BaseException as error:
            seen.append(error)
        assert seen == [mine]  # and not a group
        assert mine.__context__ is None
        mine.__traceback__ = None  # it holds the bare stream
        gc.collect()

    run(test)


@pytest.mark.parametrize("shape", PIPES)
def test_the_consumers_own_exception_comes_out_of_a_plain_loop_as_itself(shape: str) -> None:
    mine = MineError("in the loop body")

    def bare() -> None:
        for _ in PIPES[shape]():
            raise mine

    def managed() -> None:
        with PIPES[shape]().open() as stream:
            for _ in stream:
                raise mine

    for loop in (bare, managed):
        with pytest.raises(MineError) as raised:
            loop()
        assert raised.value is mine
        assert mine.__context__ is None
        mine.__traceback__ = None  # it holds the bare stream


def test_the_consumers_own_exception_comes_out_of_its_task_group_without_streamlines(
    run: Callable[[AsyncTest], None],
) -> None:
    mine = MineError("in the loop body")

    async def consume() -> None:
        async with PIPES["async map"]().open() as stream:
            async for _ in stream:
                raise mine

    async def test() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            async with anyio.create_task_group() as group:
                group.start_soon(consume)
        assert raised.value.exceptions == (mine,)

    run(test)


# What is wrong with a stage itself ----------------------------------------------------------------------------------


def test_a_stage_that_returns_no_async_iterator_is_an_error_that_names_it() -> None:
    async def forgot_to_yield(items: AsyncIterator[int]) -> int:
        return 1

    seen: list[BaseException] = []
    try:
        pipe: Pipe = sl.from_items(range(3)).through(sl.stage(stateless=True)(forgot_to_yield))  # type: ignore[arg-type]
        seen = [end for end in drain_plain(pipe, bare=False).ends if end is not None]
    except TypeError as error:
        seen = [error]
    gc.collect()
    assert seen
    assert isinstance(seen[0], TypeError)
    assert "forgot_to_yield" in "\n".join([str(seen[0]), *getattr(seen[0], "__notes__", [])])


def test_a_stage_that_takes_other_parameters_is_an_error_that_names_it() -> None:
    """A declared one where it is written; of any other function nothing is known before it runs."""
    with pytest.raises(TypeError, match=r"\.through\(declared\): missing a required (keyword-only )?argument: 'trap'"):
        source().through(declared, wrong=1, name="load")


def test_a_stage_that_fails_over_its_upstreams_failure_fails_with_its_own() -> None:
    mine = MineError("the stage's")

    @sl.stage(stateless=True)
    async def translates(items: AsyncIterator[int]) -> AsyncIterator[int]:
        try:
            async for item in items:
                yield item
        except ValueError as error:
            raise mine from error

    error = ValueError("bad sample")
    for consumer, consume in CONSUMERS.items():
        seen = consume(source().map(Trap(error)).through(translates))
        assert seen.items == list(range(AT)), consumer
        assert seen.ends == [mine] * 3, consumer
        assert mine.__cause__ is error


def test_a_stage_that_cancels_itself_is_a_failure() -> None:
    @sl.stage(stateless=True)
    async def loses_a_task(items: AsyncIterator[int]) -> AsyncIterator[int]:
        async for item in items:
            if item == AT:
                lost = asyncio.get_running_loop().create_task(anyio.sleep_forever())
                lost.cancel()
                await lost
            yield item

    for consumer, consume in CONSUMERS.items():
        seen = consume(source().through(loses_a_task))
        assert seen.items == list(range(AT)), consumer
        assert all(isinstance(end, StageError) for end in seen.ends), (consumer, seen.ends)


def test_a_failure_while_a_generator_is_closed_is_reported_not_lost() -> None:
    class Fussy:
        def __iter__(self) -> Fussy:
            return self

        def __next__(self) -> int:
            return 1

        def close(self) -> None:
            raise MineError("while closing")

    seen = drain_plain(sl.from_iterable(Fussy).take(3), bare=False)
    assert seen.items == [1, 1, 1]
    assert isinstance(seen.ends[0], MineError)


def test_opening_at_a_failing_factory_fails_with_its_exception() -> None:
    error = ValueError("no such feed")

    def factory() -> Iterator[int]:
        raise error

    for consumer, consume in CONSUMERS.items():
        seen = consume(sl.from_iterable(factory))
        assert seen.items == [], consumer
        assert seen.ends == [error] * 3, consumer


def test_a_closed_stream_says_so_instead_of_ending(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        async with sl.from_items(range(1000)).open() as stream:
            for _ in range(300):  # some more are at hand
                await anext(stream)
        for _ in range(2):
            with pytest.raises(ClosedError):
                await anext(stream)
        with pytest.raises(ClosedError):
            [item async for item in stream]

    run(test)


def test_a_closed_plain_stream_says_so_instead_of_ending() -> None:
    with sl.from_items(range(100_000)).open() as stream:
        for _ in range(10_001):
            next(stream)
    for _ in range(2):
        with pytest.raises(ClosedError):
            next(stream)
    with pytest.raises(ClosedError):
        list(stream)


def test_a_snapshot_of_a_closed_stream_stands_behind_the_last_item_received(run: Callable[[AsyncTest], None]) -> None:
    pipe = sl.from_items(range(1000)).shard(3).map(abs).merge()

    async def test() -> None:
        async with pipe.open() as stream:
            for _ in range(5):
                await anext(stream)
        snapshot = stream.snapshot()
        assert resumed(pipe, snapshot) == list(range(5, 1000))

    run(test)
    with pipe.open() as stream:
        assert [next(stream) for _ in range(5)] == list(range(5))
    assert resumed(pipe, stream.snapshot()) == list(range(5, 1000))


def test_a_finished_stream_stays_finished(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        async with sl.from_items(range(10)).open() as stream:
            assert [item async for item in stream] == list(range(10))
            assert [item async for item in stream] == []
        assert [item async for item in stream] == []

    run(test)
    with sl.from_items(range(10)).open() as stream:
        assert list(stream) == list(range(10))
        assert list(stream) == []
    assert list(stream) == []


def test_items_read_and_never_reached_after_a_failure_are_few() -> None:
    counting = Counting(100_000)
    drain_plain(sl.from_items(counting).map(Trap(ValueError("bad"))), bare=False)
    assert counting.asked <= AT + 512


def test_a_thread_that_runs_when_an_earlier_item_fails_is_awaited_and_dropped() -> None:
    def slow(item: int) -> int:
        if item == 0:
            raise ValueError("bad")
        time.sleep(0.05)
        return item

    seen = drain_plain(sl.from_items(range(8)).map(slow, executor="thread", concurrency=4), bare=False)
    assert seen.items == []
    assert [str(end) for end in seen.ends] == ["bad"] * 3


def test_a_thread_doesnt_go_on_behind_an_item_that_has_failed() -> None:
    called: list[int] = []

    def fails(item: int) -> int:
        called.append(item)
        time.sleep(0.02)  # the next ones are claimed meanwhile
        raise ValueError("bad")

    seen = drain_plain(sl.from_items(range(100)).map(fails, executor="thread"), bare=False)
    assert seen.items == []
    assert called == [0]
