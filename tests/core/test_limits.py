"""Limits of calls, without stages: what they refuse, tokens in virtual time, and permits handed out by random turns."""

from __future__ import annotations

import math
import pickle
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, cast

import anyio
import pytest

import streamline as sl
from streamline.core.gate import Event, Gate
from streamline.core.limits import CallLimits, Issuer, Permits, check_limit
from streamline.errors import PlanError, PlanTypeError
from tests.kit import in_virtual_time


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, PlanError, r"sl\.Limit\(16\) bounds the calls at once, sl\.Limit\(per_second=100\)"),
        ({"concurrency": 0}, PlanError, r"sl\.Limit\(concurrency\) is at least 1, got 0"),
        ({"concurrency": -3}, PlanError, r"concurrency.* at least 1, got -3"),
        ({"concurrency": True}, PlanTypeError, r"sl\.Limit\(concurrency\) is an integer, got bool"),
        ({"concurrency": 2.5}, PlanTypeError, r"integer, got float 2\.5"),
        ({"concurrency": math.nan}, PlanTypeError, "integer, got float nan"),
        ({"per_second": 0}, PlanError, r"sl\.Limit\(per_second=\) is a finite number of calls, more than 0, got 0"),
        ({"per_second": -1.5}, PlanError, r"more than 0, got -1\.5"),
        ({"per_second": math.nan}, PlanError, "finite number of calls, more than 0, got nan"),
        ({"per_second": math.inf}, PlanError, "finite number of calls, more than 0, got inf"),
        ({"per_second": True}, PlanTypeError, r"per_second=\) is a number of calls, got bool"),
        ({"per_second": "10"}, PlanTypeError, "got str '10'"),
        ({"per_second": 10, "burst": 0}, PlanError, r"sl\.Limit\(burst=\) is at least 1"),
        ({"per_second": 10, "burst": True}, PlanTypeError, r"burst=\) is an integer, got bool"),
        ({"concurrency": 4, "burst": 2}, PlanError, r"burst=\) says how many of the calls of per_second="),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sl.Limit(**options)


def test_what_is_no_limit_is_refused_with_the_way_to_write_one() -> None:
    with pytest.raises(PlanTypeError, match=r"\.map\(limit=\) is a sl\.Limit, .* got int 16: limit = sl\.Limit\(16\)"):
        check_limit(".map(limit=)", 16)


def test_a_limit_prints_as_it_was_written() -> None:
    assert repr(sl.Limit(16)) == "Limit(16)"
    assert repr(sl.Limit(16, per_second=2.5, burst=3)) == "Limit(16, per_second=2.5, burst=3)"
    assert repr(sl.Limit(per_second=100)) == "Limit(per_second=100)"


def test_equal_limits_are_two_and_a_pickle_keeps_which_is_which() -> None:
    shared, other = sl.Limit(2), sl.Limit(2)
    assert shared == other
    assert shared.key != other.key
    assert pickle.loads(pickle.dumps(shared)).key == shared.key

    async def work() -> None:
        limits, gate = CallLimits(), Gate()
        permits = limits.permits(shared, gate, lambda *_: None)
        assert limits.permits(pickle.loads(pickle.dumps(shared)), gate, lambda *_: None) is permits
        assert limits.permits(other, gate, lambda *_: None) is not permits

    anyio.run(work)


# Tokens ---------------------------------------------------------------------------------------------------------------


def unused_permits(limit: sl.Limit) -> Permits:
    return CallLimits().permits(limit, Gate(), lambda *_: None)


def test_tokens_come_at_their_rate_and_no_more_are_kept_than_the_burst() -> None:
    async def work() -> list[int]:
        permits, taken = unused_permits(sl.Limit(per_second=10, burst=3)), []
        for pause_s in (0.0, 0.05, 0.05, 1000.0, 0.2, 0.1):
            await anyio.sleep(pause_s)
            taken.append(sum(iter(permits.acquire_nowait, False)))
        for _ in range(2):
            permits.release(unused=True)
        return [*taken, sum(iter(permits.acquire_nowait, False))]

    assert in_virtual_time(work) == [3, 0, 1, 3, 2, 1, 2]


def test_a_burst_is_a_tenth_of_a_second_unless_it_is_given() -> None:
    async def work() -> list[int]:
        limits = [sl.Limit(per_second=rate) for rate in (0.5, 10, 95, 1000)]
        return [sum(iter(unused_permits(limit).acquire_nowait, False)) for limit in limits]

    assert in_virtual_time(work) == [1, 1, 10, 100]


