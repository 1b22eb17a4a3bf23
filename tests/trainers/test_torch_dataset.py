"""Pipelines inside torch's DataLoader."""

from __future__ import annotations

import functools
import pickle
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import streamline as sl
from streamline.errors import PlanError
from streamline.training.torch_dataset import TorchDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own
]

PIPE = sl.from_items(range(41)).shuffle(seed=2).shard(6).merge()


def numbers(loader: Any) -> list[int]:
    return [int(item) for item in loader]


@pytest.mark.parametrize(("workers", "context"), [(0, "fork"), (1, "fork"), (3, "fork")])
def test_each_worker_reads_shards_of_its_own(workers: int, context: str) -> None:
    options = {"multiprocessing_context": context} if workers else {}
    loader = DataLoader(TorchDataset(PIPE), batch_size=None, num_workers=workers, **options)
    assert Counter(numbers(loader)) == Counter(range(41))


def test_a_pipeline_of_lambdas_caches_and_locks_goes_to_spawned_workers() -> None:
    lock, doubled = threading.Lock(), functools.cache(lambda item: item * 2)

    def call(item: int) -> Any:
        with lock:
            return doubled(item)

    pipe = sl.from_items(range(9)).shard(2).map(call).merge()
    loader = DataLoader(TorchDataset(pipe), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert sorted(numbers(loader)) == list(range(0, 18, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_and_workers_together_read_everything_once(world_size: int) -> None:
    found: list[int] = []
    for rank in range(world_size):
        dataset = TorchDataset(PIPE, rank=rank, world_size=world_size)
        found += numbers(DataLoader(dataset, batch_size=None, num_workers=2))
    assert Counter(found) == Counter(range(41))


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_are_those_that_are_set_in_running_workers_too(persistent: bool) -> None:
    dataset = TorchDataset(PIPE)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    epochs = []
    for epoch in (0, 1, 1, 0):
        dataset.set_epoch(epoch)
        epochs.append(numbers(loader))
    assert epochs[0] == epochs[3] != epochs[1] == epochs[2]


@pytest.mark.parametrize("pipe", [sl.from_items(range(9)), sl.from_items(range(9)).shard(2).merge()])
def test_fewer_shards_than_workers_are_refused_with_the_way_out(pipe: sl.Pipeline[int]) -> None:
    with pytest.raises(
        PlanError, match=r"on each of 3 ranks need 3 shards, .*: write \.shard\(3\) or more, or num_work"
    ):
        numbers(DataLoader(TorchDataset(pipe, rank=0, world_size=3), batch_size=None))


def test_an_error_comes_out_of_the_data_loader() -> None:
    def fail(item: int) -> int:
        return 1 // (item - 5)

    with pytest.raises(ZeroDivisionError, match="in map"):
        numbers(DataLoader(TorchDataset(PIPE.map(fail)), batch_size=None, num_workers=2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 20, 40])
def test_torchdatas_stateful_loader_resumes_it_exactly(workers: int, stop: int) -> None:
    whole = numbers(StatefulDataLoader(TorchDataset(PIPE), batch_size=None, num_workers=workers))
    loader = StatefulDataLoader(TorchDataset(PIPE), batch_size=None, num_workers=workers)
    items = iter(loader)
    first = [int(next(items)) for _ in range(stop)]
    state = loader.state_dict()
    resumed = StatefulDataLoader(TorchDataset(PIPE), batch_size=None, num_workers=workers)
    resumed.load_state_dict(state)
    assert first + numbers(resumed) == whole


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"num_workers": 2}, {"shuffle": True}], ids=str)
def test_a_data_loader_of_a_pipeline_itself_fails_with_the_way_out(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"DataLoader\(TorchDataset\(pipe\), batch_size=None\)"):
        numbers(DataLoader(PIPE, **options))


def test_it_pickles_and_takes_nothing_else() -> None:
    assert numbers(pickle.loads(pickle.dumps(TorchDataset(PIPE)))) == numbers(TorchDataset(PIPE))
    with pytest.raises(PlanError, match="is a Pipeline, got list"):
        TorchDataset([1, 2])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="at least 0"):
        TorchDataset(PIPE).set_epoch(-1)
    assert torch.utils.data.get_worker_info() is None
