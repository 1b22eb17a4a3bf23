"""`.map(seed=)`: the same numbers, whatever runs them and wherever a run was resumed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

import streamline as sl
from streamline.core.flow import Site
from streamline.core.process_random import CHECKED_LISTS, Look
from streamline.errors import PlanError
from streamline.pipeline import Pipeline
from streamline.transforms.map import Generators, ReusedGenerator, Seeded
from tests.laws.profile import in_turn

Drawn = tuple[int, int]


def draw(item: int, *, rng: np.random.Generator) -> Drawn:
    return item, int(rng.integers(2**62))


async def draw_later(item: int, *, rng: np.random.Generator) -> Drawn:
    for _ in range(item % 5):  # completed in another order than started
        await anyio.lowlevel.checkpoint()
    return item, int(rng.integers(2**62))


def numbers(pipe: Pipeline[Drawn], **options: Any) -> list[Drawn]:
    with pipe.open(**options) as stream:
        return list(stream)


def source(shards: int = 3) -> Pipeline[int]:
    return sl.from_items(range(60)).shard(shards)


RUNS: dict[str, Any] = {
    "inline": lambda p: p.map(draw, seed=7, name="draw"),
    "one task": lambda p: p.map(draw_later, seed=7, name="draw"),
    "tasks": lambda p: p.map(draw_later, seed=7, name="draw", concurrency=9),
    "unordered tasks": lambda p: p.map(draw_later, seed=7, name="draw", concurrency=9, ordered=False),
    "one thread": lambda p: p.map(draw, seed=7, name="draw", executor="thread"),
    "threads": lambda p: p.map(draw, seed=7, name="draw", executor="thread", concurrency=4),
    "unordered threads": lambda p: p.map(draw, seed=7, name="draw", executor="thread", concurrency=4, ordered=False),
    "after a channel": lambda p: p.prefetch(5).map(draw, seed=7, name="draw").prefetch(5),
    "before a best-effort merge": lambda p: p.map(draw, seed=7, name="draw").merge("best_effort"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("run", RUNS)
def test_each_item_has_its_numbers_whatever_runs_it(run: str) -> None:
    assert sorted(numbers(RUNS[run](source()))) == sorted(numbers(RUNS["inline"](source())))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("run", "at"), in_turn(RUNS, [17, 1, 59, 0, 60]))
def test_and_after_a_resume(run: str, at: int) -> None:
    pipe = RUNS[run](source())
    with pipe.open() as stream:
        head = [next(stream) for _ in range(at)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert sorted(head + numbers(pipe, resume=snapshot)) == sorted(numbers(RUNS["inline"](source())))


def test_it_counts_its_own_inputs() -> None:
    """After a filter, a flat_map, a window: the ordinal is that of the stage's input, also at a resume."""
    pipe = (
        source()
        .filter(lambda x: x % 3 != 1, name="some")
        .flat_map(lambda x: [x, -x], name="both")
        .shuffle(window=4)
        .map(draw, seed=1)
    )
    whole = numbers(pipe)
    for at in range(0, len(whole), 7):
        with pipe.open() as stream:
            head = [next(stream) for _ in range(at)]
            snapshot = stream.snapshot()
        assert head + numbers(pipe, resume=snapshot) == whole


def test_every_item_has_numbers_of_its_own() -> None:
    found = numbers(source().map(draw, seed=7))
    assert len({number for _, number in found}) == 60


def values(pipe: Pipeline[Drawn], **options: Any) -> set[int]:
    return {number for _, number in numbers(pipe, **options)}


@pytest.mark.parametrize(
    "other",
    [
        lambda: values(source().map(draw, seed=8)),
        lambda: values(source().map(draw, seed=7, name="other")),
        lambda: values(source(4).map(draw, seed=7)),
        lambda: values(source().map(draw, seed=7), epoch=1),
    ],
    ids=["seed", "name", "number of shards", "epoch"],
)
def test_another_seed_name_shard_or_epoch_is_other_numbers(other: Any) -> None:
    assert not other() & values(source().map(draw, seed=7))


