"""What a journal's directory holds beside its items: whose it is, a lock, and which files must be there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamline.core.atomic_file import open_own, read_own, replace_file, try_lock
from streamline.errors import JournalError
from streamline.sources.segments import Segment, read_segment

__all__ = ["ABOUT", "About", "DiskErrors", "Lock", "files_in", "mend_files", "read_about", "read_files", "segment_path"]

ABOUT = "journal.json"

_NAME = re.compile(r"[0-9]{20}\.segment")
"""Other files are left alone: what a file manager calls "0 (copy).segment", say."""


class About(msgspec.Struct, forbid_unknown_fields=True):
    """What `journal.json` says.

    Attributes:
      begun: everything that a journal begins with is there; else it is begun again, for nothing was read yet.
      first: items that were read before what is still here.
      trimmed_for: the snapshot that was stored before the last trim; "": nothing was trimmed.
    """

    streamline_journal: int
    id: str
    shards: list[int]
    begun: bool
    first: int
    trimmed_for: str

    def write(self, directory: Path) -> None:
        """Put it in the place of what the directory says."""
        replace_file(directory / ABOUT, json.dumps(msgspec.structs.asdict(self), indent=1).encode() + b"\n")


class Lock:
    """One process at a time, and one opening of it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock if nobody has it."""
        descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
        try:
            if try_lock(descriptor):
                self._descriptor = descriptor
                return True
        except ImportError:  # pragma: no cover - Windows
            os.close(descriptor)
            raise JournalError("from_stream(journal=) needs a system with flock: leave it out here") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return False

    def free(self) -> None:
        """Let others have it. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class DiskErrors:
    """Turns a disk's error in a `with` block into one that names the journal, and what was done to it."""

    def __init__(self, directory: Path, what: str) -> None:
        self._directory = directory
        self._what = what

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise JournalError(
                f"can't {self._what} the journal in {self._directory}: {error.strerror or error}"
            ) from error


def segment_path(directory: Path, read: int) -> Path:
    """Return the file that begins behind item `read` of the feed."""
    return directory / f"{read:020d}.segment"


def files_in(directory: Path) -> list[Path]:
    """Return the files of items, in order."""
    return sorted(path for path in directory.glob("*.segment") if _NAME.fullmatch(path.name))


def read_about(directory: Path) -> About | None:
    """Return whose journal is in a directory; None where there is none.

    Raises:
      JournalError: that is damaged or missing, or of a newer format.
    """
    path = directory / ABOUT
    try:
        about = msgspec.convert(json.loads(read_own(path)), About)
    except FileNotFoundError:
        if files_in(directory):
            raise JournalError(f"{directory} has files of a journal, but no {ABOUT}: use a copy of it") from None
        return None
    except (ValueError, msgspec.ValidationError) as error:
        raise JournalError(f"{path} is damaged: {error}; use a copy of it") from None
    if about.streamline_journal != 1:
        raise JournalError(f"{path} is of format {about.streamline_journal}: upgrade streamline")
    return about


def read_files(directory: Path, about: About) -> list[Segment]:
    """Read all files, without what a kill has left over, and insist that nothing between them is missing.

    Raises:
      JournalError: a file is damaged, missing, or of another journal.
    """
    segments: list[Segment] = []
    paths = files_in(directory)
    for path in paths:
        last = path is paths[-1]
        if not last and int(path.stem) < about.first:
            continue  # a kill came between a trim's two steps
        segment = read_segment(path, last=last)
        if segment.header is None:
            continue  # a kill came while it was begun
        if segment.header.id != about.id:
            raise JournalError(f"{path} is of another journal ({segment.header.id}): it doesn't belong here")
        expected, found = about.first, segment.header.read
        if segments:
            expected, found = segments[-1].read, segment.header.behind
        if expected != found:
            raise JournalError(
                f"{path} goes on behind item {found:,}, and what is before it ends behind item {expected:,}: a file is "
                f"missing, or was cut; use a copy of {directory}"
            )
        segments.append(segment)
    if not segments and about.first:
        raise JournalError(f"the files of the journal in {directory} are missing: use a copy of it")
    return segments


def mend_files(directory: Path, segments: Sequence[Segment]) -> None:
    """Cut off a torn tail, and remove what a kill has left over: all but these.

    Only once it is certain that the journal is used: one that is refused stays as it is.
    """
    sound = {segment.path for segment in segments}
    for path in files_in(directory):
        if path not in sound:
            path.unlink()
    for segment in segments:
        if segment.size > segment.end:
            descriptor = open_own(segment.path, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, segment.end)
            finally:
                os.close(descriptor)
