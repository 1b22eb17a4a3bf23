"""A folder with a directory for each step of training: which holds the newest snapshot of all ranks, and which are old.

Ranks save one after the other, and a kill may come between two of them: only a directory with the files of all ranks
counts. No rank waits for another, and each removes its own files only.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path

from streamline.core.state import Json
from streamline.errors import SnapshotError
from streamline.snapshot.file_format import complete_set, decode, rank_files

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+")


def complete_sets(folder: Path) -> list[Path]:
    """Return the directories under a folder that hold the files of all ranks, the furthest first; or the folder itself.

    The furthest is that of the highest epoch and step, as rank 0 has them. What is incomplete is passed over, with a
    warning.

    Raises:
      OSError: the folder can't be read.
    """
    found: list[tuple[tuple[int, int], float, Path]] = []
    for directory in (folder, *_directories(folder)):
        try:
            files = complete_set(directory)
        except SnapshotError as error:
            logger.warning("passed over: %s", error)
            continue
        if files:
            found.append((_reached(files[0]), _saved_at(directory), directory))
    found.sort(reverse=True)
    if found and (later := [directory for _, saved_at, directory in found if saved_at > found[0][1]]):
        logger.warning(
            "%s is the furthest snapshot, and %s was saved after it: if the run went back on purpose, remove what it "
            "has left behind",
            found[0][2],
            later[0],
        )
    return [directory for _, _, directory in found]


def check_numbered(directory: Path) -> None:
    """Refuse a directory that can't be that of one step; `SnapshotError`: its name has no number, or is a file's."""
    if directory.suffix == ".json" or _NUMBER.search(directory.resolve().name) is None:
        raise SnapshotError(
            f"save(keep=) removes what was saved before, and {directory} is no directory of one step: save to "
            'f"ckpt/step-{step}/", say'
        )


def remove_older(directory: Path, ranks: range, world_size: int, keep: int) -> None:
    """Remove the files of `ranks` from the directories beside `directory` that are older than the newest complete ones.

    Beside it are those whose names differ from its own in numbers only. What can't be removed stays, with a warning.

    Args:
      keep: directories with the files of all ranks that stay, by when they were saved; at least 1.
    """
    name = directory.resolve().name
    alike = re.compile(_NUMBER.sub(r"\\d+", re.escape(name)))
    beside = [other for other in _directories(directory.resolve().parent) if alike.fullmatch(other.name)]
    try:
        saved = {other: _saved_at(other) for other in beside}
        newest = sorted((saved[other] for other in beside if _is_complete(other)), reverse=True)[:keep]
        for other, saved_at in saved.items():
            if len(newest) == keep and saved_at < newest[-1]:
                _remove(other, ranks, world_size)
    except OSError as error:
        logger.warning("a snapshot that is older than the last %d can't be removed: %s", keep, error)


def _directories(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _is_complete(directory: Path) -> bool:
    try:
        return bool(complete_set(directory))
    except SnapshotError:
        return False


def _saved_at(directory: Path) -> float:
    """Return when the last rank has saved to it; 0: none has."""
    times = [0.0]
    for path in rank_files(directory):
        with suppress(FileNotFoundError):  # another rank removes its own
            times.append(path.stat().st_mtime)
    return max(times)


def _reached(file: Path) -> tuple[int, int]:
    """Return the epoch and the step of a snapshot file; the lowest where it says none, or is damaged."""
    try:
        body: Json = decode(file.read_bytes(), file)
    except SnapshotError:
        return -1, -1
    numbers = [body.get(name) if isinstance(body, dict) else None for name in ("epoch", "step")]
    epoch, step = (number if isinstance(number, int) else -1 for number in numbers)
    return epoch, step


def _remove(directory: Path, ranks: range, world_size: int) -> None:
    for path, (of_rank, _) in rank_files(directory).items():
        if of_rank % world_size in ranks:  # a job of more ranks has left some that nobody has now
            path.unlink(missing_ok=True)
    if not any(directory.iterdir()):
        with suppress(FileNotFoundError):  # another rank was quicker
            directory.rmdir()
