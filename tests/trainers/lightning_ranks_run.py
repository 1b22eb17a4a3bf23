"""FOLDER: Lightning on two processes (gloo), resumed from a checkpoint; each writes down what it got."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from streamline.training.trainers import LightningLoader
from tests.trainers.kit import uneven


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, folder: str, steps: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.steps, self.seen = folder, steps, list[Any]()

    def train_dataloader(self) -> Any:
        return LightningLoader(uneven().filter(bool).loader())  # of no length: one is fetched ahead

    def training_step(self, item: Any, index: int) -> Any:
        self.seen.append(item)
        return self.layer(torch.tensor([[float(item)]])).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)

    def on_train_end(self) -> None:
        Path(self.folder, f"{dist.get_rank()}-{self.steps}.json").write_text(json.dumps(self.seen))


def fit(folder: str, steps: int, checkpoint: str | None) -> None:
    trainer = lightning.Trainer(
        max_steps=steps,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")],
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
    )
    trainer.fit(Model(folder, steps), ckpt_path=checkpoint)


def work(process: int, folder: str) -> None:
    launched = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    nowhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "as by torchrun"}
    os.environ.update({name: str(value) for name, value in {**launched, **nowhere}.items()})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process, world_size=2)
    fit(folder, 7, None)
    dist.barrier()
    fit(folder, 12, f"{folder}/step=3.ckpt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, args=(sys.argv[1],), nprocs=2, start_method="fork")
