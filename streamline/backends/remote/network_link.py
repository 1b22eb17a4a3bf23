"""The link to a host on another machine: a TCP connection, over which all of an item travels.

Buffers of items are written from where they lie. What the socket doesn't take is copied, unless it is `bytes`: an item
belongs to user code, which may change it once `send` has returned.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Any

import anyio
import anyio.to_thread

from streamline.backends.hosts.host_server import serve_link
from streamline.backends.ipc.frames import LARGE, Frames, head, padded
from streamline.backends.ipc.messages import Message
from streamline.backends.ipc.pickling import PickledItems, load
from streamline.backends.ipc.socket_link import SharedItems, SocketLink
from streamline.backends.network.connections import Introduction
from streamline.backends.network.tls import TlsSocket
from streamline.core.lazy_numpy import np
from streamline.core.place import Bytes, Memory
from streamline.errors import HostError
from streamline.io.storage.base import FoundObject

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
    receiving arrays of 1 MiB (`python -m bench remote`).
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[Bytes, weakref.ref[Bytes]]] = []
        self._held = 0

    def take(self, nbytes: int) -> Bytes:
        """Return at least so many bytes, uninitialised."""
        for at in reversed(range(len(self._blocks))):  # the one used last may be in the cache still
            block, lease = self._blocks[at]
            if nbytes <= block.nbytes <= 2 * nbytes and lease() is None:
                del self._blocks[at]
                return self._lend(block)
        block = np.empty(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, np.uint8)
        self._held += block.nbytes
        while self._held > BUFFERS_BYTES and self._blocks:
            self._held -= self._blocks.pop(0)[0].nbytes
        return self._lend(block)

    def _lend(self, block: Bytes) -> Bytes:
        lease = Memory(block.ctypes.data, block.nbytes, block).as_array()
        self._blocks.append((block, weakref.ref(lease)))
        return lease


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
        self._queue.post_pieces([memoryview(head(message, count, sizes)), *padded(*pickled)], _lasting)

    def _send_shared(self, message: bytes, shared: SharedItems) -> None:
        self._queue.post_pieces([memoryview(head(message, shared.count, shared.sizes)), shared.memory], _lasting)


def _lasting(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield pieces of the same bytes, that nothing changes until they are sent."""
    for small, some in groupby(pieces, lambda piece: len(piece) < LARGE):
        if small:
            yield memoryview(b"".join(some))
        else:
            yield from (piece if type(piece.obj) is bytes else memoryview(bytes(piece)) for piece in some)


async def serve_network(sock: socket.socket, payload: int, introduction: Introduction | None = None) -> None:
    """Serve a run in a host process on another machine than the consumer's.

    Args:
      introduction: of a socket that isn't connected yet; None: of one whose handshake is done.
    """
    await serve_link(await network_link(sock, introduction), payload, load_here)


async def network_link(sock: socket.socket, introduction: Introduction | None) -> NetworkLink:
    """Return a host's end of a link; as in `serve_network`."""
    if introduction is not None:
        sock = await anyio.to_thread.run_sync(introduction.dial, sock)
    return NetworkLink(sock)


# What a run needs of this machine -------------------------------------------------------------------------------------
# Modules to import, and files under the paths that the trainer listed: looked for before the first item, so that a
# machine which lacks something is named at the start, and not hours later.

MOST_FILES = 100
"""Files that are looked for at the most, one in each folder first: a look takes a millisecond on a file server."""


def load_here(payload: int) -> Any:
    """Return what `pickling.load` returns.

    Raises:
      HostError: this machine lacks a module or a file that the run needs, or has another version of it.
    """
    try:
        spec = load(payload)
    except (ImportError, AttributeError) as error:  # the latter: an older module, without the function
        raise HostError(
            _unlike(f"can't load the pipeline's functions: {type(error).__name__}: {error}", CODE)
        ) from error
    except FileNotFoundError as error:  # of a memory map
        raise HostError(_unlike(f"has no file {error.filename}, which the pipeline maps", FILES)) from error
    for found in _looked_for(spec.plan.source.local_files):
        if (lack := _lack(found)) is not None:
            raise HostError(_unlike(lack, FILES))
    return spec


CODE = (
    "Install there what is installed here, in the same versions; or put the module's folder on a file system that both "
    "machines have (of this process's sys.path, the folders that are there are used); or send it by value: "
    "`cloudpickle.register_pickle_by_value(module)` before the pipeline is opened; or, on a Ray cluster, let Ray bring "
    "it: ray.init(runtime_env={'py_modules': [...]})"
)

FILES = (
    "Workers read files under the same paths as this process: put them on a file system that all machines have, or "
    "into an object store"
)


def _unlike(lack: str, advice: str) -> str:
    return f"the machine {socket.gethostname()} {lack}. {advice}"


def _looked_for(files: Iterable[FoundObject]) -> Iterator[FoundObject]:
    """Yield the first file of each folder, then others, up to `MOST_FILES`."""
    firsts: dict[PurePath, FoundObject] = {}
    others: list[FoundObject] = []
    for found in files:
        if firsts.setdefault(PurePath(found.path).parent, found) is not found and len(others) < MOST_FILES:
            others.append(found)
    yield from [*firsts.values(), *others][:MOST_FILES]


def _lack(found: FoundObject) -> str | None:
    """Return how this machine's file is unlike the listed one; one that has grown may be."""
    try:
        size = os.stat(found.path).st_size  # noqa: PTH116 - a string, as it is opened
    except FileNotFoundError:
        return f"has no file {found.path}"
    except OSError as error:
        return f"can't read {found.path}: {error.strerror}"
    if found.size is not None and size < found.size:
        return f"has another file {found.path}: it has {size:,} bytes there, and {found.size:,} here"
    return None
