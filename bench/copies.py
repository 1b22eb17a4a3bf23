"""What do copies cost that strike a few bytes apart, and an allocator that returns its memory after each batch?

Both depend on where memory happens to lie: the first table puts it there, the others have processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import harness
from bench.suite import Case, Suite, Tally, at_least, within_mb
from streamline.backends.hosts.child_process import ALLOCATOR
from streamline.transforms.collate import empty_batch

Array = npt.NDArray[np.uint8]

ROWS, ROW_BYTES = 32, 128 << 10
PAGE = 4096


def view(apart: int) -> tuple[list[Array], Array]:
    """Return rows, and memory for their batch that begins `apart` bytes after them, modulo a page."""
    rows = np.ones((ROWS, ROW_BYTES), np.uint8)
    memory = np.zeros(rows.nbytes + PAGE, np.uint8)
    start = (rows.ctypes.data + apart - memory.ctypes.data) % PAGE
    return list(rows), memory[start : start + rows.nbytes].reshape(rows.shape)


def copied(batches: int, apart: int) -> Tally:
    """Copy rows into the same memory, again and again."""
    rows, batch = view(apart)
    return _timed(batches, lambda: np.stack(rows, out=batch))


def chosen(batches: int) -> Tally:
    """The same, into memory where `empty_batch` begins a batch."""
    rows, _ = view(0)
    batch = empty_batch(ROWS, rows[0], rows[0].dtype)
    return _timed(batches, lambda: np.stack(rows, out=batch))


def _timed(batches: int, make: Callable[[], Any]) -> Tally:
    make()
    began = process_time()
    total = sum(int(make()[:, -1].sum()) for _ in range(batches))
    return Tally(batches, total, process_time() - began)


def expected(batches: int) -> Tally:
    return Tally(batches, batches * ROWS)


ALLOCATE = """
from collections import deque
from resource import RUSAGE_SELF, getrusage
from time import process_time
import sys
import numpy as np

batches, primed = int(sys.argv[1]), sys.argv[2] == "primed"
if primed:
    np.empty(31 << 20, np.uint8)  # glibc keeps in the heap what is as large as a block once freed; at most 32 MiB
source, kept = np.zeros((64, 48 << 10), np.uint8), deque(maxlen=2)
for number in range(20 + batches):
    if number == 20:
        began, faults = process_time(), getrusage(RUSAGE_SELF).ru_minflt
    samples = [sample + 1 for sample in source]
    kept.append(np.stack(samples))
    del samples
print(process_time() - began, getrusage(RUSAGE_SELF).ru_minflt - faults)
"""
"""A program of its own: whether glibc gives memory back depends on all that was ever freed in a process."""


def in_process(batches: int, way: str, *, faults: bool) -> Tally:
    """Run it with glibc's defaults, primed, or with the allocator of a host process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", ALLOCATE, str(batches), way]
    env |= ALLOCATOR if way == "host" else {}
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()
    # a page fault is 4 KiB that the system has cleared: MB for each batch
    return Tally(batches, 0, float(out[0]), int(out[1]) * PAGE / 1e6 / batches if faults else None)


SAME = "2 KiB after its first row, modulo a page"
DEFAULTS, PRIMED, HOST = "glibc's defaults", "with one block of 31 MiB freed first", "as host processes are started"
MEMORY = {DEFAULTS: "none", PRIMED: "primed", HOST: "host"}
BATCHES = 200

SUITES = (
    Suite(
        question="Copies: what does it cost where a batch begins?",
        unit="items/s",
        floor=SAME,
        expected=expected,
        smoke_items=2,
        note=(
            "32 rows of 128 KiB into one array, by processor time; modulo a page, the array begins so many bytes after "
            "its first row. Two neighbouring heap blocks are 16 apart. 1,000 items/s are 4.2 GB/s. Processors differ: "
            "`rep movsb` of AMD's Zen 3 and 4 is slow there, and glibc 2.40 uses it no more."
        ),
        cases=(
            Case(SAME, partial(copied, apart=2048), BATCHES),
            Case("1 byte after it", partial(copied, apart=1), BATCHES // 4),
            Case("16 bytes after it", partial(copied, apart=16), BATCHES),
            Case("48 bytes after it", partial(copied, apart=48), BATCHES),
            Case("128 bytes after it", partial(copied, apart=128), BATCHES),
            Case("where `.batch` begins it", chosen, BATCHES, (at_least(0.9, SAME),)),
        ),
    ),
    Suite(
        question="Memory: what does it cost to give it back after each batch?",
        unit="items/s",
        floor=HOST,
        smoke_items=2,
        note="64 fresh samples of 48 KiB in a batch, two of which are kept; by processor time.",
        cases=tuple(Case(name, partial(in_process, way=way, faults=False), BATCHES) for name, way in MEMORY.items()),
    ),
    Suite(
        question="Memory: how much of it does the system clear for each batch?",
        unit="MB",
        smoke_items=2,
        note="The same: page faults times 4 KiB. A batch and its samples are 6.3 MB.",
        cases=(
            *(Case(name, partial(in_process, way=MEMORY[name], faults=True), BATCHES) for name in (DEFAULTS, PRIMED)),
            Case(HOST, partial(in_process, way="host", faults=True), BATCHES, (within_mb(1),)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
