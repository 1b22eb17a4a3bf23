"""An iterator that a factory returns twice is refused: a second pass, shard or resume would lack what was read."""

from __future__ import annotations

import csv
import functools
import gc
import itertools
import operator
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import streamline as sl
from streamline.errors import PlanError
from streamline.sources import single_use
from streamline.sources.single_use import USED
from streamline.testing.checks import check_resume

LENGTH = 6

SAME = r"factory returned .*the same .* again, and an iterator is read once: have it make a new one at each call"


def rows() -> Iterator[int]:
    yield from range(LENGTH)


async def arows() -> AsyncIterator[int]:
    for number in range(LENGTH):
        yield number


class Once:
    """An iterator as most are written."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at > LENGTH:
            raise StopIteration
        return self.at


class Anew(Once):
    """One that begins anew in its `__iter__`, as some loaders do."""

    def __iter__(self) -> Any:
        self.at = 0
        return self


class Wraps:
    def __init__(self, inner: Iterator[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return self.inner


MAKERS: dict[str, Callable[[], Any]] = {
    "generator": rows,
    "expression": lambda: (row for row in range(6)),
    "async generator": arows,
    "list": lambda: iter(list(range(6))),
    "map": lambda: map(abs, range(6)),
    "zip": lambda: zip(range(6), range(6), strict=True),
    "csv": lambda: csv.reader(["1,2", "3,4"]),
    "class": Once,
    "iterable of one": lambda: Wraps(rows()),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_iterator_is_read_once(make: Callable[[], Any]) -> None:
    iterator = make()
    pipe = sl.from_iterable(lambda: iterator)
    assert len(list(pipe)) == len(list(sl.from_iterable(make)))
    with pytest.raises(PlanError, match=f"from_iterable's {SAME}"):
        list(pipe)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda it: (row for row in it),
        lambda it: map(abs, it),
        lambda it: zip(it, itertools.count(), strict=False),
        lambda it: itertools.islice(map(abs, filter(None, it)), 3),
    ],
    ids=["expression", "map", "zip", "islice of map of filter"],
)
def test_a_new_one_over_the_same_iterator_is_no_new_one(wrap: Callable[[Any], Any]) -> None:
    iterator = rows()
    pipe: Any = sl.from_iterable(lambda: wrap(iterator))
    pipe.first(1)
    with pytest.raises(PlanError, match=r"returned an? \w+ over the same generator rows again.*lambda: rows\(\.\.\.\)"):
        list(pipe)


class Stateful:
    """An iterable with a state, as Hugging Face's datasets are."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.at, LENGTH))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Endless(Stateful):
    def __iter__(self) -> Iterator[int]:
        for self.at in itertools.count(self.at):  # noqa: B020 - its state is where it stands
            yield self.at


def test_a_stateful_object_in_use_is_refused_with_a_way_out_in_every_thread() -> None:
    shared = Stateful()
    pipe = sl.from_iterable(lambda: shared)
    assert list(pipe) == list(pipe) == list(range(LENGTH))
    endless = Endless()  # else one worker may be done before the other begins
    pipe = sl.from_iterable(lambda: endless)
    with pytest.raises(PlanError, match=r"same Endless again.*from_iterable\(lambda: load_dataset\(") as failed:
        list(pipe.shard(2).batch(2).merge())
    assert "deepcopy" not in str(failed.value)


class Restarts(Once):
    """An iterator, of which each `iter` is one of its own."""

    def __iter__(self) -> Any:
        yield from itertools.count()


class SetsBack(Wraps):
    """An iterable that makes its one iterator ready for another pass."""

    def __iter__(self) -> Any:
        self.inner.at = 0  # type: ignore[attr-defined]
        return self.inner


def test_what_begins_anew_at_each_iter_is_read_again() -> None:
    restarts, sets_back = Restarts(), SetsBack(Once())
    pipe = sl.from_iterable(lambda: restarts)
    with pipe.open() as stream:
        assert next(stream) == 0
        assert pipe.first(2) == [0, 1], "while another reads it"
    pipe = sl.from_iterable(lambda: sets_back)
    assert list(pipe) == list(pipe) == list(range(1, LENGTH + 1))


def test_what_a_generator_function_reads_is_not_seen() -> None:
    """The docs say so: its arguments may well go on from pass to pass."""
    iterator = rows()

    def inner(source: Iterator[int]) -> Iterator[int]:
        yield from source

    pipe = sl.from_iterable(lambda: inner(iterator))
    assert [len(list(pipe)), len(list(pipe))] == [LENGTH, 0]


