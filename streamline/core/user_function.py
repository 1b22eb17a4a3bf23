"""What authors of custom stages and sources declare: a function found again by its name, and a state that is JSON."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import update_wrapper
from typing import Any, SupportsIndex, cast

import msgspec

from streamline.core.options import type_and_repr
from streamline.errors import PlanTypeError


class DeclaredFunction:
    """A function whose author has declared its state: `state` makes the first one; None: it has none."""

    def __init__(self, fn: Callable[..., Any], state: Callable[[], dict[str, Any]] | None) -> None:
        update_wrapper(cast(Any, self), fn)
        self.fn = fn
        self.state = state

    def first_state(self, whose: str) -> dict[str, Any] | None:
        """Return the state to begin with; None: it has none. Raises `PlanTypeError`: JSON would change it."""
        return None if self.state is None else jsonable(self.state(), whose)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle by name, as the function would be, if its module has this object under that name."""
        name = self.fn.__qualname__
        if self.fn.__module__ != "__main__" and _attribute(self.fn.__module__, name) is self:
            return name
        return super().__reduce_ex__(protocol)


def _attribute(module: str, name: str) -> object:
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
    """Check `fn`'s signature: positional `inputs`, the user's keywords `given`, and `own`, which streamline passes."""
    if taken := sorted(set(own) & set(given)):
        raise PlanTypeError(f"{what}: streamline passes {', '.join(taken)} itself: leave it out")
    try:
        inspect.signature(fn).bind(*[None] * inputs, **dict.fromkeys(own), **given)
    except TypeError as error:
        raise PlanTypeError(f"{what}: {error}; it takes {inspect.signature(fn)}") from None


def jsonable(state: Any, whose: str) -> dict[str, Any]:
    """Return a deep copy of a custom stage's state. Raises `PlanTypeError`: it is no dict, or JSON would change it."""
    copy = json_copy(state, f"the state of {whose}")
    if not isinstance(copy, dict):
        raise PlanTypeError(f"the state of {whose} is a dict, got {type_and_repr(state)}")
    return copy


def json_copy(value: Any, whose: str) -> Any:
    """Return a deep copy of a value, made through JSON. Raises `PlanTypeError`: JSON would change it."""
    try:
        copy = msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanTypeError(f"{whose} is not JSON-able: {error}") from error
    if copy != value:
        raise PlanTypeError(f"{whose} does not survive JSON: {value!r} comes back as {copy!r}")
    return copy
