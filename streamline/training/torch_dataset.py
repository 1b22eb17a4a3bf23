"""A pipeline inside torch's DataLoader, for code that can't do without one. `pipe.loader()` does all that it does.

Each of the DataLoader's workers runs shards of its own: to the pipeline, worker i of w in rank r of R is rank r·w + i
of R·w. Success: each worker ends with its shards. Failure: the exception comes out of the DataLoader, as torch wraps
it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from streamline.backends.hosts.plan_shipping import dumps
from streamline.core.options import check_int
from streamline.errors import PlanError, PlanTypeError, install
from streamline.runtime.open import Openable
from streamline.runtime.sync_stream import SyncStream
from streamline.sharding.ranks import find_rank
from streamline.snapshot.file_format import seal, unseal
from streamline.snapshot.snapshot import Snapshot

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise PlanError(f"TorchDataset needs torch, which is not installed: {install('torch')}") from error


T = TypeVar("T")


class TorchDataset(IterableDataset, Generic[T]):  # type: ignore[misc]  # torch has no types
    """A pipeline as an `IterableDataset`: `DataLoader(TorchDataset(pipe), batch_size=None, num_workers=4)`.

    The pipeline batches (`batch_size=None`), and has as many shards as there are workers on all ranks, or more. How the
    DataLoader deals the workers' items is its own business.

    A DataLoader has no state. torchdata's `StatefulDataLoader` keeps that of each worker, through `state_dict` of this.

    Args:
      pipe: is pickled where workers are spawned, as for `Processes`.
      rank: of this process, as `pipe.open` takes it; found out here if it isn't given.
      world_size: likewise.
    """

    def __init__(self, pipe: Openable[T], *, rank: int | None = None, world_size: int | None = None) -> None:
        if not isinstance(pipe, Openable):
            raise PlanTypeError(f"TorchDataset(pipe) is a Pipeline, got {type(pipe).__name__}")
        super().__init__()
        self._pipe = pipe
        found = find_rank(rank, world_size)
        self._rank, self._world_size = found.rank, found.world_size
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # seen by workers that are running, too
        self._resume: Snapshot | None = None
        self._stream: SyncStream[T] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, in all workers. Without it, each is of epoch 0.

        Raises:
          PlanError: it is less than 0, or no integer.
        """
        epoch = check_int("set_epoch(epoch)", epoch, 0)
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch; in a worker of a DataLoader, its part of it.

        Raises:
          PlanError: fewer shards than there are workers on all ranks.
          What `Pipeline.open` raises.
        """
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        ranks = self._world_size * workers
        shards = self._pipe.plan.shard.num_shards  # 1 without .shard
        if shards < ranks:
            raise PlanError(
                f"{workers} workers of a DataLoader on each of {self._world_size} ranks need {ranks} shards, and this "
                f"pipeline has {shards}: write .shard({ranks}) or more, or "
                "num_workers=0 and pipe.loader(backend=sl.Processes(n))"
            )
        resume, self._resume = self._resume, None
        epoch = int(self._epoch) if resume is None else None
        own = self._rank * workers + worker
        opened = self._pipe.open(resume=resume, epoch=epoch, rank=own, world_size=ranks, ends="allow")  # one by one
        stream = opened.sync_stream()
        self._stream = stream
        return stream

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration in this process stands: one string."""
        return {"snapshot": "" if self._stream is None else seal(self._stream.snapshot().to_json(), None)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration in this process go on there.

        Raises:
          SnapshotError: it isn't what `state_dict` returns.
        """
        text = state_dict.get("snapshot")
        if not isinstance(text, str):
            raise PlanTypeError(f"load_state_dict takes what state_dict() returned, got {state_dict!r:.80}")
        self._resume = Snapshot.from_json(unseal(text, None, "the state of a TorchDataset")) if text else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipe": dumps(self._pipe), "_stream": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pipe=pickle.loads(state["_pipe"]))
