"""Workers that give nothing for too long while the consumer waits for them: reported with their stacks, or replaced."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from time import perf_counter

import anyio

from streamline.hosts.host import Host
from streamline.hosts.remote import RemoteWorker
from streamline.tasks import Tasks

__all__ = ["watch_stuck"]

logger = logging.getLogger("streamline.hosts")

LOOKS = 4
"""Looks at the clock in one `worker_timeout`."""


async def watch_stuck(
    host: Host,
    stacks: Callable[[], Awaitable[str]],
    workers: Callable[[], Collection[RemoteWorker[object]]],
    tasks: Tasks,
    timeout_s: float,
    replace: Callable[[RemoteWorker[object], float], None] | None,
) -> None:
    """Look at a host's workers now and then, for as long as the running lasts.

    The clock runs only while the consumer waits, and only for the workers that it waits for; a worker of a live source
    that has dealt with all that it was fed is not stuck. Each is reported once until it gives something again.

    Args:
      stacks: what the host is at.
      workers: those that run now.
      replace: told to end the host of a stuck worker, and how long it has been stuck; None: it is only reported.
    """
    reported: dict[int, float] = {}
    while True:
        await anyio.sleep(timeout_s / LOOKS)
        for worker in workers():
            spent = _stuck_s(worker, tasks)
            if spent < timeout_s or reported.get(worker.number) == worker.heard_at:
                continue
            reported[worker.number] = worker.heard_at
            await _report(host, stacks, worker, spent)
            if replace is not None:
                replace(worker, spent)


def _stuck_s(worker: RemoteWorker[object], tasks: Tasks) -> float:
    """Return for how long the consumer has been waiting for a worker that gave nothing; 0: it isn't stuck."""
    waiting_since = tasks.session.meters.consumer.waiting_since
    awaited = tasks.session.awaited
    if waiting_since is None or awaited is None or worker.hungry:
        return 0.0
    if worker.site.shard not in {awaiting.shard for awaiting in awaited()}:
        return 0.0
    return perf_counter() - max(waiting_since, worker.heard_at)


async def _report(host: Host, stacks: Callable[[], Awaitable[str]], worker: RemoteWorker[object], spent: float) -> None:
    what = await stacks()
    at = worker.position
    logger.warning(
        "the worker of shard %d (%s) has given nothing for %.3g s, while the consumer waits%s. What runs there:\n%s",
        worker.site.shard,
        host.name,
        spent,
        f"; it stands behind {at}" if at else "",
        what,
    )
