"""HDF5 files: every row from every place on, local and remote; damage, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import streamline as sl
from streamline.errors import DataError, PlanError
from tests.file_kit import outcome_aside as read
from tests.laws.profile import long_but
from tests.serving import Server

ROWS = 30
IMAGES = np.arange(ROWS * 6, dtype="<f4").reshape(ROWS, 2, 3)
LABELS = np.arange(ROWS, dtype="i8")
TEXTS = [f"né{n}" for n in range(ROWS)]


def saved(fill: Callable[[Any], object], **options: Any) -> bytes:
    content = io.BytesIO()
    with h5py.File(content, "w", **options) as file:
        fill(file)
    return content.getvalue()


def filled(file: Any, rows: int = ROWS) -> None:
    file.create_dataset("images", data=IMAGES[:rows], chunks=(7, 2, 2), compression="gzip", fletcher32=True)
    file.create_dataset("labels", data=LABELS[:rows])
    file.create_dataset("more/texts", data=TEXTS[:rows], dtype=h5py.string_dtype())
    file.create_dataset("more/bytes", data=np.array([b"%d" % n for n in range(rows)]))
    ragged = file.create_dataset("ragged", (rows,), dtype=h5py.vlen_dtype(np.uint8), chunks=(4,))
    for n in range(rows):
        ragged[n] = np.arange(n)


def one(values: Any, **options: Any) -> bytes:
    return saved(lambda file: file.create_dataset("x", data=values, **options))


def shown(items: list[dict[str, Any]]) -> list[Any]:
    return [
        {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()} for row in items
    ]


EXPECTED = [
    {
        "images": IMAGES[n].tolist(),
        "labels": n,
        "more/bytes": b"%d" % n,
        "more/texts": f"né{n}",
        "ragged": list(range(n)),
    }
    for n in range(ROWS)
]


@pytest.fixture(params=["local", "remote"])
def made(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> Callable[[bytes], str]:
    """Return where some bytes are: a path, or a URL."""

    def made_(content: bytes) -> str:
        server.objects["a.h5"] = content
        (tmp_path / "a.h5").write_bytes(content)
        return server.url("a.h5") if request.param == "remote" else str(tmp_path / "a.h5")

    return made_


async def test_rows_of_all_data_sets_are_those_of_h5py(made: Callable[[bytes], str]) -> None:
    found, failure = await read(sl.read_hdf5(made(saved(filled))))
    assert failure is None
    assert shown(found) == EXPECTED
    assert found[0]["images"].dtype == np.float32
    found[0]["images"] += 1  # an array of its own
    found, failure = await read(sl.read_hdf5(made(saved(filled, libver="latest")), datasets=["labels", "more/texts"]))
    assert [*found[3]] == ["labels", "more/texts"]
    assert len(found) == ROWS


async def test_chunks_of_other_lengths_are_left_out_with_the_longest(tmp_path: Path) -> None:
    def layout(file: h5py.File) -> None:
        for name, chunk in (("a", 4), ("b", 6)):
            file.create_dataset(name, data=np.arange(ROWS), chunks=(chunk,), fletcher32=True)

    content = bytearray(saved(layout))
    with h5py.File(io.BytesIO(content), "r") as file:
        found = file["a"].id.get_chunk_info_by_coord((8,))  # to 12, in the second six and the third one's first
    content[found.byte_offset] ^= 1
    (tmp_path / "a.h5").write_bytes(content)
    with sl.read_hdf5(tmp_path / "a.h5").open(on_error="skip", max_errors=None) as stream:
        assert [row["a"] for row in stream] == [*range(6), *range(12, ROWS)]
        assert stream.errors.total == 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("content", "datasets", "message"),
    [
        (saved(filled), ["labels", "none"], "expected data set 'none', the file has .*'more/texts'"),
        (saved(filled), ["more"], "expected data set 'more'"),
        (one(3), None, "'x' has no rows, but one value"),
        (one(h5py.Empty("f4")), None, "'x' has no rows"),
        (saved(lambda _: None), None, r"expected data sets with as many rows, got \{\}"),
        (saved(lambda file: [file.create_dataset(n, data=[0] * len(n)) for n in ("a", "bc")]), None, "name those that"),
    ],
)
async def test_what_has_no_rows_is_refused(
    made: Callable[[bytes], str], content: bytes, datasets: Any, message: str
) -> None:
    found, failure = await read(sl.read_hdf5(made(content), datasets=datasets))
    assert not found
    with pytest.raises(DataError, match=message):
        raise failure or AssertionError


def test_what_is_in_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.h5").write_bytes(one(LABELS))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink("other.h5", "x")
        layout = h5py.VirtualLayout((ROWS,), "i8")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", (ROWS,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", (3,), "i8", external=[(str(tmp_path / "raw"), 0, 24)])
        file.create_dataset("references", data=[file.ref], dtype=h5py.ref_dtype)
    for name in ("link", "virtual", "raw"):
        with pytest.raises(DataError, match=f"'{name}' is in other files"):
            sl.read_hdf5(tmp_path / "a.h5", datasets=[name]).first(1)
    with pytest.raises(DataError, match="has references"):
        sl.read_hdf5(tmp_path / "a.h5", datasets=["references"]).first(1)


async def test_of_a_remote_file_the_metadata_and_the_wanted_chunks_are_fetched(server: Server) -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(2**20), "u1").reshape(1024, 1024)
    server.objects["a.h5"] = saved(
        lambda file: [file.create_dataset(name, data=noise, chunks=(16, 1024)) for name in "abcd"]
    )
    found, failure = await read(sl.read_hdf5(server.url("a.h5"), datasets=["b"]))
    assert failure is None
    assert (np.stack([row["b"] for row in found]) == noise).all()
    spans = [request.headers["range"].removeprefix("bytes=").split("-") for request in server.requests]
    assert 2**20 < sum(int(stop) + 1 - int(start) for start, stop in spans) < 1.6 * 2**20


def test_without_h5py_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.core.options.find_spec", lambda module: None)
    with pytest.raises(PlanError, match=r"read_hdf5 needs h5py.*streamline-data\[hdf5\]"):
        sl.read_hdf5("a.h5")


LEFT_EARLY = """
import asyncio, atexit, threading, time
import h5py, numpy as np
import streamline as sl
from streamline.core import threads
from streamline.io.formats import hdf5
from streamline.runtime import loop_thread

