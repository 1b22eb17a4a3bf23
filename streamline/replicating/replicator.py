"""`StreamReplicator`: one stream for n readers of one process, item i for replica i mod n."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from os import PathLike
from typing import Any, Generic, Self, TypeVar, Unpack
from weakref import finalize

from streamline.errors import PlanError, ResumeError
from streamline.opened import RunOptions
from streamline.options import check_int, check_seconds
from streamline.pipeline import Pipeline
from streamline.replicating.dealer import Dealer
from streamline.replicating.feed import ReplicaFeed
from streamline.replicating.replica import Replica
from streamline.replicating.shares import ReplicaStats, Share, Shares
from streamline.replicating.state import ReplicatorState
from streamline.replicating.taps import Passed, PlanTap, Tap, check_source, tap_of
from streamline.runnable import Runnable
from streamline.snapshot import Snapshot
from streamline.sources.live import MAX_AHEAD, MAX_AHEAD_BYTES, Live, live_of
from streamline.transforms.repeat import Repeat

__all__ = ["StreamReplicator"]

T = TypeVar("T")

CAPACITY = 256
"""Items that wait for a replica: 64 cost up to a third of the rate of tiny items, 1,024 gain nothing
(bench/replicate)."""

STALL_TIMEOUT_S = 60.0
"""Longer than a checkpoint takes, and shorter than anybody waits without asking why."""


class StreamReplicator(Generic[T]):
    """Gives n readers of this process disjoint parts of one stream: item i to replica i mod n, each in order.

    The stream is read once, from the first item that anybody asks for: an async one in the event loop of who asks, or,
    if that is plain code, in a thread with a loop of its own, where a sync one is always read. A loop that ends while
    it reads the stream ends it for all, with a `ClosedError`. What can be closed is closed behind the end, a failure,
    and the replicator's close.

    A replica that isn't read holds up the others once `capacity` items wait for it; when one of them has starved of it
    for `stall_timeout`, all fail with `ReplicaStalled`, which names it. Likewise at once when one is lost: garbage
    collected unread, or left by an exception. One that is closed on purpose has its share dropped, and counted.

    Args:
      source: a pipeline, which is opened here; or an iterable, sync or async, such as a stream that is open.
      num_replicas: n, at least 1.
      capacity: items that may wait for each replica, at least 1; of a pipeline, up to 256 more are at hand. By default
        256; where a pipeline's items are batches, divided by their size, and at least 2.
      stall_timeout: seconds, more than 0; `math.inf`: for ever.
      options: of a pipeline, those of `open`.

    Raises:
      PlanTypeError: a source that can't be iterated, or an option of the wrong type.
      PlanError: an option out of range, or options of `open` for what isn't a pipeline.
    """

    def __init__(
        self,
        source: Runnable[T] | Iterable[T] | AsyncIterable[T],
        num_replicas: int,
        *,
        capacity: int | None = None,
        stall_timeout: float = STALL_TIMEOUT_S,
        **options: Unpack[RunOptions],
    ) -> None:
        check_source(source)
        num_replicas = check_int("StreamReplicator(num_replicas=)", num_replicas, 1)
        if capacity is None:
            plan = source.plan if isinstance(source, Runnable) else None
            capacity = CAPACITY if plan is None else plan.capacity(CAPACITY, plan.worker + plan.after)
        capacity = check_int("StreamReplicator(capacity=)", capacity, 1)
        if stall_timeout != math.inf:
            check_seconds("StreamReplicator(stall_timeout=)", stall_timeout)
        if options and not isinstance(source, Runnable):
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
        shares = Shares(taken, self._capacity, at)
        for replica in closed:
            shares.all[replica].leave("closed")
        open_tap: Callable[[], Tap] = partial(tap_of, self._source, self._options, resume, at)
        self._dealer = Dealer(shares, open_tap, self._stall_timeout)
        self._finalize = finalize(self, _orphaned, self._dealer)
        self._finalize.atexit = False

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return len(self._dealer.shares.all)

    # Replicas --------------------------------------------------------------------------------------------------------

    def replica(self, number: int) -> Replica[T]:
        """Return replica `number`, 0-based, for its only reader, in any thread or event loop.

        Raises:
          PlanError: there is no such replica, or somebody has it already.
          ResumeError: it was closed in the run that is gone on with.
        """
        return Replica(self._dealer, self._claimed(number))

    def pipeline(
        self,
        number: int,
        *,
        name: str = "replica",
        encode: Callable[[T], Any] | None = None,
        decode: Callable[[Any], T] | None = None,
        journal: str | PathLike[str] | None = None,
    ) -> Pipeline[T]:
        """Return a pipeline that begins with replica `number`, read as a live source: see `from_stream`.

        Its snapshots hold what it has read and not yet delivered, so each of n pipelines resumes by itself. If the
        source of all is a pipeline, that is exact, over kills too: behind its journal, each goes on in a new
        StreamReplicator with the item that it hadn't read, for which the stream is read from its start, or from where
        `load_state_dict` says. Of another source, what waited for a replica when the process ended is lost.

        Leaving such a pipeline doesn't close its replica: it may be opened again, one opening at a time.

        Args:
          name, encode, decode, journal: as in `from_stream`.

        Raises:
          PlanError: as in `replica`; or the source is a pipeline that chooses an order, so that a resume would have
            other items.
          PlanTypeError: an option of the wrong type.
        """
        source = self._source
        again = isinstance(source, Runnable) and not isinstance(source.plan.source, Live)
        if again and isinstance(source, Runnable) and (chooser := source.plan.chooser) is not None:
            raise PlanError(
                f"{chooser} chooses an order, and another run another one, in which this replica would have other "
                "items: let the pipeline be in order; or read the replicas themselves, and save state_dict(), which "
                "holds what was chosen; or give StreamReplicator the open stream, if no resume is wanted"
            )
        self._check_number(number)
        live_of_feed = partial(
            live_of,
            name,
            encode=encode,
            decode=decode,
            max_ahead=MAX_AHEAD,
            max_ahead_bytes=MAX_AHEAD_BYTES,
            partitioned=False,
            journal=journal,
        )
        live_of_feed(list)  # what is wrong with the options is said before the replica is taken
        return Pipeline(live_of_feed(ReplicaFeed(self._dealer, self.replica(number), again=again)))

    def _claimed(self, number: int) -> Share:
        self._check_number(number)
        share = self._dealer.shares.all[number]
        if share.standing == "unasked":
            share.standing = "read"
            return share
        if share.standing == "closed" and self._resume is not None and not self._dealer.begun:
            raise ResumeError(f"replica {number} was closed in the run that is gone on with: its share is dropped")
        raise PlanError(
            f"replica {number} has been asked for before, and has one reader: keep what the first call returned"
        )

    def _check_number(self, number: int) -> None:
        number = check_int("StreamReplicator.replica(number)", number, 0)
        if number >= self.num_replicas:
            raise PlanError(
                f"expected a replica from 0 to {self.num_replicas - 1}, got {number}: there are {self.num_replicas}"
            )

    def stats(self) -> tuple[ReplicaStats, ...]:
        """Return, of each replica, how many items were taken, wait, and were dropped."""
        return self._dealer.shares.stats()

    # Resume ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where all replicas stand: each right behind the last item that its reader took. Of a pipeline.

        At any time, also behind the end or the close, from any thread; each replica's place is taken on its own. What a
        resume reads again is from the slowest replica's place on: at most what waits for the others, and two lists.

        Raises:
          PlanError: the source isn't a pipeline, or that is a live one.
        """
        self._check_again("state_dict")
        shares, tap = self._dealer.shares, self._dealer.tap
        while True:
            taken = shares.taken
            try:
                found = tap.snapshot(shares.oldest(taken)) if isinstance(tap, PlanTap) else None
                break
            except Passed:
                continue  # readers have gone on since
        at, snapshot = (self._from, self._resume) if found is None else found
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
        if any(share.standing != "unasked" for share in self._dealer.shares.all):
            raise PlanError("load_state_dict comes before the first replica(...) or pipeline(...) of a replicator")
        self._finalize.detach()
        resume = Snapshot.from_json(found.snapshot) if found.snapshot else None
        self._begin(list(found.taken), found.closed, found.behind, resume)

    def _check_again(self, what: str) -> None:
        if not isinstance(self._source, Runnable):
            raise PlanError(
                f"StreamReplicator.{what}: a {type(self._source).__name__} can't be read again from where it stands: "
                "give StreamReplicator a pipeline; or read each replica through replicator.pipeline(r), whose "
                "snapshots hold what it has read"
            )
        if isinstance(self._source.plan.source, Live):
            raise PlanError(
                f"StreamReplicator.{what}: {self._source.plan.source} is read once, and its journal lets go of what "
                "the replicator has read: read each replica through replicator.pipeline(r), whose snapshots hold it"
            )
        if (chooser := _repeated_chooser(self._source)) is not None:
            raise PlanError(
                f"StreamReplicator.{what}: .repeat goes through what {chooser} has chosen anew in each pass, so items "
                "that wait for a replica could not be read again: move .repeat before .shard"
            )

    # Leaving ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it for all replicas, whose readers get a `ClosedError`; wait until the stream is closed. Idempotent.

        Code that is stuck in a thread is waited for a second at most; in the event loop that reads the stream, nothing
        is waited for: there, `await aclose()`.
        """
        self._dealer.close()

    async def aclose(self) -> None:
        """As `close`, without holding the event loop. Cancellation: the clean-up is finished all the same."""
        await self._dealer.aclose()

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


def _orphaned(dealer: Dealer) -> None:
    """The replicator is gone: what nobody has asked for, nobody can ask for any more."""
    if not any(share.standing == "read" for share in dealer.shares.all):
        dealer.stop()
    for share in dealer.shares.all:
        if share.standing == "unasked":
            dealer.lose(share, "was never asked for, and its StreamReplicator is gone,")


def _repeated_chooser(pipe: Runnable[Any]) -> str | None:
    """Return what chooses an order under a `.repeat`, whose passes keep no choices; None: nothing."""
    plan, chooser = pipe.plan, None
    for at, stage in enumerate((*plan.worker, *plan.after)):
        if at == len(plan.worker) and plan.merge.chooses:
            chooser = "the best-effort merge"
        if isinstance(stage, Repeat) and chooser is not None:
            return chooser
        chooser = str(stage) if stage.chooses else chooser
    return None
