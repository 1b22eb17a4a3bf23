"""Local files, read in large blocks: what the kernel has in memory at once, the rest in a thread.

A block that a thread has read is in another core's cache, and passing it on costs more than copying it (bench
read_jsonl: 0.7 of 2.8 us for a record of 1 kB). Linux reads without waiting for the disk, where the file system knows
how to (RWF_NOWAIT: ext4, xfs, btrfs; not tmpfs).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import anyio.lowlevel
from aiofiles.threadpool import wrap

from streamline.core.threads import SerialExecutor
from streamline.errors import ReadError
from streamline.io.storage.base import FoundObject, Storage, too_short
from streamline.io.storage.paths import check_regular

R = TypeVar("R")

FIRST_BLOCK_BYTES = 64 * 1024
"""The first block, so that a resume deep in a file doesn't wait for a large one."""

BLOCK_BYTES = 1024 * 1024
"""Other blocks: at this size a hop to a thread and back, some 60 µs, costs less than the reading; and lists of items of
100 kB are worth their way to the consumer (blocks of 256 KiB: 1.5 x the CPU time for TFRecord files, 1.2 x for tar).
"""

NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
"""Makes a read fail rather than wait; None: this system has none."""

preadv: Callable[..., int] = getattr(os, "preadv", lambda *_: 0)

CALL_S = 0.001
"""Seconds that a call which reads several small files takes: a hop to the thread and back is a twentieth of it."""

CLOSE_S = 0.5
"""Seconds that closing waits at the most for a read that hangs; the thread closes the file when that ends."""


class LocalStorage(Storage):
    """Reads local files with one thread, which ends when this is closed."""

    def __init__(self) -> None:
        self._thread = SerialExecutor("streamline files")
        self._open: set[_LocalFile] = set()
        self._buffer = bytearray(BLOCK_BYTES)

    async def stat(self, path: str) -> FoundObject:
        try:
            return FoundObject(path, (await self._call(Path(path).stat)).st_size)
        except OSError as error:
            raise _unreadable(path, error) from error

    async def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        file = _LocalFile(path)
        self._open.add(file)  # before it is opened: if this task is cancelled meanwhile, `aclose` closes it
        try:
            handle = await self._call(lambda: file.open(start))
            reader = wrap(handle, loop=asyncio.get_running_loop(), executor=self._thread)
            position, size = start, FIRST_BLOCK_BYTES
            while stop is None or position < stop:
                size = size if stop is None else min(size, stop - position)
                block = file.cached(self._buffer, position, size)
                if not (at_once := bool(block)):
                    handle.seek(position)
                    block = await reader.read(size)
                position += len(block)
                if not block or position > file.size:
                    await self._call(lambda end=position: file.check_end(end))  # type: ignore[misc]
                    return
                yield block
                if at_once and size == BLOCK_BYTES:
                    await anyio.lowlevel.checkpoint()
                size = BLOCK_BYTES
        except OSError as error:
            raise error if isinstance(error, ReadError) else _unreadable(path, error) from error
        finally:
            await self._close(file)

    async def wholes(self, paths: Sequence[str]) -> Sequence[bytes | ReadError]:
        """Return what is in some files, the first ones of `paths`, or why the last of them can't be read.

        In one call of the thread, which costs more than the reading of a small file: as many as it reads in `CALL_S`.
        """
        return await self._call(lambda: _wholes(paths))

    async def aclose(self) -> None:
        for file in list(self._open):
            await self._close(file)
        self._thread.shutdown()

    async def _close(self, file: _LocalFile) -> None:
        if file not in self._open:
            return
        self._open.discard(file)
        closing = asyncio.wrap_future(self._thread.submit(file.close))
        with anyio.move_on_after(CLOSE_S, shield=True):
            await asyncio.shield(closing)  # else giving up would take the call back

    async def _call(self, fn: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, fn)


def _wholes(paths: Sequence[str]) -> list[bytes | ReadError]:
    found: list[bytes | ReadError] = []
    until = perf_counter() + CALL_S
    for path in paths:
        file = _LocalFile(path)
        try:
            handle = file.open(0)
            data = handle.readall()
            file.check_end(len(data))
            found.append(data)
        except ReadError as error:
            found.append(error)
            break
        except OSError as error:
            found.append(_unreadable(path, error))
            break
        finally:
            file.close()
        if perf_counter() > until:
            break
    return found


class _LocalFile:
    """An open file, and what it was like when it was opened. Its methods block."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle: FileIO | None = None
        self._nowait = NOWAIT
        self.size = 0
        self._changed_ns = 0

    def open(self, start: int) -> FileIO:
        """Open the file, at byte `start`."""
        self._handle = FileIO(self._path, opener=_open_without_waiting)
        status = os.fstat(self._handle.fileno())
        check_regular(self._path, status)
        self.size, self._changed_ns = status.st_size, status.st_mtime_ns
        if start > self.size:
            raise too_short(self._path, self.size, start)
        self._handle.seek(start)
        return self._handle

    def cached(self, buffer: bytearray, position: int, size: int) -> bytes:
        """Return up to `size` bytes from `position` on that are in the kernel's memory; b"" if the next one isn't.

        The one method that never waits for a disk, however broken that is.

        Args:
          buffer: room for them; of no use afterwards.
        """
        assert self._handle is not None
        if self._nowait is None:
            return b""
        room = memoryview(buffer)[:size]
        try:
            return bytes(room[: preadv(self._handle.fileno(), [room], position, self._nowait)])
        except BlockingIOError:
            return b""
        except OSError:
            self._nowait = None  # this file system can't; or the disk fails: the thread says why
            return b""

    def check_end(self, end: int) -> None:
        """Check that reading up to `end` was reading all of the file that was opened."""
        assert self._handle is not None
        status = os.fstat(self._handle.fileno())
        if end != self.size or status.st_size != self.size:
            now = max(end, status.st_size) if end > self.size else status.st_size
            raise ReadError(
                f"{self._path} changed while it was read: it had {self.size:,} bytes when it was opened, and {now:,} "
                f"at its end (read up to byte {end:,})"
            )
        if status.st_mtime_ns != self._changed_ns:
            raise ReadError(f"{self._path} changed while it was read: it was written to")

    def close(self) -> None:
        """Close the file, if it was opened. Idempotent."""
        if self._handle is not None:
            self._handle.close()


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait for its writer


def _unreadable(path: str, error: OSError) -> ReadError:
    if isinstance(error, FileNotFoundError):
        return ReadError(f"no such file: {path}: it may have been there when the stream was opened")
    if isinstance(error, IsADirectoryError):
        return ReadError(f"{path} is a directory: write {Path(path) / '*'} for its files")
    if isinstance(error, PermissionError):
        return ReadError(f"not allowed to read {path}: check its permissions, and the user that this runs as")
    return ReadError(f"can't read {path}: {error.strerror or error}")
