"""Opening a pipeline: from the options as the user gave them to the run that they are resolved to.

Options are resolved at once, unless that means asking servers or stores in a running event loop, which must not block.
Then `async with`, or the first item, awaits the answers; a plain stream blocks until they arrive when it is created.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, Unpack

from streamline.core.meters import Traffic
from streamline.core.options import check_int
from streamline.core.state import Json
from streamline.core.tasks import WorkersExhausted
from streamline.core.text import Entry, some
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
from streamline.plan.fingerprint import DIGEST_CHARS, fingerprint
from streamline.plan.plan import AnyStage, Plan
from streamline.runtime.rank_ends import Resumed, agree_on_end
from streamline.runtime.run import (
    BeginOptions,
    OpenKeywords,
    OpenOptions,
    ResolvedRun,
    RunKeywords,
    caches_in,
    join_ranges,
)
from streamline.runtime.stream import Stream
from streamline.runtime.sync_stream import SyncStream
from streamline.sharding.ends import NAME, Agreement, checked_ends
from streamline.sharding.ranks import Rank
from streamline.snapshot.compatibility import Fit, fit_plan, refusal, resharded
from streamline.snapshot.snapshot import Snapshot
from streamline.snapshot.state_checks import check_stages
from streamline.snapshot.steps import RecordedStep, StepRecords, in_stretches
from streamline.sources.base import Source

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

hints_logger = logging.getLogger("streamline.hints")  # as the docs call it


def resolve_options(plan: Plan, options: OpenOptions) -> ResolvedRun:
    """Return the run, checked as far as is possible without asking the source, which is still as `plan` has it."""
    hold_descriptors()
    plan, begin = plan.settled, options.begin
    options.watch.check(plan)
    if options.watch.record is not None:
        plan = plan.recorded
    accepted, rank = begin.accepted_changes(plan), options.ranks.find()
    epoch = int(begin.epoch or 0)
    plan.source.check_run(epoch, rank.world_size)
    _check_ranks(plan, rank)
    if (tuning := options.work.tuning) is not None:
        tuning.check(plan, options.work.backend)
    options.work.backend.check(plan)
    return ResolvedRun(
        plan=plan,
        options=options,
        rank=rank,
        ending=Agreement(ends=checked_ends(options.ranks.ends), rank=rank),
        epoch=epoch,
        resume=begin.resume,
        listing=None,
        accepted=accepted,
        left_out=begin.left_out,
    )


def prepare(plan: Plan, options: OpenOptions) -> ResolvedRun:
    """Resolve where and from which state a plan runs: ranks, files, whether the snapshot fits. May block.

    Raises:
      PlanError: an unsharded pipeline in several hosts, or it or a live source on several ranks; fewer shards than
        ranks; a choice of order where processes share a rank; an unknown entry in `accept`; the source can't be split
        as the plan says; ranks that are to end together have no store over which to agree.
      ResumeError: the snapshot is of another plan or of other data.
      ReadError: a file of the source is missing.
    Warns: CodeChangedWarning.
    """
    run, traffic = resolve_options(plan, options), Traffic()
    return _with_source(run, run.plan.source.resolved(traffic), traffic)


def _with_source(run: ResolvedRun, source: Source[Any], traffic: Traffic) -> ResolvedRun:
    """Return a checked run with the source as it was found."""
    plan, resume, epoch = replace(run.plan, source=source), run.resume, run.epoch
    listing, resumed, left_out, options = source.listing(), None, run.left_out, run.options
    if resume is not None:
        check_stages(resume)
        fit = fit_plan(plan, part_of(resume, run.rank), listing, run.accepted)
        if fit.open:
            raise ResumeError(refusal(fit))
        if fit.changed_code:
            warnings.warn(_code_changed(fit), CodeChangedWarning, stacklevel=users_level())
        resumed = Resumed(part=fit.snapshot, job=resume, same_plan=not fit.differences)
        plan, resume, listing = fit.plan, fit.snapshot, fit.snapshot.listing
        epoch = resume.epoch
        left_out = _skipped_steps(resume, left_out, recorded=options.watch.record is not None)
        options = replace(options, begin=BeginOptions())  # frees the snapshot of all ranks
    plan.source.check_split(plan.mode, plan.shard.num_shards)
    if plan.mode == "file" and isinstance(listing, list):
        hint_at_idle_workers(plan.shard.num_shards, len(listing))
    plan = with_cache_keys(plan, listing)
    ending = agree_on_end(plan, run.ending.ends, run.rank, epoch, resumed, skips=options.errors.skips)
    run = replace(run, plan=plan, options=options, ending=ending, epoch=epoch, resume=resume)
    return replace(run, listing=listing, left_out=left_out, asked=traffic)


@cache  # once: a pipeline may be opened for every epoch
def hint_at_idle_workers(num_shards: int, files: int) -> None:
    """Log that there are more shards than files, each of which is one worker's."""
    if 0 < files < num_shards:
        hints_logger.warning("%s", idle_workers(num_shards, files, "files", num_shards - files, splittable=True))


