"""NumPy files: every row from every place on, local and remote, stored and deflated; damage of every kind."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.lib import format as npy

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, PlanError, PlanTypeError, StreamlineError
from streamline.io.formats import npy as npy_format
from streamline.pipeline import Pipeline
from tests.laws.profile import sampled
from tests.serving import Request, Server

Array = np.ndarray[Any, Any]

RECORD = np.dtype([("x", "<f4"), ("né☃", ">i2", (2,)), ("s", "U3")])

ARRAYS: dict[str, Array] = {
    "floats": np.arange(24, dtype="<f4").reshape(6, 2, 2),
    "one axis": np.arange(7),
    "big-endian": np.arange(10, dtype=">i4").reshape(5, 2),
    "bools": np.array([[True], [False], [True]]),
    "text": np.array(["a", "né", "☃"]),
    "times": np.array(["2024-01-01", "NaT"], dtype="M8[D]"),
    "records": np.array([(1, (2, 3), "abc"), (4, (5, 6), "☃")], dtype=RECORD),
    "complex": np.arange(4).reshape(2, 2) + 1j,
    "no rows": np.zeros((0, 3)),
    "no bytes": np.zeros((3, 0, 2)),
}


def saved(array: Array, version: tuple[int, int] | None = None) -> bytes:
    content = io.BytesIO()
    fallback = (3, 0) if array.dtype == RECORD else (1, 0)  # its names need UTF-8
    npy.write_array(content, array, version=version or fallback)
    return content.getvalue()


def zipped(*, packed: bool = False, **arrays: Array) -> bytes:
    content = io.BytesIO()
    save: Any = np.savez_compressed if packed else np.savez
    save(content, **arrays)
    return content.getvalue()


def same(items: list[Any], array: Array) -> bool:
    return len(items) == len(array) and all(
        item.dtype == row.dtype and item.tobytes() == row.tobytes() and np.shape(item) == np.shape(row)
        for item, row in zip(items, array, strict=True)
    )


async def gathered(pipe: Pipeline[Any], **options: Any) -> list[Any]:
    seen: list[Any] = []
    await gather(pipe, seen, **options)
    return seen


async def gather(pipe: Pipeline[Any], into: list[Any], **options: Any) -> Any:
    """Read to the end or the failure, in a thread, so that the server has its turn; what came is in `into`."""

    ends: list[Any] = []

    def plain() -> None:
        try:
            with pipe.open(**options) as stream:
                into.extend(stream)  # what came before a failure stays
            ends.append(stream.snapshot())
        except StreamlineError as error:
            ends.append(error)  # raised in here, the idle thread and the loop might keep it: with frames, maps, files

    await anyio.to_thread.run_sync(plain)
    end = ends.pop()
    if isinstance(end, StreamlineError):
        raise end
    return end


@pytest.fixture
def made(tmp_path: Path, server: Server) -> Callable[..., str]:
    """Return where some bytes are: a path, or a URL."""

    def made_(content: bytes, *, remote: bool = False, name: str = "a.npy") -> str:
        server.objects[name] = content
        (tmp_path / name).write_bytes(content)
        return server.url(name) if remote else str(tmp_path / name)

    return made_


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
async def test_rows_are_those_of_numpy(made: Callable[..., str], name: str, remote: bool) -> None:
    array = ARRAYS[name]
    for version in ((1, 0), (2, 0), (3, 0)):
        if version < (3, 0) and name == "records":
            continue
        items = await gathered(sl.read_npy(made(saved(array, version), remote=remote)))
        assert same(items, array)
        assert array.ndim == 1 or not any(item.flags.writeable for item in items)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("packed", [False, True])
async def test_rows_of_several_arrays_come_together(made: Callable[..., str], remote: bool, packed: bool) -> None:
    arrays = {"x": np.arange(40.0).reshape(20, 2), "né y": np.arange(20, dtype=">i2")}
    path = made(zipped(packed=packed, meta=np.array(3), **arrays), remote=remote, name="a.npz")
    items = await gathered(sl.read_npy(path, arrays=["né y", "x"]))
    assert [list(item) for item in items] == [["né y", "x"]] * 20
    for name, array in arrays.items():
        assert same([item[name] for item in items], array)


def test_the_same_rows_on_every_backend(tmp_path: Path, backend: Backend) -> None:
    for name, array in ARRAYS.items():
        if len(array):
            (tmp_path / f"{name}.npy").write_bytes(saved(array))
    pipe = sl.read_npy(tmp_path / "*.npy").shard(3).merge()
    with pipe.open() as inline, pipe.open(backend=backend) as other:
        assert list(map(repr, other)) == list(map(repr, inline))


async def test_fortran_order_is_read_where_it_can_be_mapped(made: Callable[..., str]) -> None:
    array = np.asfortranarray(np.arange(12).reshape(4, 3))
    assert same(await gathered(sl.read_npy(made(saved(array)))), array)
    assert same([item["x"] for item in await gathered(sl.read_npy(made(zipped(x=array))))], array)
    for path in (made(saved(array), remote=True), made(zipped(x=array, packed=True))):
        with pytest.raises(DataError, match=r"Fortran order.*np\.ascontiguousarray"):
            await gathered(sl.read_npy(path))


@pytest.mark.long
async def test_a_resume_asks_for_its_rows_only(
    made: Callable[..., str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(200_000).reshape(20_000, 10)
    monkeypatch.setattr(npy_format, "BLOCK_BYTES", 8_000)
    pipe = sl.read_npy(made(saved(array), remote=True)).take(19_990)
    snapshot = await gather(pipe, [])
    del server.requests[:]
    whole = sl.read_npy(made(saved(array), remote=True)).take(20_000)
    assert same(await gathered(whole, resume=snapshot, accept=["take.count"]), array[19_990:])
    assert sum(asked(request) for request in server.requests) < 4096 + 1600


def asked(request: Request) -> int:
    start, stop = request.headers["range"].removeprefix("bytes=").split("-")
    return int(stop) + 1 - int(start)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "expected an npy file.*got b''"),
    "magic": (lambda data: b"X" + data[1:], "expected an npy file"),
    "version": (lambda data: data[:6] + b"\x09" + data[7:], r"version 1\.0, 2\.0 or 3\.0, got 9\.0"),
    "length": (lambda data: data[:8], "header is truncated"),
    "header": (lambda data: data[:60], "header is truncated: expected 128 bytes"),
    "huge header": (lambda data: npy.magic(2, 0) + b"\xff" * 4 + data[10:], "header is damaged"),
    "code": (lambda data: data.replace(b"'<i8'", b"f(9) "), "header can't be read"),
    "no dict": (lambda data: data[:10] + b"(" * 117 + b"\n" + data[128:], "header can't be read"),
    "negative": (lambda data: data.replace(b"(6, 2)", b"(-6,2)"), "shape|can't be"),
    "behind": (lambda data: data * 2, "224 bytes after the array"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("name", DAMAGE)
async def test_a_damaged_file_is_named(made: Callable[..., str], name: str, remote: bool) -> None:
    damage, says = DAMAGE[name]
    path = made(damage(saved(np.arange(12).reshape(6, 2))), remote=remote)
    with pytest.raises(DataError, match=says) as failed:
        await gathered(sl.read_npy(path))
    assert path in str(failed.value)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("archive", [False, True])
async def test_what_is_before_the_cut_comes_then_the_error(
    made: Callable[..., str], remote: bool, archive: bool
) -> None:
    array = np.arange(12).reshape(6, 2)
    content = saved(array)[:-17]
    if archive:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as writer:
            writer.writestr("x.npy", content)
        content = packed.getvalue()
    path = made(content, remote=remote)
    seen: list[Any] = []
    with pytest.raises(DataError, match=r"a\.npy, row 4: .* truncated: its header says 6 rows, and 4 are there"):
        await gather(sl.read_npy(path), seen)
    assert same([item["x"] if archive else item for item in seen], array[:4])
    other = made(saved(array), name="b.npy", remote=remote)
    pipe = sl.read_npy([path, other])
    assert len(await gathered(pipe, on_error="skip", max_errors=2)) == 10


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (saved(np.array(3)), "a single value"),
        (saved(np.array([None]), None), "Python objects.*pickled"),
        (zipped(x=np.arange(3), y=np.arange(4)), r"as many rows, got \{'x': 3, 'y': 4\}"),
        (zipped(x=np.array(3)), "array 'x': expected an array with rows"),
        (zipped(), r"the archive has \[\]"),
    ],
)
async def test_what_has_no_rows_is_refused(made: Callable[..., str], content: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        await gathered(sl.read_npy(made(content)))


async def test_arrays_are_chosen_by_name(made: Callable[..., str]) -> None:
    path = made(zipped(x=np.arange(3), y=np.arange(4)))
    assert await gathered(sl.read_npy(path, arrays=["y"])) == [{"y": i} for i in range(4)]
    with pytest.raises(DataError, match=r"expected arrays \['z'\], the archive has \['x', 'y'\]"):
        await gathered(sl.read_npy(path, arrays=["z"]))
    with pytest.raises(PlanTypeError, match="list of names"):
        sl.read_npy(path, arrays="x")
    with pytest.raises(PlanTypeError, match="list of names"):
        sl.read_npy(path, arrays=[1])  # type: ignore[list-item]
    with pytest.raises(PlanError, match="each once"):
        sl.read_npy(path, arrays=["x", "x"])


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("packed", [False, True])
async def test_a_wrong_checksum_is_an_error(made: Callable[..., str], packed: bool, remote: bool) -> None:
    content = bytearray(zipped(packed=packed, x=np.arange(5000)))
    if packed:
        at = content.rfind(b"PK\x01\x02") + 16
        content[at : at + 4] = content[14:18] = struct.pack("<I", 7)  # in the directory, and in the member's own header
    else:
        content[5000] ^= 1
    path = made(bytes(content), remote=remote)
    if not packed and not remote:
        return  # mapped: nobody reads all of it
    with pytest.raises(DataError, match=r"a\.npy.*: array 'x' is damaged: its checksum"):
        await gathered(sl.read_npy(path))


@pytest.mark.long
async def test_a_flipped_bit_in_what_a_zip_says_of_its_arrays_never_gives_them_other_names(tmp_path: Path) -> None:
    content = zipped(x=np.arange(3), yy=np.arange(3) / 2)
    headers = [content.index(b"PK\x03\x04", 1), 0]
    places = [at + byte for at in headers for byte in range(60)]
    places += range(content.index(b"PK\x01\x02"), len(content))
    path, refused = tmp_path / "a.npz", 0
    for place in sampled(places, 3):
        for bit in range(8) if content[place : place + 1] in b"xy.np" else [place % 8]:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            try:
                items = await gathered(sl.read_npy(path))
            except DataError:
                refused += 1
            else:
                assert items == [{"x": i, "yy": i / 2} for i in range(3)]
    assert refused > len(sampled(places, 3)) / 2


@pytest.mark.parametrize("packed", [False, True])
async def test_a_checksum_or_size_that_differs_in_directory_and_header_is_an_error(
    tmp_path: Path, packed: bool
) -> None:
    content, path = zipped(x=np.arange(20), packed=packed), tmp_path / "a.npz"
    for place in (14, 18, 22):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DataError, match="CRC-32 and sizes"):
            await gathered(sl.read_npy(path))


async def test_a_name_that_differs_in_directory_and_header_is_an_error_that_says_both(
    made: Callable[..., str],
) -> None:
    content = bytearray(zipped(x=np.arange(3)))
    content[content.rfind(b"x.npy")] ^= 1
    with pytest.raises(
        DataError, match=r"directory gives 'y\.npy' the name 'y\.npy', .*header at byte 0 says 'x\.npy'; use"
    ):
        await gathered(sl.read_npy(made(bytes(content))))


async def test_archives_that_other_tools_write_are_read(made: Callable[..., str]) -> None:
    class Stream(io.BytesIO):  # zipfile writes sizes and checksums behind the data then
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError("no position")

    stream, array = Stream(), np.arange(9)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("größe.npy", saved(array))
        archive.writestr("plain.npy", saved(array), zipfile.ZIP_STORED)
    items = await gathered(sl.read_npy(made(stream.getvalue())))
    assert items == [{"größe": i, "plain": i} for i in range(9)]


async def test_a_connection_that_breaks_goes_on(made: Callable[..., str], server: Server) -> None:
    path = made(saved(np.arange(10)), remote=True)
    server.script = [server.faulty(), server.faulty(cut=10), server.faulty(cut=0)]
    assert same(await gathered(sl.read_npy(path)), np.arange(10))


def test_it_prints_as_what_it_is(tmp_path: Path) -> None:
    assert "computes its row's byte" in str(sl.read_npy(tmp_path / "a.npy"))
