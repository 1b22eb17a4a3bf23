"""Workers in hosts that drop nearly all: resumes and journals stay small, and nothing piles up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.hosts.item_sender import ItemSender
from streamline.backends.hosts.live_forwarding import TRIM_ITEMS, LiveForwarding
from streamline.backends.ipc.link import PipeLink
from streamline.backends.ipc.messages import ProgressMessage
from streamline.core.flow import Chunk
from streamline.core.state import At
from streamline.sources.journal import LEAST_ITEMS, MemoryJournal
from tests.backends.hosts.disturbing import connections_of
from tests.kit import Counting, Pipe, later
from tests.laws.profile import in_turn
from tests.sources.live_kit import Tape


class SentMessages:
    """A link and its encoder: messages are kept, with their last state as it is."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def send(self, message: Any) -> None:
        self.states.append(message.states)

    def pack(self, items: Sequence[int]) -> Any:
        return SimpleNamespace(count=len(items), nbytes=0)

    def dump(self, chunk: Chunk[int]) -> Any:
        return chunk.end.json()["items"]


async def test_progress_that_waited_is_dropped_where_later_items_overtake_it() -> None:
    link: Any = SentMessages()
    sender = ItemSender[int](link, link, 0, 100, 10**6)
    for number in (1, 2):
        await sender.send(Chunk((), (), At("items", number)))
    await sender.send(Chunk([7], [At("items", 3)]))
    sender.credit(0, 0)
    assert link.states == [1, 3]


LENGTH = 7_000
HELD = 5_000


def last(item: int) -> bool:
    return item == LENGTH - 1


@dataclass
class Hold:
    """An async function that waits from item `HELD` on until a file is there."""

    go: Path

    async def __call__(self, item: int) -> int:
        while item >= HELD and not self.go.exists():  # noqa: ASYNC110 - it may be in another process
            await anyio.sleep(0.005)
        return item


SELECTIVE: dict[str, Callable[[Pipe, Hold], Pipe]] = {
    "one worker": lambda pipe, hold: pipe.shard(1).map(hold).filter(last),
    "two workers": lambda pipe, hold: pipe.shard(2).map(hold).filter(last).merge("best_effort"),
    "through channels": lambda pipe, hold: (
        pipe.shard(1).map(hold).filter(last).prefetch(3).map(later, concurrency=2).prefetch(2)
    ),
    "before an unordered map": lambda pipe, hold: (
        pipe.shard(1).map(hold).filter(last).map(later, concurrency=2, ordered=False)
    ),
    "before a custom stage": lambda pipe, hold: (
        pipe.shard(1).map(hold).filter(last).flat_map(lambda x: [x]).batch(1).unbatch()
    ),
}


@pytest.mark.one_in(4, 1)
@pytest.mark.parametrize(
    ("hosts", "shape"),
    [(kind, shape) for shape, kind in in_turn(SELECTIVE, ["threads", "copying", "processes"])],
    indirect=["hosts"],
)
def test_a_snapshot_taken_while_the_consumer_waits_reads_almost_nothing_again(
    shape: str, hosts: Backend, tmp_path: Path
) -> None:
    def pipe(go: Path) -> tuple[Counting, Pipe]:
        source = Counting(LENGTH)
        return source, SELECTIVE[shape](sl.from_items(source), Hold(go))

    async def lowest_again(snapshot: sl.Snapshot) -> float:
        source, again = pipe(tmp_path)  # which is there: nothing waits
        async with again.open(resume=snapshot) as stream:
            assert await anext(stream) == LENGTH - 1
        return source.lowest

    async def test() -> None:
        go, found = tmp_path / "go", []

        async def consume(stream: sl.Stream[Any]) -> None:
            found.append(await anext(stream))

        with anyio.fail_after(200):
            async with pipe(go)[1].open(backend=hosts) as stream, anyio.create_task_group() as group:
                group.start_soon(consume, stream)
                while await lowest_again(stream.snapshot()) < HELD - 2_000:  # noqa: ASYNC110 - there is no event
                    await anyio.sleep(0.03)
                assert not found
                go.touch()
        assert found == [LENGTH - 1]

    anyio.run(test)


