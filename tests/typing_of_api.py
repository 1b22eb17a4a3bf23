"""Public uses of the API that a type checker must understand; checked by mypy, not run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal, assert_type

import numpy as np
import numpy.typing as npt

import streamline as sl


def length(text: str) -> int:
    return len(text)


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


async def fetch(url: str) -> bytes:
    return url.encode()


async def fetch_all(urls: list[str]) -> list[bytes]:
    return [url.encode() for url in urls]


def noisy(number: int, *, rng: np.random.Generator) -> float:
    return number + rng.normal()


async def noisy_later(number: int, *, rng: np.random.Generator) -> float:
    return number + rng.normal()


def words(line: str) -> Iterator[str]:
    yield from line.split()


def total(numbers: list[int]) -> float:
    return float(sum(numbers))


@sl.stage(state=dict)
async def running(items: AsyncIterator[int], *, state: dict[str, Any], scale: float = 1.0) -> AsyncIterator[float]:
    async for item in items:
        state["sum"] = state.get("sum", 0.0) + scale * item
        yield state["sum"]


@sl.stage(stateless=True)
async def shouted(items: AsyncIterator[str]) -> AsyncIterator[str]:
    async for item in items:
        yield item.upper()


async def undeclared(items: AsyncIterator[str]) -> AsyncIterator[int]:
    async for item in items:
        yield len(item)


@sl.source(state=dict)
async def rows(*, state: dict[str, Any], shard: int, num_shards: int, url: str) -> AsyncIterator[bytes]:
    yield url.encode()


@sl.source(state=dict)
def plain_rows(*, state: dict[str, Any], shard: int, num_shards: int, epoch: int) -> Iterator[int]:
    yield epoch


class Dataset:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> bytes:
        return bytes(index)


async def numbers() -> AsyncIterator[int]:
    yield 1


def sources() -> None:
    assert_type(sl.from_items(["a", "b"]), sl.Pipeline[str])
    assert_type(sl.from_items(range(3)), sl.Pipeline[int])
    assert_type(sl.from_items(Dataset()), sl.Pipeline[bytes])
    assert_type(sl.from_iterable(lambda: iter([1, 2])), sl.Pipeline[int])
    assert_type(sl.from_iterable(numbers), sl.Pipeline[int])
    assert_type(sl.from_torch(Dataset()), sl.Pipeline[bytes])
    assert_type(sl.from_torch(iter([1])), sl.Pipeline[int])
    frame: Any = None
    assert_type(sl.from_pandas(frame), sl.Pipeline[dict[Any, Any]])
    assert_type(sl.from_polars(frame), sl.Pipeline[dict[str, Any]])
    assert_type(sl.from_arrow(frame), sl.Pipeline[Any])
    assert_type(sl.from_huggingface(frame), sl.Pipeline[Any])
    assert_type(rows(url="a"), sl.Pipeline[bytes])
    assert_type(rows(name="mine", url="a").shard(4, "custom").map(len), sl.Pipeline[int])
    assert_type(plain_rows(), sl.Pipeline[int])
    assert_type(sl.from_stream(numbers), sl.Pipeline[int])
    assert_type(sl.from_stream(numbers(), journal="kept/"), sl.Pipeline[int])
    assert_type(sl.from_stream(numbers, encode=str, decode=int, partitioned=True), sl.Pipeline[int])
    assert_type(sl.read_lines("a.txt", http=sl.HttpOptions(retries=3)), sl.Pipeline[str])
    assert_type(sl.read_jsonl(["a.jsonl", "b.jsonl"]), sl.Pipeline[Any])
    assert_type(sl.read_csv("a.csv"), sl.Pipeline[dict[str, str]])
    assert_type(sl.read_csv("a.csv", header=False), sl.Pipeline[list[str]])
    assert_type(sl.read_parquet("a.parquet"), sl.Pipeline[dict[str, Any]])
    assert_type(sl.read_arrow("a.arrow", columns=["a"]), sl.Pipeline[dict[str, Any]])
    assert_type(sl.read_tar("a.tar"), sl.Pipeline[dict[str, Any]])
    assert_type(sl.read_tfrecord("a.tfrecord"), sl.Pipeline[bytes])
    images = sl.read_files("*.png").map(sl.decode.image())
    assert_type(images, sl.Pipeline[npt.NDArray[np.uint8]])
    depths = sl.read_files("*.png").map(sl.decode.image("I;16"))
    assert_type(depths, sl.Pipeline[npt.NDArray[np.uint16]])
    assert_type(sl.read_tfrecord("a.tfrecord").map(sl.decode.example()), sl.Pipeline[dict[str, Any]])
    assert_type(sl.read_array_record("a.array_record"), sl.Pipeline[bytes])
    assert_type(sl.read_hdf5("a.h5"), sl.Pipeline[dict[str, Any]])
    assert_type(sl.read_lance("a.lance", version=3), sl.Pipeline[dict[str, Any]])
    assert_type(sl.read_mds("train"), sl.Pipeline[dict[str, Any]])
    assert_type(sl.read_npy("a.npy"), sl.Pipeline[Any])
    assert_type(sl.read_files("*.png").map(lambda file: file.data), sl.Pipeline[bytes])
    assert_type(sl.from_items([1]).map(lambda _: sl.empty((2, 3), np.float32)), sl.Pipeline[npt.NDArray[Any]])
    assert_type(sl.stream_http("http://a/b", framing="lines"), sl.Pipeline[str])
    assert_type(sl.stream_http("http://a/b", framing="sse"), sl.Pipeline[sl.ServerSentEvent])
    assert_type(sl.read_lines("a.txt").check(world_size=2), sl.Report)


def stages() -> None:
    lines = sl.read_lines("a.txt")
    assert_type(lines.shard(4, "contiguous", drop_remainder=True), sl.Pipeline[str])
    assert_type(lines.shuffle_files(seed=1).shuffle(window=3, seed=1), sl.Pipeline[str])
    assert_type(lines.map(length), sl.Pipeline[int])
    assert_type(lines.map(length, executor="thread", concurrency=4, ordered=False), sl.Pipeline[int])
    assert_type(lines.map(lambda line: [line]), sl.Pipeline[list[str]])
    assert_type(lines.map(fetch, concurrency=4), sl.Pipeline[bytes])
    assert_type(lines.map(fetch, concurrency=4, ordered=False), sl.Pipeline[bytes])
    assert_type(lines.map(fetch, concurrency=4, retries=3, timeout_s=9, retry_on=(OSError,)), sl.Pipeline[bytes])
    limit = sl.Limit(16, per_second=0.5, burst=2)
    assert_type(lines.map(fetch, concurrency=4, retries=3, limit=limit), sl.Pipeline[bytes])
    assert_type(lines.map(length, executor="thread", limit=limit), sl.Pipeline[int])
    assert_type(lines.map(length, executor="thread", retries=3, retry_on=lambda e: bool(e.args)), sl.Pipeline[int])
    assert_type(lines.map(lengths, batched=256), sl.Pipeline[int])
    assert_type(lines.map(lengths, batched=256, executor="thread", concurrency=2), sl.Pipeline[int])
    assert_type(lines.map(fetch_all, batched=8, concurrency=4), sl.Pipeline[bytes])
    assert_type(lines.map(length).map(np.asarray, batched=8), sl.Pipeline[Any])
    assert_type(lines.map(length).map(noisy, seed=3), sl.Pipeline[float])
    assert_type(lines.map(length).map(noisy_later, seed=3, concurrency=2), sl.Pipeline[float])
    assert_type(lines.filter(bool), sl.Pipeline[str])
    assert_type(lines.flat_map(words), sl.Pipeline[str])
    assert_type(lines.flat_map(str.encode), sl.Pipeline[int])
    assert_type(lines.take(1).skip(1).repeat(2).prefetch(3, bytes=100), sl.Pipeline[str])
    assert_type(
        lines.cache(path="dir/", max_bytes=9).regenerate(8, block=2, overlap=True, spill="dir/"), sl.Pipeline[str]
    )
    assert_type(lines.transfer("cuda", depth=3), sl.Pipeline[Any])
    assert_type(lines.merge(), sl.Pipeline[str])
    assert_type(lines.merge("best_effort", max_skips_per_round=1, max_lead=3), sl.Pipeline[str])
    assert_type(lines.through(shouted), sl.Pipeline[str])
    assert_type(lines.map(length).through(running, scale=2.0), sl.Pipeline[float])
    assert_type(lines.through(undeclared), sl.Pipeline[int])


def batches() -> None:
    integers = sl.from_items([1, 2, 3])
    assert_type(integers.batch(2), sl.Pipeline[Any])
    assert_type(integers.batch(2, collate="stack", drop_remainder=True), sl.Pipeline[Any])
    assert_type(integers.batch(2, collate=None), sl.Pipeline[list[int]])
    assert_type(integers.batch(2, max_wait_s=0.5), sl.Pipeline[Any])
    assert_type(integers.batch(2, collate=None, max_wait_s=1), sl.Pipeline[list[int]])
    assert_type(integers.batch(2, collate=total, max_wait_s=None), sl.Pipeline[float])
    assert_type(integers.batch(2, collate=total), sl.Pipeline[float])
    assert_type(integers.batch(2, collate=None).unbatch(), sl.Pipeline[Any])


def plain() -> None:
    pipe = sl.from_items(["a"]).map(length)
    for item in pipe:
        assert_type(item, int)
    assert_type(iter(pipe), sl.SyncStream[int])
    assert_type(pipe.first(3), list[int])
    assert_type(pipe.max_in_flight, int)
    assert_type(pipe.open(), sl.Opened[int])
    with pipe.open(resume=None, rank=0, world_size=1, epoch=2, backend=sl.Inline()) as stream:
        assert_type(stream, sl.SyncStream[int])
        assert_type(next(stream), int)
        for item in stream:
            assert_type(item, int)
        assert_type(stream.snapshot(), sl.Snapshot)


def hosts() -> None:
    pipe = sl.from_items(["a"]).map(length)
    with pipe.open(backend=sl.Remote(2, listen="0.0.0.0:7077", key_file="key", tls="tls", env={"A": "b"})) as stream:
        assert_type(stream, sl.SyncStream[int])
    with pipe.open(backend=sl.Ray((2, 8), num_cpus=0.5, resources={"data": 1}, runtime_env={"pip": ["a"]})) as stream:
        assert_type(stream, sl.SyncStream[int])
    with pipe.open(backend=sl.Processes(2, env={"A": "b"}, worker_timeout=60.0)) as stream:
        assert_type(next(stream), int)
    with sl.Threads() as pool, pipe.open(backend=pool) as stream:
        assert_type(next(stream), int)


def loaders() -> None:
    loader = sl.from_items(["a"]).map(length).loader(steps_per_epoch=3, rank=0, world_size=1, backend=sl.Inline())
    assert_type(loader, sl.Loader[int])
    for item in loader:
        assert_type(item, int)
    assert_type(loader.epoch, int)
    assert_type(loader.state_dict(), dict[str, Any])
    assert_type(loader.snapshot(), sl.Snapshot)
    assert_type(loader.stats(), sl.Stats | None)
    assert_type(loader.errors, sl.ErrorReport)
    with sl.from_items(["a"]).loader(fixed_epoch=True, epoch=1, resume=None) as texts:
        assert_type(next(iter(texts)), str)
    sl.from_items([1]).loader(rank="0")  # type: ignore[arg-type]


async def asynchronous() -> None:
    pipe = sl.from_items(["a"]).map(fetch)
    async for item in pipe:
        assert_type(item, bytes)
    async with pipe.open() as stream:
        assert_type(stream, sl.Stream[bytes])
        assert_type(await anext(stream), bytes)
        async for item in stream:
            assert_type(item, bytes)
        assert_type(stream.snapshot(1), sl.Snapshot)
        await stream.aclose()


def debugged(pipe: sl.Pipeline[bytes]) -> None:
    with pipe.debug(on_error="skip", max_errors=0.5, dead_letters=Path("bad.jsonl")) as stream:
        assert_type(stream, sl.DebugStream[bytes])
        assert_type(next(stream), bytes)
        assert_type(stream.errors, sl.ErrorReport)
        assert_type(stream.stats(), sl.Stats)


def seen(pipe: sl.Pipeline[bytes], snapshot: sl.Snapshot) -> None:
    assert_type(pipe.draw(), sl.Drawing)
    assert_type(pipe.draw().svg, str)
    pipe.draw().save(Path("plan.svg"))
    assert_type(pipe.explain(snapshot, accept=["batch.size"]), sl.Explanation)
    assert_type(pipe.explain(snapshot).fits, bool)
    with pipe.open(accept=("batch.size",), stall_s=None, metrics="127.0.0.1:0", page=True) as stream:
        assert_type(stream.page, str | None)
        assert_type(stream.stats(), sl.Stats)
        assert_type(stream.stats().since(stream.stats()), sl.Stats)
        assert_type(stream.stats().verdict, sl.Verdict | None)
        assert_type(sl.metrics.scalars(stream.stats()), dict[str, float])
        assert_type(stream.stats().stages[0].busy_s, float)
        assert_type(stream.trace("run.json", max_bytes=1 << 20), sl.Trace)
        with stream.paused(quiesce_timeout=0) as at_work:
            assert_type(at_work, tuple[str, ...])


async def seen_later(pipe: sl.Pipeline[bytes]) -> None:
    async with pipe.open() as stream:
        assert_type(stream.stats(), sl.Stats)
        assert_type(stream.errors, sl.ErrorReport)
        with stream.trace(Path("run.json")) as trace:
            assert_type(trace, sl.Trace)
        async with stream.paused() as at_work:
            assert_type(at_work, tuple[str, ...])


def together(numbers: sl.Pipeline[int], lines: sl.Pipeline[str]) -> None:
    assert_type(sl.mix({"a": numbers, "b": numbers}, weights={"a": 1, "b": 0.5}, seed=1), sl.Pipeline[int])
    assert_type(sl.mix([numbers, numbers], [(0, {"0": 1, "1": 0}), (9, {"0": 1, "1": 1})]), sl.Pipeline[int])
    assert_type(sl.zip(numbers, lines, strict=True), sl.Pipeline[tuple[Any, ...]])
    assert_type(sl.concat(lines, lines), sl.Pipeline[str])
    assert_type(lines.sample(8, weights=[1.0, 2.0], replacement=False), sl.Pipeline[str])
    assert_type(lines.enumerate(), sl.Pipeline[tuple[int, str]])
    assert_type(lines.window(4, 2), sl.Pipeline[list[str]])
    assert_type(lines.group_by(len), sl.Pipeline[tuple[int, list[str]]])
    assert_type(lines.scan(lambda seen, line: (seen + len(line), line.encode()), 0), sl.Pipeline[bytes])
    assert_type(lines.batch(max_cost=4096, cost=len, collate=None), sl.Pipeline[list[str]])
    assert_type(lines.bucket_by_length([8], 2), sl.Pipeline[Any])
    assert_type(lines.bucket_by_length([8], [4, 2], length=len, collate=None), sl.Pipeline[list[str]])
    assert_type(lines.bucket_by_length([8], 2, collate="".join, drop_remainder=True), sl.Pipeline[str])
    assert_type(lines.pack(8, "ids", eos=0), sl.Pipeline[dict[str, npt.NDArray[Any]]])


def replicated(numbers: sl.Pipeline[int]) -> None:
    with sl.StreamReplicator(numbers, 2) as replicator:
        assert_type(replicator, sl.StreamReplicator[int])
        assert_type(next(replicator.replica(0)), int)
        assert_type(replicator.pipeline(1), sl.Pipeline[int])
    dataset = sl.StreamDataset(lambda: range(3), 0, num_workers=2)
    assert_type(next(iter(dataset)), int)
    assert_type(sl.from_iterable(dataset), sl.Pipeline[int])


def ended(numbers: sl.Pipeline[int]) -> None:
    with numbers.open(rank=0, world_size=1, ends=sl.Ends("pad", timeout_s=3)) as stream:
        assert_type(stream.ends, sl.EndsReport)
        assert_type(stream.padding, bool)


def written(numbers: sl.Pipeline[int]) -> None:
    assert_type(numbers.write("out", "tar", shard_bytes=1000, resume=True, backend=sl.Threads(2)), sl.Written)
    assert_type(sl.write_jsonl(numbers, "out", compression="gzip", storage_options={"region": "r"}), sl.Written)
    assert_type(sl.write_npy(numbers, "out", http=sl.HttpOptions(retries=3)), sl.Written)
    assert_type(sl.write_tar(numbers, "out", rank=0, world_size=2), sl.Written)
    assert_type(sl.write_parquet(numbers, "out", schema=None), sl.Written)


def snapshots() -> None:
    assert_type(sl.Snapshot.load("ckpt"), sl.Snapshot)
    assert_type(sl.Snapshot.load("ckpt", missing_ok=False), sl.Snapshot)
    assert_type(sl.Snapshot.load("ckpt", missing_ok=True), sl.Snapshot | None)
    assert_type(sl.Snapshot.load("ckpt", missing_ok=True, rank=3), sl.Snapshot | None)
    assert_type(sl.Snapshot.from_json("{}"), sl.Snapshot)
    sl.from_items([1]).open(resume=sl.Snapshot.load("ckpt", missing_ok=True))


def mistakes() -> None:
    """Each of these is an error; mypy complains of an ignore that isn't needed."""
    lines = sl.read_lines("a.txt")
    lines.map(length).map(length)  # type: ignore[arg-type]
    lines.map(length, executor="process")  # type: ignore[call-overload]
    lines.batch(2, collate="list")  # type: ignore[call-overload]
    lines.batch(2, max_wait_s="1")  # type: ignore[call-overload]
    sl.source(state=dict)(length)  # type: ignore[arg-type]
    rows(url="a").map(length)  # type: ignore[arg-type]
    lines.merge("eager")  # type: ignore[arg-type]
    lines.shard(2, "random")  # type: ignore[arg-type]
    lines.map(length).through(shouted).batch("2")  # type: ignore[call-overload]
    lines.write("out", "csv")  # type: ignore[arg-type]
    sl.write_jsonl([1], "out")  # type: ignore[arg-type]
    sl.from_items({1, 2})  # type: ignore[arg-type]
    sl.from_iterable([1, 2])  # type: ignore[arg-type]


