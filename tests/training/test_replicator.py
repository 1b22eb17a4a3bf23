"""StreamReplicator: disjoint, bounded, in order; ends and errors reach all; who stops, leaves or dies is named."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count, islice
from queue import SimpleQueue
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import ClosedError, PlanError, PlanTypeError, ReplicaStalled, StageError
from streamline.training import replica_shares
from streamline.training.replicator import Replica
from tests.kit import AsyncTest
from tests.laws.profile import examples


class Feed:
    """0, 1, …, as they are asked for; counts, fails where it is told to, and says when it was closed."""

    def __init__(self, length: int, fail_at: int | None = None, pause: int = 3) -> None:
        self.length, self.fail_at, self.pause = length, fail_at, pause
        self.asked = self.closed = 0

    def sync(self) -> Iterator[int]:
        try:
            for item in range(self.length):
                self.asked += 1
                if item == self.fail_at:
                    raise KeyError(item)
                yield item
        finally:
            self.closed += 1

    async def anew(self) -> AsyncIterator[int]:
        try:
            for item in range(self.length):
                self.asked += 1
                if item == self.fail_at:
                    raise KeyError(item)
                if item % self.pause == 0:
                    await anyio.lowlevel.checkpoint()
                yield item
        finally:
            self.closed += 1

    def pipe(self) -> sl.Pipeline[int]:
        return sl.from_iterable(self.sync).map(lambda x: x)


SOURCES: list[Callable[[Feed], Any]] = [Feed.sync, Feed.anew, Feed.pipe]
KINDS = pytest.mark.parametrize("kind", SOURCES, ids=["sync", "async", "pipeline"])


async def read(replica: Replica[int], found: list[int]) -> None:
    async for item in replica:
        found.append(item)  # noqa: PERF401 - what came before an error counts


async def read_all(replicator: sl.StreamReplicator[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(replicator.num_replicas)]
    async with anyio.create_task_group() as group:
        for number, mine in enumerate(found):
            group.start_soon(read, replicator.replica(number), mine)
    return found


def in_threads(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()


# Order, end, failure -------------------------------------------------------------------------------------------------


@KINDS
def test_each_replica_has_its_items_in_order_and_the_end(kind: Any, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        feed = Feed(1000)
        async with sl.StreamReplicator(kind(feed), 3, capacity=7) as replicator:
            assert await read_all(replicator) == [list(range(r, 1000, 3)) for r in range(3)]
            assert feed.closed == 1

    run(test)


@KINDS
def test_plain_loops_in_threads_have_the_same(kind: Any) -> None:
    feed = Feed(1000)
    found: list[list[int]] = [[], [], []]
    with sl.StreamReplicator(kind(feed), 3, capacity=7) as replicator:
        replicas = [replicator.replica(r) for r in range(3)]
        in_threads([lambda r=r: found[r].extend(replicas[r]) for r in range(3)])  # type: ignore[misc]
        assert [list(replica) for replica in replicas] == [[], [], []]  # a finished one stays so
    assert found == [list(range(r, 1000, 3)) for r in range(3)]
    assert feed.closed == 1


@KINDS
def test_loops_and_threads_read_one_stream_together(kind: Any) -> None:
    found: list[list[int]] = [[], []]

    async def task() -> None:
        await read(replicas[0], found[0])

    with sl.StreamReplicator(kind(Feed(500)), 2, capacity=4) as replicator:
        replicas = [replicator.replica(0), replicator.replica(1)]
        in_threads([lambda: anyio.run(task), lambda: found[1].extend(replicas[1])])
    assert found == [list(range(0, 500, 2)), list(range(1, 500, 2))]


@KINDS
@pytest.mark.parametrize("fail_at", [0, 17])
def test_an_error_reaches_all_behind_what_came_before_for_ever(
    kind: Any, fail_at: int, run: Callable[[AsyncTest], None]
) -> None:
    async def test() -> None:
        feed = Feed(40, fail_at)
        errors: list[BaseException] = []
        async with sl.StreamReplicator(kind(feed), 3) as replicator:
            for r in range(3):
                replica = replicator.replica(r)
                found: list[int] = []
                for _ in range(2):
                    with pytest.raises(KeyError) as caught:
                        await read(replica, found)
                    errors.append(caught.value)
                assert found == list(range(r, fail_at, 3))
        assert len({id(error) for error in errors}) == 1
        assert any("StreamReplicator of 3" in note and "of the stream" in note for note in errors[0].__notes__)
        assert feed.closed == 1

    run(test)


async def test_what_looks_like_an_end_is_a_failure() -> None:
    class Ends:
        def __aiter__(self) -> Ends:
            return self

        async def __anext__(self) -> int:
            raise StopIteration

    async with sl.StreamReplicator(Ends(), 1) as replicator:
        with pytest.raises((StageError, RuntimeError)):
            await anext(replicator.replica(0))


async def test_an_error_of_its_close_comes_behind_the_last_item() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1

    class Closes:
        def __init__(self) -> None:
            self.items = items()

        def __aiter__(self) -> AsyncIterator[int]:
            return self

        async def __anext__(self) -> int:
            return await anext(self.items)

        async def aclose(self) -> None:
            raise OSError("gone")

    async with sl.StreamReplicator(Closes(), 1) as replicator:
        replica = replicator.replica(0)
        assert await anext(replica) == 1
        with pytest.raises(OSError, match="gone"):
            await anext(replica)


# Bound, and who stops ------------------------------------------------------------------------------------------------


@KINDS
def test_a_reader_that_stops_stops_the_source(kind: Any, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        feed = Feed(100_000)
        source = kind(feed)
        ahead = source.max_in_flight if isinstance(source, sl.Pipeline) else 0
        async with sl.StreamReplicator(source, 2, capacity=5, stall_timeout=math.inf) as replicator:
            first, second = replicator.replica(0), replicator.replica(1)
            assert [await anext(first) for _ in range(4)] == [0, 2, 4, 6]
            with anyio.move_on_after(0.05):
                await read(first, [])
            stats = replicator.stats()
            assert all(one.waiting <= 5 for one in stats)
            assert feed.asked <= 10 + sum(one.taken for one in stats) + ahead
            assert await anext(second) == 1

    run(test)


@KINDS
def test_one_that_is_not_read_is_named_when_others_have_starved(kind: Any, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        feed = Feed(100)
        async with sl.StreamReplicator(kind(feed), 3, capacity=2, stall_timeout=0.05) as replicator:
            replicas = [replicator.replica(r) for r in range(3)]
            found: list[int] = []
            with pytest.raises(ReplicaStalled, match=r"replica 1 of 3 has not been read for 0\.05 s") as caught:
                await read(replicas[0], found)
            assert caught.value.replica == 1
            assert "2 items wait for it" in str(caught.value)
            assert "stall_timeout=" in str(caught.value)
            assert found == [0, 3, 6]
            for r in (1, 2):  # all have what was dealt, then the same
                mine: list[int] = []
                with pytest.raises(ReplicaStalled):
                    await read(replicas[r], mine)
                assert mine == [r, r + 3]
        assert feed.closed == 1

    run(test)


@pytest.mark.parametrize("kind", SOURCES, ids=["sync", "async", "pipeline"])
def test_one_that_is_not_read_is_named_to_plain_loops_that_wait_in_slices(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits looks up each `CTRL_C_S`, here after a twentieth of the time: each once said that it starves
    anew."""
    monkeypatch.setattr(replica_shares, "CTRL_C_S", 0.02)
    ended: SimpleQueue[BaseException] = SimpleQueue()

    def starve(replica: Replica[int]) -> None:
        try:
            list(replica)
        except BaseException as error:
            ended.put(error)

    with sl.StreamReplicator(kind(Feed(100)), 3, capacity=2, stall_timeout=0.4) as replicator:
        replicas = [replicator.replica(r) for r in range(3)]
        for r in (0, 2):
            threading.Thread(target=starve, args=(replicas[r],), daemon=True).start()
        for _ in range(2):
            with pytest.raises(ReplicaStalled, match=r"replica 1 of 3 has not been read for 0\.4 s"):
                raise ended.get(timeout=20)


