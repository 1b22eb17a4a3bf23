"""A plan as a component of a mixture or a zip: what `streamline.sources.composite` asks of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Flow, Site
from streamline.core.state import Json, State, Tally, Tree
from streamline.core.text import replay_refusal
from streamline.plan.fingerprint import check_trees, fingerprint
from streamline.plan.length import outputs_of_shard
from streamline.plan.plan import Plan, Shard, in_flight
from streamline.plan.worker import worker_flow
from streamline.sources.base import Mode, Part, Source
from streamline.sources.composite import PassOf
from streamline.sources.items import positions_of


@dataclass(frozen=True)
class PlanComponent:
    """See `Component`."""

    plan: Plan  # without shard and merge, its stages and its source named after the component

    @property
    def source(self) -> Source[Any]:
        return self.plan.source

    @property
    def names(self) -> list[str]:
        return [stage.name for stage in self.plan.stages]

    @property
    def entries(self) -> list[dict[str, Json]]:
        return [entry for entry in fingerprint(self.plan) if entry["kind"] not in ("shard", "merge")]

    @property
    def mode(self) -> Mode:
        return self.plan.mode

    @property
    def in_flight(self) -> int:
        held, weight = in_flight(self.plan.worker)
        return held + (2 * LIST_ITEMS if self.source.waits else 0) + self.source.in_flight + LIST_ITEMS * (weight - 1)

    @property
    def repeats(self) -> bool:
        return self.plan.repeats

    @property
    def moved_by(self) -> str | None:
        return self.plan.moved_by()

    @property
    def misalignment(self) -> str | None:
        if not self.source.indexable:
            return f"{self.source.kind} has no index"
        for stage in self.plan.worker:
            if stage.rewinds or stage.num_outputs(7) != 7 or stage.num_outputs(math.inf) != math.inf:
                return f"{stage} gives other items than one for each"
        return None

    def with_source(self, source: Source[Any]) -> PlanComponent:
        return PlanComponent(replace(self.plan, source=source))

    def within(self, component: str) -> PlanComponent:
        plan = self.plan
        before, worker = (
            tuple(replace(stage, name=f"{component}/{stage.name}") for stage in section)
            for section in (plan.before, plan.worker)
        )
        return PlanComponent(replace(plan, source=plan.source.within(component), before=before, worker=worker))

    def map_plans(self, bind: Callable[[Plan], Plan]) -> PlanComponent:
        return PlanComponent(bind(self.plan))

    def part(self, num_shards: int, epoch: int) -> Part:
        return self._sharded(num_shards).part((epoch,))

    def open_shard(self, site: Site, state: Tree | None) -> Flow[Any]:
        return worker_flow(self._sharded(site.num_shards), site, state)

    def num_outputs(self, shard: int, num_shards: int) -> float | None:
        return outputs_of_shard(self._sharded(num_shards), shard)

    def check_state(self, entries: list[dict[str, Json]], tree: Tree, where: str) -> None:
        check_trees(entries, tree, where)

    def reads_again(self, tree: Tree) -> str | None:
        for stage in self.plan.worker:
            if stage.name in tree and (again := stage.replay_cost(stage.read_part(tree[stage.name]))):
                return replay_refusal(stage.name, again)
        return None

    def pass_of(self, site: Site) -> PassOf | None:
        """See `Component`. For a repeat of an index, the pass is computed from the items taken; else stages tell it."""
        return self._pass_of(site, self.plan.part((0,))) if self.repeats else None

    def _pass_of(self, site: Site, part: Part) -> PassOf:
        stages, name, index = self.plan.stages[::-1], self.source.name, part.index
        positions = None if index is None else positions_of(index, site.shard, site.num_shards, part)

        def found(state: State) -> int:
            tally = Tally()
            state.tally(tally)
            number = 0
            for stage in stages:
                number = stage.pass_number(number, tally.stands.get(stage.name))
            if index is None or index.passes == 1:
                return number
            at = max(0, tally.stands[name] - 1)
            if positions is None:
                position = site.shard + at * site.num_shards
            elif positions:
                position = positions[at]
            else:
                position = 0
            return number * (index.passes or 1) + index.pass_of(position)

        return found

    def _sharded(self, num_shards: int) -> Plan:
        return replace(self.plan, shard=Shard(num_shards=num_shards))
