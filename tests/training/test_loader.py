"""Loaders: epochs, states, and leaving them in every way."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import ClosedError, PlanError, ResumeError, SnapshotError
from streamline.pipeline import Pipeline
from streamline.runtime.loop_thread import LoopThread
from streamline.runtime.run import RunKeywords
from streamline.snapshot.file_format import seal
from tests.laws.profile import in_turn
from tests.training.kit import (
    CHOOSING,
    PIPE,
    POOL,
    State,
    Steps,
    epochs_of,
    flat,
    interrupted,
    quick,
    stops,
    through_json,
)


def threads() -> set[str]:
    """Return the names of those that are there but for those of the session's processes."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("streamline") and not name.startswith("streamline process")}


# Epochs ---------------------------------------------------------------------------------------------------------------


def test_epochs_differ_and_are_the_same_in_another_run() -> None:
    first, second = epochs_of(PIPE.loader(), 3), epochs_of(PIPE.loader(), 3)
    assert first == second
    assert len({str(epoch) for epoch in first}) == 3
    assert all(sorted(flat(epoch)) == list(range(12)) for epoch in first)
    for epoch in range(3):
        with PIPE.open(epoch=epoch) as stream:
            assert list(stream) == first[epoch]


def test_the_epoch_is_the_one_that_goes_on_or_the_next() -> None:
    loader = PIPE.loader()
    seen = [(loader.epoch, loader.step)]
    for _ in range(2):
        seen.extend((loader.epoch, loader.step) for _ in loader)
        seen.append((loader.epoch, loader.step))
    assert seen == [(0, 0), *((0, n) for n in range(1, 7)), (1, 0), *((1, n) for n in range(1, 7)), (2, 0)]


def test_epochs_may_begin_elsewhere() -> None:
    whole = epochs_of(PIPE.loader(), 4)
    loader = PIPE.loader(epoch=2)
    assert loader.epoch == 2
    assert epochs_of(loader, 4) == whole[2:]


def test_set_epoch_says_which_is_next() -> None:
    whole, loader = epochs_of(PIPE.loader(), 6), PIPE.loader()
    loader.set_epoch(5)
    assert list(loader) == whole[5]
    for epoch in (2, 0):
        loader.set_epoch(epoch)
        loader.set_epoch(epoch)  # idempotent
        assert loader.epoch == epoch
        assert list(loader) == whole[epoch]
    for _ in loader:
        loader.set_epoch(4)  # while an iteration goes on: for the next one
        assert loader.epoch == 1
    assert loader.epoch == 4
    assert list(loader) == whole[4]


def test_set_epoch_of_the_epoch_that_was_loaded_keeps_the_place() -> None:
    whole, loader = epochs_of(PIPE.loader(), 3), PIPE.loader(epoch=1)
    iteration = iter(loader)
    before = [next(iteration), next(iteration)]
    state = loader.state_dict()
    resumed = PIPE.loader()
    resumed.load_state_dict(state)
    rest = []
    for epoch in range(resumed.epoch, 3):
        resumed.set_epoch(epoch)
        rest.append(list(resumed))
    assert [before + rest[0], *rest[1:]] == whole[1:]
    elsewhere = PIPE.loader()
    elsewhere.load_state_dict(state)
    elsewhere.set_epoch(2)
    assert elsewhere.state_dict() == {**state, "epoch": 2, "step": 0, "at": "begin", "snapshot": ""}
    assert list(elsewhere) == whole[2]
    loader.close()


def test_a_fixed_epoch_is_always_the_same() -> None:
    whole, loader = epochs_of(PIPE.loader(), 2), PIPE.loader(fixed_epoch=True, epoch=1)
    for _ in range(3):
        assert loader.epoch == 1
        loader.set_epoch(7)  # trainers call it for every loader that they have
        assert list(loader) == whole[1]
    iteration = iter(loader)
    before = [next(iteration) for _ in range(4)]
    resumed = PIPE.loader(fixed_epoch=True, epoch=1)
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert [before + list(resumed), list(resumed)] == [whole[1], whole[1]]
    loader.close()


