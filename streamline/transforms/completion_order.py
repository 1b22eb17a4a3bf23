"""The order in which results of concurrent calls leave: that of the inputs, or that of completion. No I/O, no waiting.

In order of completion, inputs are numbered from where the flow was opened. The state after a result: the upstream's at
the low-water mark (all inputs before it are done), and which inputs beyond it are done too, as ranges. This flow
chooses, so a mark on it also needs the choices made since: the inputs' numbers, counted from the low-water mark, in the
order of completion. A flow opened at such a state completes those first, in that order, and holds the others meanwhile.

Of inputs 0 to 5, let 0, 3, 4, 1 be delivered in this order, and the state after the third be read:

    delivered                   low-water mark   state
    0, 3, 4                     1                the upstream's after input 0, {"done": [[2, 4]], "replay": []}
    the same, since then 1      1                likewise, with "replay": [0]

3 and 4 are 2 and 3 counted from the mark, and 1 is 0. A resume passes over 3 and 4, and gives 1, then 2 and 5.

Deliveries are kept in segments that link forward: a segment that no state refers to is garbage collected, and a state
costs nothing until it is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from streamline.core.capacity import LIST_ITEMS
from streamline.core.choices import Branch, LogSegment
from streamline.core.error_policy import Failure
from streamline.core.flow import Chunk
from streamline.core.state import MadeStates, Shifted, State, States, Tally, Tree, part_json, trimmed
from streamline.core.state_types import Count, Range, total

In = TypeVar("In")
Out = TypeVar("Out")

PENDING: Any = object()
"""In place of a result that isn't there yet."""


class AdmittedInputs(Generic[In]):
    """Consecutive inputs that were admitted together.

    Attributes:
      first: the position of `items[0]` in the upstream, counted from where it was opened.
    """

    __slots__ = ("after", "first", "items", "results", "states")

    def __init__(self, chunk: Chunk[In], first: int) -> None:
        self.items = chunk.items
        self.states: States = chunk.states
        self.after: State | None = chunk.progress
        self.first = first
        self.results: list[Any] = [PENDING] * len(chunk.items)


class SkippedResult:
    """In place of a result: the item failed, and is skipped."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Delivery(ABC, Generic[In, Out]):
    """The order in which results leave, and their states.

    Attributes:
      max_ahead: inputs that may be admitted beyond the oldest one that isn't done, where that is bounded.
      num_skipped: skipped items among the results put and not taken yet.
      on_skip: called when one of them would have been taken.
    """

    max_ahead = 0
    num_skipped = 0
    on_skip: Callable[[Failure], None]

    def _next_due(self, results: list[Any]) -> tuple[list[Any], bool]:
        """Return the results before the first skipped item; where that comes first, count it, and return True."""
        if not self.num_skipped:
            return results, False
        at = next((at for at, result in enumerate(results) if isinstance(result, SkippedResult)), len(results))
        skipped = not at and bool(results)
        if skipped:
            self.num_skipped -= 1
            self.on_skip(results[0].failure)
        return results[:at], skipped

    @property
    def ready(self) -> int:
        """Results that `take` would return, where counting them costs nothing; else 0."""
        return 0

    def room(self, position: int) -> int:
        """Return how many inputs from `position` on may be admitted; 0: none before further deliveries."""
        return LIST_ITEMS

    @abstractmethod
    def admit(self, chunk: Chunk[In], position: int) -> list[AdmittedInputs[In]]:
        """Admit a chunk whose first item has `position`, and return what of it has to run now."""

    @abstractmethod
    def put(self, part: AdmittedInputs[In], index: int, result: Out) -> bool:
        """Put the result of item `index` of `part`; return whether something has become due."""

    def release_held(self) -> list[AdmittedInputs[In]]:
        """Return what was held back when it was admitted, and has to run now."""
        return []

    @property
    def stranded(self) -> bool:
        """Whether inputs that the state names have not come."""
        return False

    @abstractmethod
    def take(self) -> Chunk[Out] | None:
        """Return what is due; None: nothing."""

    def due(self, position: int) -> bool:
        """Return whether a failure of the input at `position` may be reported although others still run."""
        return False


class InOrder(Delivery[In, Out]):
    """Results leave in the order of their inputs, with their inputs' states."""

    def __init__(self) -> None:
        self._parts: deque[AdmittedInputs[In]] = deque()
        self._next = 0

    def admit(self, chunk: Chunk[In], position: int) -> list[AdmittedInputs[In]]:
        part = AdmittedInputs(chunk, position)
        self._parts.append(part)
        return [part]

    def put(self, part: AdmittedInputs[In], index: int, result: Out) -> bool:
        part.results[index] = result
        return index == self._next and part is self._parts[0]

    def take(self) -> Chunk[Out] | None:
        if not self._parts:
            return None
        part, start = self._parts[0], self._next
        results, stop, end, after = part.results, start, len(part.results), None
        while stop < end and results[stop] is not PENDING:
            stop += 1
        if start == stop < end:
            return None
        due, skipped = self._next_due(results[start:stop])
        self._next = stop = start + len(due) + skipped
        if stop == end:
            self._parts.popleft()
            self._next, after = 0, part.after
        if skipped and after is None:
            after = part.states[start]
        return Chunk(due, Shifted(part.states, start), after)

    def due(self, position: int) -> bool:
        return bool(self._parts) and position == self._parts[0].first + self._next


