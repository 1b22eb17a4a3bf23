"""Where a merge stands, and the choices that it has made.

A best-effort merge chooses, so each choice, the index of a worker, is logged, for as long as somebody holds a mark
before it. The states of a merged list are worked out from its choices when one of them is read.
"""

from __future__ import annotations

from typing import Any, cast

from streamline.choices import Stretch
from streamline.flow import Chunk
from streamline.states import Json, Reference, State, States, Tally, Tree

__all__ = ["Held", "Log", "MergeState", "Taking"]


class Log(Stretch):
    """A stretch of choices, numbered on from one to the next."""

    __slots__ = ("made", "planned", "start")

    later: Log | None

    def __init__(self, start: int, made: list[int], planned: int, name: str = "") -> None:
        super().__init__(name)
        self.start = start
        self.made = made
        self.planned = planned  # choices below this number were given at the opening, and stand until they are made

    def between(self, first: int, stop: int, target: Log | None = None) -> list[int]:
        """Return choices first ... stop - 1, all of this stretch or later, on the way to `target`."""
        found: list[int] = []
        log: Log | None = self
        while log is not None and log.start < stop:
            until, onward = log.onward(target or self)
            end = stop if until is None else min(stop, until)
            found += log.made[max(0, first - log.start) : max(0, end - log.start)]
            log = onward
        return found

    def news(self, told: Any) -> tuple[Any, Any]:
        return (None, told) if told else ((self.start, self.made, self.planned), True)

    def learn(self, news: Any, shift: int) -> None:
        start, self.made, planned = news
        self.start, self.planned = start + shift, planned + shift


class MergeState(State):
    """Where a merge stands: how many items each worker gave, and the state of each."""

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
        later = None if until is None else cast(MergeState, until.latest)
        ahead: list[State | None] = [None] * len(self.references) if later is None else [*later.workers]
        stop = later.number if later is not None and self.choosing else self.number
        own: dict[str, Json] = {
            "next_worker": self.next_worker,
            "produced": self.produced,
            "replay": self.log.between(self.number, max(stop, self.log.planned)),
            "workers": [state.json(then) for state, then in zip(self.workers, ahead, strict=True)],
        }
        return {self.name: own}

    def tally(self, found: Tally) -> None:
        found.taken += self.number
        for reference in self.references:
            reference.get().tally(found)

    def where(self) -> str:
        return self.references[self.next_worker - 1].get().where()  # of the worker that gave the last item


class Taking:
    """What one pull takes from the workers; also the column of the states behind its items, made when read."""

    __slots__ = ("_columns", "before", "log", "picks", "progressed")

    def __init__(self, before: MergeState) -> None:
        self.before = before
        self.log = before.log
        self.picks: list[int] = []
        self.progressed = False
        self._columns: dict[int, States] = {}

    def add(self, worker: int, chunk: Chunk[Any], held: Held | None) -> Reference:
        """Take note of all items of `worker` in here, and return the worker's state behind them."""
        self._columns[worker] = chunk.states
        if held is not None:
            last = Reference(chunk.states, len(chunk.items) - 1)
            held.forget(worker)
            if held.sift(worker, chunk.after, last) is None:
                return last
        if chunk.after is not None:
            self.progressed = True
        return chunk.behind

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


class Held:
    """Progress behind skipped items, until it is its worker's turn.

    How many items are skipped up to an item of a strict merge shall not depend on how fast its workers are. So what a
    worker skips behind its last item counts when the merge looks there for the next one. Progress without a skipped
    item counts as soon as it is seen.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def forget(self, worker: int) -> None:
        """`worker` gave an item, whose state is behind what was held of it."""
        self._states.pop(worker, None)

    def sift(self, worker: int, after: State | None, behind: Reference | None) -> State | None:
        """Return the progress of `worker` that counts now, if there is any.

        Args:
          after: new progress, behind what is held; None: there is none.
          behind: where the merge says that the worker stands; None: it is its turn, so all counts.
        """
        if behind is None:
            held = self._states.pop(worker, None)
            return held if after is None else after
        if after is None or _skipped(after) == _skipped(behind.get()):
            return after
        self._states[worker] = after
        return None


def _skipped(state: State) -> dict[tuple[int, str], int]:
    tally = Tally()
    state.tally(tally)
    return tally.skipped