def idle_workers(num_shards: int, objects: int, kind: str, idle: int, *, splittable: bool) -> str:
    """Say that so many workers have nothing to read, and what to write instead."""
    split = ", or split the data into more files" if splittable else ""
    return (
        f"{num_shards:,} shards for {objects:,} {kind}: {idle:,} workers would have nothing to read: write "
        f".shard({objects}) or fewer{split}"
    )


def _skipped_steps(resume: Snapshot, skipped: list[list[int]], *, recorded: bool) -> list[list[int]]:
    """Return the steps to leave out: the snapshot's, and those of `skip_steps`."""
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
    return join_ranges([*resume.left_out, *skipped])


def with_cache_keys(plan: Plan, listing: Json = None) -> Plan:
    """Return a plan, with its source resolved, whose caches on disk have a key, a digest in their files' names.

    It covers the stages before the cache, as in a fingerprint, the code of their functions, and the source's data, as
    listed in a snapshot. Not the epoch: a pass that was drawn is served in later epochs, too.
    """
    plan = replace(plan, source=plan.source.map_plans(with_cache_keys))
    if all(cache.path is None for cache in caches_in(plan)):
        return plan
    of = [plan.source.listing() if listing is None else listing, plan.source.drawn()]
    of += [[fingerprint(part), part.source.drawn()] for _, _, part in plan.source.made_of]
    entries, chosen = fingerprint(plan), False
    caches = {cache.name: cache for cache in caches_in(plan)}
    sections: list[tuple[AnyStage, ...]] = []
    for section in (plan.worker, plan.after):
        found: list[AnyStage] = []
        for stage in section:
            cache = caches.get(stage.name)
            if cache is None:
                found.append(stage)
            else:
                found.append(replace(cache, upstream_digest=_digest(entries, stage.name, of), chosen=chosen))
            chosen = chosen or stage.chooses
        chosen = chosen or plan.merge.chooses
        sections.append(tuple(found))
    worker, after = sections
    return replace(plan, worker=worker, after=after)


def _digest(entries: list[Entry], name: str, of: Json) -> str:
    before = entries[: next(at for at, entry in enumerate(entries) if at and entry["name"] == name)]
    text = json.dumps([before, of], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARS]


def part_of(snapshot: Snapshot, found: Rank) -> Snapshot:
    """Return a rank's part of a job's snapshot, or its own. Raises `ResumeError`: it is another rank's."""
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
    """Refuse a plan whose items would differ between the processes that share a rank."""
    why = "a feed is read once, by one of them" if plan.source.is_live else None
    if plan.chooser is not None:
        why = f"{plan.chooser} chooses an order, and each of them another one"
    if why is not None:
        raise PlanError(
            "the job has more processes than the mesh: those of one rank are to get the same items, and "
            f"{why}. Let one process read and send the others its batches; or, if no other is this rank, say rank= and "
            "world_size= in the place of mesh="
        )


ENTER_FIRST = (
    "pipe.open() is entered before it is read: `with pipe.open() as stream: for item in stream`, or `async with "
    "pipe.open() as stream: async for item in stream`"
)


