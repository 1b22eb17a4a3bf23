"""Pools: hosts that stay between runnings, and serve several at once."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import ClosedError, PlanError, PlanTypeError

PIPE = sl.from_items(range(40)).shuffle(seed=1).shard(4).map(lambda item: item + 100).merge().batch(2, collate=None)
WHOLE = list(PIPE)


def hosts() -> dict[str, int | None]:
    return {thread.name: thread.ident for thread in threading.enumerate() if thread.name.startswith("streamline host")}


def test_hosts_start_when_they_are_needed_and_stay() -> None:
    with sl.Threads(3) as pool:
        assert not hosts()
        with PIPE.open(backend=pool) as stream:
            assert list(stream) == WHOLE
        first = hosts()
        assert len(first) == 3
        for _ in range(3):
            with PIPE.open(backend=pool) as stream:
                assert list(stream) == WHOLE
        assert hosts() == first
    assert not hosts()


def test_no_more_hosts_start_than_there_are_workers() -> None:
    with sl.Threads(3) as pool:
        assert list(sl.from_items(range(3)).open(backend=pool).sync_stream()) == [0, 1, 2]
        assert len(hosts()) == 1
        assert list(sl.from_items(range(3)).shard(2).open(backend=pool).sync_stream()) == [0, 1, 2]
        assert len(hosts()) == 2
        assert repr(pool) == "<pool of Threads(3): 2 begun>"


def test_a_pool_serves_several_streams_at_once() -> None:
    with (
        sl.Threads(2) as pool,
        PIPE.open(backend=pool) as one,
        PIPE.open(backend=pool, epoch=1) as two,
        sl.from_items("abc").open(backend=pool) as three,
    ):
        items = [(next(one), next(two)) for _ in range(5)]
        assert list(three) == ["a", "b", "c"]
        assert [item for item, _ in items] + list(one) == WHOLE
        with PIPE.open(epoch=1) as alone:
            assert [item for _, item in items] + list(two) == list(alone)


@pytest.mark.parametrize("uvloop", [False, True])
def test_a_pool_serves_other_event_loops_and_threads(uvloop: bool) -> None:
    found: list[Any] = []

    async def validate(pool: Backend) -> None:
        async with PIPE.open(backend=pool) as stream:
            found.extend([batch async for batch in stream])

    with sl.Threads(2) as pool, PIPE.open(backend=pool) as stream:
        batches = [next(stream)]
        thread = threading.Thread(
            target=anyio.run, args=(validate, pool), kwargs={"backend_options": {"use_uvloop": uvloop}}
        )
        thread.start()
        batches += stream
        thread.join()
    assert batches == WHOLE
    assert found == WHOLE


def test_a_snapshot_of_a_stream_in_a_pool_resumes_anywhere() -> None:
    with sl.Threads(2) as pool:
        with PIPE.open(backend=pool) as stream:
            before = [next(stream) for _ in range(7)]
            snapshot = stream.snapshot()
        with PIPE.open(resume=snapshot) as stream:
            assert before + list(stream) == WHOLE
        with PIPE.open(resume=snapshot, backend=pool) as stream:
            assert before + list(stream) == WHOLE


def test_a_failure_in_one_stream_is_no_others_business() -> None:
    def fragile(item: int) -> int:
        return 1 // (item - 5)

    with sl.Threads(2) as pool, PIPE.open(backend=pool) as stream:
        batches = [next(stream)]
        with pytest.raises(ZeroDivisionError):
            list(sl.from_items(range(10)).shard(2).map(fragile).open(backend=pool).sync_stream())
        assert batches + list(stream) == WHOLE


# The end --------------------------------------------------------------------------------------------------------------


def test_a_closed_pool_opens_nothing() -> None:
    with sl.Threads(2) as pool:
        pass
    with pytest.raises(ClosedError, match=r"the pool of Threads\(2\) is closed: open the pipeline inside"), \
            PIPE.open(backend=pool):  # fmt: skip
        pass
    pool.close()
    assert repr(pool) == "<pool of Threads(2): closed>"


def test_closing_a_pool_fails_what_runs_in_it() -> None:
    pipe = sl.from_items(range(100_000)).shard(2)
    with sl.Threads(2) as pool:
        stream = pipe.open(backend=pool).sync_stream()
        items = [next(stream)]
    with pytest.raises(ClosedError, match="the pool of hosts that this stream's workers ran in was closed"):
        items.extend(stream)
    assert items == list(range(len(items)))  # what had arrived is delivered
    snapshot = stream.snapshot()
    stream.close()
    with pipe.open(resume=snapshot) as rest:
        assert next(rest) == len(items)


def test_closing_a_pool_wakes_a_consumer_that_waits() -> None:
    called, ended = threading.Event(), threading.Event()

    async def stuck(item: int) -> int:
        called.set()
        await anyio.sleep_forever()
        return item

    def consume(pool: Backend) -> None:
        with pytest.raises(ClosedError):
            list(sl.from_items([1]).map(stuck).open(backend=pool).sync_stream())
        ended.set()

    with sl.Threads(1) as pool:
        thread = threading.Thread(target=consume, args=(pool,))
        thread.start()
        assert called.wait(200)
    assert ended.wait(200)
    thread.join()


async def test_a_pool_that_is_closed_before_a_stream_reads_is_an_error_not_a_wait() -> None:
    with sl.Threads(2) as pool:
        stream = PIPE.open(backend=pool).stream()
        await stream.start()
    with anyio.fail_after(200), pytest.raises(ClosedError):
        await anext(stream)
    await stream.aclose()


def test_workers_that_are_opened_again_in_a_closed_pool_fail() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def last(item: int) -> int:
        if item == 3:
            reached.set()
            assert go_on.wait(200)
        return item

    pipe = sl.from_items(range(4)).shard(2).merge().map(last, executor="thread").repeat(2)
    with sl.Threads(2) as pool:
        stream = pipe.open(backend=pool).sync_stream()
        assert reached.wait(200)
    go_on.set()
    items: list[int] = []
    with pytest.raises(ClosedError):
        items.extend(stream)
    assert items == [0, 1, 2, 3]


def test_a_pool_that_is_dropped_ends_its_hosts() -> None:
    pool = sl.Threads(2).pool()
    assert list(PIPE.open(backend=pool).sync_stream()) == WHOLE
    assert hosts()
    del pool
    gc.collect()
    assert not hosts()


@pytest.mark.long
def test_rounds_over_a_pool_leave_nothing() -> None:
    ends: list[Callable[[sl.SyncStream[Any]], object]] = [list, next, lambda stream: None]
    with sl.Threads(2) as pool:
        with PIPE.open(backend=pool) as stream:
            list(stream)
        first = hosts()
        for number in range(30):
            with PIPE.open(backend=pool) as stream:
                ends[number % 3](stream)
        assert hosts() == first


def test_pools_of_one_backend_are_apart() -> None:
    backend = sl.Threads(2)
    with backend as outer:
        with backend as inner:
            list(chain(PIPE.open(backend=outer).sync_stream(), PIPE.open(backend=inner).sync_stream()))
            assert len([thread for thread in threading.enumerate() if thread.name.startswith("streamline host")]) == 4
        assert list(PIPE.open(backend=outer).sync_stream()) == WHOLE
    assert backend == sl.Threads(2)


# How many -------------------------------------------------------------------------------------------------------------


def test_hosts_of_a_run_alone_beside_an_open_pool_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamline.backends.hosts.pool._hinted", set())
    pipe, backend = sl.from_items(range(4)).shard(2).merge(), sl.Threads(2)
    with backend as pool:
        for where in (pool, backend, backend):
            with pipe.open(backend=where) as stream:
                assert list(stream) == list(range(4))
    with pipe.open(backend=backend) as stream:
        assert list(stream) == list(range(4))
    assert [record.getMessage() for record in caplog.records] == [
        "Threads(2) has an open pool, but backend= is not the pool, so hosts are started for this run alone: `with "
        "Threads(2) as pool:`, and then open(backend=pool)"
    ]


@pytest.mark.parametrize("cores", [1, 3, 9])
def test_without_a_number_there_are_as_many_as_cores_and_workers(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr("streamline.backends.hosts.pool.cpus_here", lambda: cores)
    with sl.Threads() as pool:
        assert list(PIPE.open(backend=pool).sync_stream()) == WHOLE
        assert len(hosts()) == min(cores, 4)
    assert repr(pool) == "<pool of Threads(): closed>"


@pytest.mark.long
def test_hosts_that_would_be_idle_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamline.backends.hosts.pool._hinted", set())
    caplog.set_level(logging.WARNING, "streamline")
    assert list(PIPE.open(backend=sl.Threads(6)).sync_stream()) == WHOLE
    (record,) = caplog.records
    assert record.getMessage() == (
        "Threads(6): there are 4 workers, one a shard, so 2 of 6 would be idle, and aren't started: write "
        ".shard(6) or more, or Threads(4)"
    )
    for epoch in range(3):  # and of that pipeline not again, whoever opens it
        list(PIPE.open(backend=sl.Threads(6), epoch=epoch).sync_stream())
    with PIPE.loader(backend=sl.Threads(6)) as loader:
        list(loader)
    assert caplog.records == [record]
    caplog.clear()
    with PIPE.open(backend=sl.Threads(6), rank=1, world_size=2) as stream:
        list(stream)
    assert "2 workers on each of the 2 ranks" in caplog.text
    assert ".shard(12) or more, or Threads(2)" in caplog.text
    caplog.clear()
    with sl.Threads(6) as pool:  # for pipelines of whatever number of workers
        assert list(PIPE.open(backend=pool).sync_stream()) == WHOLE
    with PIPE.loader(backend=sl.Threads(4)) as loader:
        assert list(loader) == WHOLE
    assert not caplog.records
    with PIPE.loader(backend=sl.Threads(7)) as loader:  # once, not each epoch
        for _ in range(3):
            assert len(list(loader)) == len(WHOLE)
    assert len(caplog.records) == 1


UNSHARDED = sl.from_items(range(8)).map(abs)


@pytest.mark.parametrize("backend", [sl.Processes(4), sl.Threads(2)], ids=lambda backend: backend.short)
def test_hosts_of_which_one_could_work_are_refused_with_the_line_to_write(backend: Backend) -> None:
    ways: list[Callable[[], object]] = [
        lambda: UNSHARDED.open(backend=backend).sync_stream(),
        lambda: list(UNSHARDED.loader(backend=backend)),
        lambda: list(sl.StreamReplicator(UNSHARDED, 1, backend=backend).replica(0)),
    ]
    said = r"over a pipeline without \.shard.* Write \.shard\(8\) after the source .* a multiple of the hosts"
    for way in ways:
        with pytest.raises(PlanError, match=said):
            way()
    (problem,) = UNSHARDED.check(backend=backend).problems
    assert re.search(said, problem.message)
    written = sl.from_items(range(8)).shard(8).map(abs)
    assert sorted(written.open(backend=sl.Threads(2)).sync_stream()) == list(range(8))


def test_one_host_a_shared_pool_and_a_default_count_accept_an_unsharded_pipeline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamline.backends.hosts.pool._hinted", set())
    monkeypatch.setattr("streamline.backends.hosts.pool.cpus_here", lambda: 3)
    with sl.Threads(2) as pool:
        for backend in (sl.Threads(1), pool):
            assert list(UNSHARDED.open(backend=backend).sync_stream()) == list(range(8))
    assert not caplog.records
    assert list(UNSHARDED.open(backend=sl.Threads()).sync_stream()) == list(range(8))
    (record,) = caplog.records
    assert record.getMessage() == (
        "Threads(): there is 1 worker, one a shard, so 2 of 3 would be idle, and aren't started: write "
        ".shard(3) or more"
    )


@pytest.mark.parametrize(("n", "error"), [(0, PlanError), (-1, PlanError), (2.0, PlanTypeError), (True, PlanTypeError)])
def test_a_number_of_hosts_is_a_number(n: Any, error: type[Exception]) -> None:
    for backend in (sl.Threads, sl.Processes):
        with pytest.raises(error, match=backend.__name__):
            backend(n)
