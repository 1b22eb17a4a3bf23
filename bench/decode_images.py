"""Do `sl.decode.image()` and its threads decode as many images as simplejpeg called in a pool?"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer
from bench.thread_decode import POOL, Files, pool


def prepare(_: int) -> None:
    pool()


def _tally(images: Iterable[Any]) -> Tally:
    count = total = 0
    for image in images:
        count += 1
        total += int(image[0, 0].sum())
    return Tally(count, total)


@cache
def expected(n: int) -> Tally:
    decode = peer("simplejpeg").decode_jpeg
    corners = [int(decode(file)[0, 0].sum()) for file in pool()]
    return Tally(n, sum(corners[index % POOL] for index in range(n)))


def in_a_pool(n: int) -> Tally:
    with ThreadPoolExecutor(2) as executor:
        return _tally(executor.map(partial(peer("simplejpeg").decode_jpeg, colorspace="RGB"), Files(n)))


def by_map(n: int) -> Tally:
    with sl.from_items(Files(n)).map(sl.decode.image(), executor="thread", concurrency=2).open() as stream:
        return _tally(stream)


def by_auto(n: int) -> Tally:
    samples = sl.from_items(Files(n)).map(lambda data: {"jpg": data})
    with samples.map(sl.decode.auto(), executor="thread", concurrency=2).open() as stream:
        return _tally(sample["jpg"] for sample in stream)


OWN, NEEDS, ITEMS = "simplejpeg in ThreadPoolExecutor(2)", ("PIL", "simplejpeg"), 1_000
SUITES = (
    Suite(
        question="JPEGs: does sl.decode.image decode as many as its library called in a pool?",
        unit="items/s",
        floor=OWN,
        expected=expected,
        smoke_items=64,
        note="640 x 480. Whole runs, opening and closing included.",
        cases=(
            Case(OWN, in_a_pool, ITEMS, peers=NEEDS, prepare=prepare),
            Case("streamline, image()", by_map, ITEMS, (at_least(0.95, OWN),), peers=NEEDS, prepare=prepare),
            Case("streamline, auto()", by_auto, ITEMS, peers=NEEDS, prepare=prepare),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
