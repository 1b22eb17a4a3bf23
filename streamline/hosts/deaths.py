"""What is done about the deaths of a host: whom they count against, and which call is at fault. Without I/O.

A host runs many workers, and what one of them calls may end it. Its workers then go on in another one, each behind the
last item of it that has arrived. That would go on for ever where the same call ends each host, so:

1. A death counts against those that had said that they were in a call; else against all that had room to give
   something. Whoever gives something has its count at 0 again.
2. A worker that dies before it has given `CAREFUL_ITEMS` since its last death, or for the last time but one, or whose
   host was killed because somebody was stuck, becomes *careful*: it says before each call of user code which one it is
   (`streamline.hosts.careful`), until it has given so many. So the next death is behind a call that is known.
3. Where several were in calls, nobody is counted: they take *turns*. One of them is opened at a time, and the next one
   when it has given something, or ended. So the next death is behind one call.
4. With the last death that is borne, the call is the *culprit*: the worker is opened once more, and raises `WorkerDied`
   in the place of that call, a failure as any other. Where no single call is known, the worker itself fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from streamline.border.messages import Calling, Culprit
from streamline.core.flow import Site
from streamline.errors import WorkerDied

__all__ = ["Care", "Deaths", "Inquest", "at_fault"]


CAREFUL_ITEMS = 512
"""Items that a worker gives in peace before the next death of its host counts as another matter. More are seldom on
their way."""


@dataclass(frozen=True, kw_only=True)
class Care:
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


class Deaths:
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

    def calling(self, message: Calling) -> None:
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


class Mortal(Protocol):
    """What has to be known of a worker here."""

    @property
    def deaths(self) -> Deaths: ...

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


W = TypeVar("W", bound=Mortal)


class Inquest(Generic[W]):
    """Finds who is at fault when one host dies."""

    def __init__(self, care: Care) -> None:
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


def at_fault(worker: Mortal, host: int, name: str, ended: str) -> Culprit | WorkerDied:
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
