"""Batches in page-locked memory: never overwritten while they are copied or held, on a device that is late.

Memory is filled with poison as soon as the library takes it for free. The device reads when its clock says so.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.transfer import pinned_memory, pinned_ring
from streamline.transfer.pinned_memory import LEAST_LENT, _Block
from streamline.transfer.pinned_ring import RingMover
from tests.backends.ipc.holders import HOLDERS
from tests.laws.profile import examples
from tests.transfer.fake_device import POISON, FakeDevice, arrived, same

KIB = 1 << 10


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Fill each block that has come back."""
    returned = _Block._returned

    def poisoning(block: _Block, ref: object) -> None:
        if block._memory is not None:
            block._memory[:] = POISON
        returned(block, ref)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Block, "_returned", poisoning)
        yield


class SharedSlab:
    """What a host process shares: it lends parts, and is poisoned, and free, when the last view of one is gone."""

    def __init__(self, mover: RingMover, size: int) -> None:
        assert mover.on_mapped is not None
        memory = np.full(size, POISON, np.uint8)
        self.free: list[_Block] = []
        self.block = _Block(memory, self.free)
        self.free.append(self.block)
        self.unmapping = mover.on_mapped(self.block.start, size)

    def lend(self) -> Any:
        return self.free.pop().lend() if self.free else None


sizes = st.sampled_from([100, LEAST_LENT, LEAST_LENT + 192, 3 * LEAST_LENT])
steps = st.lists(
    st.tuples(
        st.sampled_from(["place", "slab", "heap"]),
        sizes,
        st.sampled_from(["move", "move", "move", "drop", "hold and drop", "hold and move", "part", "strided"]),
        st.sampled_from([name for name in HOLDERS if name != "thread"]),
        st.sampled_from([0.0, 1e5, 1e7]),
    ),
    max_size=30,
)


@given(
    steps=steps,
    depth=st.integers(1, 3),
    copy_s=st.sampled_from([0.0, 1.0, 50.0]),
    most=st.sampled_from([0, 4, 16, 64]),
    failing=st.dictionaries(
        st.sampled_from(["allocate", "register", "copy", "mark", "wait", "stage"]), st.integers(0, 8), max_size=2
    ),
)
@examples(150)
def test_nothing_is_overwritten_while_it_is_copied_or_held(
    steps: list[Any], depth: int, copy_s: float, most: int, failing: dict[str, int]
) -> None:
    device = FakeDevice(copy_s=copy_s, failing=failing)
    mover = RingMover(device, max(2, depth))
    mover._pinned._most = most * LEAST_LENT
    slabs = [SharedSlab(mover, 4 * LEAST_LENT) for _ in range(2)]
    sent, got, readers = [], [], list[tuple[Callable[[], bytes], bytes]]()
    for number, (where, size, action, holder, pause_s) in enumerate(steps):
        memory = mover._pinned.empty(size) if where == "place" else None
        for slab in slabs if where == "slab" and size <= 4 * LEAST_LENT else ():
            memory = slab.lend() if memory is None else memory
        array = np.empty(size, np.uint8) if memory is None else memory[:size]
        array[:] = np.arange(size) * (number + 1) % 251
        del memory
        if "hold" in action:
            readers.append((HOLDERS[holder](array), HOLDERS[holder](array.copy())()))
        if action == "part":
            array = array[size // 3 : -1]
        elif action == "strided":
            array = array[::-2]
        twin, moved = [array.copy(), number], None
        if "drop" not in action:
            try:
                moved = mover.move([array, number])
            except MemoryError:
                pass  # its batch doesn't arrive
            else:
                sent.append(twin)
                got.append(mover.arrived(moved)[0])
        del array, moved
        device.until(device.now + pause_s)
        for read, expected in readers:
            assert read() == expected
    readers.clear()
    failing.pop("wait", None)
    mover.close()
    for slab in slabs:
        slab.unmapping()
    device.until(1e12)
    assert same([arrived(batch) for batch in got], sent)
    assert not device.registered
    assert not mover._pinned._regions


def figures(mover: RingMover) -> tuple[float, float]:
    assert mover.details is not None
    copied, staged, _ = mover.details()
    return copied.value, staged.value


def lent(mover: RingMover, size: int = LEAST_LENT, value: int = 1) -> Any:
    memory = mover._pinned.empty(size)
    assert memory is not None
    memory[:size] = value
    return memory[:size]


def test_what_lies_in_a_block_is_not_written_again() -> None:
    device = FakeDevice(copy_s=0.0)
    mover = RingMover(device, 2)
    for value in range(20):
        mover.move({"x": lent(mover, value=value), "labels": np.zeros(100, np.uint8)})
    assert figures(mover) == (20 * (LEAST_LENT + 100), 20 * 100)
    assert device.allocated == [LEAST_LENT, 4096, LEAST_LENT, 4096, LEAST_LENT], "a block isn't used again"
    mover.close()
    assert not device.buffers


def test_a_slab_is_registered_once_and_when_it_is_first_copied_from() -> None:
    device = FakeDevice()
    mover = RingMover(device, 2)
    slab, other = (SharedSlab(mover, 4 * LEAST_LENT) for _ in range(2))
    assert not device.registered
    for _ in range(4):
        memory = slab.lend()
        mover.move([memory[:LEAST_LENT], memory[LEAST_LENT : 3 * LEAST_LENT]])
        del memory
        mover.move(np.zeros(8))
        mover.move(np.zeros(8))  # its turn in the ring comes: it is let go of
    assert device.registered == {slab.block.start: 4 * LEAST_LENT}
    assert figures(mover)[1] == 8 * 64, "what was registered was staged"
    mover.close()
    slab.unmapping()
    other.unmapping()
    assert not device.registered


@pytest.mark.parametrize("where", ["place", "slab"])
def test_memory_is_kept_until_its_copy_is_done(where: str) -> None:
    device = FakeDevice(copy_s=10)
    mover = RingMover(device, 2)
    slab = SharedSlab(mover, LEAST_LENT)
    memory = lent(mover) if where == "place" else slab.lend()
    memory[:] = 7
    block: Any = mover._pinned._regions[memory.ctypes.data]
    free = slab.free if where == "slab" else block.free
    got, _ = mover.arrived(mover.move(memory))
    del memory
    assert not free
    mover.move(np.zeros(8))
    mover.move(np.zeros(8))
    assert (len(free), got.data.min(), got.data.max()) == (1, 7, 7)
    mover.close()


def test_where_there_is_no_room_none_is_lent_and_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_ring, "QUEUED", 0)
    device = FakeDevice(copy_s=10)
    mover = RingMover(device, 2)
    mover._pinned._most = 4 * LEAST_LENT
    held = [lent(mover) for _ in range(4)]
    assert mover._pinned.empty(LEAST_LENT) is None
    mover.move(held.pop())
    assert mover._pinned.empty(LEAST_LENT) is None, "its copy isn't done"
    assert (device.now, len(device.pending)) == (0, 1)
    assert mover._pinned.empty(LEAST_LENT - 1) is None, "so few aren't worth it"
    mover.close()


