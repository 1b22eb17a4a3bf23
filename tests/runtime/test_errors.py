"""Items on which user code fails are left out, counted at consumption, and counted again exactly at a resume."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.core import atomic_file, dead_letters
from streamline.core.dead_letters import DeadLetters
from streamline.core.error_policy import Errors, Policy
from streamline.core.flow import Flow
from streamline.core.tasks import Tasks
from streamline.testing.laws import ExpectedItems, quiescence_law, resume_law
from streamline.testing.subjects import PipelineSubject, run
from tests.laws.profile import examples, long_but
from tests.laws.stages import pairs

Pipe = sl.Pipeline[Any]

LENGTH = 9


class Skipping(PipelineSubject):
    """A pipeline that is run with on_error="skip"."""

    def open(self, tasks: Tasks, text: str | None) -> Flow[Any]:
        tasks.session = replace(tasks.session, errors=Errors(Policy(on_error="skip", max_errors=None)))
        return super().open(tasks, text)


class Fails:
    """A function that fails on some items, by their number."""

    def __init__(self, bad: frozenset[int], make: Callable[[int], Any] = lambda item: item) -> None:
        self.__name__ = "fails"
        self.bad, self.make = bad, make

    def check(self, item: Any) -> None:
        if number(item) in self.bad:
            raise ValueError(f"bad {item}")

    def __call__(self, item: Any) -> Any:
        self.check(item)
        return self.make(item)


class FailsLater(Fails):
    """The same, async, at an erratic pace."""

    dice = Random(0)

    async def __call__(self, item: Any) -> Any:
        for _ in range(self.dice.randrange(4)):
            await anyio.lowlevel.checkpoint()
        self.check(item)
        return self.make(item)


class FailsSeeded(Fails):
    def __call__(self, item: Any, *, rng: Any = None) -> Any:
        self.check(item)
        return item


class Verdict:
    """What a filter's function returns: true, or as an array of several items, neither true nor false."""

    def __init__(self, bad: frozenset[int], item: int) -> None:
        self.good = item not in bad

    def __bool__(self) -> bool:
        if self.good:
            return True
        raise ValueError("the truth value is ambiguous")


