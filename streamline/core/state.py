"""States: where a flow stands, right after an item it returned.

A state is immutable and lazy: stages hand out small objects that refer to one another, and only `json` turns
them into a tree that can be saved, one entry per stage, keyed by the stage's name. A list of items carries its
states as one *column*, an object that makes the state of item i when it is asked for: most states are never read.

Choosing flows (a best-effort merge, an unordered map) decide an order that another run would decide differently.
A stage that goes back to an older upstream state, a *mark*, and reads again from there must see the same items
again, so the state that it keeps is `Since(mark, now)`: the mark, plus every choice made between the two. The walk
that collects those choices is the `until` argument of `json`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import msgspec

if TYPE_CHECKING:
    from streamline.core.choices import Branch

Json: TypeAlias = Any  # a recursive alias says more, and makes every reader of a state cast
Tree: TypeAlias = dict[str, Json]
K = TypeVar("K")


def digest(body: Json) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    canonical = json.dumps(body, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


class Tally:
    """What was consumed up to a state, summed over all parts of a plan.

    Attributes:
      skipped: items that were skipped because of an error, by (shard, stage).
      taken: items that the merge took from its workers.
      stands: the part of a source or a repeat, by its name: of several workers, that of the last one.
      worker: the merge's name and the worker's number while a worker's state is tallied; else None.
      counts: `skipped` as states have it.
      places: the `worker` in which those were skipped.
    """

    __slots__ = ("counts", "places", "skipped", "stands", "taken", "worker")

    def __init__(self) -> None:
        self.worker: tuple[str, int] | None = None
        self.places: dict[tuple[int, str], tuple[str, int] | None] = {}
        self.skipped: dict[tuple[int, str], int] = {}
        self.counts: dict[tuple[int, str], SkipCounts] = {}
        self.taken = 0
        self.stands: dict[str, Any] = {}


class State(ABC):
    """Where a flow stands: what resumes right *after* the last item it returned."""

    __slots__ = ()

    @abstractmethod
    def json(self, until: State | None = None) -> Tree:
        """Return this state as JSON, keyed by stage name.

        Args:
          until: a later state of the same flow; the choices made up to there are then part of the result, and a
            flow opened at it repeats them before it chooses freely.
        """

    @property
    def latest(self) -> State:
        """The state that an `until` refers to: of a mark, where the stage stands now."""
        return self

    @abstractmethod
    def tally(self, found: Tally) -> None:
        """Add what was consumed up to here; after a mark, up to where the stage stands now.

        A source adds its position; a stage must tally its upstream's state, or what was skipped there is never counted.
        """

    def where(self) -> str:
        """Return the source position as text: "train.jsonl line 18"."""
        return ""

    def forks(self) -> Iterator[Branch]:
        """Yield the places in their logs at which choosing flows begin if a flow is opened at `json()` of this."""
        return iter(())


class At(State):
    """A source's state: its position, as JSON. `item`: the position of the item before it, if in another file."""

    __slots__ = ("item", "name", "own")

    def __init__(self, name: str, own: Json, item: Json = None) -> None:
        self.name = name
        self.own = own
        self.item = own if item is None else item

    def json(self, until: State | None = None) -> Tree:
        return {self.name: self.own}

    def tally(self, found: Tally) -> None:
        found.stands[self.name] = self.own

    def where(self) -> str:
        if isinstance(self.item, dict):
            return ", ".join(f"{key} {value}" for key, value in self.item.items())
        return f"item {self.item} of {self.name}, counted from 1"


def part_json(own: Any) -> Json:
    """Return a stage's part of a state, a struct or JSON, as JSON."""
    return msgspec.to_builtins(own) if isinstance(own, msgspec.Struct) else own


class Over(State):
    """A stage's own part (a struct, or JSON) over the state of its upstream."""

    __slots__ = ("name", "own", "upstream")

    def __init__(self, name: str, own: Any, upstream: State) -> None:
        self.name = name
        self.own = own
        self.upstream = upstream

    def json(self, until: State | None = None) -> Tree:
        tree = self.upstream.json(None if until is None else cast(Over, until.latest).upstream)
        tree[self.name] = part_json(self.own)
        return tree

    def tally(self, found: Tally) -> None:
        self.upstream.tally(found)

    def where(self) -> str:
        return self.upstream.where()

    def forks(self) -> Iterator[Branch]:
        return self.upstream.forks()


