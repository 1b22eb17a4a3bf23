"""A backend whose workers' states cross a border, and whose hosts die: all of it in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from streamline.backends.ipc.state_codec import ColumnDecoder, ColumnEncoder
from streamline.core.channel import Inbox
from streamline.core.driver import behind_channel
from streamline.core.flow import Chunk, Flow, Site
from streamline.core.state import State, Tally, Tree
from streamline.plan.plan import Plan
from streamline.plan.worker import open_worker

__all__ = ["Crossed", "Crossing", "chooses", "tally_of"]


def chooses(plan: Plan) -> bool:
    """Whether a worker of this plan chooses an order."""
    return plan.worker_logs


def tally_of(state: State) -> tuple[int, dict[tuple[int, str], int]]:
    tally = Tally()
    state.tally(tally)
    return tally.taken, tally.skipped


class Crossing(Flow[Any]):
    """The near end of a worker: pulls the far one in place of a host, which dies now and then.

    Args:
      deaths: of ten lists, before how many the host dies.
    """

    def __init__(self, plan: Plan, site: Site, state: Tree | None, dice: Random, deaths: int) -> None:
        self._plan, self._site, self._dice, self._deaths = plan, site, dice, deaths
        self._choosing = chooses(plan)
        self.columns = ColumnDecoder(self._choosing)
        self._begin(state)
        super().__init__(self.columns.load_state(self._dumper.dump_state(self._far.state)))
        self._last = self.state
        self.restarts = 0

    def _begin(self, state: Tree | None) -> None:
        self._far = open_worker(self._plan, self._site, state)
        self._dumper = ColumnEncoder(self._choosing)

    async def _next(self, limit: int) -> Chunk[Any] | None:
        if self._dice.randrange(10) < self._deaths:
            await self._die()
        chunk = await self._far.pull(self._dice.choice((limit, 1, 2)))
        if chunk is None:
            return None
        states, after = self.columns.load(self._dumper.dump(chunk), len(chunk.items))
        arrived = Chunk(chunk.items, states, after)
        self._last = arrived.end
        return arrived

    async def _die(self) -> None:
        """Lose what was read ahead, and go on where the last list that arrived ends."""
        for _ in range(self._dice.choice((0, 0, 1, 3))):  # on its way, and lost
            chunk = await self._far.pull(self._dice.choice((1, 5)))
            if chunk is None:
                break
            self._dumper.dump(chunk)
        await self._far.aclose()
        self.columns.restart_at(self._last)
        self._begin(self._last.json())
        if self._dice.random() < 0.9:  # it may die again at once
            again = self.columns.load_state(self._dumper.dump_state(self._far.state))
            assert again.json() == self._last.json() == self._far.state.json()
            self.restarts += 1
        else:
            await self._die()

    async def aclose(self) -> None:
        await super().aclose()
        await self._far.aclose()


@dataclass(frozen=True)
class Crossed:
    """A backend like `Inline`, but for the border."""

    dice: Random = field(default_factory=lambda: Random(0))
    deaths: int = 0

    def check(self, plan: Plan) -> None:
        """Every plan runs here."""

    def begin(self, plan: Plan, site: Site, workers: int) -> _CrossedWorkers:
        return _CrossedWorkers(plan, self.dice, self.deaths)


@dataclass(frozen=True)
class _CrossedWorkers:
    plan: Plan
    dice: Random
    deaths: int

    def open_worker(self, site: Site, state: Tree | None, feed: Inbox[Any] | None = None) -> Inbox[Any]:
        flow = Crossing(self.plan, site, state, self.dice, self.deaths)
        return behind_channel(flow, site, "consumer end", self.plan.worker_capacity(site.num_shards))
