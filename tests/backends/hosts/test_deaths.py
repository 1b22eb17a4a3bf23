"""A host that dies at any message: its workers go on elsewhere, and the stream is what it would have been.

Hosts here are tasks at links that copy (`Copying`), so a death strikes between any two messages, in either
direction, again and again in the same place. Real processes are killed in fewer tests.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
import streamline.core.pace
from streamline.core.flow import Site
from streamline.core.tasks import Session, Tasks, supervise
from streamline.testing.compositions import Composition, compositions
from streamline.testing.laws import ExpectedItems
from streamline.testing.steps import DICE
from streamline.testing.subjects import settle
from tests.copying_backend import Copying, HostDeath
from tests.kit import Pipe, later
from tests.laws.failing import failing_steps
from tests.laws.profile import FACTOR, examples, long_but
from tests.sources.live_kit import Tape

pytestmark = pytest.mark.usefixtures("quietly")

LENGTH = 14
"""Items: some lists of each worker's, and all of it in hundredths of a second."""


def items(shards: int = 3) -> Pipe:
    return sl.from_items(range(LENGTH)).shard(shards)


def live(shards: int = 3) -> Pipe:
    return sl.from_stream(Tape(LENGTH)).shard(shards)


def few(pipe: Pipe) -> Pipe:
    return pipe.filter(lambda item: item % 5 == 0)


def fails(item: int) -> int:
    if item % 4 == 1:
        raise ValueError(item)
    return item


async def out_of_order(item: int) -> int:
    for _ in range(item % 3):
        await anyio.lowlevel.checkpoint()
    return item


@sl.stage(state=dict, snapshot_every=3)
async def pairs(items: Any, *, state: dict[str, Any]) -> Any:
    async for item in items:
        state["held"] = [*state.get("held", []), item]
        if len(state["held"]) == 2:
            held, state["held"] = state["held"], []
            yield held


PIPES: dict[str, Callable[[], Pipe]] = {
    "strict": lambda: items().map(str),
    "best effort": lambda: items().map(str).merge("best_effort"),
    "filter": lambda: few(items()),
    "window shuffle": lambda: items().shuffle(window=3),
    "concurrent map": lambda: items().map(later, concurrency=3),
    "expanding, batched": lambda: items().flat_map(lambda item: [item] * (item % 3)).batch(2, collate=None),
    "custom stage": lambda: items().through(pairs),
    "shuffled after the merge": lambda: items().map(str).merge("best_effort").shuffle(window=4),
    "as completed, shuffled after the merge": lambda: (
        items(2).map(out_of_order, concurrency=3, ordered=False).merge().shuffle(window=6)
    ),
    "repeat": lambda: items(2).repeat(2),
    "repeat after the merge": lambda: items(2).merge().repeat(2),
    "take": lambda: items().take(2),
    "skipped items": lambda: items().map(fails, name="fails"),
    "live": lambda: live().map(str),
    "live, best effort": lambda: live().map(str).merge("best_effort"),
    "live, filter": lambda: few(live()),
    "live, window shuffle": lambda: live().shuffle(window=3),
    "live, skipped items": lambda: live().map(fails, name="fails"),
}

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}


