"""Where a pipeline starts: the functions that make one from a source."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from os import PathLike
from typing import Any, TypeVar

from streamline.errors import PlanTypeError
from streamline.formats.lines import MAX_LINE_BYTES
from streamline.options import check_function
from streamline.pipeline import Pipeline
from streamline.sources import files
from streamline.sources.http_options import HttpOptions
from streamline.sources.items import Indexable, Items
from streamline.sources.iterable import IterableSource
from streamline.sources.live import MAX_AHEAD, MAX_AHEAD_BYTES, live_of
from streamline.sources.paths import Paths

__all__ = ["from_items", "from_iterable", "from_stream", "read_jsonl", "read_lines"]

T = TypeVar("T")


def from_items(items: Indexable[T], *, name: str = "items") -> Pipeline[T]:
    """Read by index what has `__len__` and `__getitem__`: a list, an array, a memory map, a map-style dataset.

    Its `__getitems__` is called with lists of indices if it has one. A resume computes its place: nothing is read
    again. If reading item i fails, the items before it arrive, then the error, which names the index.

    Args:
      items: read, never changed.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: `items` has no length or no index.
    """
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise PlanTypeError(
            f"from_items needs __len__ and __getitem__, and {type(items).__name__} has not both: for an iterable, use "
            "from_iterable(lambda: ...)"
        )
    return Pipeline(Items(name=name, items=items))


def from_iterable(factory: Callable[[], Iterable[T] | AsyncIterable[T]], *, name: str = "iterable") -> Pipeline[T]:
    """Read the sync or async iterable that `factory` returns; it is called anew per pass, worker and resume.

    Every worker iterates all of it and keeps its stride; a resume iterates up to where it stood. If the iterable or its
    iterator has `state_dict` and `load_state_dict` (Hugging Face datasets, torchdata), or `get_state` and `set_state`
    (grain), a resume loads a state of at most 32 items before instead. It then keeps its place in itself, so `factory`
    makes a new one at each call. A sync iterable is iterated in the event loop, list by list: one that waits (for a
    queue, a socket) had better be async. For a generator function that keeps its place itself, see `sl.source`; for
    what can be read only once, `from_stream`.

    Args:
      factory: called without arguments.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: `factory` can't be called: an iterable itself could be read once only. While it runs: it returned
        no iterable; or the state holds what JSON can't.
      PlanError: while it runs: the factory returned an object whose place belongs to another use; or one whose state is
        known to lose items.
      ResumeError: while it runs: the snapshot holds a state, and what the factory returns can't load one.
    """
    check_function("from_iterable(factory)", factory)
    return Pipeline(IterableSource(name=name, factory=factory))


def from_stream(
    stream: Callable[[], AsyncIterable[T]] | AsyncIterable[T],
    *,
    name: str = "stream",
    encode: Callable[[T], Any] | None = None,
    decode: Callable[[Any], T] | None = None,
    max_ahead: int = MAX_AHEAD,
    max_ahead_bytes: int = MAX_AHEAD_BYTES,
    partitioned: bool = False,
    journal: str | PathLike[str] | None = None,
) -> Pipeline[T]:
    """Read a live feed, which can't be read again: a socket, a queue, an endless HTTP response.

    It is read once, by one task for all workers, which are handed its items in turn. What was read is kept until the
    consumer is past it, and a snapshot holds it, so a resume goes on exactly where it stood, and then with the feed.
    What was read behind the last snapshot is lost in a crash, unless it is kept on disk.

    Args:
      stream: an async iterable, or a function without arguments that returns one; an iterator can be read by one
        opening only. It is closed when the stream is left.
      name: its part of a state is kept under it.
      encode: a sync function from an item to a JSON value, bytes or a NumPy array, in which form it is kept; needed for
        other items than these.
      decode: the inverse.
      max_ahead: items that may wait for one worker while another one drops all that it is given.
      max_ahead_bytes: bytes, as kept, that may wait for all workers of a rank; each worker may have one item.
      partitioned: each rank has a feed of its own; without it, one rank only can read.
      journal: a directory in which what is read is kept, so that a crash loses nothing of it. Each item is written
        before the feed is asked for the next one. Saving a snapshot lets go of what it has passed.

    Raises:
      PlanTypeError: no async iterable, or an option of the wrong type.
      PlanError: an option out of range, or one of encode and decode without the other.
      While it runs: PlanTypeError for an item that can't be kept, JournalError for a disk that fails, WorkerStarved
      behind `max_ahead`.
    """
    return Pipeline(
        live_of(
            name,
            stream,
            encode=encode,
            decode=decode,
            max_ahead=max_ahead,
            max_ahead_bytes=max_ahead_bytes,
            partitioned=partitioned,
            journal=journal,
        )
    )


def read_lines(
    paths: Paths,
    *,
    name: str = "read_lines",
    http: HttpOptions | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Pipeline[str]:
    r"""Read the lines of text files, without their ends, "\n" or "\r\n"; empty lines are items.

    A resume goes on at the byte; in a gzip file, it decompresses what is before it once more.

    Args:
      paths: local paths and globs, http(s) URLs, all with braces: part-{000..127}.txt; one or several. ".gz" is
        unpacked.
      name: its part of a state is kept under it.
      http: how URLs are read: retries, timeouts, headers.
      max_line_bytes: a longer line is an error.

    Raises:
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for what can't be read,
      DataError for what can't be decoded, each with file, line and byte.
    """
    return Pipeline(files.read_lines(paths, name=name, http=http, max_line_bytes=max_line_bytes))


def read_jsonl(
    paths: Paths,
    *,
    name: str = "read_jsonl",
    http: HttpOptions | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Pipeline[Any]:
    """Read the JSON values of files with one a line; blank lines are skipped. Otherwise as `read_lines`."""
    return Pipeline(files.read_jsonl(paths, name=name, http=http, max_line_bytes=max_line_bytes))
