"""A job's snapshot on another number of ranks: nothing lost, nothing twice, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import ResumeError
from streamline.testing.compositions import Composition
from streamline.testing.laws import atoms
from streamline.testing.steps import DICE, Step, steps
from streamline.testing.subjects import changed
from tests.laws.profile import examples

AnyPipeline = sl.Pipeline[Any]

SIZES = (1, 2, 3, 8)


def taken(
    pipe: AnyPipeline, ranks: int, counts: Callable[[int], int | None], resume: sl.Snapshot | None = None
) -> tuple[list[list[Any]], sl.Snapshot]:
    """Return what each rank gives, of at most so many items, and the job's snapshot behind that."""
    given, parts = [], []
    for rank in range(ranks):
        with pipe.open(rank=rank, world_size=ranks, resume=resume, ends="allow") as stream:
            most = counts(rank)
            given.append([item for _, item in zip(range(1000 if most is None else most), stream, strict=False)])
            parts.append(sl.Snapshot.from_json(stream.snapshot().to_json()))
    return given, sl.Snapshot.of_job(parts)


def flat(ranks: list[list[Any]]) -> list[Any]:
    return [item for rank in ranks for item in rank]


@st.composite
def sharded(draw: st.DrawFn, *, merged: bool = True) -> Composition:
    """Random pipelines of 8 shards or more, with any stages before the merge, and any kind of merge."""
    length, shards = draw(st.integers(0, 40)), draw(st.integers(8, 11))
    source: AnyPipeline = sl.from_items(range(length))
    if draw(st.booleans()):
        source = source.shuffle(seed=length)
    made = Composition(source.shard(shards, draw(st.sampled_from(["interleaved", "contiguous"]))), f"{length}", length)
    made = made.with_steps(draw(st.lists(steps(), max_size=3)))
    if not merged:
        return made
    best_effort = draw(st.booleans())
    pipe = made.pipeline.merge("best_effort", max_lead=2) if best_effort else made.pipeline.merge()
    return Composition(pipe, f"{made.text}, {shards} shards, {'best effort' * best_effort}", made.most)


@examples(20)
@given(sharded(), st.lists(st.sampled_from(SIZES), min_size=2, max_size=4), st.data())
def test_all_ranks_together_give_each_item_once_whatever_their_number_becomes(
    composition: Composition, sizes: list[int], data: st.DataObject
) -> None:
    DICE.seed(1)
    pipe = composition.pipeline
    expected, _ = taken(pipe, 1, lambda _: None)
    found, snapshot = [], None
    for ranks in sizes:
        given, snapshot = taken(pipe, ranks, lambda _: data.draw(st.integers(0, 7)), snapshot)
        found += flat(given)
    rest, _ = taken(pipe, sizes[0], lambda _: None, snapshot)
    assert Counter(atoms(found + flat(rest))) == Counter(atoms(flat(expected)))  # some batches end by the clock


@examples(20)
@given(
    sharded(merged=False),
    st.lists(steps(), max_size=2),
    st.lists(st.sampled_from(SIZES), min_size=2, max_size=4),
    st.data(),
)
def test_ranks_change_together_with_all_else_that_needs_nothing(
    composition: Composition, after: list[Step], sizes: list[int], data: st.DataObject
) -> None:
    """Where a stage after the merge refuses another number of ranks, it stays, and the rest changes."""
    dice = Random(data.draw(st.integers(0, 999)))
    DICE.seed(1)
    merged = composition.pipeline.merge("best_effort", max_lead=2)
    pipe = Composition(merged, composition.text, composition.most).with_steps(after).pipeline
    expected, _ = taken(pipe, 1, lambda _: None)
    found, snapshot, last = [], None, sizes[0]
    for ranks in (*sizes, None):
        now, counts = changed(pipe, dice), lambda _, ranks=ranks: None if ranks is None else dice.randrange(8)
        try:
            given, snapshot = taken(now, ranks or last, counts, snapshot)
        except ResumeError as refused:
            if f"resume with world_size={last}" not in str(refused):
                raise
            given, snapshot = taken(now, last, counts, snapshot)
        else:
            last = ranks or last
        found += flat(given)
    assert Counter(atoms(found)) == Counter(atoms(flat(expected)))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("to", SIZES)
