"""`from_torch`, `from_huggingface`, `from_pandas` and `from_polars` with the libraries themselves."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import datasets.distributed
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset, get_worker_info
from tqdm import tqdm

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.testing.checks import check_resume
from streamline.training.torch_dataset import TorchDataset

ROWS = [{"n": n, "name": f"row {n}", "f": n / 2} for n in range(40)]


@pytest.fixture(scope="module", autouse=True)
def _what_libraries_keep() -> None:
    """Let polars open what it keeps for the life of the process, and tqdm start no thread."""
    tqdm.monitor_interval = 0
    pl.DataFrame(ROWS)[[0]].to_dicts()
    datasets.Dataset.from_list(ROWS)


class Splitting(IterableDataset[int]):  # type: ignore[misc]
    """Iterates a worker's part, as torch's documentation has it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, self.length, 1 if info is None else info.num_workers)


class Stateful(Splitting):
    """With a state of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        while self.at < self.length:
            self.at += 1
            if info is None or (self.at - 1) % info.num_workers == info.id:
                yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("kind", [Splitting, Stateful])
@pytest.mark.parametrize("shards", [1, 3])
def test_an_iterable_dataset_of_torch_splits_itself_and_resumes_at_every_item(kind: Any, shards: int) -> None:
    pipe = sl.from_torch(kind(41)).shard(shards)
    assert sorted(pipe) == list(range(41))
    check_resume(pipe, generations=2)


def test_in_processes_and_in_workers_of_a_dataloader_it_splits_itself_once() -> None:
    pipe = sl.from_torch(Stateful(41)).shard(4).merge()
    with pipe.open(backend=sl.Processes(2)) as stream:
        first = [next(stream) for _ in range(13)]
        snapshot = stream.snapshot()
    assert first == list(range(13))
    with pipe.open(resume=snapshot, backend=sl.Processes(2)) as stream:
        assert list(stream) == list(range(13, 41))
    loader = DataLoader(TorchDataset(pipe), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(int(item) for item in loader) == list(range(41))


def test_a_map_style_dataset_of_torch_is_read_by_index() -> None:
    whole = TensorDataset(torch.arange(9), torch.eye(9))
    ((numbers, rows),) = sl.from_torch(whole).batch(9)
    assert numbers.tolist() == list(range(9))
    assert torch.equal(rows, torch.eye(9))
    assert sorted(int(item[0]) for item in sl.from_torch(Subset(whole, [3, 1])).shuffle(seed=0).shard(2)) == [1, 3]
    for given, words in (
        (DataLoader(whole), r"sl\.from_torch\(loader\.dataset\)"),
        (RandomSampler(whole), "an order is a"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), r"sl\.from_huggingface\(dataset\)"),
    ):
        with pytest.raises(PlanTypeError, match=words):
            sl.from_torch(given)


@pytest.mark.parametrize("own", [1, 4])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_an_iterable_dataset_of_hugging_face_resumes_at_every_item_by_its_state(own: int, shards: int) -> None:
    dataset = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=own)
    pipe = sl.from_huggingface(dataset).shard(shards)
    assert sorted(row["n"] for row in pipe) == list(range(40))
    check_resume(pipe)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(36)]
        state = stream.snapshot().worker_states[0]["items"]
        assert sorted(row["n"] for row in [*first, *stream]) == list(range(40))
    assert shards > 1 or (state["state"] is not None and state["since"] <= 32)


def iterable(own: int) -> Any:
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=own)


def others() -> Any:
    return iterable(4).map(lambda row: {"n": row["n"] + 100}).take(9)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "skip": lambda data: data.skip(7),
    "take": lambda data: data.take(7),
    "skip, map, take": lambda data: data.skip(3).map(lambda row: {"m": row["n"]}).take(20).select_columns(["n"]),
    "batch": lambda data: data.batch(3),
    "whole batches": lambda data: data.batch(3, drop_last_batch=True),
    "numpy batches": lambda data: data.with_format("numpy").batch(3),
    "map of whole batches": lambda data: data.map(dict, batched=True, batch_size=7, drop_last_batch=True),
    "map with indices": lambda data: data.map(lambda row, at: {"at": at}, with_indices=True),
    "filter with indices": lambda data: data.filter(lambda row, at: at % 3 == 0, with_indices=True),
    "another column": lambda data: data.add_column("m", list(range(40))),
    "interleave": lambda data: datasets.interleave_datasets([data, others()]),
    "interleave all": lambda data: datasets.interleave_datasets([data, others()], stopping_strategy="all_exhausted"),
    "interleave by chance": lambda data: datasets.interleave_datasets([data, others()], [0.3, 0.7], seed=1),
    "interleave each once": lambda data: datasets.interleave_datasets(
        [data, data.map(lambda row: {"n": -row["n"]})], stopping_strategy="all_exhausted_without_replacement"
    ),
    "concatenate": lambda data: datasets.concatenate_datasets([data, data.skip(5)]),
    "filter": lambda data: data.filter(lambda row: row["n"] % 3 == 0),
    "map in batches": lambda data: data.map(dict, batched=True, batch_size=4),
    "repeat": lambda data: data.repeat(2),
    "a shard": lambda data: data.shard(2, 0) if data.num_shards > 1 else data,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_its_rows_are_its_own_in_however_many_shards(operation: str) -> None:
    def texts(rows: Any) -> list[str]:
        return sorted(str({name: np.asarray(value).tolist() for name, value in row.items()}) for row in rows)

    for own in (1, 4):
        dataset = OPERATIONS[operation](iterable(own))
        rows = texts(dataset)
        for shards in (1, 2, 3, 4):
            assert texts(sl.from_huggingface(dataset).shard(shards)) == rows, (own, shards)
    if operation in ("skip", "batch"):
        check_resume(sl.from_huggingface(OPERATIONS[operation](iterable(4))).shard(2), generations=2)


def test_what_counts_over_all_shards_is_read_whole_and_what_is_split_is_refused() -> None:
    pipe = sl.from_huggingface(iterable(4).skip(7)).shard(2)
    assert "everything is read 2 times, of 4 shards of its own" in str(pipe)
    assert "everything" not in str(sl.from_huggingface(iterable(4)).shard(2))
    part = datasets.distributed.split_dataset_by_node(iterable(4), rank=0, world_size=2)
    assert len(list(sl.from_huggingface(part))) == 20
    with pytest.raises(PlanError, match=r"of what split_dataset_by_node has split .* give from_huggingface the whole"):
        list(sl.from_huggingface(part).shard(2))


@pytest.mark.parametrize("style", ["arrow", "pandas", "polars"])
def test_a_format_whose_rows_are_tables_is_refused_by_name(style: str) -> None:
    data = datasets.Dataset.from_list(ROWS)
    words = rf"the format '{style}', in which rows are a table: sl\.{{}}\(dataset\.with_format\(None\)\), or 'numpy'"
    with pytest.raises(PlanTypeError, match=words.format("from_items")):
        sl.from_huggingface(data.with_format(style))
    with pytest.raises(PlanTypeError, match=words.format("from_huggingface")):
        sl.from_huggingface(data.to_iterable_dataset().with_format(style))
    with pytest.raises(PlanTypeError, match=words.format("from_iterable")):
        list(sl.from_iterable(lambda: data.to_iterable_dataset().with_format(style)))
    with pytest.raises(PlanTypeError, match=words.format("from_iterable")):
        list(sl.from_iterable(lambda: data.with_format(style)))


def test_it_goes_to_processes_and_no_item_gets_lost_in_a_buffer() -> None:
    dataset = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=8)
    with sl.from_huggingface(dataset).shard(4).merge().open(backend=sl.Processes(2)) as stream:
        assert sorted(row["n"] for row in stream) == list(range(40))
    shuffled = dataset.shuffle(seed=3, buffer_size=1000)
    with pytest.raises(PlanError, match="shuffles in a buffer"):
        list(sl.from_huggingface(shuffled))


@pytest.mark.parametrize("style", [None, "numpy", "torch"])
def test_a_dataset_of_hugging_face_is_read_in_slices_in_its_format(style: str | None) -> None:
    dataset = datasets.Dataset.from_list(ROWS).with_format(style)
    by_item = [dataset[at] for at in range(40)]
    for pipe in (sl.from_huggingface(dataset), sl.from_huggingface(dataset.select(range(39, -1, -1)))):
        found = list(pipe)
        found = found if int(found[0]["n"]) == 0 else found[::-1]
        assert [pickle.dumps({k: str(v) for k, v in row.items()}) for row in found] == [
            pickle.dumps({k: str(v) for k, v in row.items()}) for row in by_item
        ]
    if style is None:
        check_resume(sl.from_huggingface(dataset).shuffle(seed=1).shard(3).batch(4), generations=2)


def test_from_huggingface_refuses_other_things_with_the_line_to_write() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    for given, words in (
        (datasets.DatasetDict(train=dataset), r"a DatasetDict of 'train': sl\.from_huggingface\(data\['train'\]\)"),
        (
            datasets.IterableDatasetDict(test=dataset.to_iterable_dataset()),
            r"an? IterableDatasetDict of 'test': sl\.from_huggingface\(data\['test'\]\)",
        ),
        (dataset.with_format("arrow"), r"has the format 'arrow'"),
    ):
        with pytest.raises(PlanTypeError, match=words):
            sl.from_huggingface(given)


@pytest.mark.parametrize(
    ("read", "frame"),
    [(sl.from_pandas, pd.DataFrame(ROWS)), (sl.from_polars, pl.DataFrame(ROWS))],
    ids=["pandas", "polars"],
)
def test_frames_are_read_by_position_and_resume_at_every_item(read: Any, frame: Any) -> None:
    assert list(read(frame)) == ROWS
    check_resume(read(frame).shuffle(seed=2).shard(3).batch(4), generations=2)
    with read(frame).shard(2).open(backend=sl.Processes(2)) as stream:
        assert list(stream) == ROWS
    for other in (pl.DataFrame(ROWS).lazy(), frame["n"], [1]):
        with pytest.raises(PlanTypeError, match="DataFrame, got"):
            read(other)
