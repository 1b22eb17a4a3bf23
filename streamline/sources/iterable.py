"""Items out of a factory of iterables, called anew per pass.

Nothing is known of an iterable but its next item: every worker iterates all of it and keeps its stride, and a resume
iterates up to where it stood. What can be had by index is better read with `from_items`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.blame import blame, cancellation_requested
from streamline.errors import PlanTypeError
from streamline.flow import Chunk, Demand, Flow, Lists, ListsFlow, Site
from streamline.pace import Pace
from streamline.sources.base import Mode, Part, Source
from streamline.states import At, Counted, Tree

__all__ = ["IterableSource"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class IterableSource(Source[T]):
    """Iterates what `factory` returns, sync or async. State: items consumed; a resume iterates up to there again."""

    modes: ClassVar[tuple[Mode, ...]] = ("replicated",)

    factory: Callable[[], Iterable[T] | AsyncIterable[T]]

    @property
    def kind(self) -> str:
        return "from_iterable"

    @property
    def waits(self) -> bool:
        return inspect.isasyncgenfunction(self.factory)

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        done: int = 0 if state is None else state[self.name]
        demand = Demand(site)
        return ListsFlow(At(self.name, done), self._lists(demand, done), demand)

    async def _lists(self, demand: Demand, done: int) -> Lists[T]:
        count = 0
        reader = _Reader(self, demand)
        try:
            ended = False
            while not ended:
                found: list[T] = []
                failure: BaseException | None = None
                try:
                    ended = await reader.read(found)
                except BaseException as error:
                    if cancellation_requested(error):
                        raise
                    failure = blame(error, self.name, demand.site, At(self.name, count + len(found) + 1))
                fresh = found[max(0, done - count) :]
                count += len(found)
                if fresh:
                    yield Chunk(fresh, Counted(self.name, count - len(fresh) + 1))
                if failure is not None:
                    raise failure
                await reader.pace.breathe()
        finally:
            await reader.aclose()


class _Reader:
    """Draws lists from a sync or an async iterator."""

    def __init__(self, source: IterableSource[Any], demand: Demand) -> None:
        self._source = source
        self._demand = demand
        self._iterator: Iterator[Any] | AsyncIterator[Any] | None = None
        self.pace = Pace()

    async def read(self, found: list[Any]) -> bool:
        """Append the next items to `found`, as many as come without waiting, at least one; True at the end."""
        if self._iterator is None:
            self._iterator = self._open()
        if isinstance(self._iterator, Iterator):
            return self.pace.draw(self._iterator, self._demand.want, found)
        try:
            found.append(await anext(self._iterator))
        except StopAsyncIteration:
            return True
        return False

    def _open(self) -> Iterator[Any] | AsyncIterator[Any]:
        iterable = self._source.factory()
        if isinstance(iterable, AsyncIterable):
            return aiter(iterable)
        if isinstance(iterable, Iterable):
            return iter(iterable)
        raise PlanTypeError(f"expected from_iterable's factory to return an iterable, got {type(iterable).__name__}")

    async def aclose(self) -> None:
        """Close the iterator, if it can be closed."""
        if isinstance(self._iterator, AsyncIterator):
            if (aclose := getattr(self._iterator, "aclose", None)) is not None:
                await aclose()
        elif (close := getattr(self._iterator, "close", None)) is not None:
            close()
