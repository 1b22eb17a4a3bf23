"""A file as slices of whole lines, from any byte on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from streamline.errors import DataError
from streamline.fetching.file import File
from streamline.formats.lines import Splitter
from streamline.formats.pieces import pieces

__all__ = ["TooLong", "slices"]


@dataclass(frozen=True)
class TooLong:
    """A line that was passed over, unread.

    Attributes:
      size: its bytes with its end; 0: it is where the reading ends.
      error: what is wrong with it.
      head: how it begins.
    """

    size: int
    error: DataError
    head: bytes


async def slices(
    file: File,
    start: int,
    splitter: Splitter,
    wrong: Callable[[str], DataError],
    skipping: bool,
    stop: int | None = None,
) -> AsyncGenerator[tuple[bytes | TooLong, bool], None]:
    """Yield slices of whole lines from byte `start` on, and whether one is known to be the file's last.

    Args:
      splitter: cuts them; empty.
      wrong: makes the error for the line behind the slice yielded last, of what is wrong with it.
      skipping: go on behind a line that is too long; else it is the last that is yielded.
      stop: as `pieces`.

    Raises:
      As `pieces`.
    """
    long: TooLong | None = None
    async with aclosing(pieces(file, start, stop)) as blocks:
        async for block, last in blocks:
            splitter.feed(block)
            if long is not None and splitter.drop():
                yield replace(long, size=splitter.dropped), last and splitter.empty
                long = None
            if long is not None:
                continue
            try:
                while raw := splitter.cut():
                    yield raw, last and splitter.empty
            except DataError as error:
                long = TooLong(0, wrong(str(error)), splitter.begin_dropping())
                if not skipping:
                    yield long, False
                    return
    if long is not None:
        yield replace(long, size=splitter.dropped), True
    elif raw := splitter.rest():
        yield raw, True