SkipCounts: TypeAlias = int | list[int]
"""How many items a stage has skipped, in a state as JSON. Where a resume reads again what was consumed, two numbers:
the count at the mark, from which the stage counts on, and the count that was consumed."""


def skips_in(tree: Tree) -> dict[str, SkipCounts]:
    """Return how many items were skipped in a state as JSON, by stage, without those of a merge's workers."""
    found = tree.get("errors")
    return dict(found) if isinstance(found, dict) else {}


def with_skips(tree: Tree, counts: Mapping[str, SkipCounts]) -> Tree:
    """Return a copy of a state as JSON with these counts of skipped items, by stage, sorted, and no others."""
    others = {name: own for name, own in tree.items() if name != "errors"}
    return {"errors": dict(sorted(counts.items())), **others} if counts else others


def consumed_count(skips: SkipCounts) -> int:
    """Return how many skipped items are consumed."""
    return skips if isinstance(skips, int) else max(skips)


def counts_to_replay(marked: Mapping[K, SkipCounts], consumed: Mapping[K, int]) -> dict[K, SkipCounts]:
    """Return the counts of a mark, for a resume that reads again from there what was consumed."""
    found = dict(marked)
    for key, count in consumed.items():
        first = marked.get(key, 0)
        if count > consumed_count(first):
            found[key] = [first if isinstance(first, int) else first[0], count]
    return found


class Skipped(Over):
    """How many items a stage has skipped because of an error (`own`), over its state.

    Only states after the first such item have it, so a mark may lack it: `latest` and `json(until)` look through it.
    """

    __slots__ = ("shard",)

    def __init__(self, name: str, shard: int, count: SkipCounts, upstream: State) -> None:
        super().__init__(name, count, upstream)
        self.shard = shard

    def json(self, until: State | None = None) -> Tree:
        tree = self.upstream.json(until)
        return with_skips(tree, {**skips_in(tree), self.name: self.own})

    @property
    def latest(self) -> State:
        return self.upstream.latest

    def tally(self, found: Tally) -> None:
        found.skipped[self.shard, self.name] = consumed_count(self.own)
        found.counts[self.shard, self.name] = self.own
        found.places[self.shard, self.name] = found.worker
        self.upstream.tally(found)


class Since(State):
    """A mark that a stage goes back to, and the choices made from there to `now`."""

    __slots__ = ("mark", "now")

    def __init__(self, mark: State, now: State) -> None:
        self.mark = mark
        self.now = now

    def json(self, until: State | None = None) -> Tree:
        tree, found = self.mark.json(self.now if until is None else until), Tally()
        self.tally(found)
        for (shard, name), count in found.skipped.items():
            place = found.places[shard, name]
            if place is None:
                tree = with_skips(tree, counts_to_replay(skips_in(tree), {name: count}))
            else:
                merge, worker = place
                workers = tree[merge]["workers"]
                workers[worker] = with_skips(
                    workers[worker], counts_to_replay(skips_in(workers[worker]), {name: count})
                )
        return tree

    @property
    def latest(self) -> State:
        return self.now.latest

    def tally(self, found: Tally) -> None:
        self.now.tally(found)

    def where(self) -> str:
        return self.now.where()

    def forks(self) -> Iterator[Branch]:
        return self.mark.forks()


class HeldSince(Since):
    """Likewise, of items that are held and served one by one: skips among them count once all were served."""

    __slots__ = ()

    def tally(self, found: Tally) -> None:
        self.mark.tally(found)


class States(Protocol):
    """A column: the state right after item i of a list, made when it is read."""

    def __getitem__(self, index: int, /) -> State: ...


def trimmed(states: States, first: int, count: int) -> States:
    """Return states first ... first + count - 1 of a column, without what only the others need: for sending."""
    if not count:
        return ()
    trim = getattr(states, "trimmed", None)
    if trim is not None:
        return cast(States, trim(first, count))
    if isinstance(states, list | tuple):
        return states[first : first + count]
    return Shifted(states, first) if first else states


class DeferredState(State):
    """A state that is loaded or made when it is read."""

    __slots__ = ()

    @property
    @abstractmethod
    def real(self) -> State: ...

    def json(self, until: State | None = None) -> Tree:
        return self.real.json(None if until is None else until.latest)

    @property
    def latest(self) -> State:
        return self.real.latest

    def tally(self, found: Tally) -> None:
        self.real.tally(found)

    def where(self) -> str:
        return self.real.where()

    def forks(self) -> Iterator[Branch]:
        return self.real.forks()


