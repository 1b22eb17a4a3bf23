"""`.window`: lists of consecutive items, which may overlap.

State: the upstream's before the first item of the next window, if that has come already (a mark, `Since`), and how many
items are to be passed over before it, if it hasn't. A resume reads again what two windows have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.state import Json, Over, Reference, Since, State
from streamline.core.state_types import Count
from streamline.transforms.base import Stage
from streamline.transforms.batch import TOGETHER_ITEMS

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Window(Stage[T, list[T]]):
    """Lists of `size` consecutive items, each beginning `stride` items after the one before; no shorter ones."""

    kind: ClassVar[str] = "window"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "size": "the windows from here on have the new size",
        "stride": "the window after the next one begins by the new stride",
        "added": "the items from here on come in windows",
        "removed": "the items from here on come one by one, beginning with the first of the next window",
    }
    state_type: ClassVar[Any] = Count
    initial_state = 0
    depth_change: ClassVar[int] = 1

    size: int
    stride: int = 1

    @property
    def rewinds(self) -> bool:
        return self.stride < self.size

    @property
    def in_flight(self) -> int:
        return self.size

    @property
    def inputs_per_output(self) -> int:
        return self.stride

    @property
    def output_weight(self) -> int:
        return max(self.size, self.stride)

    @classmethod
    def held_items(cls, own: Json) -> str | None:
        return f"has {own:,} items to pass over" if own else None

    def num_outputs(self, items: float) -> float | None:
        return items if items == math.inf else max(0, (items - self.size) // self.stride + 1)

    async def lists(self, run: StageRun[T]) -> Lists[list[T]]:
        start: int = run.own  # of the next window, in `held`; beyond its end, of what is to come
        held: list[T] = []
        ends = [Reference.to(run.upstream.state)]  # the states before the first item held, and after each
        together = self.stride * max(1, TOGETHER_ITEMS // self.stride)
        while True:
            need = start + self.size - len(held)
            chunk = await run.pull(max(need, min(together, self.stride * run.max_items)), need)
            if chunk is None:
                break
            ends.extend(Reference(chunk.states, at) for at in range(len(chunk.items)))
            end = chunk.end_reference
            held.extend(chunk.items)
            del chunk  # the items are the windows' alone
            windows, states = list[list[T]](), _WindowStates(self.name, max(0, self.stride - self.size))
            while (stop := start + self.size) <= len(held):
                windows.append(held[start:stop])
                start += self.stride
                states.add(ends[min(start, stop)], ends[stop])
            passed = min(start, len(held))
            del held[:passed], ends[:passed]
            start -= passed
            after = None
            if not held:
                ends = [end]
                after = Over(self.name, start, end.get())
            if windows or after is not None:
                yield Chunk(windows, states, after)
            del windows
        yield Chunk((), (), Over(self.name, 0, run.upstream.state))  # what fills no window has been read


class _WindowStates:
    """The states after some windows; `skip` items are to be passed over before the next one."""

    __slots__ = ("_ends", "_name", "_skip")

    def __init__(self, name: str, skip: int) -> None:
        self._name, self._skip = name, skip
        self._ends: list[tuple[Reference, Reference]] = []

    def add(self, mark: Reference, now: Reference) -> None:
        """Add a window: the upstream's state before the next one, and after this one."""
        self._ends.append((mark, now))

    def __getitem__(self, index: int, /) -> State:
        mark, now = self._ends[index]
        return Over(self._name, self._skip, Since(mark.get(), now.get()))
