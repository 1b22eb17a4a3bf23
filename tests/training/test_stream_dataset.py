"""StreamDataset: one iterator, kept over repeated iteration, by any number of loops; and what it is in a pipeline."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import streamline as sl
from streamline.core.state import digest
from streamline.errors import ClosedError, PlanError, PlanTypeError, ResumeError, SnapshotError, StageError


class Source:
    """A factory of `range(length)` that counts how often it was called, and how many of its iterators were closed."""

    def __init__(self, length: int, fail_at: int | None = None) -> None:
        self.length = length
        self.fail_at = fail_at
        self.made = self.closed = 0

    def __call__(self) -> Iterator[int]:
        self.made += 1
        return self._items()

    def _items(self) -> Iterator[int]:
        try:
            for item in range(self.length):
                if item == self.fail_at:
                    raise KeyError(item)
                yield item
        finally:
            self.closed += 1


class AsyncSource(Source):
    def __call__(self) -> AsyncIterator[int]:  # type: ignore[override]
        self.made += 1
        return self._async_items()

    async def _async_items(self) -> AsyncIterator[int]:
        try:
            for item in range(self.length):
                if item == self.fail_at:
                    raise KeyError(item)
                await anyio.lowlevel.checkpoint()
                yield item
        finally:
            self.closed += 1


class Placed:
    """An iterator with a state of its own."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = self.drawn = 0

    def __iter__(self) -> Placed:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        self.drawn += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


# The iterator -------------------------------------------------------------------------------------------------------


def test_the_factory_is_called_for_the_first_item_not_before() -> None:
    source = Source(3)
    items = iter(sl.StreamDataset(source))
    assert source.made == 0
    assert list(items) == [0, 1, 2]
    assert source.made == source.closed == 1


def test_what_is_left_goes_on() -> None:
    dataset = sl.StreamDataset(Source(6))
    assert next(iter(dataset)) == 0
    for item in dataset:
        if item == 2:
            break
    assert list(dataset) == [3, 4, 5]
    assert list(dataset) == []


def test_a_loop_that_is_at_work_when_it_is_reset_has_no_end() -> None:
    source = Source(6)
    dataset = sl.StreamDataset(source)
    old = iter(dataset)
    assert next(old) == 0
    dataset.reset()
    assert source.closed == 1
    with pytest.raises(ClosedError, match="was reset"):
        next(old)
    assert list(dataset) == [0, 1, 2, 3, 4, 5]


def test_a_factory_may_reset_what_it_is_made_for() -> None:
    def items() -> Iterator[int]:
        yield 1
        dataset.reset()
        yield 2

    dataset = sl.StreamDataset(items)
    with pytest.raises(ClosedError, match="while it waited"):
        list(dataset)
    assert next(iter(dataset)) == 1


def test_it_is_reset_while_another_thread_waits_which_then_closes_it() -> None:
    waits, go = threading.Event(), threading.Event()
    closed: list[int] = []
    raised: list[BaseException] = []

    def items() -> Iterator[int]:
        try:
            waits.set()
            go.wait(200)
            yield 1
        finally:
            closed.append(1)

    def read() -> None:
        with pytest.raises(ClosedError) as found:
            next(iter(dataset))
        raised.append(found.value)

    dataset = sl.StreamDataset(items)
    thread = threading.Thread(target=read)
    thread.start()
    assert waits.wait(200)
    dataset.reset()  # doesn't wait
    assert not closed
    go.set()
    thread.join()
    assert closed == [1]
    assert "while it waited" in str(raised[0])


def test_a_dataset_that_is_dropped_closes_what_was_made() -> None:
    class Closing(Placed):
        def close(self) -> None:
            closed.append(self.at)

    closed: list[int] = []
    dataset = sl.StreamDataset(lambda: Closing(5))
    assert next(iter(dataset)) == 0
    del dataset
    gc.collect()
    assert closed == [1]


def test_a_failure_is_no_end_and_comes_again_until_it_is_reset() -> None:
    source = Source(5, fail_at=2)
    dataset = sl.StreamDataset(source)
    assert list(islice(dataset, 2)) == [0, 1]
    for _ in range(3):
        with pytest.raises(KeyError) as found:
            next(iter(dataset))
        assert "worker 0 of 1" in found.value.__notes__[0]
        assert len(found.value.__notes__) == 1
    source.fail_at = None
    dataset.reset()
    assert list(dataset) == [0, 1, 2, 3, 4]


