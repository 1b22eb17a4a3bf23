"""What a strict and a best-effort merge have in common: the flow over workers' flows, its fast path, and its states.

Strict always takes from the active worker with the smallest (produced, index). Best-effort looks, without blocking, at
the first `max_skips_per_round` + 1 eligible workers from `next_worker` on, takes the first that has an item, and waits
only when none has; a worker more than `max_lead` items ahead of the slowest is not eligible. While every worker has
items ready, both take whole rounds at once, in the same order as one by one. They run in the task that pulls, and call
no user code: a cancelled pull has taken nothing.

Of thousands of workers, the first ones are started with the merge, so that the first item doesn't wait for all. Each
worker that is looked at for the first time starts one more, and a merge that waits starts the others, some in each turn
of the event loop: none is idle while its items are waited for.

A best-effort merge logs each choice, the index of a worker, for as long as a mark before it is referenced. A strict
merge logs nothing: its order between two states follows from their counts. In a saved state, `replay` lists the choices
to repeat first, in a merge of either kind; of a tail in strict order, only the counts reached are saved (`strict_to`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar, cast

import anyio.lowlevel

from streamline.core.channel import FlushPoints, Inbox
from streamline.core.choices import Log
from streamline.core.flow import Chunk, Flow
from streamline.core.state import Json, Reference, State, States, Tally, Tree

T = TypeVar("T")

ALL_ROUNDS = 2**31
"""Rounds: no bound but the items."""


FIRST_WORKERS = 64
"""Workers that are started with a merge, and ahead of those that it looks at."""

WORKERS_A_TURN = 8
"""Workers that a waiting merge starts in each turn of the event loop."""


@dataclass(frozen=True)
class Inboxes(Generic[T]):
    """The inboxes of `count` workers, in index order.

    Attributes:
      open: opens a worker, once, at its state, and returns its inbox.
      begin: returns the state that a worker is opened at. In any thread.
      first: workers to open with the merge; the others, when they are to be started.
    """

    count: int
    open: Callable[[int], Inbox[T]]
    begin: Callable[[int], State]
    first: int = FIRST_WORKERS

    @classmethod
    def of(cls, inboxes: Sequence[Inbox[T]]) -> Inboxes[T]:
        """Return those of workers that are open."""
        return cls(len(inboxes), inboxes.__getitem__, lambda worker: inboxes[worker].state, first=len(inboxes))


@dataclass(frozen=True, kw_only=True)
class Merge(ABC):
    """A merge, as written in a plan; printed with its options.

    Attributes:
      chooses: whether another run may deliver the items in another order.
    """

    name: str
    chooses: ClassVar[bool]

    @abstractmethod
    def open(self, inboxes: Inboxes[T], own: Json | None) -> MergeFlow[T]:
        """Return the merge of the workers' inboxes, at its own part of a state or at the beginning."""


