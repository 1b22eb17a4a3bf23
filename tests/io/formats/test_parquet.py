"""Parquet: rows and batches, projection, filters, exact places, damage. Needs pyarrow, which `dev` brings."""

from __future__ import annotations

import datetime
import decimal
import gc
import io
import json
import pickle
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from anyio import to_thread
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, PlanError, PlanTypeError, ReadError
from streamline.io.formats import columnar as arrow_format
from streamline.io.formats import columnar as arrow_items
from streamline.io.formats.columnar_selection import python_values
from streamline.io.formats.sparse_file import SparseFile
from streamline.testing.checks import check_resume
from tests.file_kit import Plain, outcome
from tests.kit import LONGEST_S
from tests.laws.profile import examples

NAME = pa.struct([("first", pa.string()), ("last", pa.string())])
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("point", pa.struct([("x", pa.float64()), ("name", NAME)])),
        ("boxes", pa.list_(pa.struct([("at", pa.int64()), ("of", pa.int64())]))),
    ]
)


def table(rows: int, first: int = 0) -> Any:
    ids = list(range(first, first + rows))
    return pa.table(
        {
            "id": ids,
            "text": [None if i % 3 == 0 else f"ü{i}" for i in ids],
            "point": [{"x": i / 2, "name": {"first": f"a{i}", "last": "b"}} for i in ids],
            "boxes": [[{"at": i, "of": j} for j in range(i % 3)] for i in ids],
        },
        SCHEMA,
    )


def write(path: Path, rows: int = 30, first: int = 0, group: int = 7, **options: Any) -> str:
    pq.write_table(table(rows, first), path, row_group_size=group, **options)
    return str(path)


def rows_of(pipe: Any, **options: Any) -> list[Any]:
    with pipe.open(**options) as stream:
        return list(stream)


