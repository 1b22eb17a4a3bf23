"""`sl.Limit`: how many calls a stream makes at once, and how many a second, in all stages, shards and hosts together.

A call holds a *permit* from its begin to its end. The consumer's event loop issues all permits of a limit, so there are
never more than it allows. Each event loop that makes calls is a *holder*: it asks for as many permits as it has calls
waiting, and gives each back when its call is over. Holders take turns, and a holder's calls are served in order: no
shard starves.

A permit that is given back and issued again is idle for a round trip to a host. So a holder passes permits from one
call to the next, up to its share, which is the limit divided by the number of holders; those beyond it are given back
after each call. Under `per_second` each call takes a token, which only the issuer has: nothing is passed on.

When a host ends, its permits are taken back. Rejected: a fixed part of the limit for each host, which gives a busy host
too few, and with more hosts than permits some none.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TypeAlias

import anyio

from streamline.core.figures import Detail, Details
from streamline.core.gate import Gate, Rest
from streamline.core.options import check_int
from streamline.errors import PlanError, PlanTypeError

BURST_S = 0.1
"""Seconds of calls that may begin at once by default: timers are late by some milliseconds."""

ONE_TOKEN = 1 - 1e-9
"""A token, less rounding errors."""

THIS_LOOP = "the consumer's event loop"
"""The name of a holder that is not a host."""

Start: TypeAlias = Callable[[Callable[[], Awaitable[None]], str, Callable[[], None]], object]
"""`Tasks.start`."""


@dataclass(frozen=True)
class Limit:
    """How many calls of async functions and threads a stream makes: at once, per second, or both.

    One object, given to several stages as `.map(fn, concurrency=64, limit=limit)`, bounds them together, in all shards
    and hosts of a stream. Two objects are two limits, even if they are equal. Each stream has a count of its own:
    another rank, another opening of the same pipeline.

    Args:
      concurrency: calls at once, at least 1; None: as many as the stages make.
      per_second: calls that begin in a second, on average, more than 0; None: any number. In each period of t seconds
        at most `burst + per_second * t` permits are issued.
      burst: calls that may begin at once after a quiet time, at least 1; None: those of a tenth of a second.

    Attributes:
      key: identifies it in other processes; pickles keep it.

    Raises:
      PlanTypeError: not a number.
      PlanError: out of range, or nothing is limited.
    """

    concurrency: int | None = None
    per_second: float | None = None
    burst: int | None = None
    key: str = field(default_factory=lambda: os.urandom(8).hex(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            check_int("sl.Limit(concurrency)", self.concurrency, 1)
        if self.per_second is not None:
            _check_rate(self.per_second)
        elif self.concurrency is None:
            raise PlanError("sl.Limit(16) bounds the calls at once, sl.Limit(per_second=100) those of a second")
        if self.burst is not None:
            check_int("sl.Limit(burst=)", self.burst, 1)
            if self.per_second is None:
                raise PlanError("sl.Limit(burst=) says how many of the calls of per_second= may begin at once")

    @property
    def at_once(self) -> float:
        """Permits in all."""
        return math.inf if self.concurrency is None else self.concurrency

    def __repr__(self) -> str:
        shown = [] if self.concurrency is None else [f"{self.concurrency}"]
        shown += [] if self.per_second is None else [f"per_second={self.per_second:g}"]
        return f"Limit({', '.join(shown if self.burst is None else [*shown, f'burst={self.burst}'])})"


def _check_rate(given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise PlanTypeError(f"sl.Limit(per_second=) is a number of calls, got {type(given).__name__} {given!r}")
    if not (given > 0 and math.isfinite(given)):
        raise PlanError(f"sl.Limit(per_second=) is a finite number of calls, more than 0, got {given}")


def check_limit(option: str, given: object) -> None:
    if given is not None and not isinstance(given, Limit):
        raise PlanTypeError(
            f"{option} is a sl.Limit, which stages may share, got {type(given).__name__} {given!r}: "
            "limit = sl.Limit(16), or .map(fn, concurrency=16) for each shard"
        )


class Issuer:
    """Issues the permits of one limit, in turn to the holders that wait; a holder is any hashable name."""

    def __init__(self, limit: Limit, gate: Gate, start: Start) -> None:
        self._limit = limit
        self._start = start
        self._free = limit.at_once
        self._tokens = self._most_tokens = _burst(limit)
        self._refilled_at = -math.inf
        self._issued: dict[Hashable, Callable[[int, int], None]] = {}  # called with permits, and the share
        self._held: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, int] = {}  # permits asked for, and not issued yet; the next turn's first
        self._paused = False
        self._issuing = False
        self._look: anyio.Event | None = None  # set for the task that waits for tokens; None: there is none
        gate.on_pause(self._pause, self._go_on)

    def _pause(self) -> None:
        """Issue nothing: at the pause's end, calls that waited would all begin at once."""
        self._paused = True

    def _go_on(self) -> None:
        self._paused = False
        self._issue()

    def join(self, holder: Hashable, issued: Callable[[int, int], None]) -> None:
        """Add a holder; `issued` is called with its permits and its share. Does nothing if it has joined."""
        if holder not in self._issued:
            self._issued[holder] = issued
            self._held[holder] = 0
            self._send_shares()

    def leave(self, holder: Hashable) -> None:
        """Take its permits back from a holder that makes no more calls."""
        if self._issued.pop(holder, None) is not None:
            self._waiting.pop(holder, None)
            self._free += self._held.pop(holder)
            self._send_shares()
            self._issue()

    def _send_shares(self) -> None:
        for issued in self._issued.values():
            issued(0, self._share)

    @property
    def _share(self) -> int:
        """Permits that each holder may pass from call to call."""
        if self._limit.per_second is not None or self._limit.concurrency is None:
            return 0
        return self._limit.concurrency // len(self._issued)

    def take(self, holder: Hashable) -> bool:
        """Take a permit at once, if there is one and no holder waits; return whether it was taken."""
        if self._waiting or self._paused or not self._free or not self._take_token():
            return False
        self._free -= 1
        self._held[holder] += 1
        return True

    def ask(self, holder: Hashable, permits: int) -> None:
        """Issue so many permits, as soon as there are some."""
        self._waiting[holder] = self._waiting.get(holder, 0) + permits
        self._issue()
        if self._limit.per_second is not None and self._waiting and self._look is None:
            self._look = anyio.Event()
            self._start(self._refill, f"tokens of {self._limit}", lambda: None)

    def drop(self, holder: Hashable, permits: int) -> None:
        """Cancel so many of the permits that a holder has asked for."""
        self._waiting[holder] -= permits
        if not self._waiting[holder]:
            del self._waiting[holder]
        self._wake_refill()

    def take_back(self, holder: Hashable, permits: int, unused: bool) -> None:
        """Take permits back; `unused`: no call was made with them."""
        self._held[holder] -= permits
        self._free += permits
        if unused:
            self._tokens = min(self._most_tokens, self._tokens + permits)
        if self._waiting:
            self._issue()

    def _issue(self) -> None:
        """Issue what is free, as one number for each holder. Also in a callback of the event loop, which is no task."""
        if self._issuing:  # a holder has given a permit back while it was given others
            return
        self._issuing = True
        try:
            while issued := self._next():
                for holder, permits in issued.items():
                    self._issued[holder](permits, self._share)
        finally:
            self._issuing = False
            self._wake_refill()

    def _next(self) -> dict[Hashable, int]:
        issued: dict[Hashable, int] = {}
        while self._waiting and self._free and not self._paused and self._take_token():
            holder = next(iter(self._waiting))
            left = self._waiting.pop(holder) - 1
            if left:
                self._waiting[holder] = left  # its next turn is after the others'
            self._free -= 1
            self._held[holder] += 1
            issued[holder] = issued.get(holder, 0) + 1
        return issued

    def _take_token(self) -> bool:
        """Take a token, if there is one; without `per_second` there always is."""
        if self._limit.per_second is None:
            return True
        now = _loop_time()
        gained = max(0.0, now - self._refilled_at) * self._limit.per_second
        self._tokens, self._refilled_at = min(self._most_tokens, self._tokens + gained), now
        if self._tokens < ONE_TOKEN:
            return False
        self._tokens -= 1
        return True

    def _wake_refill(self) -> None:
        """Wake the task that waits for tokens, if a token is what is missing, or no call waits any more."""
        if self._look is not None and (not self._waiting or self._token_due_s < math.inf):
            self._look.set()

    @property
    def _token_due_s(self) -> float:
        """Seconds until the next token; infinite if no token is missing."""
        if self._paused or not self._free or self._limit.per_second is None:
            return math.inf
        return max(0.0, 1 - self._tokens) / self._limit.per_second

    async def _refill(self) -> None:
        """Issue permits as tokens come, until no call waits for one."""
        while self._waiting:
            self._look = anyio.Event()
            with anyio.move_on_after(self._token_due_s):
                await self._look.wait()
            self._issue()
        self._look = None


