"""Whom a death counts against, and which call is at fault: without hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from streamline.backends.hosts.restarts import TRACKED_ITEMS, CrashReport, CrashTracking, RestartPolicy, crash_verdict
from streamline.backends.ipc.messages import CallProgress, CrashingCall
from streamline.core.flow import Site
from streamline.errors import WorkerDied


@dataclass(eq=False)
class Worker:
    shard: int = 0
    finished: bool = False
    has_room: bool = True
    held: int = 0
    position: str = "line 7"
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def site(self) -> Site:
        return Site(cast(Any, None), self.shard, 4)

    def calls(self, number: int = 1) -> Worker:
        self.restart_policy.handle(CallProgress(0, "load", number, over=False))
        return self


def dies(report: CrashReport[Worker], *workers: Worker, stuck: bool = False) -> list[Worker]:
    return report.died(workers, stuck=stuck)


def test_the_third_death_in_a_row_is_the_last() -> None:
    report, worker = CrashReport[Worker](CrashTracking(max_restarts=3)), Worker()
    assert [dies(report, worker) for _ in range(3)] == [[], [], [worker]]


def test_an_item_resets_the_count_of_deaths() -> None:
    report, worker = CrashReport[Worker](CrashTracking(max_restarts=2)), Worker()
    for _ in range(5):
        assert dies(report, worker) == []
        worker.restart_policy.on_items(1, dict)


def test_a_death_counts_against_who_is_in_a_call_else_against_who_has_room() -> None:
    report = CrashReport[Worker](CrashTracking())
    calling, idle, full = Worker().calls(), Worker(), Worker(has_room=False)
    dies(report, calling, idle, full)
    assert [worker.restart_policy.count for worker in (calling, idle, full)] == [1, 0, 0]
    calling.restart_policy.handle(CallProgress(0, "load", 1, over=True))
    dies(report, calling, idle, full)
    assert [worker.restart_policy.count for worker in (calling, idle, full)] == [2, 1, 0]


@pytest.mark.parametrize(("given", "track_calls"), [(TRACKED_ITEMS - 1, True), (TRACKED_ITEMS, False)])
def test_calls_are_tracked_after_two_deaths_in_quick_succession(given: int, track_calls: bool) -> None:
    report, worker = CrashReport[Worker](CrashTracking(max_restarts=9)), Worker()
    dies(report, worker)
    assert not worker.restart_policy.track_calls
    worker.restart_policy.on_items(given, dict)
    dies(report, worker)
    assert worker.restart_policy.track_calls is track_calls


def test_calls_are_tracked_after_a_hang_and_before_the_last_death() -> None:
    stuck, last = Worker(), Worker()
    dies(CrashReport[Worker](CrashTracking(max_restarts=9)), stuck, stuck=True)
    dies(CrashReport[Worker](CrashTracking(max_restarts=2)), last)
    assert (stuck.restart_policy.track_calls, last.restart_policy.track_calls) == (True, True)


def test_several_in_calls_take_turns_and_none_is_counted() -> None:
    report = CrashReport[Worker](CrashTracking())
    later, awaited, other = Worker(held=3).calls(), Worker(held=0).calls(), Worker()
    assert dies(report, later, awaited, other) == []
    assert [worker.restart_policy.count for worker in (later, awaited, other)] == [0, 0, 0]
    assert [report.waits(worker) for worker in (later, awaited, other)] == [True, True, False]
    assert report.turn is awaited  # whom the merge waits for
    assert not report.turn_over(later)
    assert report.turn_over(awaited)
    assert report.turn is later
    later.finished = True
    assert report.turn is None


def test_several_that_would_be_counted_for_the_last_time_take_turns() -> None:
    """Else one that lost an item at each death of the others would fail in their place."""
    report = CrashReport[Worker](CrashTracking(max_restarts=2))
    awaited, later, full = Worker(), Worker(held=3), Worker(has_room=False)
    assert dies(report, awaited, later, full) == []
    assert dies(report, awaited, later, full) == []
    assert [worker.restart_policy.count for worker in (awaited, later, full)] == [1, 1, 0]
    assert report.turn is awaited
    awaited.restart_policy.on_items(1, dict)
    assert report.turn_over(awaited)
    awaited.has_room = False
    assert report.turn is later
    assert dies(report, awaited, later, full) == [later]


def test_one_that_waits_for_its_turn_is_not_counted() -> None:
    report = CrashReport[Worker](CrashTracking(max_restarts=1))
    first, second = Worker(), Worker(held=1)
    assert dies(report, first, second) == []
    assert dies(report, first, second) == [first]
    assert second.restart_policy.count == 0


def test_a_call_that_is_known_is_the_culprit_once() -> None:
    worker = Worker(shard=2).calls(5)
    worker.restart_policy.count = 3
    crashing_call = crash_verdict(worker, 1, "process 1, pid 7", "exit code 3")
    assert isinstance(crashing_call, CrashingCall)
    stage, number, failure = crashing_call
    assert (stage, number, failure.shard, failure.process, failure.exit) == ("load", 5, 2, 1, "exit code 3")
    assert "shard 2 of 4 has lost its host 3 times" in str(failure)
    worker.restart_policy.crashing_call = crashing_call
    assert isinstance(crash_verdict(worker, 1, "process 1, pid 7", "exit code 3"), WorkerDied)


@pytest.mark.parametrize("calls", [0, 2])
def test_where_no_single_call_is_known_the_worker_fails_where_it_stands(calls: int) -> None:
    worker = Worker()
    for number in range(calls):
        worker.calls(number)
    failure = crash_verdict(worker, 1, "process 1, pid 7", "exit code 3")
    assert isinstance(failure, WorkerDied)
    assert str(failure).endswith("ended with exit code 3. It stands after line 7")
