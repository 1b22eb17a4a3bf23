"""Where a merge stands, and the choices that it has made.

A best-effort merge chooses, so each choice, the index of a worker, is logged, for as long as somebody holds a mark
before it. The states of a merged list are worked out from its choices when one of them is read.

A strict merge logs nothing: its order between two states follows from what each worker gave meanwhile. A mark has it
all the same, since the run that reads again from there may merge in another way. In JSON, `replay` lists the choices to
repeat. Of those at its end that are in strict order, only the counts are written that they lead to, in `strict_to`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from streamline.core.choices import Log
from streamline.core.flow import Chunk
from streamline.core.state import Json, Reference, State, States, Tally, Tree

__all__ = ["Held", "MergeState", "Taking", "choices_of"]


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
    n of worker w has the place (n, w). Whatever has rising places may be written as counts.

    Args:
      produced: by each worker, before the first of them.
      choices: in their order.
      strict_to: the counts to which strict order goes on behind them; None: to none.
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
