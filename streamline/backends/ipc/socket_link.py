"""The link to a host process: a socket for messages and small items, shared memory for large ones.

The socket is read by a callback of the asyncio loop, registered once: that is not set up for each message, and what was
read is there when the reader's task wakes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, ClassVar, NamedTuple

import anyio

from streamline.backends.ipc.frames import Frame, Frames, head, lay_out, offsets
from streamline.backends.ipc.link import Link, LinkClosed
from streamline.backends.ipc.messages import Message, PackedItems
from streamline.backends.ipc.pickling import PickledItems, Pickling
from streamline.backends.ipc.shared_memory import (
    HEAD,
    ONCE,
    SHARED,
    SLAB_BYTES,
    Descriptor,
    Slab,
    SlabLease,
    SlabPart,
    SlabPool,
)
from streamline.backends.ipc.shared_socket import Gone, SharedSocket
from streamline.core.threads import threadsafe_call
from streamline.errors import HostError


class ReadWatcher:
    """Calls `read`, which must read all that is there and not raise, when the socket is readable; from `wait` on."""

    def __init__(self, sock: SharedSocket, read: Callable[[], None]) -> None:
        self._socket = sock
        self._read = read
        self._registered = ExitStack()  # the socket's use, while registered
        self._loop: asyncio.AbstractEventLoop | None = None  # where it is registered
        self._thread = 0
        self._waiting: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until something was read; raises `Gone` or `OSError` if the socket is closed.

        Cancellation: nothing is read until the next call.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._begin(loop)
        self._waiting = loop.create_future()
        try:
            await self._waiting
        except BaseException:
            self.end()
            raise
        finally:
            self._waiting = None

    def end(self) -> None:
        """Unregister, and wake the waiting task; only in the thread of the loop, or once that is closed."""
        loop = self._loop
        if loop is not None and (self._thread == threading.get_ident() or loop.is_closed()):
            self._loop = None
            self._registered.close()
            self._wake()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        with ExitStack() as registered:
            sock = registered.enter_context(self._socket)
            loop.add_reader(sock, self._readable)
            registered.callback(_forget, loop, sock)
            self._registered = registered.pop_all()
        self._loop, self._thread = loop, threading.get_ident()

    def _readable(self) -> None:
        self._read()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _forget(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.remove_reader(sock)


POOL_BYTES = 256 << 20
"""Bytes of shared memory for what one end sends; only what is in flight at once is allocated."""

NO_ROOM = (
    "this process has no memory left to take in what its workers send: keep fewer items, or look at its limits "
    "(`ulimit -v`, the container's, vm.max_map_count)"
)

AT_ONCE = 64
"""Pieces per call of sendmsg; kernels allow 1,024."""


@dataclass(slots=True)
class Outgoing:
    """Items packed by this end. Their memory is copied when sent, and must not change until then.

    Attributes:
      parts: buffers that may be given as they are, by their place among `pickled.buffers`.
    """

    count: int
    nbytes: int
    sizes: list[int]
    pickled: PickledItems
    parts: dict[int, SlabPart]

    @property
    def copied_bytes(self) -> int:
        return self.nbytes

    @property
    def slabs(self) -> tuple[int, int]:
        return 0, 0


def outgoing(pickling: Pickling, items: Sequence[Any]) -> Outgoing:
    """Return items packed, none of them given; raise `PackingError` if one can't be."""
    pickled = pickling.dumps(items)
    sizes = [sum(map(len, pickled.pieces)), *map(len, pickled.buffers)]
    return Outgoing(len(items), sum(sizes), sizes, pickled, {})


@dataclass(slots=True)
class ReceivedItems:
    """Items packed by the other end. Shared memory is held while this object or an unpacked item lives.

    Attributes:
      parts: the pickle, and the buffers beside it.
      copied_bytes: that the other end copied to send them.
      slabs: that they lie in: how many are new, and how many are used again.
    """

    count: int
    nbytes: int
    parts: Sequence[memoryview]
    copied_bytes: int
    slabs: tuple[int, int] = (0, 0)


SHARED_BYTES = 1 << 17
"""Bytes of a list from which on it goes to several processes in one piece of memory: to each of them, a mapping costs
less than two copies."""


