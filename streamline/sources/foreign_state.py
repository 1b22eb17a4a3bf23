"""Iterables that have a state of their own: `state_dict` and `load_state_dict`, or `get_state` and `set_state`.

The first pair is what PyTorch's world has (Hugging Face's IterableDataset, torchdata's StatefulDataLoader and
nodes.Loader: on the iterable, loaded before it is iterated), the second grain's (on the iterator). By experiment, not
every state is right, so:

- A state is taken after an item, and used only once it differs from the one before and from the next one, some items
  later: torchdata starts over at a state taken at the end, and some versions of Hugging Face's stop counting after a
  resume (datasets issue 8308).
- An object is loaded before any other use (torchdata's Loader forgets what was loaded after a call of `state_dict`),
  and an object that was loaded isn't reused: its next iteration would begin there.
"""

from __future__ import annotations

import base64
import json
import math
import warnings
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from streamline.core.state import Json
from streamline.errors import PlanError, PlanTypeError, printable

__all__ = ["Foreign", "Marks", "Renewable", "as_text", "decoded", "encoded", "foreign"]

SNAPSHOT_EVERY = 16
"""Items between two states; a resume iterates again over up to twice as many."""

PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))

BYTES, TUPLE = "__bytes__", "__tuple__"
"""Keys of an object with one entry that stands for bytes, or for a tuple."""


@runtime_checkable
class Renewable(Protocol):
    """An iterable that keeps its place between iterations, and can also be iterated from its start."""

    def anew(self) -> Iterable[Any] | AsyncIterable[Any]:
        """Return its items from the start."""
        ...


class Foreign:
    """Gets and loads the state of another library's iterable."""

    def __init__(self, owner: Any, get: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.kind = type(owner).__name__
        self._get = get
        self._load = load

    def state(self) -> str:
        """Return the state as JSON text.

        Raises:
          PlanTypeError: an entry isn't JSON; the message names it.
        """
        return encoded(self._get(), f"{self.kind}'s state")

    def load(self, state: Json) -> None:
        """Load a state that `state` has returned."""
        self._load(decoded(state))


def foreign(candidate: Any) -> Foreign | None:
    """Return the access to the state of an iterable or iterator; None: it has none.

    Raises:
      PlanError: it is known to lose items: a Hugging Face dataset that shuffles in a buffer.
    """
    for get, load in PAIRS:
        getter, setter = getattr(candidate, get, None), getattr(candidate, load, None)
        if callable(getter) and callable(setter):
            if _buffers(getattr(candidate, "_ex_iterable", None)):
                raise PlanError(
                    f"{type(candidate).__name__} shuffles in a buffer that its state leaves out, so a resume would "
                    "lose items: leave its .shuffle out, and put .shuffle(window=) after from_iterable; or have the "
                    "factory return iter(...) of it: then it has no state, and a resume iterates from the start"
                )
            return Foreign(candidate, getter, setter)
    return None


def _buffers(part: Any) -> bool:
    """Whether there is a shuffle buffer among the parts of a Hugging Face dataset."""
    if part is None:
        return False
    inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
    return type(part).__name__ == "BufferShuffledExamplesIterable" or any(map(_buffers, inner))


class Marks:
    """The states taken of an iterable, and the last one that is known to be right.

    Attributes:
      mark: JSON text of the state that a resume loads; None: it iterates from the start.
      at: items before it.
    """

    def __init__(self, source: Foreign, mark: str | None, at: int) -> None:
        self._source = source
        self.mark = mark
        self.at = at
        self._last: tuple[str | None, int] = mark, at
        self._moved = False
        self._warned = False
        self.next = at + 1

    def take(self, count: int) -> None:
        """Take the state after item `count`; use the one before it if both differ from their predecessors."""
        self.next = count + SNAPSHOT_EVERY
        text = self._source.state()
        last, at = self._last
        moved = text != last
        if moved and self._moved:
            self.mark, self.at = last, at
        if not moved and not self._warned:
            self._warned = True
            warnings.warn(
                f"the state of {printable(self._source.kind)} is the same after items {at} and {count}, so it "
                f"can't be where it stands: a resume iterates on from item {self.at}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._last, self._moved = (text, count), moved


# States as JSON -------------------------------------------------------------------------------------------------------


def encoded(state: Any, where: str) -> str:
    """Return a state as JSON text, bytes and tuples wrapped.

    Raises:
      PlanTypeError: as `Foreign.state`.
    """
    return as_text(_wrapped(state, where))


def as_text(state: Json) -> str:
    """Return the text of a state's JSON; equal states have equal texts."""
    return json.dumps(state, separators=(",", ":"))


def decoded(state: Json) -> Any:
    """Return the state of its JSON."""
    if isinstance(state, list):
        return [decoded(item) for item in state]
    if not isinstance(state, dict):
        return state
    if len(state) == 1:
        if BYTES in state:
            return base64.b64decode(state[BYTES])
        if TUPLE in state:
            return tuple(decoded(item) for item in state[TUPLE])
    return {key: decoded(item) for key, item in state.items()}


def _wrapped(value: Any, where: str) -> Json:
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is list:
        return [_wrapped(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if type(value) is tuple:
        return {TUPLE: [_wrapped(item, f"{where}[{at}]") for at, item in enumerate(value)]}
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, dict) and all(type(key) is str for key in value) and not {BYTES, TUPLE} & set(value):
        return {key: _wrapped(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise PlanTypeError(
        f"{where} is {_named(value)}, which JSON can't hold, and a snapshot is JSON: have the factory return something "
        "that keeps it elsewhere (shuffle with .shuffle(window=), say), or iter(...) of it: then it has no state, and "
        "a resume iterates from the start"
    )


def _named(value: Any) -> str:
    if isinstance(value, dict):
        keys = [key for key in value if type(key) is not str or key in (BYTES, TUPLE)]
        return f"a dict with the key {keys[0]!r}"
    return f"{value!r}" if isinstance(value, float) else f"a {type(value).__module__}.{type(value).__qualname__}"