class FailsItems:
    """Items of which some can't be read."""

    def __init__(self, bad: frozenset[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"bad {index}")
        return index


class FailsLists(FailsItems):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def number(item: Any) -> int:
    """Return the number that an item, or a list, begins with."""
    return int(item[0] if isinstance(item, list) else item)


def first(items: Any) -> Any:
    return items[0]


def numbers() -> Pipe:
    return sl.from_items(range(LENGTH))


def timed(pipe: Pipe, size: int = 5) -> Pipe:
    """Go through batches that leave whenever nothing is ready."""
    return pipe.batch(size, collate=None, max_wait_s=1e-9).unbatch()


STAGES: dict[str, Callable[[frozenset[int]], Pipe]] = {
    "map": lambda bad: numbers().map(Fails(bad)),
    "seeded map": lambda bad: numbers().map(FailsSeeded(bad), seed=1),
    "async map": lambda bad: numbers().map(FailsLater(bad), concurrency=3),
    "unordered map": lambda bad: numbers().map(FailsLater(bad), concurrency=3, ordered=False),
    "threads": lambda bad: numbers().map(Fails(bad), executor="thread", concurrency=2),
    "unordered threads": lambda bad: numbers().map(Fails(bad), executor="thread", concurrency=2, ordered=False),
    "filter": lambda bad: numbers().filter(Fails(bad, lambda item: True)),
    "filter by what has no truth value": lambda bad: numbers().filter(partial(Verdict, bad)),
    "flat_map": lambda bad: numbers().flat_map(Fails(bad, lambda item: [item])),
    "collate": lambda bad: numbers().batch(1, collate=Fails(bad, first)),
    "timed collate": lambda bad: numbers().batch(1, collate=Fails(bad, first), max_wait_s=60),
    "getitem": lambda bad: sl.from_items(FailsItems(bad)),
    "getitems": lambda bad: sl.from_items(FailsLists(bad)),
    "merged": lambda bad: numbers().shard(3).map(Fails(bad)).merge(),
    "behind the merge": lambda bad: numbers().shard(3).merge().map(Fails(bad)),
    "best effort": lambda bad: numbers().shard(3).map(FailsLater(bad), concurrency=2).merge("best_effort"),
    "timed in workers": lambda bad: timed(numbers().shard(3).map(Fails(bad)), size=2).merge(),
    "timed behind the merge": lambda bad: timed(numbers().shard(3).merge("best_effort").map(Fails(bad))),
}
"""Every stage that calls user code, failing on the items that are given; else it passes them on."""

BEHIND: dict[str, Callable[[Pipe], Pipe]] = {
    "nothing": lambda pipe: pipe,
    "shuffle": lambda pipe: pipe.shuffle(window=5),
    "batch": lambda pipe: pipe.batch(5, collate=None).unbatch(),
    "timed batch": timed,
    "timed batches": lambda pipe: timed(timed(pipe).shuffle(window=3)),
    "custom": lambda pipe: pipe.through(pairs).flat_map(lambda pair: pair, name="apart"),
    "unordered": lambda pipe: pipe.map(FailsLater(frozenset()), concurrency=2, ordered=False, name="later"),
    "prefetch": lambda pipe: pipe.prefetch(3),
}

REORDERS = (
    "unordered map", "unordered threads", "merged", "best effort", "timed in workers", "timed behind the merge",
)  # fmt: skip
"""A merge goes by how many items each worker gave, so leaving one out moves the others."""

ON_UVLOOP = ["map", "async map", "unordered map", "flat_map", "best effort"]

bad_items = st.frozensets(st.integers(0, LENGTH - 1), min_size=1, max_size=LENGTH)


@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize("stage", STAGES)
@examples(5)
@given(bad=bad_items, seed=st.integers(0, 2**16))
def test_resuming_is_exact_at_every_state_of_a_stage_that_skips(stage: str, bad: frozenset[int], seed: int) -> None:
    pipe = STAGES[stage](bad)
    good = [item for item in range(LENGTH) if item not in bad]
    truth = ExpectedItems(good, choosing=stage in REORDERS)
    run(partial(resume_law, subject=Skipping(pipe), truth=truth, generations=3, dice=Random(seed)))


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("behind", BEHIND)
@examples(5)
@given(bad=bad_items, stage=st.sampled_from(sorted(STAGES)), seed=st.integers(0, 2**16))
def test_it_is_exact_behind_stages_that_read_again(behind: str, bad: frozenset[int], stage: str, seed: int) -> None:
    pipe = BEHIND[behind](STAGES[stage](bad))
    good = [item for item in range(LENGTH) if item not in bad]
    run(
        partial(
            resume_law,
            subject=Skipping(pipe),
            truth=ExpectedItems(good, choosing=True),
            generations=3,
            dice=Random(seed),
        )
    )


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("stage", long_but(ON_UVLOOP[2:], ON_UVLOOP))
@examples(2)
@given(bad=st.frozensets(st.integers(0, LENGTH - 1), min_size=2, max_size=9))
def test_it_is_exact_on_uvloop(stage: str, bad: frozenset[int]) -> None:
    pipe = STAGES[stage](bad).shuffle(window=4)
    truth = ExpectedItems([item for item in range(LENGTH) if item not in bad], choosing=True)
    run(partial(resume_law, subject=Skipping(pipe), truth=truth, generations=5, dice=Random(0)), "uvloop")


@pytest.mark.parametrize("stage", STAGES)
def test_states_stand_still_while_nobody_pulls(stage: str) -> None:
    run(partial(quiescence_law, subject=Skipping(STAGES[stage](frozenset({1, 2, 7, 13}))), dice=Random(0)))


SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}


@pytest.mark.parametrize("behind", ["nothing", "shuffle", "custom", "unordered", "timed batch", "timed batches"])
@examples(5)
@given(bad=bad_items, stage=st.sampled_from(sorted(STAGES)), stops=st.lists(st.integers(0, 5), max_size=5))
def test_each_bad_item_is_counted_once_however_often_the_run_is_interrupted(
    behind: str, bad: frozenset[int], stage: str, stops: list[int]
) -> None:
    pipe = BEHIND[behind](STAGES[stage](bad))
    items: list[Any] = []
    snapshot: sl.Snapshot | None = None
    for stop in stops:
        with pipe.open(resume=snapshot, **SKIP) as stream:
            items += islice(stream, stop)
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            assert stream.errors.total <= len(bad)
    with pipe.open(resume=snapshot, **SKIP) as stream:
        items += stream
        assert stream.errors.total == len(bad)
        assert stream.snapshot().to_json()
    assert sorted(items) == [item for item in range(LENGTH) if item not in bad]
    with pipe.open(resume=stream.snapshot(), **SKIP) as stream:
        assert list(stream) == []
        assert stream.errors.total == len(bad)


