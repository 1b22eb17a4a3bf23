"""How many items an epoch of a loader has, where that is known without reading."""

from __future__ import annotations

import math

from streamline.plan.length import num_given
from streamline.runtime.run import ResolvedRun
from streamline.sharding.ranks import find_rank

__all__ = ["length_of"]


def length_of(opening: ResolvedRun) -> int:
    """Return the items in an epoch, on this rank.

    Raises:
      TypeError: nobody knows before they have been read, or there is no end.
    """
    rank = opening.rank
    if rank.found_in == "alone":
        rank = find_rank()  # a trainer may have begun its processes since, as each iteration finds out, too
    policy = "allow" if opening.ending is None else opening.ending.ends.policy
    items = num_given(opening.plan, rank.rank, rank.world_size, policy)
    if items is None:
        raise TypeError(
            "how many items an epoch of this pipeline has isn't known before they have been read: "
            "loader(steps_per_epoch=n) has n"
        )
    if items == math.inf:
        raise TypeError("this pipeline has no end: give the loader steps_per_epoch=")
    return int(items)
