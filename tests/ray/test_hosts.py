"""Workers on a Ray cluster: the same items, what they see there, and what goes wrong at their start."""

from __future__ import annotations

import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import streamline as sl
from streamline.backends.ray import connected_ray
from streamline.errors import HostError, PlanError
from streamline.pipeline import Pipeline
from tests.ray.conftest import SMALL

LENGTH = 3000


BLOCKED = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "streamline":
            raise ModuleNotFoundError("No module named 'streamline'", name="streamline")

sys.meta_path.insert(0, Without())
"""


def squares(length: int = LENGTH) -> Pipeline[int]:
    return sl.from_items(range(length)).shard(4).shuffle(window=16).map(lambda item: item * item).merge()


def opened(backend: sl.Ray, fn: Callable[[int], Any] = abs) -> list[Any]:
    with sl.from_items(range(2)).shard(1).map(fn).merge().open(backend=backend) as stream:
        return list(stream)


def test_items_and_their_order_are_those_of_one_process(cluster: Cluster) -> None:
    with squares().open(backend=sl.Ray(2)) as stream:
        assert list(stream) == list(squares())
        assert [host.node for host in stream.stats().hosts] == [os.uname().nodename] * 2


def test_a_loader_keeps_its_actors_and_none_outlives_it(cluster: Cluster) -> None:
    pipe = sl.from_items(range(40)).shard(2).map(lambda item: (item, os.getpid(), os.getppid())).merge()
    with pipe.loader(backend=sl.Ray(2)) as loader:
        epochs = [list(loader) for _ in range(3)]
        processes = {pid for epoch in epochs for _, *pids in epoch for pid in pids}
        assert len(processes) == 4
        ends = [os.pidfd_open(pid) for pid in processes]
    assert sorted(item for item, *_ in epochs[2]) == list(range(40))
    wait_for_ends(ends)


def wait_for_ends(processes: list[int]) -> None:
    """Wait until processes have exited, and close the descriptors of these."""
    for process in processes:
        assert select.select([process], [], [], 60)[0], "it still runs"
        os.close(process)


def test_hosts_see_no_gpu_and_only_the_variables_that_they_are_given(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the trainer")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def seen(item: int) -> list[str | None]:
        return [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SECRET", "MINE", "RUNTIME")]

    backend = sl.Ray(1, env={"MINE": "1"}, runtime_env={"env_vars": {"RUNTIME": "2"}})
    assert opened(backend, seen) == [["", None, "1", "2"]] * 2


def module_in(folder: Path) -> Path:
    """Write a module, which is not among what is installed."""
    (folder / "for_ray").mkdir(parents=True)
    (folder / "for_ray" / "__init__.py").write_text("def double(x):\n    return 2 * x\n")
    return folder


def test_a_module_that_is_not_there_is_named_with_the_runtime_env(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(module_in(tmp_path / "modules"))
    monkeypatch.setitem(sys.modules, "for_ray", None)  # what is imported is forgotten after the test
    monkeypatch.delitem(sys.modules, "for_ray")
    pipe = sl.from_items(range(2)).shard(1).map(importlib.import_module("for_ray").double)
    with pipe.open(backend=sl.Ray(1)) as stream:
        shutil.rmtree(tmp_path / "modules")  # as if the node were another machine
        with pytest.raises(HostError, match=r"No module named 'for_ray'.*ray\.init\(runtime_env=\{'py_modules'"):
            list(stream)


def test_a_runtime_env_brings_a_module(cluster: Cluster, tmp_path: Path) -> None:
    program = f"""
import shutil, sys, ray, streamline as sl
sys.path.insert(0, {str(module_in(tmp_path / "modules"))!r})
import for_ray
ray.init(runtime_env={{"py_modules": [for_ray]}})
with sl.from_items(range(2)).shard(1).map(for_ray.double).open(backend=sl.Ray(1)) as stream:
    shutil.rmtree(sys.path[0])
    print(list(stream))
