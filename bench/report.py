"""Prints suites as plain Markdown tables. Pure, but for the machine it describes."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from statistics import median

from bench.suite import Case, Result, Suite, Target, Unit

LIBRARIES = (
    "streamline",
    "anyio",
    "uvloop",
    "aiohttp",
    "obstore",
    "pyarrow",
    "webdataset",
    "numpy",
    "torch",
    "torchdata",
    "grain",
    "spdl",
    "aiostream",
    "datasets",
    "pillow",
)
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


def versions() -> str:
    """Return the libraries that are measured."""
    return ", ".join(f"{name} {_version(name)}" for name in LIBRARIES) + ".\n"


def where(use_uvloop: bool) -> str:
    """Describe what the figures of a table belong to: the machine, the interpreter, the loop."""
    loop = "uvloop" if use_uvloop else "asyncio"
    return (
        f"{_cpu_model()}, {_usable_cores()} cores, {_gpu()}{platform.system()} {platform.release()}, "
        f"{platform.python_implementation()} {platform.python_version()}, {loop}"
    )


def _gpu() -> str:
    """Name the GPU of a benchmark that has looked for one."""
    torch = sys.modules.get("torch")
    return f"{torch.cuda.get_device_name()}, " if torch is not None and torch.cuda.is_available() else ""


def table(suite: Suite, results: Mapping[str, Result], where: str) -> str:
    """Return a suite's figures, one row per case, with its targets judged within this run."""
    lines = [
        f"## {suite.question}\n",
        f"{suite.note} ({where}.)\n" if suite.note else f"({where}.)\n",
        f"| case | {suite.unit} (median, min{DASH}max) | {TIMES} floor | target | met |",
        "|---|---:|---:|---|---|",
        *(_row(suite, case, results) for case in suite.cases),
    ]
    return "\n".join(lines) + "\n"


def updated(before: str, now: str, *, whole: bool = False) -> str:
    """Return `before` with the tables of `now` in it, in place of those of the same names, or behind the others.

    What is above the tables is replaced by a run of all benchmarks (`whole`) only: the versions there are of one. It
    leaves tables alone that this machine has no device for.
    """
    (head, *old), (head_now, *new) = _sections(before), _sections(now)
    head = head if before and not whole else head_now
    tables = {section.partition("\n")[0]: section for section in (*old, *new)}
    return "".join([head, *tables.values()]).rstrip() + "\n"


def _sections(page: str) -> list[str]:
    """Return what is before the first table, and each table with its heading."""
    head, *tables = page.split("\n## ")
    return [f"{head.rstrip()}\n\n", *(f"## {table.rstrip()}\n\n" for table in tables)]


def checklist(suite: Suite, results: Mapping[str, Result]) -> str:
    """Return one line per case that a smoke test ran."""
    lines = [f"{'FAIL' if result.failed else 'ok  '} {name} {result.problem}" for name, result in results.items()]
    return "\n".join([suite.question, *(f"  {line.rstrip()}" for line in lines)]) + "\n"


def figure(value: float, unit: Unit) -> str:
    """Write a number with about three significant digits, as a reader of a table wants it."""
    if unit in ("ms", "MB"):
        return f"{value:.3g}" if value < 10 else f"{value:.1f}"
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e4 else f"{value:.0f}"


def _row(suite: Suite, case: Case, results: Mapping[str, Result]) -> str:
    mine = results[case.name]
    ratio = mine.ratio_to(results[suite.floor]) if suite.floor else None
    wanted = "; ".join(f"{target.sense} {_quantity(suite, target, target.bound)}" for target in case.targets)
    met = "; ".join(_met(suite, target, mine, results) for target in case.targets)
    cells = (case.name, _spread(mine, suite.unit), f"{ratio:.3g}" if ratio else DASH, wanted or DASH, met or DASH)
    return f"| {' | '.join(cells)} |"


def _spread(result: Result, unit: Unit) -> str:
    if not result.rounds:
        return result.problem.partition("\n")[0].replace("|", "\\|")  # an error's text must not break the table
    low, high = min(result.rounds), max(result.rounds)
    return f"{figure(median(result.rounds), unit)} ({figure(low, unit)}{DASH}{figure(high, unit)})"


def _met(suite: Suite, target: Target, mine: Result, results: Mapping[str, Result]) -> str:
    if not mine.rounds:
        return "not measured"
    reached = median(mine.rounds) if target.of is None else mine.ratio_to(results[target.of])
    if reached is None:
        return f"no figure of {target.of}"
    return "yes" if target.holds(reached) else f"**no: {_quantity(suite, target, reached)}**"


def _quantity(suite: Suite, target: Target, value: float) -> str:
    if target.of is None:
        short = f"{value:.3g}" if target.unit in ("ms", "MB") else figure(value, target.unit)
        return f"{short} {target.unit}"
    return f"{value:.3g} {TIMES} {'floor' if target.of == suite.floor else target.of}"


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
