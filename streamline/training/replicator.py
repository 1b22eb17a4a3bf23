"""`Replicator`: one stream for n readers of one process, item i for replica i mod n.

Each reader holds a `Replica`, for `async for` and for `for`; `ReplicaFeed` is one as the live source of a pipeline. The
`state_dict` holds integers, strings and lists of them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, Unpack, cast

import msgspec

from streamline.core.cleanup import Cleanup
from streamline.core.cursor import pop_uninterrupted
from streamline.core.options import check_int, check_seconds
from streamline.core.pace import Pace
from streamline.core.state_types import Count
from streamline.core.tracebacks import hide_frames
from streamline.errors import ClosedError, PlanError, ResumeError
from streamline.runtime.open import Openable
from streamline.runtime.run import RunKeywords
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.live import CountedStream
from streamline.training.loader_state import SealedState
from streamline.training.replica_dispatch import (
    Dispatcher,
    IterableReplicaSource,
    PlanReplicaSource,
    ReplicasEnd,
    ReplicaSource,
    check_source,
)
from streamline.training.replica_shares import ReplicaShare, ReplicaShares, ReplicaStats


class ReplicaFeed(CountedStream[Any]):
    """What the feed of a pipeline reads. Leaving the pipeline doesn't close the replica: it may be opened again.

    Args:
      again: the stream can be read again, so that an item is known by its number.
    """

    def __init__(self, dispatcher: Dispatcher, replica: Replica[Any], *, again: bool) -> None:
        self._dispatcher = dispatcher
        self._replica = replica
        self._again = again
        self._reading = Lock()

    async def after(self, read: int) -> AsyncIterator[Any]:
        replica = self._replica
        if not self._reading.acquire(blocking=False):
            raise PlanError(f"replica {replica.number} is being read by another opening of its pipeline: leave that")
        try:
            if self._again and replica.taken > read:
                raise ResumeError(
                    f"the pipeline of replica {replica.number} continues after {read:,} items, but {replica.taken:,} "
                    "were handed out, and this StreamReplicator can't read those between again: make a new one; it "
                    "reads from the start, or from a state_dict() that is no newer than this snapshot"
                )
            self._dispatcher.begin(in_loop=False)  # a pipeline's loop may end with it, and others may read on
            async for item in replica:
                if not self._again or replica.taken > read:
                    yield item
            if self._again and replica.taken < read:
                raise ResumeError(
                    f"the pipeline of replica {replica.number} continues after {read:,} items, but the stream "
                    f"ends after {replica.taken:,}: it isn't the one that the snapshot was taken of"
                )
        finally:
            self._reading.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the plan travel to processes that run its workers: they are handed what is read here."""
        return RemoteReplica, ()


class RemoteReplica(CountedStream[Any]):
    """Stands for a replica in a process that doesn't have it."""

    def after(self, read: int) -> AsyncIterator[Any]:
        raise PlanError("a replica is read in the process of its StreamReplicator: open its pipeline there")


T = TypeVar("T")

BREATHE_ITEMS = 31
"""A mask: each 32 items, an `async for` looks whether others should have a turn; every item would cost half as much
again as taking it."""