def tuning(numbers: sl.Pipeline[int]) -> None:
    with numbers.open(tune=True) as stream:
        assert_type(stream.tuning.values, dict[str, int])
        assert_type(stream.stats().tuning[0].after, int)
        stream.tuning.save(Path("tune.json"))
    numbers.open(tune="tune.json")
    numbers.open(tune=stream.tuning)
    assert_type(numbers.loader(tune=Path("tune.json")).tuning.resting, str)
    numbers.open(tune=3)  # type: ignore[arg-type]


async def steps(numbers: sl.Pipeline[int], snapshot: sl.Snapshot) -> None:
    with numbers.open(record=sl.Recorder("steps/"), resume=snapshot, skip_steps=range(3, 5)) as stream:
        assert_type(stream.snapshot().step, int | None)
    numbers.open(skip_steps={3, 4})
    numbers.open(record="steps/")  # type: ignore[arg-type]
    numbers.loader(record=sl.Recorder(Path("steps")))
    for item in numbers.replay_steps("steps/", 3, 4, epoch=1, rank=0):
        assert_type(item, int)
    async for item in numbers.replay_steps(Path("steps"), 3, 4):
        assert_type(item, int)


def errors(numbers: sl.Pipeline[int]) -> None:
    def handler(failure: sl.Failure) -> Literal["skip", "raise"]:
        assert_type(failure.error, Exception)
        return "skip"

    with numbers.open(on_error=handler, max_errors=3, dead_letters="bad.jsonl") as stream:
        assert_type(stream.errors, sl.ErrorReport)
        assert_type(stream.errors.last, tuple[sl.Failure, ...])
    assert_type(sl.replay(ValueError(), fn=abs), Any)
