"""The one task that reads a replicated stream and deals its items.

It runs in the event loop of whoever asks first, if the stream is async and that is an event loop; else in a thread of
its own, with a loop of its own. It knows the shares, never the replicas: one that is dropped is noticed.

Success: the stream's end, then each replica's, behind its last item; the stream is closed by then. Failure: likewise,
with the user's own exception. A replica whose queue is full stops the reading; while others starve of that, a clock
runs, and behind `stall_timeout` all of them fail. Close: the task is cancelled, and closes what it opened.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

import anyio

from streamline.core.blame import cancellation_requested, not_an_end
from streamline.core.flow import LIST_ITEMS
from streamline.core.forks import belongs_elsewhere, disowned_in_copies
from streamline.core.tasks import spawn
from streamline.core.threads import hold_quietly, start_thread, waker
from streamline.errors import ClosedError, HostError, ReplicaStalled
from streamline.replicating.bell import Bell
from streamline.replicating.shares import Share, Shares
from streamline.replicating.taps import Tap

__all__ = ["Dealer", "End"]


EXIT_S = 1.0
"""How long a close in plain code waits for a stream that is stuck in user code."""


class End(Exception):  # noqa: N818 - it is the end, no error
    """The stream's end, behind the last item of each replica."""


class Dealer:
    """Reads the stream for all replicas.

    Args:
      shares: what each replica is given.
      open_tap: makes what reads the stream; called once, where the first item is asked for.
      stall_timeout: seconds; infinite: readers are waited for for ever.

    Attributes:
      tap: what reads the stream; None: it hasn't begun.
      end: what each replica ends with, behind its last item; None: it goes on.
      blocked: the share whose queue is full, while the task waits for its reader.
    """

    def __init__(self, shares: Shares, open_tap: Callable[[], Tap], stall_timeout: float) -> None:
        self.shares = shares
        self.tap: Tap | None = None
        self.end: BaseException | None = None
        self.blocked: Share | None = None
        self._ring_at = 0
        self._news = Bell()
        self._open_tap = open_tap
        self._stall_timeout = stall_timeout
        self._lock = threading.RLock()  # Ctrl-C may come while it is held
        self._not_run = [True]
        self._begun = self._stopped = False
        self._scope: anyio.CancelScope | None = None
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._thread_id: int | None = None
        self._over = threading.Event()
        self._gone = Bell()
        self._owner = os.getpid()
        disowned_in_copies(self)

    def disown(self) -> None:
        """Give nothing more, if reading has begun: it goes on in the process that this one is a copy of."""
        if self._begun:
            self._lock, self._over = threading.RLock(), threading.Event()  # another thread may have had theirs
            self._wake = self._scope = None
            for share in self.shares.all:
                share.items.clear()
            self._ended(ClosedError(belongs_elsewhere("replicator", self._owner)))

    # What readers say ------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether somebody has asked for an item."""
        return self._begun

    def begin(self, *, in_loop: bool) -> None:
        """Begin to read, unless that has begun.

        Args:
          in_loop: this is an event loop, and an async stream is to be read in it.
        """
        with self._lock:  # Ctrl-C may come anywhere in here: then the next one who asks begins
            if self._begun or self.end is not None:
                return
            if self.tap is None:
                try:
                    self.tap = self._open_tap()
                except Exception as failure:
                    self._begun = True
                    self._ended(failure)
                    return
            if in_loop and self.tap.is_async:
                self._thread_id = threading.get_ident()
                spawn(self._main, "replicator", self._cut_off)
            else:
                self._start_thread()
            self._begun = True

    def _start_thread(self) -> None:
        try:
            start_thread(threading.Thread(target=self._run_thread, name="streamline replicator", daemon=True))
        except HostError as failure:
            self._ended(failure)

    def made_room(self) -> None:
        """A reader is just about to take an item of the share that is waited for, as it has promised."""
        share = self.blocked
        if share is not None and len(share.items) - 1 <= self._ring_at:
            self._news.ring()

    def starves(self) -> None:
        """A reader waits, and nothing is there for it."""
        if self.blocked is not None:
            self._news.ring()

    def leave(self, share: Share) -> None:
        """A replica was closed on purpose: its share is dropped from now on."""
        share.leave("closed")
        share.bell.ring()
        if not self.shares.open:
            self.stop()
        self._news.ring()

    def lose(self, share: Share, why: str, cause: BaseException | None = None) -> None:
        """A replica's reader is gone: the others are told, unless it had everything. From a finalizer, perhaps."""
        if not share.open:
            return
        unread = self.shares.given(share) - share.taken
        share.leave("lost")
        if self.end is not None and (not isinstance(self.end, End) or not unread):
            return
        error = ReplicaStalled(
            f"{self._named(share)} {why} after {share.taken:,} items, with {unread:,} that wait for it, and nobody can "
            "have its share any more: where its share is to be dropped, close it (`async with`, `with`, aclose, close)",
            replica=share.replica,
        )
        error.__cause__ = cause
        self._finish(error, soon=True)
        self.stop()

    def stop(self) -> None:
        """Read no more; doesn't wait. From any thread."""
        self._stopped = True
        self._finish(ClosedError("the replicator is closed"), soon=True)
        wake, scope = self._wake, self._scope
        if wake is not None and scope is not None:
            try:
                wake(scope.cancel)
            except RuntimeError:
                return  # its event loop has ended

    async def aclose(self) -> None:
        """Read no more, and wait until the stream is closed. The clean-up is finished also if this is cancelled."""
        self.stop()
        with anyio.CancelScope(shield=True):
            while self._begun and not self._over.is_set():
                await self._gone.wait(self._over.is_set)

    def close(self) -> None:
        """Read no more, and wait until the stream is closed, but not for user code that is stuck."""
        self.stop()
        if self._begun and self._thread_id != threading.get_ident():
            self._over.wait(EXIT_S)

    # The task --------------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        if self._not_run and self._not_run.pop():  # else it is at work: Ctrl-C came when it had just been started
            anyio.run(self._own_loop)

    async def _own_loop(self) -> None:
        hold_quietly()
        self._thread_id = threading.get_ident()
        await self._main()

    async def _main(self) -> None:
        tap = self.tap
        assert tap is not None
        self._wake = waker()
        end: BaseException = ClosedError("the event loop in which the replicator read its stream has ended")
        try:
            with anyio.CancelScope() as self._scope:
                try:
                    if not self._stopped:
                        end = await self._deal(tap)
                finally:
                    with anyio.CancelScope(shield=True):
                        failure = await self._closed(tap)
                    if failure is not None and isinstance(end, End):
                        end = failure
        finally:
            self._ended(end)

    def _cut_off(self) -> None:
        """The task has ended, or never ran."""
        if not self._over.is_set():
            self._ended(ClosedError("the event loop in which the replicator was to read its stream has ended"))

    def _ended(self, end: BaseException) -> None:
        self._wake = self._scope = None
        self._finish(end)
        self._over.set()
        self._gone.ring()

    async def _deal(self, tap: Tap) -> BaseException:
        """Deal until the end or a failure; return which."""
        try:
            while await self._wait_room():
                if await tap.draw(int(min(self.shares.room, LIST_ITEMS)), self.shares):
                    return End()
                await anyio.lowlevel.checkpoint()
        except BaseException as error:
            if cancellation_requested(error):
                raise
            return self._blamed(error, f"item {self.shares.at + 1:,} of the stream")
        return ClosedError("the replicator is closed")

    async def _closed(self, tap: Tap) -> BaseException | None:
        try:
            await tap.aclose()
        except BaseException as error:
            return self._blamed(error, "its close")
        return None

    def _blamed(self, error: BaseException, at: str) -> BaseException:
        if isinstance(error, ReplicaStalled):
            return error
        error = not_an_end(error, "the stream")
        error.add_note(f"in the stream of a StreamReplicator of {len(self.shares.all)} (pid {os.getpid()}), at {at}")
        return error

    async def _wait_room(self) -> bool:
        """Wait until an item may be dealt; False if nobody wants any.

        Raises:
          ReplicaStalled: a replica wasn't read for too long while others starved.
        """
        shares = self.shares
        while shares.open and not self._stopped:
            if shares.room >= 1:
                return True
            share = shares.next
            self.blocked = share
            try:
                await self._wait_for(share)
            finally:
                self.blocked = None
        return False

    async def _wait_for(self, share: Share) -> None:
        """Wait until half of a full queue was taken; if others starve, until any of it was."""
        shares = self.shares
        starving = False

        def taken() -> bool:
            return not share.open or self._stopped or share.waiting <= self._ring_at

        def news() -> bool:
            return taken() or bool(shares.starving) is not starving

        while True:
            starving = bool(shares.starving)
            self._ring_at = shares.capacity - 1 if starving else shares.capacity // 2
            if taken():
                return
            with anyio.move_on_after(self._stall_timeout if starving else math.inf) as scope:
                await self._news.wait(news)
            if scope.cancelled_caught and shares.starving and not taken():
                raise self._stalled(share)

    def _stalled(self, share: Share) -> ReplicaStalled:
        starving = ", ".join(map(str, self.shares.starving))
        never = " (nobody has asked for it)" if share.standing == "unasked" else ""
        return ReplicaStalled(
            f"{self._named(share)} has not been read for {self._stall_timeout:g} s{never}: {len(share.items):,} items "
            f"wait for it, and meanwhile these replicas starve: {starving}. Read it; or close it, then its share is "
            "dropped; or give StreamReplicator a larger capacity=, or a longer stall_timeout= (math.inf: for ever)",
            replica=share.replica,
        )

    def _named(self, share: Share) -> str:
        return f"replica {share.replica} of {len(self.shares.all)}"

    def _finish(self, end: BaseException, soon: bool = False) -> None:
        """Let each replica end, behind its last item; the first end holds, but for a replica that is lost."""
        if self.end is None or (isinstance(self.end, End) and isinstance(end, ReplicaStalled)):
            self.end = end
        for share in self.shares.all:
            share.bell.ring(soon)