def test_there_is_room_for_some_of_the_largest_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "MOST_BYTES", LEAST_LENT)
    mover = RingMover(FakeDevice(), 2)
    held = [lent(mover)]
    assert mover._pinned.empty(LEAST_LENT) is None
    mover.move(np.zeros(2 * LEAST_LENT, np.uint8))
    held += [lent(mover) for _ in range(2 * (pinned_ring.QUEUED + 4) - 1)]
    assert mover._pinned.empty(LEAST_LENT) is None
    mover.close()


def test_blocks_of_another_size_are_used_or_make_room() -> None:
    device = FakeDevice()
    mover = RingMover(device, 2)
    mover._pinned._most = 4 * LEAST_LENT
    for _ in range(2):
        lent(mover)
    assert lent(mover, 4 * LEAST_LENT).nbytes == 4 * LEAST_LENT
    held = lent(mover), mover._pinned.empty(LEAST_LENT)
    assert device.allocated == [LEAST_LENT, 4 * LEAST_LENT]
    assert held[1] is None
    mover.close()


def test_what_cannot_be_locked_is_staged_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for call in ("allocate", "register"):
        caplog.clear()
        device = FakeDevice(copy_s=0.0, failing={call: 0})
        mover = RingMover(device, 2)
        with caplog.at_level(logging.WARNING, "streamline.transfer"):
            slabs = [SharedSlab(mover, LEAST_LENT) for _ in range(2)]
            for _ in range(2):
                assert (mover._pinned.empty(LEAST_LENT) is None) == (call == "allocate")
            for slab in slabs * 2:
                memory = slab.lend()
                mover.move(memory)
                del memory
                for _ in range(2):  # its turn in the ring comes: it is let go of
                    mover.move(None)
                device.until(1e9)
        (record,) = caplog.records
        assert f"MemoryError: {call}: out of memory). Such batches are copied once more" in record.getMessage()
        assert len(device.registered) == (2 if call == "allocate" else 1)
        mover.close()


def test_views_outlive_the_run() -> None:
    device = FakeDevice()
    mover = RingMover(device, 2)
    held, moved = lent(mover, value=5)[10:], lent(mover, value=6)
    mover.move(moved)
    mover.close()
    assert mover._pinned.empty(LEAST_LENT) is None
    gc.collect()
    assert (held == 5).all()
    assert (moved == 6).all()
    del held, moved
    assert not device.buffers


def test_a_block_that_was_lost_in_a_cycle_comes_back() -> None:
    mover = RingMover(FakeDevice(), 2)
    circle: list[Any] = [lent(mover)]
    circle.append(circle)
    del circle
    gc.collect()
    lent(mover)
    assert len(mover._pinned._regions) == 1
    mover.close()


def test_a_fork_neither_unregisters_nor_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    mover = RingMover(device, 2)
    slab = SharedSlab(mover, LEAST_LENT)
    mover.move(slab.lend())
    mover.close()
    monkeypatch.setattr("os.getpid", lambda: -1)  # as it is there
    slab.unmapping()
    assert list(device.registered) == [slab.block.start]
