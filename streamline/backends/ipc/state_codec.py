"""States on a link: with each list of items one column of their states, and perhaps progress.

Most states are never read. So the host pickles the column, which takes microseconds, and the consumer keeps the bytes
until a state is read. With a log of choices (`streamline.core.choices`) that is not enough: the log goes on to grow,
and a reader that holds a mark asks for the choices from there to a state many messages later. So both ends keep copies
of the log in step: each message brings the choices since the last one, and the numbers of segments that no state in
the host leads to any more; states refer to segments by number.

If the host dies, the worker is opened again at the last state that arrived, with numbers from 0: its segments are
branches of those that this state is in.
"""

from __future__ import annotations

import copyreg
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from itertools import count
from typing import Any, cast

from streamline.backends.ipc.messages import Encoded
from streamline.core.choices import Branch, LogSegment
from streamline.core.flow import Chunk
from streamline.core.state import DeferredState, State, States, trimmed
from streamline.errors import PlanTypeError, ResumeError


class ColumnDecoder:
    """Decodes the states of one worker, in the order of encoding; `with_log` as of the `ColumnEncoder`."""

    def __init__(self, with_log: bool) -> None:
        self._choosing = with_log
        self._segments: dict[int, LogSegment] = {}
        self._generation = 0
        self._branches: dict[str, Branch] = {}  # where flows of this generation continue, until they arrive
        self._shifts: dict[int, int] = {}
        self._named: set[str] = set()  # stages with a flow in this generation
        self._at: State | None = None

    def load(self, data: Encoded, count: int) -> tuple[States, State | None]:
        """Return the states of `count` items, and the progress after them.

        Raises:
          ResumeError: the place of choices after a restart isn't known.
        """
        if not isinstance(data, bytes):
            return cast(Body, data)
        if self._choosing:
            return cast(Body, self._loaded(data))
        column = _LazyColumn(data)
        return column if count else (), None if data[:1] == NOTHING else _LazyProgress(column)

    def load_state(self, data: Encoded) -> State:
        """Return the state that the worker was opened at, the first time or again; raises as `load`."""
        if not isinstance(data, bytes):
            return cast(State, data)
        state = self._loaded(data) if self._choosing else pickle.loads(data)
        if self._at is not None:
            return self._at  # the same state, in the log up to there
        return cast(State, state)

    def restart_at(self, at: State) -> None:
        """Expect a new `ColumnEncoder`: the worker is opened again at `at.json()`, the last state it returned."""
        self._at = at
        self._generation += 1
        self._branches = {branch.name: branch for branch in at.forks()}
        self._segments, self._shifts, self._named = {}, {}, set()

    def _loaded(self, data: bytes) -> Any:
        unpickler = _Unpickler(BytesIO(data))
        unpickler.find = self._find
        body = unpickler.load()
        while isinstance(news := unpickler.load(), tuple):
            self._learn(*news)
        for key in news:
            self._segments.pop(key, None)
        return body

    def _find(self, kind: type[LogSegment], key: int) -> LogSegment:
        """Return the copy of a segment, empty if it is new."""
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = kind.__new__(kind)
            LogSegment.__init__(segment)
            segment.generation = self._generation
        return segment

    def _learn(self, key: int, flow: int, name: str | None, news: Any, later: int | None) -> None:
        segment, branch = self._segments[key], None
        if name is not None:
            segment.name = name
            branch = self._branches.pop(name, None) if key == flow else None
            if branch is not None and branch.shift:
                self._shifts[flow] = branch.shift
            if branch is None and self._generation and name not in self._named:
                raise ResumeError(
                    f"a worker's process ended, and where {name!r} stood in what it had chosen isn't known: a state of "
                    "another kind lies over its own, and has no `forks`; run its workers inline"
                )
            self._named.add(name)
        if news is not None:
            segment.learn(news, self._shifts.get(flow, 0))
        if branch is not None:
            branch.segment.branches += ((branch.at, segment),)
        if later is not None:
            segment.later = self._find(type(segment), later)


