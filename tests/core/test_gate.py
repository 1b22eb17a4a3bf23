"""The gate: every pair of phase and event, and who waits when."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import pytest
from anyio.abc import TaskGroup

from streamline.core.gate import TABLE, Event, Gate, Phase, Rest, gate_of_task, wait_at_rest
from streamline.errors import ClosedError, StreamlineError

Pair: TypeAlias = tuple[Phase, Event]
AsyncTest: TypeAlias = Callable[[], Awaitable[None]]

PATHS: dict[Phase, list[Event]] = {
    Phase.RUNNING: [],
    Phase.QUIESCING: [Event.QUIESCE],
    Phase.CAPTURED: [Event.QUIESCE, Event.CAPTURE],
    Phase.PAUSED: [Event.QUIESCE, Event.PAUSE],
    Phase.CLOSED: [Event.CLOSE],
}
HELD = [Phase.QUIESCING, Phase.CAPTURED, Phase.PAUSED]
LEGAL: dict[Pair, Phase] = {
    (Phase.RUNNING, Event.QUIESCE): Phase.QUIESCING,
    (Phase.RUNNING, Event.CLOSE): Phase.CLOSED,
    (Phase.QUIESCING, Event.CAPTURE): Phase.CAPTURED,
    (Phase.QUIESCING, Event.PAUSE): Phase.PAUSED,
    (Phase.QUIESCING, Event.RESUME): Phase.RUNNING,
    (Phase.QUIESCING, Event.CLOSE): Phase.CLOSED,
    (Phase.PAUSED, Event.CAPTURE): Phase.CAPTURED,
    (Phase.PAUSED, Event.RESUME): Phase.RUNNING,
    (Phase.PAUSED, Event.CLOSE): Phase.CLOSED,
    (Phase.CAPTURED, Event.PAUSE): Phase.PAUSED,
    (Phase.CAPTURED, Event.QUIESCE): Phase.QUIESCING,
    (Phase.CAPTURED, Event.RESUME): Phase.RUNNING,
    (Phase.CAPTURED, Event.CLOSE): Phase.CLOSED,
    (Phase.CLOSED, Event.CLOSE): Phase.CLOSED,
}
"""Written out again: a row that slips into the table, or out of it, must be meant twice."""

ILLEGAL = [(phase, event) for phase in Phase for event in Event if (phase, event) not in LEGAL]


def gate_in(phase: Phase) -> Gate:
    gate = Gate()
    for event in PATHS[phase]:
        gate.on(event)
    assert gate.phase is phase
    return gate


async def passers(gate: Gate, group: TaskGroup, count: int = 3) -> list[int]:
    """Start tasks that pass the gate, let them come as far as they can, and return who has passed: live."""
    passed: list[int] = []

    async def passer(number: int) -> None:
        await gate.passage()
        passed.append(number)

    for number in range(count):
        group.start_soon(passer, number)
    await anyio.wait_all_tasks_blocked()
    return passed


def test_the_table_is_the_one_that_was_agreed() -> None:
    assert TABLE == LEGAL


@pytest.mark.parametrize(("pair", "after"), LEGAL.items())
def test_a_legal_event_leads_where_the_table_says_and_returns_the_phase_before(pair: Pair, after: Phase) -> None:
    phase, event = pair
    gate = gate_in(phase)
    assert gate.on(event) is phase
    assert gate.phase is after


@pytest.mark.parametrize(("phase", "event"), ILLEGAL)
def test_an_illegal_event_raises_and_changes_nothing(phase: Phase, event: Event) -> None:
    gate = gate_in(phase)
    with pytest.raises(RuntimeError, match=rf"can't {event.value} a stream that is {phase.value}") as refused:
        gate.on(event)
    assert isinstance(refused.value, ClosedError) == (phase is Phase.CLOSED)
    assert isinstance(refused.value, StreamlineError) == (phase is Phase.CLOSED)
    assert gate.phase is phase


@pytest.mark.parametrize("phase", HELD)
def test_an_illegal_event_lets_no_participant_pass(phase: Phase, run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        gate = gate_in(phase)
        async with anyio.create_task_group() as group:
            passed = await passers(gate, group)
            for event in [event for at, event in ILLEGAL if at is phase]:
                with pytest.raises(RuntimeError):
                    gate.on(event)
            await anyio.wait_all_tasks_blocked()
            assert passed == []
            group.cancel_scope.cancel()

    run(test)


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.CLOSED])
def test_who_finds_the_gate_open_does_not_wait(phase: Phase) -> None:
    passage = gate_in(phase).passage()
    with pytest.raises(StopIteration):
        passage.send(None)  # a single step, without an event loop


@pytest.mark.parametrize("event", [Event.RESUME, Event.CLOSE])
@pytest.mark.parametrize("phase", HELD)
def test_tasks_wait_until_items_may_move_or_the_stream_is_closed(
    phase: Phase, event: Event, run: Callable[[AsyncTest], None]
) -> None:
    async def test() -> None:
        gate = gate_in(phase)
        async with anyio.create_task_group() as group:
            passed = await passers(gate, group)
            assert passed == []
            gate.on(event)
            await anyio.wait_all_tasks_blocked()
            assert sorted(passed) == [0, 1, 2]

    run(test)


def test_tasks_wait_through_the_phases_in_between(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        gate = gate_in(Phase.QUIESCING)
        async with anyio.create_task_group() as group:
            passed = await passers(gate, group)
            for event in (Event.PAUSE, Event.CAPTURE, Event.PAUSE):
                gate.on(event)
                await anyio.wait_all_tasks_blocked()
                assert passed == []
            gate.on(Event.RESUME)

        assert sorted(passed) == [0, 1, 2]

    run(test)


def test_a_gate_that_opens_and_closes_in_one_step_keeps_the_tasks_waiting(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        gate = gate_in(Phase.PAUSED)
        async with anyio.create_task_group() as group:
            passed = await passers(gate, group)
            gate.on(Event.RESUME)
            gate.on(Event.QUIESCE)
            await anyio.wait_all_tasks_blocked()
            assert passed == []
            gate.on(Event.RESUME)
            await anyio.wait_all_tasks_blocked()
            assert sorted(passed) == [0, 1, 2]

    run(test)


def test_a_snapshot_in_one_step_blocks_no_participant(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        gate = Gate()
        for event in (Event.QUIESCE, Event.CAPTURE, Event.RESUME):
            gate.on(event)
        async with anyio.create_task_group() as group:
            assert sorted(await passers(gate, group)) == [0, 1, 2]

    run(test)


def test_a_task_cancelled_at_the_gate_leaves_it_as_it_is(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        gate = gate_in(Phase.PAUSED)
        async with anyio.create_task_group() as group:
            assert await passers(gate, group) == []
            group.cancel_scope.cancel()
        assert gate.phase is Phase.PAUSED
        async with anyio.create_task_group() as group:
            passed = await passers(gate, group)
            gate.on(Event.RESUME)
        assert sorted(passed) == [0, 1, 2]

    run(test)


def test_a_pause_waits_for_active_participants_and_not_for_waiting_ones(
    run: Callable[[AsyncTest], None],
) -> None:
    async def test() -> None:
        gate, item, call = Gate(), anyio.Event(), anyio.Event()
        done: list[str] = []

        async def waits() -> None:
            await wait_at_rest(item.wait())
            await gate.passage()
            done.append("waits")

        async def works() -> None:
            await call.wait()
            assert gate_of_task() is gate
            await gate.passage()
            done.append("works")

        async with anyio.create_task_group() as group:
            group.start_soon(gate.participate, "waits", waits)
            group.start_soon(gate.participate, "works", works)
            group.start_soon(gate.participate, "works", works)
            await anyio.wait_all_tasks_blocked()
            assert gate.at_work == ("works (2 calls)",)
            group.start_soon(gate.pause)
            await anyio.wait_all_tasks_blocked()
            assert gate.phase is Phase.QUIESCING
            call.set()
            item.set()
            await anyio.wait_all_tasks_blocked()
            assert [gate.phase] == [Phase.PAUSED]
            assert (len(gate.at_work), len(done)) == (0, 0)
            gate.resume()
        assert sorted(done) == ["waits", "works", "works"]
        assert await gate.pause() == ()  # movers that have ended are waited for no more

    run(test)


def test_a_participant_that_waits_for_two_at_once_rests_once(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        gate, done = Gate(), anyio.Event()

        async def waits() -> None:
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(wait_at_rest, anyio.sleep_forever())

        async with anyio.create_task_group() as group:
            group.start_soon(gate.participate, "waits", waits)
            group.start_soon(gate.participate, "works", done.wait)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(gate.pause)
            await anyio.wait_all_tasks_blocked()
            assert (gate.phase, gate.at_work) == (Phase.QUIESCING, ("works",))
            done.set()
            await anyio.wait_all_tasks_blocked()
            assert (gate.phase, gate.at_work) == (Phase.PAUSED, ())
            group.cancel_scope.cancel()

    run(test)


def test_pause_and_resume_callbacks_run_once_each_however_a_pause_ends(run: Callable[[AsyncTest], None]) -> None:
    async def test() -> None:
        gate, told = Gate(), list[str]()
        gate.on_pause(lambda: told.append("hold"), lambda: told.append("release"))
        await gate.pause()
        gate.resume()
        gate.resume()
        assert told == ["hold", "release"]
        async with anyio.create_task_group() as group:
            group.start_soon(gate.participate, "stuck", anyio.sleep_forever)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(0.001):
                await gate.pause()
            assert (gate.phase, told) == (Phase.RUNNING, ["hold", "release"] * 2)
            assert await gate.pause(0) == ("stuck",)
            assert (gate.phase, told) == (Phase.PAUSED, [*["hold", "release"] * 2, "hold"])
            group.cancel_scope.cancel()

    run(test)


def test_a_wait_that_is_set_or_cancelled_may_be_set_again(
    run: Callable[[AsyncTest], None],
) -> None:
    async def test() -> None:
        gate, cancelled, ended = Gate(), Rest(), Rest()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await cancelled.wait()
        assert scope.cancelled_caught
        cancelled.set()
        async with anyio.create_task_group() as group:
            group.start_soon(gate.participate, "a task", ended.wait)
            await anyio.wait_all_tasks_blocked()
            assert gate.at_work == ()
            ended.set()
            ended.set()
            assert gate.at_work == ()  # its turn hasn't come yet
        assert gate.at_work == ()

    run(test)
