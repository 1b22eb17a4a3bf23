"""Which knob is turned next, and why: a hill climb. Figures in, a step out; no clock: figures say how long they took.

While the consumer waits more than a tenth of its time, the knob of the stage that limits, as the verdict says, is
turned up by half; where none limits alone, that of what is waited for most, or of a buffer. The step is kept if the
rate rises by more than 5 %, which is judged as soon as the noise between samples allows; else it is taken back, and
barred for a while, or until costs have changed. A knob that isn't needed goes down again, to what the plan says.

Rates are those of the stage that is turned, as in Plumber: its items stand in a fixed ratio to the consumer's, and
there are more of them. tf.data's tuners model every stage and turn by one. Here a step is measured, since calls of
APIs, threads under a GIL and disks follow no model; a step of one doesn't stand out of the noise, and takes long from 1
to 64.

How many hosts there are is decided likewise, but between the passes of a loader: a whole pass is one sample.

Source: Plumber (Kuchnik et al., MLSys 2022), tf.data's STAGE_BASED.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar, NamedTuple

from streamline.core.figures import Figures, HostStats, StageStats
from streamline.core.knobs import Knob
from streamline.errors import printable
from streamline.observe.verdict import LEAST_ITEMS, LEAST_S, LOADED, WAITS, Loads, limit_of

STEP = 1.5

GAIN = 0.05
"""A step up that gains less is taken back."""

CALM_WAITS = WAITS / 2
"""A consumer that waits for a smaller share of its time leaves knobs that aren't needed."""

AWAITED = 0.25
"""A stage with a larger load is worth a try where none limits and the consumer waits."""

SURE_ERRORS = 2.0
"""Standard errors that a gain must be away from what is wanted to be judged before there are all samples."""

CHANGED = 0.25
"""The share by which a rate changes when costs have changed; noise of 20 % over 20 samples doesn't reach it."""

BUSY_CPUS = 0.9
"""The share of the cores from which on more calls at once only wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is known at one moment.

    Attributes:
      figures: since the stream was opened.
      cpu_s: of CPU that its processes have used by then.
      hosts_cpu_s: of that, its host processes.
      free_bytes: says how much memory may still be used. It is asked only where a step would take some, and then anew:
        that takes longer than all else of a look, and what the step before has taken counts.
    """

    figures: Figures
    cpu_s: float = 0.0
    hosts_cpu_s: float = 0.0
    free_bytes: Callable[[], float] = lambda: math.inf


@dataclass(frozen=True, kw_only=True)
class TuningStep:
    """One turn of one knob.

    Attributes:
      at_s: since the stream was opened.
      stage: as printed; `name` is its name.
      kind: what was turned: "concurrency", "threads", "prefetch", "reads", "hosts".
      why: for a person.
      time: when it was taken, in seconds since 1970; 0: it hasn't been.
    """

    at_s: float
    stage: str
    name: str
    kind: str
    before: int
    after: int
    why: str
    time: float = 0.0

    def __str__(self) -> str:
        return printable(f"{self.stage}: {self.kind} {self.before} -> {self.after}: {self.why}")


class _Trial(NamedTuple):
    """A step that is being judged, the rates before it, and whether it eases: it shall lose nothing, not gain."""

    step: TuningStep
    rates: Sequence[float]
    eases: bool

    @property
    def up(self) -> bool:
        return self.step.after > self.step.before


class _Bar(NamedTuple):
    """A step isn't tried for a spell; sooner, if the rate there has changed."""

    until: float
    spell: float
    rates: Sequence[float]


