"""Where a pipeline starts: the functions that make one from a source."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, TypeVar

from streamline.errors import PlanTypeError
from streamline.formats.lines import MAX_LINE_BYTES
from streamline.options import check_function
from streamline.pipeline import Pipeline
from streamline.sources import files
from streamline.sources.http_options import HttpOptions
from streamline.sources.items import Indexable, Items
from streamline.sources.iterable import IterableSource
from streamline.sources.paths import Paths

__all__ = ["from_items", "from_iterable", "read_jsonl", "read_lines"]

T = TypeVar("T")


def from_items(items: Indexable[T], *, name: str = "items") -> Pipeline[T]:
    """Read by index what has `__len__` and `__getitem__`: a list, an array, a memory map, a map-style dataset.

    Its `__getitems__` is called with lists of indices if it has one. A resume computes its place: nothing is read
    again.

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

    Every worker iterates all of it and keeps its stride; a resume iterates up to where it stood. A sync iterable is
    iterated in the event loop, list by list: one that waits (for a queue, a socket) had better be async.

    Raises:
      PlanTypeError: `factory` can't be called: an iterable itself could be read once only.
    """
    check_function("from_iterable(factory)", factory)
    return Pipeline(IterableSource(name=name, factory=factory))


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