SEGMENT_ITEMS = 1024
"""Deliveries in a segment: reading a state takes time in proportion."""


class CompletionPart(msgspec.Struct, frozen=True):
    """The stage's part of a saved state: inputs beyond the low-water mark that are done, and those to do first."""

    done: list[Range]
    replay: list[Count]

    def __post_init__(self) -> None:
        total(self.done)
        done = [(one.first, one.stop) for one in self.done]
        if done != sorted(done) or any(one[1] >= other[0] for one, other in pairwise(done)):
            raise ValueError(f"Expected ranges in order that don't touch, got {done[:4]}")
        if len(set(self.replay)) < len(self.replay):
            raise ValueError("Expected each input once in `replay`")
        if any(first <= position < stop for position in self.replay for first, stop in done):
            raise ValueError("Expected inputs in `replay` that are not done")


def raise_low_water(low: int, done: set[int], arrived: int) -> int:
    """Return the low-water mark, which was at `low`, and remove the inputs before it from `done`.

    It doesn't pass `arrived`: at a resume, inputs may be known as done whose states are still to arrive.
    """
    while low in done and low < arrived:
        done.discard(low)
        low += 1
    return low


class InputList(NamedTuple):
    """A list of inputs that has arrived: [first, stop) and the states after them, then progress."""

    first: int
    stop: int
    states: States
    after: State | None


class DeliverySegment(LogSegment):
    """Consecutive deliveries, and the inputs that their states may refer to."""

    __slots__ = ("done", "handed_out", "inputs", "low", "planned", "positions", "start", "state")

    later: DeliverySegment | None

    def __init__(self, name: str, start: int, low: int, done: frozenset[int], state: State, planned: list[int]) -> None:
        super().__init__(name)
        self.start = start  # deliveries before this segment
        self.low = low  # every input before this one was done when the segment began
        self.done = done  # inputs beyond it that were done too
        self.state = state  # the upstream's right before input `low`
        self.planned = planned  # the choices to repeat, outstanding until they are made
        self.positions: list[int] = []
        self.inputs: list[InputList] = []
        self.handed_out = 0  # lists of inputs that a state refers to

    def state_after(self, position: int, seen: int) -> State:
        """Return the upstream's state after input `position`, or the last one before it in `seen` lists."""
        last = None
        for arrival in self.inputs[:seen]:
            first = arrival.first
            if first == arrival.stop:
                first -= 1  # progress alone comes after the input before it
            if first > position:
                break
            last = arrival
        if last is None:
            return self.state
        if last.after is not None and position >= last.stop - 1:
            return last.after
        return last.states[min(position, last.stop - 1) - last.first]

    @property
    def arrived(self) -> int:
        return self.inputs[-1].stop if self.inputs else self.low

    def low_water(self, count: int, seen: int) -> tuple[int, set[int]]:
        """Return the low-water mark after `count` deliveries and `seen` lists of inputs, and what is done beyond it."""
        done = {*self.done, *self.positions[:count]}
        return raise_low_water(self.low, done, self.inputs[seen - 1].stop if seen else self.low), done

    def news(self, sent: tuple[int, int] | None) -> tuple[Any, Any]:
        positions, inputs = sent or (0, 0)
        now = len(self.positions), self.handed_out
        if now == sent:
            return None, sent
        head = (self.start, self.low, self.done, self.state, self.planned) if sent is None else None
        more = [
            (first, stop, trimmed(states, 0, stop - first), after)
            for first, stop, states, after in self.inputs[inputs : now[1]]
        ]
        return (head, self.positions[positions : now[0]], more), now

    def learn(self, news: Any, shift: int) -> None:
        head, positions, inputs = news
        if head is not None:
            self.start, low, done, self.state, planned = head
            self.low = low + shift
            self.done = frozenset(at + shift for at in done)
            self.planned = [at + shift for at in planned]
            self.positions, self.inputs, self.handed_out = [], [], 0
        self.positions += [at + shift for at in positions]
        self.inputs += [InputList(first + shift, stop + shift, states, after) for first, stop, states, after in inputs]
        self.handed_out += len(inputs)


