"""One replica of a stream: what its reader holds, an iterator for `async for` and for `for`."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from streamline.core.pace import Pace
from streamline.core.tracebacks import hide_frames
from streamline.errors import ClosedError, PlanError
from streamline.replicating.dealer import Dealer, End
from streamline.replicating.shares import Share

__all__ = ["Replica"]

T = TypeVar("T")

BREATHE_ITEMS = 31
"""A mask: each 32 items, an `async for` looks whether others should have a turn; every item would cost half as much
again as taking it."""


class Replica(Generic[T]):
    """The items i of a stream with i mod n = r, in order: for one reader, `async for` or `for`, in any thread.

    Ends and errors come behind its last item, then for ever. A cancelled wait took nothing, and the next one goes on.

    `async with` or `with` around the loop says what leaving means: left without an exception, the rest of its share is
    dropped, and counted; left with one, the reader has died, and the other replicas fail with a `ReplicaStalled` that
    names this one. So they do if it is garbage collected unread. After a bare `break` it may be read on.
    """

    def __init__(self, dealer: Dealer, share: Share) -> None:
        self._dealer = dealer
        self._share = share
        self._items, self._budget = share.items, share.left
        self._pops: Iterator[T] = share.pops
        self._asked = 0
        self._over: BaseException | None = None
        self._trace: TracebackType | None = None
        self._pace = Pace()
        self._finalize = weakref.finalize(self, dealer.lose, share, "was dropped by its reader")
        self._finalize.atexit = False

    @property
    def number(self) -> int:
        """Which one it is, 0-based."""
        return self._share.replica

    @property
    def taken(self) -> int:
        """Items that were taken from it, those of an earlier run included."""
        return self._share.taken

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    def __iter__(self) -> Iterator[T]:
        return self

    async def __anext__(self) -> T:
        share = self._share
        self._asked += 1
        if self._asked & BREATHE_ITEMS == 0:
            await self._pace.breathe()
        while not self._items:
            if (end := self._ended(in_loop=True)) is not None:
                raise StopAsyncIteration if isinstance(end, End) else end.with_traceback(self._trace)
            self._check_alone()
            await share.bell.wait(self._ready)
        share.promised = self._budget() - 1
        if self._dealer.blocked is share:
            self._dealer.made_room()
        return next(self._pops)

    def __next__(self) -> T:
        share = self._share
        while not self._items:
            if (end := self._ended(in_loop=False)) is not None:
                raise StopIteration if isinstance(end, End) else end.with_traceback(self._trace)
            self._check_alone()
            share.bell.wait_in_thread(self._ready)
        share.promised = self._budget() - 1
        if self._dealer.blocked is share:
            self._dealer.made_room()
        # Between taking an item and returning it there is no place where Python looks for a signal, and no other line.
        for item in self._pops: return item  # fmt: skip # noqa: E701
        raise AssertionError("unreachable: an item waited")

    def _ready(self) -> bool:
        """Whether there is no need to wait; looked at when a ring would be heard."""
        if self._share.items or self._dealer.end is not None or not self._share.open:
            return True
        self._dealer.starves()
        return False

    def _ended(self, *, in_loop: bool) -> BaseException | None:
        """Return what this replica has ended with, if nothing waits for it; begin to read, if that hasn't begun."""
        if self._over is None:
            if not self._share.open:
                self._over = ClosedError(f"replica {self.number} is closed")
            elif (end := self._dealer.end) is None:
                self._dealer.begin(in_loop=in_loop)
                return self._dealer.end if not self._share.items else None
            elif self._share.items:  # they came just before it
                return None
            else:
                hide_frames(end)
                self._over, self._trace = end, end.__traceback__
            self._finalize.detach()
        return self._over

    def _check_alone(self) -> None:
        if self._share.bell.taken:
            raise PlanError(
                f"replica {self.number} has two readers that wait for its next item, and only one would get it: let "
                "one read, or make a StreamReplicator of more replicas"
            )

    # Leaving ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop the rest of its share, on purpose: the others go on. Idempotent; doesn't wait."""
        self._finalize.detach()
        if self._share.open and (self._over is None):
            self._dealer.leave(self._share)

    async def aclose(self) -> None:
        """As `close`. The last one to leave a stream waits until that is closed."""
        self.close()
        if not self._dealer.shares.open:
            await self._dealer.aclose()

    def __enter__(self) -> Replica[T]:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left(error)

    async def __aenter__(self) -> Replica[T]:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left(error)
        if not self._dealer.shares.open:
            await self._dealer.aclose()

    def _left(self, error: BaseException | None) -> None:
        if error is None or self._over is not None:
            self.close()
        else:
            self._finalize.detach()
            self._dealer.lose(self._share, f"was left by its reader with {type(error).__name__}", error)

    def __repr__(self) -> str:
        of = len(self._dealer.shares.all)
        return f"<replica {self.number} of {of}: {self.taken:,} taken, {len(self._share.items):,} waiting>"
