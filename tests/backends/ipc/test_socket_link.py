"""A link over a socket: order, pressure, the other end's death at every byte, hoarding, leaks; on both loops."""

from __future__ import annotations

import errno
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from streamline.backends.ipc import shared_socket
from streamline.backends.ipc.link import LinkClosed
from streamline.backends.ipc.messages import CloseWorker, Credit, ItemsMessage, Message, PauseHost
from streamline.backends.ipc.shared_memory import SLAB_BYTES
from streamline.backends.ipc.socket_link import SocketLink
from streamline.errors import HostError
from tests.kit import run_on

LARGE = 1 << 20

Run = Callable[[Callable[[], Awaitable[None]]], None]


@contextmanager
def linked(**options: Any) -> Iterator[tuple[SocketLink, SocketLink]]:
    """Two ends in one process: shared memory doesn't mind."""
    left, right = (SocketLink(sock, **options) for sock in socket.socketpair(socket.AF_UNIX))
    try:
        yield left, right
    finally:
        left.close()
        right.close()


async def received(link: SocketLink, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += await link.receive()
    assert len(messages) == count
    return messages


def put(link: SocketLink, *items: Any) -> None:
    link.send(ItemsMessage(3, link.pack(items), b"states"))


async def got(link: SocketLink) -> list[Any]:
    (message,) = await received(link, 1)
    assert isinstance(message, ItemsMessage)
    return link.unpack(message.packed)


async def closed(link: SocketLink) -> list[Message]:
    """Return what still arrives before the link is closed."""
    messages: list[Message] = []
    while True:
        try:
            messages += await link.receive()
        except LinkClosed:
            break
    with pytest.raises(LinkClosed):
        await link.receive()
    return messages


def test_messages_arrive_in_order_both_ways(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            sent: list[Message] = [Credit(1, n, 2 * n) for n in range(500)]
            for message in sent:
                near.send(message)
            far.send(PauseHost(1))
            assert await received(far, 500) == sent
            assert await received(near, 1) == [PauseHost(1)]

    run(test)


def test_items_cross_with_the_rest_of_their_message(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            items = [1, "a", b"", None, np.arange(3), {"x": np.zeros((512, 512), np.float32)}]
            packed = near.pack(items)
            near.send(ItemsMessage(7, packed, [1, 2]))
            (message,) = await received(far, 1)
            assert isinstance(message, ItemsMessage)
            assert (message.worker, message.states, message.packed.count) == (7, [1, 2], 6)
            assert message.packed.nbytes == packed.nbytes > 1 << 20
            there = far.unpack(message.packed)
            assert there[:4] == items[:4]
            assert there[5]["x"].shape == (512, 512)
            assert there[5]["x"].flags.writeable

    run(test)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, SLAB_BYTES - 1, SLAB_BYTES, LARGE, 40 << 20])
@pytest.mark.parametrize("pool_bytes", [256 << 20, 0], ids=["pooled", "without"])
def test_items_of_all_sizes(nbytes: int, pool_bytes: int) -> None:
    """Without a pool, everything is larger than its share: each has memory of its own."""

    async def test() -> None:
        with linked(pool_bytes=pool_bytes) as (near, far):
            array = np.resize(np.arange(251, dtype=np.uint8), nbytes)
            for thing in (array, array.tobytes()):
                async with anyio.create_task_group() as group:
                    group.start_soon(near.flush)
                    put(near, thing)
                    (there,) = await got(far)
                    group.cancel_scope.cancel()
                assert type(there) is type(thing)
                assert bytes(there) == bytes(thing)

    run_on("uvloop", test)


def test_an_empty_list_crosses() -> None:
    async def test() -> None:
        with linked() as (near, far):
            put(near)
            assert await got(far) == []

    run_on("asyncio", test)


@pytest.mark.one_in(2, 1)
def test_a_sender_never_waits_and_what_the_socket_does_not_take_is_written_later(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            sent: list[Message] = [Credit(n, 0, 0) for n in range(20_000)]
            for message in sent:
                near.send(message)
            async with anyio.create_task_group() as group:
                group.start_soon(near.flush)
                assert await received(far, 20_000) == sent
                await near.drain()
                for message in sent:  # with the task waiting for something to do
                    near.send(message)
                group.start_soon(near.drain)
                assert await received(far, 20_000) == sent
                group.cancel_scope.cancel()

    run(test)


@pytest.mark.one_in(2, 1)
def test_drain_writes_without_a_flush_task(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            for n in range(20_000):
                near.send(Credit(n, 0, 0))
            async with anyio.create_task_group() as group:
                group.start_soon(received, far, 20_000)
                await near.drain()

    run(test)


def test_memory_that_will_be_used_again_is_told_of_when_it_comes_and_when_it_goes() -> None:
    told: list[Any] = []

    def mapped(address: int, size: int) -> Callable[[], object]:
        told.append(size)
        return lambda: told.append(-size)

    async def test() -> None:
        with linked(pool_bytes=8 * LARGE) as (near, far):
            far.on_mapped = mapped
            for size in (LARGE // 2, LARGE // 2, 9 * LARGE):  # the last is larger than a pool: used once
                put(near, np.zeros(size, np.uint8))
                assert await got(far)
            assert len(told) == 1
        gc.collect()
        assert told == [told[0], -told[0]]

    run_on("asyncio", test)


@pytest.mark.parametrize("nbytes", [LARGE // 2, 2 * LARGE])
def test_a_consumer_that_hoards_gets_private_copies_and_is_never_stuck(nbytes: int) -> None:
    async def test() -> None:
        with linked(pool_bytes=16 * nbytes) as (near, far):
            kept = []
            async with anyio.create_task_group() as group:
                group.start_soon(near.flush)
                for n in range(40):
                    put(near, np.full(nbytes // 2, n, np.uint8), np.full(nbytes // 2, n + 1, np.uint8))
                    kept.append(await got(far))
                group.cancel_scope.cancel()
            assert near._pool.nbytes <= 16 * nbytes
            assert [(pair[0][-1], pair[1][-1]) for pair in kept] == [(n, n + 1) for n in range(40)]
            for pair in kept:
                pair[0][:] = 99
            assert all(pair[1][0] == n + 1 for n, pair in enumerate(kept))
            kept.clear()
            held = near._pool.nbytes
            for n in range(40):
                put(near, np.full(nbytes, n, np.uint8))
                assert (await got(far))[0][0] == n
            assert near._pool.nbytes == held

    run_on("uvloop", test)


def test_a_consumer_that_lets_go_is_served_from_one_slab() -> None:
    async def test() -> None:
        with linked() as (near, far):
            for n in range(50):
                put(near, np.full(LARGE, n, np.uint8))
                assert (await got(far))[0][-1] == n
            assert LARGE < near._pool.nbytes < 2 * LARGE

    run_on("uvloop", test)


@pytest.mark.parametrize(("keep", "slabs"), [(False, (1, 9)), (True, (10, 0))], ids=["let go", "kept"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_slabs_are_counted_when_new_and_when_used_again(keep: bool, slabs: tuple[int, int], in_place: bool) -> None:
    async def main() -> None:
        with linked() as (left, right):
            kept: list[Any] = []
            counts: list[tuple[int, int]] = []
            for _ in range(10):
                memory = left.place.empty(1 << 20) if in_place and left.place is not None else bytearray(1 << 20)
                assert memory is not None
                packed = left.pack([np.frombuffer(memory, np.uint8)])
                del memory
                left.send(ItemsMessage(3, packed, b"states"))
                del packed
                (message,) = await received(right, 1)
                assert isinstance(message, ItemsMessage)
                counts.append(message.packed.slabs)
                kept += right.unpack(message.packed) if keep else []
                del message
            assert (sum(made for made, _ in counts), sum(again for _, again in counts)) == slabs

    anyio.run(main)


def test_items_that_were_never_unpacked_give_their_memory_back() -> None:
    async def test() -> None:
        with linked() as (near, far):
            for _ in range(50):
                put(near, np.zeros(LARGE, np.uint8))
                await received(far, 1)
            assert near._pool.nbytes < 2 * LARGE

    run_on("uvloop", test)


@pytest.mark.one_in(2, 1)
def test_views_outlive_the_link(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            put(near, np.full(LARGE, 7, np.uint8))
            put(near, np.full(50 * LARGE, 8, np.uint8))
            messages = await received(far, 2)
            one, two = (far.unpack(message.packed)[0] for message in messages if isinstance(message, ItemsMessage))
            near.close()
            assert await closed(far) == []
            far.close()
            assert (one[-1], two[-1]) == (7, 8)
            one[:] = 9

    run(test)


def test_what_was_changed_after_it_was_sent_arrives_as_it_was() -> None:
    async def test() -> None:
        with linked(pool_bytes=0) as (near, far):
            arrays = [np.zeros(5000, np.uint8) for _ in range(200)]  # more than the socket holds
            for array in arrays:
                put(near, array)
                array[:] = 1
            async with anyio.create_task_group() as group:
                group.start_soon(near.drain)
                for message in await received(far, 200):
                    assert isinstance(message, ItemsMessage)
                    assert not far.unpack(message.packed)[0].any()

    run_on("asyncio", test)


def test_local_classes_cross_both_ways() -> None:
    class Local:
        def __init__(self, x: Any) -> None:
            self.x = x

    async def test() -> None:
        with linked() as (near, far):
            for n in range(3):
                put(near, Local(n))
                (there,) = await got(far)
                put(far, there, Local(there))
                back, nested = await got(near)
                assert type(back) is type(nested) is type(nested.x) is Local
                assert back.x == n

    run_on("asyncio", test)


# Ends -----------------------------------------------------------------------------------------------------------------


def test_closing_wakes_waiting_tasks_on_both_sides(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            async with anyio.create_task_group() as group:
                for link in (near, far):
                    group.start_soon(closed, link)
                    group.start_soon(link.flush)
                await anyio.wait_all_tasks_blocked()
                near.close()
                far.send(PauseHost(1))
                near.send(PauseHost(1))
                await near.drain()
                near.close()

    run(test)


def test_a_link_may_be_closed_in_any_thread(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            async with anyio.create_task_group() as group:
                group.start_soon(closed, near)
                await anyio.wait_all_tasks_blocked()
                thread = threading.Thread(target=near.close)
                thread.start()
                await closed(far)
                thread.join()
            assert near._socket._socket.fileno() == -1

    run(test)


@pytest.mark.one_in(2, 1)
def test_a_sender_that_is_stuck_notices_that_the_other_end_is_gone(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            for n in range(20_000):
                near.send(Credit(n, 0, 0))
            async with anyio.create_task_group() as group:
                group.start_soon(near.flush)
                group.start_soon(near.drain)
                await anyio.wait_all_tasks_blocked()
                far.close()
            near.send(PauseHost(1))
            assert not near._queue.pieces

    run(test)


def test_what_was_sent_before_hanging_up_is_received(run: Run) -> None:
    async def test() -> None:
        with linked() as (near, far):
            put(near, np.zeros(LARGE))
            near.send(CloseWorker(1))
            far.send(PauseHost(1))  # never read: Linux tells the other end of a reset
            near.close()
            assert [type(message) for message in await closed(far)] == [ItemsMessage, CloseWorker]

    run(test)


@pytest.mark.long
def test_a_stream_cut_off_at_every_byte_gives_all_whole_messages_and_then_the_end() -> None:
    """As after a SIGKILL, which leaves in the socket whatever was written."""
    near, listening = socket.socketpair(socket.AF_UNIX)
    link = SocketLink(near)
    lengths = []
    for items in ([1, 2], None, ["a", np.arange(6)], [lambda: 1]):
        link.send(Credit(1, 2, 3)) if items is None else put(link, *items)
        lengths.append(len(listening.recv(1 << 16, socket.MSG_PEEK)))
    data = listening.recv(1 << 16)
    assert lengths[-1] == len(data)
    link.close()
    listening.close()

    async def test() -> None:
        for cut in range(len(data)):
            writer, reader = socket.socketpair(socket.AF_UNIX)
            writer.sendall(data[:cut])
            writer.close()
            far = SocketLink(reader)
            assert len(await closed(far)) == sum(length <= cut for length in lengths)
            far.close()

    run_on("uvloop", test)


@pytest.mark.parametrize("kept", [0, 1, 20, 39, 40, 100, -1])
def test_a_frame_with_a_descriptor_cut_off_leaves_no_descriptor(kept: int) -> None:
    writer, listening = socket.socketpair(socket.AF_UNIX)
    link = SocketLink(writer)
    put(link, np.zeros(LARGE))
    data, (fd,), _, _ = socket.recv_fds(listening, 1 << 16, 4)
    relay, reader = socket.socketpair(socket.AF_UNIX)
    if data[:kept]:
        socket.send_fds(relay, [data[:kept]], [fd])
    os.close(fd)
    for sock in (relay, listening):
        sock.close()
    link.close()
    far = SocketLink(reader)

    async def test() -> None:
        assert await closed(far) == []

    run_on("asyncio", test)
    far.close()  # the leak check of all tests does the rest


CHILD = """
import signal, socket, os, sys
import anyio, numpy as np
from streamline.backends.ipc.messages import ItemsMessage
from streamline.backends.ipc.socket_link import SocketLink
link = SocketLink(socket.socket(fileno=int(sys.argv[1])))
for n in range(20):
    link.send(ItemsMessage(n, link.pack([n, np.full(1 << 20, n, np.uint8)]), b""))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_what_it_sent_and_nothing_else() -> None:
    async def test() -> None:
        here, there = socket.socketpair(socket.AF_UNIX)
        link = SocketLink(here)
        with there:
            child = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs
                [sys.executable, "-c", CHILD, str(there.fileno())],
                pass_fds=[there.fileno()],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            )
        arrays = [link.unpack(message.packed) for message in await closed(link) if isinstance(message, ItemsMessage)]
        link.close()
        assert child.wait() == -9
        assert [(n, array[0], array[-1]) for n, array in arrays] == [(n, n, n) for n in range(20)]
        for _, array in arrays:
            array[:] = 0

    run_on("uvloop", test)


# Leaks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_hundreds_of_links_leave_nothing() -> None:
    async def test() -> None:
        for n in range(300):
            with linked(pool_bytes=LARGE) as (near, far):
                put(near, np.zeros(2 * SLAB_BYTES, np.uint8))
                put(far, np.zeros(LARGE, np.uint8))
                if n % 3:
                    await got(far)
                if n % 2:
                    far.close()
                    await closed(near)

    before = len(os.listdir("/dev/fd"))  # noqa: PTH208
    run_on("asyncio", test)
    gc.collect()
    assert len(os.listdir("/dev/fd")) <= before + 1  # noqa: PTH208


def test_a_descriptor_that_is_lost_is_this_ends_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with as many files open as it may is given none: the kernel says that something is missing."""
    monkeypatch.setattr(shared_socket, "_ANCILLARY", 0)

    async def test() -> None:
        with linked() as (near, far):
            near.send(PauseHost(1))
            assert await received(far, 1) == [PauseHost(1)]
            put(near, np.zeros(LARGE))
            with pytest.raises(HostError, match="as many files open as it may"):
                await far.receive()
            with pytest.raises(LinkClosed):
                await far.receive()

    run_on("asyncio", test)


def _out_of_memory(*_: object) -> None:
    raise MemoryError


def _no_mapping(*_: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("what", "fails", "nbytes"),
    [("socket_link.SlabLease", _no_mapping, LARGE), ("frames.Frames.spaces", _out_of_memory, 100)],
    ids=["no mapping", "no bytes"],
)
def test_where_no_memory_is_left_this_end_says_so(
    what: str, fails: Callable[..., None], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that the other one is gone: it would be replaced in vain, and what it does blamed."""
    monkeypatch.setattr(f"streamline.backends.ipc.{what}", fails)

    async def test() -> None:
        with linked() as (near, far):
            put(near, np.zeros(nbytes))
            with pytest.raises(HostError, match="no memory left to take in what its workers send"):
                await far.receive()

    run_on("asyncio", test)


def test_push_and_send_threadsafe_write_from_another_thread_while_the_loop_blocks() -> None:
    """Nothing here runs an event loop at the sending end: it is held by a function."""
    ours, theirs = socket.socketpair()
    near, far = SocketLink(ours), SocketLink(theirs)
    sent = 0
    while not far._queue.pieces:
        far.send(PauseHost(sent))
        sent += 1
    thread = threading.Thread(target=far.send_threadsafe, args=(PauseHost(sent),))
    thread.start()
    thread.join()

    async def receive() -> None:
        found: list[int] = []
        while len(found) <= sent:
            with anyio.move_on_after(0.05) as patience:
                found += [message.number for message in await near.receive() if isinstance(message, PauseHost)]
            if patience.cancelled_caught:
                pushing = threading.Thread(target=far.push)
                pushing.start()
                pushing.join()
        assert found == list(range(sent + 1))

    anyio.run(receive)
    near.close()
    far.close()
