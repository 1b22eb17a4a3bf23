"""Snapshots: exact through JSON, and an error that says which entry for everything else."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, SnapshotError
from streamline.snapshot.file_format import FORMAT_VERSION
from streamline.snapshot.snapshot import WRITTEN_FIELDS, Snapshot


def make(rank: int = 0, world_size: int = 1, num_shards: int = 3) -> Snapshot:
    shards = range(rank, num_shards, world_size)
    own = {
        "next_worker": len(shards) - 1,
        "produced": {str(shard): 10 * shard for shard in shards},
        "replay": [],
        "workers": {
            str(shard): {"rows": {"file": f"ä{shard}.jsonl", "byte": 2**40 + shard}, "map": shard} for shard in shards
        },
    }
    return Snapshot(
        version=FORMAT_VERSION,
        fingerprint=[{"kind": "read_jsonl", "name": "rows", "options": {"size": 32, "ratio": 0.1}}],
        listing=[{"path": "ä0.jsonl", "size": 500}],
        epoch=1,
        rank=rank,
        world_size=world_size,
        num_shards=num_shards,
        state={"merge": own, "take": 17},
        merge="merge",
    )


def body(snapshot: Snapshot | None = None) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((snapshot or make()).to_json())
    return tree


# What is in it


def test_its_parts_are_read_out_of_the_merges_state() -> None:
    snapshot = make(rank=1, world_size=2, num_shards=5)
    assert list(snapshot.shards) == [1, 3]
    assert snapshot.next_worker == 1
    assert snapshot.produced == [10, 30]
    assert [state["map"] for state in snapshot.worker_states] == [1, 3]
    assert snapshot.stages == {"take": 17}
    assert repr(snapshot) == "<Snapshot: epoch 1, rank 1 of 2, 40 items merged>"


def test_it_can_not_be_assigned_to() -> None:
    snapshot = make()
    with pytest.raises(FrozenInstanceError):
        snapshot.epoch = 3  # type: ignore[misc]
    assert not hasattr(snapshot, "__dict__")


# Through JSON

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters())  # also half a surrogate pair, as in a file name that isn't UTF-8
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TEXT, lambda children: st.lists(children) | st.dictionaries(TEXT, children), max_leaves=12
)
OBJECTS = st.dictionaries(TEXT, TREES, max_size=4)
SIZE = st.integers(1, 5)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    world_size, num_shards = draw(SIZE), draw(SIZE)
    rank = draw(st.integers(0, world_size - 1))
    here = [str(shard) for shard in range(rank, num_shards, world_size)]
    own = {
        "next_worker": draw(st.integers(0, max(len(here) - 1, 0))),
        "produced": {shard: draw(st.integers(0)) for shard in here},
        "workers": {shard: draw(OBJECTS) for shard in here},
        "replay": draw(st.lists(st.integers(0, 9))),
    }
    merge = draw(TEXT)
    return Snapshot(
        version=FORMAT_VERSION,
        fingerprint=draw(st.lists(OBJECTS, max_size=3)),
        listing=draw(st.none() | OBJECTS | st.lists(OBJECTS, max_size=3)),
        epoch=draw(st.integers(0)),
        rank=rank,
        world_size=world_size,
        num_shards=num_shards,
        state={**draw(OBJECTS), merge: own},
        merge=merge,
    )


def exactly(snapshot: Snapshot) -> str:
    """Tell apart what `==` doesn't: 1, 1.0 and True; 0.0 and -0.0."""
    return repr([getattr(snapshot, name) for name in WRITTEN_FIELDS])


@settings(max_examples=60, deadline=None)
@given(snapshots())
def test_it_comes_back_from_json_and_from_a_file_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, snapshot: Snapshot
) -> None:
    text = snapshot.to_json()
    assert "\n" not in text
    text.encode("ascii")
    again = Snapshot.from_json(text)
    assert again == snapshot
    assert exactly(again) == exactly(snapshot)
    path = tmp_path_factory.mktemp("saved") / "snapshot.json"
    snapshot.save(path)
    assert exactly(Snapshot.load(path)) == exactly(snapshot)


def test_a_state_that_json_would_change_is_refused_by_name(tmp_path: Path) -> None:
    snapshot = replace(make(), state={**make().state, "take": {"seen": (1, 2)}})
    for write in (snapshot.to_json, lambda: snapshot.save(tmp_path)):
        with pytest.raises(SnapshotError, match=r"\['state'\]\['take'\]\['seen'\] is of type tuple"):
            write()
    assert list(tmp_path.iterdir()) == []


