"""Host processes, actors and nodes of a Ray cluster that end at random: no item is lost, none comes twice."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import streamline as sl
from streamline.errors import HostError
from streamline.pipeline import Pipeline
from tests.ray.conftest import SMALL, parent

ROOT = Path(__file__).parents[2]

KILLS = ["host", "actor", "raylet", "frozen", "host", "actor"]

Item = tuple[int, int, int]


def pipeline(merge: Literal["strict", "best_effort"], fn: Callable[[int], Any]) -> Pipeline[Any]:
    return sl.from_items(range(10**9)).shard(4).shuffle(window=16).map(fn).merge(merge)


def where(item: int) -> Item:
    return item, os.getpid(), os.getppid()


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


class Nodes:
    """Nodes on which the hosts run; one that is killed is followed by another."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self._cluster = cluster
        self.nodes = [self._add() for _ in range(count)]

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=2, resources={"chaos": 2}, **SMALL)

    def kill(self, actor: int) -> None:
        """Kill the raylet under which an actor runs."""
        raylet = parent(actor)
        (node,) = (node for node in self.nodes if raylet_of(node) == raylet)
        self.nodes.remove(node)
        self.nodes.append(self._add())
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        for node in self.nodes:
            self._cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    nodes = Nodes(cluster, 2)
    yield nodes
    nodes.close()


def end(kind: str, item: Item, nodes: Nodes) -> None:
    """End what an item came from."""
    _, host, actor = item
    if kind == "host":
        os.kill(host, signal.SIGKILL)
    elif kind == "actor":
        os.kill(actor, signal.SIGKILL)
    elif kind == "raylet":
        nodes.kill(actor)
    else:
        for process in (actor, host):
            os.kill(process, signal.SIGSTOP)


@pytest.mark.parametrize("merge", ["strict", "best_effort"])
def test_what_ends_at_random_is_replaced_and_changes_no_item(
    nodes: Nodes, merge: Literal["strict", "best_effort"]
) -> None:
    dice, got, ended = random.Random(merge), list[Item](), set[int]()
    kills = dice.sample(KILLS, len(KILLS))
    backend = sl.Ray(2, resources={"chaos": 1}, lost_after_s=2.0)
    with pipeline(merge, where).open(backend=backend) as stream:
        for kind in kills:
            got += [next(stream) for _ in range(dice.randrange(100, 5_000))]
            while got[-1][1] in ended or not Path(f"/proc/{got[-1][1]}").exists():  # it had arrived before that
                got.append(next(stream))
            before = {host for _, host, _ in got}
            ended.add(got[-1][1])
            end(kind, got[-1], nodes)
            begun = time.monotonic()
            while got[-1][1] in before:
                got.append(next(stream))
            print(f"{merge}, {kind}: a successor's first item after {time.monotonic() - begun:.2f} s")  # pytest -s
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        restarts = sum(host.restarts for host in stream.stats().hosts)
    assert restarts >= len(kills)
    items = [item for item, _, _ in got]
    with pipeline(merge, where).open(resume=snapshot) as stream:
        items += [next(stream)[0] for _ in range(3_000)]
    if merge == "strict":
        with pipeline(merge, abs).open() as stream:
            assert items == [next(stream) for _ in items]
    else:
        check_each_shard(items)


def check_each_shard(items: list[int]) -> None:
    """Without an order between them, each shard has given the beginning of what it has."""
    pipe = sl.from_items(range(10**9)).shard(4).shuffle(window=16)
    for shard in range(4):
        got = [item for item in items if item % 4 == shard]
        with pipe.open(rank=shard, world_size=4, ends="allow") as stream:
            assert got == [next(stream) for _ in got]


def test_successors_are_not_placed_on_the_node_that_is_silent(cluster: Cluster) -> None:
    """Ray itself takes it for a good one for a minute."""
    backend = sl.Ray(4, resources={"far": 1}, lost_after_s=2.0, start_timeout_s=50.0)
    silent, other = [cluster.add_node(num_cpus=4, resources={"far": 4}, **SMALL) for _ in range(2)]
    got: list[Item] = []
    try:
        with pipeline("strict", where).open(backend=backend) as stream:
            while len({host for _, host, _ in got}) < 4:
                got.append(next(stream))
            there = {one for _, *both in got if parent(both[1]) == raylet_of(silent) for one in both}
            assert there
            for process in (raylet_of(silent), *there):
                os.kill(process, signal.SIGSTOP)
            while len({host for _, host, _ in got}) < 4 + len(there) // 2:
                got.append(next(stream))
    finally:
        for node in (silent, other):
            cluster.remove_node(node, allow_graceful=False)
    with pipeline("strict", abs).open() as stream:
        assert [item for item, _, _ in got] == [next(stream) for _ in got]


def test_a_strategy_that_names_a_node_which_has_died_ends_the_stream(cluster: Cluster) -> None:
    """No node that comes has its number."""
    node = cluster.add_node(num_cpus=2, **SMALL)
    backend = sl.Ray(1, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False))
    with pipeline("strict", where).open(backend=backend) as stream:
        next(stream)
        cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(HostError, match=r"not schedulable: .* See scheduling_strategy="):
            list(stream)


DRIVER = """
import os, pathlib, shutil, signal
from tests.ray.conftest import FOLDER, SMALL, Cluster, ray, sl

pathlib.Path(FOLDER, "ray").mkdir(parents=True)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
try:
    cluster.add_node(num_cpus=2, **SMALL)
    ray.init(address=cluster.address, log_to_driver=False)
    pipe = sl.from_items(range(10**9)).shard(1)
    try:
        with pipe.open(backend=sl.Ray(1)) as stream:
            next(stream)
            os.kill(cluster.head_node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            list(stream)
    except sl.errors.HostError as error:
        print("told:", error)
    try:
        pipe.open(backend=sl.Ray(1))
    except sl.errors.HostError as error:
        print("told:", error)
finally:
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(FOLDER)
"""


def test_a_trainer_whose_own_node_dies_is_told() -> None:
    """Ray ends its actors, and starts no others: they would be waited for in vain."""
    done = subprocess.run([sys.executable, "-c", DRIVER], cwd=ROOT, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("told:")]
    assert len(told) == 2, done.stderr
    for line in told:
        assert re.search(r"the Ray node of this process, [\d.]+, has died: .*start the program anew", line)


def test_actors_that_end_count_against_no_worker(cluster: Cluster) -> None:
    """More often than a worker may end its host."""
    got: list[Item] = []
    with pipeline("strict", where).open(backend=sl.Ray(1)) as stream:
        got.append(next(stream))
        for _ in range(4):
            before = {actor for _, _, actor in got}
            os.kill(got[-1][2], signal.SIGKILL)
            while got[-1][2] in before:
                got.append(next(stream))
    with pipeline("strict", abs).open() as stream:
        assert [item for item, _, _ in got] == [next(stream) for _ in got]
