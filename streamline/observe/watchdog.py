"""The watchdog: logs what a consumer waits for that has waited too long, and which function holds its event loop.

Its clock runs only while the consumer waits: an hour of training is no stall, nor is a paused stream. It logs at the
limit, and again at twice, four times, … of it. It costs nothing per item.

In a plain loop the consumer's own thread checks the clock, so it can also see what holds the event loop's thread. In
an async loop a task sleeps until the limit; while the loop is held it can't run, and reports that afterwards.
"""

from __future__ import annotations

import logging
import math
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty
from time import perf_counter
from types import FrameType

import anyio

from streamline.core.gate import Phase
from streamline.core.meters import HOLD_S, HostMeter, Meters, StageMeter
from streamline.core.tasks import MergeWait, RankWait, Session, WaitedWorker
from streamline.errors import printable
from streamline.observe.verdict import way_out

hints_logger = logging.getLogger("streamline.hints")  # as the docs call it


class HoldHint:
    """Warns of a stage whose function holds the consumer's own event loop; of each stage once a stream."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, meter: StageMeter, held_s: float) -> None:
        if meter.figures.name in self._warned:
            return
        self._warned.add(meter.figures.name)
        hints_logger.warning(
            "%s held the event loop for %.2f s (more than %g s), and with it everything else that runs there: try %s",
            meter,
            held_s,
            HOLD_S,
            way_out(meter.figures.kind, 2),
        )


logger = logging.getLogger("streamline.watchdog")  # as the docs call it

STALL_S = 30.0
"""How long a consumer waits for one item before it is logged: a slow checkpoint's length, and less than a
collective's timeout."""

LOOK_S = 0.2
"""How long the event loop may take to look at itself before it is taken for held."""

MOST_SHARDS = 3
"""Shards that one message names."""

OWN = ("streamline", "asyncio", "anyio", "uvloop", "selectors", "threading", "concurrent", "contextvars")
"""Modules whose frames are no user's."""

STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Watched:
    """What is watched: a run, and what of its plan a message needs."""

    session: Session
    source: str  # name of the plan's source
    after_merge: Collection[str] = ()  # names of the stages downstream of the merge
    shared: bool = False  # whether one reader of the source feeds all workers

    @property
    def paused(self) -> bool:
        """Whether items must not move: a wait is no stall then."""
        return self.session.gate.phase not in (Phase.RUNNING, Phase.CLOSED)

    def report(self, now: float) -> str:
        """Say what the consumer waits for, as far as it can be seen. In the event loop's thread; never raises."""
        try:
            return self._report(now)
        except Exception as error:  # a report that fails is no reason to end a run
            return f"what for is unknown ({type(error).__name__}: {error})"

    def _report(self, now: float) -> str:
        busy = [meter for meter in list(self.session.meters.stages.values()) if meter.since is not None]
        last = [meter for meter in busy if meter.figures.name in self.after_merge]
        if last:
            return f"after the merge, {_at_work(_oldest(last), now)}"
        if missing := self.session.services.get(RankWait).missing:
            return f"waiting for {missing}"
        awaited = self.session.services.get(MergeWait).workers()
        if not awaited:
            return "nothing that is counted is at work, and the merge waits for no worker"
        names = ", ".join(str(worker.shard) for worker in awaited[:MOST_SHARDS])
        more = f" and {len(awaited) - MOST_SHARDS:,} more" if len(awaited) > MOST_SHARDS else ""
        whose = f"shard {names} (the merge's turn)" if len(awaited) == 1 else f"any of the shards {names}{more}"
        details = [self._worker(worker, busy, now) for worker in awaited[:MOST_SHARDS]]
        if len(awaited) > 1:
            details = [f"shard {worker.shard}: {text}" for worker, text in zip(awaited, details, strict=False)]
        return f"waiting for {whose}: {'; '.join(details)}"

    def _worker(self, worker: WaitedWorker, busy: Sequence[StageMeter], now: float) -> str:
        reader = [meter for meter in busy if self.shared and meter.figures.name == self.source]
        mine = [
            meter
            for meter in busy
            if meter.figures.shard == worker.shard
            and meter.figures.name not in self.after_merge
            and meter not in reader
        ] or reader
        where = worker.state.where()
        at = f", after {where}" if where else ""
        if not mine:
            host = self._host(worker.shard)
            if host is not None and not host.figures.alive:
                return f"its {host.figures.kind} is not there yet{at}"
            return f"nothing in it is at work{_in_host(host)}{at}"
        meter = _oldest(mine)
        if meter.figures.name == self.source and meter.since is not None:
            return f"{meter} has brought nothing for {_seconds(now - meter.since)}{_in_host(meter.host)}{at}"
        return f"{_at_work(meter, now)}{_in_host(meter.host)}{at}"

    def _host(self, shard: int) -> HostMeter | None:
        """Return the host of a shard's worker; None: it runs in the stream's own event loop."""
        return next((host for host in list(self.session.meters.hosts) if shard in host.shards), None)

    def stuck(self) -> list[HostMeter]:
        """Return the hosts in which a function holds up what the consumer waits for. In the event loop's thread."""
        shards = {worker.shard for worker in self.session.services.get(MergeWait).workers()}
        stages = list(self.session.meters.stages.values())
        held = {meter.host for meter in stages if meter.figures.shard in shards and meter.begun is not None}
        return [host for host in held if host is not None]

    def warn(self, waited: float, why: str, stacks: str = "") -> None:
        logger.warning("the consumer has waited %s: %s%s", _seconds(waited), printable(why), stacks)