class MergeFlow(Flow[T]):
    """What both merges share: taking lists, counting, repeating choices.

    Args:
      name: the stage's name.
      inboxes: the workers' channels.
      own: this stage's part of the state that it is opened at.

    Attributes:
      on_wait: called with the workers that the merge begins to wait for, and after the wait with none.
      on_ended: called with a worker that has ended, and the number of its items.
      held: progress deferred until its worker's turn; None: all progress counts as soon as it is seen.
    """

    has_own_task = True
    choosing = False
    held: DeferredProgress | None = None

    def __init__(self, name: str, inboxes: Inboxes[T], own: Any = None) -> None:
        count = inboxes.count
        self._name = name
        self._opener = inboxes
        self._inboxes: dict[int, Inbox[T]] = {}  # of workers that are open
        self._produced: list[int] = [0] * count if own is None else list(own["produced"])
        self._next_worker: int = 0 if own is None else own["next_worker"]
        self._replay: list[int] = [] if own is None else choices_of(own)[::-1]
        made = sum(self._produced)
        self._log = Log(made, self._replay[::-1], made + len(self._replay))
        begins = _Begins(inboxes.begin)
        self._references = [Reference(begins, worker) for worker in range(count)]
        self._active = list(range(count))
        self._finished: set[int] = set()  # all others
        self._started = False
        self.on_wait: Callable[[Sequence[int]], None] | None = None
        self.on_ended: Callable[[int, int], None] | None = None
        self._began = list(self._produced)
        self._untold = False  # of flush points, since a worker has ended
        self._flushes: tuple[int, int] | None = None  # where they are known: the first worker in turn, and its place
        self._batch = 1  # items that the reader needs to go on, from where this began
        self._left: dict[int, int] = {}  # by worker looked at in this pull: items not chosen yet
        self._unstarted = dict.fromkeys(sorted(self._active, key=self._turn))
        self._fresh: set[int] = set()  # started, and never looked at
        for worker in islice(self._unstarted, inboxes.first):
            self._open(worker)
        super().__init__(self._now())

    def release(self) -> None:
        for inbox in self._inboxes.values():
            inbox.release()

    async def aclose(self) -> None:
        await super().aclose()
        self._unstarted.clear()
        for inbox in self._inboxes.values():
            inbox.cancel()  # all at once, then wait for each
        for inbox in self._inboxes.values():
            await inbox.aclose()

    def awaited(self) -> list[tuple[int, State]]:
        """Return the workers that it waits for, with the states after the last items taken from them."""
        waited = [worker for worker in self._awaited() if self._idle(worker)] if self._active else []
        opened, begins = self._inboxes, self._references
        return [(worker, opened[worker].state if worker in opened else begins[worker].get()) for worker in waited]

    async def _next(self, limit: int) -> Chunk[T] | None:
        if not self._started:
            self._started = True
            self._batch = self.need
            self._tell_flush_points()
            self._start_more(FIRST_WORKERS)
        self.release()
        while self._active:
            chunk = None if self._unstarted else self._rounds(limit)
            if chunk is None and (self.held or not all(map(self._idle, self._active))):
                chunk = self._steps(limit)
            if self._untold:
                self._untold = False
                self._tell_flush_points()
            if chunk is not None:
                return chunk
            if self._active:
                await self._wait_reported()
        return None

    async def _wait_reported(self) -> None:
        """Wait; report the workers waited for, and the time."""
        if self.on_wait is not None:
            self.on_wait(self._awaited())
        if self.meter is not None:
            self.meter.wait_begins("wait_input")
        try:
            await self._start_meanwhile()
            await self._wait()
        finally:
            if self.meter is not None:
                self.meter.wait_ends()
            if self.on_wait is not None:
                self.on_wait(())

    # Workers that are started when their turn comes near --------------------------------------------------------------

    async def _start_meanwhile(self) -> None:
        """Start the workers that it waits for, and the others as long as it waits."""
        if not self._unstarted:
            return
        awaited = self._awaited()
        for worker in awaited:
            self._looks_at(worker)
        while self._unstarted and all(map(self._idle, awaited)):
            self._start_more(WORKERS_A_TURN)
            await anyio.lowlevel.checkpoint()
            await self._inboxes[awaited[0]].passage()

    def _start_more(self, count: int) -> None:
        """Start the next workers in turn."""
        for worker in list(islice(self._unstarted, count)):
            self._start(worker)

    def _start(self, worker: int) -> None:
        if worker not in self._inboxes:
            self._open(worker)
        del self._unstarted[worker]
        self._fresh.add(worker)
        self._inboxes[worker].start()

    def _open(self, worker: int) -> None:
        inbox = self._inboxes[worker] = self._opener.open(worker)
        self._references[worker].becomes(inbox.state)  # also in marks: choices since then follow those of its log
        self._opened(inbox)
        self._flush(worker)

    def _opened(self, inbox: Inbox[T]) -> None:
        """A worker is open."""

    def _looks_at(self, worker: int) -> None:
        """Start a worker that isn't running, and one more for each that is looked at for the first time."""
        if worker in self._unstarted:
            self._start(worker)
        if worker in self._fresh:
            self._fresh.discard(worker)
            self._start_more(1)

    def _idle(self, worker: int) -> bool:
        """Whether there is nothing to see of a worker."""
        inbox = self._inboxes.get(worker)
        return inbox is None or inbox.nothing_pending

    # What they give ---------------------------------------------------------------------------------------------------

    def _rounds(self, limit: int) -> Chunk[T] | None:
        """Take whole rounds at once, each with one item of every worker that has some."""
        inboxes = self._inboxes
        ready = {worker: count for worker in self._active if (count := inboxes[worker].ready)}
        if not ready or self._replay:
            return None
        rounds = min(limit // len(ready), *ready.values(), self._rounds_of(ready))
        if rounds < 1:
            return None
        order = sorted(ready, key=self._distance) if len(ready) > 1 else list(ready)
        taking = Taking(self._now())
        items: list[Any] = [] if len(order) == 1 else [None] * (rounds * len(order))
        for at, worker in enumerate(order):
            chunk = cast("Chunk[T]", inboxes[worker].take(rounds))
            if items:
                items[at :: len(order)] = chunk.items
            else:
                items = cast("list[T]", chunk.items)
            self._references[worker] = taking.add(worker, chunk, self.held)
            self._produced[worker] += rounds
        taking.picks = order * rounds
        self._next_worker = (order[-1] + 1) % len(self._produced)
        return self._chunk_of(items, taking)

    def _steps(self, limit: int) -> Chunk[T] | None:
        """Choose one by one, while the next choice needs no waiting; without a choice, adopt progress."""
        taking = Taking(self._now())
        picks = taking.picks
        self._left = {}
        repeating = bool(self._replay)
        while len(picks) < limit and self._active and repeating == bool(self._replay):
            try:
                worker = self._choose(taking)
            except BaseException as error:
                again = isinstance(error, Exception) or any(inbox.failure is error for inbox in self._inboxes.values())
                if again and (picks or taking.progressed):
                    break  # it is raised again, after them
                raise
            if worker is None or (self.held is not None and taking.progressed):  # which the states of this list lack
                break
            picks.append(worker)
            self._left[worker] -= 1
            self._produced[worker] += 1
            self._next_worker = (worker + 1) % len(self._produced)
            if repeating:
                self._replay.pop()
        items = self._take_picked(taking)
        if not items:
            for worker in self._active:
                if worker in self._inboxes:
                    self._adopt_progress(worker, taking, its_turn=False)
        return self._chunk_of(items, taking) if items or taking.progressed else None

    def _take_picked(self, taking: Taking) -> list[T]:
        """Take the chosen items, a list from each worker, and return them in the order of the choices."""
        queues: dict[int, Iterator[T]] = {}
        for worker, count in Counter(taking.picks).items():
            chunk = cast("Chunk[T]", self._inboxes[worker].take(count))
            self._references[worker] = taking.add(worker, chunk, self.held)
            queues[worker] = iter(chunk.items)
        return [next(queues[worker]) for worker in taking.picks]

    def _chunk_of(self, items: list[T], taking: Taking) -> Chunk[T]:
        """Log the choices, and return what was taken as a chunk."""
        if items and self.choosing and taking.before.number >= self._log.planned:
            taking.log = self._log.later = Log(taking.before.number, taking.picks, self._log.planned)
            self._log = taking.log
        return Chunk(items, taking, self._now() if taking.progressed else None)

    def _choose(self, taking: Taking) -> int | None:
        """Return the worker to take the next item from, which has one; None: it has none yet."""
        if self._replay:
            return self._replay[-1] if self._look(self._replay[-1], taking) else None
        return self._pick(taking)

    def _look(self, worker: int, taking: Taking) -> bool:
        """Return whether `worker` has an item that isn't chosen yet; if it had none, note its progress and its end."""
        left = self._left.get(worker)
        if left is None:
            self._looks_at(worker)
            inbox = self._inboxes[worker]
            left = self._left[worker] = inbox.ready
            if not left:
                self._adopt_progress(worker, taking, its_turn=True)
                if inbox.exhausted:
                    self._active.remove(worker)
                    self._finished.add(worker)
                    self._untold = True
                    if self.on_ended is not None:
                        self.on_ended(worker, self._produced[worker])
        return left > 0

    def _adopt_progress(self, worker: int, taking: Taking, *, its_turn: bool) -> None:
        chunk = None if self._inboxes[worker].ready else self._inboxes[worker].take(0)
        after = None if chunk is None else chunk.progress
        if self.held is not None:
            after = self.held.sift(worker, after, None if its_turn else self._references[worker])
        if after is not None:
            self._references[worker] = Reference.to(after)
            taking.progressed = True

    def _tell_flush_points(self) -> None:
        """Tell the workers which of their items the reader waits for; where that is known, lists may be longer."""
        self._flushes = self._flush_places()
        for worker in self._active:
            if worker in self._inboxes:
                self._flush(worker)

    def _flush(self, worker: int) -> None:
        if self._flushes is not None and worker not in self._finished:
            first, place = self._flushes
            active, step = self._active, len(self._active)
            at = place + (bisect_left(active, worker) - bisect_left(active, first)) % step
            count = self._produced[worker] - self._began[worker]
            self._inboxes[worker].flush_at(FlushPoints(count, at % self._batch, step, self._batch))

    def _flush_places(self) -> tuple[int, int] | None:
        """Return the worker whose turn it is, and the number of its item from where this began, if all take turns."""
        return None

    def _turn(self, worker: int) -> tuple[int, int]:
        """Sort key: workers in the order in which they are opened."""
        return self._distance(worker)

    def _distance(self, worker: int) -> tuple[bool, int]:
        """Sort key: workers from the next one on, and around."""
        return worker < self._next_worker, worker

    def _now(self) -> MergeState:
        produced, references = list(self._produced), list(self._references)
        return MergeState(self._name, self._next_worker, produced, references, self._log, self.choosing)

    @abstractmethod
    def _rounds_of(self, ready: Collection[int]) -> int:
        """Return how many rounds over these workers, from the next one on, equal picking one by one.

        Args:
          ready: the active workers that have items, at least as many as the caller will take of the answer.
        """

    @abstractmethod
    def _pick(self, taking: Taking) -> int | None:
        """Return the next worker by the rule, if it has an item; None: it must be waited for."""

    @abstractmethod
    def _awaited(self) -> list[int]:
        """Return the workers that it waits for: an item of any of them would do."""

    @abstractmethod
    async def _wait(self) -> None:
        """Wait until `_choose` may have another answer."""


class MergeState(State):
    """The state of a merge: how many items each worker gave, and the state of each."""

    __slots__ = ("choosing", "log", "name", "next_worker", "number", "produced", "references")

    def __init__(
        self, name: str, next_worker: int, produced: list[int], references: list[Reference], log: Log, choosing: bool
    ) -> None:
        self.name = name
        self.next_worker = next_worker
        self.produced = produced
        self.references = references
        self.log = log
        self.choosing = choosing
        self.number = sum(produced)  # of choices made: one an item

    @property
    def workers(self) -> list[State]:
        """The workers' states, in index order."""
        return [reference.get() for reference in self.references]

    def json(self, until: State | None = None) -> Tree:
        later = self if until is None else cast(MergeState, until.latest)
        planned = self.log.planned
        logged = self.log.between(self.number, max(later.number, planned) if self.choosing else planned)
        beyond = later.number > max(self.number, planned) and not self.choosing and self.log.leads_to(later.log)
        own: dict[str, Json] = {
            "next_worker": self.next_worker,
            "produced": self.produced,
            **_written(self.produced, logged, later.produced if beyond else None),
            "workers": list(map(Reference.json, self.references, later.references)),
        }
        return {self.name: own}

    def tally(self, found: Tally) -> None:
        found.taken += self.number
        for worker, reference in enumerate(self.references):
            found.worker = self.name, worker
            reference.get().tally(found)
        found.worker = None

    def where(self) -> str:
        return self.references[self.next_worker - 1].get().where()  # of the worker that gave the last item


def choices_of(own: Json) -> list[int]:
    """Return the choices that a merge is to repeat first, as its own part of a state has them."""
    replay: list[int] = list(own["replay"])
    produced = list(own["produced"])
    for worker in replay:
        produced[worker] += 1
    stops = own.get("strict_to") or produced
    places = [(n, worker) for worker, first in enumerate(produced) for n in range(first, stops[worker])]
    return replay + [worker for _, worker in sorted(places)]


def _written(produced: Sequence[int], choices: list[int], strict_to: Sequence[int] | None) -> dict[str, Json]:
    """Return choices as they are written.

    A strict merge takes from the worker with the smallest (produced, index), so what it takes has rising places: item
    n of worker w has the place (n, w). A sequence with rising places may be written as counts.

    Args:
      produced: by each worker, before the first of them.
      choices: in their order.
      strict_to: the counts to which strict order goes on after them; None: it doesn't.
    """
    counts, last, rising = list(produced), (-1, -1), 0  # `rising`: where the places begin to rise to the end
    for at, worker in enumerate(choices):
        place = (counts[worker], worker)
        rising = rising if last < place else at
        last = place
        counts[worker] += 1
    if strict_to is not None:
        onward = min((n, at) for at, (n, stop) in enumerate(zip(counts, strict_to, strict=True)) if n < stop)
        rising = rising if last < onward else len(choices)
        counts = list(strict_to)
    written: dict[str, Json] = {"replay": choices[:rising]}
    return written | {"strict_to": counts} if sum(counts) > sum(produced) + rising else written


class _Begins:
    """The column of the states that workers are opened at; each is made once."""

    __slots__ = ("_begin", "_made")

    def __init__(self, begin: Callable[[int], State]) -> None:
        self._begin = begin
        self._made: dict[int, State] = {}

    def __getitem__(self, worker: int, /) -> State:
        state = self._made.get(worker)
        if state is None:
            state = self._made[worker] = self._begin(worker)
        return state


class Taking:
    """What one pull takes from the workers; also the column of the states after its items, made when read."""

    __slots__ = ("_columns", "_made", "before", "log", "picks", "progressed")

    def __init__(self, before: MergeState) -> None:
        self.before = before
        self.log = before.log
        self.picks: list[int] = []
        self.progressed = False
        self._columns: dict[int, States] = {}
        self._made: dict[
            int, tuple[int, Reference]
        ] = {}  # of each worker, the last one: the next state may have it, too

    def add(self, worker: int, chunk: Chunk[Any], held: DeferredProgress | None) -> Reference:
        """Note all items of `worker` in this list, and return the worker's state after them."""
        self._columns[worker] = chunk.states
        if held is not None:
            last = Reference(chunk.states, len(chunk.items) - 1)
            held.forget(worker)
            if held.sift(worker, chunk.progress, last) is None:
                return last
        if chunk.progress is not None:
            self.progressed = True
        return chunk.end_reference

    def __getitem__(self, index: int, /) -> State:
        before = self.before
        produced, references = list(before.produced), list(before.references)
        counts: dict[int, int] = {}
        for worker in self.picks[: index + 1]:
            counts[worker] = counts.get(worker, 0) + 1
        for worker, count in counts.items():
            produced[worker] += count
            made = self._made.get(worker)
            if made is None or made[0] != count:
                made = self._made[worker] = count, Reference(self._columns[worker], count - 1)
            references[worker] = made[1]
        next_worker = (self.picks[index] + 1) % len(produced)
        return MergeState(before.name, next_worker, produced, references, self.log, before.choosing)


class DeferredProgress:
    """Progress over skipped items, deferred until its worker's turn.

    The number of items skipped before an item of a strict merge must not depend on the speed of its workers. So what a
    worker skips after its last item counts when the merge looks for its next one. Progress without a skipped item
    counts as soon as it is seen.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def forget(self, worker: int) -> None:
        """Drop the deferred progress of `worker`: it gave a later item."""
        self._states.pop(worker, None)

    def sift(self, worker: int, after: State | None, current: Reference | None) -> State | None:
        """Return the progress of `worker` that counts now, if there is any.

        Args:
          after: new progress, later than what is deferred; None: there is none.
          current: the worker's state in the merge; None: it is its turn, so all counts.
        """
        if current is None:
            held = self._states.pop(worker, None)
            return held if after is None else after
        if after is None or _skipped(after) == _skipped(current.get()):
            return after
        self._states[worker] = after
        return None


def _skipped(state: State) -> dict[tuple[int, str], int]:
    tally = Tally()
    state.tally(tally)
    return tally.skipped
