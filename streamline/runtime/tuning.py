"""`open(tune=)`: while a stream runs, its figures are looked at, and the knobs of its stages turned.

`streamline.observe.tuner` decides; here it is told the figures, and what it says is done. A task of the event loop
looks several times a second, from the first list on, in a thread of the pool: reading figures shall hold up nothing.
It stands still during a pause. What runs elsewhere, in hosts, is told by a message (`core.knobs.Widths.followers`).

How many hosts there are is decided when a stream begins, from what was seen of the one before: the next pass of a
loader, or the next stream that is opened with the same `StreamTuning`. A loader's pass that is opened ahead begins when
the hosts have nothing more to do for the present one.

Nothing of this is in a state: a resume begins with what the plan says, or with what a file or a `StreamTuning` holds.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from time import thread_time
from typing import Any, TypeAlias

import anyio

from streamline.backends.base import Backend
from streamline.core.atomic_file import replace_file
from streamline.core.cpus import cpu_s, free_bytes
from streamline.core.item_codec import decoded
from streamline.core.knobs import HOSTS, Knob, Widths
from streamline.core.meters import Meters
from streamline.core.options import given
from streamline.core.tasks import Session, Tasks
from streamline.errors import PlanError, PlanTypeError, printable
from streamline.observe.stats import collect
from streamline.observe.tuner import HostTuner, Measurement, PassLooks, Tuner, TuningStep
from streamline.plan.plan import Plan, sources_of, stages_of

logger = logging.getLogger("streamline.tuning")

LOOK_S = 0.1

SHARE = 0.01
"""Of a core's time that looks may take: those at hundreds of shards are farther apart."""

MOST_THREADS = 64
"""Of one stage, in all shards of a process: as many as its pool has."""

MOST_STEPS = 256
"""That are kept."""

VERSION = 1

NOT_TUNED = "this stream isn't tuned: open(tune=True) tunes it, and then .tuning says how"