FIELDS: list[tuple[str, Any, str]] = [
    ("version", "1", r"Expected `int`, got `str` - at `\$\.version`"),
    ("version", 0, r"version is 0"),
    ("version", FORMAT_VERSION + 1, rf"format {FORMAT_VERSION + 1}, .* reads format {FORMAT_VERSION}: upgrade"),
    ("fingerprint", {}, r"Expected `array`, got `object` - at `\$\.fingerprint`"),
    ("fingerprint", [3], r"\$\.fingerprint\[0\]"),
    ("listing", 3, r"Expected `object \| array \| null`, got `int` - at `\$\.listing`"),
    ("listing", ["a"], r"\$\.listing\[0\]"),
    ("epoch", -1, r">= 0 - at `\$\.epoch`"),
    ("epoch", 1.0, r"Expected `int`, got `float` - at `\$\.epoch`"),
    ("epoch", True, r"Expected `int`, got `bool` - at `\$\.epoch`"),
    ("rank", 1, r"rank 1 of 1"),
    ("world_size", 0, r">= 1 - at `\$\.world_size`"),
    ("num_shards", 0, r">= 1 - at `\$\.num_shards`"),
    ("rank", None, r"says no rank"),
    ("num_shards", 4, r"expected 4 workers under 'merge', of shards 0, 1, 2, 3; found 3 counts and 3 states"),
    ("state", [], r"Expected `object`, got `array` - at `\$\.state`"),
    ("merge", None, r"Expected `str`, got `null` - at `\$\.merge`"),
    ("journal", [], r"Expected `object \| null`, got `array` - at `\$\.journal`"),
    ("merge", "else", r"'else'"),
    ("merge", "take", r"'take': Expected `object`, got `int`"),
]


@pytest.mark.parametrize(("field", "value", "message"), FIELDS)
def test_an_entry_of_the_wrong_type_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        Snapshot.from_json(json.dumps({**body(), field: value}))


@pytest.mark.parametrize("field", body())
def test_a_missing_entry_is_named(field: str) -> None:
    tree = body()
    del tree[field]
    with pytest.raises(SnapshotError, match=rf"missing required field `{field}`"):
        Snapshot.from_json(json.dumps(tree))


def test_unknown_entries_are_named() -> None:
    with pytest.raises(SnapshotError, match=r"unknown entries keeper, spare"):
        Snapshot.from_json(json.dumps({**body(), "spare": 1, "keeper": []}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("produced", {"0": 1, "1": 2}, r"found 2 counts and 3 states"),
        ("produced", {"0": 1, "1": 2, "2": -1}, r"'merge'.*>= 0 - at `\$\.produced\[\.\.\.\]`"),
        ("workers", {"0": {}, "1": {}}, r"found 3 counts and 2 states"),
        (
            "workers",
            {"0": {}, "1": {}, "3": {}},
            r"of shards 0, 1, 2; found 3 counts and 3 states, of shards 0, 1, 2, 3",
        ),
        ("workers", {"0": {}, "1": {}, "2": 4}, r"'merge'.*\$\.workers\[\.\.\.\]"),
        ("workers", [{}, {}, {}], r"'merge'.*\$\.workers"),
        ("next_worker", 3, r"worker 3 as the next"),
        ("next_worker", None, r"'merge'.*\$\.next_worker"),
    ],
)
def test_a_merge_that_does_not_fit_the_shards_is_refused(key: str, value: Any, message: str) -> None:
    tree = body()
    tree["state"]["merge"][key] = value
    with pytest.raises(SnapshotError, match=message):
        Snapshot.from_json(json.dumps(tree))


@pytest.mark.parametrize("text", ["", "{", "hello", "[" * 100_000, '{"a": 1} x', None, 3, b"\xff{", {}])
def test_text_that_is_not_json_is_said_to_be_none(text: Any) -> None:
    with pytest.raises(SnapshotError, match=r"^not a snapshot: expected JSON \("):
        Snapshot.from_json(text)


def test_what_is_no_text_is_named_by_its_type() -> None:
    with pytest.raises(SnapshotError, match="must be str, bytes or bytearray, not dict"):
        Snapshot.from_json({})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["[]", "3", "null", '"text"', "{}"])
def test_other_json_is_no_snapshot(text: str) -> None:
    with pytest.raises(SnapshotError, match=r"^not a snapshot: "):
        Snapshot.from_json(text)


def test_the_text_of_a_file_is_sent_to_load(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"use Snapshot.load\(path\)"):
        Snapshot.from_json(make().save(tmp_path).read_text())


async def test_an_async_streams_snapshot_is_a_plain_call() -> None:
    async with sl.from_items(range(9)).open() as stream:
        assert [await anext(stream), await anext(stream)] == [0, 1]
        assert (stream.snapshot().produced, stream.snapshot(1).produced) == ([2], [1])
        with pytest.raises(PlanError, match=r"snapshot\(items_ago\) is 0 or 1, got 2"):
            stream.snapshot(2)
