"""A live source's journal: every item that was read and that a resume may need.

A worker's state says how many of its items need not be fed again, so an item is kept until the consumer's state has
passed it. In memory, passed items are dropped whenever the journal has doubled: the cost per item is constant.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from streamline.core.item_codec import EncodedItem, from_json, read, to_json
from streamline.core.state import Json, Reference, Tree
from streamline.core.state_types import Count
from streamline.errors import JournalError, ResumeError, SnapshotError

LEAST_ITEMS = 256

LEAST_BYTES = 2**20
"""Below both, a journal isn't trimmed: reading a state costs some tens of microseconds."""


class SavedWorker(msgspec.Struct, forbid_unknown_fields=True):
    """One worker's part of a journal in a snapshot.

    Attributes:
      first: the ordinal, among the worker's items, of the first one here.
      ended: the worker has ended by itself (a `.take`, say), and is fed no more items.
      items: as `item_codec.to_json` writes them.
    """

    shard: Count
    first: Count
    ended: bool
    items: list[Any]


class SavedJournal(msgspec.Struct, forbid_unknown_fields=True):
    """A journal in a snapshot.

    Attributes:
      id: of the feed, from its first opening on; also in a journal on disk.
      stored: the items are in the journal on disk, not here.
      read: items that were read up to here.
      next: the shard whose turn is next.
      workers: in shard order.
      mark: of the last item that was read, sent to its server at a resume; None: nothing is sent.
    """

    id: str
    stored: bool
    read: Count
    next: Count
    workers: list[SavedWorker]
    mark: Any = None


class Entry(NamedTuple):
    """An item that was fed to a worker.

    Attributes:
      ordinal: 0-based, among the items fed to this worker since the feed began.
      next: the shard whose turn was next.
    """

    shard: int
    ordinal: int
    written: EncodedItem
    next: int
    mark: Json = None


class Places:
    """How far the workers are in their items, by their states.

    Args:
      source, merge: names, the keys of their parts of a state.
      shards: of this rank, one worker each.
    """

    def __init__(self, source: str, merge: str, shards: Sequence[int]) -> None:
        self.source = source
        self.merge = merge
        self.shards = shards
        self._gave: dict[int, int] = {}  # items that a worker gave that has ended by itself

    def ended(self, shard: int, gave: int) -> None:
        """Note that a worker has ended by itself."""
        self._gave[shard] = gave

    def passed(self, state: Tree | None) -> dict[int, int | float]:
        """Return by shard how many of its worker's items need not be fed again; infinity: it needs none."""
        if state is None:
            return dict.fromkeys(self.shards, 0)
        own = state[self.merge]
        rows = zip(self.shards, own["workers"], own["produced"], strict=True)
        return {
            shard: math.inf if self._gave.get(shard) == produced else tree[self.source]
            for shard, tree, produced in rows
        }


class Journal(ABC):
    """Keeps what was read.

    Attributes:
      id: random; the same in a feed's snapshots and in its journal on disk.
      read: items that were read since the feed began.
      next: the shard whose turn is next.
      mark: of the last item that was read.
    """

    keeper: Any = None

    def __init__(self, places: Places, id: str) -> None:
        self.places = places
        self.id = id
        self.read = 0
        self.next = places.shards[0] if places.shards else 0
        self.mark: Json = None

    @abstractmethod
    def append(self, entry: Entry) -> None:
        """Keep an item, before its worker gets it; in the reader's task."""

    @abstractmethod
    def entry(self, state: Tree) -> Json:
        """Return what a snapshot of this state must hold."""

    @abstractmethod
    def close(self) -> None:
        """Close files. Idempotent."""

    def _json(
        self, passed: dict[int, int | float], read: int, turn: int, mark: Json, items: dict[int, list[Json]] | None
    ) -> Json:
        workers = [
            {
                "shard": shard,
                "first": 0 if math.isinf(first) else int(first),
                "ended": math.isinf(first),
                "items": [] if items is None else items[shard],
            }
            for shard, first in passed.items()
        ]
        kept = {"id": self.id, "stored": items is None, "read": read, "next": turn, "workers": workers}
        return kept if mark is None else {**kept, "mark": mark}


