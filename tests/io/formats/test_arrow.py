"""Arrow IPC files and streams: exact places, projection, filters, dictionaries, damage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from anyio import to_thread
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc

import streamline as sl
from streamline.errors import DataError
from streamline.testing.checks import check_resume
from tests.file_kit import Plain, outcome
from tests.laws.profile import examples


def table(rows: int, first: int = 0) -> Any:
    ids = list(range(first, first + rows))
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": pa.array([None if i % 3 == 0 else f"ü{i}" for i in ids], pa.string()),
            "at": pa.array([[i] * (i % 3) for i in ids], pa.list_(pa.int32())),
            "kind": pa.array([f"k{i % 2}" for i in ids], pa.string()).dictionary_encode(),
        }
    )


def encoded(kind: str, rows: int = 12, first: int = 0, group: int = 5, **options: Any) -> bytes:
    data, file = table(rows, first), io.BytesIO()
    new = ipc.new_file if kind == "file" else ipc.new_stream
    with new(file, data.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(data, max_chunksize=group)
    return file.getvalue()


def rows_of(pipe: Any, **options: Any) -> list[Any]:
    with pipe.open(**options) as stream:
        return list(stream)


@pytest.fixture(params=["file", "stream"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def files(tmp_path: Path, kind: str) -> list[str]:
    paths = [tmp_path / f"{name}.arrow" for name in "abc"]
    for path, (rows, first) in zip(paths, [(6, 0), (0, 6), (3, 6)], strict=True):
        path.write_bytes(encoded(kind, rows, first))
    return [str(path) for path in paths]


WAYS: dict[str, dict[str, Any]] = {
    "rows": {},
    "batches": {"batch_rows": 2, "columns": ["kind", "id"]},
    "large batches": {"batch_rows": 100},
    "filter": {"filter": pc.bit_wise_and(pc.field("id"), 1) == 1, "columns": ["text"]},
    "filter for few": {"filter": pc.field("id").isin([3, 7]), "batch_rows": 3},
}


@pytest.mark.one_in(7, 6)
@pytest.mark.parametrize("way", WAYS)
def test_it_resumes_after_every_item(files: list[str], way: str) -> None:
    check_resume(sl.read_arrow(files, **WAYS[way]).map(Plain()), generations=1)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("way", ["rows", "batches"])
async def test_it_comes_over_http_as_from_a_disk(server: Any, kind: str, way: str) -> None:
    server.objects["a.arrow"] = encoded(kind, 40, 0, 7, compression="zstd")
    pipe = sl.read_arrow(server.url("a.arrow"), **WAYS[way]).map(Plain())
    found = await to_thread.run_sync(rows_of, pipe)
    rows = [row for item in found for row in (item if isinstance(item, list) else [item])]
    columns = WAYS[way].get("columns")
    assert rows == (table(40) if columns is None else table(40).select(columns)).to_pylist()


@pytest.mark.one_in(2)
def test_dictionaries_that_change_on_the_way(tmp_path: Path, kind: str) -> None:
    file = io.BytesIO()
    schema = pa.schema([("kind", pa.dictionary(pa.int8(), pa.string()))])
    options = ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    words = [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    with (ipc.new_file if kind == "file" else ipc.new_stream)(file, schema, options=options) as writer:
        for known in words:
            column = pa.DictionaryArray.from_arrays(pa.array([len(known) - 1, 0], pa.int8()), known)
            writer.write_batch(pa.record_batch([column], schema=schema))
    (tmp_path / "a.arrow").write_bytes(file.getvalue())
    assert [row["kind"] for row in rows_of(sl.read_arrow(tmp_path / "a.arrow"))] == ["b", "a", "c", "a", "d", "a"]
    check_resume(sl.read_arrow(tmp_path / "a.arrow"), generations=2)


def test_batches_have_buffers_of_their_own(tmp_path: Path) -> None:
    """Pickled, a slice would take all that it was cut from along."""
    data = pa.table({"id": list(range(100_000))})
    with ipc.new_file(tmp_path / "a.arrow", data.schema) as writer:
        writer.write_table(data)
    batches = rows_of(sl.read_arrow(tmp_path / "a.arrow", batch_rows=100))
    assert sum(batch.get_total_buffer_size() for batch in batches) < 1_000_000


@pytest.mark.long
async def test_the_end_of_a_file_is_fetched_once(server: Any) -> None:
    server.objects["a.arrow"] = data = encoded("file", 20_000, 0, 1000)
    found = await to_thread.run_sync(rows_of, sl.read_arrow(server.url("a.arrow")))
    assert len(found) == 20_000
    ends = [request for request in server.requests if request.headers.get("range", "").endswith(f"-{len(data) - 1}")]
    assert len(ends) == 1


WHOLE = {kind: encoded(kind) for kind in ("file", "stream")}

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "text": (b"id,text\n1,a\n" * 10, "not an Arrow file"),
    "tiny": (b"AR", "was cut short"),
    "file cut short": (WHOLE["file"][:-7], "an Arrow file that was cut short"),
    "file without a beginning": (WHOLE["file"][-16:], "damaged|can't be read|cut short"),
    "no footer": (WHOLE["file"][:-10] + b"\x00\x00\x00\x00ARROW1", "can't be read"),
    "stream without an end": (WHOLE["stream"][:-8], "cut short"),
    "stream cut short": (WHOLE["stream"][:-30], "cut short"),
    "stream with rubbish": (WHOLE["stream"][:-8] + b"rubbish!" * 2, "not an Arrow file, or damaged"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_is_none_is_named(tmp_path: Path, broken: str) -> None:
    content, words = BROKEN[broken]
    path = tmp_path / "a.arrow"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        rows_of(sl.read_arrow(path))
    assert str(path) in str(caught.value)


@given(at=st.integers(0, 4000), bit=st.integers(0, 7), kind=st.sampled_from(["file", "stream"]))
@examples(80)
def test_a_flipped_bit_is_an_error_or_rows(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int, kind: str
) -> None:
    path, content = tmp_path_factory.mktemp("flipped") / "a.arrow", bytearray(WHOLE[kind])
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)
    found, failure = outcome(sl.read_arrow(path))
    if failure is not None:
        assert str(path) in str(failure)
    else:
        assert len(found) == 12  # Arrow has no checksums: values may differ


def test_mixed_schemas_and_missing_columns(tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / "a.arrow", tmp_path / "b.arrow"]
    paths[0].write_bytes(WHOLE[kind])
    other = table(3).append_column("more", pa.array([1, 2, 3]))
    with (ipc.new_file if kind == "file" else ipc.new_stream)(paths[1], other.schema) as writer:
        writer.write_table(other)
    with pytest.raises(DataError, match="column 'more'"):
        rows_of(sl.read_arrow(paths))
    assert len(rows_of(sl.read_arrow(paths, columns=["id"]))) == 15
    with pytest.raises(DataError, match=r"a\.arrow has no column 'more'"):
        rows_of(sl.read_arrow(paths, columns=["more"]))
    with pytest.raises(DataError, match="the filter"):
        rows_of(sl.read_arrow(paths, filter=pc.field("nope") == 1))