def test_what_looks_like_an_end_is_a_failure() -> None:
    class Ends(Placed):
        def __next__(self) -> int:
            raise StopAsyncIteration

    with pytest.raises(StageError, match="would read as an end"):
        list(sl.StreamDataset(lambda: Ends(1)))


def test_a_factory_that_fails_is_called_again() -> None:
    calls: list[int] = []

    def connect() -> Iterator[int]:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError
        return iter([7])

    dataset = sl.StreamDataset(connect)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            list(dataset)
    assert list(dataset) == [7]


@pytest.mark.parametrize("wrapped", [False, True])
def test_ctrl_c_inside_the_iterator_is_no_end_of_it(wrapped: bool) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    dataset = sl.StreamDataset(lambda: map(abs, items()) if wrapped else items())
    with pytest.raises(KeyboardInterrupt):
        list(dataset)
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"Ctrl-C came inside .* iterator.* ended: reset\(\) it"):
            list(dataset)


def test_ctrl_c_inside_an_iterator_that_goes_on_is_none_either() -> None:
    numbers, interrupts = iter(range(4)), [KeyboardInterrupt()]

    class Interrupted:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            if interrupts:
                raise interrupts.pop()
            return next(numbers)

    dataset = sl.StreamDataset(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(dataset)
    assert list(dataset) == list(range(4))


def test_threads_share_one_iterator_each_item_to_one_of_them() -> None:
    source = Source(4000)
    dataset = sl.StreamDataset(source)
    found: list[list[int]] = [[] for _ in range(4)]
    begin = threading.Barrier(4)

    def read(mine: list[int]) -> None:
        begin.wait()
        mine.extend(dataset)

    threads = [threading.Thread(target=read, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.made == 1
    assert Counter(item for mine in found for item in mine) == Counter(range(4000))
    assert all(mine == sorted(mine) for mine in found)


# Async ---------------------------------------------------------------------------------------------------------------


async def test_async_iteration_goes_on_too() -> None:
    for source in (AsyncSource(5), Source(5)):
        dataset = sl.StreamDataset(source)
        async for item in dataset:
            if item == 1:
                break
        assert [item async for item in dataset] == [2, 3, 4]
        assert [item async for item in dataset] == []
        await dataset.areset()
        assert [item async for item in dataset] == [0, 1, 2, 3, 4]
        assert source.made == source.closed == 2


async def test_a_factory_may_be_a_coroutine_function_called_once_for_many_tasks() -> None:
    source = AsyncSource(100)

    async def connect() -> AsyncIterator[int]:
        await anyio.sleep(0.001)
        return source()

    dataset = sl.StreamDataset(connect)
    found: list[int] = []

    async def read() -> None:
        found.extend([item async for item in dataset])

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(read)
    assert source.made == 1
    assert sorted(found) == list(range(100))


async def test_a_pull_cut_off_in_a_generator_is_no_end() -> None:
    async def items() -> AsyncIterator[int]:
        yield 0
        await anyio.sleep_forever()
        yield 1

    dataset = sl.StreamDataset(items)
    stream = aiter(dataset)
    assert await anext(stream) == 0
    with anyio.move_on_after(0.001):
        await anext(stream)
    for _ in range(2):
        with pytest.raises(ClosedError, match="cancelled inside"):
            await anext(stream)
    await dataset.areset()
    assert await anext(aiter(dataset)) == 0


async def test_an_iterator_that_bears_a_cancellation_goes_on() -> None:
    send, receive = anyio.create_memory_object_stream[int](5)
    async with send, receive:
        dataset = sl.StreamDataset(lambda: receive)
        stream = aiter(dataset)
        with anyio.move_on_after(0.001):
            await anext(stream)
        send.send_nowait(4)
        assert await anext(stream) == 4


async def test_an_async_iterator_is_reset_by_waiting_and_read_in_its_loop() -> None:
    source = AsyncSource(5)
    dataset = sl.StreamDataset(source)
    assert await anext(aiter(dataset)) == 0
    with pytest.raises(PlanError, match=r"await dataset\.areset"):
        dataset.reset()
    with pytest.raises(PlanTypeError, match="use async for"):
        list(dataset)

    def elsewhere() -> None:
        async def read() -> int:
            return await anext(aiter(dataset))

        with pytest.raises(PlanError, match="belongs to the event loop"):
            anyio.run(read)

    await anyio.to_thread.run_sync(elsewhere)
    await dataset.areset()
    assert source.closed == 1


async def test_it_is_reset_while_another_task_waits() -> None:
    send, receive = anyio.create_memory_object_stream[int](5)

    async def read() -> None:
        with pytest.raises(ClosedError, match="while it waited"):
            await anext(aiter(dataset))

    async with send, receive:
        dataset = sl.StreamDataset(lambda: receive)
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            await dataset.areset()
            send.send_nowait(1)
        with pytest.raises(anyio.ClosedResourceError):
            receive.receive_nowait()  # the one who waited has closed it


@pytest.mark.parametrize("factory", [AsyncSource(3), lambda: _later()], ids=["iterator", "coroutine"])
def test_an_async_one_in_plain_code_is_refused(factory: Any) -> None:
    with pytest.raises(PlanTypeError, match="use async for"):
        list(sl.StreamDataset(factory))


async def _later() -> list[int]:
    return [1]


# Workers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 2, 3, 7, 40])
def test_workers_have_every_item_once(of: int) -> None:
    parts = [list(sl.StreamDataset(Source(30), worker, of)) for worker in range(of)]
    assert parts == [list(range(worker, 30, of)) for worker in range(of)]


async def test_workers_of_async_streams_have_every_item_once() -> None:
    parts = [[item async for item in sl.StreamDataset(AsyncSource(20), worker, 3)] for worker in range(3)]
    assert parts == [list(range(worker, 20, 3)) for worker in range(3)]


def test_a_shared_stream_is_no_workers_part_of_a_stream() -> None:
    queue = iter(range(10))
    first, second = (sl.StreamDataset(lambda: queue, worker, 2, strategy="shared") for worker in range(2))
    assert list(islice(first, 3)) + list(islice(second, 3)) + list(first) == list(range(10))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"worker_id": 2, "num_workers": 2}, PlanError, "from 0 to 1, got 2"),
        ({"worker_id": -1, "num_workers": 2}, PlanError, "at least 0"),
        ({"worker_id": 0, "num_workers": 0}, PlanError, "at least 1"),
        ({"worker_id": True, "num_workers": 2}, PlanTypeError, "is an integer, got bool"),
        ({"worker_id": 0, "num_workers": 2.0}, PlanTypeError, "is an integer, got float"),
        ({"worker_id": 0, "num_workers": -3}, PlanError, "at least 1"),
        ({"worker_id": False, "num_workers": 1}, PlanTypeError, "is an integer, got bool"),
        ({"worker_id": "0", "num_workers": 2}, PlanTypeError, "is an integer, got str"),
        ({"worker_id": 1}, PlanError, "together"),
        ({"num_workers": 2}, PlanError, "together"),
        ({"strategy": "split"}, PlanError, "'replicated', 'shared'"),
    ],
)
def test_workers_that_there_are_not_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sl.StreamDataset(Source(3), **options)
    with pytest.raises(PlanTypeError, match="is a function"):
        sl.StreamDataset([1, 2])  # type: ignore[arg-type]


