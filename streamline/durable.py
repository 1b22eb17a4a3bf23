"""Files that are whole or not there, whatever happens while they are written.

A temporary file in the same directory is written, synced and renamed over the old one, then the directory is synced: a
kill or a power cut at any moment leaves the old content or the new. A kill may also leave a temporary behind; its name
starts with a dot and ends in ".tmp".
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["make_directory", "replace_file", "sync_directory", "write_parts"]

_CANT_SYNC = {errno.EINVAL, errno.ENOTSUP}


def replace_file(target: Path, content: bytes) -> None:
    """Put `content` in the place of what `target` holds: all of it, or nothing; directories on the way are made.

    Raises:
      OSError: `target` is as it was; or, if only the directory's sync failed, new and whole, but not yet durable.
    """
    write_parts(target, [content])


def write_parts(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """As `replace_file`, of a content that comes in parts; what making them raises leaves `target` as it was, too."""
    make_directory(target.parent)
    temporary = target.with_name(f".streamline-{os.urandom(8).hex()}.tmp")  # its own: two may save at once
    try:
        _write(temporary, parts)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(target.parent)


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for content in parts:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)  # may report what a network disk could not write


def make_directory(directory: Path) -> None:
    """Make `directory` and what is missing above it, durably."""
    if directory.is_dir():
        return
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANT_SYNC:
            raise
    finally:
        os.close(descriptor)
