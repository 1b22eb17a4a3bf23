"""Workers on a Ray cluster of two nodes: an actor is killed with its host, and the items are those of one process."""

from __future__ import annotations

import logging
import os
import signal

import ray
from ray.cluster_utils import Cluster

import streamline as sl

COUNT = 20_000
Item = tuple[int, int]


def work(item: int) -> Item:
    """Stand for a transform that wants a core of its own; tell which actor's host ran it."""
    return sum(range(item % 1000)), os.getppid()


pipe = sl.from_items(range(COUNT)).shuffle(seed=1).shard(4).map(work).merge()


def main() -> None:
    # On a real cluster: `ray start` on each node, and this program on one of them. Here, two nodes on this machine.
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    cluster.add_node(num_cpus=1, **small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    logging.getLogger("streamline").setLevel("ERROR")  # it would warn of the death

    got = []
    with pipe.open(backend=sl.Ray(2)) as stream:
        for number, item in enumerate(stream):
            got.append(item)
            if number == 5_000:
                print(f"nodes: {len(ray.nodes())}, hosts: {len({actor for _, actor in got})}")
                os.kill(item[1], signal.SIGKILL)
                print("killed: an actor with its host")

    print("the same items in the same order:", [item for item, _ in got] == [item for item, _ in pipe])
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