class StreamTuning:
    """What is tuned of a stream, what was done, and why: `stream.tuning`, also after the end.

    A loader has one for all of its passes: each goes on with what the one before has found.
    """

    def __init__(self, pinned: Mapping[str, tuple[str, int]] | None = None, path: str = "") -> None:
        self._pinned = pinned
        self._path = path
        self._knobs: dict[str, Knob] = {}
        self._values: dict[str, int] = {stage: value for stage, (_, value) in (pinned or {}).items()}
        self._turns: deque[tuple[float, TuningStep]] = deque(maxlen=MOST_STEPS)
        self._resting = "it has just begun" if pinned is None else f"{path} says so"
        self._label = ""  # of its hosts
        self._hosts: HostTuner | None = None
        self._seen = PassLooks()

    @property
    def values(self) -> dict[str, int]:
        """The knobs by their stage's name, and "hosts"; a step that is still being judged doesn't count."""
        return {stage: self._values.get(stage, knob.written) for stage, knob in self._knobs.items()}

    @property
    def steps(self) -> tuple[TuningStep, ...]:
        """What was turned and why, the last ones."""
        return tuple(step for _, step in self.turns)

    @property
    def turns(self) -> tuple[tuple[float, TuningStep], ...]:
        """The same, each with when that was, in seconds since 1970."""
        return tuple(self._turns)

    @property
    def resting(self) -> str:
        """Why nothing is turned at the moment; "": a step is being judged."""
        hosts = "" if self._hosts is None else self._hosts.resting
        return "; ".join(filter(None, [self._resting, f"hosts: {hosts}" * bool(hosts)]))

    def __str__(self) -> str:
        lines = [
            f"{self._label if self._knobs[stage].kind == 'hosts' else stage}: {self._knobs[stage].kind} {value}"
            + (f" (written: {self._knobs[stage].written})" if value != self._knobs[stage].written else "")
            for stage, value in self.values.items()
        ]
        more = [f"now: {self.resting}"] if lines and self.resting else []
        return "\n".join(map(printable, [*(lines or [NO_KNOB]), *more]))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the values to a file, atomically, which `open(tune=path)` goes by: as JSON, for people to read.

        Raises:
          OSError: it can't be written.
        """
        knobs = {
            stage: {"kind": self._knobs[stage].kind, "value": value, "written": self._knobs[stage].written}
            for stage, value in self.values.items()
        }
        text = json.dumps({"streamline tuning": VERSION, "knobs": knobs}, indent=2)
        replace_file(Path(path), text.encode() + b"\n")

    # A run ------------------------------------------------------------------------------------------------------------

    def check(self, plan: Plan, backend: Backend) -> None:
        """Take note of the knobs of a plan.

        Raises:
          PlanError: the file is of another pipeline.
        """
        knobs = list(knobs_of(plan, backend, 1))
        self._knobs = self._knobs or {knob.stage: knob for knob in knobs}
        if self._pinned is None:
            return
        found = {stage: kind for stage, (kind, _) in self._pinned.items() if (stage, kind) != (HOSTS, "hosts")}
        wanted = {knob.stage: knob.kind for knob in knobs if knob.kind != "hosts"}
        if found != wanted:
            raise PlanError(
                f".open(tune={self._path!r}): the file is of another pipeline. Expected a value for {_named(wanted)}, "
                f"got {_named(found)}: tune this one with tune=True, and save that"
            )

    def begin(self, plan: Plan, backend: Backend, workers: int, tasks: Tasks) -> None:
        """Let a run begin with the values as they stand, and tune it, if they aren't pinned. Before it is opened."""
        knobs = {knob.stage: knob for knob in knobs_of(plan, backend, workers)}
        hosts = next((knob for knob in knobs.values() if knob.kind == "hosts"), None)
        stages = {stage: knob for stage, knob in knobs.items() if knob is not hosts}
        values = {stage: min(value, stages[stage].most) for stage, value in self._values.items() if stage in stages}
        widths = tasks.session.widths = Widths(values)
        seen, self._seen = self._seen, PassLooks()
        if hosts is not None:
            tasks.session.hosts, values[HOSTS] = self._next_hosts(hosts, backend, seen)
        self._knobs, self._values = knobs, values
        self._resting = self._resting if stages or self._pinned is not None else ""
        if self._pinned is not None:
            return
        if knobs:
            tasks.start(partial(self._tune, tasks, widths, list(stages.values()), self._seen), "tuning", lambda: None)
        else:
            self._resting = NO_KNOB
            logger.info("nothing is tuned: %s", NO_KNOB)

    def _next_hosts(self, knob: Knob, backend: Backend, seen: PassLooks) -> tuple[int, int]:
        """Return how many hosts a pass gets, after what was seen of the one before, and how many are settled."""
        hosting: Any = getattr(backend, "hosting", backend)
        label = str(hosting.short)
        if self._pinned is not None:
            self._label = label
            pinned = self._values.get(HOSTS, knob.written)
            return pinned, pinned
        if self._hosts is None or self._label != label:
            self._hosts, self._label = HostTuner(knob, label), label
        try:
            step = self._hosts.next_pass(seen, knob.most)
        except Exception:
            logger.exception("hosts stay as many as they are: tuning them has failed")
            step = None
        if step is not None:
            self._note(step)
        return self._hosts.value, self._hosts.settled

    async def _tune(self, tasks: Tasks, widths: Widths, knobs: Sequence[Knob], seen: PassLooks) -> None:
        """Look, and turn, until the run ends. A failure of this ends the tuning, not the stream."""
        session, tuner = tasks.session, None
        pause_s = LOOK_S
        while True:
            await anyio.sleep(pause_s)
            if session.meters.first is None:
                continue  # it warms up, or its consumer comes later
            if tuner is None:
                values = {knob.stage: self._values[knob.stage] for knob in knobs if knob.stage in self._values}
                widths.set(values)  # another pass has found more meanwhile
                tuner = Tuner(knobs, values, memory_bytes=session.budget.most)
            if session.gate.holding:
                tuner.forget()
                seen.pause()
                continue
            step, took_s = await tasks.threads.run(partial(_look, tuner, seen, session))
            if isinstance(step, Exception):
                logger.error("tuning has ended: it has failed", exc_info=step)
                return
            self._values.update(tuner.settled)  # in place: the next pass may begin meanwhile, in another thread
            self._resting = tuner.resting if knobs else ""
            if step is not None:
                self._turn(step, widths, session.meters)
                seen.turned()
            pause_s = max(LOOK_S, took_s / SHARE)

    def _turn(self, step: TuningStep, widths: Widths, meters: Meters) -> None:
        widths.set({step.name: step.after})
        meters.began()  # the verdict is of how it runs now
        self._note(step)

    def _note(self, step: TuningStep) -> None:
        self._turns.append((time.time(), step))
        logger.info("%s", step)


