"""Plans: the sections of a pipeline, what each worker reads, and how much is held."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.merge.best_effort import BestEffort
from streamline.merge.strict import Strict
from streamline.pipeline import Pipeline
from streamline.plan.fingerprint import fingerprint
from streamline.plan.plan import ALL_WORKERS_ITEMS, BRIDGE_ITEMS, READ_AHEAD_ITEMS, Plan, index_of
from streamline.transforms.limit import Skip, Take
from streamline.transforms.repeat import Repeat
from streamline.transforms.shuffle import IndexShuffle


def double(x: Any) -> Any:
    return x + x


def items(length: int = 40) -> Pipeline[int]:
    return sl.from_items(range(length))


def kinds(stages: tuple[Any, ...]) -> list[str]:
    return [stage.kind for stage in stages]


# Sections


def test_stages_stand_before_the_shard_in_the_workers_and_behind_the_merge() -> None:
    plan = items().shuffle().take(9).shard(3).map(double).filter(double).merge().batch(4).take(2).plan
    assert kinds(plan.before) == ["shuffle", "take"]
    assert kinds(plan.worker) == ["map", "filter"]
    assert kinds(plan.after) == ["batch", "take"]
    assert (plan.shard.num_shards, plan.mode) == (3, "interleaved")


def test_without_a_merge_everything_behind_the_shard_is_the_workers() -> None:
    plan = items().shard(3).map(double).batch(2).plan
    assert (kinds(plan.worker), kinds(plan.after)) == (["map", "batch"], [])
    assert isinstance(plan.merge, Strict)


def test_without_a_shard_stages_act_on_the_index_up_to_the_first_that_does_not() -> None:
    plan = items().shuffle().take(9).map(double).take(3).plan
    assert (kinds(plan.before), kinds(plan.worker)) == (["shuffle", "take"], ["map", "take"])
    assert plan.shard.num_shards == 1


def test_an_iterable_without_a_shard_has_one_worker_that_does_it_all() -> None:
    plan = sl.from_iterable(lambda: range(3)).take(2).map(double).plan
    assert (kinds(plan.before), kinds(plan.worker)) == ([], ["take", "map"])


def test_the_merge_is_the_one_that_was_written() -> None:
    merge = items().shard(2).merge("best_effort", max_skips_per_round=0, max_lead=3).plan.merge
    assert merge == BestEffort(name="merge", max_skips_per_round=0, max_lead=3)
    assert items().shard(2).merge("best_effort").plan.merge == BestEffort(
        name="merge", max_skips_per_round=2, max_lead=8
    )


def test_a_pipeline_is_immutable_and_each_method_returns_a_new_one() -> None:
    pipe = items()
    longer = pipe.map(double)
    assert pipe.stages == ()
    assert longer != pipe
    with pytest.raises(AttributeError):
        pipe.stages = longer.stages  # type: ignore[misc]


DATA = list(range(40))


def made() -> Pipeline[Any]:
    return sl.from_items(DATA).shuffle(seed=1).shard(2).map(double).filter(double).merge().batch(3).take(2)


def test_pipelines_compare_by_what_is_written_over_the_very_data() -> None:
    assert made() == made()
    assert hash(made()) == hash(made())
    assert made() != made().take(1)
    assert sl.from_items(DATA) != sl.from_items(list(DATA)), "comparing data would take long"


def test_a_pickled_pipeline_is_the_same_plan() -> None:
    again = pickle.loads(pickle.dumps(made()))
    assert fingerprint(again.plan) == fingerprint(made().plan)
    assert repr(again) == repr(made())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in made()]


def test_stages_of_one_name_are_told_apart() -> None:
    pipe = items().map(double).map(double).filter(double).batch(2).batch(2)
    assert [stage.name for stage in pipe.stages] == ["double", "double_2", "double_3", "batch", "batch_2"]
    assert items().map(double, name="double_2").map(double).map(double).stages[-1].name == "double_3"


def test_no_stage_takes_a_sections_name() -> None:
    def merge(x: Any) -> Any:
        return x

    merge.__qualname__ = "merge"
    assert items().map(merge).stages[0].name == "merge_2"


# The index


def whole(plan_ops: list[Any], length: int, epoch: tuple[int, ...] = (0,)) -> list[int]:
    index = index_of(plan_ops, length, epoch)
    assert index.length is not None
    return index(np.arange(index.length)).tolist()  # type: ignore[no-any-return]


def test_operations_on_the_index_apply_in_the_order_in_which_they_are_written() -> None:
    take, skip = Take[Any](name="t", count=5), Skip[Any](name="s", count=2)
    assert whole([take, skip], 10) == [2, 3, 4]
    assert whole([skip, take], 10) == [2, 3, 4, 5, 6]
    assert whole([Repeat[Any](name="r", times=2), Take[Any](name="t", count=5)], 3) == [0, 1, 2, 0, 1]


def test_a_shuffle_before_a_repeat_differs_by_pass_and_one_after_it_ends_none() -> None:
    shuffle, repeat = IndexShuffle[Any](name="x", seed=3), Repeat[Any](name="r", times=2)
    before = whole([shuffle, repeat], 20)
    assert sorted(before[:20]) == sorted(before[20:]) == list(range(20))
    assert before[:20] != before[20:]
    behind = whole([repeat, shuffle], 20)
    assert sorted(behind) == sorted(list(range(20)) * 2)
    assert sorted(behind[:20]) != list(range(20))


def test_each_epoch_has_an_order_of_its_own() -> None:
    shuffle = IndexShuffle[Any](name="x", seed=3)
    assert len({tuple(whole([shuffle], 20, (epoch,))) for epoch in range(5)}) == 5


def test_open_epoch_is_what_shuffles_see() -> None:
    pipe = items().shuffle(seed=1)
    orders = []
    for epoch in (0, 1, 0):
        with pipe.open(epoch=epoch) as stream:
            orders.append(list(stream))
    assert orders[0] == orders[2] != orders[1]


# How much is held


@pytest.mark.parametrize(("workers", "expected"), [(1, 512), (2, 512), (4, 256), (64, 16), (1000, 8)])
def test_the_more_workers_the_less_each_may_hold(workers: int, expected: int) -> None:
    assert (READ_AHEAD_ITEMS, ALL_WORKERS_ITEMS) == (512, 1024)
    assert items().shard(workers).plan.worker_capacity(workers) == expected


def test_where_items_are_batches_fewer_are_held() -> None:
    assert Plan.capacity(512, items().batch(32).stages) == 16
    assert Plan.capacity(512, items().batch(32).batch(4).stages) == 4
    assert Plan.capacity(512, items().batch(10_000).stages) == 2
    assert items().batch(32).plan.bridge_capacity == BRIDGE_ITEMS // 32
    assert Plan.capacity(512, items().regenerate(10_240, block=256).stages) == 16, "4096 rows"
    assert Plan.capacity(512, items().regenerate(10_000).stages) == 512
