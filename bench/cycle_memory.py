"""How much memory does a cache of 1 GB take at its peak: a cycle of `.regenerate`, two, and `.cache(max_bytes)`? Linux.

Peaks are of the whole process, over what it had before: items, what is on its way, and what Python adds.
"""

from __future__ import annotations

import ctypes
import platform
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import streamline as sl
from bench import harness
from bench.host_memory import children
from bench.suite import Case, Suite, Tally, within_mb

ROW_BYTES, DRAWN, BLOCK = 4096, 500, 64
MB_ROWS = 1e6 / ROW_BYTES
LARGE_BYTES, BATCH = 2**20, 8
CYCLES = 4


def rows(number: int) -> np.ndarray:
    """Return what a generator makes at once, 2 MB."""
    return np.full((DRAWN, ROW_BYTES), number % 256, np.uint8)


def one(number: int, nbytes: int) -> np.ndarray:
    """Return an item."""
    return np.full(nbytes, number % 256, np.uint8)


def status(what: str, process: str = "self") -> float:
    """Return what a process takes (VmRSS), or has taken at the most since its peak was forgotten (VmHWM), in MB."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def forget_peak() -> float:
    """Return what this process takes now, without what C's allocator keeps of the round before."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def serve(pipe: sl.Pipeline[Any], wanted: int, count: Callable[[Any], int], backend: Any = None) -> float:
    """Take so many items, or rows, and return the peak of the process that serves them, in MB."""
    served, more, before = 0, {} if backend is None else {"backend": backend}, children()
    with pipe.open(**more) as stream:
        while served < wanted:
            served += count(next(stream))
        if backend is None:
            return status("VmHWM")
        (worker,) = children() - before
        return status("VmHWM", f"{worker}")


def in_rows(n: int, *, overlap: bool) -> Tally:
    """Serve cycles of `n` MB as blocks of rows."""
    size, before = int(n * MB_ROWS) // BLOCK * BLOCK, forget_peak()
    pipe = sl.from_items(range(10**6)).map(rows).regenerate(size, block=BLOCK, overlap=overlap)
    return Tally(n, 0, mb=serve(pipe, CYCLES * size, len) - before)


def in_process(n: int) -> Tally:
    """Serve them from a worker's process, and return all that this takes."""
    size = int(n * MB_ROWS) // BLOCK * BLOCK
    pipe = sl.from_items(range(10**6)).map(rows).regenerate(size, block=BLOCK, overlap=True)
    return Tally(n, 0, mb=serve(pipe, CYCLES * size, len, sl.Processes(1)))


def small(n: int, *, overlap: bool) -> Tally:
    """Serve cycles of `n` MB in items as large as a row, one by one."""
    size, before = int(n * MB_ROWS), forget_peak()
    made = sl.from_items(range(10**8)).map(partial(one, nbytes=ROW_BYTES))
    return Tally(n, 0, mb=serve(made.regenerate(size, overlap=overlap), CYCLES * size, lambda _: 1) - before)


def large(n: int, *, overlap: bool, reuse: int = 1, spill: bool = False) -> Tally:
    """Serve cycles of `n` MB in batches of items of 1 MiB."""
    size, before = int(n * 1e6 / LARGE_BYTES), forget_peak()
    made = sl.from_items(range(10**8)).map(partial(one, nbytes=LARGE_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        pipe = made.regenerate(size, overlap=overlap, reuse=reuse, spill=folder if spill else None).batch(BATCH)
        return Tally(n, 0, mb=serve(pipe, CYCLES * size * reuse, len) - before)


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
        return Tally(n, 0, mb=status("VmHWM") - before)
    raise AssertionError(f"the cache took {taken} items, more than it may hold")


SIZE_MB = 1000
ONE, TWO = within_mb(1.3 * SIZE_MB), within_mb(2.3 * SIZE_MB)

SUITES: tuple[Suite, ...] = (
    Suite(
        question="Caches of 1 GB: what does the process take at its peak?",
        unit="MB",
        smoke_items=20,
        note=(
            f"Over what it had before; a worker's process: all of it. {CYCLES} cycles each. Rows of "
            f"{ROW_BYTES} bytes, drawn by {DRAWN}, served by {BLOCK}; items of as many bytes one by one, of 1 MiB in "
            f"batches of {BATCH}. The cache is given twice what it may hold, and says so."
        ),
        cases=(
            Case(".regenerate, rows", partial(in_rows, overlap=False), SIZE_MB, (ONE,)),
            Case(".regenerate, items of 4 KiB", partial(small, overlap=False), SIZE_MB, (ONE,)),
            Case(".regenerate(reuse=2), items of 1 MiB", partial(large, overlap=False, reuse=2), SIZE_MB, (ONE,)),
            Case(".regenerate(overlap=True), rows", partial(in_rows, overlap=True), SIZE_MB, (TWO,)),
            Case(".regenerate(overlap=True), rows, Processes(1)", in_process, SIZE_MB, (TWO,)),
            Case(".regenerate(overlap=True), items of 4 KiB", partial(small, overlap=True), SIZE_MB, (TWO,)),
            Case(".regenerate(overlap=True), items of 1 MiB", partial(large, overlap=True), SIZE_MB, (TWO,)),
            Case(
                ".regenerate(overlap=True, spill=), items of 1 MiB",
                partial(large, overlap=True, spill=True),
                SIZE_MB,
                (TWO,),
            ),
            Case(".cache(max_bytes=1e9), overfull", cached, SIZE_MB, (ONE,)),
        ),
    ),
)
if not Path("/proc/self/clear_refs").exists():
    SUITES = ()


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
