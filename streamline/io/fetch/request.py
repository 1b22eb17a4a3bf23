"""Requests for the bytes of remote files, and the long-lived tasks that make those of one source.

A request knows what is asked, what has come, and what its answer means for the rest of its object.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamline.core.byte_budget import Account, Budget
from streamline.core.tasks import Job, Tasks
from streamline.errors import ClosedError, ReadError, printable
from streamline.io.storage.base import FoundObject, Storage, check_listed, too_short

GUESS_BYTES = 256 * 2**10
"""What an answer of unknown size is taken to hold at least, until it says so: what a connection buffers anyway."""


class Owner(Protocol):
    """The reader that requests are made for."""

    account: Account

    def next_request(self) -> Request | None:
        """Return the next request to make, which counts as begun; None: there is none that may begin now."""

    def is_first(self, request: Request) -> bool:
        """Whether the reader waits for this request, or will next."""

    def learn(self, request: Request, found: FoundObject, rest: bool) -> None:
        """Learn what an answer says of the object; `rest`: it ends before the object does."""

    def again(self, request: Request) -> None:
        """Make this request later: there is no room now for what it turned out to hold."""

    def streams(self, request: Request) -> None:
        """Read this object as one stream instead, at the reader's own pace."""

    def arrived(self, request: Request) -> None:
        """There is more of `request`, or it is over."""


@dataclass(slots=True, eq=False)
class Request:
    """Bytes `start` to `stop` of an object.

    Attributes:
      stop: None: nothing is known of the object, so its first part is asked for.
      part_bytes: that part's size at the most.
      charge: bytes that its owner's account holds for it.
      blocks: what has come and was not taken yet.
      hidden: whether `blocks` may still be thrown away: it is unknown yet whether they are the object's only part.
    """

    owner: Owner
    storage: Storage
    found: FoundObject
    start: int
    stop: int | None
    part_bytes: int
    charge: int
    blocks: deque[bytes] = field(default_factory=deque)
    hidden: bool = False
    over: bool = False
    error: Exception | None = None
    _untold: bool = True
    _got: int = 0
    _dropped: bool = False
    _etag: str | None = None

    def __post_init__(self) -> None:
        self._untold, self._etag = self.stop is None, self.found.etag

    async def run(self) -> None:
        """Make the request; what goes wrong, `error` says. Cancellation: it is not over."""
        self._got, self.hidden, self._dropped = 0, False, False
        try:
            if self._untold and not hasattr(self.storage, "fetch"):
                self._look(await self.storage.stat(self.found.path))
            if not self._dropped:
                await self._fetch()
            if not self._dropped and self.stop is not None and self._got != self.stop - self.start:
                end = self.start + self._got
                raise ReadError(
                    f"{printable(self.found.path)} ends at byte {end:,}, expected {self.stop:,}: has it been replaced?"
                )
        except Exception as error:
            self.fail(error)
        else:
            if not self._dropped:
                self._complete()

    def fail(self, error: Exception) -> None:
        """End with an error, after what has come."""
        self.error = error
        self._complete()

    def lost(self) -> None:
        """The task that was to make this request is gone: its reader is leaving, or the loop ends."""
        if not self.over:
            self.fail(ClosedError("the stream is closed"))

    def begins(self, found: FoundObject, end: int | None, ranged: bool) -> bool:
        """Take what an answer says of itself; return whether its bytes are wanted.

        Args:
          end: the offset after its last byte; None: unknown.
          ranged: whether it is what was asked for, and not the whole object.
        """
        if not self._untold:
            return True
        if end is None:
            self.hidden = True
            return not self.owner.is_first(self) or self.as_stream()
        rest = found.size is None or end < found.size
        count = end - self.start
        if (rest and None in (found.etag, found.size)) or (not ranged and count > self.part_bytes):
            return self.as_stream()
        if not self._charge(count):
            return False
        self._untold = False
        self.stop = end
        self.owner.learn(self, found, rest)
        return True

    def put(self, block: bytes) -> bool:
        """Take the next block; return whether more is wanted."""
        self._got += len(block)
        self.blocks.append(block)
        if not self.hidden:
            self.owner.arrived(self)
        elif self._got > self.charge and (self._got > self.part_bytes or not self._charge(2 * self._got)):
            return self.as_stream()
        return True

    async def _fetch(self) -> None:
        stop = self.start + self.part_bytes if self.stop is None else self.stop
        if (fetch := getattr(self.storage, "fetch", None)) is not None:
            made: Awaitable[Any] = fetch(self.found.path, self.start, stop, self._etag, self)
            await made
        elif stop > self.start:
            self.put(await self.storage.read(self.found.path, self.start, stop, self._etag))

    def _look(self, found: FoundObject) -> None:
        check_listed(printable(self.found.path), self.found.size, found.size)
        if found.size is not None and self.start > found.size:
            raise too_short(printable(self.found.path), found.size, self.start)
        self._etag = self._etag or found.etag
        self.begins(found, None if found.size is None else min(found.size, self.start + self.part_bytes), True)
        if found.size is None and not self._dropped:
            self.as_stream()

    def _complete(self) -> None:
        if self.hidden or self._untold:
            self.hidden = self._untold = False
            self.owner.account.take(self._got - self.charge, True)
            self.charge = self._got
        self.over = True
        self.owner.arrived(self)

    def _charge(self, count: int) -> bool:
        account = self.owner.account
        if count <= self.charge:
            account.give(self.charge - count)
        elif not account.take(count - self.charge, self.owner.is_first(self)):
            account.give(self.charge)
            self.charge = count
            self._dropped = True
            self.blocks.clear()
            self.owner.again(self)
            return False
        self.charge = count
        return True

    def as_stream(self) -> bool:
        """Throw away what has come, and let the reader read the object by itself; False: no more is wanted."""
        self.owner.account.give(self.charge)
        self.charge = 0
        self._dropped = True
        self.blocks.clear()
        self.owner.streams(self)
        return False


