"""What each stage does to items, with the corners: nothing, one, exactly full, None as an item."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import count
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.pipeline import Pipeline


def numbers(length: int, shards: int = 1) -> Pipeline[int]:
    return sl.from_items(range(length)).shard(shards)


def test_map_replaces_each_item() -> None:
    assert list(numbers(4).map(lambda x: x * x)) == [0, 1, 4, 9]


@pytest.mark.parametrize("value", [None, False, 0, "", [], ()], ids=repr)
def test_nothing_that_looks_empty_is_dropped(value: Any) -> None:
    pipe = sl.from_items([value] * 5).shard(2).map(lambda x: x, name="same").batch(1, collate=None).unbatch()
    assert list(pipe) == [value] * 5


def test_map_of_a_coroutine_function_in_a_lambda_is_an_error_that_says_so() -> None:
    async def fetch(x: int) -> int:
        return x

    with pytest.raises(PlanTypeError, match=r"give \.map the `async def` itself"):
        list(numbers(300).map(lambda x: fetch(x), name="hidden"))


def test_an_object_with_an_async_call_is_awaited() -> None:
    class Fetch:
        async def __call__(self, x: int) -> int:
            return -x

    assert list(numbers(3).map(Fetch())) == [0, -1, -2]


def test_filter_keeps_what_is_true_whatever_truth_is() -> None:
    pipe = sl.from_items([0, 1, "", "a", None, [], [0]])
    assert list(pipe.filter(lambda x: x, name="itself")) == [1, "a", [0]]
    assert list(pipe.filter(lambda x: False, name="none")) == []


def test_flat_map_unfolds_in_order() -> None:
    assert list(numbers(4).flat_map(lambda x: [x] * x, name="times")) == [1, 2, 2, 3, 3, 3]
    assert list(numbers(3).flat_map(lambda x: (y for y in "ab"), name="lazy")) == ["a", "b"] * 3


def test_flat_map_may_be_endless() -> None:
    assert numbers(2).flat_map(count, name="count").first(1000) == list(range(1000))


def test_flat_map_of_no_iterable_is_an_error() -> None:
    with pytest.raises(PlanTypeError, match=r"expected an iterable from flat_map\(same\), got int"):
        list(numbers(2).flat_map(lambda x: x, name="same"))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("length", [0, 1, 8, 300])
def test_batches_are_full_but_for_the_last(size: int, length: int) -> None:
    whole = [list(range(start, min(start + size, length))) for start in range(0, length, size)]
    assert list(numbers(length).batch(size, collate=None)) == whole
    full = [batch for batch in whole if len(batch) == size]
    assert list(numbers(length).batch(size, collate=None, drop_remainder=True)) == full


def test_batches_before_the_merge_have_one_rest_per_shard() -> None:
    lengths = [len(batch) for batch in numbers(10, 3).batch(3, collate=None)]
    assert sorted(lengths) == [1, 3, 3, 3]
    assert [len(batch) for batch in numbers(10, 3).merge().batch(3, collate=None)] == [3, 3, 3, 1]


def test_batches_are_stacked_unless_told_otherwise() -> None:
    (batch,) = sl.from_items([{"x": np.zeros(2), "y": "a"}] * 3).batch(3)
    assert batch["x"].shape == (3, 2)
    assert batch["y"] == ["a", "a", "a"]
    assert list(numbers(5).batch(2, collate=sum)) == [1, 5, 4]


def test_a_ragged_batch_is_an_error_with_shapes_and_place() -> None:
    with pytest.raises(sl.errors.DataError, match=r"\(0,\), \(1,\)") as found:
        list(numbers(4).map(np.zeros).batch(2))
    assert any("in batch" in note for note in found.value.__notes__)


class Pair(NamedTuple):
    x: int
    y: str


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "items",
    [
        [1, 2, 3],
        ["a", "b", "c"],
        [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}],
        [Pair(1, "a"), Pair(2, "b")],
        [[1], [2, 3]],
        [None],
    ],
    ids=str,
)
@pytest.mark.parametrize("collate", ["stack", None])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_unbatch_undoes_batch(items: list[Any], collate: Any, size: int) -> None:
    assert list(sl.from_items(items).batch(size, collate=collate).unbatch()) == items


@pytest.mark.parametrize("n", [0, 1, 5, 10, 11])
def test_take_and_skip_part_a_stream(n: int) -> None:
    assert list(numbers(10).take(n)) == list(range(10))[:n]
    assert list(numbers(10).skip(n)) == list(range(10))[n:]
    assert list(numbers(10, 2).merge().take(n)) + list(numbers(10, 2).merge().skip(n)) == list(range(10))


def test_take_in_the_workers_is_of_each() -> None:
    assert sorted(numbers(10, 2).take(2)) == [0, 1, 2, 3]
    assert sorted(numbers(10, 2).skip(2)) == [4, 5, 6, 7, 8, 9]


def test_take_asks_for_no_more_than_it_gives() -> None:
    drawn: list[int] = []

    def endless() -> Iterable[int]:
        for number in count():
            drawn.append(number)
            yield number

    assert list(sl.from_iterable(endless).take(3)) == [0, 1, 2]
    assert drawn == [0, 1, 2]


@pytest.mark.parametrize("times", [0, 1, 3])
def test_repeat_goes_through_everything_before_it(times: int) -> None:
    assert list(numbers(3).map(lambda x: -x, name="minus").repeat(times)) == [0, -1, -2] * times
    assert list(numbers(4, 2).merge().repeat(times)) == [0, 1, 2, 3] * times


def test_an_endless_repeat_of_nothing_ends() -> None:
    assert list(numbers(0).repeat()) == []
    assert list(numbers(5).filter(lambda x: False, name="none").repeat()) == []


def test_an_endless_repeat_ends_with_a_later_pass_of_nothing_too() -> None:
    passes: Iterator[list[int]] = iter([[1, 2], [3], [], [4]])
    assert list(sl.from_iterable(lambda: next(passes)).repeat()) == [1, 2, 3]
    assert next(passes) == [4]


def test_an_endless_repeat_of_something_does_not() -> None:
    assert numbers(3).repeat().first(1000) == [0, 1, 2] * 333 + [0]


@settings(max_examples=25, deadline=None)
@given(length=st.integers(0, 60), window=st.integers(1, 70), seed=st.integers(0, 3))
def test_a_window_shuffle_permutes_each_window(length: int, window: int, seed: int) -> None:
    found = list(numbers(length).shuffle(window=window, seed=seed))
    for start in range(0, length, window):
        assert sorted(found[start : start + window]) == list(range(start, min(start + window, length)))
    assert found == list(numbers(length).shuffle(window=window, seed=seed))


def test_shuffles_differ_by_seed_epoch_pass_shard_and_window() -> None:
    def orders(pipe: Pipeline[int], epoch: int = 0) -> list[int]:
        with pipe.open(epoch=epoch) as stream:
            return [item % 16 for item in stream]

    one = orders(numbers(32).shuffle(window=16))
    assert one[:16] != one[16:], "two windows in one order"
    assert orders(numbers(32).shuffle(window=16, seed=1)) != one
    assert orders(numbers(32).shuffle(window=16), epoch=1) != one
    twice = orders(numbers(16).shuffle(window=16).repeat(2))
    assert twice[:16] != twice[16:], "two passes in one order"
    shards = list(numbers(32, 2).shuffle(window=16))
    assert [item // 2 for item in shards[0::2]] != [item // 2 for item in shards[1::2]], "two shards in one order"


def test_prefetch_changes_nothing_but_time() -> None:
    for items, budget in [(1, None), (7, None), (300, 1), (300, 10**6)]:
        assert list(numbers(500, 3).prefetch(items, bytes=budget).merge()) == list(range(500))


# Custom stages


@sl.stage(state=dict)
async def running(items: AsyncIterator[int], *, state: dict[str, Any], start: int = 0) -> AsyncIterator[int]:
    async for item in items:
        state["sum"] = state.get("sum", start) + item
        yield state["sum"]


@sl.stage(stateless=True)
async def twice(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield item
        yield item


@pytest.mark.parametrize(
    "write", [lambda pipe: pipe.bucket_by_length([3], 2), lambda pipe: pipe.pack(4)], ids=["buckets", "pack"]
)
def test_a_snapshot_that_is_written_to_changes_no_later_run(write: Callable[[Pipeline[Any]], Pipeline[Any]]) -> None:
    pipe = write(sl.from_items([[1, 2]]))
    with pipe.open() as stream:
        taken, first = stream.snapshot(), stream.snapshot().to_json()
    for worker in taken.worker_states:
        for own in worker.values():
            if isinstance(own, dict):
                own.clear()
    with pipe.open() as stream:
        assert stream.snapshot().to_json() == first


def test_a_custom_stage_is_a_generator_with_parameters() -> None:
    assert list(numbers(5).through(running)) == [0, 1, 3, 6, 10]
    assert list(numbers(3).through(running, start=100)) == [100, 101, 103]
    assert list(numbers(3).through(twice)) == [0, 0, 1, 1, 2, 2]


def test_each_worker_and_each_pass_has_a_state_of_its_own() -> None:
    assert sorted(numbers(6, 2).through(running)) == [0, 1, 2, 4, 6, 9]
    assert list(numbers(3).through(running).repeat(2)) == [0, 1, 3, 0, 1, 3]


async def test_a_declared_stage_is_still_a_function() -> None:
    async def source() -> AsyncIterator[int]:
        yield 1
        yield 2

    assert [item async for item in running(source(), state={})] == [1, 3]
    assert running.__name__ == "running"  # type: ignore[attr-defined]


def test_an_undeclared_stage_is_warned_of_where_it_is_written() -> None:
    async def bare(items: AsyncIterator[int]) -> AsyncIterator[int]:
        async for item in items:
            yield item

    with pytest.warns(UserWarning, match="from its start: declare what it remembers with @sl.stage") as found:
        pipe = numbers(3).through(bare)
    assert found[0].filename == __file__
    assert list(pipe) == [0, 1, 2]
    with warnings.catch_warnings(action="error"):
        numbers(3).through(twice)


@pytest.mark.parametrize(
    "declare",
    [lambda: sl.stage(), lambda: sl.stage(state=dict, stateless=True), lambda: sl.stage(state=dict, snapshot_every=0)],
)
def test_a_declaration_that_says_nothing_or_too_much_is_refused(declare: Callable[[], object]) -> None:
    with pytest.raises(PlanError, match="@stage"):
        declare()


@pytest.mark.parametrize("value", [(1, 2), {1}, object(), {3: 4}, float("nan")], ids=lambda value: type(value).__name__)
def test_a_state_that_does_not_survive_json_is_an_error(value: Any) -> None:
    """▲ A tuple would come back as a list, an integer key as a string."""

    @sl.stage(state=dict, snapshot_every=1)
    async def keeps(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
        async for item in items:
            state["kept"] = value
            yield item

    with pytest.raises(PlanTypeError, match=r"the state of through\("):
        list(numbers(5).through(keeps))


@pytest.mark.parametrize("fn", [lambda items: [1, 2], lambda items: None])
def test_what_is_no_generator_is_an_error(fn: Any) -> None:
    with pytest.warns(UserWarning, match="declare"):
        pipe = numbers(3).through(fn, name="fn")
    with pytest.raises(PlanTypeError, match="expected an async generator from through"):
        list(pipe)


def test_an_async_function_that_yields_nothing_is_an_error() -> None:
    async def coroutine(items: AsyncIterator[int]) -> None:
        return None

    with pytest.raises(PlanTypeError, match="coroutine is an async function without a yield"):
        numbers(3).through(coroutine)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="declare"):
        pipe: Pipeline[Any] = numbers(3).through(lambda items: coroutine(items))  # type: ignore[arg-type, return-value]
    with pytest.raises(PlanTypeError, match="expected an async generator"):
        list(pipe)


def test_what_fails_after_the_last_item_of_a_take_never_counts() -> None:
    """Whether it has been tried by then is an accident of timing."""
    pipe = sl.from_items([3, 4, 5, 0]).shard(1).map(lambda item: 60 // item).merge().take(3)
    for _ in range(20):
        with pipe.open(on_error="skip", max_errors=None) as stream:
            assert list(stream) == [20, 15, 12]
            assert stream.errors.total == 0


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_one_thread_keeps_the_order_of_inputs_and_of_calls(ordered: bool, on_error: Any) -> None:
    """Also where a call gives items back, since it took long enough, or since one before them is skipped."""
    calls: list[int] = []

    def fn(item: int) -> int:
        calls.append(item)
        if item % 40 == 30:
            sleep(0.003)  # longer than a call's share of the thread, which is counted in time
        if on_error == "skip" and item % 7 == 3:
            raise ValueError
        return item

    pipe = sl.from_items(range(400)).map(fn, executor="thread", concurrency=1, ordered=ordered)
    options: Any = {"on_error": "skip", "max_errors": 100} if on_error == "skip" else {}
    with pipe.open(**options) as stream:
        found = list(stream)
    assert calls == list(range(400))
    assert found == [item for item in calls if on_error == "raise" or item % 7 != 3]
