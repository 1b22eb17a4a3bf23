"""Folders that shards are written to, on local disk or in a store: whole files, and a manifest that is replaced.

A shard is written to a local file without its name first, so its memory is a buffer's, and its format may go back to
its start. On disk that file is renamed; to a store it is uploaded, in parts. Either is atomic.

One job at a time: on local disk it holds a lock. Stores have none. There each start replaces the manifest, and names
its shards by how many there were before. So a job that was thought dead, and isn't, overwrites nothing that counts, and
its next manifest is refused: that of its start is there no more.
"""

from __future__ import annotations

import errno
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from anyio.from_thread import start_blocking_portal

from streamline.core.atomic_file import (
    PendingFile,
    free_lock,
    is_open_as,
    lock_file,
    make_directory,
    replace_file,
    sync_directory,
    write_all,
)
from streamline.errors import PlanError, PlanTypeError, WriteError, printable
from streamline.io.storage.base import ADDED, ShardFile, Storage, Version
from streamline.io.storage.options import Access
from streamline.io.storage.paths import MAGIC, escape, is_object, scheme_of
from streamline.io.storage.registry import Storages

logger = logging.getLogger("streamline.writing")  # as the docs call it

R = TypeVar("R")

NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
"""What a file system says that has no locks."""

FAMILY = "written shards"
"""Of the temporaries of all jobs: those that a kill has left are removed by the next one in that folder."""


