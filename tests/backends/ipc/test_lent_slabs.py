"""Memory of a link's pool that its sender fills in place: never overwritten while a view lives, at either end.

Each array has a private twin, which goes through the same: whatever holds a part of the one is compared with what holds
that part of the other, after each step. Slabs are filled with 0xDB whenever they are used again.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamline.backends.ipc import shared_memory
from streamline.backends.ipc.messages import ItemsMessage
from streamline.backends.ipc.shared_memory import SLAB_BYTES, SMALLEST, Slab, SlabPool
from streamline.backends.ipc.socket_link import SocketLink
from tests.backends.ipc.holders import HOLDERS

POISON = 0xDB
MIB = 1 << 20


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill each slab that is about to be used: views of what was in it show that they are alive."""

    find = SlabPool._find

    def poisoning(pool: SlabPool, size: int) -> Slab | None:
        slab = find(pool, size)
        if slab is not None:
            np.asarray(slab.memory)[:] = POISON
        return slab

    monkeypatch.setattr(SlabPool, "_find", poisoning)
    monkeypatch.setattr(shared_memory, "LENT_BYTES", SLAB_BYTES)  # small ones are compared quickly


def empty(link: SocketLink, nbytes: int) -> Any:
    """Memory of the link's pool."""
    assert link.place is not None
    memory = link.place.empty(nbytes)
    assert memory is not None
    return memory


class Held:
    """An array at one end, its twin, and what holds parts of both."""

    def __init__(self, array: Any, twin: Any) -> None:
        self.array, self.twin = array, twin
        self.readers: list[tuple[str, Callable[[], bytes], Callable[[], bytes]]] = []

    def hold(self, how: str) -> None:
        if self.array is not None:
            self.readers.append((how, HOLDERS[how](self.array), HOLDERS[how](self.twin)))

    def write(self, value: int) -> None:
        if self.array is not None:
            self.array[:: 1 + value % 3] = value
            self.twin[:: 1 + value % 3] = value

    def let_go(self) -> None:
        self.array = self.twin = None

    def check(self) -> None:
        if self.array is not None:
            assert np.array_equal(self.array, self.twin)
        for how, read, twin in self.readers:
            assert read() == twin(), how


SIZES = st.sampled_from([SLAB_BYTES, 50_001, 1 << 16, 120_000, 5000])
NUMBER = st.integers(0, 3)  # from the one made last on
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # an example that fails is long: shrinking it takes minutes

MAKE = st.tuples(st.just("make"), SIZES, st.integers(0, 250))
PACK = st.tuples(st.just("pack"), NUMBER, st.booleans())
CHOSEN = st.lists(st.tuples(NUMBER, st.sampled_from(["all", "all", "rows", "twice", "dict"])), min_size=1, max_size=2)
SEND = st.tuples(st.just("send"), CHOSEN, st.booleans())
OTHERS = [
    st.tuples(st.just("hold"), NUMBER, st.sampled_from(sorted(HOLDERS))),
    st.tuples(st.just("write"), NUMBER, st.integers(0, 250)),
    st.tuples(st.just("let go"), NUMBER, st.booleans()),
    st.tuples(st.just("forget"), NUMBER),
    st.tuples(st.sampled_from(["collect", "send packed", "drop packed"])),
]
STEPS = st.one_of(MAKE, MAKE, MAKE, MAKE, SEND, SEND, PACK, PACK, *OTHERS)