class Replica(Generic[T]):
    """The items i of a stream with i mod n = r, in order: for one reader, `async for` or `for`, in any thread.

    Ends and errors come after its last item, then for ever. A cancelled wait took nothing, and the next one goes on.

    `async with` or `with` around the loop says what leaving means: left without an exception, the rest of its share is
    dropped, and counted; left with one, the reader has died, and the other replicas fail with a `ReplicaStalled` that
    names this one. So they do if it is garbage collected unread. After a bare `break` it may be read on.
    """

    def __init__(self, dispatcher: Dispatcher, share: ReplicaShare) -> None:
        self._dispatcher = dispatcher
        self._share = share
        self._items, self._budget = share.items, share.left
        self._pops = cast("Iterator[T]", share.pops)
        self._asked = 0
        self._over: BaseException | None = None
        self._trace: TracebackType | None = None
        self._pace = Pace()
        self._cleanup = Cleanup(self, dispatcher.lose, share, "was dropped by its reader").not_at_exit()

    @property
    def number(self) -> int:
        """Which one it is, 0-based."""
        return self._share.replica

    @property
    def taken(self) -> int:
        """Items that were taken from it, those of an earlier run included."""
        return self._share.taken

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    def __iter__(self) -> Iterator[T]:
        return self

    async def __anext__(self) -> T:
        self._asked += 1
        if self._asked & BREATHE_ITEMS == 0:
            await self._pace.maybe_yield()
        while not self._items:
            if (end := self._ended(in_loop=True)) is not None:
                raise StopAsyncIteration if isinstance(end, ReplicasEnd) else end.with_traceback(self._trace)
            await self._share.notifier.wait(self._ready)
        share = self._share
        share.promised = self._budget() - 1
        if share.wanted_below:
            self._make_room()
        return pop_uninterrupted(self._pops)

    def __next__(self) -> T:
        while not self._items:
            if (end := self._ended(in_loop=False)) is not None:
                raise StopIteration if isinstance(end, ReplicasEnd) else end.with_traceback(self._trace)
            self._share.notifier.wait_in_thread(self._ready)
        share = self._share
        share.promised = self._budget() - 1
        if share.wanted_below:
            self._make_room()
        return pop_uninterrupted(self._pops)

    def _make_room(self) -> None:
        """Wake the dispatcher, if it waits for room: an item is just about to be taken, as `promised` says."""
        if len(self._items) <= self._share.wanted_below:
            self._dispatcher.news.ring()

    def _ready(self) -> bool:
        """Whether the reader needn't wait; asked when it can be woken already, so that it misses nothing."""
        if self._items or self._dispatcher.end is not None or not self._share.open:
            return True
        self._dispatcher.news.ring()  # it starves
        return False

    def _ended(self, *, in_loop: bool) -> BaseException | None:
        """Return what this replica has ended with, if nothing waits for it; begin to read, if that hasn't begun."""
        if self._over is not None:
            return self._over
        if self._share.open:
            self._dispatcher.begin(in_loop=in_loop)
            end = self._dispatcher.end
            if end is None or self._items:  # they came just before it
                self._check_alone()
                return None
            hide_frames(end)
            self._over, self._trace = end, end.__traceback__
        else:
            self._over = ClosedError(f"replica {self.number} is closed")
        self._cleanup.detach()
        return self._over

    def _check_alone(self) -> None:
        if self._share.notifier.taken:
            raise PlanError(
                f"replica {self.number} has two readers that wait for its next item, and only one would get it: let "
                "one read, or make a StreamReplicator of more replicas"
            )

    # Leaving ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop the rest of its share, on purpose: the others go on. Idempotent; doesn't wait."""
        self._cleanup.detach()
        if self._share.open and (self._over is None):
            self._dispatcher.leave(self._share)

    async def aclose(self) -> None:
        """As `close`. The last one to leave a stream waits until that is closed."""
        self.close()
        if not self._dispatcher.shares.open:
            await self._dispatcher.aclose()

    def __enter__(self) -> Replica[T]:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    async def __aenter__(self) -> Replica[T]:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)
        if not self._dispatcher.shares.open:
            await self._dispatcher.aclose()

    def _leave(self, error: BaseException | None) -> None:
        if error is None or self._over is not None:
            self.close()
        else:
            self._cleanup.detach()
            self._dispatcher.lose(self._share, f"was left by its reader with {type(error).__name__}", error)

    def __repr__(self) -> str:
        of = len(self._dispatcher.shares.all)
        return f"<replica {self.number} of {of}: {self.taken:,} taken, {len(self._share.items):,} waiting>"


CAPACITY = 256
"""Items that wait for a replica: 64 cost up to a third of the rate of tiny items, 1,024 gain nothing
(bench/replicate)."""

STALL_TIMEOUT_S = 60.0
"""Longer than a checkpoint takes, and shorter than anybody waits without asking why."""