def test_two_loaders_of_one_pipeline_are_independent() -> None:
    one, other, whole = PIPE.loader(), PIPE.loader(epoch=1), epochs_of(PIPE.loader(), 3)
    pairs = list(zip(one, other, strict=True))
    assert [a for a, _ in pairs] == whole[0]
    assert [b for _, b in pairs] == whole[1]
    assert (one.epoch, other.epoch) == (1, 2)


# Steps ----------------------------------------------------------------------------------------------------------------


def test_an_epoch_of_steps_goes_on_where_the_last_one_stopped() -> None:
    pipe = PIPE.repeat()
    with pipe.open() as stream:
        expected = list(islice(stream, 15))
    with pipe.loader(steps_per_epoch=5) as loader:
        assert len(loader) == 5
        assert flat(epochs_of(loader, 3)) == expected
        assert loader.epoch == 3
        assert threads()  # it reads on
    assert not threads()


def test_where_a_pipeline_ends_before_its_steps_it_begins_anew_in_its_next_epoch() -> None:
    expected = flat(epochs_of(PIPE.loader(), 4))
    for steps in (4, 5, 6, 7, 12, 13):
        with PIPE.loader(steps_per_epoch=steps) as loader:
            epochs = [list(loader) for _ in range(len(expected) // steps)]
        assert flat(epochs) == expected[: len(expected) // steps * steps]


def test_a_break_from_an_epoch_of_steps_loses_nothing() -> None:
    expected = flat(epochs_of(PIPE.loader(), 3))
    with PIPE.loader(steps_per_epoch=5) as loader:
        found = list(islice(loader, 2))
        assert not threads()
        assert (loader.epoch, loader.step) == (1, 0)
        found += list(loader)
        assert found == expected[:7]
        assert loader.epoch == 2


def test_a_break_behind_the_last_of_the_steps_is_the_end() -> None:
    expected = flat(epochs_of(PIPE.loader(), 3))
    with PIPE.loader(steps_per_epoch=5) as loader:
        found = list(islice(loader, 5))
        assert (loader.epoch, loader.step) == (1, 0)
        found += list(loader)
        assert (loader.epoch, found) == (2, expected[:10])


def test_a_fixed_epoch_of_steps_is_the_same_first_items() -> None:
    with PIPE.loader(steps_per_epoch=4, fixed_epoch=True) as loader:
        first = list(loader)
        assert not threads()
        assert first == list(loader) == next(iter(epochs_of(PIPE.loader(), 1)))[:4]


def test_set_epoch_keeps_an_epoch_of_steps_going_unless_it_is_another() -> None:
    pipe = PIPE.repeat()
    with pipe.open() as stream:
        expected = list(islice(stream, 15))
    with pipe.loader(steps_per_epoch=5) as loader:
        found = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            found += list(loader)
        assert found == expected
        loader.set_epoch(7)
        with pipe.loader(steps_per_epoch=5, epoch=7) as other:
            assert list(loader) == list(other)
        assert loader.epoch == 8


@pytest.mark.parametrize("pipe", [sl.from_items([]), PIPE.filter(lambda batch: False), PIPE.skip(6)])
def test_no_items_can_not_make_steps(pipe: sl.Pipeline[Any]) -> None:
    loader = pipe.loader(steps_per_epoch=3)
    with pytest.raises(PlanError, match=r"no item in epoch 0, so steps_per_epoch=3 can't be reached"):
        list(loader)
    assert list(pipe.loader()) == []


# Length ---------------------------------------------------------------------------------------------------------------


def test_the_length_is_the_items_of_an_epoch_where_it_is_known() -> None:
    loader = PIPE.loader()
    assert len(loader) == len(list(loader)) == 6
    assert len(PIPE.loader(rank=1, world_size=2)) == len(list(PIPE.loader(rank=1, world_size=2))) == 2


@pytest.mark.parametrize(
    ("pipe", "message"), [(PIPE.filter(len), "isn't known before"), (PIPE.repeat(), "has no end: .*steps_per_epoch")]
)
def test_a_loader_without_a_length_can_be_used_all_the_same(pipe: sl.Pipeline[Any], message: str) -> None:
    loader = pipe.loader()
    with pytest.raises(TypeError, match=message):
        len(loader)
    assert loader
    assert len(list(islice(loader, 3))) == 3
    assert PIPE.filter(len).loader(steps_per_epoch=4).__len__() == 4


def test_a_list_of_a_loader_needs_no_length() -> None:
    assert list(PIPE.filter(len).loader()) == list(PIPE)
    assert bool(sl.from_items([]).loader())


# States ---------------------------------------------------------------------------------------------------------------


def resumed(pipe: sl.Pipeline[Any], state: State, **options: Any) -> sl.Loader[Any]:
    loader = pipe.loader(**options)
    loader.load_state_dict(through_json(state))
    assert loader.state_dict() == state
    return loader


def test_a_state_before_anything_is_the_beginning() -> None:
    state = PIPE.loader(epoch=1).state_dict()
    assert (state["epoch"], state["step"], state["at"]) == (1, 0, "begin")
    assert epochs_of(resumed(PIPE, state), 3) == epochs_of(PIPE.loader(epoch=1), 3)


def test_a_state_at_an_epochs_last_item_is_the_next_epochs_beginning() -> None:
    whole, loader = epochs_of(PIPE.loader(), 3), PIPE.loader()
    for _ in loader:
        state = loader.state_dict()  # the loop has not noticed the end
    assert (state["epoch"], state["step"], state["at"]) == (1, 0, "begin")
    other = resumed(PIPE, state)
    assert other.epoch == 1
    assert epochs_of(other, 3) == whole[1:]
    assert loader.state_dict() == state


def test_a_state_that_was_taken_without_looking_further_passes_over_the_end() -> None:
    """Behind `break`, in a Snapshot: nobody knew that it was the last item."""
    whole, loader = epochs_of(PIPE.loader(), 3), PIPE.loader()
    assert list(islice(loader, 6)) == whole[0]
    state, snapshot = loader.state_dict(), loader.snapshot()
    assert (state["epoch"], state["step"], state["at"], snapshot.epoch) == (0, 6, "unknown", 0)
    assert epochs_of(resumed(PIPE, state), 3) == whole[1:]
    with resumed(PIPE, state) as other:
        assert list(other) == whole[1]
    with PIPE.loader(resume=snapshot) as other:
        assert (other.epoch, other.step) == (1, 0)
        assert epochs_of(other, 3) == whole[1:]


def test_a_look_at_the_epoch_behind_a_resume_takes_nothing() -> None:
    whole, loader = epochs_of(PIPE.loader(), 2), PIPE.loader()
    assert list(islice(loader, 2)) == whole[0][:2]
    with PIPE.loader(resume=loader.snapshot()) as other:
        assert (other.epoch, other.step) == (0, 0)  # a snapshot knows no steps
        assert other.snapshot() == loader.snapshot()
        assert list(other) == whole[0][2:]
        assert epochs_of(other, 2) == whole[1:]


def test_a_state_behind_a_break_is_where_the_loop_was_left() -> None:
    whole, loader = epochs_of(PIPE.loader(), 3), PIPE.loader()
    for step, _ in enumerate(loader, 1):
        inside = loader.state_dict()
        if step == 3:
            break
    assert not threads()
    assert (loader.epoch, loader.step) == (1, 0)  # of the next iter(), so that a loop over epochs is right
    left = loader.state_dict()
    assert {**plain(left), "at": "inside"} == plain(inside)
    other = resumed(PIPE, left)
    assert (other.epoch, other.step) == (0, 3)
    assert whole[0][:3] + list(other) == whole[0]
    assert epochs_of(loader, 3) == whole[1:]  # the same loader goes on with the next epoch


def test_a_state_behind_close_is_where_it_was_closed() -> None:
    whole = epochs_of(PIPE.loader(), 2)
    with PIPE.loader() as loader:
        iteration = iter(loader)
        before = [next(iteration)]
    assert not threads()
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state
    assert [before + list(resumed(PIPE, state))] == whole[:1]
    with pytest.raises(ClosedError, match="the loader is closed: make another"):
        iter(loader)
    with pytest.raises(ClosedError, match="this iteration was left"):
        next(iteration)


def test_a_state_is_a_values_own() -> None:
    loader = PIPE.loader()
    iteration = iter(loader)
    next(iteration)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    next(iteration)
    assert state == kept
    assert pickle.loads(pickle.dumps(state)) == state
    loader.close()


def test_a_snapshot_of_a_loader_that_has_not_begun() -> None:
    loader = PIPE.loader(epoch=2)
    snapshot = sl.Snapshot.from_json(loader.snapshot().to_json())
    assert snapshot.epoch == 2
    assert epochs_of(PIPE.loader(resume=snapshot), 4) == epochs_of(PIPE.loader(epoch=2), 4)
    assert epochs_of(loader, 4) == epochs_of(PIPE.loader(epoch=2), 4)


def test_snapshot_files_resume_loaders(tmp_path: Path) -> None:
    whole, seen = epochs_of(PIPE.loader(), 3), []
    for _ in range(30):  # a run that is ended behind each fifth item, from the beginning of the program on
        loader = PIPE.loader(resume=sl.Snapshot.load(tmp_path / "ckpt", missing_ok=True))
        taken = 0
        for _ in range(loader.epoch, 3):
            for batch in loader:
                seen.append(batch)
                taken += 1
                loader.snapshot().save(tmp_path / "ckpt")
                if taken == 5:
                    break
            if taken == 5:
                break
        if not taken:
            break
    assert seen == flat(whole)


# Interrupted anywhere -------------------------------------------------------------------------------------------------


@quick
@given(st.sampled_from(POOL), stops, st.lists(st.sampled_from(["inside", "behind", "before"]), min_size=8, max_size=8))
def test_epochs_interrupted_anywhere_are_the_uninterrupted_ones(
    make: Callable[[], sl.Pipeline[Any]], stops: list[int], how: list[str]
) -> None:
    pipe = make()
    whole = dict(enumerate(epochs_of(pipe.loader(), 3)))
    assert interrupted(pipe, 3, stops, how[: len(stops)], {}) == {
        epoch: items for epoch, items in whole.items() if items
    }


@quick
@example(POOL[0], 6, [6, 0, 6], ["inside"] * 3)
@given(
    st.sampled_from(POOL),
    st.integers(1, 9),
    stops,
    st.lists(st.sampled_from(["inside", "behind", "before"]), min_size=8, max_size=8),
)
def test_epochs_of_steps_interrupted_anywhere_are_the_uninterrupted_ones(
    make: Callable[[], sl.Pipeline[Any]], steps: int, stops: list[int], how: list[str]
) -> None:
    pipe, options = make(), {"steps_per_epoch": steps}
    with pipe.loader(steps_per_epoch=steps) as loader:
        whole = dict(enumerate(epochs_of(loader, 3)))
    assert interrupted(pipe, 3, stops, how[: len(stops)], options) == whole


@quick
@given(st.sampled_from(CHOOSING), st.none() | st.integers(1, 9), stops)
def test_where_the_order_is_open_interrupted_epochs_are_the_same_multisets(
    make: Callable[[], sl.Pipeline[Any]], steps: Steps, stops: list[int]
) -> None:
    pipe = make()
    with pipe.loader(steps_per_epoch=steps) as loader:
        whole = epochs_of(loader, 3)
    seen = interrupted(pipe, 3, stops, ["inside"] * len(stops), {"steps_per_epoch": steps})
    if steps is None:
        assert {epoch: Counter(items) for epoch, items in seen.items()} == dict(enumerate(map(Counter, whole)))
    else:  # which items fall into which epoch is open, too; each pass is whole
        assert {epoch: len(items) for epoch, items in seen.items()} == dict.fromkeys(range(3), steps)
        length, items = len(list(pipe)), flat(seen.values())
        for start in range(0, len(items) - length + 1, length):
            assert Counter(items[start : start + length]) == Counter(list(pipe))


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_state_is_loaded_before_iteration_has_begun() -> None:
    loader = PIPE.loader()
    state = loader.state_dict()
    loader.load_state_dict(state)
    iteration = iter(loader)
    with pytest.raises(RuntimeError, match="iteration has begun: load the state into a new loader"):
        loader.load_state_dict(state)
    del iteration
    loader.load_state_dict(state)  # it gave nothing
    assert next(iter(loader))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="iteration has begun"):
            loader.load_state_dict(state)
        list(loader)


def test_a_state_of_something_else_is_refused() -> None:
    loader = PIPE.loader()
    list(islice(loader, 2))
    state = loader.state_dict()
    refused: list[tuple[sl.Loader[Any], str]] = [
        (PIPE.skip(1).loader(), "taken of another plan"),
        (PIPE.loader(steps_per_epoch=4), r"steps_per_epoch=None, this one has steps_per_epoch=4"),
    ]
    for other, message in refused:
        before = other.state_dict()
        with pytest.raises(ResumeError, match=message):
            other.load_state_dict(state)
        assert other.state_dict() == before
    list(loader)
    with pytest.raises(ResumeError, match="taken of another plan"):  # between epochs, too
        PIPE.skip(1).loader().load_state_dict(loader.state_dict())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": 2}, "is of format 2, and this streamline reads format 1: upgrade"),
        ({"version": "1"}, r"Expected `int`, got `str` - at `\$.version`"),
        ({"epoch": -1}, r"`int` >= 0 - at `\$.epoch`"),
        ({"epoch": True}, r"Expected `int`, got `bool`"),
        ({"epoch": 1}, "it is of epoch 1, its snapshot of epoch 0"),
        ({"step": "2"}, r"Expected `int`, got `str`"),
        ({"at": "end"}, "Invalid enum value 'end'"),
        ({"at": "begin"}, "it begins an epoch, and stands after 2 of its items"),
        ({"steps_per_epoch": 2}, "step 2 of 2"),
        ({"snapshot": ""}, "and has no snapshot"),
        ({"snapshot": "{}"}, "the snapshot in the loader's state: not a snapshot: "),
        ({"snapshot": "{[}"}, "the snapshot in the loader's state: not a snapshot: expected JSON"),
        ({"snapshot": {}}, "Expected `str`, got `object`"),
        ({"more": 1}, r"missing entries \[\], unknown ones \['more'\]"),
    ],
)
def test_a_damaged_state_says_what_is_wrong(damage: State, message: str) -> None:
    loader = PIPE.loader()
    list(islice(loader, 2))
    state = loader.state_dict()
    other = PIPE.loader()
    with pytest.raises(SnapshotError, match=message):
        other.load_state_dict(resealed({**plain(state), **damage}))
    for missing in state:
        with pytest.raises(SnapshotError, match=rf"missing entries \['{missing}'\]"):
            other.load_state_dict({key: value for key, value in state.items() if key != missing})
    assert list(other) == list(PIPE)


