"""Stages that keep much between two items, and sources of several parts, in threads and in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume
from tests.laws.profile import in_turn, mostly_long
from tests.laws.stages import ORDERED, STAGES, noisy, packed, plus

KEEPING = ("regenerate", "cache", "repeat of a cache", "pack", "bucket", "transfer")

ITEMS = 7


@pytest.fixture(scope="module", params=["threads", "processes"])
def hosts(request: pytest.FixtureRequest, processes: Backend) -> Iterator[Backend]:
    with sl.Threads(2) as threads:
        list(numbers(2).shard(2).open(backend=threads).sync_stream())  # up before a test begins: they are no leak
        yield threads if request.param == "threads" else processes


def numbers(length: int, start: int = 0) -> Pipeline[int]:
    return sl.from_items(range(start, start + length))


def data_set(length: int) -> Pipeline[int]:
    return sl.from_iterable(sl.StreamDataset(lambda: range(length)))


SOURCES: dict[str, Callable[[], Pipeline[Any]]] = {
    "mix": lambda: sl.mix({"a": numbers(5).cache().repeat(2), "b": numbers(4, 100).regenerate(2)}, {"a": 1, "b": 3}),
    "mix in shards": lambda: sl.mix([data_set(7), numbers(6, 100).map(plus)], seed=3).shard(3),
    "mix until the first ends": lambda: sl.mix([numbers(5).filter(bool), numbers(9, 100)], stop="first").shard(2),
    "zip": lambda: sl.zip(numbers(8).shuffle(window=3), numbers(20, 100).filter(lambda item: item % 3 == 0)),
    "zip in shards": lambda: sl.zip(numbers(9), numbers(7, 100).map(noisy, seed=2)).shard(3),
    "data set": lambda: data_set(11).shard(2),
    "a mixture, kept and packed": lambda: (
        sl.mix([numbers(4), numbers(5, 50)]).shard(2).cache().repeat(2).map(lambda item: [item] * 2).pack(3).map(packed)
    ),
}


def on_hosts(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("name", "hosts"), mostly_long(in_turn(names, ["threads", "processes"]), 3), indirect=["hosts"]
    )


@pytest.mark.one_in(3, 1)
@on_hosts(name for name in (*STAGES, *ORDERED) if name.startswith(KEEPING) and "again" not in name)
def test_a_stage_that_keeps_items_resumes_exactly_on_hosts(name: str, hosts: Any) -> None:
    stage = STAGES.get(name) or ORDERED[name]
    check_resume(stage(numbers(ITEMS).shard(2)), backend=hosts, generations=1)


@pytest.mark.one_in(3)
@on_hosts(SOURCES)
def test_a_source_of_several_parts_resumes_exactly_on_hosts(name: str, hosts: Any) -> None:
    check_resume(SOURCES[name](), backend=hosts, generations=1)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_spilled_cycles_resume_exactly_on_hosts(overlap: bool, tmp_path: Path, hosts: Any) -> None:
    pipe = numbers(ITEMS).shard(2).regenerate(2, overlap=overlap, spill=tmp_path)
    check_resume(pipe, backend=hosts, generations=1)