class _Unpickler(pickle.Unpickler):
    """Finds segments by their numbers."""

    find: Callable[[type[LogSegment], int], LogSegment]

    def find_class(self, module: str, name: str) -> Any:
        if name == segment_by_key.__name__ and module == segment_by_key.__module__:
            return self.find
        return super().find_class(module, name)


class _LazyColumn:
    """A column that is loaded when a state is read."""

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


class _LazyProgress(DeferredState):
    """Progress that is loaded when it is read."""

    __slots__ = ("_column",)

    def __init__(self, column: _LazyColumn) -> None:
        self._column = column

    @property
    def real(self) -> State:
        return cast(State, self._column.body[1])


Body = tuple[States, State | None]

NOTHING, PROGRESS = b"\0", b"\1"
"""First byte of a column without a log: whether it has progress is known without loading it."""


class ColumnEncoder:
    """Encodes the states of one worker, in order, from where it was opened.

    Args:
      with_log: whether a stage of the worker chooses an order. Then its first state must be encoded first.
      copies: whether the link copies; else states are handed over as they are.
    """

    def __init__(self, with_log: bool, *, copies: bool = True) -> None:
        self._copies = copies
        self._log = _SentLogs() if with_log else None
        self._by_value = False  # once plain pickle has failed

    def dump(self, chunk: Chunk[Any]) -> Encoded:
        """Return the states of a chunk, encoded now; `PlanTypeError` names the stage of one that can't be pickled."""
        if not self._copies:
            return chunk.states, chunk.progress
        count = len(chunk.items)
        pickled = self._dumped((trimmed(chunk.states, 0, count) if count else (), chunk.progress))
        if self._log is not None:
            return pickled
        return (NOTHING if chunk.progress is None else PROGRESS) + pickled

    def dump_state(self, state: State) -> Encoded:
        """Return the encoded state that the worker was opened at; raises as `dump`."""
        return self._dumped(state) if self._copies else state

    def _dumped(self, body: Body | State) -> bytes:
        if not self._by_value:
            try:
                return self._pickled(body)
            except Exception:
                self._by_value = True  # a class of the main program or of a function, perhaps
        try:
            return self._pickled(body)
        except Exception as error:
            refusal = _refusal(body)
            if refusal is None:
                raise
            raise refusal from error

    def _pickled(self, body: Body | State) -> bytes:
        if self._log is not None:
            return self._log.dump(body, _item_pickler if self._by_value else _plain_pickler)
        return _dumps_by_value(body) if self._by_value else pickle.dumps(body, 5)


class _SentSegment(weakref.ref[LogSegment]):
    """What the consumer knows of a segment.

    Attributes:
      identity: `id` of the segment.
      key: its number, at both ends.
      flow: the key of its flow's first segment.
      sent: as `LogSegment.news` returns it.
      linked: whether the consumer knows the segment after it.
      in_message: whether it is in the message that is being encoded.
    """

    __slots__ = ("flow", "identity", "in_message", "key", "linked", "sent")

    key: int
    flow: int

    def __init__(self, segment: LogSegment, on_drop: Callable[[Any], None]) -> None:
        super().__init__(segment, on_drop)  # type: ignore[call-arg]  # as it is documented
        self.identity = id(segment)
        self.sent: Any = None
        self.linked = self.in_message = False