def plain(state: State) -> State:
    """Return a state whose snapshot has no checksum."""
    text = json.loads(state["snapshot"])
    del text["sha256"]
    return {**state, "snapshot": json.dumps(text, separators=(",", ":"))}


def resealed(state: State) -> State:
    """Return an edited state with the checksum of what it says now."""
    text = state["snapshot"]
    beside = [value for key, value in state.items() if key not in ("snapshot", "version")]
    return {**state, "snapshot": seal(text, beside)} if isinstance(text, str) and text else state


def test_a_state_with_any_entry_changed_is_refused() -> None:
    loader = PIPE.loader()
    list(islice(loader, 2))
    state = loader.state_dict()
    text = state["snapshot"]
    damaged: list[State] = [
        {**state, "epoch": 1}, {**state, "step": 3}, {**state, "at": "begin"}, {**state, "at": "inside"},
        {**state, "steps_per_epoch": 9}, {**state, "version": 2}, plain(state),
    ]  # fmt: skip
    damaged += [{**state, "snapshot": f"{text[:at]}~{text[at + 1 :]}"} for at in range(0, len(text), 7)]
    for one in damaged:
        with pytest.raises(SnapshotError):
            PIPE.loader().load_state_dict(one)
    assert list(resumed(PIPE, json.loads(json.dumps(state)))) == list(PIPE)[2:]


