"""Shared memory in slabs: taken, lent, given back when the last view dies, bounded, and without names."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamline.backends.ipc import shared_memory as slabs
from streamline.backends.ipc.shared_memory import ONCE, SMALLEST, SOME, Slab, SlabLease, SlabPool, make_shared

MIB = 1 << 20


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))  # noqa: PTH208


def lent(slab: Slab) -> SlabLease:
    assert slab.descriptor.fd is not None
    there = SlabLease(slab.descriptor.fd, slab.size)
    slab.descriptor.close()
    return there


def taken(pool: SlabPool, nbytes: int) -> Slab:
    slab = pool.take(nbytes)
    assert slab is not None
    return slab


def test_what_one_end_writes_the_other_reads_and_may_write_to() -> None:
    slab = taken(SlabPool(MIB), 1000)
    there = lent(slab)
    slab.memory[:3] = b"abc"
    view = there.lend(1000)
    assert bytes(view[:3]) == b"abc"
    view[:3] = b"xyz"
    assert bytes(slab.memory[:3]) == b"xyz"
    assert np.frombuffer(view, np.uint8).ctypes.data % slabs.ALIGN == 0


def test_a_slab_is_free_when_the_last_view_has_died() -> None:
    pool = SlabPool(MIB)
    slab: Any = taken(pool, 1000)
    there = lent(slab)
    view = there.lend(1000)
    array: Any = np.frombuffer(view[8:], np.float32)[::2].reshape(2, -1)
    del view
    assert not slab.free
    assert taken(pool, 1000) is not slab
    del array
    assert slab.free
    assert taken(pool, 1000) is slab


def test_a_view_may_die_in_any_thread() -> None:
    slab = taken(SlabPool(MIB), 1000)
    there = lent(slab)
    views = [there.lend(1000)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert slab.free


def test_a_finaliser_that_the_collector_calls_still_reads_what_it_was_lent() -> None:
    """The collector tells weak references before it calls finalisers; the memory must be theirs until after."""
    slab = taken(SlabPool(MIB), 1000)
    there = lent(slab)
    seen: list[bool] = []

    class Kept:
        def __init__(self, array: Any) -> None:
            self.array = array
            self.circle = self

        def __del__(self) -> None:
            seen.append(slab.free)

    Kept(np.frombuffer(there.lend(1000), np.uint8))
    gc.collect()
    assert seen == [False]
    assert slab.free


def test_the_slab_that_came_back_last_is_used_first() -> None:
    pool = SlabPool(MIB)
    three = [taken(pool, 1000) for _ in range(3)]
    theirs = [lent(slab) for slab in three]
    views = [there.lend(10) for there in theirs]
    views.clear()
    assert [taken(pool, 1000) for _ in range(3)] == three[::-1]


def test_a_pool_is_bounded_and_says_when_all_is_taken() -> None:
    pool = SlabPool(8 * SMALLEST)
    held = [taken(pool, 1000) for _ in range(8)]
    theirs = [lent(slab) for slab in held]
    views = [there.lend(10) for there in theirs]
    assert pool.take(1000) is None
    assert pool.nbytes == 8 * SMALLEST
    del views[3]
    assert pool.take(1000) is held[3]
    assert pool.take(1000) is None


def test_what_is_larger_than_a_pool_is_used_once_and_is_gone_with_its_views() -> None:
    pool = SlabPool(MIB)
    slab = taken(pool, MIB + 1)
    assert (slab.number, pool.nbytes) == (ONCE, 0)
    there = lent(slab)
    view = there.lend(MIB + 1)
    slab.memory[-1] = 7
    end = len(slab.memory) - 1
    del slab, there
    assert view[end] == 7


def test_when_all_are_taken_what_is_large_gets_one_of_its_own() -> None:
    pool = SlabPool(16 * MIB)
    held = []
    while (slab := taken(pool, MIB)).number != ONCE:
        held.append(slab)
    assert len(held) * MIB <= pool.nbytes <= 16 * MIB
    assert [pool.take(MIB // 2) for _ in range(4)][-1] is None


def test_a_pool_grows_to_some_of_the_largest_lists_and_no_further() -> None:
    pool = SlabPool(MIB)
    held = [taken(pool, MIB) for _ in range(6)]
    assert [slab.number for slab in held] == [1, 2, 3, 4, ONCE, ONCE]
    assert pool.nbytes == sum(slab.size for slab in held[:SOME])
    theirs = [lent(slab) for slab in held[:SOME]]
    views = [there.lend(10) for there in theirs]
    views.clear()
    assert {taken(pool, MIB).number for _ in range(SOME)} == {1, 2, 3, 4}


def test_free_slabs_make_room_for_other_sizes() -> None:
    pool = SlabPool(64 * SMALLEST)
    small = [taken(pool, 1000) for _ in range(64)]
    theirs = [lent(slab) for slab in small]
    views = [there.lend(10) for there in theirs]
    assert pool.take(4 * SMALLEST) is None
    views.clear()
    large = taken(pool, 4 * SMALLEST)
    assert pool.nbytes <= 64 * SMALLEST
    gone = pool.take_dropped()
    assert set(gone) <= {slab.number for slab in small}
    assert len(gone) >= large.size // SMALLEST
    assert pool.take_dropped() == []


def test_a_larger_one_that_is_free_will_do() -> None:
    pool = SlabPool(17 * SMALLEST)
    large = [taken(pool, 2 * SMALLEST) for _ in range(8)]
    theirs = [lent(slab) for slab in large]
    views = [there.lend(10) for there in theirs]
    views.clear()
    assert pool.take(1000) in large


@pytest.mark.parametrize("nbytes", [1, SMALLEST - 64, SMALLEST, 100_000, MIB, MIB + 1, 8 * MIB, 10_000_001])
def test_a_slab_has_room_for_what_was_asked_and_little_more(nbytes: int) -> None:
    slab = taken(SlabPool(1 << 30), nbytes)
    assert len(slab.memory) >= nbytes
    assert slab.size <= max(SMALLEST, nbytes * 1.25 + 64)
    slab.descriptor.close()


@pytest.mark.parametrize("nbytes", [2 * SMALLEST, MIB, 8 * MIB])
def test_a_power_of_two_and_what_lies_beside_it_is_a_page_more(nbytes: int) -> None:
    assert taken(SlabPool(1 << 30), nbytes + 1000).size == nbytes + 4096


def test_neither_end_keeps_descriptors_open() -> None:
    before = descriptors()
    pool = SlabPool(MIB)
    kept = []
    for _ in range(50):
        slab = pool.take(1000) or taken(pool, MIB)
        kept.append(lent(slab).lend(10))
    assert descriptors() == before


def test_views_outlive_the_pool_and_the_receivers_books() -> None:
    pool = SlabPool(MIB)
    slab = taken(pool, 1000)
    there = lent(slab)
    slab.memory[:3] = b"abc"
    view = there.lend(3)
    pool.close()
    del slab, there
    assert bytes(view) == b"abc"


def test_where_the_system_gives_no_memory_there_is_no_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(slabs, "make_shared", refuse)
    pool = SlabPool(MIB)
    assert pool.take(1000) is None
    assert pool.take(2 * MIB) is None
    assert pool.nbytes == 0


def test_a_mapping_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(slabs, "_FLAGS", 0)  # neither shared nor private: refused
    assert SlabPool(MIB).take(1000) is None
    assert descriptors() == before


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="looks into Linux's directory of names")
def test_systems_without_nameless_memory_drop_the_name_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    monkeypatch.setattr(sys, "platform", "darwin")
    fd = make_shared(5000)
    try:
        assert {name for name in os.listdir("/dev/shm") if name.startswith("streamline")} <= before  # noqa: PTH208
        assert os.fstat(fd).st_size == 5000
    finally:
        os.close(fd)
