"""MDS shards: every encoding, every sample from every place on, local and remote; shards that are damaged or cut."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, StreamlineError
from streamline.testing.checks import check_resume
from tests.io.formats.records import mds_file
from tests.serving import Server

COLUMNS: dict[str, tuple[int | None, bytes, Any]] = {
    "bytes": (None, b"\0\1", b"\0\1"),
    "str": (None, "né".encode(), "né"),
    "int": (8, b"\xfe" + b"\xff" * 7, -2),
    "uint8": (1, b"\xff", np.uint8(255)),
    "float16": (2, np.float16(1.5).tobytes(), np.float16(1.5)),
    "int64": (8, np.int64(-3).tobytes(), np.int64(-3)),
    "str_int": (None, b"-12345678901234567890", -12345678901234567890),
    "str_float": (None, b"1e3", 1000.0),
    "str_decimal": (None, b"1.10", Decimal("1.10")),
    "json": (None, b'{"a": [1, NaN]}', {"a": [1, float("nan")]}),
    "jpeg": (None, b"\xff\xd8", b"\xff\xd8"),
    "ndarray": (None, bytes([33, 2 << 2, 1, 2]) + np.array([5, 6], "<i4").tobytes(), np.array([[5, 6]], "i4")),
    "ndarray:uint8": (None, bytes([1 << 2 | 1, 3, 0, 7, 8, 9]), np.array([7, 8, 9], "u1")),
    "ndarray:float32:2": (8, np.array([0.5, 2], "<f4").tobytes(), np.array([0.5, 2], "f4")),
}


def number_file(numbers: range) -> bytes:
    return mds_file(
        {"id": ("int", 8), "text": ("str", None)}, [[n.to_bytes(8, "little"), b"%d" % n * (n % 4)] for n in numbers]
    )


EXPECTED = [{"id": n, "text": f"{n}" * (n % 4)} for n in range(30)]


@pytest.fixture(params=["local", "remote", "gzip", "remote gzip"])
def made(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> Callable[[bytes], str]:
    """Return where a shard is: a path, or a URL."""

    def made_(content: bytes) -> str:
        name = "a.mds.gz" if "gzip" in request.param else "a.mds"
        server.objects[name] = gzip.compress(content) if "gzip" in request.param else content
        (tmp_path / name).write_bytes(server.objects[name])
        return server.url(name) if "remote" in request.param else str(tmp_path / name)

    return made_


async def read(pipe: sl.Pipeline[Any], **options: Any) -> tuple[list[Any], StreamlineError | None]:
    """Return the items up to the end or the failure, which are read in a thread: the server has its turn."""
    seen: list[Any] = []

    def plain() -> StreamlineError | None:
        try:
            with pipe.open(**options) as stream:
                seen.extend(stream)
        except StreamlineError as error:
            return error
        return None

    return seen, await anyio.to_thread.run_sync(plain)


@pytest.mark.parametrize("encoding", COLUMNS)
def test_a_value_of_each_encoding(tmp_path: Path, encoding: str) -> None:
    size, data, expected = COLUMNS[encoding]
    path = tmp_path / "a.mds"
    path.write_bytes(mds_file({"before": ("str", None), "x": (encoding, size)}, [[b"x" * n, data] for n in range(2)]))
    for sample in sl.read_mds(path):
        found = sample["x"]
        assert type(found) is type(expected)
        np.testing.assert_equal(found, expected)
        assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)


@pytest.mark.parametrize("encoding", ["pkl", "pil", "list[jpeg]", "none"])
def test_a_column_that_cannot_be_decoded_is_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.mds").write_bytes(mds_file({"x": (encoding, None)}, [[b""]]))
    with pytest.raises(DataError, match=r"a\.mds: what it says of its columns can't be read: a column is '"):
        list(sl.read_mds(tmp_path))


async def test_a_resume_at_every_sample(made: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(number_file(range(13)))
    for block_bytes in (1, 60, 10_000):
        monkeypatch.setattr("streamline.io.formats.mds.BLOCK_BYTES", block_bytes)
        assert await read(sl.read_mds(path)) == (EXPECTED[:13], None)
        await anyio.to_thread.run_sync(check_resume, sl.read_mds(path).shard(1 if path.endswith(".gz") else 3))


def test_a_folder_by_shards(tmp_path: Path, backend: Backend) -> None:
    for number in range(3):
        (tmp_path / f"shard.0000{number}.mds").write_bytes(number_file(range(number * 10, number * 10 + 10)))
    (tmp_path / "index.json").write_text("{}")
    with sl.read_mds(tmp_path).shard(3).open(backend=backend) as stream:
        assert sorted(sample["id"] for sample in stream) == [*range(30)]


def test_a_shard_cut_anywhere_gives_the_samples_that_are_whole(tmp_path: Path) -> None:
    content, path = number_file(range(6)), tmp_path / "a.mds"
    begin = int.from_bytes(content[4:8], "little")
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        with sl.read_mds(path).open() as stream:
            found = list[Any]()
            with pytest.raises(DataError, match="was cut short" if cut < begin else "says that it has 6 samples"):
                found.extend(stream)
        assert found == EXPECTED[: len(found)]
        assert len(found) < 6


def test_of_a_damaged_sample_only_it_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.mds"
    content = number_file(range(30))
    path.write_bytes(content.replace(b"111111", b"\xff" * 6))
    with pytest.raises(DataError, match=r"a\.mds, row 11: a sample is damaged: UnicodeDecodeError"):
        list(sl.read_mds(path))
    with sl.read_mds(path).open(on_error="skip", max_errors=None) as stream:
        assert list(stream) == EXPECTED[:11] + EXPECTED[12:]
        assert stream.errors.total == 1


def test_random_damage_is_an_error_or_another_value(tmp_path: Path) -> None:
    content, path, rng = number_file(range(6)), tmp_path / "a.mds", np.random.default_rng(0)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        with sl.read_mds(path).open(on_error="skip", max_errors=None) as stream:
            found = list(stream)
        assert stream.errors.total > 0 or len(found) == 6


def test_what_the_columns_say_must_fit(tmp_path: Path) -> None:
    text = json.dumps({"column_names": ["a", "b"], "column_encodings": ["int"], "column_sizes": [8]}).encode()
    head = (0).to_bytes(4, "little") + (8 + len(text)).to_bytes(4, "little")
    (tmp_path / "a.mds").write_bytes(head + text)
    with pytest.raises(DataError, match="what it says of its columns can't be read"):
        list(sl.read_mds(tmp_path))