@pytest.mark.parametrize("state", [None, [], "{}", 3])
def test_a_state_is_a_dict(state: Any) -> None:
    with pytest.raises(SnapshotError, match=r"is the dict of state_dict\(\), got "):
        PIPE.loader().load_state_dict(state)


def test_wrong_options_are_refused_where_they_are_written() -> None:
    wrong: list[tuple[Any, str]] = [
        ({"steps_per_epoch": 0}, r"\.loader\(steps_per_epoch=\) is at least 1, got 0"),
        ({"steps_per_epoch": 2.0}, r"steps_per_epoch=\) is an integer, got float"),
        ({"epoch": -1}, r"\.loader\(epoch=\) is at least 0"),
        ({"fixed_epoch": 3}, r"fixed_epoch=\) is True or False, got int 3"),
        ({"resume": {}}, r"is a Snapshot, got dict; a state_dict goes to load_state_dict"),
        ({"rank": 5, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 4}, "3 shards for 4 ranks"),
    ]
    for options, message in wrong:
        with pytest.raises(PlanError, match=message):
            PIPE.loader(**options)
    with pytest.raises(TypeError, match=r"\.loader has no workers=: backend=sl\.Threads"):
        PIPE.loader(workers=3)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match="at least 0, got -1"):
        PIPE.loader().set_epoch(-1)
    with PIPE.open(epoch=1) as stream, pytest.raises(PlanError, match="the snapshot is of epoch 1"):
        PIPE.loader(resume=stream.snapshot(), epoch=2)


