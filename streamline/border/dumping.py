"""The far end of the states' way across a border; `streamline.border.columns` says what crosses, and why so."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import count
from typing import Any

from streamline.border.origins import ValuePickler
from streamline.core.choices import LogSegment
from streamline.core.flow import Chunk
from streamline.core.state import State, States, trimmed
from streamline.errors import PlanTypeError

__all__ = ["NOTHING", "Body", "Dumper", "stretch_there"]


Body = tuple[States, State | None]


NOTHING, PROGRESS = b"\0", b"\1"
"""How what needs no loading begins: whether progress is in it has to be known at once."""


class Dumper:
    """What a worker's states leave its host through, in order. One a running of a worker.

    Args:
      choosing: whether a stage of the worker chooses an order. Then the state at its opening has to be dumped first.
    """

    def __init__(self, choosing: bool) -> None:
        self._log = _Told() if choosing else None
        self._by_value = False  # once something was met that plain pickle can't have

    def dump(self, chunk: Chunk[Any]) -> bytes:
        """Return the states of a chunk, as they are now.

        Raises:
          PlanTypeError: there is one that can't be pickled; the message names its stage.
        """
        count = len(chunk.items)
        body: Body = trimmed(chunk.states, 0, count) if count else (), chunk.after
        dumped = self._dumped(body)
        if self._log is not None:
            return dumped
        return (NOTHING if chunk.after is None else PROGRESS) + dumped

    def dump_state(self, state: State) -> bytes:
        """Return one state: that of the flow at its opening.

        Raises:
          PlanTypeError: as `dump`.
        """
        return self._dumped(state)

    def _dumped(self, body: Body | State) -> bytes:
        if not self._by_value:
            try:
                return self._pickled(body)
            except Exception:
                self._by_value = True  # a class of the main program or of a function, perhaps
        try:
            return self._pickled(body)
        except Exception as error:
            if _picklable(body):
                raise
            raise PlanTypeError(_fault(body)) from error

    def _pickled(self, body: Body | State) -> bytes:
        if self._log is not None:
            return self._log.dump(body, partial(_ValuePickler if self._by_value else _Pickler, protocol=5))
        if not self._by_value:
            return pickle.dumps(body, 5)
        buffer = BytesIO()
        ValuePickler(buffer, 5).dump(body)
        return buffer.getvalue()


class _Known(weakref.ref[LogSegment]):
    """What the near end knows of a stretch.

    Attributes:
      identity: of the stretch.
      key: the number by which both ends call it.
      flow: likewise, of the flow that it is of: the key of its first stretch.
      told: as `LogSegment.news` says.
      linked: whether the near end knows what comes behind it.
      met: whether it is in the message that is being made.
    """

    __slots__ = ("flow", "identity", "key", "linked", "met", "told")

    key: int
    flow: int

    def __init__(self, stretch: LogSegment, gone: Callable[[Any], None]) -> None:
        super().__init__(stretch, gone)  # type: ignore[call-arg]  # as it is documented
        self.identity = id(stretch)
        self.told: Any = None
        self.linked = self.met = False


class _Told:
    """The logs of choices, as far as the near end has been told of them."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by identity
        self._gone: list[_Known] = []  # appended to by the garbage collector, in any thread
        self._last: dict[str, LogSegment] = {}  # of each stage: kept, so that what comes behind it is noticed
        self._met: list[LogSegment] = []
        self._keys = count()

    def dump(self, body: Body | State, kind: Callable[[BytesIO], _Pickler]) -> bytes:
        """Return `body`, and what the near end has to know of the stretches in it."""
        buffer = BytesIO()
        self._met = []
        try:
            for last in list(self._last.values()):
                self._follow(last)
            pickler = kind(buffer)
            pickler.key_of = self.key_of
            pickler.dump(body)
            told = [self._dump_news(pickler, stretch) for stretch in self._met]  # which grows meanwhile
            pickler.dump(self._forgotten())
        finally:
            for stretch in self._met:
                self._known[id(stretch)].met = False
        for known, news, linked in told:  # now that it has worked
            known.told, known.linked = news, linked
        return buffer.getvalue()

    def key_of(self, stretch: LogSegment) -> int:
        """Return the number of a stretch that is in the message."""
        return self._meet(stretch, None).key

    def _follow(self, stretch: LogSegment) -> None:
        """Let all stretches from one on be in the message: whoever holds a mark at the near end needs them."""
        known = self._meet(stretch, None)
        while (later := stretch.later) is not None:
            stretch, known = later, self._meet(later, known.flow)
        last = self._last.get(stretch.name)
        if last is None or known.key > self._known[id(last)].key:  # another pass may have begun
            self._last[stretch.name] = stretch

    def _meet(self, stretch: LogSegment, flow: int | None) -> _Known:
        known = self._known.get(id(stretch))
        if known is None or known() is not stretch:
            known = self._known[id(stretch)] = _Known(stretch, self._gone.append)
            known.key = next(self._keys)
            known.flow = known.key if flow is None else flow
        if not known.met:
            known.met = True
            self._met.append(stretch)
        return known

    def _dump_news(self, pickler: _Pickler, stretch: LogSegment) -> tuple[_Known, Any, bool]:
        known = self._known[id(stretch)]
        if not known.linked:
            self._follow(stretch)
        news, told = stretch.news(known.told)
        later = None if known.linked or stretch.later is None else self._known[id(stretch.later)].key
        if news is not None or later is not None:
            name = stretch.name if known.told is None else None
            pickler.dump((known.key, known.flow, name, news, later))
        return known, told, known.linked or later is not None

    def _forgotten(self) -> list[int]:
        """Return the numbers of stretches that are gone."""
        keys = []
        while self._gone:
            known = self._gone.pop()
            keys.append(known.key)
            if self._known.get(known.identity) is known:
                del self._known[known.identity]
        return keys


