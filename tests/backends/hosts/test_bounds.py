"""A consumer that stops, stops the sources in all hosts: items and bytes on their way stay within what is promised."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.hosts import pool as hosted
from streamline.plan.describe import in_bridge
from tests.copying_backend import Copying
from tests.kit import Pipe, later, stage
from tests.laws.profile import in_turn

MEMORY = Path("/dev/shm")
SHARDS = 4
LENGTH = 1_000_000


@pytest.fixture
def asked() -> Iterator[Path]:
    """Where it is counted."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as folder:
        yield Path(folder, "asked")


class Asked:
    """Items of a size, in whatever process, and what was asked for of each shard, counted in a file in memory.

    On a disk that others keep busy, a process that counts would stand still for seconds while the page is written.
    """

    def __init__(self, path: Path, size: Callable[[int], int] | None = None, length: int = LENGTH) -> None:
        self.path = path
        self.size = size
        self.length = length
        if not path.exists():
            path.write_bytes(bytes(SHARDS * 16))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SHARDS * 16)
        self._counts = memoryview(self._map).cast("q")

    def __reduce__(self) -> Any:
        return Asked, (self.path, self.size, self.length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        at = 2 * (index % SHARDS)
        self._counts[at] += 1
        if self.size is None:
            return index
        size = self.size(index)
        self._counts[at + 1] += size
        return bytes(size)

    def forget(self) -> None:
        """Count from 0 again."""
        for at in range(len(self._counts)):
            self._counts[at] = 0

    @property
    def total(self) -> tuple[int, int]:
        """Items and bytes."""
        return sum(self._counts[::2]), sum(self._counts[1::2])

    async def settled(self) -> tuple[int, int]:
        """Wait until nothing is asked any more, and return items and bytes."""
        seen, still = self.total, 0
        while still < 20:
            await anyio.sleep(0.002)
            now = self.total
            still, seen = (still + 1 if now == seen else 0), now
        return seen


SHAPES: dict[str, Callable[[Pipe], Pipe]] = {
    "source": lambda pipe: pipe,
    "map": lambda pipe: pipe.map(abs),
    "flat_map": lambda pipe: pipe.flat_map(lambda item: [item]),
    "async map": lambda pipe: pipe.map(later, concurrency=5),
    "unordered map": lambda pipe: pipe.map(later, concurrency=5, ordered=False),
    "shuffle": lambda pipe: pipe.shuffle(window=50),
    "prefetch": lambda pipe: pipe.prefetch(7),
    "custom stage": lambda pipe: pipe.through(stage),
    "best effort": lambda pipe: pipe.map(abs).merge("best_effort"),
    "batches": lambda pipe: pipe.batch(10).merge().unbatch(),
    "batch after the merge": lambda pipe: pipe.map(abs).merge().batch(100).unbatch(),
}
STOPS = (1, 60, 2_000)

HOSTS = [(kind, shape) for shape, kind in in_turn(SHAPES, ["threads", "processes", "copying"])]
"""Each shape in one kind of host; in all, if there is time."""


@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize(("hosts", "shape"), HOSTS, indirect=["hosts"])
def test_a_consumer_that_stops_stops_the_sources(shape: str, hosts: Backend, asked: Path) -> None:
    source = Asked(asked)
    pipe = SHAPES[shape](sl.from_items(source).shard(SHARDS))

    async def test() -> None:
        consumed = 0
        async with pipe.open(backend=hosts) as stream:
            async for _ in stream:
                consumed += 1
                if consumed in STOPS:
                    items, _ = await source.settled()
                    assert items - consumed <= pipe.max_in_flight - in_bridge(pipe.plan), f"after {consumed} items"
                    if consumed == STOPS[-1]:
                        break

    anyio.run(test)


# Bytes ----------------------------------------------------------------------------------------------------------------

BYTES = 1 << 20
"""On their way for each host, in these tests."""

ITEM = 10_000


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "BYTES_ON_THE_WAY", BYTES)


def constant(index: int) -> int:
    return ITEM


def growing(index: int) -> int:
    return ITEM if index >= 3_000 else 10


def alternating(index: int) -> int:
    return ITEM * (1 + index // SHARDS % 2 * 9)


SIZES: dict[str, tuple[Callable[[int], int], int]] = {
    "constant": (constant, 0),
    "growing": (growing, SHARDS * 256 * ITEM),
    "alternating": (alternating, SHARDS * 41 * ITEM),
}
"""Sizes of items, and the bytes of the lists that were asked for before anybody knew how large they would be.

Of alternating ones, a list of an odd number says that an item has up to 4.5 `ITEM` less than it has; the next list of
the shard is up to 8 times as long, and may begin and end with a large one.
"""


@pytest.mark.one_in(3, 1)
@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("sizes", SIZES)
def test_bytes_on_their_way_are_bounded(sizes: str, processes: Backend, asked: Path) -> None:
    size, unforeseen = SIZES[sizes]
    source = Asked(asked, size, 8_000)

    async def test(hosts: Backend) -> None:
        source.forget()
        consumed, got = 0, 0
        async with sl.from_items(source).shard(SHARDS).open(backend=hosts) as stream:
            async for item in stream:
                consumed += 1
                got += len(item)
                if consumed % 1_999 == 1:
                    _, given = await source.settled()
                    assert given - got <= 2 * BYTES + unforeseen, f"after {consumed} items"
        assert consumed == 8_000

    for backend in (Copying(2), processes):
        anyio.run(test, backend)


@pytest.mark.usefixtures("few_bytes")
def test_an_item_that_is_larger_than_all_that_may_be_on_its_way_comes_alone(processes: Backend, asked: Path) -> None:
    source = Asked(asked, lambda index: 3 * BYTES, 40)

    async def test() -> None:
        async with sl.from_items(source).shard(SHARDS).open(backend=processes) as stream:
            consumed = 0
            async for item in stream:
                assert len(item) == 3 * BYTES
                consumed += 1
                if consumed % 13 == 0:
                    items, _ = await source.settled()
                    assert items - consumed <= SHARDS * 2  # one on its way, and one that waits for it
        assert consumed == 40

    anyio.run(test)
