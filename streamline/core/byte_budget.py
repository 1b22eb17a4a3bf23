"""How many bytes may be read ahead, over all flows of one run in one process.

Inputs are throttled, never outputs: a request that is running ends without asking for anything more. Each flow may
always start the request that its reader waits for, so no flow ever waits for another one's reader; of the budget, one
part of a file is kept free for each flow for that. So what is held is at most the budget, or one request a flow where
requests are larger than that.
"""

from __future__ import annotations

from collections.abc import Callable

PART_BYTES = 8 * 2**20
"""Bytes of a large object that one request asks for: the usual budget holds 32 such requests."""

MIN_PART_BYTES = 64 * 2**10
"""Parts get smaller where many flows share a budget; with less than this, headers and round trips would count."""


class Budget:
    """The bytes that all flows of a run hold.

    Attributes:
      held: bytes that are held now: asked for, or arrived and not taken by a format yet.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._accounts = 0
        self._hungry: set[Callable[[], None]] = set()

    def account(self) -> Account:
        """Return the account of one more flow."""
        self._accounts += 1
        return Account(self)

    @property
    def part_bytes(self) -> int:
        """Bytes that one request for a part of a large object asks for."""
        return min(PART_BYTES, max(MIN_PART_BYTES, self.most // (4 * max(1, self._accounts))))

    def admits(self, count: int) -> bool:
        """Whether `count` bytes may be read ahead, besides what every flow may read at once."""
        return self.held + count <= self.most - self._accounts * self.part_bytes

    def when_freed(self, poke: Callable[[], None]) -> None:
        """Call `poke` once, as soon as bytes are free again."""
        self._hungry.add(poke)

    def forget(self, poke: Callable[[], None]) -> None:
        """Don't call `poke` any more."""
        self._hungry.discard(poke)

    def close(self) -> None:
        """An account is closed."""
        self._accounts -= 1
        self.freed()

    def freed(self) -> None:
        """Bytes are free again: wake the flows that wait for some."""
        if self._hungry:
            hungry, self._hungry = self._hungry, set()
            for poke in hungry:
                poke()


class Account:
    """What one flow holds. Its own readers ask for more by themselves; others are notified of what is given back."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    @property
    def part_bytes(self) -> int:
        return self._budget.part_bytes

    def take(self, count: int, awaited: bool) -> bool:
        """Take `count` bytes, if they may be had; `awaited`: the flow's reader can't go on without them."""
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
        if budget._hungry:
            budget.freed()

    def close(self) -> None:
        """Give everything back."""
        self._budget.held -= self.held
        self.held = 0
        self._budget.close()
