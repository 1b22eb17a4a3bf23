"""Where a live source's items come into a host: its feed is read at the other end, once for all workers."""

from __future__ import annotations

from typing import Any

from streamline.border.link import Link
from streamline.border.messages import Feed, Taken
from streamline.core.channel import Channel
from streamline.core.flow import Chunk
from streamline.core.state import At, CountedStates

__all__ = ["Inlet"]


class Inlet:
    """One worker's end of the feed.

    Args:
      name: the source's.
      done: items that the worker's state is behind.
      capacity: items that may be here.
    """

    def __init__(self, link: Link, worker: int, name: str, done: int, capacity: int) -> None:
        self.channel = Channel[Any](At(name, done), capacity)
        self.channel.on_freed = self._freed
        self._link = link
        self._worker = worker
        self._name = name
        self._put = 0
        self._freed_items = 0
        self._closed = False
        self.channel.inbox.on_closed = self._close

    def put(self, message: Feed) -> None:
        """Take items in; those that come behind the worker's end are dropped."""
        if self._closed:
            return
        try:
            items = self._link.unpack(message.packed)
        except BaseException as failure:
            self.end(failure)
            return
        self._put += len(items)
        self.channel.reserve(len(items))
        self.channel.post(Chunk(items, CountedStates(self._name, message.first + 1)))

    def end(self, failure: BaseException | None) -> None:
        """There is no more."""
        if self._closed or self.channel.finished:
            return
        if failure is None:
            self.channel.finish()
        else:
            self.channel.fail(failure)

    def _close(self) -> None:
        self._closed = True

    def _freed(self) -> None:
        taken = self._put - self.channel.held - self._freed_items
        if taken:
            self._freed_items += taken
            self._link.send(Taken(self._worker, taken))
