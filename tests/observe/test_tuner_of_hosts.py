"""How many hosts the next pass gets, on passes whose best number is known, in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.core.figures import Figures, HostStats, StageStats
from streamline.core.knobs import Knob
from streamline.observe.tuner import HostTuner, Measurement, PassLooks, TuningStep


@dataclass(frozen=True, kw_only=True)
class SimulatedHosts:
    """Passes over a pipeline that computes in hosts, `each` items a second and core.

    Attributes:
      consumer: items a second that it takes.
      server: items a second that something gives to all hosts together.
      apart: hosts that compute side by side; more wait for each other.
      cpus: cores; `others` of them are used by the consumer.
      sending: the share of what a host computes that no stage counts: it is to send items.
    """

    each: float = 100.0
    consumer: float = math.inf
    server: float = math.inf
    apart: int = 1000
    cpus: int = 8
    others: float = 0.0
    sending: float = 0.0
    written: int = 1
    shards: int = 64
    seconds: float = 10.0
    host_bytes: int = 0
    free_bytes: float = math.inf

    @property
    def most(self) -> int:
        return max(self.written, min(self.shards, self.cpus))

    def rate(self, hosts: int) -> float:
        return min(self.consumer, self.server, self.each * min(hosts, self.shards, self.apart, self.cpus - self.others))

    @property
    def best(self) -> float:
        return max(self.rate(hosts) for hosts in range(self.written, self.most + 1))


@dataclass
class Passes:
    """Passes, one after the other, with a tuner."""

    hosts: SimulatedHosts
    noise: float = 0.0
    dice: Random = field(default_factory=lambda: Random(0))
    steps: list[TuningStep] = field(default_factory=list)
    given: float = 0.0

    def __post_init__(self) -> None:
        self.tuner = HostTuner(Knob(stage="hosts", kind="hosts", written=self.hosts.written), "Processes(1)")

    def run(self, passes: int) -> Passes:
        for _ in range(passes):
            if (step := self.tuner.next_pass(self.seen(), self.hosts.most)) is not None:
                self.steps.append(step)
        return self

    def seen(self) -> PassLooks:
        """Return what is seen of a pass with as many hosts as the tuner says."""
        seen, hosts = PassLooks(), self.hosts
        count = min(self.tuner.value, hosts.shards)
        rate = hosts.rate(count)
        if rate < 0.999 * hosts.consumer:
            rate *= max(0.05, 1 + self.noise * self.dice.gauss(0, 1))
        self.given += rate * hosts.seconds
        works = hosts.apart >= count
        busy_s = rate / hosts.each if works else float(count)  # those that wait for each other are at work
        waits = 1.0 if hosts.consumer == math.inf else max(0.0, 1 - rate / hosts.consumer)
        seen.look(self._look(0.0, count, 0, 0.0, 0.0))
        seen.look(self._look(hosts.seconds, count, round(rate * hosts.seconds), busy_s * hosts.seconds, waits))
        return seen

    def _look(self, elapsed_s: float, count: int, items: int, held_s: float, waits: float) -> Measurement:
        hosts = self.hosts
        host = HostStats(number=0, kind="process", shards=(0,), busy_s=0.1, resident_bytes=hosts.host_bytes)
        each = tuple(replace(host, number=number, items=items // count) for number in range(count))
        stages = [StageStats(name="read", kind="from_items", workers=hosts.shards, items=items, hosts=count)]
        if hosts.server < math.inf:
            stages[0] = replace(stages[0], busy_s=0.95 * elapsed_s * hosts.shards)
        parse = StageStats(name="parse", kind="map", workers=hosts.shards, items=items, hosts=count)
        counted_s = held_s * (1 - hosts.sending)
        stages.append(replace(parse, busy_s=counted_s, held_s=counted_s))
        figures = Figures(
            elapsed_s=elapsed_s, items=items, consumer_wait_s=waits * elapsed_s, stages=tuple(stages), hosts=each,
            cpus=hosts.cpus,
        )  # fmt: skip
        used_s = min(hosts.cpus * elapsed_s, held_s + hosts.others * elapsed_s)
        return Measurement(figures=figures, cpu_s=used_s, hosts_cpu_s=held_s, free_bytes=lambda: hosts.free_bytes)


HOSTS = {
    "cores for more": SimulatedHosts(),
    "a consumer that takes some": SimulatedHosts(consumer=350),
    "a slow consumer": SimulatedHosts(consumer=50),
    "written well": SimulatedHosts(written=8),
    "two cores": SimulatedHosts(cpus=2),
    "two cores, and a consumer that computes": SimulatedHosts(cpus=2, others=0.3),
    "a server that gives so many": SimulatedHosts(server=250),
    "computing that takes turns": SimulatedHosts(apart=1, written=2),
    "a few shards": SimulatedHosts(shards=3),
    "items that take as long to send": SimulatedHosts(sending=0.5, consumer=450),
    "short passes": SimulatedHosts(seconds=0.3),
}


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("name", HOSTS)
def test_some_passes_bring_nine_tenths_of_the_best(name: str, noise: float) -> None:
    hosts = HOSTS[name]
    for seed in range(3 if noise else 1):
        done = Passes(hosts, noise, Random(seed)).run(60 if noise else 25)
        assert hosts.rate(done.tuner.settled["hosts"]) >= 0.9 * hosts.best, (seed, done.steps, done.tuner.resting)
        assert all(hosts.written <= step.after <= hosts.most for step in done.steps)


@pytest.mark.parametrize("name", ["a slow consumer", "written well", "a few shards"])
def test_what_gains_nothing_is_not_tried(name: str) -> None:
    done = Passes(replace(HOSTS[name], shards=min(HOSTS[name].shards, HOSTS[name].written))).run(20)
    assert done.steps == []
    assert done.tuner.resting


def test_on_one_core_there_is_no_step() -> None:
    done = Passes(SimulatedHosts(cpus=1)).run(20)
    assert done.steps == []
    assert done.tuner.resting == "all CPUs (1) are busy"


def test_without_noise_each_pass_is_a_step_until_the_consumer_has_what_it_takes() -> None:
    done = Passes(SimulatedHosts(consumer=450)).run(9)
    assert [(step.before, step.after) for step in done.steps] == [(1, 2), (2, 3), (3, 5)]
    why = "the consumer waits 78% of its time, and map(parse) keeps the hosts busy"
    assert str(done.steps[0]) == f"Processes(1): hosts 1 -> 2: {why}"
    assert done.tuner.resting == "the consumer waits 0% of its time"


def test_hosts_that_are_busy_with_what_no_stage_counts_get_more_too() -> None:
    done = Passes(SimulatedHosts(sending=0.5)).run(2)
    assert done.steps[0].why == "the consumer waits 100% of its time, and the hosts are busy 100% of theirs"


def test_what_brings_nothing_is_undone_and_tried_ever_less() -> None:
    done = Passes(SimulatedHosts(apart=1)).run(100)
    assert [(step.before, step.after) for step in done.steps[:2]] == [(1, 2), (2, 1)]
    assert done.steps[1].why == "undone: 2 brought +0%"
    assert done.tuner.settled["hosts"] == 1
    assert len(done.steps) <= 2 * 6


@pytest.mark.parametrize(
    ("free_bytes", "found"), [(10e9, 6), (4e9, 4), (2.1e9, 2), (1.9e9, 1)], ids=lambda value: f"{value:g}"
)
def test_hosts_take_half_of_the_memory_that_is_free_at_the_most(free_bytes: float, found: int) -> None:
    hosts = SimulatedHosts(host_bytes=10**9, free_bytes=free_bytes, cpus=6)
    run = Passes(hosts)
    for _ in range(12):
        before = run.tuner.value
        run.run(1)
        assert (run.tuner.value - before) * 10**9 <= run.hosts.free_bytes / 2
        run.hosts = replace(hosts, free_bytes=free_bytes - (run.tuner.value - 1) * 10**9)
    assert run.tuner.value == found, run.tuner.resting


def test_hosts_that_are_not_needed_go_down_as_far_as_written_and_stay() -> None:
    run = Passes(SimulatedHosts(written=2)).run(10)
    assert run.tuner.settled["hosts"] == 8
    run.hosts = replace(run.hosts, consumer=120)
    run.run(10)
    assert run.tuner.settled["hosts"] == 3, run.steps  # 2 would be at work 60 % of the time
    steps = list(run.steps)
    assert run.run(20).steps == steps
    run.hosts = replace(run.hosts, consumer=10)
    run.run(10)
    assert run.tuner.settled["hosts"] == 2


@pytest.mark.parametrize(("shards", "back"), [(64, 8), (6, 6), (5, None), (3, None)])
def test_a_step_down_that_costs_items_is_undone_as_far_as_there_is_room(shards: int, back: int | None) -> None:
    run = Passes(SimulatedHosts(written=2)).run(10)
    run.hosts = replace(run.hosts, server=250)  # the hosts have time now
    run.run(1)
    assert run.steps[-1].after == 5
    run.hosts = replace(run.hosts, server=math.inf, each=20, shards=shards)
    steps = len(run.steps)
    run.run(1)
    assert [(step.before, step.after) for step in run.steps[steps:]] == ([] if back is None else [(5, back)]), run.steps


def test_short_passes_count_together() -> None:
    run = Passes(SimulatedHosts(seconds=0.3))
    taken = [len(run.run(1).steps) for _ in range(8)]
    assert taken == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("seconds", [0.05, 0.19])
def test_passes_that_say_too_little_change_nothing(seconds: float) -> None:
    assert Passes(SimulatedHosts(seconds=seconds)).run(50).steps == []
    assert Passes(SimulatedHosts(each=0.5)).run(50).steps == []  # 5 items a pass


def test_after_costs_have_changed_what_brought_nothing_is_tried_again() -> None:
    run = Passes(SimulatedHosts(apart=1)).run(30)
    assert run.tuner.settled["hosts"] == 1
    run.hosts = replace(run.hosts, apart=1000, each=60)
    run.run(8)
    assert run.tuner.settled["hosts"] == 8, run.steps


@pytest.mark.long
@given(
    st.lists(
        st.builds(
            SimulatedHosts,
            each=st.floats(0.1, 1e4),
            consumer=st.floats(1.0, 1e5),
            server=st.sampled_from([math.inf, 10.0, 1000.0]),
            apart=st.sampled_from([1, 3, 1000]),
            cpus=st.integers(1, 9),
            written=st.just(2),
            shards=st.integers(1, 9),
            seconds=st.floats(0.01, 100.0),
            host_bytes=st.sampled_from([0, 10**9]),
            free_bytes=st.floats(0, 1e10),
        ),
        min_size=1,
        max_size=12,
    ),
    st.floats(0, 0.5),
)
def test_whatever_passes_are_like_hosts_stay_in_bounds(kinds: list[SimulatedHosts], noise: float) -> None:
    run = Passes(kinds[0], noise)
    for hosts in kinds:
        run.hosts = hosts
        before, steps = run.tuner.value, len(run.steps)
        run.run(1)
        step = run.steps[steps:]
        assert (before, run.tuner.value) == ((step[0].before, step[0].after) if step else (before, before))
        assert run.tuner.value <= max(before, hosts.most, *(one.before for one in step))
        assert run.tuner.value >= hosts.written
        assert run.tuner.settled["hosts"] >= hosts.written


# What is seen of a pass -----------------------------------------------------------------------------------------------
def look(elapsed_s: float, *items: int) -> Measurement:
    hosts = tuple(
        HostStats(number=number, kind="process", shards=(number,), items=one) for number, one in enumerate(items)
    )
    return Measurement(figures=Figures(elapsed_s=elapsed_s, items=sum(items), consumer_wait_s=0, hosts=hosts))


def stretch(seen: PassLooks) -> tuple[float, float] | None:
    return None if seen.stretch is None else tuple(one.figures.elapsed_s for one in seen.stretch)  # type: ignore[return-value]


def test_a_pass_is_seen_from_when_all_of_its_hosts_run() -> None:
    seen = PassLooks()
    for elapsed_s, items in ((1, (5, 0)), (2, (9, 0)), (3, (12, 1)), (4, (15, 4)), (5, (18, 7))):
        seen.look(look(elapsed_s, *items))
    assert stretch(seen) == (3, 5)


def test_the_longest_stretch_between_pauses_counts() -> None:
    seen = PassLooks()
    for elapsed_s in (1, 2, 3, None, 9, 10, None, 12, 13, 14, 15, None, 20):
        seen.pause() if elapsed_s is None else seen.look(look(elapsed_s, 1))
    assert stretch(seen) == (12, 15)


def test_what_was_seen_before_a_knob_was_turned_does_not_count() -> None:
    seen = PassLooks()
    for elapsed_s in (1, 2, 9, None, 10, 11):
        seen.forget() if elapsed_s is None else seen.look(look(elapsed_s, 1))
    assert stretch(seen) == (10, 11)


def test_a_pass_of_which_little_was_seen_says_nothing() -> None:
    tuner = HostTuner(Knob(stage="hosts", kind="hosts", written=3), "Threads(3)")
    assert tuner.next_pass(PassLooks(), 8) is None
    assert (tuner.value, tuner.settled["hosts"]) == (3, 3)