async def test_a_reader_that_asks_again_and_again_starves_all_the_same() -> None:
    async def ask(replica: Replica[int]) -> None:
        while True:
            with anyio.move_on_after(0.02):
                await anext(replica)

    async with sl.StreamReplicator(Feed(100).anew(), 2, capacity=2, stall_timeout=0.2) as replicator:
        first, _ = replicator.replica(0), replicator.replica(1)
        with pytest.raises(ReplicaStalled, match=r"replica 1 of 2 has not been read for 0\.2 s"), anyio.fail_after(20):
            await ask(first)


async def test_a_pause_of_all_is_no_stall() -> None:
    async with sl.StreamReplicator(Feed(40).anew(), 2, capacity=1, stall_timeout=0.02) as replicator:
        replicas = [replicator.replica(0), replicator.replica(1)]
        for item in range(6):
            assert await anext(replicas[item % 2]) == item
        await anyio.sleep(0.08)
        for item in range(6, 40):
            assert await anext(replicas[item % 2]) == item


async def test_one_that_was_never_asked_for_is_named() -> None:
    async with sl.StreamReplicator(range(100), 2, capacity=2, stall_timeout=0.02) as replicator:
        replica = replicator.replica(0)
        with pytest.raises(ReplicaStalled, match="no reader has asked for it"):
            await read(replica, [])


