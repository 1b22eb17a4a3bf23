"""What in a plan can't be pickled, said so that whoever wrote the plan finds it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import dropwhile
from typing import Any

import cloudpickle

from streamline.border.recreating import REFUSED, has_refused_name

__all__ = ["unsendable"]

MOST_TRIED = 300
"""Parts that are pickled by themselves in search of the culprit."""

WAY_OUT = (
    "Make it in the process that uses it: a function `@functools.cache def get(): return ...` that makes it, and get() "
    "in its place. Or run the plan where nothing is sent: backend=Inline() or Threads(n)"
)

Sendable = Callable[[object], bool]


def unsendable(payload: object, sendable: Sendable, error: Exception) -> str:
    """Return the message for a payload that is not `sendable`, but raised `error`."""
    trail, culprit = _innermost(payload, sendable)
    steps = dropwhile(lambda step: step.startswith("."), filter(None, trail))  # of ours, up to the stage
    where = "".join(f"{step}: " for step in steps)
    return (
        f"this plan can't be sent to another process: {where}a {_kind(culprit)} can't be pickled "
        f"({type(error).__name__}: {error}). {WAY_OUT}"
    )


def _innermost(payload: object, sendable: Sendable) -> tuple[list[str], object]:
    """Return the shortest way to a thing that can't be pickled though its parts can, and that thing.

    Breadth first, each thing once: an object may refer to all of a large program, in circles. After `MOST_TRIED` parts
    it is the thing that was reached; the payload, if it is only circles that can't be pickled.
    """
    reached: list[tuple[list[str], object]] = [([], payload)]
    seen, tried = {id(payload)}, 0
    for trail, found in reached:  # it grows meanwhile
        innermost = True
        for label, part in _parts(found):
            tried += 1
            if tried > MOST_TRIED:
                return trail, found
            if sendable(part):
                continue
            innermost = innermost and part is found
            if id(part) not in seen:
                seen.add(id(part))
                reached.append(([*trail, label], part))
        if innermost:
            return trail, found
    return reached[0]


def _parts(whole: Any) -> Iterator[tuple[str, object]]:
    """Yield what is pickled along with `whole`, each with how a person would name it."""
    if isinstance(whole, REFUSED) or has_refused_name(type(whole)):
        return
    if isinstance(whole, types.FunctionType):
        yield from _parts_of_function(whole)
    elif isinstance(whole, types.MethodType):
        yield f"{_kind(whole.__self__)}, whose method {whole.__name__} it calls", whole.__self__
        yield "", whole.__func__
    elif isinstance(whole, functools._lru_cache_wrapper):
        yield "", getattr(whole, "__wrapped__", None)
    elif isinstance(whole, staticmethod | classmethod):
        yield "", whole.__func__
    elif isinstance(whole, property):
        yield from (("", function) for function in (whole.fget, whole.fset, whole.fdel))
    elif isinstance(whole, functools.partial):
        yield "", whole.func
        yield from ((f"argument {number} of the partial", part) for number, part in enumerate(whole.args))
        yield from ((f"argument {name} of the partial", part) for name, part in whole.keywords.items())
    elif isinstance(whole, Mapping):
        yield from ((f"[{key!r:.40}]", part) for key, part in whole.items())
    elif isinstance(whole, list | tuple | set | frozenset):
        yield from ((_name(part) or f"[{number}]", part) for number, part in enumerate(whole))
    elif dataclasses.is_dataclass(whole):
        names = [field.name for field in dataclasses.fields(whole)]
        yield from (
            (_name(part) or f".{name}", part) for name in names if (part := getattr(whole, name, None)) is not None
        )
    else:
        yield from ((_name(part) or f".{name}", part) for name, part in getattr(whole, "__dict__", {}).items())
        if not isinstance(whole, type):
            slots = (slot for kind in type(whole).__mro__ for slot in vars(kind).get("__slots__", ()))
            yield from ((f".{slot}", getattr(whole, slot, None)) for slot in slots)
            yield f"its class {_kind(whole)}", type(whole)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"its variable {name}", _content(cell)
    for name in cloudpickle.cloudpickle.cloudpickle._extract_code_globals(
        function.__code__
    ):  # also those of functions inside
        if name in function.__globals__:
            found = function.__globals__[name]
            yield _name(found) or f"the global variable {name}", found
    yield from (("a default of its arguments", part) for part in function.__defaults__ or ())
    yield from ((f"its attribute {name}", part) for name, part in function.__dict__.items())


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


def _name(part: Any) -> str:
    """Return how a stage or a function calls itself; "" for what has no name of its own."""
    if isinstance(part, functools._lru_cache_wrapper):
        part = getattr(part, "__wrapped__", None)
    if isinstance(part, types.FunctionType):
        return f"function {part.__qualname__} ({part.__code__.co_filename}:{part.__code__.co_firstlineno})"
    if isinstance(kind := getattr(part, "kind", None), str) and isinstance(name := getattr(part, "name", None), str):
        return f"stage {name!r} (.{kind})"
    return ""


def _kind(part: object) -> str:
    kind = type(part)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
