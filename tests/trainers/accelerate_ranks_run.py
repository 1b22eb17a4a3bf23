"""FOLDER: two processes with Accelerate (gloo), which save and load a checkpoint; each writes down what it got."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from streamline.training.trainers import AccelerateLoader
from tests.trainers.kit import uneven


def work(process: int, folder: str) -> None:
    os.environ.update(
        RANK=str(process), WORLD_SIZE="2", LOCAL_RANK=str(process), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process, world_size=2)
    accelerator = Accelerator(cpu=True)
    loader = uneven().loader()
    accelerator.register_for_checkpointing(AccelerateLoader(loader))
    batches = iter(loader)
    before = [next(batches) for _ in range(3)]
    accelerator.save_state(f"{folder}/ckpt")
    accelerator.wait_for_everyone()
    behind = list(batches)
    resumed = uneven().loader()
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(AccelerateLoader(resumed))
    accelerator.load_state(f"{folder}/ckpt")
    Path(folder, f"{process}.json").write_text(json.dumps([before, behind, list(resumed)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, args=(sys.argv[1],), nprocs=2, start_method="fork")
