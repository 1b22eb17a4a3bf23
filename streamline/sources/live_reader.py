"""The reader of a live source: one task for all workers of a rank, which distributes items to their queues in turn.

It waits for room in the next queue, pulls one item from the feed, appends it to the journal
(`streamline.sources.journal`), and puts it into the queue. Nothing waits between the feed's answer and the journal, so
no cancellation loses an item. Failure: each worker gets what was read before, then the failure.

A worker that drops items may *starve*: its queue is empty, and it and the merge wait for an item, while the next queue
is full. Then the others' queues may grow, up to a bound.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import anyio

from streamline.core.blame import cancellation_requested, not_an_end
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel, Feeder, Inbox
from streamline.core.flow import Site
from streamline.core.gate import wait_at_rest
from streamline.core.item_codec import EncodedItem
from streamline.core.meters import Working
from streamline.core.pace import HANDOVER_S, Pace
from streamline.core.state import At, CountedStates, Json, Tree
from streamline.core.tasks import Job
from streamline.errors import JournalError, ResumeError, WorkerStarved, printable
from streamline.sources.disk_journal import DiskJournal
from streamline.sources.journal import Entry, Journal, MemoryJournal, Places, SavedJournal, kept_of
from streamline.sources.live import Live

SYNC_S = 0.1
"""Seconds of items that a power cut may take from a journal on disk; a kill takes none."""

logger = logging.getLogger(__name__)


class LiveReader:
    """Reads a live source for the workers of a rank.

    Args:
      shards: of this rank, one worker each.
      merge: the name of the merge's entry in a state.
      state: to begin at; None: at the beginning.
      journal: of the state's snapshot.
      capacity: items that wait for each worker, while none starves.
      stages: the worker's, for messages.

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
        self.journal, self._backlog = self._open_journal(state, journal)
        queues = self._queues(state, capacity)
        self.worker_queues = WorkerQueues(live, queues, list(shards).index(self.journal.next), stages)
        for queue in queues:
            queue.wanted = self._wanted
        site.tasks.add_cleanup(self._clean_up)
        site.tasks.session.services.add(LiveReader, self)
        site.tasks.session.hooks.on_leave(self._stop)

    def _open_journal(self, state: Tree | None, journal: Json) -> tuple[Journal, Sequence[Entry]]:
        """Return the journal, and its items to be fed before those that the feed gives from now on."""
        places = self._places
        saved: SavedJournal | None = None
        entries: list[Entry] = []
        if state is not None:
            saved, entries = kept_of(journal, state, places)
            for worker, gave in zip(saved.workers, state[places.merge]["produced"], strict=True):
                if worker.ended:
                    places.ended(worker.shard, gave)
        directory = self._live.directory(self._site)
        if directory is not None:
            stored = DiskJournal(directory, places, saved, entries, state, self._live.mark_of)
            return stored, stored.backlog
        if saved is not None and saved.stored:
            raise ResumeError(
                "the snapshot's items are in a journal on disk: give "
                f"{self._live.kind}(journal=) the directory that it was taken with"
            )
        memory = MemoryJournal(places, saved, entries)
        self._site.tasks.session.hooks.on_chunk_boundary(memory.at_chunk_boundary)
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

    # Notifications ----------------------------------------------------------------------------------------------------

    def inbox(self, shard: int) -> Inbox[Any]:
        return next(queue for queue in self.worker_queues.queues if queue.shard == shard).channel.inbox

    def merge_waits(self, workers: Sequence[int]) -> None:
        """Note that the merge waits for an item of any of these workers; none: it doesn't wait."""
        self.worker_queues.awaited = workers
        if workers:
            self.worker_queues.notice()

    def watch(self, workers: Sequence[Inbox[Any]]) -> None:
        """Watch the workers' own channels for their end."""
        for queue, worker in zip(self.worker_queues.queues, workers, strict=True):
            worker.on_end = partial(self._worker_over, queue)
            queue.worker = worker

    def worker_ended(self, index: int, produced: int) -> None:
        """Note that the merge has taken all of a worker's items; unless the feed has ended, it has ended by itself."""
        queue = self.worker_queues.queues[index]
        if not queue.channel.finished:
            self._places.ended(queue.shard, produced)

    def _wanted(self) -> None:
        """Note that a worker waits for an item; start the reader if it isn't running."""
        if self._job is None:
            tasks = self._site.tasks
            name = f"reader of {self._live.name}"
            self._job = tasks.start(partial(tasks.gate.participate, name, self._run), name, self._clean_up)
            if isinstance(self.journal, DiskJournal):
                tasks.start(partial(self._sync, self.journal), "journal", lambda: None)
        self.worker_queues.notice()

    def _worker_over(self, queue: WorkerQueue, failed: bool) -> None:
        """Skip a worker that has ended. The last one ends the reader."""
        queue.over = not failed
        if self.worker_queues.all_over:
            self._stop()
        self.worker_queues.notice()

    def _stop(self) -> None:
        """Stop reading: what is read after the last snapshot would be lost."""
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
                    if (aclose := getattr(self._iterator, "aclose", None)) is not None:
                        await aclose()
        except BaseException as failure:
            if cancellation_requested(failure):
                raise
            self.worker_queues.end(failure)
        else:
            self.worker_queues.end(None)

    async def _feed_backlog(self) -> None:
        """Feed each worker its items of the journal."""
        queues, pace = self.worker_queues, Pace()
        waiting = {queue.shard: deque[Entry]() for queue in queues.queues}
        for entry in self._backlog:
            waiting[entry.shard].append(entry)
        self._backlog = ()
        for queue in queues.queues:
            queue.given += len(waiting[queue.shard])
        while any(waiting.values()):
            starving = queues.starving is not None  # they are in memory anyway
            stuck = True
            for queue in queues.queues:
                entries = waiting[queue.shard]
                while entries and (queue.closed or starving or queue.has_room()):
                    entry = entries.popleft()
                    stuck = False
                    if not queue.closed:
                        queues.put(queue, self._read_again(entry), entry.ordinal, entry.written.size)
                        await pace.yield_after(HANDOVER_S)
            if stuck:
                await queues.wait_news()

    def _read_again(self, entry: Entry) -> Any:
        try:
            return self._live.codec.read(entry.written)
        except BaseException as error:
            raise self._with_place(error, f"item {entry.ordinal + 1} of shard {entry.shard} in its journal") from None

    async def _read(self) -> None:
        gate, pace = self._site.tasks.gate, Pace()
        if self.worker_queues.all_over:
            return
        try:
            journal, traffic = self.journal, self._site.tasks.session.meters.traffic(self._live.name)
            iterator = self._iterator = self._live.begin(journal.mark, journal.read, traffic)
        except BaseException as error:
            raise self._with_place(error, "its beginning") from None
        while await self.worker_queues.wait_room():
            await gate.passage()
            try:
                with Working(self._meter):
                    item = await wait_at_rest(anext(iterator))  # a quiet feed doesn't delay a pause
                written = self._live.codec.write(item)
            except StopAsyncIteration:
                return
            except BaseException as error:
                if cancellation_requested(error):
                    raise
                raise self._with_place(error, f"item {self.journal.read + 1}") from None
            if (kept := self._keep(written, self._live.mark(item))) is None:
                return  # all workers have ended meanwhile
            await gate.passage()  # an item that came in a pause is in the journal, and reaches its worker after it
            if self._meter is not None:
                self._meter.count((item,))
            self.worker_queues.put(kept[0], item, kept[1], written.size)
            del item, written
            await pace.yield_after(HANDOVER_S)

    def _keep(self, written: EncodedItem, mark: Json) -> tuple[WorkerQueue, int] | None:
        """Append an item to the journal; return its queue and its number there. None: all workers have ended."""
        queue = self.worker_queues.next()
        if queue is None:
            return None
        ordinal = queue.given
        self.journal.append(Entry(queue.shard, ordinal, written, self.worker_queues.pass_on(queue), mark))
        self._dirty.set()
        queue.given += 1
        return queue, ordinal

    def _with_place(self, error: BaseException, at: str) -> BaseException:
        """Return an error of the user's stream or functions, with its place."""
        rank = f"rank {self._site.shard} of {self._site.num_shards}, " if self._site.num_shards > 1 else ""
        error = not_an_end(error, self._live.name)
        error.add_note(printable(f"in {self._live.name}, read for all workers ({rank}pid {os.getpid()}), at {at}"))
        return error

    async def _sync(self, journal: DiskJournal) -> None:
        """Make durable what was written, within `SYNC_S`."""

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
            if (failure := await self._site.tasks.threads.run(sync)) is not None:
                self.worker_queues.end(failure)
                self._stop()
                return

    def _clean_up(self) -> None:
        """Close the queues and the journal. Idempotent."""
        for queue in self.worker_queues.queues:
            queue.channel.abandon()
        try:
            self.journal.close()
        except JournalError as error:
            logger.error("%s", error)  # the stream is closed: no caller to raise it to