def test_what_a_factory_must_return() -> None:
    with pytest.raises(PlanTypeError, match="an iterable, sync or async, got int"):
        list(sl.StreamDataset(lambda: 5))  # type: ignore[arg-type, return-value]


def test_in_a_worker_of_torch_it_is_that_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_data = ModuleType("torch.utils.data")
    info: list[Any] = [None]
    torch_data.get_worker_info = lambda: info[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.data", torch_data)
    assert list(sl.StreamDataset(Source(4))) == [0, 1, 2, 3]
    info[0] = SimpleNamespace(id=1, num_workers=3)
    assert list(sl.StreamDataset(Source(8))) == [1, 4, 7]
    assert list(sl.StreamDataset(Source(8), 0, 4)) == [0, 4]  # what was given holds


# Copies and states ---------------------------------------------------------------------------------------------------


def test_a_copy_for_another_process_begins_at_the_start() -> None:
    dataset = sl.StreamDataset(partial(range, 5), 1, 2)
    assert list(pickle.loads(pickle.dumps(dataset))) == [1, 3]
    assert next(iter(dataset)) == 1
    with pytest.raises(PlanError, match="being iterated"):
        pickle.dumps(dataset)
    dataset.reset()
    assert list(pickle.loads(pickle.dumps(dataset))) == [1, 3]


@pytest.mark.parametrize("taken", range(6))
@pytest.mark.parametrize("make", [lambda: iter(range(9)), lambda: Placed(9)], ids=["iterated", "loaded"])
def test_a_state_goes_on_after_the_last_item_taken(make: Any, taken: int) -> None:
    dataset = sl.StreamDataset(make, 0, 2)
    first = list(islice(dataset, taken))
    again = sl.StreamDataset(make, 0, 2)
    again.load_state_dict(dataset.state_dict())
    assert again.state_dict() == dataset.state_dict()
    assert first + list(again) == [0, 2, 4, 6, 8]
    assert list(again) == []


def test_an_iterator_with_a_state_is_not_iterated_again() -> None:
    made: list[Placed] = []

    def make() -> Placed:
        made.append(Placed(100))
        return made[-1]

    dataset = sl.StreamDataset(make)
    list(islice(dataset, 90))
    again = sl.StreamDataset(make)
    again.load_state_dict(dataset.state_dict())
    assert list(again) == list(range(90, 100))
    assert made[1].drawn == 10


def test_a_state_of_the_end_stays_at_the_end() -> None:
    dataset = sl.StreamDataset(lambda: Placed(3))
    assert len(list(dataset)) == 3
    again = sl.StreamDataset(lambda: Placed(3))
    again.load_state_dict(dataset.state_dict())
    assert list(again) == []
    again.reset()
    assert list(again) == [0, 1, 2]


def test_states_that_do_not_fit_are_refused() -> None:
    dataset = sl.StreamDataset(Source(3))
    for wrong in ({"items": 3}, {"items": 3, "ended": False, "state": None}):
        with pytest.raises(ResumeError, match=r"expected what StreamDataset\.state_dict"):
            dataset.load_state_dict(wrong)
    with pytest.raises(SnapshotError, match="is damaged, or was edited"):
        dataset.load_state_dict({**dataset.state_dict(), "items": 3})
    assert next(iter(dataset)) == 0
    with pytest.raises(PlanError, match="before the first item"):
        dataset.load_state_dict(dataset.state_dict())
    dataset.reset()
    state: dict[str, Any] = {"items": 7, "ended": False, "state": None}
    dataset.load_state_dict({**state, "sha256": digest(state)})
    for _ in range(2):
        with pytest.raises(ResumeError, match="after 7 items, and the iterator ends after 3"):
            list(dataset)
    dataset.reset()
    state = {"items": 2, "ended": False, "state": {"at": 2}}
    dataset.load_state_dict({**state, "sha256": digest(state)})
    with pytest.raises(ResumeError, match="no load_state_dict"):
        list(dataset)


# In a pipeline -------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["itself", "returned"])
@pytest.mark.parametrize(("worker", "of"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("make", [Source(40), AsyncSource(40), lambda: Placed(40)], ids=["sync", "async", "placed"])
def test_from_iterable_reads_it_anew_and_resumes_exactly(make: Any, worker: int, of: int, form: str) -> None:
    dataset = sl.StreamDataset[int](make, worker, of)
    pipe = sl.from_iterable(dataset if form == "itself" else (lambda: dataset)).shard(3).merge()
    whole = list(range(worker, 40, of))
    assert list(pipe) == whole  # three workers, each of which iterates it
    with pipe.open() as stream:
        first = list(islice(stream, 11))
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot) as stream:
        assert first + list(stream) == whole


def test_a_coroutine_function_makes_a_source_too() -> None:
    async def connect() -> list[int]:
        return list(range(9))

    assert list(sl.from_iterable(sl.StreamDataset(connect, 1, 3))) == [1, 4, 7]


def test_from_stream_goes_on_where_it_stands() -> None:
    dataset = sl.StreamDataset(Source(3000))
    assert next(iter(dataset)) == 0
    pipe = sl.from_stream(dataset).batch(10, collate=None)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(4)]
    with pipe.open(resume=stream.snapshot()) as stream:
        assert [item for batch in first + list(stream) for item in batch] == list(range(1, 3000))


def test_it_is_iterated_in_hosts(backend: Any) -> None:
    pipe = sl.from_iterable(sl.StreamDataset(partial(range, 50), 1, 2)).shard(2).map(abs).merge()
    with pipe.open(backend=backend) as stream:
        assert list(stream) == list(range(1, 50, 2))
