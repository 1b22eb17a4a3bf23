"""Workers that give nothing for too long while the consumer waits: logged with their stacks, or replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Protocol

import anyio

from streamline.backends.hosts.host import HostSlot
from streamline.backends.hosts.parts import Handlers, HostPart
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.ipc.messages import StacksRequest, TaskStacks
from streamline.core.flow import Site
from streamline.core.tasks import MergeWait, Tasks
from streamline.errors import printable

logger = logging.getLogger("streamline.hosts")

CHECKS = 4
"""Checks in one `worker_timeout`."""

ANSWER_S = 0.2
"""Seconds for a host's event loop to list its waiting tasks; after that, only its threads are shown."""


class WatchedWorker(Protocol):
    """The part of a `RemoteWorker` that is used here."""

    number: int
    site: Site
    heard_at: float

    @property
    def starved(self) -> bool: ...

    @property
    def position(self) -> str: ...


class HangDetector(HostPart):
    """Checks the open `workers` of one host periodically, if `worker_timeout` is set.

    Only the time counts in which the consumer waits for that worker; a worker of a live source that has consumed all
    that came is not stuck. Each is reported once until it gives something again.
    """

    def __init__(
        self,
        slot: HostSlot,
        crash_tracking: CrashTracking,
        tasks: Tasks,
        workers: Callable[[], Iterable[WatchedWorker]],
    ) -> None:
        self._slot = slot
        self._crash_tracking = crash_tracking
        self._tasks = tasks
        self._workers = workers
        self._replied = anyio.Event()
        self._stacks_reply = ""

    def handlers(self) -> Handlers:
        return {TaskStacks: self._on_stacks}

    def begin(self) -> None:
        if (timeout_s := self._crash_tracking.worker_timeout) is not None:
            name = f"watch over {self._slot.host.name}"
            self._tasks.start(partial(self._check_workers, timeout_s), name, lambda: None)

    def _on_stacks(self, message: TaskStacks) -> None:
        self._stacks_reply = message.stacks
        self._replied.set()

    async def _check_workers(self, timeout_s: float) -> None:
        reported: dict[int, float] = {}
        while True:
            await anyio.sleep(timeout_s / CHECKS)
            for worker in self._workers():
                spent = self._stuck_s(worker)
                if spent < timeout_s or reported.get(worker.number) == worker.heard_at:
                    continue
                reported[worker.number], link = worker.heard_at, self.link
                await self._report(worker, spent)
                if self._crash_tracking.replace_stuck and link is not None and self.link is link:
                    self._slot.stuck_s = spent
                    self._slot.host.kill(link)

    def _stuck_s(self, worker: WatchedWorker) -> float:
        """Return the seconds that the consumer has waited for a worker that gave nothing; 0: it doesn't."""
        session = self._tasks.session
        waiting_since = session.meters.consumer.waiting_since
        if waiting_since is None or worker.starved:
            return 0.0
        if worker.site.shard not in {awaiting.shard for awaiting in session.services.get(MergeWait).workers()}:
            return 0.0
        return perf_counter() - max(waiting_since, worker.heard_at)

    async def _report(self, worker: WatchedWorker, spent: float) -> None:
        stacks = await self._stacks()
        at = worker.position
        logger.warning(
            "the worker of shard %d (%s) has given nothing for %.3g s, while the consumer waits%s. "
            "What runs there:\n%s",
            worker.site.shard,
            self._slot.host.name,
            spent,
            printable(f"; it stands after {at}") if at else "",
            stacks,
        )

    async def _stacks(self) -> str:
        """Return the stacks of the host's threads, and of its tasks, if its event loop answers."""
        self._replied, self._stacks_reply = anyio.Event(), ""
        if self.link is not None:
            self.link.send(StacksRequest())
            with anyio.move_on_after(ANSWER_S):
                await self._replied.wait()
        return await self._tasks.threads.run(self._slot.host.stacks) + (
            self._stacks_reply and f"\n{self._stacks_reply}"
        )
