"""What ranks say, and what is made of it: exposed waits, the slowest rank and why, a map for page and terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.core.counters import Detail
from streamline.observe import rank_lines
from streamline.observe.figures import ChannelStats, Figures, ReadStats, StageStats
from streamline.observe.rank_lines import (
    MOST_LINE_BYTES,
    MOST_RANKS,
    MOST_STAGES,
    MOST_STREAMS,
    RankLine,
    SeenRank,
    SlowRank,
    StageLine,
    StreamLine,
    decoded,
    encoded,
    exposed_waits,
    shown_ranks,
    slowest,
    stream_line,
)

VERDICT = {"how": "good", "words": "The pipeline keeps up", "rest": "", "advice": ""}


# A line ---------------------------------------------------------------------------------------------------------------
def test_a_line_is_read_as_it_was_written() -> None:
    stage = StageLine("map(é\x00\n)", 0.25, 0.5, 4.0, 100.0)
    stream = StreamLine("train", 3, 99, 10.0, 1.5, 0.5, 0.25, 0.0, ("good", "<b>", "", ""), (stage,))
    line = RankLine(2.0, 1.5, (stream,))
    assert encoded(line).count(b"\n") == 1
    assert decoded(encoded(line)) == line
    assert decoded(encoded(RankLine(over=True))).over


@pytest.mark.parametrize(
    "wrong",
    [
        b"", b"\x00", b"\xff\xfe", b"<html>", b"null", b"[]", b"[" * 100_000, b'{"every_s": NaN}', b'{"every_s": null}',
        b'{"every_s": 1e999}', b'{"every_s": -1}', b'{"every_s": "1"}', b'{"cores": 1e16}', b'{"over": 1}',
        b'{"streams": [["a", -1]]}', b'{"streams": [["a", 0, 9007199254740993]]}', b'{"streams": [["\\ud800"]]}',
        b'{"streams": [["' + b"x" * 61 + b'"]]}',
        b'{"streams": [["a", 0, 0, 0, 0, 1.1]]}',
        b'{"streams": [["a", 0, 0, 0, 0, 0, 0, 0, ["how", "", "", ""], [[]]]]}',
        b'{"streams": [["a", 0, 0, 0, 0, 0, 0, 0, ["how", "", ""], []]]}',
        b'{"streams": [' + b",".join([b'["a"]'] * (MOST_STREAMS + 1)) + b"]}",
        b'{"streams": [["a", 0, 0, 0, 0, 0, 0, 0, ["", "", "", ""], ['
        + b",".join([b'["a"]'] * (MOST_STAGES + 1)) + b"]]]}",
    ],
)  # fmt: skip
def test_what_is_no_line_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decoded(wrong)


def test_a_line_is_bounded_whatever_a_plan_has() -> None:
    name = "\x00\ud800😀" * 2_000
    stages = tuple(StageStats(name=f"{name}{at}", kind="map", items=1, busy_s=at) for at in range(10_000))
    huge = Figures(elapsed_s=10.0, items=5, consumer_wait_s=9.0, stages=stages)
    words = dict.fromkeys(VERDICT, name)
    stream = stream_line(name, 0, 5, huge, words)
    line = encoded(RankLine(1.0, 1.0, (stream,) * MOST_STREAMS))
    assert len(line) <= MOST_LINE_BYTES
    assert decoded(line).streams == (stream,) * MOST_STREAMS
    assert len(stream.stages) == MOST_STAGES
    assert stream.stages[0].busy_s == 0  # the source is always there; then those that are waited for most
    assert {stage.busy_s for stage in stream.stages[1:]} == set(range(10_000 - MOST_STAGES + 1, 10_000))


def test_a_line_says_what_the_figures_say() -> None:
    stages = (
        StageStats(name="items", kind="from_items", items=400, bytes=4000),
        StageStats(name="decode", kind="map", items=400, busy_s=8.0),
    )
    figures = Figures(elapsed_s=10.0, items=100, consumer_wait_s=5.0, stages=stages, reads=(ReadStats("a", retries=5),))
    line = stream_line("train", 2, 700, figures, VERDICT)
    assert (line.epoch, line.items, line.over_s, line.rate, line.waits, line.retries_s) == (2, 700, 10, 10, 0.5, 0.5)
    assert line.wait_s == 0.05
    assert line.stages == (StageLine("from_items", 0, 0, 4, 10), StageLine("map(decode)", 0.5, 0.02, 4, 0))
    nothing = stream_line("train", 0, 0, Figures(elapsed_s=0, items=0, consumer_wait_s=0), VERDICT)
    assert (nothing.rate, nothing.wait_s, nothing.stages) == (0, 0, ())


# Exposed waits --------------------------------------------------------------------------------------------------------
SOURCE = StageStats(name="items", kind="from_items")
MAP = StageStats(name="decode", kind="map")
MERGE = StageStats(name="merge", kind="merge")
BATCH = StageStats(name="batch", kind="batch")


def ten_seconds(*stages: StageStats, waits: float, after: tuple[str, ...] = ()) -> Figures:
    """Ten seconds in which the consumer waits a share; a channel stands after each of the stages named."""
    channels = tuple(ChannelStats(name=name) for name in after)
    return Figures(elapsed_s=10.0, items=100, consumer_wait_s=10 * waits, stages=stages, channels=channels)


def spent(
    stage: StageStats, busy: float = 0.0, no_input: float = 0.0, no_room: float = 0.0, **other: Any
) -> StageStats:
    stage = replace(stage, **other)
    return replace(
        stage,
        busy_s=10 * busy * stage.slots, wait_input_s=10 * no_input * stage.workers,
        wait_output_s=10 * no_room * stage.workers,
    )  # fmt: skip


CHAIN = spent(SOURCE, 0.2), spent(MAP, 0.6), spent(MERGE, no_input=0.75), spent(BATCH, 0.25)

EXPOSED = {
    "all in one task": (ten_seconds(*CHAIN[:2], waits=0.4), {"items": 0.1, "decode": 0.3}),
    "what waits for input passes it on": (
        ten_seconds(*CHAIN, waits=0.8, after=("decode", "batch")),
        {"merge": 0, "batch": 0.2, "items": 0.15, "decode": 0.45},
    ),
    "work that is hidden": (ten_seconds(*CHAIN, waits=0.0, after=("decode", "batch")), dict.fromkeys(
        ("items", "decode", "merge", "batch"), 0
    )),
    "a last stage that has no room": (
        ten_seconds(spent(SOURCE, 0.1, no_room=0.9), waits=0.4, after=("items",)), {"items": 0.1}
    ),
    "many workers, many calls": (
        ten_seconds(
            spent(SOURCE, 0.1, workers=4), spent(MAP, 0.9, no_input=0.1, workers=4, concurrency=8),
            spent(MERGE, no_input=1.0), waits=1.0, after=("items", "decode"),
        ),
        {"items": 0.1, "decode": 0.9, "merge": 0},
    ),
    "waits for permits are a stage's own": (
        ten_seconds(SOURCE, spent(MAP, details=(Detail("limited_s", 5.0),)), waits=0.5), {"items": 0, "decode": 0.5}
    ),
    "nothing accounts for it": (ten_seconds(SOURCE, MAP, waits=0.5), {}),
    "no time has passed": (Figures(elapsed_s=0.0, items=0, consumer_wait_s=0.0, stages=(SOURCE,)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPOSED)
def test_waits_are_divided_over_the_stages_that_are_waited_for(name: str) -> None:
    figures, expected = EXPOSED[name]
    assert exposed_waits(figures) == pytest.approx(expected)


def test_components_of_a_mixture_are_side_by_side() -> None:
    web, code = spent(SOURCE, 0.1, name="web/items"), spent(SOURCE, 0.4, name="code/items")
    mix = StageStats(name="mix", kind="mix")
    figures = ten_seconds(web, code, mix, spent(MERGE, no_input=1.0), waits=1.0)
    found = exposed_waits(figures, {"web/items", "code/items"})
    assert found["code/items"] == pytest.approx(4 * found["web/items"])


seconds = st.floats(0, 1e9)
stages = st.builds(
    StageStats,
    name=st.sampled_from("abcd"), kind=st.sampled_from(["map", "merge", "batch"]), workers=st.integers(0, 4),
    concurrency=st.integers(0, 4), busy_s=seconds, wait_input_s=seconds, wait_output_s=seconds,
)  # fmt: skip


@given(
    st.lists(stages, max_size=6, unique_by=lambda stage: stage.name),
    st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")), seconds, seconds,
)  # fmt: skip
def test_exposed_waits_never_exceed_the_consumer_s(
    stages: list[StageStats], ends: set[str], branches: set[str], elapsed_s: float, wait_s: float
) -> None:
    channels = tuple(ChannelStats(name=name) for name in ends)
    figures = Figures(
        elapsed_s=elapsed_s, items=1, consumer_wait_s=wait_s, stages=tuple(stages), channels=channels
    )  # fmt: skip
    found = exposed_waits(figures, branches)
    assert all(share >= 0 for share in found.values())
    assert sum(found.values()) <= min(1.0, wait_s / elapsed_s if elapsed_s else 0) + 1e-9


# The slowest rank -----------------------------------------------------------------------------------------------------
READ, DECODE = StageLine("read_jsonl", 0.1, 0.001, 4.0, 1000.0), StageLine("map(decode)", 0.0, 0.002, 4.0, 1000.0)
USUAL = StreamLine(
    "train", 0, 2000, 10.0, 100.0, 0.02, 0.0, 0.0, ("good", "The pipeline keeps up", "", ""), (READ, DECODE)
)
SLOW = msgspec.structs.replace(
    USUAL, waits=0.8, verdict=("slow", "map(decode) limits", "why", "try more"),
    stages=(READ, StageLine("map(decode)", 0.7, 0.02, 4.0, 1000.0)),
)  # fmt: skip


def line(base: StreamLine = SLOW, **changed: Any) -> StreamLine:
    return msgspec.structs.replace(base, **changed)


def job(*streams: StreamLine, **of_last: Any) -> dict[int, SeenRank]:
    """Return ranks whose last lines came at a time; the last one is the one that may be slow."""
    seen = {
        rank: SeenRank(f"node{rank}", 10 + rank, RankLine(1.0, 1.0, (one,)), 100.0) for rank, one in enumerate(streams)
    }
    last = max(seen)
    seen[last] = replace(seen[last], **of_last)
    return seen


def found(*streams: StreamLine, **other: Any) -> SlowRank | None:
    return slowest("train", job(*streams, **other), 100.0)


WHY = {
    "a stage": (SLOW, "map(decode) takes 10.0 x the time of the median rank for an item"),
    "storage": (
        line(stages=(StageLine("read_jsonl", 0.7, 0.1, 4.0, 1000.0), DECODE), retries_s=2.0),
        "read_jsonl takes more than 100 x the time of the median rank for an item, with 2.0 retries a second: its "
        "storage, or the way there, is slower",
    ),
    "a selective shard": (
        line(stages=(StageLine("read_jsonl", 0.7, 0.001, 40.0, 1000.0), DECODE)),
        "it reads 40.0 items for each one that it gives, the median rank 4.0: its shards keep fewer; divide the data",
    ),
    "larger items": (
        line(stages=(StageLine("read_jsonl", 0.1, 0.01, 4.0, 8000.0), DECODE)),
        "its items are 8.0 x as large as the median rank's",
    ),
    "a slower machine": (
        line(stages=(StageLine("read_jsonl", 0.3, 0.003, 4.0, 1000.0), StageLine("map(decode)", 0.4, 0.006, 4.0, 1e3))),
        "each of its stages takes 3.0 x the time of the median rank for an item, or more: other threads hold the GIL, "
        "other programs its machine, or that is slower (it keeps 1.0 cores busy, the median rank 1.0)",
    ),
    "no stage": (line(stages=(READ, DECODE)), "none of its stages takes much longer than on the median rank"),
    "no stages": (line(stages=()), "none of its stages takes much longer"),
    "nothing comes": (line(rate=0.0), "it has given no item in the last seconds"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHY)
@pytest.mark.parametrize("others", [1, 3])
def test_the_slowest_rank_is_named_with_its_reason(name: str, others: int) -> None:
    slow, words = WHY[name]
    named = found(*[USUAL] * others, slow)
    assert named is not None
    assert (named.rank, named.advice) == (others, "try more")
    who = f"node{others}, pid {10 + others}: its consumer waits 80 % of its time, the median rank's 2 %; "
    assert named.why.startswith(who + words)
    assert str(named) == f"rank {others} is the slowest: {named.why}; try more"
    assert all(len(row) == 3 for row in named.compared)


NOBODY = {
    "healthy ranks": [USUAL] * 4,
    "a rank alone": [SLOW],
    "no rank": [],
    "all wait for the same": [SLOW] * 4,
    "waits that don't matter": [USUAL, USUAL, line(USUAL, waits=0.09)],
    "a little slower": [line(waits=0.6), line(waits=0.6), line(waits=0.8)],
    "too early": [USUAL, line(over_s=2.9)],
    "it has ended": [USUAL, line(verdict=("ended", "", "", ""))],
    "another stream": [USUAL, line(name="validation")],
}


@pytest.mark.parametrize("name", NOBODY)
def test_where_none_stands_out_none_is_named(name: str) -> None:
    ranks = NOBODY[name]
    assert (found(*ranks) if ranks else slowest("train", {}, 0.0)) is None


def test_what_all_wait_for_is_the_rank_that_waits_for_no_other() -> None:
    """Ranks that end together wait for the slow one's word that it has another item, as long as it waits itself."""
    held_up = line(USUAL, waits=0.78, for_ranks=0.76)
    named = found(held_up, held_up, SLOW)
    assert named is not None
    assert named.rank == 2
    assert "its consumer waits 80 % of its time, the median rank's 2 %; map(decode) takes" in named.why
    stuck = line(rate=0.0, waits=1.0, verdict=("stalled", "Nothing comes", "for 9 s: shard 3", ""))
    held_up = line(stuck, for_ranks=1.0)
    named = found(held_up, stuck)
    assert named is not None
    assert named.rank == 1
    (one,) = shown_ranks(job(held_up, stuck, held_up), 3, 100.0)["maps"]
    assert one["headline"]["words"] == "Rank 1 is stalled"
    assert [row["cells"][-2:] for row in one["rows"]] == [[100, 0], [0, 20], [100, 0]]


