"""What one reader reads, in order: objects one after the other, and the parts of each object one after the other.

The reader takes the first; requests for the following ones are made meanwhile, as far as the budget and the window
allow. Nothing is requested before the reader first asks.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from streamline.io.fetch.request import Request, RequestPool, expected
from streamline.io.storage.base import FoundObject, Storage


@dataclass(slots=True, eq=False)
class ObjectReader:
    """The reading of one object, or of some spans of it.

    Attributes:
      order: of the object among those that its reader takes.
      spans: what remains to be asked for, after `peeked`; None: nothing is known of the object yet.
      eager: the offset up to which it is read ahead; None: all of it.
      requests: what was asked for and not taken yet, in order.
      stream: whether it is to be read as one stream, by the reader itself.
    """

    order: int
    storage: Storage
    found: FoundObject
    start: int = 0
    spans: Iterator[tuple[int, int]] | None = None
    eager: int | None = None
    requests: deque[Request] = field(default_factory=deque)
    stream: bool = False
    peeked: tuple[int, int] | None = None

    @property
    def next_span(self) -> tuple[int, int] | None:
        """The next part to ask for."""
        if self.peeked is None and self.spans is not None:
            self.peeked = next(self.spans, None)
        return self.peeked

    @property
    def taken(self) -> bool:
        """Whether nothing is left for the reader."""
        return not self.requests and not self.stream and self.spans is not None and self.next_span is None


class ReadAhead:
    """The requests of one reader, and what it takes of them.

    Args:
      following: returns what is read after the last object, to be fetched ahead; None: nothing is.
    """

    def __init__(self, pool: RequestPool, following: Callable[[], ObjectReader | None] | None = None) -> None:
        self.account = pool.budget.account()
        self.readings: deque[ObjectReader] = deque()
        self.streaming = False
        self._pool = pool
        self._following = following
        self._again: list[tuple[int, int, Request]] = []
        self._unfinished: list[ObjectReader] = []
        self._owners: dict[Request, ObjectReader] = {}
        self._usual = 0
        self._waiting: asyncio.Future[None] | None = None
        self._there: Callable[[], bool] = bool
        self._closed = False
        pool.join(self)

    def add(self, reading: ObjectReader) -> None:
        """Read this object before the others, which come later in order."""
        self.readings.appendleft(reading)
        self._unfinished.insert(0, reading)
        self._pool.poke()

    def next_request(self) -> Request | None:
        begun = len(self._owners) - len(self._again)
        if self._closed or (begun >= self._pool.window and not self._starves()):
            return None
        if self._again and not (self._unfinished and self._unfinished[0].order < self._again[0][0]):
            later = self._again[0][2]
            if not self._admitted(later.charge, self.is_first(later)):
                return None
            del self._again[0]
            return later
        while True:
            if not self._unfinished:
                if self._following is None or self.streaming or (opened := self._following()) is None:
                    return None
                self.readings.append(opened)
                self._unfinished.append(opened)
            reading = self._unfinished[0]
            request = self._part(reading)
            if self._finished(reading):
                del self._unfinished[0]
            elif request is None:
                return None
            if request is not None:
                return request

    async def blocks(self, reading: ObjectReader) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the first object; closing this before the end drops the rest."""
        position = reading.start
        try:
            while not reading.taken:
                if reading.stream:
                    stream = reading.storage.blocks(reading.found.path, position, None, reading.found.etag)
                    async with aclosing(stream):
                        async for block in stream:
                            yield block
                    return
                request = reading.requests[0] if reading.requests else None
                if request is None:
                    self._pool.poke()
                    await self._arrival(lambda: bool(reading.requests) or reading.stream)
                    continue
                while request.blocks and not request.hidden:
                    block = request.blocks.popleft()
                    position += len(block)
                    yield block
                    request.charge -= len(block)
                    self.account.give(len(block))
                if request.over:
                    self._take(reading, request)
                    if request.error is not None:
                        raise request.error
                elif request.hidden:
                    await self._pool.stop([request])
                    request.as_stream()  # what has come so far may not be all that there is
                else:
                    await self._arrival(
                        lambda request=request: bool(request.blocks) or request.over or reading.stream  # type: ignore[misc]
                    )
        finally:
            await self.drop(reading)

    def whole(self) -> list[bytes] | None:
        """Return the first object, if it has come whole in one answer; it is taken then."""
        reading = self.readings[0] if self.readings else None
        if reading is None or len(reading.requests) != 1 or reading.next_span is not None:
            return None
        request = reading.requests[0]
        if not request.over or request.error is not None:
            return None
        found = list(request.blocks)
        self._take(reading, request)
        self.readings.popleft()
        return found

    @property
    def joins(self) -> bool:
        """Whether the first object comes in several answers, or not at all: `blocks` is the way to it."""
        reading = self.readings[0]
        if len(reading.requests) != 1:
            return bool(reading.requests) or reading.stream or reading.taken
        return reading.next_span is not None or reading.requests[0].error is not None

    async def arrival(self) -> None:
        """Wait until the first object is there, or `joins`."""
        self._pool.poke()
        reading = self.readings[0]
        await self._arrival(lambda: self.joins or bool(reading.requests and reading.requests[0].over))

    def poke(self) -> None:
        """Ask for more: something was taken."""
        self._pool.poke()

    async def drop(self, reading: ObjectReader) -> None:
        """Read no more of an object."""
        if reading not in self.readings:
            return
        self.readings.remove(reading)
        if reading in self._unfinished:
            self._unfinished.remove(reading)
        if reading.requests:
            for entry in [entry for entry in self._again if entry[0] == reading.order]:
                self._again.remove(entry)
                reading.requests.remove(entry[2])
                del self._owners[entry[2]]
            left = list(reading.requests)
            await self._pool.stop(left)
            for request in left:
                self._forget(request)
            reading.requests.clear()
        self._pool.poke()

    async def aclose(self) -> None:
        """Stop all requests, and release their bytes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._pool.leave(self, list(self._owners))
        for request in list(self._owners):
            self._forget(request)
        self.account.close()

    # Called by requests.

    def is_first(self, request: Request) -> bool:
        reading = self.readings[0] if self.readings else None
        return reading is not None and bool(reading.requests) and reading.requests[0] is request

    def learn(self, request: Request, found: FoundObject, rest: bool) -> None:
        reading = self._owners[request]
        reading.found = found
        reading.spans = iter(())
        assert request.stop is not None
        self._usual = request.stop - request.start
        if rest:
            assert found.size is not None
            reading.spans = parts([(request.stop, found.size)], self.account.part_bytes)
            if reading not in self._unfinished:
                insort(self._unfinished, reading, key=lambda one: one.order)
            self._wake()
            self._pool.poke()

    def again(self, request: Request) -> None:
        insort(self._again, (self._owners[request].order, request.start, request))
        self._pool.poke()

    def streams(self, request: Request) -> None:
        reading = self._owners.pop(request)
        reading.requests.remove(request)
        reading.spans = iter(())
        reading.stream = self.streaming = True
        self._wake()

    def arrived(self, request: Request) -> None:
        if self._waiting is not None and self.is_first(request):
            self._wake()

    # Choosing the next request.

    def _starves(self) -> bool:
        """Whether what the reader needs next is not requested yet: then no window may keep it waiting."""
        if self._again and self.is_first(self._again[0][2]):
            return True
        return not self.readings or not (self.readings[0].requests or self.readings[0].taken)

    def _part(self, reading: ObjectReader) -> Request | None:
        """Return the next request for an object, if there is one, and room for its bytes."""
        if reading.stream:
            return None
        awaited = bool(self.readings) and reading is self.readings[0] and not reading.requests
        if reading.spans is None:
            if reading.requests:
                return None
            span: tuple[int, int | None] = (reading.start, None)
        else:
            following = reading.next_span
            if following is None or (reading.eager is not None and following[0] >= reading.eager and not awaited):
                return None
            span = following
        part_bytes = self.account.part_bytes
        charge = expected(reading.found, *span, part_bytes, self._usual)
        if not self._admitted(charge, awaited):
            return None
        request = Request(self, reading.storage, reading.found, *span, part_bytes, charge)
        reading.peeked = None
        reading.requests.append(request)
        self._owners[request] = reading
        if self._waiting is not None and awaited:
            self._wake()
        return request

    def _finished(self, reading: ObjectReader) -> bool:
        """Whether there is nothing more to ask for of an object, as far as is known."""
        if reading.spans is None:
            return bool(reading.requests) or reading.stream
        return reading.next_span is None

    def _admitted(self, count: int, awaited: bool) -> bool:
        if self.account.take(count, awaited):
            return True
        self._pool.budget.call_when_freed(self._pool.poke)
        return False

    def _take(self, reading: ObjectReader, request: Request) -> None:
        reading.requests.popleft()
        if reading.spans is None:
            reading.spans = iter(())  # it ends here, and its size was unknown
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._owners.pop(request, None) is None:
            return
        request.blocks.clear()  # the task that made it may keep it for long
        if not self._closed:
            self.account.give(request.charge)

    async def _arrival(self, there: Callable[[], bool]) -> None:
        while not there():
            self._waiting = asyncio.get_running_loop().create_future()
            self._there = there
            try:
                await self._waiting
            finally:
                self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done() and self._there():
            self._waiting.set_result(None)


def parts(spans: list[tuple[int, int]] | Iterator[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Yield spans cut into parts of at most `most` bytes."""
    for start, stop in spans:
        for begin in range(start, stop, most):
            yield begin, min(stop, begin + most)
