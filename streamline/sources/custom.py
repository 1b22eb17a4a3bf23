"""`@source`: sources that users write, as generator functions that keep their place in a dict.

A resume after an item begins from the dict as it was at that item's yield: it is copied at each yield, through JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import anyio

from streamline.core.blame import blame, cancellation_requested, function_name, stage_name
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.meters import StageMeter, Working
from streamline.core.pace import Pace
from streamline.core.state import At, Json, State, Tree
from streamline.core.user_function import DeclaredFunction, jsonable, parameters_of
from streamline.errors import PlanTypeError
from streamline.sources.base import Mode, Part, Source, epoch_number

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CustomSource(Source[T]):
    """Reads what a declared generator function yields, sync or async. State: its dict after the item yielded."""

    kind: ClassVar[str] = "source"
    modes: ClassVar[tuple[Mode, ...]] = ("custom",)
    state_type: ClassVar[Any] = dict[str, Any]

    fn: DeclaredFunction
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def waits(self) -> bool:
        return True

    @property
    def reread(self) -> str:
        return "goes on from its dict"

    def reads_on(self, own: Json) -> str:
        return f"what its dict says, {json.dumps(own, ensure_ascii=False)}" if own else "the beginning"

    def options(self) -> dict[str, Any]:
        return {"fn": function_name(self.fn), "params": dict(self.params)}

    def functions(self) -> dict[str, Any]:
        return {"fn": self.fn}

    def __str__(self) -> str:
        return f"source({stage_name(self.fn)})"

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        own = self.fn.first_state(str(self)) if state is None else jsonable(state[self.name], str(self))
        begin = At(self.name, own or {})
        context = self.context(site, state)
        return ListsFlow(begin, self._lists(context, begin, self.first_items(site, state)), context)

    async def _lists(
        self, context: StageContext, begin: At, first: Callable[[Sequence[object]], bool] | None
    ) -> Lists[T]:
        rows, pace = _SourceRun[T](self, context.site, begin, context.meter), Pace(context.meter)
        async with aclosing(rows):
            while not rows.ended:
                items = await rows.read(context.max_items, pace)
                if first is not None and not first(items):
                    first = None
                if items:
                    yield Chunk(items, rows.states)
                if rows.failure is not None:
                    raise rows.failure
                del items
                await pace.maybe_yield()


class _SourceRun(Generic[T]):
    """One run of the user's generator.

    Attributes:
      states: after each item of the last list.
      failure: of the generator, after that list.
      ended: whether that list was the last.
    """

    def __init__(self, source: CustomSource[T], site: Site, begin: At, meter: StageMeter | None) -> None:
        self._source, self._site, self._meter = source, site, meter
        self._state = jsonable(begin.own, str(source))
        self._last_state: State = begin
        self._rows: Generator[T, None, None] | AsyncGenerator[T, None] | None = None
        self._items: Iterator[T] = iter(())
        self.states: list[State] = []
        self.failure: BaseException | None = None
        self.ended = False

    async def read(self, want: int, pace: Pace) -> list[T]:
        """Return up to `want` items that come without waiting, or wait for one; none at the end."""
        items: list[T] = []
        self.states = []  # a new list: a chunk may still refer to the last one
        try:
            if self._rows is None:
                self._begin()
            if isinstance(self._rows, AsyncGenerator):
                self.ended = await self._wait(self._rows, items)
            else:
                self.ended = pace.draw(self._items, want, items)
        except BaseException as error:
            if cancellation_requested(error):
                raise
            self.failure = blame(error, str(self._source), self._site, self._last_state)
        return items

    async def _wait(self, rows: AsyncGenerator[T, None], items: list[T]) -> bool:
        try:
            with Working(self._meter):
                item = await anext(rows)
        except StopAsyncIteration:  # the generator's end: Python lets no StopAsyncIteration out of its code
            return True
        self._copy()
        items.append(item)
        return False

    async def aclose(self) -> None:
        """Close the user's generator, under a shield, so that it cleans up."""
        if isinstance(self._rows, AsyncGenerator):
            with anyio.CancelScope(shield=True):
                await self._rows.aclose()
        elif self._rows is not None:
            self._rows.close()

    def _begin(self) -> None:
        source, site = self._source, self._site
        keywords = dict(source.params, state=self._state, shard=site.shard, num_shards=site.num_shards)
        names, _ = parameters_of(source.fn.fn)
        if "epoch" in names:
            keywords["epoch"] = epoch_number(site.epoch)
        rows = source.fn.fn(**keywords)
        if isinstance(rows, Generator):
            self._items = self._copied(rows)
        elif not isinstance(rows, AsyncGenerator):
            raise PlanTypeError(f"expected a generator from {source}, got {type(rows).__name__}")
        self._rows = rows

    def _copied(self, rows: Iterator[T]) -> Iterator[T]:
        for item in rows:
            self._copy()
            yield item

    def _copy(self) -> None:
        """Keep the dict as it is at this yield."""
        self._last_state = At(self._source.name, jsonable(self._state, str(self._source)))
        self.states.append(self._last_state)