def test_a_loader_takes_every_option_of_open() -> None:
    of_open = inspect.signature(Pipeline.open).parameters.keys() - {"self", "resume", "epoch", "skip_steps"}
    assert set(RunKeywords.__annotations__) == of_open


def test_a_loader_is_not_copied() -> None:
    loader = PIPE.loader()
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a loader holds a thread and can't be pickled"):
            copied(loader)


# Leaving --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, 6])
def test_a_second_iteration_ends_the_first(steps: Steps) -> None:
    whole, loader = epochs_of(PIPE.loader(), 3), PIPE.loader(steps_per_epoch=steps)
    first = iter(loader)
    assert next(first) == whole[0][0]
    second = iter(loader)
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"this iteration was left: .* another iter\(\) of it has begun"):
            next(first)
    assert len(threads()) == 1
    expected = whole[1] if steps is None else flat(whole)[1:7]
    assert next(second) == expected[0]
    del first  # whose end is not the second's
    assert list(second) == expected[1:]
    assert next(second, None) is None
    assert list(loader) == (whole[2] if steps is None else flat(whole)[7:13])
    loader.close()


@pytest.mark.parametrize("steps", [None, 6])
def test_an_iteration_that_has_ended_stays_ended(steps: Steps) -> None:
    loader = PIPE.loader(steps_per_epoch=steps)
    first = iter(loader)
    assert len(list(first)) == 6
    second = iter(loader)
    assert next(second)
    assert next(first, None) is None
    assert len(list(second)) == 5
    loader.close()
    assert next(second, None) is None


