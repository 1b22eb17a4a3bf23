"""Detects that a factory returns the same single-use iterator twice.

A second pass, a second shard or a resume calls the factory again. If it returns the iterator of an earlier call, items
would be missing without an error. So each object that was read is recorded, by identity, as long as it lives, and
looked up when a factory returns it; also what `map`, `zip`, `islice`, `csv.reader` and generator expressions read. Not
seen: what a generator function or an iterator class reads inside.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from inspect import isgeneratorfunction
from itertools import count, cycle, repeat
from types import CodeType, FunctionType, ModuleType
from typing import Any

from streamline.core.forks import ForkSafeLock
from streamline.errors import PlanError

READER_MODULES = ("builtins", "itertools", "_csv")
"""Modules whose iterators read others."""

ENDLESS_ITERATORS = (count, cycle, repeat)
"""Allowed: they may number the items of several passes."""

RETURN_SELF = (lambda self: self).__code__.co_code

LOCK = ForkSafeLock()

USED: weakref.WeakValueDictionary[int, Use] = weakref.WeakValueDictionary()
"""The last use of each object that may come again, by its identity."""

MOST_SEARCHED = 10_000
"""Objects that a factory refers to, directly or not, among which one is looked for, the nearest first."""

SIZED_CONTAINERS = (list, tuple, dict, set, frozenset)
"""Containers whose length is asked before what they hold is."""


class Use:
    """The use of what a factory returned in one call, from its opening to its close.

    Args:
      function: whose factory it is, for a message: "from_iterable".
      shared: the factory may return the same object at any time: its users share the items.
    """

    def __init__(self, function: str, factory: object, *, shared: bool = False) -> None:
        self._function, self._factory, self._shared = function, factory, shared
        self._open, self._loaded = True, False
        self._read: list[object] = []
        self._kept: dict[int, object] = {}

    def stateful(self, owner: object, loads: bool) -> None:
        """Begin to use an object whose state is taken, perhaps loaded; a PlanError if it belongs to another use."""
        if self._is_taken(owner, loads or (isinstance(owner, Iterator | AsyncIterator) and _is_read_once(owner))):
            raise PlanError(
                f"{self._function}'s factory returned the same {type(owner).__name__} again, which keeps where it "
                "stands in itself: have it make a new one at each call, from what it is made of (of Hugging Face: "
                f"{self._function}(lambda: load_dataset(..., streaming=True)))"
            )
        self._loaded = self._loaded or loads

    def iterated(self, iterable: Any, make: Callable[[Any], Any]) -> Any:
        """Begin to use the iterator of what the factory returned, and those that it reads; `make`: `iter` or `aiter`.

        Raises:
          PlanError: an earlier call returned it, and it can be read once; or it is in use.
        """
        if isinstance(iterable, Iterator | AsyncIterator) and not _begins(iterable, isgeneratorfunction):
            self._check(iterable, iterable)  # before `iter`, which may set it back
        iterator = make(iterable)
        for one in [] if self._shared else _read_by(iterator):
            if not _begins(one, callable):  # else it may have been set back
                self._check(iterator, one)
        return iterator

    def _check(self, iterator: object, inner: object) -> None:
        if self._shared or not self._is_taken(inner, _is_read_once(inner)):
            return
        kind = type(inner).__name__
        name = getattr(inner, "__name__", None) if kind.endswith("generator") else None
        make = "make()" if name is None or name.startswith("<") else f"{name}(...)"
        shown = f"the same {kind}" if name is None else f"the same {kind} {name}"
        over = "" if inner is iterator else f"a {type(iterator).__name__} over "
        raise PlanError(
            f"{self._function}'s factory returned {over}{shown} again, and an iterator is read once: have it make a "
            f"new one at each call, {self._function}(lambda: {make}), not the one that was made before. What can't be "
            "made again can be kept: sl.from_items(list(it))"
        )

    def _is_taken(self, owner: object, once: bool) -> bool:
        """Whether an object belongs to an earlier use; if it doesn't, it belongs to this one."""
        with LOCK:
            earlier = USED.get(id(owner))
            if earlier is self:
                return False
            if earlier is not None and (once or earlier._open or earlier._loaded):
                return True
            USED[id(owner)] = self
            self._read.append(owner)
            return False

    def close(self) -> None:
        """End the use; the caller has dropped its references to the objects.

        They stay recorded as long as they live; what can't have a weak reference (`map`, `zip`, a list's iterator) is
        kept as long as the factory lives, if the factory refers to it.
        """
        self._open = False
        factory, self._factory = self._factory, None
        for owner in self._read:
            key = id(owner)
            try:
                weakref.finalize(owner, self._forget, key).atexit = False
            except TypeError:
                if not _refers_to(factory, owner):
                    self._forget(key)
                    continue
                self._kept[key] = owner
                with suppress(TypeError):
                    weakref.finalize(factory, self._forget, key).atexit = False
        self._read.clear()

    def _forget(self, key: int) -> None:
        self._kept.pop(key, None)
        if USED.get(key) is self:
            del USED[key]


