"""LOG DIE CHECKPOINTS: three epochs in a loop with Accelerate, with a checkpoint every third step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from streamline.training.trainers import AccelerateLoader
from tests.trainers.kit import Log, pipe


def main(log: str, die: str, checkpoints: str) -> None:
    loader = pipe(sized=False).loader()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.001))
    accelerator.register_for_checkpointing(AccelerateLoader(loader))
    saved = sorted(Path(checkpoints).glob("*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    step = int(saved[-1].name) if saved else 0
    log_batch = Log(log, int(die))
    for _ in range(loader.epoch, 3):
        for batch in loader:
            log_batch(step, batch)
            optimizer.zero_grad()
            accelerator.backward(model(torch.as_tensor(batch)[:, None].float()).mean())
            optimizer.step()
            step += 1
            if step % 3 == 0:
                accelerator.save_state(f"{checkpoints}/{step:04d}")


if __name__ == "__main__":
    main(*sys.argv[1:])