def _burst(limit: Limit) -> float:
    """Return how many tokens are kept at most."""
    if limit.burst is not None:
        return limit.burst
    return math.inf if limit.per_second is None else max(1, math.ceil(limit.per_second * BURST_S))


def _loop_time() -> float:
    """Return the event loop's time; also in a callback, where anyio knows no loop."""
    return asyncio.get_running_loop().time()


class Permits:
    """The permits of one limit in one event loop: asked for, given to calls in turn, and given back.

    `ask` is answered by `grant`; `give_back` has a flag, whether they are unused. `take` takes one at once, and `drop`
    takes requests back; None: not possible here.
    """

    def __init__(
        self,
        gate: Gate,
        ask: Callable[[int], None],
        give_back: Callable[[int, bool], None],
        take: Callable[[], bool] | None = None,
        drop: Callable[[int], None] | None = None,
    ) -> None:
        self._gate = gate
        self._ask = ask
        self._give_back = give_back
        self._take = take
        self._drop = drop
        self._share = 0
        self._held = 0
        self._asked = 0
        self._waiting: deque[Rest] = deque()

    def grant(self, permits: int, share: int) -> None:
        """Give permits to the calls that wait, in order."""
        self._share = share
        self._asked -= permits
        self._held += permits
        for _ in range(permits):
            if self._waiting:
                self._waiting.popleft().set()
            else:  # its call has another one, or was cancelled
                self._return(unused=True)

    def acquire_nowait(self) -> bool:
        """Take a permit if there is one that no other call waits for; return whether it was taken."""
        if self._take is None or self._waiting or self._gate.holding or not self._take():
            return False
        self._held += 1
        return True

    async def wait(self) -> None:
        """Wait for a permit, after `acquire_nowait` found none. Cancellation: none is taken."""
        while True:
            await self._turn()
            if not self._gate.holding:
                return
            self.release(unused=True)  # its token is of the time before the pause
            await self._gate.passage()

    async def _turn(self) -> None:
        turn = Rest()
        self._waiting.append(turn)
        missing = len(self._waiting) - self._asked
        if missing > 0:
            self._asked += missing
            self._ask(missing)
        try:
            await turn.wait()
        except BaseException:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._drop_surplus()
            else:
                self.release(unused=True)
            raise

    def _drop_surplus(self) -> None:
        surplus = self._asked - len(self._waiting)
        if self._drop is not None and surplus > 0:
            self._asked -= surplus
            self._drop(surplus)

    def release(self, *, unused: bool = False) -> None:
        """Pass a permit to the next call, or give it back; `unused`: no call was made with it."""
        if self._waiting and self._held <= self._share:
            self._waiting.popleft().set()
        else:
            self._return(unused=unused)

    def _return(self, *, unused: bool) -> None:
        self._held -= 1
        self._give_back(1, unused)