with h5py.File("a.h5", "w") as file:
    file["x"] = np.arange(9)
hdf5.BLOCK_BYTES = 8
inside, ended, read = threading.Event(), threading.Event(), h5py.Dataset.__getitem__
atexit.register(lambda: print(ended.is_set()))


def slow(dataset, key):
    if key.start:
        inside.set()
        for _ in range(COUNT):
            with h5py._objects.phil:
                time.sleep(0.01)
        ended.set()
    return read(dataset, key)


def plain():
    with sl.read_hdf5("a.h5").open() as stream:
        next(stream)
        inside.wait()


def bare():
    for _ in sl.read_hdf5("a.h5"):
        inside.wait()
        break


async def cancelled():
    async for _ in sl.read_hdf5("a.h5"):
        await asyncio.to_thread(inside.wait)
        raise KeyboardInterrupt


h5py.Dataset.__getitem__ = slow
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "leave",
    long_but(["bare()"], ["plain()", "bare()", "try: asyncio.run(cancelled())\nexcept KeyboardInterrupt: pass"]),
)
def test_a_loop_that_is_left_while_h5py_reads_ends_before_python_does(
    python: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert python(LEFT_EARLY.replace("COUNT", "50") + leave) == "True\n"


@pytest.mark.long
def test_a_thread_that_is_in_h5py_for_ever_does_not_keep_python_from_ending(
    start_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = "threads.CALL_S = loop_thread.CALL_S = 0.1; hdf5.CALL_S = 0.5\n"
    with start_python(LEFT_EARLY.replace("range(COUNT)", "iter(int, 1)") + short + "plain()") as process:
        output, errors = process.communicate(timeout=200)
    assert (process.returncode, output) == (1, "False\n")  # what others have registered is done
    assert "a thread is still at work on a.h5" in errors
    assert "Timeout (0:00:00.500000)!" in errors
