"""`sl.Limit`: how many calls a stream makes at once, and how many a second, in all stages, shards and hosts together.

A call needs a *permit* from before it begins until it is over. The permits of a limit are issued in one place, the
consumer's event loop, so that there are never more than it says, wherever the calls are made. Each event loop that
makes calls is a *holder*: it asks for as many permits as it has calls waiting, and gives each back when its call is
over. Holders take turns, and within a holder, calls are served in the order in which they asked: no shard starves.

A permit that came back to be issued again would be idle for a round trip to another host. So a holder may pass on as
many as are its share, the limit divided by the holders, from one call to the next. What it holds beyond its share it
gives back after each call. A holder that waits and has less than its share gets it: others have too much, or some are
free. Under `per_second` each call takes a token, which only the issuer has, so there nothing is passed on.

A host that has ended has its permits taken from it, once it is known to be gone. Rejected: the limit divided among the
hosts once and for all, of which a busy host gets too little, and with more hosts than permits some nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeAlias

import anyio

from streamline.core.counters import Detail, Details
from streamline.core.gate import Gate, Rest
from streamline.core.options import check_int
from streamline.errors import PlanError, PlanTypeError

BURST_S = 0.1
"""Seconds' worth of calls that may begin at once by default: timers are late by some milliseconds."""

ENOUGH = 1 - 1e-9
"""A token, but for what rounding takes of it."""

Start: TypeAlias = Callable[[Callable[[], Awaitable[None]], str, Callable[[], None]], object]
"""`Tasks.start`."""


@dataclass(frozen=True)
class Limit:
    """How many calls of async functions and threads a stream makes: at once, a second, or both.

    One object, given to several stages as `.map(fn, concurrency=64, limit=limit)`, bounds them together, in all shards
    and in all hosts of a stream. Two objects are two limits, also if they are equal. Each stream counts for itself:
    another rank, another opening of the same pipeline.

    Args:
      concurrency: calls at once, at least 1; None: as many as the stages make.
      per_second: calls that begin in a second, on average, more than 0; None: any number. Over each time of t seconds
        at most `burst + per_second * t` permits are issued.
      burst: calls that may begin at once after a quiet time, at least 1; None: those of a tenth of a second.

    Raises:
      PlanTypeError: not a number.
      PlanError: out of range, or nothing is limited.
    """

    concurrency: int | None = None
    per_second: float | None = None
    burst: int | None = None

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
    """Insist on a `Limit`, or None."""
    if given is not None and not isinstance(given, Limit):
        raise PlanTypeError(
            f"{option} is a sl.Limit, which stages may share, got {type(given).__name__} {given!r}: "
            "limit = sl.Limit(16), or .map(fn, concurrency=16) for each shard"
        )


class TokenBucket:
    """Tokens that come at a rate, of which at most `burst` are kept. Times are those of the event loop."""

    def __init__(self, per_second: float, burst: int | None) -> None:
        self._per_second = per_second
        self._most = float(max(1, math.ceil(per_second * BURST_S)) if burst is None else burst)
        self._level = self._most
        self._at = -math.inf

    def take(self) -> bool:
        """Take a token, if there is one."""
        now = _loop_time()
        self._level = min(self._most, self._level + max(0.0, now - self._at) * self._per_second)
        self._at = now
        if self._level < ENOUGH:
            return False
        self._level -= 1
        return True

    def put_back(self, tokens: int) -> None:
        self._level = min(self._most, self._level + tokens)

    @property
    def due_s(self) -> float:
        """Seconds from the last look until there is a token."""
        return max(0.0, 1 - self._level) / self._per_second


def _loop_time() -> float:
    """Return the event loop's time; also in a callback that a thread has sent it, where anyio knows no loop."""
    return asyncio.get_running_loop().time()


class Holder:
    """What an issuer knows of one event loop.

    Attributes:
      issued: told of permits issued after they were asked for, and of the holder's share.
      waiting: asked for, and not issued yet.
      held: issued, and not given back.
    """

    def __init__(self, issued: Callable[[int, int], None]) -> None:
        self.issued = issued
        self.waiting = 0
        self.held = 0