class Opened(Generic[T]):
    """An opened pipeline: `async with` gives a `Stream`, `with` a `SyncStream`, and a loop runs it to its end.

    They raise as `prepare`.
    """

    def __init__(self, plan: Plan, options: OpenOptions) -> None:
        self._checked = checked = resolve_options(plan, options)
        waits = checked.plan.source.is_remote and asyncio._get_running_loop() is not None  # it would hold up the loop
        self._resolved: ResolvedRun | None = None
        with TrimmedTraceback():
            if not waits:
                self._resolved = self.resolved
        self._stream: Stream[T] | None = None
        self._sync: SyncStream[T] | None = None

    @property
    def resolved(self) -> ResolvedRun:
        """The resolved run. Blocks, if it isn't resolved yet."""
        if self._resolved is None:
            traffic = Traffic()
            self._resolved = _with_source(self._checked, self._checked.plan.source.resolved(traffic), traffic)
        return self._resolved

    async def _resolve(self) -> ResolvedRun:
        """Return the resolved run, without blocking the event loop. Cancellation: it stays unresolved."""
        if self._resolved is None:
            traffic = Traffic()
            self._resolved = _with_source(self._checked, await self._checked.plan.source.aresolved(traffic), traffic)
        return self._resolved

    def stream(self) -> Stream[T]:
        """Return an async iterator that begins with its first pull."""
        if self._resolved is None and self._checked.resume is None:
            return Stream(self._checked, resolve=self._resolve)
        return Stream(self.resolved)

    def sync_stream(
        self, most_ahead: int | None = None, *, on_exhausted: Callable[[], None] | None = None, ahead: bool = False
    ) -> SyncStream[T]:
        """Return a plain iterator that has begun; channels hold at most `most_ahead` items each."""
        session = self.resolved.session(most_ahead)
        if on_exhausted is not None:
            session.services.add(WorkersExhausted, WorkersExhausted(on_exhausted))
        return SyncStream(self.resolved, session, ahead=ahead)

    def __iter__(self) -> SyncStream[T]:
        return self.sync_stream()

    def __aiter__(self) -> Stream[T]:
        return self.stream()

    if not TYPE_CHECKING:  # type checkers say so sooner

        def __next__(self) -> NoReturn:
            """Refuse: each would be of another run."""
            raise PlanTypeError(f"{ENTER_FIRST}; `for item in pipe.open()` runs it to its end")

        __anext__ = __next__

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("_") and hasattr(SyncStream, name):
                raise AttributeError(f"{ENTER_FIRST}, and that has .{name}", name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    async def __aenter__(self) -> Stream[T]:
        with TrimmedTraceback():
            await self._resolve()
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
    """What can be opened: the interface of `Pipeline` for modules below it."""

    @property
    @abstractmethod
    def plan(self) -> Plan: ...

    @abstractmethod
    def open(self, **options: Unpack[OpenKeywords]) -> Opened[T_co]:
        """Return what `async with` or `with` runs. See `Pipeline.open`."""


class StepReplay(Generic[T_co]):
    """The items of recorded steps again, in order, by `for` or `async for`. Made by `pipe.replay_steps`.

    Each loop opens the pipeline at the state before the first of them; where an order was chosen, by a best-effort
    merge say, before each of them. Leaving the loop closes it.

    Raises:
      As `Pipeline.replay_steps`; and as `open`, when a loop begins.
    """

    def __init__(
        self,
        pipe: Openable[T_co],
        path: str | os.PathLike[str],
        first: int,
        last: int,
        epoch: int | None,
        options: RunKeywords,
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
        self._options: RunKeywords = {**options, "rank": rank, "ends": "allow"}
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
            with closing(self._open(stretch[0]).sync_stream(most_ahead=len(stretch))) as stream:
                for step in stretch:
                    yield _item_of(step, next(stream, _NOTHING))

    async def __aiter__(self) -> AsyncIterator[T_co]:
        for stretch in in_stretches(self.steps):
            async with self._open(stretch[0]) as stream:
                for step in stretch:
                    yield _item_of(step, await anext(stream, _NOTHING))

    def _open(self, step: RecordedStep) -> Opened[T_co]:
        options: RunKeywords = {**self._options, "world_size": step.run.world_size}
        return self._pipe.open(resume=step.snapshot_again, **options)

    def __repr__(self) -> str:
        return f"<StepReplay: steps {self.steps[0].number}..{self.steps[-1].number} of rank {self._options['rank']}>"


REPLAYED_AS_RECORDED = frozenset({"world_size", "mesh", "ends", "record", "resume", "skip_steps"})
_NOTHING = object()


def _item_of(step: RecordedStep, found: Any) -> Any:
    if found is _NOTHING:
        raise RecordError(
            f"the pipeline ended before step {step.number}, which was recorded: does it read the same data, with the "
            "same functions and on_error=?"
        )
    return found
