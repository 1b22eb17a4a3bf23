"""Which rank this process is: given > torch.distributed > JAX > Ray Train > torchrun's > SLURM step's variables."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from streamline.errors import PlanError
from streamline.sharding.rank_sync import store_of_torch
from streamline.sharding.ranks import Rank, find_rank

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "RAY_RAYLET_PID",
)
MODULES = ("torch.distributed", "jax", "ray.train")


class Context:
    """The context of a worker of Ray Train."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.get_world_rank = lambda: rank
        self.get_world_size = lambda: world_size


class OldContext(Context):
    """That of the first version."""


class World:
    """Where this process seems to have been launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name in MODULES:
            monkeypatch.delitem(sys.modules, name, raising=False)

    def torch(self, rank: int, world_size: int, *, available: bool = True, initialized: bool = True) -> None:
        module: Any = SimpleNamespace(
            is_available=lambda: available,
            is_initialized=lambda: initialized,
            get_rank=lambda: rank,
            get_world_size=lambda: world_size,
        )
        self._patch.setitem(sys.modules, "torch.distributed", module)

    def jax(self, rank: int, world_size: int, *, initialized: bool = True) -> None:
        distributed = SimpleNamespace(is_initialized=lambda: initialized)
        module: Any = SimpleNamespace(
            distributed=distributed, process_index=lambda: rank, process_count=lambda: world_size
        )
        self._patch.setitem(sys.modules, "jax", module)

    def old_jax(self) -> None:
        module: Any = SimpleNamespace(distributed=SimpleNamespace())
        self._patch.setitem(sys.modules, "jax", module)

    def ray_train(self, context: Any = None) -> None:
        """Have its second version; without a context, in a process that is no worker of a trainer."""

        def get_context() -> Any:
            if context is None:
                raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")
            return context

        module: Any = SimpleNamespace(get_context=get_context, context=SimpleNamespace(TrainContext=OldContext))
        self._patch.setitem(sys.modules, "ray.train", module)

    def old_ray_train(self, session: Any) -> None:
        """Have its first version, which has a context in any process."""
        module: Any = SimpleNamespace(
            get_context=lambda: OldContext(5, 11),
            context=SimpleNamespace(TrainContext=OldContext),
            _internal=SimpleNamespace(session=SimpleNamespace(get_session=lambda: session)),
        )
        self._patch.setitem(sys.modules, "ray.train", module)

    def environment(self, **variables: object) -> None:
        for name, value in variables.items():
            self._patch.setenv(name, str(value))

    def torchrun(self, rank: int, world_size: int) -> None:
        self.environment(RANK=rank, WORLD_SIZE=world_size)

    def slurm(self, rank: int, world_size: int) -> None:
        self.environment(SLURM_STEP_ID=0, SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS=world_size)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.usefixtures("world")
def test_a_process_of_its_own_is_rank_0_of_1(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streamline"):
        assert find_rank() == Rank(0, 1, "alone")
    assert not caplog.records


def test_what_is_known_best_is_taken(world: World) -> None:
    """Each layer hides those below it; all are there in the end."""
    world.slurm(4, 10)
    assert find_rank() == Rank(4, 10, "SLURM_PROCID and SLURM_STEP_NUM_TASKS")
    world.torchrun(3, 9)
    assert find_rank() == Rank(3, 9, "RANK and WORLD_SIZE")
    world.ray_train(Context(5, 11))
    assert find_rank() == Rank(5, 11, "Ray Train")
    world.jax(2, 8)
    assert find_rank() == Rank(2, 8, "jax.distributed")
    world.torch(1, 7)
    assert find_rank() == Rank(1, 7, "torch.distributed")
    assert find_rank(rank=0, world_size=6) == Rank(0, 6, "given")


def test_shards_are_dealt_to_ranks_in_turn() -> None:
    assert [list(Rank(rank, 3, "given").shards(8)) for rank in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_what_is_not_initialized_says_nothing(world: World) -> None:
    world.torch(1, 7, initialized=False)
    world.jax(2, 8, initialized=False)
    assert find_rank().found_in == "alone"
    world.torch(1, 7, available=False)
    assert find_rank().found_in == "alone"


def test_a_program_that_only_has_ray_train_is_alone(world: World) -> None:
    world.ray_train()
    assert find_rank().found_in == "alone"
    for session in (None, SimpleNamespace(world_rank=None)):  # the latter: of a trial of Ray Tune
        world.old_ray_train(session)
        assert find_rank().found_in == "alone"
    world.old_ray_train(SimpleNamespace(world_rank=5))
    assert find_rank() == Rank(5, 11, "Ray Train")


def test_the_step_that_started_ray_is_none_of_its_processes(world: World) -> None:
    world.slurm(3, 9)
    world.environment(RAY_RAYLET_PID=4711)
    assert find_rank().found_in == "alone"
    world.torchrun(2, 8)
    assert find_rank() == Rank(2, 8, "RANK and WORLD_SIZE")


def test_a_jax_that_can_not_say_is_no_error(world: World) -> None:
    world.old_jax()
    assert find_rank().found_in == "alone"


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_a_batch_scripts_own_variables_are_not_a_steps(
    world: World, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """▲ They tell of the allocation: a script that was submitted with 8 tasks runs once, not eight times."""
    world.slurm(0, 8)
    world.environment(SLURM_NTASKS=8)
    monkeypatch.delenv(missing)
    assert find_rank() == Rank(0, 1, "alone")


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_half_of_torchruns_variables_say_nothing(world: World, variable: str) -> None:
    world.environment(**{variable: 1})
    assert find_rank().found_in == "alone"


@pytest.mark.parametrize(("rank", "world_size"), [("one", 2), (0, ""), (0, "2x")])
def test_variables_that_are_no_numbers_are_an_error_that_names_them(world: World, rank: Any, world_size: Any) -> None:
    world.torchrun(rank, world_size)
    with pytest.raises(PlanError, match="RANK and WORLD_SIZE are set, but not to numbers"):
        find_rank()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (5, 1)])
def test_a_rank_outside_its_world_is_refused_with_where_it_was_found(world: World, rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match=rf"rank {rank} of {world_size} \(given\)"):
        find_rank(rank, world_size)
    world.torchrun(rank, world_size)
    with pytest.raises(PlanError, match=rf"rank {rank} of {world_size} \(RANK and WORLD_SIZE\)"):
        find_rank()


@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 2}])
def test_half_a_rank_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="together, or neither"):
        find_rank(**given)


def test_one_line_says_what_was_found(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """▲ One line, not one for each epoch of a loader; another one if something else is found."""
    world.torchrun(3, 8)
    with caplog.at_level(logging.INFO, "streamline"):
        for _ in range(3):
            assert find_rank() == Rank(3, 8, "RANK and WORLD_SIZE")
        world.torch(1, 2)
        find_rank()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "rank 3 of 8, found in RANK and WORLD_SIZE"),
        ("INFO", "rank 1 of 2, found in torch.distributed"),
    ]


# A mesh -------------------------------------------------------------------------------------------------------------


class Mesh:
    """One dimension of a mesh, as torch's `mesh["dp"]` is."""

    ndim = 1
    mesh_dim_names: tuple[str, ...] = ("dp",)

    def __init__(self, rank: int, members: list[int], coordinate: list[int] | None = None) -> None:
        self._rank = rank
        self.mesh = SimpleNamespace(tolist=lambda: members)
        self._coordinate = [rank] if coordinate is None else coordinate

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.mesh.tolist())

    def get_coordinate(self) -> list[int] | None:
        return self._coordinate or None


