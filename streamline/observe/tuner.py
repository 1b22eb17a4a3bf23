"""Which knob is turned next, and why: figures in, a step out. No clock: figures say how long they took.

While the consumer waits more than a tenth of its time, the knob of the stage that limits, as the verdict finds it,
goes up by half; where that gains less than 5 %, it goes back. Rates are those of the stage that is turned, as in
Plumber: its items stand in a fixed ratio to the consumer's, and there are more of them. A step is judged as soon as the
noise between samples allows it. One that was undone isn't tried again for a while, or until costs have changed. A knob
that isn't needed goes down again, to what the plan says; below that only where it makes the stage faster. Where no
stage limits alone, a buffer is tried, then what is waited for most.

tf.data's tuners model every stage and turn by one. Here a step is measured, since calls of APIs, threads under a GIL
and disks follow no model; and a step of one doesn't stand out of the noise, and takes too long from 1 to 64.

How many hosts there are is decided likewise, but between the passes of a loader: a whole pass is one sample.

Source: Plumber (Kuchnik et al., MLSys 2022), tf.data's STAGE_BASED.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from streamline.core.knobs import Knob
from streamline.errors import printable
from streamline.observe.figures import Figures, HostStats, StageStats, between
from streamline.observe.verdict import LEAST_ITEMS, LEAST_S, LOADED, WAITS, Loads, limit_of

STEP = 1.5

GAIN = 0.05
"""A step up that gains less is undone."""

CALM = WAITS / 2
"""A consumer that waits for a smaller share of its time leaves knobs that aren't needed."""

IDLE = 0.5
"""A stage with a smaller load has calls to spare: with a step down it is still below `LOADED`."""

AWAITED = 0.25
"""A stage with a larger load is worth a try where none limits and the consumer waits."""

RELIEVED = 0.85
"""A stage with a smaller load doesn't limit."""

LEAST_SAMPLES, MOST_SAMPLES = 3, 20
"""Of a rate, before and after a step: with 20 % of noise, 20 tell 10 % from nothing."""

KNOWN = 0.1
"""Standard error of the rate before a step; it costs as many samples as the noise asks for."""

SURE = 2.0
"""Standard errors that the gain of a step must be away from `GAIN` to be judged before `MOST_SAMPLES`."""

NOISE, NOISE_SAMPLES = 0.2, 6.0
"""What is taken for the noise of a sample before there are any, and as how many it counts."""

CHANGED = 0.25
"""The share by which a rate changes when costs have changed; noise of 20 % over 20 samples doesn't reach it."""

CALM_S = 3.0
"""Seconds for which a knob must not have been needed before it goes down."""

REST_S, SURE_REST_S, MOST_REST_S = 2.0, 20.0, 60.0
"""Seconds for which a step that was undone isn't tried again: the first time, or where its loss stood out of the noise,
doubled each time; and at the most."""

LONGEST_SAMPLE_S = 5.0

BUSY_CPUS = 0.9
"""The share of the cores from which on more calls at once only wait for each other."""


def _endless() -> float:
    return math.inf


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
    free_bytes: Callable[[], float] = _endless


@dataclass(frozen=True, kw_only=True)
class TuningStep:
    """One turn of one knob.

    Attributes:
      at_s: since the stream was opened.
      stage: as printed; `name` is its name.
      kind: what was turned: "concurrency", "threads", "prefetch", "reads", "hosts".
      why: for a person.
    """

    at_s: float
    stage: str
    name: str
    kind: str
    before: int
    after: int
    why: str

    def __str__(self) -> str:
        return printable(f"{self.stage}: {self.kind} {self.before} -> {self.after}: {self.why}")


_Way: TypeAlias = tuple[str, int, bool]
"""A step: of which stage's knob, from which value, and whether up."""


@dataclass(frozen=True)
class _Trial:
    """A step that is being judged.

    Attributes:
      rates: of the stage before it.
      eases: it goes down because the knob isn't needed; else it is to gain something.
      settled_at: seconds from which on the new rate counts.
    """

    knob: Knob
    before: int
    after: int
    rates: list[float]
    eases: bool
    settled_at: float


