"""Classes that the other end can't import: of a script, a notebook, a function's inside.

cloudpickle sends such a class by value with every pickle, and writes all its attributes anew into the class that the
other end knows already: the running's own class would get copies of its methods, with globals of their own. So here a
class is sent once a link, as a definition, and mentioned by the identity that cloudpickle gives it. An end that knows
the identity, because the class is its own or came with the plan, takes what it has and never looks at the definition.
"""

from __future__ import annotations

import copyreg
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle
from cloudpickle import cloudpickle as inner

from streamline.border.recreating import RecreatingPickler

__all__ = ["ByValue", "Told", "recall", "recalling"]


Callback = Callable[[Any], Any]


class Told:
    """What one end has told the other about classes."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._fresh: dict[str, bytes] = {}
        self._identities: WeakKeyDictionary[type, str] = WeakKeyDictionary()

    def fresh(self) -> dict[str, bytes]:
        """Return definitions since the last call, by identity; they must cross before what was pickled with them."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def mention(self, cls: type) -> str | None:
        """Return the identity of a class that must be defined, and define it; None: it can be imported."""
        identity = self._identities.get(cls)
        if identity is None:
            if inner._should_pickle_by_reference(cls):
                return None
            identity = self._identities[cls] = inner._get_or_create_tracker_id(cls)
        if identity not in self._known:
            self._known.add(identity)
            try:
                file = io.BytesIO()
                ByValue(file, self, copyreg.dispatch_table, None, whole=cls).dump(cls)
            except BaseException:
                self._known.discard(identity)
                raise
            self._fresh[identity] = file.getvalue()
        return identity


class ByValue(RecreatingPickler):
    """A pickler of everything, classes mentioned.

    Args:
      table: how to reduce what neither pickle nor cloudpickle should.
      whole: the one class that is not mentioned but written down.
    """

    def __init__(
        self,
        file: Any,
        told: Told,
        table: Mapping[Any, Any],
        callback: Callback | None,
        whole: type | None = None,
    ) -> None:
        self.dispatch_table = {**self._dispatch_table, **table}  # before __init__, which looks for it
        super().__init__(file, 5, callback)
        self.definitions_only = whole is None  # a lock in an item is its user's mistake
        self._told = told
        self._whole = whole

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj is not self._whole:
            identity = self._told.mention(obj)
            if identity is not None:
                return recall, (identity,)
        return super().reducer_override(obj)


class _Here(threading.local):
    definitions: Mapping[str, bytes] = {}
    keep: dict[str, type] = {}  # noqa: RUF012 - never written to: each `recalling` brings its own


_here = _Here()


class recalling:  # noqa: N801 - read as a statement: with recalling(...)
    """Unpickle with these definitions at hand; classes made of them are kept in `keep`."""

    def __init__(self, definitions: Mapping[str, bytes], keep: dict[str, type]) -> None:
        self._now = definitions, keep

    def __enter__(self) -> None:
        self._before = _here.definitions, _here.keep
        _here.definitions, _here.keep = self._now

    def __exit__(self, *_: object) -> None:
        _here.definitions, _here.keep = self._before


def recall(identity: str) -> type:
    """Return the class of this identity: the one that this process has, else as defined by the other end."""
    known: type | None = inner._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if known is not None:
        return known
    made: type = cloudpickle.loads(_here.definitions[identity])
    _here.keep[identity] = made
    return made