def test_what_is_read_ahead_at_the_beginning_says_nothing_about_shards() -> None:
    full = WHY["a selective shard"][0]
    for slow, words in (
        (full, "its shards keep fewer"),
        (line(full, items=1999), "none of its stages takes much longer"),
    ):
        named = found(USUAL, slow)
        assert named is not None
        assert words in named.why


def test_ranks_at_their_own_pace_are_told_apart_by_the_wait_for_an_item() -> None:
    own_pace = line(waits=1.0)
    named = found(own_pace, own_pace, line(waits=1.0, rate=20.0))
    assert named is not None
    assert named.rank == 2


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "live"),
        ({"at": 91.0}, "silent"),
        ({"at": 80.0, "line": RankLine(10.0, 1.0, (SLOW,))}, "live"),  # that says something every ten seconds
        ({"connected": False}, "lost"),
        ({"connected": False, "line": RankLine(over=True)}, "ended"),
        ({"line": None}, "live"),
    ],
)
def test_only_ranks_that_publish_are_compared(changed: dict[str, Any], status: str) -> None:
    seen = job(USUAL, USUAL, SLOW, **changed)
    assert seen[2].status(100.0) == status
    assert (slowest("train", seen, 100.0) is not None) == (status == "live" and changed.get("line", SLOW) is not None)


