"""Finding the call that ends a process: a worker whose host has died says, before each call of user code, which it is.

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
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from streamline.border.link import Link
from streamline.border.messages import Calling, Culprit
from streamline.core.options import is_async
from streamline.core.replay import Adapter
from streamline.core.tasks import Tasks
from streamline.core.threads import waker
from streamline.errors import WorkerDied
from streamline.plan.plan import Plan
from streamline.transforms.base import Stage

__all__ = ["Calls", "careful", "one_ahead"]


class Calls:
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
        self._say(Calling(self._worker, stage, number, over=False), wait=True)

    def ends(self, stage: str, number: int) -> None:
        """The call has returned, or raised; or has given something, and waits to be asked for more."""
        self._say(Calling(self._worker, stage, number, over=True), wait=False)

    def _say(self, message: Calling, *, wait: bool) -> None:
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


class _Told(Adapter):
    """A user's function whose calls are told."""

    def __init__(self, fn: Any, stage: str, calls: Calls) -> None:
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


def careful(plan: Plan, calls: Calls) -> Plan:
    """Return a plan whose workers tell of each call of a user's function, one at a time."""
    return replace(plan, worker=tuple(_told(stage, calls) for stage in plan.worker))


def _told(stage: Stage[Any, Any], calls: Calls) -> Stage[Any, Any]:
    from streamline.transforms.custom import Through  # not at the top: a host starts sooner without

    changes: dict[str, Any] = {
        field: _Told(fn, stage.name, calls)
        for field in ("fn", "collate")
        if callable(fn := getattr(stage, field, None))
        and not isinstance(stage, Through)  # one call makes all its items
    }
    if getattr(stage, "concurrency", 1) > 1:
        changes["concurrency"] = 1
    return replace(stage, **changes) if changes else stage
