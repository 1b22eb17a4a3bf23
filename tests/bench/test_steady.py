"""A steady rate leaves out the first delivery, and the time before it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from bench import steady
from bench.steady import steady_tally
from bench.suite import Tally

DELIVERIES = [[1, 2], [3, 4], [5]]


def read(delivery: list[int]) -> tuple[int, int]:
    return len(delivery), sum(delivery)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second each time it is read."""
    seconds: Iterator[float] = iter(range(100))
    monkeypatch.setattr(steady, "perf_counter", lambda: next(seconds))


@pytest.mark.usefixtures("_clock")
def test_all_items_count_as_though_they_had_come_like_those_after_the_first_delivery() -> None:
    assert steady.consume(DELIVERIES, read) == Tally(5, 15, seconds=2 * 5 / 3)


@pytest.mark.usefixtures("_clock")
async def test_an_async_loop_is_timed_likewise() -> None:
    async def deliveries() -> AsyncIterator[list[int]]:
        for delivery in DELIVERIES:
            yield delivery

    assert await steady.consume_async(deliveries(), read) == Tally(5, 15, seconds=2 * 5 / 3)


def test_one_delivery_has_no_rate_but_a_tally() -> None:
    assert steady_tally(2, 3, 2, 0.0) == Tally(2, 3, seconds=0.0)
