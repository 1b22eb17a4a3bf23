"""An object on its way into the cache: its bytes are written down while somebody reads them, in whatever order.

Readers are in an event loop. The disk's calls (`_write`, `_keep`, `_drop`) are made in a thread, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from streamline.core.threads import OneThread
from streamline.storage.cache_folder import CacheFolder, Part
from streamline.storage.spans import Spans

__all__ = ["CachePart"]


@dataclass
class CachePart:
    """An object that is being read, and what of it has been written.

    Attributes:
      name: under which it will be kept.
      made: returns the folder; called in the thread only.
      thread: that writes.
      size: of the object in bytes; None: not known yet.
      asked: whether somebody has asked for the size.
      users: who are reading it.
      done: whether it is kept, or given up.
      keeping: done when it is kept.
      spans: what of it has been handed to the thread.
    """

    name: str
    made: Callable[[], CacheFolder]
    thread: OneThread
    size: int | None = None
    asked: bool = False
    users: int = 0
    done: bool = False
    keeping: asyncio.Future[None] | None = None
    spans: Spans = field(default_factory=Spans)
    _part: Part | None = None
    _begun: bool = False
    _failed: bool = False
    _last: asyncio.Future[None] | None = None

    async def write(self, position: int, data: bytes) -> None:
        """Write bytes behind those that were written before; waits until all but these are on disk."""
        if self.done:
            return
        if self._failed:
            self.drop()
            return
        last, self._last = self._last, asyncio.wrap_future(self.thread.submit(lambda: self._write(position, data)))
        self.spans.add(position, position + len(data))
        if last is not None:
            await asyncio.wait([last])

    def ended(self, size: int | None) -> None:
        """Something was read, perhaps up to the end; if nothing is missing now, keep it."""
        self.size = size if self.size is None else self.size
        if not self.done and self.size is not None and self.spans.cover(self.size):
            self.done = True
            self.keeping = asyncio.wrap_future(self.thread.submit(self._keep))

    def drop(self) -> None:
        """Give it up. Idempotent."""
        if not self.done:
            self.done = True
            self.thread.submit(self._drop)

    def _write(self, position: int, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._part = self.made().begin(self.name)
        if self._part is None or self._failed:
            self._failed = True
            return
        try:
            fits = self.size is None or self.made().fits(self.size)
            if fits and self.made().admit(len(data)):
                self._part.write(position, data)
                return
        except OSError as error:
            self.made().failed(error)
        self._failed = True
        self._part.drop()

    def _keep(self) -> None:
        if not self._begun:  # it has no bytes
            self._write(0, b"")
        if self._part is None or self._failed:
            return
        assert self.size is not None
        try:
            self._part.keep(self.size)
        except OSError as error:
            self.made().failed(error)
            self._part.drop()

    def _drop(self) -> None:
        if self._part is not None:
            self._part.drop()
