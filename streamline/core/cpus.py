"""How many cores and how much memory there are for a process, and how many cores for a rank.

Cores are those that this process may run on, and that its control group has time for. The ranks of a job on one machine
share them, unless the launcher has given each its own. Memory is what the machine has left, and the control groups.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

Read = Callable[[str], str | None]

LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Where launchers say how many ranks there are on this machine: torchrun, Open MPI, Intel MPI and MPICH."""

TASKS_PATTERN = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def cpus_here() -> int:
    """Return how many cores this rank may keep busy, at least 1."""
    return cpus_of(usable_cpus(), os.environ)


def cpu_s(pid: int) -> float | None:
    """Return the seconds of CPU time that a process of this machine has used; None: it has exited, or it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):  # no /proc, as on macOS; or it exits just now
        return None


def usable_cpus() -> int:
    """Return how many cores this process may keep busy, shared or not; at least 1."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cpus = os.cpu_count() or 1
    quota = _quota()
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


@cache  # a dozen files, which `stream.stats()` may ask for after every step
def _quota() -> float | None:
    return cpu_quota(_read)


def quota_periods() -> tuple[int, int]:
    """Return the periods of this process's CPU quota, and those in which it was used up; (0, 0): there is no quota."""
    file = _throttling_file()
    return (0, 0) if file is None else throttled_periods(_read(file) or "")


@cache
def _throttling_file() -> str | None:
    return min(_all_quotas(_read), default=(math.inf, None))[1]


def throttled_periods(cpu_stat: str) -> tuple[int, int]:
    """Return the periods in a control group's cpu.stat, and those that were throttled. Pure."""
    counts = dict(line.split(" ", 1) for line in cpu_stat.splitlines() if " " in line)
    return _number(counts.get("nr_periods")) or 0, _number(counts.get("nr_throttled")) or 0


def cpus_of(cpus: int, environ: Mapping[str, str]) -> int:
    """Return how many of a process's cores are its rank's, as the launcher's variables say; at least 1.

    Pure. A SLURM task that was given cores of its own (`--cpus-per-task`) shares them with the ranks that it has
    launched itself, and with no other task, whether or not SLURM binds it to them.
    """
    ranks = next(filter(None, (_number(environ.get(name)) for name in LOCAL_RANKS)), None)
    if "SLURM_STEP_ID" in environ:
        own = _number(environ.get("SLURM_CPUS_PER_TASK"))
        if own:
            cpus, ranks = min(cpus, own), ranks or 1
        ranks = ranks or _tasks_here(environ)
    return max(1, cpus // (ranks or 1))


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return how many tasks of a SLURM step run on this node: "2(x3),1" is 2 on each of three nodes, 1 on a fourth."""
    tasks, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environ.get("SLURM_NODEID"))
    counts: list[int] = []
    for part in tasks.split(","):
        found = TASKS_PATTERN.fullmatch(part.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node or 0] if (node or 0) < len(counts) else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def cpu_quota(read: Read) -> float | None:
    """Return how many cores' time the control groups of this process allow; None: no bound. `read` returns a file."""
    return min((quota for quota, _ in _all_quotas(read)), default=None)


def _all_quotas(read: Read) -> list[tuple[float, str]]:
    """Return each quota of this process, with the file that says how often it was used up."""
    return [found for line in (read("/proc/self/cgroup") or "").splitlines() for found in _quotas(line, read)]


def _quotas(line: str, read: Read) -> Iterator[tuple[float, str]]:
    """Yield the quotas of a control group and those around it. In a container, the group's path may be the host's,
    which isn't
    mounted: the mounted root is the container's own group.
    """
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if not path.startswith("/"):
        return
    if controllers and "cpu" not in controllers.split(","):
        return
    for group in (PurePosixPath(path), *PurePosixPath(path).parents):
        inside = str(group).strip("/")
        folder = PurePosixPath("/sys/fs/cgroup/cpu" if controllers else "/sys/fs/cgroup", inside)
        if not controllers:
            quota, _, period = (read(str(folder / "cpu.max")) or "").partition(" ")
        else:
            quota, period = (read(str(folder / file)) or "" for file in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        time, of = _number(quota.strip()), _number(period.strip())  # "max" and -1 are no bound
        if time and of:
            yield time / of, str(folder / "cpu.stat")


def free_bytes(read: Read | None = None) -> float:
    """Return how many bytes of memory this process may still take; infinity: unknown."""
    read = read or _read
    found = re.search(r"^MemAvailable: +(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE)
    left = math.inf if found is None else 1024.0 * int(found[1])
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if path.startswith("/") and (not controllers or "memory" in controllers.split(",")):
            left = min([left, *_free_in_groups(path, bool(controllers), read)])
    return max(0.0, left)


def _free_in_groups(path: str, first: bool, read: Read) -> Iterator[float]:
    """Yield what a control group and those around it have left; cached files don't count, as they are dropped first."""
    folder = "/sys/fs/cgroup/memory" if first else "/sys/fs/cgroup"
    most, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    for group in (PurePosixPath(path), *PurePosixPath(path).parents):
        here = PurePosixPath(folder, str(group).strip("/"))
        limit, taken = (_number((read(str(here / file)) or "").strip()) for file in (most, used))
        if limit is not None and taken is not None:  # "max" is no bound
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", read(str(here / "memory.stat")) or "", re.MULTILINE)
            yield limit - taken + (0 if cached is None else int(cached[1]))


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
