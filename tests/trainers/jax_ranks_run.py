"""FOLDER PROCESS: one of two processes of JAX, each with a device of its own (gloo); writes down what it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import streamline as sl

rows = sl.from_items([{"x": np.full(2, n, np.float32), "n": n, "name": f"row {n}"} for n in range(13)])
batches = rows.shuffle(seed=1).shard(2).merge().batch(2, drop_remainder=True)
total = jax.jit(jnp.sum)


def told(batch: Any) -> dict[str, Any]:
    """Return what a process can say of a batch: all of its shape, and the rows that are here."""
    (here,) = batch["n"].addressable_shards
    return {
        "shapes": [list(batch[name].shape) for name in ("x", "n")],
        "totals": [float(total(batch["x"])), int(total(batch["n"]))],
        "here": np.asarray(here.data).tolist(),
        "names": batch["name"],
    }


def resumed(pipe: sl.Pipeline[Any]) -> list[list[int]]:
    """Return the rows here before and behind the state of a loader."""
    loader = pipe.loader()
    batches = iter(loader)
    before = told(next(batches))["here"]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    behind = pipe.loader()
    behind.load_state_dict(state)
    return [before, *(told(batch)["here"] for batch in behind)]


def refused(pipe: sl.Pipeline[Any]) -> str:
    try:
        pipe.open()
    except sl.errors.PlanError as error:
        return str(error)
    return "not refused"


def main(folder: str, process: str) -> None:
    address = f"unix:{folder}/coordinator"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(process), coordinator_bind_address=address)
    data = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
    model = NamedSharding(jax.make_mesh((1, 2), ("data", "model")), PartitionSpec("data"))
    with batches.transfer(data).open() as stream:
        told_of = [told(batch) for batch in stream]
        position = stream.snapshot()
    on_device = rows.shard(2).map(lambda row: {**row, "n": jnp.asarray([row["n"]])}).transfer(data)
    with batches.transfer(model).open(rank=0, world_size=1) as stream:
        shared = [told(batch) for batch in stream]
    found = {
        "rank": [position.rank, position.world_size],
        "batches": told_of,
        "on device": [[list(row["n"].shape), int(total(row["n"]))] for row in on_device],
        "shared": shared,
        "resumed": resumed(batches.transfer(data)),
        "not counted": refused(rows.shard(2).filter(bool).transfer(data)),
    }
    Path(folder, f"{process}.json").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
