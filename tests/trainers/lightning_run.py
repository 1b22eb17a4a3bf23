"""LOG DIE CHECKPOINTS SIZED PLAIN: three epochs in Lightning, with a checkpoint every third step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from streamline.training.trainers import LightningLoader
from tests.trainers.kit import Log, pipe


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.log_batch = log

    def training_step(self, batch: Any, index: int) -> Any:
        self.log_batch(self.global_step, batch)
        return self.layer(torch.as_tensor(batch)[:, None].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)


def main(log: str, die: str, checkpoints: str, sized: str, plain: str) -> None:
    saved = sorted(Path(checkpoints).glob("*.ckpt"))
    callback = ModelCheckpoint(dirpath=checkpoints, every_n_train_steps=3, save_top_k=-1, filename="{step:04d}")
    trainer = lightning.Trainer(
        max_epochs=3,
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    loader = pipe(sized == "True").loader()
    batches = loader if plain == "True" else LightningLoader(loader)
    trainer.fit(Model(Log(log, int(die))), batches, ckpt_path=saved[-1] if saved else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
