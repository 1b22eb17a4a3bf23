"""What `stats()` says of a mixture's components: counts, passes, ends and weights; in any backend, after a resume."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.figures import StageStats
from streamline.core.flow import Flow, Site
from streamline.core.state import State
from streamline.core.tasks import Tasks
from streamline.pipeline import Pipeline
from streamline.plan.component import PlanComponent
from streamline.plan.plan import Plan, Shard
from streamline.plan.worker import worker_flow
from streamline.sources.composite import SeveralState
from streamline.sources.mix import ComponentMetrics
from streamline.sources.sampler import draws_of
from streamline.testing.subjects import Read, Subject, opened, read, run
from tests.copying_backend import Copying, HostDeath

AnyPipeline = Pipeline[Any]


def numbers(length: int, start: int = 0) -> Pipeline[int]:
    return sl.from_items(range(start, start + length))


def iterated(length: int, start: int = 0) -> Pipeline[int]:
    return sl.from_iterable(lambda: range(start, start + length))


def mixed(stream: Any) -> StageStats:
    found: StageStats = next(stage for stage in stream.stats().stages if stage.kind == "mix")
    return found


def told(stage: StageStats) -> dict[str, tuple[float, ...]]:
    """By component: served, taken, epoch, ended, weight."""
    names = ("served", "taken", "epoch", "ended", "weight")
    parts = dict.fromkeys(detail.part for detail in stage.details)
    return {part: tuple(stage.detail(name, part) for name in names) for part in parts}


PARTS = {"a": numbers(6), "b": numbers(3, 100).repeat(4), "c": iterated(5, 200).map(abs).repeat(2)}
PIPE = sl.mix(PARTS, {"a": 1, "b": 2, "c": 0.5}, seed=3).shard(2).merge()
WHOLE = {"a": (6, 6, 0, 2, 1), "b": (12, 12, 3, 2, 2), "c": (10, 10, 1, 2, 0.5)}


def test_after_the_end_each_component_has_what_it_gave_wherever_it_ran(backend: Backend) -> None:
    with PIPE.open(backend=backend) as stream:
        list(stream)
        assert told(mixed(stream)) == WHOLE
    assert told(mixed(stream)) == WHOLE
    lines = str(stream.stats()).splitlines()
    at = lines.index("mix  served  taken  epoch  ended  weight")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["a", "6", "6", "0", "2", "1"],
        ["b", "12", "12", "3", "2", "2"],
    ]


@pytest.mark.parametrize("at", [0, 7, 27])
def test_after_a_resume_what_was_taken_goes_on_and_what_was_served_begins(at: int) -> None:
    with PIPE.open() as stream:
        before = [next(stream) for _ in range(at)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with PIPE.open(resume=snapshot) as stream:
        after = list(stream)
        found = told(mixed(stream))
    given = {name: sum(item // 100 == number for item in after) for number, name in enumerate("abc")}
    assert {name: each[0] for name, each in found.items()} == given
    assert {name: each[1:] for name, each in found.items()} == {name: each[1:] for name, each in WHOLE.items()}
    assert len(before) + len(after) == 28


def test_after_the_death_of_a_host_what_was_taken_counts_once() -> None:
    with PIPE.open(backend=Copying(1, (HostDeath(0, received=8),), max_restarts=3)) as stream:
        assert len(list(stream)) == 28
        found = told(mixed(stream))
        (host,) = stream.stats().hosts
    assert host.restarts == 1
    assert {name: each[1:] for name, each in found.items()} == {name: each[1:] for name, each in WHOLE.items()}


def test_a_component_that_is_gone_has_no_metrics_and_a_new_one_has() -> None:
    schedule: list[tuple[int, dict[str, float]]] = [(0, {"a": 1, "b": 0}), (4, {"a": 0.25, "b": 3})]
    pipe = sl.mix({"a": numbers(4), "b": numbers(4, 100)}, schedule).prefetch(1)
    with pipe.open() as stream:
        list(stream)
        assert told(mixed(stream)) == {"a": (4, 4, 0, 1, 0.25), "b": (4, 4, 0, 1, 3)}
    with pipe.open() as stream:
        [next(stream) for _ in range(5)]
        snapshot = stream.snapshot()
    with sl.mix({"a": numbers(4), "new": numbers(2, 200)}).prefetch(1).open(resume=snapshot) as stream:
        list(stream)
        found = told(mixed(stream))
    taken = snapshot.worker_states[0]["mix"]["taken"]["a"]
    assert found == {"a": (4 - taken, 4, 0, 1, 1), "new": (2, 2, 0, 1, 1)}


def test_passes_after_a_mixture_add_up_what_was_served() -> None:
    with sl.mix({"a": numbers(3), "b": numbers(2, 100).repeat(2)}).shard(1).prefetch(4).repeat(3).open() as stream:
        assert len(list(stream)) == 21
        assert told(mixed(stream)) == {"a": (9, 3, 0, 1, 1), "b": (12, 4, 1, 1, 1)}
        earlier = stream.stats()
        window = stream.stats().since(earlier)
    (stage,) = (stage for stage in window.stages if stage.kind == "mix")
    assert told(stage) == {"a": (0, 3, 0, 1, 1), "b": (0, 4, 1, 1, 1)}


# The pass of each item -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Component(Subject):
    """One shard of a component."""

    plan: Plan
    shard: int

    def open(self, tasks: Tasks, text: str | None) -> Flow[Any]:
        return worker_flow(self.plan, Site(tasks, self.shard, self.plan.shard.num_shards), None)

    def write(self, state: State) -> str:
        return str(state.json())


def identity(item: int) -> int:
    return item


def odd(item: int) -> bool:
    return item % 2 == 1


COMPONENTS: dict[str, tuple[AnyPipeline, int, int]] = {
    "an index": (numbers(5).repeat(4), 20, 20),
    "an index without end": (numbers(5).repeat().take(23), 23, 23),
    "an index, shuffled": (numbers(5).shuffle(seed=1).repeat(4), 20, 20),
    "an index in passes, in passes": (numbers(5).repeat(2).map(identity).repeat(2), 20, 10),
    "an iterable": (iterated(5).repeat(4), 20, 20),
    "a channel": (numbers(5).repeat(4).prefetch(2), 20, 20),
    "stages": (numbers(5).map(identity).repeat(4), 20, 5),
    "stages in passes": (numbers(5).map(identity).repeat(2).map(identity).repeat(2), 20, 5),
    "a filter": (numbers(10).map(identity).repeat(4).filter(odd), 20, 5),
}
"""With how many items it has, and over how many of them the shards share the work: what repeats after that has its
shard's items again."""


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", COMPONENTS)
def test_the_pass_of_each_item_is_known(kind: str, shards: int) -> None:
    component, items, together = COMPONENTS[kind]
    ((_, part),) = sl.mix({"c": component}).plan.source.components  # type: ignore[attr-defined]
    plan = replace(part.plan, shard=Shard(num_shards=shards))
    seen = 0
    for shard in range(shards):

        async def work(tasks: Tasks, shard: int = shard) -> Read:
            async with opened(tasks, subject := Component(plan, shard), None) as flow:
                return await read(flow, subject.write, Random(0))

        found = run(work)
        tells = PlanComponent(plan).pass_of(Site(None, shard, shards))  # type: ignore[arg-type]
        assert tells is not None
        of_shard = [at for at in range(together) if at % shards == shard]
        if kind == "a filter":  # odd items alone
            of_shard = [at for at in range(5) if (2 * at + 1) % shards == shard]
        expected = [(number * together + at) // 5 for number in range(items // together) for at in of_shard]
        passes = {at: tells(state) for at, state, _ in reversed(found.states) if at}  # of several states, the first one
        assert [passes[at] for at in range(1, len(found.items) + 1)] == expected
        assert tells(found.states[0][1]) == 0
        seen += len(found.items)
    assert seen == items


def test_a_component_that_is_not_repeated_has_no_pass() -> None:
    for component in (numbers(5), iterated(5).map(identity), numbers(5).shuffle(seed=1).take(3)):
        ((_, part),) = sl.mix({"c": component}).plan.source.components  # type: ignore[attr-defined]
        assert part.pass_of(Site(None)) is None  # type: ignore[arg-type]


def test_weights_are_those_of_the_next_item() -> None:
    """Of two workers, number 1 serves items 1, 3, 5 of a strict merge; the old weights hold for what is read again."""
    old = draws_of({"a": 5, "b": 5}, "ab", 0)
    new = draws_of([(0, {"a": 1, "b": 0}), (6, {"a": 0.25, "b": 3})], "ab", 0)
    weights = []
    for n in range(5):
        state = SeveralState("mix", {"n": n, "taken": {"a": 0, "b": 0}, "ended": []}, {})
        one = ComponentMetrics(state, [(2, old), (math.inf, new)], Site(None, 1, 2), {})  # type: ignore[arg-type]
        weights.append(tuple(detail.value for detail in one.details() if detail.name == "weight"))
    assert weights == [(5, 5), (5, 5), (1, 0), (0.25, 3), (0.25, 3)]
