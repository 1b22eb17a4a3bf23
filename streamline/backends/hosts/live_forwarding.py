"""Items of a live source, sent to the host of a worker and kept until the worker's state has passed them.

The feed is read in the consumer's event loop, once for all workers (`streamline.sources.live_reader`). When a host
dies, the worker that takes over is sent again what the state doesn't cover.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio

from streamline.backends.hosts.parts import WorkerPart
from streamline.backends.ipc.exceptions import encode_failure
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import LiveCredit, LiveEnd, LiveItems, OpenWorker, PackingError
from streamline.core.blame import cancellation_requested
from streamline.core.capacity import LIST_ITEMS
from streamline.core.channel import Inbox
from streamline.core.gate import wait_at_rest
from streamline.core.state import Tree
from streamline.core.tasks import Job, Tasks
from streamline.errors import TransportError

TRIM_ITEMS = 1024
"""Kept items from which on the worker's state is checked."""


class KeptItems:
    """Items of a feed that a worker's state doesn't cover yet.

    Attributes:
      items: from the one with index `first` on.
      stop: the index after the last one.
    """

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.first = 0
        self._trim_at = TRIM_ITEMS

    @property
    def stop(self) -> int:
        return self.first + len(self.items)

    def drop_until(self, index: int) -> None:
        """Drop the items before this one."""
        while self.first < index:
            self.items.popleft()
            self.first += 1

    def trim(self, covered: Callable[[], int]) -> None:
        """Drop items that the worker's state covers; amortised. `covered` returns how many, from the feed's first."""
        if len(self.items) >= self._trim_at:
            self.drop_until(covered())
            self._trim_at = max(TRIM_ITEMS, 2 * len(self.items))


class LiveForwarding(WorkerPart):
    """Forwards one worker's part of the feed, a bounded number of items ahead of it.

    Args:
      worker: its number on the link.
      name: of the source.
    """

    handles = (LiveCredit,)

    def __init__(self, worker: int, name: str, inbox: Inbox[Any], tasks: Tasks) -> None:
        self._worker = worker
        self._name = name
        self._inbox = inbox
        self._tasks = tasks
        self._capacity = max(2, inbox.capacity)
        self._link: Link | None = None
        self._kept = KeptItems()
        self._consumed = 0  # items that the worker has consumed
        self._unreleased = InFlightBytes()  # read from the feed, and not yet released to it
        self._ended: tuple[BaseException | None] | None = None
        self._room: anyio.Event | None = None
        self._job: Job | None = None

    def complete(self, message: OpenWorker) -> OpenWorker:
        return message._replace(live_capacity=self._capacity)

    def on_open(self, link: Link, state: Tree | None) -> None:
        consumed, kept = self._covered(state), self._kept
        if self._link is None and self._job is None:
            kept.first = consumed
        kept.drop_until(consumed)
        self._consumed = kept.first
        self._link = link
        if kept.items:
            self._send(list(kept.items), kept.first)
        if self._ended is not None:
            self._send_end()
        if self._job is None:
            name = f"feed of worker {self._worker}"
            self._job = self._tasks.start(partial(self._tasks.gate.participate, name, self._run), name, lambda: None)
        elif self._room is not None:
            self._room.set()

    @property
    def starved(self) -> bool:
        return self._inbox.starved

    def on_lost(self) -> None:
        self._link = None

    def on_end(self) -> None:
        if self._job is not None:
            self._job.cancel()
        self._kept.drop_until(self._kept.stop)

    def handle(self, message: LiveCredit) -> None:
        """Release what the worker has consumed."""
        self._consumed += message.items
        released = self._kept.stop - self._unreleased.items
        if (items := self._consumed - released) > 0:  # else an earlier host had consumed them already
            self._inbox.free(items, self._unreleased.take(items))
        if self._room is not None:
            self._room.set()

    def on_items(self, items: int, state: Callable[[], Tree | None]) -> None:
        self._kept.trim(lambda: self._covered(state()))

    def _covered(self, state: Tree | None) -> int:
        """Return how many items of the feed a state of the worker covers."""
        covered: int = 0 if state is None else state[self._name]
        return covered

    async def _run(self) -> None:
        inbox = self._inbox
        try:
            while True:
                while (room := self._capacity - (self._kept.stop - self._consumed)) < 1:
                    self._room = anyio.Event()
                    await wait_at_rest(self._room.wait())
                await inbox.passage()
                before = inbox.unreleased
                if (chunk := inbox.take(min(room, LIST_ITEMS))) is None:
                    if inbox.exhausted:
                        break
                    await inbox.wait()
                    continue
                after = inbox.unreleased
                if chunk.items:
                    self._unreleased.add(after[0] - before[0], after[1] - before[1])
                first = self._kept.stop
                self._kept.items.extend(chunk.items)
                self._send(chunk.items, first)
                del chunk
        except BaseException as failure:
            if cancellation_requested(failure):
                raise
            self._ended = (failure,)
        else:
            self._ended = (None,)
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
                f"{self._name} gives an item that can't be pickled, so it can't reach the workers' processes: "
                f"{error.kind} ({error.__cause__}). Let the stream give plain data, or run with Inline() or Threads()"
            ) from error.__cause__
        link.send(LiveItems(self._worker, packed, first))

    def _send_end(self) -> None:
        if (link := self._link) is not None and self._ended is not None:
            (failure,) = self._ended
            link.send(LiveEnd(self._worker, None if failure is None else encode_failure(link, failure)))
