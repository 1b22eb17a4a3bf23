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
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import anyio

from streamline.core.blame import cancellation_requested, not_an_end
from streamline.core.capacity import LIST_ITEMS
from streamline.core.forks import belongs_elsewhere, disown_in_copies
from streamline.core.gate import Gate
from streamline.core.pace import SLICE_S
from streamline.core.state import Reference, Since
from streamline.core.tasks import check_event_loop, spawn, wait_shielded
from streamline.core.threads import disable_slow_callback_log, start_thread, threadsafe_call, wait_interruptible
from streamline.errors import ClosedError, PlanError, PlanTypeError, ReplicaStalled
from streamline.runtime.open import Openable, Opened
from streamline.runtime.run import RunKeywords
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
      stall_timeout: seconds; infinite: readers are waited for for ever.

    Attributes:
      shares: what each replica is given.
      end: what each replica ends with, after its last item; None: it goes on.
      news: at which the task waits for its readers.
    """

    def __init__(self, shares: ReplicaShares, source: ReplicaSource, stall_timeout: float) -> None:
        self.shares = shares
        self.source = source
        self.begun = False
        self.end: BaseException | None = None
        self.news = Notifier()
        self._stall_timeout = stall_timeout
        self._lock = threading.RLock()  # Ctrl-C may come while it is held
        self._not_run = [True]
        self._cancel: Callable[[], object] | None = None  # the task, from any thread, while it runs
        self._thread_id: int | None = None
        self._over: Future[None] = Future()
        self._owner = os.getpid()
        disown_in_copies(self)

    def disown(self) -> None:
        """Give nothing more, if reading has begun: the process that this one is a copy of goes on reading."""
        if self.begun:
            self._lock, self._over = threading.RLock(), Future()  # another thread may have had theirs
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
                self.source.open()
                if in_loop and self.source.is_async:
                    self._thread_id = threading.get_ident()
                    cut_off = ClosedError("the event loop in which the replicator was to read its stream has ended")
                    spawn(self._main, "replicator", partial(self._ended, cut_off))
                else:
                    start_thread(threading.Thread(target=self._run_thread, name="streamline replicator", daemon=True))
            except Exception as failure:
                self._ended(failure)
            self.begun = True

    def leave(self, share: ReplicaShare) -> None:
        """A replica was closed on purpose: its share is dropped from now on."""
        share.leave("closed")
        share.notifier.ring()
        if not self.shares.open:
            self.stop()
        self.news.ring()

    def lose(self, share: ReplicaShare, why: str, cause: BaseException | None = None) -> None:
        """A replica's reader is gone: the others fail, unless it had everything. From a finalizer, perhaps twice."""
        if not share.open:
            return
        unread = self.shares.given(share) - share.taken
        if self.end is None or (unread and isinstance(self.end, ReplicasEnd)):
            error = ReplicaStalled(
                f"{self._name_of(share)} {why} after {share.taken:,} items, with {unread:,} that wait for it, and its "
                "share can't be read any more: where its share is to be dropped, close it (`async with`, `with`, "
                "aclose, close)",
                replica=share.replica,
            )
            error.__cause__ = cause
            self._finish(error)
        self.stop()
        share.leave("lost")

    def stop(self) -> None:
        """Read no more; doesn't wait. From any thread."""
        self._finish(ClosedError("the replicator is closed"))
        if (cancel := self._cancel) is not None:
            with suppress(RuntimeError):  # its event loop has ended
                cancel()

    async def aclose(self) -> None:
        """Read no more, and wait until the stream is closed. The clean-up is finished also if this is cancelled."""
        self.stop()
        if self.begun and not self._over.done():
            over, wake = anyio.Event(), threadsafe_call()
            self._over.add_done_callback(lambda _: wake(over.set))
            await wait_shielded(over)

    def close(self) -> None:
        """Read no more, and wait until the stream is closed, but not for user code that is stuck."""
        self.stop()
        if self.begun and self._thread_id != threading.get_ident():
            over: SimpleQueue[object] = SimpleQueue()  # `futures.wait` may leave its lock taken, if Ctrl-C comes in it
            self._over.add_done_callback(over.put)
            with suppress(Empty):
                wait_interruptible(lambda slice_s: over.get(timeout=slice_s), EXIT_S)

    # The task --------------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        if self._not_run and self._not_run.pop():  # else it is at work: Ctrl-C came when it had just been started
            self._thread_id = threading.get_ident()
            anyio.run(self._main, True)

    async def _main(self, own_loop: bool = False) -> None:
        if own_loop:
            disable_slow_callback_log()
        end: BaseException = ClosedError("the event loop in which the replicator read its stream has ended")
        try:
            with anyio.CancelScope() as scope:
                self._cancel = partial(threadsafe_call(), scope.cancel)
                try:
                    end = await self._deal()
                finally:
                    with anyio.CancelScope(shield=True):
                        try:
                            await self.source.aclose()
                        except BaseException as error:
                            if isinstance(end, ReplicasEnd):
                                end = self._with_place(error, "its close")
        finally:
            self._ended(end)

    def _ended(self, end: BaseException) -> None:
        """The task has ended, or never ran. Idempotent."""
        self._cancel = None
        self._finish(end)
        if not self._over.done():
            self._over.set_result(None)

    def _finish(self, end: BaseException) -> None:
        """Let each replica end, after its last item; the first end holds, but for a replica that is lost."""
        if self.end is None or (isinstance(self.end, ReplicasEnd) and isinstance(end, ReplicaStalled)):
            self.end = end
        for share in self.shares.all:
            share.notifier.ring()

    async def _deal(self) -> BaseException:
        """Deal until the end or a failure; return which."""
        shares = self.shares
        try:
            while shares.open and self.end is None:
                if shares.room < 1:
                    await self._wait_reader(shares.next)
                    continue
                if await self.source.draw(int(min(shares.room, LIST_ITEMS)), shares):
                    return ReplicasEnd()
                await anyio.lowlevel.checkpoint()
        except BaseException as error:
            if cancellation_requested(error):
                raise
            return self._with_place(error, f"item {shares.at + 1:,} of the stream")
        return ClosedError("the replicator is closed")

    def _with_place(self, error: BaseException, at: str) -> BaseException:
        if isinstance(error, ReplicaStalled):
            return error
        error = not_an_end(error, "the stream")
        error.add_note(f"in the stream of a StreamReplicator of {len(self.shares.all)} (pid {os.getpid()}), at {at}")
        return error

    async def _wait_reader(self, share: ReplicaShare) -> None:
        """Wait until half of a full queue was taken; if others starve, until any of it was.

        Raises:
          ReplicaStalled: it wasn't read for too long while others starved.
        """
        shares = self.shares
        starving, deadline = False, math.inf

        def taken() -> bool:
            return not share.open or self.end is not None or share.waiting < share.wanted_below

        def news() -> bool:
            return taken() or bool(shares.starving) is not starving

        try:
            while True:
                before, starving = starving, bool(shares.starving)
                share.wanted_below = shares.capacity if starving else shares.capacity // 2 + 1
                if taken():
                    return
                if starving is not before:  # those that starve ring again and again, and the clock goes on
                    deadline = anyio.current_time() + self._stall_timeout if starving else math.inf
                with anyio.CancelScope(deadline=deadline) as scope:
                    await self.news.wait(news)
                if scope.cancelled_caught and shares.starving and not taken():
                    raise self._stall_error(share)
        finally:
            share.wanted_below = 0

    def _stall_error(self, share: ReplicaShare) -> ReplicaStalled:
        starving = ", ".join(map(str, self.shares.starving))
        never = " (no reader has asked for it)" if share.standing == "unasked" else ""
        return ReplicaStalled(
            f"{self._name_of(share)} has not been read for {self._stall_timeout:g} s{never}: {len(share.items):,} "
            f"items wait for it, and meanwhile these replicas starve: {starving}. Read it; or close it, then its share "
            "is dropped; or give StreamReplicator a larger capacity=, or a longer stall_timeout= (math.inf: for ever)",
            replica=share.replica,
        )

    def _name_of(self, share: ReplicaShare) -> str:
        return f"replica {share.replica} of {len(self.shares.all)}"


