"""streamline: data into training loops, with exact resume at every item."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import TypeVar

from streamline import errors
from streamline.backends.inline import Inline
from streamline.pipeline import Pipeline
from streamline.snapshot import Snapshot
from streamline.sources.items import Indexable, Items
from streamline.sources.iterable import IterableSource
from streamline.stream import Stream
from streamline.sync import SyncStream
from streamline.transforms.custom import stage

__all__ = ["Inline", "Pipeline", "Snapshot", "Stream", "SyncStream", "errors", "from_items", "from_iterable", "stage"]

T = TypeVar("T")


def from_items(items: Indexable[T]) -> Pipeline[T]:
    """Read what has `__len__` and `__getitem__`: a list, an array, a map-style dataset."""
    return Pipeline(Items(name="items", items=items))


def from_iterable(factory: Callable[[], Iterable[T] | AsyncIterable[T]]) -> Pipeline[T]:
    """Read the iterable that `factory` returns, called anew per pass."""
    return Pipeline(IterableSource(name="iterable", factory=factory))