"""
    assert said(run_in(cluster, program)) == ["[0, 2]"]


def test_strategies_are_passed_on_as_objects(cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=2, labels={"for": "data"}, **SMALL)
    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())

    try:
        for strategy in (
            NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            NodeLabelSchedulingStrategy({"for": In("data")}),
            PlacementGroupSchedulingStrategy(group),
            "DEFAULT",
            None,
        ):
            assert opened(sl.Ray(1, scheduling_strategy=strategy)) == [0, 1]
    finally:
        remove_placement_group(group)
        cluster.remove_node(node)


def test_without_room_the_error_says_what_was_asked_for_and_what_there_is(cluster: Cluster) -> None:
    backend = sl.Ray(3, num_cpus=7, resources={"feed": 2}, start_timeout_s=1.0)
    words = (
        r"no machine has run process 0 of Ray\(3\) within 1 s \(start_timeout_s=\)\. 0 of its 3 hosts have come\. "
        r"Each needs CPU 7, feed 2; the cluster's 2 nodes have CPU 16 \(\d+ free\), feed 0 \(0 free\)\. Add nodes.*"
        r"Ray\(\(1, 3\)\)"
    )
    with pytest.raises(HostError, match=words):
        opened_of(backend)


def opened_of(backend: sl.Ray) -> list[int]:
    with squares().open(backend=backend) as stream:
        return list(stream)


def test_fewer_hosts_begin_and_a_node_that_comes_brings_others(cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=2, resources={"slot": 1}, **SMALL)
    pipe = sl.from_items(range(10**9)).shard(4).map(lambda item: (item, os.getpid())).merge()
    got = []
    with pipe.open(backend=sl.Ray((1, 2), resources={"slot": 1})) as stream:
        got.append(next(stream))
        more = cluster.add_node(num_cpus=2, resources={"slot": 1}, **SMALL)
        while len({pid for _, pid in got[-100:]}) < 2:
            got.append(next(stream))
        cluster.remove_node(node, allow_graceful=False)
        before = len(got)
        while len(got) < before + 20_000 or len({pid for _, pid in got[-8_000:]}) > 1:
            got.append(next(stream))
    cluster.remove_node(more, allow_graceful=False)
    assert [item for item, _ in got] == list(range(len(got)))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import streamline\nstreamline.__version__ = '9.9'\n", r"streamline-data 9\.9"),
        (BLOCKED, r"a Ray actor on \S+ has ended: No module named 'streamline'\. Install"),
    ],
    ids=["another version", "without"],
)
def test_a_node_that_joins_and_can_not_run_hosts_ends_no_stream(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, program: str, words: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(program)
    other: dict[str, Any] = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    nodes = [cluster.add_node(num_cpus=1, resources={"picky": 1}, **SMALL)]
    pipe = sl.from_items(range(10**9)).shard(4).map(lambda item: (item, os.getpid())).merge()
    with pipe.open(backend=sl.Ray((1, 2), resources={"picky": 1})) as stream:
        got = [next(stream)]
        nodes.append(cluster.add_node(num_cpus=4, resources={"picky": 4}, **other, **SMALL))
        while not re.search(words, caplog.text):
            got.append(next(stream))
        nodes.append(cluster.add_node(num_cpus=1, resources={"picky": 1}, **SMALL))
        while len({pid for _, pid in got[-100:]}) < 2:
            got.append(next(stream))
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)
    assert [item for item, _ in got] == list(range(len(got)))
    assert len(re.findall("a Ray actor.* has ended", caplog.text)) == 1


def test_too_few_hosts_are_counted(cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=1, resources={"rare": 1}, **SMALL)
    words = r"only [01] of the 2 hosts that Ray\(\(2, 4\)\) needs at least have come.*[01] of its 4 hosts have come"
    with pytest.raises(HostError, match=words):
        opened_of(sl.Ray((2, 4), resources={"rare": 1}, start_timeout_s=3.0))
    cluster.remove_node(node, allow_graceful=False)


def test_nodes_without_streamline_are_found_at_the_start(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    with pytest.raises(
        HostError, match=r"No module named 'streamline'\. Install streamline-data on the nodes.*runtime_env="
    ):
        opened(sl.Ray(1, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}}))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"runtime_env": {"pip": ["x"], "conda": "y"}}, PlanError, r"Ray refuses the options of Ray\(1\): .*conda"),
        ({"resources": {"GPU": 1}}, PlanError, r"Ray refuses the options .*'num_gpus'"),
        ({"num_cpus": -1}, PlanError, r"Ray refuses the options .*negative"),
        (
            {"scheduling_strategy": NodeAffinitySchedulingStrategy("ab" * 28, soft=False)},
            HostError,
            r"not schedulable: .* See scheduling_strategy=",
        ),
    ],
)
def test_what_ray_refuses_is_said_at_once(
    cluster: Cluster, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        opened(sl.Ray(1, **options))


def test_an_agent_of_another_version_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch = "streamline.backends.network.handshake._mismatch"
    monkeypatch.setattr(mismatch, lambda hello: "the trainer runs streamline 9.9")
    with pytest.raises(HostError, match=r"a Ray actor.* has ended: the trainer runs streamline 9\.9"):
        opened(sl.Ray(1))


def test_a_trainer_that_the_nodes_can_not_reach_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.backends.ray.Agents.port", property(lambda agents: 9))
    monkeypatch.setattr("streamline.backends.ray.CONNECT_S", 0.0)
    with pytest.raises(HostError, match=r":9 can't be reached: .*The nodes must reach this process at any port"):
        opened(sl.Ray(1))


# Connecting -----------------------------------------------------------------------------------------------------------
def test_a_client_connection_is_refused_with_the_way_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ray.util.client.ray), "is_connected", lambda self: True)
    with pytest.raises(HostError, match=r"can't work over a Ray client \(ray://\).*ray job submit"):
        opened(sl.Ray(1))


def test_an_address_of_a_client_is_refused_before_it_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(HostError, match=r"RAY_ADDRESS is ray://127\.0\.0\.1:10001: sl\.Ray can't work over"):
        connected_ray()


@pytest.mark.parametrize(
    "error", [ray.exceptions.AuthenticationError("no token was found"), ConnectionError("Failed to connect")]
)
def test_a_refused_connection_is_named_with_what_a_token_takes(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    words = rf"can't connect to a cluster at RAY_ADDRESS=10\.0\.0\.1:6379: {error.args[0]}.*RAY_AUTH_MODE is disabled"
    with pytest.raises(HostError, match=words):
        connected_ray()


def test_ray_is_initialised_where_the_program_has_not(cluster: Cluster) -> None:
    program = (
        "import logging, streamline as sl; logging.basicConfig(level=logging.INFO)\n"
        "with sl.from_items(range(3)).shard(1).open(backend=sl.Ray(1)) as stream: print(list(stream))"
    )
    done = run_in(cluster, program)
    assert said(done) == ["[0, 1, 2]"]
    assert f"ray.init() has connected this process to {cluster.address}" in done.stderr


def run_in(cluster: Cluster, program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what a program has printed, without what Ray says there of nodes that have died."""
    return [line for line in done.stdout.splitlines() if line.startswith(("[0", "False"))]