SHAPES: dict[str, Callable[[Any], Any]] = {
    "all": lambda array: array,
    "rows": lambda array: (array[: len(array) // 2], array[len(array) // 2 :]),
    "twice": lambda array: [array, array[:]],
    "dict": lambda array: {"x": array, "n": 1, "last": array[-1:]},
}


def arrays_in(item: Any) -> list[Any]:
    if isinstance(item, np.ndarray):
        return [item]
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    return [array for part in parts for array in arrays_in(part)]


class Border:
    """Both ends of a link in one process, and what is held at each."""

    def __init__(self, near: SocketLink, far: SocketLink) -> None:
        self.near, self.far = near, far
        self.held: list[Held] = []
        self.packed: list[tuple[Any, list[Any]]] = []

    def at(self, number: int) -> Held | None:
        return self.held[-1 - number % len(self.held)] if self.held else None

    async def step(self, what: str, *args: Any) -> None:
        if what == "make":
            nbytes, value = args
            memory = self.near.place.empty(nbytes) if self.near.place else None
            array = np.empty(nbytes, np.uint8) if memory is None else memory[:nbytes]
            array[:] = value
            self.held.append(Held(array, array.copy()))
            del array, memory
        elif what == "collect":
            gc.collect()
        elif what == "send":
            self.pack(*args)
            await self.send()
        elif what == "pack":
            self.pack([(args[0], "all")], args[1])
        elif what == "send packed":
            await self.send()
        elif what == "drop packed":
            self.packed.clear()
        elif (held := self.at(args[0])) is not None:
            if what == "hold":
                held.hold(args[1])
            elif what == "write":
                held.write(args[1])
            elif what == "let go":
                held.let_go()
                if args[1]:
                    held.readers.clear()
            else:
                self.held.remove(held)

    def pack(self, chosen: list[tuple[int, str]], keep: bool) -> None:
        picked = {id(held): (held, shape) for number, shape in chosen if (held := self.at(number)) is not None}
        sources = [(held, shape) for held, shape in picked.values() if held.array is not None]  # one is one there, too
        if not sources:
            return
        items = [SHAPES[shape](held.array) for held, shape in sources]
        twins = [array for held, shape in sources for array in arrays_in(SHAPES[shape](held.twin))]
        self.packed.append((self.near.pack(items), twins))
        if not keep:
            for held, _ in sources:
                held.let_go()

    async def send(self) -> None:
        while self.packed:
            packed, twins = self.packed.pop(0)
            twins = [twin.copy() for twin in twins]  # as they are now: what was packed is read when it is sent
            self.near.send(ItemsMessage(1, packed, b""))
            del packed
            (message,) = await self.far.receive()
            assert isinstance(message, ItemsMessage)
            arrived = [array for item in self.far.unpack(message.packed) for array in arrays_in(item)]
            del message
            self.held += [Held(array, twin) for array, twin in zip(arrived, twins, strict=True)]

    def check(self) -> None:
        for held in self.held:
            held.check()


@pytest.mark.long
@pytest.mark.parametrize("pool_bytes", [MIB, 0])
@settings(max_examples=int(os.environ.get("LENT_EXAMPLES", "25")), deadline=None, phases=PHASES)
@given(steps=st.lists(STEPS, min_size=25, max_size=40))
def test_nothing_is_overwritten_while_a_view_lives_at_either_end(pool_bytes: int, steps: list[Any]) -> None:
    async def test() -> None:
        border = Border(*(SocketLink(sock, pool_bytes=pool_bytes) for sock in socket.socketpair(socket.AF_UNIX)))
        for step in steps:
            await border.step(*step)
            border.check()
        border.near.close()
        border.far.close()
        gc.collect()
        border.check()  # views outlive the link

    asyncio.run(test())


async def test_slabs_are_used_again_and_lent_within_bounds() -> None:
    near, far = (SocketLink(sock, pool_bytes=MIB) for sock in socket.socketpair(socket.AF_UNIX))
    border = Border(near, far)
    for value in range(100):
        await border.step("make", 50_001, value)
        await border.step("send", [(0, "all")], False)
        border.held.clear()
    assert near._pool.nbytes <= 2 * SMALLEST, "one is written while the other one is read"
    lent = [near._pool.empty(50_001) for _ in range(20)]
    assert sum(memory is not None for memory in lent) == 8, "half of the pool"
    near.close()
    far.close()
    assert near._pool.nbytes == 0
    for memory in lent:
        if memory is not None:
            memory[:] = 1  # is still there
    assert near._pool.empty(50_001) is None, "closed"


def pair(pool_bytes: int = MIB) -> tuple[SocketLink, SocketLink]:
    near, far = (SocketLink(sock, pool_bytes=pool_bytes) for sock in socket.socketpair(socket.AF_UNIX))
    return near, far


def sent(link: SocketLink, item: Any, worker: int = 1) -> None:
    link.send(ItemsMessage(worker, link.pack([item]), b""))


async def test_a_slab_may_be_dropped_before_its_descriptor_is_sent() -> None:
    near, far = pair()
    while not near._queue.pieces:  # the socket is full
        sent(near, bytes(20_000))
    made = 0
    for nbytes in (40_000, 60_000, 80_000, 100_000, 120_000):  # not sent, and too small for the next ones
        lent = [near._pool.empty(nbytes) for _ in range(16)]
        made += nbytes * sum(memory is not None for memory in lent)
        del lent
    assert made > 2 * near._pool.nbytes, "most were dropped, to make room"
    sent(near, np.full(100_000, 7, np.uint8), worker=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(near.flush)
        while (message := (await far.receive())[-1])[0] != 2:  # the worker's number
            pass
        assert (far.unpack(message[1])[0] == 7).all()
        near.close()
    far.close()


def test_items_for_an_end_that_has_died_are_dropped_when_their_slab_is_announced() -> None:
    near, far = pair()
    far.close()
    sent(near, np.zeros(100_000, np.uint8))
    assert near._pool.nbytes == 0
    near.close()


def test_what_was_lent_before_is_room_for_what_is_copied() -> None:
    pool = SlabPool(MIB)
    for _ in [pool.empty(50_001) for _ in range(20)]:
        pass
    slabs = [pool.take(100_000) for _ in range(8)]
    assert None not in slabs
    pool.close()


def test_a_finaliser_may_ask_for_memory_while_freed_slabs_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs it anywhere, from Python 3.12 on even between two lines of the pool's own."""
    pool, free = SlabPool(MIB), vars(Slab)["free"].fget
    deep: list[bool] = []
    kept: list[Any] = []

    def finalising(slab: Slab) -> bool:
        if not deep:
            deep.append(True)
            kept.append(pool.empty(50_001))
            deep.clear()
        return bool(free(slab))

    for _ in [pool.empty(50_001) for _ in range(4)]:
        pass
    monkeypatch.setattr(Slab, "free", property(finalising))
    kept += [pool.empty(50_001) for _ in range(3)]
    addresses = [memory.ctypes.data for memory in kept if memory is not None]
    assert len(addresses) == len(set(addresses)) >= 4, "each slab is lent once"
    pool.close()
