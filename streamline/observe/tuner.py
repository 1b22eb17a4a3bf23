"""Which knob is turned next, and why: a hill climb. Figures in, a step out; no clock: figures say how long they took.

While the consumer waits more than a tenth of its time, the verdict names the stage that limits, and `MOVES` says what
may be tried. The first move that isn't barred turns one knob by half. It is kept if the rate rises by more than 5 %,
which is judged as soon as the noise between samples allows; else it is taken back, and barred for a while, or until
costs have changed. A knob that isn't needed goes down again, to what the plan says.

Rates are those of the stage that is turned, as in Plumber: its items stand in a fixed ratio to the consumer's, and
there are more of them. tf.data's tuners model every stage and turn by one. Here a step is measured, since calls of
APIs, threads under a GIL and disks follow no model; a step of one doesn't stand out of the noise, and takes long from 1
to 64.

How many hosts there are is decided likewise, but between the passes of a loader: a whole pass is one sample.

Source: Plumber (Kuchnik et al., MLSys 2022), tf.data's STAGE_BASED.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

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
"""A stage with a larger load needs its calls, and is worth a try where none limits and the consumer waits."""

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


@dataclass(frozen=True)
class _Move:
    """A step that may gain something; or it eases: the knob isn't needed, so that it shall lose nothing."""

    knob: Knob
    after: int
    why: str
    eases: bool = False