def test_each_pass_has_numbers_of_its_own() -> None:
    found = numbers(source().map(draw, seed=7).repeat(3))
    assert len(found) == 180
    assert len({number for _, number in found}) == 180


def test_two_stages_of_one_function_draw_apart() -> None:
    def add(item: tuple[Any, ...], *, rng: np.random.Generator) -> tuple[Any, ...]:
        return (*item, int(rng.integers(2**62)))

    pipe = source().map(lambda x: (x,), name="tuple").map(add, seed=7).map(add, seed=7)
    assert all(first != second for _, first, second in pipe)


def test_generators_do_not_overlap_and_never_change() -> None:
    site = Site(tasks=None, shard=1, num_shards=4)  # type: ignore[arg-type]
    generators = Generators(7, "draw", site)
    streams = [generators.lend(ordinal).rng.integers(2**62, size=1000) for ordinal in range(20)]
    assert len(np.unique(np.concatenate(streams))) == 20_000
    assert generators.lend(3).rng.integers(1000, size=4).tolist() == [17, 275, 317, 187]


KEPT: dict[str, Callable[[np.random.Generator], Callable[[], float]]] = {
    "it": lambda rng: rng.random,
    "its bits": lambda rng: np.random.Generator(rng.bit_generator).random,
    "what draws from it": lambda rng: (rng.random() for _ in [0]).__next__,
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("run", ["inline", "tasks", "threads"])
def test_a_function_that_keeps_its_generator_has_it_alone(
    run: str, keep: Callable[[np.random.Generator], Callable[[], float]]
) -> None:
    kept: dict[int, Callable[[], float]] = {}

    def keeps(item: int, *, rng: np.random.Generator) -> Drawn:
        if item % 3 == 0:
            kept[item] = keep(rng)
        return draw(item, rng=rng)

    async def keeps_later(item: int, *, rng: np.random.Generator) -> Drawn:
        await anyio.lowlevel.checkpoint()
        return keeps(item, rng=rng)

    def draws_twice(item: int, *, rng: np.random.Generator) -> tuple[int, float]:
        return draw(item, rng=rng)[0], rng.random()

    pipe: Pipeline[Any] = {
        "inline": source().map(keeps, seed=7, name="draw"),
        "tasks": source().map(keeps_later, seed=7, name="draw", concurrency=9),
        "threads": source().map(keeps, seed=7, name="draw", executor="thread", concurrency=4),
    }[run]
    assert sorted(numbers(pipe)) == sorted(numbers(RUNS["inline"](source())))
    second = dict(source().map(draws_twice, seed=7, name="draw"))
    assert {item: draw_once() for item, draw_once in kept.items()} == {item: second[item] for item in range(0, 60, 3)}


def test_calls_at_once_have_generators_of_their_own_and_later_ones_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = ReusedGenerator.__init__

    def counted(generator: ReusedGenerator, key: list[int]) -> None:
        made.append(1)
        init(generator, key)

    monkeypatch.setattr(ReusedGenerator, "__init__", counted)
    for run, most in {"inline": 1, "one task": 1, "tasks": 9, "one thread": 1, "threads": 4}.items():
        made.clear()
        numbers(RUNS[run](source()))
        assert 0 < len(made) <= 3 * most, run


def test_a_call_that_is_made_again_has_the_same_numbers() -> None:
    found: dict[int, list[int]] = {}

    def fails_once(item: int, *, rng: np.random.Generator) -> int:
        found.setdefault(item, []).append(int(rng.integers(2**62)))
        if len(found[item]) == 1:
            raise OSError
        return item

    pipe = sl.from_items(range(6)).map(fails_once, seed=7, executor="thread", concurrency=2, retries=1, backoff=0)
    assert list(pipe) == list(range(6))
    assert all(first == second for first, second in found.values())
    assert len({first for first, _ in found.values()}) == 6


def test_what_the_user_sees_is_the_function() -> None:
    assert Seeded(draw).__qualname__ == "draw"
    assert "map(draw)" in repr(source().map(draw, seed=7))


def test_a_failure_is_the_users_own() -> None:
    def fails(item: int, *, rng: np.random.Generator) -> int:
        if item == 5:
            raise LookupError(item)
        return item

    with pytest.raises(LookupError, match="5") as found:
        list(sl.from_items(range(9)).map(fails, seed=0))
    assert any("fails" in note and "at index 5 of items: 5" in note for note in found.value.__notes__), (
        found.value.__notes__
    )


def roll(item: int) -> tuple[int, float, float]:
    return item, random.random(), float(np.random.rand())


def draw_both(item: int, rng: np.random.Generator) -> tuple[float, float]:
    return rng.random(), float(np.random.rand())


def test_generators_of_the_process_are_set_for_each_call_and_set_back() -> None:
    pipe = sl.from_items(range(6)).shard(2).map(roll, seed=3, seed_globals=True)
    before = random.getstate(), repr(np.random.get_state())
    whole = list(pipe.debug())
    assert (random.getstate(), repr(np.random.get_state())) == before
    assert len({number for row in whole for number in row[1:]}) == 12
    assert list(pipe.debug()) == whole
    debugged = pipe.debug()
    head = [next(debugged) for _ in range(3)]
    assert head + list(pipe.debug(resume=debugged.snapshot())) == whole
    debugged.close()
    with pipe.open() as stream, pytest.raises(PlanError, match=r"beside others that may draw.*sl.Processes\(n\)"):
        next(stream)
    with pytest.raises(ZeroDivisionError):
        list(sl.from_items([0]).map(lambda item: 1 // item + random.random(), seed=3, seed_globals=True).debug())
    assert (random.getstate(), repr(np.random.get_state())) == before, "after a failure"
    both = sl.from_items(range(3)).map(draw_both, seed=3, seed_globals=True)
    drawn = list(both.debug())
    assert drawn == list(both.debug())
    assert {number for number, _ in drawn}.isdisjoint(number for _, number in drawn)
    assert len({number for _, number in drawn}) == 3


@pytest.mark.parametrize(
    "options", [{}, {"seed": 1, "executor": "thread"}, {"seed": 1, "concurrency": 2}], ids=["seed", "threads", "calls"]
)
def test_they_are_not_set_for_several_calls_at_once_nor_without_a_seed(options: Any) -> None:
    pipe: Any = sl.from_items(range(6))
    with pytest.raises(PlanError, match=r"needs a seed=|one call at a time"):
        pipe.map(roll, seed_globals=True, **options)


def test_a_generator_of_torchs_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.transforms.map.find_spec", lambda name: None)
    with pytest.raises(
        PlanError, match=r"<lambda> takes generator=, one of torch's, which is not installed: take rng="
    ):
        sl.from_items(range(6)).map(lambda item, generator: item, seed=1)


def test_a_look_at_a_map_in_a_process_tells_once_what_it_draws_from(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = SimpleNamespace(session=SimpleNamespace(where="process 0, pid 1"))
    look = Look("map(roll)", Site(tasks))  # type: ignore[arg-type]
    look.begin()
    look.end()
    look.begin()
    roll(1)
    with pytest.warns(RuntimeWarning, match=r"map\(roll\) draws from random and numpy.random.*seed_globals=True"):
        look.end()
    assert not look.left
    look = Look("map(roll)", Site(tasks))  # type: ignore[arg-type]
    torch = SimpleNamespace(get_rng_state=lambda: SimpleNamespace(numpy=lambda: np.zeros(1)))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for _ in range(CHECKED_LISTS):
        look.begin()
        monkeypatch.setitem(sys.modules, "torch", torch)  # imported by a call
        look.end()
    assert not look.left
    tasks.session.where = "thread 0"
    assert not Look("map(roll)", Site(tasks)).left  # type: ignore[arg-type]
    tasks.session.where = "process 0, pid 1"
    assert not Look("map(roll)", Site(tasks, shard=1)).left  # type: ignore[arg-type]