@pytest.mark.parametrize("max_wait_s", [None, 5.0])
def test_a_batch_hides_no_skipped_item_from_max_errors(max_wait_s: float | None) -> None:
    pipe = sl.from_items([1, 2, 0, 3, 0, 4]).map(invert).batch(2, collate=None, max_wait_s=max_wait_s)
    with pipe.open(on_error="skip", max_errors=1) as stream:
        with pytest.raises(sl.errors.TooManyErrors):
            list(stream)
        assert stream.errors.total == 2


def test_repeats_of_timed_batches_go_on_counting() -> None:
    pipe = sl.from_items([1, 0, 2]).map(invert).batch(2, collate=None, max_wait_s=5.0).repeat(3)
    with pipe.open(**SKIP) as stream:
        list(islice(stream, 2))
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot, **SKIP) as stream:
        assert list(stream) == [[60, 30]]
        assert stream.errors.total == 3


def invert(item: int) -> int:
    return 60 // item


# Together with what else a pipeline has -------------------------------------------------------------------------------


def check(item: int) -> int:
    if item % 5 == 1:
        raise ValueError(item)
    return item


async def check_soon(item: int) -> int:
    return check(item)


def letters(path: Path) -> list[tuple[Any, ...]]:
    """Return who skipped what, in order."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(letter["shard"], letter["stage"], letter["n"], letter["passes"], letter["item"]) for letter in found]


@pytest.mark.parametrize("where", ["worker", "behind the merge"])
def test_what_is_skipped_before_a_batch_that_does_not_wait_counts(where: str, tmp_path: Path) -> None:
    source = sl.from_items(range(12)) if where == "worker" else sl.from_items(range(12)).merge()
    pipe = source.map(check).batch(3, collate=None, max_wait_s=60)
    with pipe.open(**SKIP, dead_letters=tmp_path / "bad.jsonl") as stream:
        assert list(stream) == [[0, 2, 3], [4, 5, 7], [8, 9, 10]]
        assert stream.errors.total == 3
    assert len(letters(tmp_path / "bad.jsonl")) == 3
    with pipe.open(on_error="skip", max_errors=2) as stream, pytest.raises(sl.errors.TooManyErrors):
        list(stream)


def test_what_a_pass_skipped_beyond_its_end_is_not_taken_for_skips_of_the_next(tmp_path: Path) -> None:
    pipe = sl.from_items(range(30)).map(check_soon, concurrency=8).take(3).repeat(3)
    with pipe.open(**SKIP, dead_letters=tmp_path / "bad.jsonl") as stream:
        assert list(stream) == [0, 2, 3] * 3
        assert [failure.item for failure in stream.errors.last] == [1, 1, 1]
    assert letters(tmp_path / "bad.jsonl") == [(0, "check_soon", n, [n - 1], "1") for n in (1, 2, 3)]


def numbered(path: Path) -> list[tuple[int, str]]:
    return [(n, item) for _, _, n, _, item in letters(path)]


def test_lines_of_items_that_a_cache_on_disk_serves_stay_at_a_resume(tmp_path: Path) -> None:
    """They aren't tried again: a pass that is on disk is read from there, whatever the snapshot counts."""
    bad = tmp_path / "bad.jsonl"
    pipe = sl.from_items(range(12)).map(check).cache(path=tmp_path / "kept").repeat(2)
    options = {**SKIP, "dead_letters": bad}
    with pipe.open(**options) as stream:
        begun = [next(stream), next(stream)]
        snapshot = stream.snapshot()
        list(stream)
    whole = numbered(bad)
    assert len(whole) == 3
    for _ in range(2):
        with pipe.open(resume=snapshot, **options) as stream:
            assert numbered(bad) == whole
            assert len(begun + list(stream)) == 18
            assert stream.errors.total == 3
        assert numbered(bad) == whole


