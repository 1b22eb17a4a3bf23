"""From a plan to a stream: what is settled when a pipeline is opened, and the two ways to run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from streamline.backends.base import Backend
from streamline.errors import PlanError
from streamline.opening import Opening
from streamline.options import check_int
from streamline.plan import Plan
from streamline.ranks import Rank, find_rank
from streamline.snapshot import Snapshot
from streamline.stream import Stream
from streamline.sync import SyncStream

__all__ = ["Opened", "prepare"]

T = TypeVar("T")


def prepare(
    plan: Plan,
    *,
    backend: Backend,
    resume: Snapshot | None,
    rank: int | None,
    world_size: int | None,
    epoch: int | None,
) -> Opening:
    """Settle where and from which state a plan runs: ranks, files, whether the snapshot belongs to it.

    Raises:
      PlanError: an unsharded pipeline on several ranks; fewer shards than ranks.
      ResumeError: the snapshot is of another plan, of other data, or of another rank.
      ReadError: a file of the source is missing.
    """
    if epoch is not None:
        check_int(".open(epoch=)", epoch, 0)
        if resume is not None and resume.epoch != epoch:
            raise PlanError(f"the snapshot is of epoch {resume.epoch}: leave epoch={epoch} out, or resume without it")
    found = find_rank(rank, world_size)
    _check_ranks(plan, found)
    source = plan.source.resolved()
    opening = Opening(
        plan=replace(plan, source=source),
        backend=backend,
        rank=found,
        epoch=resume.epoch if resume is not None else epoch or 0,
        resume=resume,
        listing=source.listing(),
    )
    opening.check()
    return opening


def _check_ranks(plan: Plan, found: Rank) -> None:
    ranks = found.world_size
    if ranks > 1 and not plan.sharded:
        raise PlanError(
            f"each of the {ranks} ranks would read everything: add .shard(n) with n a multiple of {ranks}, or "
            "open(rank=0, world_size=1) if that is meant"
        )
    if ranks > plan.shard.num_shards:
        raise PlanError(f"{plan.shard.num_shards} shards for {ranks} ranks: .shard({ranks}) or more")


class Opened(Generic[T]):
    """A plan about to run: `async with` gives a `Stream`, `with` a `SyncStream`."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._stream: Stream[T] | None = None
        self._sync: SyncStream[T] | None = None

    def stream(self) -> Stream[T]:
        """Return an async iterator that begins when it is first asked for an item."""
        return Stream(self._opening)

    def sync_stream(self) -> SyncStream[T]:
        """Return a plain iterator, begun."""
        return SyncStream(self._opening)

    async def __aenter__(self) -> Stream[T]:
        self._stream = self.stream()
        await self._stream.start()
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    def __enter__(self) -> SyncStream[T]:
        self._sync = self.sync_stream()
        return self._sync

    def __exit__(self, *_: object) -> None:
        if self._sync is not None:
            self._sync.close()