class Noise:
    """How far samples of a rate are off their mean; what is known fades.

    Args:
      guess: what is taken for it before there are any samples.
      count: as how many samples that counts.
    """

    def __init__(self, guess: float, count: float) -> None:
        self._squares, self._count = guess**2 * count, count

    @property
    def enough(self) -> int:
        """Samples from which on their mean is known well enough."""
        return math.ceil(self._squares / self._count / KNOWN**2)

    def learn(self, rates: Sequence[float]) -> None:
        """Take note of samples of one rate."""
        fades = 0.9
        self._squares = fades * self._squares + _off(rates)
        self._count = fades * self._count + len(rates) - 1

    def error(self, before: Sequence[float], after: Sequence[float]) -> float:
        """Return the standard error of the ratio of two mean rates."""
        squares = self._squares + _off(before) + _off(after)
        count = self._count + len(before) + len(after) - 2
        return math.sqrt(squares / count * (1 / len(before) + 1 / len(after)))


def _off(rates: Sequence[float]) -> float:
    """Return the sum of squares of what samples are off their mean, as shares of it."""
    mean = fmean(rates)
    return sum((rate / mean - 1) ** 2 for rate in rates) if mean else 1.0


class Tuner:
    """Decides on knobs.

    Args:
      knobs: of the plan.
      values: to begin with; those that aren't named begin as written.
      memory_bytes: that items in flight may take beyond what they take as written.

    Attributes:
      values: as they stand.
      resting: why nothing is turned at the moment, for a person.
    """

    def __init__(
        self, knobs: Sequence[Knob], values: Mapping[str, int] | None = None, *, memory_bytes: float = math.inf
    ) -> None:
        self.values = {knob.stage: knob.written for knob in knobs} | dict(values or {})
        self.resting = "it has just begun"
        self._knobs = {knob.stage: knob for knob in knobs}
        self._looks: list[Measurement] = []  # since the last turn has settled
        self._trial: _Trial | None = None
        self._usual: tuple[str, list[float]] | None = (
            None  # the stage that limited, and its rates, before costs changed
        )
        self._memory_bytes = memory_bytes
        self._barred: dict[_Way, float] = {}  # steps that gain nothing, until when
        self._rests: dict[_Way, float] = {}
        self._noise = Noise(NOISE, NOISE_SAMPLES)
        self._calm_since: dict[str, float] = {}

    @property
    def settled(self) -> dict[str, int]:
        """The values, without a step that is still being judged."""
        trial = self._trial
        return self.values if trial is None else self.values | {trial.knob.stage: trial.before}

    def look(self, look: Measurement) -> TuningStep | None:
        """Return the step to take now: `values` have it already. None: there is none. Called several times a second."""
        now = look.figures.elapsed_s
        trial = self._trial
        if trial is not None and now < trial.settled_at:
            return None
        self._looks.append(look)
        if len(self._looks) < 2:
            return None
        if trial is not None:
            return self._judged(trial, now)
        self._looks = self._looks[-1 - MOST_SAMPLES :]
        window = between(self._looks[0].figures, look.figures)
        if len(self._looks) <= LEAST_SAMPLES or window.elapsed_s <= 0:
            return None
        step = self._down(window, now)
        return self._up(window, now) if step is None else step

    def forget(self) -> None:
        """Compare nothing with what comes next: in between, nothing was to run."""
        self._looks.clear()
        self._calm_since.clear()

    # Steps ------------------------------------------------------------------------------------------------------------

    def _up(self, window: Figures, now: float) -> TuningStep | None:
        """Begin a step of the knob that limits, if the consumer waits."""
        loads = Loads(window)
        if loads.waits < WAITS:
            self._usual = None
            return self._rest(f"the consumer waits {loads.waits:.0%} of its time: nothing is to be gained")
        rule, stage = _limiting(window)
        if not rule:
            knob, stage = self._likely(loads, now)
        else:
            knob = None if stage is None else self._knobs.get(stage.name)
        if knob is None:
            return self._rest("nothing with a knob limits" if stage is None else f"{stage} limits, and has no knob")
        rates = self._rates(stage)
        if len(rates) < self._enough or not fmean(rates):
            return None
        self._notice(knob.stage, rates)
        if rule == "limit":
            return self._rest(f"the limit= of {stage} bounds it")
        value, name = self.values[knob.stage], knob.stage if stage is None else str(stage)
        after, bounded = value, f"neither more nor fewer than {value} gain anything"
        if not self._bars((knob.stage, value, True), now):
            after, bounded = self._affordable(knob, stage, min(knob.most, math.ceil(value * STEP)))
        if after > value:
            most = f"{name} limits" if rule else f"no stage limits alone; {name} may help"
            return self._begin(knob, after, rates, f"the consumer waits {loads.waits:.0%}, and {most}", now)
        if not rule and stage is not None:
            return self._rest(f"no stage limits alone, and more of {name} gain nothing")
        fewer = math.floor(value / STEP)
        if self._busy(knob) and stage is not None and value * stage.workers <= self._looks[-1].figures.cpus:
            return self._rest(f"{name} limits: {self._all_busy}")  # each computes on a core of its own
        if fewer and not self._bars((knob.stage, value, False), now):
            return self._begin(knob, fewer, rates, f"{name} limits, and more gain nothing; are fewer faster?", now)
        return self._rest(f"{name} limits: {bounded}")

    def _down(self, window: Figures, now: float) -> TuningStep | None:
        """Begin a step down of a knob that has not been needed for a while, if there is one."""
        loads = Loads(window)
        idle = IDLE if _limiting(window)[0] else AWAITED  # what has gone up because no stage limits alone stays
        for name, knob in self._knobs.items():
            stage = next((one for one in window.stages if one.name == name), None)
            value = self.values[name]
            calm = loads.waits < CALM or (stage is not None and loads.awaited(stage) < idle)
            after = max(knob.written, math.floor(value / STEP))
            if not calm or after >= value:
                self._calm_since.pop(name, None)
                continue
            since = self._calm_since.setdefault(name, now)
            if now - since < CALM_S or self._bars((name, value, False), now):
                continue
            rates = self._rates(stage)
            if len(rates) >= self._enough:
                del self._calm_since[name]
                return self._begin(knob, after, rates, "it isn't needed", now, eases=True)
        return None

    def _begin(
        self, knob: Knob, after: int, rates: list[float], why: str, now: float, *, eases: bool = False
    ) -> TuningStep:
        before = self.values[knob.stage]
        self._trial = _Trial(knob, before, after, rates, eases, now + self._settling_s(knob))
        return self._turned(knob, after, why, now)

    def _judged(self, trial: _Trial, now: float) -> TuningStep | None:
        """Keep or undo a step, once it can be told what it has brought."""
        window = between(self._looks[0].figures, self._looks[-1].figures)
        stage = next((one for one in window.stages if one.name == trial.knob.stage), None)
        rates = self._rates(stage)
        if len(rates) < LEAST_SAMPLES:
            return None
        usual = fmean(trial.rates)
        gain = fmean(rates) / usual - 1
        waits = Loads(window).waits
        if waits < CALM and gain < 0 and not trial.eases:  # the consumer does something else: this says nothing
            del self._looks[:-1]
            return None
        wanted = -GAIN if trial.eases else GAIN
        up = trial.after > trial.before
        done = up and gain > 0 and waits < CALM  # the consumer has what it can take
        sure = abs(gain - wanted) >= SURE * self._noise.error(trial.rates, rates)
        if not (done or sure or len(rates) >= MOST_SAMPLES):
            return None
        self._trial = None
        self._noise.learn(trial.rates)
        if done or gain >= wanted or (trial.eases and waits < WAITS) or (up and self._relieved(window, stage)):
            self._usual = (trial.knob.stage, rates)
            self._barred[trial.knob.stage, trial.after, not up] = now + 2 * REST_S  # that is where it came from
            self.resting = f"{trial.knob.stage}: {trial.knob.kind} {trial.after} has brought {gain:+.0%}"
            return None
        way = trial.knob.stage, trial.before, up
        self._rests[way] = min(MOST_REST_S, max(2 * self._rests.get(way, 0.0), SURE_REST_S if sure else REST_S))
        self._barred[way] = now + self._rests[way]
        return self._turned(trial.knob, trial.before, f"undone: {trial.after} brought {gain:+.0%}", now)

    def _relieved(self, window: Figures, stage: StageStats | None) -> bool:
        """Whether another stage with a knob limits now, and this one has calls to spare: two were nearly as loaded."""
        _, limiting = _limiting(window)
        if stage is None or limiting is None or limiting.name == stage.name:
            return False
        return Loads(window).awaited(stage) < RELIEVED and limiting.name in self._knobs

    def _bars(self, way: _Way, now: float) -> bool:
        return self._barred.get(way, 0.0) > now

    def _turned(self, knob: Knob, after: int, why: str, now: float) -> TuningStep:
        before, self.values[knob.stage] = self.values[knob.stage], after
        last = self._looks[-1].figures
        stage = next((str(one) for one in last.stages if one.name == knob.stage), knob.stage)
        self._looks.clear()
        self.resting = ""
        return TuningStep(at_s=now, stage=stage, name=knob.stage, kind=knob.kind, before=before, after=after, why=why)

    def _rest(self, why: str) -> TuningStep | None:
        self.resting = why
        return None

    # What figures say -------------------------------------------------------------------------------------------------

    def _rates(self, stage: StageStats | None) -> list[float]:
        """Return samples of a stage's items per second, of the consumer's for None: each at least as long as a call,
        or the calls that end together would be noise."""
        call_s = 0.0 if stage is None else min(LONGEST_SAMPLE_S, stage.busy_s / max(1, stage.items))
        rates: list[float] = []
        begin = self._looks[0].figures
        for look in self._looks[1:]:
            passed = look.figures.elapsed_s - begin.elapsed_s
            if passed > 0 and passed >= call_s:
                rates.append((_items(look.figures, stage) - _items(begin, stage)) / passed)
                begin = look.figures
        return rates

    def _settling_s(self, knob: Knob) -> float:
        """Return the seconds until a turned knob shows: the calls that are at work end first."""
        window = between(self._looks[0].figures, self._looks[-1].figures)
        stage = next((one for one in window.stages if one.name == knob.stage), None)
        return 0.0 if stage is None else min(LONGEST_SAMPLE_S, stage.busy_s / max(1, stage.items))

    def _notice(self, stage: str, rates: list[float]) -> None:
        """Forget what was tried when costs have changed: another stage limits, or the same one at another rate."""
        if self._usual is not None and self._usual[0] == stage:
            change = fmean(rates) / (fmean(self._usual[1]) or math.inf) - 1
            if len(rates) < 5 or abs(change) < max(CHANGED, SURE * self._noise.error(self._usual[1], rates)):
                return
            self._barred.clear()
            self._rests.clear()
        self._usual = (stage, rates)

    def _likely(self, loads: Loads, now: float) -> tuple[Knob | None, StageStats | None]:
        """Return what may help where no stage limits all of the time, and yet the consumer waits; None: nothing.

        That is by turns, for which there are buffers; or a stage costs the loop about as much time as it is awaited.
        """
        buffer = next((knob for knob in self._knobs.values() if knob.kind == "prefetch"), None)
        held = 0 if buffer is None else self.values[buffer.stage]
        if buffer is not None and held < buffer.most and not self._bars((buffer.stage, held, True), now):
            return buffer, None
        stages = [stage for stage in loads.stages if stage.name in self._knobs and loads.awaited(stage) >= AWAITED]
        stage = max(stages, key=loads.awaited, default=None)
        return (buffer, None) if stage is None else (self._knobs[stage.name], stage)

    def _affordable(self, knob: Knob, stage: StageStats | None, after: int) -> tuple[int, str]:
        """Return up to which value a knob may go in one step to `after`, and what bounds it."""
        value = self.values[knob.stage]
        last = self._looks[-1]
        if self._busy(knob):
            return value, self._all_busy
        each = self._bytes_each(knob, last.figures)
        if not each or after <= value:
            return after, f"{value} is the most"
        left = min(last.free_bytes() / 2, self._memory_bytes - self._taken_bytes(last.figures))
        if each * (after - value) > left:
            after = max(value, value + math.floor(left / each))
        return after, f"{value} take the memory that there is for them"

    @property
    def _all_busy(self) -> str:
        return f"all CPUs ({self._looks[-1].figures.cpus}) are busy"

    def _busy(self, knob: Knob) -> bool:
        """Whether all CPUs are at work, so that more calls at once would only wait for each other."""
        first, last = self._looks[0], self._looks[-1]
        passed = last.figures.elapsed_s - first.figures.elapsed_s
        return knob.kind != "prefetch" and last.cpu_s - first.cpu_s >= BUSY_CPUS * last.figures.cpus * passed

    def _taken_bytes(self, figures: Figures) -> float:
        """Return what items in flight take beyond what they take as written."""
        return sum(
            max(0, self.values[knob.stage] - knob.written) * self._bytes_each(knob, figures)
            for knob in self._knobs.values()
        )

    def _bytes_each(self, knob: Knob, figures: Figures) -> float:
        """Return what one more takes: items that go in, or come out, whichever are larger."""
        names = [one.name for one in figures.stages]
        at = names.index(knob.stage) if knob.stage in names else len(names) - 1
        near = figures.stages[max(0, at - 1) : at + 1]
        item_bytes = max((one.bytes / one.items for one in near if one.items), default=0.0)
        return item_bytes * knob.items_each * max((one.workers for one in near), default=1)

    @property
    def _enough(self) -> int:
        """Samples from which on the rate before a step is known well enough."""
        return min(MOST_SAMPLES, max(LEAST_SAMPLES, self._noise.enough))


