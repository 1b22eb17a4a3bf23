"""Train with workers on three machines, lose one with all that runs on it: batches and model stay the same."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import streamline as sl

os.environ["STREAMLINE_KEY"] = os.urandom(32).hex()  # the same on all machines
with socket.create_server(("127.0.0.1", 0)) as free:
    ADDRESS = f"127.0.0.1:{free.getsockname()[1]}"


def start_node(hosts: int) -> subprocess.Popen[bytes]:
    """Start what each machine runs; here, a process group stands for it."""
    command = ["streamline", "worker", "--connect", ADDRESS, "--hosts", str(hosts), "--rejoin", "0"]
    return subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.DEVNULL, process_group=0)


def train(batches: Iterable[Any]) -> str:
    """Learn from each batch; return a digest of what was delivered, and of the weights after each step."""
    weights, digest = np.zeros(8), hashlib.sha256()
    for batch in batches:
        weights += 0.01 * (batch - weights).mean(axis=0)
        digest.update(batch.tobytes() + weights.tobytes())
    return digest.hexdigest()


def main() -> None:
    logging.getLogger("streamline").setLevel("ERROR")  # it would warn of the loss
    pipe = sl.from_items(range(20_000)).shard(4).map(lambda item: np.full(8, item / 1e4)).merge().batch(32)
    nodes = [start_node(hosts) for hosts in (2, 1, 1)]  # together, one host for each worker

    def batches(stream: sl.SyncStream[Any]) -> Iterator[Any]:
        for number, batch in enumerate(stream):
            yield batch
            if number == 300:
                os.killpg(nodes[0].pid, signal.SIGKILL)  # all that runs on it at once, as a power cut does it
                nodes.append(start_node(2))
        print("hosts that were lost and replaced:", sum(host.restarts for host in stream.stats().hosts))

    with pipe.open(backend=sl.Remote(4, listen=ADDRESS)) as stream:
        on_nodes = train(batches(stream))
    for node in nodes:
        node.wait()
    print("the same batches and the same model, bit for bit:", on_nodes == train(pipe))


if __name__ == "__main__":
    main()
