"""`.transfer` in whole pipelines: which device, what arrives, where it stands, what is refused, what fails."""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import streamline as sl
from streamline.errors import ClosedError, DataError, PlanError, PlanTypeError
from streamline.pipeline import Pipeline
from streamline.transfer.cuda import Cuda, CudaCopier
from streamline.transfer.devices import _log_once
from streamline.transfer.pinned_ring import RingMover
from streamline.transfer.stage import Transfer
from tests.transfer.arrays import Pair, Sample, nested, odd_arrays
from tests.transfer.fake_torch import FakeTorch, Tensor


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return install(monkeypatch, FakeTorch())


def install(monkeypatch: pytest.MonkeyPatch, module: FakeTorch) -> FakeTorch:
    monkeypatch.setitem(sys.modules, "torch", module)
    _log_once.cache_clear()
    return module


def numbers(count: int = 40, shards: int = 2) -> Pipeline[Any]:
    return sl.from_items(range(count)).shard(shards).batch(4)


def target_of(pipe: Pipeline[Any]) -> Any:
    (stage,) = pipe.open().resolved.plan.after
    assert isinstance(stage, Transfer)
    return stage.target


# Which device -------------------------------------------------------------------------------------------------------


def test_the_host_is_the_reference() -> None:
    pipe = sl.from_items([{"x": np.arange(3), "y": "a"}] * 5).transfer("host")
    assert repr(list(pipe)) == repr(list(pipe.debug())) == repr([{"x": np.arange(3), "y": "a"}] * 5)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:1", "xpu", "", "HOST"])
def test_a_name_that_no_device_has_is_refused_where_it_is_written(device: str) -> None:
    with pytest.raises(PlanError, match=r'\.transfer\(device\) is "host", "cpu", "cuda", "cuda:1"'):
        numbers().transfer(device)


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(PlanTypeError, match="got 0, a int"):
        numbers().transfer(0)
    with pytest.raises(PlanError, match="depth"):
        numbers().transfer("cpu", depth=0)


def test_a_device_of_torch_is_kept_by_its_name(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "device", type(torch.device("cpu")))
    pipe = numbers()
    assert pipe.transfer(torch.device("cuda", 1)) == pipe.transfer("cuda:1")
    assert pipe.transfer(torch.device("cpu:0")) == pipe.transfer("cpu")


def test_writing_a_plan_imports_nothing_and_opening_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr("streamline.transfer.devices.find_spec", lambda name: None)
    cuda, jax = numbers().transfer("cuda"), numbers().transfer("jax")
    for pipe, extra in ((cuda, "torch"), (numbers().transfer("cpu"), "torch"), (jax, "jax")):
        with pytest.raises(PlanError, match=rf"not installed: pip install 'streamline-data\[{extra}\]'"):
            pipe.open()
        with pytest.raises(PlanError, match="not installed"):
            pipe.loader()


def test_without_a_gpu_opening_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, FakeTorch(devices=0))
    with pytest.raises(PlanError, match=r'no CUDA device here: it was built without: .*\.transfer\("cpu"\)'):
        numbers().transfer("cuda").open()
    torch.version.cuda = "13.0"
    with pytest.raises(PlanError, match="no driver, or CUDA_VISIBLE_DEVICES hides them"):
        numbers().transfer("cuda").open()
    with pytest.raises(PlanError, match="no Apple GPU here"):
        numbers().transfer("mps").open()


def test_a_gpu_that_is_not_there_is_refused(torch: FakeTorch) -> None:
    with pytest.raises(PlanError, match=r"torch sees 2 CUDA devices, numbered from 0"):
        numbers().transfer("cuda:2").open()


def test_cuda_is_the_current_device_of_the_thread_that_opens(torch: FakeTorch) -> None:
    pipe = numbers().transfer("cuda")
    torch.cuda.set_device(1)
    assert target_of(pipe) == Cuda(1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(target_of(pipe)))
    thread.start()
    thread.join()
    assert found == [Cuda(0)]
    assert {str(batch.device) for batch in pipe} == {"cuda:1"}
    assert set(torch.cuda.pinned_on) == {1}, "pinned for another rank's GPU"


