"""Random numbers for functions that take torch's generators, or none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import streamline as sl
from streamline.errors import PlanError, ResumeError
from streamline.testing.checks import check_resume


def with_generator(item: int, generator: torch.Generator) -> tuple[int, float]:
    return item, float(torch.rand((), generator=generator))


def with_both(item: int, *, rng: np.random.Generator, generator: torch.Generator) -> tuple[float, float]:
    return rng.random(), float(torch.rand((), generator=generator))


def with_none(item: int) -> tuple[int, float, float, float]:
    return item, random.random(), float(np.random.rand()), float(torch.rand(()))


PIPE = sl.from_items(range(12)).shard(3)


def test_a_function_that_takes_generator_is_given_one_of_torchs_for_each_item() -> None:
    pipe = PIPE.map(with_generator, seed=3)
    whole = list(pipe)
    assert len({number for _, number in whole}) == 12
    check_resume(pipe, expected=whole, generations=2)
    with pipe.open(backend=sl.Processes(1)) as stream:
        assert list(stream) == whole
    assert list(PIPE.map(with_generator, seed=4)) != whole
    assert list(PIPE.map(with_generator, seed=3, executor="thread", concurrency=2)) == whole


def test_both_generators_draw_apart_and_rng_draws_what_it_did() -> None:
    plain = list(PIPE.map(lambda item, rng: rng.random(), seed=3, name="draw"))
    assert [drawn for drawn, _ in PIPE.map(with_both, seed=3, name="draw")] == plain


def test_generators_of_the_process_are_seeded_for_each_call_and_set_back() -> None:
    pipe = PIPE.map(with_none, seed=3, seed_globals=True)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    whole = list(pipe.debug())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # type: ignore[index]
    assert len({number for row in whole for number in row[1:]}) == 36
    with pipe.open(backend=sl.Processes(2)) as stream:
        head = [next(stream) for _ in range(5)]
        snapshot = stream.snapshot()
    with pipe.open(backend=sl.Processes(1), resume=snapshot) as stream:
        assert head + list(stream) == whole
    with pytest.raises(ResumeError, match="seed_globals=True"):
        PIPE.map(with_none).open(resume=snapshot)


def test_where_others_of_the_process_draw_it_is_refused() -> None:
    pipe: Any = PIPE.map(with_none, seed=3, seed_globals=True)
    for backend in (sl.Inline(), sl.Threads(1)):
        with pipe.open(backend=backend) as stream, pytest.raises(PlanError, match=r"backend=sl.Processes\(n\)"):
            next(stream)
    for options in ({"executor": "thread"}, {"seed": 3, "concurrency": 2, "executor": "thread"}):
        with pytest.raises(PlanError, match="one call at a time"):
            PIPE.map(with_none, **{"seed": 3, "seed_globals": True, **options})  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="needs a seed="):
        PIPE.map(with_none, seed_globals=True)  # type: ignore[call-overload]


def test_a_map_that_draws_from_what_its_process_shares_is_warned_about_once(capfd: pytest.CaptureFixture[str]) -> None:
    with PIPE.map(with_none).open(backend=sl.Processes(1)) as stream:
        assert len(list(stream)) == 12
    said = capfd.readouterr().err
    assert said.count("map(with_none) draws from random and numpy.random and torch") == 1
    with PIPE.map(with_generator, seed=3).open(backend=sl.Processes(1)) as stream:
        assert len(list(stream)) == 12
    with PIPE.map(with_none, seed=3, seed_globals=True).open(backend=sl.Processes(1)) as stream:
        assert len(list(stream)) == 12
    assert "draws from" not in capfd.readouterr().err
