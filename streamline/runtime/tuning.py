"""`open(tune=)`: changes the knobs of a running stream's stages, by its figures.

`streamline.observe.tuner` decides. A task of the event loop passes it the figures several times a second, in a thread
of the pool, so that reading them blocks nothing. The number of hosts changes when the next stream begins, of a loader
or with the same `StreamTuning`, by the figures of the last one.

No state has the values: a resume begins with those of the plan, of a file, or of a `StreamTuning`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from time import thread_time
from typing import Annotated, Any, TypeAlias

import anyio
import msgspec

from streamline.backends.base import Backend
from streamline.core.atomic_file import replace_file
from streamline.core.cpus import cpu_s, free_bytes
from streamline.core.knobs import HOSTS, Knob, KnobValues
from streamline.core.options import type_and_repr
from streamline.core.tasks import Session, Tasks
from streamline.errors import PlanError, PlanTypeError, printable
from streamline.observe.stats import collect
from streamline.observe.tuner import HostTuner, Measurement, PassLooks, Tuner, TuningStep
from streamline.plan.plan import Plan, sources_of, stages_of

logger = logging.getLogger("streamline.tuning")
LOOK_S = 0.1

MOST_TIME_SHARE = 0.01
"""Of a core's time that reading figures may take: with hundreds of shards, it is done more rarely."""

MOST_THREADS = 64
"""Of one stage, in all shards of a process: as many as its pool has."""

MOST_STEPS = 256
VERSION = 1
NOT_TUNED = "this stream isn't tuned: open(tune=True) tunes it, and then .tuning says how"
NO_KNOB = "no stage has a knob: .map(concurrency=) of more than 1, .map(executor='thread'), .prefetch, remote files"
EXPECTED_FILE = 'what stream.tuning.save("tune.json") has written'


class SavedKnob(msgspec.Struct):
    kind: str
    value: Annotated[int, msgspec.Meta(ge=1)]
    written: int = 0


class _TuneFile(msgspec.Struct):
    version: int = msgspec.field(name="streamline tuning")
    knobs: dict[str, SavedKnob]