class Issuer:
    """Issues the permits of one limit, in turn to those who wait."""

    def __init__(self, limit: Limit, gate: Gate, start: Start) -> None:
        self._limit = limit
        self._start = start
        self._free = limit.at_once
        self._bucket = None if limit.per_second is None else TokenBucket(limit.per_second, limit.burst)
        self._holders: list[Holder] = []
        self._turns: deque[Holder] = deque()
        self._paused = gate.holding
        self._issuing = False
        self._dry = False  # the next permit needs a token that isn't there yet
        self._look: anyio.Event | None = None  # set for the task that waits for tokens; None: there is none
        gate.on_pause(self._pause, self._go_on)

    def _pause(self) -> None:
        """Issue nothing: calls that waited would all begin at its end."""
        self._paused = True

    def _go_on(self) -> None:
        self._paused = False
        self._issue()

    def join(self, issued: Callable[[int, int], None]) -> Holder:
        """Add a holder."""
        holder = Holder(issued)
        self._holders.append(holder)
        self._tell_shares()
        return holder

    def leave(self, holder: Holder) -> None:
        """Take its permits from a holder whose calls are all over."""
        self._holders.remove(holder)
        self.drop(holder, holder.waiting)
        self._free += holder.held
        self._tell_shares()
        self._issue()

    def _tell_shares(self) -> None:
        for holder in self._holders:
            holder.issued(0, self._share)

    @property
    def _share(self) -> int:
        """Permits that each holder may pass on from call to call."""
        if self._bucket is not None or self._limit.concurrency is None:
            return 0
        return self._limit.concurrency // len(self._holders)

    def ask(self, holder: Holder, permits: int) -> None:
        """Issue permits as soon as there are some."""
        if self._free >= permits and self._bucket is None and not (self._turns or self._paused or self._issuing):
            self._free -= permits
            holder.held += permits
            holder.issued(permits, self._share)  # as below, in fewer steps
            return
        if not holder.waiting:
            self._turns.append(holder)
        holder.waiting += permits
        self._issue()
        if self._bucket is not None and self._turns and self._look is None:
            self._look = anyio.Event()
            self._start(self._refill, f"tokens of {self._limit}", lambda: None)

    def drop(self, holder: Holder, permits: int) -> None:
        """Issue no more the permits that a holder has asked for and doesn't need."""
        holder.waiting -= permits
        if not holder.waiting and holder in self._turns:
            self._turns.remove(holder)
        self._looked()

    def take_back(self, holder: Holder, permits: int, *, unused: bool = False) -> None:
        """Take permits back; `unused`: no call was made with them."""
        holder.held -= permits
        self._free += permits
        if unused and self._bucket is not None:
            self._bucket.put_back(permits)
        if self._turns:
            self._issue()

    def _looked(self) -> None:
        """Tell the task that waits for tokens that the next one is waited for, or none any more."""
        if self._look is not None and (self._dry or not self._turns):
            self._look.set()

    def _issue(self) -> None:
        """Issue what is free, as one list for each holder. Also in a callback of the event loop, which is no task."""
        if self._issuing:  # a holder gives back what it needs no more
            return
        self._issuing = True
        try:
            while issued := self._next():
                for holder, permits in issued.items():
                    holder.issued(permits, self._share)
        finally:
            self._issuing = False
            self._looked()

    def _next(self) -> dict[Holder, int]:
        issued: dict[Holder, int] = {}
        while self._turns and self._free and not self._paused:
            if self._bucket is not None and not self._bucket.take():
                self._dry = True
                break
            holder = self._turns.popleft()
            self._free -= 1
            holder.held += 1
            holder.waiting -= 1
            issued[holder] = issued.get(holder, 0) + 1
            if holder.waiting:
                self._turns.append(holder)
        return issued

    async def _refill(self) -> None:
        """Issue what waits for tokens as they come, until nobody waits for one."""
        assert self._bucket is not None
        while self._turns:
            self._look = anyio.Event()
            with anyio.move_on_after(self._bucket.due_s if self._dry else math.inf):
                await self._look.wait()
            self._dry = False
            self._issue()
        self._look = None


class HostHolders:
    """What one host holds: of each limit that its calls have asked for.

    Args:
      issued: tells the host of permits, (number of the limit, permits, its share).
    """

    def __init__(self, limits: CallLimits, gate: Gate, start: Start, issued: Callable[[int, int, int], None]) -> None:
        self._issuer = partial(limits.issuer, gate=gate, start=start)
        self._issued = issued
        self._holders: dict[int, Holder] = {}

    def ask(self, number: int, permits: int) -> None:
        """Issue permits of limit `number` as soon as there are some."""
        issuer = self._issuer(number)
        if number not in self._holders:
            self._holders[number] = issuer.join(partial(self._issued, number))
        issuer.ask(self._holders[number], permits)

    def take_back(self, number: int, permits: int, unused: bool) -> None:
        """Take permits back; `unused`: no call was made with them."""
        self._issuer(number).take_back(self._holders[number], permits, unused=unused)

    def leave(self) -> None:
        """Let others have all permits: the host has ended."""
        while self._holders:
            number, holder = self._holders.popitem()
            self._issuer(number).leave(holder)


