"""The state of a worker that has given nothing yet, and may not even run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from streamline.core.channel import Channel
from streamline.core.flow import Site
from streamline.core.session import Session
from streamline.core.state import At, State, Tally, Tree
from streamline.core.tasks import Tasks
from streamline.plan.plan import Plan
from streamline.plan.worker import worker_flow
from streamline.sources.base import Source
from streamline.sources.live import FedSource

__all__ = ["BeginState"]


class BeginState(State):
    """What the worker says once it has been opened; until then, what opening it here, unread, would say.

    Attributes:
      actual: what it has said; None: nothing yet.
    """

    __slots__ = ("_plan", "_site", "_state", "actual")

    def __init__(self, plan: Plan, site: Site, state: Tree | None) -> None:
        self.actual: State | None = None
        self._plan = plan
        self._site = site
        self._state = state

    def json(self, until: State | None = None) -> Tree:
        return self._now().json(None if until is None else until.latest)

    @property
    def latest(self) -> State:
        return self._now().latest

    def tally(self, found: Tally) -> None:
        self._now().tally(found)

    def where(self) -> str:
        return self._now().where()

    def _now(self) -> State:
        if self.actual is None:
            self.actual = self._opened()
        return self.actual

    def _opened(self) -> State:
        """Return the state of the worker's flow, opened here and closed again: that does no I/O."""
        tasks = Tasks(cast(Any, None), Session(metered=False))
        tasks.session.errors = self._site.tasks.session.errors
        plan, site = self._plan, replace(self._site, tasks=tasks)
        if plan.mode == "shared":
            name = plan.source.name
            inbox = Channel[Any](At(name, 0 if self._state is None else self._state[name]), 1)
            source: Source[Any] = FedSource(name=name, inbox=inbox.inbox)
            tasks.own(inbox.abandon)
            plan = replace(plan, source=source)
        try:
            return worker_flow(plan, site, self._state).state
        finally:
            tasks.finished()
