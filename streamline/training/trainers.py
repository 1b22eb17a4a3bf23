"""Loaders as trainers take them: `AccelerateLoader` and `LightningLoader`.

Accelerate: `accelerator.register_for_checkpointing(AccelerateLoader(pipe.loader()))`. It asks each process for its
state, and writes only the first one's: with a plain loader, the place of all other ranks would be missing.

Lightning: `trainer.fit(model, LightningLoader(pipe.loader()))`; its checkpoints hold the loader's state. It fetches a
batch ahead where the number of batches is unknown, and saves in between: a plain loader's state would be one batch
further than the model. It saves what `state_dict` returns, and loads it before it begins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from streamline.errors import PlanTypeError
from streamline.training.loader import Loader

T = TypeVar("T")


class LoaderView(Generic[T]):
    """A loader that counts its epochs itself: it has no `set_epoch`, for trainers that number them from 0 anew."""

    def __init__(self, loader: Loader[T]) -> None:
        if not isinstance(loader, Loader):
            raise PlanTypeError(f"{type(self).__name__}(loader) is a pipe.loader(), got {type(loader).__name__}")
        self.loader = loader

    def __iter__(self) -> Iterator[T]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # else Python would ask for the length

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where a loader stood. As `Loader.load_state_dict`."""
        self.loader.load_state_dict(state_dict)


class OfAllRanks(LoaderView[T]):
    """A loader under a trainer whose first process saves for all: its state holds that of each process.

    `state_dict` is then a call that all processes make, as saving a checkpoint is in such trainers.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return where the loaders of all processes stand; of one that is alone, where it stands."""
        own = self._standing()
        distributed = _torch_distributed()
        if distributed is None:
            return own
        states: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(states, own)
        return {"processes": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where the loaders stood; their processes may be others in number now.

        Raises:
          What `Loader.load_state_dict` raises.
        """
        states = state_dict.get("processes") if isinstance(state_dict, dict) else None
        if not isinstance(states, list):
            self.loader.load_state_dict(state_dict)
            return
        distributed = _torch_distributed()
        if distributed is not None and distributed.get_world_size() == len(states):
            self.loader.load_state_dict(states[distributed.get_rank()])
        else:
            self.loader.load_state_dict([state for at, state in enumerate(states) if state not in states[:at]])

    def _standing(self) -> dict[str, Any]:
        return self.loader.state_dict()


class AccelerateLoader(OfAllRanks[T]):
    """A loader whose place on all ranks is in Accelerate's checkpoints; `save_state` is called on all of them."""


class LightningLoader(OfAllRanks[T]):
    """A loader for Lightning's trainer, whose resume (`fit(ckpt_path=)`) goes on with the next batch, exactly.

    Where the trainer knows no length, it fetches one batch ahead: the state is after the batch that it trains on.
    """

    _given = 0
    _ended = True

    def __iter__(self) -> Iterator[T]:
        self._given, self._ended = 0, False
        for item in self.loader:
            self._given += 1
            yield item
        self._ended = True

    def _standing(self) -> dict[str, Any]:
        """Return where the trainer stands: one batch before the loader, unless that has ended or a length is known."""
        ahead = self._given > 0 and not self._ended and not _sized(self.loader)
        return self.loader.state_dict(batches_ago=1 if ahead else 0)


def _torch_distributed() -> Any:
    """Return torch.distributed, if this process is one of several; else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    several = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if several and distributed.get_world_size() > 1 else None


def _sized(loader: Loader[Any]) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True
