"""What `stats()` tells of a `.regenerate`: where it is, what was drawn, and how long that took; in any backend."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.figures import StageStats
from streamline.pipeline import Pipeline
from streamline.transforms import regenerate
from streamline.transforms import regenerate as drawing
from tests.copying_backend import Copying, HostDeath

KINDS = ("plain", "overlap", "spill", "block")
WHERE: list[tuple[str, Backend]] = [
    *((kind, backend) for kind in KINDS for backend in (sl.Inline(), sl.Threads(2), Copying(2))),
]


def numbers(n: int) -> Pipeline[int]:
    return sl.from_items(range(n))


def stage_of(stream: Any) -> StageStats:
    found: StageStats = next(stage for stage in stream.stats().stages if stage.kind == "regenerate")
    return found


def told(stage: StageStats) -> tuple[float, ...]:
    """Cycle, served, of, reuse, drawn: what doesn't depend on time."""
    return tuple(stage.detail(name) for name in ("cycle", "served", "of", "reuse", "drawn"))


def rows(number: int) -> Any:
    return np.full((3, 2), number)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "backend"), WHERE, ids=lambda one: one if isinstance(one, str) else type(one).__name__
)
def test_after_the_end_it_is_in_the_last_cycle_wherever_it_ran(kind: str, backend: Backend, tmp_path: Path) -> None:
    """Two shards of 11 items, in cycles of 4, 4, 3; in blocks, of 30 rows, in cycles of 12, 12, 6, by 4."""
    pipe: Pipeline[Any] = numbers(22).shard(2)
    if kind == "block":
        pipe = numbers(20).shard(2).map(rows).regenerate(12, reuse=2, block=4)
    else:
        spill = str(tmp_path) if kind == "spill" else None
        pipe = pipe.regenerate(4, reuse=2, overlap=kind == "overlap", spill=spill)
    with pipe.merge().open(backend=backend) as stream:
        list(stream)
    stage = stage_of(stream)
    outputs = 4 if kind == "block" else 6
    assert told(stage) == (2, 2 * outputs, 2 * outputs, 2, 6)
    assert stage.detail("generating_s") > 0
    assert stage.detail("waited_s") > 0
    assert [told_of.details[:5] for told_of in stage.per_worker] == [stage.per_worker[0].details[:5]] * 2
    assert stage.per_worker[0].details[4].value == 3
    assert "regenerate  cycle  served  of  reuse  drawn  generating  waited" in str(stream.stats())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("at", [0, 3, 8, 13, 19])
def test_after_a_resume_the_cycle_goes_on_and_drawn_are_those_that_were_drawn_again(
    at: int, spilled: bool, tmp_path: Path
) -> None:
    pipe = numbers(10).regenerate(4, reuse=2, spill=str(tmp_path) if spilled else None)
    with pipe.open() as stream:
        for _ in range(at):
            next(stream)
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        list(stream)
    with pipe.open(resume=snapshot) as stream:
        assert len(list(stream)) == 20 - at
        drawn = 3 - at // 8 - (spilled and at % 8 > 0)
        assert told(stage_of(stream)) == (2, 4, 4, 2, drawn)


def test_what_a_host_drew_before_its_death_is_drawn_again_and_counts_again() -> None:
    pipe = numbers(12).regenerate(4)
    with pipe.open(backend=Copying(1, (HostDeath(0, received=6),), max_restarts=3)) as stream:
        assert len(list(stream)) == 12
        cycle, served, of, reuse, drawn = told(stage_of(stream))
    assert (cycle, served, of, reuse) == (2, 4, 4, 1)
    assert drawn >= 2


def test_passes_after_it_add_up_what_was_drawn() -> None:
    with numbers(8).regenerate(4).repeat(3).open() as stream:
        assert len(list(stream)) == 24
        assert told(stage_of(stream)) == (1, 4, 4, 1, 6)


@pytest.mark.parametrize("overlap", [False, True])
def test_seconds_are_those_of_drawing_and_of_having_nothing_to_serve(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def drawn(item: int) -> int:
        nonlocal now
        now += 2.0
        return item

    for module in (drawing, regenerate):
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    with numbers(12).map(drawn).regenerate(4, overlap=overlap).open() as stream:
        list(stream)
    stage = stage_of(stream)
    assert stage.detail("generating_s") == 24.0
    assert stage.detail("waited_s") <= 24.0
    if not overlap:
        assert stage.detail("waited_s") == 24.0


def test_seconds_are_counted_while_a_cycle_is_being_drawn() -> None:
    """A cycle that a model makes may take an hour."""
    seen: list[float] = []
    opened = threading.Event()

    def look(item: int) -> int:
        opened.wait(200)
        found = [stage for stage in stream.stats().stages if stage.kind == "regenerate"]
        seen.append(found[0].detail("generating_s"))
        return item

    with numbers(2000).map(look).regenerate(2000).open() as stream:
        opened.set()
        next(stream)
    assert seen[0] == 0.0
    assert 0 < seen[-1] <= stage_of(stream).detail("generating_s")


def test_no_items_are_kept_for_it() -> None:
    """The meter stays as long as the stream; a cycle doesn't."""

    class Item:
        pass

    alive: weakref.WeakSet[Item] = weakref.WeakSet()

    def make(_: int) -> Item:
        alive.add(item := Item())
        return item

    with numbers(40).map(make).regenerate(10, overlap=True).map(id).open() as stream:
        list(stream)
    gc.collect()
    assert not alive
    assert stage_of(stream).detail("drawn") == 4