# The map --------------------------------------------------------------------------------------------------------------
def test_the_map_has_a_row_for_each_rank_and_a_column_for_each_stage() -> None:
    seen = job(USUAL, SLOW)
    found = shown_ranks(seen, 4, 100.0)
    (one,) = found["maps"]
    assert (one["name"], one["columns"]) == ("train", ["read_jsonl", "map(decode)", "other ranks", "other"])
    assert [(row["rank"], row["status"], row["waits"], row["cells"]) for row in one["rows"]] == [
        (0, "live", 2, [10, 0, 0, 0]),
        (1, "live", 80, [10, 70, 0, 0]),
        (2, "missing", 0, []),
        (3, "missing", 0, []),
    ]
    assert one["slowest"]["rank"] == 1
    assert ("map(decode), an item", "20 ms", "2 ms") in one["slowest"]["compared"]
    assert one["headline"]["words"] == "Rank 1 is the slowest"
    assert found["missing"] == "nothing has come from rank 2, 3 yet: is page= given there, too?"


@pytest.mark.parametrize(
    ("changed", "words", "rest"),
    [
        ({"connected": False, "at": 60.0}, "Rank 2 is lost", "rank 2 (node2, pid 12) has said nothing for 40 s"),
        ({"at": 60.0}, "Rank 2 is silent", "rank 2 (node2, pid 12) has said nothing for 40 s"),
        (
            {"line": RankLine(1.0, 1.0, (line(verdict=("stalled", "Nothing comes", "for 9 s: shard 3", "")),))},
            "Rank 2 is stalled", "rank 2 (node2, pid 12): for 9 s: shard 3",
        ),
    ],
)  # fmt: skip
def test_what_is_worse_than_slow_is_the_headline(changed: dict[str, Any], words: str, rest: str) -> None:
    (one,) = shown_ranks(job(USUAL, SLOW, USUAL, **changed), 3, 100.0)["maps"]
    assert (one["headline"]["how"], one["headline"]["words"], one["headline"]["rest"]) == ("stalled", words, rest)


