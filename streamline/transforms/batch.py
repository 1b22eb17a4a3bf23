"""Items into batches, and batches into items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from streamline.blame import blame
from streamline.flow import Chunk, Lists, Run, Stage
from streamline.pace import Pace
from streamline.states import State

__all__ = ["Batch"]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True)
class Batch(Stage[In, Out]):
    """Collates `size` items into one, the rest at the end too unless `drop_remainder`.

    State: the upstream's right after the batch's last item; items that wait for their batch to fill are read again.
    """

    size: int
    drop_remainder: bool = False
    collate: Callable[[list[In]], Out]

    @property
    def in_flight(self) -> int:
        return self.size

    async def lists(self, run: Run[In]) -> Lists[Out]:
        held: list[In] = []
        last = run.upstream.state
        pace = Pace()
        while (chunk := await run.upstream.pull(run.want * self.size - len(held))) is not None:
            start, count = 0, len(chunk.items)
            while count - start >= (missing := self.size - len(held)):
                held.extend(chunk.items[start : start + missing])
                start += missing
                last = chunk.states[start - 1]
                yield self._batch(held, run, last, chunk.after if start == count else None)
                held = []
                await pace.breathe()
            held.extend(chunk.items[start:])
            if start < count:
                last = chunk.states[count - 1]
            elif not held and not count and chunk.after is not None:
                yield Chunk((), (), chunk.after)
        if held and not self.drop_remainder:
            yield self._batch(held, run, last, run.upstream.state)

    def _batch(self, held: list[In], run: Run[In], last: State, after: State | None) -> Chunk[Out]:
        try:
            return Chunk([self.collate(held)], [last], after)
        except BaseException as error:
            raise blame(error, str(self), run.site, last)  # noqa: B904 - it is the error itself, or has its cause
