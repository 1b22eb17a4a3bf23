"""Tables of the libraries themselves in `from_items`: pandas, polars, Hugging Face's datasets, torch's."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Subset, TensorDataset
from tqdm import tqdm

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.testing.checks import check_resume

ROWS = [{"n": n, "name": f"row {n}", "f": n / 2} for n in range(20)]
FRAME = pd.DataFrame(ROWS, index=range(100, 80, -1))
POLARS = pl.DataFrame(ROWS)
DATASET = datasets.Dataset.from_list(ROWS)
NESTED = pl.DataFrame({"at": [datetime(2026, 1, 2, tzinfo=UTC)], "list": [[1, 2]]})
TABLES = [FRAME, POLARS, DATASET, pd.concat([FRAME[:7], FRAME[7:]]), pl.concat([POLARS[:7], POLARS[7:]])]


@pytest.fixture(scope="module", autouse=True)
def _what_libraries_keep() -> None:
    """Let polars open what it keeps for the life of the process, and tqdm start no thread."""
    tqdm.monitor_interval = 0
    for frame in (POLARS, NESTED):
        frame[[0]].to_dicts()
    datasets.Dataset.from_list(ROWS)


@pytest.mark.parametrize("table", TABLES, ids=["pandas", "polars", "datasets", "pandas joined", "polars chunked"])
def test_items_are_rows_by_position_and_resume_exactly(table: Any) -> None:
    assert list(sl.from_items(table)) == ROWS
    assert [type(value) for value in sl.from_items(table).first(1)[0].values()] == [int, str, float]
    pipe, plain = sl.from_items(table).shuffle(seed=2).shard(3), sl.from_items(ROWS).shuffle(seed=2).shard(3)
    check_resume(pipe.batch(4), expected=plain.batch(4), generations=2)


@pytest.mark.parametrize("values", [FRAME["n"], POLARS["n"]], ids=["pandas", "polars"])
def test_items_of_a_series_are_its_values_by_position(values: Any) -> None:
    assert list(sl.from_items(values).shard(3)) == list(range(20))
    assert type(sl.from_items(values).first(1)[0]) is int


def test_rows_of_pandas_are_the_records_that_it_gives_itself_of_every_type() -> None:
    frame = pd.DataFrame(
        {
            "int": np.arange(3, dtype=np.int8),
            "float": np.array([1, np.nan, np.inf], np.float32),
            "bool": [True, False, True],
            "time": pd.to_datetime(["2026-01-02", None, "2026-01-03"]),
            "zone": pd.to_datetime(["2026-01-02", None, "2026-01-03"], utc=True),
            "delta": pd.to_timedelta([1, 2, None], unit="s"),
            "text": ["a", None, "c"],
            "object": pd.Series([np.int64(3), {"a": 1}, None], dtype=object),
            "nullable": pd.array([1, None, 3], dtype="Int64"),
            "string": pd.array(["a", None, "c"], dtype="string"),
            "category": pd.Categorical(["u", "v", None]),
            "complex": [1j, 2j, 3j],
        }
    )
    for part in (frame, frame[["int"]], frame[["object", "category"]], frame[:0], frame[[]]):
        found, own = list(sl.from_items(part)), part.to_dict("records")
        assert repr(found) == repr(own)
        assert [[type(value) for value in row.values()] for row in found] == [
            [type(value) for value in row.values()] for row in own
        ]


def test_with_pandas_installed_timestamps_are_what_they_are_without_it(tmp_path: Path) -> None:
    whole, odd = 1_700_000_000_000_001_000, 1_700_000_000_000_000_123
    moment = datetime(2023, 11, 14, 22, 13, 20, 1)
    kinds = {"at": pa.timestamp("ns"), "zone": pa.timestamp("ns", "UTC"), "list": pa.list_(pa.timestamp("ns"))}
    rows = [{"at": at, "zone": at, "list": [at], "time": 10**9 + at % 10**6, "took": at % 10**9} for at in (whole, odd)]
    schema = pa.schema([*kinds.items(), ("time", pa.time64("ns")), ("took", pa.duration("ns"))])
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, tmp_path / "a.parquet")
    late = [datetime(9999, 12, 31, 23, 59, 59), datetime(1000, 1, 1), datetime(2262, 4, 12)]
    pq.write_table(pa.table({"at": late}), tmp_path / "b.parquet", use_deprecated_int96_timestamps=True)
    exact = np.datetime64(odd, "ns")
    expected = [
        {
            "at": moment,
            "zone": moment.replace(tzinfo=UTC),
            "list": [moment],
            "time": time(0, 0, 1, 1),
            "took": timedelta(microseconds=1),
        },
        {
            "at": exact,
            "zone": exact,
            "list": [exact],
            "time": np.timedelta64(1_000_000_123, "ns"),
            "took": np.timedelta64(123, "ns"),
        },
    ]
    for pipe in (sl.read_parquet(tmp_path / "a.parquet"), sl.from_items(table), sl.from_items(pl.from_arrow(table))):
        found = list(pipe)
        assert found == expected
        assert [[type(value) for value in row.values()] for row in found] == [
            [type(value) for value in row.values()] for row in expected
        ]
    assert list(sl.from_items(pl.from_arrow(table)["list"])) == [row["list"] for row in expected]
    assert [row["at"] for row in sl.read_parquet(tmp_path / "b.parquet")] == late


def test_labels_of_columns_are_keys_as_they_are_and_a_second_one_is_refused() -> None:
    assert sl.from_items(pd.DataFrame(np.eye(2))).first(1) == [{0: 1.0, 1: 0.0}]
    several = pd.DataFrame({("a", "x"): [1], ("a", "y"): [2]})
    assert list(sl.from_items(several)) == [{("a", "x"): 1, ("a", "y"): 2}]
    with pytest.raises(PlanError, match=r"the pandas DataFrame has more than one column 'n'"):
        sl.from_items(pd.concat([FRAME, FRAME], axis=1))


def test_values_are_those_of_python_and_what_is_missing_stays_missing() -> None:
    frame = pd.DataFrame({"i": pd.array([1, None], dtype="Int64"), "c": pd.Categorical(["u", "v"])})
    first, second = sl.from_items(frame)
    assert first == {"i": 1, "c": "u"}
    assert second["i"] is None or second["i"] is pd.NA
    assert sl.from_items(NESTED).first(1) == [{"at": datetime(2026, 1, 2, tzinfo=UTC), "list": [1, 2]}]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (POLARS.lazy(), r"it has no rows yet, sl.from_items\(frame.collect\(\)\)"),
        (FRAME.groupby("n"), r"a pandas DataFrameGroupBy is read by key.*sl.from_items\(list\(groups\)\)"),
        (datasets.DatasetDict(train=DATASET), r"a DatasetDict is read by key.*: sl.from_items\(data\['train'\]\)"),
        (DATASET.to_iterable_dataset(), r"IterableDataset has not both: .*from_iterable"),
        (DATASET.with_format("arrow"), r"has the format 'arrow'.*sl.from_items\(dataset.with_format\(None\)\)"),
        (DATASET.with_format("polars"), r"has the format 'polars'"),
        (torch.tensor(3), r"this torch Tensor has none"),
    ],
    ids=["lazy", "groups", "splits", "iterable", "arrow", "polars", "scalar"],
)
def test_what_has_no_rows_is_refused_with_the_line_to_write(items: Any, message: str) -> None:
    with pytest.raises(PlanTypeError, match=message):
        sl.from_items(items)


@pytest.mark.parametrize("table", [FRAME, POLARS], ids=["pandas", "polars"])
def test_a_frame_is_not_iterated_by_its_columns(table: Any) -> None:
    with pytest.raises(PlanTypeError, match=r"DataFrame, whose iterator gives columns"):
        list(sl.from_iterable(lambda: table))


def test_datasets_of_torch_and_of_hugging_face_in_a_format_are_read_as_they_are() -> None:
    whole = TensorDataset(torch.arange(4), torch.eye(4))
    ((numbers, rows),) = sl.from_items(whole).batch(4)
    assert numbers.tolist() == [0, 1, 2, 3]
    assert torch.equal(rows, torch.eye(4))
    assert [int(item[0]) for item in sl.from_items(Subset(whole, [3, 1]))] == [3, 1]
    (batch,) = sl.from_items(DATASET.with_format("torch")).take(3).batch(3)
    assert torch.equal(batch["n"], torch.arange(3))
