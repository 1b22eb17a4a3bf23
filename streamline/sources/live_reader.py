"""The reader of a live source: one task for all workers of a rank, which hands out what it reads in turn.

It waits for room in the queue whose turn it is (`streamline.sources.live_reader`), asks the feed for one item, keeps it
(`streamline.sources.journal`), and hands it out; between the feed's answer and its being kept nothing waits, so no
cancellation can lose an item.

End: the queues end. Failure: each queue's worker gets what was read before, then the failure. Leaving: the reader is
cancelled, and closes the feed's iterator.

Whose turn it is to be handed a live item, and whether there is room: the queues of a rank's workers, without I/O.

A full queue may belong to a worker that nobody waits for, while another one, which drops what it is given, *starves*:
its queue is empty, its chain waits for an item, and the merge waits for it. Then the others' queues may grow, up to a
bound.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import anyio

from streamline.core.blame import cancellation_requested, not_an_end
from streamline.core.channel import Channel, Inbox
from streamline.core.counters import Working
from streamline.core.flow import Site
from streamline.core.gate import resting
from streamline.core.item_codec import EncodedItem
from streamline.core.pace import HANDOVER_S, Pace
from streamline.core.state import At, CountedStates, Json, Tree
from streamline.core.tasks import Job
from streamline.errors import JournalError, ResumeError, WorkerStarved
from streamline.sources.disk_journal import DiskJournal
from streamline.sources.journal import Entry, Journal, MemoryJournal, Places, SavedJournal, kept_of
from streamline.sources.live import Live

__all__ = ["LiveReader", "WorkerQueue", "WorkerQueues"]


SYNC_S = 0.1
"""Seconds of items that a power cut may take from a journal on disk; a kill takes none."""


logger = logging.getLogger(__name__)


class LiveReader:
    """Reads a live source for the workers of a rank.

    Args:
      live: the source as written.
      site: the rank's.
      shards: of this rank, one worker each.
      merge: the name of the merge's entry in a state.
      state: that the rank's run begins at; None: at the beginning.
      journal: of the snapshot that it comes from.
      capacity: items that wait for each worker, while none starves.
      stages: the worker's, for messages.

    Attributes:
      journal: what was read and may be needed again.
      turns: the workers' queues.

    Raises:
      PlanError: the source is an iterator that was read already.
      ResumeError, SnapshotError, JournalError: the journal doesn't have what the state needs.
    """

    def __init__(
        self,
        live: Live[Any],
        site: Site,
        shards: Sequence[int],
        *,
        merge: str,
        state: Tree | None,
        journal: Json,
        capacity: int,
        stages: str,
    ) -> None:
        live.check_unread()
        self._live = live
        self._site = site
        self._places = Places(live.name, merge, shards)
        self._job: Job | None = None
        self._dirty = anyio.Event()
        self._iterator: AsyncIterator[Any] | None = None
        self._meter = site.meter(live.name, live.kind)
        self.journal, self._backlog = self._opened(state, journal)
        queues = self._queues(state, capacity)
        self.turns = WorkerQueues(live, queues, list(shards).index(self.journal.next), stages)
        for queue in queues:
            queue.channel.inbox.on_wait = self._wanted
        site.tasks.own(self._clean_up)
        site.tasks.session.journal = self.journal
        site.tasks.session.at_leaving(self._stop)

    def _opened(self, state: Tree | None, journal: Json) -> tuple[Journal, Sequence[Entry]]:
        """Return the journal, and what is to be fed before what the feed gives from now on."""
        places = self._places
        kept: SavedJournal | None = None
        entries: list[Entry] = []
        if state is not None:
            kept, entries = kept_of(journal, state, places)
            for worker, gave in zip(kept.workers, state[places.merge]["produced"], strict=True):
                if worker.ended:
                    places.ended(worker.shard, gave)
        directory = self._live.directory(self._site)
        if directory is not None:
            stored = DiskJournal(directory, places, kept, entries, state, self._live.mark_of)
            return stored, stored.backlog
        if kept is not None and kept.stored:
            raise ResumeError(
                "the snapshot's items are in a journal on disk: give "
                f"{self._live.kind}(journal=) the directory that it was taken with"
            )
        memory = MemoryJournal(places, kept, entries)
        self._site.tasks.session.on_chunk_boundary(memory.at_chunk_boundary)
        return memory, entries

    def _queues(self, state: Tree | None, capacity: int) -> list[WorkerQueue]:
        places, queues, meters = self._places, [], self._site.tasks.session.meters
        for index, (shard, passed) in enumerate(places.passed(state).items()):
            done = 0 if state is None else state[places.merge]["workers"][index][places.source]
            queue = WorkerQueue(self._live.name, index, shard, done, capacity)
            if passed == math.inf:
                queue.over = True
                queue.channel.finish()
            queue.channel.join(self._site.tasks.session)
            if meters.on:
                queue.channel.meter = meters.channel(self._live.name, shard, capacity)
            queues.append(queue)
        return queues

    # What others say --------------------------------------------------------------------------------------------------

    def inbox(self, shard: int) -> Inbox[Any]:
        """Return what the worker of a shard reads."""
        return next(queue for queue in self.turns.queues if queue.shard == shard).channel.inbox

    def merge_waits(self, workers: Sequence[int]) -> None:
        """The merge waits for an item of any of these workers; or it waits no more."""
        self.turns.awaited = workers
        if workers:
            self.turns.notice()

    def watch(self, workers: Sequence[Inbox[Any]]) -> None:
        """Learn from the workers' own channels when they end."""
        for queue, worker in zip(self.turns.queues, workers, strict=True):
            worker.on_end = partial(self._worker_over, queue)
            queue.worker = worker

    def worker_ended(self, index: int, produced: int) -> None:
        """The merge has taken all that a worker gives; unless the feed has ended, it has ended by itself."""
        queue = self.turns.queues[index]
        if not queue.channel.finished:
            self._places.ended(queue.shard, produced)

    def _wanted(self) -> None:
        """A worker waits for an item: begin to read, if that hasn't begun."""
        if self._job is None:
            tasks = self._site.tasks
            name = f"reader of {self._live.name}"
            self._job = tasks.start(partial(tasks.gate.participate, name, self._run), name, self._clean_up)
            if isinstance(self.journal, DiskJournal):
                tasks.start(partial(self._sync, self.journal), "journal", lambda: None)
        self.turns.notice()

    def _worker_over(self, queue: WorkerQueue, failed: bool) -> None:
        """A worker has ended: it is passed over from now on. The last one ends the reader."""
        queue.over = not failed
        if self.turns.all_over:
            self._stop()
        self.turns.notice()

    def _stop(self) -> None:
        """Read no more: what is read behind the last snapshot would be lost."""
        if self._job is not None:
            self._job.cancel()

    # The reader -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            try:
                await self._feed_backlog()
                await self._read()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._close_iterator()
        except BaseException as failure:
            if cancellation_requested(failure):
                raise
            self.turns.end(failure)
        else:
            self.turns.end(None)

    async def _feed_backlog(self) -> None:
        """Hand out what the journal has, to each worker what was its own."""
        turns, pace = self.turns, Pace()
        waiting = {queue.shard: deque[Entry]() for queue in turns.queues}
        for entry in self._backlog:
            waiting[entry.shard].append(entry)
        self._backlog = ()
        for queue in turns.queues:
            queue.given += len(waiting[queue.shard])
        while any(waiting.values()):
            starving = turns.starving is not None  # they are in memory anyway
            stuck = True
            for queue in turns.queues:
                entries = waiting[queue.shard]
                while entries and (queue.closed or starving or queue.has_room()):
                    entry = entries.popleft()
                    stuck = False
                    if not queue.closed:
                        turns.hand(queue, self._read_again(entry), entry.ordinal, entry.written.size)
                        await pace.breathe(HANDOVER_S)
            if stuck:
                await turns.wait_news()

    def _read_again(self, entry: Entry) -> Any:
        try:
            return self._live.codec.read(entry.written)
        except BaseException as error:
            raise self._blamed(error, f"item {entry.ordinal + 1} of shard {entry.shard} in its journal") from None

    async def _read(self) -> None:
        gate, pace = self._site.tasks.gate, Pace()
        if self.turns.all_over:
            return
        try:
            journal, traffic = self.journal, self._site.tasks.session.meters.traffic(self._live.name)
            iterator = self._iterator = self._live.begin(journal.mark, journal.read, traffic)
        except BaseException as error:
            raise self._blamed(error, "its beginning") from None
        while await self.turns.wait_room():
            await gate.passage()
            try:
                with Working(self._meter):
                    item = await resting(anext(iterator))  # a quiet feed holds no pause up
                written = self._live.codec.write(item)
            except StopAsyncIteration:
                return
            except BaseException as error:
                if cancellation_requested(error):
                    raise
                raise self._blamed(error, f"item {self.journal.read + 1}") from None
            if (kept := self._keep(written, self._live.mark(item))) is None:
                return  # all workers have ended meanwhile
            await gate.passage()  # it came in a pause: it is kept, and handed out behind it
            if self._meter is not None:
                self._meter.count((item,))
            self.turns.hand(kept[0], item, kept[1], written.size)
            del item, written
            await pace.breathe(HANDOVER_S)

    def _keep(self, written: EncodedItem, mark: Json) -> tuple[WorkerQueue, int] | None:
        """Keep an item; return whose it is, and its number there. None: there is nobody to hand it to."""
        queue = self.turns.next()
        if queue is None:
            return None
        ordinal = queue.given
        self.journal.append(Entry(queue.shard, ordinal, written, self.turns.pass_on(queue), mark))
        self._dirty.set()
        queue.given += 1
        return queue, ordinal

    def _blamed(self, error: BaseException, at: str) -> BaseException:
        """Return what the consumer is to see for an error out of the user's stream or functions."""
        rank = f"rank {self._site.shard} of {self._site.num_shards}, " if self._site.num_shards > 1 else ""
        error = not_an_end(error, self._live.name)
        error.add_note(f"in {self._live.name}, read for all workers ({rank}pid {os.getpid()}), at {at}")
        return error

    async def _close_iterator(self) -> None:
        if (aclose := getattr(self._iterator, "aclose", None)) is not None:
            await aclose()

    async def _sync(self, journal: DiskJournal) -> None:
        """Make durable what was written, soon after."""

        def sync() -> BaseException | None:
            try:
                journal.sync()
            except BaseException as error:
                return error
            return None

        while True:
            await self._dirty.wait()
            self._dirty = anyio.Event()
            await anyio.sleep(SYNC_S)
            failure = await self._site.tasks.threads.run(sync)
            if failure is not None:
                self.turns.end(failure)
                self._stop()
                return

    def _clean_up(self) -> None:
        """Let go of everything; idempotent."""
        for queue in self.turns.queues:
            queue.channel.abandon()
        try:
            self.journal.close()
        except JournalError as error:
            logger.error("%s", error)  # the stream is closed: there is nobody to raise it to