def ids_of(pipe: Any, **options: Any) -> list[int]:
    """Return the ids of rows, or of batches."""
    found = rows_of(pipe, **options)
    return [i for item in found for i in (item["id"].to_pylist() if isinstance(item, pa.RecordBatch) else [item["id"]])]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three files of 5, 0 and 4 rows in groups of 3."""
    return [
        write(tmp_path / "a.parquet", 5, 0, 3),
        write(tmp_path / "b.parquet", 0, 5, 3),
        write(tmp_path / "c.parquet", 4, 5, 3),
    ]


SOME = pc.field("id") > 3
FEW = (pc.field("id") == 1) | (pc.field("id") == 8)
ODD = pc.bit_wise_and(pc.field("id"), 1) == 1

WAYS: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"columns": ["point.name.last", "id"]},
    "batches": {"batch_rows": 2},
    "large batches": {"batch_rows": 100},
    "filter": {"filter": ODD, "columns": ["text"]},
    "filter that prunes": {"filter": SOME},
    "filter that leaves gaps": {"filter": FEW, "batch_rows": 3},
    "filter for nothing": {"filter": pc.field("id") < 0},
}


@pytest.mark.one_in(8, 7)
@pytest.mark.parametrize("way", WAYS)
def test_it_resumes_after_every_item(files: list[str], way: str) -> None:
    check_resume(sl.read_parquet(files, **WAYS[way]).map(Plain()), generations=2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("way", "step"), [("rows", 1), ("batches", 3), ("filter", 1)])
def test_it_resumes_in_the_middle_of_what_was_decoded(
    files: list[str], way: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamline.io.formats.parquet_table.STEP_BYTES", step * 150)
    monkeypatch.setattr(arrow_items, "CALL_BYTES", 1)
    check_resume(sl.read_parquet(files[:2], **WAYS[way]).map(Plain()))


@pytest.mark.long
@pytest.mark.parametrize(("way", "shards"), [("rows", 5), ("filter that leaves gaps", 2)])
def test_it_resumes_where_one_file_is_split(tmp_path: Path, shards: int, way: str) -> None:
    path = write(tmp_path / "one.parquet", 22, 0, 7)
    check_resume(sl.read_parquet(path, **WAYS[way]).shard(shards).map(Plain()), generations=3)


@pytest.mark.long
def test_a_resume_in_another_host(tmp_path: Path, processes: Backend) -> None:
    files = [write(tmp_path / f"{at}.parquet", rows, at, 3) for at, rows in ((0, 7), (7, 0), (8, 6))]
    pipe = sl.read_parquet(files, filter=ODD, batch_rows=2).shard(2)
    whole = [batch.to_pylist() for batch in rows_of(pipe)]
    with pipe.open(backend=processes) as stream:
        first = [batch.to_pylist() for batch in islice(stream, 4)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        assert first + [batch.to_pylist() for batch in stream] == whole
    assert first + [batch.to_pylist() for batch in rows_of(pipe, resume=snapshot)] == whole


def test_rows_are_what_pyarrow_makes_of_them(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.UTC)
    data = pa.table(
        {
            "when": pa.array([moment, None], pa.timestamp("us", "UTC")),
            "day": pa.array([moment.date(), None]),
            "time": pa.array([moment.time(), None]),
            "took": pa.array([datetime.timedelta(seconds=3), None]),
            "price": pa.array([decimal.Decimal("1.50"), None]),
            "kind": pa.array(["a", None]).dictionary_encode(),
            "raw": pa.array([b"\xff", None]),
            "large": pa.array(["l", None], pa.large_string()),
            "half": pa.array([np.float16(0.5), None]),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())),
            "box": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),  # pyarrow 17 to 21 itself reads no None in one
            "nested": pa.array([[[1], None, []], None]),
            "nothing": pa.nulls(2),
            "id": pa.array([b"0123456789abcdef", None], pa.uuid() if hasattr(pa, "uuid") else pa.binary(16)),
        }
    )
    pq.write_table(data, tmp_path / "a.parquet")
    expected = pq.ParquetFile(tmp_path / "a.parquet").read().to_pylist()
    assert rows_of(sl.read_parquet(tmp_path / "a.parquet")) == expected
    assert expected[0]["price"] == decimal.Decimal("1.50")


MOMENTS = [
    datetime.datetime(9999, 12, 31, 23, 59, 59),
    datetime.datetime(1000, 1, 1),
    datetime.datetime(2262, 4, 12),
    None,
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
]


def test_timestamps_of_spark_are_the_dates_that_they_are(tmp_path: Path) -> None:
    rows = [{"at": moment, "in": [{"at": moment}], "id": n} for n, moment in enumerate(MOMENTS)]
    within = pa.list_(pa.struct([("at", pa.timestamp("us"))]))
    data = pa.Table.from_pylist(rows, pa.schema([("at", pa.timestamp("us")), ("in", within), ("id", pa.int64())]))
    path = tmp_path / "a.parquet"
    pq.write_table(data, path, use_deprecated_int96_timestamps=True, row_group_size=2)
    assert pq.read_schema(path).field("at").type == pa.timestamp("ns")  # it was written as INT96
    assert rows_of(sl.read_parquet(path)) == rows
    assert [row for batch in sl.read_parquet(path, batch_rows=2) for row in batch.to_pylist()] == rows
    for bound, ids in ((datetime.datetime(2300, 1, 1), [0]), (datetime.datetime(1500, 1, 1), [0, 2, 4])):
        assert [row["id"] for row in sl.read_parquet(path, columns=["id"], filter=pc.field("at") > bound)] == ids


SHORT, FINE = 1_700_000_000_000_001_000, 1_700_000_000_000_000_123
MOMENT = datetime.datetime(2023, 11, 14, 22, 13, 20, 1)
TIMES: list[tuple[Any, Any, Any]] = [
    (pa.timestamp("ns"), MOMENT, np.datetime64(FINE, "ns")),
    (pa.timestamp("ns", "+01:00"), MOMENT.replace(tzinfo=datetime.UTC), np.datetime64(FINE, "ns")),
    (pa.duration("ns"), datetime.timedelta(days=19675, seconds=80000, microseconds=1), np.timedelta64(FINE, "ns")),
    (pa.time64("ns"), datetime.time(0, 0, 1, 1), np.timedelta64(1_000_000_123, "ns")),
]
CONTAINERS: dict[str, Any] = {
    "plain": (lambda kind: kind, lambda value: value),
    "list": (pa.list_, lambda value: [value]),
    "fixed list": (lambda kind: pa.list_(kind, 1), lambda value: [value]),
    "struct": (lambda kind: pa.struct([("a", kind), ("b", pa.list_(kind))]), lambda value: {"a": value, "b": [value]}),
    "map": (lambda kind: pa.map_(pa.string(), kind), lambda value: [("k", value)]),
    "dictionary": (None, lambda value: value),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("time", range(len(TIMES)))
def test_nanoseconds_are_python_times_where_exact_and_numpy_s_elsewhere(container: str, time: int) -> None:
    """With pandas installed (tests/trainers) and without: pyarrow's own values are pandas', cut, or an error."""
    kind, short, exact = TIMES[time]
    of_type, of_value = CONTAINERS[container]
    numbers = pa.array([SHORT, FINE] if kind != pa.time64("ns") else [1_000_001_000, 1_000_000_123], kind)
    if of_type is None:
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), numbers)
    else:
        column = pa.array([*map(of_value, numbers), None], of_type(kind))
    found = python_values(column)
    assert found == [of_value(short), of_value(exact), None]
    (back,) = (python_values(part) for part in [column.slice(1)])
    assert back == found[1:]
    if container == "plain":
        assert [type(value) for value in found] == [type(short), type(exact), type(None)]
        assert found[0] == short
        assert getattr(found[0], "utcoffset", lambda: None)() == (datetime.timedelta(hours=1) if time == 1 else None)


def test_rows_of_nanoseconds_are_the_same_in_every_file_and_resume(tmp_path: Path) -> None:
    columns = {f"c{n}": pa.array([0, 1000, 1234, None], kind) for n, (kind, _, _) in enumerate(TIMES)}
    data = pa.table({**columns, "id": range(4)})
    pq.write_table(data, tmp_path / "a.parquet", row_group_size=3)
    pa.feather.write_feather(data, tmp_path / "a.feather")
    rows = rows_of(sl.read_parquet(tmp_path / "a.parquet"))
    assert rows[2]["c0"] == np.datetime64(1234, "ns")
    assert rows[1] == {
        "c0": datetime.datetime(1970, 1, 1, 0, 0, 0, 1),
        "c1": datetime.datetime(1970, 1, 1, 0, 0, 0, 1, datetime.UTC),
        "c2": datetime.timedelta(microseconds=1),
        "c3": datetime.time(0, 0, 0, 1),
        "id": 1,
    }
    assert (
        rows == rows_of(sl.read_arrow(tmp_path / "a.feather")) == list(sl.from_arrow(data)) == list(sl.from_items(data))
    )
    assert list(sl.from_items(data["c0"])) == [row["c0"] for row in rows]
    check_resume(sl.read_parquet(tmp_path / "a.parquet"))


@pytest.mark.parametrize("options", [{"columns": ["point.name", "id"]}, {"columns": ["boxes.list.element.of"]}])
def test_columns_come_as_they_are_asked_for(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "a.parquet", 5)
    rows = pq.ParquetFile(path).read(**options).to_pylist()
    found = rows_of(sl.read_parquet(path, **options))
    assert found == rows
    assert list(found[0]) == [name.split(".")[0] for name in options["columns"]]
    (batch,) = rows_of(sl.read_parquet(path, batch_rows=9, **options))
    assert batch.to_pylist() == rows


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "filter",
    [
        pc.field("point", "x") > 4,
        (pc.field("point", "x") > 4) & (pc.field("id") < 20) & ~pc.field("text").is_null(),
        pc.scalar(True),
        pc.scalar(False),
        pc.field("id").isin([1, 28]),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [None, ["point.name.first"], ["id"]], ids=str)
def test_a_filter_does_what_pyarrow_does(tmp_path: Path, filter: Any, columns: list[str] | None) -> None:
    path = write(tmp_path / "a.parquet")
    expected = [
        {name: value for name, value in row.items() if columns is None or any(c.startswith(name) for c in columns)}
        for row in pq.read_table(path).filter(filter).to_pylist()
    ]
    if columns == ["point.name.first"]:
        expected = [{"point": {"name": {"first": row["point"]["name"]["first"]}}} for row in expected]
    assert rows_of(sl.read_parquet(path, filter=filter, columns=columns)) == expected
    batches = rows_of(sl.read_parquet(path, filter=filter, columns=columns, batch_rows=4))
    assert [row for batch in batches for row in batch.to_pylist()] == expected
    assert all(batch.num_rows for batch in batches)


def test_batches_are_of_one_row_group_and_zero_copies_of_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 20, 0, 7)
    batches = rows_of(sl.read_parquet(path, batch_rows=4))
    assert [batch.num_rows for batch in batches] == [4, 3, 4, 3, 4, 2]
    assert batches[1]["id"].to_numpy(zero_copy_only=True).tolist() == [4, 5, 6]


def test_states_name_file_group_and_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 10, 0, 4)
    places = []
    with sl.read_parquet(path, name="p", filter=ODD).open() as stream:
        for _ in stream:
            (state,) = stream.snapshot().worker_states
            places.append(json.loads(json.dumps(state))["p"])
    at = [(place["group"], place["row"]) if place["file"] else None for place in places]
    assert at == [(0, 2), (1, 0), (1, 2), (2, 0), None]


def test_a_filter_that_drops_everything_moves_on_all_the_same(files: list[str]) -> None:
    with sl.read_parquet(files, filter=pc.field("text") == "nope", name="p").open() as stream:
        assert list(stream) == []
        assert stream.snapshot().worker_states[0]["p"]["file"] is None


@pytest.mark.long
def test_columns_that_are_encrypted_end_no_process(tmp_path: Path) -> None:
    """Asked for their metadata, pyarrow would end it: "terminate called"."""
    content = bytearray(WHOLE_BYTES)
    found = []
    for at in range(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content) - 8, 29):
        content[at] ^= 0x10
        (tmp_path / "a.parquet").write_bytes(content)
        found.append(outcome(sl.read_parquet(tmp_path / "a.parquet"))[1])
        content[at] ^= 0x10
    assert any(found)


def test_nothing_is_kept_of_files_that_were_read(files: list[str]) -> None:
    """An error that Python raises for pyarrow may be kept by it, with all frames that it went through."""
    rows_of(sl.read_parquet(files))
    gc.collect()
    assert not [kept for kept in gc.get_objects() if issubclass(type(kept), SparseFile)]


def test_a_large_row_group_of_a_local_file_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_items, "CALL_BYTES", 1)
    path = tmp_path / "a.parquet"
    path.write_bytes(noise(600_000, 600_000)[0])
    assert path.stat().st_size > 19_000_000
    before = pa.total_allocated_bytes()
    with sl.read_parquet(path).open() as stream:
        assert next(stream)["id"] == 0
        assert pa.total_allocated_bytes() - before < 8_000_000


def test_batches_that_wait_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_format, "AHEAD_BYTES", 20_000)
    pq.write_table(pa.table({"id": range(40_000)}), tmp_path / "a.parquet")
    with sl.read_parquet(tmp_path / "a.parquet", batch_rows=1000).open() as stream:
        assert sum(batch.num_rows for batch in stream) == 40_000
        (channel,) = [one for one in stream.stats().channels if one.name == "read_parquet"]
    assert channel.peak == 2, "batches of 8,000 bytes"


def test_many_columns_are_found_by_their_names(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(400)] + ["a.b", "a"]
    pq.write_table(pa.table({name: [n] for n, name in enumerate(names)}), tmp_path / "a.parquet")
    for wanted in (names[::-1], ["a.b"], ["a"], ["c3", "c39"]):
        (row,) = rows_of(sl.read_parquet(tmp_path / "a.parquet", columns=wanted))
        expected = pq.read_table(tmp_path / "a.parquet", columns=wanted).to_pylist()
        assert [row] == expected


def counted(server: Any) -> int:
    """Return the bytes that were asked for so far."""
    total = 0
    for request in server.requests:
        if (asked := request.headers.get("range", "")).startswith("bytes="):
            start, stop = asked.removeprefix("bytes=").split("-")
            total += int(stop) + 1 - int(start) if stop else 0
    return total


def noise(rows: int, group: int, columns: int = 4) -> tuple[bytes, Any]:
    """Return a file of columns of numbers that don't compress, and what pyarrow says of it."""
    dice, file = np.random.default_rng(0), io.BytesIO()
    data = {"id": np.arange(rows), **{f"c{n}": dice.random(rows) for n in range(columns - 1)}}
    pq.write_table(pa.table(data), file, row_group_size=group, compression="none", use_dictionary=False)
    return file.getvalue(), pq.read_metadata(io.BytesIO(file.getvalue()))


