"""A replica as the live source of a pipeline of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from threading import Lock
from typing import Any

from streamline.errors import PlanError, ResumeError
from streamline.replicating.dealer import Dealer
from streamline.replicating.replica import Replica
from streamline.sources.live import CountedStream

__all__ = ["Elsewhere", "ReplicaFeed"]


class ReplicaFeed(CountedStream[Any]):
    """What the feed of a pipeline reads. Leaving the pipeline doesn't close the replica: it may be opened again.

    Args:
      dealer: of all replicas.
      replica: what is read.
      again: the stream can be read again, so that an item is known by its number.
    """

    def __init__(self, dealer: Dealer, replica: Replica[Any], *, again: bool) -> None:
        self._dealer = dealer
        self._replica = replica
        self._again = again
        self._reading = Lock()

    async def behind(self, read: int) -> AsyncIterator[Any]:
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
            self._dealer.begin(in_loop=False)  # a pipeline's loop may end with it, and others may read on
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
        return Elsewhere, ()


class Elsewhere(CountedStream[Any]):
    """Stands for a replica in a process that doesn't have it."""

    def behind(self, read: int) -> AsyncIterator[Any]:
        raise PlanError("a replica is read in the process of its StreamReplicator: open its pipeline there")