@dataclass(frozen=True)
class _Trial:
    """A step that is being judged; `rates` are samples from before it, and those from `settled_at` on count."""

    move: _Move
    before: int
    rates: Sequence[float]
    settled_at: float

    @property
    def up(self) -> bool:
        return self.move.after > self.before


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
        self._trial: _Trial | None = None
        self._bars: dict[tuple[str, int, bool], tuple[float, float]] = {}  # steps: for how long, until when
        self._usual: tuple[str, Sequence[float]] = "", ()  # the last stage that limited or was turned, and its rates

    def _begin(self, move: _Move, rates: Sequence[float], settled_at: float) -> TuningStep:
        self._trial = _Trial(move, self.values[move.knob.stage], rates, settled_at)
        return self._turn(move.knob, move.after, move.why)

    def _keep_or_undo(self, rates: Sequence[float], now: float, *, enough: bool, excused: bool) -> TuningStep | None:
        """Keep the step or take it back, once it can be told what it has brought.

        Args:
          enough: the consumer has what it can take.
          excused: the step is kept whatever it has gained.
        """
        trial = self._trial
        assert trial is not None
        stage, wanted = trial.move.knob.stage, -GAIN if trial.move.eases else GAIN
        gain, error = self._change(trial.rates, rates)
        sure = abs(gain - wanted) >= SURE_ERRORS * error
        if not (enough or sure or len(rates) >= self.MOST_SAMPLES):
            return None
        self._trial = None
        if enough or excused or gain >= wanted:
            self._usual = stage, rates
            self._bar((stage, trial.move.after, not trial.up), now, 2 * self.BARRED)  # that is where it came from
            self.resting = f"{trial.move.after} have brought {gain:+.0%}"
            return None
        self._bar((stage, trial.before, trial.up), now, self.CLEAR_BARRED if sure else self.BARRED)
        return self._turn(trial.move.knob, trial.before, f"undone: {trial.move.after} brought {gain:+.0%}")

    def _bar(self, step: tuple[str, int, bool], now: float, least: float) -> None:
        spell = min(self.MOST_BARRED, max(least, 2 * self._bars.get(step, (0, 0))[0]))
        self._bars[step] = spell, now + spell

    def _is_barred(self, knob: Knob, now: float, *, up: bool) -> bool:
        return self._bars.get((knob.stage, self.values[knob.stage], up), (0, now))[1] > now

    def _notice(self, stage: str, rates: Sequence[float]) -> bool:
        """Forget what was tried when costs have changed: a stage gives another rate than it did. Return whether."""
        known = self._usual[0] == stage
        if known:
            gain, error = self._change(self._usual[1], rates)
            if abs(gain) < max(CHANGED, SURE_ERRORS * error):
                return False
            self._bars.clear()
        self._usual = stage, rates
        return known

    def _change(self, before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
        """Return by which share a rate has risen, and the standard error of that."""
        (noise, count), means = self.NOISE, (fmean(before), fmean(after))
        squares = [(rate / (means[0] or math.inf) - 1) ** 2 for rate in before]
        squares += [(rate / (means[1] or math.inf) - 1) ** 2 for rate in after]
        variance = (noise**2 * count + sum(squares)) / (count + len(squares) - 2)
        return means[1] / (means[0] or math.inf) - 1, math.sqrt(variance * (1 / len(before) + 1 / len(after)))

    def _turn(self, knob: Knob, after: int, why: str) -> TuningStep:
        before, self.values[knob.stage] = self.values[knob.stage], after
        self.resting = ""
        return TuningStep(
            at_s=0.0, stage=knob.stage, name=knob.stage, kind=knob.kind, before=before, after=after, why=why
        )


class Tuner(HillClimb):
    """Decides on the knobs of stages; `memory_bytes`: for items in flight, beyond what they take as written."""

    NOISE = 0.2, 6
    ENOUGH_SAMPLES, LEAST_SAMPLES, MOST_SAMPLES = 4, 3, 20  # before a step, after it; 20 tell 10 % from 20 % of noise
    BARRED, CLEAR_BARRED, MOST_BARRED = 2.0, 20.0, 60.0  # seconds
    LONGEST_SAMPLE_S = 5.0

    def __init__(
        self, knobs: Sequence[Knob], values: Mapping[str, int] | None = None, *, memory_bytes: float = math.inf
    ) -> None:
        super().__init__(knobs, values or {})
        self._memory_bytes = memory_bytes
        self._looks: list[Measurement] = []  # since the last turn has settled

    @property
    def settled(self) -> dict[str, int]:
        """The values, without a step that is still being judged."""
        trial = self._trial
        return self.values if trial is None else self.values | {trial.move.knob.stage: trial.before}

    def look(self, look: Measurement) -> TuningStep | None:
        """Return the step to take now: `values` have it already. None: there is none. Called several times a second."""
        trial = self._trial
        if trial is not None and look.figures.elapsed_s < trial.settled_at:
            return None
        self._looks = [*self._looks[-self.MOST_SAMPLES :], look] if trial is None else [*self._looks, look]
        window = look.figures - self._looks[0].figures
        if len(self._looks) <= (self.ENOUGH_SAMPLES if trial is None else self.LEAST_SAMPLES) or window.elapsed_s <= 0:
            return None
        return self._move(Loads(window)) if trial is None else self._judge(trial, Loads(window))

    def forget(self) -> None:
        """Compare nothing with what comes next: in between, nothing was to run."""
        self._looks.clear()

    # Moves ------------------------------------------------------------------------------------------------------------

    def _move(self, loads: Loads) -> TuningStep | None:
        """Begin the first move for what is found that isn't barred."""
        finding, stage = self._find(loads)
        said, moves = MOVES[finding]
        if finding in ("stage", "limit") and stage is not None and (rates := self._rates(stage.name)):
            self._notice(stage.name, rates)
        reasons = [said.format(stage=stage, waits=loads.waits)]
        for find_move in moves:
            move = find_move(self, loads, stage)
            if isinstance(move, _Move):
                rates = self._rates(move.knob.stage)
                settled_at = self._now + self._call_s(move.knob.stage)  # the calls that are at work end first
                return (
                    self._begin(move, rates, settled_at) if len(rates) >= self.ENOUGH_SAMPLES and any(rates) else None
                )
            reasons += [move] if move else []
        self.resting = ": ".join(reasons[:2])
        return None

    def _find(self, loads: Loads) -> tuple[str, StageStats | None]:
        """Return the key in `MOVES` of what limits, and the stage."""
        if loads.waits < WAITS:
            return "consumer", None
        found = limit_of(loads.figures)
        if found is None:
            return "several", None
        rule, (stage, *_) = found
        if stage is None or stage.name not in self._knobs:
            return "no knob", stage
        return ("limit" if rule == "limit" else "stage"), stage

    def _less_than_needed(self, loads: Loads, _: StageStats | None) -> _Move | str:
        """Turn down what hasn't been needed for as long as looks are kept."""
        if len(self._looks) <= self.MOST_SAMPLES:
            return ""
        idle = [stage.name for stage in loads.stages if loads.awaited(stage) < AWAITED]
        for stage, knob in self._knobs.items():
            after = max(knob.written, math.floor(self.values[stage] / STEP))
            needed = loads.waits >= CALM_WAITS and stage not in idle
            if after < self.values[stage] and not needed and not self._is_barred(knob, self._now, up=False):
                return _Move(knob, after, "it isn't needed", eases=True)
        return ""

    def _more(self, loads: Loads, stage: StageStats) -> _Move | str:
        """Turn up what limits."""
        return self._up(self._knobs[stage.name], f"the consumer waits {loads.waits:.0%}, and {stage} limits")

    def _fewer(self, loads: Loads, stage: StageStats) -> _Move | str:
        """Turn down what limits: calls may crowd a server, and threads take turns with the GIL."""
        knob, value = self._knobs[stage.name], self.values[stage.name]
        each_has_a_core = self._busy(knob) and value * stage.workers <= loads.figures.cpus
        if value < STEP or each_has_a_core or self._is_barred(knob, self._now, up=False):
            return ""
        return _Move(knob, math.floor(value / STEP), f"{stage} limits, and more gain nothing; are fewer faster?")

    def _more_ahead(self, loads: Loads, _: StageStats | None) -> _Move | str:
        """Turn up a buffer: stages limit by turns."""
        knob = next((knob for knob in self._knobs.values() if knob.kind == "prefetch"), None)
        return "" if knob is None else self._up(knob, MAY_HELP.format(waits=loads.waits, name=knob.stage))

    def _more_of_awaited(self, loads: Loads, _: StageStats | None) -> _Move | str:
        """Turn up what is waited for most: it may cost the loop about as much time."""
        awaited = [one for one in loads.stages if one.name in self._knobs and loads.awaited(one) >= AWAITED]
        stage = max(awaited, key=loads.awaited, default=None)
        return (
            "" if stage is None else self._up(self._knobs[stage.name], MAY_HELP.format(waits=loads.waits, name=stage))
        )

    def _up(self, knob: Knob, why: str) -> _Move | str:
        """Turn a knob up as far as there are CPUs and memory; or return why not."""
        value, last = self.values[knob.stage], self._looks[-1]
        after = min(knob.most, math.ceil(value * STEP))
        if after <= value:
            return f"{value} is the most"
        if self._busy(knob):
            return f"all CPUs ({last.figures.cpus}) are busy"
        if self._is_barred(knob, self._now, up=True):
            return f"more of {knob.stage} than {value} gain nothing"
        if each := self._bytes_each(knob, last.figures):
            left = min(last.free_bytes() / 2, self._memory_bytes - self._taken_bytes(last.figures))
            after = min(after, max(value, value + math.floor(left / each)) if left < math.inf else after)
        if after <= value:
            return f"{value} take the memory that there is for them"
        return _Move(knob, after, why)

    def _judge(self, trial: _Trial, loads: Loads) -> TuningStep | None:
        stage, rates = trial.move.knob.stage, self._rates(trial.move.knob.stage)
        if len(rates) < self.LEAST_SAMPLES:
            return None
        gained = fmean(rates) > fmean(trial.rates)
        if loads.waits < CALM_WAITS and not gained and not trial.move.eases:  # the consumer does something else
            del self._looks[:-1]
            return None
        finding, limiting = self._find(loads)
        relieved = finding == "stage" and limiting is not None and limiting.name != stage  # two were nearly as loaded
        excused = loads.waits < WAITS if trial.move.eases else trial.up and relieved
        step = self._keep_or_undo(
            rates, self._now, enough=trial.up and gained and loads.waits < CALM_WAITS, excused=excused
        )
        if self.resting:  # it is kept
            self.resting = f"{stage}: {trial.move.knob.kind}: {self.resting}"
        return step

    def _turn(self, knob: Knob, after: int, why: str) -> TuningStep:
        last = self._looks[-1].figures
        stage = next((str(one) for one in last.stages if one.name == knob.stage), knob.stage)
        self._looks.clear()
        return replace(super()._turn(knob, after, why), at_s=last.elapsed_s, stage=stage)

    # What figures say -------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._looks[-1].figures.elapsed_s

    def _rates(self, stage: str) -> list[float]:
        """Return samples of a stage's items per second, of the consumer's for a buffer: each at least as long as a
        call, or the calls that end together would be noise."""
        call_s = self._call_s(stage)
        rates: list[float] = []
        begin = self._looks[0].figures
        for look in self._looks[1:]:
            passed = look.figures.elapsed_s - begin.elapsed_s
            if passed > 0 and passed >= call_s:
                rates.append((_items(look.figures, stage) - _items(begin, stage)) / passed)
                begin = look.figures
        return rates

    def _call_s(self, stage: str) -> float:
        window = self._looks[-1].figures - self._looks[0].figures
        calls = [one.busy_s / max(1, one.items) for one in window.stages if one.name == stage]
        return min(self.LONGEST_SAMPLE_S, sum(calls))

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


MAY_HELP = "the consumer waits {waits:.0%}, and no stage limits alone; {name} may help"

MOVES: dict[str, tuple[str, tuple[Callable[..., _Move | str], ...]]] = {
    "consumer": ("the consumer waits {waits:.0%} of its time: nothing is to be gained", (Tuner._less_than_needed,)),
    "stage": ("{stage} limits", (Tuner._less_than_needed, Tuner._more, Tuner._fewer)),
    "limit": ("the limit= of {stage} bounds it", (Tuner._less_than_needed,)),
    "no knob": ("{stage} limits, and has no knob", (Tuner._less_than_needed,)),
    "several": ("no stage limits alone", (Tuner._less_than_needed, Tuner._more_of_awaited, Tuner._more_ahead)),
}
"""By what limits: what is said of it where nothing is turned, and what may be, in this order."""


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

    def turned(self) -> None:
        """What was seen before says nothing of how it runs now."""
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
        self._passes = 0

    @property
    def value(self) -> int:
        """Hosts of the next pass."""
        return self.values[self._knob.stage]

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
        loads = Loads(last.figures - first.figures)
        items = sum(host.items for host in loads.figures.hosts)
        if loads.elapsed_s < LEAST_S or items < LEAST_ITEMS:
            return None
        rate = items / loads.elapsed_s
        self._passes += 1
        if self._trial is None and self._rates:
            self._usual = self._knob.stage, self._rates
            if self._notice(self._knob.stage, [rate]):
                self._rates, self._seconds = [], 0.0
        self._rates = [*self._rates[1 - self.MOST_SAMPLES :], rate]
        self._seconds += loads.elapsed_s
        if self._seconds < PASS_S:
            return None
        step = None if self._trial is None else self._judge(self._trial, loads, most)
        return self._move(loads, first, last, most) if self._trial is None and step is None else step

    def _move(self, loads: Loads, first: Measurement, last: Measurement, most: int) -> TuningStep | None:
        """Change the number, if hosts have too much to do, or too little."""
        computed = (last.hosts_cpu_s - first.hosts_cpu_s) / (loads.elapsed_s * max(1, len(loads.figures.hosts)))
        busy = min(1.0, max(loads.hosted_hold, computed))  # stages don't count what it takes to send items
        fewer = max(self._knob.written, math.floor(self.value / STEP))
        idle = fewer < self.value and busy * self.value / fewer < LOADED
        if idle and not self._is_barred(self._knob, self._passes, up=False):
            move = _Move(self._knob, fewer, f"the hosts are busy {busy:.0%} of their time", eases=True)
            return self._begin(move, self._rates, 0.0)
        used = max(0.0, last.cpu_s - first.cpu_s) / loads.elapsed_s
        after, why = self._more(loads, busy, used, last.free_bytes, most)
        if after > self.value:
            return self._begin(_Move(self._knob, after, why), self._rates, 0.0)
        self.resting = why
        return None

    def _more(
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
        return (
            (value, "more have brought nothing") if self._is_barred(self._knob, self._passes, up=True) else (after, why)
        )

    def _judge(self, trial: _Trial, loads: Loads, most: int) -> TuningStep | None:
        """Judge the step; there may be room for as many as before no more."""
        step = self._keep_or_undo(
            self._rates,
            self._passes,
            enough=loads.waits < (WAITS if trial.move.eases else CALM_WAITS),
            excused=trial.move.eases and most <= self.value,
        )
        if step is None:
            return None
        self.values[self._knob.stage] = after = min(step.after, most)
        self._rates, self._seconds = trial.rates, PASS_S
        return replace(step, after=after)

    def _turn(self, knob: Knob, after: int, why: str) -> TuningStep:
        self._rates, self._seconds = [], 0.0
        return replace(super()._turn(knob, after, why), stage=self._label)
