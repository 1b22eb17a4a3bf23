"""The part of an object that can't be pickled, found for messages."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from streamline.backends.ipc.by_value import is_refused

MOST_TRIED = 300
"""Parts that are pickled in search of the one that can't be."""

Step = tuple[str, object]
"""A label, "" where there is none, and the part that it leads to."""


def pickling_error(thing: object, dumps: Callable[[object], object]) -> Exception | None:
    """Return what `dumps` raises; None: the thing can be pickled."""
    try:
        dumps(thing)
    except Exception as error:
        return error
    return None


def unpicklable_part(whole: object, dumps: Callable[[object], object]) -> list[Step]:
    """Return the shortest path to a part that can't be pickled though its own parts can; empty: that is `whole`.

    Breadth first, each object once, at most `MOST_TRIED`; `whole` if only cycles can't be pickled.
    """
    reached: list[tuple[list[Step], object]] = [([], whole)]
    seen, tried = {id(whole)}, 0
    for path, found in reached:  # it grows meanwhile
        innermost = True
        for label, part in _parts(found):
            tried += 1
            if tried > MOST_TRIED:
                return path
            if pickling_error(part, dumps) is None:
                continue
            innermost = innermost and part is found
            if id(part) not in seen:
                seen.add(id(part))
                reached.append(([*path, (label, part)], part))
        if innermost:
            return path
    return []


def kind_of(part: object) -> str:
    kind = type(part)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _parts(whole: Any) -> Iterator[tuple[str, object]]:
    """Yield what is pickled along with `whole`, each with a label."""
    if is_refused(whole):
        return
    if isinstance(whole, types.FunctionType):
        yield from _parts_of_function(whole)
    elif isinstance(whole, types.MethodType):
        yield f"{kind_of(whole.__self__)}, whose method {whole.__name__} it calls", whole.__self__
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
        for name, part in getattr(whole, "__dict__", {}).items():
            if not isinstance(part, types.GetSetDescriptorType | types.MemberDescriptorType):  # of each class anew
                yield _name(part) or f".{name}", part
        if not isinstance(whole, type):
            slots = (slot for kind in type(whole).__mro__ for slot in vars(kind).get("__slots__", ()))
            yield from ((f".{slot}", getattr(whole, slot, None)) for slot in slots)
            yield f"its class {kind_of(whole)}", type(whole)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"its variable {name}", _content(cell)
    for name in cloudpickle.cloudpickle._extract_code_globals(function.__code__):  # also those of functions inside
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
    """Return the label of a stage or function; "" for other objects."""
    if isinstance(part, functools._lru_cache_wrapper):
        part = getattr(part, "__wrapped__", None)
    if isinstance(part, types.FunctionType):
        return f"function {part.__qualname__} ({part.__code__.co_filename}:{part.__code__.co_firstlineno})"
    if isinstance(kind := getattr(part, "kind", None), str) and isinstance(name := getattr(part, "name", None), str):
        return f"stage {name!r} (.{kind})"
    return ""