class StagePermits:
    """The permits for one stage's calls in one shard; counts the time that its calls wait for them."""

    def __init__(self, permits: Permits) -> None:
        self.acquire_nowait = permits.acquire_nowait
        self.release = permits.release
        self._permits = permits
        self._waited_s = 0.0

    async def wait(self) -> None:
        began = perf_counter()
        await self._permits.wait()
        self._waited_s += perf_counter() - began

    async def acquire(self) -> None:
        """Take a permit, or wait for one. Cancellation: none is taken."""
        if not self.acquire_nowait():
            await self.wait()

    def details(self) -> Details:
        """Return how long calls have waited for permits, in total. From any thread."""
        return (Detail("limited_s", self._waited_s),)


class CallLimits:
    """The limits of one run in one event loop. In a host, `ask` and `give_back` reach the consumer's."""

    def __init__(
        self, ask: Callable[[Limit, int], None] | None = None, give_back: Callable[[str, int, bool], None] | None = None
    ) -> None:
        self._ask = ask
        self._give_back = give_back
        self._issuers: dict[str, Issuer] = {}
        self._permits: dict[str, Permits] = {}

    def permits(self, limit: Limit, gate: Gate, start: Start) -> Permits:
        """Return the permits of a limit in this event loop."""
        if limit.key not in self._permits:
            self._permits[limit.key] = self._new_permits(limit, gate, start)
        return self._permits[limit.key]

    def _new_permits(self, limit: Limit, gate: Gate, start: Start) -> Permits:
        if self._ask is not None and self._give_back is not None:
            return Permits(gate, partial(self._ask, limit), partial(self._give_back, limit.key))
        issuer = self.issuer(limit, gate, start)
        permits = Permits(
            gate,
            ask=partial(issuer.ask, THIS_LOOP),
            give_back=partial(issuer.take_back, THIS_LOOP),
            take=partial(issuer.take, THIS_LOOP),
            drop=partial(issuer.drop, THIS_LOOP),
        )
        issuer.join(THIS_LOOP, permits.grant)
        return permits

    def issuer(self, limit: Limit, gate: Gate, start: Start) -> Issuer:
        """Return the issuer of a limit, in the consumer's event loop."""
        if limit.key not in self._issuers:
            self._issuers[limit.key] = Issuer(limit, gate, start)
        return self._issuers[limit.key]

    def grant(self, key: str, permits: int, share: int) -> None:
        """Give calls the permits that `ask` has asked for."""
        self._permits[key].grant(permits, share)

    def take_back(self, holder: Hashable, key: str, permits: int, unused: bool) -> None:
        """Take permits back from a host; `unused`: no call was made with them."""
        self._issuers[key].take_back(holder, permits, unused)

    def leave(self, holder: Hashable) -> None:
        """Take all permits of a host back, which has ended."""
        for issuer in self._issuers.values():
            issuer.leave(holder)