class Run:
    """What a consumer sees of one run: items, snapshots, and what was counted as skipped."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.snapshots: list[sl.Snapshot] = []
        self.errors = 0

    async def read(self, pipe: Pipe, backend: Any, resume: sl.Snapshot | None = None) -> Run:
        with anyio.fail_after(200):
            async with pipe.open(backend=backend, resume=resume, **SKIP) as stream:
                async for item in stream:
                    self.items.append(item)
                    self.snapshots.append(stream.snapshot())
                self.errors = stream.errors.total
        return self


def on_loop(test: Callable[[], Awaitable[None]]) -> None:
    anyio.run(test, backend="asyncio")


def chooses(pipe: Pipe) -> bool:
    plan = pipe.plan
    return plan.merge.chooses or any(stage.chooses for stage in plan.worker + plan.after)


STEP = 7 if FACTOR == 1 else 1
"""A host dies at one message of so many; at which of them is another question for each pipeline."""


async def insist_undisturbed(make: Callable[[], Pipe], whole: Run, *cuts: HostDeath, seed: int = 0) -> int:
    """Run with these deaths, then for even seeds resume from a snapshot; return how many deaths there were."""
    pipe, backend, dice = make(), Copying(2, cuts), Random(seed)
    truth = ExpectedItems(whole.items, chooses(pipe))
    found = await Run().read(pipe, backend)
    truth.insist_whole("Death", f"{cuts}", [], found.items)
    assert found.errors == whole.errors, cuts
    if (
        seed % 2 == 0 and pipe.plan.mode != "shared" and found.items
    ):  # what a live source gave can't be had from another one
        at = dice.randrange(len(found.items))
        rest = await Run().read(pipe, Copying(3), sl.Snapshot.from_json(found.snapshots[at].to_json()))
        truth.insist_whole("Death", f"{cuts}, resumed after item {at + 1}", found.items[: at + 1], rest.items)
    return backend.runs[0].happened


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", long_but(["custom stage", "live, best effort", "skipped items"], PIPES))
def test_a_host_may_die_at_every_message_and_nothing_is_lost_doubled_or_moved(name: str) -> None:
    make = PIPES[name]

    async def test() -> None:
        whole = await Run().read(make(), sl.Inline())
        calm = Copying(2)
        await Run().read(make(), calm)
        deaths = calm.runs[0]
        died = 0
        begin = list(PIPES).index(name) % STEP
        for link in range(2):
            for seed, sent in enumerate(range((begin + link) % STEP, deaths.sent[link], STEP)):
                died += await insist_undisturbed(make, whole, HostDeath(link, sent=sent), seed=seed)
            for seed, received in enumerate(range((begin + link) % STEP, deaths.received[link], STEP)):
                died += await insist_undisturbed(make, whole, HostDeath(link, received=received), seed=seed)
        assert died > 10 / STEP

    on_loop(test)


cuts = st.builds(
    lambda link, at, sent: HostDeath(link, sent=at) if sent else HostDeath(link, received=at),
    st.integers(0, 5),
    st.integers(0, 12),
    st.booleans(),
)


@pytest.mark.long
@examples(40)
@given(compositions(more=failing_steps()), st.lists(cuts, min_size=1, max_size=5), st.integers(0, 1000))
def test_any_pipeline_survives_any_deaths(composition: Composition, deaths: list[HostDeath], seed: int) -> None:
    DICE.seed(seed)

    async def test() -> None:
        whole = await Run().read(composition.pipeline, sl.Inline())
        backend = Copying(2, tuple(deaths), max_restarts=10)
        found = await Run().read(composition.pipeline, backend)
        ExpectedItems(whole.items, composition.chooses).insist_whole("Death", f"{deaths}", [], found.items)
        assert found.errors == whole.errors

    on_loop(test)


def test_a_worker_that_dies_three_times_and_gives_nothing_fails_the_stream() -> None:
    async def test() -> None:
        pipe = sl.from_items(range(LENGTH)).shard(2).batch(3, collate=None)
        cuts = (HostDeath(0, received=2), *(HostDeath(link, received=0) for link in range(1, 9)))
        with anyio.fail_after(200), pytest.raises(sl.errors.WorkerDied) as caught:
            async with pipe.open(backend=Copying(1, cuts)) as stream:
                await anext(stream)
        assert caught.value.shard in (0, 1)
        assert caught.value.process == 0
        assert caught.value.exit == "a cut"

    on_loop(test)


def test_a_worker_that_gives_something_between_two_deaths_may_die_for_ever() -> None:
    async def test() -> None:
        pipe = sl.from_items(range(LENGTH)).shard(1).prefetch(1)
        cuts = tuple(HostDeath(link, received=4) for link in range(LENGTH))  # some of them items
        backend = Copying(1, cuts)
        found = await Run().read(pipe, backend)
        assert found.items == list(range(LENGTH))
        assert backend.runs[0].happened > backend.max_restarts

    on_loop(test)


def test_a_filter_that_drops_nearly_all_is_told_of_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each list one, where none is cut by the clock: a busy machine cuts them all."""
    monkeypatch.setattr(streamline.core.pace, "SLICE_S", math.inf)

    async def test() -> None:
        backend = Copying(1)
        found = await Run().read(sl.from_items(range(20_000)).filter(lambda item: item == 19_999), backend)
        assert found.items == [19_999]
        assert backend.runs[0].received[0] < 200

    on_loop(test)


def test_what_a_filter_has_dropped_is_not_read_again_after_a_death() -> None:
    """The worker goes on at its progress, not at its last item."""
    seen, count = list[int](), 10_000

    def last(item: int) -> bool:
        seen.append(item)
        return item == count - 1

    async def test() -> None:
        pipe, calm = sl.from_items(range(count)).filter(last), Copying(1)
        await Run().read(pipe, calm)
        seen.clear()
        backend = Copying(1, (HostDeath(0, received=calm.runs[0].received[0] // 2),))
        found = await Run().read(pipe, backend)
        assert found.items == [count - 1]
        assert backend.runs[0].happened == 1

    on_loop(test)
    assert seen.count(0) == 1


def test_a_worker_that_begins_when_its_host_was_left_already_can_be_closed() -> None:
    """A repeat after the merge may begin another pass while the stream ends."""
    plan, stop, ready, closed = items(1).plan, anyio.Event(), anyio.Event(), anyio.Event()

    async def late(tasks: Tasks) -> None:
        site = Site(tasks)
        workers = Copying(1).begin(plan, site, 1)
        first = workers.open_worker(site, None)
        assert await anext(first) == 0
        ready.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await first.aclose()
                await settle(100)  # by then the host has been left
                second = workers.open_worker(site, None)
                second.start()
                await second.aclose()
                closed.set()

    def begin(tasks: Tasks) -> None:
        tasks.start(partial(late, tasks), "late", lambda: None)

    async def test() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(supervise, begin, stop, Session())
            with anyio.fail_after(200):
                await ready.wait()
                stop.set()
                await closed.wait()

    on_loop(test)