Tune: TypeAlias = bool | str | PathLike[str] | StreamTuning
"""What `open(tune=)` takes."""

NO_KNOB = "no stage has a knob: .map(concurrency=) of more than 1, .map(executor='thread'), .prefetch, remote files"


def _look(tuner: Tuner, seen: PassLooks, session: Session) -> tuple[TuningStep | Exception | None, float]:
    """Return what a tuner says to the present figures, and how many seconds of a core that took. In any thread."""
    began = thread_time()
    try:
        figures = collect(session.meters)
        pids = [host.pid for host in figures.hosts if host.kind == "process" and host.alive and not host.node]
        hosts_s = sum(cpu_s(pid) or 0.0 for pid in pids if pid is not None)
        used_s = time.process_time() + hosts_s
        look = Measurement(figures=figures, cpu_s=used_s, hosts_cpu_s=hosts_s, free_bytes=free_bytes)
        seen.look(look)
        step = tuner.look(look)
    except Exception as failure:
        return failure, 0.0
    return step, thread_time() - began


def knobs_of(plan: Plan, backend: Backend, workers: int) -> Iterator[Knob]:
    """Yield the knobs of a plan with so many workers; those in hosts that other processes share have none.

    The last one is that of the hosts, unless a stage whose knob it would be has its name.
    """
    shared = getattr(getattr(backend, "hosting", backend), "shared", None) is not None
    merged = {stage.name for stage in plan.after}
    sources = [] if shared else [source.knob for source in sources_of(plan)]
    stages = [stage.knob for stage in (plan.after if shared else stages_of(plan))]
    for knob in (*sources, *stages):
        if knob is not None and knob.kind == "reads":
            yield knob  # all shards of a process have one pool of requests
        elif knob is not None:
            shards = 1 if knob.stage in merged else max(1, workers)
            most = min(knob.most, MOST_THREADS) if knob.kind == "threads" else knob.most
            yield replace(knob, most=max(knob.written, most // shards))
    hosts: Knob | None = getattr(backend, "knob", _none)(workers)
    if hosts is not None and all(knob is None or knob.stage != hosts.stage for knob in (*sources, *stages)):
        yield hosts


def _none(_: int) -> Knob | None:
    """Of a backend without hosts."""
    return None


def _named(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{stage!r} ({kind})" for stage, kind in kinds.items()) or "no stage"


def tuning_of(tune: object) -> StreamTuning | None:
    """Return what tunes a stream, as `open(tune=)` says; None: nothing.

    Raises:
      PlanTypeError: it is neither a bool, a path, nor another stream's tuning.
      PlanError: the file isn't there, or nothing that `save` has written.
    """
    if tune is False:
        return None
    if tune is True:
        return StreamTuning()
    if isinstance(tune, StreamTuning):
        return tune
    if not isinstance(tune, str | PathLike):
        raise PlanTypeError(
            '.open(tune=) is True, False, the path of what stream.tuning.save("tune.json") has written, or another '
            f"stream's .tuning, got {given(tune)}"
        )
    path = str(fspath(tune))
    return StreamTuning(_pinned(path), path)


def _pinned(path: str) -> dict[str, tuple[str, int]]:
    """Return the kind and value of each knob in a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PlanError(
            f'.open(tune={path!r}): {why}; expected what stream.tuning.save("tune.json") has written'
        ) from error

    def read(found: Any) -> dict[str, tuple[str, int]]:
        version, knobs = found["streamline tuning"], found["knobs"]
        if version != VERSION:
            raise PlanError(f".open(tune={path!r}): expected version {VERSION} of such a file, got {version!r}")
        return {stage: (str(knob["kind"]), _value(knob["value"])) for stage, knob in knobs.items()}

    expected = f'.open(tune={path!r}): expected what stream.tuning.save("tune.json") has written'
    return decoded(text, read, lambda why: PlanError(f"{expected}, got {text[:60]!r} ({why})"))


def _value(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"a value is an integer from 1 on, got {value!r}")
    return value