def working(meters: Meters, now: float) -> dict[int, str]:
    """Say what each host is at, by its number: its oldest call. From any thread."""
    found: dict[int, tuple[float, StageMeter]] = {}
    for meter in list(meters.stages.values()):
        since = meter.since
        if meter.host is not None and since is not None:
            number = meter.host.figures.number
            found[number] = min(found.get(number, (since, meter)), (since, meter), key=lambda one: one[0])
    return {
        number: f"{meter} of shard {meter.figures.shard} for {_seconds(max(0.0, now - since))}"
        for number, (since, meter) in found.items()
    }


class Patience:
    """The watch of a plain loop: the consumer's thread takes from a queue, and looks at the clock."""

    def __init__(self, watched: Watched, stall_s: float) -> None:
        self._watched = watched
        self._stall_s = stall_s

    def wait(
        self,
        take: Callable[[float], object],
        wake: Callable[[Callable[[], None]], object] | None,
        loop_thread: int | None,
        began: float,
    ) -> None:
        """Wait until `take` has taken what comes next, which it hasn't since `began`; say so when it takes long.

        Args:
          take: waits so many seconds at most; queue.Empty: nothing came.
          wake: runs a function in the event loop, which knows best what it waits for; None: there is none yet.
          loop_thread: the loop's, to be looked at from outside when it doesn't answer.
        """
        limit = self._stall_s
        while True:
            try:
                take(max(0.0, began + limit - perf_counter()))
                return
            except Empty:
                if self._watched.paused:
                    began, limit = perf_counter(), self._stall_s
                    continue
            answer: list[tuple[str, list[HostMeter]]] = []
            if wake is not None:
                with suppress(RuntimeError):  # the loop has ended: something is on its way
                    wake(partial(self._answer, answer))
            try:
                take(LOOK_S)  # the loop answers; or it comes after all
                return
            except Empty:
                waited = perf_counter() - began
                why, hosts = answer[0] if answer else (held(loop_thread), [])
                self._watched.warn(waited, why, stacks(hosts))
            while limit <= waited:
                limit *= 2

    def _answer(self, answer: list[tuple[str, list[HostMeter]]]) -> None:
        answer.append((self._watched.report(perf_counter()), self._watched.stuck()))


async def watch(watched: Watched, stall_s: float) -> None:
    """Watch an async consumer until cancelled."""
    meters, consumer = watched.session.meters, watched.session.meters.consumer
    current: float | None = None
    limit, free_since = stall_s, -math.inf
    while True:
        now = perf_counter()
        since, delay = consumer.waiting_since, stall_s
        if watched.paused:
            free_since, limit = now, stall_s
        elif since is not None:
            if since != current:
                current, limit = since, stall_s
            waited = now - max(since, free_since)
            if waited >= limit:
                why, hosts = watched.report(now), watched.stuck()
                at = await watched.session.threads.run(partial(stacks, hosts)) if hosts else ""
                watched.warn(waited, why, at)
            while limit <= waited:
                limit *= 2
            delay = min(stall_s, limit - waited)  # another wait may begin, whose limit is nearer
        before = consumer.wait_s_until(now)
        held_s = {meter: meter.figures.held_s for meter in list(meters.stages.values()) if meter.host is None}
        await anyio.sleep(delay)
        woken = perf_counter()
        late = woken - now - delay
        idle = woken - now - (consumer.wait_s_until(woken) - before)  # when the consumer had what it wanted
        if late >= stall_s and idle < late / 2 and not watched.paused:
            watched.warn(late, f"the event loop was held{_by(held_s)}; in it nothing else runs, not even this watchdog")
            if since is not None and consumer.waiting_since == since:
                limit = max(limit, 2 * stall_s)


def stacks(hosts: Sequence[HostMeter]) -> str:
    """Return what hosts are at, as lines to append. Not in the event loop's thread: one may take its time."""
    try:
        return "".join(f"\nWhat runs in {host}:\n{host.stacks()}" for host in hosts)
    except Exception as error:  # it has died just now
        return f"\nWhat runs there is unknown ({type(error).__name__}: {error})"


def held(loop_thread: int | None) -> str:
    """Say what holds the event loop of another thread: the user's innermost frame."""
    frame = sys._current_frames().get(loop_thread) if loop_thread is not None else None
    found = user_frame(frame)
    if found is None:
        return "the event loop doesn't answer"
    where = f"{found.f_code.co_qualname} ({found.f_code.co_filename}, line {found.f_lineno})"
    return f"the event loop is held by {where}: sync code that waits belongs into .map(executor='thread')"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code; of a library's, if there is none; None: of neither."""
    library: FrameType | None = None
    while frame is not None:
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if name.partition(".")[0] not in OWN and not file.startswith("<frozen"):
            installed = "site-packages" in file or "dist-packages" in file
            if not installed and not file.startswith(STDLIB):
                return frame
            library = library or frame
        frame = frame.f_back
    return library


def _by(before: dict[StageMeter, float]) -> str:
    grown = {meter: meter.figures.held_s - held_s for meter, held_s in before.items()}
    most = max(grown, key=lambda meter: grown[meter], default=None)
    if most is None or grown[most] <= 0:
        return ""
    return f", by {most} as it seems: sync code that waits belongs into .map(executor='thread')"


def _in_host(host: HostMeter | None) -> str:
    return "" if host is None else f" in {host}"


def _oldest(meters: Sequence[StageMeter]) -> StageMeter:
    return min(meters, key=lambda meter: math.inf if meter.since is None else meter.since)


def _at_work(meter: StageMeter, now: float) -> str:
    took = now - meter.since if meter.since is not None else 0.0
    call = "one call" if meter.figures.concurrency == 1 else f"up to {meter.figures.concurrency:,} calls"
    return f"{meter} has been in {call} for {_seconds(took)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