async def test_one_reader_that_takes_in_any_order_within_the_capacity_is_served() -> None:
    """Room for one item is enough while another replica starves, whatever half of the capacity is."""
    async with sl.StreamReplicator(Feed(60).anew(), 2, capacity=4, stall_timeout=1000) as replicator:
        first, second = replicator.replica(0), replicator.replica(1)
        for at in range(0, 30, 3):
            assert [await anext(first) for _ in range(3)] == [2 * (at + k) for k in range(3)]
            assert [await anext(second) for _ in range(3)] == [2 * (at + k) + 1 for k in range(3)]


# Leaving, and dying --------------------------------------------------------------------------------------------------


@KINDS
def test_one_that_is_closed_on_purpose_has_its_share_dropped_and_counted(
    kind: Any, run: Callable[[AsyncTest], None]
) -> None:
    async def test() -> None:
        feed = Feed(100)
        async with sl.StreamReplicator(kind(feed), 2, capacity=3, stall_timeout=1000) as replicator:
            async with replicator.replica(1) as leaving:
                assert await anext(leaving) == 1
            with pytest.raises(ClosedError, match="replica 1 is closed"):
                await anext(leaving)
            found: list[int] = []
            await read(replicator.replica(0), found)
            assert found == list(range(0, 100, 2))
            assert [(one.standing, one.taken, one.dropped) for one in replicator.stats()] == [
                ("read", 50, 0),
                ("closed", 1, 49),
            ]

    run(test)


