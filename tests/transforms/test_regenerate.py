"""Regenerating caches: exact cycles, in bounded memory, resumed by drawing again or from what was written down."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.core.item_codec import Buffer, bytes_of, pack, unpack
from streamline.errors import DataError, PlanError, PlanTypeError, ReadError, ResumeError
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_resume, check_stage
from tests.laws.profile import SEEDS, long_but, sampled
from tests.laws.stages import erratic


def numbers(n: int) -> Pipeline[int]:
    return sl.from_items(range(n))


def cut(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


# Cycles -------------------------------------------------------------------------------------------------------------


def test_each_cycle_is_exactly_its_items_in_an_order_of_its_own() -> None:
    found = cut(list(numbers(30).regenerate(10)), 10)
    assert [sorted(cycle) for cycle in found] == [list(range(start, start + 10)) for start in (0, 10, 20)]
    orders = {tuple(item % 10 for item in cycle) for cycle in found}
    assert len(orders) == 3
    assert found == cut(list(numbers(30).regenerate(10, overlap=True)), 10)
    assert found != cut(list(numbers(30).regenerate(10, seed=1)), 10)


def test_each_serving_has_an_order_of_its_own() -> None:
    found = cut(list(numbers(20).regenerate(10, reuse=3)), 10)
    assert [sorted(serving) for serving in found] == [list(range(10))] * 3 + [list(range(10, 20))] * 3
    assert len({tuple(item % 10 for item in serving) for serving in found}) == 6


def test_a_shard_is_cycled_for_ever_and_shards_are_disjoint() -> None:
    pipe = numbers(10).shard(2, mode="contiguous").repeat().regenerate(4, shuffle=False).take(12).merge()
    found = list(pipe)
    assert found[::2] == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert found[1::2] == [5, 6, 7, 8, 9] * 2 + [5, 6]


def test_the_last_cycle_has_the_rest() -> None:
    found = list(numbers(13).regenerate(5, reuse=2))
    assert sorted(found[20:]) == [10, 10, 11, 11, 12, 12]
    assert list(numbers(0).regenerate(5)) == []


def test_ranks_regenerate_at_the_same_step() -> None:
    """On the count served, never on time: rank 0 and rank 1 begin their third cycle with the same item number."""
    pipe = numbers(40).shard(2, mode="contiguous").regenerate(5).merge()
    for rank in (0, 1):
        with pipe.open(rank=rank, world_size=2) as stream:
            cycles = []
            for _ in range(20):
                next(stream)
                (state,) = stream.snapshot().worker_states
                cycles.append((state["regenerate"]["cycle"], state["regenerate"]["served"]))
        assert cycles == [((n + 1) // 5, (n + 1) % 5) for n in range(20)]


def test_nothing_of_the_next_cycle_is_drawn_before_the_last_item_was_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.core.capacity.QUICK_ITEM_S", 0.0)  # else the channel after it may hold them all
    drawn: list[int] = []

    def draw(item: int) -> int:
        drawn.append(item)
        return item

    pipe = numbers(2000).map(draw).regenerate(600)
    with pipe.open() as stream:
        next(stream)
        time.sleep(0.05)
        assert len(drawn) == 600  # the channel after it holds 512


# Memory -------------------------------------------------------------------------------------------------------------


class Item:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize(("overlap", "cycles"), [(False, 1), (True, 2)])
def test_one_cycle_is_in_memory_or_two(overlap: bool, cycles: int) -> None:
    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    most = 0

    def make(number: int) -> Item:
        nonlocal most
        item = Item(number)
        alive.add(item)
        most = max(most, len(alive))
        return item

    pipe = numbers(3000).map(make).regenerate(500, overlap=overlap).map(lambda item: item.number)
    assert sum(pipe) == sum(range(3000))
    assert most <= cycles * 500
    assert most > (cycles - 1) * 500


@pytest.mark.parametrize(("overlap", "cycles"), [(False, 1), (True, 2)])
def test_rows_are_kept_in_arrays_that_are_used_again(
    overlap: bool, cycles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    empty = np.empty

    def counted(shape: Any, *args: Any, **more: Any) -> Any:
        array = empty(shape, *args, **more)
        made.extend([array.nbytes] * (shape == (500, 100)))
        return array

    blocks = [np.full((50, 100), number, np.float32) for number in range(60)]
    monkeypatch.setattr("streamline.transforms.regenerate_cycle.np.empty", counted)
    found = list(sl.from_items(blocks).regenerate(500, block=100, overlap=overlap))
    assert set(made) == {500 * 100 * 4}
    assert len(made) <= cycles, "for six cycles"
    assert sorted(int(row[0]) for block in found for row in block) == sorted(list(range(60)) * 50)


def test_what_was_handed_out_is_never_overwritten() -> None:
    for shuffle in (True, False):
        blocks = [np.arange(10) + 10 * number for number in range(40)]
        pipe = sl.from_items(blocks).regenerate(20, block=5, shuffle=shuffle, overlap=True)
        kept, copies = [], []
        for block in pipe:
            kept.append(block)
            copies.append(block.copy())
        assert np.array_equal(np.stack(kept), np.stack(copies))
        assert np.array_equal(np.sort(np.concatenate(kept)), np.arange(400))


def test_the_printed_plan_says_how_many_are_held() -> None:
    pipe = numbers(100)
    assert pipe.regenerate(50).max_in_flight - pipe.max_in_flight == 50
    text = str(pipe.regenerate(50, overlap=True, spill="cycles"))
    assert "regenerate(size=50, seed=0, overlap=True, spill='cycles')" in text
    assert pipe.regenerate(50, overlap=True).max_in_flight - pipe.max_in_flight == 100


@pytest.mark.one_in(2)
def test_hosts_serve_the_same(tmp_path: Path, backend: Any) -> None:
    pipe = numbers(14).shard(3).regenerate(3, overlap=True).cache().repeat(2).merge().regenerate(4)
    with pipe.open(backend=backend) as stream:
        first = [next(stream) for _ in range(17)]
        snapshot = stream.snapshot()
    with pipe.open(backend=backend, resume=snapshot) as stream:
        assert first + list(stream) == list(pipe)
    kept = numbers(40).shard(2).map(Model(), name="model").regenerate(3, spill=tmp_path).merge().shuffle(window=30)
    with kept.open(backend=backend) as stream:
        begun = [next(stream) for _ in range(4)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        rest = list(stream)
    assert [len(state["regenerate"]["files"]) for state in snapshot.worker_states] >= [5, 5]
    with kept.open(backend=backend, resume=snapshot) as stream:
        assert [next(stream) for _ in range(26)] == rest[:26]
        assert sorted(number for number, _ in [*begun, *rest]) == list(range(40))


def test_waiting_for_cycles_is_counted() -> None:
    def slow(item: int) -> int:
        time.sleep(0.002)
        return item

    with numbers(20).map(slow).regenerate(10).open() as stream:
        assert len(list(stream)) == 20
        (stage,) = (stage for stage in stream.stats().stages if stage.kind == "regenerate")
    assert stage.items == 20
    assert stage.wait_input_s >= 0.04


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kept", [False, True])
def test_what_was_left_out_is_counted_once(tmp_path: Path, kept: bool) -> None:
    def picky(item: int) -> int:
        if item % 5 == 1:
            raise ValueError(item)
        return item

    pipe = numbers(50).map(picky).regenerate(8, spill=tmp_path if kept else None).cache().repeat(2)
    with pipe.open(on_error="skip") as stream:
        whole = list(stream)
        assert stream.errors.total == 10
    assert sorted(whole) == sorted(2 * [item for item in range(50) if item % 5 != 1])
    for stop in (3, 8, 21, 40, 43, 77):
        with pipe.open(on_error="skip") as stream:
            first = [next(stream) for _ in range(stop)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        with pipe.open(on_error="skip", resume=snapshot) as stream:
            assert first + list(stream) == whole
            assert stream.errors.total == 10


def test_a_journal_and_kept_cycles_are_trimmed_by_the_same_snapshot(tmp_path: Path) -> None:
    async def feed() -> Any:
        for item in range(60):
            yield item

    pipe = sl.from_stream(feed, journal=tmp_path / "journal").regenerate(8, spill=tmp_path / "cycles")
    with pipe.open() as stream:
        for step in range(1, 51):
            next(stream)
            if step % 10 == 0:
                stream.snapshot().save(tmp_path / "ckpt.json")
        rest = list(stream)
    assert not list((tmp_path / "cycles").glob("*.cycle-0.*"))
    with pipe.open(resume=sl.Snapshot.load(tmp_path / "ckpt.json")) as stream:
        assert list(stream)[:6] == rest[:6]  # of the cycle that was being served


def test_what_changes_of_it_survives_a_resume() -> None:
    pipe = numbers(40).regenerate(10)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(4)]
        snapshot = stream.snapshot()
        rest = [next(stream) for _ in range(6)]
    other = numbers(40).regenerate(15, reuse=2, seed=3)
    accept = ["regenerate.size", "regenerate.reuse", "regenerate.seed"]
    with other.open(resume=snapshot, accept=accept) as stream:
        found = list(stream)
    assert found[:6] == rest
    assert sorted(first + found[:6]) == list(range(10))
    assert [sorted(found[6:21]), sorted(found[21:36])] == [list(range(10, 25))] * 2
    with pytest.raises(ResumeError, match="draws the 10 items of cycle 0 again, and passes over the 4 outputs"):
        numbers(40).open(resume=snapshot)


# Rows ---------------------------------------------------------------------------------------------------------------


def rows(number: int) -> dict[str, Any]:
    """Blocks of 0 to 6 rows."""
    count = number * 3 % 7
    ids = np.arange(count) + 100 * number
    return {"id": ids, "parts": (ids.astype(np.float32)[:, None] * np.ones(3, np.float32), ids % 2 == 0)}


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("overlap", [False, True])
def test_rows_of_blocks_of_any_size_resume_exactly(overlap: bool) -> None:
    check_resume(numbers(8).shard(2).map(rows).regenerate(6, block=3, overlap=overlap).merge(), generations=2)


def test_a_block_that_is_larger_than_a_cycle_is_served_over_several() -> None:
    pipe = sl.from_items([np.arange(23), np.arange(23, 31)]).regenerate(4, block=2, shuffle=False)
    assert np.concatenate(list(pipe)).tolist() == list(range(31))
    check_resume(pipe)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([[1, 2]], r"NumPy arrays, or dicts, lists and tuples of them.* got int as block\[0\]"),
        ([{"a": np.zeros(2), "b": np.zeros(3)}], "as many rows in each array, got 2, 3"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], "blocks that are alike"),
        ([{}], "got no array"),
        ([{"a": np.ma.array([1, 2], mask=[True, False])}], "got MaskedArray"),
    ],
)
def test_what_is_no_block_is_an_error(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(sl.from_items(items).regenerate(8, block=2))


def test_options_are_checked_where_they_are_written() -> None:
    pipe: Any = numbers(3)
    with pytest.raises(PlanError, match=r"\.regenerate\(10, block=4\) would end each cycle with a block of 2 rows"):
        pipe.regenerate(10, block=4)
    with pytest.raises(PlanTypeError, match=r"\.regenerate\(overlap=\) is True or False, got int 1"):
        pipe.regenerate(10, overlap=1)
    with pytest.raises(PlanTypeError, match=r"\.regenerate\(spill=\) is the path of a folder, got int 3"):
        pipe.regenerate(10, spill=3)
    with pytest.raises(PlanError, match=r"reuse"):
        pipe.regenerate(10, reuse=0)
    with pytest.raises(PlanError, match=r"`\.regenerate` before `\.shard\(2\)` would run 2 times"):
        pipe.regenerate(2).shard(2)


# Spill --------------------------------------------------------------------------------------------------------------


class Model:
    """A generator that has moved on: it never makes the same item twice."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, number: int) -> tuple[int, int]:
        self.calls += 1
        return number, self.calls