def _limiting(window: Figures) -> tuple[str, StageStats | None]:
    """Return the rule that says what limits, and the stage."""
    found = limit_of(window)
    return ("", None) if found is None else (found[0], found[1][0])


def _items(figures: Figures, stage: StageStats | None) -> int:
    """Return how many items a stage has given, and for None, how many the consumer got.

    Of one in processes, how many came from there: what is counted there is told now and then only.
    """
    if stage is None:
        return figures.items
    if stage.hosts and any(host.kind == "process" for host in figures.hosts):
        return sum(host.items for host in figures.hosts)
    return sum(one.items for one in figures.stages if one.name == stage.name)


# Hosts, between passes ------------------------------------------------------------------------------------------------

PASS_S = 1.0
"""Of passes with one number of hosts, shorter ones together, before it is changed, or a step is judged."""

PASS_NOISE, PASS_NOISE_SAMPLES = 0.05, 2.0
"""As `NOISE`, of the rates of whole passes, in which that of samples cancels out."""

MOST_PASSES = 5
"""Of a rate, before and after a step."""

REST_PASSES, MOST_REST_PASSES = 2, 32
"""Passes for which a step that was undone isn't tried again: the first time, doubled each time; and at the most."""


class PassLooks:
    """What is seen of one pass: its longest stretch without a pause, since all of its hosts run, and no knob is turned.

    Attributes:
      stretch: its first and last look; None: there were no two.
    """

    def __init__(self) -> None:
        self.stretch: tuple[Measurement, Measurement] | None = None
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

    def turned(self) -> None:
        """What was seen before says nothing of how it runs now."""
        self._first = self.stretch = None