def _refers_to(factory: object, wanted: object) -> bool:
    """Whether a factory refers to an object, which it may return again: by variables, arguments, attributes, items."""
    found: list[Any] = [factory, getattr(type(factory), "__call__", None)]  # noqa: B004
    names, seen = set[str](), {id(None), *map(id, found)}
    for one in found:  # it grows meanwhile
        kind, held = type(one), list[Any]()
        if kind is FunctionType:
            names.update(_names(one.__code__))
            held = [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
        elif not issubclass(kind, type | ModuleType | Use) and not (
            kind in SIZED_CONTAINERS and len(one) > MOST_SEARCHED
        ):
            held = gc.get_referents(one)
        if issubclass(kind, FunctionType | ModuleType):  # of all its names, those in the code
            variables = one.__globals__ if kind is FunctionType else vars(one)
            held += [variables[name] for name in names if name in variables]
        if any(each is wanted for each in held):
            return True
        fresh = {id(each): each for each in held if id(each) not in seen}
        seen.update(fresh)
        found += [*fresh.values()][: MOST_SEARCHED - len(found)]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _read_by(iterator: object) -> list[object]:
    """Return an iterator, and those that it reads."""
    found = [iterator]
    for one in found:  # it grows meanwhile
        frame = getattr(one, "gi_frame", None) or getattr(one, "ag_frame", None)
        held: list[object] = []
        if frame is not None and ".0" in frame.f_code.co_varnames:  # what an expression's first `in` reads
            held = [frame.f_locals[".0"]]
        elif type(one).__module__ in READER_MODULES and frame is None:
            held = gc.get_referents(one)
            held += [part for each in held if type(each) is tuple for part in each]  # `map` and `zip` hold a tuple
        iterators = [
            it for it in held if isinstance(it, Iterator | AsyncIterator) and not isinstance(it, ENDLESS_ITERATORS)
        ]
        found += [it for it in iterators if not any(it is known for known in found)]
    return found


def _begins(iterator: object, how: Callable[[Any], bool]) -> bool:
    """Whether its `iter` is Python code, which may set it back, and of a kind."""
    begin = getattr(type(iterator), "__iter__", None) or getattr(type(iterator), "__aiter__", None)
    return isinstance(begin, FunctionType) and how(begin)


def _is_read_once(iterator: object) -> bool:
    """Whether `iter` of it can't set it back: it's C code, or `return self`."""
    return not _begins(iterator, lambda begin: begin.__code__.co_code != RETURN_SELF)


def check_not_over(function: str, stream: object) -> None:
    """Raise a PlanError if an async generator has ended."""
    if getattr(stream, "ag_frame", stream) is None:
        raise PlanError(
            f"{function}'s async generator {getattr(stream, '__name__', '')} has ended: an earlier opening read it, "
            f"and closed it. Give the function that makes a new one: {function}(lambda: connect())"
        )
