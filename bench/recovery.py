"""How soon does a stream go on after a host, or a machine, was killed? To the first item of the successor."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import streamline as sl
from bench import harness, remote
from bench.suite import Case, Suite, Tally, within_ms
from streamline.backends.base import Backend

BEFORE = 50
"""Items that a host gives before it is killed."""


def worked_on(item: int) -> tuple[int, int]:
    sleep(0.001)
    return os.getpid(), os.getppid()


def after_a_kill(n: int, where: Callable[[int], AbstractContextManager[Backend]], agent: bool) -> Tally:
    """Kill hosts, or the agents that run them; return the median of the seconds to an item of another host."""
    logging.getLogger("streamline.hosts").setLevel(logging.ERROR)  # each death is logged
    seconds = []
    with (
        where(n) as backend,
        sl.from_items(range(10**9)).shard(1).map(worked_on).merge().open(backend=backend) as stream,
    ):
        for _ in range(n):
            for _ in range(BEFORE):
                host, parent = next(stream)
            began = perf_counter()
            os.kill(parent if agent else host, signal.SIGKILL)
            while next(stream)[0] == host:  # what it had sent before
                pass
            seconds.append(perf_counter() - began)
    return Tally(n, 0, median(seconds))


def here(_: int) -> Any:
    return nullcontext(sl.Processes(1))


def there(_: int) -> Any:
    return remote.machines()


def on_ray(_: int) -> Any:
    return nullcontext(sl.Ray(1))


def there_and_elsewhere(kills: int) -> Any:
    return remote.machines(agents=kills + 1, hosts=1)


SUITES = (
    Suite(
        question="Recovery: how long from the death of a host to the first item of the one that replaces it?",
        unit="ms",
        smoke_items=1,
        note="One shard, 1 ms an item; SIGKILL, three times, the median. Starting an interpreter and imports included.",
        cases=(
            Case(
                "Processes(1), a host is killed", partial(after_a_kill, where=here, agent=False), 3, (within_ms(1000),)
            ),
            Case(
                "Remote(1), a host is killed",
                partial(after_a_kill, where=there, agent=False),
                3,
                (within_ms(1000),),
            ),
            Case(
                "Remote(1), its agent is killed, another one is there",
                partial(after_a_kill, where=there_and_elsewhere, agent=True),
                3,
                (within_ms(3000),),
            ),
            *(
                Case(
                    f"Ray(1), its {whose} is killed",
                    partial(after_a_kill, where=on_ray, agent=whose == "actor"),
                    3,
                    (within_ms(bound_ms),),
                    ("ray",),
                    remote.start_cluster,
                )
                for whose, bound_ms in (("host", 1000), ("actor", 3000))
            ),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