class Reference:
    """A state in a column, made when it is read: most never are."""

    __slots__ = ("_index", "_states", "_written")

    def __init__(self, states: States, index: int) -> None:
        self._states = states
        self._index = index
        self._written: tuple[Reference | None, Tree] | None = None

    @classmethod
    def to(cls, state: State) -> Reference:
        return cls((state,), 0)

    def get(self) -> State:
        return self._states[self._index]

    def json(self, until: Reference) -> Tree:
        """Return the state's JSON, with the choices made up to `until`. It is cached, and must not be changed."""
        then = None if until is self else until
        written = self._written
        if written is None or written[0] is not then:
            written = self._written = then, self.get().json(None if then is None else then.get())
        return written[1]

    def becomes(self, state: State) -> None:
        """Refer to `state` from now on: the same state, of the flow that is open now."""
        self._states = {self._index: state}  # in one step: another thread may be making it
        self._written = None


class MadeStates:
    """A column whose state i is `make(name, *given, first + i, states[i])`, without what is None.

    `make`, a class of states or a function of a module, is pickled with the column.
    """

    __slots__ = ("_first", "_given", "_make", "_name", "_states")

    def __init__(
        self, make: Callable[..., State], name: str, *given: Any, first: int | None = None, states: States | None = None
    ) -> None:
        self._make, self._name, self._given, self._first, self._states = make, name, given, first, states

    def __getitem__(self, index: int, /) -> State:
        number = () if self._first is None else (self._first + index,)
        upstream = () if self._states is None else (self._states[index],)
        return self._make(self._name, *self._given, *number, *upstream)

    def trimmed(self, first: int, count: int) -> States:
        number = None if self._first is None else self._first + first
        states = None if self._states is None else trimmed(self._states, first, count)
        return MadeStates(self._make, self._name, *self._given, first=number, states=states)


class CountedStates(MadeStates):
    """The states of a source that counts its items; `first`: the count after the list's first one."""

    __slots__ = ()

    def __init__(self, name: str, first: int) -> None:
        super().__init__(At, name, first=first)


class NumberedStates(MadeStates):
    """A stage's count of its items, over the upstream's states."""

    __slots__ = ()

    def __init__(self, name: str, first: int, states: States) -> None:
        super().__init__(Over, name, first=first, states=states)


class Shifted:
    """A column without its first `by` states."""

    __slots__ = ("_by", "_states")

    def __init__(self, states: States, by: int) -> None:
        whole, before = (states._states, states._by) if isinstance(states, Shifted) else (states, 0)
        self._states: States = whole  # a part of a part refers to the whole list
        self._by: int = before + by

    def __getitem__(self, index: int, /) -> State:
        return self._states[self._by + index]

    def trimmed(self, first: int, count: int) -> States:
        return trimmed(self._states, self._by + first, count)


class Picked:
    """Some states of a column, in order."""

    __slots__ = ("_indices", "_states")

    def __init__(self, states: States, indices: Sequence[int]) -> None:
        self._states = states
        self._indices = indices

    def __getitem__(self, index: int, /) -> State:
        return self._states[self._indices[index]]

    def trimmed(self, first: int, count: int) -> States:
        indices = self._indices[first : first + count]
        start = indices[0]
        return Picked(trimmed(self._states, start, indices[-1] + 1 - start), [index - start for index in indices])


class Joined:
    """Columns end to end."""

    __slots__ = ("_columns", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._columns: list[States] = []

    def add(self, start: int, states: States) -> None:
        """Append a column whose first state is number `start`; starts increase."""
        self._starts.append(start)
        self._columns.append(states)

    def __getitem__(self, index: int, /) -> State:
        at = bisect_right(self._starts, index) - 1
        return self._columns[at][index - self._starts[at]]

    def trimmed(self, first: int, count: int) -> States:
        at = bisect_right(self._starts, first) - 1
        joined, stop = Joined(), first + count
        while at < len(self._starts) and (start := self._starts[at]) < stop:
            end = min(stop, self._starts[at + 1]) if at + 1 < len(self._starts) else stop
            begin = max(first, start)
            part = trimmed(self._columns[at], begin - start, end - begin)
            if end - begin == count:
                return part
            joined.add(begin - first, part)
            at += 1
        return joined