SPARE_ITEMS = 64
"""Items read at once after a worker was seen to starve: one by one, each would cost task switches (10,000 drops in a
row take a fifth of the time)."""


class WorkerQueue(Feeder):
    """The queue of one worker.

    Attributes:
      index: of the worker on its rank.
      given: items that the worker was fed since the feed began.
      closed: the worker reads no more: it has ended or failed.
      worker: its output; None: not known yet.
      over: the worker has ended; a failed one has not: a resume after a fix needs its items where they were.
    """

    def __init__(self, name: str, index: int, shard: int, done: int, capacity: int) -> None:
        self.index = index
        self.shard = shard
        self.given = done
        self.closed = False
        self.over = False
        self.worker: Inbox[Any] | None = None
        self.channel = Channel[Any](At(name, done), Capacity(capacity), self)
        self.notice: Callable[[], None] = lambda: None
        self.wanted: Callable[[], None] = lambda: None
        self._full = False

    def on_wait(self) -> None:
        self.wanted()

    def on_freed(self) -> None:
        self.notice()

    def on_closed(self) -> None:
        self.closed = True
        self.notice()

    @property
    def starved(self) -> bool:
        """Whether the worker needs another item to give one: it has consumed all, and its output was taken."""
        return self.channel.inbox.starved and (self.worker is None or self.worker.nothing_pending)

    def has_room(self) -> bool:
        """Whether it may be filled; after it was full, only once it is down to three quarters."""
        if self.closed:
            return False
        held, capacity = self.channel.capacity.held, self.channel.capacity.items
        self._full = held > capacity * 3 // 4 if self._full else held >= capacity
        return not self._full


