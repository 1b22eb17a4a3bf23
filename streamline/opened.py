"""From a plan to a stream: what is settled when a pipeline is opened, and the two ways to run it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Generic, TypedDict, TypeVar

from streamline.backends.base import Backend
from streamline.errors import CodeChangedWarning, PlanError, PlanTypeError, ResumeError
from streamline.failing.failures import OnError, Policy
from streamline.opening import Opening
from streamline.options import check_int, given
from streamline.plan import Plan
from streamline.ranks import Rank, find_rank
from streamline.resuming.accept import check_snapshot, checked
from streamline.resuming.fit import fitted, refusal
from streamline.session import Session
from streamline.snapshot import Snapshot
from streamline.sources.live import Live
from streamline.stream import Stream
from streamline.sync import SyncStream
from streamline.watching.watchdog import check_stall

__all__ = ["Opened", "RunOptions", "part_of", "prepare"]

T = TypeVar("T")


def prepare(
    plan: Plan,
    *,
    backend: Backend,
    resume: Snapshot | None,
    rank: int | None,
    world_size: int | None,
    epoch: int | None,
    accept: Collection[str] = (),
    policy: Policy | None = None,
    progress: bool = False,
    stall_s: float | None = None,
) -> Opening:
    """Settle where and from which state a plan runs: ranks, files, whether the snapshot belongs to it.

    Raises:
      PlanError: an unsharded pipeline or a live source on several ranks; fewer shards than ranks; `accept` names what
        isn't there.
      ResumeError: the snapshot is of another plan, of other data, or of other ranks.
      ReadError: a file of the source is missing.
    """
    if isinstance(plan.source, Live):
        plan.source.check_unread()
        if epoch:
            raise PlanError(
                f"a live source has one epoch, 0, and no epoch {epoch}: a feed is read once, and its end is the "
                "end. Leave epoch= out; epochs of a feed that goes on are .loader(steps_per_epoch=n)"
            )
    _check_types(backend, resume, progress)
    accepted = checked(accept, plan)
    if epoch is not None:
        check_int(".open(epoch=)", epoch, 0)
        if resume is not None and resume.epoch != epoch:
            raise PlanError(f"the snapshot is of epoch {resume.epoch}: leave epoch={epoch} out, or resume without it")
    check_stall(stall_s)
    found = find_rank(rank, world_size)
    _check_ranks(plan, found)
    plan = replace(plan, source=plan.source.resolved())
    listing = plan.source.listing()
    if resume is not None:
        fit = fitted(plan, part_of(resume, found), listing, accepted)
        if fit.open:
            raise ResumeError(refusal(fit))
        if fit.changed_code:
            warnings.warn(_code_changed(fit.changed_code), CodeChangedWarning, stacklevel=3)
        plan, resume, listing = fit.plan, fit.snapshot, fit.snapshot.listing
    return Opening(
        plan=plan,
        backend=backend,
        rank=found,
        epoch=resume.epoch if resume is not None else epoch or 0,
        resume=resume,
        listing=listing,
        policy=policy or Policy(),
        progress=progress,
        stall_s=stall_s,
    )


def _check_types(backend: object, resume: object, progress: object) -> None:
    if isinstance(backend, type) or not hasattr(backend, "begin"):
        raise PlanTypeError(f".open(backend=) is a backend, such as sl.Inline(), got {given(backend)}")
    if resume is not None:
        check_snapshot(".open(resume=)", resume)
    if not isinstance(progress, bool):
        raise PlanTypeError(f".open(progress=) is True or False, got {given(progress)}")


def part_of(snapshot: Snapshot, found: Rank) -> Snapshot:
    """Return the part of a rank, out of a whole job's snapshot or its own.

    Raises:
      ResumeError: the snapshot is of other ranks.
    """
    if snapshot.world_size != found.world_size:
        raise ResumeError(
            f"the snapshot is of {snapshot.world_size} ranks, and there are {found.world_size} ({found.found_in}): "
            f"resume with the same world_size, {snapshot.world_size}"
        )
    if snapshot.rank not in (None, found.rank):
        raise ResumeError(
            f"the snapshot is of rank {snapshot.rank} of {snapshot.world_size}, this is rank {found.rank}: load the "
            "directory that all ranks saved to, without rank=, and each takes its own part"
        )
    return snapshot.part(found.rank)


def _code_changed(functions: tuple[str, ...]) -> str:
    return (
        f"since the snapshot, the code of {', '.join(functions)} has changed: what was delivered stays as it was, "
        "items from here on are of the new code"
    )


def _check_ranks(plan: Plan, found: Rank) -> None:
    ranks = found.world_size
    if ranks > 1 and isinstance(plan.source, Live) and not plan.source.partitioned:
        raise PlanError(
            f"each of the {ranks} ranks would read the same feed, and be handed the same items: give each rank a feed "
            "of its own and say from_stream(partitioned=True), or open(rank=0, world_size=1) if that is meant"
        )
    if ranks > 1 and not plan.sharded:
        raise PlanError(
            f"each of the {ranks} ranks would read everything: add .shard(n) with n a multiple of {ranks}, or "
            "open(rank=0, world_size=1) if that is meant"
        )
    if ranks > plan.shard.num_shards:
        raise PlanError(f"{plan.shard.num_shards} shards for {ranks} ranks: .shard({ranks}) or more")


class RunOptions(TypedDict, total=False):
    """What `open` and `loader` take alike: how a plan runs. See `Runnable.open`, which has the defaults."""

    backend: Backend
    accept: Collection[str]
    rank: int | None
    world_size: int | None
    on_error: OnError
    max_errors: int | float | None
    dead_letters: str | os.PathLike[str] | None
    progress: bool
    stall_s: float | None


class Opened(Generic[T]):
    """A plan about to run: `async with` gives a `Stream`, `with` a `SyncStream`.

    Attributes:
      opening: what was settled.
    """

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self._stream: Stream[T] | None = None
        self._sync: SyncStream[T] | None = None

    def stream(self) -> Stream[T]:
        """Return an async iterator that begins when it is first asked for an item."""
        return Stream(self.opening)

    def sync_stream(
        self, most_ahead: int | None = None, *, spent: Callable[[], None] | None = None, ahead: bool = False
    ) -> SyncStream[T]:
        """Return a plain iterator, begun.

        Args:
          most_ahead: items that each channel may hold, at the most; None: as many as the plan says.
          spent: as in `Session`.
          ahead: as in `SyncStream`.
        """
        session = Session(most_ahead=most_ahead)
        session.spent = spent
        return SyncStream(self.opening, session, ahead=ahead)

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
