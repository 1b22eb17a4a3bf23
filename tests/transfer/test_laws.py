"""A transfer keeps the laws, to the host and in threads, on every event loop and wherever its workers run."""

from __future__ import annotations

from typing import Any

import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_failure, check_resume, check_stage
from streamline.testing.scripted import SlowDevice, scripted, to_elsewhere
from streamline.testing.subjects import LOOPS
from streamline.transfer.stage import Transfer
from tests.laws.profile import in_turn


def in_place(pipe: Pipeline[Any]) -> Pipeline[Any]:
    return pipe.transfer("host")


@pytest.mark.long
@pytest.mark.parametrize(("loop", "depth"), in_turn(LOOPS, [1, 5]))
def test_a_device_that_is_waited_for_keeps_the_laws(loop: str, depth: int) -> None:
    check_stage(
        Transfer(name="transfer", device="cuda", depth=depth, target=SlowDevice()), range(7), loop=loop, generations=2
    )


def test_the_host_keeps_the_laws_pulled_directly() -> None:
    check_stage(Transfer(name="transfer", device="host"), range(7), generations=2)


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize(("moved", "merge"), [(in_place, "best_effort"), (to_elsewhere, "strict")])
def test_it_resumes_exactly_while_workers_run_in_threads(merge: Any, moved: Any) -> None:
    pipe = moved(sl.from_items(range(8)).shard(3).shuffle(window=4).merge(merge).batch(2, collate=None))
    check_resume(pipe, backend=sl.Threads(2), generations=2)


def test_it_resumes_exactly_while_workers_run_in_processes(processes: Backend) -> None:
    """Once: random pipelines do it often."""
    pipe = to_elsewhere(sl.from_items(range(24)).shard(3).shuffle(window=4).batch(2, collate=None), depth=4)
    whole = list(pipe)
    with pipe.open(backend=processes) as stream:
        assert [next(stream) for _ in range(5)] == whole[:5]
        snapshot = stream.snapshot()
    with pipe.open(backend=processes, resume=snapshot) as stream:
        assert list(stream) == whole[5:]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_that_cannot_be_moved_fails_as_any_stage_does(loop: str) -> None:
    error = LookupError("no room for 12")
    pipe = scripted([1, 2, 3], [11, 12, 13, 14], [])
    check_failure(to_elsewhere(pipe, SlowDevice(12, error)), error, mended=to_elsewhere(pipe), loop=loop)
