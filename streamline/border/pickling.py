"""Items to bytes and back: a pickle, and beside it the memory of arrays, untouched.

Plain pickle, in C, is tried first. Where it fails, or speaks of a module that the other end doesn't have, cloudpickle
takes over for the rest of the link: a link's items are mostly of one kind.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamline.border.packed import PackingError
from streamline.border.reducers import reducers

if TYPE_CHECKING:
    from streamline.border.classes import Told

__all__ = ["BESIDE", "Pickled", "Pickling"]


BESIDE = 1 << 12
"""Bytes of a buffer from which on it travels beside the pickle: for smaller ones copying costs less than keeping
count (measured by bench/buffer_threshold.py)."""


SEARCHED = 1 << 14
"""Bytes of a pickle that is searched for the names of modules; a longer one costs more than asking the pickler."""


BUILT_IN = frozenset([str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, np.ndarray])
"""Types of most of what a pickler remembers; they are everywhere."""


DEPTH = 8
"""Containers within containers that are searched for what can't be pickled."""


class Pickled(NamedTuple):
    """Items as bytes.

    Attributes:
      pieces: of the pickle. A large `bytes` among the items is a piece, itself: nothing was copied.
      buffers: beside it; the items' own memory.
    """

    pieces: list[bytes]
    buffers: list[memoryview]


class Pickling:
    """Packs the items of one end of a link, and unpacks those of the other."""

    def __init__(self) -> None:
        self._told: Told | None = None  # once cloudpickle is needed
        self._definitions: dict[str, bytes] = {}
        self._classes: dict[str, type] = {}

    def dumps(self, items: Sequence[Any]) -> Pickled:
        """Return the pickle, and the buffers beside it.

        Raises:
          PackingError: one of them can't be pickled.
        """
        if type(items) is not list:
            items = list(items)
        if self._told is None:
            with suppress(Exception):  # whatever a class's own code raises: the second try, or the search, says what
                pickled, memo = _plain(items)
                if not _speaks_of_others(pickled, memo):
                    return pickled
        try:
            return self._by_value(items)
        except Exception as error:
            self._blame(items)
            raise PackingError(0, type(items).__name__) from error

    def loads(self, data: bytes | memoryview, buffers: Sequence[memoryview]) -> list[Any]:
        """Return the items; arrays are views of the buffers.

        Raises:
          What unpickling raises.
        """
        with self._recalling():
            items: list[Any] = pickle.loads(data, buffers=buffers)
        return items

    def fresh(self) -> Mapping[str, bytes]:
        """Return the definitions of classes that must cross before what was pickled since the last call."""
        return self._told.fresh() if self._told is not None else {}

    def define(self, definitions: Mapping[str, bytes]) -> None:
        """Take the other end's definitions; they are looked at when they are needed."""
        self._definitions.update(definitions)

    def _recalling(self) -> Any:
        if not self._definitions:
            return nullcontext()
        from streamline.border.classes import recalling

        return recalling(self._definitions, self._classes)

    def _by_value(self, items: Sequence[Any]) -> Pickled:
        from streamline.border.classes import ByValue, Told

        told = self._told or Told()
        into = _Into()
        ByValue(into, told, reducers(), into.takes).dump(items)
        self._told = told
        return into.pickled

    def _blame(self, items: Sequence[Any]) -> None:
        """Raise for the first item that can't be pickled."""
        for index, item in enumerate(items):
            error = self._failure(item)
            if error is not None:
                culprit, why = self._culprit(item, error, DEPTH)
                raise PackingError(index, type(culprit).__name__) from why

    def _failure(self, thing: Any) -> Exception | None:
        try:
            self._by_value([thing])
        except Exception as error:
            return error
        return None

    def _culprit(self, thing: Any, error: Exception, depth: int) -> tuple[Any, Exception]:
        """Return the innermost part that can't be pickled, and why."""
        for part in _parts(thing) if depth else ():
            why = self._failure(part)
            if why is not None:
                return self._culprit(part, why, depth - 1)
        return thing, error


class _Into:
    """What a pickler writes into."""

    def __init__(self) -> None:
        self.pickled = Pickled([], [])

    def write(self, piece: bytes | bytearray | pickle.PickleBuffer) -> None:
        """Keep a piece: a frame of the pickle, or a large object that a frame would have to copy."""
        self.pickled.pieces.append(piece if type(piece) is bytes else bytes(piece))

    def takes(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer, beside the pickle; True: it's small, and part of it."""
        raw = buffer.raw()
        if raw.nbytes < BESIDE:
            return True
        self.pickled.buffers.append(raw)
        return False


def _plain(items: Sequence[Any]) -> tuple[Pickled, Callable[[], dict[int, tuple[int, Any]]]]:
    into = _Into()
    pickler = pickle.Pickler(into, 5, buffer_callback=into.takes)
    pickler.dispatch_table = reducers()
    pickler.dump(items)
    return into.pickled, pickler.memo.copy


def _speaks_of_others(pickled: Pickled, memo: Callable[[], dict[int, tuple[int, Any]]]) -> bool:
    """Whether a pickle refers to a module that only this process has: its script, or one registered with cloudpickle.

    A short pickle is searched for the name; if it is no more than a text that contains it, cloudpickle does what pickle
    would have. That is slow for a long one: 1 ns a byte. There, what the pickler remembers is looked at.
    """
    cloudpickle = sys.modules.get("cloudpickle")
    names = ["__main__", *(cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ())]
    if len(pickled.pieces) == 1 and len(pickled.pieces[0]) <= SEARCHED:
        return any(name.encode() in pickled.pieces[0] for name in names)
    modules = {getattr(thing, "__module__", None) for _, thing in memo().values() if type(thing) not in BUILT_IN}
    return any(f"{module}.".startswith(f"{name}.") for module in modules for name in names)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif is_dataclass(thing) and not isinstance(thing, type):
        yield from (getattr(thing, field.name) for field in fields(thing))
    else:
        yield from getattr(thing, "__dict__", {}).values()