def test_calls_begin_at_the_rate_after_the_first_burst() -> None:
    async def work() -> list[float]:
        async with anyio.create_task_group() as group:
            permits = CallLimits().permits(limit, Gate(), starter(group))
            begun = anyio.current_time()
            times: list[float] = []
            for _ in range(9):
                if not permits.acquire_nowait():
                    await permits.wait()
                times.append(anyio.current_time() - begun)
                permits.release()
            group.cancel_scope.cancel()
        return times

    limit = sl.Limit(4, per_second=2, burst=3)
    assert in_virtual_time(work) == pytest.approx([0, 0, 0, 0.5, 1, 1.5, 2, 2.5, 3])


def starter(group: Any) -> Any:
    return lambda work, name, cleanup: group.start_soon(work, name=name)


def test_a_pause_gathers_no_more_calls_than_a_burst() -> None:
    async def work() -> list[float]:
        times: list[float] = []

        async def call() -> None:
            if not permits.acquire_nowait():
                await permits.wait()
            times.append(anyio.current_time() - begun)

        async with anyio.create_task_group() as group:
            permits = CallLimits().permits(limit, gate, starter(group))
            begun = anyio.current_time()
            for _ in range(6):
                group.start_soon(call)
            await anyio.sleep(0.5)
            await gate.pause()
            await anyio.sleep(100)
            assert len(times) == 1
            gate.resume()
            await anyio.sleep(10)
            group.cancel_scope.cancel()
        return times

    gate = Gate()
    limit = sl.Limit(per_second=1, burst=1)
    assert in_virtual_time(work) == pytest.approx([0, 100.5, 101.5, 102.5, 103.5, 104.5])


# Permits --------------------------------------------------------------------------------------------------------------


