"""The dispatcher of a replicated stream: the one task that reads it, and hands item i to replica i mod n.

It runs in the event loop of the first reader, if the stream is async; else in a thread with a loop of its own. It knows
the shares, never the replicas: one that is dropped is noticed.

Success: the stream's end, then each replica's, after its last item; the stream is closed by then. Failure: likewise,
with the user's own exception. A replica whose queue is full stops the reading; while others starve of that, a clock
runs, and after `stall_timeout` all of them fail. Close: the task is cancelled, and closes what it opened.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import anyio

from streamline.core.blame import cancellation_requested, not_an_end
from streamline.core.capacity import LIST_ITEMS
from streamline.core.forks import belongs_elsewhere, disowned_in_copies
from streamline.core.gate import Gate
from streamline.core.pace import SLICE_S
from streamline.core.state import Reference, Since
from streamline.core.tasks import check_event_loop, spawn, surely
from streamline.core.threads import hold_quietly, interruptible, start_thread, waker
from streamline.errors import ClosedError, PlanError, PlanTypeError, ReplicaStalled
from streamline.runtime.open import Openable, RunOptions
from streamline.runtime.stream import Stream
from streamline.runtime.stream_base import BaseStream
from streamline.snapshot.snapshot import Snapshot
from streamline.training.replica_shares import Notifier, ReplicaShare, ReplicaShares

EXIT_S = 1.0
"""How long a close in plain code waits for a stream that is stuck in user code."""


class ReplicasEnd(Exception):  # noqa: N818 - it is the end, no error
    """The stream's end, after the last item of each replica."""


