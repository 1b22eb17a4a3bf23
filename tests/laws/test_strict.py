"""Where the order is fixed: the oracle's, at every split, however uneven the shards."""

from __future__ import annotations

import math
from random import Random
from typing import Any, cast

import pytest

import streamline as sl
import streamline.core.pace
from streamline.core.tasks import Tasks
from streamline.testing import oracle
from streamline.testing.checks import check_resume
from streamline.testing.scripted import Script, scripted
from streamline.testing.subjects import ChainSubject, PipelineSubject, read, run
from tests.laws.profile import GENERATIONS, mostly_long, sampled
from tests.laws.stages import erratic, fan, noisy, pairs


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sizes", [(5, 3, 0, 4), (0, 0, 1), (0,), (1, 9), (0, 7, 0), (2,) * 9])
def test_uneven_shards_come_in_turn_and_resume_exactly(sizes: tuple[int, ...]) -> None:
    check_resume(scripted(*[range(10 * shard, 10 * shard + size) for shard, size in enumerate(sizes)]))


def test_the_order_of_uneven_shards_is_round_robin() -> None:
    assert list(scripted([0, 1, 2], [10], [], [30, 31]).merge()) == [0, 10, 30, 1, 31, 2]


@pytest.mark.parametrize("shards", [1, 2, 3, 9])
@pytest.mark.parametrize("length", [0, 1, 23])
def test_interleaved_shards_and_one_to_one_stages_keep_the_order_of_the_dataset(length: int, shards: int) -> None:
    pipe = sl.from_items(range(length)).shard(shards).map(erratic, concurrency=3).prefetch(2).map(str)
    assert list(pipe) == list(map(str, range(length)))


@pytest.mark.parametrize("shards", mostly_long(sampled(range(1, 10), 2), 5))
def test_every_kind_of_stage_at_once_resumes_exactly(shards: int) -> None:
    pipe = sl.from_items(range(23)).shuffle(seed=2).shard(shards).map(noisy, seed=1).flat_map(fan).shuffle(window=3)
    check_resume(
        pipe.through(pairs).unbatch().merge().filter(lambda item: item % 3 != 0).batch(4, collate=None),
        generations=GENERATIONS,
    )


def test_a_worker_that_ends_exactly_at_the_snapshot_is_not_begun_again() -> None:
    check_resume(scripted([0, 1], [10, 11, 12, 13]).repeat(2).take(3))


def test_each_pass_of_a_repeat_behind_the_merge_is_shuffled_anew() -> None:
    pipe = sl.from_items(range(12)).shard(3).shuffle(window=4).merge().repeat(3)
    check_resume(pipe)
    first, second = list(pipe)[:12], list(pipe)[12:24]
    assert sorted(first) == sorted(second)
    assert first != second


def test_the_cache_of_a_component_is_one_over_all_passes() -> None:
    """Of the oracle, too: a seed would draw other numbers in each pass."""
    part = sl.from_items(range(4)).map(noisy, seed=1).cache()
    check_resume(sl.zip(sl.from_items(range(4)), part).map(sum).repeat(3))


def test_windows_are_those_of_the_oracle_however_short_the_lists_that_come() -> None:
    check_resume(scripted(range(17), schedule=(0, 2, 1)).shuffle(window=5))


def test_the_oracle_takes_an_endless_repeat_as_far_as_it_is_asked() -> None:
    assert oracle(sl.from_items(range(3)).repeat().shard(1).take(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_resume_behind_a_selective_filter_reads_almost_nothing_again() -> None:
    pipe = sl.from_items(Counting(100_000)).filter(lambda item: item == 5)
    items: Any = pipe.source.items  # type: ignore[attr-defined]
    subject = PipelineSubject(pipe)

    async def work(tasks: Any, text: str | None) -> tuple[list[int], str]:
        flow = subject.open(tasks, text)
        found = [item async for item in flow]
        text = subject.write(flow.state)
        await flow.aclose()
        return found, text

    found, text = run(lambda tasks: work(tasks, None))
    assert (found, items.read) == ([5], 100_000)
    assert run(lambda tasks: work(tasks, text))[0] == []
    assert items.read == 100_000


def test_progress_passes_every_stage_that_keeps_it() -> None:
    """A filter that drops all, then everything: the state at the end stands at the end of the source."""
    pipe = scripted(range(50), range(50)).filter(lambda item: False).map(erratic, concurrency=2, ordered=False)
    pipe = pipe.flat_map(fan).take(3).skip(1).prefetch(2).merge("best_effort").batch(2).map(erratic, concurrency=2)

    async def work(tasks: Any) -> str:
        subject = PipelineSubject(pipe)
        flow = subject.open(tasks, None)
        found = await read(flow, subject.write, Random(0))
        await flow.aclose()
        return found.last

    assert run(work).count('"script":50') == 2


def test_progress_before_an_input_that_is_unfolded_again_keeps_the_place_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume inside of 30's outputs meets the dropped items before 30 as a list of their own."""
    monkeypatch.setattr(streamline.core.pace, "SLICE_S", math.inf)  # else a first pull may end before 30
    pipe = scripted(range(1, 31)).filter(lambda item: item % 30 == 0).flat_map(lambda item: [item, -item, 0])
    subject = ChainSubject(cast(Script, pipe.source), pipe.stages)

    async def work(tasks: Tasks) -> tuple[list[int], list[int]]:
        flow = subject.open(tasks, None)
        whole = await flow.pull()
        assert whole is not None
        text = subject.write(whole.states[0])
        flow = subject.open(tasks, text)
        progress = await flow.pull(1)
        assert progress is not None
        assert not progress.items
        text = subject.write(flow.state)
        return list(whole.items), [item async for item in subject.open(tasks, text)]

    assert run(work) == ([30, -30, 0], [-30, 0])


def test_a_custom_stage_resumes_with_another_number_of_inputs_between_its_copies() -> None:
    def every(inputs: int) -> PipelineSubject:
        return PipelineSubject(scripted(range(12)).through(sl.stage(state=dict, snapshot_every=inputs)(pairs.fn)))

    async def work(tasks: Tasks) -> None:
        whole = await read(every(5).open(tasks, None), every(5).write, Random(0))
        for k, _, text in whole.states:
            assert (await read(every(1).open(tasks, text), every(1).write, Random(0))).items == whole.items[k:]

    run(work)


class Counting:
    """A range that counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index
