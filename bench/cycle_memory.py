"""How much memory does a cache of 1 GB take at its peak: a cycle of `.regenerate`, two, and `.cache(max_bytes)`? Linux.

Peaks are of the whole process, over what it had before: rows, what is on its way, and what Python adds.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, within_mb

ROW_BYTES, DRAWN, BLOCK = 4096, 500, 64
MB_ROWS = 1e6 / ROW_BYTES
CYCLES = 2


def rows(number: int) -> np.ndarray:
    """Return what a generator makes at once, 2 MB."""
    return np.full((DRAWN, ROW_BYTES), number % 256, np.uint8)


def resident(peak: bool) -> float:
    """Return what this process takes, or has taken at the most since its peak was forgotten, in MB."""
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return resident(peak=False)


def regenerated(n: int, *, overlap: bool) -> Tally:
    """Serve two cycles of `n` MB, and count what came."""
    size = int(n * MB_ROWS) // BLOCK * BLOCK
    before = forget_peak()
    pipe = sl.from_items(range(10**6)).map(rows).regenerate(size, block=BLOCK, overlap=overlap)
    served = 0
    with pipe.open() as stream:
        while served < CYCLES * size:
            served += len(next(stream))
    return Tally(n, 0, mb=resident(peak=True) - before)


def cached(n: int) -> Tally:
    """Read twice as much as a cache of `n` MB may hold, until it says so."""
    before = forget_peak()
    pipe = sl.from_items(range(int(2 * n / (DRAWN * ROW_BYTES / 1e6)))).map(rows).cache(max_bytes=int(n * 1e6))
    taken = 0
    try:
        with pipe.open() as stream:
            for _ in stream:
                taken += 1
    except sl.errors.CacheFull:
        return Tally(n, 0, mb=resident(peak=True) - before)
    raise AssertionError(f"the cache took {taken} items, more than it may hold")


SIZE_MB = 1000

SUITES: tuple[Suite, ...] = (
    Suite(
        question="Caches of 1 GB: what does the process take at its peak?",
        unit="MB",
        smoke_items=20,
        note=(
            f"Over what it had before. Rows of {ROW_BYTES} bytes, drawn by {DRAWN}, served by {BLOCK}, {CYCLES} cycles "
            "each; the cache is given twice what it may hold, and says so."
        ),
        cases=(
            Case(".regenerate, one cycle", partial(regenerated, overlap=False), SIZE_MB, (within_mb(1.3 * SIZE_MB),)),
            Case(".regenerate(overlap=True)", partial(regenerated, overlap=True), SIZE_MB, (within_mb(2.3 * SIZE_MB),)),
            Case(".cache(max_bytes=1e9), overfull", cached, SIZE_MB, (within_mb(1.3 * SIZE_MB),)),
        ),
    ),
)
if not Path("/proc/self/clear_refs").exists():
    SUITES = ()


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
