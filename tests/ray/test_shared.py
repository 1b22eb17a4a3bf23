"""Ranks of one machine that share hosts on a cluster: one of them asks for actors, and passes links on."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray.train
from ray.cluster_utils import Cluster
from ray.train.collective import barrier
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import Exists, NodeLabelSchedulingStrategy, PlacementGroupSchedulingStrategy

import streamline as sl
from tests.backends.hosts.job_kit import RankForks, RankJob, end, rest_of, running
from tests.backends.hosts.shared_rank import LENGTH
from tests.ray.conftest import parent, report_of, trained

ALL = list(range(LENGTH))


def on_ray(folder: Path) -> dict[str, Any]:
    return {"kind": "Ray", "n": 2, "shared": "node", "env": {"READS": os.fspath(folder / "reads")}}


@pytest.fixture(scope="module")
def forks() -> Iterator[RankForks]:
    forks = RankForks()
    yield forks
    forks.close()


@pytest.fixture
def made(forks: RankForks, cluster: Cluster, tmp_path: Path) -> Iterator[RankJob]:
    with running(forks, tmp_path, RAY_ADDRESS=cluster.address) as made:
        yield made


@pytest.mark.parametrize("pipe", ["items", "arrays"])
def test_hosts_on_a_cluster_are_shared_and_read_once(made: RankJob, tmp_path: Path, pipe: str) -> None:
    ranks = made.opened(2, pipe, backend=on_ray(tmp_path))
    expected = ALL if pipe == "items" else [[number, number] for number in ALL]
    assert rest_of(*ranks) == [expected] * 2
    assert made.reads == Counter(ALL)
    assert ranks[0].hosts() == ranks[1].hosts()
    end(made, *ranks)


def test_when_the_owner_dies_another_rank_asks_for_actors(made: RankJob, tmp_path: Path) -> None:
    owner, one = made.opened(2, backend=on_ray(tmp_path))
    owner.send_signal(signal.SIGKILL)
    assert rest_of(one) == [ALL]
    end(made, one)


@pytest.mark.parametrize("dies", ["host", "actor"])
def test_what_dies_is_replaced_for_all_ranks(made: RankJob, tmp_path: Path, dies: str) -> None:
    ranks = made.opened(2, backend=on_ray(tmp_path))
    host = ranks[0].hosts()[0]
    os.kill(host if dies == "host" else parent(host), signal.SIGKILL)
    assert rest_of(*ranks) == [ALL] * 2
    end(made, *ranks)


def train(config: dict[str, Any]) -> None:
    """Read the same as the other workers of the trainer do, at the same time."""
    pipe = sl.from_items(range(50)).shard(4).map(lambda item: (item, uuid4().hex)).merge()
    with pipe.open(backend=sl.Ray(2, shared="node"), rank=0, world_size=1) as stream:
        items = [next(stream)]
        barrier()
        items += stream
        seen = [host.pid for host in stream.stats().hosts]
        barrier()
    report_of(config["folder"], ray.train.get_context().get_world_rank()).write_text(json.dumps([items, seen]))


@pytest.mark.filterwarnings("default::DeprecationWarning:ray")
def test_workers_of_a_trainer_are_of_one_job(cluster: Cluster, tmp_path: Path) -> None:
    one, other = trained(train, tmp_path)
    assert one == other
    assert [item for item, _ in one[0]] == list(range(50))


def test_a_backend_is_the_same_in_all_ranks_if_ray_is_asked_for_the_same(cluster: Cluster) -> None:
    def kind(**options: Any) -> str:
        return sl.Ray(2, shared="node", **options).sharing_kind

    def in_group(group: PlacementGroup) -> str:
        return kind(scheduling_strategy=PlacementGroupSchedulingStrategy(group))

    group = placement_group([{"CPU": 1}])
    fetched = PlacementGroup(group.id)
    assert fetched.bundle_specs  # which are kept in the handle
    assert in_group(PlacementGroup(group.id)) == in_group(fetched) != in_group(PlacementGroup.empty())
    remove_placement_group(group)
    assert kind(resources={"a": 1, "b": 2}) == kind(resources={"b": 2, "a": 1}) != kind(resources={"a": 1})
    there = NodeLabelSchedulingStrategy(hard={"for": Exists()})
    assert kind(scheduling_strategy=there) == kind(scheduling_strategy=pickle.loads(pickle.dumps(there)))
    assert len({kind(), kind(num_cpus=2), kind(env={"A": "b"}), kind(runtime_env={"pip": ["a"]})}) == 4
