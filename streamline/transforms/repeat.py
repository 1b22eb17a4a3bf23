"""`.repeat`: pass after pass over the upstream, which is opened anew for each.

State: the pass, whether it has yielded anything yet, and the upstream's state in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, StageRun
from streamline.core.state import MadeStates, Over, Tally, Tree
from streamline.core.state_types import Count
from streamline.errors import PlanError, ResumeError
from streamline.sharding.index import Index, Repeated
from streamline.sources.base import Source
from streamline.transforms.base import Stage

T = TypeVar("T")


class RepeatPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stage's part of a saved state; `seen` is what a merge took in the passes before, where items were skipped."""

    number: Count = msgspec.field(name="pass")
    yielded: bool
    seen: Count = 0


@dataclass(frozen=True, kw_only=True)
class Repeat(Stage[T, T]):
    """`times` passes over the upstream; None for no end. A pass that yields nothing ends it.

    What is upstream sees the pass in its epoch, so that shuffles and random numbers differ between passes.
    """

    kind: ClassVar[str] = "repeat"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "times": "it goes on to the new number of passes, those before included; if they were more already, it ends"
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset({"times"})
    state_type: ClassVar[Any] = RepeatPart
    initial_state = RepeatPart(0, yielded=False)
    before_shard = frozenset({"index", "whole", "passes"})
    repeats: ClassVar[bool] = True
    moves_items: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "added": "what is before it would be in another pass, and shuffle otherwise: finish the epoch as it was",
        "removed": "what is before it would be in another pass, and shuffle otherwise: finish the epoch as it was",
    }

    times: int | None = None

    @classmethod
    def reshard(cls, owns: Sequence[RepeatPart]) -> RepeatPart:
        passes = {own.number for own in owns}
        if len(passes) > 1 or any(own.seen for own in owns):
            raise ResumeError(f"is in another pass on each rank ({', '.join(str(own.number) for own in owns)})")
        return RepeatPart(passes.pop(), any(own.yielded for own in owns))

    def check_live(self, source: Source[Any]) -> None:
        raise PlanError(
            f".repeat goes through its source anew, and {source.kind} can be read once: reconnect in the stream itself"
        )

    def pass_number(self, before: int, own: RepeatPart | None) -> int:
        return before if own is None else before * (self.times or 1) + own.number

    def reindexed(self, inner: Callable[[tuple[int, ...]], Index], epoch: tuple[int, ...]) -> Index:
        return Repeated(lambda number: inner((*epoch, number)), self.times)

    def num_outputs(self, items: float) -> float | None:
        if not items or self.times == 0:
            return 0
        return math.inf if self.times is None else items * self.times

    def num_left(self, left: float, whole: float, own: RepeatPart | None) -> float | None:
        if own is None:
            return self.num_outputs(left)
        more = math.inf if self.times is None else max(0, self.times - 1 - own.number)
        return left + whole * more if whole and (left or own.yielded) else left

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        own = self.part_of(state)
        flow = upstream.at(upstream.site.in_pass(own.number))(state)
        run = self.run_over(flow, upstream.site, state, own)
        return ListsFlow(_PassState(self.name, own, flow.state), self._passes(upstream, run), run, flow)

    async def _passes(self, upstream: Opener[T], run: StageRun[T]) -> Lists[T]:
        own: RepeatPart = run.own
        number, yielded, seen = own.number, own.yielded, own.seen
        flow = run.upstream
        while self.times is None or number < self.times:
            async with aclosing(flow):
                while (chunk := await flow.pull(run.max_items)) is not None:
                    yielded = yielded or bool(chunk.items)
                    yield self._in_pass(chunk, RepeatPart(number, yielded, seen))
                    del chunk  # release the items while the next are made
            if not yielded:
                return
            tally = Tally()
            flow.state.tally(tally)
            if tally.skipped or seen or run.site.tasks.session.errors.goes_on:
                seen += tally.taken
            number, yielded = number + 1, False
            flow = upstream.at(upstream.site.in_pass(number, tally.counts))(None)
            flow.reader = run.meter

    def _in_pass(self, chunk: Chunk[T], own: RepeatPart) -> Chunk[T]:
        after = None if chunk.progress is None else _PassState(self.name, own, chunk.progress)
        return Chunk(chunk.items, MadeStates(_PassState, self.name, own, states=chunk.states), after)


class _PassState(Over):
    """A state in a pass."""

    __slots__ = ()

    own: RepeatPart

    def tally(self, found: Tally) -> None:
        found.taken += self.own.seen
        found.stands[self.name] = self.own
        super().tally(found)
