"""A Ray cluster on this machine, for all tests of this folder: a head without cores, and a node that has some."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.backends.hosts.pool import HostPool

os.environ |= dict.fromkeys(("HOME", "RAY_TMPDIR"), f"{tempfile.gettempdir()}/sl-ray-{os.getpid()}") | {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

import ray  # after that: it reads them, looks for a token at home, and notes a cluster's address in RAY_TMPDIR/ray
from ray.cluster_utils import Cluster

from tests.conftest import LOOKS

FOLDER = os.environ["HOME"]
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False, "temp_dir": FOLDER}

FILES = LOOKS["files"]


def _files() -> set[object]:
    """Return what is open but for Ray's own sockets: those to actors that have ended stay open for a while."""
    ours = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one.fileno() >= 0]
    numbers = {one.fileno() for one in ours}
    return {file for file in FILES() if file[1] != stat.S_IFSOCK or file[0] in numbers}  # type: ignore[index]


@pytest.fixture(scope="session", autouse=True)
def _let_ray_keep_sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOOKS, "files", _files)
        yield


@pytest.fixture(scope="session")
def cluster(_warm_up: None) -> Iterator[Cluster]:
    """The cluster, to which this process is connected. What its driver keeps open is there before a test begins."""
    Path(FOLDER, "ray").mkdir(parents=True)  # which it doesn't make itself
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
    try:
        cluster.add_node(num_cpus=16, **SMALL)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(FOLDER)


def trained(train: Callable[[dict[str, Any]], None], folder: Path) -> list[Any]:
    """Run a function in two workers of a trainer of Ray Train; return what each has written to `report_of` its rank."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "results")),
    )
    trainer.fit()
    return [json.loads(report_of(folder, rank).read_text()) for rank in range(2)]


def parent(process: int) -> int:
    """Return the process that has started another one: the actor of a host, the raylet of an actor."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def report_of(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{rank}.json")


@pytest.fixture(scope="session")
def pool(cluster: Cluster) -> Iterator[HostPool]:
    """Two hosts that are up before a test begins, so that they are no test's leak."""
    with sl.Ray(2) as pool:
        with sl.from_items(range(2)).shard(2).open(backend=pool) as stream:
            list(stream)
        yield pool
