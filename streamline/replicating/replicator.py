"""`Replicator`: one stream for n readers of one process, item i for replica i mod n."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from typing import Any, Generic, Self, TypeVar, Unpack
from weakref import finalize

from streamline.core.options import check_int, check_seconds
from streamline.errors import PlanError, ResumeError
from streamline.replicating.dealer import Dealer
from streamline.replicating.feed import ReplicaFeed
from streamline.replicating.replica import Replica
from streamline.replicating.shares import ReplicaStats, Share, Shares
from streamline.replicating.state import ReplicatorState
from streamline.replicating.taps import Passed, PlanTap, Tap, check_source, tap_of
from streamline.runtime.open import Openable, RunOptions
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.live import Live
from streamline.transforms.repeat import Repeat

__all__ = ["Replicator"]

T = TypeVar("T")

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
        **options: Unpack[RunOptions],
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

    def _feed(self, number: int) -> ReplicaFeed:
        """Take replica `number` for a pipeline, whose source reads this feed.

        Raises:
          PlanError: as in `replica`; or the source is a pipeline that chooses an order.
          ResumeError: as in `replica`.
        """
        source = self._source
        again = isinstance(source, Openable) and not isinstance(source.plan.source, Live)
        if again and isinstance(source, Openable) and (chooser := source.plan.chooser) is not None:
            raise PlanError(
                f"{chooser} chooses an order, and another run another one, in which this replica would have other "
                "items: let the pipeline be in order; or read the replicas themselves, and save state_dict(), which "
                "holds what was chosen; or give StreamReplicator the open stream, if no resume is wanted"
            )
        return ReplicaFeed(self._dealer, self.replica(number), again=again)

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
        if not isinstance(self._source, Openable):
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


def _repeated_chooser(pipe: Openable[Any]) -> str | None:
    """Return what chooses an order under a `.repeat`, whose passes keep no choices; None: nothing."""
    plan, chooser = pipe.plan, None
    for at, stage in enumerate((*plan.worker, *plan.after)):
        if at == len(plan.worker) and plan.merge.chooses:
            chooser = "the best-effort merge"
        if isinstance(stage, Repeat) and chooser is not None:
            return chooser
        chooser = str(stage) if stage.chooses else chooser
    return None
