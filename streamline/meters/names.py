"""What stages, channels and hosts are called, wherever figures and messages name them."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["BORDER", "Executor", "HostKind", "host_label", "label"]

Executor: TypeAlias = Literal["inline", "task", "thread"]
"""Where a stage does its work: in the event loop, which stands still meanwhile; awaited; in threads."""

HostKind: TypeAlias = Literal["process", "thread"]

BORDER = " (border)"
"""Behind the name of a channel whose items come from a host; the stage may fill another channel there."""


def label(name: str, kind: str) -> str:
    """Return a stage as it is printed: "map(decode)"; where its name says no more than its kind, "read_jsonl"."""
    if kind == "numbering":  # what makes the generators of .map(seed=)
        return f"rng({name.removesuffix('.rng')})"
    return kind if name.startswith(kind) or kind.endswith(f"_{name}") else f"{kind}({name})"


def host_label(number: int, kind: HostKind, pid: int | None) -> str:
    """Return a host as it is printed: "process 2, pid 4711", "thread 0"."""
    return f"{kind} {number}" + (f", pid {pid}" if kind == "process" and pid else "")
