"""A snapshot with any one value changed is refused by its own errors, or harmless: never a raw error, never a hang."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.core.state import Json
from streamline.errors import ResumeError, SnapshotError, StreamlineError
from streamline.pipeline import Pipeline
from streamline.snapshot.file_format import complete_set, encode
from streamline.snapshot.inspection import report
from tests.snapshot.functions import later, noisy, size_of, tokens, twice

Place = tuple[Any, ...]

GONE = object()

VALUES: tuple[Json, ...] = ("x", None, -1, True, 10**19, 1.5, [], {}, [1], {"a": 1}, 2**62, GONE)


async def fed() -> Any:
    for n in range(8):
        yield n


@sl.stage(state=dict)
async def summed(items: Any, *, state: dict[str, int]) -> Any:
    async for item in items:
        state["sum"] = 1
        yield item


def lines_of(folder: Path) -> Pipeline[Any]:
    for name in "ab":
        (folder / f"{name}.txt").write_text("".join(f"{n}\n" for n in range(6)))
    return sl.read_lines([folder / "a.txt", folder / "b.txt"])


def rows_of(folder: Path) -> Pipeline[Any]:
    np.save(folder / "a.npy", np.arange(9))
    return sl.read_npy([folder / "a.npy"])


ROWS = sl.from_items(range(12))
PLANS: dict[str, Callable[[Path], Pipeline[Any]]] = {
    "choosing": lambda _: ROWS.shard(2).map(later, concurrency=2, ordered=False).flat_map(twice).merge("best_effort")
    .shuffle(window=4),
    "timed": lambda _: ROWS.shard(2).shuffle(window=3).merge().batch(2, collate=None, max_wait_s=60).unbatch().take(9),
    "bucket": lambda _: ROWS.shuffle().shard(2).map(noisy, seed=1)
    .bucket_by_length([1], 3, length=size_of, collate=None).merge().skip(1),
    "cache": lambda _: ROWS.shard(2).cache().repeat(2).merge().repeat(2),
    "regenerate": lambda _: ROWS.regenerate(4, reuse=2).merge().regenerate(3),
    "pack": lambda _: ROWS.map(tokens).pack(4),
    "through": lambda _: ROWS.shard(2).through(summed).merge().take(9),
    "mix": lambda folder: sl.mix({"a": ROWS.shuffle(), "b": lines_of(folder)}).shuffle(window=3).repeat(2),
    "zip": lambda folder: sl.zip(sl.from_iterable(lambda: iter(range(9))), rows_of(folder)),
    "lines in turn": lambda folder: lines_of(folder).shard(1, mode="file", interleave=2),
    "live": lambda _: sl.from_stream(fed),
}  # fmt: skip


def places(tree: Json, at: Place = ()) -> Iterator[Place]:
    """Yield where all values of a tree are."""
    yield at
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from places(child, (*at, key))


def changed(text: str, at: Place, value: Json) -> str:
    """Return the text of a tree with another value at one place, or none."""
    tree = json.loads(text)
    node = tree
    for key in at[:-1]:
        node = node[key]
    if value is GONE:
        del node[at[-1]]
    else:
        node[at[-1]] = value
    return json.dumps(tree)


def taken(pipe: Pipeline[Any]) -> sl.Snapshot:
    with pipe.open() as stream:
        for _ in range(3):
            next(stream)
        return stream.snapshot()


def tried(pipe: Pipeline[Any], text: str, *, read: bool) -> bool:
    """Do with a snapshot's text all that is done with one; return whether it opens. No error but streamline's."""
    try:
        snapshot = sl.Snapshot.from_json(text)
    except SnapshotError:
        return False
    try:
        report(snapshot)
        fits = pipe.explain(snapshot).fits
        opened = pipe.open(resume=snapshot)
    except (SnapshotError, ResumeError):
        return False
    assert fits
    if read:
        try:
            with opened as stream:
                for _ in islice(stream, 100):
                    pass
        except StreamlineError:
            return False
    return True


@pytest.mark.one_in(7, 5)
@pytest.mark.filterwarnings("ignore::streamline.errors.CodeChangedWarning")
@pytest.mark.parametrize("name", PLANS)
def test_any_value_of_a_snapshot_that_is_changed_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    pipe = PLANS[name](tmp_path)
    text = taken(pipe).to_json()
    assert tried(pipe, text, read=True)
    found = [at for at in places(json.loads(text)) if at and at[0] in ("state", "journal", "num_shards", "listing")]
    opened = 0
    for number, at in enumerate(found):
        for turn in range(3):  # all of them together are 10,000 snapshots
            value = VALUES[(number + 4 * turn) % len(VALUES)]
            opened += tried(pipe, changed(text, at, value), read=number % 4 == 0)
    assert opened < len(found), "of three values, less than one is the type and in the range of what was there"


@pytest.mark.parametrize("shards", [10**19, 2**62])
def test_a_sealed_snapshot_that_says_any_number_of_shards_is_refused_at_once(shards: int, tmp_path: Path) -> None:
    body = json.loads(taken(ROWS.shard(2)).to_json())
    path = tmp_path / "snapshot.json"
    path.write_bytes(encode({**body, "num_shards": shards}))
    with pytest.raises(SnapshotError, match=r"num_shards|expected 4,611,686,018,427,387,904 workers"):
        sl.Snapshot.load(path)


def test_a_directory_with_a_file_of_any_number_of_ranks_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / f"rank-00001-of-{10**19}.json").write_text("{}")
    with pytest.raises(SnapshotError, match=r"of 10{19} ranks, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 9{17}89 more"):
        complete_set(tmp_path)


def test_ranges_that_no_stage_keeps_are_refused_before_they_are_made_sets_of() -> None:
    pipe = ROWS.map(later, concurrency=2, ordered=False).shuffle(window=2)
    text = taken(pipe).to_json()
    place = ("state", "merge", "workers", "0", "later", "done")
    for ranges in ([[0, 2**62]], [[3, 2]], [[0, 2], [1, 4]], [[0, 1, 2]]):
        with pytest.raises(SnapshotError, match=r"state of 'later' in shard 0: .*(Expected|range)"):
            pipe.open(resume=sl.Snapshot.from_json(changed(text, place, ranges)))


def test_a_place_behind_the_end_is_refused() -> None:
    pipe = ROWS.shard(2)
    text = taken(pipe).to_json()
    with pytest.raises(SnapshotError, match="'items' in shard 1: it has read 7 of 6 items"):
        pipe.open(resume=sl.Snapshot.from_json(changed(text, ("state", "merge", "workers", "1", "items"), 7)))