def stretch_there(kind: type[LogSegment], key: int) -> LogSegment:
    """Stands in a pickle for what the near end finds by this number."""
    raise LookupError(f"a {kind.__name__} outside of its message: {key}")


class _Pickler(pickle.Pickler):
    """Pickles stretches as their numbers."""

    key_of: Callable[[LogSegment], int]

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, LogSegment):
            return stretch_there, (type(thing), self.key_of(thing))
        return NotImplemented


class _ValuePickler(ValuePickler):
    """The same, and classes by value that the other end can't import."""

    key_of: Callable[[LogSegment], int]

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, LogSegment):
            return stretch_there, (type(thing), self.key_of(thing))
        return super().reducer_override(thing)


def _fault(body: Any) -> str:
    """Say which state it is that can't be pickled."""
    stage, at = None, body
    while True:
        stage = getattr(at, "name", None) or getattr(at, "_name", None) or stage
        inner = next((part for part in _parts(at) if not _picklable(part)), None)
        if inner is None:
            break
        at = inner
    kind = f"{type(at).__module__}.{type(at).__qualname__}"
    whose = f"the state of {stage!r}" if isinstance(stage, str) else "a state"
    return (
        f"{whose} can't be sent to another process: expected something that pickles, got a {kind}. Give it a "
        "__getstate__ that leaves out what doesn't, or run its workers inline"
    )


def _parts(thing: Any) -> Iterator[Any]:
    """Yield what a state, or a column, consists of."""
    if isinstance(thing, list | tuple):
        yield from thing
        return
    if isinstance(thing, State) or hasattr(type(thing), "__getitem__"):
        slots = (name for kind in type(thing).__mro__ for name in kind.__dict__.get("__slots__", ()))
        yield from (getattr(thing, name) for name in slots if hasattr(thing, name))
        yield from getattr(thing, "__dict__", {}).values()


def _picklable(thing: Any) -> bool:
    try:
        ValuePickler(BytesIO(), 5).dump(thing)
    except Exception:
        return False
    return True