class OutputFolder(ABC):
    """A folder that one rank of a job writes to. Its methods block, and raise `WriteError` for what fails.

    Attributes:
      disk: where a shard is written first, for messages.
      fenced: whether the name of a shard says how many starts of the job there were before.
    """

    fenced: bool

    def __init__(self, path: str, disk: str) -> None:
        self.path = path
        self.disk = disk

    @abstractmethod
    def names(self) -> dict[str, int | None]:
        """Return the names of what is directly in the folder, and sizes; hidden files are left out."""

    @abstractmethod
    def manifest(self, name: str) -> bytes | None:
        """Return the content of a manifest; None: it isn't there."""

    @abstractmethod
    def replace_manifest(self, name: str, content: bytes) -> None:
        """Write the manifest that `manifest` has returned, durably: whole or not at all."""

    @abstractmethod
    def shard(self) -> ShardFile:
        """Return a new shard, without a name."""

    @abstractmethod
    def commit(self, shard: Any, name: str) -> None:
        """Give a shard that `shard` returned its name, durably: whole or not at all."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


@contextmanager
def output_folder(path: object, access: Access, manifest: str) -> Iterator[OutputFolder]:
    """Open a folder for one rank of a job.

    Raises:
      PlanTypeError, PlanError: it is no path of a folder, or of a storage that can't be written to.
      WriteError: another job writes to it.
    """
    folder = _path_text(path)
    scheme = scheme_of(folder)
    if is_object(folder) or scheme in ADDED:
        with _storage(folder, access) as (storage, call):
            yield _StoreFolder(folder, storage, call)
        return
    if scheme:
        raise PlanError(f"{scheme}:// can't be written to: give a local folder, or s3://, gs:// or az://; got {folder}")
    with ExitStack() as stack:
        made = _LocalFolder(os.path.expanduser(folder))  # noqa: PTH111 - as the readers do
        stack.enter_context(made.locked(manifest))
        yield made


def _path_text(path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise PlanTypeError(f"expected the folder to write to as str or os.PathLike, got {type(path).__name__}")
    if not text.strip("/") or "\0" in text:
        raise PlanError(f"expected a folder to write to, got {text!r}")
    if is_object(text) and (MAGIC.search(text) or not text.partition("://")[2].strip("/").partition("/")[2]):
        raise PlanError(f"expected {scheme_of(text)}://BUCKET/FOLDER, without * ? [ in it, got {text}")
    return text.rstrip("/")


class _LocalFolder(OutputFolder):
    fenced = False

    def __init__(self, path: str) -> None:
        super().__init__(path, path)
        self._folder = Path(path)

    @contextmanager
    def locked(self, manifest: str) -> Iterator[None]:
        """Hold the lock of a rank; its file goes with it."""
        lock = self._folder / f".{manifest}.lock"
        with self._name_errors("lock"):
            make_directory(self._folder)
            descriptor = self._lock(lock)
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()
            if descriptor is not None:
                free_lock(descriptor)

    def _lock(self, lock: Path) -> int | None:
        while True:
            try:
                descriptor = lock_file(lock)
            except (OSError, ImportError) as error:
                if isinstance(error, OSError) and error.errno not in NO_LOCKS:
                    raise
                where = printable(self.path)
                logger.warning("%s can't be locked (%s): make sure that one job writes to it", where, error)
                return None
            if descriptor is None:
                raise WriteError(f"another job writes to {self.path}: wait for its end, or give another folder")
            if is_open_as(descriptor, lock):
                return descriptor
            os.close(descriptor)  # of a job that has just ended, and has removed it

    def names(self) -> dict[str, int | None]:
        with self._name_errors("look into"):
            return {path.name: path.lstat().st_size for path in sorted(self._folder.iterdir()) if path.name[0] != "."}

    def manifest(self, name: str) -> bytes | None:
        with self._name_errors("read the manifest in"):
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

    def replace_manifest(self, name: str, content: bytes) -> None:
        with self._name_errors("write to"):
            replace_file(self._folder / name, content)

    def shard(self) -> PendingFile:
        with self._name_errors("write to"):
            return PendingFile(self._folder, FAMILY)

    def commit(self, shard: PendingFile, name: str) -> None:
        with self._name_errors("write to"):
            shard.commit(name)

    def remove(self, name: str) -> None:
        with self._name_errors("remove a file of"):
            (self._folder / name).unlink(missing_ok=True)
            sync_directory(self._folder)

    @contextmanager
    def _name_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except WriteError:
            raise
        except OSError as error:
            raise unwritable(self.path, what, error) from error


def unwritable(path: str, what: str, error: OSError) -> WriteError:
    return WriteError(f"can't {what} {path}: {error.strerror or error}: look at the disk and its permissions")


class _Spooled:
    """A shard in a nameless file of this machine, until it is uploaded."""

    def __init__(self) -> None:
        self.size = 0
        self.file: IO[bytes] = TemporaryFile(buffering=0)  # noqa: SIM115 - `discard` closes it

    def write(self, content: bytes | memoryview) -> None:
        write_all(self.file.fileno(), content)
        self.size += len(content)

    def write_start(self, content: bytes) -> None:
        self.file.seek(0)
        write_all(self.file.fileno(), content)
        self.file.seek(0, os.SEEK_END)

    def discard(self) -> None:
        self.file.close()


class _StoreFolder(OutputFolder):
    fenced = True

    def __init__(self, path: str, storage: Storage, call: Callable[[Awaitable[Any]], Any]) -> None:
        super().__init__(path, "the folder of temporary files (TMPDIR)")
        self._storage = storage
        self._call = call
        self._version: Version | None = None

    def names(self) -> dict[str, int | None]:
        listed = self._call(self._storage.list(f"{escape(self.path)}/*"))
        return {found.path.rpartition("/")[2]: found.size for found in listed}

    def manifest(self, name: str) -> bytes | None:
        found = self._call(self._storage.look(f"{self.path}/{name}"))
        content, self._version = found or (None, None)
        return content

    def replace_manifest(self, name: str, content: bytes) -> None:
        self._version = self._call(self._storage.replace(f"{self.path}/{name}", content, self._version))

    def shard(self) -> _Spooled:
        try:
            return _Spooled()
        except OSError as error:
            raise unwritable(self.disk, "write to", error) from error

    def commit(self, shard: _Spooled, name: str) -> None:
        try:
            self._call(self._storage.upload(f"{self.path}/{name}", shard.file, shard.size))
        finally:
            shard.discard()

    def remove(self, name: str) -> None:
        self._call(self._storage.remove(f"{self.path}/{name}"))


@contextmanager
def _storage(path: str, access: Access) -> Iterator[tuple[Storage, Callable[[Awaitable[Any]], Any]]]:
    """Open a storage in an event loop of its own, in a thread; give it, and what waits there for a coroutine of it."""

    async def opened() -> tuple[Storages, Storage]:
        storages = Storages(access)
        return storages, storages.of(path)

    async def wait_for(work: Awaitable[R]) -> R:
        return await work

    with start_blocking_portal("asyncio", name="streamline writing") as portal:
        storages, storage = portal.call(opened)
        try:
            yield storage, lambda work: portal.call(wait_for, work)
        finally:
            portal.call(storages.aclose)
