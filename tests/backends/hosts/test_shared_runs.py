"""How a host gives several ranks what one worker makes: bounds, late ones, and those that lag."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from streamline.backends.hosts import shared_runs
from streamline.backends.hosts.shared_runs import KEPT_TIMES, RunPeer, SharedPlan, SharedRun
from streamline.backends.ipc.messages import (
    Credit,
    Hello,
    ItemsMessage,
    Message,
    OpenWorker,
    ProgressMessage,
    WorkerClosed,
    WorkerEnded,
)

CAPACITY = 8


class NotedLink:
    """Notes what is sent."""

    one_machine = True
    host = ""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def items(self) -> int:
        return sum(message.packed.count for message in self.sent if isinstance(message, ItemsMessage))


class Table:
    """A run with one worker, and peers that have opened it."""

    def __init__(self) -> None:
        self.plan = SharedPlan(b"", cast(Any, None))
        self.run = SharedRun(self.plan, Hello("process 0", None, False, None), one_machine=True)
        self.plan.runs.append(self.run)
        self.links: dict[str, NotedLink] = {}
        self.peers: dict[str, RunPeer] = {}

    def open(self, name: str, in_flight: int = 0, state: Any = None) -> None:
        link = self.links[name] = NotedLink()
        peer = self.peers[name] = RunPeer(cast(Any, link), self.plan)
        peer._handlers[OpenWorker](
            OpenWorker(3, 0, 1, (0,), {}, state, CAPACITY, 1000, in_flight=in_flight, in_flight_bytes=in_flight)
        )

    def give(self, items: int) -> None:
        packed: Any = SimpleNamespace(count=items, nbytes=items)
        self.worker.put(ItemsMessage(self.worker.number, packed, b""))

    def take(self, name: str, items: int) -> None:
        self.peers[name]._handlers[Credit](Credit(3, items, items))

    @property
    def worker(self) -> Any:
        (worker,) = self.run.workers.values()
        return worker

    @property
    def credit(self) -> list[int]:
        """The credit that the worker was given since the last look."""
        messages, self.run._link._messages = self.run._link._messages, []
        return [message.items for message in messages if isinstance(message, Credit)]

    def given(self) -> dict[str, int]:
        return {name: link.items for name, link in self.links.items()}


def at_a_table(test: Callable[[Table], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        async def main() -> None:
            await test(Table())

        anyio.run(main)

    del run.__wrapped__  # pytest would ask for its argument
    return run


@at_a_table
async def test_each_peer_gets_as_much_as_it_has_room_for(table: Table) -> None:
    table.open("fast")
    table.open("slow")
    for _ in range(4):
        table.give(2)
    assert table.given() == {"fast": 8, "slow": 8}
    table.take("fast", 8)
    assert table.credit == []  # the slow one holds all of them
    table.give(2)
    assert table.given() == {"fast": 10, "slow": 8}
    table.take("slow", 2)
    assert table.credit == [2]
    assert table.given() == {"fast": 10, "slow": 10}
    table.take("slow", 8)
    table.take("fast", 2)
    assert sum(table.credit) == 8


@at_a_table
async def test_one_that_comes_later_gets_all_and_holds_up_the_rest(table: Table) -> None:
    table.open("first")
    for _ in range(3):
        table.give(4)
        table.take("first", 4)
    assert sum(table.credit) == 12
    table.open("later", in_flight=3)
    assert table.credit == [-15]  # 12 that it hasn't got or consumed, and 3 that it had
    assert table.given() == {"first": 12, "later": 4}
    table.take("later", 3)
    assert table.credit == [3]
    assert table.given() == {"first": 12, "later": 8}


@at_a_table
async def test_after_too_much_was_given_none_joins_any_more(table: Table) -> None:
    table.open("first")
    for _ in range(KEPT_TIMES):
        table.give(CAPACITY)
        table.take("first", CAPACITY)
    table.open("in time")
    assert len(table.run.workers) == 1
    for _ in range(KEPT_TIMES):
        table.take("in time", CAPACITY)
    table.give(1)
    table.take("first", 1)
    opened = partial(table.open, "late")
    with pytest.raises(AssertionError):  # it begins a run of its own, for which there is no task here
        opened()


@at_a_table
async def test_another_place_is_never_joined(table: Table) -> None:
    table.open("first", state={"items": 3})
    for state in (None, {"items": 4}):
        with pytest.raises(AssertionError):
            table.open("other", state=state)
    table.open("same", state={"items": 3})
    assert len(table.worker.peers) == 2


@at_a_table
async def test_what_is_over_is_kept_for_those_that_come_later(table: Table) -> None:
    table.open("first")
    table.give(4)
    table.worker.put(WorkerEnded(table.worker.number, None))
    table.take("first", 4)
    assert table.worker.leave(table.peers["first"])
    table.run.deliver(WorkerClosed(table.worker.number))
    table.open("later")
    assert table.given()["later"] == 4
    assert isinstance(table.links["later"].sent[-1], WorkerEnded)


@at_a_table
async def test_a_peer_that_leaves_frees_those_that_waited_for_it(table: Table) -> None:
    table.open("fast")
    table.open("slow")
    table.give(8)
    table.take("fast", 8)
    assert table.credit == []
    assert table.worker.leave(table.peers["slow"])
    assert table.credit == [8]
    assert not table.worker.leave(table.peers["fast"])  # the last one waits until it is closed


@at_a_table
async def test_progress_goes_on_when_it_has_come_everywhere(table: Table) -> None:
    table.open("one")
    table.open("two")
    table.worker.put(ProgressMessage(table.worker.number, b""))
    for name, expected in (("one", []), ("two", [0])):
        table.take(name, 0)
        assert table.credit == expected


@at_a_table
async def test_one_that_consumes_nothing_while_another_waits_is_detached(table: Table) -> None:
    async with anyio.create_task_group() as group:
        table.run.group = group
        table.open("fast")
        table.open("stuck")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_runs, "STALL_S", 0.0)
            table.give(8)
            table.take("fast", 8)
            await anyio.wait_all_tasks_blocked()
        assert table.links["stuck"].sent[-1] == WorkerClosed(3)
        assert list(table.worker.peers) == [table.peers["fast"]]
        assert sum(table.credit) == 8


@at_a_table
async def test_one_that_consumes_slowly_or_for_whom_none_waits_is_not_detached(table: Table) -> None:
    async with anyio.create_task_group() as group:
        table.run.group = group
        table.open("fast")
        table.open("slow")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_runs, "STALL_S", 0.0)
            table.give(8)
            table.take("fast", 7)  # it has one left
            await anyio.wait_all_tasks_blocked()
            table.run.pause(table.peers["fast"])
            table.take("fast", 1)  # in a pause, it wants none
            await anyio.wait_all_tasks_blocked()
        assert len(table.worker.peers) == 2
