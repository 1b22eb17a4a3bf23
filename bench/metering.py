"""What does counting cost? The tiny items of `tiny_items`, with the meters on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from bench import harness, process_tiny, tiny_items
from bench.suite import Case, Suite, Tally, at_least
from bench.tiny_items import MANY, expected
from streamline.core.meters import Meters


@contextmanager
def unmetered() -> Iterator[None]:
    """Let streams be opened that count nothing: there is no option for that."""
    meters = partial(Meters, on=False)
    with mock.patch("streamline.runtime.run.Meters", meters):
        yield


async def async_for_off(n: int) -> Tally:
    with unmetered():
        return await tiny_items.async_for(n)


def plain_for_off(n: int) -> Tally:
    with unmetered():
        return tiny_items.plain_for(n)


async def strict_merge_off(n: int) -> Tally:
    with unmetered():
        return await tiny_items.strict_merge(n)


def process_off(n: int) -> Tally:
    with unmetered():
        return process_tiny.plain_for(n)


OFF = "{}, nothing counted"
ASYNC, PLAIN, MERGE = "async for", "plain for", "4 workers, strict merge"
PROCESS = "Processes(1), plain for"
LEAST = 0.97

SUITES = (
    Suite(
        question="Metering: what does counting take from tiny items?",
        unit="items/s",
        expected=expected,
        smoke_items=2_000,
        note="range → x + 1 → a consumer that counts and adds up. Out of a process: from the first delivery on.",
        cases=(
            Case(OFF.format(ASYNC), async_for_off, MANY),
            Case(ASYNC, tiny_items.async_for, MANY, (at_least(LEAST, OFF.format(ASYNC)),)),
            Case(OFF.format(PLAIN), plain_for_off, MANY),
            Case(PLAIN, tiny_items.plain_for, MANY, (at_least(LEAST, OFF.format(PLAIN)),)),
            Case(OFF.format(MERGE), strict_merge_off, MANY),
            Case(MERGE, tiny_items.strict_merge, MANY, (at_least(LEAST, OFF.format(MERGE)),)),
            Case(OFF.format(PROCESS), process_off, MANY),
            Case(PROCESS, process_tiny.plain_for, MANY, (at_least(LEAST, OFF.format(PROCESS)),)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
