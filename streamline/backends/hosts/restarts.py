"""What is done about the deaths of a host: whom they count against, and which call is at fault. Without I/O.

A host runs many workers, and what one of them calls may end it. Its workers then go on in another one, each behind the
last item of it that has arrived. That would go on for ever where the same call ends each host, so:

1. A death counts against those that had said that they were in a call; else against all that had room to give
   something. Whoever gives something has its count at 0 again.
2. A worker that dies before it has given `CAREFUL_ITEMS` since its last death, or for the last time but one, or whose
   host was killed because somebody was stuck, becomes *careful*: it says before each call of user code which one it is
   (`streamline.backends.hosts.restarts`), until it has given so many. So the next death is behind a call that is known.
3. Where several were in calls, nobody is counted: they take *turns*. One of them is opened at a time, and the next one
   when it has given something, or ended. So the next death is behind one call.
4. With the last death that is borne, the call is the *culprit*: the worker is opened once more, and raises `WorkerDied`
   in the place of that call, a failure as any other. Where no single call is known, the worker itself fails.

Finding the call that ends a process: a worker whose host has died says, before each call of user code, which it is.

What was said before a death has crossed the border, so the call that was never said to have returned is the one at
fault. Calls are counted from where the worker was opened, and it is opened at the same state again: so the third time
the host is told which one it is, and raises an error there instead of calling. From there on it is a failure as any
other: it reaches the consumer behind everything before it, or is left out.

So that a call says all, one is made at a time, and nothing is read ahead: each item is on its way before the next one
is asked for, also out of sources and custom stages, whose steps are nobody's calls. That may be a hundred times slower
than without; a worker that has given enough is opened anew, and goes on as before.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import CallProgress, Culprit
from streamline.core.flow import Site
from streamline.core.options import is_async
from streamline.core.replay import Adapter
from streamline.core.tasks import Tasks
from streamline.core.threads import waker
from streamline.errors import WorkerDied
from streamline.plan.plan import Plan
from streamline.transforms.base import Stage

__all__ = ["CallLog", "CrashReport", "CrashTracking", "RestartPolicy", "at_fault", "careful", "one_ahead"]


class CallLog:
    """The calls of user code in one worker, from where it was opened. Made in the event loop's thread.

    Args:
      culprit: the call that is not to be made, and what is raised in its place; None: none is known.
    """

    def __init__(self, link: Link, worker: int, culprit: Culprit | None) -> None:
        self._home = threading.get_ident()
        self._wake = waker()
        self._link = link
        self._worker = worker
        self._culprit = culprit
        self._counts: dict[str, int] = {}

    def begins(self, stage: str) -> int:
        """Take note of a call of a stage's function, and return its number.

        Raises:
          WorkerDied: it has ended processes before.
        """
        number = self._counts[stage] = self._counts.get(stage, 0) + 1
        culprit = self._culprit
        if culprit is not None and (culprit.stage, culprit.number) == (stage, number):
            raise WorkerDied(culprit.message, shard=culprit.shard, process=culprit.process, exit=culprit.exit)
        self.goes_on(stage, number)
        return number

    def goes_on(self, stage: str, number: int) -> None:
        """The call is in user code, from now on; returns when that has been said."""
        self._say(CallProgress(self._worker, stage, number, over=False), wait=True)

    def ends(self, stage: str, number: int) -> None:
        """The call has returned, or raised; or has given something, and waits to be asked for more."""
        self._say(CallProgress(self._worker, stage, number, over=True), wait=False)

    def _say(self, message: CallProgress, *, wait: bool) -> None:
        if threading.get_ident() == self._home:
            self._link.send(message)
            return
        said = threading.Event()  # a link belongs to its loop, and the call to a thread

        def say() -> None:
            self._link.send(message)
            said.set()

        try:
            self._wake(say)
        except RuntimeError:
            return  # the loop has ended: nobody is there to be told
        if wait:
            said.wait()


class _TrackedFunction(Adapter):
    """A user's function whose calls are told."""

    def __init__(self, fn: Any, stage: str, calls: CallLog) -> None:
        self.fn = self.__wrapped__ = fn
        self.is_async = is_async(fn)
        self._stage = stage
        self._calls = calls

    def __reduce__(self) -> Any:
        return _the_function, (self.fn,)  # an exception may carry its call to another process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_async:
            return self._awaited(*args, **kwargs)
        number = self._calls.begins(self._stage)
        try:
            made = self.fn(*args, **kwargs)
        except BaseException:
            self._calls.ends(self._stage, number)
            raise
        self._calls.ends(self._stage, number)
        return self._read(made, number) if isinstance(made, Iterator) else made

    def _read(self, made: Iterator[Any], number: int) -> Iterator[Any]:
        """Read what a flat_map's function has made: the call goes on whenever that is asked for more."""
        while True:
            self._calls.goes_on(self._stage, number)
            try:
                item = next(made)
            except StopIteration:
                return
            finally:
                self._calls.ends(self._stage, number)
            try:
                yield item
            except GeneratorExit:
                if isinstance(made, Generator):
                    made.close()
                raise

    async def _awaited(self, *args: Any, **kwargs: Any) -> Any:
        number = self._calls.begins(self._stage)
        try:
            return await self.fn(*args, **kwargs)
        finally:
            self._calls.ends(self._stage, number)

    def fresh(self, given: Any) -> Any:
        return self.fn.fresh(given) if isinstance(self.fn, Adapter) else given

    def item(self, given: Any) -> Any:
        return self.fn.item(given) if isinstance(self.fn, Adapter) else given

    def around(self, fn: Any) -> Any:
        return self.fn.around(fn) if isinstance(self.fn, Adapter) else fn


