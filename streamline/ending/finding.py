"""A store that is there already: torch.distributed's, never its process groups, which belong to the trainer."""

from __future__ import annotations

import sys
from typing import Any, cast

from streamline.ending.policy import Store
from streamline.ranks import Rank

__all__ = ["own_connection", "store_of_torch"]


def store_of_torch(rank: Rank) -> Store | None:
    """Return the store with which torch.distributed was initialised; None: it wasn't, or is of other ranks.

    Ranks that were given, and are not as many as torch's processes, might be there several times: only a mesh says
    which processes are whose.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if not rank.members and (distributed.get_rank(), distributed.get_world_size()) != (rank.rank, rank.world_size):
        return None
    found = getattr(getattr(distributed, "distributed_c10d", None), "_get_default_store", None)
    return None if found is None else cast("Store | None", found())


def own_connection(store: Store) -> Store:
    """Return a store to the same keys, over a connection of its own where there is one: no one waits for our calls."""
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return cast(Store, clone())
    except (RuntimeError, NotImplementedError):  # a kind of store that has no other connection
        return store
