"""A link over TCP: items arrive whole, aligned, and as they were when they were sent, however little a socket takes."""

from __future__ import annotations

import mmap
import pickle
import random
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import anyio
import numpy as np
import pytest

from streamline.backends.ipc.frames import head
from streamline.backends.ipc.link import LinkClosed
from streamline.backends.ipc.messages import Credit, ItemsMessage, Message
from streamline.backends.ipc.shared_socket import SharedSocket
from streamline.backends.remote import network_link
from streamline.backends.remote.network_link import BUFFERS_BYTES, NetworkLink, ReceiveBuffers
from tests.kit import LOOPS, run_on

pytestmark = pytest.mark.parametrize("loop", LOOPS)


@contextmanager
def linked() -> Iterator[tuple[NetworkLink, NetworkLink]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    ends = NetworkLink(here), NetworkLink(there)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def put(link: NetworkLink, *items: Any) -> None:
    link.send(ItemsMessage(3, link.pack(items), b"states"))


async def received(link: NetworkLink, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += await link.receive()
    return messages


def rows(sizes: list[int]) -> list[Any]:
    return [np.full(size, at % 251, np.uint8) if at % 3 else b"%d" % at * size for at, size in enumerate(sizes)]


def same(left: Any, right: Any) -> bool:
    return bool((left == right).all() if isinstance(left, np.ndarray) else left == right)


@pytest.mark.one_in(2, 1)
def test_items_of_any_size_cross_in_order_with_messages_between_them(loop: str) -> None:
    async def test() -> None:
        dice = random.Random(1)
        lists = [
            rows([dice.choice([0, 1, 63, 64, 65, 4096, 5000, 70_000, 3_000_001]) for _ in range(9)]) for _ in range(20)
        ]
        with linked() as (near, far):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(far.flush)
                for at, items in enumerate(lists):
                    put(far, *items)
                    far.send(Credit(1, at, at))
                messages = await received(near, 2 * len(lists))
                far.close()
            for at, items in enumerate(lists):
                there: Any = messages[2 * at]
                got = near.unpack(there.packed)
                assert all(map(same, got, items))
                large = [item for item in got if isinstance(item, np.ndarray) and item.size >= 1 << 15]
                assert all(item.ctypes.data % 64 == 0 and item.flags.writeable for item in large)
                assert messages[2 * at + 1] == Credit(1, at, at)

    run_on(loop, test)


def test_what_was_sent_may_be_overwritten_at_once(loop: str) -> None:
    async def test() -> None:
        with linked() as (near, far):
            buffer = np.empty(4 << 20, np.uint8)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(far.flush)
                for value in range(6):  # more than the socket takes
                    buffer.fill(value)
                    put(far, buffer)
                buffer.fill(255)
                messages: list[Any] = await received(near, 6)
                far.close()
            for value, message in enumerate(messages):
                (got,) = near.unpack(message.packed)
                assert (got == value).all()

    run_on(loop, test)


SIZE = 5 << 20


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("waits", "make"),
    [
        (True, lambda kept: b"3" * SIZE),
        (False, lambda kept: np.full(SIZE, 3, np.uint8)),
        (False, lambda kept: kept),
        (False, lambda kept: kept[1:]),
        (False, lambda kept: np.frombuffer(bytearray(SIZE), np.uint8)),
    ],
    ids=["bytes", "array", "array that is kept", "view of it", "array over other memory"],
)
def test_what_nothing_can_change_waits_uncopied(waits: bool, make: Callable[[Any], Any], loop: str) -> None:
    async def test() -> None:
        kept = np.full(SIZE, 3, np.uint8)
        item = make(kept)
        expected = bytes(item)
        with linked() as (near, far):
            while not far._queue.pieces:  # the socket has room
                put(far, b"x" * (1 << 20))
            blocked = len(far._queue.pieces)
            far.send(ItemsMessage(3, far.pack([item]), b"states"))
            waiting: list[Any] = [piece.obj for piece, _ in list(far._queue.pieces)[blocked:] if len(piece) > 1 << 20]
            assert [owner is item for owner in waiting] == [waits]
            del waiting, item
            kept[:] = 9
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(far.flush)
                got: Any = b""
                while len(got) < SIZE - 1:
                    for message in await near.receive():
                        (got,) = near.unpack(cast("ItemsMessage", message).packed)
                far.close()
            assert bytes(got) == expected

    run_on(loop, test)


def test_a_socket_that_takes_little_at_a_time_loses_nothing(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(2)
    write = SharedSocket.write

    def little(self: SharedSocket, pieces: list[memoryview], descriptor: int | None = None) -> int:
        if dice.random() < 0.1:
            raise BlockingIOError
        return write(self, [pieces[0][: dice.randrange(1, 100_000)]], descriptor)

    async def test() -> None:
        with linked() as (near, far):
            lists = [rows([dice.randrange(200_000) for _ in range(4)]) for _ in range(5)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(far.flush)
                for items in lists:
                    put(far, *items)
                messages: list[Any] = await received(near, len(lists))
                far.close()
            for items, message in zip(lists, messages, strict=True):
                assert all(map(same, near.unpack(message.packed), items))

    monkeypatch.setattr(SharedSocket, "write", little)
    run_on(loop, test)


def whole(view: Any, sent: int) -> bool:
    found = np.abs(np.asarray(view))
    return bool(found.size and (found == sent).all())


@pytest.mark.one_in(2, 1)
def test_memory_is_used_again_only_when_its_last_view_is_gone(loop: str) -> None:
    async def test() -> None:
        dice, held = random.Random(3), dict[int, Any]()
        with linked() as (near, far):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(far.flush)
                for at in range(200):
                    put(far, {"a": np.full(100_000, at, np.int32), "b": np.full((100, 300), -at, np.int32)})
                    (message,) = await received(near, 1)
                    (item,) = near.unpack(cast("ItemsMessage", message).packed)
                    if dice.random() < 0.5:  # a part of it, far from its beginning
                        held[at] = dice.choice([item["a"][99_999:], memoryview(item["a"][50_000:]), item["b"][7:9].T])
                    if held and dice.random() < 0.45:
                        del held[dice.choice(list(held))]
                    del message, item
                    for sent, view in held.items():
                        assert whole(view, sent)
                far.close()
        near.close()
        assert all(whole(view, sent) for sent, view in held.items())

    run_on(loop, test)


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memory,
        lambda memory: memory[5:6].cast("b"),
        lambda memory: np.frombuffer(memory, np.float32)[::2].reshape(2, -1).T,
        lambda memory: [np.asarray(memory).view("M8[s]")],
        lambda memory: pickle.loads(
            pickle.dumps(np.ones(1 << 18), 5, buffer_callback=lambda _: False), buffers=[memory]
        ),
        lambda memory: pickle.PickleBuffer(np.frombuffer(memory, np.uint8)[100:200].data),
        lambda memory: np.frombuffer(memory, np.uint8)[1:].data.toreadonly()[2:],
    ],
)
def test_memory_to_receive_into_is_used_again_once_its_last_view_is_gone(
    view: Callable[[memoryview], Any], loop: str
) -> None:
    buffers = ReceiveBuffers()
    memory = buffers.take(1 << 21).data
    first, held = address(memory), view(memory[: 1 << 21])
    del memory
    assert address(buffers.take(1 << 21).data) != first
    del held
    assert first in [address(block.data) for block in [buffers.take(1 << 21) for _ in range(2)]]


def test_what_a_link_keeps_to_receive_into_is_bounded(loop: str) -> None:
    buffers = ReceiveBuffers()
    kept = [buffers.take(1 << 20) for _ in range(4)]
    addresses = {block.ctypes.data for block in kept}
    del kept
    assert buffers.take(1 << 20).ctypes.data in addresses
    for size in [1 << 24] * 9 + [1 << 27]:
        buffers.take(size)
        assert sum(block.nbytes for block, _ in buffers._blocks) <= max(BUFFERS_BYTES, size + mmap.PAGESIZE)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes late")
def test_a_loop_is_woken_for_much_of_a_large_frame_or_its_end(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = 1 << 13  # a new connection has room for little
    monkeypatch.setattr(network_link, "WAKE_BYTES", some)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near = NetworkLink(here)

    def comes(sent: bytes | memoryview, *, wakes: bool = True) -> Sequence[Message]:
        there.sendall(sent)
        assert bool(select.select([here], [], [], 10 if wakes else 0)[0]) == wakes
        if wakes:
            near._read()
        messages, near._arrived = near._arrived, []
        return messages

    items: Any = ItemsMessage(3, cast("Any", None), b"states")
    frame = memoryview(head(pickle.dumps(items, 5), 1, [64, 5 * some]) + bytes(64 + 5 * some))
    with closing(near), there:
        for _ in range(2):
            assert comes(frame[:1000]) == []
            for at in range(1000, len(frame) - some, some):
                assert comes(frame[at : at + some - 1], wakes=False) == []
                assert comes(frame[at + some - 1 : at + some]) == []
            assert comes(frame[at + some : -1], wakes=False) == []
            assert len(comes(frame[-1:])) == 1
            assert comes(head(pickle.dumps(Credit(1, 2, 3), 5))) == [Credit(1, 2, 3)]
        assert comes(frame[:1000]) == []
        assert comes(frame[1000:2000], wakes=False) == []
        there.shutdown(socket.SHUT_WR)
        assert select.select([here], [], [], 10)[0]
        near._read()
        assert near._read_closed


def test_a_lost_connection_is_the_end_of_the_link_after_what_came(loop: str) -> None:
    async def test() -> None:
        with linked() as (near, far):
            far.send(Credit(1, 2, 3))
            far.close()
            assert await received(near, 1) == [Credit(1, 2, 3)]
            with pytest.raises(LinkClosed):
                await near.receive()
            put(near, b"x" * 5_000_000)  # nobody reads it
            await near.drain()

    run_on(loop, test)