@KINDS
def test_when_the_last_has_left_the_stream_is_closed(kind: Any, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        feed = Feed(100_000)
        replicator: sl.StreamReplicator[int] = sl.StreamReplicator(kind(feed), 2, capacity=3)
        async with replicator.replica(1), replicator.replica(0) as first:
            assert await anext(first) == 0
        assert feed.closed == 1

    run(test)


@KINDS
def test_a_reader_that_dies_is_named_to_the_others(kind: Any, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        feed = Feed(100)

        async def dies() -> None:
            async with replicator.replica(1) as replica:
                async for item in replica:
                    if item == 5:
                        raise OSError("no space left")

        async with sl.StreamReplicator(kind(feed), 2, capacity=3) as replicator:
            first = replicator.replica(0)
            assert await anext(first) == 0
            with pytest.raises(OSError, match="no space"):
                await dies()
            with pytest.raises(ReplicaStalled, match="replica 1 of 2 was left by its reader with OSError") as caught:
                await read(first, [])
            assert caught.value.replica == 1
            assert isinstance(caught.value.__cause__, OSError)
        assert feed.closed == 1

    run(test)


async def test_a_cancelled_reader_is_named_too() -> None:
    async def one() -> None:
        async with replicator.replica(1) as replica:
            await read(replica, [])

    async with sl.StreamReplicator(Feed(100_000).anew(), 2, capacity=3) as replicator:
        first = replicator.replica(0)
        async with anyio.create_task_group() as group:
            group.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        with pytest.raises(ReplicaStalled, match="was left by its reader with CancelledError"):
            await read(first, [])


@KINDS
@pytest.mark.parametrize("begun", [False, True])
def test_one_that_is_garbage_is_named_to_the_others(kind: Any, begun: bool, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        async with sl.StreamReplicator(kind(Feed(100)), 2, capacity=3, stall_timeout=math.inf) as replicator:
            first, second = replicator.replica(0), replicator.replica(1)
            if begun:
                assert await anext(second) == 1
            del second
            gc.collect()
            with pytest.raises(ReplicaStalled, match=f"replica 1 of 2 was dropped by its reader after {int(begun)} "):
                await read(first, [])

    run(test)


async def test_one_that_is_garbage_behind_the_end_has_not_ended_well_for_the_others() -> None:
    async with sl.StreamReplicator(Feed(6).anew(), 3) as replicator:
        replicas = [replicator.replica(r) for r in range(3)]
        await read(replicas[0], [])
        await read(replicas[1], [])
        del replicas[0]  # has had everything
        gc.collect()
        assert await anext(replicas[1]) == 2
        await read(replicas[1], [])
        del replicas[1]
        gc.collect()
        await anyio.lowlevel.checkpoint()
        assert [one.waiting for one in replicator.stats()] == [0, 0, 0]


async def test_what_waits_for_one_that_is_garbage_is_no_clean_end() -> None:
    async with sl.StreamReplicator(Feed(6).anew(), 2) as replicator:
        first, second = replicator.replica(0), replicator.replica(1)
        assert await anext(first) == 0  # by now the stream has ended, and all is dealt
        await anyio.wait_all_tasks_blocked()
        del second
        gc.collect()
        found: list[int] = []
        with pytest.raises(ReplicaStalled, match="with 3 that wait for it"):
            await read(first, found)
        assert found == [2, 4]


def test_a_replicator_that_is_garbage_goes_on_for_its_replicas_if_all_were_asked_for() -> None:
    def replicas(ask: int) -> list[Replica[int]]:
        replicator = sl.StreamReplicator(Feed(20).sync(), 2)
        return [replicator.replica(r) for r in range(ask)]

    both = replicas(2)
    gc.collect()
    assert [list(replica) for replica in both] == [list(range(0, 20, 2)), list(range(1, 20, 2))]
    (one,) = replicas(1)
    gc.collect()
    with pytest.raises(ReplicaStalled, match="was never asked for"):
        list(one)


def test_all_that_is_garbage_leaves_nothing() -> None:
    feed = Feed(100_000)
    replica = sl.StreamReplicator(feed.sync(), 1, capacity=3).replica(0)
    assert next(replica) == 0
    del replica
    gc.collect()  # the fixture looks for the thread
    for _ in range(1000):
        if feed.closed:
            break
        threading.Event().wait(0.003)
    assert feed.closed == 1


@KINDS
def test_the_close_of_all_is_an_error_for_who_reads(kind: Any, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        feed = Feed(100_000)
        async with sl.StreamReplicator(kind(feed), 2, capacity=3) as replicator:
            first = replicator.replica(0)
            assert await anext(first) == 0
        assert feed.closed == 1
        with pytest.raises(ClosedError, match="the replicator is closed"):
            await read(first, [])
        await replicator.aclose()

    run(test)


def test_a_close_in_another_thread_ends_waits() -> None:
    waits = threading.Event()

    def quiet() -> Iterator[int]:
        yield 0
        waits.set()
        release.wait(200)

    release = threading.Event()
    replicator = sl.StreamReplicator(quiet(), 1)
    replica = replicator.replica(0)
    assert next(replica) == 0

    def close() -> None:
        waits.wait(200)
        replicator._dispatcher.stop()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedError):
        next(replica)
    closing.join()
    release.set()
    replicator.close()


def test_a_loop_that_ends_ends_what_it_reads_for_all() -> None:
    replicator = sl.StreamReplicator(Feed(100_000).anew(), 2, capacity=2)
    first, second = replicator.replica(0), replicator.replica(1)

    async def main() -> int:
        return await anext(first)

    assert anyio.run(main) == 0
    with pytest.raises(ClosedError, match="event loop in which the replicator read its stream has ended"):
        list(second)
    with pytest.raises(ClosedError):
        list(first)


async def test_a_loop_that_ends_before_the_first_step_too() -> None:
    replicator = sl.StreamReplicator(Feed(100).anew(), 1)
    replica = replicator.replica(0)
    pull = anyio.CancelScope()
    with pull:
        pull.cancel()
        await anext(replica)
    assert await anext(replica) == 0  # cancelled, it took nothing
    await replicator.aclose()


# Refusals ------------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    with pytest.raises(PlanTypeError, match="call it, and give what it returns"):
        sl.StreamReplicator(Feed(3).anew, 2)  # type: ignore[arg-type]
    with pytest.raises(PlanTypeError, match="is a pipeline, or an iterable"):
        sl.StreamReplicator("text", 2)
    for options, message in [
        ({"num_replicas": 0}, "num_replicas=. is at least 1"),
        ({"num_replicas": 2, "capacity": 0}, "capacity=. is at least 1"),
        ({"num_replicas": 2, "stall_timeout": 0}, "finite number of seconds, more than 0"),
        ({"num_replicas": 2, "backend": sl.Inline()}, "says how a pipeline is opened, and a range is none"),
    ]:
        with pytest.raises(PlanError, match=message):
            sl.StreamReplicator(range(3), **options)  # type: ignore[arg-type]
    replicator = sl.StreamReplicator(range(3), 2)
    with pytest.raises(PlanError, match="from 0 to 1, got 2"):
        replicator.replica(2)
    with pytest.raises(PlanError, match="at least 0"):
        replicator.replica(-1)
    kept = replicator.replica(0)
    with pytest.raises(PlanError, match="asked for before"):
        replicator.replica(0)
    assert "0 taken" in repr(kept)
    assert "StreamReplicator of 2" in repr(replicator)
    with pytest.raises(PlanError, match="can't be read again from where it stands"):
        replicator.state_dict()
    kept.close()


async def test_two_readers_of_one_replica_are_refused() -> None:
    async with sl.StreamReplicator(_quiet(), 1) as replicator:
        replica = replicator.replica(0)
        async with anyio.create_task_group() as group:
            group.start_soon(_wait, replica)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(PlanError, match="two readers"):
                await anext(replica)
            group.cancel_scope.cancel()


async def _wait(replica: Replica[int]) -> None:
    await anext(replica)


async def _quiet() -> AsyncIterator[int]:
    await anyio.sleep_forever()
    yield 0


# Laws ----------------------------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["take", "cancel", "yield", "close"])), max_size=25)


@examples(60)
@given(
    st.sampled_from(SOURCES),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 30),
    st.one_of(st.none(), st.integers(0, 30)),
    STEPS,
)
def test_whatever_readers_do_nothing_is_lost_or_doubled(
    kind: Any, of: int, capacity: int, length: int, fail_at: int | None, steps: list[tuple[int, str]]
) -> None:
    """Any order of takes, cancelled waits and closes, then all read on: Close, Failure, Bound, and the items."""
    feed = Feed(length, fail_at if fail_at is not None and fail_at < length else None)
    last = length if feed.fail_at is None else feed.fail_at

    async def main() -> None:
        async with sl.StreamReplicator(kind(feed), of, capacity=capacity, stall_timeout=math.inf) as replicator:
            replicas = [replicator.replica(r) for r in range(of)]
            found: list[list[int]] = [[] for _ in range(of)]
            closed: set[int] = set()
            for number, step in steps:
                r = number % of
                if step == "close":
                    replicas[r].close()
                    closed.add(r)
                elif step == "yield":
                    await anyio.lowlevel.checkpoint()
                elif r not in closed:
                    await _take(replicas[r], found[r], cancelled=step == "cancel")
                assert all(one.waiting <= capacity for one in replicator.stats())
            async with anyio.create_task_group() as group:
                for r in set(range(of)) - closed:
                    group.start_soon(_to_the_end, replicas[r], found[r], feed.fail_at)
            for r in range(of):
                whole = list(range(r, last, of))
                assert found[r] == (whole[: len(found[r])] if r in closed else whole)
        assert feed.closed == 1 or not feed.asked

    with_limit(main)


def with_limit(main: AsyncTest) -> None:
    async def limited() -> None:
        with anyio.fail_after(200):
            await main()

    anyio.run(limited)


async def _take(replica: Replica[int], found: list[int], *, cancelled: bool) -> None:
    with anyio.CancelScope() as scope, anyio.move_on_after(0.002):
        if cancelled:
            scope.cancel()
        try:
            found.append(await anext(replica))
        except (StopAsyncIteration, KeyError):
            return


async def _to_the_end(replica: Replica[int], found: list[int], fail_at: int | None) -> None:
    try:
        await read(replica, found)
    except KeyError:
        assert fail_at is not None
    else:
        assert fail_at is None


def test_a_list_of_readers_with_bodies_of_any_length_is_served(run: Callable[[AsyncTest], None]) -> None:
    async def slow(replica: Replica[int], found: list[int]) -> None:
        async for item in islice_async(replica):
            found.append(item)
            if item % 7 == replica.number:
                await anyio.sleep(0.001)

    async def test() -> None:
        async with sl.StreamReplicator(range(600), 4, capacity=3, stall_timeout=1000) as replicator:
            found: list[list[int]] = [[] for _ in range(4)]
            async with anyio.create_task_group() as group:
                for r in range(4):
                    group.start_soon(slow, replicator.replica(r), found[r])
            assert found == [list(islice(range(600), r, None, 4)) for r in range(4)]

    run(test)


async def islice_async(replica: Replica[int]) -> AsyncIterator[int]:
    async for item in replica:
        yield item


async def test_a_task_that_is_cancelled_at_any_of_its_steps_and_awaited_leaves_no_task() -> None:
    async def consume() -> None:
        async with sl.StreamReplicator(sl.from_items(range(1000)), 1) as replicator:
            for _ in range(3):
                await anext(replicator.replica(0))

    others = asyncio.all_tasks()
    for steps in count():
        task = asyncio.ensure_future(consume())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert asyncio.all_tasks() - others == set(), f"cancelled after {steps} steps"
        if not task.cancelled():
            return
