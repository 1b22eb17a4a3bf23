"""HDF5 files: rows of data sets of one length, along their first axis. h5py is an extra, and imported late.

h5py has one lock for all threads, and its files don't survive a fork. So a file is opened for each block of rows, in a
thread, and closed there: nothing of h5py's is kept, and the event loop never waits for its lock. Opening takes 0.4 ms.

A remote file is read through one of which only some bytes are in memory. What h5py misses there is fetched, and it is
asked again; the chunks of a block, whose places the file tells, are fetched ahead.
"""

from __future__ import annotations

import atexit
import faulthandler
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from math import prod
from typing import Any, ClassVar, TypeVar

from streamline.core.threads import CALL_S, finish_calls
from streamline.errors import DataError
from streamline.io.fetch.file import File
from streamline.io.formats.base import InThread
from streamline.io.formats.columnar import Unchanged
from streamline.io.formats.rows import BLOCK_BYTES, BLOCK_ROWS, RowFormat, RowTable, dicts, row_spans
from streamline.io.formats.sparse_file import AbsentError, Span, SparseFile, coalesced

T = TypeVar("T")

OBJECT_ROWS = 256
"""Rows in a block at the most where values have no fixed size: images of 100 kB would be 26 MB."""

FIRST_BLOCKS, MOST_BLOCKS = 16, 1024
"""Blocks of a remote file whose places are asked for at once, at first and later: nothing is read ahead beyond them."""

MOST_UNPACKED_RATIO, MOST_ROW_BYTES = 1032, 2**30
"""Bytes that a byte of a file may unpack to (zeros, deflated), and that a row may have that only seems to be there."""

FETCH_BYTES = 64 * 1024
"""What is fetched around bytes that h5py misses: its own reads of metadata have some hundred bytes."""


@dataclass(frozen=True, kw_only=True)
class Hdf5Format(RowFormat):
    """HDF5 files, whose items are dicts of rows of `datasets`, named with their groups; None: all of the file."""

    kind: ClassVar[str] = "read_hdf5"
    reread: ClassVar[str] = "reads its chunk again"

    datasets: tuple[str, ...] | None = None

    def options(self) -> dict[str, Any]:
        return {} if self.datasets is None else {"datasets": list(self.datasets)}

    async def table(self, file: File, in_thread: InThread[Any]) -> Hdf5Table:
        size = await file.size("reading an HDF5 file")
        unchanged = await in_thread(lambda: Unchanged(file.path, size)) if file.local else None
        opened = Hdf5File(file, size, unchanged, in_thread)
        names, rows, chunk, step = await opened.ask(lambda h5: _layout(h5, self.datasets, size))
        return Hdf5Table(opened, names, chunk, step, rows=rows)