class SharedItems:
    """A list of items that is packed and written once, and sent over several links.

    From `SHARED_BYTES` on, the processes of one machine get the same memory: each maps it for itself, and what one of
    them writes there, no other sees (copy on write).

    Args:
      packed: by the link that made them, not sent yet.
      one_machine: whether all links lead to processes of this machine.

    Attributes:
      classes: definitions of classes, sent before them.
      memory: their parts as a frame has them.
    """

    def __init__(self, packed: Outgoing, classes: Mapping[str, bytes], *, one_machine: bool) -> None:
        self.count = packed.count
        self.nbytes = packed.nbytes
        self.sizes = packed.sizes
        self.classes = classes
        self.slab: Slab | None = None
        whole = offsets(packed.sizes)[-1]
        if one_machine and whole >= SHARED_BYTES:
            with suppress(OSError):  # none is left: through the sockets
                self.slab = Slab(SHARED, whole + HEAD)
        self.memory = memoryview(bytearray(whole)) if self.slab is None else self.slab.memory[:whole]
        lay_out(*packed.pickled, self.memory)

    @property
    def copied_bytes(self) -> int:
        return self.nbytes

    @property
    def slabs(self) -> tuple[int, int]:
        return int(self.slab is not None), 0


class GivenPart(NamedTuple):
    """A buffer that isn't copied: its place among the buffers, and where in which slab it lies."""

    at: int
    slab: int
    start: int
    nbytes: int


class _Between(NamedTuple):
    """Between messages: definitions of classes that later items refer to, and slabs that won't be reused.

    A slab that is made comes with such a message.
    """

    classes: Mapping[str, bytes]
    dropped: Sequence[int]


class SendQueue:
    """What one end of a link writes: as much as the socket takes at once, in any thread; `flush` writes the rest.

    Args:
      on_over: called when the other end reads no more.

    Attributes:
      pieces: to be written, each with the descriptor that goes with its first byte.
    """

    def __init__(self, sock: SharedSocket, on_over: Callable[[], object]) -> None:
        self.pieces: deque[tuple[memoryview, Descriptor | None]] = deque()
        self._socket = sock
        self._on_over = on_over
        self._over = False
        self._lock = threading.RLock()  # seldom contended
        self._loop_thread: tuple[int, Callable[[Callable[[], None]], object]] | None = None  # its id, what calls in it
        self._wrote: anyio.Event | None = None  # while a task waits at the socket, to write more
        self._queued: anyio.Event | None = None  # while a task waits for something to write

    @property
    def over(self) -> bool:
        """Whether nothing more is written."""
        return self._over or self._socket.closed

    def post(self, frame: bytes, descriptor: Descriptor | None = None) -> None:
        """Write a frame, and queue what the socket doesn't take. A descriptor goes with the first byte."""
        with self._lock:
            self.pieces.append((memoryview(frame), descriptor))
            if len(self.pieces) == 1:
                self.push()
            if self.pieces:
                self._wake_flush()

    def post_pieces(
        self, pieces: Sequence[memoryview], keep: Callable[[Sequence[memoryview]], Iterable[memoryview]]
    ) -> None:
        """Likewise, of a frame whose pieces may change when this has returned: `keep` copies what is queued."""
        with self._lock:
            if rest := pieces if self.pieces else self._write_pieces(pieces):
                self.pieces.extend((piece, None) for piece in keep(rest))
                self._wake_flush()

    def push(self) -> None:
        """Write what the socket takes."""
        with self._lock:
            try:
                with self._socket:
                    while self.pieces:
                        self._drop_written(self._write_first())
            except BlockingIOError:
                return
            except (Gone, OSError):
                self.stop()

    async def flush(self) -> None:
        """Write what is queued, until the link closes."""
        self._loop_thread = threading.get_ident(), threadsafe_call()
        while not self.over:
            with self._lock:  # another thread may be sending
                self._queued = queued = None if self.pieces else anyio.Event()
            if queued is None:
                await self._write_more()
            else:
                await queued.wait()

    async def drain(self) -> None:
        """Wait until all is written, or the other end is gone."""
        while self.pieces and not self.over:
            await self._write_more()

    def stop(self) -> None:
        """Drop what is queued, and write nothing more."""
        with self._lock:
            self._over = True
            for _, descriptor in self.pieces:
                if descriptor is not None:
                    descriptor.close()
            self.pieces.clear()
            self._on_over()
            self._wake_flush()

    async def _write_more(self) -> None:
        """Wait until the socket takes more, and write it, or until another task has."""
        if self._wrote is not None:
            await self._wrote.wait()
            return
        self._wrote = anyio.Event()
        try:
            with self._socket as sock:
                await anyio.wait_writable(sock)
            self.push()
        except (Gone, OSError, anyio.ClosedResourceError):
            self.stop()
        finally:
            self._wrote.set()
            self._wrote = None

    def _wake_flush(self) -> None:
        """Wake the task that waits for something to write."""
        queued, self._queued = self._queued, None
        if queued is None:
            return
        if self._loop_thread is None or self._loop_thread[0] == threading.get_ident():
            queued.set()
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop_thread[1](queued.set)

    def _write_first(self) -> int:
        """Write the first pieces; those with a descriptor alone."""
        first, descriptor = self.pieces[0]
        if descriptor is not None and descriptor.fd is not None:
            return self._socket.write([first], descriptor.fd)
        if len(self.pieces) == 1:
            return self._socket.write([first])
        bare = takewhile(lambda piece: piece[1] is None, islice(self.pieces, AT_ONCE))
        return self._socket.write([piece for piece, _ in bare])

    def _drop_written(self, nbytes: int) -> None:
        while self.pieces:
            piece, descriptor = self.pieces[0]
            if nbytes and descriptor is not None:
                descriptor.close()
            if nbytes < len(piece):
                self.pieces[0] = piece[nbytes:], None if nbytes else descriptor
                return
            nbytes -= len(piece)
            self.pieces.popleft()

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
            self.stop()
            return ()
        return ()


