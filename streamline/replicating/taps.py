"""How the one stream is read, whatever it is: a sync or an async iterable, a running stream, or a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from time import perf_counter
from typing import Any

from streamline.core.gate import Gate
from streamline.core.pace import SLICE_S
from streamline.core.state import Reference, Since
from streamline.errors import PlanError, PlanTypeError
from streamline.replicating.shares import Shares
from streamline.runtime.open import Openable, RunOptions
from streamline.runtime.stream import Stream
from streamline.runtime.stream_base import BaseStream
from streamline.snapshot.snapshot import Snapshot
from streamline.transfer.stage import Transfer

__all__ = ["AsyncTap", "Passed", "PlanTap", "SyncTap", "Tap", "check_source", "tap_of"]


class Passed(Exception):  # noqa: N818 - whoever asks looks again
    """What was asked for is out of reach: readers have gone on."""


class Tap(ABC):
    """Draws from the stream, in one task. What it has opened, it closes.

    Attributes:
      is_async: it may be read in an event loop that others use.
      drawn: items of the stream that were drawn here.
    """

    is_async = True
    drawn = 0

    @abstractmethod
    async def draw(self, room: int, shares: Shares) -> bool:
        """Deal 1 to `room` items, as many as come in no time; True at the end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close what was opened; idempotent, if it wasn't opened nothing happens."""


class SyncTap(Tap):
    """A sync iterable. It may wait for its next item, so it is read in a thread of its own."""

    is_async = False

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None

    async def draw(self, room: int, shares: Shares) -> bool:
        if self._iterator is None:
            self._iterator = iter(self._source)
        iterator, give = self._iterator, shares.give
        stop = perf_counter() + SLICE_S
        for _ in range(room):
            try:
                item = next(iterator)
            except StopIteration:
                return True
            self.drawn += 1
            give(item)  # at once: the next one may be long in coming
            if perf_counter() > stop:
                break
        return False

    async def aclose(self) -> None:
        if (close := getattr(self._iterator, "close", None)) is not None:
            close()


class AsyncTap(Tap):
    """An async iterable."""

    def __init__(self, source: AsyncIterable[Any]) -> None:
        self._source = source
        self._iterator: AsyncIterator[Any] | None = None

    async def draw(self, room: int, shares: Shares) -> bool:
        if self._iterator is None:
            self._iterator = aiter(self._source)
        iterator, give = self._iterator, shares.give
        stop = perf_counter() + SLICE_S
        for _ in range(room):
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                return True
            self.drawn += 1
            give(item)
            if perf_counter() > stop:
                break
        return False

    async def aclose(self) -> None:
        if (aclose := getattr(self._iterator, "aclose", None)) is not None:
            await aclose()


class PlanTap(Tap):
    """A pipeline, opened here: what was drawn can be drawn again.

    Args:
      options: of `open`.
      resume: where to begin; None: at the beginning.
      at: items of the stream before there.
    """

    def __init__(self, pipe: Openable[Any], options: RunOptions, resume: Snapshot | None, at: int) -> None:
        self._opened = pipe.open(resume=resume, **options)
        self._at = at
        self._stream: Stream[Any] | None = None
        self._marks: deque[tuple[int, Reference]] = deque()
        self._now: Reference | None = None
        self._list: list[Any] = []
        self._dealt = 0

    async def draw(self, room: int, shares: Shares) -> bool:
        stream = self._stream
        if stream is None:
            self._stream = stream = self._opened.stream()
            await stream.start()
            self._marks.append((self._at, stream.behind))
        if self._dealt == len(self._list) and not await self._pull(stream, shares):
            return True
        part = self._list[self._dealt : self._dealt + room]
        self._dealt += len(part)
        shares.give_all(part)
        return False

    async def _pull(self, stream: Stream[Any], shares: Shares) -> bool:
        """Fetch the next list; False at the end. The state behind it is known before any of it is dealt."""
        self._list, self._dealt = [], 0
        before = stream.behind
        try:
            first = await anext(stream)
        except StopAsyncIteration:
            return False
        self._list = [first, *stream.take_rest()]
        oldest = shares.oldest(shares.taken)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.popleft()
        if self._marks[-1][0] < self._at + self.drawn:
            self._marks.append((self._at + self.drawn, before))
        self._now = stream.behind
        self.drawn += len(self._list)
        return True

    def snapshot(self, oldest: int) -> tuple[int, Snapshot] | None:
        """Return a snapshot from which everything behind item `oldest` is had again, and how many items are before it.

        None: nothing was drawn. From any thread.

        Raises:
          Passed: nobody needs that item any more.
        """
        now = self._now
        if self._stream is None or now is None:
            return None
        behind = [found for found in tuple(self._marks) if found[0] <= oldest]
        if not behind:
            raise Passed
        at, mark = behind[-1]
        return at, self._stream.snapshot_since(Since(mark.get(), now.get()), Gate())

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


def check_source(source: object) -> None:
    """Insist on something that `tap_of` can read.

    Raises:
      PlanTypeError: it can't be iterated.
      PlanError: its batches are for the thread that takes them, which isn't the replica's reader's.
    """
    if isinstance(source, Openable | BaseStream):
        for stage in source.plan.after:
            if isinstance(stage, Transfer) and stage.hands_over:
                raise PlanError(
                    f"StreamReplicator(source) ends with {stage}, whose batches are for the CUDA stream of the thread "
                    "that reads them all, and a replica's reader has another: leave it out, and let each reader have "
                    f'replicator.pipeline(r).transfer("{stage.device}")'
                )
    if isinstance(source, Openable | AsyncIterable) or (
        isinstance(source, Iterable) and not isinstance(source, str | bytes)
    ):
        return
    hint = ": call it, and give what it returns" if callable(source) else ""
    raise PlanTypeError(
        f"StreamReplicator(source) is a pipeline, or an iterable, sync or async, got {type(source).__name__}{hint}"
    )


def tap_of(source: Any, options: RunOptions, resume: Snapshot | None, at: int) -> Tap:
    """Return what reads `source`; of a pipeline, opened with these options, behind `resume` and `at` items."""
    if isinstance(source, Openable):
        return PlanTap(source, options, resume, at)
    return AsyncTap(source) if isinstance(source, AsyncIterable) else SyncTap(source)
