"""Where the snapshots of ranks lie: one file each, named for the rank, in a directory for a step of training."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from streamline.errors import SnapshotError

__all__ = ["complete_set", "file_name", "nothing_at", "target"]

_FILE_NAME = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.json")


def file_name(rank: int, world_size: int) -> str:
    """Return what the snapshot of a rank is called."""
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


def target(path: str | os.PathLike[str], name: str) -> Path:
    """Return the file to save to: `path`, or one called `name` in it.

    Raises:
      SnapshotError: it could mean either.
    """
    given, location = os.fspath(path), Path(path)
    if location.is_dir() or given.endswith(("/", os.sep)):
        return location / name
    if given.endswith(".json"):
        return location
    if location.suffix:
        raise SnapshotError(f"is {given!r} to be a file or a directory? End it in '.json' or in '/'")
    return location / name


def complete_set(directory: Path) -> list[Path]:
    """Return the files of all ranks, by rank; none where there are none.

    Files of another world size may lie about, but not a whole set.

    Raises:
      SnapshotError: some are missing, or several sets are complete.
    """
    found: dict[int, set[int]] = {}
    for path in directory.iterdir():
        if match := _FILE_NAME.fullmatch(path.name):
            rank, size = int(match[1]), int(match[2])
            if rank < size:
                found.setdefault(size, set()).add(rank)
    whole = [size for size, ranks in sorted(found.items()) if len(ranks) == size]
    if len(whole) > 1:
        sizes = " and of ".join(map(str, whole))
        raise SnapshotError(f"{directory} holds snapshots of {sizes} ranks, each complete: remove all but one set")
    if found and not whole:
        absent = "; ".join(f"of {size} ranks, {_missing(size, ranks)}" for size, ranks in sorted(found.items()))
        raise SnapshotError(f"{directory} lacks the snapshots of some ranks: {absent}. Use an earlier directory")
    return [directory / file_name(rank, size) for size in whole for rank in range(size)]


def _missing(size: int, ranks: set[int]) -> str:
    """Return the ranks that aren't there; a file's name may say any number of them."""
    first = list(islice((rank for rank in range(size) if rank not in ranks), 10))
    more = size - len(ranks) - len(first)
    return ", ".join(map(str, first)) + (f" and {more} more" if more else "")


def nothing_at(location: Path) -> str:
    """Say that there is no snapshot, and what there is instead."""
    if not location.is_dir():
        return f"no snapshot at {location}: no such file or directory (a first run: missing_ok=True)"
    others = sorted(path.name for path in location.glob("*.json"))
    hint = f", but {', '.join(others[:5])}: is it one of these?" if others else " (a first run: missing_ok=True)"
    return f"no snapshot in {location}: no file is named rank-*-of-*.json{hint}"
