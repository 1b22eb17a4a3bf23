"""Iterables that know their own state are loaded; stand-ins behave as the real libraries do, with their quirks.

Written after torchdata 0.11 (StatefulDataLoader, nodes.Loader), grain 0.2.18 and Hugging Face datasets 5.2; checked
against these by hand.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest

import streamline as sl
from streamline.core.item_codec import state_from_json, state_text
from streamline.errors import CodeChangedWarning, PlanError, PlanTypeError, ResumeError
from streamline.pipeline import Pipeline
from streamline.testing.checks import check_failure, check_resume
from streamline.testing.subjects import LOOPS
from tests.laws.profile import in_turn

DRAWN: list[int] = []
"""What stand-ins were asked for, over all of them."""


class Dataset:
    """As Hugging Face's IterableDataset: the state is the iterable's, of its latest iterator; a load stays."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._state: dict[str, Any] = {}
        self._starting: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._starting = state_dict

    def __iter__(self) -> Iterator[int]:
        start = 0 if self._starting is None else self._starting["examples_iterable"]["shard_example_idx"]
        self._state = {"examples_iterable": {"shard_idx": 0, "shard_example_idx": start}, "epoch": 0}
        for item in range(start, self.length):
            DRAWN.append(item)
            self._state["examples_iterable"]["shard_example_idx"] += 1
            yield item


class FrozenDataset(Dataset):
    """As some versions of it (datasets issue 8308): behind a load, the state says for ever that it is at the start."""

    def state_dict(self) -> dict[str, Any]:
        if self._starting is not None:
            return {"examples_iterable": {"shard_idx": 0, "shard_example_idx": 0}, "epoch": 0}
        return super().state_dict()


class Loader:
    """As torchdata's nodes.Loader: a state at the end starts over; `state_dict` before a load makes that forgotten."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._next: dict[str, Any] | None = None
        self._iterator: LoaderIterator | None = None
        self._made_for_state = False

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            iter(self)
            self._made_for_state = True
        assert self._iterator is not None
        return {"root": {"source": {"_num_yielded": self._iterator.at}}, "num_yielded": self._iterator.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict

    def __iter__(self) -> Iterator[int]:
        if self._iterator is None:
            self._iterator = LoaderIterator(self.length)
        elif self._made_for_state:
            self._made_for_state = False
            return self._iterator
        self._iterator.at = 0 if self._next is None else self._next["num_yielded"] % self.length
        self._next = None
        return self._iterator


class LoaderIterator:
    def __init__(self, length: int) -> None:
        self.length = length
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at >= self.length:
            raise StopIteration
        DRAWN.append(self.at)
        self.at += 1
        return self.at - 1


class GrainIterator:
    """As grain's DatasetIterator: the state is the iterator's, and is set once it is there."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._next_index = 0

    def get_state(self) -> Any:
        return {"next_index": self._next_index}

    def set_state(self, state: Any) -> None:
        self._next_index = state["next_index"]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._next_index >= self.length:
            raise StopIteration
        DRAWN.append(self._next_index)
        self._next_index += 1
        return self._next_index - 1


class BytesIterator(GrainIterator):
    """As the iterator of grain's DataLoader: its state is bytes."""

    def get_state(self) -> Any:
        return json.dumps({"version": 2, "last": super().get_state()}).encode()

    def set_state(self, state: Any) -> None:
        assert isinstance(state, bytes)
        super().set_state(json.loads(state)["last"])


class GrainDataset:
    """As grain's IterDataset: no state itself."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return GrainIterator(self.length)


class Awaited(Dataset):
    """An async iterable with a state."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is async")

    async def __aiter__(self) -> AsyncIterator[int]:
        for item in super().__iter__():
            yield item


KINDS: dict[str, Callable[[int], Any]] = {
    "state_dict of the iterable": Dataset,
    "torchdata's loader": Loader,
    "get_state of the iterator": GrainDataset,
    "get_state of what the factory returns": GrainIterator,
    "a state of bytes": BytesIterator,
}


def pipeline(kind: Callable[[int], Any], length: int = 70) -> Pipeline[int]:
    return sl.from_iterable(lambda: kind(length))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "length"),
    [(name, length) for at, name in enumerate(KINDS) for length in ([17] if at else [0, 1, 16, 17, 33])],
)
def test_it_resumes_exactly_at_every_length(name: str, length: int) -> None:
    """▲ At its end, torchdata's loader starts over: a state from there must never be loaded."""
    check_resume(pipeline(KINDS[name], length), expected=range(length), generations=2, loop=LOOPS[length % len(LOOPS)])


