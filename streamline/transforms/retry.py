"""Calls of a map that are made again when they fail: after which failures, how often, after which pause.

Libraries (stamina, tenacity) wrap a function, and wait in it. Here a call that waits is at rest, so that a pause of the
stream doesn't wait for it; a thread that waits ends its wait when the stream closes; a seeded call is given the same
numbers again; and what is counted reaches `stats()`.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

import anyio

from streamline.core.figures import Detail, Details
from streamline.core.gate import Gate, wait_at_rest
from streamline.core.limits import StagePermits
from streamline.core.options import check_function, check_int, check_seconds
from streamline.core.replay import Adapter
from streamline.errors import PlanError, PlanTypeError, WorkerDied, printable

In = TypeVar("In")
Out = TypeVar("Out")

RetryOn: TypeAlias = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], object]

MAX_BACKOFF_S = 60.0
"""No pause is longer, but for what a server asks."""

MAX_ASKED_S = 600.0
"""A server that asks for a longer pause is not waited for: the failure says so."""

NEVER = (PlanError, WorkerDied)
"""A mistake in the pipeline, and a call that has ended a process."""

_jitter = random.SystemRandom()  # the user's `random` is seeded for other purposes


class RetryOptions(TypedDict, total=False):
    """What `.map` takes as keywords. What each means is said at `Retry`."""

    retries: int
    timeout_s: float | None
    backoff: float
    retry_on: RetryOn


@dataclass(frozen=True, kw_only=True)
class Retry:
    """When a failed call of an async function, or of a sync one in a thread, is made again.

    Attributes:
      retries: calls after the first, >= 0. A seeded call is given the same random numbers again.
      timeout_s: seconds for each call of an async function, which then fails with a `TimeoutError`; None: any time.
      backoff: seconds: the first pause takes a random time up to this, each further one up to twice as long as the one
        before, 60 s at most. What a server asks for (Retry-After) is added, where the exception has its headers.
      retry_on: classes of exceptions, or a function that says of one whether to call again.
    """

    retries: int
    timeout_s: float | None
    backoff: float
    retry_on: RetryOn

    @classmethod
    def of(
        cls, *, retries: object = 0, timeout_s: object = None, backoff: object = 0.5, retry_on: object = Exception
    ) -> Retry | None:
        """Return what the options of `.map` mean; None: calls are made once.

        Raises:
          PlanTypeError: one is of the wrong type.
          PlanError: one is out of range, or has no meaning without another.
        """
        made = check_int(".map(retries=)", retries, 0)
        if timeout_s is not None:
            check_seconds(".map(timeout_s=)", timeout_s)
        if backoff != 0:
            check_seconds(".map(backoff=)", backoff)
        if retry_on is not Exception:
            _check_retry_on(retry_on)
            if not made:
                raise PlanError(".map(retry_on=) says after which errors a call is made again: add retries=3, say")
        if not made and timeout_s is None:
            return None
        return cls(retries=made, timeout_s=timeout_s, backoff=backoff, retry_on=retry_on)  # type: ignore[arg-type]

    def applies(self, error: Exception) -> bool:
        """Whether a call that failed with `error` may be made again."""
        if isinstance(error, NEVER):
            return False
        if isinstance(self.retry_on, type | tuple):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))

    def __str__(self) -> str:
        shown = [f"retries={self.retries}"] if self.retries else []
        return ", ".join(shown if self.timeout_s is None else [*shown, f"timeout_s={self.timeout_s:g}"])


def _check_retry_on(given: object) -> None:
    kinds = given if isinstance(given, tuple) else (given,) if isinstance(given, type) else None
    if kinds is None:
        check_function(".map(retry_on=)", given)
    elif not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise PlanTypeError(
            f".map(retry_on=) is a class of exceptions, a tuple of them, or a function of one, got {given!r}"
        )


class Tries:
    """The tries of one call."""

    __slots__ = ("_before", "_began", "_failed", "_retry")

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._began = perf_counter()
        self._failed = 0
        self._before = ""

    def pause_s(self, error: Exception) -> float:
        """Return the seconds to wait before the next try, or raise `error`, with a note if there were several tries."""
        retry = self._retry
        self._failed += 1
        asked_s = _asked_s(error)
        if self._failed > retry.retries or asked_s > MAX_ASKED_S or not retry.applies(error):
            self._note(error, asked_s)
            raise error
        self._before = f"{type(error).__name__}: {error}"
        longest_s = min(MAX_BACKOFF_S, retry.backoff * 2 ** min(self._failed - 1, 64))
        return asked_s + _jitter.uniform(0.0, longest_s)

    def _note(self, error: Exception, asked_s: float) -> None:
        asks = f"; it asks to wait {asked_s:,.0f} s, which is too long" if asked_s > MAX_ASKED_S else ""
        if self._failed > 1:
            took_s = perf_counter() - self._began
            text = f"the call failed {self._failed} times within {took_s:.3g} s, before this with {self._before}{asks}"
            error.add_note(printable(text))
        elif asks:
            error.add_note(f"the call is not made again{asks}")


def _asked_s(error: Exception) -> float:
    """Return how long a server asks to wait, where the exception of its client's library has it; else 0."""
    for holder in (error, getattr(error, "response", None)):
        headers = getattr(holder, "headers", None)
        if isinstance(headers, Mapping):
            said = headers.get("Retry-After") or headers.get("retry-after")
            if isinstance(said, str):
                from streamline.io.storage.http_response import retry_after_s  # a host of a plain plan loads no `http`

                if (asked_s := retry_after_s(said)) is not None:
                    return asked_s
    asked = getattr(error, "retry_after", None)
    if isinstance(asked, int | float) and not isinstance(asked, bool) and math.isfinite(asked):
        return max(0.0, float(asked))
    return 0.0


