"""What people write in their first hour: a message says what was expected, what arrived, and the line to write."""

from __future__ import annotations

import asyncio
import functools
import io
import warnings
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


def with_rng(item: int, rng: np.random.Generator) -> Iterator[int]:
    yield item


@functools.wraps(abs)
def wrapped(item: int) -> int:
    return abs(item)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    value: Any


async def of_stream(use: Callable[[Any], Any]) -> Any:
    async with PIPE.open() as stream:
        return use(stream)


def of_plain_stream(use: Callable[[Any], Any]) -> Any:
    with PIPE.open() as stream:
        return use(stream)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # awaitables
    "map, a coroutine": (
        lambda: list(PIPE.map(lambda item: fetch(2, item))),
        PlanTypeError,
        r"^map\(<lambda>\) returned a .* not be awaited: give .map the `async def` it.*or .map\(fn, concurrency=16\)",
    ),
    "map, some coroutines": (
        lambda: list(PIPE.map(lambda item: item if item % 2 else fetch(2, item))),
        PlanTypeError,
        "would not be awaited",
    ),
    "map in threads, a coroutine": (
        lambda: list(PIPE.map(lambda item: fetch(2, item), executor="thread")),
        PlanTypeError,
        r"would not be awaited: give .map the `async def`, without executor=",
    ),
    "map at once, sync": (lambda: PIPE.map(abs, concurrency=4), PlanError, "needs executor='thread'.*`async def`"),
    "map at once, wrapped": (lambda: PIPE.map(wrapped, concurrency=4), PlanError, "needs executor='thread'"),
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
    "map with a seed, a generator": (lambda: PIPE.map(with_rng, seed=1), PlanError, r"with_rng yields: .flat_map"),
    "filter, a generator": (lambda: PIPE.filter(sync_generator), PlanError, "a generator is always true"),
    "through, a sync generator": (
        lambda: PIPE.through(sync_generator),
        PlanTypeError,
        r"sync_generator is a sync generator function: async def sync_generator\(items\), with `async for",
    ),
    "through, a sync call": (
        lambda: PIPE.through(sync_generator(PIPE)),
        PlanTypeError,
        r"got generator.*.through\(sync_generator\), which is called with the items",
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
    "shuffle(1000)": (
        lambda: PIPE.shuffle(1000),
        PlanTypeError,
        r".shuffle\(window=1000\) permutes .* .shuffle\(seed=1000\) the",
    ),
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
    "next of pipe": (
        lambda: next(PIPE),
        PlanTypeError,
        r"for item in pipe; `with pipe.open\(\) as stream: next.*pipe.first",
    ),
    "pipe[0]": (lambda: PIPE[0], PlanTypeError, r"no positions, so no \[0\]: pipe.first\(3\)"),
    "pipe[2:]": (lambda: PIPE[2:], PlanTypeError, r"no \[slice\(2, None, None\)\]"),
    "shuffle(True)": (lambda: PIPE.shuffle(True), PlanTypeError, r"\.shuffle\(\) shuffles as it is"),
    "sl.DataLoader": (lambda: SL.DataLoader, AttributeError, r"no attribute 'DataLoader': pipe.loader\(\)"),
    "sl.load_dataset": (lambda: SL.load_dataset, AttributeError, r"sl.from_huggingface\(dataset\)"),
    "sl.nothing": (lambda: SL.nothing, AttributeError, r"module 'streamline' has no attribute 'nothing'$"),
    "next of open": (lambda: next(PIPE.open()), PlanTypeError, r"`with pipe.open\(\) as stream: for item in stream`"),
    "snapshot of open": (lambda: PIPE.open().snapshot(), AttributeError, r"`with pipe.open.*and that has .snapshot"),
    "anext of open": (lambda: anext(PIPE.open()), PlanTypeError, r"`async with pipe.open\(\) as stream"),
    "list in async": (lambda: asyncio.run(of_stream(list)), PlanTypeError, r"\[item async for item in stream\]"),
    "next in async": (lambda: asyncio.run(of_stream(next)), PlanTypeError, r"is async: async for item in stream"),
    "async for of plain": (lambda: of_plain_stream(aiter), PlanTypeError, "this stream is a plain one: for item"),
    "anext of plain": (lambda: of_plain_stream(anext), PlanTypeError, "this stream is a plain one: for item"),
    "backend, a class": (
        lambda: PIPE.open(backend=sl.Processes),
        PlanTypeError,
        r"backend=sl.Processes\(\), or sl.Processes\(4\)$",
    ),
    "backend, the class of one": (lambda: PIPE.open(backend=sl.Inline), PlanTypeError, r"backend=sl.Inline\(\)$"),
    "backend, another class": (lambda: PIPE.open(backend=int), PlanTypeError, r"such as sl.Inline\(\), .*, got type"),
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
    "mix, half a schedule": (
        lambda: SL.mix([PIPE], [1, {"0": 1}]),
        PlanTypeError,
        r"as a schedule is \[\(0, .*got int 1",
    ),
    "mix, no schedule": (lambda: SL.mix([PIPE], []), PlanError, r"as a schedule begins at 0 and rises, got \[\]"),
    "from_iterable([1, 2])": (lambda: SL.from_iterable([1, 2]), PlanTypeError, r"sl.from_items\(items\)"),
    "from_iterable(set)": (lambda: SL.from_iterable({1, 2}), PlanTypeError, r"from_iterable\(lambda: items\)"),
    "from_iterable(agen)": (lambda: SL.from_iterable(generator(PIPE)), PlanTypeError, r"\(make\), not make\(\)"),
    "from_iterable(gen)": (lambda: SL.from_iterable(n for n in [1]), PlanTypeError, r"from_iterable\(make\), not make"),
    "factory, None": (lambda: list(SL.from_iterable(lambda: None)), PlanTypeError, "has it a return, or a yield?"),
    "batch(3.0)": (lambda: PIPE.batch(3.0), PlanTypeError, "is an integer, got float 3.0"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("work", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_the_line_to_write(work: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        run(work)
    assert not any(name in str(raised.value) for name in ("Openable", "Opened"))


def test_what_no_stream_has_is_an_attribute_error_as_anywhere() -> None:
    with pytest.raises(AttributeError, match=r"^'Opened' object has no attribute 'batches'$"):
        _ = PIPE.open().batches


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize(("concurrency", "ordered"), [(4, True), (4, False), (None, False)])
def test_a_lambda_around_an_async_function_is_awaited_where_calls_are_concurrent(
    concurrency: int | None, ordered: bool
) -> None:
    pipe = sl.from_items(range(20)).map(lambda item: fetch(2, item), concurrency=concurrency, ordered=ordered)
    assert ("ordered=False" in str(pipe)) is not ordered
    found = run(lambda: list(pipe))
    assert (found if ordered else sorted(found)) == list(range(0, 40, 2))
    check_resume(pipe, generations=2)


@pytest.mark.long
def test_it_is_awaited_in_any_backend_in_debug_and_with_a_seed_and_is_replayed() -> None:
    pipe = PIPE.shard(2).map(lambda item: fetch(2, item), concurrency=2)
    for backend in (sl.Threads(2), sl.Processes(1)):
        with pipe.open(backend=backend) as stream:
            assert list(stream) == [0, 2, 4, 6, 8, 10]
    assert list(pipe.debug()) == [0, 2, 4, 6, 8, 10]
    assert len(set(PIPE.map(lambda item, rng: fetch(1, rng.integers(1 << 60)), concurrency=2, seed=1))) == 6
    assert list(PIPE.map(functools.partial(lambda factor, item: fetch(factor, item), 2), concurrency=2)) == list(pipe)
    assert list(PIPE.map(lambda item: asyncio.ensure_future(fetch(2, item)), concurrency=2)) == list(pipe)

    async def fail(item: int) -> int:
        return 1 // (item - 3)

    with pytest.raises(ZeroDivisionError) as failed:
        list(PIPE.map(lambda item: fail(item), concurrency=2))
    with pytest.raises(ZeroDivisionError):
        sl.replay(failed.value)
    assert sl.replay(failed.value, fn=lambda item: fetch(3, item)) == 9
    with pytest.raises(ZeroDivisionError) as failed:
        list(PIPE.map(lambda item, rng: fail(item), concurrency=2, seed=1))
    assert sl.replay(failed.value, fn=lambda item, rng: fetch(3, item)) == 9


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


def test_a_file_of_another_format_is_no_text_whatever_its_name_says(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", "{}\n")
    for read in (sl.read_lines, sl.read_jsonl, sl.read_csv, sl.read_tar):
        with pytest.raises(DataError, match=r"train.jsonl is a zip archive, whatever its name says: unzip it"):
            list(read(path))
    for head, message in {
        b"PAR1\x15\x00": "is a Parquet file, whatever its name says: sl.read_parquet reads it",
        b"ARROW1\x00\x00\xff": "is an Arrow file, whatever its name says: sl.read_arrow reads it",
        b"\x93NUMPY\x01\x00": "is a NumPy array, whatever its name says: sl.read_npy reads it",
        b"\x89HDF\r\n\x1a\n": "is an HDF5 file, whatever its name says: sl.read_hdf5 reads it",
        b"\x04\x22\x4d\x18d@": "is an lz4 file, whatever its name says: unpack it with `lz4 -d`, or write gzip or zstd",
        b"\xff\x06\x00\x00sNaPpY": "is a snappy file, whatever its name says: unpack it with `snzip -d`",
        b"7z\xbc\xaf\x27\x1c\x00\x04": "is a 7z archive, whatever its name says: unpack it with `7z x`",
        b"SQLite format 3\x00\x10": r"is an SQLite database, .*: sl.from_iterable\(lambda: connect\(\).execute",
    }.items():
        path.write_bytes(head)
        with pytest.raises(DataError, match=f"train.jsonl {message}"):
            list(sl.read_lines(path))


def test_an_open_file_is_no_path(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    with path.open() as file:
        with pytest.raises(PlanTypeError, match=r"got an open file \(TextIOWrapper\): give its path, '.*a.jsonl'"):
            SL.read_jsonl(file)
        with pytest.raises(PlanTypeError, match=r"got TextIOWrapper.*: give its path"):
            SL.read_jsonl([file])
    with pytest.raises(PlanTypeError, match=r"got an open file \(BytesIO\): give its path, path, so that"):
        SL.read_jsonl(io.BytesIO())


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
        ([Pair(1, {"b": 1}), Pair(2, {"b": ""})], r"items of one type at item.second\['b'\], got int, str"),
        ([{"a": Record(1)}, {"a": Record(None)}], r"items of one type at item\['a'\].value, got int, NoneType"),
        ([np.zeros(3), np.zeros(4)], r"needs arrays of one shape, got \(3,\), \(4,\)"),
    ],
    ids=["shapes", "types", "keys", "named tuple", "dataclass", "top"],
)
def test_parts_that_cannot_be_stacked_are_named(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(sl.from_items(items).batch(2))


async def test_an_opened_pipeline_is_iterated_without_with() -> None:
    assert [item async for item in PIPE.open()] == list(range(6))


def test_an_opened_pipeline_is_iterated_without_with_in_a_plain_loop() -> None:
    assert list(PIPE.open(epoch=3)) == list(range(6))
    for item in PIPE.open():
        if item == 2:
            break


def test_streams_say_what_they_are_and_that_a_loader_has_a_state_dict() -> None:
    with sl.from_items(range(6)).map(abs).batch(2).open() as stream:
        next(stream)
        assert repr(stream) == "<SyncStream of items, shard, abs, batch, merge, at item 1>"
        with pytest.raises(AttributeError, match=r"no attribute 'state_dict': of a loader, `loader = pipe.loader\(\)`"):
            stream.state_dict()  # type: ignore[attr-defined]
    assert repr(PIPE.draw()) == "<Drawing of a plan that reads items: print it as Mermaid, or .save('plan.svg')>"


def test_completion_shows_what_is_for_users() -> None:
    shown = {name for name in dir(PIPE) if not name.startswith("_")}
    assert {"map", "open", "source", "plan"} <= shown
    assert not shown & {"merged_at", "merging", "settled", "sharded_at", "sharding"}


def test_more_shards_than_files_are_told_once_when_it_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("x\n")
    for _ in range(2):
        assert len(list(sl.read_lines(tmp_path / "*.txt").shard(7))) == 3
    (record,) = caplog.records
    assert record.name == "streamline.hints"
    message = record.getMessage()
    assert message.startswith(
        "7 shards for 3 files: 4 workers would have nothing to read: write .shard(3) or fewer, or split"
    )


@pytest.mark.parametrize("name", ["image", "audio", "auto", "example"])
def test_a_decoder_is_called_in_plans_what_it_was_called_in_the_program(name: str) -> None:
    pipe = sl.from_items([b""]).map(getattr(sl.decode, name)())
    assert f"map(decode.{name})" in str(pipe)