def test_a_job_of_which_every_rank_is_gone_has_a_headline() -> None:
    seen = {1: SeenRank("node1", 11, None, 60.0, connected=False)}
    found = shown_ranks(seen, 2, 100.0)
    assert found["maps"] == []
    assert found["headline"]["words"] == "Rank 1 is lost"
    assert "STALLED: Rank 1 is lost; rank 1 (node1, pid 11)" in "\n".join(rank_lines.rank_lines(found))


def test_the_terminal_shows_the_same() -> None:
    ended, lost = SeenRank("node2", 12, RankLine(over=True), 99.0), SeenRank("node3", 13, RankLine(), 90.0, False)
    seen = job(USUAL, SLOW) | {2: ended, 3: lost}
    lines = list(rank_lines.rank_lines(shown_ranks(seen, 5, 100.0)))
    assert lines[0] == "STALLED: Rank 3 is lost; rank 3 (node3, pid 13) has said nothing for 10 s"
    assert lines[1:8] == [
        "exposed wait, train, 5 ranks",
        "rank     items/s  waits  read_jsonl  map(decode)  other ranks   other",
        "    0      100.0    2 %        10 %            ·            ·       ·  node0, pid 10",
        "    1      100.0   80 %        10 %         70 %            ·       ·  node1, pid 11",
        "    2          -      -  ended  node2, pid 12",
        "    3          -      -  lost for 10 s  node3, pid 13",
        "    4          -      -  missing",
    ]
    assert "  consumer waits: 80 % on rank 1, 2 % on the median rank" in lines
    assert lines[-1] == "nothing has come from rank 4 yet: is page= given there, too?"


