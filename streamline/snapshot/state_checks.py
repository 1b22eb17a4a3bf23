"""Checks that each part of a snapshot's states is of the type that its stage declares (`Stage.state_type`). Pure.

A snapshot's file has a checksum, but its text may have been edited. Opening and resharding rely on this check.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from streamline.core.state import Tree
from streamline.core.state_types import Count, FingerprintEntry, check_strict_to, check_type
from streamline.plan.fingerprint import check_trees, sections
from streamline.sharding.ends import NAME as ENDS
from streamline.snapshot.snapshot import Snapshot


class _EndsPart(msgspec.Struct):
    policy: Literal["allow", "drop", "pad"] = "allow"
    left: Count = 0
    spare: Count = 0
    padded: Count = 0
    again: Tree | None = None


class _Merged(msgspec.Struct):
    """The merge's part of a state as flows write it."""

    next_worker: Count
    produced: list[Count]
    workers: list[Tree]
    replay: list[Count] = []
    strict_to: list[Count] | None = None

    def __post_init__(self) -> None:
        workers = len(self.workers)
        if len(self.produced) != workers or max([0, *self.replay, self.next_worker]) >= max(workers, 1):
            raise ValueError(f"Expected counts of {workers} workers")
        if self.strict_to is not None:
            check_strict_to(self.produced, self.replay, self.strict_to)


def check_stages(snapshot: Snapshot) -> None:
    check_type(snapshot.fingerprint, list[FingerprintEntry], "the plan")
    before, worker, after = sections(snapshot.fingerprint)
    worker = [*before, *worker]
    for part in snapshot.parts or (snapshot,):
        whose = f" of rank {part.rank}" if part.world_size > 1 else ""
        of_workers = list[Annotated[int, msgspec.Meta(ge=0, lt=max(len(part.shards), 1))]]
        own = part.state[part.merge]
        check_type(own.get("replay"), of_workers, f"the choices of {part.merge!r}{whose}, of workers by number")
        check_type({**own, "produced": part.produced, "workers": part.worker_states}, _Merged, f"{part.merge!r}{whose}")
        for shard, tree in zip(part.shards, part.worker_states, strict=True):
            check_trees(worker, tree, f" in shard {shard}")
        check_trees(after, part.stages, whose)
        check_type(ends := part.stages.get(ENDS), _EndsPart | None, f"{ENDS!r}{whose}")
        if ends is not None and (again := ends.get("again")) is not None:
            check_type(own := again.get(part.merge), _Merged, f"the items given again{whose}, {part.merge!r}")
            check_trees(after, again, f"{whose}, of the items given again")
            for at, tree in enumerate(own["workers"]):
                check_trees(worker, tree, f" in worker {at}{whose}, of the items given again")
