"""What the two ends of a link say to each other. *Near* is the running, *far* the host; workers go by a number.

States, failures and what was left out cross as bytes where a link copies, and as they are where it doesn't; see
`streamline.backends.ipc.codec`.

Items on their way across a border.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from streamline.core.counters import Doing, StageCounts
from streamline.core.duplicate_check import Beginning
from streamline.core.state import Tree

__all__ = [
    "AtWork",
    "Broken",
    "CallProgress",
    "Close",
    "Closed",
    "Counts",
    "Credit",
    "Culprit",
    "Ended",
    "Hello",
    "Hold",
    "ItemsMessage",
    "Leave",
    "LiveEnd",
    "LiveItems",
    "Message",
    "Observe",
    "Open",
    "PackedItems",
    "PackingError",
    "ProgressMessage",
    "Release",
    "SkippedItem",
    "Span",
    "Taken",
    "WaitingTasks",
    "WhatWaits",
    "WorkerOpened",
]


Carried: TypeAlias = Any
"""A state, a failure: bytes, or the object itself."""


Span: TypeAlias = "tuple[tuple[str, int], Doing, float, float]"
"""A stretch of work or of waiting: of the stage of this name in the worker of this shard, what, began, ended."""


# From the running to the host -----------------------------------------------------------------------------------------
class Hello(NamedTuple):
    """What comes first.

    Attributes:
      host: how messages call it: "process 2, pid 4711".
      meters: to count in, where objects are handed over; None: in some of its own, and `Counts` tell of them.
      observed: as in `Observe`.
      ask: where objects are handed over, what decides on items to be left out; None: the host knows whom to ask.
    """

    host: str
    meters: Any
    observed: bool
    ask: Any


class Observe(NamedTuple):
    """Tell of every stretch of work and of waiting from now on; or don't."""

    observed: bool


class Open(NamedTuple):
    """Run a worker.

    Attributes:
      epoch: as in a `Site`, like `skipped`.
      items: that may be on their way until there is credit for more.
      size: likewise, their bytes; one item is always admitted.
      held: items that are on their way already: an earlier host sent them. Like `held_size`, of `items` and `size`.
      fed: its source is what the running feeds it; so many items of it may be on their way. 0: it reads by itself.
      careful: tell of each call of user code; an earlier host has died of one, perhaps.
      culprit: the call that earlier hosts have died of.
    """

    worker: int
    shard: int
    num_shards: int
    epoch: tuple[int, ...]
    skipped: Mapping[tuple[int, str], int]
    state: Tree | None
    items: int
    size: int
    held: int = 0
    held_size: int = 0
    fed: int = 0
    careful: bool = False
    culprit: Culprit | None = None


class Culprit(NamedTuple):
    """A call of user code that ends processes: the how-many-th of a stage's function since the worker was opened.

    The other attributes are those of the `WorkerDied` that is raised in its place.
    """

    stage: str
    number: int
    message: str
    shard: int
    process: int
    exit: str


class Credit(NamedTuple):
    """So many items, of so many bytes, have been dealt with. No items: the worker's progress has arrived."""

    worker: int
    items: int
    size: int


class Close(NamedTuple):
    """End a worker; `Closed` is the answer."""

    worker: int


class LiveItems(NamedTuple):
    """Items of a live source, for a worker; `first` is the number of the first one among all it was ever handed."""

    worker: int
    packed: PackedItems
    first: int


class LiveEnd(NamedTuple):
    """A worker's feed has ended, or failed."""

    worker: int
    failure: Carried | None


class Hold(NamedTuple):
    """Let nothing move; `AtWork` is the answer, again whenever that changes, until nothing is at work.

    Attributes:
      number: of the pause.
    """

    number: int = 0


class Release(NamedTuple):
    """Let things move again."""


class WhatWaits(NamedTuple):
    """Say what the tasks wait for; `Waiting` is the answer."""


class Leave(NamedTuple):
    """The running is over: clean up, and hang up."""


# From the host to the running -----------------------------------------------------------------------------------------
class WorkerOpened(NamedTuple):
    """A worker stands at this state.

    Attributes:
      items: that are on their way at the most, if its last stage allows less than `Open` does.
    """

    worker: int
    begin: Carried
    items: int


class ItemsMessage(NamedTuple):
    """Items of a worker, and the states behind them."""

    worker: int
    packed: PackedItems
    states: Carried


class ProgressMessage(NamedTuple):
    """How far a worker has come: all that followed its last item was dropped.

    One at a time is on its way, until there is `Credit` for it: they must not pile up before a running that is busy
    elsewhere. Of careful workers, all.
    """

    worker: int
    states: Carried


class Ended(NamedTuple):
    """A worker has given all that it has, or failed."""

    worker: int
    failure: Carried | None


class CallProgress(NamedTuple):
    """A careful worker is about to call a stage's function; or that call is over."""

    worker: int
    stage: str
    number: int
    over: bool


class Closed(NamedTuple):
    """A worker has been closed, and everything it opened."""

    worker: int


class Taken(NamedTuple):
    """A worker has dealt with so many of the items that it was fed."""

    worker: int
    items: int


class SkippedItem(NamedTuple):
    """A stage has left an item out: what `Errors.happened` takes."""

    key: tuple[int, str]
    failure: Carried
    epoch: tuple[int, ...]
    number: int


class AtWork(NamedTuple):
    """What doesn't rest yet in a pause, by name; nothing: everything does."""

    number: int
    names: tuple[str, ...]


class WaitingTasks(NamedTuple):
    """The stacks of the tasks that wait in user code."""

    stacks: str


class Counts(NamedTuple):
    """What the host's meters say: of those that say something new. Times are those of `time.perf_counter`, which has
    one clock for all processes of a machine.

    Attributes:
      channels: (stage, shard, capacity, items, depth, peak).
      spans: since the last ones, if they are wanted.
      traffics: (source, requests, retries, bytes, hits, misses and bytes of its cache).
    """

    stages: tuple[StageCounts, ...]
    channels: tuple[tuple[str, int, int, int, int, int], ...] = ()
    spans: tuple[Span, ...] = ()
    traffics: tuple[tuple[str, int, int, int, int, int, int], ...] = ()


class Broken(NamedTuple):
    """The host can't run this at all."""

    failure: Carried


Message: TypeAlias = (
    Hello
    | Observe
    | Open
    | Credit
    | Close
    | LiveItems
    | LiveEnd
    | Hold
    | Release
    | Leave
    | WhatWaits
    | WorkerOpened
    | ItemsMessage
    | ProgressMessage
    | CallProgress
    | Ended
    | Closed
    | Taken
    | SkippedItem
    | AtWork
    | Beginning
    | Counts
    | WaitingTasks
    | Broken
)


class PackedItems(Protocol):
    """A list of items, packed by one end of a link for the other.

    Attributes:
      count: items.
      nbytes: of all of them; 0 where nothing is copied.
    """

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class PackingError(Exception):
    """An item that can't cross; the `__cause__` says why.

    Attributes:
      index: of the item in the list.
      kind: its type's name, or of that in it which can't.
    """

    def __init__(self, index: int, kind: str) -> None:
        super().__init__(index, kind)
        self.index = index
        self.kind = kind
