"""What is done about the deaths of a host: which workers they count against, and which call is at fault. No I/O.

A host runs many workers, and a call of user code may end it. Its workers are opened again in another one, each after
its last item that arrived. A call that ends every host is found so:

1. A death counts against the workers that had reported to be in a call; else against all that had room to send. The
   count of a worker that gives something starts again.
2. A worker that dies within `TRACKED_ITEMS` items of its last death, or for the last time but one, or whose host was
   killed because a worker was stuck, has its calls tracked: it reports each one before it is made, makes one at a time,
   and reads nothing ahead. That may be a hundred times slower, so after enough items it is opened again without.
3. If several workers were in calls, or would be counted and one of them for the last time, none is counted: they take
   turns, so that the next death has one worker.
4. At the last death that is tolerated, the call is at fault. Calls are numbered from where the worker was opened, and
   it is opened at the same state, so `WorkerDied` is raised in place of the call with that number, a failure as any
   other. If no single call is known, the worker fails.

Rejected: a word in shared memory for each call, written always. Writing one before and after each call takes 27 % more
CPU for a tiny item in a closure, 91 % more in an `Adapter`; a word for each list of calls doesn't tell which of them is
at fault, nor does any word of several calls at once; and there is no shared memory between machines.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from streamline.backends.hosts.parts import WorkerPart
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import CallProgress, CrashingCall, OpenWorker
from streamline.core.flow import Site
from streamline.core.knobs import KnobValues
from streamline.core.options import is_async
from streamline.core.replay import Adapter
from streamline.core.state import Tree
from streamline.core.tasks import Tasks
from streamline.errors import WorkerDied
from streamline.plan.plan import Plan
from streamline.transforms.base import Stage


class CallLog:
    """Numbers the calls of user code in one worker, reports them, and raises in place of the one that is known."""

    def __init__(self, link: Link, worker: int, crashing_call: CrashingCall | None) -> None:
        self._link = link
        self._worker = worker
        self._crashing_call = crashing_call
        self._counts: dict[str, int] = {}

    def count(self, stage: str) -> int:
        """Return the number of a stage's next call; raise `WorkerDied` if it has ended processes before."""
        number = self._counts[stage] = self._counts.get(stage, 0) + 1
        known = self._crashing_call
        if known is not None and (known.stage, known.number) == (stage, number):
            raise known.failure
        return number

    def last(self, stage: str) -> int:
        """Return the number of a stage's last call."""
        return self._counts[stage]

    def report(self, stage: str, number: int, *, over: bool) -> None:
        """Report that a call begins, or that it has returned, raised or yielded; returns once that is sent."""
        self._link.send_threadsafe(CallProgress(self._worker, stage, number, over))