def test_zip_of_a_loader_with_itself_says_what_is_wrong() -> None:
    loader = PIPE.loader()
    with pytest.raises(ClosedError, match="this iteration was left"):
        list(zip(loader, loader, strict=True))


def test_an_iteration_that_gave_nothing_has_not_begun_its_epoch() -> None:
    whole, loader = epochs_of(PIPE.loader(), 3), PIPE.loader()
    for _ in range(3):
        iter(loader)  # as some trainers do, to see whether it can be iterated
    assert not threads()
    assert epochs_of(loader, 3) == whole
    assert list(islice(loader, 2))
    other = resumed(PIPE, loader.state_dict())
    iter(other)
    assert (other.epoch, other.step) == (3, 2)
    assert list(other) == list(PIPE.loader(epoch=3))[2:]


def test_an_iteration_keeps_its_loader() -> None:
    assert list(iter(PIPE.loader())) == list(PIPE)
    assert [batch for batch in PIPE.loader(steps_per_epoch=3)] == list(PIPE)[:3]  # noqa: C416
    gc.collect()
    assert not threads()


def test_what_is_dropped_leaves_nothing() -> None:
    loader = PIPE.loader(steps_per_epoch=3)
    list(loader)
    assert threads()
    del loader
    assert not threads()
    iteration: Any = iter(PIPE.loader())
    next(iteration)
    del iteration
    assert not threads()


