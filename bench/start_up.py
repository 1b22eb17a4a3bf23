"""How long until the first batch out of two processes: in a fresh interpreter, a second time, in a second epoch?"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Literal

from bench import harness
from bench.first_batch import ITEMS, WIDTH
from bench.suite import Case, Suite, Tally, Target, at_most

What = Literal["first", "again", "epoch"]

ROOT = Path(__file__).parent.parent


def program(_: int, *, library: str, what: What) -> Tally:
    """Run `first_batch` in an interpreter of its own."""
    command = [sys.executable, "-m", "bench.first_batch", library, what]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return Tally(**json.loads(done.stdout))


def expected(_: int) -> Tally:
    return Tally(ITEMS, float(WIDTH * sum(range(ITEMS))))


def case(what: What, name: str, library: str, targets: tuple[Target, ...] = (), peers: tuple[str, ...] = ()) -> Case:
    return Case(name, partial(program, library=library, what=what), ITEMS, targets, peers)


OURS = "streamline, Processes(2)"
SPAWN, FORKSERVER, SPDL = "torch DataLoader, spawn", "torch DataLoader, forkserver", "spdl, ProcessPoolExecutor, spawn"
KEPT = "torch DataLoader, persistent_workers=True"
TARGETS = (at_most(1, SPDL), at_most(0.3, SPAWN), at_most(0.3, FORKSERVER))
NOTE = "2 processes, small arrays, batches of 32, a fresh interpreter for each run; the parent's imports don't count."


def opening(question: str, what: What) -> Suite:
    return Suite(
        question=question,
        unit="ms",
        expected=expected,
        smoke_items=ITEMS,
        note=NOTE,
        cases=(
            case(what, OURS, "streamline", TARGETS),
            case(what, SPAWN, "torch-spawn", peers=("torch",)),
            case(what, FORKSERVER, "torch-forkserver", peers=("torch",)),
            case(what, SPDL, "spdl-spawn", peers=("spdl",)),
        ),
    )


SUITES = (
    opening("Start-up: how long until the first batch out of two processes?", "first"),
    opening("Start-up: and at a second opening in the same program?", "again"),
    Suite(
        question="Start-up: and in an epoch after the first?",
        unit="ms",
        expected=expected,
        smoke_items=ITEMS,
        note=f"{NOTE} From `iter()` of a loader that keeps its processes.",
        cases=(
            case("epoch", "streamline, loader(persistent=True)", "streamline", (at_most(1, KEPT),)),
            case("epoch", KEPT, "torch-spawn", peers=("torch",)),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
