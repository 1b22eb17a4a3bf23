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
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypedDict, TypeVar, Unpack, cast

from streamline.backends.base import Backend
from streamline.backends.hosts.pool import HostingBackend, HostPool
from streamline.core.error_policy import OnError, Policy
from streamline.core.meters import Traffic
from streamline.core.options import check_flag, check_int, check_seconds, given
from streamline.core.tasks import MEMORY_BYTES, Session
from streamline.core.text import some
from streamline.core.threads import hold_descriptors
from streamline.core.tracebacks import TrimmedTraceback
from streamline.errors import (
    CodeChangedWarning,
    PlanError,
    PlanTypeError,
    RecordError,
    ResumeError,
    printable,
    users_level,
)
from streamline.observe.exporters import check_metrics
from streamline.observe.page import page_place
from streamline.observe.watchdog import STALL_S
from streamline.plan.plan import Plan
from streamline.runtime.rank_ends import Resumed, agreed
from streamline.runtime.run import ResolvedRun, bound
from streamline.runtime.stream import Stream
from streamline.runtime.sync_stream import SyncStream
from streamline.runtime.tuning import Tune, tuning_of
from streamline.sharding.ends import NAME, Agreement, Ends, EndsPolicy, checked_ends
from streamline.sharding.ranks import Mesh, Rank, find_rank
from streamline.snapshot.compatibility import (
    Fit,
    NewFiles,
    accepting,
    check_snapshot,
    checked,
    fitted,
    refusal,
    resharded,
)
from streamline.snapshot.recorder import Recorder
from streamline.snapshot.snapshot import Snapshot
from streamline.snapshot.state_checks import check_stages
from streamline.snapshot.steps import RecordedStep, StepRecords, in_stretches
from streamline.sources.base import Source

T = TypeVar("T")

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class OpenOptions:
    """The options of a run as the user gave them: see `Pipeline.open`, which has the same defaults."""

    backend: Backend
    policy: Policy = field(default_factory=Policy)
    resume: Snapshot | None = None
    accept: Collection[str] = ()
    new_files: NewFiles = "refuse"
    rank: int | None = None
    world_size: int | None = None
    mesh: Mesh | None = None
    epoch: int | None = None
    ends: EndsPolicy | Ends = "drop"
    progress: bool = False
    stall_s: float | None = STALL_S
    memory: int = MEMORY_BYTES
    metrics: str | None = None
    page: bool | str = False
    record: Recorder | None = None
    skip_steps: Collection[int] = ()
    tune: Tune = False

    def check(self, plan: Plan) -> ResolvedRun:
        """Check what can be checked without a look at the source; return the run, whose data is as `plan` names it."""
        hold_descriptors()
        plan = plan.settled
        _check_types(self.backend, self.resume, self.progress)
        if self.record is not None:
            _check_record(self.record, plan)
            plan = plan.recorded
        accepted = checked(self.accept, plan) | accepting(self.new_files, plan)
        epoch = None if self.epoch is None else check_int(".open(epoch=)", self.epoch, 0)
        if epoch is not None and self.resume is not None and self.resume.epoch != epoch:
            raise PlanError(
                f"the snapshot is of epoch {self.resume.epoch}: leave epoch={epoch} out, or resume without it"
            )
        if self.stall_s is not None:
            check_seconds(".open(stall_s=) (or None, for no watchdog)", self.stall_s)
        memory = check_int(".open(memory=)", self.memory, 1)
        tuning = tuning_of(self.tune)
        if tuning is not None:
            tuning.check(plan, self.backend)
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
            page=page_place(self.page),
            stall_s=self.stall_s,
            memory=memory,
            ending=Agreement(ends=ends, rank=rank),
            accepted=accepted,
            record=self.record,
            tuning=tuning,
            left_out=as_ranges(self.skip_steps),
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
    listing, resumed, left_out = source.listing(), None, run.left_out
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
        left_out = _left_out(resume, left_out, recorded=run.record is not None)
    plan.source.check_split(plan.mode, plan.shard.num_shards)
    plan = bound(plan, listing)
    ending = agreed(plan, run.ending.ends, run.rank, epoch, resumed, skips=run.policy.skips)
    return replace(
        run, plan=plan, epoch=epoch, resume=resume, listing=listing, left_out=left_out, asked=traffic, ending=ending
    )


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
    check_flag(".open(progress=)", progress)


def _check_record(record: object, plan: Plan) -> None:
    if not isinstance(record, Recorder):
        raise PlanTypeError(f'.open(record=) is a recorder, record=sl.Recorder("steps/"), got {given(record)}')
    if plan.source.is_live:
        raise PlanError(".open(record=): a feed's items can't be read again, so a record of steps would say nothing")
    record.check()


