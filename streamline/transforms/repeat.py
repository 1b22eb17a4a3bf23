"""A flow again and again: each pass opens the upstream anew, in a pass of its own.

State: the pass, whether it has yielded anything yet, and the upstream's state in it.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from streamline.flow import Chunk, Flow, Lists, ListsFlow, Opener, Run, Stage
from streamline.states import Over, Overlaid, Tree

__all__ = ["Repeat"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Repeat(Stage[T, T]):
    """`times` passes over the upstream; None for no end. A pass that yields nothing ends it.

    What is upstream sees the pass in its epoch, so that shuffles and random numbers differ between passes.
    """

    times: int | None = None

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        own = {"pass": 0, "yielded": False} if state is None else state[self.name]
        flow = upstream.at(upstream.site.in_pass(own["pass"]))(state)
        run = Run(flow, own, upstream.site)
        return ListsFlow(Over(self.name, own, flow.state), self._passes(upstream, run), run, flow)

    async def _passes(self, upstream: Opener[T], run: Run[T]) -> Lists[T]:
        number, yielded = run.own["pass"], run.own["yielded"]
        flow = run.upstream
        while self.times is None or number < self.times:
            async with aclosing(flow):
                while (chunk := await flow.pull(run.want)) is not None:
                    yielded = yielded or bool(chunk.items)
                    yield self._in_pass(chunk, number, yielded)
            if not yielded:
                return
            number, yielded = number + 1, False
            flow = upstream.at(upstream.site.in_pass(number))(None)

    def _in_pass(self, chunk: Chunk[T], number: int, yielded: bool) -> Chunk[T]:
        own = {"pass": number, "yielded": yielded}
        after = None if chunk.after is None else Over(self.name, own, chunk.after)
        return Chunk(chunk.items, Overlaid(self.name, own, chunk.states), after)