async def test_only_what_is_wanted_is_fetched(server: Any) -> None:
    server.objects["a.parquet"], about = noise(400_000, 40_000)  # 10 groups of 1.3 MB
    group = about.row_group(0).total_byte_size
    url = server.url("a.parquet")

    async def fetched(pipe: Any, take: int | None = None, **options: Any) -> tuple[list[int], int]:
        def items() -> list[Any]:
            with pipe.open(**options) as stream:
                return list(islice(stream, take))

        server.requests.clear()
        found = await to_thread.run_sync(items)  # opening waits for the server, which is in this loop
        return [item["id"] if isinstance(item, dict) else item["id"][0].as_py() for item in found], counted(server)

    footer = 70_000
    _, column = await fetched(sl.read_parquet(url, columns=["id"], batch_rows=40_000))
    assert column < 400_000 * 8 * 1.05 + footer, "one of four columns"
    some = (pc.field("id") >= 85_000) & (pc.field("id") < 95_000)
    found, pruned = await fetched(sl.read_parquet(url, filter=some, batch_rows=40_000))
    assert found == [85_000]
    assert pruned < group * 1.05 + footer, "the group that statistics can't rule out"
    _, split = await fetched(sl.read_parquet(url, batch_rows=40_000).shard(5), None)
    assert split < 10 * group * 1.05 + 5 * footer, "each shard its own groups"
    state = {"read_parquet": {"file": url, "group": 7, "row": 123}}

    def begun() -> Any:
        with sl.read_parquet(url).open() as stream:
            return stream.snapshot()

    deep = replaced(await to_thread.run_sync(begun), state)
    found, resumed = await fetched(sl.read_parquet(url), 1, resume=deep)
    assert found == [7 * 40_000 + 123]
    assert resumed < 3 * group * 1.05 + footer, "the group, and perhaps the two after it, read ahead"


