"""What a worker in a host reads of a live source: sent there as it comes, and kept until the worker's state is past it.

The feed itself is read in the running's own event loop, once for all workers (`streamline.sources.live_reader`). When a
host dies, the worker that takes over is sent again what the other had been sent and its state isn't behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio

from streamline.backends.ipc.codec import failure_out
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import LiveEnd, LiveItems, PackingError, Taken
from streamline.core.blame import cancellation_requested
from streamline.core.channel import Inbox
from streamline.core.flow import LIST_ITEMS
from streamline.core.gate import resting
from streamline.core.state import Tree
from streamline.core.tasks import Job, Tasks
from streamline.errors import TransportError

__all__ = ["LiveForwarding"]


TRIM_ITEMS = 1024
"""Items that are kept before it is worth looking at the worker's state."""


class LiveForwarding:
    """One worker's feed.

    Args:
      worker: its number.
      inbox: what it is handed.
      done: tells how many items the worker's state is behind.

    Attributes:
      capacity: items that may be in the host.
    """

    def __init__(self, worker: int, name: str, inbox: Inbox[Any], done: Callable[[], int], tasks: Tasks) -> None:
        self.name = name
        self.capacity = max(2, inbox.capacity)
        self._worker = worker
        self._inbox = inbox
        self._done = done
        self._tasks = tasks
        self._link: Link | None = None
        self._kept: deque[Any] = deque()
        self._first = 0  # the number of the first one kept
        self._taken = 0  # the number behind the last one that the worker has dealt with
        self._freed = 0  # likewise, and that the feed was told of
        self._parcels = InFlightBytes()  # that the feed has not been told of
        self._trim_at = TRIM_ITEMS
        self._over: tuple[BaseException | None] | None = None
        self._room: anyio.Event | None = None
        self._job: Job | None = None

    def open(self, link: Link, state: Tree | None) -> None:
        """Feed the worker at the other end of `link`, opened at `state`."""
        done = 0 if state is None else state[self.name]
        if self._link is None and self._job is None:
            self._first = self._freed = done
        while self._first < done:
            self._kept.popleft()
            self._first += 1
        self._taken = self._first
        self._link = link
        if self._kept:
            self._send(list(self._kept), self._first)
        if self._over is not None:
            self._send_end()
        if self._job is None:
            name = f"feed of worker {self._worker}"
            self._job = self._tasks.start(partial(self._tasks.gate.participate, name, self._run), name, lambda: None)
        elif self._room is not None:
            self._room.set()

    @property
    def hungry(self) -> bool:
        """Whether the worker has dealt with all that came."""
        return self._inbox.hungry

    def lost(self) -> None:
        """The worker's host is gone."""
        self._link = None

    def end(self) -> None:
        """The worker reads no more."""
        if self._job is not None:
            self._job.cancel()
        self._kept.clear()

    def taken(self, message: Taken) -> None:
        """The worker has dealt with some."""
        self._taken += message.items
        if (items := self._taken - self._freed) > 0:  # else an earlier host had dealt with them, too
            self._freed += items
            self._inbox.free(items, self._parcels.take(items))
        if self._room is not None:
            self._room.set()

    def trim(self) -> None:
        """Drop what the worker's state is behind; not each time."""
        if len(self._kept) < self._trim_at:
            return
        done = self._done()
        while self._first < done:
            self._kept.popleft()
            self._first += 1
        self._trim_at = max(TRIM_ITEMS, 2 * len(self._kept))

    async def _run(self) -> None:
        inbox = self._inbox
        try:
            while True:
                while (room := self.capacity - (self._first + len(self._kept) - self._taken)) < 1:
                    self._room = anyio.Event()
                    await resting(self._room.wait())
                await inbox.passage()
                before = inbox.unreleased
                if (chunk := inbox.take(min(room, LIST_ITEMS))) is None:
                    if inbox.over:
                        break
                    await inbox.wait()
                    continue
                after = inbox.unreleased
                if chunk.items:
                    self._parcels.add(after[0] - before[0], after[1] - before[1])
                first = self._first + len(self._kept)
                self._kept.extend(chunk.items)
                self._send(chunk.items, first)
                del chunk
        except BaseException as failure:
            if cancellation_requested(failure):
                raise
            self._over = (failure,)
        else:
            self._over = (None,)
        finally:
            with anyio.CancelScope(shield=True):
                await inbox.aclose()
        self._send_end()

    def _send(self, items: Sequence[Any], first: int) -> None:
        if (link := self._link) is None:
            return
        try:
            packed = link.pack(items)
        except PackingError as error:
            if error.index:
                self._send(items[: error.index], first)
            raise TransportError(
                f"{self.name} gives an item that can't be pickled, so it can't reach the workers' processes: "
                f"{error.kind} ({error.__cause__}). Let the stream give plain data, or run with Inline() or Threads()"
            ) from error.__cause__
        link.send(LiveItems(self._worker, packed, first))

    def _send_end(self) -> None:
        if (link := self._link) is not None and self._over is not None:
            (failure,) = self._over
            link.send(LiveEnd(self._worker, None if failure is None else failure_out(link, failure)))
