"""`.map(batched=)`: a function of lists. Three stages: items into lists, `.map` of a list, its results one by one.

Each list has the same items in every run: it is made anew where a resume begins in its midst. State: as of `.batch`,
`.map` and `.unbatch`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.core.blame import stage_name
from streamline.core.options import is_async
from streamline.core.replay import Adapter
from streamline.core.state import Json
from streamline.errors import PlanTypeError
from streamline.transforms.batch import Batch
from streamline.transforms.collate import as_list, unstack
from streamline.transforms.flat_map import FlatMap

T = TypeVar("T")

GATHER, SCATTER = ".lists", ".results"
"""What the names of the stages around the map end with."""


@dataclass(frozen=True, kw_only=True)
class Gather(Batch[T, list[T]]):
    """Makes a list of each `size` items; the last one has the rest."""

    kind: ClassVar[str] = "gather"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "size": "the lists from here on have the new size",
        "added": "its function is given lists from here on",
        "removed": "its function is given items from here on",
    }
    uncounted_options: ClassVar[Collection[str]] = (
        "drop_remainder",
        "collate",
        "max_wait_s",
        "counts",
    )  # all but its size

    collate: Callable[[list[T]], list[T]] = as_list

    @property
    def method(self) -> str:
        return "map(batched=)"

    def shown_options(self) -> list[str]:
        return [f"size={self.size}"]

    def num_outputs(self, items: float) -> float | None:
        return items / self.size  # the last list in proportion, so that `Scatter` finds the items again

    @classmethod
    def argument(cls, name: str, what: str) -> str:
        """Name the change as one of the map between."""
        return _argument(name.removesuffix(GATHER), what)


@dataclass(frozen=True, kw_only=True)
class Scatter(FlatMap[list[T], T]):
    """Gives the results of a list one by one; `size` is that of a full list."""

    kind: ClassVar[str] = "scatter"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "added": "its function is given lists from here on",
        "removed": "its function is given items from here on",
    }
    uncounted_options = ("fn", "size")
    depth_change: ClassVar[int] = -1
    in_flight = 1

    fn: Callable[[list[T]], list[T]] = as_list
    size: int

    def shown_options(self) -> list[str]:
        return []

    def num_outputs(self, items: float) -> float | None:
        return items if items == math.inf else round(items * self.size)

    @classmethod
    def held_items(cls, own: Json) -> str | None:
        return f"has delivered {own:,} results of a list" if own else None

    @classmethod
    def argument(cls, name: str, what: str) -> str:
        """Name the change as one of the map before."""
        return _argument(name.removesuffix(SCATTER), what)


def _argument(name: str, what: str) -> str:
    return f"{name}.{what if what in ('name', 'removed') else 'batched'}"


class OfList(Adapter):
    """Calls `fn` on a list, and checks that it gives one result for each item. A class: it is picklable.

    Raises:
      PlanTypeError: it gives another number of results, or what has no rows.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = self.__wrapped__ = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.is_async = is_async(fn)

    def __call__(self, given: list[Any], **generators: Any) -> Any:
        made = self.fn(list(given), **generators)  # a function may change its list; the next try needs all of it
        return self._await_each(len(given), made) if inspect.isawaitable(made) else self._rows(len(given), made)

    async def _await_each(self, count: int, made: Any) -> list[Any]:
        return self._rows(count, await made)

    def _rows(self, count: int, made: Any) -> list[Any]:
        try:
            rows = list(unstack(made))
        except (TypeError, ValueError) as error:
            raise PlanTypeError(f"{stage_name(self.fn)} gave {type(made).__name__}: {IT_GIVES}") from error
        if len(rows) != count:
            raise PlanTypeError(f"{stage_name(self.fn)} gave {len(rows):,} results for {count:,} items: {IT_GIVES}")
        return rows

    def around(self, fn: Callable[..., Any]) -> OfList:
        return OfList(fn)


IT_GIVES = (
    "with batched=, it gives a list of as many results as there are items, an array with as many rows, or a dict of "
    "such columns"
)
