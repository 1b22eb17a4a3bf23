"""How much memory does a worker process take, over an interpreter that has done nothing but import numpy? Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import streamline as sl
from bench import harness
from bench.first_batch import ITEMS, Samples, pipeline
from bench.suite import Case, Suite, Tally, WrongItemsError, peer, within_mb

Kind = Literal["resident", "shared pages divided", "private"]

FIELDS: dict[Kind, tuple[str, ...]] = {
    "resident": ("Rss",),
    "shared pages divided": ("Pss",),
    "private": ("Private_Clean", "Private_Dirty"),
}
"""Of /proc/PID/smaps_rollup."""

WORKERS = 2
BARE = "import numpy, sys; print('ready', flush=True); sys.stdin.read()"
ONE_BLAS_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def megabytes(pid: int, kind: Kind) -> float:
    """Return what a process takes, in 1e6 bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return sum(kilobytes[name] for name in FIELDS[kind]) * 1024 / 1e6


def bare(kind: Kind) -> float:
    """Return what an interpreter takes that has imported numpy, with one BLAS thread, as hosts have."""
    command, env = [sys.executable, "-c", BARE], {**os.environ, **ONE_BLAS_THREAD}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = megabytes(process.pid, kind)
        process.communicate()
    return found


def interpreter(n: int, *, kind: Kind) -> Tally:
    return Tally(n, 0, mb=bare(kind))


def hosts(n: int, *, kind: Kind) -> Tally:
    before = children()
    with pipeline().open(backend=sl.Processes(WORKERS)) as stream:
        return over_bare(n, stream, before, kind)


def torch_workers(n: int, *, kind: Kind) -> Tally:
    before = children()
    loader = peer("torch.utils.data").DataLoader(
        Samples(), batch_size=32, num_workers=WORKERS, multiprocessing_context="spawn"
    )
    return over_bare(n, iter(loader), before, kind)


def over_bare(n: int, batches: Iterator[Any], before: set[int], kind: Kind) -> Tally:
    """Measure the workers in mid-stream, when each of them has delivered."""
    for _ in range(2 * WORKERS):
        next(batches)
    workers = children() - before
    if len(workers) != WORKERS:
        raise WrongItemsError(f"expected {WORKERS} workers, found {len(workers)} processes")
    return Tally(n, 0, mb=sum(megabytes(pid, kind) for pid in workers) / WORKERS - bare(kind))


def children() -> set[int]:
    """Return the processes that this one has started, but for multiprocessing's own helper."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that ended since it was listed
            for pid in (task / "children").read_text().split():
                if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text():
                    pids.add(int(pid))
    return pids


MOST_MB = 45

SUITES: tuple[Suite, ...] = (
    Suite(
        question="Memory: what does one more process take?",
        unit="MB",
        smoke_items=ITEMS,
        note=(
            "The mean of 2 worker processes in mid-stream, less what an interpreter takes that has imported numpy. "
            "*resident*: all its pages; *shared pages divided*: a page that k processes have counts 1/k (PSS); "
            "*private*: its own pages only (USS)."
        ),
        cases=(
            *(Case(f"python, import numpy, {kind}", partial(interpreter, kind=kind), 1) for kind in FIELDS),
            *(
                Case(f"streamline, Processes(2), {kind}", partial(hosts, kind=kind), 1, (within_mb(MOST_MB),))
                for kind in FIELDS
            ),
            *(
                Case(f"torch DataLoader, spawn, {kind}", partial(torch_workers, kind=kind), 1, peers=("torch",))
                for kind in FIELDS
            ),
        ),
    ),
)
if not Path("/proc/self/smaps_rollup").exists():
    SUITES = ()


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
