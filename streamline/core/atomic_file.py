"""Atomic, durable writes of files; locks; and opening files safely where others may write.

A temporary file in the same directory is written, synced and renamed over the old one, then the directory is synced: a
kill or a power cut at any moment leaves the old content or the new. A kill may also leave a temporary, unlocked: the
next write of the file that it was for removes it.

Ctrl-C may come after any call in C, whose result is lost then. So one call in C opens a file and puts its descriptor
into a list, or an object that closes itself.

Other users may write to the directory (/tmp). So names of temporaries can't be guessed, and files of known names are
opened by `open_own`, which doesn't follow links, doesn't wait for pipes, and refuses other users' files.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from itertools import starmap
from pathlib import Path
from zlib import crc32

_CANT_SYNC = {errno.EINVAL, errno.ENOTSUP}

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
)

_SAFELY = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class UnsafeFileError(OSError):
    """A file's name belongs to something else, or to another user's file. `strerror` says what to do."""


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file that a user has named, as `os.open`; refuse a pipe, a socket or a device at once."""
    with suppress(FileNotFoundError):
        _check_kind(path.stat(), path)  # before it is opened: that may do something to a device
    return _open_checked(path, flags, mode)


def open_own(path: Path, flags: int, mode: int = 0o666, *, strict: bool = False) -> int:
    """Open a file of a known name in a directory that others may write to, as `os.open`, without following a link.

    Raises `UnsafeFileError`: no regular file, or another user's, if other users may write there or `strict`.
    """
    with suppress(FileNotFoundError):
        _check_kind(path.lstat(), path)
    try:
        descriptor = _open_checked(path, flags | _NO_LINK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _check_kind(path.lstat(), path)
        raise
    try:
        status = os.fstat(descriptor)
        if (strict or _is_shared(path.parent)) and not is_own(status.st_uid, path.parent):
            raise UnsafeFileError(
                errno.EPERM,
                f"{path.name} belongs to user {status.st_uid}, and this process is of user {os.geteuid()}: name a "
                "directory of your own, that others can't write to",
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path) -> bytes:
    with FileIO(open_own(path, os.O_RDONLY)) as file:
        return file.read()


def _open_checked(path: Path, flags: int, mode: int) -> int:
    opened: list[int] = []
    try:
        opened.extend(starmap(os.open, ((path, flags | _SAFELY, mode),)))
        _check_kind(os.fstat(opened[0]), path)
    except BaseException as error:
        for descriptor in opened:
            os.close(descriptor)
        if isinstance(error, OSError) and error.errno == errno.ENXIO:  # a pipe without a reader, a socket
            _check_kind(path.stat(), path)
        raise
    return opened[0]


def _check_kind(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((kind for test, kind in _KINDS if test(status.st_mode)), "a device")
        raise UnsafeFileError(
            errno.EINVAL, f"{path.name} is {kind}, expected a regular file: remove it, or name another directory"
        )


def _is_shared(directory: Path) -> bool:
    if os.name == "nt":
        return False
    status = directory.stat()
    return bool(status.st_mode & stat.S_IWOTH) or status.st_uid not in (0, os.geteuid())


def is_own(uid: int, directory: Path) -> bool:
    """Whether files that this process makes in a directory belong to this user: a server may change their owner (as
    NFS's root_squash does), so one is made to see.
    """
    if os.name == "nt" or uid == os.geteuid():
        return True
    probe = directory / f".streamline-{os.urandom(8).hex()}.tmp"
    with suppress(OSError), probe.open("xb", buffering=0) as file:
        try:
            return os.fstat(file.fileno()).st_uid == uid
        finally:
            probe.unlink()
    return False


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False: another process has. Raises `OSError`, `ImportError`: no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(path: Path) -> int | None:
    """Open and lock a file, made if missing, until `free_lock` or an exit; None: another process has locked it."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        if try_lock(descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def free_lock(descriptor: int) -> None:
    """Unlock a file and close it. A close alone would leave it locked by copies in children that are being started."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_if_abandoned(path: Path) -> bool:
    """Remove a temporary that its writer doesn't lock any more; return whether it was removed."""
    try:
        descriptor = open_own(path, os.O_RDWR)
    except OSError:
        return False
    try:
        with suppress(OSError, ImportError):
            if try_lock(descriptor) and is_open_as(descriptor, path):
                path.unlink()
                return True
        return False
    finally:
        os.close(descriptor)


def replace_file(target: Path, content: bytes) -> None:
    """Replace the content of `target` atomically; missing directories are made. Raises `OSError`."""
    write_parts(target, [content])


def write_parts(target: Path, parts: Iterable[bytes | memoryview], family: str | None = None) -> None:
    """As `replace_file`, of content in parts; if making a part raises, `target` has its old content.

    The next write of the same `family` in this directory removes temporaries that a kill has left; by default, of the
    file.
    """
    pending = PendingFile(target.parent, family or target.name)
    try:
        for content in parts:
            pending.write(content)
    except BaseException:
        pending.discard()
        raise
    pending.commit(target.name)


class PendingFile:
    """A new file in a directory, made if missing, under a temporary name until `commit` or `discard`.

    A kill before that leaves a temporary, which the next pending file of the same family in this directory removes.
    """

    def __init__(self, directory: Path, family: str) -> None:
        make_directory(directory)
        begin = _begin(family)
        _remove_abandoned(directory, begin)
        self._path, self._file, self._lock = _new(directory, begin)
        self.size = 0

    def write(self, content: bytes | memoryview) -> None:
        write_all(self._file.fileno(), content)
        self.size += len(content)

    def write_start(self, content: bytes) -> None:
        """Write over the first bytes."""
        self._file.seek(0)
        write_all(self._file.fileno(), content)
        self._file.seek(0, os.SEEK_END)

    def commit(self, name: str) -> None:
        """Make it durable, and rename it to `name`, over what had that name.

        After an `OSError`, the old file stays; or, if only the directory's sync failed, this one has the name, not yet
        durable.
        """
        try:
            os.fsync(self._file.fileno())
            self._file.close()  # may report what a network disk could not write
            self._path.replace(self._path.parent / name)
        except BaseException:
            self.discard()
            raise
        self._unlock()
        sync_directory(self._path.parent)

    def discard(self) -> None:
        """Remove it. Idempotent; does nothing after `commit`."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None and not self._lock.closed:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_UN)  # as in `free_lock`
            self._lock.close()


def _begin(family: str) -> str:
    return f".streamline-{crc32(os.fsencode(family)):08x}-"


def _remove_abandoned(directory: Path, begin: str) -> None:
    """Remove temporaries that a kill has left."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(begin) and entry.name.endswith(".tmp"):
                remove_if_abandoned(Path(entry.path))


def _new(directory: Path, begin: str) -> tuple[Path, FileIO, FileIO | None]:
    """Return a new temporary, open, and what holds its lock until it is closed; None: the system has no locks."""
    while True:
        path = directory / f"{begin}{os.urandom(8).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file = next(map(FileIO, starmap(os.open, ((path, flags, 0o666),)), ("wb",)))
        try:
            if try_lock(file.fileno()) and is_open_as(file.fileno(), path):
                return path, file, next(map(FileIO, map(os.dup, (file.fileno(),)), ("wb",)))
        except (OSError, ImportError):
            return path, file, None
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        file.close()  # another process saw it before it was locked, and removes it


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)  # may report what a network disk could not write


def make_directory(directory: Path) -> None:
    """Make `directory` and its missing parents, durably."""
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
    opened: list[int] = []
    try:
        opened.extend(map(os.open, (directory,), (os.O_RDONLY,)))
        os.fsync(opened[0])
    except OSError as error:
        if not opened or error.errno not in _CANT_SYNC:
            raise
    finally:
        for descriptor in opened:
            os.close(descriptor)
