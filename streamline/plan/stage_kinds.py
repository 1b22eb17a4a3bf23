"""The stages by their kind, as a snapshot's fingerprint writes it; and whether saved states are of their types."""

from __future__ import annotations

from typing import Any

from streamline.core.state import Tree
from streamline.core.state_types import Count, check_type
from streamline.core.text import Entry
from streamline.transfer.stage import Transfer
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.bucket import BucketByLength
from streamline.transforms.cache import Cache
from streamline.transforms.custom import Through
from streamline.transforms.filter import Filter
from streamline.transforms.flat_map import FlatMap, Unbatch
from streamline.transforms.limit import Skip, Stride, Take
from streamline.transforms.map import ConcurrentMap, Map, Numbering
from streamline.transforms.pack import Pack
from streamline.transforms.regenerate import Regenerate
from streamline.transforms.repeat import Repeat
from streamline.transforms.shuffle import IndexShuffle, Shuffle, ShuffleFiles

__all__ = ["check_trees", "stage_class"]


KINDS: dict[str, type[Stage[Any, Any]]] = {
    "batch": Batch,
    "bucket_by_length": BucketByLength,
    "cache": Cache,
    "filter": Filter,
    "flat_map": FlatMap,
    "map": Map,
    "numbering": Numbering,
    "pack": Pack,
    "regenerate": Regenerate,
    "repeat": Repeat,
    "shuffle": Shuffle,
    "shuffle_files": ShuffleFiles,
    "skip": Skip,
    "take": Take,
    "through": Through,
    "transfer": Transfer,
    "unbatch": Unbatch,
}


def stage_class(kind: str, options: dict[str, Any]) -> type[Stage[Any, Any]]:
    """Return the class of a stage of this kind and these options; `Stage` itself where there is none.

    A map says what it remembers as a concurrent one does: they share a kind.
    """
    if kind == "shuffle" and "window" not in options:
        return IndexShuffle
    if kind == "map" and options.get("ordered") is False:
        return ConcurrentMap
    return KINDS.get(kind, Stage)


def check_trees(entries: list[Entry], tree: Tree, where: str) -> None:
    """Insist that the parts of a state are of the stages of these entries of a fingerprint.

    A part may be missing: a stage that was accepted as added begins there.

    Raises:
      SnapshotError: a part is of another type or out of range; it says which.
    """
    check_type(tree.get("errors"), dict[str, Count] | None, f"the counts of skipped items{where}")
    check_type(tree.get("shard"), Stride.state_type | None, f"the state of 'shard'{where}")
    for entry in entries:
        name, options = entry["name"], entry.get("options") or {}
        stage = stage_class(entry["kind"], options)
        if name in tree:
            stage.check_state(tree.get(name), options, f"the state of {name!r}{where}")
