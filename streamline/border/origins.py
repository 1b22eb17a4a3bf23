"""Classes and functions that went to a host by value, on their way back: their originals are where they came from.

What a script, a notebook or a module that a host can't import defines goes there by value (cloudpickle). On the way
back it goes by name, and where nothing has that name, by value again. That is cheaper than cloudpickle's own way back,
and does the original no harm: cloudpickle, too, finds a class again that it has sent, but then sets all its attributes
to what they were when it was sent.
"""

from __future__ import annotations

import pickle
import sys
from types import FunctionType
from typing import Any

from streamline.border.recreating import RecreatingPickler, dumps

__all__ = ["ValuePickler"]


class ValuePickler(RecreatingPickler):
    """Pickles whatever cloudpickle can; what has no other name here than elsewhere, by that name."""

    definitions_only = True

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type | FunctionType):
            module, name = thing.__module__, thing.__qualname__
            if isinstance(module, str) and "<locals>" not in name and _by_name(module, name) is not thing:
                return _original, (module, name, _code(thing), dumps(thing))
        return super().reducer_override(thing)


def _original(module: str, qualname: str, code: bytes | None, value: bytes) -> Any:
    found = _by_name(module, qualname)
    if isinstance(found, type | FunctionType) and _code(found) == code:
        return found
    return pickle.loads(value)


def _by_name(module: str, qualname: str) -> Any:
    """Return what has this name in a module that is there; None: nothing."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _code(thing: type | FunctionType) -> bytes | None:
    """Return what tells functions of one name apart; None: it is a class."""
    return thing.__code__.co_code if isinstance(thing, FunctionType) else None
