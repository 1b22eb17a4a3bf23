"""Ray Train: each of its workers finds its rank, and its hosts run outside of the trainer's placement group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ray.train
from ray.cluster_utils import Cluster
from ray.util import get_current_placement_group

import streamline as sl
from streamline.sharding.ranks import find_rank
from tests.ray.conftest import report_of, trained

LENGTH = 50


def pipeline() -> sl.Pipeline[Any]:
    return sl.from_items(range(LENGTH)).shuffle(seed=2).shard(4).map(lambda item: (item, os.getpid())).merge()


def train(config: dict[str, Any]) -> None:
    """Run in each worker of the trainer, of which each has hosts of its own."""
    assert get_current_placement_group() is not None
    context = ray.train.get_context()
    with pipeline().open(backend=sl.Ray(2), ends="allow") as stream:
        items = list(stream)
    seen = {
        "found": repr(find_rank()),
        "context": [context.get_world_rank(), context.get_world_size()],
        "items": items,
        "trainer": os.getpid(),
    }
    report_of(config["folder"], context.get_world_rank()).write_text(json.dumps(seen))


@pytest.mark.filterwarnings("default::DeprecationWarning:ray")
def test_each_worker_of_a_trainer_reads_its_part_with_hosts_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    """The group has a core per worker, so hosts that were captured by it would wait for ever."""
    ranks = trained(train, tmp_path)
    for rank, seen in enumerate(ranks):
        assert seen["context"] == [rank, 2]
        assert seen["found"] == f"Rank(rank={rank}, world_size=2, found_in='Ray Train', members=(), process=None)"
        with pipeline().open(rank=rank, world_size=2, ends="allow") as stream:
            assert [item for item, _ in seen["items"]] == [item for item, _ in stream]
    hosts = [{pid for _, pid in seen["items"]} for seen in ranks]
    assert [len(pids) for pids in hosts] == [2, 2]
    assert not hosts[0] & hosts[1]
    assert sorted(item for seen in ranks for item, _ in seen["items"]) == list(range(LENGTH))


@pytest.mark.usefixtures("cluster")
def test_a_driver_that_has_imported_ray_train_is_alone() -> None:
    assert find_rank().world_size == 1


def test_variables_of_the_step_that_started_ray_say_nothing_of_a_process_of_it(cluster: Cluster) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}
    found = ray.remote(lambda: find_rank().found_in).options(runtime_env={"env_vars": step}).remote()
    assert ray.get(found) == "alone"