class HillClimb:
    """The values of knobs, of which one at a time is turned, and turned back where that has gained nothing.

    Args:
      values: to begin with; those that aren't named begin as written.

    Attributes:
      resting: why nothing is turned at the moment, for a person; "": a step is being judged.
    """

    NOISE: ClassVar[tuple[float, int]]
    """What is taken for the noise of a sample before there are any, and as how many it counts."""

    MOST_SAMPLES: ClassVar[int]
    """Of a rate: a step is judged then at the latest."""

    BARRED: ClassVar[float]
    CLEAR_BARRED: ClassVar[float]
    MOST_BARRED: ClassVar[float]
    """For how long a step that was taken back isn't tried again: the first time, or where it was clear that it gains
    nothing, doubled each time; and at the most."""

    def __init__(self, knobs: Sequence[Knob], values: Mapping[str, int]) -> None:
        self.values = {knob.stage: knob.written for knob in knobs} | dict(values)
        self.resting = "it has just begun"
        self._knobs = {knob.stage: knob for knob in knobs}
        self._now = 0.0
        self._trial: _Trial | None = None
        self._bars: dict[tuple[str, int, bool], _Bar] = {}  # by stage, value, and whether up from there

    @property
    def settled(self) -> dict[str, int]:
        """The values, without a step that is still being judged."""
        return self.values if self._trial is None else self.values | {self._trial.step.name: self._trial.step.before}

    def _begin(self, knob: Knob, after: int, why: str, rates: Sequence[float], *, eases: bool = False) -> TuningStep:
        stage, before = knob.stage, self.values[knob.stage]
        step = TuningStep(at_s=0.0, stage=stage, name=stage, kind=knob.kind, before=before, after=after, why=why)
        self._trial = _Trial(step, rates, eases)
        return self._take(step)

    def _take(self, step: TuningStep) -> TuningStep:
        self.values[step.name] = step.after
        self.resting = ""
        return step

    def _keep_or_undo(self, trial: _Trial, rates: Sequence[float], *, enough: bool, excused: bool) -> TuningStep | None:
        """Keep a step, or return the one that takes it back, once it can be told what it has brought.

        Args:
          enough: the consumer has what it can take.
          excused: the step is kept whatever it has gained.
        """
        step, wanted = trial.step, -GAIN if trial.eases else GAIN
        gain, error = self._change(trial.rates, rates)
        sure = abs(gain - wanted) >= SURE_ERRORS * error
        if not (enough or sure or len(rates) >= self.MOST_SAMPLES):
            return None
        self._trial = None
        if enough or excused or gain >= wanted:
            self._bar((step.name, step.after, not trial.up), rates, 2 * self.BARRED)  # that is where it came from
            self.resting = f"{step.after} have brought {gain:+.0%}"
            return None
        self._bar((step.name, step.before, trial.up), trial.rates, self.CLEAR_BARRED if sure else self.BARRED)
        why = f"undone: {step.after} brought {gain:+.0%}"
        return self._take(replace(step, before=step.after, after=step.before, why=why))

    def _bar(self, turn: tuple[str, int, bool], rates: Sequence[float], least: float) -> None:
        spell = min(self.MOST_BARRED, max(least, 2 * self._bars[turn].spell if turn in self._bars else 0.0))
        self._bars[turn] = _Bar(self._now + spell, spell, rates)

    def _is_barred(self, knob: Knob, rates: Sequence[float], *, up: bool) -> bool:
        turn = knob.stage, self.values[knob.stage], up
        bar = self._bars.get(turn)
        if bar is None:
            return not any(rates)  # nothing has come, with which it could be compared
        gain, error = self._change(bar.rates, rates)
        if abs(gain) >= max(CHANGED, SURE_ERRORS * error):  # costs have changed
            del self._bars[turn]
            return False
        return self._now < bar.until

    def _change(self, before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
        """Return by which share a rate has risen, and the standard error of that."""
        (noise, count), means = self.NOISE, (fmean(before), fmean(after))
        squares = [(rate / (means[0] or math.inf) - 1) ** 2 for rate in before]
        squares += [(rate / (means[1] or math.inf) - 1) ** 2 for rate in after]
        variance = (noise**2 * count + sum(squares)) / (count + len(squares) - 2)
        return means[1] / (means[0] or math.inf) - 1, math.sqrt(variance * (1 / len(before) + 1 / len(after)))


class Tuner(HillClimb):
    """Decides on the knobs of stages; `memory_bytes`: for items in flight, beyond what they take as written."""

    NOISE = 0.2, 6
    ENOUGH_SAMPLES, LEAST_SAMPLES, MOST_SAMPLES = 4, 3, 20  # before a step, after it; 20 tell 10 % from 20 % of noise
    BARRED, CLEAR_BARRED, MOST_BARRED = 2.0, 20.0, 60.0  # seconds
    LEAST_SAMPLE_S, LONGEST_SAMPLE_S = 0.001, 5.0

    def __init__(
        self, knobs: Sequence[Knob], values: Mapping[str, int] | None = None, *, memory_bytes: float = math.inf
    ) -> None:
        super().__init__(knobs, values or {})
        self._memory_bytes = memory_bytes
        self._looks = deque[Measurement](maxlen=self.MOST_SAMPLES + 1)  # since the last turn has settled
        self._next_s = 0.0  # earlier looks say nothing

    def look(self, look: Measurement) -> TuningStep | None:
        """Return the step to take now: `values` have it already. None: there is none. Called several times a second."""
        if look.figures.elapsed_s < self._next_s:
            return None
        self._now = look.figures.elapsed_s
        self._looks.append(look)
        window = look.figures - self._looks[0].figures
        self._next_s = self._now + self._call_s(window)
        if len(self._looks) <= (self.ENOUGH_SAMPLES if self._trial is None else self.LEAST_SAMPLES):
            return None
        step = self._move(Loads(window)) if self._trial is None else self._judge(self._trial, Loads(window))
        if step is None:
            return None
        self._looks.clear()
        self._next_s = self._now + self._call_s(window)  # the calls that are at work end first
        stage = next((str(one) for one in window.stages if one.name == step.name), step.name)
        return replace(step, at_s=self._now, stage=stage)

    def forget(self) -> None:
        """Compare nothing with what comes next: in between, nothing was to run."""
        self._looks.clear()

    # Moves ------------------------------------------------------------------------------------------------------------

    def _move(self, loads: Loads) -> TuningStep | None:
        """Turn down what isn't needed, else up what limits, or what may; note why not."""
        if (step := self._turn_down(loads)) is not None:
            return step
        if loads.waits < WAITS:
            self.resting = f"the consumer waits {loads.waits:.0%} of its time: nothing is to be gained"
            return None
        found = limit_of(loads.figures)
        if found is None:
            return self._try_what_may_help(loads)
        rule, (stage, what, *_) = found
        if stage is None or stage.name not in self._knobs:
            self.resting = f"{what}, and has no knob"
            return None
        if rule == "limit":
            self.resting = f"the limit= of {stage} bounds it"
            return None
        knob = self._knobs[stage.name]
        if (after := self._find_more(knob, what)) is None:
            return self._try_fewer(knob, loads, stage)
        return self._begin(knob, after, f"the consumer waits {loads.waits:.0%}, and {stage} limits", self._rates(knob))

    def _turn_down(self, loads: Loads) -> TuningStep | None:
        """Turn down what is above the plan, while the consumer has had what it takes for as long as looks are kept."""
        if len(self._looks) <= self.MOST_SAMPLES or loads.waits >= CALM_WAITS:
            return None
        for stage, knob in self._knobs.items():
            after = max(knob.written, math.floor(self.values[stage] / STEP))
            if after < self.values[stage] and not self._is_barred(knob, rates := self._rates(knob), up=False):
                return self._begin(knob, after, "it isn't needed", rates, eases=True)
        return None

    def _try_fewer(self, knob: Knob, loads: Loads, stage: StageStats) -> TuningStep | None:
        """Turn down what limits: calls may crowd a server, and threads take turns with the GIL."""
        value, rates = self.values[knob.stage], self._rates(knob)
        each_has_a_core = self._busy(knob) and value * stage.workers <= loads.figures.cpus
        if value < STEP or each_has_a_core or self._is_barred(knob, rates, up=False):
            return None
        why = f"{stage} limits, and more gain nothing; are fewer faster?"
        return self._begin(knob, math.floor(value / STEP), why, rates)

    def _try_what_may_help(self, loads: Loads) -> TuningStep | None:
        """Turn up what is waited for most, which may cost the loop about as much time; else a buffer: stages limit by
        turns."""
        said = "no stage limits alone"
        awaited = [one for one in loads.stages if one.name in self._knobs and loads.awaited(one) >= AWAITED]
        tried = [(self._knobs[one.name], str(one)) for one in sorted(awaited, key=loads.awaited)[-1:]]
        tried += [(knob, knob.stage) for knob in self._knobs.values() if knob.kind == "prefetch"][:1]
        self.resting = said
        for knob, name in tried:
            if (after := self._find_more(knob, said)) is not None:
                why = f"the consumer waits {loads.waits:.0%}, and {said}; {name} may help"
                return self._begin(knob, after, why, self._rates(knob))
        return None

    def _find_more(self, knob: Knob, said: str) -> int | None:
        """Return a higher value, as far as there are CPUs and memory; None: there is none, and `resting` says why."""
        value, last, rates = self.values[knob.stage], self._looks[-1], self._rates(knob)
        after = min(knob.most, math.ceil(value * STEP))
        why = ""
        if after <= value:
            why = f"{value} is the most"
        elif self._busy(knob):
            why = f"all CPUs ({last.figures.cpus}) are busy"
        elif self._is_barred(knob, rates, up=True):
            why = f"more of {knob.stage} than {value} gain nothing"
        elif each := self._bytes_each(knob, last.figures):
            left = min(last.free_bytes() / 2, self._memory_bytes - self._taken_bytes(last.figures))
            after = min(after, value + math.floor(left / each)) if left < math.inf else after
            why = "" if after > value else f"{value} take the memory that there is for them"
        if why:
            self.resting = f"{said}: {why}"
            return None
        return after

    def _judge(self, trial: _Trial, loads: Loads) -> TuningStep | None:
        rates = self._rates(self._knobs[trial.step.name])
        gained = fmean(rates) > fmean(trial.rates)
        calm = loads.waits < CALM_WAITS
        if calm and not gained and not trial.eases:  # the consumer does something else
            self._looks.clear()
            return None
        enough = loads.waits < WAITS if trial.eases else trial.up and calm
        step = self._keep_or_undo(trial, rates, enough=enough, excused=trial.up and self._is_relieved(trial, loads))
        if self.resting:  # it is kept
            self.resting = f"{trial.step.name}: {trial.step.kind}: {self.resting}"
        return step

    def _is_relieved(self, trial: _Trial, loads: Loads) -> bool:
        """Whether another stage limits now: two were nearly as loaded, so that both have to be turned up to gain."""
        found = limit_of(loads.figures)
        stage = None if found is None or found[0] == "limit" else found[1].stage
        return stage is not None and stage.name in self._knobs and stage.name != trial.step.name

    # What figures say -------------------------------------------------------------------------------------------------

    def _rates(self, knob: Knob) -> list[float]:
        """Return samples of its stage's items per second, of the consumer's for a buffer."""
        looks = [look.figures for look in self._looks]
        items = [_items(figures, knob.stage) for figures in looks]
        return [
            (items[at] - items[at - 1]) / (looks[at].elapsed_s - looks[at - 1].elapsed_s) for at in range(1, len(looks))
        ]

    def _call_s(self, window: Figures) -> float:
        """Return how far apart looks are to be: as long as a call, or the calls that end together would be noise."""
        judged = self._knobs if self._trial is None else [self._trial.step.name]
        calls = [one.busy_s / max(one.slots, one.items) for one in window.stages if one.name in judged]
        return min(self.LONGEST_SAMPLE_S, max(calls, default=0.0)) or self.LEAST_SAMPLE_S

    def _busy(self, knob: Knob) -> bool:
        """Whether all CPUs are at work, so that more calls at once would only wait for each other."""
        first, last = self._looks[0], self._looks[-1]
        passed = last.figures.elapsed_s - first.figures.elapsed_s
        return knob.kind != "prefetch" and last.cpu_s - first.cpu_s >= BUSY_CPUS * last.figures.cpus * passed

    def _taken_bytes(self, figures: Figures) -> float:
        """Return what items in flight take beyond what they take as written."""
        more = {knob: self.values[knob.stage] - knob.written for knob in self._knobs.values()}
        return sum(max(0, count) * self._bytes_each(knob, figures) for knob, count in more.items())

    def _bytes_each(self, knob: Knob, figures: Figures) -> float:
        """Return what one more takes: items that go in, or come out, whichever are larger."""
        names = [one.name for one in figures.stages]
        at = names.index(knob.stage) if knob.stage in names else len(names) - 1
        near = figures.stages[max(0, at - 1) : at + 1]
        item_bytes = max((one.bytes / one.items for one in near if one.items), default=0.0)
        return item_bytes * knob.items_each * max((one.workers for one in near), default=1)


def _items(figures: Figures, stage: str) -> int:
    """Return how many items a stage has given, and for a buffer, how many the consumer got.

    Of one in processes, how many came from there: what is counted there is told now and then only.
    """
    found = [one for one in figures.stages if one.name == stage]
    if any(one.hosts for one in found) and any(host.kind == "process" for host in figures.hosts):
        return sum(host.items for host in figures.hosts)
    return sum(one.items for one in found) if found else figures.items


# Hosts, between passes ------------------------------------------------------------------------------------------------

PASS_S = 1.0
"""Of passes with one number of hosts, shorter ones together, before it is changed, or a step is judged."""


class PassLooks:
    """What is seen of one pass: its longest stretch without a pause, with all hosts running, and no knob turned."""

    def __init__(self) -> None:
        self.stretch: tuple[Measurement, Measurement] | None = None  # first and last look; None: there were no two
        self._first: Measurement | None = None

    def look(self, look: Measurement) -> None:
        """Take note of the figures, several times a second."""
        if self._first is None:
            self._first = look if all(map(_runs, look.figures.hosts)) else None
        elif self.stretch is None or _seconds(self._first, look) >= _seconds(*self.stretch):
            self.stretch = self._first, look

    def pause(self) -> None:
        """Nothing is to run from here to the next look."""
        self._first = None

    def forget(self) -> None:
        """What was seen before says nothing of how it runs now: a knob was turned."""
        self._first = self.stretch = None


def _runs(host: HostStats) -> bool:
    """Whether a host is past its start, as far as it has told, or has nothing to run."""
    return not host.shards or host.items > 0 or host.busy_s + host.wait_input_s > 0


def _seconds(first: Measurement, last: Measurement) -> float:
    return last.figures.elapsed_s - first.figures.elapsed_s


class HostTuner(HillClimb):
    """Decides how many hosts the next pass gets, from what was seen of whole passes.

    While the consumer waits and what limits is computing in the hosts, the next pass gets half as many more. That is
    judged by what comes from the hosts in a second, as a knob's step, and goes down again likewise.
    """

    NOISE = 0.05, 2  # of whole passes: that of samples cancels out
    MOST_SAMPLES = 5
    BARRED, CLEAR_BARRED, MOST_BARRED = 2.0, 2.0, 32.0  # passes

    def __init__(self, knob: Knob, label: str) -> None:
        super().__init__([knob], {})
        self.resting = "no pass has shown yet what it takes"
        self._knob = knob
        self._label = label
        self._rates: Sequence[float] = []  # of passes with the present value
        self._seconds = 0.0  # that they took

    @property
    def value(self) -> int:
        """Hosts of the next pass."""
        return self.values[self._knob.stage]

    def next_pass(self, seen: PassLooks, most: int) -> TuningStep | None:
        """Take a pass into account; return the step for the next one: `value` has it already.

        Args:
          most: as many workers and cores as there are, whatever is written.
        """
        if seen.stretch is None:
            return None
        first, last = seen.stretch
        loads = Loads(last.figures - first.figures)
        items = sum(host.items for host in loads.figures.hosts)
        if loads.elapsed_s < LEAST_S or items < LEAST_ITEMS:
            return None
        self._now += 1
        self._rates = [*self._rates[1 - self.MOST_SAMPLES :], items / loads.elapsed_s]
        self._seconds += loads.elapsed_s
        if self._seconds < PASS_S:
            return None
        step = None if self._trial is None else self._judge(self._trial, loads, most)
        if self._trial is None and step is None:
            step = self._move(loads, first, last, most)
        return None if step is None else replace(step, stage=self._label)

    def _move(self, loads: Loads, first: Measurement, last: Measurement, most: int) -> TuningStep | None:
        """Change the number, if hosts have too much to do, or too little."""
        computed = (last.hosts_cpu_s - first.hosts_cpu_s) / (loads.elapsed_s * max(1, len(loads.figures.hosts)))
        busy = min(1.0, max(loads.hosted_hold, computed))  # stages don't count what it takes to send items
        fewer = max(self._knob.written, math.floor(self.value / STEP))
        idle = fewer < self.value and busy * self.value / fewer < LOADED
        if idle and not self._is_barred(self._knob, self._rates, up=False):
            return self._turn(fewer, f"the hosts are busy {busy:.0%} of their time", eases=True)
        used = max(0.0, last.cpu_s - first.cpu_s) / loads.elapsed_s
        after, why = self._find_more(loads, busy, used, last.free_bytes, most)
        if after > self.value:
            return self._turn(after, why)
        self.resting = why
        return None

    def _turn(self, after: int, why: str, *, eases: bool = False) -> TuningStep:
        rates, self._rates, self._seconds = self._rates, [], 0.0
        return self._begin(self._knob, after, why, rates, eases=eases)

    def _find_more(
        self, loads: Loads, busy: float, used: float, free_bytes: Callable[[], float], most: int
    ) -> tuple[int, str]:
        """Return a larger number of hosts, and why; or the present one, and why there are no more."""
        figures, value = loads.figures, self.value
        waits = f"the consumer waits {loads.waits:.0%} of its time"
        found = limit_of(figures)
        if loads.waits < WAITS:
            return value, waits
        if found is None and busy >= LOADED:
            why = f"{waits}, and the hosts are busy {busy:.0%} of theirs"
        elif found is not None and found[0] == "loop" and (stage := found[1][0]) is not None and stage.hosts:
            why = f"{waits}, and {stage} keeps the hosts busy"
        else:
            return value, "the hosts' computing isn't what limits"
        if used >= BUSY_CPUS * figures.cpus:
            return value, f"all CPUs ({figures.cpus}) are busy"
        after = min(math.ceil(value * STEP), most, value + math.ceil(figures.cpus - used))
        if after <= value:
            return value, f"{value} are as many as there are shards or CPUs for"
        if each := max(host.resident_bytes for host in figures.hosts):
            after = min(after, value + math.floor(free_bytes() / 2 / each))
        if after <= value:
            return value, f"another one would take {each / 1e6:,.0f} MB, more than half of what is free"
        if self._is_barred(self._knob, self._rates, up=True):
            return value, "more have brought nothing"
        return after, why

    def _judge(self, trial: _Trial, loads: Loads, most: int) -> TuningStep | None:
        """Judge the step; there may be room for as many as before no more."""
        enough = loads.waits < (WAITS if trial.eases else CALM_WAITS) or (trial.eases and most <= self.value)
        step = self._keep_or_undo(trial, self._rates, enough=enough, excused=False)
        if step is None:
            return None
        self.values[self._knob.stage] = after = min(step.after, most)
        self._rates, self._seconds = trial.rates, PASS_S
        return replace(step, after=after)