def _the_function(fn: Any) -> Any:
    return fn


def one_ahead(tasks: Tasks) -> Tasks:
    """Return `tasks` for a worker whose channels hold one item each: the next is made when that has been dealt with."""
    ours = copy.copy(tasks)
    ours.session = copy.copy(tasks.session)
    ours.session.most_ahead = 1
    return ours


def careful(plan: Plan, calls: CallLog) -> Plan:
    """Return a plan whose workers tell of each call of a user's function, one at a time."""
    return replace(plan, worker=tuple(_told(stage, calls) for stage in plan.worker))


def _told(stage: Stage[Any, Any], calls: CallLog) -> Stage[Any, Any]:
    from streamline.transforms.custom import Through  # not at the top: a host starts sooner without

    changes: dict[str, Any] = {
        field: _TrackedFunction(fn, stage.name, calls)
        for field in ("fn", "collate")
        if callable(fn := getattr(stage, field, None))
        and not isinstance(stage, Through)  # one call makes all its items
    }
    if getattr(stage, "concurrency", 1) > 1:
        changes["concurrency"] = 1
    return replace(stage, **changes) if changes else stage


CAREFUL_ITEMS = 512
"""Items that a worker gives in peace before the next death of its host counts as another matter. More are seldom on
their way."""


@dataclass(frozen=True, kw_only=True)
class CrashTracking:
    """What is borne of a host.

    Attributes:
      max_restarts: deaths while a worker gives nothing in between.
      worker_timeout: seconds that the consumer waits for a worker that gives nothing before it is reported with its
        stack; None: for ever.
      replace_stuck: whether the host is then replaced.
    """

    max_restarts: int = 3
    worker_timeout: float | None = None
    replace_stuck: bool = False


