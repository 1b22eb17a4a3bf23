"""`.enumerate`: items with their numbers. State: items seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.state import NumberedStates, Over
from streamline.core.state_types import Count
from streamline.transforms.base import Stage

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Enumerate(Stage[T, tuple[int, T]]):
    """Pairs (number, item), numbered from `start` on."""

    kind: ClassVar[str] = "enumerate"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "start": "the numbers from here on are as if it had begun with the new start",
        "added": "the items from here on are numbered, from start on",
        "removed": "the items from here on come without numbers",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset(accepted_changes)
    state_type: ClassVar[Any] = Count
    one_to_one = True
    initial_state = 0
    own_state_counts: ClassVar[bool] = False

    start: int = 0

    async def lists(self, run: StageRun[T]) -> Lists[tuple[int, T]]:
        seen: int = run.own
        while (chunk := await run.pull()) is not None:
            pairs = list(enumerate(chunk.take_items(), self.start + seen))
            states = NumberedStates(self.name, seen + 1, chunk.states)
            seen += len(pairs)
            made = [Chunk(pairs, states, None if chunk.progress is None else Over(self.name, seen, chunk.progress))]
            del chunk, pairs  # the items are the reader's: none is kept while the next are made
            yield made.pop()