def expected(found: FoundObject, start: int, stop: int | None, part_bytes: int, usual: int) -> int:
    """Return what the answer to a request is taken to hold, until it says so.

    Taken for too little, answers would come that there is no room for, and be thrown away with their connections.

    Args:
      stop: None: the object's first part is asked for.
      usual: what the last such part held.
    """
    if stop is not None:
        return stop - start
    if found.size is not None:
        return max(0, min(found.size - start, part_bytes))
    return max(GUESS_BYTES, min(usual, part_bytes))


WINDOW = 2
"""Requests that are begun and not taken yet, for each that may be in flight."""


class RequestPool:
    """Makes the requests of all flows of a source, in turn; each flow's in its order.

    A task takes the next request as soon as it has done with one, so nothing is paid per request but the request.

    Attributes:
      window: requests that each flow may have begun, and not taken yet: one slow answer shall hold up few others.
    """

    def __init__(self, tasks: Tasks, concurrency: int, budget: Budget) -> None:
        self.budget = budget
        self.concurrency = concurrency
        self._tasks = tasks
        self._requesters: deque[Owner] = deque()
        self._idle: list[tuple[asyncio.Future[Request], Job]] = []
        self._busy: dict[Request, Job] = {}
        self._jobs: set[Job] = set()
        self._closed = False
        self._share()

    def join(self, requester: Owner) -> None:
        """Make the requests of a flow, too."""
        self._requesters.append(requester)
        self._share()

    async def leave(self, requester: Owner, requests: list[Request]) -> None:
        """Make no more requests of a flow, and break off `requests`, which are on their way."""
        if requester in self._requesters:
            self._requesters.remove(requester)
            self._share()
        await self.stop(requests)
        self.poke()

    async def stop(self, requests: list[Request]) -> None:
        """Break off those of the requests that are on their way, and wait until they are."""
        jobs = [job for request in requests if (job := self._busy.pop(request, None)) is not None]
        if jobs:
            await self._stop(jobs)

    def poke(self) -> None:
        """Start the requests that may begin and that no task has taken."""
        while not self._closed and self._working < self.concurrency:
            request = self._take()
            if request is None:
                return
            if self._idle:
                waiting, job = self._idle.pop()
                self._busy[request] = job
                waiting.set_result(request)
            else:
                self._start(request)

    def resize(self, concurrency: int) -> None:
        """Have so many requests in flight at once from now on; those that there are too many of are finished."""
        self.concurrency = concurrency
        self._share()
        self.poke()

    @property
    def _working(self) -> int:
        """Tasks that have a request."""
        return len(self._jobs) - len(self._idle)

    async def aclose(self) -> None:
        """End all tasks, and wait for them. Idempotent."""
        self._closed = True
        self.budget.forget(self.poke)
        await self._stop(list(self._jobs))

    def _share(self) -> None:
        self.window = max(2, WINDOW * self.concurrency // max(1, len(self._requesters)))

    def _take(self) -> Request | None:
        requesters = self._requesters
        for _ in range(len(requesters)):
            requester = requesters[0]
            requesters.rotate(-1)
            if (request := requester.next_request()) is not None:
                return request
        return None

    def _start(self, request: Request) -> None:
        async def work() -> None:
            await self._work(request, job)

        job = self._tasks.start(work, "request", request.lost)
        self._jobs.add(job)
        self._busy[request] = job

    async def _work(self, request: Request, job: Job) -> None:
        try:
            while True:
                await request.run()
                self._busy.pop(request, None)
                following = None if self._working > self.concurrency else self._take()
                if following is None:
                    following = await self._wait(job)
                request = following
                self._busy[request] = job
        finally:
            self._jobs.discard(job)
            self._busy.pop(request, None)
            request.lost()

    async def _wait(self, job: Job) -> Request:
        waiting: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        self._idle.append((waiting, job))
        try:
            return await waiting
        except asyncio.CancelledError:
            if (waiting, job) in self._idle:
                self._idle.remove((waiting, job))
            else:
                waiting.result().lost()
            raise

    async def _stop(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.cancel()
        for job in jobs:
            await self._tasks.stop(job)
            self._jobs.discard(job)
