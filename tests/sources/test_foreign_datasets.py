"""`from_torch`, `from_huggingface`, `from_pandas`, … with stand-ins. The libraries themselves: `tests/trainers`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest

import streamline as sl
from streamline.errors import DuplicateWarning, PlanError, PlanTypeError
from streamline.sources.foreign_datasets import WORKER
from streamline.testing.checks import check_resume
from tests.copying_backend import Copying
from tests.sources.stand_ins import (
    DataFrame,
    Dataset,
    DatasetDict,
    Numbered,
    Numbers,
    Sampler,
    Splitting,
    StatefulNumbers,
)

ROWS = [{"n": n, "name": f"row {n}"} for n in range(12)]
TABLE = pa.Table.from_pylist(ROWS)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where torch keeps which worker a process is."""
    module: Any = ModuleType(WORKER)
    module._worker_info, module.WorkerInfo = None, SimpleNamespace
    monkeypatch.setitem(sys.modules, WORKER, module)
    return module


@pytest.fixture
def split_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function by which datasets of Hugging Face are split."""
    module: Any = ModuleType("datasets.distributed")
    module.split_dataset_by_node = lambda dataset, rank, world_size: dataset.part(rank, world_size)
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    monkeypatch.setitem(sys.modules, "datasets.distributed", module)


# Torch ----------------------------------------------------------------------------------------------------------------


def test_a_map_style_dataset_is_read_by_index() -> None:
    pipe = sl.from_torch(ROWS).shuffle(seed=2).shard(3)
    check_resume(pipe, expected=sl.from_items(ROWS).shuffle(seed=2).shard(3))


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize(("kind", "shards"), [(Splitting, 5), (StatefulNumbers, 1), (StatefulNumbers, 2)])
def test_each_shard_is_a_worker_to_the_dataset(kind: Any, shards: int, torch: Any) -> None:
    pipe = sl.from_torch(kind(7)).shard(shards)
    expected = [[n for n in range(7) if n % shards == shard] for shard in range(shards)]
    by_turns = [part[at] for at in range(7) for part in expected if at < len(part)]
    assert list(pipe) == by_turns
    with pipe.merge().open(backend=Copying(2)) as stream:
        assert list(stream) == by_turns
    assert torch._worker_info is None
    check_resume(pipe.repeat(2), generations=2)


def test_the_worker_of_a_loader_does_not_split_it_once_more(torch: Any) -> None:
    torch._worker_info = info = SimpleNamespace(id=1, num_workers=2)
    assert list(sl.from_torch(Splitting(9))) == list(range(9))
    assert list(sl.from_torch(Splitting(9)).shard(2)) == list(range(9))
    assert torch._worker_info is info


def test_a_dataset_that_ignores_its_worker_comes_twice_and_that_is_said(torch: Any) -> None:
    with pytest.warns(DuplicateWarning, match="of shard 0 and of shard 1 are the same"):
        assert len(list(sl.from_torch(Numbers(40)).shard(2))) == 80
    once = list(sl.from_iterable(lambda: Numbers(40)).shard(2))
    assert once == list(range(40))


def test_a_dataset_is_told_its_epoch_and_its_own_seed(torch: Any) -> None:
    loader = sl.from_torch(Numbered(3)).shard(2).merge().loader(persistent=False)
    with loader:
        found = [list(loader) for _ in range(2)]
    assert [[epoch for epoch, _, _ in of] for of in found] == [[0] * 6, [1] * 6]
    seeds = {seed for of in found for _, seed, _ in of}
    assert len(seeds) == 4
    with sl.from_torch(Numbered(3)).shard(2).merge().loader(persistent=False) as again:
        assert list(again) == found[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Sampler(), r"an order is a \.shuffle\(seed=0\) here"),
        (Splitting, "an instance of it is a dataset"),
        (iter(range(3)), r"one with __getitem__ and __len__, or an IterableDataset; .* sl\.from_iterable\(make\)"),
        (7, "one with __getitem__"),
    ],
    ids=["sampler", "class", "iterator", "number"],
)
def test_from_torch_refuses_other_things(given: Any, words: str) -> None:
    with pytest.raises(PlanTypeError, match=rf"from_torch reads a dataset of torch, got .*{words}"):
        sl.from_torch(given)


# Hugging Face ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_an_iterable_dataset_of_hugging_face_is_split_and_resumed_by_its_state(
    shards: int, split_by_node: None, torch: Any
) -> None:
    torch._worker_info = SimpleNamespace(id=1, num_workers=2)  # in a worker of a DataLoader, once is enough
    pipe = sl.from_huggingface(Dataset.iterable(61)).shard(shards)
    assert sorted(pipe) == list(range(61))
    check_resume(pipe.batch(4, collate=None), generations=2)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(45)]
        states = stream.snapshot().worker_states
        assert states[0]["items"]["since"] <= 32
        assert (states[0]["items"]["state"] is None) == (shards > 1 and 45 // shards < 17)
        assert sorted(first + list(stream)) == list(range(61))


def test_the_plan_says_what_is_read_several_times() -> None:
    dataset = Dataset.iterable(10)
    dataset.num_shards = 4
    assert "shard into 2 (custom): 4 shards of its own" in str(sl.from_huggingface(dataset).shard(2))
    assert "everything is read 3 times, of 4 shards of its own" in str(sl.from_huggingface(dataset).shard(3))
    assert "it splits itself, as worker s of 3" in str(sl.from_torch(Splitting(3)).shard(3))


@pytest.mark.parametrize("index", ["in order", "shuffled"])
def test_a_dataset_of_hugging_face_is_read_in_slices(index: str) -> None:
    dataset = Dataset(ROWS)
    pipe = sl.from_huggingface(dataset) if index == "in order" else sl.from_huggingface(dataset).shuffle(seed=1)
    assert list(pipe) == list(sl.from_items(ROWS) if index == "in order" else sl.from_items(ROWS).shuffle(seed=1))
    assert {type(asked) for asked in dataset.asked} == {slice if index == "in order" else list}
    assert len(dataset.asked) < len(ROWS)
    check_resume(pipe.shard(3), generations=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            DatasetDict(train=[1], test=[2]),
            r"a DatasetDict of 'train', 'test': sl\.from_huggingface\(data\['train'\]\)",
        ),
        ("imdb", r"got the name 'imdb': sl\.from_huggingface\(datasets\.load_dataset\('imdb', split=\"train\""),
        ([1, 2], r"got list \[1, 2\]: sl\.from_items\(data\)"),
    ],
    ids=["splits", "name", "list"],
)
def test_from_huggingface_refuses_other_things(given: Any, words: str) -> None:
    with pytest.raises(PlanTypeError, match=rf"from_huggingface reads .*{words}"):
        sl.from_huggingface(given)


def test_each_constructor_names_the_right_one() -> None:
    with pytest.raises(PlanTypeError, match=r"of torch, got IterableDataset: .*sl\.from_huggingface\(dataset\)"):
        sl.from_torch(Dataset.iterable(3))
    for given, words in (
        (DataFrame("polars"), r"from_pandas reads a pandas DataFrame, got polars DataFrame: sl\.from_polars\(frame\)"),
        (TABLE, r"got pyarrow Table: sl\.from_arrow\(table\)"),
        ([1], r"got list \[1\]: sl\.from_items\(data\)"),
    ):
        with pytest.raises(PlanTypeError, match=words):
            sl.from_pandas(given)
    with pytest.raises(PlanTypeError, match=r"from_polars reads a polars DataFrame, .*sl\.from_pandas\(frame\)"):
        sl.from_polars(DataFrame("pandas"))
    with pytest.raises(PlanTypeError, match=r"from_arrow reads a pyarrow Table.* got DataFrame: sl\.from_items"):
        sl.from_arrow(DataFrame("pandas"))


# Arrow ----------------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("data", [TABLE, pa.concat_tables([TABLE[:5], TABLE[5:]]), TABLE.to_batches()[0]], ids=type)
def test_items_of_arrow_are_rows(data: Any) -> None:
    assert list(sl.from_arrow(data)) == ROWS
    check_resume(sl.from_arrow(data).shuffle(seed=1).shard(2), expected=sl.from_items(ROWS).shuffle(seed=1).shard(2))
    assert sl.from_arrow(TABLE).plan.source == sl.from_items(TABLE).plan.source


def test_of_an_arrow_array_items_are_its_values() -> None:
    assert list(sl.from_arrow(TABLE["n"]).shard(2)) == list(range(12))
    assert list(sl.from_arrow(pa.array([1, None]))) == [1, None]


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_dataset_of_files_is_read_as_its_files_are(suffix: str, tmp_path: Any) -> None:
    for at in range(3):
        part, path = TABLE[at * 4 : at * 4 + 4], str(tmp_path / f"{at}.{suffix}")
        parquet.write_table(part, path, row_group_size=3) if suffix == "parquet" else feather.write_feather(part, path)
    dataset = pds.dataset(tmp_path, format=suffix)
    assert list(sl.from_arrow(dataset)) == ROWS
    check_resume(sl.from_arrow(dataset).shard(3))
    few = sl.from_arrow(dataset.filter(pds.field("n") > 5))
    assert list(few) == ROWS[6:]
    check_resume(few, generations=2)


def test_a_dataset_that_its_files_do_not_tell_is_refused(tmp_path: Any) -> None:
    pds.write_dataset(TABLE, tmp_path / "keys", format="parquet", partitioning=["n"], partitioning_flavor="hive")
    pds.write_dataset(TABLE, tmp_path / "csv", format="csv")
    pds.write_dataset(TABLE, tmp_path / "plain", format="parquet")
    cast = pa.schema([("n", pa.int32()), ("name", pa.string())])
    elsewhere: Any = type("FileSystemDataset", (), {"format": pds.ParquetFileFormat(), "filesystem": object()})()
    for dataset, words in (
        (
            pds.dataset(tmp_path / "keys", partitioning="hive"),
            r"other columns, .* sl\.from_arrow\(dataset\.to_table\(\)\)",
        ),
        (pds.dataset(tmp_path / "plain", schema=cast), "or other types"),
        (pds.dataset(tmp_path / "csv", format="csv"), r"is 'csv': sl\.read_csv\(dataset\.files\)"),
        (elsewhere, r"its files are elsewhere: sl\.read_parquet\('s3:"),
    ):
        with pytest.raises(PlanError, match=words):
            sl.from_arrow(dataset)
    with pytest.raises(PlanTypeError, match=r"got InMemoryDataset: sl\.from_arrow\(dataset\.to_table\(\)\)"):
        sl.from_arrow(pds.dataset(TABLE))
    with pytest.raises(PlanTypeError, match=r"got RecordBatchReader: its \.read_all\(\)"):
        sl.from_arrow(TABLE.to_reader())


def test_a_frame_is_read_by_position() -> None:
    for library, read in (("pandas", sl.from_pandas), ("polars", sl.from_polars)):
        frame = DataFrame(library, ROWS)
        assert list(read(frame).shard(2)) == ROWS
        check_resume(read(frame).shuffle(seed=3).shard(2))
