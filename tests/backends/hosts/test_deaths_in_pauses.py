"""Hosts that die while a stream quiesces, is paused or goes on, and while snapshots are taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.testing.laws import ExpectedItems
from streamline.testing.subjects import settle
from tests.backends.hosts.disturbing import connections_of
from tests.copying_backend import Copying, HostDeath
from tests.kit import Pipe, later
from tests.laws.profile import FACTOR, long_but
from tests.sources.live_kit import Tape

LENGTH = 16

DEATHS = 4 if FACTOR == 1 else 20
"""At messages that are drawn, of each pipeline."""

STEP = 3 if FACTOR == 1 else 1
"""A host dies in one pause of so many: which of them begin is another question for each pipeline."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def items(shards: int = 3) -> Pipe:
    return sl.from_items(range(LENGTH)).shard(shards)


PIPES: dict[str, Callable[[], Pipe]] = {
    "strict": lambda: items().map(str),
    "best effort": lambda: items().map(str).merge("best_effort"),
    "window shuffle": lambda: items().shuffle(window=3),
    "concurrent map": lambda: items().map(later, concurrency=3),
    "filter": lambda: items().filter(lambda item: item % 5 == 0),
    "live": lambda: sl.from_stream(Tape(LENGTH)).shard(2).map(str),
    "repeat after the merge": lambda: items(2).merge().repeat(2),
}


def chooses(pipe: Pipe) -> bool:
    return pipe.plan.merge.chooses


class Paused:
    """A run that is paused after each item, and in which nothing moves.

    Args:
      cut: closes the link of one of its hosts during the pause after this item; None: never.
    """

    def __init__(self, cut: int | None = None, dice: Random | None = None) -> None:
        self.cut = cut
        self.dice = dice or Random(0)
        self.items: list[Any] = []
        self.snapshots: list[str] = []

    async def read(self, pipe: Pipe, backend: Any, resume: sl.Snapshot | None = None) -> Paused:
        with anyio.fail_after(200):
            async with pipe.open(backend=backend, resume=resume) as stream:
                while True:
                    await settle(self.dice.choice([0, 1, 3, 10]))
                    async with stream.paused() as at_work:
                        await self._inside(stream, at_work)
                    try:
                        self.items.append(await anext(stream))
                    except StopAsyncIteration:
                        return self

    async def _inside(self, stream: sl.Stream[Any], at_work: tuple[str, ...]) -> None:
        assert at_work == ()
        before = stream.snapshot().to_json()
        links = [
            (connection, connection._link) for connection in connections_of(stream) if connection._link is not None
        ]
        if self.cut == len(self.items) and links:
            self.dice.choice(links)[1].close()
        await settle(20)
        assert stream.snapshot().to_json() == before
        for connection, link in links:
            assert connection._link in (link, None)  # nothing is replaced inside
        self.snapshots.append(before)


async def insist_undisturbed(make: Callable[[], Pipe], whole: list[Any], found: Paused, dice: Random) -> None:
    pipe = make()
    truth = ExpectedItems(whole, chooses(pipe))
    truth.insist_whole("Death", "in pauses", [], found.items)
    if pipe.plan.mode != "shared":  # what a live source gave can't be had from another one
        at = dice.randrange(len(found.snapshots))
        rest = await Paused().read(make(), Copying(3), sl.Snapshot.from_json(found.snapshots[at]))
        truth.insist_whole("Death", f"resumed from pause {at}", found.items[:at], rest.items)


@pytest.mark.parametrize("name", long_but(["best effort"], PIPES))
def test_a_host_may_die_at_any_message_of_a_stream_that_is_paused_after_each_item(name: str) -> None:
    make = PIPES[name]

    async def test() -> None:
        whole = [item async for item in make()]
        calm = Copying(2)
        await Paused().read(make(), calm)
        deaths, died = calm.runs[0], 0
        dice = Random(name)
        cuts = [HostDeath(link, sent=at) for link in range(2) for at in range(deaths.sent[link])]
        cuts += [HostDeath(link, received=at) for link in range(2) for at in range(deaths.received[link])]
        for cut in dice.sample(cuts, min(len(cuts), DEATHS)):
            backend = Copying(2, (cut,))
            found = await Paused(dice=dice).read(make(), backend)
            await insist_undisturbed(make, whole, found, dice)
            died += backend.runs[0].happened
        assert died > DEATHS / 2

    anyio.run(test)


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(["best effort"], PIPES))
def test_a_host_may_die_inside_any_pause(name: str) -> None:
    make = PIPES[name]

    async def test() -> None:
        whole = [item async for item in make()]
        dice = Random(name)
        for at in range(list(PIPES).index(name) % STEP, len(whole) + 1, STEP):
            found = await Paused(at, dice).read(make(), Copying(2))
            await insist_undisturbed(make, whole, found, dice)

    anyio.run(test)


@pytest.mark.long
@pytest.mark.parametrize("dying", [False, True])
def test_workers_that_are_no_longer_read_are_removed(dying: bool) -> None:
    """Passes of a repeat after the merge bring new ones each time; where hosts die, some of them are over by then."""
    cuts = (
        tuple(HostDeath(link, received=received) for link, received in enumerate([7, 11, 5, 9, 13] * 8))
        if dying
        else ()
    )
    backend = Copying(2, cuts, max_restarts=50)

    async def test() -> None:
        found = []
        async with sl.from_items(range(6)).shard(3).map(abs).merge().repeat(60).open(backend=backend) as stream:
            async for item in stream:
                found.append(item)
                assert sum(len(connection._workers.known) for connection in connections_of(stream)) <= 6
                assert all(
                    connection._workers.wanted <= set(connection._workers.known)
                    for connection in connections_of(stream)
                )
            assert all(not connection._workers.known for connection in connections_of(stream))
        assert found == list(range(6)) * 60
        assert backend.runs[0].happened >= 20 * dying

    anyio.run(test)
