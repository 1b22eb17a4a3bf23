"""LOG DIE CHECKPOINTS WAY: three epochs in a torch loop; saved by torch.save or torch.distributed.checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from tests.trainers.kit import Log, pipe


def save(way: str, target: Path, everything: dict[str, Any]) -> None:
    if way == "dcp":
        dcp.save(everything, checkpoint_id=target)
    else:
        torch.save({name: one.state_dict() for name, one in everything.items()}, target)


def load(way: str, target: Path, everything: dict[str, Any]) -> None:
    if way == "dcp":
        dcp.load(everything, checkpoint_id=target)
    else:
        found = torch.load(target)
        for name, one in everything.items():
            one.load_state_dict(found[name])


def main(log: str, die: str, checkpoints: str, way: str) -> None:
    folder = Path(checkpoints)
    folder.mkdir(exist_ok=True)
    loader = pipe(sized=False).loader()
    assert isinstance(loader, Stateful)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    saved = sorted(folder.glob("*"))
    if saved:
        load(way, saved[-1], {"model": model, "loader": loader})
    step = int(saved[-1].name) if saved else 0
    log_batch = Log(log, int(die))
    for _ in range(loader.epoch, 3):
        for batch in loader:
            log_batch(step, batch)
            optimizer.zero_grad()
            model(torch.as_tensor(batch)[:, None].float()).mean().backward()
            optimizer.step()
            step += 1
            if step % 3 == 0:
                save(way, folder / f"{step:04d}", {"model": model, "loader": loader})


if __name__ == "__main__":
    main(*sys.argv[1:])