class UnorderedState(State):
    """The state of an unordered map after `count` deliveries of a segment, and `seen` lists of inputs."""

    __slots__ = ("_count", "_name", "_seen", "_segment")

    def __init__(self, name: str, segment: DeliverySegment, seen: int, count: int) -> None:
        self._name = name
        self._segment = segment
        self._count = count
        self._seen = seen

    def json(self, until: State | None = None) -> Tree:
        later = self if until is None else cast(UnorderedState, until.latest)
        low, done = self._low_water
        replay = self._delivered_until(later) + later._segment.planned[later._segment.start + later._count :]
        tree = self._mark.json(later._segment.state_after(max([low - 1, *done, *replay]), later._seen))
        tree[self._name] = part_json(CompletionPart(ranges(done, low), [position - low for position in replay]))
        return tree

    @property
    def _low_water(self) -> tuple[int, set[int]]:
        return self._segment.low_water(self._count, self._seen)

    @property
    def _mark(self) -> State:
        """The upstream's state at the low-water mark."""
        return self._segment.state_after(self._low_water[0] - 1, self._seen)

    def tally(self, found: Tally) -> None:
        self._mark.tally(found)

    def where(self) -> str:
        return self._segment.state_after(self._low_water[0], self._seen).where()

    def forks(self) -> Iterator[Branch]:
        yield Branch(self._name, self._segment, self._count, self._low_water[0])
        yield from self._mark.forks()

    def _delivered_until(self, later: UnorderedState) -> list[int]:
        found: list[int] = []
        segment, start = self._segment, self._count
        while segment is not later._segment:
            stop, onward = segment.onward(later._segment)
            found += segment.positions[start:stop]
            segment, start = cast(DeliverySegment, onward), 0
        return found + segment.positions[start : later._count]


def ranges(positions: Iterable[int], low: int) -> list[Range]:
    """Return positions as ranges, counted from `low`."""
    found: list[Range] = []
    for position in sorted(positions):
        if found and found[-1].stop == position - low:
            found[-1].stop += 1
        else:
            found.append(Range(position - low, position - low + 1))
    return found


class _Resume(Generic[In, Out]):
    """What a saved state says of the inputs that come again: which are done, and which are to be delivered first.

    Attributes:
      outstanding: choices that are to be repeated, in order; the other inputs are parked meanwhile.
    """

    def __init__(self, own: CompletionPart) -> None:
        self.done = {at for one in own.done for at in range(one.first, one.stop)}
        self.outstanding = deque(own.replay)
        self._planned = frozenset(self.outstanding)
        self._next = deque(self.outstanding)  # those that have not been started
        self._arrived: dict[int, AdmittedInputs[In]] = {}  # their inputs that have arrived
        self._early: dict[int, Out] = {}  # their results
        self.parked: list[AdmittedInputs[In]] = []

    def admit(self, chunk: Chunk[In], position: int) -> list[AdmittedInputs[In]]:
        """Pass over what was done; start logged choices in their order, and hold all others while some are outstanding.

        A choice started early would keep its place in the channel until the others are done, and the channel may be
        smaller now than it was.
        """
        parts: list[AdmittedInputs[In]] = []
        for index in range(len(chunk.items)):
            at = position + index
            if at in self.done:
                self.done.discard(at)
                continue
            part = AdmittedInputs(chunk.part(index, 1), at)
            if at in self._planned:
                self._arrived[at] = part
            elif self.outstanding:
                self.parked.append(part)
            else:
                parts.append(part)
        while self._next and self._next[0] in self._arrived:
            parts.append(self._arrived.pop(self._next.popleft()))
        return parts

    def put(self, position: int, result: Out) -> Iterator[tuple[int, Out]]:
        """Take a result, and yield those whose turn it is, with their positions."""
        self._early[position] = result
        while self.outstanding and self.outstanding[0] in self._early:
            position = self.outstanding.popleft()
            yield position, self._early.pop(position)


