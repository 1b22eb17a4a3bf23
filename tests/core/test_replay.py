"""`replay` calls the function again that failed, on the very item, in the calling thread."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError, StageError, TooManyErrors

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def fails(item: Any) -> Any:
    calls.append((threading.current_thread().name, item))
    if item == 3:
        raise ValueError(f"bad {item}")
    return item


async def fails_later(item: Any) -> Any:
    await asyncio.sleep(0)
    return fails(item)


def fails_unfolding(item: int) -> Iterator[str]:
    yield f"{item}a"
    yield f"{item}b"
    fails(item)
    yield f"{item}c"


def fails_together(items: list[int]) -> list[int]:
    fails(3 if 3 in items else 0)
    return items


def fails_seeded(item: int, *, rng: np.random.Generator) -> float:
    drawn = float(rng.random())
    calls.append((item, drawn))
    if item == 3:
        raise ValueError("bad 3")
    return drawn


async def fails_seeded_later(item: int, *, rng: np.random.Generator) -> float:
    await asyncio.sleep(0)
    return fails_seeded(item, rng=rng)


class Table:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return int(fails(index))


class Lists(Table):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def caught(pipe: sl.Pipeline[Any], expected: type[BaseException] = ValueError) -> BaseException:
    with pipe.open() as stream, pytest.raises(expected) as info:
        list(stream)
    calls.clear()
    return info.value


NUMBERS = sl.from_items(range(6))

PIPES: dict[str, tuple[sl.Pipeline[Any], Any]] = {
    "map": (NUMBERS.map(fails), 3),
    "map of many shards": (NUMBERS.shard(3).map(fails).merge(), 3),
    "async map": (NUMBERS.map(fails_later, concurrency=3), 3),
    "unordered map": (NUMBERS.map(fails_later, concurrency=3, ordered=False), 3),
    "thread map": (NUMBERS.map(fails, executor="thread", concurrency=2), 3),
    "filter": (NUMBERS.filter(fails), 3),
    "batch": (NUMBERS.batch(2, collate=fails_together), 3),
    "flat_map": (NUMBERS.flat_map(fails_unfolding), 3),
    "getitem": (sl.from_items(Table()), 3),
    "getitems": (sl.from_items(Lists()), 3),
}


@pytest.mark.parametrize("kind", PIPES)
def test_it_fails_again_in_the_calling_thread_on_that_item_alone(kind: str) -> None:
    pipe, item = PIPES[kind]
    error = caught(pipe)
    assert any(note.startswith("in ") for note in error.__notes__)
    with pytest.raises(ValueError, match="bad 3") as again:
        sl.replay(error)
    assert calls[-1] == (threading.current_thread().name, item)
    assert len(calls) == 1
    if "async" not in kind and "unordered" not in kind:
        assert again.value is not error


def test_a_verdict_without_a_truth_value_is_blamed_on_its_item_and_replayed() -> None:
    pipe = NUMBERS.filter(lambda item: np.arange(2) if item == 3 else item)
    error = caught(pipe)
    expected, where = error.__notes__
    assert expected == "expected true or false of filter(<lambda>)'s function, got ndarray"
    assert where.startswith("in filter(<lambda>), shard 0 of 1")
    assert where.endswith("at index 3 of items: 3")
    with pytest.raises(ValueError, match="ambiguous"):
        sl.replay(error)
    assert sl.replay(error, fn=lambda item: np.arange(2).any()) is True


FIXES: dict[str, tuple[Callable[..., Any], Any]] = {
    "map": (lambda item: item * 10, 30),
    "filter": (lambda item: False, False),
    "thread map": (lambda item: None, None),
    "batch": (sum, 5),
    "flat_map": (lambda item: [item] * 9, [3, 3, 3]),
    "getitem": (lambda index: "row", "row"),
    "getitems": (lambda indices: indices, [3]),
}


@pytest.mark.parametrize("kind", FIXES)
def test_a_fix_is_tried_on_the_item_and_its_result_returned(kind: str) -> None:
    fix, expected = FIXES[kind]
    assert sl.replay(caught(PIPES[kind][0]), fn=fix) == expected
    assert calls == []


def test_a_fix_of_an_async_function_may_be_of_either_kind() -> None:
    async def fixed(item: int) -> int:
        await asyncio.sleep(0)
        return item + 1

    error = caught(PIPES["async map"][0])
    assert sl.replay(error, fn=fixed) == 4
    assert sl.replay(error, fn=lambda item: -item) == -3


@pytest.mark.parametrize("fn", [fails_seeded, fails_seeded_later])
def test_a_seeded_map_gets_its_generator_as_it_was(fn: Any) -> None:
    with NUMBERS.map(fn, seed=7).open() as stream, pytest.raises(ValueError, match="bad 3") as info:
        list(stream)
    drawn = next(value for item, value in calls if item == 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad 3"):
            sl.replay(info.value)
        assert calls[-1] == (3, drawn)
    assert sl.replay(info.value, fn=lambda item, rng: (item, float(rng.random()))) == (3, drawn)


def test_a_function_in_the_place_of_one_that_draws_globally_gets_the_same_numbers() -> None:
    drawn: list[float] = []

    def fails_globally(item: int) -> None:
        drawn.append(random.random())
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as info:
        list(NUMBERS.map(fails_globally, seed=7, seed_globals=True).debug())
    assert sl.replay(info.value, fn=lambda item: random.random()) == drawn[0]


def test_inside_a_running_loop_an_async_function_is_replayed_in_a_thread() -> None:
    error = caught(PIPES["async map"][0])

    async def main() -> None:
        with pytest.raises(PlanError, match=r"await asyncio\.to_thread\(sl\.replay, error\)"):
            sl.replay(error)
        with pytest.raises(ValueError, match="bad 3"):
            await asyncio.to_thread(sl.replay, error)
        assert sl.replay(error, fn=lambda item: item) == 3

    asyncio.run(main())


def test_what_looked_like_an_end_is_replayed_through_its_wrapper_and_itself() -> None:
    def ends(item: int) -> int:
        raise StopIteration(item)

    error = caught(NUMBERS.map(ends), StageError)
    for failed in (error, error.__cause__):
        assert failed is not None
        with pytest.raises(StopIteration):
            sl.replay(failed)
        assert sl.replay(failed, fn=abs) == 0


def test_too_many_errors_stand_for_the_last_of_them() -> None:
    with NUMBERS.map(fails).open(on_error="skip", max_errors=0) as stream, pytest.raises(TooManyErrors) as info:
        list(stream)
    with pytest.raises(ValueError, match="bad 3"):
        sl.replay(info.value)
    assert sl.replay(info.value, fn=str) == "3"


def test_skipped_failures_can_be_replayed() -> None:
    with NUMBERS.map(fails).open(on_error="skip") as stream:
        list(stream)
        (failure,) = stream.errors.last
    assert sl.replay(failure.error, fn=str) == "3"


@sl.stage(stateless=True)
async def custom(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield fails(item)


def test_what_has_no_item_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[")
    errors = [
        caught(NUMBERS.through(custom)),
        caught(sl.from_iterable(lambda: map(fails, range(5)))),
        caught(sl.read_jsonl(str(tmp_path / "a.jsonl")), DataError),
        ValueError("of somebody else"),
    ]
    for error in errors:
        with pytest.raises(PlanError, match="carries no item to replay") as refused:
            sl.replay(error)
        assert refused.value.__cause__ is error
    with pytest.raises(PlanTypeError, match="takes an exception"):
        sl.replay("bad")  # type: ignore[arg-type]
    with pytest.raises(PlanTypeError, match=r"replay\(fn=\) is a function"):
        sl.replay(errors[0], fn=3)  # type: ignore[arg-type]


def test_a_pickled_exception_drops_function_and_item() -> None:
    error = caught(NUMBERS.map(lambda item: fails(item)))
    copied = pickle.loads(pickle.dumps(error))
    assert copied.__notes__ == error.__notes__
    with pytest.raises(PlanError, match="copied or pickled"):
        sl.replay(copied)
    with pytest.raises(ValueError, match="bad 3"):
        sl.replay(copy.copy(error))


def test_a_fix_that_should_have_been_awaited_is_named() -> None:
    error = caught(NUMBERS.map(fails))
    with pytest.raises(PlanTypeError, match="returned a coroutine"):
        sl.replay(error, fn=lambda item: fails_later(item))
    flat = caught(PIPES["flat_map"][0])
    with pytest.raises(PlanTypeError, match="expected an iterable, got int"):
        sl.replay(flat, fn=abs)


def test_an_exception_carries_its_item_and_no_other() -> None:
    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

    def check(item: Item) -> Item:
        if item.number == 3:
            raise ValueError("bad")
        return item

    with sl.from_items(range(6)).map(Item).map(check).open() as stream:
        for _ in range(3):
            next(stream)
        with pytest.raises(ValueError, match="bad") as info:
            next(stream)
    error = info.value.with_traceback(None)
    del info, stream
    gc.collect()
    assert sorted(found.number for found in gc.get_objects() if type(found) is Item) == [3]
    assert sl.replay(error, fn=lambda item: item.number) == 3
