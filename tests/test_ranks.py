"""Which rank this process is: given > torch.distributed > JAX > torchrun's > SLURM step's variables."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from streamline.errors import PlanError
from streamline.ranks import Rank, find_rank

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)
MODULES = ("torch.distributed", "jax")


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
    world.jax(2, 8)
    assert find_rank() == Rank(2, 8, "jax.distributed")
    world.torch(1, 7)
    assert find_rank() == Rank(1, 7, "torch.distributed")
    assert find_rank(rank=0, world_size=6) == Rank(0, 6, "given")


def test_what_is_not_initialized_says_nothing(world: World) -> None:
    world.torch(1, 7, initialized=False)
    world.jax(2, 8, initialized=False)
    assert find_rank().found_in == "alone"
    world.torch(1, 7, available=False)
    assert find_rank().found_in == "alone"


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
def test_half_a_rank_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="together, or neither"):
        find_rank(**given)


def test_one_line_says_what_was_found(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.torchrun(3, 8)
    with caplog.at_level(logging.INFO, "streamline"):
        find_rank()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "rank 3 of 8, found in RANK and WORLD_SIZE")
    ]