class ReplicaSource(ABC):
    """Draws from the stream, in one task. What it has opened, it closes.

    Attributes:
      is_async: it may be read in an event loop that others use.
    """

    is_async = True

    def open(self) -> None:  # noqa: B027 # an iterable needs none
        """Check that it can be read; idempotent."""

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
    """A pipeline: what was drawn can be drawn again.

    Args:
      at: items of the stream before there; it goes on with what is drawn.
    """

    def __init__(self, pipe: Openable[Any], options: RunKeywords, resume: Snapshot | None, at: int) -> None:
        self._open = partial(pipe.open, resume=resume, **options)
        self._opened: Opened[Any] | None = None
        self._at = at
        self._stream: Stream[Any] | None = None
        self._marks: deque[tuple[int, Reference]] = deque()
        self._now: Reference | None = None
        self._list: list[Any] = []
        self._dealt = 0

    def open(self) -> None:
        self._opened = self._opened or self._open()

    async def draw(self, room: int, shares: ReplicaShares) -> bool:
        stream = self._stream
        if stream is None:
            assert self._opened is not None
            self._stream = stream = self._opened.stream()
            await stream.start()
            self._now = stream.state_after
            self._marks.append((self._at, self._now))
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

    @property
    def marks(self) -> tuple[tuple[int, Reference], ...]:
        """From where what readers still need can be had again: how many items are before it. From any thread."""
        return tuple(self._marks)

    def snapshot_at(self, mark: Reference) -> Snapshot:
        """Return a snapshot at one of the marks, with what was chosen since. From any thread."""
        assert self._stream is not None
        assert self._now is not None
        return self._stream.snapshot_since(Since(mark.get(), self._now.get()), Gate())

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
