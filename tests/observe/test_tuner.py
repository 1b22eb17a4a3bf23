"""The tuner's decisions, on pipelines whose best knobs are known, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.core.figures import Figures
from streamline.core.knobs import Knob
from streamline.observe.tuner import Measurement, Tuner
from tests.laws.profile import examples
from tests.observe.simulated_pipelines import SimulatedPipeline, SimulatedStage, Simulation

PIPELINES = {
    "an API": SimulatedPipeline(stages=(SimulatedStage(name="fetch", call_s=0.05),), consumer_s=1 / 1000),
    "an API, from one call": SimulatedPipeline(
        stages=(SimulatedStage(name="fetch", call_s=0.05, written=1),), consumer_s=1 / 600
    ),
    "a slow consumer": SimulatedPipeline(
        stages=(SimulatedStage(name="fetch", call_s=0.05, written=16),), consumer_s=1 / 100
    ),
    "written well": SimulatedPipeline(
        stages=(SimulatedStage(name="fetch", call_s=0.02, written=64),), consumer_s=1 / 3000
    ),
    "a busy server": SimulatedPipeline(stages=(SimulatedStage(name="fetch", call_s=0.03, written=4, most_per_s=1000),)),
    "a crowded server": SimulatedPipeline(
        stages=(SimulatedStage(name="fetch", call_s=0.02, written=24, crowds_at=16),)
    ),
    "pure Python": SimulatedPipeline(
        stages=(SimulatedStage(name="parse", kind="threads", call_s=0.01, cpu_s=0.01, gil=True, written=2, most=64),)
    ),
    "no GIL": SimulatedPipeline(
        stages=(SimulatedStage(name="decode", kind="threads", call_s=0.01, cpu_s=0.01, written=1, most=64),)
    ),
    "two stages": SimulatedPipeline(
        stages=(
            SimulatedStage(name="fetch", call_s=0.03, written=16),
            SimulatedStage(name="decode", kind="threads", call_s=0.004, cpu_s=0.004, written=2, most=64),
        ),
        consumer_s=1 / 1500,
    ),
    "eight shards": SimulatedPipeline(
        stages=(SimulatedStage(name="fetch", call_s=0.05, written=2),), consumer_s=1 / 2000, workers=8
    ),
    "little memory": SimulatedPipeline(
        stages=(SimulatedStage(name="fetch", call_s=0.05, written=4, item_bytes=10_000_000),), memory=400e6
    ),
    "bursts": SimulatedPipeline(
        stages=(
            SimulatedStage(name="read", call_s=0.0001, written=None),
            SimulatedStage(name="ready", kind="prefetch", written=8, burst=20),
        ),
        consumer_s=1 / 5000,
    ),
    "processes that tell of it now and then": SimulatedPipeline(
        stages=(SimulatedStage(name="fetch", call_s=0.05, told_every=3),), consumer_s=1 / 2000, workers=2
    ),
    "a limit": SimulatedPipeline(stages=(SimulatedStage(name="fetch", call_s=0.05, written=8, limited=20),)),
}


@pytest.mark.one_in(7, 5)
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("name", PIPELINES)
def test_ten_seconds_bring_nine_tenths_of_the_best(name: str, noise: float) -> None:
    pipeline = PIPELINES[name]
    for seed in range(3 if noise else 1):
        done = Simulation(pipeline, noise, Random(seed)).run(10)
        rate = pipeline.rate(done.tuner.settled)
        assert rate >= 0.9 * pipeline.best, (seed, done.steps, done.tuner.resting)
        assert rate >= 0.97 * pipeline.rate(pipeline.written), (seed, done.steps)


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("buffers", [(), (SimulatedStage(name="ready", kind="prefetch", burst=1),)])
@pytest.mark.parametrize(("noise", "seconds", "share"), [(0.0, 10, 0.9), (0.2, 20, 0.8)])
def test_calls_that_cost_the_loop_time_too_become_more_though_no_stage_limits_alone(
    noise: float, seconds: float, share: float, buffers: tuple[SimulatedStage, ...]
) -> None:
    fetch = SimulatedStage(name="fetch", call_s=0.03, loop_s=0.0005, written=16)
    pipeline = SimulatedPipeline(stages=(fetch, *buffers))
    for seed in range(3 if noise else 1):
        done = Simulation(pipeline, noise, Random(seed)).run(seconds)
        assert pipeline.rate(done.tuner.settled) >= share * pipeline.best, (seed, done.steps, done.tuner.resting)
        assert any("no stage limits alone; map(fetch) may help" in step.why for step in done.steps)
        down = [step for step in done.steps if step.name == "fetch" and step.why == "it isn't needed"]
        assert all(step.before > 122 for step in down), (seed, down)


def test_calls_of_a_second_are_tuned_in_a_minute() -> None:
    pipeline = SimulatedPipeline(stages=(SimulatedStage(name="fetch", call_s=1.0),), consumer_s=1 / 100)
    done = Simulation(pipeline).run(60)
    assert pipeline.rate(done.tuner.settled) >= 90, (done.steps, done.tuner.resting)


def test_what_comes_from_processes_is_counted_where_it_arrives() -> None:
    pipeline = PIPELINES["processes that tell of it now and then"]
    for seed in range(3):
        done = Simulation(pipeline, 0.2, Random(seed)).run(5.5)
        assert pipeline.rate(done.tuner.settled) >= 0.9 * pipeline.best, (seed, done.steps)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("name", PIPELINES)
def test_probing_costs_little_of_a_minute(name: str) -> None:
    pipeline = PIPELINES[name]
    done = Simulation(pipeline, 0.2, Random(1)).run(60)
    assert done.given >= 0.97 * 60 * pipeline.rate(pipeline.written), done.steps


@pytest.mark.one_in(5, 4)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SimulatedStage(name="fetch", call_s=0.02), SimulatedStage(name="fetch", call_s=0.08)),
        (SimulatedStage(name="fetch", call_s=0.08), SimulatedStage(name="fetch", call_s=0.02)),
        (SimulatedStage(name="fetch", call_s=0.05), SimulatedStage(name="fetch", call_s=0.05, crowds_at=16)),
    ],
    ids=["slower", "faster", "crowded"],
)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_after_costs_have_changed_the_best_is_found_again(
    before: SimulatedStage, after: SimulatedStage, noise: float
) -> None:
    pipeline = SimulatedPipeline(stages=(before,), consumer_s=1 / 600)
    for seed in range(3 if noise else 1):
        run = Simulation(pipeline, noise, Random(seed)).run(20)
        assert pipeline.rate(run.tuner.settled) >= 0.9 * pipeline.best, (seed, run.steps)
        changed = run.pipeline = replace(pipeline, stages=(after,))
        run.run(20)
        assert changed.rate(run.tuner.settled) >= 0.9 * changed.best, (seed, run.steps, run.tuner.resting)


def test_a_knob_that_is_not_needed_any_more_goes_down_as_far_as_written() -> None:
    pipeline = PIPELINES["an API"]
    run = Simulation(pipeline).run(10)
    assert run.tuner.settled["fetch"] > 40
    run.pipeline = replace(pipeline, consumer_s=1 / 50)
    run.run(60)
    assert run.tuner.settled == {"fetch": 8}, run.steps
    assert run.pipeline.rate(run.tuner.settled) == 50


def test_a_consumer_that_rests_during_a_step_does_not_undo_it() -> None:
    pipeline = PIPELINES["an API"]
    run = Simulation(pipeline)
    for step in run.ticks(5):
        if step is not None:
            break
    run.pipeline = replace(pipeline, consumer_s=10.0)  # it saves a model, say
    before = dict(run.tuner.values)
    run.run(2)
    assert run.tuner.values == before
    run.pipeline = pipeline
    run.run(10)
    assert pipeline.rate(run.tuner.settled) >= 0.9 * pipeline.best, run.steps


def test_threads_that_keep_all_cores_busy_are_not_probed_for_fewer() -> None:
    stage = SimulatedStage(name="decode", kind="threads", call_s=0.01, cpu_s=0.01, written=8, most=64)
    run = Simulation(SimulatedPipeline(stages=(stage,))).run(30)
    assert (run.steps, run.tuner.resting) == ([], "map(decode) limits: all CPUs (8) are busy")


def test_what_costs_nothing_to_find_out_is_said() -> None:
    for name, said in {
        "a slow consumer": "nothing is to be gained",
        "little memory": "take the memory that there is for them",
        "no GIL": "all CPUs (8) are busy",
    }.items():
        assert said in Simulation(PIPELINES[name]).run(20).tuner.resting
    limited = SimulatedPipeline(stages=(SimulatedStage(name="fetch", call_s=0.05, written=32, limited=20),))
    assert "the limit= of map(fetch) bounds it" in Simulation(limited).run(2).tuner.resting
    assert "has no knob" in Simulation(_with(PIPELINES["an API"], written=None)).run(2).tuner.resting


def _with(pipeline: SimulatedPipeline, written: int | None) -> SimulatedPipeline:
    return replace(pipeline, stages=tuple(replace(one, written=written) for one in pipeline.stages))


def test_free_memory_as_it_stands_bounds_a_step_too() -> None:
    pipeline = replace(PIPELINES["little memory"], memory=float("inf"))
    run = Simulation(pipeline)
    run.free_bytes = 15e6  # of which one item would take more than half
    assert run.run(10).tuner.values["fetch"] <= 4
    assert "take the memory" in run.tuner.resting


@pytest.mark.parametrize("total", [2e9, 1e12])
def test_memory_is_asked_for_anew_at_each_step_up_and_at_no_other_look(total: float) -> None:
    pipeline = replace(PIPELINES["little memory"], memory=float("inf"))
    run = Simulation(pipeline)
    before, asked = pipeline.written, 0
    run.free_bytes = total
    for step in run.ticks(10):
        values = dict(run.tuner.values)
        taken = pipeline.taken_bytes(values) - pipeline.taken_bytes(before)
        assert taken <= run.free_bytes / 2
        if total > 1e10:  # there is room for all
            assert run.asked - asked == (step is not None and taken > 0)
        before, asked, run.free_bytes = values, run.asked, total - pipeline.taken_bytes(values)
    assert len(run.steps) > 4


def test_values_to_begin_with_are_kept() -> None:
    knob = Knob(stage="fetch", kind="concurrency", written=8)
    tuner = Tuner([knob], {"fetch": 40})
    assert tuner.values == tuner.settled == {"fetch": 40}
    assert tuner.look(Measurement(figures=Figures(elapsed_s=0.1, items=0, consumer_wait_s=0.1))) is None


STAGE = st.builds(
    SimulatedStage,
    name=st.just(""),
    call_s=st.floats(0.0005, 0.2),
    kind=st.sampled_from(["concurrency", "threads"]),
    gil=st.booleans(),
    crowds_at=st.sampled_from([4.0, 16.0, 64.0, float("inf")]),
    most_per_s=st.sampled_from([100.0, 1000.0, float("inf")]),
    limited=st.sampled_from([4.0, 32.0, float("inf")]),
    written=st.one_of(st.none(), st.integers(1, 48)),
    most=st.integers(48, 96),
    item_bytes=st.integers(1, 10**7),
)


@st.composite
def any_pipeline(draw: st.DrawFn) -> SimulatedPipeline:
    drawn = draw(st.lists(STAGE, min_size=1, max_size=3))
    shares = [draw(st.floats(0, 1)) for _ in drawn]
    stages = [
        replace(one, name=f"s{at}", cpu_s=one.call_s * (1 if one.gil else share))
        for at, (one, share) in enumerate(zip(drawn, shares, strict=True))
    ]
    return SimulatedPipeline(
        stages=tuple(stages),
        consumer_s=draw(st.sampled_from([0.0, 0.0005, 0.01])),
        cpus=draw(st.integers(1, 16)),
        workers=draw(st.integers(1, 4)),
        memory=draw(st.sampled_from([0.0, 1e6, 1e8, float("inf")])),
    )


@examples(120)
@given(any_pipeline(), st.sampled_from([0.0, 0.2]), st.integers(0, 99))
def test_budgets_hold_and_one_knob_turns_at_a_time(pipeline: SimulatedPipeline, noise: float, seed: int) -> None:
    run = Simulation(pipeline, noise, Random(seed))
    before = dict(run.tuner.values)
    for step in run.ticks(10):
        now = run.tuner.values
        turned = {name for name in now if now[name] != before[name]}
        assert turned == (set() if step is None else {step.name})
        if step is not None:
            assert (step.before, step.after) == (before[step.name], now[step.name])
            assert step.after <= -(-step.before * 3 // 2)
        assert all(1 <= now[knob.stage] <= knob.most for knob in pipeline.knobs)
        assert pipeline.taken_bytes(now) <= pipeline.memory
        before = dict(now)


@pytest.mark.long
@examples(100)
@given(any_pipeline())
def test_it_never_ends_below_what_was_written(pipeline: SimulatedPipeline) -> None:
    run = Simulation(pipeline).run(20)
    assert pipeline.rate(run.tuner.settled) >= 0.97 * pipeline.rate(pipeline.written), run.steps


@given(st.lists(st.builds(Measurement, figures=st.builds(
    Figures, elapsed_s=st.floats(0, 100), items=st.integers(0, 10**6), consumer_wait_s=st.floats(0, 100),
))))  # fmt: skip
def test_whatever_it_is_told_it_raises_nothing(looks: list[Measurement]) -> None:
    tuner = Tuner([Knob(stage="ready", kind="prefetch", written=4, most=64)])
    for look in looks:
        tuner.look(look)
        assert 1 <= tuner.values["ready"] <= 64
