"""A snapshot as a person sees it; also one that nobody foresaw."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from streamline.snapshot.inspection import describe, report
from streamline.snapshot.snapshot import Snapshot

WIDE = 200
SNAPSHOT = Snapshot(
    version=1,
    fingerprint=[
        {"kind": "read_jsonl", "name": "read_jsonl", "options": {"pattern": "data/*.jsonl"}},
        {"kind": "shuffle", "name": "shuffle", "options": {"window": 4096, "seed": 0}},
        {"kind": "map", "name": "tokenize", "options": {}},
        {"kind": "merge", "name": "merge", "options": {}},
        {"kind": "take", "name": "take", "options": {"count": 9000}},
    ],
    listing=[{"path": "data/a.jsonl", "size": 1_000_000}, {"path": "data/b.jsonl", "size": 500}],
    epoch=2,
    rank=1,
    world_size=2,
    num_shards=5,
    state={
        "merge": {
            "next_worker": 1,
            "produced": {"1": 1200, "3": 34},
            "replay": [],
            "workers": {
                "1": {"read_jsonl": {"file": "data/a.jsonl", "line": 1817, "byte": 120_400}, "shuffle": {"window": 3}},
                "3": {"read_jsonl": {"file": "data/b.jsonl", "line": 35, "byte": 402}, "shuffle": {"window": 0}},
            },
        },
        "take": 1234,
    },
    merge="merge",
)
SHARD = {"kind": "shard", "name": "shard", "options": {"num_shards": 3}}
TREES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=8,
)


def lines(snapshot: Snapshot, width: int = WIDE) -> list[str]:
    """The report, with each run of spaces as one."""
    return [" ".join(line.split()) for line in report(snapshot, width).splitlines()]


def with_workers(*trees: dict[str, Any], **changes: Any) -> Snapshot:
    workers = {str(shard): tree for shard, tree in enumerate(trees)}
    own = {"next_worker": 0, "produced": dict.fromkeys(workers, 1), "replay": [], "workers": workers}
    return replace(SNAPSHOT, rank=0, world_size=1, num_shards=len(trees), state={"merge": own}, **changes)


def test_it_says_whose_it_is_and_how_far() -> None:
    shown = lines(SNAPSHOT)
    assert shown[:4] == [
        "streamline snapshot, format 1",
        "where epoch 2, rank 1 of 2, 2 of 5 shards",
        "items 1,234 taken from the workers by merge",
        "data 2 files, 1,000,500 bytes: data/a.jsonl … data/b.jsonl",
    ]


def test_the_plan_has_a_stage_a_line_with_its_options() -> None:
    shown = lines(SNAPSHOT)
    at = shown.index("plan")
    assert shown[at + 1 : at + 6] == [
        "1. read_jsonl pattern data/*.jsonl",
        "2. shuffle window 4,096, seed 0",
        "3. map(tokenize)",
        "4. merge",
        "5. take count 9,000",
    ]


def test_each_shard_has_its_count_place_and_stages_and_the_next_one_is_marked() -> None:
    shown = lines(SNAPSHOT)
    assert "1 1,200 data/a.jsonl, line 1,817, byte 120,400 shuffle: window 3" in shown
    assert "next > 3 34 data/b.jsonl, line 35, byte 402 shuffle: window 0" in shown


def test_stages_behind_the_merge_come_last_and_are_left_out_where_there_are_none() -> None:
    shown = lines(SNAPSHOT)
    assert shown[shown.index("after the merge") + 1] == "take: 1,234"
    assert shown[-2:] == ["a resume", "computes nothing again that was delivered"]
    assert "after the merge" not in report(with_workers({"read_jsonl": 3}))


def test_what_a_resume_does_again_is_said_for_all_shards_that_do_the_same() -> None:
    shuffle = {"window": 3, "served": 120, "of": 4096, "seed": 0}
    workers: list[dict[str, Any]] = [
        {"read_jsonl": 5, "shuffle": shuffle},
        {"read_jsonl": 6},
        {"read_jsonl": 7, "shuffle": shuffle},
    ]
    snapshot = with_workers(*workers, fingerprint=[*SNAPSHOT.fingerprint[:1], SHARD, *SNAPSHOT.fingerprint[1:]])
    shown = lines(snapshot)
    assert shown[shown.index("a resume") + 1 :] == [
        "shards 0, 2: shuffle: reads the 4,096 items of window 3 again, and passes over the 120 of them that were "
        "delivered"
    ]


def test_the_code_of_functions_has_a_short_hash() -> None:
    entry = {
        "kind": "map",
        "name": "tokenize",
        "options": {"fn": "tokenize"},
        "code": {"fn": "cpython-311-O0:0123456789"},
    }
    assert "1. map(tokenize) fn tokenize; code of fn 01234567" in lines(replace(SNAPSHOT, fingerprint=[entry]))


def test_several_files_are_listed_with_their_sizes() -> None:
    listing = [{"path": f"part-{n}", "size": 1000 * n, "etag": None} for n in range(12)]
    shown = lines(replace(SNAPSHOT, listing=listing))
    assert "data 12 files, 66,000 bytes: part-0 … part-11" in shown
    assert ["part-3 3,000 bytes" in shown, "part-7 7,000 bytes" in shown, "part-8 8,000 bytes" in shown] == [1, 1, 0]
    assert "… and 4 more" in shown


def job() -> Snapshot:
    """Of two ranks and three shards."""
    parts = []
    for rank in range(2):
        shards = [str(shard) for shard in range(rank, 3, 2)]
        own = {
            "next_worker": len(shards) - 1,
            "produced": dict.fromkeys(shards, 10),
            "replay": [0] * rank,
            "workers": {shard: {"read_jsonl": 7} for shard in shards},
        }
        state = {"merge": own, "take": rank}
        parts.append(replace(SNAPSHOT, rank=rank, world_size=2, num_shards=3, state=state))
    return Snapshot.of_job(parts)


def test_a_whole_job_is_one_table_with_the_next_worker_and_the_stages_of_each_rank() -> None:
    shown = lines(job())
    assert "where epoch 2, all 2 ranks, 3 shards" in shown
    assert "items 30 taken from the workers by merge" in shown
    assert [line.split(" 10 ")[0] for line in shown if " 10 " in line] == ["0", "next > 1", "next > 2"]
    assert shown[shown.index("after the merge, rank 0") + 1] == "take: 0"
    assert shown[shown.index("after the merge, rank 1") + 1] == "take: 1"
    assert shown[-1] == "after the merge, rank 1: merge: takes 1 item again, in the order in which it took them before"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_whole_jobs_report_fits_a_terminal(width: int) -> None:
    assert max(map(len, report(job(), width).splitlines())) <= width


@pytest.mark.parametrize(
    ("listing", "shown"),
    [
        (None, "data not recorded"),
        ({"length": None}, "data not recorded"),
        ({"length": 60000}, "data 60,000 items"),
        ({"etag": "x"}, 'data {"etag": "x"}'),
        ([], "data no files"),
        ([{"path": "a"}], "data 1 file: a"),
        ([{"path": "a", "size": 3}, {"path": "b", "size": None}], "data 2 files: a … b"),
        ([{"length": 5}], 'data 1 file: {"length": 5}'),
    ],
)
def test_the_data_is_one_line(listing: Any, shown: str) -> None:
    assert shown in lines(replace(SNAPSHOT, listing=listing))


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        (None, "0 1 the beginning"),
        (1817, "0 1 item 1,817"),
        ({"index": {"a": [1]}}, '0 1 {"index": {"a": [1]}}'),
        ([1, 2], "0 1 [1, 2]"),
        ("cursor-17", "0 1 cursor-17"),
        (True, "0 1 true"),
        ({}, "0 1 {}"),
    ],
)
def test_a_place_of_any_shape_is_shown(own: Any, shown: str) -> None:
    assert any(line.removeprefix("next > ") == shown for line in lines(with_workers({"read_jsonl": own})))


def test_a_source_under_another_name_is_the_first_of_the_state() -> None:
    assert "0 1 item 5 map: 6" in [
        line.removeprefix("next > ") for line in lines(with_workers({"rows": 5, "map": 6}, fingerprint=[]))
    ]


def test_a_worker_without_any_state_is_at_the_beginning() -> None:
    assert "next > 0 1 the beginning" in lines(with_workers({}))


def test_a_rank_without_shards_is_said_to_have_none() -> None:
    own: dict[str, Any] = {"next_worker": 0, "produced": {}, "replay": [], "workers": {}}
    empty = replace(SNAPSHOT, rank=3, world_size=4, num_shards=2, state={"merge": own})
    assert "no shard is this rank's" in lines(empty)


def test_a_long_state_is_cut_and_its_length_told() -> None:
    done = {"low": 17, "done": [[n, n + 1] for n in range(0, 1000, 3)]}
    text = report(with_workers({"read_jsonl": 1, "map": done}), WIDE)
    assert 'map: {"low": 17, "done": [[0, 1],' in text
    assert "characters)" in text
    assert len(text) < 3000


def test_names_are_shown_as_they_are_and_can_not_command_a_terminal() -> None:
    text = report(with_workers({"read_jsonl": {"file": "[red]a[/red]\x1b[2J\udcff.jsonl", "line": 1}}), WIDE)
    assert "[red]a[/red]\\x1b[2J\\udcff.jsonl, line 1" in text
    text.encode()


def test_a_narrow_report_folds_and_loses_nothing() -> None:
    text = report(SNAPSHOT, 60)
    assert max(map(len, text.splitlines())) <= 60
    assert "120,400" in text


def test_a_terminal_gets_the_same_words() -> None:
    console = Console(file=StringIO(), width=WIDE, force_terminal=True, no_color=True)
    with console.capture() as capture:
        console.print(describe(SNAPSHOT))
    assert "data/a.jsonl, line 1,817, byte 120,400" in capture.get()


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text(), TREES, max_size=3),
    st.dictionaries(st.text(), TREES, max_size=3),
    st.lists(st.dictionaries(st.sampled_from(["kind", "name", "options", "?"]), TREES), max_size=3),
    st.none() | st.lists(st.dictionaries(st.sampled_from(["path", "size", "?"]), TREES), max_size=3),
    st.integers(20, 200),
)
def test_any_tree_can_be_shown(tree: Any, after: Any, fingerprint: Any, listing: Any, width: int) -> None:
    snapshot = with_workers(tree, fingerprint=fingerprint, listing=listing)
    report(replace(snapshot, state={**after, **snapshot.state}), width).encode()


def test_a_length_that_nobody_knows_is_said_in_words_and_one_is_not_many() -> None:
    assert "data not recorded" in lines(replace(SNAPSHOT, listing={"length": None}))
    assert "data 1 item" in lines(replace(SNAPSHOT, listing={"length": 1}))


def test_of_skipped_items_those_are_counted_that_are_consumed() -> None:
    tree = {"read_jsonl": 7, "errors": {"tokenize": [2, 5], "parse": 1}}
    assert "next > 0 1 item 7 errors: tokenize 5, parse 1" in lines(with_workers(tree))


def test_a_state_that_holds_nothing_is_left_out() -> None:
    batch: dict[str, list[int]] = {"replay": []}
    full = {"replay": [3, 4]}
    shown = "\n".join(lines(with_workers({"read_jsonl": 3, "batch": batch}, {"read_jsonl": 4, "batch_2": full})))
    assert "batch:" not in shown
    assert "batch_2: " in shown
    own = dict(SNAPSHOT.state["merge"])
    assert "after the merge" not in report(replace(SNAPSHOT, state={"merge": own, "batch": batch}))
