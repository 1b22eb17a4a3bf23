"""A folder of whole objects on local disk, which any number of processes share. Calls block.

An object is written to a file of its own, "<digest>.part", and renamed to "<digest>.object" when all of it is there. So
what has the second name is whole, even after a kill at any moment. The writer of a part holds a lock on it that the
kernel frees when the process ends: a part that can be locked is abandoned, and is removed. (A pid could be another
process's by then.)

A trailer after an object's bytes says how many they are. Journalling file systems (ext4, XFS, Btrfs, APFS) lengthen a
file only once the bytes are on disk. So after a power cut, one that was written in order is too short, and its trailer
missing; one that was written out of order could have holes, and is synced before it is renamed.

Only files of these names are counted or removed, and names are digests, never parts of a URL. Others may be able to
write to the folder, and to compute a digest: so a part is always a new file, and only regular files of this user are
read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from streamline.core.atomic_file import UnsafeFileError, is_open_as, is_own, open_own, remove_if_abandoned, try_lock
from streamline.errors import PlanError, ReadError, printable

logger = logging.getLogger(__name__)

FOLDER = "objects-v1"
"""Where in `cache_dir` they are: another layout gets another name, and leaves these alone."""

NAME = re.compile(r"([0-9a-f]{64})\.(object|part)")

TRAILER = struct.Struct("<8sQ")

MAGIC = b"slcached"

LOOKS_PER_FOLDER = 64
"""A process looks through the folder, and makes room, whenever it has written 1/64 of what the folder may hold: some
1,600 objects of 100 KiB for 10 GiB; looking at 100,000 files takes 0.2 s."""

FILLED_SHARE = 7 / 8
"""How full a folder is left when room is made: eight processes, each a 64th ahead of its last look, still fit."""


def digest(path: str, etag: str, scope: str = "") -> str:
    """Return the name under which one version of an object is kept.

    Args:
      scope: what else says which object `path` is: "s3://bucket/key" is another one at another endpoint.
    """
    return hashlib.sha256("\0".join([path, etag, scope]).encode(errors="surrogatepass")).hexdigest()


class CacheFolder:
    """The objects in one folder.

    Attributes:
      max_bytes: on disk, in all; None: no limit.

    Raises:
      ReadError: it can't be made.
      PlanError: the system has no locks on files that the kernel frees.
    """

    def __init__(self, cache_dir: str, max_bytes: int | None = None) -> None:
        self.path = Path(cache_dir).expanduser().absolute() / FOLDER
        self.max_bytes = max_bytes
        self._writes = True
        self._unseen_bytes = 0
        self._room_bytes = 0  # what may be written before the next look
        self._looking = threading.Lock()
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise ReadError(f"can't make {self.path} for cache_dir=: {error.strerror}: name another folder") from error
        if (owner := self.path.stat().st_uid) and not is_own(owner, self.path):
            raise ReadError(
                f"{self.path} belongs to user {owner}, who could replace what cache_dir= keeps there: name a folder of "
                "your own"
            )
        try:
            import fcntl  # noqa: F401
        except ImportError as error:
            raise PlanError("cache_dir= needs locks on files (fcntl), which this system doesn't have") from error
        with suppress(OSError):
            self._look()

    # Reading ------------------------------------------------------------------------------------------------------

    def open(self, name: str) -> CachedObject | None:
        """Return an object that is there and whole, open; its bytes stay readable if it is removed meanwhile."""
        path = self._object(name)
        try:
            fd = open_own(path, os.O_RDONLY, strict=True)
        except FileNotFoundError:
            self._check_part(name)
            return None
        except UnsafeFileError as error:
            raise self._unsafe_error(error) from None
        except OSError as error:
            logger.warning("can't read %s of the cache, fetching it anew: %s", printable(str(path)), error)
            return None
        try:
            status = os.fstat(fd)
            size = status.st_size - TRAILER.size
            if size < 0 or os.pread(fd, TRAILER.size, size) != TRAILER.pack(MAGIC, size):
                why = "it doesn't end as it was written"
                logger.warning("%s of the cache is damaged, fetching it anew: %s", printable(str(path)), why)
                self._remove_same(path, status)
                os.close(fd)
                return None
            with suppress(OSError):  # of another user, say
                os.utime(fd)  # when it was used last
            return CachedObject(fd, size)
        except OSError as error:
            logger.warning("can't read %s of the cache, fetching it anew: %s", printable(str(path)), error)
            os.close(fd)
            return None

    def _check_part(self, name: str) -> None:
        """Check that a part, if there is one, is this user's: `begin` would take any other for one being written."""
        try:
            os.close(open_own(self._part(name), os.O_RDONLY, strict=True))
        except UnsafeFileError as error:
            raise self._unsafe_error(error) from None
        except OSError:
            return

    def _unsafe_error(self, error: UnsafeFileError) -> ReadError:
        return ReadError(f"{self.path}, of cache_dir=, has what this user has not put there: {error.strerror}")

    @staticmethod
    def _remove_same(path: Path, status: os.stat_result) -> None:
        """Remove a damaged file, if it is still the one that was looked at."""
        with suppress(OSError):
            if os.path.samestat(path.stat(), status):
                path.unlink()

    # Writing ------------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> PartialObject | None:
        """Return a new part to be written; None: it is being written, it is there by now, or the disk failed."""
        if not self._writes:
            return None
        path = self._part(name)
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                if remove_if_abandoned(path) or not os.path.lexists(path):
                    continue
                return None
            except OSError as error:
                self.failed(error)
                return None
            part = PartialObject(fd, path, self._object(name))
            try:
                if not try_lock(fd):
                    part.close()
                    return None
                if not is_open_as(fd, path):  # renamed or removed before it was ours
                    part.close()
                    continue
                if not self._object(name).exists():
                    return part
                part.drop()
            except OSError as error:
                part.close()
                self.failed(error)
            return None

    def admit(self, nbytes: int) -> bool:
        """Make room for `nbytes` more; whether there is any."""
        if self.max_bytes is None:
            return True
        self._unseen_bytes += nbytes
        if self._unseen_bytes > self._room_bytes:
            self._look(nbytes)
        return self._unseen_bytes <= self._room_bytes

    def fits(self, size: int) -> bool:
        """Whether an object of `size` bytes is ever kept."""
        return self.max_bytes is None or size + TRAILER.size <= FILLED_SHARE * self.max_bytes

    def failed(self, error: OSError) -> None:
        """The disk can't be written to: go on without, and say so once."""
        if self._writes:
            self._writes = False
            where = printable(str(self.path))
            logger.warning("can't write to the cache %s, going on without keeping more: %s", where, error.strerror)

    # Room ---------------------------------------------------------------------------------------------------------

    def _look(self, nbytes: int = 0) -> None:
        """Remove abandoned parts, and the objects that were used least recently, until there is room."""
        with self._looking:
            objects: list[tuple[int, int, str]] = []
            used = nbytes
            for entry, status in self._files():
                if entry.name.endswith(".object"):
                    used += status.st_size
                    objects.append((status.st_mtime_ns, status.st_size, entry.path))
                elif not remove_if_abandoned(Path(entry.path)):
                    used += min(status.st_size, status.st_blocks * 512)  # it may have holes
            if self.max_bytes is None:
                return
            most = FILLED_SHARE * self.max_bytes
            for _, size, path in sorted(objects) if used > most else ():
                if used <= most:
                    break
                with suppress(FileNotFoundError):  # another process has
                    Path(path).unlink()
                used -= size
            room = min(self.max_bytes - used, self.max_bytes // LOOKS_PER_FOLDER)
            self._unseen_bytes, self._room_bytes = nbytes, nbytes + int(room)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        yield entry, entry.stat(follow_symlinks=False)

    def _object(self, name: str) -> Path:
        return self.path / f"{name}.object"

    def _part(self, name: str) -> Path:
        return self.path / f"{name}.part"


class CachedObject:
    """An object on disk, open."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop`; fewer if the file was cut."""
        data = os.pread(self._fd, stop - start, start)
        if len(data) == stop - start or not data:
            return data
        return data + self.read(start + len(data), stop)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PartialObject:
    """An object that is being written, locked."""

    def __init__(self, fd: int, path: Path, target: Path) -> None:
        self._fd = fd
        self._path = path
        self._target = target
        self._end = 0
        self._in_order = True

    def write(self, position: int, data: bytes) -> None:
        self._in_order &= position == self._end
        _write(self._fd, position, data)
        self._end = max(self._end, position + len(data))

    def keep(self, size: int) -> None:
        """All `size` bytes are written: give it its name. After an OSError, drop it."""
        _write(self._fd, size, TRAILER.pack(MAGIC, size))
        if not self._in_order:
            os.fsync(self._fd)
        self._path.rename(self._target)
        self.close()

    def drop(self) -> None:
        """Remove it, unless it is kept. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                self._path.unlink()  # while it is locked: so it is still this one
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _write(fd: int, position: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, position)
        rest, position = rest[written:], position + written
