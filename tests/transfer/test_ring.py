"""The ring of pinned buffers against a device with a virtual clock: overlap, reuse, order, failures, close."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import ClosedError
from streamline.transfer import pinned_ring as ring
from streamline.transfer.pinned_ring import RingMover
from tests.laws.profile import examples
from tests.transfer.fake_device import FakeDevice, arrived, same


def train(
    device: FakeDevice, batches: list[Any], *, depth: int, step_s: float, slots: int | None = None
) -> tuple[list[Any], float]:
    """Do what a stream and its loop do, in virtual time: a step waits for its batch, and the loop for the step.

    Returns:
      The batches on the device, and how long all of it took.
    """
    mover = RingMover(device, slots or max(2, depth))
    taken: list[float] = []
    loop, got = 0.0, []
    for at, batch in enumerate(batches):
        if at >= depth:
            device.until(taken[at - depth])  # there is room again
        moved = mover.move(batch)
        loop = max(loop, device.now)
        taken.append(loop)
        on_device, ready = mover.arrived(moved)
        got.append(on_device)
        loop = max(loop, ready) + step_s
    mover.close()
    return [arrived(batch) for batch in got], loop


@pytest.mark.parametrize(("copy_s", "step_s"), [(1.0, 100.0), (1.0, 300.0), (3.0, 100.0), (1.0, 1.0)])
def test_a_step_takes_as_long_as_the_longer_of_copy_and_work(copy_s: float, step_s: float) -> None:
    batches = [np.full(100, at, np.uint8) for at in range(200)]
    device = FakeDevice(copy_s=copy_s, stage_s=0.1)
    _, took = train(device, batches, depth=2, step_s=step_s)
    longer = max(100 * copy_s, step_s)
    assert took == pytest.approx(200 * longer, rel=0.05)
    _, alone = train(FakeDevice(copy_s=copy_s, stage_s=0.1), batches, depth=1, step_s=step_s)
    assert alone >= took


def test_staging_copy_and_work_go_on_side_by_side() -> None:
    batches = [np.full(100, at, np.uint8) for at in range(200)]
    _, took = train(FakeDevice(copy_s=1.0, stage_s=1.0), batches, depth=2, step_s=100.0)
    assert took == pytest.approx(200 * 100, rel=0.05)


leaves = st.one_of(
    st.integers(0, 40).map(lambda size: np.arange(size, dtype=np.int16)),
    st.integers(0, 6).map(lambda size: np.full((2, size), size, np.float64)),
    st.sampled_from(["label", None, 3]),
)
batch_lists = st.lists(
    st.recursive(
        leaves,
        lambda part: st.one_of(
            st.lists(part, max_size=3), st.tuples(part, part), st.dictionaries(st.sampled_from("abc"), part)
        ),
        max_leaves=6,
    ),
    max_size=12,
)
speeds = st.sampled_from([0.0, 0.01, 1.0, 50.0])


@given(batches=batch_lists, depth=st.integers(1, 5), copy_s=speeds, stage_s=speeds, step_s=speeds)
@examples(100)
def test_every_batch_arrives_as_it_was_at_any_pace(
    batches: list[Any], depth: int, copy_s: float, stage_s: float, step_s: float
) -> None:
    device = FakeDevice(copy_s=copy_s, stage_s=stage_s)
    got, _ = train(device, batches, depth=depth, step_s=step_s)
    assert same(got, batches)
    assert not device.pending, "closed before its copies were done"
    assert not device.buffers, "a buffer is still there"


def test_a_buffer_that_is_written_to_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the poison is for: without the wait, batches are wrong."""
    batches = [np.full(8, at, np.uint8) for at in range(6)]
    assert same(train(FakeDevice(copy_s=100), batches, depth=4, slots=2, step_s=0)[0], batches)
    monkeypatch.setattr("tests.transfer.fake_device.Point.wait", lambda self: None)
    device = FakeDevice(copy_s=100)
    mover = RingMover(device, 2)
    got = [mover.arrived(mover.move(batch))[0] for batch in batches]
    device.until(1e9)
    assert not same([arrived(batch) for batch in got], batches)


@given(
    batches=batch_lists,
    call=st.sampled_from(["size", "allocate", "stage", "copy", "mark", "wait"]),
    after=st.integers(0, 12),
    depth=st.integers(1, 3),
)
@examples(100)
def test_a_failure_comes_at_its_batch_and_spoils_no_other(
    batches: list[Any], call: str, after: int, depth: int
) -> None:
    device = FakeDevice(copy_s=10, failing={call: after})
    mover = RingMover(device, max(2, depth))
    got, sent, failures = [], [], list[str]()
    for batch in batches:
        try:
            moved = mover.move(batch)
        except MemoryError as error:
            failures.append(str(error))
            continue
        sent.append(batch)
        got.append(mover.arrived(moved)[0])
    assert failures in ([], [f"{call}: out of memory"])
    if "wait" in device.failing and device.failing["wait"] >= 0:
        del device.failing["wait"]
    mover.close()
    mover.close()
    device.until(1e9)
    assert same([arrived(batch) for batch in got], sent)
    assert not device.buffers


def test_a_buffer_with_unknown_reads_is_kept_until_the_close() -> None:
    """The device reads it, though the point after its copy couldn't be made: freed, it might be another batch's."""
    device = FakeDevice(copy_s=10, failing={"mark": 0})
    mover = RingMover(device, 2)
    with pytest.raises(MemoryError, match="mark"):
        mover.move(np.zeros(8, np.uint8))
    device.pending.clear()  # which holds the memory, too
    gc.collect()
    assert device.buffers == 1
    for _ in range(2):
        mover.move(np.zeros(8, np.uint8))
    assert len(device.allocated) == device.buffers == 3, "it was written to again"
    mover.close()
    assert device.buffers == 0


