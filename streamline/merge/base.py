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
from itertools import islice, pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

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
    """The inboxes of `count` workers, in index order."""

    count: int
    open: Callable[[int], Inbox[T]]  # opens a worker, once, at its state, and returns its inbox
    begin: Callable[[int], State]  # returns the state that a worker is opened at; in any thread
    first: int = FIRST_WORKERS  # workers to open with the merge; the others, when they are to be started

    @classmethod
    def of(cls, inboxes: Sequence[Inbox[T]]) -> Inboxes[T]:
        """Return those of workers that are open."""
        return cls(len(inboxes), inboxes.__getitem__, lambda worker: inboxes[worker].state, first=len(inboxes))


@dataclass(frozen=True, kw_only=True)
class Merge(ABC):
    """A merge, as written in a plan; printed with its options."""

    name: str
    chooses: ClassVar[bool]  # whether another run may deliver the items in another order

    @abstractmethod
    def open(self, inboxes: Inboxes[T], own: Json | None) -> MergeFlow[T]:
        """Return the merge of the workers' inboxes, at its own part of a state or at the beginning."""


class MergeInputs(Generic[T]):
    """The workers of a merge: what was taken from each, which are open, and which have ended.

    Args:
      on_ready: called when a worker may have something new to give.

    Attributes:
      produced: items taken from each worker; `began` when the merge was opened.
      references: the state of each, after the last item taken from it.
      inboxes: of those that are open.
      active: those that haven't ended, in index order.
      unstarted: in the order in which they are started.
      turns: which of their items end a batch, where that is known.
    """

    def __init__(self, workers: Inboxes[T], produced: list[int], on_ready: Callable[[], None] | None) -> None:
        self._workers, self._on_ready = workers, on_ready
        self.produced, self.began = produced, list(produced)
        begins = _Begins(workers.begin)
        self.references = [Reference(begins, worker) for worker in range(workers.count)]
        self.inboxes: dict[int, Inbox[T]] = {}
        self.active = list(range(workers.count))
        self.finished: set[int] = set()
        self.unstarted: dict[int, None] = {}
        self.turns: BatchTurns | None = None
        self._fresh: set[int] = set()  # started, and never looked at

    def begin(self, order: list[int]) -> None:
        """Open the first workers of those, which are to be started in this order."""
        self.unstarted = dict.fromkeys(order)
        for worker in order[: self._workers.first]:
            self._open(worker)

    def start_more(self, count: int) -> None:
        for worker in list(islice(self.unstarted, count)):
            self._start(worker)

    async def start_meanwhile(self, awaited: Sequence[int]) -> None:
        """Start the workers that are waited for, and the others as long as there is nothing to see of those."""
        for worker in awaited:
            self.look_at(worker)
        while self.unstarted and all(map(self.is_idle, awaited)):
            self.start_more(WORKERS_A_TURN)
            await anyio.lowlevel.checkpoint()
            await self.inboxes[awaited[0]].passage()

    def look_at(self, worker: int) -> None:
        """Start a worker that isn't running, and one more for each that is looked at for the first time."""
        if worker in self.unstarted:
            self._start(worker)
        if worker in self._fresh:
            self._fresh.discard(worker)
            self.start_more(1)

    def is_idle(self, worker: int) -> bool:
        inbox = self.inboxes.get(worker)
        return inbox is None or inbox.nothing_pending

    def end(self, worker: int) -> None:
        self.active.remove(worker)
        self.finished.add(worker)

    def flush_by(self, turns: BatchTurns | None) -> None:
        """Tell the workers which of their items the reader waits for; where that is known, lists may be longer."""
        self.turns = turns
        if turns is not None:
            first = bisect_left(self.active, turns.first)
            for at, worker in enumerate(self.active):
                if worker in self.inboxes:
                    self._flush(worker, turns, at - first)

    def release(self) -> None:
        for inbox in self.inboxes.values():
            inbox.release()

    async def aclose(self) -> None:
        self.unstarted.clear()
        for inbox in self.inboxes.values():
            inbox.cancel()  # all at once, then wait for each
        for inbox in self.inboxes.values():
            await inbox.aclose()

    def _start(self, worker: int) -> None:
        if worker not in self.inboxes:
            self._open(worker)
        del self.unstarted[worker]
        self._fresh.add(worker)
        self.inboxes[worker].start()

    def _open(self, worker: int) -> None:
        inbox = self.inboxes[worker] = self._workers.open(worker)
        self.references[worker].becomes(inbox.state)  # also in marks: choices since then follow those of its log
        if self._on_ready is not None:
            inbox.on_ready = self._on_ready
        if self.turns is not None and worker not in self.finished:
            ahead = bisect_left(self.active, worker) - bisect_left(self.active, self.turns.first)
            self._flush(worker, self.turns, ahead)

    def _flush(self, worker: int, turns: BatchTurns, ahead: int) -> None:
        """Tell a worker, whose turn is so many after the first one's."""
        step, (_, place, size) = len(self.active), turns
        count = self.produced[worker] - self.began[worker]
        self.inboxes[worker].flush_at(FlushPoints(count, (place + ahead % step) % size, step, size))


