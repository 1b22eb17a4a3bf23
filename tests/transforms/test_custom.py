"""What `@sl.stage` and `.through` refuse where they are written; and how a wrong declaration is found out."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.testing import steps
from streamline.testing.checks import check_resume, check_stage


@sl.stage(state=dict)
async def packed(words: AsyncIterator[str], *, state: dict[str, Any], width: int) -> AsyncIterator[str]:
    async for word in words:
        yield word[:width]


@sl.stage(stateless=True)
async def shouted(words: AsyncIterator[str], mark: str = "!") -> AsyncIterator[str]:
    async for word in words:
        yield word.upper() + mark


async def bare(words: AsyncIterator[str]) -> AsyncIterator[str]:
    async for word in words:
        yield word


async def stateful(words: AsyncIterator[str], *, state: dict[str, Any]) -> AsyncIterator[str]:
    async for word in words:
        yield word


async def inputless(*, state: dict[str, Any]) -> AsyncIterator[str]:
    yield "a"


def sync(words: Any) -> Any:
    yield from words


async def coroutine(words: Any, *, state: dict[str, Any]) -> list[str]:
    return []


def text() -> sl.Pipeline[str]:
    return sl.from_items(["one", "two"])


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing said": (lambda: sl.stage(), r"either state=dict .* or stateless=True"),
    "both said": (lambda: sl.stage(state=dict, stateless=True), r"either state=dict"),
    "a dict": (lambda: sl.stage(state={}), r"@stage\(state=\) is a function, got dict"),  # type: ignore[arg-type]
    "no inputs at all": (lambda: sl.stage(state=dict, snapshot_every=0), r"snapshot_every=\) is at least 1, got 0"),
    "a bool": (lambda: sl.stage(state=dict, snapshot_every=True), r"snapshot_every=\) is an integer, got bool"),
    "no state": (lambda: sl.stage(state=dict)(bare), r"bare has no keyword `state`: .* or stateless=True"),
    "a state": (
        lambda: sl.stage(stateless=True)(stateful),
        r"has a parameter `state`: declare it with @stage\(state=d",
    ),
    "no inputs": (lambda: sl.stage(state=dict)(inputless), r"inputless has no first parameter for the inputs"),
    "a sync one": (lambda: sl.stage(stateless=True)(sync), r"sync is none: .*\.map, \.filter and \.flat_map take"),
    "a coroutine": (lambda: sl.stage(state=dict)(coroutine), r"coroutine is none"),  # type: ignore[arg-type]
    "a parameter missing": (lambda: text().through(packed), r"\.through\(packed\): missing a required .*'width'"),
    "one unknown": (
        lambda: text().through(shouted, marks="?"),
        r"\.through\(shouted\): .* unexpected keyword .*'marks'",
    ),
    "our own": (lambda: text().through(packed, width=2, state={}), r"streamline passes state itself: leave it out"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_where_it_is_written(mistake: str) -> None:
    make, match = MISTAKES[mistake]
    with pytest.raises(PlanError, match=match) as refused:
        make()
    assert isinstance(refused.value, ValueError)


def test_a_wrong_function_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        sl.stage(state=dict)(bare)
    assert issubclass(PlanTypeError, TypeError)


def test_parameters_reach_it() -> None:
    assert list(text().through(packed, width=2)) == ["on", "tw"]
    assert list(text().through(shouted)) == ["ONE!", "TWO!"]
    assert list(text().through(shouted, mark="?")) == ["ONE?", "TWO?"]


@sl.stage(state=dict, snapshot_every=1)
async def forgets(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
    total = 0
    async for item in items:
        total += item
        yield total


@sl.stage(state=dict, snapshot_every=1)
async def late(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[list[int]]:
    held: list[int] = []
    async for item in items:
        held.append(item)
        if len(held) == 3:
            yield held
            held = []
            state["held"] = held


@sl.stage(state=dict, snapshot_every=1)
async def remembers(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
    async for item in items:
        state["total"] = state.get("total", 0) + item
        yield state["total"]


@pytest.mark.parametrize("broken", [forgets, late])
def test_the_kit_catches_what_is_not_in_the_dict_when_the_next_input_is_asked_for(broken: Any) -> None:
    with pytest.raises(AssertionError, match=r"^Resume"):
        check_stage(lambda pipe: pipe.through(broken), range(12), behind_choices=False)
    with pytest.raises(AssertionError, match=r"^Resume"):
        check_resume(sl.from_items(range(12)).through(broken))


def test_the_kit_lets_a_sound_one_pass() -> None:
    check_stage(lambda pipe: pipe.through(remembers), range(12), behind_choices=False)


def test_the_state_to_begin_with_is_made_once_for_each_worker() -> None:
    made: list[int] = []

    def first() -> dict[str, Any]:
        made.append(1)
        return {"seen": 0}

    @sl.stage(state=first)
    async def counts(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
        async for item in items:
            state["seen"] += 1
            yield item

    pipe = sl.from_items(range(6)).shard(3).through(counts).merge()
    del made[:]
    assert len(list(pipe)) == 6
    assert len(made) == 3


def test_a_function_that_is_declared_twice_is_pickled_by_what_it_is() -> None:
    again = sl.stage(state=dict, snapshot_every=2)(steps.pairs)
    assert pickle.loads(pickle.dumps(again)).fn is steps.pairs