COMPOSITIONS: dict[str, Callable[[Pipeline[int]], Pipeline[Any]]] = {
    "shards": lambda pipe: pipe.shard(3),
    "passes": lambda pipe: pipe.repeat(2).shard(2).shuffle(window=4).batch(4, collate=None),
    "choices": lambda pipe: pipe.take(25).shard(2).map(lambda n: -n).merge("best_effort").batch(3, collate=None),
}


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(("name", "composition"), in_turn(KINDS, [*COMPOSITIONS]))
def test_it_resumes_exactly_in_compositions(name: str, composition: str) -> None:
    compose = COMPOSITIONS[composition]
    check_resume(compose(pipeline(KINDS[name], 35)), expected=compose(sl.from_items(range(35))), generations=2)


@pytest.mark.parametrize("name", KINDS)
def test_a_resume_loads_and_does_not_iterate_from_the_start(name: str) -> None:
    pipe = pipeline(KINDS[name], 1000)
    with pipe.open() as stream:
        assert list(islice(stream, 900)) == list(range(900))
        snapshot = stream.snapshot()
    own = snapshot.worker_states[0]["iterable"]
    assert own["items"] == 900
    assert own["since"] <= 32
    DRAWN.clear()
    with pipe.open(resume=snapshot) as stream:
        assert next(stream) == 900
    assert DRAWN[0] == 900 - own["since"]


async def test_an_async_iterable_is_loaded_too() -> None:
    pipe: Pipeline[int] = sl.from_iterable(lambda: Awaited(50))
    async with pipe.open() as stream:
        found = [await anext(stream) for _ in range(40)]
        snapshot = stream.snapshot()
    assert snapshot.worker_states[0]["iterable"]["since"] <= 32
    async with pipe.open(resume=snapshot) as stream:
        assert found + [item async for item in stream] == list(range(50))


def test_the_first_states_iterate_from_the_start() -> None:
    with pipeline(Dataset).open() as stream:
        next(stream)
        assert stream.snapshot().worker_states[0] == {"iterable": {"items": 1, "since": 1, "state": None}}


def test_a_state_that_stops_moving_is_not_believed() -> None:
    """▲ The second resume of such a dataset would start over."""

    def generation(resume: sl.Snapshot | None, count: int | None) -> tuple[list[int], sl.Snapshot]:
        with pipeline(FrozenDataset, 200).open(resume=resume) as stream:
            return list(islice(stream, count)), stream.snapshot()

    first, snapshot = generation(None, 60)
    with pytest.warns(
        RuntimeWarning, match="the state of FrozenDataset is the same after items 34 and 50, so it can't"
    ):
        second, snapshot = generation(snapshot, 60)
    with pytest.warns(RuntimeWarning, match="a resume iterates on from item 33"):
        third, _ = generation(snapshot, None)
    assert first + second + third == list(range(200))


def test_what_was_saved_of_an_iterable_without_a_state_is_iterated_to() -> None:
    with sl.from_iterable(lambda: range(50)).open() as stream:
        assert list(islice(stream, 40))[-1] == 39
        snapshot = stream.snapshot()
    with pytest.warns(CodeChangedWarning), pipeline(Dataset, 50).open(resume=snapshot) as stream:
        assert list(stream) == list(range(40, 50))


def test_what_was_saved_of_one_with_a_state_needs_one() -> None:
    with pipeline(Dataset, 50).open() as stream:
        assert list(islice(stream, 40))[-1] == 39
        snapshot = stream.snapshot()
    with (
        pytest.warns(CodeChangedWarning),
        sl.from_iterable(lambda: range(50)).open(resume=snapshot) as stream,
        pytest.raises(ResumeError, match=r"holds the state of an iterable, and the range .* no load_state_dict"),
    ):
        next(stream)


def test_half_a_protocol_is_none() -> None:
    class Half(GrainIterator):
        set_state = None  # type: ignore[assignment]

    check_resume(pipeline(Half, 20), expected=range(20))
    with pipeline(Half, 20).open() as stream:
        next(stream)
        assert stream.snapshot().worker_states[0] == {"iterable": 1}


# Failure ------------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("at", [0, 1, 16, 17, 30, 40])
def test_it_fails_as_others_and_is_resumed_after_a_fix(at: int) -> None:
    error = ValueError("scripted")

    class Breaks(GrainIterator):
        def __next__(self) -> int:
            if self._next_index == at:
                raise error
            return super().__next__()

    check_failure(pipeline(Breaks, 45), error, mended=pipeline(GrainIterator, 45))


