"""LOG DIE CHECKPOINTS SIZED ACCUMULATED: three epochs in transformers' Trainer, with a checkpoint every second step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from streamline.training.transformers import LoaderTrainer
from tests.trainers.kit import Log, pipe


def entry(batch: Any) -> dict[str, Any]:
    return {"numbers": batch}


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, numbers: Any) -> dict[str, Any]:
        return {"loss": self.layer(numbers[:, None].float()).mean()}


class Trainer(LoaderTrainer):
    log_batch: Log

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        self.log_batch(self.state.global_step, inputs["numbers"])
        return model(**inputs)["loss"]


def main(log: str, die: str, checkpoints: str, sized: str, accumulated: str) -> None:
    arguments = transformers.TrainingArguments(
        checkpoints,
        num_train_epochs=3,
        max_steps=-1 if sized == "True" else 24 // int(accumulated),
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        gradient_accumulation_steps=int(accumulated),
        logging_strategy="no",
    )
    trainer = Trainer(Model(), arguments, train_loader=pipe(sized == "True").map(entry).loader())
    trainer.log_batch = Log(log, int(die))
    trainer.train(resume_from_checkpoint=any(Path(checkpoints).glob("checkpoint-*")) or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
