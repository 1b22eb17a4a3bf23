"""A plan that runs, for a plain `for` loop.

The event loop runs in a thread of its own (`streamline.runtime.loop_thread`), from which the consumer receives lists.

Success, failure, snapshot: as in `streamline.runtime.stream`. Ctrl-C: `KeyboardInterrupt` in the consumer's thread, and
the stream goes on: an item that the loop hasn't received is the next one, and the state is before it. Leaving the
`with` block, or dropping the iterator, ends the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from streamline.core.cleanup import Cleanup
from streamline.core.cursor import CurrentChunk, PartIterator
from streamline.core.flow import Chunk
from streamline.core.gate import Event, Gate
from streamline.core.options import check_ago
from streamline.core.tasks import Session
from streamline.errors import ClosedError, PlanError, PlanTypeError
from streamline.runtime.loop_thread import LoopThread
from streamline.runtime.pause import QUIESCE_S, SyncPause, check_may_pull
from streamline.runtime.run import RESET_WITHIN, ResolvedRun, reset_caches
from streamline.runtime.stream_base import BaseStream
from streamline.snapshot.snapshot import Snapshot

T = TypeVar("T")


class SyncStream(BaseStream[T], PartIterator[T]):
    """An iterator over a running plan. Made by `for x in pipe` or `with pipe.open() as stream`.

    Args:
      ahead: it is opened before its consumer needs it; `begin` is called then.
    """

    def __init__(self, resolved: ResolvedRun, session: Session | None = None, *, ahead: bool = False) -> None:
        super().__init__(resolved, session)
        self._gate = Gate()  # of the consumer's thread
        self._lock = threading.RLock()  # a signal's handler may take a snapshot inside another
        self._loop_thread = LoopThread[T](resolved, self._session)
        self._cleanup = Cleanup(self, _end, self._loop_thread, self._session)
        self._failure: BaseException | None = None
        self._trace: TracebackType | None = None
        self._ended = False
        self._begin_at(self._loop_thread.start())
        if not ahead:
            try:
                resolved.show(self._session)
            except BaseException:
                self.close()
                raise

    def begin(self) -> None:
        """Show and time a stream that was opened ahead, from now on."""
        self._session.meters.consumer.opened_at = perf_counter()
        self._resolved.show(self._session)

    def close(self) -> None:
        """End everything that this stream started, and wait until it has ended. Idempotent.

        User code that blocks the event loop is waited for a second at most: a thread can't be ended from outside.
        Other work has two seconds: a loaded machine needs time, and clean-up that awaits something.
        """
        self._session.errors.close(self.state)
        self._end_record()
        self._end()
        self._session.meters.consumer.close(self.at_hand)
        self._forget()
        if self._failure is None and not self._ended:
            self._failure = ClosedError("the stream is closed")

    def leave_at_exit(self) -> None:
        """Let the interpreter exit without closing this stream, whose daemon threads may be stuck."""
        self._cleanup.not_at_exit()

    def snapshot(self, items_ago: int = 0) -> Snapshot:
        """Return the state of the run: what resumes right after the last item received. Doesn't wait.

        Args:
          items_ago: 1: what resumes with that item, where one is fetched ahead of its use.

        Raises:
          DeadLetterError: a skipped item that it counts can't be written down.
          PlanError: `items_ago` is neither 0 nor 1.
        """
        check_ago("snapshot(items_ago)", items_ago)
        with self._lock:
            return self._snapshot(None, items_ago)

    def reset_cache(self) -> None:
        """Let streams that are opened from now on draw anew what `.cache(path=)` keeps. After this one's end or close.

        In memory, each stream draws its own anyway.

        Raises:
          PlanError: the stream goes on; or there is no `.cache`.
          ReadError: a folder can't be written.
        """
        if self._failure is None and not self._ended:
            raise PlanError(RESET_WITHIN)
        reset_caches(self._resolved)

    def paused(self, *, quiesce_timeout: float = QUIESCE_S) -> SyncPause:
        """Return the context manager of a pause: for an evaluation, say, that needs CPU and network for itself.

        Inside, nothing moves, no function of the pipeline is called, and nothing is closed or dropped; then everything
        goes on where it was. Entering waits for calls in progress, and gives the names of those that didn't end in
        time; they are logged, too, and their results are kept.

        Inside, snapshots may be taken, and the items of the list at hand; asking for more is a `PausedError`. Pauses
        don't nest. A stream that has ended is at rest already.

        Args:
          quiesce_timeout: seconds that entering waits for calls in progress; 0: it doesn't wait.

        Cancellation: Ctrl-C while it is entered comes out as `KeyboardInterrupt`; the stream goes on.

        Raises:
          PlanError: `quiesce_timeout` is no finite number from 0 on.
          PausedError: on entering, the stream is paused already.
        """
        return SyncPause(self._gate, self._lock, self._loop_thread.remote_gate, quiesce_timeout)

    def peek(self) -> bool | None:
        """Say whether another item follows; None if a failure does, or the stream is closed. Takes nothing.

        Waits for the item, or for the end. Ctrl-C meanwhile changes nothing.

        Raises:
          PausedError: the item hasn't arrived, and the stream is paused.
        """
        try:  # a failure may be on its way to the user: to raise it here again would change its traceback
            return self._wait_list() if self._failure is None else None
        except BaseException:
            if self._failure is None:
                raise
            return None

    def part(self) -> Iterator[T] | None:
        """Return what `_part_at_hand` does, after waiting for a list, if there is none. None at the end."""
        return self._part_at_hand() if self._wait_list() else None

    def _fetch_part(self) -> NoReturn:
        self._go_on(self.part())

    def _on_consumed(self, current: CurrentChunk[T]) -> None:
        self._loop_thread.bridge.consumer.note_consumed(current.received, self._loop_thread.signal)

    def _wait_list(self) -> bool:
        """Fetch lists until there is an item at hand; return whether there is one."""
        while not self._to_give():
            if not self._fetch():
                return False
        return True

    if not TYPE_CHECKING:  # type checkers say so sooner

        def __aiter__(self) -> NoReturn:
            """Refuse: this is the stream of `with`."""
            raise PlanTypeError(
                "this stream is a plain one: for item in stream; `async with pipe.open() as stream` gives one for "
                "async for"
            )

        __anext__ = __aiter__

    def _fetch(self) -> bool:
        """Go to the next list; return whether there is one. An interrupt doesn't lose a list that has arrived."""
        if self._failure is not None:
            raise self._failure.with_traceback(self._trace)  # else it would grow with every raise
        if self._ended:
            return False
        if self._gate.holding:
            check_may_pull(self._gate)
        coming = self._current.coming
        if not coming:
            self._take(coming)
        found = coming[0]
        if isinstance(found, Chunk):
            self._load(found)
            return True
        self._end()
        if found is not None:
            self._trace, self._failure = found.__traceback__, found
            raise found
        self._ended = True
        return False

    def _end(self) -> None:
        self._cleanup()
        with self._lock:
            self._gate.on(Event.CLOSE)

    def _take(self, coming: list[Chunk[T] | BaseException | None]) -> None:
        """Wait for the next list, or failure, append it to `coming`, and count it."""
        if (failure := self._at_chunk_boundary()) is not None:
            coming.append(failure)
            return
        meters, consumer = self._session.meters, self._session.meters.consumer
        try:
            self._loop_thread.take(coming)  # Ctrl-C interrupts this, and changes nothing
        except BaseException:
            consumer.wait_ends(perf_counter())
            raise
        consumer.wait_ends(self._loop_thread.bridge.consumer.taken_at)
        found = coming[0]
        if isinstance(found, Chunk):
            meters.count_list(len(found.items))
        else:
            consumer.close()

    def _at_chunk_boundary(self) -> Exception | None:
        """Run the chunk boundary; return its failure, with which the stream fails."""
        try:
            self._session.hooks.run_chunk_boundary(self.state_after)
        except Exception as failure:
            return failure
        return None


def _end(loop_thread: LoopThread[Any], session: Session) -> None:
    loop_thread.stop()
    session.hooks.close()  # a loop that is blocked by user code doesn't
