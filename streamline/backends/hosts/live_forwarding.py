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

from streamline.backends.ipc.exceptions import encode_failure
from streamline.backends.ipc.link import InFlightBytes, Link
from streamline.backends.ipc.messages import LiveCredit, LiveEnd, LiveItems, PackingError
from streamline.core.blame import cancellation_requested
from streamline.core.capacity import LIST_ITEMS
from streamline.core.channel import Inbox
from streamline.core.gate import resting
from streamline.core.state import Tree
from streamline.core.tasks import Job, Tasks
from streamline.errors import TransportError

TRIM_ITEMS = 1024
"""Kept items from which on the worker's state is checked."""


class LiveForwarding:
    """Forwards one worker's part of the feed, at most `capacity` items ahead of it.

    Args:
      worker: its number on the link.
      consumed: returns how many items the worker's state covers.
    """

    def __init__(self, worker: int, name: str, inbox: Inbox[Any], consumed: Callable[[], int], tasks: Tasks) -> None:
        self.name = name
        self.capacity = max(2, inbox.capacity)
        self._worker = worker
        self._inbox = inbox
        self._consumed_by_state = consumed
        self._tasks = tasks
        self._link: Link | None = None
        self._kept: deque[Any] = deque()
        self._first = 0  # index of the first item kept
        self._consumed = 0  # items that the worker has consumed
        self._released = 0  # items released to the feed
        self._unreleased = InFlightBytes()  # not yet released to the feed
        self._trim_at = TRIM_ITEMS
        self._ended: tuple[BaseException | None] | None = None
        self._room: anyio.Event | None = None
        self._job: Job | None = None

    def open(self, link: Link, state: Tree | None) -> None:
        """Forward to the worker at the other end of `link`, opened at `state`."""
        consumed = 0 if state is None else state[self.name]
        if self._link is None and self._job is None:
            self._first = self._released = consumed
        self._drop(consumed)
        self._consumed = self._first
        self._link = link
        if self._kept:
            self._send(list(self._kept), self._first)
        if self._ended is not None:
            self._send_end()
        if self._job is None:
            name = f"feed of worker {self._worker}"
            self._job = self._tasks.start(partial(self._tasks.gate.participate, name, self._run), name, lambda: None)
        elif self._room is not None:
            self._room.set()

    @property
    def starved(self) -> bool:
        """Whether the worker has consumed all that came."""
        return self._inbox.starved

    def lost(self) -> None:
        """Stop sending: the worker's host has ended."""
        self._link = None

    def end(self) -> None:
        """Stop: the worker reads no more."""
        if self._job is not None:
            self._job.cancel()
        self._kept.clear()

    def on_credit(self, message: LiveCredit) -> None:
        """Release what the worker has consumed."""
        self._consumed += message.items
        if (items := self._consumed - self._released) > 0:  # else an earlier host had consumed them already
            self._released += items
            self._inbox.free(items, self._unreleased.take(items))
        if self._room is not None:
            self._room.set()

    def trim(self) -> None:
        """Drop items that the worker's state covers; amortised."""
        if len(self._kept) < self._trim_at:
            return
        self._drop(self._consumed_by_state())
        self._trim_at = max(TRIM_ITEMS, 2 * len(self._kept))

    def _drop(self, consumed: int) -> None:
        while self._first < consumed:
            self._kept.popleft()
            self._first += 1

    async def _run(self) -> None:
        inbox = self._inbox
        try:
            while True:
                while (room := self.capacity - (self._first + len(self._kept) - self._consumed)) < 1:
                    self._room = anyio.Event()
                    await resting(self._room.wait())
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
                first = self._first + len(self._kept)
                self._kept.extend(chunk.items)
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
                f"{self.name} gives an item that can't be pickled, so it can't reach the workers' processes: "
                f"{error.kind} ({error.__cause__}). Let the stream give plain data, or run with Inline() or Threads()"
            ) from error.__cause__
        link.send(LiveItems(self._worker, packed, first))

    def _send_end(self) -> None:
        if (link := self._link) is not None and self._ended is not None:
            (failure,) = self._ended
            link.send(LiveEnd(self._worker, None if failure is None else encode_failure(link, failure)))