def test_a_pass_that_is_opened_ahead_goes_to_the_trainers_device(torch: FakeTorch) -> None:
    torch.cuda.set_device(1)
    loader = numbers().transfer("cuda").loader(backend=sl.Threads(1))
    passes = loader._passes
    for _ in range(2):
        assert {str(batch.device) for batch in loader} == {"cuda:1"}
    coming = passes._next
    assert coming is not None
    assert coming.wait() is not None
    assert coming.resolved is not None
    assert coming.resolved.plan.after[0].target == Cuda(1)  # type: ignore[attr-defined]
    passes.close()


# What arrives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arrays_become_tensors_wherever_they_are_and_all_else_stays(torch: FakeTorch, device: str) -> None:
    source = nested()
    (got,) = sl.from_items([source]).transfer(device)
    where = "cpu" if device == "cpu" else "cuda:0"
    assert repr(got["list"]) == f"[tensor([0, 1, 2], {where}, torch.int16), 'name', None]"
    assert repr(got["tuple"]) == f"(tensor([1.5], {where}, torch.float32), 3)"
    assert type(got["pair"]) is Pair
    assert repr(got["pair"].left) == f"tensor(True, {where}, torch.bool)"
    assert got["pair"].right["deep"].shape == (2, 0)
    assert type(got["sample"]) is Sample
    assert got["sample"].image.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(got["ordered"]) is OrderedDict
    assert list(got["ordered"]) == ["z", "a"]
    assert got["ordered"]["z"].tolist() == [65535]
    assert got["frozen"][3].tolist() == [7]
    assert got["names"] is source["names"], "what has no arrays was copied"
    for before in (source["sample"].image, source["ordered"]["z"], source["list"][0]):
        assert isinstance(before, np.ndarray), "the batch before was changed"


class Shared(MutableMapping[str, Any]):
    """A mapping whose `copy.copy` holds the same dict."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_a_mapping_that_can_not_be_copied_stays_as_it_was_and_arrives_as_a_dict(torch: FakeTorch) -> None:
    """Else a data set in the host's memory would move to the GPU, item by item."""
    item = Shared({"x": np.arange(2), "name": "a"})
    for _ in range(2):
        (got,) = sl.from_items([item]).transfer("cuda")
        assert type(item["x"]) is np.ndarray
        assert (list(got), got["x"].tolist(), got["name"]) == (["x", "name"], [0, 1], "a")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("at", range(len(odd_arrays())))
def test_arrays_of_any_layout_arrive(torch: FakeTorch, device: str, at: int) -> None:
    array = odd_arrays()[at]
    (got,) = sl.from_items([array]).transfer(device)
    assert got.shape == array.shape
    assert got.tolist() == array.tolist()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.array(["a", "bc"]), "<U2"),
        (np.array([object()]), "object"),
        (np.array(["2026-01-01"], "datetime64[D]"), r"datetime64\[D\]"),
        (np.zeros(1, np.longdouble), "float128|longdouble"),
        (np.zeros(1, [("a", "i4")]), "a"),
    ],
)
def test_arrays_that_torch_does_not_know_are_refused_with_their_place(
    torch: FakeTorch, device: str, array: Any, what: str
) -> None:
    with pytest.raises(DataError, match=rf"batch\['rows'\]\[1\]: torch has no dtype for .* of .*({what})") as caught:
        list(sl.from_items([{"rows": [1, array]}]).transfer(device))
    assert "at batch['rows'][1]" not in "".join(caught.value.__notes__), "the place is told twice"
    with pytest.raises(DataError, match=r"batch: a MaskedArray would lose its mask"):
        list(sl.from_items([np.ma.masked_array([1, 2], [True, False])]).transfer(device))