class SocketLink(Link):
    """One end of a link between two processes, over a connected stream socket of the AF_UNIX family.

    `send` writes what the socket takes, and queues the rest for the task that runs `flush`. The ends trust each other;
    either may die at any time.

    Args:
      sock: owned by the link.
      pool_bytes: of reused shared memory for what this end sends; see `SlabPool`. Beyond it, items go through the
        socket.
    """

    copies: ClassVar[bool] = True

    def __init__(self, sock: socket.socket, *, pool_bytes: int = POOL_BYTES) -> None:
        self._socket = SharedSocket(sock, self._stop)
        self._pickling = Pickling()
        self.place = self._pool = SlabPool(pool_bytes, self._announce)
        self._queue = SendQueue(self._socket, self._pool.close)
        self._read_closed: str | None = None  # it will say no more, and why
        self._reading = ReadWatcher(self._socket, self._read)
        self._arrived: list[Message] = []
        self._read_error: BaseException | None = None
        self._frames = Frames()
        self._leases: dict[int, SlabLease] = {}

    def __repr__(self) -> str:
        state = "closed" if self._socket.closed else f"{len(self._queue.pieces)} unsent"
        return f"<SocketLink {state}, {self._pool.nbytes} bytes shared>"

    # Items

    def pack(self, items: Sequence[Any]) -> PackedItems:
        packed = outgoing(self._pickling, items)
        buffers = packed.pickled.buffers
        for at, buffer in enumerate(buffers if self._pool.lends else ()):
            if (part := self._pool.claim(buffer)) is not None:
                packed.parts[at] = part
                buffers[at] = part.memory  # a view of the slab, not of the item
        return packed

    def unpack(self, packed: PackedItems) -> list[Any]:
        assert isinstance(packed, ReceivedItems)
        items: list[Any] = pickle.loads(packed.parts[0], buffers=packed.parts[1:])
        return items

    # Sending

    def send(self, message: Message) -> None:
        if self._queue.over:
            return
        packed = getattr(message, "packed", None)
        if packed is None:
            self._queue.post(head(pickle.dumps(message, 5)))
            return
        rest: Any = message
        if isinstance(packed, SharedItems):
            self._define(packed.classes)
            self._send_shared(pickle.dumps(rest._replace(packed=None), 5), packed)
            return
        assert isinstance(packed, Outgoing)
        self._define(self._pickling.fresh())
        given = [
            GivenPart(at, part.slab.number, part.start, part.nbytes) for at, part in packed.parts.items() if part.give()
        ]
        sizes, (pieces, buffers) = packed.sizes, packed.pickled
        if given:
            sizes, buffers = list(sizes), list(buffers)
            for part in reversed(given):
                del sizes[1 + part.at], buffers[part.at]
        message_bytes = pickle.dumps(rest._replace(packed=given or None), 5)
        self._send_items(message_bytes, packed.count, sizes, PickledItems(pieces, buffers))

    def _define(self, classes: Mapping[str, bytes]) -> None:
        """Send definitions of classes that what follows refers to."""
        if classes:
            self._queue.post(head(pickle.dumps(_Between(classes, ()), 5)))

    def _send_shared(self, message: bytes, shared: SharedItems) -> None:
        slab = shared.slab
        if slab is None:
            self._queue.post(head(message, shared.count, shared.sizes) + bytes(shared.memory))
        else:
            assert slab.descriptor.fd is not None  # each link sends one of its own
            frame = head(message, shared.count, shared.sizes, SHARED, slab.size, 1)
            self._queue.post(frame, Descriptor(os.dup(slab.descriptor.fd)))

    def _send_items(self, message: bytes, count: int, sizes: list[int], pickled: PickledItems) -> None:
        whole = offsets(sizes)[-1]
        slab = self._pool.take(whole) if whole >= SLAB_BYTES else None
        if slab is None:
            inline = bytearray(whole)
            lay_out(*pickled, memoryview(inline))
            self._queue.post(head(message, count, sizes) + inline)
            return
        if dropped := self._pool.take_dropped():
            self._queue.post(head(pickle.dumps(_Between({}, dropped), 5)))
        lay_out(*pickled, slab.memory)
        new = slab.descriptor if slab.number == ONCE else None  # others are announced
        self._queue.post(head(message, count, sizes, slab.number, slab.size, new is not None), new)

    def _announce(self, slab: Slab) -> None:
        """Send a new slab's descriptor; from any thread."""
        if self._queue.over:
            slab.descriptor.close()
        else:
            between = _Between({}, self._pool.take_dropped())
            self._queue.post(head(pickle.dumps(between, 5), 0, (), slab.number, slab.size, 1), slab.descriptor)

    def send_threadsafe(self, message: Message) -> None:
        if not self._queue.over:
            self._queue.post(head(pickle.dumps(message, 5)))

    def push(self) -> None:
        if self._queue.pieces:
            self._queue.push()

    async def flush(self) -> None:
        await self._queue.flush()

    async def drain(self) -> None:
        await self._queue.drain()

    # Receiving

    def unread(self, messages: Sequence[Message]) -> None:
        """Let the next `receive` return messages that the last one has returned."""
        self._arrived[:0] = messages

    async def receive(self) -> Sequence[Message]:
        while not self._arrived and self._read_closed is None:
            try:
                await self._reading.wait()
            except (Gone, OSError) as error:
                self._read_closed = str(error) or "this end was closed"
        if self._read_error is not None:
            read_error, self._read_error = self._read_error, None
            raise read_error
        if self._arrived:
            messages, self._arrived = self._arrived, []
            return messages
        self._stop_receiving()
        raise LinkClosed(self._read_closed)

    def _read(self) -> None:
        """Read the messages that are there; called by the event loop."""
        try:
            with self._socket:
                self._arrived += self._messages()
        except Gone:
            self._read_closed = self._read_closed or "this end was closed"
        except MemoryError as error:
            self._read_error, self._read_closed = HostError(NO_ROOM), "what came can't be read"
            self._read_error.__cause__ = error
        except BaseException as error:  # raised by `receive`
            self._read_error, self._read_closed = error, "what came can't be read"
        if self._read_closed is not None:
            self._reading.end()

    def _messages(self) -> list[Message]:
        """Return all messages that are there; all, since libuv reports a closed socket only once."""
        messages: list[Message] = []
        try:
            while True:
                nbytes = self._socket.read(self._frames.spaces())
                if not nbytes:
                    self._read_closed = "the other end hung up"
                    break
                for frame in self._frames.take(nbytes):
                    self._take(frame, messages)
        except BlockingIOError:
            return messages  # that was all
        except OSError as error:
            self._read_closed = f"the other end is gone: {error}"
        return messages

    def _take(self, frame: Frame, messages: list[Message]) -> None:
        message = pickle.loads(frame.message)
        if isinstance(message, _Between):
            if message.classes:
                from streamline.backends.ipc.by_value import define  # not at the top: few need it

                define(message.classes)
            for number in message.dropped:
                self._leases.pop(number, None)
            if frame.slab is not None:
                self._leases[frame.slab] = self._mapped(frame)
        elif frame.sizes:
            messages.append(message._replace(packed=self._received(frame, message.packed)))
        else:
            messages.append(message)

    def _received(self, frame: Frame, given: Sequence[GivenPart] | None) -> ReceivedItems:
        starts, copied = offsets(frame.sizes), sum(frame.sizes)
        borrowed = None if frame.slab is None else self._borrow(frame)
        leases = [self._leases[part.slab] for part in given or ()]
        used = [lease.used for lease in (*leases, *([] if borrowed is None else [borrowed]))]
        memory = frame.parts if borrowed is None else borrowed.lend(starts[-1])
        parts = [memory[start : start + size] for start, size in zip(starts, frame.sizes, strict=False)]
        nbytes = copied
        for part, lease in zip(given or (), leases, strict=True):
            parts.insert(1 + part.at, lease.lend(part.nbytes, part.start))
            nbytes += part.nbytes
        return ReceivedItems(frame.items, nbytes, parts, copied, (used.count(False), used.count(True)))

    def _borrow(self, frame: Frame) -> SlabLease:
        assert frame.slab is not None
        return self._mapped(frame) if frame.slab in (ONCE, SHARED) else self._leases[frame.slab]

    def _mapped(self, frame: Frame) -> SlabLease:
        fd = self._socket.descriptors.popleft()
        try:
            if frame.slab == SHARED:
                return SlabLease(fd, frame.slab_size, own=True)
            return SlabLease(fd, frame.slab_size, None if frame.slab == ONCE else self.on_mapped)
        except OSError as error:
            raise HostError(NO_ROOM) from error
        finally:
            os.close(fd)

    def _stop_receiving(self) -> None:
        self._socket.drop_descriptors()
        self._leases.clear()
        self._frames = Frames()

    # The end

    def close(self) -> None:
        self._socket.close()
        self._reading.end()

    def _stop(self) -> None:
        self._queue.stop()
        self._stop_receiving()
