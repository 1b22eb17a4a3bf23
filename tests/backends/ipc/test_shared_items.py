"""Items that go to several processes at once: written once, and each receiver's own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from streamline.backends.ipc import socket_link
from streamline.backends.ipc.messages import ItemsMessage
from streamline.backends.ipc.pickling import Pickling
from streamline.backends.ipc.socket_link import SHARED_BYTES, SharedItems, SocketLink, outgoing
from streamline.backends.remote.network_link import NetworkLink


@contextmanager
def links(count: int, kind: type[SocketLink] = SocketLink) -> Iterator[tuple[list[SocketLink], list[SocketLink]]]:
    """Yield the near and the far ends of some links."""
    with ExitStack() as opened:
        pairs = [[kind(sock) for sock in socket.socketpair()] for _ in range(count)]
        for pair in pairs:
            for end in pair:
                opened.callback(end.close)
        yield [near for near, _ in pairs], [far for _, far in pairs]


def packed(items: list[Any], *, one_machine: bool = True) -> SharedItems:
    pickling = Pickling()
    made = outgoing(pickling, items)
    return SharedItems(made, pickling.fresh(), one_machine=one_machine)


def sent_to_all(
    items: list[Any], kind: type[SocketLink] = SocketLink, *, count: int = 2, one_machine: bool = True
) -> list[list[Any]]:
    """Return what each of some receivers gets."""

    async def send() -> list[list[Any]]:
        with links(count, kind) as (near, far):
            shared = packed(items, one_machine=one_machine)
            got = []
            for number, (sender, receiver) in enumerate(zip(near, far, strict=True)):
                async with anyio.create_task_group() as group:
                    sender.send(ItemsMessage(number, shared, b"states"))
                    group.start_soon(sender.drain)
                    ((_, found, states),) = await receiver.receive()
                    assert states == b"states"
                    assert found.nbytes == shared.nbytes
                    got.append(receiver.unpack(found))
                    del found
            return got

    return anyio.run(send)


def mappings() -> list[str]:
    """Return the mappings of memory without a name in this process: how they may be used, and whose memory it is."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:streamline" in line]
    return sorted(f"{rights} {inode}" for _, rights, _, _, inode, *_ in lines)


def test_receivers_of_one_machine_map_the_same_memory_each_for_itself() -> None:
    before = mappings()
    array = np.arange(SHARED_BYTES, dtype=np.uint8)
    (one,), (other,) = sent_to_all([array])
    new = [mapping for mapping in mappings() if mapping not in before]
    assert len(new) == 2
    assert new[0] == new[1]
    assert new[0].startswith("rw-p")
    assert one.flags.writeable
    one[:] = 0
    assert (other == array).all()
    other[:] = 1
    assert not one.any()
    del one, other
    assert mappings() == before


def test_small_lists_go_through_the_sockets() -> None:
    before = mappings()
    one, other = sent_to_all([{"number": 1, "few": np.arange(3000)}])
    assert mappings() == before
    one[0]["few"][:] = 0
    assert (other[0]["few"] == np.arange(3000)).all()


def test_without_memory_to_share_lists_go_through_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket_link, "Slab", none_left)
    array = np.arange(SHARED_BYTES, dtype=np.uint8)
    for (got,) in sent_to_all([array]):
        assert (got == array).all()


def test_over_a_network_each_gets_all_bytes() -> None:
    array = np.arange(3 * SHARED_BYTES, dtype=np.uint8)
    (one,), (other,) = sent_to_all([array], NetworkLink, one_machine=False)
    one[:] = 0
    assert (other == array).all()


def test_classes_of_the_sender_alone_are_defined_at_each_receiver() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Local:\n    def __init__(self, number): self.number = number", namespace)
    for (got,) in sent_to_all([namespace["Local"](7)], count=3):
        assert got.number == 7