SPARE_ITEMS = 64
"""Items that may be read once a worker was seen to starve, though it has some by then: else each would cost switches of
tasks (10,000 drops in a row take a fifth of the time)."""


class WorkerQueue:
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


class WorkerQueues:
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

    def __init__(self, live: Live[Any], queues: Sequence[WorkerQueue], turn: int, stages: str) -> None:
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

    def _closed(self, queue: WorkerQueue) -> None:
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

    def next(self) -> WorkerQueue | None:
        """Return the queue whose turn it is; None if all workers have ended."""
        for queue in (*self.queues[self._turn :], *self.queues[: self._turn]):
            if not queue.over:
                return queue
        return None

    def pass_on(self, queue: WorkerQueue) -> int:
        """Let it be the turn of the one behind `queue`; return that one's shard."""
        self._turn = (queue.index + 1) % len(self.queues)
        return self.queues[self._turn].shard

    def hand(self, queue: WorkerQueue, item: Any, ordinal: int, size: int) -> None:
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
    def starving(self) -> WorkerQueue | None:
        """A worker that starves: the merge waits, and nothing that it waits for can come without another item."""
        queues = [self.queues[index] for index in self.awaited]
        if queues and all(queue.hungry for queue in queues):
            return queues[0]
        return None

    def _may_read(self, queue: WorkerQueue) -> bool:
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

    def _starved(self, starving: WorkerQueue, full: WorkerQueue) -> WorkerStarved:
        live = self._live
        return WorkerStarved(
            f"the worker of shard {starving.shard} ({self._stages}) was handed {starving.given:,} items by {live.name} "
            f"and the merge still waits for it, while {full.channel.held:,} read ahead wait for shard {full.shard} "
            f"({self._held_bytes:,} bytes for all; max_ahead={live.max_ahead:,}, "
            f"max_ahead_bytes={live.max_ahead_bytes:,}): drop items in the stream itself, before they are handed out, "
            "use fewer shards, .merge('best_effort', max_lead=) with a larger lead, or "
            f"{live.kind}(max_ahead=, max_ahead_bytes=) with larger ones. Nothing is lost: resume behind the change"
        )
