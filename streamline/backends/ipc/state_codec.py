"""The far end of the states' way across a border; `streamline.backends.ipc.state_codec` says what crosses, and why so.

States on their way across a border: with each list of items one column of them, and perhaps progress.

Most states are never read. So the far end (`streamline.backends.ipc.state_codec`) pickles the column, which takes
microseconds, and the near end keeps the bytes until somebody reads a state.

Behind a choosing flow that is not enough: a state stands in a log of choices (`streamline.core.choices`) that goes on
to grow, and whoever holds a mark will ask for the choices from there to a state that comes many messages later. So
there the two ends keep copies of the log in step. Each message brings what was chosen since the last one, and says
which stretches no state at the far end leads to any more; states refer to stretches by number. What the near end holds
of the log is what the far end holds, and what its own states lead to.

If the far end dies, its worker is opened anew elsewhere, at the last state that arrived, and counts from 0 again: the
new stretches are numbered on from there, as branches of those that this state stands in.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import count
from typing import Any, cast

from streamline.backends.ipc.by_value import ValuePickler
from streamline.core.choices import Branch, LogSegment
from streamline.core.flow import Chunk
from streamline.core.state import State, States, Tally, Tree, trimmed
from streamline.errors import PlanTypeError, ResumeError

__all__ = ["NOTHING", "Body", "Columns", "Dumper", "stretch_there"]


class Columns:
    """The states of one worker, as they arrive; in the order in which they were dumped.

    Args:
      choosing: as of the `Dumper`.
    """

    def __init__(self, choosing: bool) -> None:
        self._choosing = choosing
        self._stretches: dict[int, LogSegment] = {}
        self._generation = 0
        self._forks: dict[str, Branch] = {}  # where flows of this generation go on, until they are there
        self._shifts: dict[int, int] = {}
        self._named: set[str] = set()  # stages with a flow in this generation
        self._at: State | None = None

    def load(self, data: bytes, count: int) -> tuple[States, State | None]:
        """Return the states of `count` items, and the progress behind them.

        Raises:
          ResumeError: behind a restart, choices that nobody can place.
        """
        if self._choosing:
            return cast(Body, self._loaded(data))
        late = _Late(data)
        return late if count else (), None if data[:1] == NOTHING else _LazyProgress(late)

    def load_state(self, data: bytes) -> State:
        """Return a state: at the opening of the worker, or where it was opened again.

        Raises:
          ResumeError: as `load`.
        """
        state = self._loaded(data) if self._choosing else pickle.loads(data)
        if self._at is not None:
            return self._at  # it is the same, and is in the log up to there
        return cast(State, state)

    def restarted(self, at: State) -> None:
        """The far end is gone; the worker is opened anew at `at.json()`, with a `Dumper` of its own.

        Args:
          at: the last state that this object has returned: behind all items, or the progress behind them.
        """
        self._at = at
        self._generation += 1
        self._forks = {fork.name: fork for fork in at.forks()}
        self._stretches, self._shifts, self._named = {}, {}, set()

    def _loaded(self, data: bytes) -> Any:
        unpickler = _Unpickler(BytesIO(data))
        unpickler.find = self._find
        body = unpickler.load()
        while isinstance(news := unpickler.load(), tuple):
            self._learn(*news)
        for key in news:
            self._stretches.pop(key, None)
        return body

    def _find(self, kind: type[LogSegment], key: int) -> LogSegment:
        """Return the copy of a stretch; of one that is new, nothing is known yet."""
        stretch = self._stretches.get(key)
        if stretch is None:
            stretch = self._stretches[key] = kind.__new__(kind)
            LogSegment.__init__(stretch)
            stretch.generation = self._generation
        return stretch

    def _learn(self, key: int, flow: int, name: str | None, news: Any, later: int | None) -> None:
        stretch, fork = self._stretches[key], None
        if name is not None:
            stretch.name = name
            fork = self._forks.pop(name, None) if key == flow else None
            if fork is not None and fork.shift:
                self._shifts[flow] = fork.shift
            if fork is None and self._generation and name not in self._named:
                raise ResumeError(
                    f"a worker's process ended, and where {name!r} stood in what it had chosen isn't known: a state of "
                    "another kind lies over its own, and has no `forks`; run its workers inline"
                )
            self._named.add(name)
        if news is not None:
            stretch.learn(news, self._shifts.get(flow, 0))
        if fork is not None:
            fork.segment.branches += ((fork.at, stretch),)
        if later is not None:
            stretch.later = self._find(type(stretch), later)


class _Unpickler(pickle.Unpickler):
    """Finds stretches by their numbers."""

    find: Callable[[type[LogSegment], int], LogSegment]

    def find_class(self, module: str, name: str) -> Any:
        if name == stretch_there.__name__ and module == stretch_there.__module__:
            return self.find
        return super().find_class(module, name)


class _Late:
    """A column that is loaded when somebody reads a state."""

    __slots__ = ("_body", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._body: Body | None = None

    @property
    def body(self) -> Body:
        """The column and the progress, as they were sent."""
        data, body = self._data, self._body  # in this order: another thread may load it meanwhile
        if body is None:
            body = self._body = pickle.loads(memoryview(data)[1:])
            self._data = b""
        return body

    def __getitem__(self, index: int, /) -> State:
        return self.body[0][index]


class _LazyProgress(State):
    """Progress that is loaded when it is read."""

    __slots__ = ("_late",)

    def __init__(self, late: _Late) -> None:
        self._late = late

    @property
    def _real(self) -> State:
        return cast(State, self._late.body[1])

    def json(self, until: State | None = None) -> Tree:
        return self._real.json(until)

    @property
    def latest(self) -> State:
        return self._real.latest

    def tally(self, found: Tally) -> None:
        self._real.tally(found)

    def where(self) -> str:
        return self._real.where()

    def forks(self) -> Iterator[Branch]:
        return self._real.forks()


Body = tuple[States, State | None]


NOTHING, PROGRESS = b"\0", b"\1"
"""How what needs no loading begins: whether progress is in it has to be known at once."""


class Dumper:
    """What a worker's states leave its host through, in order. One a running of a worker.

    Args:
      choosing: whether a stage of the worker chooses an order. Then the state at its opening has to be dumped first.
    """

    def __init__(self, choosing: bool) -> None:
        self._log = _SentLogs() if choosing else None
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
            return self._log.dump(body, partial(_StateValuePickler if self._by_value else _StatePickler, protocol=5))
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


class _SentLogs:
    """The logs of choices, as far as the near end has been told of them."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by identity
        self._gone: list[_Known] = []  # appended to by the garbage collector, in any thread
        self._last: dict[str, LogSegment] = {}  # of each stage: kept, so that what comes behind it is noticed
        self._met: list[LogSegment] = []
        self._keys = count()

    def dump(self, body: Body | State, kind: Callable[[BytesIO], _StatePickler]) -> bytes:
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

    def _dump_news(self, pickler: _StatePickler, stretch: LogSegment) -> tuple[_Known, Any, bool]:
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


class _StatePickler(pickle.Pickler):
    """Pickles stretches as their numbers."""

    key_of: Callable[[LogSegment], int]

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, LogSegment):
            return stretch_there, (type(thing), self.key_of(thing))
        return NotImplemented


class _StateValuePickler(ValuePickler):
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
