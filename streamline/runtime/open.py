"""Opening a pipeline: from the options as the user gave them to the run that they are resolved to.

All is resolved at once, unless servers or stores have to be asked inside asyncio's loop, which must not block. Then
`async with`, or the first item, awaits the answers; a plain stream waits for them when it is made.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypedDict, TypeVar, Unpack

from streamline.backends.base import Backend
from streamline.backends.hosts.pool import HostingBackend, HostPool
from streamline.core.error_policy import OnError, Policy
from streamline.core.meters import Traffic
from streamline.core.options import check_int, check_seconds, given
from streamline.core.tasks import MEMORY_BYTES, Session
from streamline.core.threads import hold_descriptors
from streamline.core.tracebacks import TrimmedTraceback
from streamline.errors import CodeChangedWarning, PlanError, PlanTypeError, ResumeError, printable, users_level
from streamline.observe.exporters import check_metrics
from streamline.plan.cache_key import bound
from streamline.plan.plan import Plan
from streamline.runtime.rank_ends import Resumed, agreed, page_of
from streamline.runtime.run import ResolvedRun
from streamline.runtime.stream import Stream
from streamline.runtime.sync_stream import SyncStream
from streamline.sharding.ends import Agreement, Ends, EndsPolicy, checked_ends
from streamline.sharding.ranks import Mesh, Rank, find_rank
from streamline.snapshot.compatibility import Fit, NewFiles, accepting, check_snapshot, checked, fitted, refusal
from streamline.snapshot.reshard import resharded
from streamline.snapshot.snapshot import Snapshot
from streamline.snapshot.state_checks import check_stages
from streamline.sources.base import Source

T = TypeVar("T")

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class OpenOptions:
    """The options of a run as the user gave them: see `Pipeline.open`."""

    backend: Backend
    policy: Policy = field(default_factory=Policy)
    resume: Snapshot | None = None
    accept: Collection[str] = ()
    new_files: NewFiles = "refuse"
    rank: int | None = None
    world_size: int | None = None
    mesh: Mesh | None = None
    epoch: int | None = None
    ends: EndsPolicy | Ends = "allow"
    progress: bool = False
    stall_s: float | None = None
    memory: int = MEMORY_BYTES
    metrics: str | None = None
    page: bool | str = False

    def check(self, plan: Plan) -> ResolvedRun:
        """Check what can be checked without a look at the source; return the run, whose data is as `plan` names it."""
        hold_descriptors()
        plan = plan.settled
        _check_types(self.backend, self.resume, self.progress)
        accepted = checked(self.accept, plan) | accepting(self.new_files, plan)
        epoch = None if self.epoch is None else check_int(".open(epoch=)", self.epoch, 0)
        if epoch is not None and self.resume is not None and self.resume.epoch != epoch:
            raise PlanError(
                f"the snapshot is of epoch {self.resume.epoch}: leave epoch={epoch} out, or resume without it"
            )
        if self.stall_s is not None:
            check_seconds(".open(stall_s=) (or None, for no watchdog)", self.stall_s)
        memory = check_int(".open(memory=)", self.memory, 1)
        if self.metrics is not None:
            check_metrics(".open(metrics=)", self.metrics)
        ends = checked_ends(self.ends)
        rank = find_rank(self.rank, self.world_size, self.mesh)
        plan.source.check_run(epoch or 0, rank.world_size)
        _check_ranks(plan, rank)
        if isinstance(self.backend, HostingBackend | HostPool):
            self.backend.check(plan)
        return ResolvedRun(
            plan=plan,
            backend=self.backend,
            rank=rank,
            epoch=epoch or 0,
            resume=self.resume,
            listing=None,
            policy=self.policy,
            progress=self.progress,
            metrics=self.metrics,
            page=page_of(self.page, rank, ends),
            stall_s=self.stall_s,
            memory=memory,
            ending=Agreement(ends=ends, rank=rank),
            accepted=accepted,
        )


def prepare(plan: Plan, options: OpenOptions) -> ResolvedRun:
    """Resolve where and from which state a plan runs: ranks, files, whether the snapshot belongs to it. May block.

    Raises:
      PlanError: an unsharded pipeline in several hosts, or it or a live source on several ranks; fewer shards than
        ranks; what chooses an order where processes share a rank; `accept` names what isn't there; the source, as it
        was found, can't be split as the plan says; ranks that are to end together have nothing over which to agree.
      ResumeError: the snapshot is of another plan or of other data.
      ReadError: a file of the source is missing.
    Warns: CodeChangedWarning.
    """
    run, traffic = options.check(plan), Traffic()
    return _resolved(run, run.plan.source.resolved(traffic), traffic)


def _resolved(run: ResolvedRun, source: Source[Any], traffic: Traffic) -> ResolvedRun:
    """Return a run that was checked, over its source as it was found."""
    plan, resume, epoch = replace(run.plan, source=source), run.resume, run.epoch
    listing, resumed = source.listing(), None
    if resume is not None:
        check_stages(resume)
        fit = fitted(plan, part_of(resume, run.rank), listing, run.accepted)
        if fit.open:
            raise ResumeError(refusal(fit))
        if fit.changed_code:
            warnings.warn(_code_changed(fit), CodeChangedWarning, stacklevel=users_level())
        resumed = Resumed(part=fit.snapshot, job=resume, same_plan=not fit.differences)
        plan, resume, listing = fit.plan, fit.snapshot, fit.snapshot.listing
        epoch = resume.epoch
    plan.source.check_split(plan.mode, plan.shard.num_shards)
    plan = bound(plan, listing)
    ending = agreed(plan, run.ending.ends, run.rank, epoch, resumed, skips=run.policy.skips)
    return replace(run, plan=plan, epoch=epoch, resume=resume, listing=listing, asked=traffic, ending=ending)


def _check_types(backend: object, resume: object, progress: object) -> None:
    if isinstance(backend, type) and hasattr(backend, "begin"):
        name = f"sl.{backend.__name__}"
        takes = inspect.signature(backend).parameters.values()
        ways = [f"{name}()"] * all(one.default is not one.empty for one in takes) + [f"{name}(4)"] * bool(takes)
        raise PlanTypeError(f".open(backend=) is a backend, got the class {name}: backend={', or '.join(ways)}")
    if not hasattr(backend, "begin"):
        raise PlanTypeError(
            f".open(backend=) is a backend, such as sl.Inline(), sl.Threads(4), sl.Processes(4), got {given(backend)}"
        )
    if resume is not None:
        check_snapshot(".open(resume=)", resume)
    if not isinstance(progress, bool):
        raise PlanTypeError(f".open(progress=) is True or False, got {given(progress)}")


def part_of(snapshot: Snapshot, found: Rank) -> Snapshot:
    """Return the part of a rank, out of a whole job's snapshot or its own.

    Raises:
      ResumeError: the snapshot is another rank's, or of another number of ranks and can't be divided anew.
    """
    if snapshot.world_size != found.world_size and (snapshot.rank is None or snapshot.world_size == 1):
        return resharded(snapshot, found)
    if snapshot.world_size != found.world_size or snapshot.rank not in (None, found.rank):
        raise ResumeError(
            f"the snapshot is of rank {snapshot.rank} of {snapshot.world_size}, this is rank {found.rank} of "
            f"{found.world_size}: load the directory that all ranks saved to, without rank=, and each takes its part"
        )
    return snapshot.part(found.rank)


def _code_changed(fit: Fit) -> str:
    changed = (
        f"since the snapshot, the code of {', '.join(fit.changed_code)} has changed: what was delivered stays as it "
        "was, items from here on are of the new code"
    )
    return printable("; ".join([changed, *fit.unsteady]))


def _check_ranks(plan: Plan, found: Rank) -> None:
    ranks = found.world_size
    if found.shared:
        _check_shared(plan)
    if ranks > 1 and not plan.sharded:
        raise PlanError(
            f"each of the {ranks} ranks would read everything: add .shard(n) with n a multiple of {ranks}, or "
            "open(rank=0, world_size=1) if that is meant"
        )
    if ranks > plan.shard.num_shards:
        raise PlanError(f"{plan.shard.num_shards} shards for {ranks} ranks: .shard({ranks}) or more")


def _check_shared(plan: Plan) -> None:
    """Refuse what gives the processes of one rank, those that share its data, other items each."""
    why = "a feed is read once, by one of them" if plan.source.is_live else None
    if plan.chooser is not None:
        why = f"{plan.chooser} chooses an order, and each of them another one"
    if why is not None:
        raise PlanError(
            "the job has more processes than the mesh: those of one rank are to get the same items, and "
            f"{why}. Let one process read and send the others its batches; or, if no other is this rank, say rank= and "
            "world_size= in the place of mesh="
        )


ENTER = (
    "pipe.open() is entered before it is read: `with pipe.open() as stream: for item in stream`, or `async with "
    "pipe.open() as stream: async for item in stream`"
)


class RunOptions(TypedDict, total=False):
    """What `open` and `loader` take alike: how a plan runs. See `Pipeline.open`, which has the defaults."""

    backend: Backend
    accept: Collection[str]
    new_files: NewFiles
    rank: int | None
    world_size: int | None
    mesh: Mesh | None
    ends: EndsPolicy | Ends
    on_error: OnError
    max_errors: int | float | None
    dead_letters: str | os.PathLike[str] | None
    progress: bool
    stall_s: float | None
    memory: int
    metrics: str | None
    page: bool | str


class Opened(Generic[T]):
    """A plan about to run: `async with` gives a `Stream`, `with` a `SyncStream`.

    Raises:
      As `prepare`; where servers or stores have to be asked inside asyncio's loop, some of it only by `async with`.
    """

    def __init__(self, plan: Plan, options: OpenOptions) -> None:
        self._checked = checked = options.check(plan)
        waits = checked.plan.source.is_remote and asyncio._get_running_loop() is not None  # it would hold up the loop
        self._resolved: ResolvedRun | None = None
        with TrimmedTraceback():
            if not waits:
                self._resolved = self.resolved
        self._stream: Stream[T] | None = None
        self._sync: SyncStream[T] | None = None

    @property
    def resolved(self) -> ResolvedRun:
        """The run; if it isn't resolved yet, this does it, and blocks."""
        if self._resolved is None:
            traffic = Traffic()
            self._resolved = _resolved(self._checked, self._checked.plan.source.resolved(traffic), traffic)
        return self._resolved

    async def _aresolved(self) -> ResolvedRun:
        """As `resolved`, while the event loop goes on. Cancellation: nothing is left, and nothing resolved."""
        if self._resolved is None:
            traffic = Traffic()
            self._resolved = _resolved(self._checked, await self._checked.plan.source.aresolved(traffic), traffic)
        return self._resolved

    def stream(self) -> Stream[T]:
        """Return an async iterator that begins when it is first asked for an item."""
        if self._resolved is None and self._checked.resume is None:
            return Stream(self._checked, resolve=self._aresolved)
        return Stream(self.resolved)

    def sync_stream(
        self, most_ahead: int | None = None, *, spent: Callable[[], None] | None = None, ahead: bool = False
    ) -> SyncStream[T]:
        """Return a plain iterator, begun.

        Args:
          most_ahead: items that each channel may hold, at the most; None: as many as the plan says.
          spent: as in `Session`.
          ahead: as in `SyncStream`.
        """
        session = Session(most_ahead=most_ahead, memory=self.resolved.memory)
        session.spent = spent
        return SyncStream(self.resolved, session, ahead=ahead)

    if not TYPE_CHECKING:  # type checkers say so sooner

        def __iter__(self) -> NoReturn:
            """Refuse: what is iterated is what `with` gives."""
            raise PlanTypeError(f"{ENTER}; for all of the defaults, for item in pipe")

        __aiter__ = __next__ = __anext__ = __iter__

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("_") and hasattr(SyncStream, name):
                raise AttributeError(f"{ENTER}, and that has .{name}", name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    async def __aenter__(self) -> Stream[T]:
        with TrimmedTraceback():
            await self._aresolved()
            self._stream = self.stream()
            await self._stream.start()
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    def __enter__(self) -> SyncStream[T]:
        with TrimmedTraceback():
            self._sync = self.sync_stream()
        return self._sync

    def __exit__(self, *_: object) -> None:
        if self._sync is not None:
            self._sync.close()


class Openable(ABC, Generic[T_co]):
    """What can be opened: a `Pipeline`, for all that stands below it and takes one."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan in sections, as it is run."""

    @abstractmethod
    def open(
        self, *, resume: Snapshot | None = None, epoch: int | None = None, **options: Unpack[RunOptions]
    ) -> Opened[T_co]:
        """Return what `async with` or `with` runs. See `Pipeline.open`, which has the defaults."""
