"""Whose turn it is to be handed a live item, and whether there is room: the queues of a rank's workers, without I/O.

A full queue may belong to a worker that nobody waits for, while another one, which drops what it is given, *starves*:
its queue is empty, its chain waits for an item, and the merge waits for it. Then the others' queues may grow, up to a
bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio

from streamline.core.channel import Channel, Inbox
from streamline.core.gate import resting
from streamline.core.state import At, CountedStates
from streamline.errors import WorkerStarved
from streamline.sources.live import Live

__all__ = ["Queue", "Turns"]


SPARE_ITEMS = 64
"""Items that may be read once a worker was seen to starve, though it has some by then: else each would cost switches of
tasks (10,000 drops in a row take a fifth of the time)."""


class Queue:
    """What waits for one worker.

    Attributes:
      index: of the worker on its rank.
      given: items that the worker was handed since the feed began.
      closed: the worker reads no more: it has ended, it has failed, or nobody knows yet.
      worker: what it gives; None: that isn't known yet.
      over: the worker has ended; a failed one has not: a resume behind a fix needs its items where they were.
    """

    def __init__(self, name: str, index: int, shard: int, done: int, capacity: int) -> None:
        self.index = index
        self.shard = shard
        self.given = done
        self.closed = False
        self.over = False
        self.worker: Inbox[Any] | None = None
        self.channel = Channel[Any](At(name, done), capacity)
        self._full = False

    @property
    def hungry(self) -> bool:
        """Whether the worker needs another item to give one: it has dealt with all, and what it gave was taken."""
        return self.channel.inbox.hungry and (self.worker is None or self.worker.idle)

    def has_room(self) -> bool:
        """Whether it may be filled; one that was full, only when it is down to three quarters."""
        if self.closed:
            return False
        held, capacity = self.channel.held, self.channel.capacity
        self._full = held > capacity * 3 // 4 if self._full else held >= capacity
        return not self._full


class Turns:
    """The queues of a rank's workers, filled in turn; a worker that has ended is passed over.

    Args:
      live: the source, for its bounds.
      queues: in index order.
      turn: the index of the worker that is next.
      stages: the worker's, for messages.

    Attributes:
      peak: the most items that waited for one worker at once.
      awaited: the workers that the merge waits for, by index; an item of any of them would do.
    """

    def __init__(self, live: Live[Any], queues: Sequence[Queue], turn: int, stages: str) -> None:
        self.queues = queues
        self.peak = 0
        self.awaited: Sequence[int] = ()
        self._live = live
        self._turn = turn
        self._stages = stages
        self._spare = 0
        self._news: anyio.Event | None = None
        for queue in queues:
            queue.channel.on_freed = self.notice

            queue.channel.inbox.on_closed = partial(self._closed, queue)

    @property
    def all_over(self) -> bool:
        """Whether all workers have ended."""
        return all(queue.over for queue in self.queues)

    def _closed(self, queue: Queue) -> None:
        queue.closed = True
        self.notice()

    def notice(self) -> None:
        """Something has changed that the reader may wait for."""
        if self._news is not None:
            self._news.set()

    async def wait_news(self) -> None:
        """Wait until something has changed."""
        self._news = anyio.Event()
        await resting(self._news.wait())

    async def wait_room(self) -> bool:
        """Wait until the next item may be read; False if all workers have ended.

        Raises:
          WorkerStarved: there is no room, and without the next item nothing goes on.
        """
        while (queue := self.next()) is not None:
            if self._may_read(queue):
                return True
            await self.wait_news()
        return False

    def next(self) -> Queue | None:
        """Return the queue whose turn it is; None if all workers have ended."""
        for queue in (*self.queues[self._turn :], *self.queues[: self._turn]):
            if not queue.over:
                return queue
        return None

    def pass_on(self, queue: Queue) -> int:
        """Let it be the turn of the one behind `queue`; return that one's shard."""
        self._turn = (queue.index + 1) % len(self.queues)
        return self.queues[self._turn].shard

    def hand(self, queue: Queue, item: Any, ordinal: int, size: int) -> None:
        """Hand out an item of `size` bytes, the worker's number `ordinal`, whatever the room."""
        if queue.closed:
            return  # it is kept for a resume all the same
        queue.channel.admit(item, CountedStates(self._live.name, ordinal + 1), size)
        self.peak = max(self.peak, queue.channel.held)

    def end(self, failure: BaseException | None) -> None:
        """Let every worker have what it was handed, then the end, or the failure."""
        for queue in self.queues:
            if queue.closed or queue.channel.finished:
                continue
            if failure is None:
                queue.channel.finish()
            else:
                queue.channel.fail(failure)

    @property
    def starving(self) -> Queue | None:
        """A worker that starves: the merge waits, and nothing that it waits for can come without another item."""
        queues = [self.queues[index] for index in self.awaited]
        if queues and all(queue.hungry for queue in queues):
            return queues[0]
        return None

    def _may_read(self, queue: Queue) -> bool:
        """Say whether there is room for the next item, which is for `queue`."""
        held = queue.channel.held
        heavy = held > 0 and self._held_bytes >= self._live.max_ahead_bytes
        if queue.has_room() and not heavy:
            return True
        if (starving := self.starving) is not None:
            self._spare = SPARE_ITEMS
        if held < self._live.max_ahead and not heavy:
            self._spare -= 1
            return self._spare >= 0 and bool(self.awaited)
        if starving is None:
            return False
        raise self._starved(starving, queue)

    @property
    def _held_bytes(self) -> int:
        return sum([queue.channel.held_bytes for queue in self.queues])

    def _starved(self, starving: Queue, full: Queue) -> WorkerStarved:
        live = self._live
        return WorkerStarved(
            f"the worker of shard {starving.shard} ({self._stages}) was handed {starving.given:,} items by {live.name} "
            f"and the merge still waits for it, while {full.channel.held:,} read ahead wait for shard {full.shard} "
            f"({self._held_bytes:,} bytes for all; max_ahead={live.max_ahead:,}, "
            f"max_ahead_bytes={live.max_ahead_bytes:,}): drop items in the stream itself, before they are handed out, "
            "use fewer shards, .merge('best_effort', max_lead=) with a larger lead, or "
            f"{live.kind}(max_ahead=, max_ahead_bytes=) with larger ones. Nothing is lost: resume behind the change"
        )
