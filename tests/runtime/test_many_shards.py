"""What a run with many shards costs: no more for each of them than one with few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import streamline as sl
from streamline.sharding.index import Bijection, Positions
from tests.kit import counted_calls

FEW, MANY = 40, 320
MORE = 1.3 * MANY / FEW
"""How many times more may be done for many than for few: what grows with the square is done 64 times more."""


@pytest.mark.parametrize("batch", [1, 8])
def test_reading_all_of_many_shards_costs_no_more_for_each(batch: int) -> None:
    async def read(shards: int) -> None:
        pipe = sl.from_items(range(4 * shards)).shard(shards).map(str).merge().batch(batch)
        with counted_calls(counts):
            assert len([each async for each in pipe]) == 4 * shards // batch

    counts: list[int] = []
    for shards in (FEW, MANY):
        anyio.run(read, shards)
    assert counts[1] < MORE * counts[0]


def test_many_shards_of_shuffled_files_compute_each_place_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(self: Bijection, positions: Positions, of: Callable[..., Positions] = Bijection.__call__) -> Positions:
        computed.append(len(positions))
        return of(self, positions)

    computed: list[int] = []
    for number in range(MANY):
        (tmp_path / f"{number}.txt").touch()
    pipe = sl.read_lines(tmp_path / "*.txt").shuffle_files(seed=1).shard(MANY)
    monkeypatch.setattr(Bijection, "__call__", counted)
    with pipe.open() as stream:
        assert list(stream) == []
    assert computed == [1] * MANY