class RestartPolicy:
    """One worker's.

    Attributes:
      count: since it last gave something.
      careful: whether it tells of its calls.
      calls: of user code that it is in, as far as it tells: stage and number.
      culprit: the call that its hosts have died of; None: none is known.
    """

    def __init__(self) -> None:
        self.count = 0
        self.careful = False
        self.calls: set[tuple[str, int]] = set()
        self.culprit: Culprit | None = None
        self._given = CAREFUL_ITEMS  # items since the last one

    def gave(self, items: int) -> None:
        """It has given so many items, or news of where it stands."""
        self.count, self.culprit = 0, None
        self._given += items

    @property
    def in_peace(self) -> bool:
        """Whether it has given enough since the last one."""
        return self._given >= CAREFUL_ITEMS

    def calling(self, message: CallProgress) -> None:
        """It is about to call a function, or that is over."""
        call = message.stage, message.number
        if message.over:
            self.calls.discard(call)
        else:
            self.calls.add(call)

    def another(self, most: int, *, careful: bool) -> bool:
        """Count one; return whether it was the last of `most` that are borne.

        Args:
          careful: be so from now on, whatever came before.
        """
        self.count += 1
        self.careful = self.careful or careful or not self.in_peace or self.count == most - 1
        self._given = 0
        return self.count >= most


class Restartable(Protocol):
    """What has to be known of a worker here."""

    @property
    def deaths(self) -> RestartPolicy: ...

    @property
    def site(self) -> Site: ...

    @property
    def over(self) -> bool:
        """Whether nothing more is wanted of it, or comes."""

    @property
    def has_room(self) -> bool:
        """Whether it could give something."""

    @property
    def held(self) -> int:
        """Items of it that nobody has dealt with yet."""

    @property
    def position(self) -> str:
        """Where it stands in the source, for a person."""


W = TypeVar("W", bound=Restartable)


class CrashReport(Generic[W]):
    """Finds who is at fault when one host dies."""

    def __init__(self, care: CrashTracking) -> None:
        self._most = care.max_restarts
        self._turns: deque[W] = deque()

    def died(self, workers: Collection[W], *, stuck: bool) -> list[W]:
        """Count a death of the host that these workers ran in; return those of whom it was the last that is borne.

        Args:
          stuck: it was killed because one of them, not necessarily the one that was waited for, was stuck.
        """
        suspects = [worker for worker in workers if worker.deaths.calls]
        self._turns.clear()
        if len(suspects) > 1:
            self._turns.extend(sorted(suspects, key=lambda worker: worker.held))  # whom the merge waits for: 0
            return []
        counted = suspects or [worker for worker in workers if worker.has_room]
        return [worker for worker in counted if worker.deaths.another(self._most, careful=stuck)]

    def waits(self, worker: W) -> bool:
        """Tell whether a worker is one of those that take turns."""
        return worker in self._turns

    @property
    def turn(self) -> W | None:
        """Whose turn it is; None: nobody takes turns."""
        while self._turns and self._turns[0].over:
            self._turns.popleft()
        return self._turns[0] if self._turns else None

    def turn_over(self, worker: W) -> bool:
        """It has given something, or ended; return whether it was its turn."""
        if self._turns and self._turns[0] is worker:
            self._turns.popleft()
            return True
        return False


def at_fault(worker: Restartable, host: int, name: str, ended: str) -> Culprit | WorkerDied:
    """Return what a worker has died of for the last time: the call, or, where that isn't known, the error to fail with.

    Args:
      host: the last one's number, as `name` its name.
      ended: what it ended with.
    """
    deaths, site, at = worker.deaths, worker.site, worker.position
    message = (
        f"the worker of shard {site.shard} of {site.num_shards} has lost its host {deaths.count} times without "
        f"giving anything in between; the last, {name}, ended with {ended}"
    )
    if deaths.culprit is None and len(deaths.calls) == 1:
        ((stage, number),) = deaths.calls
        message += f": each time it had called {stage}, on the same item"
        return Culprit(stage, number, message, site.shard, host, ended)
    message += f". It stands behind {at}" if at else ""
    return WorkerDied(message, shard=site.shard, process=host, exit=ended, position=at)
