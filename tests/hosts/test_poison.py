"""An item that ends every process in which it is touched: found, named, passed if asked; nobody else is to blame."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import streamline as sl
from streamline.errors import WorkerDied
from tests.hosts.disturbing import leaves_nothing_shared, quiet

LENGTH, POISON = 24, 13
"""Items, of two shards in one process: the poison is item 7 of shard 1, counted from 1."""


def dies(item: int) -> int:
    if item == POISON:
        os._exit(3)
    return item


def crashes(item: int) -> int:
    if item == POISON:
        ctypes.string_at(0)
    return item


def hangs_up(item: int) -> int:
    if item == POISON:
        os.closerange(3, 256)
    return item


async def dies_later(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return dies(item)


def dies_unfolding(item: int) -> Iterator[int]:
    yield item
    yield dies(item)


def dies_drawing(item: int, rng: np.random.Generator) -> int:
    return dies(item)


def dies_collating(items: list[int]) -> list[int]:
    return [dies(item) for item in items]


@sl.stage(stateless=True)
async def stage(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield dies(item)


class Dangerous:
    """A dataset of which one item can't be read."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return dies(index)


def items() -> sl.Pipeline[int]:
    return sl.from_items(range(LENGTH)).shard(2)


CALLS: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "map": lambda: items().map(dies),
    "flat_map": lambda: items().flat_map(dies_unfolding),
    "collate": lambda: items().batch(2, collate=dies_collating),
    "async": lambda: items().map(dies_later, concurrency=8),
    "thread": lambda: items().map(dies, executor="thread", concurrency=2),
    "seeded": lambda: items().map(dies_drawing, seed=1),
    "unordered": lambda: items().map(dies_later, concurrency=3, ordered=False),
}
"""Where a call can be found and left out."""

STEPS: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "source": lambda: sl.from_items(Dangerous()).shard(2).map(abs),
    "custom stage": lambda: items().through(stage),
}
"""Where it can't."""


def harmless(pipe: Callable[[], sl.Pipeline[Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what the pipeline gives, each worker's items in a list, if nothing dies."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "_exit", lambda code: None)
        return pipe().merge().first(10**6)


def of_workers(items: list[Any], *, sort: bool) -> list[list[Any]]:
    """Return each worker's items, in its order where that is fixed."""
    workers: list[list[Any]] = [[], []]
    for item in items:
        workers[(item[0] if isinstance(item, list) else item) % 2].append(item)
    return [sorted(mine) for mine in workers] if sort else workers


@pytest.mark.parametrize("name", CALLS)
def test_a_poison_is_counted_and_passed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = harmless(CALLS[name], monkeypatch)
    borne = 3 if name == "map" else 2  # deaths, by default three: each costs a process
    backend = sl.Processes(1, max_restarts=borne)
    with quiet(caplog), CALLS[name]().merge().open(backend=backend, on_error="skip") as stream:
        found = list(stream)
        left_out = [POISON, POISON + 2] if name == "collate" else POISON
        assert stream.errors.total == (2 if name == "collate" else 1)
    innocent, poisoned = of_workers(whole, sort=name == "unordered")
    poisoned.remove(left_out)  # a flat_map gave one item of its two before it died
    assert of_workers(found, sort=name == "unordered") == [innocent, poisoned]


@pytest.mark.parametrize("name", [*STEPS, "map"])
def test_a_poison_raises_behind_the_items_before_it(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[int] = []
    pipe = (STEPS | CALLS)[name]().merge()
    with quiet(caplog), pipe.open(backend=sl.Processes(1), on_error="skip" if name in STEPS else "raise") as stream:
        with pytest.raises(WorkerDied, match="3 times") as caught:
            found.extend(stream)
        snapshot = stream.snapshot()
        with pytest.raises(WorkerDied):
            next(stream)
    assert found == list(range(POISON))
    died = caught.value
    assert (died.shard, died.process, died.exit) == (1, 0, "exit code 3")
    assert f"item {6 if name in STEPS else 7} of items" in died.position
    with monkeypatch.context() as patched:  # the fix
        patched.setattr(os, "_exit", lambda code: None)
        with pipe.open(resume=snapshot) as stream:
            assert list(stream) == list(range(POISON, LENGTH))


@pytest.mark.parametrize(
    ("fn", "exit_"), [(crashes, "signal 11 (SIGSEGV)"), (hangs_up, None)], ids=["crash", "hangs up"]
)
def test_what_a_process_ended_with_is_told(
    fn: Callable[[int], int], exit_: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with items().map(fn).merge().open(backend=sl.Processes(1)) as stream, pytest.raises(WorkerDied) as caught:
        list(stream)
    told = [record.getMessage() for record in caplog.records if "has ended with" in record.getMessage()]
    if exit_ is not None:
        assert caught.value.exit == exit_
        assert "\n" not in str(caught.value).split("\nin map")[0]
        assert all(exit_ in line and "in crashes" in line for line in told)  # with the stack
    assert len(told) >= 3


def greedy(item: int) -> int:
    if item == POISON:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, hard))
        try:
            return np.ones(1 << 32, np.uint8).size
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return item


def test_a_process_without_memory_raises_and_goes_on() -> None:
    with items().map(greedy).merge().open(backend=sl.Processes(1), on_error="skip") as stream:
        assert set(stream) == set(range(LENGTH)) - {POISON}
        assert stream.errors.total == 1
        assert isinstance(stream.errors.last[0].error, MemoryError)


def kills_its_loop(item: int) -> int:
    if item == POISON:
        import asyncio

        asyncio.get_running_loop().stop()
    return item


def test_user_code_that_stops_the_event_loop_ends_its_process_and_no_more(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with quiet(caplog), leaves_nothing_shared():
        with items().map(kills_its_loop).merge().open(backend=sl.Processes(1)) as stream:
            assert list(stream) == list(range(LENGTH))
        del stream
    assert "Event loop stopped before" in capfd.readouterr().err
