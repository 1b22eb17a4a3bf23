"""A resolved run: a plan, where it runs and the state that it begins at; it opens the flows, and resets caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from time import perf_counter
from typing import Any, ClassVar
from weakref import ref

from streamline.backends.base import Backend, Workers
from streamline.core.channel import Inbox
from streamline.core.dead_letters import DeadLetters
from streamline.core.driver import behind_channel
from streamline.core.error_policy import Errors, Policy, counts_in
from streamline.core.flow import Flow, Opener, Site
from streamline.core.meters import Meters, Traffic
from streamline.core.state import Json, Tree
from streamline.core.tasks import MEMORY_BYTES, Session, Tasks, WaitedWorker
from streamline.core.text import Entry
from streamline.core.threads import undisturbed
from streamline.errors import PlanError
from streamline.merge.base import DeferredProgress, Inboxes, MergeFlow
from streamline.observe.exporters import ExportedStream, export
from streamline.observe.page import STALLED_S, StreamFacts, open_page
from streamline.observe.progress import Progress
from streamline.observe.stats import stats_of
from streamline.observe.trace import Trace
from streamline.observe.watchdog import Watched, working
from streamline.plan.compile import merged_size
from streamline.plan.fingerprint import fingerprint
from streamline.plan.length import left_on_ranks, num_given
from streamline.plan.plan import AnyStage, Plan
from streamline.plan.worker import BeginState, SourceOpener, StageOpener, ahead_of
from streamline.runtime.rank_ends import begun_at
from streamline.runtime.tuning import StreamTuning
from streamline.sharding.end_flow import ending
from streamline.sharding.ends import Agreement
from streamline.sharding.ranks import Rank
from streamline.sharding.split import shards_of_rank
from streamline.snapshot.coordinator import SnapshotCoordinator
from streamline.snapshot.recorder import Recorder
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.live import Live
from streamline.sources.live_reader import LiveReader
from streamline.transforms.cache import Cache
from streamline.transforms.cache_files import CacheFiles


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A plan about to run.

    Attributes:
      rank: which rank's part of the plan.
      epoch: what shuffles and random generators see as the epoch.
      resume: the state to begin at, of this rank and as this plan reads it; None: at the beginning.
      listing: what the source reads, bound into snapshots.
      policy: what is done with items on which user code fails.
      progress: whether to show how it gets on.
      metrics: where its metrics are exported; None: nowhere.
      page: where its live page is; None: it has none.
      stall_s: how long the consumer may wait before the log says what for; None: for ever.
      memory: bytes that sources may hold read ahead in each process.
      ending: how it ends together with the other ranks.
      accepted: what may have changed since the snapshot.
      record: where its steps are recorded; None: nowhere.
      tuning: what turns its knobs; None: they stay as written.
      left_out: steps whose items are not given, as [first, stop]; see `open(skip_steps=)`.
      asked: what servers and stores were asked for all this; the run counts it as its own.
    """

    last_task: ClassVar[str] = "the last stage"  # the name of the task that pulls the last chain

    plan: Plan
    backend: Backend
    rank: Rank
    epoch: int
    resume: Snapshot | None
    listing: Any
    policy: Policy = field(default_factory=Policy)
    progress: bool = False
    metrics: str | None = None
    page: str | None = None
    stall_s: float | None = None
    memory: int = MEMORY_BYTES
    ending: Agreement
    accepted: frozenset[str] = frozenset()
    record: Recorder | None = None
    tuning: StreamTuning | None = None
    left_out: list[list[int]] = field(default_factory=list)
    asked: Traffic = field(default_factory=Traffic, compare=False)

    @cached_property
    def snapshots(self) -> SnapshotCoordinator:
        """What takes the run's snapshots."""
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
        """The number of the first item that it gives; None: its snapshot doesn't say."""
        return 0 if self.resume is None else self.resume.step

    @property
    def leaves_out_more(self) -> bool:
        """Whether there are items from its first one on that aren't given."""
        return any(stop > (self.first_step or 0) for _, stop in self.left_out)

    def leaves_out(self, step: int) -> bool:
        """Whether the item of a step isn't given."""
        return any(first <= step < stop for first, stop in self.left_out)

    @property
    def computes_last(self) -> bool:
        """Whether the last chain runs user code, or waits for other ranks: never in the consumer's task."""
        return not self.plan.owns_output_channel and (bool(self.plan.after) or self.ending.active)

    def flow(self, tasks: Tasks) -> Flow[Any]:
        """Return the last flow of the plan, for a consumer in the event loop of `tasks`, to which its tasks belong."""
        flow, plan = self.chain(tasks), self.plan
        if not self.computes_last:
            return flow
        usual, widest, most = plan.end_capacity, plan.end_widest, plan.source.ahead_bytes
        site = Site(tasks, self.rank.rank)
        return behind_channel(flow, site, self.last_task, usual, most, by_list=True, widest=widest, last=True)

    def chain(self, tasks: Tasks) -> Flow[Any]:
        """Return the flow of the plan's last stage: what pulls it does that stage's work."""
        tasks.session.meters.order = self.plan.names
        tasks.session.meters.traffic(self.plan.source.name).add(self.asked)
        site = Site(tasks, self.rank.rank, self.rank.world_size, (self.epoch,))
        if self.tuning is not None:
            self.tuning.begin(self.plan, self.backend, len(self.rank.shards(self.plan.shard.num_shards)), tasks)
        journal = None if self.resume is None else self.resume.journal
        opener: Opener[Any] = _MergeOpener(self.plan, self.backend, site, journal)
        most = self.plan.source.ahead_bytes
        for stage in self.plan.after:
            if stage.owns_output_channel:
                opener = ahead_of(self._ended(opener), "ready", self.plan.end_capacity, most)
            opener = StageOpener(stage, opener)
        if self.plan.owns_output_channel:
            return opener(self._state)
        return self._ended(opener)(self._state)

    def _ended(self, opener: Opener[Any]) -> Opener[Any]:
        """Return the opener of what this rank gives, so that all ranks end together."""
        agreement = self.ending
        if not agreement.active:
            return opener
        return SourceOpener(lambda site, state: ending(opener, site, agreement, state), opener.site)

    def errors(self, meters: Meters) -> Errors:
        """Return what counts the skipped items of one run: made anew for each.

        Raises:
          DeadLetterError: they can't be written where they should be, or something else is there.
        """
        before, rank, letters = self._skipped, self.rank, None
        cached = any(cache.path is not None for cache in caches_of(self.plan))
        if self.policy.dead_letters is not None:
            path, of = self.policy.dead_letters, (rank.rank, rank.world_size)
            kept = cached and self.resume is not None
            letters = DeadLetters(path, *of, self.epoch, before, rank.process, cached=kept)
        return Errors(self.policy, before, letters, merged_size(self.plan), meters, cached=cached)

    @property
    def begun_at(self) -> Snapshot | None:
        """This rank's part of the state to begin at, with how many items are left."""
        return None if self.resume is None else begun_at(self.ending, self.resume)

    @property
    def _skipped(self) -> dict[tuple[int, str], int]:
        """The items that were skipped before the state to begin at, by (shard, stage)."""
        state = self._state
        if state is None:
            return {}
        found = {(self.rank.rank, name): count for name, count in counts_in(state).items()}
        shards = shards_of_rank(self.plan.shard.num_shards, self.rank.rank, self.rank.world_size)
        for shard, tree in zip(shards, state[self.plan.merge.name]["workers"], strict=True):
            found.update({(shard, name): count for name, count in counts_in(tree).items()})
        return found

    @property
    def merged(self) -> frozenset[str]:
        """The names of the merge and the stages after it."""
        return frozenset({self.plan.merge.name, *(stage.name for stage in self.plan.after)})

    def watched(self, session: Session) -> Watched:
        """Return what a watchdog needs to know of this run."""
        return Watched(session, self.plan.source.name, self.merged, shared=self.plan.mode == "shared")

    def show(self, session: Session) -> None:
        """Show the progress of the run, its page and its metrics, if that is wanted. Raises `HostError`."""
        if self.metrics is not None or self.page is not None:
            undisturbed(partial(self._export, session))
        if self.progress:
            progress = Progress(partial(stats_of, session.meters), self.epoch)
            session.on_chunk_boundary(progress.at_chunk_boundary)
            session.at_close(progress.stop)
            progress.start()

    def _export(self, session: Session) -> None:
        stats, whose = partial(stats_of, session.meters), (self.plan.source.name, self.rank.rank)
        if self.metrics is not None:
            session.at_close(export(self.metrics, ExportedStream(*whose, stats)))
        if self.page is not None:
            about = partial(self._about, session, self._length)
            session.at_close(export(self.page, ExportedStream(*whose, stats, about), open_page))

    @property
    def _length(self) -> float | None:
        """How many items this run gives; None: that isn't known before they have been read."""
        if self.ending.left is not None:
            return self.ending.left
        plan, rank = self.plan, self.rank
        if self.resume is None:
            return num_given(plan, rank.rank, rank.world_size, self.ending.ends.policy)
        taken = dict(zip(self.resume.shards, self.resume.produced, strict=True))
        return left_on_ranks(plan, rank.world_size, lambda shard: taken.get(shard, 0))[rank.rank]

    def _about(self, session: Session, length: float | None) -> StreamFacts:
        """Return what a page shows of the run besides its figures. From any thread."""
        now, consumer, last = perf_counter(), session.meters.consumer, self.snapshots.last
        since = consumer.waiting_since
        waited = 0.0 if since is None else now - since
        stalled = f"for {waited:,.0f} s: {self.watched(session).report(now)}" if waited > STALLED_S else ""
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
            turns=() if self.tuning is None else self.tuning.turns,
        )

    def trace(self, session: Session, path: str | PathLike[str], max_bytes: int) -> Trace:
        """Begin to write a trace of the run; it ends with it."""
        one = {self.plan.source.name} if self.plan.mode == "shared" else set()
        trace = Trace(path, session.meters, max_bytes=max_bytes, rank=self.rank.rank, after_merge=self.merged | one)
        session.at_close(trace.stop)
        return trace

    @property
    def _state(self) -> Tree | None:
        """The state to begin at, as flows write it."""
        return None if self.resume is None else self.resume.flow_state


