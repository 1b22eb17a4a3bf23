"""Sources that users write: split by themselves, resumed from their dict, failing and closed as others."""

from __future__ import annotations

import asyncio
import os
import pickle
from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any

import anyio
import cloudpickle
import numpy as np
import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError, ResumeError, StageError
from streamline.sources.base import epoch_number
from streamline.testing.checks import check_failure, check_resume
from streamline.testing.subjects import LOOPS


@sl.source(state=dict)
async def rows(
    *, state: dict[str, Any], shard: int, num_shards: int, length: int, every: int = 3
) -> AsyncIterator[int]:
    for number in range(state.get("next", shard), length, num_shards):
        if number % every == 0:
            await anyio.lowlevel.checkpoint()
        state["next"] = number + num_shards
        yield number


@sl.source(state=lambda: {"next": 0})
def plain(*, state: dict[str, Any], shard: int, num_shards: int, length: int) -> Iterator[int]:
    for number in range(state["next"], length):
        state["next"] = number + 1
        if number % num_shards == shard:
            yield number


@sl.source(state=dict)
def epochs(*, state: dict[str, Any], shard: int, num_shards: int, epoch: int) -> Iterator[tuple[int, int]]:
    for number in range(state.get("next", 0), 2):
        state["next"] = number + 1
        yield epoch, number


SOURCES: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "async": lambda: rows(length=12),
    "sync": lambda: plain(length=12),
    "of nothing": lambda: rows(length=0),
    "fewer than shards": lambda: rows(length=2).shard(5),
    "sharded": lambda: rows(length=12).shard(3),
    "sync sharded": lambda: plain(length=12).shard(3),
    "repeated": lambda: rows(length=5).repeat(3).shard(2),
    "repeated behind": lambda: plain(length=5).shard(2).repeat(2),
    "shuffled": lambda: plain(length=12).shard(2).shuffle(window=4).batch(3, collate=None),
    "best effort": lambda: rows(length=12).shard(3).merge("best_effort").flat_map(lambda n: [n, n + 100]),
}


@pytest.mark.one_in(7, 3)
@pytest.mark.parametrize("name", SOURCES)
def test_it_resumes_exactly(name: str) -> None:
    check_resume(SOURCES[name](), loop=LOOPS[len(name) % len(LOOPS)])


