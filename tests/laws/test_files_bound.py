"""A consumer that stops, stops the reading: items in flight, over random pipelines, and bytes read ahead of a server.

`STREAMLINE_EXAMPLES=50 pytest tests/laws/test_files_bound.py` searches deeper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core import byte_budget as budget
from streamline.core.flow import Lists, StageContext
from streamline.io.fetch import request as requests
from streamline.io.fetch.request import Request
from streamline.io.formats.base import Place
from streamline.io.storage import retry as attempts
from streamline.pipeline import Pipeline
from streamline.sources.files import Files
from streamline.testing.compositions import Composition
from streamline.testing.laws import atoms
from streamline.testing.steps import batches, maps, prefetches, shuffles
from tests.io.formats.records import put
from tests.laws.files import number_of
from tests.laws.profile import examples
from tests.laws.written import ENDS, as_lines
from tests.serving import Server, breaking, serving

pytestmark = pytest.mark.long

FILES, ITEMS, FEW = 4, 1200, 30

one_each = st.one_of(maps(), shuffles(), prefetches(), batches().filter(lambda step: not step.ordered))
"""Stages behind which each item is still there, alone or in a batch."""

KINDS = {"lines": (sl.read_lines, as_lines), **ENDS}


@cache
def content(kind: str, number: int) -> bytes:
    return KINDS[kind][1](list(range(number * ITEMS, (number + 1) * ITEMS)))


@dataclass
class Taken:
    """Counts the items that sources have read."""

    items: int = 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        lists = Files._lists

        async def counted(source: Files[Any], parts: Any, place: Place, context: StageContext) -> Lists[Any]:
            async with aclosing(lists(source, parts, place, context)) as chunks:
                async for chunk in chunks:
                    self.items += len(chunk.items)
                    yield chunk

        patch.setattr(Files, "_lists", counted)

    async def at_rest(self) -> int:
        """Return how many they are when no more come: too early a look would only see fewer."""
        before, still = -1, 0
        while still < 10:
            await anyio.sleep(0.002)
            before, still = self.items, still + 1 if self.items == before else 0
        return self.items


async def check_bound(pipe: Pipeline[Any], limits: tuple[int, ...], backend: Backend) -> None:
    with pytest.MonkeyPatch.context() as patch:
        taken = Taken()
        taken.watch(patch)
        delivered = 0
        async with pipe.open(backend=backend) as stream:
            for limit in limits:
                while delivered < limit and (item := await anext(stream, None)) is not None:
                    delivered += len(list(atoms(item)))
                assert await taken.at_rest() <= delivered + pipe.max_in_flight, (limit, delivered)
            assert taken.items


@examples(8)
@given(
    st.sampled_from(list(KINDS)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(one_each, max_size=2),
    st.lists(one_each, max_size=2),
    st.booleans(),
    st.sampled_from([sl.Inline(), sl.Threads(2)]),
)
def test_no_more_items_are_read_than_may_be_in_flight(
    kind: str, shards: int, turns: int, worker: list[Any], after: list[Any], choosing: bool, backend: Backend
) -> None:
    with TemporaryDirectory() as folder:
        for number in range(FILES):
            put(Path(folder, f"{number}.x"), content(kind, number))
        read: Any = KINDS[kind][0]
        pipe = read(f"{folder}/*.x").shard(shards, mode="file", interleave=turns).map(number_of)
        made = Composition(pipe, "", 1).with_steps(worker)
        merged = made.pipeline.merge("best_effort") if choosing else made.pipeline.merge()
        pipe = Composition(merged, "", 1).with_steps(after).pipeline
        anyio.run(check_bound, pipe, (1, 30, 700), backend)


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


class Held:
    """Watches what flows hold of a server's bytes: what their accounts say, and what is really there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = self.most_there = self.largest = self.flows = 0
        self.budgets: set[budget.Budget] = set()
        self._there: dict[Request, int] = {}
        put, take, account = Request.put, budget.Account.take, budget.Budget.account

        def putting(request: Request, block: bytes) -> bool:
            more = put(request, block)
            live = {one: sum(map(len, one.blocks)) for one in {*self._there, request} if one.owner.account.held}
            self._there = live
            there, held = sum(live.values()), sum(one.held for one in self.budgets)
            assert there <= held, (there, held)
            self.most_there = max(self.most_there, there)
            return more

        def taking(own: budget.Account, count: int, awaited: bool) -> bool:
            taken = take(own, count, awaited)
            self.largest = max(self.largest, count)
            self.most = max(self.most, own._budget.held)
            return taken

        def opening(own: budget.Budget) -> budget.Account:
            self.budgets.add(own)
            found = account(own)
            self.flows = max(self.flows, own._accounts)
            return found

        patch.setattr(Request, "put", putting)
        patch.setattr(budget.Account, "take", taking)
        patch.setattr(budget.Budget, "account", opening)


@examples(15)
@given(
    kind=st.sampled_from(["lines", "tar", "parquet", "npz", "arrow", "files"]),
    shards=st.integers(1, 3),
    turns=st.integers(1, 2),
    part_bytes=st.sampled_from([300, 4000]),
    memory=st.sampled_from([1, 3000, 15_000, 10**8]),
    share=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
)
def test_no_more_bytes_are_held_than_memory_says(
    server: Server, kind: str, shards: int, turns: int, part_bytes: int, memory: int, share: float, seed: int
) -> None:
    dice = Random(seed)
    data = KINDS["tar" if kind == "files" else kind][1](list(range(FEW * (20 if kind == "lines" else 1))))
    names = [f"{number}.x" for number in range(6)]
    server.objects = {name: data[: dice.randrange(len(data))] if kind == "files" else data for name in names}
    server.otherwise = breaking(seed, share)
    read: Any = sl.read_files if kind == "files" else KINDS[kind][0]
    pipe = read([server.url(name) for name in names], concurrency=5, http=sl.HttpOptions(retries=30))
    with pytest.MonkeyPatch.context() as patch:
        held = Held(patch)
        for name, value in (("PART_BYTES", part_bytes), ("MIN_PART_BYTES", part_bytes)):
            patch.setattr(budget, name, value)
        patch.setattr(requests, "GUESS_BYTES", 100)
        patch.setattr(attempts, "BACKOFF_S", 0.0)
        with pipe.shard(shards, mode="file", interleave=turns).open(memory=memory) as stream:
            assert sum(1 for _ in stream) == 6 * {"files": 1, "lines": 20 * FEW}.get(kind, FEW)
    assert held.most_there or share
    assert held.most <= max(memory, held.flows * held.largest)
    assert held.largest <= 2 * part_bytes
    assert all(one.held == 0 for one in held.budgets)
