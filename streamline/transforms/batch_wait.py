"""Batches that don't wait for ever: one that isn't full leaves some time after its first item came.

Where a batch ends depends on time then, so this flow chooses, and logs what it chose: the sizes. A flow opened at a
state with choices in it makes batches of these sizes first, however long that takes, then chooses freely.

Batches that do wait until they are full need no log. But the run that resumes may have a `max_wait_s`, so where a stage
downstream reads batches again, they are counted, and written down as if their sizes had been chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

import anyio
import msgspec

from streamline.core.channel import Inbox
from streamline.core.choices import Branch, Log
from streamline.core.flow import Chunk, Lists, Run
from streamline.core.pace import Pace
from streamline.core.state import Json, Reference, State, Tally, Tree
from streamline.core.state_types import Size
from streamline.errors import ResumeError

__all__ = ["BatchState", "Batching", "Cuts", "Sizes", "Waiting"]


In = TypeVar("In")


Out = TypeVar("Out")


class Sizes(msgspec.Struct):
    """The stage's part of a saved state: the sizes of batches that are to be repeated."""

    replay: list[Size]


class Batching(Protocol[In, Out]):
    """What this module needs to know of the stage."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def drop_remainder(self) -> bool: ...
    @property
    def max_wait_s(self) -> float | None: ...
    def collated(self, held: list[In], run: Run[In], last: State) -> list[Out]: ...


LATE: Chunk[Any] = Chunk((), ())
"""Instead of a list: nothing came in time."""


class BatchState(State):
    """Behind a batch: the upstream's state behind its last item, and how many batches were made so far."""

    __slots__ = ("_count", "_log", "_name", "_sizes", "_upstream")

    def __init__(self, name: str, upstream: State, log: Log, count: int, sizes: tuple[int, int] | None = None) -> None:
        self._name = name
        self._upstream = upstream
        self._log = log
        self._count = count  # batches made since the stretch began
        self._sizes = sizes  # of a full batch, and of the last one; None: sizes are logged

    @property
    def _number(self) -> int:
        return self._log.start + self._count

    def json(self, until: State | None = None) -> Tree:
        later = self if until is None else cast(BatchState, until.latest)
        stop, planned = later._number, later._log.planned
        tree = self._upstream.json(None if until is None else later._upstream)
        logged = planned if later._sizes is not None else max(stop, planned)
        replay = self._log.between(self._number, logged, later._log)
        if later._sizes is not None and stop > max(self._number, planned) and self._log.leads_to(later._log):
            full, last = later._sizes
            replay += [full] * (stop - 1 - max(self._number, planned)) + [last]
        own: dict[str, Json] = {"replay": replay}
        tree[self._name] = own
        return tree

    def forks(self) -> Iterator[Branch]:
        yield Branch(self._name, self._log, self._number, self._number)
        yield from self._upstream.forks()

    def tally(self, found: Tally) -> None:
        self._upstream.tally(found)

    def where(self) -> str:
        return self._upstream.where()


class Cuts:
    """Counts the batches of a stage that waits until they are full."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._log = name, Log(0, [], 0, name)
        self._size = self._last = size
        self._made = 0

    def add(self, size: int) -> None:
        """A batch of this size was made."""
        self._made += 1
        self._last = size

    def behind(self, upstream: State) -> State:
        """Return the state behind the last batch, over the upstream's."""
        return BatchState(self._name, upstream, self._log, self._made, (self._size, self._last))


class Waiting(Generic[In, Out]):
    """One running of a batching stage that chooses, or that has choices to repeat.

    Args:
      stage: its options.
      inbox: what it reads: a pull of it may be cut off without losing anything.
      own: its part of the state that it is opened at.
    """

    def __init__(self, stage: Batching[In, Out], inbox: Inbox[In], own: Any) -> None:
        sizes: list[int] = list(own["replay"]) if own else []
        self._stage, self._inbox = stage, inbox
        self._replay = deque(sizes)
        self._log = Log(0, sizes, len(sizes), stage.name)
        self._made = 0
        self._size = stage.size  # of the last batch
        self._held: list[In] = []
        self._last = Reference.to(inbox.state)
        self._after: State | None = None  # progress behind the last item
        self._deadline: float | None = None

    def begin(self) -> State:
        """Return the state before the first batch. Not kept here: it would hold on to every choice made since."""
        return self._behind(self._inbox.state)

    async def lists(self, run: Run[In]) -> Lists[Out]:
        """Yield batches, each as soon as it is full or its time is over."""
        pace = Pace()
        while (chunk := await self._pull()) is not None:
            self._take(chunk)
            if not self._missing or (chunk is LATE):
                yield self._batch(run, self._after)
            elif not self._held and chunk.after is not None:
                yield Chunk((), (), self._behind(chunk.after))
            del chunk
            await pace.breathe()
        if self._replay:
            raise ResumeError(f"{self._stage}: fewer items came than when the snapshot was taken")
        if self._held and not self._stage.drop_remainder:
            yield self._batch(run, self._inbox.state)
        elif self._held:
            yield Chunk((), (), self._behind(self._inbox.state))  # what was skipped among the rest is to be counted

    @property
    def _missing(self) -> int:
        """Items until the batch at hand is full, or as large as it was."""
        return (self._replay[0] if self._replay else self._stage.size) - len(self._held)

    async def _pull(self) -> Chunk[In] | None:
        """Return the next list, None at the end; or `LATE`, if the batch at hand has waited long enough."""
        if self._deadline is None or not self._inbox.idle:
            return await self._inbox.pull(self._missing)
        if anyio.current_time() < self._deadline:
            with anyio.CancelScope(deadline=self._deadline):  # no yield in here: this is a coroutine of its own
                return await self._inbox.pull(self._missing)
        return LATE

    def _take(self, chunk: Chunk[In]) -> None:
        """Put a list into the batch at hand; the first item in it starts the clock."""
        if chunk is not LATE:
            self._after = chunk.after
        if not chunk.items:
            return
        max_wait_s = self._stage.max_wait_s
        if not self._held and max_wait_s is not None and not self._replay:
            self._deadline = anyio.current_time() + max_wait_s
        self._held.extend(chunk.items)
        self._last = Reference(chunk.states, len(chunk.items) - 1)

    def _batch(self, run: Run[In], after: State | None) -> Chunk[Out]:
        """Make a batch of what is at hand, and log its size."""
        last, held = self._last.get(), self._held
        made = self._stage.collated(held, run, last)
        if self._replay:
            self._replay.popleft()
        elif self._chooses:
            self._log.later = self._log = Log(self._made, [len(held)], self._log.planned, self._stage.name)
        self._made += 1
        self._size = len(held)
        self._held, self._deadline = [], None
        if not made:
            return Chunk((), (), self._behind(last if after is None else after))
        return Chunk(made, [self._behind(last)], None if after is None else self._behind(after))

    @property
    def _chooses(self) -> bool:
        return self._stage.max_wait_s is not None

    def _behind(self, upstream: State) -> State:
        sizes = None if self._chooses else (self._stage.size, self._size)
        return BatchState(self._stage.name, upstream, self._log, self._made - self._log.start, sizes)
