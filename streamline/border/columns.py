"""States on their way across a border: with each list of items one column of them, and perhaps progress.

Most states are never read. So the far end (`streamline.border.dumping`) pickles the column, which takes microseconds,
and the near end keeps the bytes until somebody reads a state.

Behind a choosing flow that is not enough: a state stands in a log of choices (`streamline.core.choices`) that goes on to
grow, and whoever holds a mark will ask for the choices from there to a state that comes many messages later. So there
the two ends keep copies of the log in step. Each message brings what was chosen since the last one, and says which
stretches no state at the far end leads to any more; states refer to stretches by number. What the near end holds of the
log is what the far end holds, and what its own states lead to.

If the far end dies, its worker is opened anew elsewhere, at the last state that arrived, and counts from 0 again: the
new stretches are numbered on from there, as branches of those that this state stands in.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, cast

from streamline.border.dumping import NOTHING, Body, stretch_there
from streamline.core.choices import Branch, LogSegment
from streamline.core.state import State, States, Tally, Tree
from streamline.errors import ResumeError

__all__ = ["Columns"]


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
        return late if count else (), None if data[:1] == NOTHING else _Progress(late)

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
            fork.stretch.branches += ((fork.at, stretch),)
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


class _Progress(State):
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
