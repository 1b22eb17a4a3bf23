"""`@sl.source`: a pipeline that starts at a generator function of one's own."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar, overload

from streamline.core.blame import stage_name
from streamline.core.options import check_function
from streamline.core.user_function import DeclaredFunction, check_call, parameters_of
from streamline.errors import PlanTypeError
from streamline.pipeline import Pipeline
from streamline.sources.custom import CustomSource

__all__ = ["DeclaredSource", "source"]

T = TypeVar("T")

SOURCE_KEYWORDS = ("state", "shard", "num_shards")
"""The keywords that a source's function is always given."""


class DeclaredSource(DeclaredFunction, Generic[T]):
    """A generator function that keeps its place in a dict: called with its parameters, it makes a pipeline.

    `fn` is the function as it was written, for calling it in a test: `rows.fn(state={}, shard=0, num_shards=1)`.
    """

    def __call__(self, *, name: str | None = None, **params: Any) -> Pipeline[T]:
        """Return a pipeline that reads what the function yields.

        Args:
          name: its part of a state is kept under it; by default the function's name.
          params: keyword arguments for the function. They count in the fingerprint as `.through`'s do.

        Raises:
          PlanTypeError: a parameter is missing, unknown, or one that streamline passes itself.
          PlanError: a name that a pipeline uses itself.
        """
        own = stage_name(self)
        names, _ = parameters_of(self.fn)
        check_call(f"{own}()", self.fn, 0, params, (*SOURCE_KEYWORDS, "epoch") if "epoch" in names else SOURCE_KEYWORDS)
        pipe: Pipeline[T] = Pipeline(
            CustomSource(name=own if name is None else name, fn=self, params=tuple(params.items()))
        )
        _ = pipe.plan  # is checked
        return pipe


@overload
def source(
    *, state: Callable[[], dict[str, Any]]
) -> Callable[[Callable[..., AsyncIterator[T] | Iterator[T]]], DeclaredSource[T]]: ...
@overload
def source(fn: Callable[..., Any] | None = None, /, *, state: None = None) -> Any: ...
def source(fn: Callable[..., Any] | None = None, /, *, state: Callable[[], dict[str, Any]] | None = None) -> Any:
    """Declare that a generator function is a source that keeps its place in a dict, so that it resumes exactly.

        @sl.source(state=dict)
        async def rows(*, state, shard, num_shards, url):
            async for number, row in table(url, start=state.get("next", shard), step=num_shards):
                state["next"] = number + num_shards  # first: the dict at a yield resumes behind the item yielded
                yield row

        pipe = rows(url="...").shard(4).map(decode)

    The function, async or sync, is called anew per worker, pass and resume, with

    - `state`: at first what the decorator's `state` makes; at a resume, what it was at the yield of the last item that
      the consumer got. Change it in place, then yield; JSON-able at every yield.
    - `shard`, `num_shards`: it splits itself: together, all shards must be the whole. Without `.shard`, 0 of 1.
    - `epoch`, if it has a parameter of that name: a number, another one in each pass: the loader's epoch; within a
      `.repeat`, that epoch * 2**32 + the pass.
    - what the pipeline was made with.

    It is run in a task of its own, some way ahead of its reader. A sync one holds the event loop while it waits.

    Args:
      state: makes the first state, a dict (`state=dict`).

    Raises:
      PlanTypeError: `state` is missing, or what is decorated is no generator function that takes the keywords above.
    """
    if fn is not None or state is None:
        raise PlanTypeError(
            "@source takes state=dict (or another function that makes a dict): @sl.source(state=dict). A generator "
            "function that declares no state is read with from_iterable(rows), and iterated from its start at a resume"
        )
    check_function("@source(state=)", state)

    def declare(fn: Callable[..., AsyncIterator[T] | Iterator[T]]) -> DeclaredSource[T]:
        _check_source(fn)
        return DeclaredSource(fn, state)

    return declare


def _check_source(fn: Callable[..., Any]) -> None:
    """Insist on a function that can be a source."""
    name = stage_name(fn)
    if not (inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn)):
        raise PlanTypeError(
            f"@source declares a generator function (async def or def, with a yield in it), and {name} is none: what "
            "returns an iterable is read with from_iterable"
        )
    names, others = parameters_of(fn)
    if missing := [keyword for keyword in SOURCE_KEYWORDS if keyword not in names and not others]:
        raise PlanTypeError(
            f"@source: {name} has no keyword {', '.join(missing)}: async def {name}(*, state, shard, num_shards, ...)"
        )
    if "name" in names:
        raise PlanTypeError(f"@source: name= names the source where {name} is called: call the parameter otherwise")