@pytest.mark.parametrize("of", SIZES)
def test_each_rank_gives_what_it_would_have_less_what_was_consumed(of: int, to: int) -> None:
    """Rank by rank and in order: when all shards stand at one count, it is the end of an uninterrupted run."""
    pipe = sl.from_items(range(120)).shard(24).map(str)
    given, snapshot = taken(pipe, of, lambda _: 72 // of)
    whole, _ = taken(pipe, to, lambda _: None)
    rest, _ = taken(pipe, to, lambda _: None, snapshot)
    assert sorted(map(int, flat(given))) == list(range(72))
    assert rest == [[item for item in items if int(item) >= 72] for items in whole]


def test_shards_that_were_left_behind_come_first() -> None:
    """Strict takes the smallest (produced, index), whoever has produced it."""
    pipe = sl.from_items(range(12)).shard(4)
    _, snapshot = taken(pipe, 2, lambda rank: 4 * rank)  # shards 1 and 3 have given two each
    assert snapshot.produced == [0, 2, 0, 2]
    rest, after = taken(pipe, 1, lambda _: None, snapshot)
    assert rest == [[0, 2, 4, 6, 8, 9, 10, 11]]
    assert after.produced == [3, 3, 3, 3]


def test_batches_behind_the_merge_are_begun_anew() -> None:
    pipe = sl.from_items(range(24)).shard(4).merge().batch(4, collate=None)
    given, snapshot = taken(pipe, 2, lambda _: 1)
    rest, _ = taken(pipe, 1, lambda _: None, snapshot)
    assert sorted(flat(flat(given)) + flat(flat(rest))) == list(range(24))
    assert [len(batch) for batch in flat(rest)] == [4, 4, 4, 4]


@sl.stage(state=dict)
async def pairs(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[list[int]]:
    async for item in items:
        held = state.setdefault("held", [])
        held.append(item)
        if len(held) == 2:
            state["held"] = []
            yield held


async def slow(item: int) -> int:
    return item


def seeded(item: int, rng: Any) -> int:
    return item + 100 * int(rng.integers(100, 200))


MERGED = sl.from_items(range(60)).shard(4).merge()

HOLDING: list[tuple[AnyPipeline, str]] = [
    (MERGED.shuffle(window=8), r"'shuffle', after the merge, reads the 8 items of window 0 again.* \(rank 0\)"),
    (MERGED.flat_map(lambda n: [n, n]), "passes over the 1 outputs"),
    (MERGED.through(pairs), r"'pairs', after the merge, takes 6 inputs again"),
    (MERGED.take(20), r"'take', after the merge, keeps a count of its own on each rank \(rank 0: 3\)"),
    (MERGED.skip(2), r"'skip', after the merge, keeps a count of its own"),
]


@pytest.mark.parametrize(("pipe", "why"), HOLDING)
def test_what_holds_items_behind_the_merge_refuses_another_number_of_ranks_by_name(pipe: AnyPipeline, why: str) -> None:
    given, snapshot = taken(pipe, 2, lambda _: 3)
    with pytest.raises(ResumeError, match=why) as caught:
        pipe.open(resume=snapshot, rank=0, world_size=4)
    assert "is of 2 ranks, and there are 4 (given)" in str(caught.value)
    assert str(caught.value).endswith("resume with world_size=2")
    rest, _ = taken(pipe, 2, lambda _: None, snapshot)
    whole, _ = taken(pipe, 2, lambda _: None)
    assert [had + more for had, more in zip(given, rest, strict=True)] == whole


@pytest.mark.parametrize("pipe", [pipe for pipe, _ in HOLDING if "skip" not in repr(pipe)])
def test_before_its_first_item_nothing_is_held(pipe: AnyPipeline) -> None:
    _, snapshot = taken(pipe, 2, lambda _: 0)
    rest, _ = taken(pipe, 4, lambda _: None, snapshot)
    assert rest == taken(pipe, 4, lambda _: None)[0]


def test_a_window_that_was_served_to_its_end_is_not_held() -> None:
    pipe = MERGED.shuffle(window=5)
    given, snapshot = taken(pipe, 2, lambda _: 10)
    rest, _ = taken(pipe, 4, lambda _: None, snapshot)
    assert sorted(flat(given) + flat(rest)) == list(range(60))


def test_an_unordered_map_that_has_done_all_before_is_at_rest() -> None:
    pipe = MERGED.map(slow, concurrency=3, ordered=False)
    given, snapshot = taken(pipe, 2, lambda _: None)
    assert sorted(flat(given)) == list(range(60))
    assert taken(pipe, 4, lambda _: None, snapshot)[0] == [[], [], [], []]


def test_random_numbers_behind_the_merge_are_given_to_one_item_each() -> None:
    pipe = MERGED.map(seeded, seed=1)
    given, snapshot = taken(pipe, 2, lambda rank: 3 + rank)
    rest, _ = taken(pipe, 4, lambda _: None, snapshot)
    assert sorted(item % 100 for item in flat(given) + flat(rest)) == list(range(60))
    assert [part.stages["seeded.rng"] for part in taken(pipe, 4, lambda _: 0, snapshot)[1].parts] == [4] * 4


@pytest.mark.parametrize(("counts", "same"), [((20, 18), True), ((20, 6), False)])
def test_a_repeat_behind_the_merge_goes_on_if_all_ranks_are_in_one_pass(counts: tuple[int, int], same: bool) -> None:
    pipe = sl.from_items(range(30)).shard(4).merge().repeat(3)
    given, snapshot = taken(pipe, 2, lambda rank: counts[rank])
    if not same:
        with pytest.raises(ResumeError, match=r"'repeat', after the merge, is in another pass on each rank \(1, 0\)"):
            taken(pipe, 4, lambda _: None, snapshot)
        return
    rest, _ = taken(pipe, 4, lambda _: None, snapshot)
    assert Counter(flat(given) + flat(rest)) == Counter([*range(30)] * 3)


def test_what_was_skipped_is_counted_once_on_whatever_ranks(tmp_path: Path) -> None:
    def odd(item: int) -> int:
        if item % 2 == 0:
            raise ValueError(item)
        return item

    pipe = sl.from_items(range(40)).shard(4).merge().map(odd)
    found: list[int] = []
    skip: Any = {"on_error": "skip", "max_errors": None, "ends": "allow"}
    for rank in range(2):
        with pipe.open(rank=rank, world_size=2, **skip) as stream:
            found += [item for _, item in zip(range(4 * rank), stream, strict=False)]
            stream.snapshot().save(tmp_path / "ckpt/")
    total = 0
    for rank in range(3):
        with pipe.open(resume=sl.Snapshot.load(tmp_path / "ckpt/"), rank=rank, world_size=3, **skip) as stream:
            found += stream
            total += stream.errors.total
    assert sorted(found) == list(range(1, 40, 2))
    assert total == 20


def test_the_files_of_one_rank_of_several_are_no_jobs() -> None:
    pipe = sl.from_items(range(24)).shard(4)
    _, snapshot = taken(pipe, 2, lambda _: 1)
    with pytest.raises(ResumeError, match=r"is of rank 1 of 2, this is rank 0 of 4: load the directory"):
        pipe.open(resume=snapshot.part(1), rank=0, world_size=4)


def test_a_feeds_snapshot_goes_on_on_as_many_ranks() -> None:
    async def feed() -> AsyncIterator[int]:
        for item in range(20):
            yield item

    pipe: AnyPipeline = sl.from_stream(feed, partitioned=True).shard(4)
    _, snapshot = taken(pipe, 2, lambda _: 1)
    with pytest.raises(ResumeError, match="a feed's items that are on their way are its own rank's"):
        pipe.open(resume=snapshot, rank=0, world_size=4)


def test_a_resume_of_a_resume_is_as_exact() -> None:
    pipe = sl.from_items(range(50)).shuffle(seed=1).shard(8).merge().batch(3, collate=None)
    found: list[Any] = []
    snapshot = None
    for ranks in (2, 3, 8, 1, 2):
        given, snapshot = taken(pipe, ranks, lambda rank: rank % 3, snapshot)
        found += flat(flat(given))
    found += flat(flat(taken(pipe, 3, lambda _: None, snapshot)[0]))
    assert sorted(found) == list(range(50))
