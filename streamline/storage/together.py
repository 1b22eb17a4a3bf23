"""Several questions at once, to a store or to a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

__all__ = ["together"]

R = TypeVar("R")

IN_FLIGHT = 64
"""Questions in flight: at 30 ms each, a thousand take half a second."""


async def together(calls: Sequence[Callable[[], Awaitable[R]]]) -> list[R]:
    """Return what each call returns, in order; at most `IN_FLIGHT` run at any time.

    Raises:
      Exception: the first that fails, as it is; the others are cancelled.
    """
    found: dict[int, R] = {}
    failures: list[Exception] = []
    waiting = iter(enumerate(calls))

    async def work() -> None:
        for at, call in waiting:
            try:
                found[at] = await call()
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()
                return

    async with anyio.create_task_group() as group:
        for _ in range(min(IN_FLIGHT, len(calls))):
            group.start_soon(work)
    if failures:
        raise failures[0]
    return [found[at] for at in range(len(calls))]
