"""Scripted sources, with aborts and pauses between their items (an idea of bytewax's), and a slow device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import anyio.lowlevel

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.state import At, CountedStates, Tree
from streamline.errors import PlanError
from streamline.pipeline import Pipeline
from streamline.sources.base import Mode, Part, Source
from streamline.transfer.base import Mover, Target
from streamline.transfer.stage import Transfer


@dataclass(frozen=True)
class SlowDevice(Target, Mover):
    """A device that has to be waited for; batches stay what they are.

    Attributes:
      error: what it fails with at `failing`; None: it doesn't.
    """

    failing: Any = None
    error: Exception | None = None

    def mover(self, depth: int) -> Mover:
        return self

    def move(self, batch: Any) -> Any:
        if self.error is not None and batch == self.failing:
            raise self.error
        return batch


def to_elsewhere(pipe: Pipeline[Any], target: Target | None = None, depth: int = 2) -> Pipeline[Any]:
    """Return a pipeline with a transfer as it is to a GPU: in a thread, after a channel of its own."""
    merged = pipe if pipe.merging is not None else pipe.merge()
    return merged._with(Transfer(name="transfer", device="cuda", depth=depth, target=target or SlowDevice()))


@dataclass(frozen=True)
class Abort:
    """Between two items: the source fails with `error` when it is asked for the next one."""

    error: BaseException


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name  # the same one in another process, too


PAUSE: Final = _Mark("PAUSE")
"""Between two items: the source waits until `Script.release` was called."""

YIELD: Final = _Mark("YIELD")
"""Between two items: the source lets every other task run once."""


class ScriptRecord:
    """What happened to a script, over all its openings.

    Attributes:
      asked: items that were handed out.
      opened: flows that were asked for something.
      closed: how many of those have been closed.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.opened = 0
        self.closed = 0
        self.released = False
        self.waiting: list[anyio.Event] = []
        self.flows: list[Flow[Any]] = []  # held, so that garbage collection can't pass for a close

    def __reduce__(self) -> tuple[type[ScriptRecord], tuple[()]]:
        return ScriptRecord, ()  # what happens in another process is not known here


@dataclass(frozen=True, kw_only=True)
class Script(Source[Any]):
    """Gives the items of a list, with marks between them. State: items given, so that a mended script resumes it.

    Attributes:
      shards: the entries of each shard; of one only, its items are interleaved over however many shards there are. A
        mark belongs to the shard of the item after it, and acts each time that this item is asked for.
      schedule: makes it choose its pace: before list number i the source gives way `schedule[i]` times (cyclically, and
        somewhere else in each opening), and the list is short. With several shards, this is what interleaves them.
      record: what happened.
    """

    kind: ClassVar[str] = "script"
    modes: ClassVar[tuple[Mode, ...]] = ("interleaved",)

    name: str = "script"
    shards: tuple[tuple[Any, ...], ...]
    schedule: tuple[int, ...] = ()
    record: ScriptRecord = field(default_factory=ScriptRecord, compare=False, repr=False)

    @property
    def mended(self) -> Script:
        """The same items without failures or pauses, with a record of its own."""
        shards = tuple(tuple(entry for entry in shard if not _is_mark(entry)) for shard in self.shards)
        return replace(self, shards=shards, record=ScriptRecord())

    def failing(self, error: BaseException, *, at: int, shard: int = 0) -> Script:
        """Return a script that fails with `error` before item number `at` of a shard; with a record of its own."""
        place = _place(self.shards[shard], at)
        entries = (*self.shards[shard][:place], Abort(error), *self.shards[shard][place:])
        shards = (*self.shards[:shard], entries, *self.shards[shard + 1 :])
        return replace(self, shards=shards, record=ScriptRecord())

    def release(self) -> None:
        """Let the source pass every PAUSE from now on."""
        self.record.released = True
        while self.record.waiting:
            self.record.waiting.pop().set()

    def entries(self, shard: int, num_shards: int) -> Sequence[Any]:
        """Return the items and marks of one shard.

        Raises:
          PlanError: the script was written for another number of shards.
        """
        if len(self.shards) == num_shards:
            return self.shards[shard]
        if len(self.shards) != 1:
            raise PlanError(f"a script of {len(self.shards)} shards can't be read as {num_shards}")
        found: list[Any] = []
        position = 0
        for entry in self.shards[0]:
            if position % num_shards == shard:
                found.append(entry)
            position += not _is_mark(entry)
        return found

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[Any]:
        done: int = 0 if state is None else state[self.name]
        context = StageContext(site)
        entries = self.entries(site.shard, site.num_shards)
        flow = ListsFlow(At(self.name, done), self._lists(context, entries, done), context)
        self.record.flows.append(flow)
        return flow

    async def _lists(self, context: StageContext, entries: Sequence[Any], done: int) -> Lists[Any]:
        self.record.opened += 1
        turn = 7 * self.record.opened
        try:
            at = _place(entries, done)
            while at < len(entries):
                if _is_mark(entries[at]):
                    await self._act(entries[at])
                    at += 1
                    continue
                turn += 1
                stop = min(at + await self._pace(context.max_items, turn), len(entries))
                items = []
                while at < stop and not _is_mark(entries[at]):
                    items.append(entries[at])
                    at += 1
                self.record.asked += len(items)
                yield Chunk(items, CountedStates(self.name, done + 1))
                done += len(items)
        finally:
            self.record.closed += 1

    async def _pace(self, want: int, turn: int) -> int:
        """Give way as the schedule says, and return how many items to give."""
        if not self.schedule:
            return want
        waits = self.schedule[turn % len(self.schedule)]
        for _ in range(waits):
            await anyio.lowlevel.checkpoint()
        return min(want, 1 + waits)

    async def _act(self, mark: Any) -> None:
        if isinstance(mark, Abort):
            raise mark.error
        if mark is YIELD:
            await anyio.lowlevel.checkpoint()
        elif not self.record.released:
            event = anyio.Event()
            self.record.waiting.append(event)
            await event.wait()


def scripted(*shards: Sequence[Any], schedule: Sequence[int] = ()) -> Pipeline[Any]:
    """Return a pipeline over a `Script` with one worker for each of the given lists of items and marks."""
    script = Script(shards=tuple(map(tuple, shards)), schedule=tuple(schedule))
    return Pipeline(script).shard(len(shards)) if len(shards) > 1 else Pipeline(script)


def _is_mark(entry: Any) -> bool:
    return isinstance(entry, Abort | _Mark)


def _place(entries: Sequence[Any], done: int) -> int:
    """Return the index after the first `done` items; marks after them are still to come."""
    at = 0
    while done and at < len(entries):
        done -= not _is_mark(entries[at])
        at += 1
    return at
