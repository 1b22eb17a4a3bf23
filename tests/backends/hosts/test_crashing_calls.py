"""An item that ends every process in which it is touched: found, named, passed if asked; nothing else is blamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import streamline as sl
from streamline.backends.hosts.restarts import CallLog, track_calls
from streamline.errors import WorkerDied
from tests.backends.hosts.disturbing import leaves_nothing_shared, quiet
from tests.backends.hosts.poisons import (
    LENGTH,
    POISON,
    Dangerous,
    crashes,
    dies,
    dies_at_its_second_try,
    dies_at_its_second_try_later,
    dies_collating,
    dies_drawing,
    dies_later,
    dies_unfolding,
    greedy,
    hangs_up,
    kills_its_loop,
    stage,
)
from tests.laws.profile import long_but


def items() -> sl.Pipeline[int]:
    return sl.from_items(range(LENGTH)).shard(2)


CALLS: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "map": lambda: items().map(dies),
    "flat_map": lambda: items().flat_map(dies_unfolding),
    "collate": lambda: items().batch(2, collate=dies_collating),
    "async": lambda: items().map(dies_later, concurrency=8),
    "limited": lambda: items().map(dies_later, concurrency=8, limit=sl.Limit(2)),
    "thread": lambda: items().map(dies, executor="thread", concurrency=2),
    "seeded": lambda: items().map(dies_drawing, seed=1),
    "unordered": lambda: items().map(dies_later, concurrency=3, ordered=False),
    "tried again": lambda: items().map(dies_at_its_second_try_later, concurrency=3, retries=2, backoff=0.0),
    "tried again in threads": lambda: items().map(
        dies_at_its_second_try, executor="thread", concurrency=2, retries=2, backoff=0.0
    ),
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


@pytest.mark.parametrize("name", long_but(["map"], CALLS))
def test_a_poison_is_counted_and_passed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = harmless(CALLS[name], monkeypatch)
    borne = 2  # deaths, by default three: each costs a process
    backend = sl.Processes(1, max_restarts=borne)
    with quiet(caplog), CALLS[name]().merge().open(backend=backend, on_error="skip") as stream:
        found = list(stream)
        left_out = [POISON, POISON + 2] if name == "collate" else POISON
        assert stream.errors.total == (2 if name == "collate" else 1)
    innocent, poisoned = of_workers(whole, sort=name == "unordered")
    poisoned.remove(left_out)  # a flat_map gave one item of its two before it died
    assert of_workers(found, sort=name == "unordered") == [innocent, poisoned]


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(["source"], [*STEPS, "map"]))
def test_a_poison_raises_after_the_items_before_it(
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
    assert died.position == f"index {11 if name in STEPS else 13} of items"
    with monkeypatch.context() as patched:  # the fix
        patched.setattr(os, "_exit", lambda code: None)
        with pipe.open(resume=snapshot) as stream:
            assert list(stream) == list(range(POISON, LENGTH))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "exit_"), [(crashes, "signal 11 (SIGSEGV)"), (hangs_up, None)], ids=["crash", "hangs up"]
)
def test_what_a_process_ended_with_is_told(
    fn: Callable[[int], int], exit_: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with items().map(fn).merge().open(backend=sl.Processes(1)) as stream, pytest.raises(WorkerDied) as caught:
        list(stream)
    logged = [record.getMessage() for record in caplog.records if "has ended with" in record.getMessage()]
    if exit_ is not None:
        assert caught.value.exit == exit_
        assert "\n" not in str(caught.value).split("\nin map")[0]
        assert all(exit_ in line and "in crashes" in line for line in logged)  # with the stack
    assert len(logged) >= 3


def test_a_process_without_memory_raises_and_goes_on() -> None:
    with items().map(greedy).merge().open(backend=sl.Processes(1), on_error="skip") as stream:
        assert set(stream) == set(range(LENGTH)) - {POISON}
        assert stream.errors.total == 1
        assert isinstance(stream.errors.last[0].error, MemoryError)


@pytest.mark.long
def test_user_code_that_stops_the_event_loop_ends_its_process_and_no_more(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with quiet(caplog), leaves_nothing_shared():
        with items().map(kills_its_loop).merge().open(backend=sl.Processes(1)) as stream:
            assert list(stream) == list(range(LENGTH))
        del stream
    assert "Event loop stopped before" in capfd.readouterr().err


def test_further_tries_of_a_call_have_its_number() -> None:
    """How often one fails may change from one process to the next; the call that ended one is known by its number."""
    reported: list[tuple[int, bool]] = []
    link: Any = SimpleNamespace(send_threadsafe=lambda message: reported.append((message.number, message.over)))
    plan = sl.from_items(["a"]).shard(1).map(len, executor="thread", retries=1).plan
    tracked: Any = track_calls(plan, CallLog(link, 0, None)).worker[0]
    assert (tracked.fn("a"), tracked.fn("ab"), tracked.fn.again("abc"), tracked.fn("")) == (1, 2, 3, 0)
    assert reported == [(number, over) for number in (1, 2, 2, 3) for over in (False, True)]
