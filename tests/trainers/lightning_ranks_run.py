"""FOLDER: Lightning on two processes of its own (gloo), resumed from a checkpoint; each writes down what it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from streamline.integrations.lightning import LightningLoader
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
        strategy="ddp_fork",
    )
    trainer.fit(Model(folder, steps), ckpt_path=checkpoint)


if __name__ == "__main__":
    fit(sys.argv[1], 7, None)
    fit(sys.argv[1], 12, f"{sys.argv[1]}/step=3.ckpt")