def test_a_snapshot_after_the_end_covers_all_dropped_items(hosts: Backend) -> None:
    source = Counting(5_000)
    pipe = sl.from_items(source).shard(2).filter(lambda item: item < 10)
    with pipe.open(backend=hosts) as stream:
        assert list(stream) == list(range(10))
        snapshot = stream.snapshot()
    source.asked = 0
    with pipe.open(resume=snapshot) as stream:
        assert list(stream) == []
    assert source.asked == 0


def test_progress_does_not_pile_up_before_a_running_that_is_busy_elsewhere() -> None:
    source = Counting(10_000_000)
    pipe = sl.from_items(source).shard(2).filter(lambda item: False)

    async def test() -> None:
        async with pipe.open(backend=sl.Threads(2)) as stream, anyio.create_task_group() as group:
            group.start_soon(anext, stream)
            while not source.asked:  # noqa: ASYNC110 - in another thread
                await anyio.sleep(0.001)
            enough = source.asked + 100_000
            while source.asked < enough:
                time.sleep(0.001)  # noqa: ASYNC251 - nothing is consumed meanwhile
            for connection in connections_of(stream):
                assert isinstance(connection._link, PipeLink)
                assert sum(type(message) is ProgressMessage for message in list(connection._link._messages)) <= 1
            group.cancel_scope.cancel()

    anyio.run(test)


# Live sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3, 1)
def test_items_of_a_feed_are_kept_until_a_state_covers_them(hosts: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, journal = [0], [0]
    append, trim = MemoryJournal.append, LiveForwarding.on_items

    def appended(self: MemoryJournal, entry: Any) -> None:
        append(self, entry)
        journal.append(len(self))

    def trimmed(self: LiveForwarding, items: int, state: Any) -> None:
        kept.append(len(self._kept.items))
        trim(self, items, state)

    monkeypatch.setattr(MemoryJournal, "append", appended)
    monkeypatch.setattr(LiveForwarding, "on_items", trimmed)

    pipe = sl.from_stream(Tape(LENGTH, pause=100)).shard(2).filter(lambda item: item == LENGTH - 2).merge()

    async def test() -> None:
        with anyio.fail_after(200):
            async with pipe.open(backend=hosts) as stream:
                assert [item async for item in stream] == [LENGTH - 2]

    anyio.run(test)
    assert max(kept) <= TRIM_ITEMS + 3 * 512
    assert max(journal) <= 2 * (512 + 512 + 256) * 4 + LEAST_ITEMS


@pytest.mark.one_in(6, 2)
@pytest.mark.parametrize("options", [{"max_ahead": 50}, {"max_ahead_bytes": 50 * 16}])
def test_a_worker_that_starves_is_named_as_without_hosts(options: dict[str, Any], hosts: Backend) -> None:
    length = 4_100

    def drop_even(item: int) -> bool:
        return item % 2 == 1 or item >= 4_000

    async def test() -> None:
        tape = Tape(length)
        pipe = sl.from_stream(tape, **options).shard(2).filter(drop_even).merge()
        async with pipe.open(backend=hosts) as stream:
            with pytest.raises(
                sl.errors.WorkerStarved, match=r"shard 0 \(filter\(drop_even\)\).*5\d read ahead.*best_effort"
            ):
                await anext(stream)
            snapshot = stream.snapshot()
        wider = sl.from_stream(tape).shard(2).filter(drop_even).merge()
        async with wider.open(backend=hosts, resume=snapshot) as stream:
            found = [item async for item in stream]
        assert sorted(found) == [item for item in range(length) if drop_even(item)]

    anyio.run(test)
