"""LOG DIE CHECKPOINTS: three epochs in a JAX loop, with a checkpoint every third step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tests.trainers.kit import Log, pipe


@jax.jit  # type: ignore[untyped-decorator]
def step_of(weight: Any, batch: Any) -> Any:
    return weight - 0.001 * jax.grad(lambda w: jnp.mean(w * batch))(weight)


def main(log: str, die: str, checkpoints: str) -> None:
    folder = Path(checkpoints)
    folder.mkdir(exist_ok=True)
    loader = pipe(sized=False).loader()
    saved = sorted(folder.glob("*.json"))
    weight, step = jnp.zeros(()), 0
    if saved:
        found = json.loads(saved[-1].read_text())
        weight, step = jnp.asarray(found["weight"]), found["step"]
        loader.load_state_dict(found["loader"])
    log_batch = Log(log, int(die))
    for _ in range(loader.epoch, 3):
        for batch in loader:
            log_batch(step, batch)
            weight = step_of(weight, jnp.asarray(batch, dtype=jnp.float32))
            step += 1
            if step % 3 == 0:
                everything = {"weight": float(weight), "step": step, "loader": loader.state_dict()}
                (folder / f"{step:04d}.json").write_text(json.dumps(everything))


if __name__ == "__main__":
    main(*sys.argv[1:])