def test_tensors_that_are_there_are_moved(torch: FakeTorch) -> None:
    cpu = torch.device("cpu")
    plain, transposed = Tensor(torch, np.arange(4), cpu), Tensor(torch, np.arange(4).reshape(2, 2).T, cpu)
    pinned = Tensor(torch, np.arange(3), cpu, pinned=True)
    other = Tensor(torch, np.arange(2), torch.device("cuda:1"))
    (got,) = sl.from_items([[plain, transposed, pinned, other]]).transfer("cuda:0")
    assert {str(tensor.device) for tensor in got} == {"cuda:0"}
    assert [tensor.tolist() for tensor in got] == [[0, 1, 2, 3], [[0, 2], [1, 3]], [0, 1, 2], [0, 1]]
    torch.cuda.pinned_on.clear()
    list(sl.from_items([pinned]).transfer("cuda:0"))
    assert not torch.cuda.pinned_on, "what is pinned already was written to another buffer"


def test_the_batch_is_the_consumers_stream_to_use(torch: FakeTorch) -> None:
    mine = torch.cuda.Stream()
    with numbers().transfer("cuda").open() as stream, torch.cuda.stream(mine):
        batch = next(stream)
        assert batch.used_by == [mine], "its memory might be reused while it is computed with"
        assert batch.tolist() == [0, 2, 4, 6]


def test_each_batch_is_for_the_stream_that_is_current_when_it_is_taken(torch: FakeTorch) -> None:
    """Of its own device, whichever that is; the streams change under the loop's hands."""
    mine, default = torch.cuda.Stream(), torch.cuda.current_stream(torch.device("cuda", 1))
    with numbers().transfer("cuda:1").open() as stream:
        first = next(stream)
        with torch.cuda.stream(mine):
            second = next(stream)
        third = next(stream)
    assert [batch.used_by for batch in (first, second, third)] == [[default], [mine], [default]]


def test_replicas_go_to_the_device_each_for_its_own_reader(torch: FakeTorch) -> None:
    """Else the batches would be for the stream of whoever reads for all of them."""
    with pytest.raises(PlanError, match=r"replicator\.pipeline\(r\)\.transfer\(device='cuda:1'\)"):
        sl.StreamReplicator(numbers().transfer("cuda:1"), 2)
    with numbers().transfer("cuda:1").open() as running, pytest.raises(PlanError, match="CUDA stream of the thread"):
        sl.StreamReplicator(running, 2)
    mine = torch.cuda.Stream()
    with sl.StreamReplicator(numbers(), 2) as replicator, torch.cuda.stream(mine):
        with (
            replicator.pipeline(0).transfer("cuda:1").open() as even,
            replicator.pipeline(1).transfer("cuda:1").open() as odd,
        ):
            batches = [batch for pair in zip(even, odd, strict=True) for batch in pair]
        assert all(batch.used_by == [mine] for batch in batches)
        assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in numbers()]
    with sl.StreamReplicator(numbers().transfer("cpu"), 1) as replicator:
        assert len(list(replicator.replica(0))) == 10


def test_a_copy_is_on_its_way_when_the_next_batch_is_staged(torch: FakeTorch) -> None:
    """Nobody has waited for it until the consumer's stream does."""
    copier = CudaCopier(0)
    mover = RingMover(copier, 2)
    moved = mover.move({"x": np.arange(3), "y": Tensor(torch, np.arange(2), torch.device("cpu"))})
    assert (len(copier._stream.work), copier._stream.done) == (2, 0)
    got = mover.arrived(moved)
    assert copier._stream.done == 0, "taking a batch has waited for it"
    assert (got["x"].tolist(), got["y"].tolist()) == ([0, 1, 2], [0, 1])
    mover.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("kind", ["for", "async for", "debug"])
async def test_batches_come_whole_and_in_order(torch: FakeTorch, kind: str, depth: int) -> None:
    pipe, plain = numbers(200).transfer("cuda", depth=depth), [batch.tolist() for batch in numbers(200)]
    found = list(pipe if kind == "for" else pipe.debug()) if kind != "async for" else [batch async for batch in pipe]
    assert [batch.tolist() for batch in found] == plain
    assert len(torch.cuda.pinned_on) == max(2, depth), "a buffer was allocated twice"


