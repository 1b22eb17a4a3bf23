"""What each replica is given: item i goes to replica i mod n; and how a reader waits for its next one.

One task fills the shares, one reader empties each, perhaps in another thread: each counter has one writer, and a
deque's two ends may be used at once.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat, starmap
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Any, Literal

import anyio

from streamline.core.threads import CTRL_C_S, threadsafe_call

Standing = Literal["unasked", "read", "closed", "lost"]


class _Waiter:
    __slots__ = ("rung", "thread", "wake")

    def __init__(self, wake: Callable[[], object], thread: int | None = None) -> None:
        self.wake = wake
        self.thread = thread  # that waits; None: a task does
        self.rung = False


class Notifier:
    """Wakes the task or the thread that waits at it.

    Nothing is locked: the waiter checks again after it has registered, and the notifier changes the state first. A
    notification belongs to one wait, so a late one can't end the next.

    Attributes:
      waiter: None: nothing waits.
    """

    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: _Waiter | None = None

    @property
    def taken(self) -> bool:
        """Whether another waits: not this thread, in a wait that Ctrl-C has cut off."""
        return self.waiter is not None and self.waiter.thread != get_ident()

    def ring(self) -> None:
        """Wake what waits, if anything does. From anywhere, a finalizer or another thread say; doesn't wait."""
        waiter = self.waiter
        if waiter is not None and not waiter.rung:
            with suppress(RuntimeError):  # its event loop has ended, and has cancelled what waited
                waiter.wake()
            waiter.rung = True  # not before: Ctrl-C may come in the middle of this

    async def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until it rings, or not at all if it is `ready`. Cancellation: nothing has changed."""
        event = anyio.Event()
        try:
            self.waiter = _Waiter(partial(threadsafe_call(), event.set))
            if not ready():
                await event.wait()
        finally:
            self.waiter = None

    def wait_in_thread(self, ready: Callable[[], bool]) -> None:
        """Likewise, in a thread that has no event loop.

        A wait in C: in that of a `threading.Event`, Ctrl-C may come out as a RuntimeError about a lock.
        """
        rings: SimpleQueue[None] = SimpleQueue()
        try:
            self.waiter = _Waiter(partial(rings.put, None), get_ident())
            while not ready():
                with suppress(Empty):
                    rings.get(timeout=CTRL_C_S)
                    break
        finally:
            self.waiter = None


UNBOUNDED = sys.maxsize


@dataclass(frozen=True)
class ReplicaStats:
    """One replica, at one moment.

    Attributes:
      replica: its number.
      standing: "unasked": not asked for yet; "read"; "closed": on purpose, its share is dropped; "lost": its
        reader is gone.
      taken: items that its reader has taken.
      waiting: items that wait for it.
      dropped: items of its share that are not delivered, because it is closed.
    """

    replica: int
    standing: Standing
    taken: int
    waiting: int
    dropped: int


class ReplicaShare:
    """What one replica is given.

    Attributes:
      before: items that an earlier run has taken.
      items: that wait for its reader.
      pops: gives them, while there are any, and counts them in the same step, in C: Ctrl-C may come anywhere.
      left: returns how many `pops` will still give, were there so many; it begins at `UNBOUNDED`.
      promised: what `left` returns, or will as soon as its reader has taken the item that it is about to take: the
        dispatcher need not wait for that.
      wanted_below: the dispatcher waits until fewer items wait; 0: it doesn't.
      notifier: at which its reader waits.
      open: whether it is given anything.
    """

    def __init__(self, replica: int, taken: int) -> None:
        self.replica = replica
        self.before = taken
        self.items: deque[Any] = deque()
        budget = repeat((), UNBOUNDED)
        self.pops: Iterator[Any] = starmap(self.items.popleft, budget)
        self.left: Callable[[], int] = budget.__length_hint__
        self.promised = UNBOUNDED
        self.wanted_below = 0
        self.notifier = Notifier()
        self.standing: Standing = "unasked"
        self.open = True

    @property
    def taken(self) -> int:
        """How many items its reader has taken, since the stream's beginning."""
        return self.before + UNBOUNDED - self.left()

    @property
    def waiting(self) -> int:
        """How many items wait, without one that is just about to be taken."""
        return len(self.items) - max(0, self.left() - self.promised)

    def leave(self, standing: Literal["closed", "lost"]) -> None:
        """Give it nothing any more, and drop what waits."""
        self.standing = standing
        self.open = False
        self.items.clear()


class ReplicaShares:
    """All shares of one stream.

    Args:
      taken: by each replica, in an earlier run.
      capacity: items that may wait for each replica.
      at: items of the stream before the first one that is dealt here.

    Attributes:
      at: items of the stream that were dealt, or passed over.
    """

    def __init__(self, taken: Sequence[int], capacity: int, at: int = 0) -> None:
        self.all = [ReplicaShare(replica, count) for replica, count in enumerate(taken)]
        self.capacity = capacity
        self.at = at
        self._behind = max(count * len(self.all) + replica for replica, count in enumerate(taken))

    def give(self, item: Any) -> None:
        at = self.at
        share = self.all[at % len(self.all)]
        if share.open and (at >= self._behind or at // len(self.all) >= share.before):
            share.items.append(item)
        self.at = at + 1
        if share.notifier.waiter is not None:
            share.notifier.ring()

    def give_all(self, items: Sequence[Any]) -> None:
        at, count = self.at, len(self.all)
        if at < self._behind:
            for item in items:
                self.give(item)
            return
        for share in self.all:
            if share.open:
                share.items.extend(items[(share.replica - at) % count :: count])
        self.at = at + len(items)
        for share in self.all:
            if share.notifier.waiter is not None and share.items:
                share.notifier.ring()

    @property
    def room(self) -> int | float:
        """How many items may be dealt before one replica has too much; infinite if none is open."""
        least, count, at = math.inf, len(self.all), self.at
        for share in self.all:
            if share.open:
                least = min(least, (share.replica - at) % count + count * (self.capacity - share.waiting))
        return least

    @property
    def next(self) -> ReplicaShare:
        """The share that the next item is for."""
        return self.all[self.at % len(self.all)]

    @property
    def open(self) -> bool:
        """Whether any replica is given anything."""
        return any(share.open for share in self.all)

    @property
    def starving(self) -> list[int]:
        """The replicas whose readers wait, with nothing there for them."""
        return [share.replica for share in self.all if share.notifier.waiter is not None and not share.items]

    def given(self, share: ReplicaShare) -> int:
        """Return how many items of the stream were a replica's so far."""
        return max(share.before, -(-(self.at - share.replica) // len(self.all)))

    @property
    def taken(self) -> list[int]:
        """How many items each reader has taken; they go on meanwhile, in other threads."""
        return [share.taken for share in self.all]

    def oldest(self, taken: Sequence[int]) -> int:
        """Return how many items of the stream, from its beginning, no reader that has taken so many needs any more."""
        count, at = len(self.all), self.at
        needed = (taken[share.replica] * count + share.replica for share in self.all if share.standing != "closed")
        return min([at, *needed])

    def stats(self) -> tuple[ReplicaStats, ...]:
        """Return what each replica was given, and what became of it."""
        found = []
        for share in self.all:
            rest = max(0, self.given(share) - share.taken)
            closed = share.standing == "closed"
            waiting, dropped = (0, rest) if closed else (rest, 0)
            found.append(ReplicaStats(share.replica, share.standing, share.taken, waiting, dropped))
        return tuple(found)