class MemoryJournal(Journal):
    """Items in the order in which they were read.

    The reader appends, in the event loop's thread; the consumer trims and copies, perhaps in another one. A copy is a
    prefix of what was read, even if the reader appends meanwhile.
    """

    def __init__(self, places: Places, kept: SavedJournal | None, entries: Sequence[Entry]) -> None:
        super().__init__(places, secrets.token_hex(16) if kept is None else kept.id)
        self._log = list(entries)
        self._bytes = sum(entry.written.size for entry in entries)
        self._cut_bytes = 0
        self._cut = 0 if kept is None else kept.read - len(entries)
        self._turn_after_cut = (self.next, None) if kept is None else (kept.next, kept.mark)
        self.read = self._cut + len(entries)
        self.next, self.mark = self._turn_after_cut
        self._look_at = (LEAST_ITEMS, LEAST_BYTES)

    def __len__(self) -> int:
        return len(self._log)

    @property
    def bytes(self) -> int:
        """About how many bytes its items have."""
        return self._bytes - self._cut_bytes

    def append(self, entry: Entry) -> None:
        self._bytes += entry.written.size
        self._log.append(entry)
        self.read += 1
        self.next, self.mark = entry.next, entry.mark

    def close(self) -> None:
        """There are no files."""

    def at_chunk_boundary(self, consumed: Reference) -> None:
        """Trim what the consumer has passed, if the journal has doubled since the last time."""
        items, size = self._look_at
        if len(self._log) >= items or self.bytes >= size:
            self.trim(self.places.passed(consumed.get().json()))
            self._look_at = (max(LEAST_ITEMS, 2 * len(self._log)), max(LEAST_BYTES, 2 * self.bytes))

    def trim(self, passed: dict[int, int | float]) -> None:
        """Drop the items that these positions have passed."""
        log = self._log[:]
        kept = [entry for entry in log if entry.ordinal >= passed[entry.shard]]
        if len(kept) == len(log):
            return
        self._turn_after_cut = (log[-1].next, log[-1].mark)
        self._cut += len(log) - len(kept)
        self._cut_bytes += sum(entry.written.size for entry in log if entry.ordinal < passed[entry.shard])
        self._log[: len(log)] = kept  # the reader may have appended meanwhile

    def entry(self, state: Tree) -> Json:
        passed = self.places.passed(state)
        log = self._log[:]
        items: dict[int, list[Json]] = {shard: [] for shard in passed}
        for entry in log:
            if entry.ordinal >= passed[entry.shard]:
                items[entry.shard].append(to_json(entry.written))
        turn, mark = (log[-1].next, log[-1].mark) if log else self._turn_after_cut
        return self._json(passed, self._cut + len(log), turn, mark, items)


def kept_of(journal: Json, state: Tree, places: Places) -> tuple[SavedJournal, list[Entry]]:
    """Return a snapshot's journal, and the items in it.

    Raises:
      ResumeError: the snapshot has none.
      SnapshotError: it is damaged, or doesn't fit the state.
    """
    if journal is None:
        raise ResumeError("the snapshot has no journal: it wasn't taken of a live source")
    try:
        kept = msgspec.convert(journal, SavedJournal)
        passed = places.passed(state)
        if [worker.shard for worker in kept.workers] != list(places.shards) or kept.next not in [*places.shards, 0]:
            raise ValueError(f"expected the shards {list(places.shards)}")
        entries = []
        for worker in kept.workers:
            if not worker.ended and worker.first != passed[worker.shard]:
                raise ValueError(
                    f"expected shard {worker.shard} to begin at {passed[worker.shard]}, not {worker.first}"
                )
            for at, item in enumerate(worker.items):
                read(written := from_json(item))
                entries.append(Entry(worker.shard, worker.first + at, written, kept.next, kept.mark))
        if kept.read < len(entries):
            raise ValueError(f"{len(entries)} items of {kept.read} that were read")
    except (ValueError, RecursionError, JournalError) as error:
        raise SnapshotError(f"the snapshot's journal is damaged, or was edited: {error}") from None
    return kept, entries
