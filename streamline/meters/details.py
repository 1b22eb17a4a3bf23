"""What only one kind of stage counts: the cycles of a cache, the components of a mixture, bytes copied to a device.

A stage tells its meter how to find out (`StageMeter.tells`), and is asked when somebody wants to know: counting costs
what it takes to keep a number. From then on all is the same for all stages: details cross from processes with the
meter's other counts, are put together over workers here, and are drawn by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

__all__ = ["Detail", "Details", "How", "Tells", "later", "since", "together"]

How: TypeAlias = Literal["count", "total", "now"]


@dataclass(frozen=True, slots=True)
class Detail:
    """A number that only one kind of stage has.

    Attributes:
      name: what it is; the unit at its end, "_s" or "_bytes".
      value: of all workers together: their sum, or of "now" the least.
      part: which part of the stage it is of, the name of a component, say; "": all of it.
      how: "count": since the stream was opened. "total": a sum that the state has, so that it goes on behind a resume.
        "now": how it stands, each worker its own.
    """

    name: str
    value: float
    part: str = ""
    how: How = "count"


Details: TypeAlias = tuple[Detail, ...]

Tells: TypeAlias = Callable[[], Details]
"""Called in any thread; holds on to no items, for it stays as long as the meter."""


def later(before: Details, now: Details) -> Details:
    """Return the details of a stage that was opened again, in another pass or another process: counts go on."""
    if not before:
        return now
    known = {(detail.part, detail.name): detail for detail in before}
    for detail in now:
        key = detail.part, detail.name
        if detail.how == "count" and key in known:
            detail = replace(detail, value=known[key].value + detail.value)
        known[key] = detail
    return tuple(known.values())


def together(workers: Iterable[Details]) -> Details:
    """Return the details of all workers of a stage."""
    found: dict[tuple[str, str], Detail] = {}
    for detail in (detail for details in workers for detail in details):
        key = detail.part, detail.name
        if key in found:
            other = found[key].value
            value = min(other, detail.value) if detail.how == "now" else other + detail.value
            detail = replace(detail, value=value)
        found[key] = detail
    return tuple(found.values())


def since(earlier: Details, now: Details) -> Details:
    """Return what was added since `earlier`; what is no count is as it stands."""
    were = {(detail.part, detail.name): detail.value for detail in earlier}
    return tuple(
        replace(detail, value=max(0, detail.value - were.get((detail.part, detail.name), 0)))
        if detail.how == "count"
        else detail
        for detail in now
    )