@dataclass(frozen=True)
class _MergeOpener:
    """Opens a rank's workers, and the merge over them; for a live source, first the feed that they read."""

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
        if own is not None or feed is not None:  # what can't be resumed is refused when the stream is opened
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
            merge.held = DeferredProgress()  # of a live source the journal would grow meanwhile
        site.tasks.session.awaited = partial(_awaited, ref(merge), shards)
        return merge

    def _inboxes(self, shards: range, own: Json | None, feed: LiveReader | None) -> Inboxes[Any]:
        """Return the inboxes of the rank's workers, at the merge's part of a state or at the beginning."""
        plan, (workers,) = self.plan, self.begun
        on_end = None
        if feed is None and not any(stage.repeats for stage in plan.after):  # which would open the workers again
            on_end = _when_spent(len(shards), self.site.tasks.session)

        def placed(at: int) -> tuple[Site, Tree | None]:
            worker_site = replace(self.site, shard=shards[at], num_shards=plan.shard.num_shards)
            return worker_site, None if own is None else own["workers"][at]

        def open_worker(at: int) -> Inbox[Any]:
            inbox = workers.open_worker(*placed(at), None if feed is None else feed.inbox(shards[at]))
            inbox.on_end = on_end
            return inbox

        return Inboxes(len(shards), open_worker, lambda at: BeginState(plan, *placed(at)))

    def _feed(self, shards: range, state: Tree | None) -> LiveReader | None:
        """Return what reads a live source for all workers of the rank; None for any other source."""
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


