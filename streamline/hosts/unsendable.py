"""What in a plan can't be pickled, said so that whoever wrote the plan finds it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["unsendable"]

DEEPEST = 20

Dumps = Callable[[object], bytes]


def unsendable(payload: object, dumps: Dumps, error: Exception) -> str:
    """Return the message for a payload that `dumps` failed on with `error`."""
    trail, culprit = _trail(payload, dumps)
    where = "".join(f"{step}: " for step in trail)
    return (
        f"this plan can't be sent to another process: {where}a {_kind(culprit)} can't be pickled "
        f"({type(error).__name__}: {error}). Make it inside the function that needs it, once a process, or run the "
        "plan where nothing is sent: backend=Inline() or Threads(n)"
    )


def _trail(found: object, dumps: Dumps) -> tuple[list[str], object]:
    """Return the way to the innermost thing that can't be pickled, and that thing."""
    trail: list[str] = []
    seen: set[int] = set()
    for _ in range(DEEPEST):
        seen.add(id(found))
        for label, part in _parts(found):
            if id(part) not in seen and not _sendable(part, dumps):
                if label:
                    trail.append(label)
                found = part
                break
        else:
            break
    return trail, found


def _sendable(part: object, dumps: Dumps) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True


def _parts(whole: Any) -> Iterator[tuple[str, object]]:
    """Yield what is pickled along with `whole`, each with how a person would name it."""
    if isinstance(whole, types.FunctionType):
        yield from _parts_of_function(whole)
    elif isinstance(whole, types.MethodType):
        yield f"{_kind(whole.__self__)}, whose method {whole.__name__} it calls", whole.__self__
        yield "", whole.__func__
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


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"its variable {name}", _content(cell)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"the global variable {name}", function.__globals__[name]
    yield from (("a default of its arguments", part) for part in function.__defaults__ or ())
    yield from ((f"its attribute {name}", part) for name, part in function.__dict__.items())


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


def _name(part: Any) -> str:
    """Return how a stage or a function calls itself; "" for what has no name of its own."""
    if isinstance(part, types.FunctionType):
        return f"function {part.__qualname__} ({part.__code__.co_filename}:{part.__code__.co_firstlineno})"
    if isinstance(kind := getattr(part, "kind", None), str) and isinstance(name := getattr(part, "name", None), str):
        return f"stage {name!r} (.{kind})"
    return ""


def _kind(part: object) -> str:
    kind = type(part)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
