"""What does the live page cost? Tiny items without a page, with one, and with one that is watched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least
from bench.tiny_items import MANY, add_one, consume, expected

WATCHER = "import sys, urllib.request\nfor line in urllib.request.urlopen(sys.argv[1]): print(len(line), flush=True)\n"


def pipeline(n: int) -> sl.Pipeline[int]:
    return sl.from_items(range(n)).shard(4).map(add_one).merge()


def timed(items: Iterable[int]) -> Tally:
    """Consume items, and tell how long that took: without the start of a watcher."""
    began = perf_counter()
    return replace(consume(items), seconds=perf_counter() - began)


def without(n: int) -> Tally:
    with pipeline(n).open() as stream:
        return timed(stream)


def unwatched(n: int) -> Tally:
    with pipeline(n).open(page=True) as stream:
        return timed(stream)


@contextmanager
def watcher(url: str) -> Iterator[None]:
    """Watch a page from another process, from its first update on."""
    with subprocess.Popen([sys.executable, "-c", WATCHER, url], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def watched(n: int) -> Tally:
    with pipeline(n).loader(page=True) as loader, watcher(f"{loader.page}events"):
        return timed(loader)


NONE = "no page"
LEAST = 0.99

SUITES = (
    Suite(
        question="The live page: what does it take from tiny items?",
        unit="items/s",
        expected=expected,
        smoke_items=2_000,
        note="range → x + 1 in 4 workers → strict merge → a plain for. Watched: by a client in another process.",
        cases=(
            Case(NONE, without, 4 * MANY),
            Case("a page that nobody looks at", unwatched, 4 * MANY, (at_least(LEAST, NONE),)),
            Case("a page that is watched", watched, 4 * MANY, (at_least(LEAST, NONE),)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
