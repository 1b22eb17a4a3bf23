"""Pipelines one after the other: all items of the first, then those of the next. State: each component's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.pace import Pace
from streamline.core.state import Reference, State, States, Tree
from streamline.sources.base import Part
from streamline.sources.composite import Several, SeveralState

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Concat(Several[T]):
    """Reads a shard of each component to its end before the next."""

    kind: ClassVar[str] = "concat"

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        flows = self.flows(site, state)
        context = self.context(site, state)
        begin = SeveralState(self.name, {}, {name: Reference.to(flow.state) for name, flow in flows.items()})
        return ListsFlow(begin, self._lists(context, flows), context, *flows.values())

    def num_outputs(self, part: Part, shard: int, num_shards: int) -> float | None:
        found = self.outputs(part, shard, num_shards)
        return None if None in found else sum(count for count in found if count is not None)

    async def _lists(self, context: StageContext, flows: Mapping[str, Flow[T]]) -> Lists[T]:
        parts = {name: Reference.to(flow.state) for name, flow in flows.items()}
        pace = Pace()
        for name, flow in flows.items():  # one that had ended, at a resume, ends at once
            while (chunk := await flow.pull(context.max_items)) is not None:
                states = _ConcatStates(self.name, dict(parts), name, chunk.states)
                parts[name] = chunk.end_reference
                after = None if chunk.progress is None else SeveralState(self.name, {}, dict(parts))
                made = [Chunk(chunk.take_items(), states, after)]
                del chunk  # the items are the reader's
                yield made.pop()
                await pace.maybe_yield()
            parts[name] = Reference.to(flow.state)
            yield Chunk((), (), SeveralState(self.name, {}, dict(parts)))


class _ConcatState(SeveralState):
    """After an item of the component `current`."""

    __slots__ = ("current",)

    def __init__(self, name: str, parts: Mapping[str, Reference], current: str) -> None:
        super().__init__(name, {}, parts)
        self.current = current

    def where(self) -> str:
        return f"{self.current}: {self.parts[self.current].get().where()}"


class _ConcatStates:
    """The states after some items of one component; `parts`: the states of all before."""

    __slots__ = ("_current", "_name", "_parts", "_states")

    def __init__(self, name: str, parts: Mapping[str, Reference], current: str, states: States) -> None:
        self._name, self._parts, self._current, self._states = name, parts, current, states

    def __getitem__(self, index: int, /) -> State:
        parts = {**self._parts, self._current: Reference(self._states, index)}
        return _ConcatState(self._name, parts, self._current)