class _TrackedFunction(Adapter):
    """A user's function whose calls are reported."""

    def __init__(self, fn: Any, stage: str, calls: CallLog) -> None:
        self.fn = self.__wrapped__ = fn
        self.is_async = is_async(fn)
        self._stage = stage
        self._calls = calls

    def __reduce__(self) -> Any:
        return _unwrapped, (self.fn,)  # an exception may carry its call to another process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.fn, self._calls.count(self._stage), *args, **kwargs)

    def again(self, given: Any) -> Any:
        """Call it under the same number: how often a call fails may change from one process to the next."""
        fn = self.fn.again if isinstance(self.fn, Adapter) else self.fn
        return self._call(fn, self._calls.last(self._stage), given)

    def _call(self, fn: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        if self.is_async:
            return self._awaited(fn, number, args, kwargs)
        with self._reported(number):
            made = fn(*args, **kwargs)
        return self._read(made, number) if isinstance(made, Iterator) else made

    @contextmanager
    def _reported(self, number: int) -> Iterator[None]:
        self._calls.report(self._stage, number, over=False)
        try:
            yield
        finally:
            self._calls.report(self._stage, number, over=True)

    def _read(self, made: Iterator[Any], number: int) -> Iterator[Any]:
        """Iterate a flat_map function's result: each `next` is in user code, too."""
        try:
            while True:
                with self._reported(number):
                    item = next(made, END)
                if item is END:
                    return
                yield item
        finally:
            if isinstance(made, Generator):
                made.close()

    async def _awaited(self, fn: Callable[..., Any], number: int, args: Any, kwargs: Any) -> Any:
        with self._reported(number):
            return await fn(*args, **kwargs)

    def around(self, fn: Any) -> Any:
        return self.fn.around(fn) if isinstance(self.fn, Adapter) else fn


END = object()


def _unwrapped(fn: Any) -> Any:
    return fn


def unbuffered(tasks: Tasks) -> Tasks:
    """Return `tasks` for a worker whose channels hold one item each."""
    ours = copy.copy(tasks)
    ours.session = replace(tasks.session, most_ahead=1, services=tasks.session.services.without(KnobValues))
    return ours


def track_calls(plan: Plan, calls: CallLog) -> Plan:
    """Return a plan whose workers report each call of a user's function, one at a time."""
    return replace(plan, worker=tuple(_tracked(stage, calls) for stage in plan.worker))


def _tracked(stage: Stage[Any, Any], calls: CallLog) -> Stage[Any, Any]:
    changes: dict[str, Any] = {
        field: _TrackedFunction(fn, stage.name, calls)
        for field in stage.item_functions
        if callable(fn := getattr(stage, field, None))
    }
    if getattr(stage, "concurrency", 1) > 1:
        changes["concurrency"] = 1
    return replace(stage, **changes) if changes else stage


TRACKED_ITEMS = 512
"""Items from a worker after which the next death is unrelated to the last one. More are seldom in flight."""


@dataclass(frozen=True, kw_only=True)
class CrashTracking:
    """When a host, or a worker in it, is given up.

    Attributes:
      max_restarts: deaths in a row, without an item in between.
      worker_timeout: seconds that the consumer waits for a worker before its stack is logged; None: no limit.
      replace_stuck: whether the host is then replaced, too.
    """

    max_restarts: int = 3
    worker_timeout: float | None = None
    replace_stuck: bool = False


class RestartPolicy(WorkerPart):
    """The deaths of one worker's hosts.

    Attributes:
      count: deaths since it last gave something.
      track_calls: whether it reports its calls.
      calls: of user code that it is in, as reported: stage and number.
      crashing_call: the call that its hosts have died of; None: none is known.
    """

    handles = (CallProgress,)

    def __init__(self) -> None:
        self.count = 0
        self.track_calls = False
        self.calls: set[tuple[str, int]] = set()
        self.crashing_call: CrashingCall | None = None
        self._delivered = TRACKED_ITEMS  # items since the last death

    def complete(self, message: OpenWorker) -> OpenWorker:
        return message._replace(track_calls=self.track_calls, crashing_call=self.crashing_call)

    def on_open(self, link: Link, state: Tree | None) -> None:
        self.calls.clear()

    def on_items(self, items: int, state: Callable[[], Tree | None]) -> None:
        self.count, self.crashing_call = 0, None
        self._delivered += items

    def handle(self, message: CallProgress) -> None:
        """Note the start or end of a call."""
        call = message.stage, message.number
        if message.over:
            self.calls.discard(call)
        else:
            self.calls.add(call)

    @property
    def stable(self) -> bool:
        """Whether it has given enough since the last death."""
        return self._delivered >= TRACKED_ITEMS

    def count_death(self, most: int, *, track_calls: bool) -> bool:
        """Count a death, and perhaps track calls from now on; return whether it was the last of `most`."""
        self.count += 1
        self.track_calls = self.track_calls or track_calls or not self.stable or self.count == most - 1
        self._delivered = 0
        return self.count >= most


class Restartable(Protocol):
    """The part of a worker that is used here."""

    @property
    def restart_policy(self) -> RestartPolicy: ...

    @property
    def site(self) -> Site: ...

    @property
    def finished(self) -> bool: ...

    @property
    def has_room(self) -> bool: ...

    @property
    def held(self) -> int: ...

    @property
    def position(self) -> str: ...


W = TypeVar("W", bound=Restartable)


class CrashReport(Generic[W]):
    """Finds the workers that a death of their host counts against."""

    def __init__(self, crash_tracking: CrashTracking) -> None:
        self._most = crash_tracking.max_restarts
        self._turns: deque[W] = deque()

    def died(self, workers: Collection[W], *, stuck: bool) -> list[W]:
        """Count a death of these workers' host, killed for a stuck one if `stuck`; return those out of restarts."""
        in_calls = [worker for worker in workers if worker.restart_policy.calls]
        waiting = list(self._turns)[1:]
        counted = in_calls or [
            worker for worker in workers if not worker.finished and worker.has_room and worker not in waiting
        ]
        self._turns.clear()
        last = any(worker.restart_policy.count == self._most - 1 for worker in counted)
        if len(counted) > 1 and (in_calls or last):
            self._turns.extend(sorted(counted, key=lambda worker: worker.held))  # the merge waits for those with 0
            return []
        return [worker for worker in counted if worker.restart_policy.count_death(self._most, track_calls=stuck)]

    def waits(self, worker: W) -> bool:
        """Return whether a worker waits for its turn, or has it."""
        return worker in self._turns

    @property
    def turn(self) -> W | None:
        """The worker whose turn it is; None: no turns are taken."""
        while self._turns and self._turns[0].finished:
            self._turns.popleft()
        return self._turns[0] if self._turns else None

    def turn_over(self, worker: W) -> bool:
        """End a worker's turn after it gave something or ended; return whether it was its turn."""
        if self._turns and self._turns[0] is worker:
            self._turns.popleft()
            return True
        return False


def crash_verdict(worker: Restartable, host: int, name: str, ended: str) -> CrashingCall | WorkerDied:
    """Return the call that a worker has died of for the last time, or the error to fail it with."""
    restart_policy, site, at = worker.restart_policy, worker.site, worker.position
    message = (
        f"the worker of shard {site.shard} of {site.num_shards} has lost its host {restart_policy.count} times without "
        f"giving anything in between; the last, {name}, ended with {ended}"
    )
    died = partial(WorkerDied, shard=site.shard, process=host, exit=ended)
    if restart_policy.crashing_call is None and len(restart_policy.calls) == 1:
        ((stage, number),) = restart_policy.calls
        return CrashingCall(stage, number, died(f"{message}: each time it had called {stage}, on the same item"))
    return died(message + (f". It stands after {at}" if at else ""), position=at)