class Dispatcher:
    """Reads the stream for all replicas.

    Args:
      shares: what each replica is given.
      open_source: makes what reads the stream; called once, where the first item is asked for.
      stall_timeout: seconds; infinite: readers are waited for for ever.

    Attributes:
      source: what reads the stream; None: it hasn't begun.
      begun: it reads, or has read.
      end: what each replica ends with, after its last item; None: it goes on.
      blocked: the share whose queue is full, while the task waits for its reader.
    """

    def __init__(self, shares: ReplicaShares, open_source: Callable[[], ReplicaSource], stall_timeout: float) -> None:
        self.shares = shares
        self.source: ReplicaSource | None = None
        self.end: BaseException | None = None
        self.blocked: ReplicaShare | None = None
        self._ring_at = 0
        self._news = Notifier()
        self._open_source = open_source
        self._stall_timeout = stall_timeout
        self._lock = threading.RLock()  # Ctrl-C may come while it is held
        self._not_run = [True]
        self.begun = self._stopped = False
        self._scope: anyio.CancelScope | None = None
        self._wake: Callable[[Callable[[], None]], object] | None = None
        self._thread_id: int | None = None
        self._over: Future[None] = Future()
        self._owner = os.getpid()
        disowned_in_copies(self)

    def disown(self) -> None:
        """Give nothing more, if reading has begun: it goes on in the process that this one is a copy of."""
        if self.begun:
            self._lock, self._over = threading.RLock(), Future()  # another thread may have had theirs
            self._wake = self._scope = None
            for share in self.shares.all:
                share.items.clear()
            self._ended(ClosedError(belongs_elsewhere("replicator", self._owner)))

    # What readers say ------------------------------------------------------------------------------------------------

    def begin(self, *, in_loop: bool) -> None:
        """Begin to read, unless that has begun.

        Args:
          in_loop: this is an event loop, and an async stream is to be read in it.
        """
        with self._lock:  # Ctrl-C may come anywhere in here: then the next one who asks begins
            if self.begun or self.end is not None:
                return
            try:
                if in_loop:
                    check_event_loop()
                self.source = self.source or self._open_source()
                if in_loop and self.source.is_async:
                    self._thread_id = threading.get_ident()
                    spawn(self._main, "replicator", self._cut_off)
                else:
                    start_thread(threading.Thread(target=self._run_thread, name="streamline replicator", daemon=True))
            except Exception as failure:
                self._ended(failure)
            self.begun = True

    def made_room(self) -> None:
        """A reader is just about to take an item of the share that is waited for, as it has promised."""
        share = self.blocked
        if share is not None and len(share.items) - 1 <= self._ring_at:
            self._news.ring()

    def starves(self) -> None:
        """A reader waits, and nothing is there for it."""
        if self.blocked is not None:
            self._news.ring()

    def leave(self, share: ReplicaShare) -> None:
        """A replica was closed on purpose: its share is dropped from now on."""
        share.leave("closed")
        share.notifier.ring()
        if not self.shares.open:
            self.stop()
        self._news.ring()

    def lose(self, share: ReplicaShare, why: str, cause: BaseException | None = None) -> None:
        """A replica's reader is gone: the others fail, unless it had everything. From a finalizer, perhaps twice."""
        if not share.open:
            return
        unread = self.shares.given(share) - share.taken
        if self.end is None or (unread and isinstance(self.end, ReplicasEnd)):
            error = ReplicaStalled(
                f"{self._named(share)} {why} after {share.taken:,} items, with {unread:,} that wait for it, and its "
                "share can't be read any more: where its share is to be dropped, close it (`async with`, `with`, "
                "aclose, close)",
                replica=share.replica,
            )
            error.__cause__ = cause
            self._finish(error, soon=True)
        self.stop()
        share.leave("lost")

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
        if self.begun and not self._over.done():
            over, wake = anyio.Event(), waker()
            self._over.add_done_callback(lambda _: wake(over.set))
            await surely(over)

    def close(self) -> None:
        """Read no more, and wait until the stream is closed, but not for user code that is stuck."""
        self.stop()
        if self.begun and self._thread_id != threading.get_ident():
            over: SimpleQueue[object] = SimpleQueue()  # `futures.wait` may leave its lock taken, if Ctrl-C comes in it
            self._over.add_done_callback(over.put)
            with suppress(Empty):
                interruptible(lambda slice_s: over.get(timeout=slice_s), EXIT_S)

    # The task --------------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        if self._not_run and self._not_run.pop():  # else it is at work: Ctrl-C came when it had just been started
            self._thread_id = threading.get_ident()
            anyio.run(self._main, True)

    async def _main(self, own_loop: bool = False) -> None:
        if own_loop:
            hold_quietly()
        source = self.source
        assert source is not None
        self._wake = waker()
        end: BaseException = ClosedError("the event loop in which the replicator read its stream has ended")
        try:
            with anyio.CancelScope() as self._scope:
                try:
                    if not self._stopped:
                        end = await self._deal(source)
                finally:
                    with anyio.CancelScope(shield=True):
                        failure = await self._closed(source)
                    if failure is not None and isinstance(end, ReplicasEnd):
                        end = failure
        finally:
            self._ended(end)

    def _cut_off(self) -> None:
        """The task has ended, or never ran."""
        if not self._over.done():
            self._ended(ClosedError("the event loop in which the replicator was to read its stream has ended"))

    def _ended(self, end: BaseException) -> None:
        self._wake = self._scope = None
        self._finish(end)
        if not self._over.done():
            self._over.set_result(None)

    async def _deal(self, source: ReplicaSource) -> BaseException:
        """Deal until the end or a failure; return which."""
        try:
            while await self._wait_room():
                if await source.draw(int(min(self.shares.room, LIST_ITEMS)), self.shares):
                    return ReplicasEnd()
                await anyio.lowlevel.checkpoint()
        except BaseException as error:
            if cancellation_requested(error):
                raise
            return self._blamed(error, f"item {self.shares.at + 1:,} of the stream")
        return ClosedError("the replicator is closed")

    async def _closed(self, source: ReplicaSource) -> BaseException | None:
        try:
            await source.aclose()
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
        """Wait until an item may be dealt; False if none is wanted.

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

    async def _wait_for(self, share: ReplicaShare) -> None:
        """Wait until half of a full queue was taken; if others starve, until any of it was."""
        shares = self.shares
        starving, deadline = False, math.inf

        def taken() -> bool:
            return not share.open or self._stopped or share.waiting <= self._ring_at

        def news() -> bool:
            return taken() or bool(shares.starving) is not starving

        while True:
            before, starving = starving, bool(shares.starving)
            self._ring_at = shares.capacity - 1 if starving else shares.capacity // 2
            if taken():
                return
            if starving is not before:  # those that starve ring again and again, and the clock goes on
                deadline = anyio.current_time() + self._stall_timeout if starving else math.inf
            with anyio.CancelScope(deadline=deadline) as scope:
                await self._news.wait(news)
            if scope.cancelled_caught and shares.starving and not taken():
                raise self._stalled(share)

    def _stalled(self, share: ReplicaShare) -> ReplicaStalled:
        starving = ", ".join(map(str, self.shares.starving))
        never = " (no reader has asked for it)" if share.standing == "unasked" else ""
        return ReplicaStalled(
            f"{self._named(share)} has not been read for {self._stall_timeout:g} s{never}: {len(share.items):,} items "
            f"wait for it, and meanwhile these replicas starve: {starving}. Read it; or close it, then its share is "
            "dropped; or give StreamReplicator a larger capacity=, or a longer stall_timeout= (math.inf: for ever)",
            replica=share.replica,
        )

    def _named(self, share: ReplicaShare) -> str:
        return f"replica {share.replica} of {len(self.shares.all)}"

    def _finish(self, end: BaseException, soon: bool = False) -> None:
        """Let each replica end, after its last item; the first end holds, but for a replica that is lost."""
        if self.end is None or (isinstance(self.end, ReplicasEnd) and isinstance(end, ReplicaStalled)):
            self.end = end
        for share in self.shares.all:
            share.notifier.ring(soon)


class Passed(Exception):  # noqa: N818 - the caller looks again
    """What was asked for is out of reach: readers have gone on."""


class ReplicaSource(ABC):
    """Draws from the stream, in one task. What it has opened, it closes.

    Attributes:
      is_async: it may be read in an event loop that others use.
    """

    is_async = True

    @abstractmethod
    async def draw(self, room: int, shares: ReplicaShares) -> bool:
        """Deal 1 to `room` items, as many as come in no time; True at the end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close what was opened; idempotent, if it wasn't opened nothing happens."""


