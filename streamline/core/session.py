"""One run of a plan, from its opening to its close: what all its parts share, and what is done at its edges.

The consumer takes lists. An *edge* is the moment at which it asks for another one: whatever must follow what was
consumed (trimming a journal, counting errors) is done there, once a list and never once an item, in the consumer's own
thread, with the state right after the last item that it got, which isn't made unless it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from streamline.core.byte_budget import Budget
from streamline.core.duplicate_check import DuplicateCheck
from streamline.core.error_policy import Errors
from streamline.core.forks import disowned_in_copies
from streamline.core.gate import Gate
from streamline.core.meters import Meters
from streamline.core.state import Json, Reference, State, Tree
from streamline.core.threads import ThreadPool

__all__ = ["MEMORY_BYTES", "Awaited", "PendingItems", "Session"]

MEMORY_BYTES = 256 * 2**20
"""Bytes that sources may hold read ahead in one process: 16 objects of 16 MiB, or 64 of 4 MiB."""


class PendingItems(Protocol):
    """What a source that can't be read again keeps of the items that are on their way."""

    @property
    def keeper(self) -> Any:
        """What a snapshot tells that it has been stored, see `Snapshot.keepers`; None: nothing."""

    def entry(self, state: Tree) -> Json:
        """Return what a snapshot of this state must hold. From the consumer's thread; doesn't wait."""


@dataclass(frozen=True)
class Awaited:
    """A worker that the merge waits for.

    Attributes:
      state: right after the last item that the merge has taken from it.
    """

    shard: int
    state: State


class Session:
    """What the parts of one run share. Made anew at each opening.

    Attributes:
      gate: what every task that moves items passes between two lists.
      meters: what is counted.
      most_ahead: items that each channel may hold, where that is less than its own capacity; None: as many as it has.
      threads: for sync user code that shall not hold the loop.
      awaited: tells, in the event loop's thread, which workers the merge waits for; None: there is no merge yet.
      journal: of a live source; None for any other.
      errors: items that are left out because of an error.
      beginnings: the first items of shards, compared with one another.
      spent: told, in the event loop's thread, that the workers have given all that they have, or that no more is wanted
        of them; perhaps more than once. None: not called.
      budget: of the bytes that sources may hold read ahead, all together.
      shares: what the flows of one source share, by its name; their own business.
      other_ranks: what is waited for that others have to say; "": nothing.
      spare: items that this rank doesn't give, since others have none left; and whether there may be more of them.
      arrived: makes what the last stage hands out of what its channel carries, in the consumer's thread, when it takes
        it; None: that is the same.
      where: how messages call the host that this is in: "process 2, pid 4711"; "": it is the run itself.

    Args:
      metered: False: nothing is counted of stages and channels; only for measuring what that costs.
      memory: bytes that sources may hold read ahead.
    """

    def __init__(
        self,
        *,
        most_ahead: int | None = None,
        threads: ThreadPool | None = None,
        metered: bool = True,
        memory: int = MEMORY_BYTES,
    ) -> None:
        self.gate = Gate()
        self.most_ahead = most_ahead
        self.budget = Budget(memory)
        self.shares: dict[str, Any] = {}
        self.threads = threads or ThreadPool()
        self.meters = Meters(perf_counter(), on=metered)
        self.journal: PendingItems | None = None
        self.errors = Errors()
        self.arrived: Callable[[Any], Any] | None = None
        self.where = ""
        self.other_ranks = ""
        self.spare = (0, False)
        self.awaited: Callable[[], Sequence[Awaited]] | None = None
        self.spent: Callable[[], None] | None = None
        self._at_leaving: list[Callable[[], None]] = []
        self._on_chunk_boundary: list[Callable[[Reference], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._closed = False
        self.duplicate_check = DuplicateCheck(self.on_chunk_boundary)
        disowned_in_copies(self)

    def disown(self) -> None:
        """Write and close nothing: it is done in the process that this one is a copy of."""
        self.errors = Errors()
        for work in (self._at_leaving, self._on_chunk_boundary, self._at_close):
            work.clear()

    def leave_out(self, errors: Errors) -> None:
        """Leave out items as `errors` says. Before anything runs."""
        self.errors = errors
        if errors.policy.skips:
            self.on_chunk_boundary(errors.judge)

    def on_chunk_boundary(self, work: Callable[[Reference], None]) -> None:
        """Do `work` at every edge, in the consumer's thread; what it raises, the stream fails with."""
        self._on_chunk_boundary.append(work)

    def at_leaving(self, work: Callable[[], None]) -> None:
        """Do `work` as soon as an async stream is asked to close, in the event loop's thread: read no more, say."""
        self._at_leaving.append(work)

    def leave(self) -> None:
        """The stream is about to be closed, by its consumer or after its end."""
        for work in self._at_leaving:
            work()

    def run_chunk_boundary(self, state: Reference) -> None:
        """The consumer asks for another list; `state` is the state right after the last item that it got."""
        for work in self._on_chunk_boundary:
            work(state)

    def at_close(self, work: Callable[[], None]) -> None:
        """Do `work` when the stream has ended, in whatever way and thread that comes about; it never raises."""
        self._at_close.append(work)
        if self._closed:
            self.close()

    def close(self) -> None:
        """The stream has ended. Idempotent."""
        self._closed = True
        while self._at_close:
            self._at_close.pop()()
