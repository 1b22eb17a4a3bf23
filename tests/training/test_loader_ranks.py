"""Loaders' states of all ranks, on another number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

import streamline as sl
from streamline.errors import ResumeError, SnapshotError
from streamline.training.loader_state import LoaderState
from tests.laws.profile import covering

PIPE = sl.from_items(range(24)).shuffle(seed=2).shard(6).merge().batch(2, collate=None)


def loaders(ranks: int, **options: Any) -> list[sl.Loader[Any]]:
    return [PIPE.loader(rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def states(ranks: int, steps: int, **options: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return what all ranks were given in so many steps, and their states."""
    found: list[Any] = []
    saved = []
    for loader in loaders(ranks, **options):
        iterator = iter(loader)  # held on to: its loop isn't left
        for batch in islice(iterator, steps):
            found += batch
        saved.append(json.loads(json.dumps(loader.state_dict())))
        loader.close()
    return found, saved


@pytest.mark.parametrize(("of", "to"), [(2, 3), (3, 1), (1, 2), (2, 2)])
def test_an_epoch_goes_on_on_another_number_of_ranks(of: int, to: int) -> None:
    found, saved = states(of, 2)
    second: list[Any] = []
    for loader in loaders(to):
        loader.load_state_dict(saved)
        assert (loader.epoch, loader.step) == (0, 2)
        again = loader.state_dict()
        for batch in loader:
            found += batch
        for batch in loader:
            second += batch
        loader.close()
        assert json.loads(again["snapshot"])["world_size"] == to
    assert sorted(found) == sorted(second) == list(range(24))


def test_a_loader_older_than_its_trainers_processes_has_the_length_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """▲ Trainers that start their own processes are handed it before; its iterations found out, its length didn't."""
    loader = PIPE.loader()
    assert len(loader) == 12
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(loader) == len(list(loader)) == 6
    loader.close()
    given = PIPE.loader(rank=0, world_size=1)
    assert len(given) == len(list(given)) == 12
    given.close()


def part(loader: sl.Loader[int], most: int | None = None) -> tuple[list[int], Any]:
    """Return what is left of an epoch, or so many items of it, and the state behind them."""
    with loader:
        iterator = iter(loader)
        found = list(islice(iterator, most))
        return found, loader.state_dict()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("length", "ends", "saved_anew"), covering([32, 35], ["drop", "pad"], [False, True]))
def test_ranks_end_together_behind_another_number_of_ranks(length: int, ends: Any, saved_anew: bool) -> None:
    """One of which is alone, and stops where the eight have unequal rests; also if each saves before its first item."""
    pipe = sl.from_items(range(length)).shard(8)

    def on(ranks: int, rank: int) -> sl.Loader[int]:
        return pipe.loader(rank=rank, world_size=ranks, ends=ends, persistent=False)

    saved = [part(on(8, rank), 1)[1] for rank in range(8)]
    alone = on(1, 0)
    alone.load_state_dict(saved)
    taken, state = part(alone, 11)
    assert taken == list(range(8, 19))
    rests = [list(range(rank, length, 8))[2 + (rank < 3) :] for rank in range(8)]
    count = (min if ends == "drop" else max)(map(len, rests))
    for rank, rest in enumerate(rests):
        loader = on(8, rank)
        loader.load_state_dict([state])
        if saved_anew:
            again = json.loads(json.dumps(loader.state_dict()))
            loader.close()
            loader = on(8, rank)
            loader.load_state_dict(again)
        found, _ = part(loader)
        assert found[: len(rest)] == rest[:count]
        assert len(found) == count


def test_between_two_epochs_the_next_one_begins() -> None:
    _, saved = states(2, 6)
    assert {state["at"] for state in saved} == {"begin"}
    found: list[Any] = []
    for loader in loaders(3):
        loader.load_state_dict(saved)
        assert loader.epoch == 1
        found += [item for batch in loader for item in batch]
        loader.close()
    assert sorted(found) == list(range(24))


def test_a_shards_end_is_found_out_by_the_rank_that_has_it_now() -> None:
    """▲ On one rank more follows; of the ranks that share its shards now, one has nothing left."""
    pipe = sl.from_items(range(9)).shard(8)
    with pipe.loader() as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(8)]
        saved = loader.state_dict()
    assert saved["at"] == "inside"
    for rank in range(2):
        with pipe.loader(rank=rank, world_size=2, ends="allow") as loader:
            loader.load_state_dict([saved])
            assert loader.epoch == rank  # rank 1 has nothing left of epoch 0
            if not rank:
                found += list(loader)
    assert sorted(found) == list(range(9))


def test_where_one_rank_does_not_know_whether_more_follows_the_job_does_not() -> None:
    _, (one, other) = states(2, 1)
    unsure = replace(LoaderState.from_dict(other), at="unknown").to_dict()
    joined, _ = LoaderState.read([one, unsure])
    assert (one["at"], joined.at) == ("inside", "unknown")


def test_states_of_several_steps_or_of_some_ranks_only_are_refused() -> None:
    _, first = states(2, 1)
    _, second = states(2, 2)
    (loader,) = loaders(1)
    with pytest.raises(SnapshotError, match="are of one step, these are of several: epoch 0 step 1, epoch 0 step 2"):
        loader.load_state_dict([first[0], second[1]])
    with pytest.raises(SnapshotError, match="of rank 0 of 1"):
        loader.load_state_dict(first[:1])
    with pytest.raises(ResumeError, match="load the directory that all ranks saved to"):
        loader.load_state_dict(first[0])


def test_steps_go_on_where_all_ranks_stood() -> None:
    found, saved = states(2, 3, steps_per_epoch=4)
    for loader in loaders(3, steps_per_epoch=4):
        loader.load_state_dict(saved)
        found += [item for batch in loader for item in batch]
        assert loader.epoch == 1
        loader.close()
    assert sorted(found[:18]) == sorted(set(found[:18]))


def test_ranks_in_different_passes_go_on_each_by_itself_only() -> None:
    pipe = sl.from_items(range(9)).shard(2)
    saved, following = [], []
    for rank in range(2):
        with pipe.loader(rank=rank, world_size=2, steps_per_epoch=9, persistent=False) as loader:
            iterator = iter(loader)
            assert len(list(islice(iterator, 5))) == 5
            saved.append(json.loads(json.dumps(loader.state_dict())))
            following.append(list(iterator))
    for ranks in (1, 2):
        with (
            pipe.loader(rank=0, world_size=ranks, steps_per_epoch=9) as loader,
            pytest.raises(
                SnapshotError, match=r"in different passes over their data \(0, 1\), since they have unequal"
            ),
        ):
            loader.load_state_dict(saved)
    for rank in range(2):
        with pipe.loader(rank=rank, world_size=2, steps_per_epoch=9) as loader:
            loader.load_state_dict(saved[rank])
            assert list(loader) == following[rank]
