"""Tables in `from_items`: rows by position, whatever a table's own `[i]` is. Pandas and polars: `tests/trainers`."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import PlanError, PlanTypeError
from streamline.sources.table_rows import rows_of
from streamline.testing.checks import check_resume

ROWS = [{"n": n, "name": f"row {n}", "f": n / 2} for n in range(30)]
TABLE = pa.Table.from_pylist(ROWS)
CHUNKED = pa.concat_tables([TABLE.slice(0, 7), TABLE.slice(7, 0), TABLE.slice(7, 1), TABLE.slice(8)])


class Column:
    dtype = "str"

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def tolist(self) -> list[Any]:
        return self.values


class Selected:
    """What a stand-in's `iloc` has selected."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def items(self) -> Any:
        return ((name, Column([row[name] for row in self.rows])) for name in (self.rows[0] if self.rows else ()))

    def to_dict(self, orient: str) -> list[Any]:
        assert orient == "records"
        return self.rows


class Iloc:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.asked: list[Any] = []

    def __getitem__(self, key: Any) -> Selected:
        self.asked.append(key)
        return Selected(self.rows[key] if isinstance(key, slice) else [self.rows[at] for at in key])


class DataFrame:
    """As pandas' is met: `[0]` is a column, and there is none of that name."""

    __module__ = "pandas"

    def __init__(self, rows: list[Any]) -> None:
        self.iloc = Iloc(rows)
        self.columns = ["n", "name", "f"]

    def __len__(self) -> int:
        return len(self.iloc.rows)

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Any:
        return iter(self.columns)


TABLES = [TABLE, CHUNKED, TABLE.combine_chunks().to_batches()[0], DataFrame(ROWS)]
IDS = ["table", "chunked", "batch", "pandas"]


@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_items_are_rows(table: Any) -> None:
    assert list(sl.from_items(table)) == ROWS
    assert len(sl.from_items(table).loader()) == 30
    pipe = sl.from_items(table).shuffle(seed=1).shard(4)
    assert list(pipe) == list(sl.from_items(ROWS).shuffle(seed=1).shard(4))


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_rows_resume_exactly_and_come_by_position_in_every_split(table: Any) -> None:
    check_resume(sl.from_items(table).shuffle(seed=3).shard(3).batch(5), generations=1)
    assert list(sl.from_items(table).shard(4, "contiguous")) == list(sl.from_items(ROWS).shard(4, "contiguous"))


@pytest.mark.parametrize("values", [CHUNKED["n"], TABLE["n"].chunk(0)], ids=["chunked", "array"])
def test_items_of_a_column_are_its_values(values: Any) -> None:
    assert list(sl.from_items(values).shard(4)) == list(range(30))
    (batch,) = sl.from_items(values).batch(30)
    assert batch.tolist() == list(range(30))


def test_rows_are_fetched_by_slices_and_few_at_a_time_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("streamline.sources.items.perf_counter", lambda: clock[0])

    def asked(seconds_a_row: float) -> list[int]:
        frame = DataFrame([dict(ROWS[0])] * 1000)
        rows = frame.iloc.__class__.__getitem__

        def slow(self: Iloc, key: Any) -> Selected:
            found = rows(self, key)
            clock[0] += seconds_a_row * len(found.rows)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Iloc, "__getitem__", slow)
            assert len(list(sl.from_items(frame))) == 1000
        assert all(isinstance(key, slice) for key in frame.iloc.asked)
        return [key.stop - key.start for key in frame.iloc.asked]

    assert max(asked(1e-6)) == 256
    assert set(asked(0.1)[4:]) == {1}


def test_a_row_of_a_table_that_cannot_be_had_is_named_and_what_is_before_it_arrives() -> None:
    table = pa.table({"at": pa.array([0, 1, 10**18], pa.timestamp("s"))})  # Python's years end with 9999
    pipe = sl.from_items(table)
    with pipe.open() as stream:
        assert [next(stream)["at"].second for _ in range(2)] == [0, 1]
        with pytest.raises((ValueError, OverflowError)) as failed:
            next(stream)
    assert failed.value.__notes__[0].endswith("at index 2 of items")


def test_a_plan_over_the_same_table_is_the_same_and_goes_to_processes(processes: Backend) -> None:
    assert sl.from_items(TABLE) == sl.from_items(TABLE) != sl.from_items(CHUNKED)
    assert hash(sl.from_items(TABLE)) == hash(sl.from_items(TABLE))
    assert pickle.loads(pickle.dumps(rows_of(CHUNKED)))[29] == ROWS[29]
    with sl.from_items(TABLE).shard(2).open(backend=processes) as stream:
        assert list(stream) == ROWS


def test_a_column_twice_is_refused_and_a_label_that_is_no_string_is_a_key() -> None:
    with pytest.raises(PlanError, match=r"the pyarrow Table has more than one column 'a'.*: rename them"):
        sl.from_items(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))
    frame = DataFrame([{0: 1.5, ("a", 1): 2}])
    frame.columns = [0, ("a", 1)]  # type: ignore[list-item]
    assert list(sl.from_items(frame)) == [{0: 1.5, ("a", 1): 2}]


def test_a_structured_array_gives_its_records_and_a_batch_is_one_again() -> None:
    records = np.array([(1, 2.5), (2, 3.5)], dtype=[("a", "i4"), ("b", "f8")])
    assert [item["b"] for item in sl.from_items(records)] == [2.5, 3.5]
    (batch,) = sl.from_items(records).batch(2)
    assert batch.dtype == records.dtype
    assert batch.tolist() == records.tolist()