class Replicator(Generic[T]):
    """All of `sl.StreamReplicator` but `.pipeline`, for a `Pipeline` stands above this module.

    Users know the subclass: its docstring says what is promised, and its name stands in errors and in the repr.
    """

    def __init__(
        self,
        source: Openable[T] | Iterable[T] | AsyncIterable[T],
        num_replicas: int,
        *,
        capacity: int | None = None,
        stall_timeout: float = STALL_TIMEOUT_S,
        **options: Unpack[RunKeywords],
    ) -> None:
        check_source(source)
        num_replicas = check_int("StreamReplicator(num_replicas=)", num_replicas, 1)
        if capacity is None:
            plan = source.plan if isinstance(source, Openable) else None
            capacity = CAPACITY if plan is None else plan.capacity(CAPACITY, plan.worker + plan.after)
        capacity = check_int("StreamReplicator(capacity=)", capacity, 1)
        if stall_timeout != math.inf:
            check_seconds("StreamReplicator(stall_timeout=)", stall_timeout)
        if options and not isinstance(source, Openable):
            raise PlanError(
                f"StreamReplicator({sorted(options)[0]}=) says how a pipeline is opened, and a "
                f"{type(source).__name__} is none"
            )
        self._source = source
        self._options = options
        self._capacity = capacity
        self._stall_timeout = stall_timeout
        self._begin([0] * num_replicas, (), 0, None)

    def _begin(self, taken: list[int], closed: Iterable[int], at: int, resume: Snapshot | None) -> None:
        self._resume = resume
        self._from = at
        shares = ReplicaShares(taken, self._capacity, at)
        for replica in closed:
            shares.all[replica].leave("closed")
        source: ReplicaSource
        if isinstance(self._source, Openable):
            source = PlanReplicaSource(self._source, self._options, resume, at)
        else:
            source = IterableReplicaSource(self._source)
        self._dispatcher = Dispatcher(shares, source, self._stall_timeout)
        self._cleanup = Cleanup(self, _orphaned, self._dispatcher).not_at_exit()

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return len(self._dispatcher.shares.all)

    # Replicas --------------------------------------------------------------------------------------------------------

    def replica(self, number: int) -> Replica[T]:
        """Return replica `number`, 0-based, for its only reader, in any thread or event loop.

        Raises:
          PlanError: there is no such replica, or it has a reader already.
          ResumeError: it was closed in the run that is gone on with.
        """
        number = check_int("StreamReplicator.replica(number)", number, 0)
        if number >= self.num_replicas:
            raise PlanError(
                f"expected a replica from 0 to {self.num_replicas - 1}, got {number}: there are {self.num_replicas}"
            )
        share = self._dispatcher.shares.all[number]
        if share.standing == "closed" and self._resume is not None and not self._dispatcher.begun:
            raise ResumeError(f"replica {number} was closed in the run that is gone on with: its share is dropped")
        if share.standing != "unasked":
            raise PlanError(
                f"replica {number} has been asked for before, and has one reader: keep what the first call returned"
            )
        share.standing = "read"
        return Replica(self._dispatcher, share)

    def _feed(self, number: int) -> ReplicaFeed:
        """Take replica `number` for a pipeline, whose source reads this feed."""
        source = self._source
        again = isinstance(source, Openable) and not source.plan.source.is_live
        if again and isinstance(source, Openable) and (chooser := source.plan.chooser) is not None:
            raise PlanError(
                f"{chooser} chooses an order, and another run another one, in which this replica would have other "
                "items: let the pipeline be in order; or read the replicas themselves, and save state_dict(), which "
                "holds what was chosen; or give StreamReplicator the open stream, if no resume is wanted"
            )
        return ReplicaFeed(self._dispatcher, self.replica(number), again=again)

    def stats(self) -> tuple[ReplicaStats, ...]:
        """Return, of each replica, how many items were taken, wait, and were dropped."""
        return self._dispatcher.shares.stats()

    # Resume ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where all replicas stand: each right after the last item that its reader took. Of a pipeline.

        At any time, also after the end or the close, from any thread; each replica's place is taken on its own. What a
        resume reads again is from the slowest replica's place on: at most what waits for the others, and two lists.

        Raises:
          PlanError: the source isn't a pipeline, or that is a live one.
        """
        self._check_again("state_dict")
        shares, source = self._dispatcher.shares, self._dispatcher.source
        assert isinstance(source, PlanReplicaSource)
        at, snapshot = self._from, self._resume
        marks, taken = source.marks, shares.taken  # in this order: readers go on meanwhile
        if marks:
            oldest = shares.oldest(taken)
            at, mark = [found for found in marks if found[0] <= oldest][-1]
            snapshot = source.snapshot_at(mark)
        elif source.marks:  # they have just begun to read
            return self.state_dict()
        closed = [share.replica for share in shares.all if share.standing == "closed"]
        return ReplicatorState(
            taken=taken, closed=closed, behind=at, snapshot="" if snapshot is None else snapshot.to_json()
        ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` said. Before any replica is asked for.

        Raises:
          PlanError: replicas were asked for; or as in `state_dict`.
          SnapshotError: it is no such state.
          ResumeError: it is of another number of replicas. When the first item is asked for: of another pipeline.
        """
        self._check_again("load_state_dict")
        found = ReplicatorState.from_dict(state)
        if len(found.taken) != self.num_replicas:
            raise ResumeError(
                f"the state is of {len(found.taken)} replicas, and there are {self.num_replicas}: make a "
                f"StreamReplicator(source, {len(found.taken)})"
            )
        if any(share.standing != "unasked" for share in self._dispatcher.shares.all):
            raise PlanError("load_state_dict comes before the first replica(...) or pipeline(...) of a replicator")
        self._cleanup.detach()
        resume = Snapshot.from_json(found.snapshot) if found.snapshot else None
        self._begin(list(found.taken), found.closed, found.behind, resume)

    def _check_again(self, what: str) -> None:
        if not isinstance(self._source, Openable):
            raise PlanError(
                f"StreamReplicator.{what}: a {type(self._source).__name__} can't be read again from where it stands: "
                "give StreamReplicator a pipeline; or read each replica through replicator.pipeline(r), whose "
                "snapshots hold what it has read"
            )
        if self._source.plan.source.is_live:
            raise PlanError(
                f"StreamReplicator.{what}: {self._source.plan.source} is read once, and its journal releases what "
                "the replicator has read: read each replica through replicator.pipeline(r), whose snapshots hold it"
            )
        if (found := self._source.plan.repeated_choice) is not None:
            raise PlanError(
                f"StreamReplicator.{what}: .repeat goes through what {found[0]} has chosen anew in each pass, so items "
                "that wait for a replica could not be read again: move .repeat before .shard"
            )

    # Leaving ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it for all replicas, whose readers get a `ClosedError`; wait until the stream is closed. Idempotent.

        Code that is stuck in a thread is waited for a second at most; in the event loop that reads the stream, nothing
        is waited for: there, `await aclose()`.
        """
        self._dispatcher.close()

    async def aclose(self) -> None:
        """As `close`, without holding the event loop. Cancellation: the clean-up is finished all the same."""
        await self._dispatcher.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        rows = ", ".join(f"{one.taken:,} taken and {one.waiting:,} waiting" for one in self.stats())
        return f"<StreamReplicator of {self.num_replicas}: {rows}>"


def _orphaned(dispatcher: Dispatcher) -> None:
    """The replicator is gone: replicas without a reader can't get one any more."""
    if not any(share.standing == "read" for share in dispatcher.shares.all):
        dispatcher.stop()
    for share in dispatcher.shares.all:
        if share.standing == "unasked":
            dispatcher.lose(share, "was never asked for, and its StreamReplicator is gone,")


@dataclass(frozen=True, kw_only=True)
class ReplicatorState(SealedState):
    """Where the replicas of a pipeline stand. Its snapshot has what was chosen since; "": the beginning.

    Attributes:
      taken: items that each replica's reader has taken.
      closed: the replicas that were closed on purpose.
      behind: items of the stream before the snapshot; all those after it can be had again.
    """

    of: ClassVar[str] = "replicator"
    taken: Annotated[list[Count], msgspec.Meta(min_length=1)]
    closed: list[Count]
    behind: Count

    def _contradiction(self) -> str | None:
        count = len(self.taken)
        needed = [share * count + at for at, share in enumerate(self.taken) if at not in self.closed]
        if self.behind > min(needed, default=self.behind) or any(at >= count for at in self.closed):
            return "its entries contradict each other; it was edited"
        if (self.behind or any(self.taken)) and not self.snapshot:
            return "it says where the stream stands, and has no snapshot"
        return None
