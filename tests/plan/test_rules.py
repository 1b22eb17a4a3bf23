"""What may stand where: each refusal names the stage and the way out, where the plan is written."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.core.flow import Chunk, Lists, StageRun
from streamline.errors import PlanError
from streamline.pipeline import Pipeline
from streamline.transforms.base import Stage


def same(x: Any) -> Any:
    return x


async def wait(x: Any) -> Any:
    return x


def noisy(x: Any, *, rng: Any) -> Any:
    return x


def several(x: Any) -> list[Any]:
    return [x]


def chained(stages: int, pipe: Pipeline[Any]) -> Pipeline[Any]:
    for _ in range(stages):
        pipe = pipe.regenerate(5)  # no stage's pull takes more calls
    return pipe


def nested(levels: int) -> Pipeline[Any]:
    pipe: Pipeline[Any] = sl.from_items(range(5))
    for _ in range(levels):
        pipe = sl.concat(pipe)
    return pipe


def test_more_stages_than_a_pull_can_go_through_are_refused() -> None:
    longest = chained(60, nested(4))
    with pytest.raises(PlanError, match=r"an item would pass 65 stages, one after the other, and 64 is the most"):
        longest.map(same)
    assert list(nested(64)) == [*range(5)]
    with pytest.raises(PlanError, match=r"would pass 65 stages.*concatenate or mix all pipelines at once"):
        list(nested(65))


def test_as_many_stages_as_are_allowed_run_and_resume() -> None:
    pipe = chained(64, sl.from_items(range(5)))
    assert sorted(pipe) == [*range(5)]
    with pipe.open() as stream:
        first, snapshot = [next(stream)], stream.snapshot()
    with pipe.open(resume=sl.Snapshot.from_json(snapshot.to_json())) as stream:
        assert sorted(first + list(stream)) == [*range(5)]


@sl.stage(state=dict)
async def custom(items: AsyncIterator[Any], *, state: dict[str, Any]) -> AsyncIterator[Any]:
    async for item in items:
        yield item


def items() -> Pipeline[int]:
    return sl.from_items(list(range(40)))


def iterable() -> Pipeline[int]:
    return sl.from_iterable(lambda: range(40))


def files() -> Pipeline[str]:
    return sl.read_lines(["a.txt", "b.txt"])


def unordered(pipe: Pipeline[Any]) -> Pipeline[Any]:
    return pipe.map(wait, ordered=False, concurrency=2)


def best_effort(pipe: Pipeline[Any]) -> Pipeline[Any]:
    return pipe.shard(2).merge("best_effort")


def refused(make: Callable[[], object], *parts: str) -> None:
    with pytest.raises(PlanError) as found:
        make()
    for part in parts:
        assert part in str(found.value)


# Before the shard


STAGES: dict[str, Callable[[Pipeline[Any]], Pipeline[Any]]] = {
    "map": lambda p: p.map(same),
    "filter": lambda p: p.filter(same),
    "flat_map": lambda p: p.flat_map(several),
    "batch": lambda p: p.batch(2),
    "unbatch": lambda p: p.unbatch(),
    "through": lambda p: p.through(custom),
    "prefetch": lambda p: p.prefetch(3),
}

SOURCES: dict[str, Callable[[], Pipeline[Any]]] = {"items": items, "iterable": iterable, "files": files}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stage", STAGES)
def test_what_acts_on_items_before_the_shard_is_refused(source: str, stage: str) -> None:
    """Whatever the source: the sentence of the design, by name and number."""
    refused(
        lambda: STAGES[stage](SOURCES[source]()).shard(16),
        f"`.{stage}` before `.shard(16)` would run 16 times per item: move it after `.shard`",
    )


def test_a_window_shuffle_before_the_shard_is_refused() -> None:
    refused(lambda: items().shuffle(window=4).shard(2), "`.shuffle` before `.shard(2)` would run 2 times per item")


def test_what_acts_on_the_index_may_stand_there() -> None:
    pipe = items().shuffle(seed=1).take(30).skip(2).repeat(2).shard(4)
    assert len(pipe.first(1000)) == 56


def test_a_stream_that_every_worker_reads_whole_can_be_cut_and_repeated_there() -> None:
    assert sorted(iterable().skip(1).take(5).repeat(2).shard(3)) == sorted([1, 2, 3, 4, 5] * 2)


@pytest.mark.parametrize("stage", ["take", "skip"])
def test_files_can_not_be_cut_before_they_are_read(stage: str) -> None:
    refused(
        lambda: getattr(files(), stage)(3).shard(2),
        f"`.{stage}` before `.shard` needs to know which items there are, and read_lines doesn't",
        "move it after `.shard` (there it counts per shard), or after `.merge`",
    )


# Shuffles of the index and of the files


def test_an_index_shuffle_behind_the_shard_is_refused() -> None:
    refused(lambda: items().shard(2).shuffle(), "put it before .shard, or give it a window=")
    refused(lambda: items().shard(2).merge().shuffle(), "put it before .shard, or give it a window=")
    refused(lambda: items().map(same).shuffle(), "put it before .shard, or give it a window=")


@pytest.mark.parametrize("source", [iterable, files])
def test_an_index_shuffle_needs_an_index(source: Callable[[], Pipeline[Any]]) -> None:
    parts = ("permutes a whole index", "has none: use .shuffle(window=n) after .shard")
    refused(lambda: source().shuffle(), *parts)
    refused(lambda: source().shuffle().shard(2), *parts)
    refused(lambda: source().shard(2).shuffle(), *parts)


def test_files_have_a_shuffle_of_their_own() -> None:
    refused(lambda: files().shuffle(), "and .shuffle_files() before it")
    files().shuffle_files(seed=3).shard(2)
    files().shuffle_files().map(same)


@pytest.mark.parametrize("source", [items, iterable])
def test_a_shuffle_of_files_needs_files(source: Callable[[], Pipeline[Any]]) -> None:
    refused(lambda: source().shuffle_files(), "permutes a list of files, and from_i", "has none")
    refused(lambda: source().shuffle_files().shard(2), "permutes a list of files, and from_i", "has none")


def test_a_mixture_has_no_list_of_files_to_shuffle() -> None:
    refused(lambda: sl.mix([files()]).shuffle_files().shard(2), ".shuffle_files permutes a list of files, and mix has")


def test_a_shuffle_of_files_stands_next_to_them() -> None:
    refused(lambda: files().shard(2).shuffle_files(), "next to the source, before .shard")
    refused(lambda: files().map(same).shuffle_files(), "next to the source, before .shard")


# Shard, merge, modes


def test_there_is_one_shard() -> None:
    refused(lambda: items().shard(2).shard(2), "once", "after another .shard or a .merge")
    refused(lambda: items().merge().shard(2), "once")


def test_there_is_one_merge() -> None:
    refused(lambda: items().shard(2).merge().merge(), "there is one .merge: after it there is only one stream")


@pytest.mark.parametrize(
    ("source", "mode", "modes"),
    [
        (items, "file", "interleaved, contiguous"),
        (items, "replicated", "interleaved, contiguous"),
        (iterable, "interleaved", "replicated"),
        (items, "other", "interleaved, contiguous"),
    ],
)
def test_a_mode_that_the_source_does_not_have_is_refused(source: Any, mode: Any, modes: str) -> None:
    refused(lambda: source().shard(2, mode), f"is one of {modes}", repr(mode))


@pytest.mark.parametrize("shards", [0, -1])
def test_there_is_at_least_one_shard(shards: int) -> None:
    refused(lambda: items().shard(shards), f".shard(num_shards) is at least 1, got {shards}")


def test_an_endless_repeat_has_no_contiguous_blocks() -> None:
    refused(
        lambda: items().repeat().shard(2, "contiguous"),
        "an endless .repeat() has no contiguous blocks: put .repeat() after .shard",
    )
    assert items().shard(2, "contiguous").repeat().first(45)[40:] == [0, 20, 1, 21, 2]


@pytest.mark.parametrize(
    "make", [lambda: items().repeat().shuffle().shard(2), lambda: items().repeat().repeat().shard(2)]
)
def test_what_an_endless_index_can_not_do_is_refused_where_it_is_written(make: Callable[[], object]) -> None:
    refused(make, ".repeat")


# Choosing and rewinding


REWINDING: dict[str, Callable[[Pipeline[Any]], Pipeline[Any]]] = {
    "flat_map": lambda p: p.flat_map(several),
    "unbatch": lambda p: p.unbatch(),
    "shuffle": lambda p: p.shuffle(window=4),
    "custom": lambda p: p.through(custom),
    "map": unordered,
}


@pytest.mark.parametrize("chooser", [unordered, best_effort])
@pytest.mark.parametrize("stage", REWINDING)
def test_a_repeat_between_choosing_and_rewinding_is_refused(chooser: Any, stage: str) -> None:
    refused(lambda: REWINDING[stage](chooser(items()).repeat(2)), stage, "move .repeat before .shard")
    refused(lambda: REWINDING[stage](chooser(items()).repeat(2).map(same).take(5)), "move .repeat before .shard")


@pytest.mark.parametrize("chooser", [unordered, best_effort])
@pytest.mark.parametrize("stage", REWINDING)
def test_each_of_the_two_alone_may_be_repeated(chooser: Any, stage: str) -> None:
    REWINDING[stage](chooser(items().repeat(2)))
    REWINDING[stage](chooser(items()))
    REWINDING[stage](items().shard(2)).merge().repeat(2)
    chooser(items()).repeat(2)


def test_the_refusal_says_who_chooses() -> None:
    refused(lambda: best_effort(items()).repeat().shuffle(window=2), "the best-effort merge")
    refused(lambda: unordered(items()).repeat().shuffle(window=2), "map(wait)")


@pytest.mark.parametrize("chooser", [unordered, best_effort])
def test_numbered_generators_behind_choices_are_refused(chooser: Any) -> None:
    refused(lambda: chooser(items()).map(noisy, seed=0), ".map(seed=) numbers its inputs", "move it before")
    refused(lambda: chooser(items()).filter(same).map(noisy, seed=0), "move it before")
    chooser(items().shuffle())


def test_numbered_generators_before_the_choices_are_fine() -> None:
    items().shard(2).map(noisy, seed=0).merge("best_effort")


# Options


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.batch(0), ".batch(size) is at least 1, got 0"),
        (lambda p: p.batch(2.0), ".batch(size) is an integer, got float 2.0"),
        (lambda p: p.batch(2, collate="list"), ".batch(collate=) is 'stack', 'torch', None or a function, got 'list'"),
        (lambda p: p.take(-1), ".take(count) is at least 0"),
        (lambda p: p.skip(-1), ".skip(count) is at least 0"),
        (lambda p: p.repeat(-1), ".repeat(times) is at least 0"),
        (lambda p: p.shuffle(window=0), ".shuffle(window=) is at least 1"),
        (lambda p: p.shuffle(seed=-1), ".shuffle(seed=) is at least 0"),
        (lambda p: p.prefetch(0), ".prefetch(items) is at least 1"),
        (lambda p: p.prefetch(1, bytes=0), ".prefetch(bytes=) is at least 1"),
        (lambda p: p.map(3), ".map(fn) is a function, got int 3"),
        (lambda p: p.map(wait, concurrency=0), ".map(concurrency=) is at least 1"),
        (lambda p: p.map(same, concurrency=2), "needs executor='thread'"),
        (lambda p: p.map(same, ordered=False), "needs executor='thread'"),
        (lambda p: p.map(wait, executor="thread"), "runs in the event loop already"),
        (lambda p: p.map(same, executor="process"), ".map(executor=) is 'thread' or None, got 'process'"),
        (lambda p: p.map(noisy, seed=-1), ".map(seed=) is at least 0"),
        (lambda p: p.filter(wait), "an async one would always be true"),
        (lambda p: p.flat_map(wait), ".flat_map takes a sync function; for an async one, write a stage for .through"),
        (lambda p: p.through(None), ".through(fn) is a function"),
        (lambda p: p.merge("eager"), ".merge is 'strict' or 'best_effort', got 'eager'"),
        (lambda p: p.merge(max_lead=3), "options of .merge('best_effort')"),
        (lambda p: p.merge("best_effort", max_lead=0), ".merge(max_lead=) is at least 1"),
        (lambda p: p.merge("best_effort", max_skips_per_round=-1), ".merge(max_skips_per_round=) is at least 0"),
        (lambda p: p.map(same, name="items"), "already: names keep states apart"),
        (lambda p: p.map(same, name="x").filter(same, name="x"), "already: names keep states apart"),
        (lambda p: p.open(epoch=-1), "epoch=) is at least 0"),
        (lambda p: p.open(rank=1), "together, or neither"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_out_of_range_is_refused_by_its_name(make: Callable[[Any], object], message: str) -> None:
    refused(lambda: make(items()), message)


# Ranks


def test_a_file_that_is_missing_is_found_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(sl.errors.ReadError):
        sl.read_lines(tmp_path / "missing.txt").open()


# Stages of users' own


@dataclass(frozen=True, kw_only=True)
class Doubled(Stage[int, int]):
    kind = "doubled"

    async def lists(self, run: StageRun[int]) -> Lists[int]:
        while (chunk := await run.upstream.pull(run.max_items)) is not None:
            yield Chunk([2 * item for item in chunk.items], chunk.states, chunk.progress)


def test_a_stage_class_of_the_users_is_put_into_a_plan() -> None:
    pipe = items().shard(2).through(Doubled(name="doubled")).through(Doubled(name="doubled"), name="again")
    assert pipe.first(3) == [0, 4, 8]
    assert "  doubled()\n  doubled(again)\n" in str(pipe)
    assert "again_2" in pipe.through(Doubled(name="again")).plan.names
    refused(lambda: pipe.through(Doubled(name="third"), name="again"), "a stage called 'again' already")
    refused(lambda: pipe.through(Doubled(name="third"), factor=3), "takes no factor=: a stage has its options")
    refused(lambda: items().through(Doubled(name="early")).shard(2), "`.doubled` before `.shard(2)` would run 2 times")


def test_a_kind_of_the_packages_own_is_not_taken_by_another_class() -> None:
    class Batch(Doubled):
        pass

    refused(lambda: items().through(Batch(name="b")), "Batch is of the kind 'batch'", 'kind = "own_batch"')
    assert list(items().batch(40, collate=None)) == [list(range(40))]
