"""Which items belong to which shard. Pure: all ranks and workers compute the same split, without communication.

The union of all shards is the dataset, their intersection empty, also with more shards than items. Lengths are 0 or
more, there is at least 1 shard, and shards are numbered from 0: else all of these raise a PlanError.
"""

from __future__ import annotations

from streamline.errors import PlanError


def interleaved(length: int, num_shards: int, shard: int, *, drop_remainder: bool = False) -> range:
    """Return the indices that one shard owns: every `num_shards`-th.

    Args:
      drop_remainder: leave out the last `length % num_shards` items, so that all shards own the same number.
    """
    _check(length, num_shards, shard)
    stop = length - length % num_shards if drop_remainder else length
    return range(shard, stop, num_shards)


def contiguous(length: int, num_shards: int, shard: int, *, drop_remainder: bool = False) -> range:
    """Return the block of indices that one shard owns; the first `length % num_shards` shards own one more.

    Args:
      drop_remainder: every shard owns `length // num_shards`, and the last items belong to none.
    """
    _check(length, num_shards, shard)
    each, rest = divmod(length, num_shards)
    if drop_remainder:
        rest = 0
    start = shard * each + min(shard, rest)
    return range(start, start + each + (shard < rest))


def files_of(count: int, num_shards: int, shard: int) -> range:
    """Return the files, by index in the listing, that one shard reads: file f goes to shard f mod `num_shards`."""
    return interleaved(count, num_shards, shard)


def byte_range(size: int, num_shards: int, shard: int) -> tuple[int, int]:
    """Return the [start, stop) bytes, of a line file of `size` bytes, in which the lines of one shard *begin*."""
    _check(size, num_shards, shard)
    return size * shard // num_shards, size * (shard + 1) // num_shards


def shards_of_rank(num_shards: int, rank: int, world_size: int) -> range:
    """Return the shards that rank `rank` of `world_size` runs: s mod world_size = rank."""
    return interleaved(num_shards, world_size, rank)


def _check(length: int, num_shards: int, shard: int) -> None:
    if length < 0:
        raise PlanError(f"a length is 0 or more, got {length}")
    if num_shards < 1:
        raise PlanError(f"there is at least 1 shard, got {num_shards}")
    if not 0 <= shard < num_shards:
        raise PlanError(f"shard {shard} is not among 0 ... {num_shards - 1}")
