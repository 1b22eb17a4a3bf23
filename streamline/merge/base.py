"""What a strict and a best-effort merge have in common: the flow over workers' flows, its fast path, and its states.

Strict always takes from the active worker with the smallest (produced, index). Best-effort looks, without blocking, at
the first `max_skips_per_round` + 1 eligible workers from `next_worker` on, takes the first that has an item, and waits
only when none has; a worker more than `max_lead` items ahead of the slowest is not eligible. While every worker has
items ready, both take whole rounds at once, in the same order as one by one. They run in the task that pulls, and call
no user code: a cancelled pull has taken nothing.

A best-effort merge logs each choice, the index of a worker, for as long as a mark before it is referenced. A strict
merge logs nothing: its order between two states follows from their counts. In a saved state, `replay` lists the choices
to repeat first, in a merge of either kind; of a tail in strict order, only the counts reached are saved (`strict_to`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from streamline.core.channel import Inbox
from streamline.core.choices import Log
from streamline.core.flow import Chunk, Flow
from streamline.core.state import Json, Reference, State, States, Tally, Tree

T = TypeVar("T")

MANY = 2**31
"""Rounds: no bound but the items."""


@dataclass(frozen=True, kw_only=True)
class Merge(ABC):
    """A merge, as written in a plan; printed with its options.

    Attributes:
      chooses: whether another run may deliver the items in another order.
    """

    name: str
    chooses: ClassVar[bool]

    @abstractmethod
    def open(self, inboxes: Sequence[Inbox[T]], own: Json | None) -> MergeFlow[T]:
        """Return the merge of the workers' inboxes, at its own part of a state or at the beginning."""


class MergeFlow(Flow[T]):
    """What both merges share: taking lists, counting, repeating choices.

    Args:
      name: the stage's name.
      inboxes: the workers' channels, opened at the workers' states, in index order.
      own: this stage's part of the state that it is opened at.

    Attributes:
      on_wait: called with the workers that the merge begins to wait for, and after the wait with none.
      on_ended: called with a worker that has ended, and the number of its items.
      held: progress deferred until its worker's turn; None: all progress counts as soon as it is seen.
    """

    apart = True
    choosing = False
    held: DeferredProgress | None = None

    def __init__(self, name: str, inboxes: Sequence[Inbox[T]], own: Any = None) -> None:
        self._name = name
        self._inboxes = inboxes
        self._produced: list[int] = [0] * len(inboxes) if own is None else list(own["produced"])
        self._next_worker: int = 0 if own is None else own["next_worker"]
        self._replay: list[int] = [] if own is None else choices_of(own)[::-1]
        made = sum(self._produced)
        self._log = Log(made, self._replay[::-1], made + len(self._replay))
        self._references = [Reference.to(inbox.state) for inbox in inboxes]
        self._active = list(range(len(inboxes)))
        self._finished: set[int] = set()  # all others
        self._started = False
        self.on_wait: Callable[[Sequence[int]], None] | None = None
        self.on_ended: Callable[[int, int], None] | None = None
        self._began = list(self._produced)
        self._untold = False  # of flush points, since a worker has ended
        self._batch = 1  # items that the reader needs to go on, from where this began
        self._left: dict[int, int] = {}  # by worker looked at in this pull: items not chosen yet
        super().__init__(self._now())

    def release(self) -> None:
        for inbox in self._inboxes:
            inbox.release()

    async def aclose(self) -> None:
        await super().aclose()
        for inbox in self._inboxes:
            inbox.cancel()  # all at once, then wait for each
        for inbox in self._inboxes:
            await inbox.aclose()

    def awaited(self) -> list[tuple[int, State]]:
        """Return the workers that it waits for, with the states after the last items taken from them."""
        waited = [worker for worker in self._awaited() if self._inboxes[worker].idle] if self._active else []
        return [(worker, self._inboxes[worker].state) for worker in waited]

    async def _next(self, limit: int) -> Chunk[T] | None:
        if not self._started:
            self._started = True
            self._batch = self.need
            self._tell_flush_points()
            for inbox in self._inboxes:
                inbox.start()
        self.release()
        while self._active:
            chunk = self._rounds(limit)
            if chunk is None and (self.held or not all(self._inboxes[worker].idle for worker in self._active)):
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
            await self._wait()
        finally:
            if self.meter is not None:
                self.meter.wait_ends()
            if self.on_wait is not None:
                self.on_wait(())

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
        self._next_worker = (order[-1] + 1) % len(inboxes)
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
                again = isinstance(error, Exception) or any(inbox.failure is error for inbox in self._inboxes)
                if again and (picks or taking.progressed):
                    break  # it is raised again, after them
                raise
            if worker is None or (self.held is not None and taking.progressed):  # which the states of this list lack
                break
            picks.append(worker)
            self._left[worker] -= 1
            self._produced[worker] += 1
            self._next_worker = (worker + 1) % len(self._inboxes)
            if repeating:
                self._replay.pop()
        items = self._take_picked(taking)
        if not items:
            for worker in self._active:
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
            inbox = self._inboxes[worker]
            left = self._left[worker] = inbox.ready
            if not left:
                self._adopt_progress(worker, taking, its_turn=True)
                if inbox.over:
                    self._active.remove(worker)
                    self._finished.add(worker)
                    self._untold = True
                    if self.on_ended is not None:
                        self.on_ended(worker, self._produced[worker])
        return left > 0

    def _adopt_progress(self, worker: int, taking: Taking, *, its_turn: bool) -> None:
        chunk = None if self._inboxes[worker].ready else self._inboxes[worker].take(0)
        after = None if chunk is None else chunk.after
        if self.held is not None:
            after = self.held.sift(worker, after, None if its_turn else self._references[worker])
        if after is not None:
            self._references[worker] = Reference.to(after)
            taking.progressed = True

    def _tell_flush_points(self) -> None:
        """Tell the workers which of their items the reader waits for; where that is known, lists may be longer."""

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
        ahead: Sequence[State | None] = [None] * len(self.references) if until is None else later.workers
        planned = self.log.planned
        logged = self.log.between(self.number, max(later.number, planned) if self.choosing else planned)
        beyond = later.number > max(self.number, planned) and not self.choosing and self.log.leads_to(later.log)
        own: dict[str, Json] = {
            "next_worker": self.next_worker,
            "produced": self.produced,
            **_written(self.produced, logged, later.produced if beyond else None),
            "workers": [state.json(then) for state, then in zip(self.workers, ahead, strict=True)],
        }
        return {self.name: own}

    def tally(self, found: Tally) -> None:
        found.taken += self.number
        for reference in self.references:
            reference.get().tally(found)

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


class Taking:
    """What one pull takes from the workers; also the column of the states after its items, made when read."""

    __slots__ = ("_columns", "before", "log", "picks", "progressed")

    def __init__(self, before: MergeState) -> None:
        self.before = before
        self.log = before.log
        self.picks: list[int] = []
        self.progressed = False
        self._columns: dict[int, States] = {}

    def add(self, worker: int, chunk: Chunk[Any], held: DeferredProgress | None) -> Reference:
        """Note all items of `worker` in this list, and return the worker's state after them."""
        self._columns[worker] = chunk.states
        if held is not None:
            last = Reference(chunk.states, len(chunk.items) - 1)
            held.forget(worker)
            if held.sift(worker, chunk.after, last) is None:
                return last
        if chunk.after is not None:
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
            references[worker] = Reference(self._columns[worker], count - 1)
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