class _SentLogs:
    """The part of the logs of choices that the consumer knows."""

    def __init__(self) -> None:
        self._entries: dict[int, _SentSegment] = {}  # by identity
        self._dropped: list[_SentSegment] = []  # appended to by the garbage collector, in any thread
        self._last: dict[str, LogSegment] = {}  # by stage: kept so that later segments are followed
        self._in_message: list[LogSegment] = []
        self._keys = count()

    def dump(self, body: Body | State, kind: Callable[[BytesIO, Mapping[type, Any]], Any]) -> bytes:
        """Return `body`, and the news of the segments in it; `kind` makes a pickler with such a table of reducers."""
        buffer = BytesIO()
        self._in_message = []
        try:
            for last in list(self._last.values()):
                self._follow(last)
            pickler = kind(buffer, dict.fromkeys(_kinds_of(LogSegment), self._by_key))
            pickler.dump(body)
            sent = [self._dump_news(pickler, segment) for segment in self._in_message]  # which may grow meanwhile
            pickler.dump(self._forgotten())
        finally:
            for segment in self._in_message:
                self._entries[id(segment)].in_message = False
        for entry, news, linked in sent:  # now that pickling has succeeded
            entry.sent, entry.linked = news, linked
        return buffer.getvalue()

    def _by_key(self, segment: LogSegment) -> Any:
        """Reduce a segment to its number, and include it in the message."""
        return segment_by_key, (type(segment), self._include(segment, None).key)

    def _follow(self, segment: LogSegment) -> None:
        """Include all segments from one on: marks in the consumer may lead to them."""
        entry = self._include(segment, None)
        while (later := segment.later) is not None:
            segment, entry = later, self._include(later, entry.flow)
        last = self._last.get(segment.name)
        if last is None or entry.key > self._entries[id(last)].key:  # another pass may have begun
            self._last[segment.name] = segment

    def _include(self, segment: LogSegment, flow: int | None) -> _SentSegment:
        entry = self._entries.get(id(segment))
        if entry is None or entry() is not segment:
            entry = self._entries[id(segment)] = _SentSegment(segment, self._dropped.append)
            entry.key = next(self._keys)
            entry.flow = entry.key if flow is None else flow
        if not entry.in_message:
            entry.in_message = True
            self._in_message.append(segment)
        return entry

    def _dump_news(self, pickler: Any, segment: LogSegment) -> tuple[_SentSegment, Any, bool]:
        entry = self._entries[id(segment)]
        if not entry.linked:
            self._follow(segment)
        news, sent = segment.news(entry.sent)
        later = None if entry.linked or segment.later is None else self._entries[id(segment.later)].key
        if news is not None or later is not None:
            name = segment.name if entry.sent is None else None
            pickler.dump((entry.key, entry.flow, name, news, later))
        return entry, sent, entry.linked or later is not None

    def _forgotten(self) -> list[int]:
        """Return the numbers of segments that were garbage collected."""
        keys = []
        while self._dropped:
            entry = self._dropped.pop()
            keys.append(entry.key)
            if self._entries.get(entry.identity) is entry:
                del self._entries[entry.identity]
        return keys


def segment_by_key(kind: type[LogSegment], key: int) -> LogSegment:
    """Stand for a segment in a pickle; the decoder replaces this by its number's segment."""
    raise LookupError(f"a {kind.__name__} outside of its message: {key}")


def _kinds_of(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield the classes that are derived from one."""
    for derived in kind.__subclasses__():
        yield derived
        yield from _kinds_of(derived)


def _plain_pickler(buffer: BytesIO, table: Mapping[type, Any]) -> Any:
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = {**copyreg.dispatch_table, **table}
    return pickler


def _item_pickler(buffer: BytesIO, table: Mapping[type, Any]) -> Any:
    from streamline.backends.ipc.by_value import ItemPickler  # not at the top: hosts start sooner

    return ItemPickler(buffer, table=table)


def _dumps_by_value(thing: Any) -> bytes:
    """Return something pickled, with what the consumer can't import by value."""
    buffer = BytesIO()
    _item_pickler(buffer, {}).dump(thing)
    return buffer.getvalue()


def _refusal(body: Any) -> PlanTypeError | None:
    """Return an error that names the state that can't be pickled; None: each can."""
    from streamline.backends.ipc.unpicklable import kind_of, pickling_error, unpicklable_part

    if pickling_error(body, _dumps_by_value) is None:
        return None
    path = [body, *(part for _, part in unpicklable_part(body, _dumps_by_value))]
    names = [name for part in path if isinstance(name := getattr(part, "name", getattr(part, "_name", None)), str)]
    whose = f"the state of {names[-1]!r}" if names else "a state"
    return PlanTypeError(
        f"{whose} can't be sent to another process: expected something that pickles, got a {kind_of(path[-1])}. Give "
        "it a __getstate__ that leaves out what doesn't, or run its workers inline"
    )