def test_stages_that_no_rank_waits_for_have_no_column() -> None:
    (one,) = shown_ranks(job(*[line(USUAL, stages=(StageLine("read_jsonl", 0.004), DECODE))] * 2), 2, 100.0)["maps"]
    assert one["columns"] == ["other ranks", "other"]
    assert [row["cells"] for row in one["rows"]] == [[0, 2], [0, 2]]


def test_a_thousand_ranks_make_a_bounded_update_and_few_lines() -> None:
    stages = tuple(StageLine(f"{at}" * 20, 0.02 * (at % 3), 0.1, 1.0, 1.0) for at in range(MOST_STAGES))
    seen = {
        rank: SeenRank("n" * 253, rank, RankLine(1.0, 1.0, (line(stages=stages),)), 100.0) for rank in range(MOST_RANKS)
    }
    found = shown_ranks(seen, 5_000, 100.0)
    assert len(json.dumps(found)) < 1_000_000
    assert found["more"] == 5_000 - MOST_RANKS
    assert len(found["maps"][0]["columns"]) == rank_lines.MOST_COLUMNS + 2
    lines = list(rank_lines.rank_lines(found))
    assert len(lines) < 100
    assert f"and {MOST_RANKS - 64} more ranks, which wait less" in lines
    assert lines[-1] == f"{5_000 - MOST_RANKS:,} more ranks aren't shown"


shares, numbers = st.floats(0, 1), st.floats(0, 1e15)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
hostile = st.builds(
    StreamLine, name=st.sampled_from(["a", "b"]), epoch=st.integers(0, 1 << 53), items=st.integers(0, 1 << 53),
    over_s=numbers, rate=numbers, waits=shares, for_ranks=shares, retries_s=numbers,
    verdict=st.tuples(st.sampled_from(["slow", "stalled", "ended", ""]), texts, texts, texts),
    stages=st.lists(st.builds(StageLine, texts, shares, numbers, numbers, numbers), max_size=3).map(tuple),
)  # fmt: skip
said = st.builds(RankLine, numbers, numbers, st.lists(hostile, max_size=2).map(tuple), st.booleans())


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(said, st.floats(0, 1e9), st.booleans()), max_size=5), st.floats(0, 1e9)
)
def test_whatever_ranks_say_there_is_a_map_of_it(lines: dict[int, tuple[RankLine, float, bool]], now: float) -> None:
    seen = {
        rank: SeenRank("node", 1, decoded(encoded(line)), at, connected)
        for rank, (line, at, connected) in lines.items()
    }
    found = shown_ranks(seen, 6, now)
    json.loads(msgspec.json.encode(found))
    assert all(len(one["rows"]) == 6 for one in found["maps"])
    assert all(
        0 <= cell <= 100 for one in found["maps"] for row in one["rows"] for cell in (row["waits"], *row["cells"])
    )
    assert all(isinstance(text, str) for text in rank_lines.rank_lines(found))