def test_a_mesh_beats_what_is_found_and_knows_its_members(world: World) -> None:
    world.torch(5, 8)
    assert find_rank(mesh=Mesh(2, [1, 3, 5, 7])) == Rank(2, 4, "mesh", (1, 3, 5, 7), process=5)
    assert find_rank(mesh=Mesh(5, list(range(8)))) == Rank(5, 8, "mesh", tuple(range(8)), process=None)


def test_a_mesh_that_says_little_is_enough() -> None:
    class Small:
        def get_local_rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    assert find_rank(mesh=Small()) == Rank(1, 2, "mesh")


@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 2}, {"rank": 0, "world_size": 2}])
def test_a_mesh_and_a_rank_contradict(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="leave rank= and world_size= out"):
        find_rank(mesh=Mesh(0, [0, 1]), **given)


def test_a_mesh_of_two_dimensions_or_without_this_process_or_none_is_refused() -> None:
    whole = Mesh(0, [0, 1])
    whole.ndim, whole.mesh_dim_names = 2, ("dp", "tp")
    with pytest.raises(PlanError, match=r"has 2 dimensions \(dp, tp\): give the one .* mesh\['dp'\]"):
        find_rank(mesh=whole)
    whole.mesh_dim_names = ()
    with pytest.raises(PlanError, match=r"has 2 dimensions \(without names: .*mesh_dim_names=\)"):
        find_rank(mesh=whole)
    with pytest.raises(PlanError, match="this process isn't in the mesh"):
        find_rank(mesh=Mesh(0, [0, 1], []))
    with pytest.raises(PlanError, match=r"list \[0, 1\] has no get_local_rank\(\): .* rank= and world_size="):
        find_rank(mesh=[0, 1])  # type: ignore[arg-type]


def test_over_torchs_store_agree_only_ranks_that_are_its_processes(world: World) -> None:
    """▲ With a tensor-parallel dimension, each data rank is there several times: only a mesh tells them apart."""
    world.torch(1, 2)
    store = object()
    sys.modules["torch.distributed"].distributed_c10d = SimpleNamespace(_get_default_store=lambda: store)  # type: ignore[attr-defined]
    assert store_of_torch(find_rank()) is store
    assert store_of_torch(find_rank(1, 2)) is store
    assert store_of_torch(find_rank(0, 2)) is None
    assert store_of_torch(find_rank(mesh=Mesh(0, [0, 1, 2, 3]))) is store
    world.torch(1, 2, initialized=False)
    assert store_of_torch(find_rank(1, 2)) is None