def test_a_pool_outlives_a_connection_to_the_cluster(cluster: Cluster) -> None:
    """The program has left the cluster, or its head was restarted: the next run asks the new connection for actors."""
    program = """
import ray, streamline as sl
with sl.Ray(1) as pool:
    for _ in range(2):
        with sl.from_items(range(3)).shard(1).open(backend=pool) as stream:
            print(list(stream))
        ray.shutdown()
print(ray.is_initialized())
"""
    assert said(run_in(cluster, program)) == ["[0, 1, 2]", "[0, 1, 2]", "False"]


# Deaths ---------------------------------------------------------------------------------------------------------------
TRAINER = """
import os, sys
import streamline as sl

pipe = sl.from_items(range(10**9)).shard(2).map(lambda item: (os.getpid(), os.getppid())).merge()
with pipe.open(backend=sl.Ray(2)) as stream:
    print(*next(stream), *next(stream), flush=True)
    sys.stdin.read()
"""


def test_a_trainer_that_is_killed_leaves_no_host_and_no_actor(cluster: Cluster) -> None:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        processes = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(processes) == 4
        trainer.kill()
        killed = time.monotonic()
        wait_for_ends(processes)
    print(f"all had ended {time.monotonic() - killed:.1f} s after the trainer's death")  # pytest -s


def test_a_host_whose_code_kills_it_is_given_up_and_its_actor_is_not(cluster: Cluster) -> None:
    def deadly(item: int) -> int:
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    pipe = sl.from_items(range(2)).shard(1).map(deadly).merge()
    with (
        pipe.open(backend=sl.Ray(1)) as stream,
        pytest.raises(sl.errors.WorkerDied, match="called deadly, on the same"),
    ):
        list(stream)