def test_a_failure_is_behind_the_last_good_item_and_the_loader_stays_usable() -> None:
    broken = True

    def fragile(item: int) -> int:
        if broken and item == 7:
            raise ZeroDivisionError("item 7")
        return item

    pipe = sl.from_items(range(10)).shuffle(seed=2).map(fragile)
    with pipe.loader() as loader:
        iteration = iter(loader)
        seen: list[int] = []

        def train() -> None:
            for item in iteration:
                seen.append(item)
                loader.state_dict()  # looks further, and says nothing of the failure

        with pytest.raises(ZeroDivisionError, match="item 7"):
            train()
        with pytest.raises(ZeroDivisionError, match="item 7"):
            next(iteration)
        state = loader.state_dict()
        assert (state["epoch"], state["step"], state["at"]) == (0, len(seen), "unknown")
        broken = False
        whole = epochs_of(pipe.loader(), 2)
        assert seen + list(resumed(pipe, state)) == whole[0]
        assert list(loader) == whole[1]  # as behind a break


def test_a_failure_before_the_first_item_can_be_tried_again() -> None:
    failing = [True, False]

    def fragile(item: int) -> int:
        if failing and failing.pop(0):
            raise OSError("no disk")
        return item

    loader = sl.from_items(range(3)).map(fragile).loader()
    with pytest.raises(OSError, match="no disk"):
        list(loader)
    assert list(loader) == [0, 1, 2]
    assert loader.epoch == 1


def test_what_can_not_be_opened_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("1\n2\n3\n")
    pipe = sl.read_lines(str(file))
    with pytest.raises(sl.errors.ReadError):
        sl.read_lines(str(tmp_path / "b.txt")).loader()
    loader = pipe.loader()
    list(islice(loader, 2))
    state = loader.state_dict()
    file.unlink()
    with pytest.raises(sl.errors.ReadError):
        iter(loader)
    assert loader.state_dict() == state
    file.write_text("1\n2\n3\n")
    assert list(loader) == ["1", "2", "3"]
    file.write_text("1\n2\n3\n4\n")
    with pytest.raises(ResumeError, match="the data changed"):
        pipe.loader().load_state_dict(state)


def test_a_loader_looks_as_it_stands() -> None:
    loader = PIPE.loader()
    assert repr(loader) == "<Loader: epoch 0, step 0, waiting>"
    for _ in islice(loader, 2):
        assert "running" in repr(loader)
    assert repr(loader) == "<Loader: epoch 0, step 2, left>"
    loader.close()
    assert repr(loader) == "<Loader: epoch 0, step 2, closed>"


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_something_is_waited_for_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, interrupts = epochs_of(PIPE.loader(), 2), [True]
    take = LoopThread.take

    def interrupted(engine: LoopThread[Any], into: list[Any]) -> None:
        if interrupts.pop() if interrupts else False:
            raise KeyboardInterrupt  # where Ctrl-C comes out
        take(engine, into)

    monkeypatch.setattr(LoopThread, "take", interrupted)
    state: State | None = None
    seen: dict[int, list[Any]] = {}
    for _ in range(2):
        loader = PIPE.loader()
        if state is not None:
            loader.load_state_dict(state)
        iteration, epoch = iter(loader), loader.epoch
        for _ in range(4):
            interrupts.append(True)
            while True:
                try:
                    item = next(iteration)
                    break
                except KeyboardInterrupt:
                    continue
            seen.setdefault(epoch, []).append(item)
            interrupts[:] = [True]
            while True:
                try:
                    state = loader.state_dict()
                    break
                except KeyboardInterrupt:
                    assert (loader.epoch, loader.step) == (epoch, len(seen[epoch]))
            interrupts.clear()
            if state["at"] == "begin":
                break
        loader.close()
    assert seen == {0: whole[0]}
    assert state is not None
    assert state["epoch"] == 1
    other = resumed(PIPE, {**state})
    interrupts.append(True)
    with pytest.raises(KeyboardInterrupt):
        list(other)
    assert epochs_of(other, 2) == whole[1:]