COLUMNS = {"x": np.arange(3), "y": list("abc")}


def test_a_dict_of_columns_is_refused_and_the_line_in_the_message_reads_its_rows() -> None:
    with pytest.raises(PlanTypeError, match=r"a dict is read by key, as 'x'") as refused:
        sl.from_items(COLUMNS)  # type: ignore[arg-type]
    line = str(refused.value).partition("where the values are columns: ")[2]
    assert list(eval(line, {"sl": sl, "data": COLUMNS})) == [{"x": n, "y": "abc"[n]} for n in range(3)]
    assert list(sl.from_items({0: "a", 1: "b"})) == ["a", "b"]  # by key, and by position


def test_a_dict_of_splits_and_an_archive_of_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    with np.load(tmp_path / "a.npz") as archive, pytest.raises(PlanTypeError, match=r"sl.from_items\(data\['x'\]\)"):
        sl.from_items(archive)


class Foreign:
    """A frame of a library that streamline doesn't know."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __arrow_c_stream__(self) -> Any:
        raise AssertionError("not called")


class ReadsLists(Foreign):
    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return list(indices)


def test_a_frame_of_an_unknown_library_is_refused_unless_it_reads_lists_itself() -> None:
    with pytest.raises(PlanTypeError, match=r"how a tests\S* Foreign is read by row: sl.from_items\(pyarrow.table"):
        sl.from_items(Foreign())  # type: ignore[arg-type]
    assert list(sl.from_items(ReadsLists())) == [0, 1, 2]  # type: ignore[arg-type]


class LazyFrame:
    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("not called")


class DataFrameGroupBy:
    """As pandas' is met: it has a length, and `[0]` is a column."""

    __module__ = "pandas.core.groupby.generic"

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)


class Dataset:
    """As Hugging Face's map-style one is met."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, style: str | None) -> None:
        self.format = {"type": style}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: int) -> dict[str, int]:
        return {"n": key}

    def __getitems__(self, keys: list[int]) -> list[dict[str, int]]:
        return [{"n": key} for key in keys]


@pytest.mark.parametrize("style", [None, "numpy", "torch", "jax"])
def test_a_hugging_face_dataset_is_read_by_row_in_formats_whose_lists_are_rows(style: str | None) -> None:
    assert list(sl.from_items(Dataset(style))) == [{"n": 0}, {"n": 1}]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (DataFrameGroupBy(), r"a pandas DataFrameGroupBy is read by key, not by position: sl.from_items\(list\(gr"),
        (
            Dataset("arrow"),
            r"the format 'arrow', in which rows are a table: sl\.from_items\(dataset\.with_format\(None",
        ),
        (Dataset("polars"), r"the format 'polars', in which rows are a table: .*with_format\(None"),
        (Dataset("pandas"), r"the format 'pandas', in which rows are a table: .*with_format\(None"),
        ({1, 2}, r"set has not both: it has no order, sl.from_items\(sorted\(items\)\)"),
        (iter([1]), r"list_iterator has not both: of an iterator, sl.from_items\(list\(items\)\), or sl.from_iterable"),
        (sqlite3.connect(":memory:").execute("select 1"), "Cursor has not both: of an iterator"),
        (range, r"type has not both: sl.from_iterable\(make\) calls a function"),
        (Path("train.jsonl"), "has not both: of a file, sl.read_lines"),
        (10, r"int has not both: of numbers, sl.from_items\(range\(10\)\)"),
        (sl.from_items([1]), "Pipeline has not both: it is the beginning of a pipeline already"),
        (len, "has not both: sl.from_iterable"),
        (LazyFrame(), r"it has no rows yet, sl.from_items\(frame.collect\(\)\)"),
        (None, "NoneType has not both: of an iterable, use from_iterable"),
        (np.array(3), "this numpy ndarray has none: len"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_has_no_positions_is_refused_with_the_line_to_write(items: Any, message: str) -> None:
    with pytest.raises(PlanTypeError, match=message):
        sl.from_items(items)


def test_a_table_is_not_iterated_by_its_columns() -> None:
    table: Any = DataFrame(ROWS)
    message = (
        r"whose iterator gives columns: to have its rows, read it with sl.from_items\(table\), or return table.to_"
    )
    with pytest.raises(PlanTypeError, match=f"from_iterable's factory returned a .*{message}"):
        list(sl.from_iterable(lambda: table))
    with pytest.raises(PlanTypeError, match=f"from_iterable's factory returned a pyarrow Table, {message}"):
        list(sl.from_iterable(lambda: TABLE))
    with pytest.raises(PlanTypeError, match=f"StreamDataset's factory returned a .*{message}"):
        list(sl.StreamDataset(lambda: table))


def test_a_table_is_not_unfolded_into_its_columns() -> None:
    with pytest.raises(PlanTypeError, match=r"flat_map\(<lambda>\) returned a pandas DataFrame, whose iterator"):
        list(sl.from_items([1]).flat_map(lambda _: DataFrame(ROWS)))


def test_rows_of_arrow_come_in_the_order_that_was_asked_for() -> None:
    rows = rows_of(pa.table({"a": [0, 1, 2, 3]}))
    assert [row["a"] for row in rows.__getitems__([0, 2, 1, 3])] == [0, 2, 1, 3]
