"""What a factory must not return twice: objects that keep their place in themselves.

A second pass, a second shard or a resume calls the factory again. If it then returns the iterator of an earlier call,
that goes on where it stood: the pass is empty, or lacks its beginning, without an error. So every use is on record here
as long as the object lives, and is compared with what the factory returns next. An object that nobody else holds is not
kept alive for that: of most there is a weak reference; of those that can't have one (`map`, `zip`, a list's iterator),
a strong one, as long as the factory lives, where the count of references says that somebody holds it.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from itertools import count, cycle, repeat
from types import FunctionType
from typing import Any

from streamline.errors import PlanError

__all__ = ["Use", "check_not_over"]

READERS = ("builtins", "itertools", "_csv")
"""Modules whose iterators read others: `map`, `zip`, `islice`, `csv.reader`."""

ENDLESS = (count, cycle, repeat)
"""What numbers the items of several passes, perhaps, and is no reason to refuse them."""

DEPTH = 4
"""Iterators inside one another that are looked at."""


class Use:
    """The use of what a factory returned in one call, from its opening to its close.

    Args:
      function: whose factory it is, for a message: "from_iterable".
      factory: as long as it lives, it may return the same object again.
      shared: it may do so at any time: its users share what there is to read.
    """

    def __init__(self, function: str, factory: object, *, shared: bool = False) -> None:
        self._function = function
        self._shared = shared
        self._factory = factory
        self._records: list[_Record] = []

    def stateful(self, owner: object, loads: bool) -> None:
        """Begin to use an object whose state is taken and loaded: iterated again it begins at its start, unless it was
        loaded.

        Raises:
          PlanError: its place belongs to another use.
        """
        once = isinstance(owner, Iterator | AsyncIterator) and _read_once(owner, own=True) is True
        if self._began(owner, loads, once=once):
            raise PlanError(
                f"{self._function}'s factory returned the same {type(owner).__name__} again, which keeps where it "
                "stands in itself: have it make a new one at each call (of a Hugging Face dataset, "
                "copy.deepcopy(dataset))"
            )

    def iterated(self, iterable: Any, make: Callable[[Any], Any]) -> Any:
        """Begin to use the iterator of what the factory returned, and those that it reads; `make`: `iter` or `aiter`.

        Raises:
          PlanError: an earlier call returned it, and it can be read once; or it is in use.
        """
        if isinstance(iterable, Iterator | AsyncIterator) and not self._shared:
            self._check(iterable, own=True)
        iterator = make(iterable)
        if iterator is not iterable and not self._shared:
            self._check(iterator, own=False)
        return iterator

    def _check(self, iterator: object, *, own: bool) -> None:
        for inner in _read_by(iterator):
            once = _read_once(inner, own=own)
            if once is not None and self._began(inner, loads=False, once=once):
                raise PlanError(self._same(iterator, inner))
            own = False

    def _began(self, owner: object, loads: bool, *, once: bool) -> bool:
        """Put the use on record; whether the object belongs to an earlier one."""
        with LOCK:
            before = USED.get(id(owner))
            if before is not None and before in self._records:
                return False
            if before is not None and before.is_of(owner) and (before.open or before.loaded or loads or once):
                return True
            self._records.append(_Record(owner, loads))
            return False

    def _same(self, iterator: object, inner: object) -> str:
        kind = type(inner).__name__
        name = getattr(inner, "__name__", None) if kind.endswith("generator") else None
        make = "make()" if name is None or name.startswith("<") else f"{name}(...)"
        shown = f"the same {kind}" if name is None else f"the same {kind} {name}"
        over = "" if inner is iterator else f"a {type(iterator).__name__} over "
        return (
            f"{self._function}'s factory returned {over}{shown} again, and an iterator is read once: have it make a "
            f"new one at each call, {self._function}(lambda: {make}), not the one that was made before. What can't be "
            "made again can be kept: sl.from_items(list(it))"
        )

    def close(self) -> None:
        """Say that it is read no more; the caller holds no reference to it by now."""
        records, self._records = self._records, []
        while records:
            records.pop(0).close(self._factory)


class _Record:
    """The use of one object. It lives as long as its `Use`, and then as long as the object may come again."""

    def __init__(self, owner: object, loaded: bool) -> None:
        self.open = True
        self.loaded = loaded
        self._owner: Any = owner
        self._weak: weakref.ref[Any] | None = None
        USED[id(owner)] = self

    def is_of(self, owner: object) -> bool:
        return (self._owner if self._weak is None else self._weak()) is owner

    def close(self, factory: object) -> None:
        self.open = False
        keeper = self._owner
        try:
            self._weak = weakref.ref(keeper)
            self._owner = None
        except TypeError:
            del keeper
            if self.references() <= ALONE:
                return
            keeper = factory
        with suppress(TypeError):
            weakref.finalize(keeper, self._forget).atexit = False  # until then, that holds this record

    def references(self) -> int:
        """Return how many references there are to the object: this record's, the call's, and others'."""
        return sys.getrefcount(self._owner)

    def _forget(self) -> None:
        self._owner = None


def check_not_over(function: str, stream: object) -> None:
    """Insist on an async generator that has not ended yet.

    Raises:
      PlanError: it was read, or closed, before.
    """
    if getattr(stream, "ag_frame", stream) is None:
        raise PlanError(
            f"{function}'s async generator {getattr(stream, '__name__', '')} has ended: an earlier opening read it, "
            f"and closed it. Give the function that makes a new one: {function}(lambda: connect())"
        )


def _read_by(iterator: object, depth: int = DEPTH) -> Iterator[object]:
    """Yield an iterator, and those that it reads."""
    yield iterator
    frame = getattr(iterator, "gi_frame", None) or getattr(iterator, "ag_frame", None)
    inner: list[object] = []
    if frame is not None:
        inner = [frame.f_locals[".0"]] if ".0" in frame.f_code.co_varnames else []  # what an expression's `in` reads
    elif type(iterator).__module__ in READERS:
        held = gc.get_referents(iterator)
        inner = [*held, *(one for each in held if type(each) is tuple for one in each)]  # `map` and `zip` hold a tuple
    for one in inner if depth else ():
        if isinstance(one, Iterator | AsyncIterator) and not isinstance(one, ENDLESS):
            yield from _read_by(one, depth - 1)


def _read_once(iterator: object, *, own: bool) -> bool | None:
    """Whether `iter()` of it can't begin anew; False: it may, when it is in use no more; None: it may at any time.

    Args:
      own: it is what the factory returned; else an iterable made it, and may make it ready for another pass.
    """
    kind = type(iterator)
    begins: Any = getattr(kind, "__iter__", None) or getattr(kind, "__aiter__", None)
    if not isinstance(begins, FunctionType):
        return True
    code = begins.__code__
    if not own or code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR):
        return None
    return not code.co_names and not code.co_freevars  # `return self`: it touches nothing that it could set back


LOCK = threading.Lock()

USED: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
"""By identity."""

ALONE = _Record(iter(()), loaded=False).references()
"""References to an object that its record alone holds, as this Python counts them."""