MODEL = Model()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_resume_reads_the_cycle_that_a_model_has_made(tmp_path: Path, overlap: bool) -> None:
    model = Model()
    pipe = numbers(40).map(model, name="model").regenerate(10, reuse=2, spill=tmp_path, overlap=overlap)
    with pipe.open() as stream:
        for served in range(79):
            next(stream)
            text = stream.snapshot().to_json()
            if served in (3, 32, 59):
                with pipe.open(resume=sl.Snapshot.from_json(text)) as other:
                    found = [next(other) for _ in range(79 - served)]
                here = served // 20 * 20 + 20 - served - 1
                whole = sorted(number for number, _ in found[here:])
                assert whole == sorted(2 * list(range(10 * (served // 20 + 1), 40)))[: len(whole)]
                made = {call for _, call in found[:here]}
                assert not made or max(made) <= 40 + 10 * overlap + model.calls


def test_a_spilled_run_and_its_resume_have_the_same_items_of_a_cycle(tmp_path: Path) -> None:
    """With a generator that never makes the same again, at every point inside a cycle."""
    pipe = numbers(30).map(Model(), name="model").regenerate(10, spill=tmp_path)
    for stop in sampled(range(1, 30), 6):
        with pipe.open() as stream:
            first = [next(stream) for _ in range(stop)]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            rest = [next(stream) for _ in range(-stop % 10)]
        with pipe.open(resume=snapshot) as stream:
            assert [next(stream) for _ in range(-stop % 10)] == rest
            more = list(stream)
        assert sorted(number for number, _ in first + rest + more) == list(range(30))


def test_a_stage_that_goes_back_finds_the_files_of_all_that_lies_between(tmp_path: Path) -> None:
    """A window is longer than a cycle here: what a resume reads again must be what was there."""
    source = numbers(40).map(Model(), name="model").regenerate(6, spill=tmp_path)
    pipe = source.shuffle(window=16)
    for stop in (3, 9, 17, 20, 31):
        with pipe.open() as stream:
            for _ in range(stop):
                next(stream)
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            rest = [next(stream) for _ in range(min(-stop % 16, 40 - stop))]
            (own,) = snapshot.worker_states
            assert len(own["regenerate"]["files"]) >= 3
        with pipe.open(resume=snapshot) as stream:
            again = stream.snapshot()
            assert [next(stream) for _ in range(len(rest))] == rest
        with pipe.open(resume=again) as stream:
            assert [next(stream) for _ in range(len(rest))] == rest


@pytest.mark.long
@pytest.mark.parametrize("block", long_but([2], [None, 2]))
def test_spilled_cycles_keep_the_laws(tmp_path: Path, block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # some thousand files: only a power cut would tell

    def made(pipe: Pipeline[Any]) -> Pipeline[Any]:
        if block is None:
            return pipe.regenerate(5, spill=tmp_path)
        return pipe.map(rows).regenerate(6, block=block, overlap=True, spill=tmp_path)

    check_stage(made, range(7), behind_choices=False, generations=1)
    if block is None:
        check_resume(made(numbers(9).map(erratic, concurrency=3, ordered=False)).flat_map(lambda n: [n, n]))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cycle_is_durable_before_its_first_item_is_handed_out(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps what was synced, file and name: nothing else that a test can kill would notice."""
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", noted)
    with numbers(6).regenerate(2, spill=tmp_path, overlap=overlap).open() as stream:
        for at, _ in enumerate(stream):
            assert sum(path.startswith(f"{tmp_path}/") for path in synced) > at // 2
            assert synced.count(str(tmp_path)) > at // 2


def test_the_rows_that_a_cycle_had_no_room_for_are_in_its_file(tmp_path: Path) -> None:
    def block(number: int) -> Any:
        return np.arange(7) * 1000 + model(number)[1]

    model = Model()
    pipe = numbers(6).map(block).regenerate(4, block=2, spill=tmp_path, shuffle=False)
    with pipe.open() as stream:
        first = [next(stream), next(stream)]  # a cycle: 4 rows of 7
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        rest = next(stream)
    with pipe.open(resume=snapshot) as stream:
        assert np.array_equal(next(stream), rest)
    assert first[0][0] == rest[0] % 1000


def test_saving_a_snapshot_removes_what_only_earlier_ones_need(tmp_path: Path) -> None:
    folder = tmp_path / "cycles"
    pipe = numbers(200).shard(2).regenerate(10, spill=folder).merge()
    saved = []
    with pipe.open() as stream:
        for step in range(1, 161):
            next(stream)
            if step % 35 == 0:
                snapshot = stream.snapshot()
                snapshot.save(tmp_path / f"{step}.json")
                saved.append(snapshot)
                there = {path.name for path in folder.glob("*.cycle")}
                for kept in saved[-2:]:
                    assert {name for own in kept.worker_states for name in own["regenerate"]["files"]} <= there
                passed = {name for name in there if int(name.split("cycle-")[1].split(".")[0]) < (step - 72) // 20 - 1}
                assert not passed
    for path in sorted(tmp_path.glob("*.json"), key=lambda path: int(path.stem))[-2:]:
        with pipe.open(resume=sl.Snapshot.load(path)) as stream:
            assert len(list(stream)) == 200 - int(path.stem)
    early, message = sl.Snapshot.load(tmp_path / "35.json"), r"can't be read from .*cycle-1\..* resume a later one"
    with pytest.raises(ResumeError, match=message), pipe.open(resume=early) as stream:
        list(stream)


def mixed(part: Pipeline[Any], _: Path) -> Pipeline[Any]:
    return sl.mix({"a": part, "b": part}, weights={"a": 1, "b": 1}, seed=1).shard(2).merge().shuffle(window=5)


def in_a_row(part: Pipeline[Any], folder: Path) -> Pipeline[Any]:
    return sl.concat(part, part).shard(2).regenerate(10, spill=folder).merge()


def nested(part: Pipeline[Any], _: Path) -> Pipeline[Any]:
    return sl.zip(part, sl.mix({"a": part}, weights={"a": 1}, seed=1)).map(str).repeat(2)


@pytest.mark.parametrize("several", long_but([nested], [mixed, in_a_row, nested]))
def test_saving_a_snapshot_removes_what_components_need_no_more(tmp_path: Path, several: Any) -> None:
    folder = tmp_path / "cycles"
    pipe = several(numbers(100).regenerate(10, spill=folder), folder)
    with pipe.open() as stream:
        got = []
        for step, item in enumerate(stream, 1):
            got.append(item)
            if step % 35 == 0:
                stream.snapshot().save(tmp_path / f"{step}.json")
    assert len(list(folder.glob("*.cycle"))) <= 12
    for step in (140, 175):
        with pipe.open(resume=sl.Snapshot.load(tmp_path / f"{step}.json")) as stream:
            assert list(stream) == got[step:]


def test_a_damaged_file_is_never_served(tmp_path: Path) -> None:
    pipe = numbers(30).map(lambda n: np.full(4, n)).regenerate(10, spill=tmp_path)
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    (name,) = snapshot.worker_states[0]["regenerate"]["files"]
    content = (tmp_path / name).read_bytes()
    dice = random.Random(0)
    for _ in range(30):
        at = dice.randrange(len(content))
        for bad in (content[:at], content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]):
            (tmp_path / name).write_bytes(bad)
            with pytest.raises(ResumeError, match=r"cut short|damaged"), pipe.open(resume=snapshot) as stream:
                list(stream)
    (tmp_path / name).write_bytes(content + b"x")
    with pytest.raises(ResumeError, match="damaged"), pipe.open(resume=snapshot) as stream:
        list(stream)


def test_what_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"spill=\) writes down .* got object: turn it into"):
        list(numbers(3).map(lambda n: object()).regenerate(2, spill=tmp_path))
    for odd in (np.ma.masked_array([1.0], [True]), np.zeros(2, "i4, i2")[["f1", "f0"]]):  # a mask would be lost, say
        with pytest.raises(DataError, match=r"spill=\) writes down .* got (an array of .*|MaskedArray): turn it into"):
            list(sl.from_items([odd]).regenerate(1, spill=tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadError, match=r"can't keep a cycle in .*needs a folder"):
        list(numbers(3).regenerate(2, spill=tmp_path / "file"))


def test_a_spilled_snapshot_needs_its_folder(tmp_path: Path) -> None:
    pipe = numbers(30).regenerate(10, spill=tmp_path)
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    other, message = numbers(30).regenerate(10), r"kept in a folder, in .*: resume it with \.regenerate\(spill=\)"
    with pytest.raises(ResumeError, match=message), other.open(resume=snapshot) as stream:
        next(stream)


def test_what_is_written_down_comes_back_as_it_was() -> None:
    dtype = np.dtype([("a", "<i4", (2,)), ("b", "<f8")])
    padded = np.dtype([(("title", "a"), "i1"), ("b", [("é", "<f8", (2,)), ("c", "i1")])], align=True)
    values: list[Any] = [
        None, True, 1, 2**80, -1.5, "ü", b"\0x", (1, [2, (3,)]), {"a": 1, 3: None}, [],
        np.arange(6).reshape(2, 3).T, np.zeros((0, 3)), np.array(4.5), np.float32(1.5), np.array(["ab", "c"]),
        np.array(["2020-01-01"], "datetime64[D]"), np.zeros(2, dtype), {"x": (np.ones(2), "l")},
        np.zeros(2, padded), np.zeros(2, padded)[0], {"a\0b\udcff": 1, 2.5: 2, "": 3},
    ]  # fmt: skip
    for value in values:
        buffers: list[Buffer] = []
        form = json.loads(json.dumps(pack(value, buffers, "")))
        rest = memoryview(b"".join(map(bytes_of, buffers)))

        def read(buffer: memoryview) -> None:
            nonlocal rest
            buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]

        found = unpack(form, read)
        assert type(found) is type(value)
        assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
        assert not rest
        np.testing.assert_equal(found, value)


KILLED = """
import sys
import numpy as np
import streamline as sl

folder = sys.argv[1]

def model(number):
    return np.append(np.random.default_rng().random(2000), number)  # never the same again

pipe = sl.from_items(range(40)).repeat().map(model).regenerate(64, spill=folder + "/cycles", overlap=True)
snapshot = sl.Snapshot.load(folder + "/ckpt.json", missing_ok=True)
begin = 0 if snapshot is None else snapshot.produced[0]
with pipe.open(resume=snapshot) as stream:
    for step, item in enumerate(stream, begin):
        print(step, item[0], int(item[-1]), flush=True)
        if step % 10 == 9:
            stream.snapshot().save(folder + "/ckpt.json")
"""


@pytest.mark.long
def test_a_run_that_is_killed_anywhere_goes_on_from_its_last_snapshot(tmp_path: Path) -> None:
    dice, runs = random.Random(), list[dict[int, list[str]]]()
    for _ in range(1 + len(SEEDS)):
        with (tmp_path / "log").open("w") as log:
            command = [sys.executable, "-c", KILLED, str(tmp_path)]
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE)
            try:
                while "\n" not in (tmp_path / "log").read_text() and child.poll() is None:
                    time.sleep(0.01)
                time.sleep(0.1 * dice.random())
            finally:
                child.send_signal(signal.SIGKILL)
                _, errors = child.communicate()
        assert child.returncode == -signal.SIGKILL, errors.decode()
        told = (tmp_path / "log").read_text().rpartition("\n")[0].splitlines()
        runs.append({int(line.split()[0]): line.split() for line in told})
    for before, after in pairwise(runs):
        begin = min(after)
        assert before.keys() >= set(range(min(before), begin))
        cycle = [step for step in after if begin % 64 and step // 64 == begin // 64]  # of which the model made others
        assert all(after[step] == before[step] for step in cycle if step in before)
    delivered = {step: line for run in runs for step, line in run.items()}
    for number in range(max(delivered) // 64):
        drawn = sorted(int(delivered[step][2]) for step in range(64 * number, 64 * number + 64))
        assert drawn == sorted(item % 40 for item in range(64 * number, 64 * number + 64))