def test_a_lists_iterator_inside_a_new_map_is_seen() -> None:
    numbers = iter([1, 2, 3])
    pipe = sl.from_iterable(lambda: map(abs, numbers))
    assert list(pipe) == [1, 2, 3]
    with pytest.raises(PlanError, match="a map over the same list_iterator again"):
        list(pipe)


def test_a_second_shard_and_a_second_pass_and_a_resume_are_refused() -> None:
    one, two, three = rows(), rows(), rows()
    with pytest.raises(PlanError, match=SAME) as failed:
        list(sl.from_iterable(lambda: one).shard(2))
    assert "shard 1 of 2" in failed.value.__notes__[0]
    with sl.from_iterable(lambda: two).repeat(2).open() as stream:
        assert [next(stream) for _ in range(6)] == list(range(6))
        with pytest.raises(PlanError, match=SAME):
            next(stream)
    pipe = sl.from_iterable(lambda: three)
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot) as stream, pytest.raises(PlanError, match=SAME):
        next(stream)


def test_it_is_refused_in_a_mixture_in_a_zip_and_on_threads() -> None:
    def twice(iterator: Any) -> dict[str, Any]:
        return {name: sl.from_iterable(lambda: iterator) for name in "ab"}

    with pytest.raises(PlanError, match=SAME):
        list(sl.mix(twice(rows())))
    with pytest.raises(PlanError, match=SAME):
        list(sl.zip(*twice(rows()).values()))
    numbers = iter(range(100_000))
    pipe = sl.from_iterable(lambda: numbers).shard(2)
    with pipe.open(backend=sl.Threads(2)) as stream, pytest.raises(PlanError, match=SAME):
        list(stream)


def test_one_that_begins_anew_is_read_again_when_it_is_in_use_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = Anew()
    pipe = sl.from_iterable(lambda: iterator)
    assert list(pipe) == list(pipe) == [1, 2, 3, 4, 5, 6]
    monkeypatch.setitem(globals(), "LENGTH", 10_000_000)  # no reader comes to its end unasked
    with pipe.open() as stream:
        next(stream)
        with pytest.raises(PlanError, match=SAME):
            list(pipe)


def test_numbers_that_go_on_over_passes_are_no_reason_to_refuse() -> None:
    numbers = itertools.count()
    pipe = sl.from_iterable(lambda: zip("ab", numbers, strict=False))
    assert [list(pipe), list(pipe)] == [[("a", 0), ("b", 1)], [("a", 2), ("b", 3)]]


def test_an_iterator_twice_in_one_pass_is_one_use() -> None:
    pipe = sl.from_iterable(lambda: zip(*[iter(range(6))] * 2, strict=True))
    assert list(pipe) == list(pipe) == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize("workers", [None, 2])
def test_a_stream_dataset_calls_its_factory_for_a_new_one(workers: int | None) -> None:
    iterator = rows()
    dataset = sl.StreamDataset(lambda: iterator, *([] if workers is None else [0, workers]))
    assert list(dataset) == list(range(0, 6, workers or 1))
    dataset.reset()
    with pytest.raises(PlanError, match=f"StreamDataset's {SAME}"):
        list(dataset)
    with pytest.raises(PlanError, match=SAME):
        list(sl.from_iterable(dataset))


async def test_an_async_one_too() -> None:
    iterator = arows()
    dataset = sl.StreamDataset(lambda: iterator)
    assert [row async for row in dataset] == list(range(6))
    await dataset.areset()
    with pytest.raises(PlanError, match=f"StreamDataset's {SAME}"):
        await anext(aiter(dataset))


def test_a_live_feed_that_has_ended_is_refused() -> None:
    feed = arows()
    assert list(sl.from_stream(lambda: feed)) == list(range(6))
    with pytest.raises(PlanError, match="from_stream's async generator arows has ended: an earlier opening read it"):
        list(sl.from_stream(lambda: feed))
    with pytest.raises(PlanError, match="has ended"):
        list(sl.from_stream(feed))


class Item:
    pass


