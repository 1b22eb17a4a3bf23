"""The long-lived tasks that make the requests of one source: as many as may be in flight, and no more than needed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from streamline.core.byte_budget import Budget
from streamline.core.tasks import Job, Tasks
from streamline.io.fetch.request import Request

WINDOW = 2
"""Requests that are begun and not taken yet, for each that may be in flight."""


class Requester(Protocol):
    """A flow that wants requests made."""

    def next_request(self) -> Request | None:
        """Return the next request to make, which counts as begun; None: there is none that may begin now."""


class RequestPool:
    """Makes the requests of all flows of a source, in turn; each flow's in its order.

    A task takes the next request as soon as it has done with one, so nothing is paid per request but the request.

    Attributes:
      budget: bytes that all requests may hold.
      window: requests that each flow may have begun, and not taken yet: one slow answer shall hold up few others.

    Args:
      tasks: where the tasks are started.
      concurrency: requests in flight at the most.
      budget: see there.
    """

    def __init__(self, tasks: Tasks, concurrency: int, budget: Budget) -> None:
        self.budget = budget
        self.concurrency = concurrency
        self._tasks = tasks
        self._requesters: deque[Requester] = deque()
        self._idle: list[tuple[asyncio.Future[Request], Job]] = []
        self._busy: dict[Request, Job] = {}
        self._jobs: set[Job] = set()
        self._closed = False
        self._share()

    def join(self, requester: Requester) -> None:
        """Make the requests of a flow, too."""
        self._requesters.append(requester)
        self._share()

    async def leave(self, requester: Requester, requests: list[Request]) -> None:
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
        while not self._closed and (self._idle or len(self._jobs) < self.concurrency):
            request = self._take()
            if request is None:
                return
            if self._idle:
                waiting, job = self._idle.pop()
                self._busy[request] = job
                waiting.set_result(request)
            else:
                self._start(request)

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
                following = self._take()
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