class WorkerQueues:
    """The queues of a rank's workers, in index order, filled in turn; a worker that has ended is skipped.

    Args:
      turn: the index of the worker that is next.

    Attributes:
      awaited: the workers that the merge waits for, by index; an item of any of them would do.
    """

    def __init__(self, live: Live[Any], queues: Sequence[WorkerQueue], turn: int, stages: str) -> None:
        self.queues = queues
        self.awaited: Sequence[int] = ()
        self._live = live
        self._next_index = turn
        self._stages = stages
        self._spare = 0
        self._news: anyio.Event | None = None
        for queue in queues:
            queue.notice = self.notice

    @property
    def all_over(self) -> bool:
        return all(queue.over for queue in self.queues)

    def notice(self) -> None:
        if self._news is not None:
            self._news.set()

    async def wait_news(self) -> None:
        self._news = anyio.Event()
        await wait_at_rest(self._news.wait())

    async def wait_room(self) -> bool:
        """Wait until the next item may be read; False if all workers have ended.

        Raises:
          WorkerStarved: there is no room, and without the next item nothing proceeds.
        """
        while (queue := self.next()) is not None:
            if self._may_read(queue):
                return True
            await self.wait_news()
        return False

    def next(self) -> WorkerQueue | None:
        """Return the queue whose turn it is; None if all workers have ended."""
        for queue in (*self.queues[self._next_index :], *self.queues[: self._next_index]):
            if not queue.over:
                return queue
        return None

    def pass_on(self, queue: WorkerQueue) -> int:
        """Give the turn to the queue after `queue`; return its shard."""
        self._next_index = (queue.index + 1) % len(self.queues)
        return self.queues[self._next_index].shard

    def put(self, queue: WorkerQueue, item: Any, ordinal: int, size: int) -> None:
        """Put an item of `size` bytes, the worker's number `ordinal`, into a queue, full or not."""
        if queue.closed:
            return  # the journal keeps it for a resume
        queue.channel.admit(item, CountedStates(self._live.name, ordinal + 1), size)

    def end(self, failure: BaseException | None) -> None:
        """End or fail every queue, after what it holds."""
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
        if queues and all(queue.starved for queue in queues):
            return queues[0]
        return None

    def _may_read(self, queue: WorkerQueue) -> bool:
        """Return whether there is room for the next item, which is for `queue`."""
        held = queue.channel.capacity.held
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
        raise self._starved_error(starving, queue)

    @property
    def _held_bytes(self) -> int:
        return sum([queue.channel.capacity.held_bytes for queue in self.queues])

    def _starved_error(self, starving: WorkerQueue, full: WorkerQueue) -> WorkerStarved:
        live = self._live
        return WorkerStarved(
            f"the worker of shard {starving.shard} ({self._stages}) was handed {starving.given:,} items by {live.name} "
            f"and the merge still waits for it, while {full.channel.capacity.held:,} read ahead wait for shard "
            f"{full.shard} ({self._held_bytes:,} bytes for all; max_ahead={live.max_ahead:,}, "
            f"max_ahead_bytes={live.max_ahead_bytes:,}): drop items in the stream itself, before they are handed out, "
            "use fewer shards, .merge('best_effort', max_lead=) with a larger lead, or "
            f"{live.kind}(max_ahead=, max_ahead_bytes=) with larger ones. Nothing is lost: resume after the change"
        )
