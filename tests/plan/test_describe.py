"""A plan for a person."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest

import streamline as sl
from streamline.pipeline import Pipeline
from streamline.plan.describe import describe, max_in_flight
from streamline.plan.plan import BRIDGE_ITEMS
from streamline.transforms.map import AHEAD, WAITING_EACH, WAITING_ITEMS


def tokenize(x: Any) -> Any:
    return x


async def fetch(x: Any) -> Any:
    return x


def test_a_plan_reads_from_top_to_bottom() -> None:
    pipe = (
        sl.from_items(range(10_000))
        .shuffle(seed=1)
        .shard(16)
        .map(tokenize)
        .shuffle(window=8)
        .merge("best_effort")
        .batch(4)
    )
    assert repr(pipe).splitlines() == [
        "from_items (10,000 items)",
        "  shuffle(seed=1)",
        "shard into 16 (interleaved)",
        "  map(tokenize)",
        "  shuffle(window=8, seed=0)",
        "merge (best effort: max_skips_per_round=2, max_lead=8)",
        "  batch(size=4)",
        "reads       each item once, item i by worker i mod 16; a resume computes its place",
        "worker x16  from_items, map(tokenize), shuffle (holds 16) → [256 items]",
        "rank        merge, batch (holds 4) → [128 batches]",
        "memory      bounded in items, as above; .prefetch(n, bytes=) bounds a channel in bytes",
        "at most 4,868 items in flight; in a quick plain loop 4,096 more",
    ]
    assert repr(pipe) == describe(pipe.plan)


def test_the_last_line_says_how_much_is_held() -> None:
    pipe = sl.from_items(range(10)).shard(2)
    assert repr(pipe).splitlines()[-1] == "at most 4,096 items in flight; in a quick plain loop 4,096 more"
    assert pipe.max_in_flight == max_in_flight(pipe.plan) == 2 * 4 * 512 + BRIDGE_ITEMS


def test_the_channel_behind_ends_that_ranks_agree_on_is_counted() -> None:
    """▲ Of three workers one rank runs two, and has that channel besides: more than all three on one rank."""
    pipe = sl.from_items(range(10)).shard(3)
    several = (2 * 341 + 512) * 4
    assert pipe.max_in_flight == several + BRIDGE_ITEMS
    more = f"; on several ranks {several - 3 * 4 * 341:,} more; in a quick plain loop 4,096 more"
    assert repr(pipe).splitlines()[-1] == f"at most 4,092 items in flight{more}"
    for other in (sl.from_items(range(10)), pipe.merge().map(tokenize), sl.from_items(range(10)).shard(4)):
        assert "ranks" not in repr(other)


def test_what_a_take_in_every_worker_gives_in_all_is_said() -> None:
    assert "take(count=100): up to 1,600 in all" in repr(sl.from_items(range(9)).shard(16).take(100))
    assert "in all" not in repr(sl.from_items(range(9)).shard(16).merge().take(100))
    assert "in all" not in repr(sl.from_items(range(9)).map(tokenize).take(100))


def test_that_every_worker_reads_everything_is_said() -> None:
    assert "shard into 16 (replicated): everything is read 16 times" in repr(sl.from_iterable(lambda: [1]).shard(16))
    assert "is read" not in repr(sl.from_iterable(lambda: [1]))


@pytest.mark.parametrize(
    ("more", "by"),
    [
        (lambda p: p.map(tokenize), 0),
        (lambda p: p.shuffle(window=100), 200),
        (lambda p: p.prefetch(50), 50),
        (lambda p: p.map(fetch, concurrency=4), 4 + WAITING_ITEMS),
        (lambda p: p.map(fetch, concurrency=100), 100 + WAITING_EACH * 100),
        (lambda p: p.map(fetch, concurrency=4, ordered=False), 4 + WAITING_ITEMS + AHEAD * 4),
    ],
)
def test_each_stage_adds_what_it_may_hold_in_every_worker(more: Any, by: int) -> None:
    pipe = sl.from_items(range(10)).shard(4)
    assert more(pipe).max_in_flight - pipe.max_in_flight == 4 * by


def test_items_in_a_batch_count_each() -> None:
    pipe = sl.from_items(range(10)).batch(8)
    assert pipe.prefetch(5).max_in_flight - pipe.max_in_flight == 5 * 8


def test_what_runs_beside_what_is_said_with_its_bounds() -> None:
    pipe = sl.read_jsonl("part-*.jsonl").shard(2).map(fetch, concurrency=8).map(tokenize).merge().batch(8).prefetch(4)
    lines = repr(pipe).splitlines()
    assert (
        "worker x2   read_jsonl → [512 items] → map(fetch): 8 calls → [72 items] → map(tokenize) → [2,048 items]"
        in lines
    )
    assert "rank        merge, batch (holds 8) → [4 batches] → passes items on → [64 batches]" in lines


def test_a_long_way_is_broken_into_lines() -> None:
    pipe = sl.from_items(range(10))
    for _ in range(9):
        pipe = pipe.map(fetch, concurrency=8)
    lines = repr(pipe).splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith(" " * 12 + "→ ") for line in lines) >= 2


@pytest.mark.parametrize(
    ("pipe", "says"),
    [
        (sl.read_jsonl("a.jsonl").shard(4), "each byte once, in 4 blocks; a resume seeks to its line"),
        (sl.read_jsonl(["a", "b"]).shard(2), "each byte once, file i by worker i mod 2; a resume seeks"),
        (sl.read_lines("a").shard(16, mode="replicated"), "each byte is read 16 times: by every worker"),
        (
            sl.from_iterable(lambda: [1]).shard(3),
            "each item is read 3 times: by every worker, which keeps one item in 3",
        ),
        (sl.from_items(range(9)).repeat(2), "each item once, again in each pass; a resume computes its place"),
    ],
)
def test_it_says_how_often_everything_is_read(pipe: Any, says: str) -> None:
    [line] = [line for line in repr(pipe).splitlines() if line.startswith("reads")]
    assert says in line


def test_byte_budgets_are_added_up() -> None:
    pipe = sl.from_items(range(9)).shard(4).prefetch(8, bytes=16 << 20).merge().prefetch(2, bytes=1000)
    [line] = [line for line in repr(pipe).splitlines() if line.startswith("memory")]
    assert line == "memory      64 MiB in 5 channels with a byte budget; the rest is bounded in items"


def test_options_are_shown_where_they_are_not_the_usual_ones() -> None:
    pipe = sl.from_items(range(9)).map(tokenize, executor="thread", concurrency=2, ordered=False).shuffle(window=3)
    assert "  map(tokenize, concurrency=2, ordered=False, executor='thread')" in repr(pipe).splitlines()
    assert "  shuffle(window=3, seed=0)" in repr(pipe).splitlines()


def test_a_plan_of_ten_lines_stays_one_screen() -> None:
    pipe = (
        sl.read_jsonl("nowhere/part-*.jsonl")
        .shuffle_files()
        .shard(8)
        .map(fetch, concurrency=64)
        .filter(tokenize)
        .shuffle(window=100)
        .merge()
        .batch(8)
        .map(tokenize, name="last")
        .prefetch(2)
    )
    assert len(repr(pipe).splitlines()) <= 20


def test_the_reader_of_a_feed_stands_before_the_workers() -> None:
    async def feed() -> Any:
        yield 1

    text = describe(sl.from_stream(feed).shard(4).map(fetch, concurrency=2).plan)
    assert "reader      from_stream → [256 items for each worker, 65,536 while another starves]" in text
    assert "worker x4   map(fetch): 2 calls" in text
    assert "a resume is fed from the journal first" in text
    alone = sl.from_stream(feed)
    assert "reader      from_stream → [512 items]\nworker      passes items on" in describe(alone.plan)
    assert max_in_flight(alone.plan) == 512 + 512 + BRIDGE_ITEMS  # nobody else can starve


def test_a_batch_that_does_not_wait_reads_a_channel_of_its_own() -> None:
    pipe = sl.from_items(range(9)).shard(2).merge()
    assert "merge → [4 items] → batch (holds 4) → " in describe(pipe.batch(4, max_wait_s=1).plan)
    assert "merge → [3 items] → batch (holds 4) → " in describe(pipe.prefetch(3).batch(4, max_wait_s=1).plan)


def test_stages_read_as_they_were_written() -> None:
    def augment(x: Any, *, rng: Any) -> Any:
        return x

    @sl.stage(stateless=True)
    async def shouted(items: Any, mark: str, words: list[int]) -> Any:
        async for item in items:
            yield item

    @sl.source(state=dict)
    def rows(*, state: dict[str, Any], shard: int, num_shards: int) -> Any:
        yield 1

    pipe = rows().shard(2).map(augment, seed=7).through(shouted, mark="!", words=[1] * 50)
    lines = describe(pipe.batch(2, collate=None).batch(3, collate=tokenize).plan).splitlines()
    assert "  map(augment, seed=7)" in lines
    assert "  through(shouted, mark='!', words=<list>)" in lines
    assert "  batch(size=2, collate=None)" in lines
    assert "  batch(size=3, collate=tokenize)" in lines
    assert not any("numbering" in line for line in lines)
    assert any(line.startswith("worker x2   source(rows) → ") for line in lines)


def test_calls_of_all_workers_at_once_are_told() -> None:
    async def fetch(n: int) -> int:
        return n

    pipe = sl.from_items(range(8)).shard(4).map(fetch, concurrency=64).map(abs).merge().map(fetch, concurrency=3)
    lines = str(pipe).splitlines()
    assert "  map(fetch, concurrency=64): up to 256 calls at once (64 x 4 shards)" in lines
    assert "  map(fetch_2, concurrency=3)" in lines
    assert "shards)" not in str(sl.from_items(range(8)).map(fetch, concurrency=64))


def test_a_mixture_is_a_tree_with_weights_seeds_and_the_stages_of_each_branch() -> None:
    def tok(item: int) -> int:
        return item

    web = sl.from_items(range(10)).shuffle(seed=1).repeat(3)
    both = sl.zip(sl.from_items(range(5)).map(tok), sl.from_items(range(5)))
    weights: Any = [(0, {"web": 3, "both": 1}), (1000, {"web": 1, "both": 0.5})]
    branches: dict[str, Pipeline[Any]] = {"web": web, "both": both}
    pipe = sl.mix(branches, weights=weights, seed=7, stop="first").shard(2)
    tree = [
        "mix of web, both (seed=7, stop='first', other weights from 1,000 on)",
        "  web: weight 3 → 1, from_items (10 items)",
        "    shuffle(seed=1)",
        "    repeat(times=3)",
        "  both: weight 1 → 0.5, zip of 0, 1",
        "    0: from_items (5 items)",
        "      map(tok)",
        "    1: from_items (5 items)",
        "shard into 2 (custom)",
    ]
    assert repr(pipe).splitlines()[: len(tree)] == tree
    for line in tree[:-1]:
        assert line.strip().partition(" (")[0] in pipe.draw().svg
    for words in ("weight 3", "seed=7", "repeat(times=3)", "map(tok)"):
        assert words in pipe.draw().mermaid


def test_plans_stats_and_checks_are_shown_in_a_notebook_with_their_text_escaped() -> None:
    pipe = sl.from_items(range(3)).map(lambda item: item)
    with pipe.open() as stream:
        next(stream)
        stats, snapshot = stream.stats(), stream.snapshot()
    failing = sl.from_items([0]).map(lambda item: 1 // item)
    for shown in (pipe, stats, failing.check(), pipe.batch(2).explain(snapshot)):
        text: str = shown._repr_html_()
        assert text.startswith("<pre>")
        assert text.endswith("</pre>")
        assert text.count("<") == 2
        assert "&lt;lambda&gt;" in text
        assert unescape(text[5:-6]) == (repr(shown) if shown is pipe else str(shown))


def test_the_package_lists_its_public_names_only() -> None:
    assert dir(sl) == sorted(sl.__all__)
    assert [name for name in dir(sl) if name.startswith("_")] == ["__version__"]
    assert all(hasattr(sl, name) for name in dir(sl))
    assert issubclass(sl.errors.PlanError, Exception)