def as_ranges(skip_steps: object) -> list[list[int]]:
    """Return the numbers of steps as ranges [first, stop], in order.

    Raises:
      PlanTypeError: they are no collection of integers. PlanError: one is less than 0.
    """
    if not isinstance(skip_steps, Collection) or isinstance(skip_steps, str | bytes):
        raise PlanTypeError(f".open(skip_steps=) is numbers of steps, range(1820, 1841) say, got {given(skip_steps)}")
    if isinstance(skip_steps, range) and skip_steps.step == 1 and skip_steps:
        return [[check_int(SKIP_STEPS, skip_steps.start, 0), skip_steps.stop]]
    found: list[list[int]] = []
    for number in sorted(check_int(SKIP_STEPS, one, 0) for one in skip_steps):
        if found and number <= found[-1][1]:
            found[-1][1] = max(found[-1][1], number + 1)
        else:
            found.append([number, number + 1])
    return found


SKIP_STEPS = "a number in .open(skip_steps=)"


def _left_out(resume: Snapshot, skipped: list[list[int]], *, recorded: bool) -> list[list[int]]:
    """Return the steps that are left out: those of the snapshot, and more of them."""
    if resume.step is None:
        if skipped or recorded or any(resume.left_out):
            raise ResumeError(
                "the snapshot doesn't say at which step it was taken: its ranks are at different steps. With "
                "the number of items that the stream had given of its epoch, "
                "dataclasses.replace(snapshot, step=number) says it"
            )
        return []
    if skipped and skipped[0][0] < resume.step:
        raise PlanError(
            f".open(skip_steps=): step {skipped[0][0]} was given before the snapshot, which stands before step "
            f"{resume.step}: resume from one that was taken before it"
        )
    joined: list[list[int]] = []
    for first, stop in sorted([*resume.left_out, *skipped]):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([first, stop])
    return joined


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
    record: Recorder | None
    tune: Tune


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
        session.workers_exhausted = spent
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


class StepReplay(Generic[T_co]):
    """The items of recorded steps again, in order, by `for` or `async for`. Made by `pipe.replay_steps`.

    Each loop opens the pipeline at the state before the first of them; where an order was chosen, by a best-effort
    merge say, before each of them. Leaving the loop closes it.

    Raises:
      As `Pipeline.replay_steps`, and what `open` raises, when a loop begins.
    """

    def __init__(
        self,
        pipe: Openable[T_co],
        path: str | os.PathLike[str],
        first: int,
        last: int,
        epoch: int | None,
        options: RunOptions,
    ) -> None:
        first, last = check_int(".replay_steps(first)", first, 0), check_int(".replay_steps(last)", last, 0)
        if last < first:
            raise PlanError(
                f".replay_steps(path, {first}, {last}): expected the first and the last step, in this order"
            )
        for name in REPLAYED_AS_RECORDED & options.keys():
            raise PlanError(f".replay_steps({name}=): it is as the steps were recorded, so leave {name}= out")
        records, rank = StepRecords(path, epoch), options.get("rank")
        if rank is None and len(records.ranks) > 1:
            raise PlanError(f".replay_steps: the record is of ranks {some(records.ranks)}: say whose, rank=0")
        rank = records.ranks[0] if rank is None and records.ranks else rank or 0
        self.steps = records.read_all(rank, first, last)
        self._pipe = pipe
        self._options: RunOptions = {**options, "rank": rank, "ends": "allow"}
        for step in self.steps:
            if step.after.get(NAME, {}).get("padded"):
                raise RecordError(f"step {step.number} of rank {rank} was padding: one of its first items, given again")
            if step.again is None:
                raise RecordError(
                    f"step {step.number} of rank {rank} began another pass of a .repeat, and the order that was chosen "
                    "there isn't in the record: replay the steps before it, and after it, by themselves"
                )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[T_co]:
        for stretch in in_stretches(self.steps):
            with closing(self._opened(stretch[0]).sync_stream(most_ahead=len(stretch))) as stream:
                for step in stretch:
                    if (item := next(stream, _NOTHING)) is _NOTHING:
                        raise _ended_before(step)
                    yield cast("T_co", item)

    async def __aiter__(self) -> AsyncIterator[T_co]:
        for stretch in in_stretches(self.steps):
            async with self._opened(stretch[0]) as stream:
                for step in stretch:
                    if (item := await anext(stream, _NOTHING)) is _NOTHING:
                        raise _ended_before(step)
                    yield cast("T_co", item)

    def _opened(self, step: RecordedStep) -> Opened[T_co]:
        options: RunOptions = {**self._options, "world_size": step.run.world_size}
        return self._pipe.open(resume=step.snapshot_again, **options)

    def __repr__(self) -> str:
        return f"<StepReplay: steps {self.steps[0].number}..{self.steps[-1].number} of rank {self._options['rank']}>"


REPLAYED_AS_RECORDED = frozenset({"world_size", "mesh", "ends", "record", "resume", "skip_steps"})

_NOTHING = object()


def _ended_before(step: RecordedStep) -> RecordError:
    return RecordError(
        f"the pipeline ended before step {step.number}, which was recorded: does it read the same data, with the same "
        "functions and on_error=?"
    )
