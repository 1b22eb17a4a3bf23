"""What do all ranks on one page cost: CPU time of a line, where it is published, and at rank 0?"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from time import thread_time
from unittest.mock import patch

from msgspec.structs import replace

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, WrongItemsError, within_ms
from streamline.backends.network.handshake import PeerHello
from streamline.observe import rank_publishing
from streamline.observe.rank_lines import RankLine, StageLine, StreamLine, decoded, encoded

EVERY_S = 0.26
"""In place of a second: more than figures are used again for, so that a line takes what it would."""

PUBLISHER = "streamline rank publisher"


def plan(stages: int, workers: int) -> sl.Pipeline[int]:
    pipe = sl.from_items(range(10**9)).shard(workers)
    for _ in range(stages - 2):
        pipe = pipe.map(abs)
    return pipe.merge()


@contextmanager
def counted() -> Iterator[threading.Semaphore]:
    """Yield what is released for each line that has come to rank 0, at which they come faster than they would."""
    came = threading.Semaphore(0)

    def count(text: bytes) -> RankLine:
        came.release()
        return decoded(text)

    with (
        patch.object(rank_publishing, "decoded", count),
        patch.object(rank_publishing, "EVERY_S", EVERY_S),
        patch.object(rank_publishing, "SHARE", 1.0),
        patch.dict(os.environ, STREAMLINE_KEY="of a benchmark, on this machine"),
    ):
        yield came


def cpu_s(name: str) -> float:
    """Return the CPU time of this process's thread of a name."""
    thread = next(one for one in threading.enumerate() if one.name == name)
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def published(n: int, *, stages: int, workers: int) -> Tally:
    """Publish n lines of a rank that waits for its consumer, to a rank 0 of the same process."""
    page = f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.2:8600"  # of this machine, and no other process's
    with (
        counted() as came,
        sl.from_items(range(2)).shard(2).open(rank=0, world_size=2, page=page),
        plan(stages, 2 * workers).open(rank=1, world_size=2, page=page) as stream,
    ):
        next(stream)
        came.acquire()  # it has connected
        began_s = cpu_s(PUBLISHER)
        for _ in range(n):
            came.acquire()
        used_s = cpu_s(PUBLISHER) - began_s
    return Tally(n, 0, used_s / n)


def looked_at(n: int, *, ranks: int, slow: bool) -> Tally:
    """Look n times at what as many ranks have published, each a line; return the CPU time of a look."""
    stages = tuple(StageLine(f"map(decode_{at})", 0.01, 0.001, 4.0, 1000.0) for at in range(30))
    usual = StreamLine("items", over_s=10.0, rate=100.0, waits=0.01, stages=stages)
    lines = [encoded(RankLine(1.0, 1.0, (usual,)))] * ranks
    if slow:
        lines[-1] = encoded(RankLine(1.0, 1.0, (replace(usual, waits=0.9),)))
    used_s = 0.0
    with patch.object(rank_publishing, "EVERY_S", 1e9), ExitStack() as stack:
        collector = rank_publishing.RankCollector(rank_publishing.JobRanks(0, ranks + 1), lambda: (usual,))
        stack.callback(collector.close)
        there = [stack.enter_context(_connected(collector, rank)) for rank in range(1, ranks + 1)]
        for _ in range(n):
            for sock, line in zip(there, lines, strict=True):
                sock.sendall(line)
            began_s = thread_time()
            collector._look()
            used_s += thread_time() - began_s
        if (collector.slow != {}) is not slow:
            raise WrongItemsError(f"the slowest rank: {collector.slow}")
    return Tally(n, 0, used_s / n)


def _connected(collector: rank_publishing.RankCollector, rank: int) -> socket.socket:
    here, there = socket.socketpair()
    hello = PeerHello(role="node", node="node", pid=rank, ticket=f"{rank}/{collector.world_size}")
    collector._answer(rank_publishing._RankConnection(here, hello))
    return there


def expected(n: int) -> Tally:
    return Tally(n, 0)


LINES = 12

SUITES = (
    Suite(
        question="All ranks on one page: CPU time of a line",
        unit="ms",
        expected=expected,
        smoke_items=1,
        note=(
            "A line a second is 0.1 % of the time if it takes 1 ms; one that takes longer is published less often, so "
            "that it is 0.1 %, too: every 10 s, if it takes 10 ms. Rank 0 looks once a second at what all the others "
            "have published, 30 stages each."
        ),
        cases=(
            Case("10 stages, 1 worker", partial(published, stages=10, workers=1), LINES, (within_ms(2.0),)),
            Case("10 stages, 4 workers", partial(published, stages=10, workers=4), LINES),
            Case("30 stages, 4 workers", partial(published, stages=30, workers=4), LINES, (within_ms(10.0),)),
            Case("30 stages, 64 workers", partial(published, stages=30, workers=64), LINES),
            Case("a look of rank 0: 64 ranks", partial(looked_at, ranks=64, slow=False), LINES, (within_ms(5.0),)),
            Case("a look of rank 0: 64 ranks, one is slow", partial(looked_at, ranks=64, slow=True), LINES),
            Case("a look of rank 0: 1,000 ranks, one is slow", partial(looked_at, ranks=1000, slow=True), LINES),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
