"""Workers that give nothing for too long while the consumer waits for them: reported with their stacks, or replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from time import perf_counter

import anyio

from streamline.backends.hosts.host import Host
from streamline.backends.hosts.remote_worker import RemoteWorker
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import WaitingTasks, WhatWaits
from streamline.core.tasks import Tasks
from streamline.errors import printable

__all__ = ["HangDetector"]


logger = logging.getLogger("streamline.hosts")


LOOKS = 4
"""Looks at the clock in one `worker_timeout`."""


ANSWER_S = 0.2
"""Seconds that a host's event loop has to say what its tasks wait for; one that doesn't is shown by its threads."""


class HangDetector:
    """Looks at the workers that one host runs now and then, for as long as the running lasts, if that is wanted.

    The clock runs only while the consumer waits, and only for the workers that it waits for; a worker of a live source
    that has dealt with all that it was fed is not stuck. Each is reported once until it gives something again.

    Args:
      workers: those that run now.

    Attributes:
      link: to the host; None: there is none at the moment.
      ended_for_s: how long a worker had been stuck when the host was killed for that; None: it wasn't.
    """

    def __init__(
        self, host: Host, care: CrashTracking, tasks: Tasks, workers: Callable[[], Collection[RemoteWorker[object]]]
    ) -> None:
        self.link: Link | None = None
        self.ended_for_s: float | None = None
        self._host = host
        self._care = care
        self._tasks = tasks
        self._workers = workers
        self._answered = anyio.Event()
        self._answer = ""

    def start(self) -> None:
        """Begin to look."""
        if (timeout_s := self._care.worker_timeout) is not None:
            self._tasks.start(partial(self._look, timeout_s), f"watch over {self._host.name}", lambda: None)

    def answered(self, message: WaitingTasks) -> None:
        """The host has said what its tasks wait for."""
        self._answer = message.stacks
        self._answered.set()

    async def _look(self, timeout_s: float) -> None:
        reported: dict[int, float] = {}
        while True:
            await anyio.sleep(timeout_s / LOOKS)
            for worker in self._workers():
                spent = self._stuck_s(worker)
                if spent < timeout_s or reported.get(worker.number) == worker.heard_at:
                    continue
                reported[worker.number] = worker.heard_at
                await self._report(worker, spent)
                if self._care.replace_stuck and self.link is not None:
                    self.ended_for_s = spent
                    self._host.kill(self.link)

    def _stuck_s(self, worker: RemoteWorker[object]) -> float:
        """Return for how long the consumer has been waiting for a worker that gave nothing; 0: it isn't stuck."""
        session = self._tasks.session
        waiting_since, awaited = session.meters.consumer.waiting_since, session.awaited
        if waiting_since is None or awaited is None or worker.hungry:
            return 0.0
        if worker.site.shard not in {awaiting.shard for awaiting in awaited()}:
            return 0.0
        return perf_counter() - max(waiting_since, worker.heard_at)

    async def _report(self, worker: RemoteWorker[object], spent: float) -> None:
        stacks = await self._stacks()
        at = worker.position
        logger.warning(
            "the worker of shard %d (%s) has given nothing for %.3g s, while the consumer waits%s. "
            "What runs there:\n%s",
            worker.site.shard,
            self._host.name,
            spent,
            printable(f"; it stands behind {at}") if at else "",
            stacks,
        )

    async def _stacks(self) -> str:
        """Return what the host is at: its threads, and the tasks of its event loop, if that answers."""
        self._answered, self._answer = anyio.Event(), ""
        if self.link is not None:
            self.link.send(WhatWaits())
            with anyio.move_on_after(ANSWER_S):
                await self._answered.wait()
        return await self._tasks.threads.run(self._host.stacks) + (self._answer and f"\n{self._answer}")
