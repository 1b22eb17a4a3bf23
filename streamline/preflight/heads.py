"""The first records of a few files, and the sizes that no listing has told; side by side, within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from streamline.core.flow import Site
from streamline.core.session import Session
from streamline.core.tasks import Tasks
from streamline.core.threads import start_thread
from streamline.io.fetch.fetcher import SharedStorages
from streamline.io.storage.base import FoundObject
from streamline.io.storage.registry import Storages
from streamline.sources.base import Part, Source
from streamline.sources.files import Files

__all__ = ["Heads", "look", "spread"]


AT_ONCE = 64
"""Sizes that are asked for at once."""


HANGS_S = 2.0
"""How much longer than its deadline a look may take before it hangs: in a function of the user that doesn't return."""


@dataclass
class Heads:
    """What was found.

    Attributes:
      records: (where it is from, the record), in order.
      empty: what has no record.
      sizes: of objects, in bytes, as far as the server has said, by path.
      failures: (where, what went wrong), in order.
      late: what didn't answer in time.
    """

    records: list[tuple[str, Any]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[str, Exception]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of `count` indices: the first, the last, and some between."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def look(source: Source[Any], part: Part, places: Sequence[int], sized: Sequence[int], deadline_s: float) -> Heads:
    """Read first records, in a thread and an event loop of their own: this may be called in a running one.

    Args:
      source: resolved.
      part: how it is read if it has no files: then the first `len(places)` items are.
      places: of the files whose first record is read.
      sized: of those whose sizes are asked for.
      deadline_s: for all of it.
    """
    heads = Heads()
    thread = threading.Thread(
        target=anyio.run, args=(_look, heads, source, part, places, sized, deadline_s), daemon=True
    )
    start_thread(thread)
    thread.join(deadline_s + HANGS_S)
    if thread.is_alive():
        heads.late.append(source.name)
    return heads


async def _look(
    heads: Heads, source: Source[Any], part: Part, places: Sequence[int], sized: Sequence[int], deadline_s: float
) -> None:
    async with anyio.create_task_group() as group:
        tasks = Tasks(group, Session(metered=False))  # else all files would be one stage
        try:
            looking = _Looking(heads, tasks, anyio.current_time() + deadline_s)
            await looking.all(source, part, places, sized)
        finally:
            tasks.finished()
            group.cancel_scope.cancel()


class _Looking:
    def __init__(self, heads: Heads, tasks: Tasks, deadline: float) -> None:
        self._heads = heads
        self._tasks = tasks
        self._deadline = deadline
        self._slots = anyio.Semaphore(AT_ONCE)
        self._found: dict[int, list[tuple[str, Any]]] = {}
        self._failed: dict[int, tuple[str, Exception]] = {}

    async def all(self, source: Source[Any], part: Part, places: Sequence[int], sized: Sequence[int]) -> None:
        """Look at everything, side by side."""
        async with anyio.create_task_group() as group:
            if not isinstance(source, Files):
                group.start_soon(self._items, source, part, len(places))
            else:
                self._files(group, source, places, sized)
        self._heads.records = [record for _, found in sorted(self._found.items()) for record in found]
        self._heads.failures = [failed for _, failed in sorted(self._failed.items(), key=lambda item: item[0])]

    def _files(self, group: TaskGroup, source: Files[Any], places: Sequence[int], sized: Sequence[int]) -> None:
        for at in places:
            one = replace(source, found=(source.files[at],))
            group.start_soon(self._head, at, source.files[at].path, one, Part(mode="file"))
        lease = SharedStorages(self._tasks.session, source.name, source.access)
        group.start_soon(self._sizes, lease, [(at, source.files[at]) for at in sized])

    async def _items(self, source: Source[Any], part: Part, count: int) -> None:
        await self._head(0, source.name, source, part, count)

    async def _head(self, at: int, where: str, source: Source[Any], part: Part, count: int = 1) -> None:
        found: list[tuple[str, Any]] = []

        async def read() -> None:
            flow = source.open(Site(self._tasks, 0, 1), part)
            try:
                async for item in flow:
                    found.append((where if count == 1 else f"item {len(found)} of {where}", item))
                    if len(found) >= count:
                        return
                if not found:
                    self._heads.empty.append(where)
            finally:
                with anyio.CancelScope(shield=True):
                    await flow.aclose()

        await self._within(at, where, read)
        self._found[at] = found

    async def _sizes(self, lease: SharedStorages, files: list[tuple[int, FoundObject]]) -> None:
        try:
            async with anyio.create_task_group() as group:
                for at, found in files:
                    stat = partial(self._size, lease.storages, found.path)
                    group.start_soon(self._within, at, found.path, stat)
        finally:
            with anyio.CancelScope(shield=True):
                await lease.aclose()

    async def _size(self, storages: Storages, path: str) -> None:
        async with self._slots:
            size = (await storages.of(path).stat(path)).size
        if size is not None:
            self._heads.sizes[path] = size

    async def _within(self, at: int, where: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` until the deadline; of its failures, each file has one."""
        with anyio.CancelScope(deadline=self._deadline) as scope:
            try:
                await work()
            except anyio.get_cancelled_exc_class():
                raise
            except Exception as error:
                self._failed.setdefault(at, (where, error))
        if scope.cancelled_caught and where not in self._heads.late:
            self._heads.late.append(where)
