"""One shard's section of a plan, opened at a state: source, stages before the shard, the worker's stages.

Channels are where concurrency begins: after a source that waits, and at the worker's end.

Some imports are inside functions: a host process starts sooner without what few plans need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from streamline.core.capacity import Capacity
from streamline.core.channel import Channel, Inbox
from streamline.core.driver import behind_channel
from streamline.core.flow import Flow, Opener, Site
from streamline.core.meters import Meters
from streamline.core.state import At, DeferredState, State, Tree
from streamline.core.tasks import Session, Tasks
from streamline.plan.plan import READ_AHEAD_ITEMS, Plan
from streamline.sources.base import Source
from streamline.transforms.base import Stage


@dataclass(frozen=True)
class SourceOpener:
    """Opens a source: `open_at` finds the site's part of it."""

    open_at: Callable[[Site, Tree | None], Flow[Any]]
    site: Site

    def __call__(self, state: Tree | None = None) -> Flow[Any]:
        return self.open_at(self.site, state)

    def at(self, site: Site) -> SourceOpener:
        return replace(self, site=site)


@dataclass(frozen=True)
class StageOpener:
    stage: Stage[Any, Any]
    upstream: Opener[Any]

    @property
    def site(self) -> Site:
        return self.upstream.site

    def __call__(self, state: Tree | None = None) -> Flow[Any]:
        return self.stage.open(self.upstream, state)

    def at(self, site: Site) -> StageOpener:
        return replace(self, upstream=self.upstream.at(site))


def ahead_of(opener: Opener[Any], name: str, items: int, most_bytes: int | None) -> Opener[Any]:
    """Return the opener of a channel that a task called `name` fills from `opener`."""

    def open_at(site: Site, state: Tree | None) -> Flow[Any]:
        return behind_channel(opener.at(site)(state), site, name, items, most_bytes, by_list=True)

    return SourceOpener(open_at, opener.site)


def open_worker(plan: Plan, site: Site, state: Tree | None) -> Inbox[Any]:
    """Return the inbox of the worker of shard `site.shard`; its tasks run in this event loop."""
    flow = worker_flow(plan, site, state)
    fed = plan.mode == "shared" and not plan.worker  # then the channel is the feed's
    if isinstance(flow, Inbox) and not fed:  # the worker ends in a channel already, such as a concurrent map's
        return flow
    usual, widest = plan.worker_capacity(site.num_shards), plan.worker_widest(site.num_shards)
    most, last = plan.source.ahead_bytes, not plan.after
    return behind_channel(flow, site, "worker", usual, most, by_list=True, widest=widest, last=last)


def worker_flow(plan: Plan, site: Site, state: Tree | None) -> Flow[Any]:
    """Return the flow of the worker of shard `site.shard`, before the channel at its end."""
    opener = _head(plan, site)
    for stage in plan.worker:
        opener = StageOpener(stage, opener)
    return opener(state)


class BeginState(DeferredState):
    """The state of a worker before its first item: `actual`, the host's; until that has arrived, made here."""

    __slots__ = ("_plan", "_site", "_state", "actual")

    def __init__(self, plan: Plan, site: Site, state: Tree | None) -> None:
        self.actual: State | None = None
        self._plan = plan
        self._site = site
        self._state = state

    @property
    def real(self) -> State:
        if self.actual is None:
            self.actual = self._first_state()
        return self.actual

    def _first_state(self) -> State:
        """Return the state of the worker's flow, opened without I/O and never pulled."""
        tasks = Tasks(cast(Any, None), Session(meters=Meters(0.0, on=False), errors=self._site.tasks.session.errors))
        plan, site = self._plan, replace(self._site, tasks=tasks)
        if plan.mode == "shared":
            from streamline.sources.live import FedSource

            name = plan.source.name
            inbox = Channel[Any](At(name, 0 if self._state is None else self._state[name]), Capacity(1))
            source: Source[Any] = FedSource(name=name, inbox=inbox.inbox)
            tasks.add_cleanup(inbox.abandon)
            plan = replace(plan, source=source)
        try:
            return worker_flow(plan, site, self._state).state
        finally:
            tasks.clean_up()


def _head(plan: Plan, site: Site) -> Opener[Any]:
    """Return the opener of the shard's items."""
    opener: Opener[Any] = SourceOpener(lambda at, state: plan.source.open(at, plan.part(at.epoch), state), site)
    for stage in plan.in_workers:
        opener = StageOpener(stage, opener)
    if plan.mode == "replicated" and site.num_shards > 1:
        from streamline.transforms.limit import Stride

        opener = StageOpener(Stride(name="shard"), opener)
    return ahead_of(opener, "source", READ_AHEAD_ITEMS, plan.source.ahead_bytes) if plan.source.waits else opener
