"""Iterables that have a state of their own: `state_dict` and `load_state_dict`, or `get_state` and `set_state`.

The first pair is of PyTorch's world (Hugging Face's IterableDataset, torchdata's StatefulDataLoader and nodes.Loader:
on the iterable, loaded before it is iterated), the second grain's (on the iterator). Not every state is right, so:

- A state is used only if it differs from the one before and from the next one, some items later: torchdata starts over
  at a state taken at the end, and some versions of Hugging Face's stop counting after a resume (datasets issue 8308).
- An object is loaded before any other use (torchdata's Loader forgets what was loaded after a call of `state_dict`),
  and isn't reused: its next iteration would begin there.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from streamline.core.item_codec import state_from_json, state_text
from streamline.core.state import Json
from streamline.errors import PlanError, printable

SNAPSHOT_EVERY = 16
"""Items between two states; a resume iterates again over up to twice as many."""

PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


@runtime_checkable
class Renewable(Protocol):
    """An iterable that keeps its place between iterations, and can also be iterated from its start."""

    def anew(self) -> Iterable[Any] | AsyncIterable[Any]: ...


class Foreign:
    """Gets and loads the state of another library's iterable."""

    def __init__(self, owner: Any, get: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.kind = type(owner).__name__
        self._get = get
        self._load = load

    def state(self) -> str:
        return state_text(self._get(), f"{self.kind}'s state")

    def load(self, state: Json) -> None:
        self._load(state_from_json(state))


def foreign(candidate: Any) -> Foreign | None:
    """Return the access to the state of an iterable or iterator; None: it has none.

    Raises:
      PlanError: it is known to lose items: a Hugging Face dataset that shuffles in a buffer.
    """
    for get, load in PAIRS:
        getter, setter = getattr(candidate, get, None), getattr(candidate, load, None)
        if callable(getter) and callable(setter):
            if _buffers(candidate):
                raise PlanError(
                    f"{type(candidate).__name__} shuffles in a buffer that its state leaves out, so a resume would "
                    "lose items: leave its .shuffle out, and put .shuffle(window=) after from_iterable; or have the "
                    "factory return iter(...) of it: then it has no state, and a resume iterates from the start"
                )
            return Foreign(candidate, getter, setter)
    return None


def _buffers(part: Any) -> bool:
    """Whether there is a shuffle buffer among the parts of a Hugging Face dataset."""
    return type(part).__name__ == "BufferShuffledExamplesIterable" or any(map(_buffers, parts_of(part)))


def parts_of(part: Any) -> list[Any]:
    """Return what a Hugging Face dataset, or a part of one, reads."""
    one = getattr(part, "ex_iterable", getattr(part, "_ex_iterable", None))
    inner = [one, *(getattr(part, "ex_iterables", None) or ())]
    return [part for part in inner if part is not None]


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
