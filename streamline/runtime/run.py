"""The options of a run, as the user gave them, and the resolved run.

Options are declared by theme, each once, in a frozen dataclass with its default and its check. Users write them flat,
as keywords of `Pipeline.open`, whose docstring says what they mean; the TypedDicts declare these keywords for editors
and type checkers. So a new option is a field of a theme and a keyword.

A resolved run has its plan, where it runs and the state that it begins at; it opens the flows, and resets caches.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from os import PathLike
from time import perf_counter
from typing import Any, TypedDict, TypeVar, Unpack
from weakref import ref

from streamline.backends.base import Backend, Workers
from streamline.backends.inline import Inline
from streamline.core.byte_budget import Budget
from streamline.core.channel import Inbox
from streamline.core.dead_letters import DeadLetters
from streamline.core.driver import LAST_TASK, behind_channel
from streamline.core.error_policy import Errors, OnError, Policy, counts_in
from streamline.core.flow import Flow, Opener, Site
from streamline.core.meters import Meters, Traffic
from streamline.core.options import check_flag, check_int, check_known, check_seconds, type_and_repr
from streamline.core.state import Json, Tree
from streamline.core.tasks import MEMORY_BYTES, MergeWait, Session, Tasks, WaitedWorker, WorkersExhausted
from streamline.core.threads import ThreadPool, run_uninterrupted
from streamline.errors import PlanError, PlanTypeError
from streamline.merge.base import DeferredProgress, Inboxes, MergeFlow
from streamline.observe.exporters import ExportedStream, check_metrics, export
from streamline.observe.page import STALLED_S, StreamFacts, open_page, page_place
from streamline.observe.progress import Progress
from streamline.observe.stats import stats_of
from streamline.observe.trace import Trace
from streamline.observe.watchdog import STALL_S, Watched, working
from streamline.plan.compile import merged_size
from streamline.plan.length import num_left_on_ranks, num_outputs_of_rank
from streamline.plan.plan import Plan
from streamline.plan.worker import BeginState, SourceOpener, StageOpener, ahead_of
from streamline.runtime.rank_ends import with_items_left
from streamline.runtime.tuning import StreamTuning, Tune, tuning_of
from streamline.sharding.end_flow import ending
from streamline.sharding.ends import Agreement, Ends, EndsPolicy, checked_ends
from streamline.sharding.ranks import Mesh, Rank, find_rank
from streamline.sharding.split import shards_of_rank
from streamline.snapshot.compatibility import NewFiles, accepted_new_files, check_accept, check_snapshot
from streamline.snapshot.coordinator import SnapshotCoordinator
from streamline.snapshot.recorder import Recorder
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.live import Live
from streamline.sources.live_reader import LiveReader
from streamline.transforms.cache import Cache
from streamline.transforms.cache_files import CacheFiles

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """What runs the workers, and what they may use."""

    backend: Backend = Inline()  # noqa: RUF009 - it is immutable
    memory: int = MEMORY_BYTES
    tune: Tune = False

    def __post_init__(self) -> None:
        _check_backend(self.backend)
        check_int(".open(memory=)", self.memory, 1)

    @cached_property
    def tuning(self) -> StreamTuning | None:
        """What changes the knobs; None: they stay as written. May read a file."""
        return tuning_of(self.tune)


@dataclass(frozen=True, kw_only=True)
class BeginOptions:
    """Where the run begins, and what may have changed since."""

    resume: Snapshot | None = None
    accept: Collection[str] = ()
    new_files: NewFiles = "refuse"
    epoch: int | None = None
    skip_steps: Collection[int] = ()

    def __post_init__(self) -> None:
        epoch, resume = self.epoch, self.resume
        if resume is not None:
            check_snapshot(".open(resume=)", resume)
        if epoch is not None:
            check_int(".open(epoch=)", epoch, 0)
        if epoch is not None and resume is not None and resume.epoch != epoch:
            raise PlanError(f"the snapshot is of epoch {resume.epoch}: leave epoch={epoch} out, or resume without it")
        _ = self.left_out

    @cached_property
    def left_out(self) -> list[list[int]]:
        """The steps that are left out, as sorted ranges [first, stop]."""
        skip_steps, option = self.skip_steps, "a number in .open(skip_steps=)"
        if not isinstance(skip_steps, Collection) or isinstance(skip_steps, str | bytes):
            raise PlanTypeError(
                f".open(skip_steps=) is numbers of steps, range(1820, 1841) say, got {type_and_repr(skip_steps)}"
            )
        if isinstance(skip_steps, range) and skip_steps.step == 1 and skip_steps:
            return [[check_int(option, skip_steps.start, 0), skip_steps.stop]]
        return join_ranges([number, number + 1] for number in (check_int(option, one, 0) for one in skip_steps))

    def accepted_changes(self, plan: Plan) -> frozenset[str]:
        """Return what may have changed in this plan since the snapshot."""
        return check_accept(self.accept, plan) | accepted_new_files(self.new_files, plan)


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Which rank this is, and how all of them end."""

    rank: int | None = None
    world_size: int | None = None
    mesh: Mesh | None = None
    ends: EndsPolicy | Ends = "drop"

    def __post_init__(self) -> None:
        checked_ends(self.ends)

    def find(self) -> Rank:
        return find_rank(self.rank, self.world_size, self.mesh)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What shows or records the run."""

    progress: bool = False
    stall_s: float | None = STALL_S
    metrics: str | None = None
    page: bool | str = False
    record: Recorder | None = None

    def __post_init__(self) -> None:
        check_flag(".open(progress=)", self.progress)
        if self.stall_s is not None:
            check_seconds(".open(stall_s=) (or None, for no watchdog)", self.stall_s)
        if self.metrics is not None:
            check_metrics(".open(metrics=)", self.metrics)
        _ = self.page_place
        record: object = self.record
        if record is not None and not isinstance(record, Recorder):
            raise PlanTypeError(
                f'.open(record=) is a recorder, record=sl.Recorder("steps/"), got {type_and_repr(record)}'
            )

    @property
    def page_place(self) -> str | None:
        """The key of its page among exporters; None: it has none."""
        return page_place(self.page)

    def check(self, plan: Plan) -> None:
        """Refuse to record the steps of a live source, or to a directory that isn't writable."""
        if self.record is not None:
            if plan.source.is_live:
                raise PlanError(".open(record=): a feed's items can't be read again: a record of steps says nothing")
            self.record.check()


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    work: WorkOptions = field(default_factory=WorkOptions)
    begin: BeginOptions = field(default_factory=BeginOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    errors: Policy = field(default_factory=Policy)
    watch: WatchOptions = field(default_factory=WatchOptions)

    @classmethod
    def of(cls, **options: Unpack[OpenKeywords]) -> OpenOptions:
        """Return the options given flat; the others have their defaults. Raises `PlanError`, `PlanTypeError`."""
        check_known(".open", options.keys() - DEFAULTS.keys(), DEFAULTS)
        themes: dict[str, Any] = {}
        for name, theme in THEMES.items():
            themes[name] = theme(**{key: value for key, value in options.items() if key in theme.__dataclass_fields__})
        return cls(**themes)


THEMES: dict[str, Any] = {theme.name: theme.default_factory for theme in fields(OpenOptions)}
DEFAULTS: dict[str, Any] = {one.name: one.default for theme in THEMES.values() for one in fields(theme)}


class _DataKeywords(TypedDict, total=False):
    """Options that decide which items there are."""

    accept: Collection[str]
    new_files: NewFiles
    rank: int | None
    world_size: int | None
    mesh: Mesh | None
    on_error: OnError
    max_errors: int | float | None
    dead_letters: str | os.PathLike[str] | None


class DebugKeywords(_DataKeywords, total=False):
    """What `Pipeline.debug` takes."""

    resume: Snapshot | None
    epoch: int | None


class RunKeywords(_DataKeywords, total=False):
    """What `Pipeline.loader`, `write` and their like pass to each `open`."""

    backend: Backend
    ends: EndsPolicy | Ends
    progress: bool
    stall_s: float | None
    memory: int
    metrics: str | None
    page: bool | str
    record: Recorder | None
    tune: Tune


class OpenKeywords(RunKeywords, total=False):
    """What `Pipeline.open` takes."""

    resume: Snapshot | None
    epoch: int | None
    skip_steps: Collection[int]


def lists_keywords(keywords: type) -> Callable[[F], F]:
    """Return a decorator by which `help()` lists the keywords of a function, with defaults, in place of `**options`."""

    def add_signature(fn: F) -> F:
        signature, types = inspect.signature(fn), keywords.__annotations__
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        for name in (option for option in DEFAULTS if option in types):
            text = types[name].__forward_arg__
            own.append(inspect.Parameter(name, own[0].KEYWORD_ONLY, default=DEFAULTS[name], annotation=text))
        fn.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return fn

    return add_signature


def join_ranges(ranges: Iterable[list[int]]) -> list[list[int]]:
    """Return ranges [first, stop] in order; those that overlap or touch become one."""
    found: list[list[int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([first, stop])
    return found


def _check_backend(backend: object) -> None:
    if isinstance(backend, type) and hasattr(backend, "begin"):
        name = f"sl.{backend.__name__}"
        takes = inspect.signature(backend).parameters.values()
        ways = [f"{name}()"] * all(one.default is not one.empty for one in takes) + [f"{name}(4)"] * bool(takes)
        raise PlanTypeError(f".open(backend=) is a backend, got the class {name}: backend={', or '.join(ways)}")
    if not hasattr(backend, "begin"):
        raise PlanTypeError(
            ".open(backend=) is a backend, such as sl.Inline(), sl.Threads(4), sl.Processes(4), got "
            f"{type_and_repr(backend)}"
        )


# The resolved run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A plan that is ready to run.

    Attributes:
      options: as they were given, but for where it begins.
      ending: how it ends together with the other ranks.
      epoch: what shuffles and random generators use as the epoch.
      resume: the state to begin at, of this rank and as this plan reads it; None: the beginning.
      listing: what the source reads, for snapshots.
      accepted: what may have changed since the snapshot.
      left_out: steps whose items are not given, as [first, stop]; see `open(skip_steps=)`.
      asked: what servers and stores were asked to resolve it; added to the run's figures.
    """

    plan: Plan
    options: OpenOptions
    rank: Rank
    ending: Agreement
    epoch: int
    resume: Snapshot | None
    listing: Any
    accepted: frozenset[str]
    left_out: list[list[int]]
    asked: Traffic = field(default_factory=Traffic, compare=False)

    def session(self, most_ahead: int | None = None, threads: ThreadPool | None = None) -> Session:
        """Return what the parts of one run share; the arguments as there.

        Raises:
          DeadLetterError: skipped items can't be written down.
        """
        meters = Meters(perf_counter())
        return Session(
            most_ahead=most_ahead,
            budget=Budget(int(self.options.work.memory)),
            threads=threads or ThreadPool(),
            meters=meters,
            errors=self._errors(meters),
        )

    @cached_property
    def snapshots(self) -> SnapshotCoordinator:
        return SnapshotCoordinator(
            plan=self.plan,
            rank=self.rank,
            epoch=self.epoch,
            listing=self.listing,
            begun_from=self._state,
            left_out=self.left_out,
        )

    @property
    def first_step(self) -> int | None:
        """The number of its first item; None: the snapshot has no step."""
        return 0 if self.resume is None else self.resume.step

    @property
    def leaves_out_more(self) -> bool:
        """Whether items after its first one are left out."""
        return any(stop > (self.first_step or 0) for _, stop in self.left_out)

    def leaves_out(self, step: int) -> bool:
        return any(first <= step < stop for first, stop in self.left_out)

    @property
    def computes_last(self) -> bool:
        """Whether the last chain runs user code, or waits for other ranks: then it needs a task of its own."""
        return not self.plan.owns_output_channel and (bool(self.plan.after) or self.ending.active)

    def flow(self, tasks: Tasks) -> Flow[Any]:
        """Return the last flow of the plan, for a consumer in the event loop of `tasks`."""
        flow, plan = self.chain(tasks), self.plan
        if not self.computes_last:
            return flow
        usual, widest, most = plan.end_capacity, plan.end_widest, plan.source.ahead_bytes
        site = Site(tasks, self.rank.rank)
        return behind_channel(flow, site, LAST_TASK, usual, most, by_list=True, widest=widest, last=True)

    def chain(self, tasks: Tasks) -> Flow[Any]:
        """Return the flow of the plan's last stage, whose work is done in the task that pulls it."""
        tasks.session.meters.order = self.plan.names
        tasks.session.meters.traffic(self.plan.source.name).add(self.asked)
        site = Site(tasks, self.rank.rank, self.rank.world_size, (self.epoch,))
        work = self.options.work
        if work.tuning is not None:
            work.tuning.begin(self.plan, work.backend, len(self.rank.shards(self.plan.shard.num_shards)), tasks)
        journal = None if self.resume is None else self.resume.journal
        opener: Opener[Any] = _MergeOpener(self.plan, work.backend, site, journal)
        most = self.plan.source.ahead_bytes
        for stage in self.plan.after:
            if stage.owns_output_channel:
                opener = ahead_of(self._with_common_end(opener), "ready", self.plan.end_capacity, most)
            opener = StageOpener(stage, opener)
        if self.plan.owns_output_channel:
            return opener(self._state)
        return self._with_common_end(opener)(self._state)

    def _with_common_end(self, opener: Opener[Any]) -> Opener[Any]:
        """Return the opener of a flow that ends together with those of other ranks."""
        agreement = self.ending
        if not agreement.active:
            return opener
        return SourceOpener(lambda site, state: ending(opener, site, agreement, state), opener.site)

    def _errors(self, meters: Meters) -> Errors:
        """Return what counts the skipped items of one run."""
        before, rank, letters, policy = self._skips_before, self.rank, None, self.options.errors
        cached = any(cache.path is not None for cache in caches_of(self.plan))
        if policy.dead_letters is not None:
            path, of = policy.dead_letters, (rank.rank, rank.world_size)
            kept = cached and self.resume is not None
            letters = DeadLetters(path, *of, self.epoch, before, rank.process, cached=kept)
        return Errors(policy, before, letters, merged_size(self.plan), meters, cached=cached)

    @property
    def start_snapshot(self) -> Snapshot | None:
        """This rank's part of the state to begin at, with how many items are left."""
        return None if self.resume is None else with_items_left(self.ending, self.resume)

    @property
    def _skips_before(self) -> dict[tuple[int, str], int]:
        """How many items were skipped before the state to begin at, by (shard, stage)."""
        state = self._state
        if state is None:
            return {}
        found = {(self.rank.rank, name): count for name, count in counts_in(state).items()}
        shards = shards_of_rank(self.plan.shard.num_shards, self.rank.rank, self.rank.world_size)
        for shard, tree in zip(shards, state[self.plan.merge.name]["workers"], strict=True):
            found.update({(shard, name): count for name, count in counts_in(tree).items()})
        return found

    @property
    def merged_names(self) -> frozenset[str]:
        """The names of the merge and the stages after it."""
        return frozenset({self.plan.merge.name, *(stage.name for stage in self.plan.after)})

    def watch_target(self, session: Session) -> Watched:
        return Watched(session, self.plan.source.name, self.merged_names, shared=self.plan.mode == "shared")

    def show(self, session: Session) -> None:
        """Start the progress line, the page and the metrics that were asked for. Raises `HostError`."""
        watch = self.options.watch
        if watch.metrics is not None or watch.page_place is not None:
            run_uninterrupted(partial(self._export, session))
        if watch.progress:
            progress = Progress(partial(stats_of, session.meters), self.epoch)
            session.hooks.on_chunk_boundary(progress.at_chunk_boundary)
            session.hooks.at_close(progress.stop)
            progress.start()

    def _export(self, session: Session) -> None:
        stats, whose = partial(stats_of, session.meters), (self.plan.source.name, self.rank.rank)
        metrics, page = self.options.watch.metrics, self.options.watch.page_place
        if metrics is not None:
            session.hooks.at_close(export(metrics, ExportedStream(*whose, stats)))
        if page is not None:
            about = partial(self._about, session, self._length)
            session.hooks.at_close(export(page, ExportedStream(*whose, stats, about), open_page))

    @property
    def _length(self) -> float | None:
        """How many items this run gives; None: unknown."""
        if self.ending.left is not None:
            return self.ending.left
        plan, rank = self.plan, self.rank
        if self.resume is None:
            return num_outputs_of_rank(plan, rank.rank, rank.world_size, self.ending.ends.policy)
        taken = dict(zip(self.resume.shards, self.resume.produced, strict=True))
        return num_left_on_ranks(plan, rank.world_size, lambda shard: taken.get(shard, 0))[rank.rank]

    def _about(self, session: Session, length: float | None) -> StreamFacts:
        """Return what a page shows besides figures. From any thread."""
        now, consumer, last = perf_counter(), session.meters.consumer, self.snapshots.last
        tuning = self.options.work.tuning
        since = consumer.waiting_since
        waited = 0.0 if since is None else now - since
        stalled = f"for {waited:,.0f} s: {self.watch_target(session).report(now)}" if waited > STALLED_S else ""
        return StreamFacts(
            epoch=self.epoch,
            world_size=self.rank.world_size,
            length=length,
            workers=self.plan.worker_names,
            branches={name: name.partition("/")[0] for name in self.plan.source.names[:-1]},
            errors=session.errors.report(),
            working=working(session.meters, now),
            stalled=stalled,
            ended=consumer.closed_at is not None,
            snapshot=dict(vars(last)),
            steps=() if tuning is None else tuning.steps,
        )

    def trace(self, session: Session, path: str | PathLike[str], max_bytes: int) -> Trace:
        """Begin a trace of the run, which ends with it."""
        one = {self.plan.source.name} if self.plan.mode == "shared" else set()
        trace = Trace(
            path, session.meters, max_bytes=max_bytes, rank=self.rank.rank, after_merge=self.merged_names | one
        )
        session.hooks.at_close(trace.stop)
        return trace

    @property
    def _state(self) -> Tree | None:
        """The state to begin at, as flows write it; None: the beginning."""
        return None if self.resume is None else self.resume.flow_state


@dataclass(frozen=True)
class _MergeOpener:
    """Opens a rank's workers and the merge over them; for a live source, its reader before them."""

    plan: Plan
    backend: Backend
    site: Site
    journal: Json = None
    begun: list[Workers] = field(default_factory=list, compare=False)  # one, for all that is opened in the run

    def __call__(self, state: Tree | None = None) -> Flow[Any]:
        plan, site = self.plan, self.site
        own = None if state is None else state[plan.merge.name]
        shards = shards_of_rank(plan.shard.num_shards, site.shard, site.num_shards)
        feed = self._feed(shards, state)
        if not self.begun:
            self.begun.append(self.backend.begin(plan, site, len(shards)))
        inboxes = self._inboxes(shards, own, feed)
        if own is not None or feed is not None:  # so that opening refuses what can't be resumed
            opened = [inboxes.open(at) for at in range(len(shards))]
            inboxes = Inboxes.of(opened)
            if feed is not None:
                feed.watch(opened)
        merge: MergeFlow[Any] = plan.merge.open(inboxes, own)
        merge.meter = site.meter(plan.merge.name, "merge")
        if merge.meter is not None:
            merge.meter.figures.ordered = not plan.merge.chooses
        if feed is not None:
            merge.on_wait, merge.on_ended = feed.merge_waits, feed.worker_ended
        elif site.tasks.session.errors.policy.skips and not plan.merge.chooses:
            merge.held = DeferredProgress()  # not of a live source, whose journal would grow
        site.tasks.session.services.add(MergeWait, MergeWait(partial(_waited_workers, ref(merge), shards)))
        return merge

    def _inboxes(self, shards: range, own: Json | None, feed: LiveReader | None) -> Inboxes[Any]:
        """Return the inboxes of the rank's workers, at the merge's part of a state or at the beginning."""
        plan, (workers,) = self.plan, self.begun
        on_end = None
        if feed is None and not any(stage.repeats for stage in plan.after):  # a repeat opens the workers again
            on_end = _when_exhausted(len(shards), self.site.tasks.session)

        def place(at: int) -> tuple[Site, Tree | None]:
            worker_site = replace(self.site, shard=shards[at], num_shards=plan.shard.num_shards)
            return worker_site, None if own is None else own["workers"][at]

        def open_worker(at: int) -> Inbox[Any]:
            inbox = workers.open_worker(*place(at), None if feed is None else feed.inbox(shards[at]))
            inbox.on_end = on_end
            return inbox

        return Inboxes(len(shards), open_worker, lambda at: BeginState(plan, *place(at)))

    def _feed(self, shards: range, state: Tree | None) -> LiveReader | None:
        """Return the reader of a live source; None for any other source."""
        plan = self.plan
        if not isinstance(plan.source, Live):
            return None
        return LiveReader(
            plan.source,
            self.site,
            shards,
            merge=plan.merge.name,
            state=state,
            journal=self.journal,
            capacity=plan.feed_capacity,
            stages=" -> ".join(map(str, plan.worker)) or "no stages",
        )

    def at(self, site: Site) -> _MergeOpener:
        return replace(self, site=site)


def _when_exhausted(workers: int, session: Session) -> Callable[[bool], None] | None:
    """Return what each worker calls at its end: after the last, it notifies `WorkersExhausted`; never if one fails."""
    left, exhausted = workers, session.services.find(WorkersExhausted)

    def ended(failed: bool) -> None:
        nonlocal left
        left -= not failed
        if not left and exhausted is not None:
            exhausted.tell()

    return None if exhausted is None else ended


def _waited_workers(merge: ref[MergeFlow[Any]], shards: range) -> list[WaitedWorker]:
    """Return the workers that a merge waits for; none if it was freed."""
    flow = merge()
    return [] if flow is None else [WaitedWorker(shards[worker], stage) for worker, stage in flow.awaited()]


def caches_of(plan: Plan) -> list[Cache[Any]]:
    return [cache for part in (plan, *(part for _, _, part in plan.source.made_of)) for cache in caches_in(part)]


def caches_in(plan: Plan) -> list[Cache[Any]]:
    return [stage for stage in (*plan.worker, *plan.after) if isinstance(stage, Cache)]


def reset_caches(run: ResolvedRun) -> None:
    """Let later runs find nothing of this rank's caches on disk. Raises `PlanError`: there is no cache; `ReadError`."""
    plan, rank = run.plan, run.rank
    caches = caches_of(plan)
    if not caches:
        raise PlanError("reset_cache() draws anew what .cache keeps, and there is no .cache in this pipeline")
    for cache in caches:
        if cache.path is None:
            continue  # every run draws its own
        merged = cache in plan.after
        of = rank.world_size if merged else plan.shard.num_shards
        for shard in [rank.rank] if merged else rank.shards(of):
            CacheFiles(cache.path, str(cache), cache.name, cache.upstream_digest, shard, of).reset()


RESET_WITHIN = (
    "reset_cache() in the middle of an epoch: its items are read ahead, of the pass that is kept. Call it between two "
    "epochs: that of a loader between two iterations (not with steps_per_epoch=, where the pipeline goes on), that of "
    "a stream after its end, or after close(). For new items within a run, write .regenerate(n) in the place of .cache"
)