def test_ctrl_c_while_an_iteration_is_closed_leaves_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, loader, stop = epochs_of(PIPE.loader(), 3), PIPE.loader(), LoopThread.stop
    interrupts = [True]

    def interrupted(engine: LoopThread[Any]) -> None:
        stop(engine)
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt

    monkeypatch.setattr(LoopThread, "stop", interrupted)
    iteration = iter(loader)
    assert [next(iteration), next(iteration)] == whole[0][:2]
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, 2)
    assert (loader.epoch, loader.step) == (1, 0)
    assert epochs_of(loader, 3) == whole[1:]


SCRIPT = """
import json, os, signal, sys
import streamline as sl
pipe = sl.from_items(range(40)).shuffle(seed=1).shard(2).shuffle(window=3).merge().batch(2, collate=None)
loader, path, stop = pipe.loader(), sys.argv[1], int(sys.argv[2])
if os.path.exists(path):
    with open(path) as file:
        loader.load_state_dict(json.load(file))
used = 0
try:
    for epoch in range(loader.epoch, 3):
        for batch in loader:
            print(epoch, batch, flush=True)
            used += 1
            if used == stop:
                os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
finally:
    with open(path, "w") as file:
        json.dump(loader.state_dict(), file)
kept = iter(pipe.loader())  # half-used at the exit
next(kept)
"""


@pytest.mark.long
def test_a_program_that_is_interrupted_and_started_again_uses_each_batch_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def train(name: str, stop: int) -> list[str]:
        command = [sys.executable, "-W", "error", str(script), str(tmp_path / name), str(stop)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, env=environment)
        assert done.stderr == ""
        return done.stdout.splitlines()

    whole = train("one.json", 1000)
    assert len(whole) == 60
    assert train("two.json", 20) + train("two.json", 27) + train("two.json", 1000) == whole


def test_a_loader_has_the_figures_and_the_errors_of_its_iteration() -> None:
    def odd_fails(item: int) -> int:
        if item % 2:
            raise ValueError(item)
        return item

    with sl.from_items(range(8)).map(odd_fails).loader(on_error="skip", max_errors=None) as loader:
        assert loader.stats() is None
        assert loader.errors.total == 0
        for _ in range(2):
            assert list(loader) == [0, 2, 4, 6]
            stats = loader.stats()
            assert stats is not None
            assert stats.items == 4
            assert loader.errors.stages == {"odd_fails": 4}
    assert loader.errors.total == 4


# One batch ago --------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize(("steps", "looking"), in_turn([None, 3, 12, 17], [False, True]))
def test_the_state_one_batch_ago_resumes_with_the_last_batch(steps: int | None, looking: bool) -> None:
    def loader() -> sl.Loader[Any]:
        return PIPE.loader(steps_per_epoch=steps)

    whole = flat(epochs_of(loader(), 3))
    ours, seen = loader(), 0
    for _ in range(3):
        for item in ours:
            state = through_json(ours.state_dict(batches_ago=1))
            if looking:
                ours.state_dict()  # looks whether another item follows
                assert through_json(ours.state_dict(batches_ago=1)) == state
            with loader() as other:
                other.load_state_dict(state)
                items = iter(other)
                assert next(items) == item == whole[seen]
                assert (other.epoch, other.step) == (ours.epoch, ours.step)
            seen += 1
    ours.close()


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("pipe", CHOOSING)
def test_one_batch_ago_nothing_is_lost_behind_choices(pipe: Callable[[], sl.Pipeline[Any]]) -> None:
    for stop in range(1, 9):
        loader = pipe().loader()
        items = iter(loader)
        first = [next(items) for _ in range(stop)]
        state = through_json(loader.state_dict(batches_ago=1))
        loader.close()
        with pipe().loader() as other:
            other.load_state_dict(state)
            rest = list(other)
        assert Counter(first[:-1] + rest) == Counter(pipe())


@pytest.mark.parametrize("ago", [-1, 2, True, "1"])
def test_states_further_back_are_refused(ago: Any) -> None:
    with PIPE.loader() as loader:
        list(loader)
        with pytest.raises(PlanError, match="batches_ago"):
            loader.state_dict(batches_ago=ago)


def test_before_the_first_batch_and_behind_the_last_there_is_none_ago() -> None:
    with PIPE.loader() as loader:
        for _ in range(2):
            with pytest.raises(PlanError, match="expected an iteration that has given an item, and goes on"):
                loader.state_dict(batches_ago=1)
            list(loader)