class AsCompleted(Delivery[In, Out]):
    """Results leave when they are complete; at a resume, first in the order that was chosen before.

    Args:
      begin: the upstream's state where it was opened.
      own: this stage's part of that state.
    """

    def __init__(self, name: str, begin: State, own: CompletionPart, max_ahead: int) -> None:
        self._name = name
        self.max_ahead = max_ahead
        self._resume = resume = _Resume[In, Out](own)
        self._low, self._done = 0, set(resume.done)  # the low-water mark after what was taken, and what is done beyond
        self._segment = DeliverySegment(name, 0, 0, frozenset(resume.done), begin, list(resume.outstanding))
        self._most_inputs = SEGMENT_ITEMS
        self._positions: list[int] = []
        self._results: list[Out] = []
        self._progress = False
        self._running = 0

    @property
    def ready(self) -> int:
        return len(self._results)

    @property
    def begin(self) -> State:
        """The state before the first delivery."""
        return UnorderedState(self._name, self._segment, 0, 0)

    def room(self, position: int) -> int:
        self._low = raise_low_water(self._low, self._done, self._segment.arrived)
        limit = self._low + self.max_ahead
        if self._resume.outstanding:  # they were within the bound of the run that chose them
            limit = max(limit, max(self._resume.outstanding) + 1)
        return max(0, limit - position)

    def admit(self, chunk: Chunk[In], position: int) -> list[AdmittedInputs[In]]:
        count, inputs, resume = len(chunk.items), self._segment.inputs, self._resume
        if not count and len(inputs) > self._segment.handed_out and inputs[-1].first == inputs[-1].stop == position:
            inputs.pop()  # one progress at a place is enough, unless a state refers to it
        inputs.append(InputList(position, position + count, chunk.states, chunk.progress))
        self._progress = chunk.progress is not None
        if resume.done or resume.outstanding:
            parts = resume.admit(chunk, position)
            self._running += len(parts)
            return parts
        self._running += count
        return [AdmittedInputs(chunk, position)] if count else []

    def put(self, part: AdmittedInputs[In], index: int, result: Out) -> bool:
        self._running -= 1
        if not self._resume.outstanding:
            self._positions.append(part.first + index)
            self._results.append(result)
            return True
        for position, due in self._resume.put(part.first + index, result):
            self._positions.append(position)
            self._results.append(due)
        return bool(self._results)

    def release_held(self) -> list[AdmittedInputs[In]]:
        resume = self._resume
        if resume.outstanding or not resume.parked:
            return []
        parked, resume.parked = resume.parked, []
        self._running += len(parked)
        return parked

    def take(self) -> Chunk[Out] | None:
        segment = self._segment
        if len(segment.positions) >= SEGMENT_ITEMS or len(segment.inputs) >= self._most_inputs:
            segment = self._next_segment()
        count, seen = len(segment.positions), len(segment.inputs)
        if not self._results:
            if not self._progress or self._running or self._resume.parked:
                return None
            self._progress = False
            segment.handed_out = seen
            return Chunk((), (), UnorderedState(self._name, segment, seen, count))
        due, skipped = self._next_due(self._results)
        taken = len(due) + skipped
        positions = self._positions[:taken]
        self._results, self._positions = self._results[taken:], self._positions[taken:]
        segment.handed_out = seen
        segment.positions += positions
        self._done.update(positions)
        self._low = raise_low_water(self._low, self._done, segment.arrived)
        after = UnorderedState(self._name, segment, seen, count + 1) if skipped else None
        return Chunk(due, MadeStates(UnorderedState, self._name, segment, seen, first=count + 1), after)

    @property
    def stranded(self) -> bool:
        return bool(self._resume.outstanding)

    def _next_segment(self) -> DeliverySegment:
        """Begin a new segment, which keeps no inputs before the low-water mark."""
        old, low = self._segment, self._low
        start, state = old.start + len(old.positions), old.state_after(low - 1, len(old.inputs))
        new = DeliverySegment(self._name, start, low, frozenset(self._done), state, old.planned)
        new.inputs = [arrival for arrival in old.inputs if arrival.stop > low]
        self._most_inputs = max(SEGMENT_ITEMS, 2 * len(new.inputs))
        old.later = self._segment = new
        return new