def test_nothing_is_kept_of_an_iterator_that_nobody_else_holds() -> None:
    before = len(USED)
    seen: list[weakref.ref[Item]] = []

    def items() -> list[Item]:
        found = [Item(), Item()]
        seen.extend(map(weakref.ref, found))
        return found

    pipes: list[Any] = [
        sl.from_iterable(lambda: iter(items())),
        sl.from_iterable(lambda: map(str, (item for item in items()))),
        sl.from_iterable(lambda: itertools.islice(map(str, iter(items())), 5)),
    ]
    for pipe in pipes:
        pipe.first(1)
    gc.collect()
    assert len(USED) == before
    assert [item() for item in seen] == [None] * 6


def test_one_that_only_the_factory_holds_is_kept_no_longer_than_the_factory() -> None:
    before, seen = len(USED), read_twice()
    gc.collect()
    assert len(USED) == before
    assert seen() is None


def test_the_identity_of_one_that_only_its_user_held_is_no_other_ones() -> None:
    """A `map` can't have a weak reference: freed, its identity would be that of a later one, which is refused then."""
    numbers = [map(abs, range(3))]
    pipe = sl.from_iterable(lambda: numbers[-1])
    assert list(pipe) == [0, 1, 2]
    first = id(numbers.pop())
    assert first not in [id(other) for other in [map(abs, range(3)) for _ in range(20_000)]]
    numbers.append(map(abs, range(3)))
    assert list(pipe) == [0, 1, 2]


def held_by_default(held: list[Any]) -> Callable[[], Any]:
    def made(held: list[Any] = held) -> Any:
        return held[0]

    return made


def held_by_name(held: Any) -> Callable[[], Any]:
    HELD[:] = [held]
    return lambda: HELD[0]


def held_by_a_module(held: Any) -> Callable[[], Any]:
    package = ModuleType("package")
    package.module = ModuleType("module")  # type: ignore[attr-defined]
    package.module.held = held
    return lambda: next(package.module.held for _ in range(1))


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = {"deep": [(held,)]}

    def __call__(self) -> Any:
        return self.held["deep"][0][0]


HELD: list[Any] = []


@pytest.mark.parametrize(
    "factory_of",
    [
        lambda it: lambda: it,
        lambda it: held_by_default([it]),
        Holder,
        lambda it: Holder(it).__call__,
        lambda it: functools.partial(operator.itemgetter(0), (it,)),
        lambda it: held_by_name(it),
        lambda it: held_by_a_module(it),
        lambda it: functools.cache(lambda: map(abs, [1, 2])),
    ],
)
def test_what_a_factory_refers_to_in_any_way_is_seen_again(factory_of: Callable[[Any], Callable[[], Any]]) -> None:
    factory = factory_of(map(abs, [1, 2]))
    pipe = sl.from_iterable(factory)
    assert list(pipe) == [1, 2]
    with pytest.raises(PlanError, match=SAME):
        list(pipe)
    HELD.clear()


def test_a_factory_that_refers_to_much_is_searched_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def referents(one: object) -> list[object]:
        nonlocal calls
        calls += 1
        return [[], []]

    monkeypatch.setattr(single_use, "gc", SimpleNamespace(get_referents=referents))
    assert not single_use._refers_to(Holder([0]), object())
    assert calls <= single_use.MOST_SEARCHED


def read_twice() -> weakref.ref[Item]:
    item = Item()
    numbers = iter([item, item])
    pipe = sl.from_iterable(lambda: numbers)
    pipe.first(1)
    with pytest.raises(PlanError, match=SAME):
        pipe.first(1)
    return weakref.ref(item)


def test_a_file_is_an_iterator(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    with path.open() as file:
        pipe = sl.from_iterable(lambda: (line.strip() for line in file))
        assert list(pipe) == ["a", "b"]
        with pytest.raises(PlanError, match=r"over the same TextIOWrapper again"):
            list(pipe)
    check_resume(sl.from_iterable(path.open), expected=["a\n", "b\n"])


def test_a_use_that_is_refused_leaves_the_iterator_to_its_first_user() -> None:
    numbers = (number for number in range(100_000))
    pipe = sl.from_iterable(lambda: numbers)
    with pipe.open() as stream:
        assert next(stream) == 0
        with pytest.raises(PlanError, match=SAME):
            list(pipe)
        assert list(stream) == list(range(1, 100_000))


def test_users_of_a_shared_dataset_may_share_an_iterator() -> None:
    queue = iter(range(10))
    first, second = (sl.StreamDataset(lambda: queue, worker, 2, strategy="shared") for worker in range(2))
    assert [next(iter(first)), next(iter(second)), next(iter(first))] == [0, 1, 2]
