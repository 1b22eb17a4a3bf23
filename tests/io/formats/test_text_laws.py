"""Files of text in every format and compression: the laws, damage at random places, and what a resume reads."""

import csv
import io
import json
import tempfile
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.flow import Site
from streamline.core.tasks import Session
from streamline.errors import DataError
from streamline.sources.base import Part
from tests.file_kit import PACK
from tests.laws.profile import examples

RECORDS = [{"id": str(number), "text": f'"{number}",\nö' * (number % 3)} for number in range(12)]

Read = Callable[..., sl.Pipeline[Any]]


def as_csv(records: list[dict[str, str]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["id", "text"])
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().encode()


def as_jsonl(records: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


FORMATS: dict[str, tuple[Read, Callable[[list[dict[str, str]]], bytes]]] = {
    "csv": (sl.read_csv, as_csv),
    "jsonl": (sl.read_jsonl, as_jsonl),
}


PACKED = {"plain": ("", bytes), **PACK}


def written(folder: Path, format: str, kind: str) -> sl.Pipeline[Any]:
    """Return what reads the records out of three files, one of them without any."""
    read, dump = FORMATS[format]
    suffix, pack = PACKED[kind]
    for number, part in enumerate([RECORDS[:5], [], RECORDS[5:]]):
        (folder / f"{number}{suffix}").write_bytes(pack(dump(part)))
    return read(str(folder / "*"))


def test_the_items_are_the_same_wherever_workers_run(tmp_path: Path, backend: Backend) -> None:
    pipe = written(tmp_path, "csv", "bzip2").shard(2).merge()  # bzip2: it has a thread of its own
    expected = RECORDS  # shard 0 has the files with records, and shard 1 the one without
    with pipe.open(backend=backend) as stream:
        items = [next(stream) for _ in range(7)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert items == expected[:7]
    with pipe.open(backend=backend, resume=snapshot) as stream:
        assert list(stream) == expected[7:]


def read_all(path: Path, read: Read) -> tuple[list[Any], Exception | None]:
    async def read_() -> tuple[list[Any], Exception | None]:
        source = read(path).plan.source
        items: list[Any] = []
        flow = source.open(Site(cast(Any, SimpleNamespace(session=Session()))), Part(mode="file"))
        async with aclosing(flow):
            try:
                async for item in flow:
                    items.append(item)  # noqa: PERF401
            except Exception as failure:
                return items, failure
        return items, None

    return anyio.run(read_)


CHANGES = st.tuples(
    st.sampled_from(["flip", "delete", "insert", "truncate"]), st.floats(0, 1, exclude_max=True), st.integers(1, 255)
)


def damaged(data: bytes, change: tuple[str, float, int]) -> bytes:
    how, place, byte = change
    at = int(place * len(data))
    if how == "flip":
        return data[:at] + bytes([data[at] ^ byte]) + data[at + 1 :]
    if how == "insert":
        return data[:at] + bytes([byte]) + data[at:]
    return data[:at] + (data[at + 1 + byte % 3 :] if how == "delete" else b"")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("format", FORMATS)
@given(change=CHANGES)
@examples(40)
def test_damaged_files_never_give_other_records_in_silence(
    format: str, kind: str, change: tuple[str, float, int]
) -> None:
    read, dump = FORMATS[format]
    suffix, pack = PACK[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{suffix}"
        path.write_bytes(damaged(pack(dump(RECORDS)), change))
        items, failure = read_all(path, read)
    if failure is None:
        assert items == RECORDS  # some bytes say nothing of the data
        return
    assert isinstance(failure, DataError), failure
    assert str(failure).startswith(f"{path}")
    assert "byte " in str(failure)


@pytest.mark.parametrize("format", FORMATS)
@given(change=CHANGES)
@examples(60)
def test_a_damaged_text_gives_the_records_before_the_damage(format: str, change: tuple[str, float, int]) -> None:
    read, dump = FORMATS[format]
    data = dump(RECORDS)
    at = int(change[1] * len(data))
    whole = sum(len(dump(RECORDS[: count + 1])) <= at for count in range(len(RECORDS)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.txt"
        path.write_bytes(damaged(data, change))
        items, failure = read_all(path, read)
        skipped = 0
        if failure is not None and " line 1 " not in str(failure):  # the header can't be left out
            with read(path).open(on_error="skip", max_errors=None) as stream:
                left = list(stream)
                skipped = stream.errors.total
                assert left[: len(items)] == items
    assert items[:whole] == RECORDS[:whole]
    if failure is not None:
        assert isinstance(failure, DataError)
        assert str(failure).startswith(f"{path} line ")
        assert " (byte " in str(failure)
        assert skipped or " line 1 " in str(failure)