class BatchTurns(NamedTuple):
    """All workers take turns: next is worker `first`; its item has this place in batches of so many items."""

    first: int
    place: int
    batch: int


class MergeFlow(Flow[T]):
    """What both merges share: taking lists, counting, repeating choices.

    Args:
      own: this stage's part of the state that it is opened at.
      on_ready: called when a worker may have something new to give.

    Attributes:
      on_wait: called with the workers that the merge begins to wait for, and after the wait with none.
      on_ended: called with a worker that has ended, and the number of its items.
      held: progress deferred until its worker's turn; None: all progress counts as soon as it is seen.
    """

    has_own_task = True
    choosing = False
    held: DeferredProgress | None = None

    def __init__(
        self, name: str, workers: Inboxes[T], own: Any = None, on_ready: Callable[[], None] | None = None
    ) -> None:
        produced = [0] * workers.count if own is None else list(own["produced"])
        self._name = name
        self._inputs = MergeInputs(workers, produced, on_ready)
        self._next_worker: int = 0 if own is None else own["next_worker"]
        self._replay: list[int] = [] if own is None else choices_of(own)[::-1]
        made = sum(produced)
        self._log = Log(made, self._replay[::-1], made + len(self._replay))
        self.on_wait: Callable[[Sequence[int]], None] | None = None
        self.on_ended: Callable[[int, int], None] | None = None
        self._left: dict[int, int] = {}  # by worker looked at in this pull: items not chosen yet
        self._batch = 0  # items that the reader needs to go on, from where this began; 0: it hasn't begun
        self._inputs.begin(sorted(self._inputs.active, key=self._turn))
        super().__init__(self._now())

    def release(self) -> None:
        self._inputs.release()

    async def aclose(self) -> None:
        await super().aclose()
        await self._inputs.aclose()

    def awaited(self) -> list[tuple[int, State]]:
        """Return the workers that it waits for, with the states after the last items taken from them."""
        inputs = self._inputs
        waited = [worker for worker in self._workers_awaited() if inputs.is_idle(worker)] if inputs.active else []
        opened, begins = inputs.inboxes, inputs.references
        return [(worker, opened[worker].state if worker in opened else begins[worker].get()) for worker in waited]

    async def _next(self, limit: int) -> Chunk[T] | None:
        inputs = self._inputs
        if not self._batch:
            self._batch = self.min_items
            inputs.flush_by(self._batch_turns())
            inputs.start_more(FIRST_WORKERS)
        inputs.release()
        active = inputs.active
        while active:
            workers = len(active)
            chunk = None if inputs.unstarted else self._rounds(limit)
            if chunk is None and (self.held or not all(map(inputs.is_idle, active))):
                chunk = self._steps(limit)
            if len(active) < workers:
                inputs.flush_by(self._batch_turns())
            if chunk is not None:
                return chunk
            if active:
                await self._wait_reported()
        return None

    async def _wait_reported(self) -> None:
        """Wait; report the workers waited for, and the time."""
        if self.on_wait is not None:
            self.on_wait(self._workers_awaited())
        if self.meter is not None:
            self.meter.wait_begins("wait_input")
        try:
            if self._inputs.unstarted:
                await self._inputs.start_meanwhile(self._workers_awaited())
            await self._wait()
        finally:
            if self.meter is not None:
                self.meter.wait_ends()
            if self.on_wait is not None:
                self.on_wait(())

    def _rounds(self, limit: int) -> Chunk[T] | None:
        """Take whole rounds at once, each with one item of every worker that has some."""
        inputs, inboxes = self._inputs, self._inputs.inboxes
        ready = {worker: count for worker in inputs.active if (count := inboxes[worker].ready)}
        if not ready or self._replay:
            return None
        rounds = min(limit // len(ready), *ready.values(), self._rounds_of(ready))
        if rounds < 1:
            return None
        order = sorted(ready, key=self._distance) if len(ready) > 1 else list(ready)
        take = MergeTake(self._now(), order * rounds)
        items: list[Any] = [] if len(order) == 1 else [None] * (rounds * len(order))
        for at, worker in enumerate(order):
            chunk = cast("Chunk[T]", inboxes[worker].take(rounds))
            if items:
                items[at :: len(order)] = chunk.items
            else:
                items = cast("list[T]", chunk.items)
            inputs.references[worker] = take.add(worker, chunk, self.held)
            inputs.produced[worker] += rounds
        self._next_worker = (order[-1] + 1) % len(inputs.produced)
        return self._chunk_of(items, take)

    def _steps(self, limit: int) -> Chunk[T] | None:
        """Choose one by one, while the next choice needs no waiting; without a choice, adopt progress."""
        inputs, take = self._inputs, MergeTake(self._now(), [])
        picks, self._left = take.picks, {}
        repeating = bool(self._replay)
        while len(picks) < limit and inputs.active and repeating == bool(self._replay):
            try:
                worker = self._choose(take)
            except BaseException as error:
                if self._comes_again(error) and (picks or take.progressed):
                    break  # after what was chosen
                raise
            if worker is None:
                break
            if self.held is not None and take.progressed:
                break  # that progress is not in the states of this list's items
            picks.append(worker)
            self._left[worker] -= 1
            inputs.produced[worker] += 1
            self._next_worker = (worker + 1) % len(inputs.produced)
            if repeating:
                self._replay.pop()
        items = self._take_picked(take)
        if not items:
            for worker in inputs.active:
                if worker in inputs.inboxes:
                    self._adopt_progress(worker, take, its_turn=False)
        return self._chunk_of(items, take) if items or take.progressed else None

    def _comes_again(self, error: BaseException) -> bool:
        """Whether the next pull raises this error too: a worker's failure is kept by its inbox."""
        inboxes = self._inputs.inboxes.values()
        return isinstance(error, Exception) or any(inbox.failure is error for inbox in inboxes)

    def _take_picked(self, take: MergeTake) -> list[T]:
        """Take the chosen items, a list from each worker, and return them in the order of the choices."""
        inboxes, references = self._inputs.inboxes, self._inputs.references
        queues: dict[int, Iterator[T]] = {}
        for worker, count in Counter(take.picks).items():
            chunk = cast("Chunk[T]", inboxes[worker].take(count))
            references[worker] = take.add(worker, chunk, self.held)
            queues[worker] = iter(chunk.items)
        return [next(queues[worker]) for worker in take.picks]

    def _chunk_of(self, items: list[T], take: MergeTake) -> Chunk[T]:
        """Log the choices, and return what was taken as a chunk."""
        before = take.before.number
        if items and self.choosing and before >= self._log.planned:
            take.log = self._log.later = Log(before, take.picks, self._log.planned)
            self._log = take.log
        return Chunk(items, take, self._now() if take.progressed else None)

    def _choose(self, take: MergeTake) -> int | None:
        """Return the worker to take the next item from, which has one; None: it has none yet."""
        if self._replay:
            return self._replay[-1] if self._look(self._replay[-1], take) else None
        return self._pick(take)

    def _look(self, worker: int, take: MergeTake) -> bool:
        """Return whether `worker` has an item that isn't chosen yet; if it had none, note its progress and its end."""
        left = self._left.get(worker)
        if left is None:
            self._inputs.look_at(worker)
            inbox = self._inputs.inboxes[worker]
            left = self._left[worker] = inbox.ready
            if not left:
                self._adopt_progress(worker, take, its_turn=True)
                if inbox.exhausted:
                    self._inputs.end(worker)
                    if self.on_ended is not None:
                        self.on_ended(worker, self._inputs.produced[worker])
        return left > 0

    def _adopt_progress(self, worker: int, take: MergeTake, *, its_turn: bool) -> None:
        inbox, references = self._inputs.inboxes[worker], self._inputs.references
        chunk = None if inbox.ready else inbox.take(0)
        after = None if chunk is None else chunk.progress
        if self.held is not None:
            after = self.held.sift(worker, after, None if its_turn else references[worker])
        if after is not None:
            references[worker] = Reference.to(after)
            take.progressed = True

    def _batch_turns(self) -> BatchTurns | None:
        """Return whose turn it is, if all workers take turns."""
        return None

    def _turn(self, worker: int) -> tuple[int, int]:
        """Sort key: workers in the order in which they are opened."""
        return self._distance(worker)

    def _distance(self, worker: int) -> tuple[bool, int]:
        """Sort key: workers from the next one on, and around."""
        return worker < self._next_worker, worker

    def _now(self) -> MergeState:
        produced, references = list(self._inputs.produced), list(self._inputs.references)
        return MergeState(self._name, self._next_worker, produced, references, self._log, self.choosing)

    @abstractmethod
    def _rounds_of(self, ready: Collection[int]) -> int:
        """Return how many rounds over these workers, from the next one on, equal picking one by one.

        Args:
          ready: the active workers that have items, at least as many as the caller will take of the answer.
        """

    @abstractmethod
    def _pick(self, take: MergeTake) -> int | None:
        """Return the next worker by the rule, if it has an item; None: it must be waited for."""

    @abstractmethod
    def _workers_awaited(self) -> list[int]:
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
            **choices_json(self.produced, logged, later.produced if beyond else None),
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


def choices_json(produced: Sequence[int], choices: list[int], strict_to: Sequence[int] | None) -> dict[str, Json]:
    """Return choices as a state has them.

    A strict merge takes from the worker with the smallest (produced, index), so what it takes has rising places: item
    n of worker w has the place (n, w). A sequence with rising places may be written as counts.

    Args:
      produced: by each worker, before the first choice.
      strict_to: the counts to which strict order goes on after the choices; None: it doesn't.
    """
    counts, places = list(produced), list[tuple[int, int]]()
    for worker in choices:
        places.append((counts[worker], worker))
        counts[worker] += 1
    if strict_to is not None:
        places.append(min((n, at) for at, (n, stop) in enumerate(zip(counts, strict_to, strict=True)) if n < stop))
        counts = list(strict_to)
    falls = [at for at, (last, place) in enumerate(pairwise(places), 1) if not last < place]
    rising = falls[-1] if falls else 0  # from here on, places rise to the end
    found: dict[str, Json] = {"replay": choices[:rising]}
    return found | {"strict_to": counts} if sum(counts) > sum(produced) + rising else found


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


class MergeTake:
    """What one pull takes from the workers; also the column of the states after its items, made when read.

    Attributes:
      before: the merge's state before them.
      picks: the worker of each item.
      progressed: a worker's state has moved without an item.
    """

    __slots__ = ("_columns", "_made", "before", "log", "picks", "progressed")

    def __init__(self, before: MergeState, picks: list[int]) -> None:
        self.before = before
        self.log = before.log
        self.picks = picks
        self.progressed = False
        self._columns: dict[int, States] = {}
        # of each worker, the last one: the next state may have it, too
        self._made: dict[int, tuple[int, Reference]] = {}

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
        if after is None or _skip_counts(after) == _skip_counts(current.get()):
            return after
        self._states[worker] = after
        return None


def _skip_counts(state: State) -> dict[tuple[int, str], int]:
    tally = Tally()
    state.tally(tally)
    return tally.skipped