async def test_batches_that_wait_together_are_handed_over_one_by_one(torch: FakeTorch) -> None:
    async with numbers(80).transfer("cuda", depth=5).open() as stream:
        found = [await anext(stream)]
        with anyio.fail_after(200):
            while len(torch.cuda.pinned_on) < 5:  # noqa: ASYNC110 - until all five buffers have been written to
                await anyio.sleep(0.01)
        found += [batch async for batch in stream]
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in numbers(80)]


def test_no_more_than_depth_batches_are_ahead_of_the_loop(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    to = Tensor.to

    def counted(self: Tensor, *args: Any, **options: Any) -> Tensor:
        moved.append(self)
        return to(self, *args, **options)

    monkeypatch.setattr(Tensor, "to", counted)  # before it is opened: some are on their way then
    with numbers(400).transfer("cuda", depth=3).open() as stream:
        for at in range(1, 30):
            next(stream)
            assert len(moved) <= at + 3
        deadline = threading.Event()
        for _ in range(3000):  # many times what it takes: this machine is shared
            if len(moved) == 29 + 3:
                break
            deadline.wait(0.01)
        assert len(moved) == 29 + 3, "the batches behind this one are not on their way"


@pytest.mark.parametrize("depth", [1, 3])
async def test_depth_batches_are_on_their_way_while_an_async_loop_has_one(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(torch, "spend", moved.append)  # for each copy
    async with numbers(400).transfer("cuda", depth=depth).open() as stream:
        for at in range(1, 10):
            await anext(stream)
            with anyio.fail_after(200):
                while len(moved) < at + depth:  # noqa: ASYNC110 - threads move them
                    await anyio.sleep(0.001)
            assert len(moved) == at + depth


# Where it stands ----------------------------------------------------------------------------------------------------


def test_it_must_be_the_last_stage_after_a_merge() -> None:
    pipe = numbers()
    assert pipe.transfer("host") == pipe.merge().transfer("host")
    merged = numbers().merge("best_effort").transfer("host")
    assert merged.plan.merge.chooses
    with pytest.raises(PlanError, match=r"\.transfer is a plan's last stage, and \.map comes after it"):
        numbers().transfer("host").map(str)
    with pytest.raises(PlanError, match=r"one \.merge"):
        numbers().transfer("host").merge()
    with pytest.raises(PlanError, match=r"it can't stand after another \.shard or a \.merge"):
        sl.from_items(range(3)).transfer("host").shard(2)


def test_it_is_shown_with_its_channels() -> None:
    pipe = numbers().map(np.negative).transfer("cuda", depth=3)
    lines = repr(pipe).splitlines()
    assert "  transfer(device='cuda', depth=3)" in lines
    assert "rank        merge → [128 batches] → transfer → [3 batches]" in lines
    assert lines[-1] == f"at most {pipe.max_in_flight:,} items in flight"
    assert "transfer" in str(pipe.draw())
    assert "transfer" in pipe.draw().svg
    assert numbers().transfer("cuda", depth=9).max_in_flight == pipe.max_in_flight + 6 * 4


def test_a_snapshot_is_of_the_batch_consumed_on_whatever_device(torch: FakeTorch) -> None:
    whole = [batch.tolist() for batch in numbers()]
    pipe = numbers().transfer("cuda")
    for taken in range(len(whole) + 1):
        with pipe.open() as stream:
            for _ in range(taken):
                next(stream)
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        for resumed in (pipe, numbers(), numbers().transfer("cpu"), numbers().transfer("host", depth=1)):
            with resumed.open(resume=snapshot) as stream:
                assert [batch.tolist() for batch in stream] == whole[taken:]


@pytest.mark.long
def test_workers_in_processes_know_nothing_of_it(torch: FakeTorch) -> None:
    def sees(item: int) -> Any:
        import os
        import sys

        return np.array([os.environ["CUDA_VISIBLE_DEVICES"] == "", "torch" not in sys.modules])

    pipe = sl.from_items(range(4)).shard(2).map(sees).transfer("cuda")
    with pipe.open(backend=sl.Processes(2)) as stream:
        assert [batch.tolist() for batch in stream] == [[True, True]] * 4


# Failures, close ----------------------------------------------------------------------------------------------------


def test_a_failure_comes_at_its_batch_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = install(monkeypatch, FakeTorch(memory=3 * 4 * 8))
    with numbers().transfer("cuda").open() as stream:
        assert len([next(stream) for _ in range(3)]) == 3
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
                next(stream)
        snapshot = stream.snapshot()
    assert caught.value.__notes__[0] == "at batch, a ndarray of int64[4]"
    assert caught.value.__notes__[1].startswith("in transfer, shard 0 of 1 (pid ")
    with numbers().open(resume=snapshot) as plain:
        assert len(list(plain)) == 7


def test_batches_that_cannot_be_moved_are_skipped_where_that_is_wanted(torch: FakeTorch) -> None:
    items = [np.arange(2), np.array(["a"]), np.arange(3)]
    with sl.from_items(items).transfer("cuda").open(on_error="skip") as stream:
        assert [batch.tolist() for batch in stream] == [[0, 1], [0, 1, 2]]
        assert stream.errors.total == 1
    with sl.from_items(items[:2]).transfer("cuda").open(on_error="skip") as stream:
        assert [batch.tolist() for batch in stream] == [[0, 1]]
        snapshot = stream.snapshot()
    with sl.from_items(items[:2]).transfer("cuda").open(on_error="skip", resume=snapshot) as stream:
        assert not list(stream)
        assert stream.errors.total == 1, "the state isn't behind what was skipped last"


def test_what_is_dropped_before_it_is_not_read_again(torch: FakeTorch) -> None:
    pipe = sl.from_items(range(2000)).filter(lambda item: item < 3)
    snapshots = []
    for there in (pipe, pipe.transfer("cuda")):
        with there.open() as stream:
            assert list(stream) == [0, 1, 2]
            snapshots.append(stream.snapshot().worker_states)
    assert snapshots[0] == snapshots[1]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_loop_may_be_left_at_any_batch(torch: FakeTorch, taken: int) -> None:
    streams: list[Any] = []
    make = torch.cuda.Stream

    def noted(**options: Any) -> Any:
        streams.append(make(**options))
        return streams[-1]

    torch.cuda.Stream = noted  # type: ignore[assignment]
    with numbers(400).transfer("cuda", depth=3).open() as stream:
        for _ in range(taken):
            next(stream)
    assert all(len(side.work) == side.done for side in streams), "copies are at work on memory that is gone"
    with pytest.raises(ClosedError):
        next(stream)


def test_a_stream_that_is_dropped_leaves_nothing_at_work(torch: FakeTorch) -> None:
    iterator: Iterator[Any] | None = iter(numbers(400).transfer("cuda"))
    assert iterator is not None
    next(iterator)
    del iterator  # and conftest looks for threads


def test_a_failing_hand_over_takes_nothing(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    with numbers().transfer("cuda").open() as stream:
        next(stream)
        before = stream.snapshot()
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "record_stream", lambda self, stream: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(stream)
        assert stream.snapshot() == before
        assert next(stream).tolist() == [1, 3, 5, 7]


# Devices that nothing is pinned for ---------------------------------------------------------------------------------


def test_what_is_not_done_is_said_once(torch: FakeTorch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streamline.transfer"):
        for _ in range(2):
            list(numbers().transfer("cpu"))
    (record,) = [record for record in caplog.records if record.name == "streamline.transfer"]
    assert record.getMessage().startswith('transfer("cpu"): pinned memory, and copies beside the computation, are for')


def test_on_the_cpu_an_arrays_memory_is_the_tensors(torch: FakeTorch) -> None:
    array = np.arange(5)
    (got,) = sl.from_items([array]).transfer("cpu")
    assert np.shares_memory(got.data, array)


def copied(pipe: Pipeline[Any]) -> dict[str, float]:
    """Return what `stats()` tells of a transfer, behind the end."""
    with pipe.open() as stream:
        list(stream)
    (stage,) = (stage for stage in stream.stats().stages if stage.kind == "transfer")
    return {detail.name: detail.value for detail in stage.details}


def test_stats_tell_what_was_copied(torch: FakeTorch) -> None:
    arrays = [{"x": np.zeros(5, np.int32), "name": "a"} for _ in range(6)]
    found = copied(sl.from_items(arrays).transfer("cuda"))
    assert list(found) == ["copied_bytes", "staged_bytes", "device_waited_s"]
    assert (found["copied_bytes"], found["staged_bytes"]) == (120, 120)
    assert copied(sl.from_items(arrays).transfer("cpu")) == {"copied_bytes": 0}
    assert copied(sl.from_items([np.zeros((4, 4), np.int32).T] * 2).transfer("cpu")) == {"copied_bytes": 128}
    assert copied(sl.from_items(arrays).transfer("host")) == {}
    there = Tensor(torch, np.zeros(5, np.int32), torch.device("cuda:0"))
    assert copied(sl.from_items([there]).transfer("cpu")) == {"copied_bytes": 20}


def test_stats_tell_where_it_works_and_for_how_long(torch: FakeTorch) -> None:
    with numbers().transfer("cuda").open() as stream:
        list(stream)
    (stage,) = (stage for stage in stream.stats().stages if stage.kind == "transfer")
    assert (stage.executor, stage.items) == ("thread", 10)
    assert stage.busy_s > 0


def test_stats_tell_what_jax_was_given(jax: FakeJax) -> None:
    arrays = [{"x": np.zeros(5, np.int32), "name": "a"} for _ in range(6)]
    assert copied(sl.from_items(arrays).transfer("jax")) == {"copied_bytes": 120}


class FakeJax(SimpleNamespace):
    """As much of JAX as a transfer uses: arrays that know where they were put."""

    def __init__(self) -> None:
        super().__init__(Array=FakeArray, Device=type("Device", (), {}), Sharding=Sharding)

    def device_put(self, value: Any, place: Any) -> FakeArray:
        return FakeArray(np.asarray(getattr(value, "data", value)), place)

    def make_array_from_process_local_data(self, sharding: Any, local: Any) -> FakeArray:
        part = getattr(local, "data", local)
        return FakeArray(np.concatenate([part, part]), sharding)


class FakeArray:
    def __init__(self, data: Any, place: Any) -> None:
        self.data = data
        self.place = place
        self.nbytes = data.nbytes


@dataclass(frozen=True)
class Sharding:
    is_fully_addressable: bool


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> FakeJax:
    module = FakeJax()
    monkeypatch.setitem(sys.modules, "jax", module)
    monkeypatch.setitem(sys.modules, "jax.sharding", module)
    return module


def test_jax_is_given_arrays_and_where_to_put_them(jax: FakeJax) -> None:
    device = jax.Device()
    for given, place in (("jax", None), (device, device), (Sharding(True), Sharding(True))):
        (got,) = sl.from_items([{"x": np.arange(3), "name": "a"}]).transfer(given)
        assert got["name"] == "a"
        assert (got["x"].data.tolist(), got["x"].place) == ([0, 1, 2], place)


def test_an_array_over_processes_is_made_of_each_ones_part(jax: FakeJax) -> None:
    for part in (np.arange(3), FakeArray(np.arange(3), None)):
        (got,) = sl.from_items([part]).transfer(Sharding(False))
        assert got.data.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(DataError, match=r"batch: JAX has no dtype for a NumPy array of <U1"):
        list(sl.from_items([np.array(["a"])]).transfer("jax"))
