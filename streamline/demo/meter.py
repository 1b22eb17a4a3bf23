"""Where the trainer's time goes, which says what limits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["input", "model", "saving"]


# Of the past, per batch: a live line that speaks of the last thirty batches or so follows changes, and doesn't flicker.
DECAY = 0.97


class TimeTally:
    """Seconds by part, and items."""

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = {"input": 0.0, "model": 0.0, "saving": 0.0}
        self.items = 0.0

    def fade(self, factor: float) -> None:
        """Let the past count for less."""
        self.items *= factor
        for part in self.seconds:
            self.seconds[part] *= factor

    def items_per_s(self) -> float:
        """Return the rate, 0 before the first batch."""
        seconds = sum(self.seconds.values())
        return self.items / seconds if seconds else 0.0

    def waiting(self) -> float:
        """Return the share of the time that the model waits for data."""
        return self.seconds["input"] / (sum(self.seconds.values()) or 1.0)

    def limit(self) -> Part:
        """Return what takes the most time: speeding up anything else would help less."""
        return max(self.seconds, key=self.seconds.__getitem__)


class Meter:
    """Counts the seconds that the training loop spends on each of its parts: in the whole run, and of late.

    Args:
      clock: in seconds; another one for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.whole, self.recent = TimeTally(), TimeTally()

    @contextmanager
    def spent(self, part: Part) -> Iterator[None]:
        """Count the body's time as spent on `part`."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            self.whole.seconds[part] += seconds
            self.recent.seconds[part] += seconds

    def add_items(self, count: int) -> None:
        """Count a batch, at the end of its step."""
        self.whole.items += count
        self.recent.items += count
        self.recent.fade(DECAY)
