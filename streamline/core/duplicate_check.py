"""Warns if two shards of a source that splits itself begin alike: then both read the same, and each item comes twice.

Only the source's function knows what a shard is. So the first items of each worker are digested at the source, before a
shuffle or a map changes them, and the digests of a rank's workers are compared. A digest is cheap, however large the
item is. The warning is raised in the consumer's thread, at its line, between two chunks (`streamline.core.tasks`).
"""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, NamedTuple

from streamline.core.lazy_numpy import loaded_np, np
from streamline.core.tree import field_names
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
            "shard and num_shards (for n in range(shard, len(rows), num_shards), say; a dataset of torch's has "
            "get_worker_info()), or leave out .shard. If these data are right, "
            'warnings.filterwarnings("ignore", category=streamline.errors.DuplicateWarning)',
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


# Digests --------------------------------------------------------------------------------------------------------------
DIGEST_BYTES = 16

EDGE_BYTES = 1 << 15
"""Of a longer buffer, so many bytes from its beginning and from its end count, and how long it is."""

MOST_PARTS = 4096
"""Of an item that holds more, these count, in order."""

TOLD_BY_REPR = frozenset({"datetime", "decimal", "fractions", "uuid"})
"""Modules whose classes say all that they hold in their `repr`."""


def digest(item: object) -> bytes | None:
    """Return a digest of an item: that of an equal one is equal, in any process; None: it can't be made.

    It is made of numbers, strings, bytes, paths, times, arrays, torch tensors in memory, enums; of lists, tuples, sets,
    dicts, dataclasses and msgspec structs of them. An item that holds anything else has none: nothing of the user's
    (a `repr`, a `__reduce__`) is called to look into it.
    """
    written = _DigestInput()
    try:
        written.add(item)
    except _Enough:
        return written.digest()
    except Exception:  # nothing that is known, a tensor on a GPU, a list that holds itself
        return None
    return written.digest()


class _Enough(Exception):  # noqa: N818 - no error
    """All that counts has been written."""


class _DigestInput:
    """What a digest is made of: each part after its type and its length, so that no two items look like one."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self._left = MOST_PARTS

    def digest(self) -> bytes:
        return self._hash.digest()

    def add(self, item: Any) -> None:
        """Write an item, and what it holds.

        Raises:
          _Enough: that, and no more.
          TypeError: it is of no class that is known.
        """
        if not self._left:
            raise _Enough
        self._left -= 1
        kind: type[Any] = type(item)
        if item is None or kind in (bool, int, float, complex) or kind.__module__ in TOLD_BY_REPR:
            self._bytes(kind, repr(item).encode())
        elif isinstance(item, Enum):
            self._bytes(kind, item.name.encode())
        elif isinstance(item, str):
            self._bytes(kind, item.encode(errors="surrogatepass"))
        elif isinstance(item, bytes | bytearray | memoryview | array):
            self._bytes(kind, memoryview(item).cast("B"))
        elif isinstance(item, loaded_np.ndarray | loaded_np.generic):
            self._array(np.asarray(item))
        elif isinstance(item, dict):
            self._parts(kind, [part for entry in item.items() for part in entry])
        elif isinstance(item, list | tuple):
            self._parts(kind, item)
        elif isinstance(item, set | frozenset):
            self._parts(kind, sorted(_known(part) for part in item))
        elif isinstance(item, os.PathLike):
            self._bytes(kind, os.fsencode(item))
        else:
            self._object(kind, item)

    def _object(self, kind: type[Any], item: Any) -> None:
        names = field_names(item) or getattr(kind, "__struct_fields__", None)
        if names is not None or is_dataclass(item):
            self._parts(kind, [getattr(item, name) for name in names or ()])
        elif kind.__module__.partition(".")[0] == "torch":
            self._array(item.detach().numpy())
        else:
            raise TypeError(f"a {kind.__name__} has no digest")

    def _parts(self, kind: type[Any], parts: Any) -> None:
        self._head(kind, len(parts))
        for part in parts:
            self.add(part)

    def _array(self, item: np.ndarray[Any, Any]) -> None:
        if item.dtype.hasobject:
            self._parts(np.ndarray, item.ravel().tolist())
            return
        self._hash.update(f"{item.dtype.str}{item.shape}".encode())
        edge = EDGE_BYTES // max(1, item.itemsize) + 1
        if item.size <= 2 * edge:
            self._bytes(np.ndarray, item.tobytes())
        else:  # the middle isn't even looked at: it may be on disk
            self._bytes(np.ndarray, item.flat[:edge].tobytes())
            self._bytes(np.ndarray, item.flat[item.size - edge :].tobytes())

    def _bytes(self, kind: type[Any], data: bytes | memoryview) -> None:
        self._head(kind, len(data))
        if len(data) <= 2 * EDGE_BYTES:
            self._hash.update(data)
        else:
            self._hash.update(data[:EDGE_BYTES])
            self._hash.update(data[-EDGE_BYTES:])

    def _head(self, kind: type[Any], length: int) -> None:
        self._hash.update(f"{kind.__qualname__}:{length}:".encode())


def _known(part: object) -> bytes:
    found = digest(part)
    if found is None:
        raise TypeError(f"a {type(part).__name__} has no digest")
    return found
