"""The messages between the consumer's side of a run and one of its hosts. Workers are identified by a number.

States, failures and records of skipped items are bytes where the link copies, else the objects
(`streamline.backends.ipc.state_codec`, `streamline.backends.ipc.exceptions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from streamline.core.channel import FlushPoints
from streamline.core.figures import ChannelStats, Doing, ReadStats, StageStats
from streamline.core.limits import Limit
from streamline.core.meters import Ongoing
from streamline.core.state import SkipCounts, Tree
from streamline.errors import WorkerDied

Encoded: TypeAlias = Any
"""A state, a failure: bytes, or the object itself."""

Span: TypeAlias = "tuple[tuple[str, int], Doing, float, float]"
"""A span of work or waiting: (stage name, shard), what, start, end."""


# From the consumer to the host ----------------------------------------------------------------------------------------
class Hello(NamedTuple):
    """The first message.

    Attributes:
      host: its name in messages: "process 2, pid 4711".
      meters: to count in, where objects are handed over; None: in some of its own, and `MetricsUpdate` tell of them.
      ask: decides on items to skip, where the link doesn't copy; None: the host asks over its stdio socket.
      answer: with `HostReady`.
      share: runs with the same one, and not b"", may share their workers: their plans are the same.
      widths: the values of knobs, as in `SetKnobs`; None: they are as written, and stay so.
    """

    host: str
    meters: Any = None
    observed: bool = False
    ask: Any = None
    answer: bool = False
    share: bytes = b""
    widths: Mapping[str, int] | None = None


class SetKnobs(NamedTuple):
    """Run with these values of knobs from now on, by the names of their stages."""

    widths: Mapping[str, int]


class Observe(NamedTuple):
    """Report spans of work and waiting from now on, or stop."""

    observed: bool


class OpenWorker(NamedTuple):
    """Run a worker.

    Attributes:
      epoch, skipped: as in a `Site`.
      items: that may be in flight until there is credit for more.
      size: bytes that may be in flight; one item is always admitted.
      in_flight, in_flight_bytes: sent by an earlier host and not consumed yet; they count, too.
      live_capacity: items of a live source, read by the consumer, that may be in flight to it. 0: it reads by itself.
      track_calls: report each call of user code; one may have ended an earlier host.
      crashing_call: the call that ended earlier hosts.
    """

    worker: int
    shard: int
    num_shards: int
    epoch: tuple[int, ...]
    skipped: Mapping[tuple[int, str], SkipCounts]
    state: Tree | None
    items: int
    size: int
    in_flight: int = 0
    in_flight_bytes: int = 0
    live_capacity: int = 0
    track_calls: bool = False
    crashing_call: CrashingCall | None = None
    flush_points: FlushPoints | None = None


class CrashingCall(NamedTuple):
    """A call of user code that ends processes, and the failure to raise in its place.

    `number` counts the stage's calls from where the worker was opened.
    """

    stage: str
    number: int
    failure: WorkerDied


class Credit(NamedTuple):
    """Items of `size` bytes have been consumed. 0 items: the worker's progress has arrived."""

    worker: int
    items: int
    size: int


class FlushAt(NamedTuple):
    """Up to which items a worker may make lists longer, counted from where it was opened."""

    worker: int
    points: FlushPoints


class CloseWorker(NamedTuple):
    """End a worker; `WorkerClosed` is the answer."""

    worker: int


class LiveItems(NamedTuple):
    """Items of a live source, for a worker; `first` is the index of the first one in its feed."""

    worker: int
    packed: PackedItems
    first: int


class LiveEnd(NamedTuple):
    """A worker's feed has ended, or failed."""

    worker: int
    failure: Encoded | None


class PermitsIssued(NamedTuple):
    """Permits of the limit with this key, for calls; `share` of them may go from one call to the next."""

    key: str
    permits: int
    share: int


class PauseHost(NamedTuple):
    """Pause; `PauseStatus` of this number is the answer, and sent again on changes until all is at rest."""

    number: int = 0


class ResumeHost(NamedTuple):
    """End the pause."""


class StacksRequest(NamedTuple):
    """Ask what the tasks wait for; `TaskStacks` is the answer."""


class Shutdown(NamedTuple):
    """The run is over: clean up, and hang up."""


# From the host to the consumer ----------------------------------------------------------------------------------------
class HostReady(NamedTuple):
    """The host has loaded the plan: workers that are opened from now on begin at once."""


class WorkerOpened(NamedTuple):
    """A worker was opened at this state; `items` are fewer than in `OpenWorker` if its last channel is smaller."""

    worker: int
    begin: Encoded
    items: int


class ItemsMessage(NamedTuple):
    """Items of a worker, and the states after them."""

    worker: int
    packed: PackedItems
    states: Encoded


class ProgressMessage(NamedTuple):
    """A worker's state, where the inputs after its last item gave none.

    One at a time is in flight, until there is `Credit` for it: they must not pile up in front of a busy consumer. A
    worker whose calls are tracked sends all.
    """

    worker: int
    states: Encoded


class WorkerEnded(NamedTuple):
    """A worker has finished, or failed."""

    worker: int
    failure: Encoded | None


class CallProgress(NamedTuple):
    """A tracked worker is about to call a stage's function; or that call is over."""

    worker: int
    stage: str
    number: int
    over: bool


class WorkerClosed(NamedTuple):
    """A worker has been closed, and everything it opened."""

    worker: int


class LiveCredit(NamedTuple):
    """A worker has consumed items of its live source."""

    worker: int
    items: int


class PermitsWanted(NamedTuple):
    """Calls wait for permits of a limit."""

    limit: Limit
    permits: int


class PermitsReturned(NamedTuple):
    """Calls under the limit with this key are over; `unused`: they have never begun."""

    key: str
    permits: int
    unused: bool


class SkippedItem(NamedTuple):
    """A stage has skipped an item: the arguments of `Errors.record_skip`."""

    key: tuple[int, str]
    failure: Encoded
    epoch: tuple[int, ...]
    number: int


class PauseStatus(NamedTuple):
    """The names of what isn't at rest yet in a pause."""

    number: int
    names: tuple[str, ...]


class TaskStacks(NamedTuple):
    """The stacks of the tasks that wait in user code."""

    stacks: str


class MetricsUpdate(NamedTuple):
    """Meters that have changed. Times are of `time.perf_counter`, one clock for all processes of a machine.

    Attributes:
      clock: the sender's, where it is on another machine; None: it is not.
      stages: what each has counted, and what it is at.
      spans: since the last update, if observed.
    """

    stages: tuple[tuple[StageStats, Ongoing], ...]
    channels: tuple[ChannelStats, ...] = ()
    spans: tuple[Span, ...] = ()
    traffics: tuple[ReadStats, ...] = ()
    clock: float | None = None


class HostFailed(NamedTuple):
    """The host can't load the plan."""

    failure: Encoded


Message: TypeAlias = tuple[Any, ...]
"""One of the above, or a `Beginning`."""


class PackedItems(Protocol):
    """A list of `count` items, packed by one end of a link; `nbytes` is 0 where they stay where they are.

    Attributes:
      copied_bytes: of those, that were copied to be sent; before that, that would be at the most.
      slabs: of shared memory that they came in: how many were new, and how many were used again.
    """

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def copied_bytes(self) -> int: ...

    @property
    def slabs(self) -> tuple[int, int]: ...


class PackingError(Exception):
    """Item `index` of a list can't be sent; `kind` is the type of the part at fault, `__cause__` says why."""

    def __init__(self, index: int, kind: str) -> None:
        super().__init__(index, kind)
        self.index = index
        self.kind = kind