class IterableReplicaSource(ReplicaSource):
    """An iterable. A sync one may wait for its next item, so it is read in a thread of its own."""

    def __init__(self, source: Iterable[Any] | AsyncIterable[Any]) -> None:
        self._source = source
        self.is_async = isinstance(source, AsyncIterable)
        self._iterator: Any = None

    async def draw(self, room: int, shares: ReplicaShares) -> bool:
        if self._iterator is None:
            self._iterator = aiter(self._source) if isinstance(self._source, AsyncIterable) else iter(self._source)
        iterator, give, is_async = self._iterator, shares.give, self.is_async
        ends = StopAsyncIteration if is_async else StopIteration
        stop = perf_counter() + SLICE_S
        for _ in range(room):
            try:
                item = await anext(iterator) if is_async else next(iterator)
            except ends:
                return True
            give(item)  # at once: the next one may be long in coming
            if perf_counter() > stop:
                break
        return False

    async def aclose(self) -> None:
        if (close := getattr(self._iterator, "aclose" if self.is_async else "close", None)) is not None:
            closed = close()
            if self.is_async:
                await closed


class PlanReplicaSource(ReplicaSource):
    """A pipeline, opened here: what was drawn can be drawn again.

    Args:
      options: of `open`.
      resume: where to begin; None: at the beginning.
      at: items of the stream before there; it goes on with what is drawn.
    """

    def __init__(self, pipe: Openable[Any], options: RunOptions, resume: Snapshot | None, at: int) -> None:
        self._opened = pipe.open(resume=resume, **options)
        self._at = at
        self._stream: Stream[Any] | None = None
        self._marks: deque[tuple[int, Reference]] = deque()
        self._now: Reference | None = None
        self._list: list[Any] = []
        self._dealt = 0

    async def draw(self, room: int, shares: ReplicaShares) -> bool:
        stream = self._stream
        if stream is None:
            self._stream = stream = self._opened.stream()
            await stream.start()
            self._marks.append((self._at, stream.state_after))
        if self._dealt == len(self._list) and not await self._pull(stream, shares):
            return True
        part = self._list[self._dealt : self._dealt + room]
        self._dealt += len(part)
        shares.give_all(part)
        return False

    async def _pull(self, stream: Stream[Any], shares: ReplicaShares) -> bool:
        """Fetch the next list; False at the end. The state after it is known before any of it is dealt."""
        self._list, self._dealt = [], 0
        before = stream.state_after
        try:
            first = await anext(stream)
        except StopAsyncIteration:
            return False
        self._list = [first, *stream.take_rest()]
        oldest = shares.oldest(shares.taken)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.popleft()
        if self._marks[-1][0] < self._at:
            self._marks.append((self._at, before))
        self._now = stream.state_after
        self._at += len(self._list)
        return True

    def snapshot(self, oldest: int) -> tuple[int, Snapshot] | None:
        """Return a snapshot from which everything after item `oldest` is had again, and how many items are before it.

        None: nothing was drawn. From any thread.

        Raises:
          Passed: that item is not needed any more.
        """
        now = self._now
        if self._stream is None or now is None:
            return None
        reachable = [found for found in tuple(self._marks) if found[0] <= oldest]
        if not reachable:
            raise Passed
        at, mark = reachable[-1]
        return at, self._stream.snapshot_since(Since(mark.get(), now.get()), Gate())

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


def check_source(source: object) -> None:
    """Insist on something that a `ReplicaSource` can read.

    Raises:
      PlanTypeError: it can't be iterated.
      PlanError: its batches are for the thread that takes them, which isn't the replica's reader's.
    """
    if isinstance(source, Openable | BaseStream):
        for stage in source.plan.after:
            if stage.hands_over:
                raise PlanError(
                    f"StreamReplicator(source) ends with {stage}, whose batches are for the CUDA stream of the thread "
                    "that reads them all, and a replica's reader has another: leave it out, and let each reader have "
                    f"replicator.pipeline(r).{stage.line()}"
                )
    if isinstance(source, Openable | AsyncIterable) or (
        isinstance(source, Iterable) and not isinstance(source, str | bytes)
    ):
        return
    hint = ": call it, and give what it returns" if callable(source) else ""
    raise PlanTypeError(
        f"StreamReplicator(source) is a pipeline, or an iterable, sync or async, got {type(source).__name__}{hint}"
    )
