"""The rules by themselves: which speaks, what it says, and how its estimate comes about."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from streamline.core.figures import ContentionStats, Detail, Figures, HostStats, ReadStats, StageStats, ThreadStats
from streamline.observe.verdict import RULES, verdict_of, way_out

SOURCE = StageStats(name="items", kind="from_items", items=1000, busy_s=0.1, held_s=0.1)
MAP = StageStats(name="decode", kind="map", items=1000, busy_s=0.2, held_s=0.2)
FETCH = StageStats(name="fetch", kind="map", items=1000, concurrency=4, executor="task")
MERGE = StageStats(name="merge", kind="merge", items=1000)


def figures(*stages: StageStats, waits: float = 0.8, **other: Any) -> Figures:
    """Ten seconds of a pipeline, a thousand items."""
    return Figures(**{"elapsed_s": 10.0, "items": 1000, "consumer_wait_s": 10 * waits, "stages": stages, **other})


def held(stage: StageStats, load: float) -> StageStats:
    return replace(stage, busy_s=10 * load, held_s=10 * load)


def busy(stage: StageStats, load: float) -> StageStats:
    return replace(stage, busy_s=10 * load * stage.slots)


def verdict(*stages: StageStats, **other: Any) -> tuple[str, str | None] | None:
    found = verdict_of(figures(*stages, **other))
    return None if found is None else (found.rule, found.stage)


def test_too_little_says_nothing() -> None:
    assert verdict(SOURCE, held(MAP, 0.9)) == ("loop", "map(decode)")
    assert verdict(SOURCE, held(MAP, 0.9), items=7) is None
    assert verdict_of(Figures(elapsed_s=0.1, items=1000, consumer_wait_s=0.1, stages=(held(MAP, 0.009),))) is None
    assert verdict_of(Figures(elapsed_s=0.0, items=0, consumer_wait_s=0.0)) is None


def test_no_load_says_nothing() -> None:
    assert verdict(SOURCE, MAP, MERGE) is None
    assert verdict() is None


def test_a_consumer_that_hardly_waits_limits_whatever_the_stages_do() -> None:
    assert verdict(SOURCE, held(MAP, 0.9), waits=0.05) == ("consumer", None)


def test_of_two_functions_in_one_loop_the_one_that_holds_it_longer_is_named() -> None:
    found = verdict_of(figures(SOURCE, held(MAP, 0.55), held(replace(MAP, name="parse"), 0.4)))
    assert found is not None
    assert (found.rule, found.stage) == ("loop", "map(decode)")
    assert found.speedup == pytest.approx(1 / 0.41)  # the rest of the loop: parse, and the source


@pytest.mark.parametrize(("waits", "speedup"), [(0.6, 1 / 0.4), (0.2, 1 / 0.8)])
def test_the_estimate_ends_where_the_consumer_becomes_the_limit(waits: float, speedup: float) -> None:
    found = verdict_of(figures(SOURCE, held(MAP, 0.95), waits=waits))
    assert found is not None
    assert found.speedup == pytest.approx(speedup)
    assert f"about {speedup:.1f} x" in found.line


def test_an_estimate_that_is_not_worth_it_says_nothing() -> None:
    assert verdict(busy(FETCH, 0.95), busy(replace(FETCH, name="look"), 0.93)) is None
    assert verdict(SOURCE, held(MAP, 0.95), waits=0.1001) is not None
    assert verdict(busy(FETCH, 0.95), busy(replace(FETCH, name="look"), 0.6)) == ("calls", "map(fetch)")


def test_calls_advise_as_many_as_the_next_limit_allows() -> None:
    found = verdict_of(figures(SOURCE, busy(FETCH, 0.97), waits=0.5))
    assert found is not None
    assert found.line == (
        "map(fetch) limits: busy 97 %; the consumer waits 50 % of its time; try concurrency=8: about 2.0 x"
    )
    many = verdict_of(figures(busy(FETCH, 0.97), waits=1.0))
    assert many is not None
    assert "concurrency=32" in many.line
    assert many.speedup == 8


def test_a_full_loop_delays_calls_so_it_is_looked_at_first() -> None:
    assert verdict(busy(FETCH, 1.0), held(MAP, 0.9)) == ("loop", "map(decode)")
    assert verdict(busy(FETCH, 1.0), held(MAP, 0.65)) == ("calls", "map(fetch)")


def test_tiny_calls_are_advised_to_batch_not_to_use_threads() -> None:
    found = verdict_of(figures(SOURCE, held(replace(MAP, items=9_000_000), 0.9)))
    assert found is not None
    assert found.rule == "loop"
    assert "batched=256" in found.line
    assert "thread" not in found.line


def test_threads_are_said_to_help_only_what_leaves_the_interpreter() -> None:
    found = verdict_of(figures(SOURCE, busy(replace(FETCH, executor="thread"), 0.97)))
    assert found is not None
    assert found.line.endswith("if it waits or releases the GIL")


def body(held_s: float, waits: float = 0.4) -> dict[str, Any]:
    return {"consumer_held_s": held_s, "waits": waits}


def test_a_body_that_holds_the_loop_is_named_where_both_fill_it() -> None:
    found = verdict_of(figures(held(MAP, 0.4), **body(6)))
    assert found is not None
    assert (found.rule, found.stage) == ("loop body", None)
    assert found.speedup == pytest.approx(1 / 0.6)
    assert "plain `for`" in found.line
    assert verdict(held(MAP, 0.55), **body(4)) == ("loop", "map(decode)")  # the stage holds it longer
    assert verdict(busy(FETCH, 0.95), **body(6)) == ("calls", "map(fetch)")  # the loop had time to spare


def workers(*each: tuple[int, float]) -> dict[str, Any]:
    return {
        "workers": len(each),
        "items": sum(items for items, _ in each),
        "busy_s": sum(busy_s for _, busy_s in each),
        "per_worker": tuple(replace(FETCH, shard=n, items=items, busy_s=s) for n, (items, s) in enumerate(each)),
    }


def uneven(*each: tuple[int, float], merge: StageStats = MERGE) -> Any:
    return verdict_of(figures(SOURCE, replace(FETCH, concurrency=1, **workers(*each)), merge))


def test_one_worker_that_is_slower_than_the_rest_is_named_with_its_shard() -> None:
    found = uneven((100, 1.0), (100, 1.0), (100, 9.5))
    assert (found.rule, found.stage) == ("uneven workers", "map(fetch)")
    assert found.line.startswith("map(fetch) of shard 2 limits: busy 95 %, 10 x the time of the others")
    assert found.speedup == pytest.approx(0.95 / 0.2)  # then the consumer limits
    assert '.merge("best_effort"' in found.line
    loose = uneven((100, 1.0), (100, 1.0), (100, 9.5), merge=replace(MERGE, ordered=False))
    assert "a larger max_lead=" in loose.line


@pytest.mark.parametrize(
    "each",
    [
        ((100, 9.0), (100, 9.5), (100, 9.2)),  # all are slow
        ((0, 0.0), (0, 0.0), (100, 9.5)),  # the others have nothing to do
        ((10, 0.9), (10, 1.0), (100, 9.5)),  # it has more items, and is no slower
        ((100, 9.5),),
    ],
    ids=["all slow", "others empty", "more items", "one worker"],
)
def test_workers_that_are_alike_are_not_uneven(each: tuple[tuple[int, float], ...]) -> None:
    found = uneven(*each)
    assert found is None or found.rule != "uneven workers"


def test_idle_calls_after_slow_ones_are_a_matter_of_order() -> None:
    stalled = replace(FETCH, busy_s=8.0, wait_output_s=30.0)
    found = verdict_of(figures(SOURCE, stalled, waits=0.9))
    assert found is not None
    assert (found.rule, found.stage) == ("order", "map(fetch)")
    assert "ordered=False" in found.line
    assert found.speedup == pytest.approx(5)
    again = verdict_of(figures(SOURCE, replace(stalled, ordered=False), waits=0.9))
    assert again is not None
    assert "ordered=False" not in again.line
    assert verdict(SOURCE, stalled, held(MAP, 0.9)) == ("loop", "map(decode)")  # its downstream is idle


def test_calls_that_wait_for_permits_advise_a_larger_limit() -> None:
    limited = replace(FETCH, busy_s=4.0, details=(Detail("limited_s", 60.0),))
    found = verdict_of(figures(SOURCE, limited, waits=0.9))
    assert found is not None
    assert (found.rule, found.stage) == ("limit", "map(fetch)")
    assert "wait for permits" in found.line
    assert found.speedup == pytest.approx(10)
    few = replace(limited, details=(Detail("limited_s", 1.0),), busy_s=70.0)
    assert verdict(SOURCE, few) == ("calls", "map(fetch)")


def test_a_selective_filter_is_named_only_if_nothing_takes_long() -> None:
    source = held(replace(SOURCE, items=5_000_000), 0.4)
    rare = held(StageStats(name="rare", kind="filter", items=1000), 0.45)
    found = verdict_of(figures(source, rare))
    assert found is not None
    assert (found.rule, found.stage) == ("selective filter", "filter(rare)")
    assert "1 of 5,000" in found.line
    none = verdict_of(figures(source, replace(rare, items=0)))
    assert none is not None
    assert "none of 5,000,000" in none.line
    slow = held(replace(MAP, items=50_000), 0.8)
    assert verdict(SOURCE, slow, replace(rare, busy_s=0.1, held_s=0.1)) == ("loop", "map(decode)")
    assert verdict(source, replace(rare, items=2_500_000)) != ("selective filter", "filter(rare)")


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("map", 'executor="thread", concurrency=2'),
        ("batch", ".batch(collate=None)"),
        ("flat_map", ".unbatch()"),
        ("filter", "a .map(executor="),
        ("from_items", "data.__getitem__"),
        ("from_iterable", "a factory"),
        ("read_jsonl", ".map(executor="),
    ],
)
def test_every_kind_has_a_way_out(kind: str, word: str) -> None:
    assert word in way_out(kind, 2)


@pytest.mark.parametrize(
    ("kind", "executor", "word"),
    [
        ("read_jsonl", "inline", ".shard(8)"),
        ("from_iterable", "inline", ".map(concurrency=)"),
        ("through", "inline", ".map(concurrency=)"),
        ("map", "thread", "concurrency=8"),
    ],
)
def test_every_kind_of_wait_has_its_advice(kind: str, executor: Any, word: str) -> None:
    found = verdict_of(figures(StageStats(name="it", kind=kind, items=1000, busy_s=9.7, executor=executor), waits=1.0))
    assert found is not None
    assert found.rule == "calls"
    assert word in found.line


def test_the_rules_are_those_of_the_page() -> None:
    assert list(RULES) == [
        "consumer", "other ranks", "loop body", "memory", "quota", "collector", "gil", "cores", "uneven workers",
        "selective filter", "border", "loop", "limit", "calls", "order",
    ]  # fmt: skip


def test_waits_for_other_ranks_to_have_another_item_are_no_stage_s() -> None:
    assert verdict(SOURCE, held(MAP, 0.9), ranks_wait_s=3.9) == ("loop", "map(decode)")
    assert verdict(SOURCE, held(MAP, 0.1), ranks_wait_s=4.1) == ("other ranks", None)
    assert verdict(SOURCE, held(MAP, 0.1), waits=0.05, ranks_wait_s=0.5) == ("consumer", None)


def test_a_slow_feed_is_said_with_its_rate_and_promised_nothing() -> None:
    feed = StageStats(name="stream", kind="from_stream", items=400)
    found = verdict_of(figures(busy(feed, 0.97), MAP, MERGE, waits=0.95))
    assert found is not None
    assert (found.stage, found.speedup) == ("from_stream", None)
    assert "the feed gives 40 items/s and is waited for 97 % of the time" in found.line
    slower = verdict_of(figures(busy(replace(feed, items=9), 1.0), waits=1.0, items=9))
    assert slower is not None
    assert "gives 0.9 items/s" in slower.line


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("map", "batched=256"),
        ("gather", "a larger batched="),
        ("scatter", "a larger batched="),
        ("filter", "in a .map, between"),
        ("flat_map", ".unbatch after"),
        ("batch", "larger batches"),
        ("unbatch", "larger batches"),
        ("from_items", "__getitems__"),
        ("from_iterable", "let it yield lists"),
        ("source", "let it yield lists"),
    ],
)
def test_tiny_calls_of_every_kind_get_advice_for_their_stage(kind: str, word: str) -> None:
    found = verdict_of(figures(held(StageStats(name="it", kind=kind, items=9_000_000), 0.9)))
    assert found is not None
    assert word in found.line


def hosts(count: int, kind: Any = "process", **other: Any) -> dict[str, Any]:
    each = (HostStats(number=number, kind=kind, **other) for number in range(count))
    return {"hosts": tuple(each), "cpus": 8, "waits": 0.9}


SPREAD = replace(MAP, workers=8, hosts=2)


def test_hosts_have_event_loops_of_their_own() -> None:
    full = replace(SPREAD, busy_s=19.4, held_s=19.4)
    found = verdict_of(figures(replace(SOURCE, hosts=2), full, MERGE, **hosts(2)))
    assert found is not None
    assert (found.rule, found.stage) == ("loop", "map(decode)")
    assert "it holds the event loops of 2 processes 97 % of the time" in found.line
    half = replace(SPREAD, busy_s=9.7, held_s=9.7)
    assert verdict_of(figures(half, MERGE, **hosts(2))) is None  # one loop would have been full


def test_more_processes_are_advised_as_long_as_there_are_cpus_for_them() -> None:
    full = replace(SPREAD, busy_s=19.4, held_s=19.4)
    found = verdict_of(figures(full, MERGE, **hosts(2)))
    assert found is not None
    assert found.line.endswith("; or backend=Processes(8): about 4.0 x")
    few = verdict_of(figures(full, MERGE, **{**hosts(2), "cpus": 2}))
    assert few is not None
    assert "have all of the CPUs" in few.line
    assert "Processes(" not in few.line


def test_more_hosts_are_advised_on_other_machines_whatever_cpus_this_one_has() -> None:
    full = replace(SPREAD, busy_s=19.4, held_s=19.4)
    found = verdict_of(figures(full, MERGE, **{**hosts(2, node="node7"), "cpus": 2}))
    assert found is not None
    assert found.line.endswith("; or .shard(16) and 16 hosts: about 8.0 x")


def test_shards_are_advised_with_processes_that_would_be_idle_without() -> None:
    found = verdict_of(figures(SOURCE, held(MAP, 0.97), MERGE, waits=1.0, cpus=2))
    assert found is not None
    assert found.line.endswith("; or .shard(2) and backend=Processes(2): about 2.0 x")
    downstream = verdict_of(figures(SOURCE, MERGE, held(MAP, 0.97), waits=1.0, cpus=2))
    assert downstream is not None
    assert "Processes(" not in downstream.line  # what is downstream of the merge stays here


def test_of_threads_it_is_said_that_processes_help_python() -> None:
    full = replace(SPREAD, busy_s=19.4, held_s=19.4)
    found = verdict_of(figures(full, MERGE, **hosts(2, "thread")))
    assert found is not None
    assert "the event loops of 2 threads" in found.line
    assert "backend=Processes(8)" in found.line
    assert found.line.endswith("if it computes in Python")


def test_what_waits_in_hosts_isnt_excused_by_a_full_loop_here() -> None:
    fetch = replace(busy(FETCH, 0.95), hosts=2)
    assert verdict(fetch, MERGE, held(MAP, 0.5), **hosts(2)) == ("calls", "map(fetch)")


def test_taking_in_too_many_items_is_the_borders_limit() -> None:
    found = verdict_of(figures(replace(SPREAD, held_s=2.0), MERGE, **hosts(2, arrival_s=4.0)))
    assert found is not None
    assert (found.rule, found.stage, found.speedup) == ("border", None, None)
    assert "taking in the items of 2 processes holds the event loop 80 % of the time" in found.line
    assert verdict_of(figures(replace(SPREAD, held_s=2.0), MERGE, **hosts(2, arrival_s=0.4))) is None


LOOP = ThreadStats(number=2, name="streamline loop", cpu_s=1.0)
MAIN = ThreadStats(number=1, name="MainThread", cpu_s=0.5)


def contention(*threads: ThreadStats, **other: Any) -> ContentionStats:
    """Ten seconds in which a loop's thread and the consumer's hardly compute."""
    seen: dict[str, Any] = {"looked_s": 10.0, "gil_looks": 30, "threads": (MAIN, *(threads or (LOOP,))), "loop": 2}
    return ContentionStats(**seen | other)


@pytest.mark.parametrize(
    ("rule", "seen", "words"),
    [
        ("memory", contention(memory_wait_s=4.0), "40 % of the time programs wait for pages"),
        ("quota", contention(quota_periods=100, quota_throttled=80), "used up in 80 % of its periods"),
        ("collector", contention(collecting_s=5.0), "stops all threads of this process 50 % of the time"),
        (
            "gil",
            contention(LOOP, ThreadStats(number=3, name="exporter", cpu_s=6.0, core_wait_s=3.0), gil_waits=29),
            "the thread 'exporter' limits: it computes 90 % of the time",
        ),
        ("cores", contention(replace(LOOP, cpu_s=3.0, core_wait_s=6.0)), "the event loop waits for one 60 % of"),
    ],
)  # fmt: skip
def test_what_slows_all_stages_alike_is_named_before_any_of_them(rule: str, seen: ContentionStats, words: str) -> None:
    found = verdict_of(figures(SOURCE, held(MAP, 0.95), contention=seen))
    assert found is not None
    assert (found.rule, found.stage) == (rule, None)
    assert words in found.line
    assert "; the consumer waits 80 % of its time; " in found.line  # the page tells the parts apart by it
    assert verdict(SOURCE, held(MAP, 0.95), waits=0.05, contention=seen) == ("consumer", None)


@pytest.mark.parametrize(
    "seen",
    [
        contention(),
        contention(memory_wait_s=1.0, quota_periods=100, quota_throttled=15, collecting_s=1.5, gil_waits=30),
        contention(looked_s=0.5, memory_wait_s=0.4, collecting_s=0.4, quota_periods=5, quota_throttled=5),
        contention(LOOP, ThreadStats(number=3, name="feeder", cpu_s=9.0)),  # it computes, and not in Python
        contention(replace(LOOP, cpu_s=8.0), ThreadStats(number=3, name="feeder", cpu_s=9.0), gil_waits=30),  # nor here
        contention(LOOP, replace(MAIN, cpu_s=4.0), gil_waits=30),  # the loop's body, in its own time
        contention(replace(LOOP, cpu_s=9.5), gil_waits=30),
        contention(replace(LOOP, cpu_s=5.0, core_wait_s=4.0)),
        contention(replace(LOOP, cpu_s=0.5, core_wait_s=4.0)),  # a loop that sleeps is late whenever it wakes
        contention(ThreadStats(number=9, name="Dummy", core_wait_s=9.0)),
    ],
)
def test_a_little_of_it_or_what_others_do_is_not_named(seen: ContentionStats) -> None:
    assert verdict(SOURCE, held(MAP, 0.95), waits=0.6, contention=seen) == ("loop", "map(decode)")


def test_threads_that_compute_in_python_are_advised_processes() -> None:
    pool = replace(FETCH, executor="thread")
    turns = [ThreadStats(number=number, name="streamline map", cpu_s=2.4) for number in range(3, 7)]
    found = verdict_of(figures(SOURCE, busy(pool, 0.97), MERGE, cpus=8, contention=contention(*turns, gil_waits=30)))
    assert found is not None
    assert (found.rule, found.stage) == ("calls", "map(fetch)")
    assert "take turns with the GIL" in found.line
    assert "backend=sl.Processes(5): about 5.0 x" in found.line
    waiting = [replace(thread, cpu_s=0.2) for thread in turns]
    found = verdict_of(figures(SOURCE, busy(pool, 0.97), MERGE, cpus=8, contention=contention(*waiting, gil_waits=30)))
    assert found is not None
    assert "if it waits or releases the GIL" in found.line
    spread = [replace(thread, cpu_s=9.0) for thread in turns]  # on four cores at once
    found = verdict_of(figures(SOURCE, busy(pool, 0.97), MERGE, cpus=8, contention=contention(*spread, gil_waits=30)))
    assert found is not None
    assert "if it waits or releases the GIL" in found.line


def test_a_server_that_is_asked_again_and_again_is_said_to_be_busy() -> None:
    lines = StageStats(name="read_lines", kind="read_lines", items=1000, executor="inline")
    asked = ReadStats("read_lines", requests=100, retries=40)
    found = verdict_of(figures(busy(lines, 0.97), reads=(asked,)))
    assert found is not None
    assert "40 of its 100 requests were repeats: the server is busy, or drops connections" in found.line
    found = verdict_of(figures(busy(lines, 0.97), reads=(replace(asked, retries=4),)))
    assert found is not None
    assert "repeats" not in found.line


def test_in_a_healthy_hour_nothing_is_named() -> None:
    draw = random.Random(0)
    for _ in range(360):  # windows of ten seconds
        own = replace(LOOP, cpu_s=draw.uniform(1, 5), core_wait_s=draw.uniform(0, 1.5))
        body = replace(MAIN, cpu_s=draw.uniform(0, 9.5))
        seen = contention(
            own,
            body,
            collecting_s=draw.uniform(0, 0.5),
            gil_waits=draw.randrange(10),
            memory_wait_s=draw.uniform(0, 0.5),
            quota_periods=100,
            quota_throttled=draw.randrange(5),
        )
        waits = draw.uniform(0, 0.3)
        stages = held(MAP, draw.uniform(0.1, 0.5)), busy(FETCH, draw.uniform(0.1, 0.55)), MERGE
        found = verdict(SOURCE, *stages, waits=waits, contention=seen)
        assert found == (("consumer", None) if waits < 0.1 else None)