def replaced(snapshot: Any, state: dict[str, Any]) -> Any:
    """Return a snapshot in which the one worker stands elsewhere."""
    told = json.loads(snapshot.to_json())
    text = json.dumps(told).replace(json.dumps(snapshot.worker_states[0]), json.dumps(state))
    assert json.loads(text) != told
    return sl.Snapshot.from_json(text)


async def test_a_footer_beyond_the_first_read(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.io.formats.parquet.FOOTER_BYTES", 16)
    file = io.BytesIO()
    pq.write_table(table(10), file, row_group_size=4)
    server.objects["a.parquet"] = file.getvalue()
    found = await to_thread.run_sync(ids_of, sl.read_parquet(server.url("a.parquet"), columns=["id"]))
    assert found == list(range(10))


def test_a_pipeline_pickles_compares_and_tells_plans_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    pipe = sl.read_parquet(path, filter=ODD, columns=["id"])
    assert pickle.loads(pickle.dumps(pipe)) == pipe == sl.read_parquet(path, filter=ODD, columns=["id"])
    assert pipe != sl.read_parquet(path, filter=SOME, columns=["id"])
    with pipe.open() as stream:
        next(iter(stream))
        snapshot = stream.snapshot()
    for other in (
        {"filter": SOME, "columns": ["id"]},
        {"filter": ODD},
        {"filter": ODD, "columns": ["id"], "batch_rows": 1},
    ):
        with pytest.raises(sl.errors.ResumeError):
            rows_of(sl.read_parquet(path, **other), resume=snapshot)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"columns": "id"}, PlanTypeError, "a list of names"),
        ({"columns": [1]}, PlanTypeError, "a list of names"),
        ({"columns": []}, PlanError, "at least one"),
        ({"columns": ["a", "a"]}, PlanError, "twice"),
        ({"filter": [("a", ">", 1)]}, PlanTypeError, "filters_to_expression"),
        ({"filter": "a > 1"}, PlanTypeError, "Expression"),
        ({"filter": pc.field(0) > 1}, PlanError, "names its columns"),
        ({"batch_rows": 0}, PlanError, "at least 1"),
        ({"batch_rows": True}, PlanTypeError, "integer"),
    ],
    ids=str,
)
def test_options_are_checked_where_they_are_written(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        sl.read_parquet("a.parquet", **options)


@pytest.mark.long
def test_without_pyarrow_the_extra_is_named() -> None:
    program = (
        "import sys\nsys.modules['pyarrow'] = None\nimport streamline as sl\n"
        "for read in (sl.read_parquet, sl.read_arrow):\n"
        "    try:\n        read('a')\n    except sl.errors.PlanError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.count("pip install 'streamline-data[arrow]'") == 2


@pytest.mark.long
def test_a_plan_imports_no_pyarrow() -> None:
    program = (
        "import sys, streamline as sl\nsl.read_parquet('a', columns=['id']).shard(2)\nprint('pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("columns", "words"), [(["nope"], "no column 'nope'"), (["point.nope"], "'point.nope'"), (["poi"], "'poi'")]
)
def test_a_missing_column_names_the_file_and_what_there_is(tmp_path: Path, columns: list[str], words: str) -> None:
    path = write(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=words) as caught:
        rows_of(sl.read_parquet(path, columns=columns))
    assert path in str(caught.value)
    assert "'boxes'" in str(caught.value)


@pytest.mark.parametrize(
    "filter", [pc.field("nope") > 1, pc.field("text") > 1, pc.field("point", "nope") == 1], ids=str
)
def test_a_filter_that_does_not_fit_names_the_file(tmp_path: Path, filter: Any) -> None:
    path = write(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="the filter") as caught:
        rows_of(sl.read_parquet(path, filter=filter))
    assert path in str(caught.value)


MIXED: dict[str, tuple[Any, str]] = {
    "type": (pa.table({"id": ["x"], "b": [1]}), "column 'id' is string, expected int64"),
    "missing": (pa.table({"id": [1]}), "column 'b' .* is missing"),
    "more": (pa.table({"id": [1], "b": [1], "c": [1]}), "column 'c' .* is not expected"),
    "order": (pa.table({"b": [1], "id": [1]}), "another order"),
}


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_schemas_are_found_at_the_second_file(tmp_path: Path, kind: str) -> None:
    other, words = MIXED[kind]
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(pa.table({"id": [1, 2], "b": [1, 2]}), paths[0])
    pq.write_table(other, paths[1])
    found: list[Any] = []
    with sl.read_parquet(paths).open() as stream, pytest.raises(DataError, match=words) as caught:
        found.extend(stream)
    assert [row["id"] for row in found] == [1, 2]
    assert all(str(path) in str(caught.value) for path in paths)
    if kind in ("more", "order"):
        assert len(rows_of(sl.read_parquet(paths, columns=["id", "b"]))) == 3


def test_columns_of_one_name(tmp_path: Path) -> None:
    data = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(data, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="2 columns that are called 'a'"):
        rows_of(sl.read_parquet(tmp_path / "a.parquet"))


WHOLE = io.BytesIO()
pq.write_table(table(12), WHOLE, row_group_size=5, write_page_checksum=True)
WHOLE_BYTES = WHOLE.getvalue()

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a Parquet file"),
    "short": (b"PAR1PAR1", "not a Parquet file"),
    "text": (b"id,text\n1,a\n" * 10, "not a Parquet file"),
    "no end": (WHOLE_BYTES[:-1], "not a Parquet file"),
    "no footer": (WHOLE_BYTES[: len(WHOLE_BYTES) // 2], "not a Parquet file"),
    "no beginning": (WHOLE_BYTES[-20:], "damaged"),
    "encrypted": (WHOLE_BYTES[:-4] + b"PARE", "encrypted"),
    "long footer": (WHOLE_BYTES[:-8] + b"\xff\xff\xff\x7fPAR1", "damaged"),
    "no thrift": (WHOLE_BYTES[:-8] + b"\x08\x00\x00\x00PAR1", "the footer can't be read"),
    "empty footer": (WHOLE_BYTES[:-8] + b"\x00\x00\x00\x00PAR1", "the footer can't be read"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_none_is_named(tmp_path: Path, kind: str) -> None:
    content, words = BROKEN[kind]
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        rows_of(sl.read_parquet(path))
    assert str(path) in str(caught.value)


@given(at=st.integers(0, len(WHOLE_BYTES) - 1), bit=st.integers(0, 7), columns=st.sampled_from([None, ["id"]]))
@examples(60)
def test_a_flipped_bit_is_an_error_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int, columns: list[str] | None
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "a.parquet"
    content = bytearray(WHOLE_BYTES)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    footer = len(WHOLE_BYTES) - 8 - int.from_bytes(WHOLE_BYTES[-8:-4], "little")
    found, failure = outcome(sl.read_parquet(path, columns=columns))
    if failure is not None:
        assert str(path) in str(failure)
    elif at < footer:  # a footer has no checksum
        assert found == pq.read_table(io.BytesIO(WHOLE_BYTES), columns=columns).to_pylist()


def damaged(path: Path, group: int = 1) -> str:
    """Write a file of which one row group of three is damaged in a page that has a checksum."""
    about = pq.read_metadata(io.BytesIO(WHOLE_BYTES)).row_group(group).column(0)
    content = bytearray(WHOLE_BYTES)
    content[about.data_page_offset + about.total_compressed_size // 2] ^= 0x55
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(("options", "count"), [({}, 5), ({"batch_rows": 2}, 3)])
def test_a_damaged_group_can_be_left_out(tmp_path: Path, options: dict[str, Any], count: int) -> None:
    pipe = sl.read_parquet(damaged(tmp_path / "a.parquet"), **options)
    failures: list[Any] = []

    def decide(failure: sl.Failure) -> Any:
        failures.append(failure)
        return "skip"

    with pipe.open(on_error=decide, max_errors=None) as stream:
        found = [item["id"] if isinstance(item, dict) else item["id"].to_pylist() for item in stream]
        assert stream.errors.total == count
    assert np.hstack(found).tolist() == [0, 1, 2, 3, 4, 10, 11]
    (failure,) = failures
    assert failure.items == count
    assert "group 1" in failure.position


def test_a_row_that_python_can_not_hold_is_left_out_alone(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    pq.write_table(pa.table({"id": [0, 1, 2], "text": texts}), tmp_path / "a.parquet")
    pipe = sl.read_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row group 0 row 1: can't be decoded"):
        rows_of(pipe)
    with pipe.open(on_error="skip") as stream:
        assert [row["id"] for row in stream] == [0, 2]
        assert stream.errors.total == 1


def test_a_row_that_is_left_out_after_a_filter_has_its_number_in_the_file(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"b", b"c", b"\xff", b"e"]).view(pa.string())
    pq.write_table(pa.table({"id": range(5), "text": texts}), tmp_path / "a.parquet")
    pipe = sl.read_parquet(tmp_path / "a.parquet", filter=pc.field("id") >= 2)
    with pytest.raises(DataError, match="row group 0 row 3: can't be decoded"):
        rows_of(pipe)


def test_a_file_that_shrank_since_it_was_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 400)
    source: Any = sl.read_parquet(path).plan.source
    resolved = source.resolved()
    write(tmp_path / "a.parquet", 10)
    with pytest.raises(ReadError, match="has it been replaced"):
        rows_of(sl.Pipeline(resolved))


def test_what_was_read_leaves_nothing_in_memory(files: list[str]) -> None:
    def tables() -> int:
        from streamline.io.formats.parquet_table import ParquetTable

        gc.collect()
        return sum(isinstance(one, ParquetTable) for one in gc.get_objects())

    before = tables()
    for _ in range(3):
        ids_of(sl.read_parquet(files))
    deadline = time.monotonic() + LONGEST_S
    while tables() > before:  # a thread may not have let go of its last one yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
