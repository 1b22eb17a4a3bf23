"""What people write in their first hour: a message says what was expected, what arrived, and the line to write."""

from __future__ import annotations

import asyncio
import functools
import warnings
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError
from streamline.testing.checks import check_resume

PIPE: Any = sl.from_items(range(6))
SL: Any = sl


async def fetch(factor: int, item: int) -> int:
    await asyncio.sleep(0)
    return factor * item


def sync_generator(items: Any) -> Iterator[int]:
    yield from items


async def no_generator(items: Any) -> int:
    return 1


async def generator(items: Any) -> AsyncIterator[int]:
    async for item in items:
        yield item


def run(work: Callable[[], Any]) -> Any:
    """Run it, and let no coroutine go without being awaited or closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return work()


async def as_list() -> list[int]:
    async with PIPE.open() as stream:
        return list(stream)


async def async_for_open() -> None:
    async for _ in PIPE.open():
        pass


async def async_for_plain() -> None:
    with PIPE.open() as stream:
        async for _ in stream:
            pass


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # awaitables
    "map, a coroutine": (
        lambda: list(PIPE.map(lambda item: fetch(2, item))),
        PlanTypeError,
        r"would not be awaited: give .map the `async def` itself.*or .map\(fn, concurrency=16\)",
    ),
    "map in threads, a coroutine": (
        lambda: list(PIPE.map(lambda item: fetch(2, item), executor="thread")),
        PlanTypeError,
        r"would not be awaited: give .map the `async def`, without executor=",
    ),
    "map at once, sync": (lambda: PIPE.map(abs, concurrency=4), PlanError, "needs executor='thread'.*`async def`"),
    "map at once, a sync lambda": (
        lambda: list(PIPE.map(lambda item: item, concurrency=4)),
        PlanTypeError,
        r"needs executor='thread'.*returned no awaitable, but int",
    ),
    "filter, a coroutine": (
        lambda: list(PIPE.filter(lambda _: fetch(1, 1))),
        PlanTypeError,
        "await it in a .map befor",
    ),
    "flat_map, a coroutine": (lambda: list(PIPE.flat_map(lambda _: fetch(1, 1))), PlanTypeError, "await it in a .map"),
    "collate, a coroutine": (
        lambda: list(PIPE.batch(2, collate=lambda _: fetch(1, 1))),
        PlanTypeError,
        r"await it in a .map after .batch\(collate=None\)",
    ),
    "factory, a coroutine": (lambda: list(SL.from_iterable(lambda: fetch(1, 1))), PlanTypeError, "an async generator"),
    # generators
    "map, a generator": (lambda: PIPE.map(sync_generator), PlanError, r"sync_generator yields: .flat_map\(fn\)"),
    "map, an async generator": (lambda: PIPE.map(generator), PlanError, r"generator yields: .through\(fn\)"),
    "filter, a generator": (lambda: PIPE.filter(sync_generator), PlanError, "a generator is always true"),
    "through, a sync generator": (
        lambda: PIPE.through(sync_generator),
        PlanTypeError,
        r"sync_generator is a sync generator function: async def sync_generator\(items\), with `async for",
    ),
    "through, no generator": (lambda: PIPE.through(no_generator), PlanTypeError, "without a yield: async def"),
    "through, a call": (lambda: PIPE.through(generator(PIPE)), PlanTypeError, r"got async_generator.*.through\(gener"),
    "flat_map, no iterable": (lambda: list(PIPE.flat_map(abs)), PlanTypeError, r"\[item\] for one item, \[\] for none"),
    # functions of other arguments
    "map of two": (lambda: PIPE.map(lambda x, y: x), PlanTypeError, r"called as fn\(item\).*fn is given the tuple"),
    "map of none": (lambda: PIPE.map(lambda: 1), PlanTypeError, r"<lambda>\(\) can't be"),
    "map without rng": (lambda: PIPE.map(lambda x: x, seed=1), PlanTypeError, r"called as fn\(item, rng=\)"),
    "filter of two": (lambda: PIPE.filter(lambda x, y: x), PlanTypeError, r".filter\(fn\) is called as fn\(item\)"),
    # names of other loaders
    "shuffle(1000)": (lambda: PIPE.shuffle(1000), PlanTypeError, r".shuffle\(window=1000\) permutes each 1000"),
    "shuffle(buffer_size=)": (lambda: PIPE.shuffle(buffer_size=9), PlanTypeError, r".shuffle\(window=4096\)"),
    "loader(num_workers=)": (
        lambda: PIPE.loader(num_workers=4),
        PlanTypeError,
        r"^.loader has no num_workers=: .shard\(4\).*sl.Processes\(4\)",
    ),
    "open(num_workers=)": (lambda: PIPE.open(num_workers=4), PlanTypeError, r"^.open has no num_workers=: .shard\(4\)"),
    "loader(epochs=)": (lambda: PIPE.loader(epochs=4), PlanTypeError, r"no epochs=: did you mean epoch=\?"),
    "open(workerz=)": (lambda: PIPE.open(zzz=4), PlanTypeError, r"no zzz=: it has backend, .*resume"),
    "batch(drop_last=)": (lambda: PIPE.batch(4, drop_last=True), PlanTypeError, r"drop_remainder=True"),
    "batch(collate_fn=)": (lambda: PIPE.batch(4, collate_fn=list), PlanTypeError, r".batch\(32, collate=fn\)"),
    "map(num_parallel_calls=)": (lambda: PIPE.map(abs, num_parallel_calls=4), PlanTypeError, r"concurrency=4"),
    "map(executor='process')": (lambda: PIPE.map(abs, executor="process"), PlanError, r"backend=sl.Processes\(4\)"),
    "shard(4, 0)": (lambda: PIPE.shard(4, 0), PlanTypeError, r".shard\(mode=\) is one of .*got int 0: .*rank="),
    "shard(index=)": (lambda: PIPE.shard(4, index=0), PlanTypeError, r"open\(rank=, world_size=\)"),
    "pipe.to": (lambda: PIPE.to("cuda"), AttributeError, r"no attribute 'to': .transfer\(\"cuda\"\)"),
    "pipe.state_dict": (lambda: PIPE.state_dict(), AttributeError, r"`loader = pipe.loader\(\)`"),
    "pipe.snapshot": (lambda: PIPE.snapshot(), AttributeError, r"`with pipe.open\(\) as stream`"),
    # opening
    "for in open": (lambda: list(PIPE.open()), PlanTypeError, r"`with pipe.open\(\) as stream: for item in stream`"),
    "next of open": (lambda: next(PIPE.open()), PlanTypeError, r"`with pipe.open\(\) as stream: for item in stream`"),
    "snapshot of open": (lambda: PIPE.open().snapshot(), AttributeError, r"`with pipe.open.*and that has .snapshot"),
    "async for in open": (lambda: asyncio.run(async_for_open()), PlanTypeError, r"`async with pipe.open\(\) as stream"),
    "list in async": (lambda: asyncio.run(as_list()), PlanTypeError, r"\[item async for item in stream\]"),
    "async for of plain": (
        lambda: asyncio.run(async_for_plain()),
        PlanTypeError,
        "this stream is a plain one: for item",
    ),
    "backend, a class": (
        lambda: PIPE.open(backend=sl.Processes),
        PlanTypeError,
        r"backend=sl.Processes\(\), or sl.Processes\(4\)$",
    ),
    "backend, another": (
        lambda: PIPE.open(backend="threads"),
        PlanTypeError,
        r"sl.Threads\(4\), sl.Processes\(4\), got",
    ),
    # sources
    "mix, a list of weights": (
        lambda: SL.mix([PIPE, PIPE], [1, 1]),
        PlanTypeError,
        r"is a dict by name, {'0': 1, '1': 1}, got the list \[1, 1\]",
    ),
    "from_iterable([1, 2])": (lambda: SL.from_iterable([1, 2]), PlanTypeError, r"sl.from_items\(items\)"),
    "from_iterable(set)": (lambda: SL.from_iterable({1, 2}), PlanTypeError, r"from_iterable\(lambda: items\)"),
    "from_iterable(gen)": (lambda: SL.from_iterable(n for n in [1]), PlanTypeError, r"from_iterable\(make\), not make"),
    "factory, None": (lambda: list(SL.from_iterable(lambda: None)), PlanTypeError, "has it a return, or a yield?"),
    "batch(3.0)": (lambda: PIPE.batch(3.0), PlanTypeError, "is an integer, got float 3.0"),
}


@pytest.mark.parametrize(("work", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_the_line_to_write(work: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        run(work)
    assert not any(name in str(raised.value) for name in ("Openable", "Opened"))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_lambda_around_an_async_function_is_awaited_where_calls_are_concurrent(ordered: bool) -> None:
    pipe = sl.from_items(range(20)).map(lambda item: fetch(2, item), concurrency=4, ordered=ordered)
    found = run(lambda: list(pipe))
    assert (found if ordered else sorted(found)) == list(range(0, 40, 2))
    check_resume(pipe, generations=2)


def test_it_is_awaited_in_any_backend_in_debug_and_with_a_seed_and_is_replayed() -> None:
    pipe = PIPE.shard(2).map(lambda item: fetch(2, item), concurrency=2)
    for backend in (sl.Threads(2), sl.Processes(1)):
        with pipe.open(backend=backend) as stream:
            assert list(stream) == [0, 2, 4, 6, 8, 10]
    assert list(pipe.debug()) == [0, 2, 4, 6, 8, 10]
    assert len(set(PIPE.map(lambda item, rng: fetch(1, rng.integers(1 << 60)), concurrency=2, seed=1))) == 6

    async def fail(item: int) -> int:
        return 1 // (item - 3)

    with pytest.raises(ZeroDivisionError) as failed:
        list(PIPE.map(lambda item: fail(item), concurrency=2))
    with pytest.raises(ZeroDivisionError):
        sl.replay(failed.value)
    assert sl.replay(failed.value, fn=lambda item: fetch(3, item)) == 9


def test_a_decorated_async_function_is_awaited_and_known_to_a_snapshot_by_its_name() -> None:
    @functools.wraps(fetch)
    def traced(item: int) -> Any:
        return fetch(2, item)

    pipe = PIPE.map(traced, concurrency=2)
    assert list(pipe) == [0, 2, 4, 6, 8, 10]
    with pipe.open() as stream:
        assert next(stream) == 0
        snapshot = stream.snapshot()
    (entry,) = [entry for entry in snapshot.fingerprint if entry["kind"] == "map"]
    assert entry["options"] == {"fn": "fetch"}


@pytest.mark.parametrize("size", [np.int64(3), np.uint8(3), np.array(3)])
def test_integers_of_numpy_are_integers(size: Any) -> None:
    pipe = PIPE.shard(size).shuffle(window=size, seed=size).take(size).merge().batch(size, collate=None)
    whole = list(pipe)
    assert sorted(item for batch in whole for item in batch) == list(range(6))
    with pipe.open(epoch=size, rank=np.int64(0), world_size=np.int64(1)) as stream:
        next(stream)
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with pipe.open(resume=snapshot) as stream:
        assert len(list(stream)) == len(whole) - 1
    assert len(list(PIPE.loader(steps_per_epoch=size, epoch=size))) == 3


def test_a_zip_archive_is_no_text_whatever_its_name_says(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", "{}\n")
    for read in (sl.read_lines, sl.read_jsonl, sl.read_csv, sl.read_tar):
        with pytest.raises(DataError, match=r"train.jsonl is a zip archive, whatever its name says: unzip it"):
            list(read(path))
    np.save(tmp_path / "b.npy", np.arange(3))
    with pytest.raises(DataError, match=r"b.npy is a NumPy array, whatever its name says: sl.read_npy reads it"):
        list(sl.read_lines(tmp_path / "b.npy"))


def test_an_open_file_is_no_path(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    with path.open() as file:
        with pytest.raises(PlanTypeError, match=r"got an open file \(TextIOWrapper\): give its path, '.*a.jsonl'"):
            SL.read_jsonl(file)
        with pytest.raises(PlanTypeError, match=r"got TextIOWrapper.*: give its path"):
            SL.read_jsonl([file])


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [{"a": 1, "b": {"c": np.zeros(3)}}, {"a": 2, "b": {"c": np.zeros(4)}}],
            r"needs arrays of one shape at item\['b'\]\['c'\], got \(3,\), \(4,\): pad",
        ),
        (
            [{"a": ({"b": 1},)}, {"a": ({"b": None},)}],
            r"items of one type at item\['a'\]\[0\]\['b'\], got int, NoneType",
        ),
        ([{"a": {"b": 1}}, {"a": {"c": 1}}], r"items of one structure at item\['a'\], got \['b'\] and \['c'\]"),
        ([np.zeros(3), np.zeros(4)], r"needs arrays of one shape, got \(3,\), \(4,\)"),
    ],
    ids=["shapes", "types", "keys", "top"],
)
def test_parts_that_cannot_be_stacked_are_named(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(sl.from_items(items).batch(2))
