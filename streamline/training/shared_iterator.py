"""An iterator that several readers share, each item for one of them, until it is dropped.

An end or a failure is final. A drop closes the iterator, after the draw in progress.

Ctrl-C loses no item of a sync iterator, unless it strikes inside that: an item is drawn and numbered in one call in C,
stays at hand, and leaves in another one, the loop's own (`streamline.core.cursor.PartIterator`).
"""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from functools import partial
from itertools import islice, repeat, starmap, takewhile
from operator import is_not
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

import anyio.lowlevel

from streamline.core.blame import cancellation_requested, not_an_end
from streamline.core.forks import disown_in_copies
from streamline.errors import ClosedError, PlanError, ResumeError
from streamline.sources.foreign_state import Foreign, foreign
from streamline.sources.single_use import Use
from streamline.sources.table_rows import check_not_table

T = TypeVar("T")

_GONE: Any = object()
"""Stands for an item at hand that another thread has taken."""


class SharedIterator(Generic[T]):
    """What a factory has returned, and how much of it was drawn.

    Args:
      iterable: not iterated yet.
      worker, of: the items i with i mod `of` = `worker` are given.
      resume: the state to begin at, of `state_dict`; None: at the beginning.
      use: of what the factory returned; it ends with the drop.
    """

    begin: ClassVar[Callable[[Any], Any]]
    """`iter` or `aiter`."""

    def __init__(self, iterable: Any, worker: int, of: int, resume: dict[str, Any] | None, use: Use) -> None:
        self._use = use
        self._closed = False
        self._worker = worker
        self._of = of
        self._at = 0
        self._hand: dict[int, T] = {}  # by its number, an item that was drawn, until a loop has got it
        self._pass_over = 0
        self._failure: BaseException | None = None
        self._trace: TracebackType | None = None
        self._dropped = self._ended = False
        check_not_table("StreamDataset's factory returned", iterable)
        self._foreign: Foreign | None = foreign(iterable)
        state = None if resume is None else resume["state"]
        if self._foreign is not None and state is not None:
            self._foreign.load(state)
        self._iterator = use.iterated(iterable, type(self).begin)
        if self._foreign is None and (known := foreign(self._iterator)) is not None:
            self._foreign = known
            if state is not None:
                known.load(state)
        if resume is not None:
            if state is not None and self._foreign is None:
                raise ResumeError(
                    f"the state holds one of an iterator's own, and the {type(iterable).__name__} that the factory "
                    "returns has no load_state_dict or set_state to take it"
                )
            self._ended = bool(resume["ended"])
            self._at = resume["items"] if state is not None or self._ended else 0
            self._pass_over = resume["items"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item given."""
        at = next(iter(tuple(self._hand)), None)
        items = max(self._at if at is None else at, self._pass_over)
        own = self._foreign is not None and at is None and self._at == items > 0 and not self._ended
        state = json.loads(self._foreign.state()) if own and self._foreign is not None else None
        return {"items": items, "ended": self._ended, "state": state}

    def _mine(self, at: int) -> bool:
        """Count an item that was drawn; return whether it is given."""
        self._at = at + 1
        return at % self._of == self._worker and at >= self._pass_over

    def _over(self) -> None:
        self._iterator = self._foreign = None
        self._use.close()

    def _check(self) -> None:
        if self._dropped:
            raise ClosedError("this StreamDataset was reset: iterate it anew")
        if self._failure is not None:
            raise self._failure.with_traceback(self._trace)

    def _end(self) -> None:
        """Note the end; raise a ResumeError if it comes before the place to begin at."""
        self._ended = True
        if self._at < self._pass_over:
            raise self._keep_failure(
                ResumeError(
                    f"the state is after {self._pass_over:,} items, and the iterator ends after {self._at:,}: it isn't "
                    "the stream that the state was taken of"
                )
            )

    def _keep_failure(self, error: BaseException) -> BaseException:
        failure = not_an_end(error, "StreamDataset's iterator")
        failure.add_note(
            f"in StreamDataset, worker {self._worker} of {self._of} (pid {os.getpid()}), at item {self._at + 1:,} of "
            "the factory's stream"
        )
        self._failure, self._trace = failure, failure.__traceback__
        return failure


class SharedSyncIterator(SharedIterator[T]):
    """Over a sync iterator, from any thread."""

    begin = iter

    def __init__(self, iterable: Iterable[T], worker: int, of: int, resume: dict[str, Any] | None, use: Use) -> None:
        self._lock = threading.RLock()  # Ctrl-C may come while it is held
        disown_in_copies(self)
        self._drawing = self._cut = False
        super().__init__(iterable, worker, of, resume, use)
        self._numbered: Any = enumerate(self._iterator, self._at)

    def disown(self) -> None:
        """Forget the lock, which another thread may have held."""
        self._lock = threading.RLock()

    def part(self) -> Iterator[T] | None:
        """Return what gives the next item, in C, or nothing where another thread is quicker; None: there is none."""
        try:
            with self._lock:
                at = self._next()
                if self._dropped:
                    raise ClosedError("this StreamDataset was reset while it waited for an item: iterate it anew")
                taken = starmap(self._hand.pop, repeat((at, _GONE), 1))
                return None if at is None else takewhile(partial(is_not, _GONE), taken)
        finally:
            if self._dropped or self._ended:
                self._close()

    def _next(self) -> int | None:
        """Return the number of the item at hand; draw one first, if there is none. None: at the end."""
        self._check()
        while not self._ended:
            at = next(iter(tuple(self._hand)), None)
            if at is None:
                self._draw()
                at = next(iter(self._hand), None)
            if at is None and self._cut:
                raise self._keep_failure(
                    ClosedError(
                        "Ctrl-C came inside this StreamDataset's iterator, which says now that it has ended: reset() it"
                    )
                )
            if at is None:
                self._end()
            elif self._mine(at):
                return at
            else:
                self._hand.clear()
        return None

    def _draw(self) -> None:
        self._drawing = True
        try:
            self._hand.update(islice(self._numbered, 1))
            self._cut = self._cut and not self._hand
        except KeyboardInterrupt as error:  # with a frame of its own, the iterator's code may have ended by it
            self._cut = error.__traceback__ is None or error.__traceback__.tb_next is not None
            raise
        except BaseException as error:
            failure = self._keep_failure(error)
            if failure is error:
                raise
            raise failure from error
        finally:
            self._drawing = False

    def drop(self) -> None:
        """Close the iterator; during a draw, it is closed after that. Idempotent."""
        self._dropped = True
        self._close()

    def _close(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed and not self._drawing:
                    self._closed = True
                    self._numbered = None
                    self._hand.clear()
                    getattr(self._iterator, "close", lambda: None)()
                    self._over()
            finally:
                self._lock.release()


class SharedAsyncIterator(SharedIterator[T]):
    """Over an async iterator, in the event loop in which it was made."""

    begin = aiter

    def __init__(
        self, iterable: AsyncIterable[T], worker: int, of: int, resume: dict[str, Any] | None, use: Use
    ) -> None:
        self._lock = anyio.Lock(fast_acquire=True)
        self._loop = anyio.lowlevel.current_token()
        self._cut = False
        super().__init__(iterable, worker, of, resume, use)

    async def next(self) -> T:
        """Return the next item that is given; StopAsyncIteration: there is none."""
        if anyio.lowlevel.current_token() != self._loop:
            raise PlanError(
                "this StreamDataset's async iterator belongs to the event loop in which it was made: read it there, or "
                "await dataset.areset() there first"
            )
        try:
            async with self._lock:
                item = await self._drawn()
                if self._dropped:
                    raise ClosedError("this StreamDataset was reset while it waited for an item: iterate it anew")
                return item
        finally:
            if self._dropped or self._ended:
                await self._close()

    async def _drawn(self) -> T:
        self._check()
        while not self._ended:
            try:
                item: T = await anext(self._iterator)
            except StopAsyncIteration:
                if self._cut:
                    raise self._keep_failure(
                        ClosedError(
                            "a pull of this StreamDataset was cancelled inside its iterator, which says now that it "
                            "has ended: areset() it"
                        )
                    ) from None
                self._end()
            except BaseException as error:
                if cancellation_requested(error):
                    self._cut = not inspect.isasyncgen(self._iterator) or self._iterator.ag_frame is None
                    raise
                failure = self._keep_failure(error)
                if failure is error:
                    raise
                raise failure from error
            else:
                self._cut = False
                if self._mine(self._at):
                    return item
        raise StopAsyncIteration

    async def drop(self) -> None:
        """Close the iterator; during a draw, it is closed after that. Idempotent."""
        self._dropped = True
        await self._close()

    async def _close(self) -> None:
        try:
            self._lock.acquire_nowait()
        except anyio.WouldBlock:
            return  # the draw in progress closes it
        try:
            if not self._closed:
                self._closed = True
                if (aclose := getattr(self._iterator, "aclose", None)) is not None:
                    with anyio.CancelScope(shield=True):
                        await aclose()
                self._over()
        finally:
            self._lock.release()
