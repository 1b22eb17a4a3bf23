"""Times a stream from its first delivery on, over plain and async loops alike: starting up is another question.

By the clock, or by the CPU time that this process takes.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from bench.suite import Tally

Read = Callable[[Any], tuple[int, float]]
"""Returns how many items a delivery has, and their checksum."""


@dataclass
class Meter:
    """Counts deliveries, and knows when the first and the last one came."""

    read: Read
    clock: Callable[[], float] | None = None
    """None: `perf_counter`."""
    count: int = 0
    checksum: float = 0
    first_count: int = 0
    first_at: float = 0.0
    last_at: float = 0.0

    def see(self, delivery: Any) -> None:
        count, checksum = self.read(delivery)
        self.last_at = (self.clock or perf_counter)()
        if not self.count:
            self.first_count, self.first_at = count, self.last_at
        self.count += count
        self.checksum += checksum

    def tally(self) -> Tally:
        return steady_tally(self.count, self.checksum, self.first_count, self.last_at - self.first_at)


def steady_tally(count: int, checksum: float, first_count: int, seconds: float) -> Tally:
    """Return a tally as though all items had come at the rate of those after the first delivery.

    Args:
      count: all items.
      checksum: of all items.
      first_count: items of the first delivery.
      seconds: from the first delivery to the last one.
    """
    return Tally(count, checksum, seconds * count / max(count - first_count, 1))


def consume(deliveries: Iterable[Any], read: Read, clock: Callable[[], float] | None = None) -> Tally:
    meter = Meter(read, clock)
    for delivery in deliveries:
        meter.see(delivery)
    return meter.tally()


async def consume_async(deliveries: AsyncIterable[Any], read: Read, clock: Callable[[], float] | None = None) -> Tally:
    meter = Meter(read, clock)
    async for delivery in deliveries:
        meter.see(delivery)
    return meter.tally()
