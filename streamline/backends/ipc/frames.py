"""Frames on a byte stream: written, and parsed from pieces of any size. No I/O.

A frame is a header, the pickle of a message, and, where the message carries items, the sizes of their parts (the
pickle, then each buffer beside it) and the parts, unless those lie in a slab.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from streamline.backends.ipc.shared_memory import ALIGN
from streamline.core.lazy_numpy import np
from streamline.core.place import Bytes

HEADER = Struct("=IIIIIxxxxQQ")
"""Bytes of the message; items; parts; 1 + the slab's number, 0: none; descriptors; bytes of parts; of the slab."""

BUFFER = 1 << 18
"""Bytes read at once: what a socket's buffer holds."""

AHEAD = 1 << 12
"""Bytes read after a large frame: the head of the next one, whose parts are then received where they stay."""

LARGE = 1 << 15
"""Bytes of a frame from which on it is received into memory of its own."""


GAP = memoryview(bytes(ALIGN))


class Frame(NamedTuple):
    """A received frame: a pickled message, and `items` in parts of these sizes.

    Attributes:
      slab: the number of the slab where the parts lie; None: in `parts`, writable and owned by the receiver.
      descriptors: sent with it: 1 for a new slab.
    """

    message: memoryview
    items: int
    sizes: tuple[int, ...]
    slab: int | None
    slab_size: int
    descriptors: int
    parts: memoryview


def head(
    message: bytes,
    items: int = 0,
    sizes: Sequence[int] = (),
    slab: int | None = None,
    slab_size: int = 0,
    descriptors: int = 0,
) -> bytes:
    """Return a frame without its parts; they follow, unless they are in a slab."""
    number = 0 if slab is None else slab + 1
    inline = 0 if slab is not None or not sizes else offsets(sizes)[-1]
    header = HEADER.pack(len(message), items, len(sizes), number, descriptors, inline, slab_size)
    return b"".join((header, message, array("Q", sizes)))


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each part, and, last, the total size in bytes."""
    end, starts = 0, [0]
    for size in sizes:
        end += (size + ALIGN - 1) // ALIGN * ALIGN
        starts.append(end)
    return starts


def lay_out(pieces: Sequence[bytes], buffers: Sequence[memoryview], memory: memoryview) -> None:
    """Copy the parts to their offsets; `pieces` make up the first one."""
    start = 0
    for piece in pieces:
        memory[start : start + len(piece)] = piece
        start += len(piece)
    for buffer in buffers:
        start = (start + ALIGN - 1) // ALIGN * ALIGN
        memory[start : start + len(buffer)] = buffer
        start += len(buffer)


def padded(pieces: Sequence[bytes], buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the parts as `lay_out` would copy them, uncopied, with what fills the gaps between them."""
    nbytes = sum(map(len, pieces))
    yield from (memoryview(piece) for piece in pieces)
    for buffer in buffers:
        if gap := -nbytes % ALIGN:
            yield GAP[:gap]
        yield buffer
        nbytes = len(buffer)
    if gap := -nbytes % ALIGN:
        yield GAP[:gap]


class Frames:
    """Parses frames: read into `spaces()`, then take the frames that `take()` yields.

    Args:
      memory: returns so many bytes for a frame with buffers, uninitialised.
    """

    def __init__(self, memory: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8)) -> None:
        self._memory = memory
        # of which small messages touch a page or two; not shared with forks
        self._buffer = memoryview(mmap.mmap(-1, BUFFER, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._start = self._end = 0  # of what is unparsed in the buffer
        self._large: memoryview | None = None
        self._received = 0  # of the large one

    @property
    def missing(self) -> int:
        """Bytes of a large frame that have yet to come; 0: none is on its way."""
        return 0 if self._large is None else len(self._large) - self._received

    def spaces(self) -> list[memoryview]:
        """Return where to read to, in this order."""
        if self._large is not None:
            return [self._large[self._received :], self._buffer[:AHEAD]]
        if self._start:  # move the start of a small frame to the front: the rest fits after it
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        return [self._buffer[self._end :]]

    def take(self, nbytes: int) -> Iterator[Frame]:
        """Yield the frames that `nbytes` more bytes complete. Must be exhausted."""
        if self._large is not None:
            taken = min(nbytes, len(self._large) - self._received)
            self._received += taken
            nbytes -= taken
            if self._received == len(self._large):
                frame, self._large = self._large, None
                yield _frame(frame)
        self._end += nbytes
        while (available := self._end - self._start) >= HEADER.size:
            size = _size(self._buffer[self._start :])
            if available < size and size <= LARGE:
                return
            frame = self._space(self._buffer[self._start :], size)
            received = min(available, size)
            frame[:received] = self._buffer[self._start : self._start + received]
            self._start += received
            if received < size:
                self._large, self._received = frame, received
                break
            yield _frame(frame)
        if self._start == self._end:
            self._start = self._end = 0

    def _space(self, header: memoryview, size: int) -> memoryview:
        """Return memory for a frame of `size` bytes, in which buffers beside the pickle are aligned."""
        _, _, parts, _, _, inline, _ = HEADER.unpack_from(header)
        if parts < 2 or not inline:
            return memoryview(bytearray(size))
        whole = self._memory(size + ALIGN - 1)
        begin = -(whole.ctypes.data + size - inline) % ALIGN
        return whole.data[begin : begin + size]


def _size(header: memoryview) -> int:
    message, _, parts, _, _, inline, _ = HEADER.unpack_from(header)
    size: int = HEADER.size + message + 8 * parts + inline
    return size


def _frame(frame: memoryview) -> Frame:
    message, items, parts, number, descriptors, _, slab_size = HEADER.unpack_from(frame)
    table = HEADER.size + message
    body = table + 8 * parts
    sizes = tuple(frame[table:body].cast("Q"))
    slab = number - 1 if number else None
    return Frame(frame[HEADER.size : table], items, sizes, slab, slab_size, descriptors, frame[body:])
