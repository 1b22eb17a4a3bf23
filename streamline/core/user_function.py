"""What authors of custom stages and sources declare: a function found again by its name, and a state that is JSON."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import update_wrapper
from typing import Any, SupportsIndex, cast

import msgspec

from streamline.core.options import given
from streamline.errors import PlanTypeError


class DeclaredFunction:
    """A function whose author has declared its state. Base of what `@sl.stage` and `@sl.source` make of one.

    Attributes:
      state: makes its first state; None: it has none.
    """

    def __init__(self, fn: Callable[..., Any], state: Callable[[], dict[str, Any]] | None) -> None:
        update_wrapper(cast(Any, self), fn)
        self.fn = fn
        self.state = state

    def first_state(self, whose: str) -> dict[str, Any] | None:
        """Return the state to begin with; None: it has none.

        Raises:
          PlanTypeError: it is no dict, or JSON would change it; `whose` it is, for the message.
        """
        return None if self.state is None else jsonable(self.state(), whose)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle what a module declares by its name, as the function would be, if that is bound to this object."""
        name = self.fn.__qualname__
        if self.fn.__module__ != "__main__" and _bound(self.fn.__module__, name) is self:
            return name
        return super().__reduce_ex__(protocol)


def _bound(module: str, name: str) -> object:
    """Return what a module has under a name, dotted perhaps; None: nothing."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def parameters_of(fn: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names by which `fn` takes keywords, and whether it takes any other (`**kwargs`)."""
    found = inspect.signature(fn).parameters.values()
    by_name = {p.name for p in found if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return by_name, any(p.kind is p.VAR_KEYWORD for p in found)


def check_call(what: str, fn: Callable[..., Any], inputs: int, given: Mapping[str, Any], own: Collection[str]) -> None:
    """Check that a declared function can be called with the parameters that were written.

    Args:
      what: the call as written, for the message.
      inputs: positional arguments that streamline passes.
      given: the user's keywords.
      own: keywords that streamline passes itself.
    """
    if taken := sorted(set(own) & set(given)):
        raise PlanTypeError(f"{what}: streamline passes {', '.join(taken)} itself: leave it out")
    try:
        inspect.signature(fn).bind(*[None] * inputs, **dict.fromkeys(own), **given)
    except TypeError as error:
        raise PlanTypeError(f"{what}: {error}; it takes {inspect.signature(fn)}") from None


def jsonable(state: Any, whose: str) -> dict[str, Any]:
    """Return a deep copy of the state of a custom stage or source, made through JSON.

    Raises:
      PlanTypeError: the state is not a dict, or comes back from JSON as something else.
    """
    copy = json_copy(state, f"the state of {whose}")
    if not isinstance(copy, dict):
        raise PlanTypeError(f"the state of {whose} is a dict, got {given(state)}")
    return copy


def json_copy(value: Any, whose: str) -> Any:
    """Return a deep copy of a value, made through JSON.

    Args:
      whose: for the message: "the state of rows".

    Raises:
      PlanTypeError: it comes back from JSON as something else.
    """
    try:
        copy = msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanTypeError(f"{whose} is not JSON-able: {error}") from error
    if copy != value:
        raise PlanTypeError(f"{whose} does not survive JSON: {value!r} comes back as {copy!r}")
    return copy