class Ends:
    """An issuer and holders in other event loops, with the messages between them on their way for a while."""

    def __init__(self, limit: sl.Limit, holders: int) -> None:
        self.limit = limit
        self.issuer = Issuer(limit, Gate(), lambda *_: None)
        self.on_their_way: list[list[Callable[[], None]]] = []
        self.permits: list[Permits] = []
        self.running: list[list[int]] = []
        self.begun: list[int] = []
        self.lost: set[int] = set()
        for _ in range(holders):
            self.add()

    def add(self) -> None:
        """Add a holder."""
        at = len(self.permits)
        to, back = [], []  # type: ignore[var-annotated]
        self.on_their_way += [to, back]

        def ask(permits: int) -> None:
            back.append(lambda: self.issuer.ask(at, permits))

        def give_back(permits: int, unused: bool) -> None:
            back.append(lambda: self.issuer.take_back(at, permits, unused))

        made = Permits(Gate(), ask, give_back)
        self.permits.append(made)
        self.running.append([])
        self.begun.append(0)
        self.issuer.join(at, lambda permits, share: to.append(lambda: made.grant(permits, share)))

    def lose(self, at: int) -> None:
        """End a holder, with all that is on its way."""
        self.lost.add(at)
        self.issuer.leave(at)

    def deliver(self, dice: Random) -> bool:
        """Deliver one message; False: there is none."""
        ways = [way for at, way in enumerate(self.on_their_way) if way and at // 2 not in self.lost]
        if ways:
            dice.choice(ways).pop(0)()
        return bool(ways)

    @property
    def at_once(self) -> int:
        return sum(len(running) for at, running in enumerate(self.running) if at not in self.lost)


@pytest.mark.parametrize("seed", range(4))
def test_never_more_than_the_limit_nor_a_call_that_waits_for_ever(seed: int, run: Callable[..., None]) -> None:
    """Random turns: calls begin, end, are cancelled; messages arrive late; a holder is lost, another one comes."""

    async def test() -> None:
        dice = Random(seed)
        ends = Ends(sl.Limit(dice.randint(1, 7)), dice.randint(1, 4))
        scopes: list[anyio.CancelScope] = []
        waiting = [0] * 9

        async def call(at: int) -> None:
            permits = ends.permits[at]
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                waiting[at] += 1
                try:
                    if not permits.acquire_nowait():
                        await permits.wait()
                finally:
                    waiting[at] -= 1
                ends.begun[at] += 1
                done = dice.randrange(1, 30)
                ends.running[at].append(1)
                assert ends.at_once <= ends.limit.at_once
                try:
                    for _ in range(done):
                        await anyio.lowlevel.checkpoint()
                finally:
                    ends.running[at].pop()
                    permits.release()

        async with anyio.create_task_group() as group:
            for turn in range(400):
                alive = [at for at in range(len(ends.permits)) if at not in ends.lost]
                if dice.random() < 0.5:
                    group.start_soon(call, dice.choice(alive))
                if dice.random() < 0.1 and scopes:
                    dice.choice(scopes).cancel()
                if turn == 200 and len(alive) > 1:
                    ends.lose(alive[0])
                    ends.add()
                ends.deliver(dice)
                await anyio.lowlevel.checkpoint()
            alive = [at for at in range(len(ends.permits)) if at not in ends.lost]
            while any(waiting[at] or ends.running[at] for at in alive) or ends.deliver(dice):
                ends.deliver(dice)
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert all(ends.begun[at] for at in alive)
        assert ends.issuer._free == ends.limit.at_once  # all came back

    run(test)


def test_holders_take_turns_and_each_keeps_its_share(run: Callable[..., None]) -> None:
    async def test() -> None:
        ends, dice = Ends(sl.Limit(4), 2), Random(0)

        async def calls(at: int) -> None:
            while True:
                if not ends.permits[at].acquire_nowait():
                    await ends.permits[at].wait()
                ends.begun[at] += 1
                await anyio.lowlevel.checkpoint()
                ends.permits[at].release()

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(calls, 0)  # many wait here
            for _ in range(100):
                ends.deliver(dice)
                await anyio.lowlevel.checkpoint()
            for _ in range(4):
                group.start_soon(calls, 1)
            before = list(ends.begun)
            for _ in range(2000):
                ends.deliver(dice)
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        first, second = (now - then for now, then in zip(ends.begun, before, strict=True))
        assert second > first / 4  # with a fifth of the calls, it has half of the permits

    run(test)


def test_a_call_that_is_cancelled_in_any_state_leaves_its_permit(run: Callable[..., None]) -> None:
    async def test() -> None:
        limit = sl.Limit(1)
        permits = CallLimits().permits(limit, Gate(), lambda *_: None)

        async def call() -> None:
            await permits.wait()  # in asyncio, one that has got its permit isn't cancelled here
            permits.release()

        assert permits.acquire_nowait()
        for granted in (False, True):
            async with anyio.create_task_group() as group:
                group.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                if granted:
                    permits.release()  # it wakes, and is cancelled before it runs
                group.cancel_scope.cancel()
        assert permits.acquire_nowait()
        assert not permits.acquire_nowait()

    run(test)


def test_a_permit_that_arrives_in_a_pause_goes_back_and_is_asked_for_again(run: Callable[..., None]) -> None:
    async def test() -> None:
        told: list[Any] = []
        gate = Gate()
        permits = Permits(gate, lambda n: told.append(("ask", n)), lambda n, unused: told.append(("back", n, unused)))
        async with anyio.create_task_group() as group:
            group.start_soon(permits.wait)
            await anyio.wait_all_tasks_blocked()
            gate.on(Event.QUIESCE)
            permits.grant(1, 0)
            await anyio.wait_all_tasks_blocked()
            assert told == [("ask", 1), ("back", 1, True)]
            gate.on(Event.RESUME)
            await anyio.wait_all_tasks_blocked()
            assert told[2:] == [("ask", 1)]
            permits.grant(1, 0)

    run(test)


def test_no_task_waits_for_a_token_that_no_call_wants_any_more(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with anyio.create_task_group() as tasks:
            before = len(anyio.get_running_tasks())

            def start(work: Callable[[], Awaitable[None]], name: str, cleanup: Callable[[], None]) -> None:
                tasks.start_soon(cast(Any, work), name=name)

            limit = sl.Limit(per_second=1e-6, burst=1)
            permits = CallLimits().permits(limit, Gate(), start)
            assert permits.acquire_nowait()
            for _ in range(2):  # also the second time
                async with anyio.create_task_group() as calls:
                    calls.start_soon(permits.wait)
                    calls.start_soon(permits.wait)
                    await anyio.wait_all_tasks_blocked()
                    assert len(anyio.get_running_tasks()) == before + 3
                    calls.cancel_scope.cancel()
                await anyio.wait_all_tasks_blocked()
                assert len(anyio.get_running_tasks()) == before
            assert not permits.acquire_nowait()
            tasks.cancel_scope.cancel()

    run(test)