def _when_spent(workers: int, session: Session) -> Callable[[bool], None] | None:
    """Return what notifies the session when it was called at the end of each worker. If one fails, that is never."""
    left = workers

    def ended(failed: bool) -> None:
        nonlocal left
        left -= not failed
        if not left and session.workers_exhausted is not None:
            session.workers_exhausted()

    return None if session.workers_exhausted is None else ended


def _awaited(merge: ref[MergeFlow[Any]], shards: range) -> list[WaitedWorker]:
    """Return the workers that a merge waits for; none if it is gone."""
    flow = merge()
    return [] if flow is None else [WaitedWorker(shards[worker], stage) for worker, stage in flow.awaited()]


def reset_caches(run: ResolvedRun) -> None:
    """Let runs that begin from now on find nothing of what this rank keeps on disk: they draw anew.

    Raises:
      PlanError: the plan keeps nothing.
      ReadError: a folder can't be written.
    """
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
            CacheFiles(cache.path, str(cache), cache.name, cache.of, shard, of).reset()


RESET_WITHIN = (
    "reset_cache() in the middle of an epoch: its items are read ahead, of the pass that is kept. Call it between two "
    "epochs: that of a loader between two iterations (not with steps_per_epoch=, where the pipeline goes on), that of "
    "a stream after its end, or after close(). For new items within a run, write .regenerate(n) in the place of .cache"
)
"""What a reset is refused with where a pass goes on."""


# Caches on disk -------------------------------------------------------------------------------------------------------

DIGEST_CHARS = 16


def bound(plan: Plan, listing: Json = None) -> Plan:
    """Return a plan whose caches on disk know what they are of: a digest of it is in their files' names.

    In it are the stages before the cache, as a fingerprint has them, the code of their functions, and the source's
    data, as a snapshot lists them. Not the epoch: a pass that was drawn is served in the next epochs, too.

    Args:
      plan: as it will run, its source resolved.
      listing: of the data that it reads; None: what its source says.
    """
    plan = replace(plan, source=plan.source.bound(bound))
    if all(cache.path is None for cache in _caches(plan)):
        return plan
    of = [plan.source.listing() if listing is None else listing, plan.source.drawn()]
    of += [[fingerprint(part), part.source.drawn()] for _, _, part in plan.source.made_of]
    entries, chosen = fingerprint(plan), False
    caches = {cache.name: cache for cache in _caches(plan)}
    sections: list[tuple[AnyStage, ...]] = []
    for section in (plan.worker, plan.after):
        found: list[AnyStage] = []
        for stage in section:
            cache = caches.get(stage.name)
            found.append(stage if cache is None else replace(cache, of=_digest(entries, stage.name, of), chosen=chosen))
            chosen = chosen or stage.chooses
        chosen = chosen or plan.merge.chooses
        sections.append(tuple(found))
    worker, after = sections
    return replace(plan, worker=worker, after=after)


def caches_of(plan: Plan) -> list[Cache[Any]]:
    """Return all caches of a plan, those of its source's components, too."""
    return [cache for part in (plan, *(part for _, _, part in plan.source.made_of)) for cache in _caches(part)]


def _caches(plan: Plan) -> list[Cache[Any]]:
    return [stage for stage in (*plan.worker, *plan.after) if isinstance(stage, Cache)]


def _digest(entries: list[Entry], name: str, of: Json) -> str:
    before = entries[: next(at for at, entry in enumerate(entries) if at and entry["name"] == name)]
    text = json.dumps([before, of], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARS]
