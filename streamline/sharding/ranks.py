"""Which data-parallel rank this process is.

Given > torch.distributed or JAX > Ray Train > torchrun's variables > those of a SLURM step.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from streamline.core.options import check_int, type_and_repr
from streamline.errors import PlanError, PlanTypeError
from streamline.sharding.split import shards_of_rank

logger = logging.getLogger(__name__)

_said: Rank | None = None
"""The rank last logged: a loader looks again in each epoch."""


@dataclass(frozen=True)
class Rank:
    """Rank `rank` of `world_size`, and how that is known.

    Attributes:
      members: of a mesh, the numbers of its processes in the whole job, by rank; else none.
      process: of a mesh, the number of this process in the job, if processes outside the mesh may be the same rank.
    """

    rank: int
    world_size: int
    found_in: str
    members: tuple[int, ...] = ()
    process: int | None = None

    @property
    def shared(self) -> bool:
        """Whether other processes may be this rank, and are then to get the same items."""
        return self.process is not None

    def shards(self, num_shards: int) -> range:
        return shards_of_rank(num_shards, self.rank, self.world_size)


class Mesh(Protocol):
    """One dimension of a mesh of processes, as torch's `DeviceMesh` is: `mesh["dp"]`."""

    def get_local_rank(self) -> int:
        """Return which of the processes this is."""

    def size(self) -> int:
        """Return how many there are."""


def find_rank(rank: int | None = None, world_size: int | None = None, mesh: Mesh | None = None) -> Rank:
    """Return the rank that was given, by numbers or by a mesh, or else the one this process was launched as.

    Raises:
      PlanError: only one of the numbers was given, or with a mesh; the rank is not below the world size; a mesh of
        several dimensions, or without this process. PlanTypeError: no numbers, or no mesh.
    """
    if mesh is not None:
        if rank is not None or world_size is not None:
            raise PlanError("mesh= says which rank this is, and of how many: leave rank= and world_size= out")
        return _check_rank(_of_mesh(mesh))
    if (rank is None) != (world_size is None):
        raise PlanError("give rank= and world_size= together, or neither")
    if rank is not None and world_size is not None:
        rank, world_size = check_int(".open(rank=)", rank, None), check_int(".open(world_size=)", world_size, None)
        return _check_rank(Rank(rank, world_size, "given"))
    global _said
    found = _of_torch() or _of_jax() or _of_ray_train() or _of_environment("RANK", "WORLD_SIZE") or _of_slurm()
    if found is None:
        return Rank(0, 1, "alone")
    _check_rank(found)
    if found != _said:
        logger.info("rank %d of %d, found in %s", found.rank, found.world_size, found.found_in)
        _said = found
    return found


def _check_rank(found: Rank) -> Rank:
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        raise PlanError(f"rank {found.rank} of {found.world_size} ({found.found_in}): expected 0 <= rank < world_size")
    return found


def _of_mesh(mesh: Any) -> Rank:
    missing = [name for name in ("get_local_rank", "size") if not callable(getattr(mesh, name, None))]
    if missing:
        raise PlanTypeError(
            f".open(mesh=) is one dimension of a DeviceMesh of torch's, mesh['dp'], and {type_and_repr(mesh)} has no "
            f"{missing[0]}(): without one, say rank= and world_size="
        )
    if (dimensions := getattr(mesh, "ndim", 1)) != 1:
        names = getattr(mesh, "mesh_dim_names", None)
        said = ", ".join(map(str, names)) if names else "without names: init_device_mesh(..., mesh_dim_names=)"
        raise PlanError(
            f".open(mesh=) has {dimensions} dimensions ({said}): give the one over which the data is divided, "
            "mesh['dp']; if it is divided over two of them, these as one, mesh['a', 'b']._flatten()"
        )
    if getattr(mesh, "get_coordinate", lambda: ())() is None:
        raise PlanError(".open(mesh=): this process isn't in the mesh, so it has no part of the data")
    members = getattr(mesh, "mesh", None)
    numbers = () if members is None else tuple(int(number) for number in members.tolist())
    job = _of_torch()
    process = job.rank if job is not None and job.world_size > mesh.size() else None
    return Rank(mesh.get_local_rank(), mesh.size(), "mesh", numbers, process)


def _of_torch() -> Rank | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Rank(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")


def _of_jax() -> Rank | None:
    jax: Any = sys.modules.get("jax")
    initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)  # older versions can't say
    if initialized is None or not initialized():
        return None
    return Rank(jax.process_index(), jax.process_count(), "jax.distributed")


def ray_train_context() -> Any | None:
    """Return Ray Train's context of this process, if that is a worker of a trainer."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
    except (RuntimeError, DeprecationWarning):  # this is no worker of a trainer, but a driver, or a trial of Ray Tune
        return None
    if isinstance(context, train.context.TrainContext):  # of the first version, which says rank 0 of 1 anywhere
        session: Any = train._internal.session.get_session()
        if session is None or session.world_rank is None:
            return None
    return context


def _of_ray_train() -> Rank | None:
    context = ray_train_context()
    return None if context is None else Rank(context.get_world_rank(), context.get_world_size(), "Ray Train")


def _of_environment(rank: str, world_size: str) -> Rank | None:
    if rank not in os.environ or world_size not in os.environ:
        return None
    try:
        return Rank(int(os.environ[rank]), int(os.environ[world_size]), f"{rank} and {world_size}")
    except ValueError as error:
        raise PlanError(f"{rank} and {world_size} are set, but not to numbers: {error}") from error


def _of_slurm() -> Rank | None:
    if "SLURM_STEP_ID" not in os.environ:
        return None  # a batch script's own variables describe the allocation, not of this process
    if "RAY_RAYLET_PID" in os.environ:
        return None  # a process that Ray has started: they are of `ray start`, on its node
    return _of_environment("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
