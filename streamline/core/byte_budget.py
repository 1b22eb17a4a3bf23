"""How many bytes may be read ahead, over all flows of one run in one process.

Inputs are throttled, never outputs. A flow may always start the request that its reader waits for, so no flow waits for
another one's reader; of the budget, one part of a file is kept free for each flow for that. What is held is at most the
budget, or one request a flow where requests are larger than that.
"""

from __future__ import annotations

from collections.abc import Callable

PART_BYTES = 8 * 2**20
"""Bytes of a large object that one request asks for: the usual budget holds 32 such requests."""

MIN_PART_BYTES = 64 * 2**10
"""Parts get smaller where many flows share a budget; with less than this, headers and round trips would count."""


class Budget:
    """The bytes that all flows of a run hold: that were asked for, or have arrived and are not decoded yet."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._accounts = 0
        self._waiting: set[Callable[[], None]] = set()

    def account(self) -> Account:
        self._accounts += 1
        return Account(self)

    @property
    def part_bytes(self) -> int:
        """Bytes that one request for a part of a large object asks for."""
        return min(PART_BYTES, max(MIN_PART_BYTES, self.most // (4 * max(1, self._accounts))))

    def admits(self, count: int) -> bool:
        """Whether `count` bytes may be read ahead, besides what every flow may read at once."""
        return self.held + count <= self.most - self._accounts * self.part_bytes

    def call_when_freed(self, poke: Callable[[], None]) -> None:
        """Call `poke` once, when bytes are freed."""
        self._waiting.add(poke)

    def forget(self, poke: Callable[[], None]) -> None:
        self._waiting.discard(poke)

    def close(self) -> None:
        self._accounts -= 1
        self.wake()

    def wake(self) -> None:
        """Wake the flows that wait for bytes."""
        if self._waiting:
            waiting, self._waiting = self._waiting, set()
            for poke in waiting:
                poke()


class Account:
    """What one flow holds. Its own readers ask for more by themselves; other flows are woken."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    @property
    def part_bytes(self) -> int:
        return self._budget.part_bytes

    def take(self, count: int, awaited: bool) -> bool:
        """Take `count` bytes, if admitted; always if `awaited`: the flow's reader waits for them."""
        budget = self._budget
        if not awaited and not budget.admits(count):
            return False
        budget.held += count
        self.held += count
        return True

    def give(self, count: int) -> None:
        budget = self._budget
        budget.held -= count
        self.held -= count
        budget.wake()

    def close(self) -> None:
        self._budget.held -= self.held
        self.held = 0
        self._budget.close()
