"""FOLDER: four processes of a mesh (torch, gloo), 2 for the data x 2 for tensors; each writes down what it got."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import streamline as sl
from tests.trainers.kit import ITEMS, uneven

counted = uneven()


async def fed() -> AsyncIterator[int]:
    yield 0


best_effort = sl.from_items(range(ITEMS)).shard(4).merge("best_effort")
unordered = sl.from_items(range(ITEMS)).shard(4).map(abs, executor="thread", ordered=False)
feed = sl.from_stream(fed, partitioned=True).shard(4)

found_out = counted.filter(lambda item: item % 5 != 1).batch(2, collate=None)
"""Nobody knows beforehand how many are left."""


def refused(pipe: sl.Pipeline[Any], mesh: Any) -> str:
    try:
        pipe.open(mesh=mesh)
    except sl.errors.PlanError as error:
        return str(error)
    return "not refused"


def ended(pipe: sl.Pipeline[Any], mesh: Any, policy: Any) -> dict[str, Any]:
    """Return what a stream gives, and which of it again."""
    with pipe.open(mesh=mesh, ends=policy) as stream:
        found = [(item, stream.padding) for item in stream]
        return {"items": found, "agreed": stream.ends.agreed}


def saved_and_resumed(mesh: Any, folder: Path) -> list[Any]:
    """Return what was given before a snapshot that all four processes save, and behind it."""
    with counted.open(mesh=mesh, ends="allow") as stream:
        before = [next(stream) for _ in range(4)]
        dist.barrier()
        stream.snapshot().save(folder)
    dist.barrier()
    with counted.open(mesh=mesh, ends="allow", resume=sl.Snapshot.load(folder)) as stream:
        return [before, list(stream)]


def checkpointed(mesh: Any, folder: Path) -> list[Any]:
    """Likewise of loaders, which are in the trainer's checkpoint under the names of their ranks."""
    name = f"loader-{mesh.get_local_rank()}"
    loader = counted.loader(mesh=mesh)
    batches = iter(loader)
    before = [next(batches) for _ in range(3)]
    dcp.save({name: loader}, checkpoint_id=folder)
    loader.close()
    resumed = counted.loader(mesh=mesh)
    dcp.load({name: resumed}, checkpoint_id=folder)
    return [before, list(resumed)]


def skipped(mesh: Any, folder: Path) -> list[int]:
    """Return what is left of items of which one can't be mapped."""
    pipe = counted.map(lambda item: 1 // item and item)
    with pipe.open(mesh=mesh, ends="allow", on_error="skip", dead_letters=folder / "bad.jsonl") as stream:
        return list(stream)


def work(process: int, folder: str, ports: SimpleQueue[int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0 if process == 0 else ports.get(), is_master=process == 0)
    for _ in range(3 if process == 0 else 0):
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=process, world_size=4)
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh, everyone = whole["dp"], whole["dp", "tp"]._flatten("all")
    found = {
        "counted": [ended(counted, mesh, policy) for policy in ("allow", "drop", "pad")],
        "found out": [ended(found_out, mesh, policy) for policy in ("drop", "pad")],
        "flattened": list(counted.open(mesh=everyone, ends="allow").sync_stream()),
        "without a mesh": list(counted.open(ends="allow").sync_stream()),
        "whole": refused(counted, whole),
        "choosers": [refused(pipe, mesh) for pipe in (best_effort, unordered, feed)],
        "choosers alone": refused(best_effort, everyone),
        "skipped": skipped(mesh, Path(folder)),
        "resumed": saved_and_resumed(mesh, Path(folder, "ckpt")),
        "checkpointed": checkpointed(mesh, Path(folder, "dcp")),
    }
    Path(folder, f"{process}.json").write_text(json.dumps(found))
    dist.barrier()  # process 0 has the store
    dist.destroy_process_group()


if __name__ == "__main__":
    ports = torch.multiprocessing.get_context("fork").SimpleQueue()
    torch.multiprocessing.start_processes(work, args=(sys.argv[1], ports), nprocs=4, start_method="fork")
