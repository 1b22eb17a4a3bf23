"""What is iterated in these tests, and the trainer that is interrupted anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import chain, count
from typing import Any

from hypothesis import strategies as st

import streamline as sl
from streamline.runtime.run import RunKeywords
from tests.laws.profile import examples

PIPE = sl.from_items(range(12)).shuffle(seed=3).shard(3).shuffle(window=3).merge().batch(2, collate=None)
Steps = int | None
State = dict[str, Any]


def plus(item: int) -> int:
    return item + 1000


def odd(item: int) -> bool:
    return item % 2 == 1


def through_json(state: State) -> State:
    assert all(type(value) in (str, int) for value in state.values())
    found: State = json.loads(json.dumps(state))
    assert found == state
    return found


def epochs_of(loader: sl.Loader[Any], epochs: int) -> list[list[Any]]:
    """Return what a trainer sees, epoch by epoch."""
    return [list(loader) for _ in range(loader.epoch, epochs)]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


POOL: list[Callable[[], sl.Pipeline[Any]]] = [
    lambda: PIPE,
    lambda: sl.from_items(range(7)).shuffle(),
    lambda: sl.from_items(range(11)).shard(4).shuffle(window=2).map(plus).filter(odd).merge(),
    lambda: sl.from_items(range(9)).shard(2).batch(2, collate=None).merge().shuffle(window=2).unbatch(),
    lambda: sl.from_items(range(5)).shuffle(seed=1).repeat(2).shard(2).merge().batch(3, collate=None),
    lambda: sl.from_iterable(lambda: range(10)).shard(3).shuffle(window=4).prefetch(2).merge().skip(1),
    lambda: sl.from_items(range(6)).flat_map(lambda n: [n] * (n % 3)).shuffle(window=3),
]
CHOOSING: list[Callable[[], sl.Pipeline[Any]]] = [
    lambda: sl.from_items(range(13)).shuffle().shard(4).merge("best_effort"),
    lambda: sl.from_items(range(13)).shard(3).shuffle(window=2).merge("best_effort", max_lead=2).shuffle(window=3),
    lambda: sl.from_items(range(9)).map(plus, executor="thread", concurrency=3, ordered=False).shuffle(window=2),
]
quick = examples(25)
stops = st.lists(st.integers(0, 8), max_size=8)


def interrupted(
    pipe: sl.Pipeline[Any], epochs: int, stops: list[int], how: list[str], options: RunKeywords | State
) -> dict[int, list[Any]]:
    """Return what a trainer uses in each epoch that is stopped behind so many items, resumed, stopped again."""
    seen: dict[int, list[Any]] = {}
    state: State | None = None
    for stop, way in [*zip(stops, how, strict=True), (None, "")]:
        with pipe.loader(**options) as loader:
            if state is not None:
                loader.load_state_dict(through_json(state))
            state = run(loader, epochs, stop, way, seen)
    return seen


def run(loader: sl.Loader[Any], epochs: int, stop: int | None, way: str, seen: dict[int, list[Any]]) -> State:
    """Train until `stop` items have been used; return the state that is saved then."""
    left = count() if stop is None else range(stop)
    budget = iter(left)
    for epoch in range(loader.epoch, epochs):
        assert loader.epoch == epoch
        if way == "before" and next(budget, None) is None:
            return loader.state_dict()
        for item in loader:
            assert loader.epoch == epoch
            seen.setdefault(epoch, []).append(item)
            if next(budget, None) is None:
                if way == "inside":
                    return loader.state_dict()
                break
        else:
            continue
        break
    return loader.state_dict()