def _runs(host: HostStats) -> bool:
    """Whether a host is past its start, as far as it has told, or has nothing to run."""
    return not host.shards or host.items > 0 or host.busy_s + host.wait_input_s > 0


def _seconds(first: Measurement, last: Measurement) -> float:
    return last.figures.elapsed_s - first.figures.elapsed_s


@dataclass(frozen=True)
class _HostTrial:
    """A number of hosts that is being judged; `before`, `rates` and `eases` as of `_Trial`."""

    before: int
    rates: list[float]
    eases: bool


class HostTuner:
    """Decides how many hosts the next pass gets, from what was seen of whole passes.

    While the consumer waits and what limits is computing in the hosts, the next pass gets half as many more. That is
    judged by what comes from the hosts in a second, as a knob's step, and goes down again likewise.

    Args:
      knob: of the backend.
      label: what steps are said to be of.
      value: to begin with; None: as written.

    Attributes:
      value: hosts of the next pass.
      resting: why it isn't changed, for a person; "": a step is being judged.
    """

    def __init__(self, knob: Knob, label: str, value: int | None = None) -> None:
        self.value = max(knob.written, value or 0)
        self.resting = "no pass has shown yet what it takes"
        self._knob = knob
        self._label = label
        self._trial: _HostTrial | None = None
        self._rates: list[float] = []  # of passes with the present value
        self._seconds = 0.0  # that they took
        self._noise = Noise(PASS_NOISE, PASS_NOISE_SAMPLES)
        self._passes = 0
        self._barred: dict[bool, int] = {}  # whether up, until which pass
        self._rests: dict[bool, int] = {}

    @property
    def settled(self) -> int:
        """The value, without a step that is still being judged."""
        return self.value if self._trial is None else self._trial.before

    def next_pass(self, seen: PassLooks, most: int) -> TuningStep | None:
        """Take a pass into account; return the step for the next one: `value` has it already.

        Args:
          most: as many workers and cores as there are, whatever is written.
        """
        if seen.stretch is None:
            return None
        first, last = seen.stretch
        window = between(first.figures, last.figures)
        items = sum(host.items for host in window.hosts)
        if window.elapsed_s < LEAST_S or items < LEAST_ITEMS:
            return None
        self._passes += 1
        rate = items / window.elapsed_s
        if self._trial is None:
            self._notice(rate)
        self._rates = [*self._rates[1 - MOST_PASSES :], rate]
        self._seconds += window.elapsed_s
        if self._seconds < PASS_S:
            return None
        loads, used = Loads(window), max(0.0, last.cpu_s - first.cpu_s) / window.elapsed_s
        computed = (last.hosts_cpu_s - first.hosts_cpu_s) / (window.elapsed_s * max(1, len(window.hosts)))
        busy = min(1.0, max(loads.hosted_hold, computed))  # stages don't count what it takes to send items
        if self._trial is not None and (judged := self._judged(self._trial, loads.waits, most)) is not None:
            return judged
        if self._trial is not None:
            return None
        step = self._down(busy)
        return self._up(loads, busy, used, last.free_bytes, most) if step is None else step

    def _up(
        self, loads: Loads, busy: float, used: float, free_bytes: Callable[[], float], most: int
    ) -> TuningStep | None:
        """Begin a step up, if the consumer waits for what the hosts compute."""
        figures, value = loads.figures, self.value
        if loads.waits < WAITS:
            return self._rest(f"the consumer waits {loads.waits:.0%} of its time")
        rule, stage = _limiting(figures)
        if rule == "loop" and stage is not None and stage.hosts:
            why = f"{stage} keeps the hosts busy"
        elif not rule and busy >= LOADED:
            why = f"the hosts are busy {busy:.0%} of theirs"
        else:
            return self._rest("the hosts' computing isn't what limits")
        if used >= BUSY_CPUS * figures.cpus:
            return self._rest(f"all CPUs ({figures.cpus}) are busy")
        after = min(math.ceil(value * STEP), most, value + math.ceil(figures.cpus - used))
        if after <= value:
            return self._rest(f"{value} are as many as there are shards or CPUs for")
        if each := max(host.resident_bytes for host in figures.hosts):
            after = min(after, value + math.floor(free_bytes() / 2 / each))
        if after <= value:
            return self._rest(f"another one would take {each / 1e6:,.0f} MB, more than half of what is free")
        if self._barred.get(True, 0) > self._passes:
            return self._rest("more have brought nothing")
        return self._begin(after, f"the consumer waits {loads.waits:.0%} of its time, and {why}", eases=False)

    def _down(self, busy: float) -> TuningStep | None:
        """Begin a step down, if fewer hosts have time enough for what these compute."""
        after = max(self._knob.written, math.floor(self.value / STEP))
        if after >= self.value or self._barred.get(False, 0) > self._passes:
            return None
        if busy * self.value / after >= LOADED:
            return None
        return self._begin(after, f"the hosts are busy {busy:.0%} of their time", eases=True)

    def _begin(self, after: int, why: str, *, eases: bool) -> TuningStep:
        self._trial = _HostTrial(self.value, self._rates, eases)
        return self._turned(after, why)

    def _judged(self, trial: _HostTrial, waits: float, most: int) -> TuningStep | None:
        """Keep or undo a step, once it can be told what it has brought; return the step back, if there is room."""
        gain = fmean(self._rates) / (fmean(trial.rates) or math.inf) - 1
        wanted = -GAIN if trial.eases else GAIN
        done = waits < (WAITS if trial.eases else CALM)  # the consumer has what it can take
        sure = abs(gain - wanted) >= SURE * self._noise.error(trial.rates, self._rates)
        if not (done or sure or len(self._rates) >= MOST_PASSES):
            return None
        self._trial = None
        self._noise.learn(trial.rates)
        self._noise.learn(self._rates)
        if done or gain >= wanted or (trial.eases and most <= self.value):
            self._rest(f"{self.value} have brought {gain:+.0%}")
            return None
        up, after = not trial.eases, self.value
        self._rests[up] = min(MOST_REST_PASSES, max(REST_PASSES, 2 * self._rests.get(up, 0)))
        self._barred[up] = self._passes + self._rests[up]
        step = self._turned(min(trial.before, most), f"undone: {after} brought {gain:+.0%}")
        self._rates, self._seconds = trial.rates, PASS_S
        return step

    def _notice(self, rate: float) -> None:
        """Forget what was tried when costs have changed."""
        if not self._rates:
            return
        change = rate / (fmean(self._rates) or math.inf) - 1
        if abs(change) >= max(CHANGED, SURE * self._noise.error(self._rates, [rate])):
            self._rates, self._seconds = [], 0.0
            self._barred.clear()
            self._rests.clear()

    def _turned(self, after: int, why: str) -> TuningStep:
        before, self.value = self.value, after
        self._rates, self._seconds, self.resting = [], 0.0, ""
        kind, name = self._knob.kind, self._knob.stage
        return TuningStep(at_s=0.0, stage=self._label, name=name, kind=kind, before=before, after=after, why=why)

    def _rest(self, why: str) -> TuningStep | None:
        self.resting = why
        return None
