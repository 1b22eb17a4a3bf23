"""Pipelines side by side: item n is a tuple of their items n. State: each component's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.pace import Pace
from streamline.core.state import Reference, State, States, Tree
from streamline.errors import DataError, PlanError
from streamline.sources.base import Mode, Part
from streamline.sources.composite import Several, SeveralState


@dataclass(frozen=True, kw_only=True)
class Zip(Several[tuple[Any, ...]]):
    """Ends with the shortest; with `strict`, one that ends before the others is an error."""

    kind: ClassVar[str] = "zip"

    strict: bool = False

    def options(self) -> dict[str, Any]:
        return {"components": len(self.components)}

    def check_split(self, mode: Mode, num_shards: int) -> None:
        super().check_split(mode, num_shards)
        for name, component in self.components if num_shards > 1 else ():
            if (why := component.misalignment) is not None:
                raise PlanError(
                    f"sl.zip is split into {num_shards} shards by splitting each part alike, and part {name} can't be: "
                    f"{why}. Leave .shard out, or zip what is indexed and do the rest after it"
                )

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[tuple[Any, ...]]:
        flows = self.flows(site, state)
        context = self.context(site, state)
        begin = SeveralState(self.name, {}, {name: Reference.to(flow.state) for name, flow in flows.items()})
        return ListsFlow(begin, self._lists(context, list(flows.items())), context, *flows.values())

    def num_outputs(self, part: Part, shard: int, num_shards: int) -> float | None:
        found = self.outputs(part, shard, num_shards)
        return None if None in found else min(count for count in found if count is not None)

    async def _lists(self, context: StageContext, flows: Sequence[tuple[str, Flow[Any]]]) -> Lists[tuple[Any, ...]]:
        held = [Chunk[Any]((), ())] * len(flows)
        parts = {name: Reference.to(flow.state) for name, flow in flows}
        pace = Pace()
        want = context.max_items
        while True:
            for at, (name, flow) in enumerate(flows):
                while not held[at].items:
                    chunk = await flow.pull(want if at == 0 else max(len(held[0].items), 1))
                    if chunk is None or not chunk.items:  # what it has dropped on the way to its next item
                        parts[name] = Reference.to(flow.state)
                        yield Chunk((), (), SeveralState(self.name, {}, dict(parts)))
                    if chunk is None:
                        await self._check_ends(at, flows, held)
                        return
                    held[at] = chunk
                    del chunk
            count = min(len(chunk.items) for chunk in held)
            columns = {name: chunk.states for (name, _), chunk in zip(flows, held, strict=True)}
            rows = list(zip(*(chunk.items[:count] for chunk in held), strict=True))
            yield Chunk(rows, _ZippedStates(self.name, columns))
            del rows  # the reader has them: items are not kept while the next are made
            parts = {name: Reference(states, count - 1) for name, states in columns.items()}
            held = [chunk.part(count, len(chunk.items)) for chunk in held]
            want = context.max_items
            await pace.maybe_yield()

    async def _check_ends(self, at: int, flows: Sequence[tuple[str, Flow[Any]]], held: Sequence[Chunk[Any]]) -> None:
        """If `strict`, raise a DataError unless all other components end with number `at`."""
        if not self.strict:
            return
        for other, (name, flow) in enumerate(flows):
            chunk: Chunk[Any] | None = held[other]
            while chunk is not None and not chunk.items and other != at:
                chunk = await flow.pull(1)
            if chunk is not None and chunk.items:
                raise DataError(f"sl.zip(strict=True): part {flows[at][0]} has ended, and part {name} has more items")


@dataclass(slots=True, eq=False)
class _ZippedStates:
    _name: str
    _columns: Mapping[str, States]

    def __getitem__(self, index: int, /) -> State:
        parts = {name: Reference(states, index) for name, states in self._columns.items()}
        return SeveralState(self._name, {}, parts)