class StreamTuning:
    """What the tuner has changed, and why: `stream.tuning`, also after the end.

    A loader has one for all of its passes: each begins with the values of the one before.
    """

    def __init__(self, pinned: Mapping[str, SavedKnob] | None = None, path: str = "") -> None:
        self._pinned = pinned
        self._path = path
        self._knobs: dict[str, Knob] = {}
        self._values: dict[str, int] = {stage: knob.value for stage, knob in (pinned or {}).items()}
        self._steps = deque[TuningStep](maxlen=MOST_STEPS)
        self._resting = "it has just begun" if pinned is None else f"{path} says so"
        self._label = ""  # of its hosts
        self._hosts: HostTuner | None = None
        self._seen = PassLooks()

    @property
    def values(self) -> dict[str, int]:
        """The knobs by their stage's name, and "hosts"; without a step that isn't judged yet."""
        return {stage: self._values.get(stage, knob.written) for stage, knob in self._knobs.items()}

    @property
    def steps(self) -> tuple[TuningStep, ...]:
        """The last changes, and why they were made."""
        return tuple(self._steps)

    @property
    def resting(self) -> str:
        """Why nothing is changed at the moment; "": a step is being judged."""
        hosts = f"hosts: {self._hosts.resting}" if self._hosts is not None and self._hosts.resting else ""
        return "; ".join(filter(None, [self._resting, hosts]))

    def __str__(self) -> str:
        lines = [] if self._knobs else [NO_KNOB]
        for stage, value in self.values.items():
            knob = self._knobs[stage]
            written = "" if value == knob.written else f" (written: {knob.written})"
            lines.append(f"{self._label if knob.kind == 'hosts' else stage}: {knob.kind} {value}{written}")
        if self._knobs and self.resting:
            lines.append(f"now: {self.resting}")
        return "\n".join(map(printable, lines))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the values to a file, atomically, for `open(tune=path)`: JSON that people can read.

        Raises:
          OSError: it can't be written.
        """
        knobs = {
            stage: SavedKnob(self._knobs[stage].kind, value, self._knobs[stage].written)
            for stage, value in self.values.items()
        }
        text = msgspec.json.format(msgspec.json.encode(_TuneFile(VERSION, knobs)), indent=2)
        replace_file(Path(path), text + b"\n")

    # A run ------------------------------------------------------------------------------------------------------------

    def check(self, plan: Plan, backend: Backend) -> None:
        """Read the knobs of a plan. Raises `PlanError`: the file is of another pipeline."""
        knobs = list(knobs_of(plan, backend, 1))
        self._knobs = self._knobs or {knob.stage: knob for knob in knobs}
        if self._pinned is None:
            return
        saved = self._pinned.items()
        found = {stage: knob.kind for stage, knob in saved if (stage, knob.kind) != (HOSTS, "hosts")}
        wanted = {knob.stage: knob.kind for knob in knobs if knob.kind != "hosts"}
        if found != wanted:
            raise PlanError(
                f".open(tune={self._path!r}): the file is of another pipeline. Expected a value for "
                f"{_kinds_text(wanted)}, got {_kinds_text(found)}: tune this one with tune=True, and save that"
            )

    def begin(self, plan: Plan, backend: Backend, workers: int, tasks: Tasks) -> None:
        """Set the values of a run that is about to be opened, and tune it, unless a file gives them."""
        self._knobs = {knob.stage: knob for knob in knobs_of(plan, backend, workers)}
        stages = [knob for knob in self._knobs.values() if knob.kind != "hosts"]
        values = {knob.stage: min(self._values[knob.stage], knob.most) for knob in stages if knob.stage in self._values}
        hosts, settled = None, dict(values)
        seen, self._seen = self._seen, PassLooks()
        if len(stages) < len(self._knobs):
            hosts, settled[HOSTS] = self._next_hosts(self._knobs[HOSTS], backend, seen)
        running = KnobValues(values, hosts)
        tasks.session.services.add(KnobValues, running)
        self._values = settled
        if self._pinned is not None:
            return
        if self._knobs:
            self._resting = self._resting if stages else ""
            tasks.start(partial(self._tune, tasks, running, stages, self._seen), "tuning", lambda: None)
        else:
            self._resting = NO_KNOB
            logger.info("nothing is tuned: %s", NO_KNOB)

    def _next_hosts(self, knob: Knob, backend: Backend, seen: PassLooks) -> tuple[int, int]:
        """Return how many hosts a pass gets, after what was seen of the one before, and how many are settled."""
        hosting: Any = getattr(backend, "hosting", backend)
        label = str(hosting.short)
        if self._pinned is not None:
            self._label = label
            return (self._values.get(HOSTS, knob.written),) * 2
        if self._hosts is None or self._label != label:
            self._hosts, self._label = HostTuner(knob, label), label
        try:
            if (step := self._hosts.next_pass(seen, knob.most)) is not None:
                self._note(step)
        except Exception:
            logger.exception("hosts stay as many as they are: tuning them has failed")
        return self._hosts.value, self._hosts.settled[HOSTS]

    async def _tune(self, tasks: Tasks, running: KnobValues, knobs: Sequence[Knob], seen: PassLooks) -> None:
        """Tune until the run ends. A failure ends the tuning, not the stream."""
        session, tuner, pause_s = tasks.session, None, LOOK_S
        while True:
            await anyio.sleep(pause_s)
            if session.meters.first is None:
                continue  # it warms up
            if tuner is None:
                values = {knob.stage: self._values[knob.stage] for knob in knobs if knob.stage in self._values}
                running.set(values)  # another pass may have changed them
                tuner = Tuner(knobs, values, memory_bytes=session.budget.most)
            if session.gate.holding:
                tuner.forget()
                seen.pause()
                continue
            step, took_s = await tasks.threads.run(partial(_look, tuner, seen, session))
            if isinstance(step, Exception):
                logger.error("tuning has ended: it has failed", exc_info=step)
                return
            self._values.update(tuner.settled)  # in place: the next pass may begin now, in another thread
            self._resting = tuner.resting if knobs else ""
            if step is not None:
                running.set({step.name: step.after})
                session.meters.end_warm_up()  # the verdict is about the new values
                seen.forget()
                self._note(step)
            pause_s = max(LOOK_S, took_s / MOST_TIME_SHARE)

    def _note(self, step: TuningStep) -> None:
        self._steps.append(replace(step, time=time.time()))
        logger.info("%s", step)


Tune: TypeAlias = bool | str | PathLike[str] | StreamTuning
"""What `open(tune=)` takes."""


def _look(tuner: Tuner, seen: PassLooks, session: Session) -> tuple[TuningStep | Exception | None, float]:
    """Return a tuner's answer to the present figures, and the CPU seconds that it took. In any thread."""
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

    The hosts' knob comes last; without one, if a stage with a knob has its name.
    """
    shared = getattr(getattr(backend, "hosting", backend), "shared", None) is not None
    merged = {stage.name for stage in plan.after}
    written = [] if shared else [source.knob for source in sources_of(plan)]
    written += [stage.knob for stage in (plan.after if shared else stages_of(plan))]
    knobs = [knob for knob in written if knob is not None]
    for knob in knobs:
        one_for_all = knob.stage in merged or knob.kind == "reads"  # a process has one pool of requests
        shards = 1 if one_for_all else max(1, workers)
        most = min(knob.most, MOST_THREADS) if knob.kind == "threads" else knob.most
        yield replace(knob, most=max(knob.written, most // shards))
    hosts: Knob | None = getattr(backend, "knob", lambda _: None)(workers)
    if hosts is not None and all(knob.stage != hosts.stage for knob in knobs):
        yield hosts


def _kinds_text(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{stage!r} ({kind})" for stage, kind in kinds.items()) or "no stage"


def tuning_of(tune: object) -> StreamTuning | None:
    """Return what tunes a stream, as `open(tune=)` says; None: nothing. Raises `PlanError`, `PlanTypeError`."""
    if tune is False:
        return None
    if tune is True:
        return StreamTuning()
    if isinstance(tune, StreamTuning):
        return tune
    if not isinstance(tune, str | PathLike):
        raise PlanTypeError(
            '.open(tune=) is True, False, the path of what stream.tuning.save("tune.json") has written, or another '
            f"stream's .tuning, got {type_and_repr(tune)}"
        )
    path = str(fspath(tune))
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f".open(tune={path!r}): {error.strerror or error}; expected {EXPECTED_FILE}") from error
    try:
        saved = msgspec.json.decode(text, type=_TuneFile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PlanError(f".open(tune={path!r}): expected {EXPECTED_FILE}, got {text[:60]!r} ({error})") from error
    if saved.version != VERSION:
        raise PlanError(f".open(tune={path!r}): expected version {VERSION} of such a file, got {saved.version!r}")
    return StreamTuning(saved.knobs, path)
