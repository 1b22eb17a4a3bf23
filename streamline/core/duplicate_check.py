"""Warns if two shards of a source that splits itself have the same first items: then each item comes twice.

The first items of each worker are digested at the source, before a shuffle or a map changes them, and the digests of a
rank's workers are compared. The warning is raised in the consumer's thread, at a chunk boundary.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from streamline.core.lazy_numpy import loaded_np, np
from streamline.errors import DuplicateWarning, printable, users_level

FIRST_ITEMS = 8
"""Items of a worker that are digested. A shard that has fewer is not compared."""

MIN_DISTINCT = 4
"""Different items that there must be among them, else (labels, constants) they aren't compared. Of four equally
frequent values, two shards have the same ones by chance, with all four, once in 100,000 times; of more, less often."""

EDGE_BYTES = 1 << 15
"""Of a longer item, its length and so many bytes from its beginning and from its end are digested."""


class Beginning(NamedTuple):
    """The digests of a shard's first items. `where` it is read: "process 2"; "": here."""

    source: str
    shard: int
    epoch: tuple[int, ...]
    where: str
    digests: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return f"shard {self.shard} ({self.where})" if self.where else f"shard {self.shard}"


class DuplicateCheck:
    """Compares the first items of one run's shards, in its event loop; a host `report`s them to the run instead."""

    def __init__(
        self,
        on_chunk_boundary: Callable[[Callable[[Any], None]], None],
        report: Callable[[Beginning], object] | None = None,
    ) -> None:
        self._report = report or self.compare
        self._on_chunk_boundary = on_chunk_boundary
        self._known: dict[tuple[str, tuple[int, ...], tuple[bytes, ...]], Beginning] = {}
        self._alike: list[tuple[Beginning, Beginning]] = []
        self._warned = False

    def first_items(self, beginning: Beginning) -> Callable[[Sequence[object]], bool]:
        """Return what to call with a shard's items, from its first on, while it returns True."""
        digests: list[bytes] = []

        def look(items: Sequence[object]) -> bool:
            for item in items[: FIRST_ITEMS - len(digests)]:
                if (found := digest(item)) is None:
                    return False  # nothing can be said of this source
                digests.append(found)
            if len(digests) == FIRST_ITEMS and len(set(digests)) >= MIN_DISTINCT:
                self._report(beginning._replace(digests=tuple(digests)))
            return len(digests) < FIRST_ITEMS

        return look

    def compare(self, beginning: Beginning) -> None:
        """Compare with other shards; if one has the same items, warn at the next chunk boundary, once."""
        other = self._known.setdefault((beginning.source, beginning.epoch, beginning.digests), beginning)
        if other.shard != beginning.shard:
            self._alike.append((other, beginning))
            if len(self._alike) == 1:
                self._on_chunk_boundary(self._warn)

    def _warn(self, _: object) -> None:
        if self._warned:
            return
        self._warned = True
        one, other = sorted(self._alike[0], key=lambda beginning: beginning.shard)
        warnings.warn(
            f"{printable(one.source)}: the first {FIRST_ITEMS} items of {one} and of {other} are the same. Where each "
            "shard reads everything, every item comes as often as there are shards. A source splits itself: use its "
            "shard and num_shards (for n in range(shard, len(rows), num_shards), say; a dataset of torch's has "
            "get_worker_info()), or leave out .shard. If these data are right, "
            'warnings.filterwarnings("ignore", category=streamline.errors.DuplicateWarning)',
            DuplicateWarning,
            stacklevel=users_level(),
        )


def digest(item: object) -> bytes | None:
    """Return a digest of an item, the same for equal items in any process; None: it has none.

    It covers what msgspec writes, arrays, torch tensors in memory and paths; no code of the user's (a `repr`, a
    `__reduce__`) is called.
    """
    try:
        written = msgspec.msgpack.encode(item, enc_hook=_encode_part)
    except Exception:  # nothing that is known, a tensor on a GPU, a list that holds itself
        return None
    made = blake2b(written[:EDGE_BYTES], digest_size=16)
    made.update(written[max(EDGE_BYTES, len(written) - EDGE_BYTES) :])
    made.update(b"%d" % len(written))
    return made.digest()


def _encode_part(item: Any) -> Any:
    """Return what to write of an item that msgspec doesn't know."""
    if isinstance(item, loaded_np.ndarray | loaded_np.generic):
        array: np.ndarray[Any, Any] = np.asarray(item)
        if array.dtype.hasobject:
            return array.tolist()
        edge = EDGE_BYTES // max(1, array.itemsize) + 1  # the middle isn't even looked at: it may be on disk
        edges = array.flat[:edge], array.flat[max(edge, array.size - edge) :]
        return array.dtype.str, array.shape, [part.tobytes() for part in edges]
    if isinstance(item, os.PathLike):
        return os.fsencode(item)
    if isinstance(item, complex):
        return item.real, item.imag
    if type(item).__module__.partition(".")[0] == "torch":
        return item.detach().numpy()
    raise TypeError(f"a {type(item).__name__} has no digest")
