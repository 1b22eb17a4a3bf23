"""`from_iterable`: items of a factory of iterables, called anew for each pass.

Every worker iterates all of an iterable and keeps its stride; a resume iterates up to its place. One with a state of
its own (`streamline.sources.foreign_state`) is loaded instead: the state was taken some items before, and these are
iterated again.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import FunctionType
from typing import Any, ClassVar, TypeVar, cast

import msgspec

from streamline.core.blame import blame, cancellation_requested
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.meters import Working
from streamline.core.pace import Pace
from streamline.core.state import At, CountedStates, Json, Shifted, State, States, Tree
from streamline.core.state_types import Count
from streamline.errors import PlanTypeError, ResumeError
from streamline.sources.base import Mode, Part, Source
from streamline.sources.foreign_state import Foreign, Marks, Renewable, foreign
from streamline.sources.single_use import Use
from streamline.sources.table_rows import check_not_table

T = TypeVar("T")


class Loaded(msgspec.Struct):
    """Its part of a saved state, for an iterable with a state of its own: that state, taken `since` items before."""

    items: Count
    since: Count
    state: Any

    def __post_init__(self) -> None:
        if self.since > self.items:
            raise ValueError(f"Expected at most {self.items} items since the iterable's state, got {self.since}")


@dataclass(frozen=True, kw_only=True)
class IteratedSource(Source[T], ABC):
    """Iterates an iterable that is made anew for each worker, pass and resume.

    State: items consumed; of an iterable that has a state also that, and how many items were consumed since.
    """

    state_type: ClassVar[Any] = Count | Loaded

    @abstractmethod
    def make(self, site: Site) -> Iterable[T] | AsyncIterable[T]:
        """Return the iterable, for the worker at a site."""

    @abstractmethod
    def use(self) -> Use:
        """Return what watches over the use of one iterable."""

    @property
    def reread(self) -> str:
        return "iterates up to its place, or loads its state"

    def reads_on(self, own: Json) -> str:
        if isinstance(own, dict):
            return f"item {own['items']:,}: loads the state that it gave {own['since']:,} items before"
        return f"item {own:,}, iterated to from the start" if own else "the beginning"

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        own: Json = 0 if state is None else state[self.name]
        context = self.context(site, state)
        first = self.first_items(site, state) if self.default_mode == "custom" else None
        return ListsFlow(_Stateful(self.name, own), self._lists(context, own, first), context)

    async def _lists(
        self, context: StageContext, own: Json, first: Callable[[Sequence[object]], bool] | None
    ) -> Lists[T]:
        reader = _ListReader(self, context, own)
        done: int = own["items"] if isinstance(own, dict) else own
        try:
            ended = False
            while not ended:
                found: list[T] = []
                failure: BaseException | None = None
                states: States = ()
                try:
                    reader.open()
                    states = reader.states()
                    ended = await reader.read(found)
                except BaseException as error:
                    if cancellation_requested(error):
                        raise
                    failure = blame(error, self.name, context.site, At(self.name, reader.count + 1))
                if first is not None and not first(found):
                    first = None
                passed_over = min(max(0, done - reader.count + len(found)), len(found))
                if passed_over < len(found):
                    yield Chunk(found[passed_over:], Shifted(states, passed_over))
                if failure is not None:
                    raise failure
                await reader.pace.maybe_yield()
        finally:
            await reader.aclose()


@dataclass(frozen=True, kw_only=True)
class IterableSource(IteratedSource[T]):
    """Iterates what `factory` returns, sync or async."""

    kind: ClassVar[str] = "from_iterable"
    modes: ClassVar[tuple[Mode, ...]] = ("replicated",)

    factory: Callable[[], Iterable[T] | AsyncIterable[T]]

    def make(self, site: Site) -> Iterable[T] | AsyncIterable[T]:
        return self.factory()

    def use(self) -> Use:
        return Use("from_iterable", self.factory)

    @property
    def waits(self) -> bool:
        return inspect.isasyncgenfunction(self.factory)

    def functions(self) -> dict[str, Any]:
        return {"factory": self.factory}


class _ListReader:
    """Draws lists from a sync or an async iterator; `count` items so far."""

    def __init__(self, source: IteratedSource[Any], context: StageContext, own: Json) -> None:
        self._source = source
        self._context = context
        self._own = own
        self._iterator: Iterator[Any] | AsyncIterator[Any] | None = None
        self._nexts: Iterator[Any] | None = None
        self._marks: Marks | None = None
        self._use = source.use()
        self._meter = context.meter
        self.pace = Pace(context.meter)
        self.count = 0

    def states(self) -> States:
        if self._marks is None:
            return CountedStates(self._source.name, self.count + 1)
        return _IterableStates(self._source.name, self._marks.mark, self._marks.at, self.count + 1)

    async def read(self, found: list[Any]) -> bool:
        """Append the next items to `found`, as many as come without waiting, at least one; True at the end."""
        before = self.count
        try:
            ended = await self._draw(found)
        finally:
            self.count = before + len(found)
        if self._marks is not None and self.count == self._marks.next:
            self._marks.take(self.count)
        return ended

    async def _draw(self, found: list[Any]) -> bool:
        if self._nexts is not None:
            want = (
                self._context.max_items
                if self._marks is None
                else min(self._context.max_items, self._marks.next - self.count)
            )
            return self.pace.draw(self._nexts, want, found)
        try:
            with Working(self._meter):
                found.append(await anext(cast("AsyncIterator[Any]", self._iterator)))
        except StopAsyncIteration:
            return True
        return False

    def open(self) -> None:
        """Make the iterator at the state to begin at, if there is none yet."""
        if self._iterator is not None:
            return
        iterable: Any = self._source.make(self._context.site)
        if isinstance(iterable, Renewable):
            iterable = iterable.anew()
        state: Json = self._own["state"] if isinstance(self._own, dict) else None
        check_not_table("from_iterable's factory returned", iterable)
        known = foreign(iterable)
        if known is not None:
            self._begin(known, state)  # before it is iterated
        if isinstance(iterable, AsyncIterable):
            self._iterator = self._use.iterated(iterable, aiter)
        elif isinstance(iterable, Iterable):
            iterator = self._iterator = self._use.iterated(iterable, iter)
            self._nexts = _nexts(iterator)
        else:
            raise _not_iterable(iterable)
        if known is None and (known := foreign(self._iterator)) is not None:
            self._begin(known, state)
        if known is None and state is not None:
            raise ResumeError(
                f"{self._source.name}: the snapshot holds the state of an iterable, and the {type(iterable).__name__} "
                "that the factory returns has no load_state_dict or set_state to take it"
            )

    def _begin(self, known: Foreign, state: Json) -> None:
        """Load the state, if there is one, and track it from now on."""
        self._use.stateful(known.owner, loads=state is not None)
        if state is None:
            self._marks = Marks(known, None, 0)
            return
        known.load(state)
        self.count = self._own["items"] - self._own["since"]
        self._marks = Marks(known, json.dumps(state, separators=(",", ":")), self.count)

    async def aclose(self) -> None:
        try:
            if isinstance(self._iterator, AsyncIterator):
                if (aclose := getattr(self._iterator, "aclose", None)) is not None:
                    await aclose()
            elif (close := getattr(self._iterator, "close", None)) is not None:
                close()
        finally:
            self._iterator = self._nexts = self._marks = None
            self._use.close()


def _not_iterable(found: object) -> PlanTypeError:
    way = ""
    if inspect.iscoroutine(found):
        found.close()
        way = ": an async generator awaits it, async for item in await connect(): yield item"
    elif found is None:
        way = ": has it a return, or a yield?"
    return PlanTypeError(f"expected from_iterable's factory to return an iterable, got {type(found).__name__}{way}")


def _nexts(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that `iter` doesn't reset, as the `__iter__` of many a class does."""
    reset = isinstance(getattr(type(iterator), "__iter__", None), FunctionType)
    return map(next, repeat(iterator)) if reset else iterator  # `map` ends where `next` does


class _IterableStates:
    """The states after items of an iterable whose own state was taken after `at` items."""

    __slots__ = ("_at", "_first", "_mark", "_name")

    def __init__(self, name: str, mark: str | None, at: int, first: int) -> None:
        self._name, self._mark, self._at, self._first = name, mark, at, first

    def __getitem__(self, index: int, /) -> State:
        items = self._first + index
        state = None if self._mark is None else json.loads(self._mark)
        return _Stateful(self._name, {"items": items, "since": items - self._at, "state": state})


class _Stateful(At):
    """After an item of an iterable, perhaps with a state of its own."""

    __slots__ = ()

    def where(self) -> str:
        return At(self.name, self.own["items"] if isinstance(self.own, dict) else self.own).where()
