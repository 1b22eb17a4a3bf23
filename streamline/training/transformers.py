"""transformers' Trainer on a loader: `LoaderTrainer(model, args, train_loader=pipe.loader())`.

The Trainer saves between two steps, with nothing fetched ahead, and each checkpoint gets the loader's state, a file for
each rank. Where training resumes, the Trainer counts off the batches of its epoch that it has trained on. The loader
stands after them already, so what is counted off are blanks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamline.core.atomic_file import replace_file
from streamline.errors import PlanError, SnapshotError, install
from streamline.training.loader import Loader
from streamline.training.trainers import LoaderView

try:
    import transformers
    from torch.utils.data import DataLoader, IterableDataset
except ImportError as error:
    raise PlanError(f"LoaderTrainer needs transformers and torch: {install('torch')} transformers") from error


class LoaderTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer whose batches come from a loader, and whose resume goes on with the next batch, exactly.

    Arrays in batches become tensors. `ignore_data_skip` and the Trainer's samplers, workers and collator have no effect
    on them. A subclass may stand in place of one of `transformers.Trainer`.

    Args:
      train_loader: what it trains on, on this rank; each rank has its own.
    """

    def __init__(self, *args: Any, train_loader: Loader[Any], **options: Any) -> None:
        self._batches = _TrainerBatches(train_loader)
        super().__init__(*args, **options)
        self.add_callback(_SavesState(self._batches))

    def get_train_dataloader(self) -> Any:
        return DataLoader(self._batches, batch_size=None)


class _TrainerBatches(LoaderView, IterableDataset):  # type: ignore[misc, type-arg]
    """The loader's batches; after a resume, the first iteration begins with as many blanks as are counted off."""

    blanks = 0

    def __iter__(self) -> Iterator[Any]:
        blanks, self.blanks = self.blanks, 0
        for _ in range(blanks):
            yield None
        yield from self.loader


class _SavesState(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes the loader's state into each checkpoint, and reads it where training resumes."""

    def __init__(self, batches: _TrainerBatches) -> None:
        self._batches = batches

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state, whole or not at all."""
        replace_file(_file(args, state), json.dumps(self._batches.state_dict()).encode())

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the state of the checkpoint that training resumes from.

        Raises:
          SnapshotError: it has no state of this rank's loader.
          What `Loader.load_state_dict` raises.
        """
        if not state.global_step:
            return
        file = _file(args, state)
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{file}: expected the loader's state, as the checkpoint was saved: {error}") from error
        self._batches.load_state_dict(saved)
        if not args.ignore_data_skip:
            self._batches.blanks = _counted_off(args, state, self._batches)


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", f"streamline-rank-{args.process_index:05d}.json")


def _counted_off(args: Any, state: Any, batches: _TrainerBatches) -> int:
    """Return how many batches the Trainer is going to pass over: those of its present epoch.

    Where it isn't known how many an epoch has, all of its steps are one.
    """
    accumulated: int = args.gradient_accumulation_steps
    try:
        steps_in_epoch = math.ceil(len(batches) / accumulated)
    except TypeError:
        steps_in_epoch = state.max_steps
    passed: int = state.global_step % steps_in_epoch
    return passed * accumulated