class Permits:
    """The permits of one limit in one event loop: asked for, given to calls, and given back.

    Args:
      ask: asks for so many permits; `issued` is the answer, perhaps at once.
      give_back: gives so many back; the second argument: whether they are unused.
      drop: takes back what was asked for and isn't issued yet; None: it may be on its way, and is given back later.
    """

    def __init__(
        self,
        gate: Gate,
        ask: Callable[[int], None],
        give_back: Callable[[int, bool], None],
        drop: Callable[[int], None] | None = None,
    ) -> None:
        self._gate = gate
        self._ask = ask
        self._give_back = give_back
        self._drop = drop
        self._share = 0
        self._held = 0
        self._asked = 0
        self._at_once = 0  # of a call that is asking right now: what it got
        self._asking = False
        self._waiting: deque[Rest] = deque()

    def issued(self, permits: int, share: int) -> None:
        """Give permits to the calls that wait, in order."""
        self._share = share
        self._asked -= permits
        self._held += permits
        for _ in range(permits):
            if self._waiting:
                self._waiting.popleft().set()
            elif self._asking:
                self._asking, self._at_once = False, 1
            else:  # the call that it was asked for has got another one, or was cancelled
                self._return(unused=True)

    async def wait(self) -> None:
        """Wait for a permit that wasn't there. Cancellation: there is none."""
        while True:
            await self._turn()
            if not self._gate.holding:
                return
            self.release(unused=True)  # its token is of the time before the pause
            await self._gate.passage()

    def acquire_nowait(self) -> bool:
        """Take a permit if there is one that no other call waits for."""
        if self._waiting or self._gate.holding:
            return False
        self._asking, self._at_once = True, 0
        self._asked += 1
        self._ask(1)
        self._asking = False
        return bool(self._at_once)

    async def _turn(self) -> None:
        turn = Rest()
        self._waiting.append(turn)
        if (more := len(self._waiting) - self._asked) > 0:
            self._asked += more
            self._ask(more)
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
        """Give a permit to the next call, or back; `unused`: no call was made with it."""
        if self._waiting and self._held <= self._share:
            self._waiting.popleft().set()
        else:
            self._return(unused=unused)

    def _return(self, *, unused: bool) -> None:
        self._held -= 1
        self._give_back(1, unused)


class StagePermits:
    """The permits for one stage's calls in one shard.

    Attributes:
      acquire_nowait, release: as of `Permits`.
    """

    def __init__(self, permits: Permits) -> None:
        self.acquire_nowait = permits.acquire_nowait
        self.release = permits.release
        self._permits = permits
        self._waited_s = 0.0

    async def wait(self) -> None:
        """Wait for a permit that wasn't there. Cancellation: there is none."""
        began = perf_counter()
        await self._permits.wait()
        self._waited_s += perf_counter() - began

    async def acquire(self) -> None:
        """Take a permit, or wait for one. Cancellation: there is none."""
        if not self.acquire_nowait():
            await self.wait()

    def details(self) -> Details:
        """Return how long calls have waited for permits, all together. From any thread."""
        return (Detail("limited_s", self._waited_s),)


class CallLimits:
    """The limits of one run, in one event loop. A limit is known by its number among those of the plan.

    Args:
      limits: of the plan.
      ask: in a host: asks the consumer for permits, (number, permits); None: they are issued here.
      give_back: in a host: gives permits back, (number, permits, unused).
    """

    def __init__(
        self,
        limits: Sequence[Limit] = (),
        *,
        ask: Callable[[int, int], None] | None = None,
        give_back: Callable[[int, int, bool], None] | None = None,
    ) -> None:
        self.limits = list(limits)
        self._ask = ask
        self._give_back = give_back
        self._issuers: dict[int, Issuer] = {}
        self._permits: dict[int, Permits] = {}

    def number(self, limit: Limit) -> int:
        """Return the number of a limit; one that isn't the plan's, of a stage that runs by itself, gets the next."""
        for number, known in enumerate(self.limits):
            if known is limit:
                return number
        self.limits.append(limit)
        return len(self.limits) - 1

    def permits(self, limit: Limit, gate: Gate, start: Start) -> Permits:
        """Return the permits of a limit in this event loop."""
        number = self.number(limit)
        if number not in self._permits:
            self._permits[number] = self._new(number, gate, start)
        return self._permits[number]

    def _new(self, number: int, gate: Gate, start: Start) -> Permits:
        if self._ask is not None and self._give_back is not None:
            return Permits(gate, partial(self._ask, number), partial(self._give_back, number))
        issuer = self.issuer(number, gate, start)
        permits = Permits(
            gate,
            lambda wanted: issuer.ask(holder, wanted),
            lambda given, unused: issuer.take_back(holder, given, unused=unused),
            lambda unwanted: issuer.drop(holder, unwanted),
        )
        holder = issuer.join(permits.issued)
        return permits

    def issuer(self, number: int, gate: Gate, start: Start) -> Issuer:
        """Return what issues the permits of limit `number`, in the consumer's event loop."""
        if number not in self._issuers:
            self._issuers[number] = Issuer(self.limits[number], gate, start)
        return self._issuers[number]

    def issued(self, number: int, permits: int, share: int) -> None:
        """Permits for which `ask` has asked have come."""
        self._permits[number].issued(permits, share)
