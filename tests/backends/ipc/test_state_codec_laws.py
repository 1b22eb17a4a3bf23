"""States that have crossed a border, over random pipelines, are those that an inline worker hands out.

`STREAMLINE_EXAMPLES=50 pytest tests/border` searches deeper.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.ipc.state_codec import ColumnDecoder, ColumnEncoder
from streamline.core.flow import Site
from streamline.core.state import State
from streamline.core.tasks import Tasks
from streamline.plan.worker import open_worker
from streamline.testing.checks import check_resume
from streamline.testing.compositions import Composition, compositions
from streamline.testing.steps import DICE, Step, customs, erratic, shuffles, steps
from streamline.testing.subjects import run
from streamline.transforms.repeat import Repeat
from tests.backends.ipc.crossing_kit import Crossed, chooses, tally_of
from tests.laws.profile import examples, short

seeds = st.integers(0, 1000)
lists = st.sampled_from([1, 2, 3, 256])


def said(state: State) -> Any:
    return state.json(), tally_of(state), state.where(), state.latest.json()


CALLS: list[Step] = [
    Step(
        f".map(erratic, concurrency={calls}, ordered=False)",
        partial(lambda p, calls: p.map(erratic, concurrency=calls, ordered=False), calls=calls),
    )
    for calls in (1, 3, 5)
]

TIMED = [
    Step(
        f".batch({size}, collate=None, max_wait_s=1e-9)",
        partial(lambda p, size: p.batch(size, collate=None, max_wait_s=1e-9), size=size),
    )
    for size in (2, 3)
]


@st.composite
def choosing_workers(draw: st.DrawFn) -> Composition:
    """Pipelines of few shards whose workers choose, once or twice, with stages after the merge that read again."""
    length, shards = draw(st.integers(5, 14)), draw(st.integers(1, 2))
    made = Composition(sl.from_items(range(length)).shard(shards), f"items of {length}.shard({shards})", length)
    chooser = st.sampled_from([*CALLS, *CALLS, *TIMED])
    worker = [*draw(st.lists(steps(), max_size=1)), draw(chooser), *draw(st.lists(steps(), max_size=1))]
    worker += [*draw(st.lists(chooser, max_size=1)), *draw(st.lists(shuffles() | customs(), max_size=1))]
    made = made.with_steps(worker)
    assume(chooses(made.pipeline.plan))
    if draw(st.booleans()):
        merged = Composition(
            made.pipeline.merge("best_effort", max_lead=3), f"{made.text}.merge(best_effort)", made.most
        )
    else:
        merged = Composition(made.pipeline.merge(), f"{made.text}.merge()", made.most)
    return merged.with_steps([draw(shuffles() | customs() | chooser), *draw(st.lists(steps(), max_size=2))])


async def compare(tasks: Tasks, composition: Composition, dice: Random) -> None:
    """Dump and load all that a worker says, and compare it then and when the worker has gone on."""
    plan = composition.pipeline.plan
    shard = dice.randrange(plan.shard.num_shards)
    flow = open_worker(plan, Site(tasks, shard, plan.shard.num_shards), None)
    with_log = chooses(plan)
    dumper, columns = ColumnEncoder(with_log), ColumnDecoder(with_log)
    states = [(flow.state, columns.load_state(dumper.dump_state(flow.state)))]
    try:
        while (chunk := await flow.pull(dice.choice((1, 3, 256)))) is not None:
            loaded, after = columns.load(dumper.dump(chunk), len(chunk.items))
            found = [(chunk.states[index], loaded[index]) for index in range(len(chunk.items))]
            assert (after is None) == (chunk.progress is None)
            if chunk.progress is not None and after is not None:
                found.append((chunk.progress, after))
            if dice.random() < 0.5:
                assert [said(there) for _, there in found] == [said(here) for here, _ in found]
            states += found
    finally:
        await flow.aclose()
    assert [said(there) for _, there in states] == [said(here) for here, _ in states]
    if with_log and any(isinstance(stage, Repeat) for stage in plan.worker):
        return  # nothing goes back over passes that chose: refused (`check_choices`)
    for first in range(0, len(states), 1 + len(states) // 12):
        for last in range(first, len(states), 1 + len(states) // 12):
            (mark, its), (now, there) = states[first], states[last]
            assert its.json(there) == mark.json(now)


@examples(120)
@given(compositions(most=60) | choosing_workers(), seeds, lists)
def test_what_has_crossed_says_what_it_said_before(composition: Composition, seed: int, most: int) -> None:
    DICE.seed(seed)
    with short(LIST_ITEMS=most, SEGMENT_ITEMS=3, AHEAD=2, WAITING_ITEMS=2):
        run(partial(compare, composition=composition, dice=Random(seed)))


@pytest.mark.long
@examples(20)
@given(choosing_workers(), seeds, lists, st.sampled_from([0, 1, 3]))
def test_choices_are_known_in_the_consumer_also_when_hosts_die(
    composition: Composition, seed: int, most: int, deaths: int
) -> None:
    DICE.seed(seed)
    with short(SEGMENT_ITEMS=3, AHEAD=2, WAITING_ITEMS=2, LIST_ITEMS=most):
        check_resume(composition.pipeline, generations=2, seed=seed, backend=Crossed(Random(seed), deaths))
