"""The link to a host on another machine: a TCP connection, over which all of an item travels.

Buffers of items are written from where they lie. What the socket doesn't take waits as it is, if nothing but the
message refers to it, as to most arrays that user code makes; else it is copied: once `send` has returned, the owner of
an item may change it.
"""

from __future__ import annotations

import mmap
import socket
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

import anyio
import anyio.to_thread
import numpy as np

from streamline.backends.hosts.shared_runs import serve_link
from streamline.backends.ipc.frames import LARGE, Frames, aligned, head, padded
from streamline.backends.ipc.messages import Message
from streamline.backends.ipc.pickling import PickledItems
from streamline.backends.ipc.shared_memory import ALIGN
from streamline.backends.ipc.shared_socket import Gone
from streamline.backends.ipc.socket_link import AT_ONCE, SharedItems, SocketLink
from streamline.backends.remote.needs import load_here
from streamline.core.dial import Introduction
from streamline.core.place import Bytes
from streamline.core.tls import TlsSocket

LOST_AFTER_S = 10.0
"""Seconds of silence after which a machine counts as lost, if nothing else is said."""

PROBES = 3
"""Keep-alive probes before a silent connection counts as lost."""


def watch_peer(sock: socket.socket, lost_after_s: float, *, busy: bool = False) -> None:
    """Let a TCP socket fail `lost_after_s` seconds after the other machine stopped answering.

    Args:
      busy: also while something is being sent. Not for links: the kernel takes a consumer that reads nothing for so
        long, a trainer in an evaluation, for a lost one.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = max(1, round(lost_after_s / (PROBES + 1)))
    options = {"TCP_KEEPIDLE": pause_s, "TCP_KEEPINTVL": pause_s, "TCP_KEEPCNT": PROBES}
    if busy:
        options["TCP_USER_TIMEOUT"] = round(1000 * lost_after_s)
    for name, value in options.items():
        if hasattr(socket, name):  # macOS has other names
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


BUFFERS_BYTES = 64 << 20
"""Bytes of receive buffers that a link keeps: what may be in flight."""


class ReceiveBuffers:
    """Memory for frames that arrive, used again once the last view of it is gone.

    The allocator gives large blocks back to the system; to fault their pages in again took half the CPU time of
    receiving arrays of 1 MiB (`python -m bench remote`). A block owns its memory, so that each view of it, through
    whatever else, refers to the block: NumPy lets a view of a view refer to the owner, and to nothing between. A
    loan takes 2.5 µs; 3.8 with an object of its own for each, and a weak reference to that.
    """

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []
        self._held = 0

    def take(self, nbytes: int) -> memoryview:
        """Return at least so many bytes at a cache line, uninitialised."""
        whole, blocks = nbytes + ALIGN, self._blocks
        for at in range(len(blocks) - 1, -1, -1):  # the one used last may be in the cache still
            if whole <= blocks[at].nbytes <= 2 * whole and _references(blocks, at) == UNUSED:
                block = blocks.pop(at)
                break
        else:
            block = np.empty(-(-whole // mmap.PAGESIZE) * mmap.PAGESIZE, np.uint8)
            self._held += block.nbytes
            while self._held > BUFFERS_BYTES and blocks:
                self._held -= blocks.pop(0).nbytes
        blocks.append(block)
        return aligned(block)


def _references(blocks: Sequence[object], at: int) -> int:
    return sys.getrefcount(blocks[at])


UNUSED = min(_references([object()], 0) for _ in range(64))
"""References to an object that only a list has; versions of Python count them differently, and perhaps once they have
seen the function some times: the least, so that a block with a view is never taken for one without."""


WAKE_BYTES = 1 << 19
"""Bytes of a large frame for which the event loop is woken, unless its end comes before.

Woken for each packet of 64 KiB, as they come from a sender that is no faster than the receiver, it took 1.6 times the
CPU time for 1 MiB: 14 wake-ups of 25 µs each instead of 2. What comes in larger pieces is less often in the cache when
it is copied.
"""


class NetworkLink(SocketLink):
    """One end of a link between two machines. The ends trust each other; see `SocketLink`."""

    one_machine = False

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, pool_bytes=0)
        self.place = None  # no memory is shared
        self._frames = Frames(ReceiveBuffers().take)
        # TLS may have a part of a record already; other kernels may wait for more bytes than they have room for
        self._woken_late = sys.platform == "linux" and not isinstance(sock, TlsSocket)

    def _messages(self) -> list[Message]:
        messages = super()._messages()
        if self._woken_late and self._read_closed is None:
            self._socket.readable_from(min(max(1, self._frames.missing), WAKE_BYTES))
        return messages

    def _send_items(self, message: bytes, count: int, sizes: list[int], pickled: PickledItems) -> None:
        self._send_pieces([memoryview(head(message, count, sizes)), *padded(*pickled)])

    def _send_shared(self, message: bytes, shared: SharedItems) -> None:
        self._send_pieces([memoryview(head(message, shared.count, shared.sizes)), shared.memory])

    def _send_pieces(self, pieces: Sequence[memoryview]) -> None:
        with self._sending:
            rest = pieces if self._unsent else self._write_pieces(pieces)
            if rest:
                self._unsent.extend((piece, None) for piece in _lasting(rest))
                self._wake_flush()

    def _write_pieces(self, pieces: Sequence[memoryview]) -> Sequence[memoryview]:
        """Write what the socket takes; return what is left."""
        at = 0
        try:
            with self._socket:
                while at < len(pieces):
                    nbytes = self._socket.write(pieces[at : at + AT_ONCE])
                    while at < len(pieces) and nbytes >= len(pieces[at]):
                        nbytes -= len(pieces[at])
                        at += 1
                    if nbytes:
                        pieces = [pieces[at][nbytes:], *pieces[at + 1 :]]
                        at = 0
        except BlockingIOError:
            return pieces[at:]
        except (Gone, OSError):
            self._stop_sending()
            return ()
        return ()


def _lasting(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield pieces of the same bytes, that nothing changes until they are sent."""
    for copied, some in groupby(pieces, lambda piece: len(piece) < LARGE or _shared(piece)):
        if copied:
            yield memoryview(b"".join(some))
        else:
            yield from some


def _shared(piece: memoryview) -> bool:
    """Whether something else may change the memory of a piece."""
    owner: object = piece.obj
    if type(owner) is bytes:
        return False
    return type(owner) is not np.ndarray or owner.base is not None or _owner_references(piece) > ALONE


def _owner_references(piece: memoryview) -> int:
    owner: object = piece.obj
    return sys.getrefcount(owner)


ALONE = _owner_references(np.empty(1, np.uint8).data) + 1
"""References to an array that a piece alone holds, and `_shared`; versions of Python count them differently."""


async def serve_network(sock: socket.socket, payload: int, introduction: Introduction | None = None) -> None:
    """Serve a run in a host process on another machine than the consumer's.

    Args:
      introduction: of a socket that isn't connected yet; None: of one whose handshake is done.
    """
    if introduction is not None:
        sock = await anyio.to_thread.run_sync(introduction.dial, sock)
    await serve_link(NetworkLink(sock), payload, load_here)