@dataclass(frozen=True)
class Hdf5Table(RowTable):
    """Data sets of one length. h5py opens no file that was cut short.

    Attributes:
      names: of the data sets.
      chunk: rows that are stored together, of the data set that has most; so many are left out where one is damaged.
      step: rows in a block: those of whole chunks, unless their values have no fixed size.
    """

    opened: Hdf5File
    names: tuple[str, ...]
    chunk: int
    step: int

    async def blocks(self, start: int, stop: int) -> AsyncGenerator[Sequence[Sequence[Any]], None]:
        async with aclosing(self._fetch(start, stop)) as fetched:
            for span in row_spans(start, stop, self.step):
                blocks, wrong = await self._read(*span, await anext(fetched))
                for block in blocks:
                    yield block
                if wrong is not None:
                    raise wrong

    async def _fetch(self, start: int, stop: int) -> AsyncGenerator[list[tuple[int, bytes]] | None, None]:
        """Yield the bytes of each block; of a local file None."""
        cuts, count = row_spans(start, stop, self.step), FIRST_BLOCKS
        if self.opened.file.local:
            for _ in cuts:
                yield None
        while rows := list(islice(cuts, count)):
            spans = await self.opened.ask(lambda h5: [_spans(h5, self.names, *span) for span in rows])
            async with aclosing(self.opened.file.ranges(span for block in spans for span in block)) as ranges:
                for block in spans:
                    yield [(begin, await anext(ranges)) for begin, _ in block]
            count = min(2 * count, MOST_BLOCKS)

    async def _read(
        self, start: int, stop: int, data: list[tuple[int, bytes]] | None
    ) -> tuple[list[list[Sequence[Any]]], DataError | None]:
        """Return rows, as one block; where a chunk is damaged, those before it, found by halves, and what is wrong."""
        blocks, spans = list[list[Sequence[Any]]](), [(start, stop)]
        while spans:
            first, last = spans.pop()
            try:
                blocks.append(await self.opened.ask(partial(_rows, names=self.names, start=first, stop=last), data))
            except DataError as error:
                middle = max((first + last) // 2 // self.chunk * self.chunk, self.following(first))
                if middle >= last:
                    return blocks, error
                spans += [(middle, last), (first, middle)]
        return blocks, None

    def following(self, row: int) -> int:
        return (row // self.chunk + 1) * self.chunk

    def items(self, block: Sequence[Sequence[Any]]) -> list[Any]:
        return dicts(self.names, block)


@dataclass
class Hdf5File:
    """A file that h5py can be asked about, in a thread, as often as is needed.

    Attributes:
      unchanged: checks that a local file doesn't change; a remote one has an ETag.
      metadata: parts of a remote file that are kept, since h5py asks for them each time that it is opened.
    """

    file: File
    size: int
    unchanged: Unchanged | None
    in_thread: InThread[Any]
    metadata: list[tuple[int, bytes]] = field(default_factory=list)

    async def ask(self, question: Callable[[Any], T], data: list[tuple[int, bytes]] | None = None) -> T:
        """Return the answer of a function of the file.

        Args:
          data: parts of the file that it will look at; what else it misses then is not kept, either. None: metadata.
        """
        missed = self.metadata if data is None else data
        while True:
            answer: Any = await self.in_thread(lambda: self._answer(question, [*self.metadata, *missed]))
            if not isinstance(answer, AbsentError):
                return answer  # type: ignore[no-any-return]
            start = answer.start // FETCH_BYTES * FETCH_BYTES
            stop = min(self.size, max(answer.stop, start + FETCH_BYTES))
            missed.append((start, await self.file.read(start, stop)))

    def _answer(self, question: Callable[[Any], T], held: Iterable[tuple[int, bytes]]) -> T | AbsentError:
        h5py = _h5py()
        source: Any = self.file.path
        if self.unchanged is None:
            source = SparseFile(self.size)
            source.hold(held)
        try:
            with h5py.File(source, "r", locking=False) as h5:
                answer = question(h5)
        except AbsentError as missing:
            return AbsentError(missing.start, missing.stop)  # another one: its frames would hold the file
        except DataError:
            raise
        except Exception as error:  # of h5py, on garbage: OSError, KeyError, RuntimeError, ...
            self._check()
            raise DataError(f"h5py can't read it: {type(error).__name__}: {error}") from error
        self._check()
        return answer

    def _check(self) -> None:
        if self.unchanged is not None:
            self.unchanged.check()


@cache
def _h5py() -> Any:
    import h5py

    atexit.register(_end, h5py)  # comes before what h5py has registered
    return h5py


def _end(h5py: Any) -> None:
    """Let Python end although a thread is in h5py for ever, with its lock, which h5py takes as Python ends."""
    if finish_calls():
        faulthandler.dump_traceback_later(CALL_S, exit=True, file=2)
        atexit.unregister(getattr(h5py, "_unregister_converters", lambda: None))


def _layout(h5: Any, wanted: tuple[str, ...] | None, size: int) -> tuple[tuple[str, ...], int, int, int]:
    """Return the names of the data sets, how many rows each has, are stored together, and are read at a time."""
    import h5py

    every = list[str]()
    h5.visititems(lambda name, found: every.append(name) if isinstance(found, h5py.Dataset) else None)
    names = tuple(every) if wanted is None else wanted
    lengths = dict[str, int]()
    for name in names:
        found = h5.get(name)
        if not isinstance(found, h5py.Dataset):
            raise DataError(f"expected data set {name!r}, the file has {every}")
        if found.file != h5 or found.is_virtual or found.external:
            raise DataError(f"data set {name!r} is in other files, which are not listed: read those, or copy it here")
        if not found.shape:
            raise DataError(f"data set {name!r} has no rows, but one value: name those that have, datasets=[...]")
        if h5py.check_ref_dtype(found.dtype) is not None:
            raise DataError(f"data set {name!r} has references, which mean nothing elsewhere: name others, datasets=")
        lengths[name] = found.shape[0]
    if len(set(lengths.values())) != 1:
        raise DataError(f"expected data sets with as many rows, got {lengths}: name those that belong together")
    sets = [h5[name] for name in names]
    chunk = max(1 if found.chunks is None else found.chunks[0] for found in sets)
    return names, lengths[names[0]], chunk, _step(sets, chunk, MOST_UNPACKED_RATIO * size)


def _step(sets: Sequence[Any], chunk: int, most_bytes: int) -> int:
    """Return the rows of a block; whole chunks, if the file can have such. `most_bytes`: what it can unpack to."""
    row_bytes = sum(prod(found.shape[1:]) * found.dtype.itemsize for found in sets)
    if row_bytes > max(most_bytes, MOST_ROW_BYTES):
        raise DataError(f"it is damaged: it says that a row has {row_bytes:,} bytes, more than all of it can have")
    most: int = max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, row_bytes)))
    if any(found.dtype.hasobject for found in sets):
        return min(OBJECT_ROWS, most)
    return max(1, most // chunk) * chunk if chunk * row_bytes <= max(most_bytes, BLOCK_BYTES) else most


def _rows(h5: Any, names: Sequence[str], start: int, stop: int) -> list[Sequence[Any]]:
    return [_texts(h5[name])[start:stop] for name in names]


def _texts(found: Any) -> Any:
    """Return a data set, whose values are str where they are UTF-8."""
    import h5py

    text = h5py.check_string_dtype(found.dtype)
    return found.asstr() if text is not None and text.encoding == "utf-8" else found


def _spans(h5: Any, names: Sequence[str], start: int, stop: int) -> list[Span]:
    """Return the bytes that have some rows, as far as their place in the file is known without reading them."""
    spans = list[Span]()
    for name in names:
        found = h5[name]
        if found.chunks is not None:
            for chunk in found.iter_chunks((slice(start, stop), *map(slice, found.shape[1:]))):
                at = tuple(part.start // size * size for part, size in zip(chunk, found.chunks, strict=True))
                info = found.id.get_chunk_info_by_coord(at)
                if info.byte_offset is not None:  # else it was never written
                    spans.append((info.byte_offset, info.byte_offset + info.size))
        elif (offset := found.id.get_offset()) is not None:
            row_bytes = found.id.get_type().get_size() * prod(found.shape[1:])
            spans.append((offset + start * row_bytes, offset + stop * row_bytes))
    return coalesced(spans)