def test_each_pass_of_a_repeat_begins_with_a_fresh_state() -> None:
    assert list(rows(length=3).repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert sorted(rows(length=3).repeat(2).shard(2)) == [0, 0, 1, 1, 2, 2]


def test_the_kit_catches_a_state_that_is_updated_after_its_yield() -> None:
    """What is wrong in docs/custom.md, and how it is seen."""

    @sl.source(state=dict)
    def late(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        for number in range(state.get("next", 0), 6):
            yield number
            state["next"] = number + 1

    @sl.source(state=dict)
    def right(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        for number in range(state.get("next", 0), 6):
            state["next"] = number + 1
            yield number

    check_resume(right())
    with pytest.raises(AssertionError, match=r"(?s)^Resume: from the state after item 1, .*expected \[1.* got \[0, 1"):
        check_resume(late())


def test_the_kit_catches_a_place_that_is_kept_in_a_local_variable() -> None:
    @sl.source(state=dict)
    async def forgetful(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncIterator[int]:
        for number in range(6):
            yield number

    with pytest.raises(AssertionError, match=r"^Resume: from the state after item 1"):
        check_resume(forgetful())


def test_what_is_changed_in_the_dict_later_does_not_change_what_was_handed_out() -> None:
    @sl.source(state=dict)
    def deep(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        seen = state.setdefault("seen", [])
        while len(seen) < 9:
            seen.append(len(seen))
            yield len(seen)

    check_resume(deep())
    with deep().open() as stream:
        next(stream)
        snapshot = stream.snapshot()
        assert list(stream)[-1] == 9
    assert list(snapshot.worker_states) == [{"deep": {"seen": [0]}}]


def test_an_epoch_is_given_to_who_asks_for_it() -> None:
    assert list(epochs()) == [(0, 0), (0, 1)]
    with epochs().open(epoch=7) as stream:
        assert list(stream) == [(7, 0), (7, 1)]
    assert [epoch for epoch, _ in epochs().repeat(3)] == [0, 0, 1, 1, 2, 2]
    check_resume(epochs().repeat(3).shard(2))


def test_an_epochs_number_is_another_one_in_each_pass() -> None:
    assert epoch_number((5,)) == 5
    assert epoch_number((0, 3)) == 3
    assert epoch_number((2, 3)) == 2 * 2**32 + 3
    several = [(loader, a, b) for loader in range(3) for a in range(3) for b in range(3)]
    assert len({epoch_number(epoch) for epoch in several}) == len(several)


# Failure ------------------------------------------------------------------------------------------------------------


def failing(error: BaseException | None, sync: bool) -> sl.Pipeline[int]:
    def numbers(state: dict[str, Any]) -> Iterator[int]:
        for number in range(state.get("line", 0), 9):
            if number == 5 and error is not None:
                raise error
            state["line"] = number + 1
            yield number

    @sl.source(state=dict)
    def plainly(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        yield from numbers(state)

    @sl.source(state=dict)
    async def waiting(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncIterator[int]:
        for number in numbers(state):
            yield number

    return plainly(name="feed") if sync else waiting(name="feed")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_what_comes_before_a_failure_is_delivered_and_a_resume_goes_on_after_a_fix(sync: bool, loop: str) -> None:
    error = ValueError("line 5")
    check_failure(failing(error, sync), error, mended=failing(None, sync), loop=loop)


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_a_failure_says_where(sync: bool) -> None:
    error = ValueError("bad row")
    with failing(error, sync).open() as stream:
        assert list(islice(stream, 5)) == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="bad row") as failed:
            next(stream)
    assert failed.value is error
    name = "plainly" if sync else "waiting"
    assert failed.value.__notes__ == [f"in source({name}), shard 0 of 1 (pid {os.getpid()}), at line 5"]


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, CancelledError, GeneratorExit])
def test_what_looks_like_an_end_is_none(kind: type[BaseException], sync: bool) -> None:
    with failing(kind(), sync).open() as stream:
        assert list(islice(stream, 5)) == [0, 1, 2, 3, 4]
        for _ in range(2):
            with pytest.raises((StageError, RuntimeError)) as failed:
                next(stream)
            assert isinstance(failed.value.__cause__, kind)


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1}, object(), {3: 4}, float("nan")],
    ids=["tuple", "set", "object", "key", "nan"],
)
def test_a_dict_that_does_not_survive_json_is_an_error_after_the_items_before(value: Any) -> None:
    @sl.source(state=dict)
    def remembers(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        yield 0
        state["value"] = value
        yield 1

    with remembers().open() as stream:
        assert next(stream) == 0
        with pytest.raises(
            PlanTypeError, match=r"the state of source\(remembers\) (is not JSON-able|does not survive)"
        ):
            next(stream)


def test_a_random_generators_state_of_128_bits_survives() -> None:
    @sl.source(state=dict)
    def drawn(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        rng = np.random.default_rng(3)
        if "rng" in state:
            rng.bit_generator.state = state["rng"]
        for _ in range(9 - state.get("drawn", 0)):
            number = int(rng.integers(1000))
            state.update(rng=rng.bit_generator.state, drawn=state.get("drawn", 0) + 1)
            yield number

    check_resume(drawn())


def test_a_first_state_that_is_no_dict_is_an_error() -> None:
    @sl.source(state=lambda: [1])  # type: ignore[arg-type, return-value]
    def listed(*, state: Any, shard: int, num_shards: int) -> Iterator[int]:
        yield 0

    with pytest.raises(PlanTypeError, match=r"the state of source\(listed\)"):
        list(listed())


# Leaving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_leaving_closes_the_generator(sync: bool) -> None:
    closed: list[int] = []

    @sl.source(state=dict)
    def plainly(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        try:
            yield from range(shard, 10_000_000, num_shards)
        finally:
            closed.append(shard)

    @sl.source(state=dict)
    async def waiting(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncIterator[int]:
        try:
            for number in range(shard, 10_000_000, num_shards):
                yield number
        finally:
            await anyio.lowlevel.checkpoint()
            closed.append(shard)

    pipe = plainly() if sync else waiting()
    with pipe.shard(2).open() as stream:
        next(stream)
    assert sorted(closed) == [0, 1]


async def test_leaving_while_it_waits_closes_it() -> None:
    events: list[str] = []

    @sl.source(state=dict)
    async def quiet(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncIterator[int]:
        try:
            yield 0
            await anyio.sleep_forever()
        finally:
            events.append("closed")

    async with quiet().open() as stream:
        assert await anext(stream) == 0
        with anyio.move_on_after(0.01):
            await anext(stream)
        assert events == []
    assert events == ["closed"]


def test_it_reads_ahead_and_no_further() -> None:
    asked = 0

    @sl.source(state=dict)
    async def endless(*, state: dict[str, Any], shard: int, num_shards: int) -> AsyncIterator[int]:
        nonlocal asked
        while True:
            asked += 1
            yield asked

    pipe = endless()

    async def work() -> None:
        async with pipe.open() as stream:
            await anext(stream)
            await anyio.wait_all_tasks_blocked()

    asyncio.run(work())
    assert 1 < asked <= pipe.max_in_flight + 1


# What is written ----------------------------------------------------------------------------------------------------


def test_its_name_can_be_given() -> None:
    assert rows(length=3).source.name == "rows"
    assert rows(name="other", length=3).source.name == "other"
    with rows(name="other", length=3).open() as stream:
        next(stream)
        assert stream.snapshot().worker_states[0] == {"other": {"next": 1}}
    with pytest.raises(PlanError, match="a name is a string"):
        rows(name="", length=3)
    with pytest.raises(PlanError, match="is a name that the pipeline uses itself"):
        rows(name="shard", length=3)


def test_it_is_printed_and_compared_and_pickled() -> None:
    pipe = rows(length=3)
    assert repr(pipe).startswith("source(rows)\nshard into 1 (custom)\n")
    assert pipe == rows(length=3) != rows(length=4)
    assert list(pickle.loads(cloudpickle.dumps(pipe))) == [0, 1, 2]
    assert list(pickle.loads(pickle.dumps(pipe))) == [0, 1, 2]


def test_one_of_a_script_or_of_a_function_is_pickled_by_value() -> None:
    @sl.source(state=dict)
    def local(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        yield 7

    assert list(cloudpickle.loads(cloudpickle.dumps(local()))) == [7]


def test_the_function_is_there_for_a_test_of_its_own() -> None:
    state: dict[str, Any] = {}
    assert list(plain.fn(state={"next": 1}, shard=0, num_shards=1, length=3)) == [1, 2]
    assert state == {}
    assert rows.__doc__ == rows.fn.__doc__


def test_another_function_or_another_parameter_is_another_plan() -> None:
    with rows(length=3).open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    with pytest.raises(ResumeError, match=r"(?s)- source 'rows' .*'length': 3.*\+ source 'rows' .*'length': 4"):
        rows(length=4).open(resume=snapshot)
    with pytest.raises(ResumeError, match="another plan"):
        plain(name="rows", length=3).open(resume=snapshot)


def undecorated(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
    yield 1


async def nameless(*, shard: int, num_shards: int) -> AsyncIterator[int]:
    yield 1


def named(*, state: dict[str, Any], shard: int, num_shards: int, name: str) -> Iterator[str]:
    yield name


def returns(*, state: dict[str, Any], shard: int, num_shards: int) -> list[int]:
    return [1]


async def awaits(*, state: dict[str, Any], shard: int, num_shards: int) -> list[int]:
    return [1]


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "without parentheses": (lambda: sl.source(undecorated), r"@sl\.source\(state=dict\).*from_iterable\(rows\)"),
    "without a state": (lambda: sl.source(), r"@source takes state=dict.*from_iterable"),
    "with a dict": (lambda: sl.source(state={}), r"@source\(state=\) is a function, got dict"),  # type: ignore[call-overload]
    "no generator": (
        lambda: sl.source(state=dict)(returns),  # type: ignore[arg-type]
        "returns is none: what returns an iterable is read with from_iterable",
    ),
    "a coroutine": (lambda: sl.source(state=dict)(awaits), "awaits is none"),  # type: ignore[arg-type]
    "no state": (lambda: sl.source(state=dict)(nameless), r"nameless has no keyword state: async def nameless\("),
    "its name": (lambda: sl.source(state=dict)(named), "name= names the source where named is called"),
    "a parameter missing": (
        lambda: rows(),
        r"rows\(\): missing a required (keyword-only )?argument: 'length'; it takes \(\*, state",
    ),
    "one unknown": (lambda: rows(length=1, size=2), r"unexpected keyword argument 'size'"),
    "one of ours": (lambda: rows(length=1, shard=2), r"streamline passes shard itself"),
    "our epoch": (lambda: epochs(epoch=2), r"streamline passes epoch itself"),
    "another mode": (lambda: rows(length=1).shard(2, "interleaved"), r"of source is one of custom; got 'interleaved'"),
    "the remainder": (lambda: rows(length=1).shard(2, drop_remainder=True), r"source\(rows\) splits itself"),
    "take before": (lambda: rows(length=1).take(1).shard(2), r"`\.take` before `\.shard` needs to know"),
    "skip before": (lambda: rows(length=1).skip(1).shard(2), r"`\.skip` before `\.shard` needs to know"),
    "a shuffle of the index": (
        lambda: rows(length=1).shuffle().shard(2),
        r"permutes a whole index, and source has none",
    ),
    "a shuffle of files": (lambda: rows(length=1).shuffle_files().shard(2), r"list of files, and source has none"),
    "a map before": (lambda: rows(length=1).map(abs).shard(2), r"`\.map` before `\.shard\(2\)` would run 2 times"),
    "custom elsewhere": (lambda: sl.from_items([1]).shard(2, "custom"), r"is one of interleaved, contiguous"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_where_it_is_written(mistake: str) -> None:
    make, match = MISTAKES[mistake]
    with pytest.raises(PlanError, match=match) as refused:
        make()
    assert isinstance(refused.value, ValueError)
