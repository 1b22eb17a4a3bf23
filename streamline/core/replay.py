"""Running the one item again on which user code failed: `replay(error)`.

An exception out of user code carries the call that raised it: the function and the very item. It is called again in
the caller's thread, so that breakpoints, prints and a debugger's prompt work.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any

from streamline.core.options import check_function, is_async
from streamline.errors import PlanError, PlanTypeError, TooManyErrors

CALL_ATTRIBUTE = "_streamline_call"
"""The attribute under which an exception carries its call."""


class Adapter(ABC):
    """A function that streamline wraps around a user's, because it passes on more than the item."""

    fn: Callable[..., Any]

    @abstractmethod
    def __call__(self, given: Any) -> Any: ...

    def again(self, given: Any) -> Any:
        """Call the function again, on what it has failed on."""
        return self(given)

    def item(self, given: Any) -> Any:
        """Return the user's item in an argument."""
        return self.fn.item(given) if isinstance(self.fn, Adapter) else given

    @abstractmethod
    def around(self, fn: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return the same adapter of another function."""


class FailedCall:
    """A failed call of user code with one item; `outputs`: how many a function that makes an iterable gave before."""

    __slots__ = ("fn", "given", "outputs")

    def __init__(self, fn: Callable[[Any], Any], item: Any, outputs: int | None = None) -> None:
        self.fn = fn
        self.given = item
        self.outputs = outputs

    def __reduce__(self) -> Any:
        """Pickle as None: exceptions travel between processes, functions and items don't."""
        return _nothing, ()

    def __deepcopy__(self, memo: Any) -> FailedCall:
        return self

    @property
    def item(self) -> Any:
        """The user's item."""
        return self.fn.item(self.given) if isinstance(self.fn, Adapter) else self.given

    def attach(self, error: BaseException) -> None:
        vars(error)[CALL_ATTRIBUTE] = self  # an exception may be a frozen dataclass

    def again(self, fn: Callable[..., Any] | None) -> Any:
        """Call again, or call `fn` in its place."""
        call: Callable[[Any], Any] = self.fn
        given = self.given
        if fn is not None:
            call = call.around(fn) if isinstance(call, Adapter) else fn
        if is_async(call):
            return _run_async(call, given)
        result = call(given)
        if self.outputs is not None:
            return _take_outputs(result, self.outputs + 1)
        if inspect.iscoroutine(result):
            result.close()
            raise PlanTypeError(f"{call!r} returned a coroutine: give replay the `async def` itself")
        return result


def replay(error: BaseException, *, fn: Callable[..., Any] | None = None) -> Any:
    """Call the function again that raised `error`, on the same item, in this thread.

    A seeded map gets its generator as it was before the call. A `.batch` gets the list to collate. A `.flat_map` is
    unfolded up to the output that failed, and these outputs are returned. An async function runs to its end in an event
    loop of its own. What the function changed in its item before it failed stays changed.

    Args:
      error: that came out of a stream; of a `TooManyErrors`, its cause is taken.
      fn: called in place of the function: a fix, say. None: the function itself.

    Returns:
      What the function returns, if it doesn't fail now.

    Raises:
      PlanError: the error didn't come from a function that is called on items; or the function is async and this
        thread already runs an event loop.
      What the function raises.
    """
    given: object = error
    if not isinstance(given, BaseException):
        raise PlanTypeError(f"replay takes an exception that came out of a stream, got {type(given).__name__}")
    if fn is not None:
        check_function("replay(fn=)", fn)
    if isinstance(error, TooManyErrors) and error.__cause__ is not None:
        error = error.__cause__
    call = vars(error).get(CALL_ATTRIBUTE)
    if not isinstance(call, FailedCall):
        raise PlanError(_why_not(error, CALL_ATTRIBUTE in vars(error))) from error
    return call.again(fn)


def _why_not(error: BaseException, travelled: bool) -> str:
    if travelled:
        return f"the item at which {type(error).__name__} was raised isn't here: the exception was copied or pickled"
    return (
        f"{type(error).__name__} carries no item to replay: only what functions of .map, .filter, .flat_map, .unbatch, "
        "a batch's collate or from_items' __getitem__ raise does; reading files, iterables and custom stages have none"
    )


def _run_async(fn: Callable[[Any], Awaitable[Any]], item: Any) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_await_call(fn, item))
    raise PlanError(
        "replay runs an async function in an event loop of its own, which can't begin inside a running one: write "
        "`await asyncio.to_thread(sl.replay, error)`, or call replay outside of the loop"
    )


async def _await_call(fn: Callable[[Any], Awaitable[Any]], item: Any) -> Any:
    return await fn(item)


def _take_outputs(outputs: Any, count: int) -> list[Any]:
    if not isinstance(outputs, Iterable):
        raise PlanTypeError(f"expected an iterable, got {type(outputs).__name__}")
    return list(islice(outputs, count))


def _nothing() -> None:
    return None
