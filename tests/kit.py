"""What the tests of running pipelines share: consumers of every kind, and sources that count and wait."""

from __future__ import annotations

import asyncio
import math
import selectors
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias, TypeVar

import anyio

import streamline as sl

R = TypeVar("R")
AsyncTest: TypeAlias = Callable[[], Awaitable[None]]
Pipe: TypeAlias = "sl.Pipeline[Any]"

LOOPS = ["asyncio", "uvloop"]
STANDING = "STREAMLINE_TESTS_STANDING"
"""An environment variable of the hosts that all tests of a session use."""

LONGEST_S = 200.0
"""What takes longer hangs. No test depends on how fast the machine is, or on what it does beside."""


def run_on(loop: str, test: AsyncTest) -> None:
    """Run `test` on a loop of a kind; it must leave no task."""

    async def main() -> None:
        others = asyncio.all_tasks()
        with anyio.fail_after(LONGEST_S):
            await test()
            await gone(lambda: asyncio.all_tasks() - others)

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": loop == "uvloop"})


class _Jumps(selectors.SelectSelector):
    """Selects without waiting where a loop would wait for a timer: its clock is set to that instead."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 3600:  # nothing is due but what only holds references
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.passed_s += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing else can happen."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.passed_s


def in_virtual_time(work: Callable[[], Awaitable[R]]) -> R:
    """Run `work` in an event loop whose time is virtual: it passes when nothing else can happen."""
    return anyio.run(work, backend_options={"loop_factory": _VirtualLoop})


async def gone(look: Callable[[], set[Any]], limit_s: float = LONGEST_S) -> None:
    """Wait until `look` finds nothing any more; fail if it does after `limit_s`."""
    deadline = anyio.current_time() + limit_s
    while left := look():
        assert anyio.current_time() < deadline, f"still there: {left}"
        await anyio.lowlevel.checkpoint()


def streamline_tasks() -> set[asyncio.Task[Any]]:
    """Return the tasks of this loop that streamline started."""
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("streamline")}


@contextmanager
def counted_calls(counts: list[int]) -> Iterator[None]:
    """Append how many functions of Python are called in the block, which is a measure of work that no load changes."""
    calls = count()
    sys.setprofile(lambda frame, event, argument: next(calls) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(None)
        counts.append(next(calls))


@dataclass
class Counting:
    """`range(length)`, how many of its items were asked for, and the lowest of them."""

    length: int
    asked: int = 0
    lowest: float = math.inf

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        if index < self.lowest:
            self.lowest = index
        return index


@dataclass
class Tap:
    """An async source that yields what was put into it, then waits for more.

    Attributes:
      waits: it has yielded all of it, and was asked for more.
    """

    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    waits: bool = False

    def put(self, *items: Any) -> None:
        """Let the source yield these."""
        for item in items:
            self.queue.put_nowait(item)

    @property
    def pipe(self) -> sl.Pipeline[Any]:
        """A pipeline over this source."""

        async def tap() -> AsyncIterator[Any]:
            while True:
                self.waits = self.queue.empty()
                item = await self.queue.get()
                self.waits = False
                yield item

        return sl.from_iterable(tap)


@dataclass
class Outcome:
    """What a consumer saw: the items, how it ended, and what asking again gave.

    Attributes:
      ends: an exception of each time that it asked, or None for a clean end.
      snapshot: taken after the first of them.
    """

    items: list[Any] = field(default_factory=list)
    ends: list[BaseException | None] = field(default_factory=list)
    snapshot: sl.Snapshot | None = None


async def _ask_async(stream: sl.Stream[Any], seen: Outcome) -> None:
    try:
        async for item in stream:
            seen.items.append(item)
    except BaseException as error:
        seen.ends.append(error)
    else:
        seen.ends.append(None)
    for _ in range(2):
        try:
            seen.items.append(await anext(stream))
        except StopAsyncIteration:
            seen.ends.append(None)
        except BaseException as error:
            seen.ends.append(error)
    seen.snapshot = stream.snapshot()


def _ask(stream: sl.SyncStream[Any], seen: Outcome) -> None:
    try:
        for item in stream:
            seen.items.append(item)
    except BaseException as error:
        seen.ends.append(error)
    else:
        seen.ends.append(None)
    for _ in range(2):
        try:
            seen.items.append(next(stream))
        except StopIteration:
            seen.ends.append(None)
        except BaseException as error:
            seen.ends.append(error)
    seen.snapshot = stream.snapshot()


def drain_async(pipe: Pipe, loop: str, *, bare: bool) -> Outcome:
    """Consume by `async for`, over the pipe itself or in `async with`."""
    seen = Outcome()

    async def main() -> None:
        if bare:
            await _ask_async(aiter(pipe), seen)  # type: ignore[arg-type]
        else:
            async with pipe.open() as stream:
                await _ask_async(stream, seen)

    run_on(loop, main)
    return seen


def drain_plain(pipe: Pipe, *, bare: bool) -> Outcome:
    """Consume by `for`, over the pipe itself or in `with`; a loop that hangs fails."""
    seen = Outcome()

    def main() -> None:
        if bare:
            _ask(iter(pipe), seen)
        else:
            with pipe.open() as stream:
                _ask(stream, seen)

    in_thread(main)
    return seen


def in_thread(work: Callable[[], None]) -> None:
    """Do `work` in another thread, so that a plain loop that hangs fails this test and stops no other."""
    failures: list[BaseException] = []

    def catching() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=catching, daemon=True, name="plain consumer")
    thread.start()
    thread.join(LONGEST_S)
    if failures:
        raise failures[0]
    assert not thread.is_alive(), "the plain loop hangs"


CONSUMERS: dict[str, Callable[[Pipe], Outcome]] = {
    "async for": lambda pipe: drain_async(pipe, "asyncio", bare=True),
    "async with": lambda pipe: drain_async(pipe, "asyncio", bare=False),
    "async for, uvloop": lambda pipe: drain_async(pipe, "uvloop", bare=True),
    "async with, uvloop": lambda pipe: drain_async(pipe, "uvloop", bare=False),
    "for": lambda pipe: drain_plain(pipe, bare=True),
    "with": lambda pipe: drain_plain(pipe, bare=False),
}


def at_last(check: Callable[[int], None]) -> None:
    """Check something that is measured, slower each time: what else a machine does matters less the slower it is.

    Args:
      check: is given how many times as slow: 1, and where that fails 4, 16, and 64.
    """
    for times in (1, 4, 16):
        try:
            return check(times)
        except AssertionError:
            continue
    return check(64)


def leaves(item: Any) -> list[str]:
    """Return what an item consists of: which items a batch has depends on their order."""
    return [leaf for part in item for leaf in leaves(part)] if isinstance(item, list | tuple) else [repr(item)]


def numbers(count: int) -> Iterator[int]:
    """Return what a factory returns: an iterator of 0 ... count - 1."""
    return iter(range(count))


async def later(item: Any) -> Any:
    """Give way once, and return the item."""
    await anyio.lowlevel.checkpoint()
    return item


@sl.stage(stateless=True)
async def stage(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Pass every item on."""
    async for item in items:
        yield item


def stopped(
    pipe: Pipe, stop: int, snapshot: sl.Snapshot | None = None, **options: Any
) -> tuple[list[Any], sl.Snapshot]:
    """Return the next items, at most `stop`, and the snapshot after them."""
    with pipe.open(resume=snapshot, **options) as stream:
        found = [item for _, item in zip(range(stop), stream, strict=False)]
        return found, sl.Snapshot.from_json(stream.snapshot().to_json())
