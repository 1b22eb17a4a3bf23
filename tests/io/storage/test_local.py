import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from io import FileIO
from pathlib import Path

import pytest

from streamline.errors import ReadError
from streamline.io.storage import local
from streamline.io.storage.local import LocalStorage

DATA = bytes(range(256)) * 1000


def never(*_: object) -> int:
    raise BlockingIOError(11, "it would wait")


def unsupported(*_: object) -> int:
    raise OSError(95, "Operation not supported")


def sometimes(fd: int, buffers: Sequence[memoryview], position: int, flags: int) -> int:
    """Find every third block in memory, and half of it."""
    if position // 500 % 3:
        return never()
    return os.preadv(fd, [buffers[0][: len(buffers[0]) // 2 + 1]], position)


KERNELS = {"what is in memory": os.preadv, "some of it": sometimes, "nothing": never, "it can't tell": unsupported}


@pytest.fixture(params=list(KERNELS.values()), ids=list(KERNELS))
async def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalStorage]:
    monkeypatch.setattr(local, "FIRST_BLOCK_BYTES", 1000)
    monkeypatch.setattr(local, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(local, "NOWAIT", getattr(os, "RWF_NOWAIT", 8))
    monkeypatch.setattr(local, "preadv", request.param)
    storage = LocalStorage()
    yield storage
    await storage.aclose()
    assert leftovers() == ([], [])


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "data").write_bytes(DATA)
    return str(tmp_path / "data")


def leftovers() -> tuple[list[str], list[str]]:
    """Return the threads and open files that a storage has left."""
    files = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("streamline files")]
    return threads, [file for file in files if file.endswith("/data")]


async def read(storage: LocalStorage, path: str, start: int = 0, stop: int | None = None) -> list[bytes]:
    async with aclosing(storage.blocks(path, start, stop)) as blocks:
        return [block async for block in blocks]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (1, None), (len(DATA) - 1, None), (0, 2), (5, 5), (999, 20_003)]
)
async def test_any_bytes_come_in_blocks(storage: LocalStorage, path: str, start: int, stop: int | None) -> None:
    blocks = await read(storage, path, start, stop)
    assert b"".join(blocks) == DATA[start:stop]
    assert all(blocks)
    assert all(len(block) <= 10_000 for block in blocks)


async def test_at_the_end_there_is_nothing(storage: LocalStorage, path: str) -> None:
    assert await read(storage, path, len(DATA)) == []


async def test_a_start_after_the_end_is_an_error(storage: LocalStorage, path: str) -> None:
    with pytest.raises(ReadError, match="has 256,000 bytes, expected more than 256,001"):
        await read(storage, path, len(DATA) + 1)


async def test_the_size_is_told(storage: LocalStorage, path: str) -> None:
    assert (await storage.stat(path)).size == len(DATA)


async def test_what_is_not_there_is_an_error(storage: LocalStorage, path: str) -> None:
    for missing in (f"{path}/below", f"{path}.missing"):
        with pytest.raises(ReadError, match=r"no such file|can't read"):
            await read(storage, missing)
        with pytest.raises(ReadError, match=r"no such file|can't read"):
            await storage.stat(missing)


async def test_a_directory_is_an_error(storage: LocalStorage, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"is a directory: write .*/\*"):
        await read(storage, str(tmp_path))


async def test_a_file_that_may_not_be_read_is_an_error(
    storage: LocalStorage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local, "_open_without_waiting", refuse)  # root may read everything
    with pytest.raises(ReadError, match=r"not allowed to read .*check its permissions"):
        await read(storage, path)


async def test_a_pipe_is_an_error_and_nobody_waits_for_its_writer(storage: LocalStorage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ReadError, match="not a regular file"):
        await read(storage, str(tmp_path / "pipe"))


async def test_a_disk_that_fails_is_an_error(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    class Broken(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(local, "FileIO", Broken)
    with pytest.raises(ReadError, match=r"can't read .*: Input/output error"):
        await read(storage, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 5000), "it had 256,000 bytes when it was opened, and 5,000"),
        (lambda path: os.truncate(path, 355_999), "and 355,999"),
        (lambda path: os.utime(path, (1, 1)), "it was written to"),
    ],
    ids=["shorter", "longer", "rewritten"],
)
async def test_a_file_that_changes_while_it_is_read_is_an_error(
    storage: LocalStorage, path: str, change: object, message: str
) -> None:
    assert callable(change)
    async with aclosing(storage.blocks(path)) as blocks:
        await anext(blocks)
        change(Path(path))
        with pytest.raises(ReadError, match=f"changed while it was read.*{message}"):
            assert [block async for block in blocks]


async def test_leaving_in_the_middle_leaves_nothing(storage: LocalStorage, path: str) -> None:
    blocks = storage.blocks(path)
    await anext(blocks)
    assert leftovers()[1] == [path]
    await blocks.aclose()
    assert leftovers()[1] == []


async def test_closing_the_storage_closes_what_is_open(path: str) -> None:
    storage = LocalStorage()
    blocks = storage.blocks(path)
    await anext(blocks)
    await storage.aclose()
    assert leftovers() == ([], [])
    await blocks.aclose()
    await storage.aclose()
    assert leftovers() == ([], [])


async def test_being_cancelled_while_a_file_opens_leaves_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    really_open = local._open_without_waiting

    def slowly(path: str, flags: int) -> int:
        loop.call_soon_threadsafe(opening.set)
        go_on.wait(200)
        return really_open(path, flags)

    monkeypatch.setattr(local, "_open_without_waiting", slowly)
    storage = LocalStorage()
    task = asyncio.ensure_future(read(storage, path))
    await opening.wait()
    task.cancel()
    loop.call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    await storage.aclose()
    assert leftovers() == ([], [])


async def test_a_read_that_hangs_does_not_stop_the_close(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Hanging(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            loop.call_soon_threadsafe(hanging.set)
            go_on.wait(200)
            return b""

    monkeypatch.setattr(local, "FileIO", Hanging)
    monkeypatch.setattr(local, "CLOSE_S", 0.01)
    storage = LocalStorage()
    task = asyncio.ensure_future(read(storage, path))
    await hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await storage.aclose()
    thread = next(thread for thread in threading.enumerate() if thread.name.startswith("streamline files"))
    assert thread.daemon
    go_on.set()
    thread.join(200)
    assert leftovers() == ([], [])