class RetriedCalls(Generic[In, Out]):
    """Calls of one stage's function in one shard, each made again when it fails.

    Args:
      permits: that calls need; the first call of an item finds its own taken. A pause holds none. None: they need none.
      wrap: makes of the function, and of what calls it once more, what is called here.
    """

    def __init__(
        self,
        fn: Callable[[In], Any],
        retry: Retry,
        gate: Gate,
        permits: StagePermits | None = None,
        wrap: Callable[[Callable[[In], Any]], Callable[[In], Any]] = lambda fn: fn,
    ) -> None:
        self._fn = wrap(fn)
        self._again = wrap(fn.again) if isinstance(fn, Adapter) else self._fn
        self._retry = retry
        self._permits = permits
        self._gate = gate
        self._stopped = threading.Event()
        self._counting = threading.Lock()
        self._retries = 0

    def stop(self) -> None:
        """Let no thread wait any more. Idempotent."""
        self._stopped.set()

    def details(self) -> Details:
        """Return how many calls were made again, and what is counted of permits. From any thread."""
        limited = () if self._permits is None else self._permits.details()
        return (Detail("retries", self._retries), *limited)

    async def acall(self, item: In) -> Out:
        """Return what the async function gives for `item`; raises what it raised last."""
        tries, call = Tries(self._retry), self._fn
        while True:
            try:
                return await _within(call(item), self._retry.timeout_s)
            except Exception as error:
                pause_s = tries.pause_s(error)
            call = self._again
            await wait_at_rest(anyio.sleep(pause_s))
            await self._gate.passage()
            if self._permits is not None:
                await self._permits.acquire()
            self._count()

    def call(self, item: In) -> Out:
        """Return what the sync function gives for `item`; in a thread. Raises what it raised last."""
        tries, call = Tries(self._retry), self._fn
        while True:
            try:
                return call(item)  # type: ignore[no-any-return]
            except Exception as error:
                pause_s = tries.pause_s(error)
                call = self._again
                if self._stopped.wait(pause_s):
                    raise
            self._count()

    def _count(self) -> None:
        with self._counting:
            self._retries += 1


async def _within(call: Awaitable[Out], timeout_s: float | None) -> Out:
    """Return what `call` gives; `TimeoutError`: not in time."""
    if timeout_s is None:
        return await call
    with anyio.move_on_after(timeout_s):
        return await call
    raise TimeoutError(f"no result within timeout_s={timeout_s:g} s")