def test_a_close_waits_for_copies_after_which_no_point_could_be_made() -> None:
    device = FakeDevice(copy_s=10, failing={"mark": 0})
    mover = RingMover(device, 2)
    with pytest.raises(MemoryError, match="mark"):
        mover.move(np.zeros(8, np.uint8))
    mover.close()
    assert not device.pending
    assert device.buffers == 0


def test_copies_begun_of_a_batch_that_failed_are_waited_for_and_released() -> None:
    """Its buffer isn't written to before, nor freed; what was copied is gone, though the failure is remembered."""
    device = FakeDevice(copy_s=10, failing={"copy": 3})
    mover = RingMover(device, 2)
    mover.move(np.zeros(8, np.uint8))
    with pytest.raises(MemoryError, match="copy") as caught:
        mover.move({"a": np.zeros(8, np.uint8), "b": [np.zeros(8, np.uint8), 1, np.zeros(8, np.uint8)]})
    assert caught.value.__notes__ == ["at batch['b'][2], a ndarray of uint8[8]"]
    assert len(device.pending) == 3, "what was begun is gone before it was waited for"
    for _ in range(2):
        mover.move(np.zeros(8, np.uint8))
    assert device.now == 240, "the buffer was written to while it was copied from"
    gc.collect()
    assert [copy() for copy in device.made[1:3]] == [None, None], "the failure holds memory of the device"
    mover.close()
    device.until(1e9)


def test_the_first_failure_is_raised() -> None:
    mover = RingMover(FakeDevice(failing={"copy": 0, "mark": 0}), 2)
    with pytest.raises(MemoryError, match="copy"):
        mover.move(np.zeros(8))
    mover.close()


def test_memory_that_is_read_where_it_is_stays_until_it_was_read_and_no_longer() -> None:
    device = FakeDevice(copy_s=10, pinned=True)
    mover = RingMover(device, 2)
    batches = [np.full(8, at, np.uint8) for at in range(6)]
    refs = [weakref.ref(batch) for batch in batches]
    got = []
    while batches:
        got.append(mover.arrived(mover.move(batches.pop(0)))[0])
        assert sum(ref() is not None for ref in refs) <= len(batches) + 2, "what was read is still held"
    mover.close()
    assert [batch.tolist() for batch in arrived(got)] == [[at] * 8 for at in range(6)]
    assert not any(ref() is not None for ref in refs)
    assert not device.allocated


@pytest.mark.parametrize("taken", range(5))
def test_close_waits_for_copies_that_are_on_their_way(taken: int) -> None:
    device = FakeDevice(copy_s=10)
    mover = RingMover(device, 3)
    for at in range(taken):
        mover.move(np.full(8, at, np.uint8))
    mover.close()
    assert not device.pending
    assert not device.buffers
    assert device.now >= 80 * (taken > 0)
    with pytest.raises(ClosedError):
        mover.move(np.zeros(1))


def test_close_lets_go_of_its_buffers_though_the_device_fails() -> None:
    device = FakeDevice(failing={"wait": 0})
    mover = RingMover(device, 2)
    mover.move(np.zeros(8))
    with pytest.raises(MemoryError, match="wait"):
        mover.close()
    device.pending.clear()  # it copies no more
    assert not device.buffers
    mover.close()


def test_buffers_are_allocated_once_and_grow() -> None:
    device = FakeDevice(copy_s=0)
    mover = RingMover(device, 2)
    for size in [100, 100, 100, 4000, 5000, 5000, 10, 8192, 8192, 9000]:
        mover.move(np.zeros(size, np.uint8))
    assert device.allocated == [4096, 4096, 8192, 8192, 16384]
    assert device.buffers == 2, "a buffer that was too small is still there"
    assert device.beside == [0, 1, 1, 1, 1], "one that was too small was still there when another was allocated"
    mover.close()


def test_a_batch_of_no_arrays_needs_no_buffer() -> None:
    device = FakeDevice()
    mover = RingMover(device, 2)
    assert mover.arrived(mover.move({"name": ["a", "b"]}))[0] == {"name": ["a", "b"]}
    assert not device.allocated
    mover.close()


def test_a_note_says_where_in_the_batch_it_failed() -> None:
    mover = RingMover(FakeDevice(failing={"copy": 1}), 2)
    with pytest.raises(MemoryError) as caught:
        mover.move({"x": np.zeros(2), "y": (np.zeros((2, 3)), 1)})
    assert caught.value.__notes__ == ["at batch['y'][0], a ndarray of float64[2, 3]"]
    mover.close()


def test_what_is_copied_and_how_long_the_device_is_waited_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers: from the third batch on, one is written to when its copy is done."""
    device = FakeDevice(copy_s=1.0, stage_s=0.1)
    monkeypatch.setattr(ring, "perf_counter", lambda: device.now)
    mover = RingMover(device, 2)
    assert mover.details is not None
    batch = {"x": np.zeros(10, np.uint8), "name": "label"}
    seen = []
    for _ in range(4):
        mover.move(batch)
        seen.append(tuple(detail.value for detail in mover.details()))
    mover.close()
    assert seen == [(10, 10, 0.0), (20, 20, 0.0), (30, 30, 9.0), (40, 40, pytest.approx(18.0))]
    assert [detail.name for detail in mover.details()] == ["copied_bytes", "staged_bytes", "device_waited_s"]


def test_a_batch_that_fails_is_not_counted_as_copied() -> None:
    device = FakeDevice(failing={"copy": 1})
    mover = RingMover(device, 2)
    assert mover.details is not None
    mover.move(np.zeros(10, np.uint8))
    with pytest.raises(MemoryError):
        mover.move(np.zeros(10, np.uint8))
    assert mover.details()[0].value == 10
