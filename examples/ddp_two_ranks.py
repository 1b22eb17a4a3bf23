"""Two ranks with unequal shards train together (torch, gloo), and end together; neither waits for ever.

Under "allow" they give what they have, and torch's own `Join` lets the one that is done go along.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import streamline as sl


def wanted(value: float) -> bool:
    return value % 3 != 1  # how many are left on each rank isn't known beforehand


def train(rank: int, folder: str, ends: sl.Ends) -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ends.policy}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    pipe = sl.read_lines(f"{folder}/part-*.txt").shard(2).map(float).filter(wanted).merge().batch(4)
    steps = padded = 0
    joined = Join([model]) if ends.policy == "allow" else nullcontext()
    with joined, pipe.loader(ends=ends) as loader:  # rank and world size are torch's, and so is the store to agree over
        for batch in loader:
            loss = model(torch.as_tensor(batch, dtype=torch.float32)[:, None]).square().mean()
            if loader.padding:
                loss = 0 * loss  # every rank takes the step; what is given again teaches nothing
                padded += 1
            loss.backward()  # waits for the other rank's gradients
            steps += 1
        report = loader.ends
    print(f"rank {rank}: {steps} steps, {padded} of them padding; {report}", flush=True)
    dist.barrier()  # rank 0 has the store
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for part, lines in enumerate((range(30), range(30, 90))):  # rank 1 has twice as much
            Path(folder, f"part-{part}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for ends in (sl.Ends("drop"), sl.Ends("pad"), sl.Ends("allow")):
            torch.multiprocessing.spawn(train, args=(folder, ends), nprocs=2)


if __name__ == "__main__":
    main()