def test_a_state_dict_that_fails_is_the_sources_failure() -> None:
    class Breaks(Dataset):
        def state_dict(self) -> dict[str, Any]:
            raise LookupError("no state")

    with pipeline(Breaks).open() as stream:
        assert next(stream) == 0
        with pytest.raises(LookupError, match="no state") as failed:
            next(stream)
    assert failed.value.__notes__[0].startswith("in iterable, shard 0 of 1")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "a builtins.object"),
        ({1, 2}, "a builtins.set"),
        (float("nan"), "nan"),
        ({3: 4}, "a dict with the key 3"),
        ({"__bytes__": 1}, "a dict with the key '__bytes__'"),
    ],
    ids=["object", "set", "nan", "integer key", "our own word"],
)
def test_a_state_that_json_cannot_hold_is_an_error_that_names_the_entry(value: Any, named: str) -> None:
    class Holds(GrainIterator):
        def get_state(self) -> Any:
            return {"sampler": [0, {"generator": value}]}

    with pipeline(Holds).open() as stream:
        assert next(stream) == 0
        with pytest.raises(PlanTypeError) as failed:
            next(stream)
    assert str(failed.value).startswith(f"Holds's state['sampler'][1]['generator'] is {named}, which JSON can't hold")
    assert "iter(...)" in str(failed.value)


def test_what_json_has_no_word_for_is_wrapped() -> None:
    state = {
        "a": [1, 2.5, None, True],
        "b": b"\x00\xff",
        "c": (1, (b"2", "3")),
        "d": {},
        "rng": random.Random(1).getstate(),
    }
    assert state_from_json(json.loads(state_text(state, "it"))) == state


# Objects that hold their state --------------------------------------------------------------------------------------


def test_one_object_for_two_workers_is_refused() -> None:
    """▲ Its state would be that of whichever began last."""
    shared = Dataset(5000)
    with (
        sl.from_iterable(lambda: shared).shard(2).open() as stream,
        pytest.raises(PlanError, match=r"returned the same Dataset again.*make a new one at each call"),
    ):
        list(stream)


def test_one_object_may_be_iterated_again_from_its_start() -> None:
    shared = Dataset(20)
    pipe = sl.from_iterable(lambda: shared)
    assert list(pipe) == list(pipe) == list(range(20))
    assert list(pipe.repeat(2)) == [*range(20)] * 2


def test_an_object_that_was_loaded_is_not_used_again() -> None:
    """▲ It would begin where it was loaded."""
    shared = Dataset(50)
    with pipeline(Dataset, 50).open() as stream:
        assert list(islice(stream, 40))[-1] == 39
        snapshot = stream.snapshot()
    pipe = sl.from_iterable(lambda: shared)
    with pytest.warns(CodeChangedWarning), pipe.open(resume=snapshot) as stream:
        assert list(stream) == list(range(40, 50))
    with pytest.raises(PlanError, match="returned the same Dataset again"):
        list(pipe)


def test_an_object_that_was_iterated_is_not_loaded() -> None:
    """▲ torchdata's loader forgets what is loaded behind a `state_dict`."""
    shared = Loader(50)
    pipe = sl.from_iterable(lambda: shared)
    with pipe.open() as stream:
        assert list(islice(stream, 40))[-1] == 39
        snapshot = stream.snapshot()
    with pytest.raises(PlanError, match="returned the same Loader again"), pipe.open(resume=snapshot) as stream:
        next(stream)


def test_one_that_cannot_be_watched_is_used_all_the_same() -> None:
    class Slotted:
        __slots__ = ("at",)

        def __init__(self) -> None:
            self.at = 0

        def get_state(self) -> int:
            return self.at

        def set_state(self, state: int) -> None:
            self.at = state

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            if self.at == 40:
                raise StopIteration
            self.at += 1
            return self.at

    check_resume(sl.from_iterable(Slotted), expected=range(1, 41))


def test_a_shuffle_buffer_that_the_state_leaves_out_is_refused() -> None:
    """▲ Hugging Face's state_dict says so in its documentation: what is in the buffer is lost."""

    class BufferShuffledExamplesIterable:
        ex_iterable = None

    class Mapped:
        ex_iterables = (BufferShuffledExamplesIterable(),)

    class Shuffled(Dataset):
        _ex_iterable = Mapped()

    with pipeline(Shuffled).open() as stream, pytest.raises(PlanError, match="shuffles in a buffer that its state"):
        next(stream)
    iterated: Callable[[], Iterable[int]] = lambda: iter(Shuffled(30))  # noqa: E731
    with warnings.catch_warnings(action="error"):
        check_resume(sl.from_iterable(iterated), expected=range(30))


def test_an_iterator_that_starts_over_whenever_it_is_asked_for_itself() -> None:
    class Again:
        def __iter__(self) -> Iterator[int]:
            self.at = 0
            return self

        def __next__(self) -> int:
            if self.at == 300:
                raise StopIteration
            self.at += 1
            return self.at

    assert list(sl.from_iterable(Again)) == list(range(1, 301))