@pytest.mark.parametrize("another", [False, True])
def test_a_line_that_comes_again_behind_a_cache_is_there_once(
    another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block was written, so that items are tried again; those that fail may be others, where order is chosen."""
    bad, kept = tmp_path / "bad.jsonl", tmp_path / "kept"
    pipe = sl.from_items(range(12)).map(check).cache(path=kept)
    options = {**SKIP, "dead_letters": bad}
    with pipe.open(**options) as stream:
        next(stream)
        snapshot = stream.snapshot()
        list(stream)
    whole = bad.read_text()
    for file in kept.iterdir():
        file.unlink()
    if another:
        bad.write_text(whole.replace('"item":"6"', '"item":"60"'))
    rewritten, real = list[bytes](), atomic_file.replace_file

    def replace_file(path: Path, data: bytes) -> None:
        rewritten.append(data)
        real(path, data)

    monkeypatch.setattr(dead_letters, "replace_file", replace_file)
    with pipe.open(resume=snapshot, **options) as stream:
        list(stream)
    assert numbered(bad) == [(1, "1"), (2, "6"), (3, "11")]
    assert len(rewritten) == another
    assert another or bad.read_text() == whole


def test_a_snapshot_by_a_signals_handler_while_errors_are_counted_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler runs between any two steps of the consumer's thread; here it does in the middle of the writing."""
    append, inside = DeadLetters.append, list[sl.Snapshot]()

    def interrupted(self: DeadLetters, letters: Any) -> None:
        written = list(letters)
        if written:
            inside.append(stream.snapshot())
            assert stream.errors is not None
        append(self, written)

    pipe = sl.from_items(range(100)).map(check)
    with pipe.open(**SKIP, dead_letters=tmp_path / "bad.jsonl") as stream:
        monkeypatch.setattr(DeadLetters, "append", interrupted)
        delivered = list(stream)
        assert stream.errors.total == 20
    assert [letter[2] for letter in letters(tmp_path / "bad.jsonl")] == list(range(1, 21))
    monkeypatch.undo()
    assert inside
    with pipe.open(**SKIP, resume=inside[0]) as stream:
        rest = list(stream)
        assert stream.errors.total == 20
    assert delivered[len(delivered) - len(rest) :] == rest


def test_ctrl_c_while_errors_are_counted_loses_no_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = DeadLetters.append

    def struck(self: DeadLetters, letters: Any) -> None:
        if list(letters):
            monkeypatch.setattr(DeadLetters, "append", append)
            raise KeyboardInterrupt

    path = tmp_path / "bad.jsonl"
    with (  # noqa: PT012 - it strikes in the middle
        pytest.raises(KeyboardInterrupt),
        sl.from_items(range(10)).map(check).open(**SKIP, dead_letters=path) as stream,
    ):
        assert next(stream) == 0
        monkeypatch.setattr(DeadLetters, "append", struck)
        list(stream)
    assert [letter[2] for letter in letters(path)] == list(range(1, 1 + stream.errors.total))
    assert stream.errors.total


def test_a_worker_whose_items_are_all_skipped_holds_a_strict_merge_up_no_longer() -> None:
    def odd(item: int) -> int:
        if item % 2 == 0:
            raise ValueError(item)
        return item

    with sl.from_items(range(3000)).shard(2).map(odd).merge().open(**SKIP) as stream:
        assert list(stream) == list(range(1, 3000, 2))
        assert stream.errors.total == 1500


def test_too_many_errors_with_a_pause_and_progress_on_comes_behind_the_pause() -> None:
    pipe = sl.from_items(range(2000)).map(check)
    with pipe.open(on_error="skip", max_errors=0, progress=True) as stream:
        assert next(stream) == 0
        with stream.paused():
            snapshot = stream.snapshot()
        with pytest.raises(sl.errors.TooManyErrors):
            list(stream)
        with stream.paused():
            assert stream.snapshot().produced
    with pipe.open(**SKIP, resume=snapshot) as stream:
        assert list(stream) == [item for item in range(1, 2000) if item % 5 != 1]


@pytest.mark.long
def test_a_long_run_with_skipped_items_snapshots_and_stats_holds_on_to_nothing() -> None:
    """A fifth is skipped; what is held is what was read ahead, which goes up and down."""
    pipe = sl.from_iterable(itertools.count).shard(2).map(check).shuffle(window=8).merge().batch(50, collate=None)
    held = []
    with pipe.open(**SKIP) as stream:
        for step in range(1, 801):
            next(stream)
            if step % 20 == 0:
                assert stream.snapshot().produced
                assert stream.stats()
            if step in (200, 800):
                gc.collect()
                held.append(len(gc.get_objects()))
        assert stream.errors.total > 9_000
    assert held[1] - held[0] < 3_000  # of 7,500 items that were skipped in between, each is at least one object
