"""What `explain` says is so: its numbers are compared with the calls that a resume makes."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.pipeline import Pipeline
from streamline.transforms.base import Stage, stage_class

CALLS: Counter[Any] = Counter()


def seen(x: Any) -> Any:
    CALLS[x] += 1
    return x


async def seen_later(x: Any) -> Any:
    CALLS[x] += 1
    return x


def pair(x: int) -> list[int]:
    CALLS[x] += 1
    return [x, x + 1000]


@sl.stage(state=dict, snapshot_every=4)
async def counted(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
    async for x in items:
        state["n"] = state.get("n", 0) + 1
        yield x
        yield -x


async def undeclared(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for x in items:
        yield x


def stop(pipe: Pipeline[Any], take: int) -> tuple[list[Any], sl.Snapshot]:
    with pipe.open() as stream:
        head = [next(stream) for _ in range(take)]
        return head, sl.Snapshot.from_json(stream.snapshot().to_json())


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1].replace(",", "")) if found else 0


def resumed(pipe: Pipeline[Any], snapshot: sl.Snapshot) -> list[Any]:
    CALLS.clear()
    with pipe.open(resume=snapshot) as stream:
        return list(stream)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("take", range(31))
def test_a_window_shuffle_computes_again_what_it_says(take: int) -> None:
    pipe = sl.from_items(range(30)).map(seen).shuffle(window=8)
    head, snapshot = stop(pipe, take)
    text = str(pipe.explain(snapshot))
    again, delivered = number(r"reads the (\d+) items", text), number(r"passes over the (\d+) of them", text)
    rest = resumed(pipe, snapshot)
    assert sorted(head + rest) == list(range(30))
    assert sum(CALLS.values()) == len(rest) + delivered
    assert sum(CALLS[x] for x in head) == delivered
    assert again == (0 if take % 8 == 0 or take == 30 else min(8, 30 - take // 8 * 8))
    assert ("before it, seen computes them again" in text) is (delivered > 0)
    assert ("nothing that was delivered is computed again" in text) is (delivered == 0)


@pytest.mark.parametrize("take", range(13))
def test_a_flat_map_unfolds_one_input_again_where_it_says_so(take: int) -> None:
    pipe = sl.from_items(range(6)).flat_map(pair)
    head, snapshot = stop(pipe, take)
    text = str(pipe.explain(snapshot))
    rest = resumed(pipe, snapshot)
    assert len(head) + len(rest) == 12
    again = sum(CALLS[x] for x in head if x < 1000)
    assert again == ("unfolds one input again" in text)
    assert bool(number(r"passes over the (\d+) outputs", text)) == again


@pytest.mark.one_in(3)
@pytest.mark.parametrize("take", range(0, 41, 3))
def test_a_custom_stage_takes_again_what_it_says(take: int) -> None:
    pipe = sl.from_items(range(20)).map(seen).through(counted)
    head, snapshot = stop(pipe, take)
    text = str(pipe.explain(snapshot))
    inputs, outputs = number(r"takes (\d+) inputs again", text), number(r"over the (\d+) outputs", text)
    rest = resumed(pipe, snapshot)
    assert len(head) + len(rest) == 40
    taken = {abs(x) for x in head}
    assert sum(CALLS[x] for x in taken) == inputs <= 4
    assert outputs <= 8


def test_an_undeclared_stage_takes_everything_again() -> None:
    with pytest.warns(UserWarning, match="from its start"):
        pipe = sl.from_items(range(20)).map(seen).through(undeclared)
    _, snapshot = stop(pipe, 13)
    assert "undeclared: takes 13 inputs again, and passes over the 13 outputs" in str(pipe.explain(snapshot))
    assert resumed(pipe, snapshot) == list(range(13, 20))
    assert sum(CALLS[x] for x in range(13)) == 13


def test_an_unordered_map_passes_over_what_is_done() -> None:
    own = {"done": [[1, 3], [5, 6]], "replay": [7, 0]}
    pipe = sl.from_items(range(10)).map(seen_later, concurrency=4, ordered=False)
    _, snapshot = stop(pipe, 0)
    body = json.loads(snapshot.to_json())
    body["state"]["merge"]["workers"]["0"]["seen_later"] = own
    snapshot = sl.Snapshot.from_json(json.dumps(body))
    text = str(pipe.explain(snapshot))
    assert "reads 3 inputs again that are done, and passes over them" in text
    assert "completes 2 inputs first that had been chosen" in text
    assert sorted(resumed(pipe, snapshot)) == [0, 3, 4, 6, 7, 8, 9]
    assert not CALLS.keys() & {1, 2, 5}


def test_stages_behind_the_merge_and_the_merges_choices_have_lines_of_their_own() -> None:
    pipe = sl.from_items(range(40)).shard(2).map(seen).merge("best_effort").shuffle(window=10)
    _, snapshot = stop(pipe, 14)
    lines = str(pipe.explain(snapshot)).splitlines()
    at = lines.index("after the merge:")
    assert lines[at + 1] == "  merge: takes 10 items again, in the order in which it took them before"
    assert "passes over the 4 of them that were delivered; before it, seen computes them again" in lines[at + 2]
    assert sum(line.endswith("nothing that was delivered is computed again") for line in lines) == 2
    rest = resumed(pipe, snapshot)
    assert sum(CALLS.values()) == len(rest) + 4


def test_files_are_sought_in_or_decompressed_up_to_the_place(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(50))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.gz").write_bytes(gzip.compress(text.encode()))
    for name, how in (("a.txt", "seeks"), ("b.gz", "decompresses 70 bytes to get there")):
        pipe = sl.read_lines(tmp_path / name)
        _, snapshot = stop(pipe, 10)
        assert f"shard 0, next: reads on at {tmp_path / name}, line 10, byte 70 ({how})" in str(pipe.explain(snapshot))
        _, begin = stop(pipe, 0)
        assert f"{name}, line 0, byte 0\n" in str(pipe.explain(begin))


def test_an_iterable_is_iterated_up_to_the_place() -> None:
    asked: list[int] = []

    def numbers() -> Iterator[int]:
        for x in range(1000):
            asked.append(x)
            yield x

    pipe = sl.from_iterable(numbers)
    _, snapshot = stop(pipe, 17)
    assert "reads on at item 17, iterated to from the start" in str(pipe.explain(snapshot))
    asked.clear()
    assert resumed(pipe, snapshot) == list(range(17, 1000))
    assert asked == list(range(1000))


def test_a_snapshot_that_does_not_fit_is_explained_and_not_raised() -> None:
    _, snapshot = stop(sl.from_items(range(10)).batch(2, collate=None), 1)
    explained = sl.from_items(range(10)).batch(3, collate=None).explain(snapshot)
    assert not explained.fits
    assert 'accept=["batch.size"]: ' in str(explained)
    assert repr(explained) == str(explained)


def test_code_that_has_changed_is_said() -> None:
    def pipe(sign: int) -> Pipeline[int]:
        return sl.from_items(range(4)).map((lambda x: x) if sign > 0 else (lambda x: -x), name="sign")

    _, snapshot = stop(pipe(1), 2)
    assert "changed code: sign (fn=" in str(pipe(-1).explain(snapshot))
    assert "changed code" not in str(pipe(1).explain(snapshot))


def test_a_whole_jobs_snapshot_is_explained_rank_by_rank(tmp_path: Path) -> None:
    pipe = sl.from_items(range(20)).shard(4)
    for rank in range(2):
        with pipe.open(rank=rank, world_size=2) as stream:
            next(stream)
            stream.snapshot().save(tmp_path)
    lines = str(pipe.explain(sl.Snapshot.load(tmp_path))).splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 0, rank 0 of 2",
        "epoch 0, rank 1 of 2",
    ]
    assert [re.findall(r"^shard (\d)", line)[0] for line in lines if line.startswith("shard")] == ["0", "2", "1", "3"]


def test_a_wrong_name_is_an_error() -> None:
    pipe = sl.from_items(range(4)).batch(2)
    _, snapshot = stop(pipe, 1)
    with pytest.raises(PlanError, match=r"did you mean 'batch\.size'"):
        pipe.explain(snapshot, accept=["batch.sise"])


def test_every_kind_of_stage_can_be_asked() -> None:
    """Of two classes that share a kind, the options say which it is."""
    options: dict[str, dict[str, Any]] = {"Shuffle": {"window": 1}, "ConcurrentMap": {"ordered": False}}

    def classes(cls: type[Stage[Any, Any]]) -> Iterator[type[Stage[Any, Any]]]:
        for sub in cls.__subclasses__():
            yield from (sub, *classes(sub))

    own = [
        cls for cls in classes(Stage) if cls.__module__.startswith(("streamline.transforms.", "streamline.transfer."))
    ]
    assert len(own) > 15
    for cls in own:
        assert stage_class(cls.kind, options.get(cls.__name__, {})) is cls
    assert stage_class("unheard_of", {}) is Stage


def test_a_class_that_names_no_kind_is_called_after_itself() -> None:
    class TwiceOver(Stage[Any, Any]):
        pass

    class Renamed(TwiceOver):
        kind = "twice_over_again"

    assert (TwiceOver.kind, str(TwiceOver(name="x"))) == ("twice_over", "twice_over(x)")
    assert stage_class("twice_over", {}) is TwiceOver
    assert stage_class("twice_over_again", {}) is Renamed


def test_feeds_and_custom_sources_say_where_they_read_on() -> None:
    async def feed() -> AsyncIterator[int]:
        for item in range(9):
            yield item

    @sl.source(state=dict)
    def rows(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        for item in range(state.get("next", 0), 9):
            state["next"] = item + 1
            yield item

    live, own = sl.from_stream(feed), rows()
    assert "reads on at item 2 of those that it is handed, the journal's first" in str(live.explain(stop(live, 2)[1]))
    assert 'reads on at what its dict says, {"next": 2}' in str(own.explain(stop(own, 2)[1]))
    assert "reads on at the beginning" in str(own.explain(stop(own, 0)[1]))


def test_only_a_snapshot_is_explained() -> None:
    pipe: Any = sl.from_items([1])
    with pytest.raises(PlanTypeError, match=r"explain\(snapshot\) is a Snapshot.*sl.Snapshot.load\('ckpt/'\)"):
        pipe.explain("ckpt/")


def test_one_is_not_many() -> None:
    pipe = sl.from_items(range(1))
    _, snapshot = stop(pipe, 1)
    assert "continues after 1 item of the workers" in str(pipe.explain(snapshot))
