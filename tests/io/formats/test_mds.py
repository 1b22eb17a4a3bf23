"""MDS shards: every encoding, every sample from every place on, local and remote; shards that are damaged or cut."""

from __future__ import annotations

import gzip
import hashlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, PlanTypeError, ReadError
from streamline.testing.checks import check_resume
from tests.file_kit import outcome_aside as read
from tests.io.formats.records import mds_file
from tests.laws.profile import in_turn
from tests.servers.s3 import Bucket
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


def test_a_folder_by_shards(tmp_path: Path, backend: Backend) -> None:
    for number in range(3):
        (tmp_path / f"shard.0000{number}.mds").write_bytes(number_file(range(number * 10, number * 10 + 10)))
    with sl.read_mds(tmp_path).shard(3).open(backend=backend) as stream:
        assert sorted(sample["id"] for sample in stream) == [*range(30)]


# An index -------------------------------------------------------------------------------------------------------------


def indexed(compression: str | None = None, hashes: tuple[str, ...] = ("xxh64", "sha1")) -> dict[str, bytes]:
    """Return a folder of three shards, by name, as streaming writes it."""
    folder, shards = dict[str, bytes](), list[Any]()
    for number in range(3):
        content, name = number_file(range(number * 10, number * 10 + 10)), f"shard.0000{number}.mds"
        entry = {"format": "mds", "compression": compression, "samples": 10, "raw_data": listed(name, content, hashes)}
        if compression is not None:
            content, name = gzip.compress(content), f"{name}.gz"
        entry["zip_data"] = listed(name, content, hashes) if compression is not None else None
        folder[name] = content
        shards.append(entry)
    return {**folder, "index.json": json.dumps({"version": 2, "shards": shards}).encode()}


def listed(name: str, content: bytes, hashes: tuple[str, ...]) -> dict[str, Any]:
    found = {kind: hashlib.new(kind, content).hexdigest() if kind != "xxh64" else "0" for kind in hashes}
    return {"basename": name, "bytes": len(content), "hashes": found}


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize(
    ("where", "compression"), in_turn(["local", "server", "store", "the index itself"], [None, "gz:3"])
)
async def test_the_shards_of_an_index(
    tmp_path: Path, server: Server, bucket: Bucket, where: str, compression: str | None
) -> None:
    files = indexed(compression)
    lay(tmp_path, {**files, "of-another-job.mds": b"x"})
    server.objects = {f"train/{name}": content for name, content in files.items()}
    bucket.put_all(server.objects)
    paths = {"local": str(tmp_path), "server": server.url("train"), "store": f"{bucket.url}/train/"}
    pipe = sl.read_mds(paths.get(where, str(tmp_path / "index.json")), storage_options=bucket.options)
    assert await read(pipe) == (EXPECTED, None)
    if where == "local":
        assert await read(sl.read_mds(tmp_path, check_hashes=True)) == (EXPECTED, None)
        await anyio.to_thread.run_sync(lambda: check_resume(pipe.shard(2, interleave=2), generations=2))


def test_what_is_not_as_the_index_says_is_named(tmp_path: Path) -> None:
    pipe = sl.read_mds(lay(tmp_path, indexed("gz")))
    lay(tmp_path, {"shard.00001.mds.gz": b"x"})
    with pytest.raises(ReadError, match=r"shard\.00001\.mds\.gz has 1 bytes, and \d+ as .*index\.json says"):
        list(pipe)
    (tmp_path / "shard.00001.mds.gz").unlink()
    with pytest.raises(ReadError, match=r"no such file: .*shard\.00001\.mds\.gz; .*index\.json lists it"):
        list(pipe)


def test_unpacked_shards_stand_for_those_of_the_index(tmp_path: Path) -> None:
    lay(tmp_path, {name: content for name, content in indexed().items() if name != "index.json"})
    lay(tmp_path, {"index.json": indexed("gz")["index.json"]})
    assert list(sl.read_mds(tmp_path)) == EXPECTED


@pytest.mark.parametrize("compression", [None, "gz"])
def test_another_content_of_the_same_size_is_found_by_its_hash(tmp_path: Path, compression: str | None) -> None:
    """Of compressed shards always: they are unpacked whole. The hash that isn't hashlib's is passed over."""
    files = indexed(compression)
    index = files["index.json"].replace(hashlib.sha1(number_file(range(10, 20))).hexdigest().encode(), b"0" * 40)
    pipe = sl.read_mds(lay(tmp_path, {**files, "index.json": index}), check_hashes=compression is None)
    with pipe.open() as stream:
        found = list[Any]()
        with pytest.raises(DataError, match=r"shard\.00001\.mds.*its sha1 is [0-9a-f]{40}, expected 0{40}"):
            found.extend(stream)
    assert found == EXPECTED[:10]
    with pipe.open(on_error="skip") as stream:
        assert list(stream) == EXPECTED[:10] + EXPECTED[20:]
    if compression is None:
        assert list(sl.read_mds(tmp_path)) == EXPECTED


def test_hashes_that_cannot_be_compared_are_refused_if_asked_for(tmp_path: Path) -> None:
    lay(tmp_path, indexed(hashes=("xxh64",)))
    assert list(sl.read_mds(tmp_path)) == EXPECTED
    with pytest.raises(PlanTypeError, match=r"check_hashes=\) as True or False, got int 1"):
        sl.read_mds(tmp_path, check_hashes=1)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"check_hashes= needs a hash of it .* got \['xxh64'\]: write"):
        list(sl.read_mds(tmp_path, check_hashes=True))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'{"version"', b"[", "is no index of MDS shards, or is damaged"),
        (b'{"version"', b'{"\xff": 1, "version"', "is no index of MDS shards, or is damaged: .*utf-8"),
        (
            b'{"version"',
            b'{"a": ' + b"[" * 100_000,
            "is no index of MDS shards, or is damaged: it is nested too deeply",
        ),
        (b'"shards"', b'"others"', "is no index of MDS shards, or is damaged"),
        (b'"format": "mds"', b'"format": "xsv"', "lists shards of xsv, which aren't read"),
        (b'"compression": null', b'"compression": "br:11"', "lists shards of br, which aren't read"),
        (b"shard.00001", b"../00001", "lists '../00001.mds', which is no name of a file in its folder"),
        (b"shard.00001", b"/etc/00001", "lists '/etc/00001.mds', which is no name"),
    ],
)
def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    files = indexed()
    assert old in files["index.json"]
    lay(tmp_path, {**files, "index.json": files["index.json"].replace(old, new)})
    with pytest.raises(ReadError, match=rf"index\.json {message}"):
        list(sl.read_mds(tmp_path))


# Damage ---------------------------------------------------------------------------------------------------------------


def test_what_the_columns_say_must_fit(tmp_path: Path) -> None:
    text = json.dumps({"column_names": ["a", "b"], "column_encodings": ["int"], "column_sizes": [8]}).encode()
    head = (0).to_bytes(4, "little") + (8 + len(text)).to_bytes(4, "little")
    (tmp_path / "a.mds").write_bytes(head + text)
    with pytest.raises(DataError, match="what it says of its columns can't be read"):
        list(sl.read_mds(tmp_path))
