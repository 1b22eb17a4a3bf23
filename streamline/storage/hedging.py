"""Hedged requests: where an answer is late, the same is asked once more, and the first one to answer wins.

Source: J. Dean and L. A. Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013: a second request behind
the 95th percentile of the times costs a few per cent more requests and takes most of the tail away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import aiohttp
import anyio

__all__ = ["HEDGED_BYTES", "first_answer"]

HEDGED_BYTES = 8 * 2**20
"""Requests for more than this aren't hedged: one part of a large object, the most that is asked for read-ahead."""


async def first_answer(
    ask: Callable[[], Awaitable[aiohttp.ClientResponse]], after_s: float, asking_again: Callable[[], None]
) -> aiohttp.ClientResponse:
    """Return the answer of `ask`; if it hasn't begun after `after_s`, of a second one, if that begins before.

    The other one is cancelled, and its connection closed. A failure of one leaves it to the other.

    Args:
      asking_again: called before the second one.

    Raises:
      Exception: what the first one failed with, where no answer came.
    """
    answers: list[aiohttp.ClientResponse] = []
    failures: list[Exception] = []
    known = anyio.Event()

    async def one() -> None:
        try:
            response = await ask()
        except Exception as failure:
            failures.append(failure)
        else:
            if answers:
                response.close()
            answers.append(response)
            group.cancel_scope.cancel()
        known.set()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(one)
            with anyio.move_on_after(after_s):
                await known.wait()
            if not known.is_set():
                asking_again()
                group.start_soon(one)
    except BaseException:
        for response in answers:
            response.close()
        raise
    if not answers:
        raise failures[0]
    return answers[0]
