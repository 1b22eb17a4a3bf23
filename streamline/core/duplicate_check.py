"""Warns if two shards of a source that splits itself begin alike: then both read the same, and each item comes twice.

Only the source's function knows what a shard is. So the first items of each worker are digested at the source, before a
shuffle or a map changes them, and the digests of a rank's workers are compared. The warning is raised in the consumer's
thread, at its line, between two chunks (`streamline.core.tasks`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from streamline.core.tree import digest
from streamline.errors import DuplicateWarning, printable, users_level

FIRST_ITEMS = 8
"""Items of a worker that are digested. A shard that has fewer is not compared."""

DISTINCT = 4
"""With fewer different items among them (labels, constants), they say nothing. Of four equally frequent values, two
shards begin alike by chance, with all four, once in 100,000 times; of any others, less often."""


class Beginning(NamedTuple):
    """How a shard of a source begins: the digests of its first items. `where` it is read: "process 2"; "": here."""

    source: str
    shard: int
    epoch: tuple[int, ...]
    where: str
    digests: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return f"shard {self.shard} ({self.where})" if self.where else f"shard {self.shard}"


class DuplicateCheck:
    """Compares the beginnings of one run's shards. Used in its event loop's thread.

    Attributes:
      report: called with each beginning; in a host, this sends it to the run.
    """

    def __init__(self, on_chunk_boundary: Callable[[Callable[[Any], None]], None]) -> None:
        self.report: Callable[[Beginning], object] = self.compare
        self._on_chunk_boundary = on_chunk_boundary
        self._seen: set[tuple[str, int]] = set()
        self._known: dict[tuple[str, tuple[int, ...], tuple[bytes, ...]], Beginning] = {}
        self._found: tuple[Beginning, Beginning] | None = None
        self._warned = False

    def first_items(self, source: str, shard: int, epoch: tuple[int, ...], where: str) -> FirstItems | None:
        """Return what digests a shard that begins here; None: it has begun before, in an earlier pass."""
        if (source, shard) in self._seen:
            return None
        self._seen.add((source, shard))
        return FirstItems(self.report, Beginning(source, shard, epoch, where))

    def compare(self, beginning: Beginning) -> None:
        """Note a beginning; if another shard begins alike, warn at the next chunk boundary, once."""
        key = (beginning.source, beginning.epoch, beginning.digests)
        other = self._known.setdefault(key, beginning)
        if other.shard != beginning.shard and self._found is None:
            self._found = (other, beginning)
            self._on_chunk_boundary(self._warn)

    def _warn(self, _: object) -> None:
        if self._found is None or self._warned:
            return
        self._warned = True
        one, other = sorted(self._found, key=lambda beginning: beginning.shard)
        warnings.warn(
            f"{printable(one.source)}: the first {FIRST_ITEMS} items of {one} and of {other} are the same. Where each "
            "shard reads everything, every item comes as often as there are shards. A source splits itself: use its "
            "shard and num_shards (for n in range(shard, len(rows), num_shards), say), or leave out .shard. If these "
            'data are right, warnings.filterwarnings("ignore", category=streamline.errors.DuplicateWarning)',
            DuplicateWarning,
            stacklevel=users_level(),
        )


class FirstItems:
    """Digests the first items of a shard; `report` is called with them once there are enough."""

    def __init__(self, report: Callable[[Beginning], object], beginning: Beginning) -> None:
        self._report, self._beginning = report, beginning
        self._digests: list[bytes] = []

    def look(self, items: Sequence[object]) -> bool:
        """Digest the next items, as far as needed; return whether more are."""
        for item in items[: FIRST_ITEMS - len(self._digests)]:
            if (found := digest(item)) is None:
                return False  # nothing can be said of this source
            self._digests.append(found)
        if len(self._digests) < FIRST_ITEMS:
            return True
        if len(set(self._digests)) >= DISTINCT:
            self._report(self._beginning._replace(digests=tuple(self._digests)))
        return False
