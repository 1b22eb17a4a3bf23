"""Jobs and their supervisor: stopping, cleaning up, and tasks that never begin."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import anyio
import pytest

from streamline.core.gate import Phase
from streamline.core.tasks import Services, Session, Starter, Tasks, supervise
from tests.kit import LOOPS, AsyncTest, counted_calls, gone, streamline_tasks

Run = Callable[[AsyncTest], None]


async def supervised(test: Callable[[Tasks], object]) -> None:
    """Call `test` with the tasks of a supervisor that runs in a task of its own, then end it."""
    ready: list[Tasks] = []
    stop, session = anyio.Event(), Session()
    async with anyio.create_task_group() as group:
        group.start_soon(supervise, ready.append, stop, session)
        await anyio.wait_all_tasks_blocked()
        result = test(ready[0])
        if asyncio.iscoroutine(result):
            await result
        stop.set()
    assert session.gate.phase is Phase.CLOSED


def test_a_supervisor_that_ends_cancels_its_jobs_and_cleans_up_after_them(run: Run) -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            done.append("work")

    async def test(tasks: Tasks) -> None:
        tasks.start(work, "work", lambda: done.append("cleanup"))
        await anyio.wait_all_tasks_blocked()

    run(lambda: supervised(test))
    assert done == ["work", "cleanup"]


def test_what_is_owned_is_cleaned_up_unless_it_was_disowned(run: Run) -> None:
    done: list[str] = []

    def first() -> None:
        done.append("first")

    def second() -> None:
        done.append("second")

    def test(tasks: Tasks) -> None:
        tasks.add_cleanup(first)
        tasks.add_cleanup(first)
        tasks.add_cleanup(second)
        tasks.remove_cleanup(second)

    run(lambda: supervised(test))
    assert done == ["first"]


def test_stopping_a_job_waits_until_it_has_cleaned_up(run: Run) -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
            done.append("work")

    async def test(tasks: Tasks) -> None:
        job = tasks.start(work, "work", lambda: None)
        await anyio.wait_all_tasks_blocked()
        await tasks.stop(job)
        assert done == ["work"]
        await tasks.stop(job)

    run(lambda: supervised(test))


def test_ending_many_jobs_that_clean_up_one_by_one_costs_no_more_for_each() -> None:
    """As shards do that read files: one thread closes them."""

    async def end(jobs: int) -> None:
        thread = anyio.Lock()

        async def work() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    async with thread:
                        await anyio.lowlevel.checkpoint()

        async def begun(tasks: Tasks) -> None:
            for _ in range(jobs):
                tasks.start(work, "work", lambda: None)
            await anyio.wait_all_tasks_blocked()

        with counted_calls(counts):
            await supervised(begun)

    counts: list[int] = []
    for jobs in (40, 320):
        anyio.run(end, jobs)
    assert counts[1] < 10 * counts[0]


def test_a_job_stopped_before_it_begins_never_runs_and_blocks_no_waiter(run: Run) -> None:
    async def work() -> None:
        pytest.fail("it ran")

    async def test(tasks: Tasks) -> None:
        job = tasks.start(work, "work", lambda: None)
        await tasks.stop(job)
        assert job.cancelled
        await anyio.wait_all_tasks_blocked()

    run(lambda: supervised(test))


def test_a_job_cancelled_by_the_loop_before_its_first_step_blocks_no_waiter(run: Run) -> None:
    async def work() -> None:
        pytest.fail("it ran")

    async def test() -> None:
        ready: list[Tasks] = []
        stop = anyio.Event()
        supervisor = asyncio.ensure_future(supervise(ready.append, stop, Session()))
        await anyio.wait_all_tasks_blocked()
        job = ready[0].start(work, "work", lambda: None)
        for task in streamline_tasks():
            task.cancel()
        with anyio.fail_after(200):
            await job.stop()
        stop.set()
        await asyncio.wait([supervisor])

    run(test)


@pytest.mark.parametrize("loop", LOOPS)
def test_coroutines_that_a_loop_never_began_are_closed_in_silence(loop: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        await anyio.sleep_forever()

    async def main() -> None:
        async def own() -> None:
            group = anyio.create_task_group()
            starter = Starter(group)
            try:
                async with group:
                    for _ in range(3):
                        starter.start(work, "work")
                    for task in streamline_tasks():
                        task.cancel()
            finally:
                starter.close()

        await asyncio.wait([asyncio.ensure_future(own())])
        await gone(streamline_tasks)

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": loop == "uvloop"})
    gc.collect()  # a coroutine that was never awaited warns here, and a warning is an error
    assert capfd.readouterr() == ("", "")


def test_what_ctrl_c_cuts_off_at_the_close_of_a_session_is_done_by_the_next_close() -> None:
    session, calls = Session(), list[str]()

    def struck() -> None:
        calls.append("struck")
        if calls.count("struck") == 1:
            raise KeyboardInterrupt

    session.hooks.at_close(lambda: calls.append("first"))
    session.hooks.at_close(struck)
    with pytest.raises(KeyboardInterrupt):
        session.hooks.close()
    session.hooks.close()
    session.hooks.close()
    assert calls == ["struck", "struck", "first"]


def test_a_service_that_is_added_while_another_thread_makes_one_stays() -> None:
    services = Services()

    class Made:
        def __init__(self, *, begin: Callable[[], None] = lambda: None) -> None:
            begin()

    added = Made()
    assert services.get(Made, begin=lambda: services.add(Made, added)) is added
    assert services.find(Made) is added
    assert services.without(Made).find(Made) is None
