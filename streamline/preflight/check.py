"""A plan looked through before it is run: what it would read, and what it would fail on, in seconds.

Reads the listing, the sizes that it doesn't tell, and the first record of a few files, which then go through the
stages. Nothing is written: no cache, no journal, no dead letters. A live source isn't read at all: what is read of it
is gone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.core.options import check_int, check_seconds
from streamline.errors import PlanError
from streamline.io.storage.options import Access, HttpOptions
from streamline.opened import Begin, prepare
from streamline.plan.plan import Plan
from streamline.preflight.balance import idle, loads_of, ranks_of, uneven
from streamline.preflight.heads import Heads, look, spread
from streamline.preflight.rehearsal import pickles, rehearse
from streamline.preflight.report import DEADLINE_S, Load, Problem, Report
from streamline.preflight.schema import mixed
from streamline.sharding.ranks import find_rank
from streamline.sources.files import Files
from streamline.sources.live import Live

__all__ = ["check"]


PATIENCE = 0.8
"""The part of the deadline after which a request gives up: what it says then tells more than that time is up."""


HEADS = 8
"""Files whose first record is read, or items."""


SIZES = 1000
"""Objects whose sizes are asked for, if no listing tells them: with 64 at once and 30 ms each, half a second."""


SHOWN = 5
"""Problems of a kind that are told one by one."""


TABLES = ("read_csv", "read_parquet", "read_arrow")
"""Formats whose files must have the same columns."""


@dataclass
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, what: str, messages: Sequence[str]) -> None:
        """Add problems of one kind: the first few, and how many more there are; none that is there already."""
        messages = [message for message in messages if all(message != one.message for one in self.problems)]
        self.problems += [Problem(what=what, message=message) for message in messages[:SHOWN]]
        if len(messages) > SHOWN:
            self.problems.append(Problem(what=what, message=f"… and {len(messages) - SHOWN:,} more"))


def check(
    plan: Plan, *, world_size: int | None = None, backend: Backend | None = None, deadline_s: float = DEADLINE_S
) -> Report:
    """Return what is found; what is wrong with the plan or the data is in it, not raised.

    Raises:
      PlanError: `world_size` or `deadline_s` is out of range or type.
    """
    if world_size is not None:
        world_size = check_int(".check(world_size=)", world_size, 1)
    check_seconds(".check(deadline_s=)", deadline_s)
    began = perf_counter()
    findings = _Findings()
    report = _checked(plan, findings, world_size, backend, deadline_s)
    return replace(
        report,
        problems=tuple(findings.problems),
        notes=tuple(findings.notes),
        took_s=perf_counter() - began,
    )


def _checked(
    plan: Plan, findings: _Findings, world_size: int | None, backend: Backend | None, deadline_s: float
) -> Report:
    source, rank = plan.source, None if world_size is None else 0
    report = Report(source=str(source), files=isinstance(source, Files), mode=plan.mode)
    if isinstance(source, Files):
        _check_cache(source.access, findings)
        source = replace(source, access=_impatient(source.access, deadline_s))
    try:
        source = source.resolved()
    except Exception as error:
        findings.problem("listing", [_said(error)])
        return report
    plan = replace(plan, source=source)
    report = replace(report, source=str(source), mode=plan.mode)
    try:
        prepare(plan, Begin(rank=rank, world_size=world_size), backend=backend or Inline())
        ranks = find_rank(rank, world_size)
    except Exception as error:
        findings.problem("plan", [_said(error)])
        ranks = None
    reason = pickles(plan, backend)
    if reason is not None and backend is not None:
        findings.problem("pickling", [reason])
    elif reason is not None:
        findings.notes.append(f"it can't run in processes: {reason}")
    if isinstance(source, Live):
        findings.notes.append("it is live: nothing was read, for that would be gone")
        return report
    heads = _look(plan, findings, deadline_s)
    found = _sized(source, heads) if isinstance(source, Files) else None
    report = _balanced(report, plan, found, findings)
    if ranks is not None and report.shards:
        report = replace(report, ranks=ranks_of(report.shards, ranks.world_size), world_found_in=ranks.found_in)
        if ranks.world_size > 1:
            findings.notes += uneven(report.ranks, "rank")
    report = replace(report, records=tuple(heads.records))
    return replace(report, outputs=_through_stages(plan, heads, findings, deadline_s))


def _look(plan: Plan, findings: _Findings, deadline_s: float) -> Heads:
    """Read first records, and say what went wrong."""
    source = plan.source
    if isinstance(source, Files):
        files = source.files
        places = spread(len(files), HEADS)
        unsized = [at for at in range(len(files)) if files[at].size is None]
        sized = [unsized[at] for at in spread(len(unsized), SIZES)]
    else:
        places, sized = list(range(HEADS)), []
    part = plan.part((0,)) if source.indexable else replace(plan.part((0,)), mode=source.modes[0])
    heads = look(source, part, places, sized, deadline_s)
    findings.problem("reading", [_said(error, where) for where, error in heads.failures])
    findings.problem("reading", [f"{where} gave no answer within {deadline_s:g} s" for where in heads.late])
    if heads.empty and not heads.records and not heads.failures and not heads.late:
        findings.problem("reading", ["there are no records: " + ", ".join(heads.empty[:SHOWN])])
    elif heads.empty:
        findings.notes.append(
            f"{len(heads.empty)} of those looked at have no records: {', '.join(heads.empty[:SHOWN])}"
        )
    columns = isinstance(source, Files) and source.kind in TABLES
    differences = mixed(heads.records, columns=columns)
    findings.problem("schema", [message for message, fails in differences if fails])
    findings.notes += [message for message, fails in differences if not fails][:SHOWN]
    return heads


def _sized(source: Files[Any], heads: Heads) -> list[Any]:
    """Return the files with the sizes that are known by now."""
    return [one if one.size is not None else replace(one, size=heads.sizes.get(one.path)) for one in source.files]


def _balanced(report: Report, plan: Plan, found: list[Any] | None, findings: _Findings) -> Report:
    """Return a report that also says what each shard reads."""
    shards: tuple[Load, ...] = ()
    try:
        shards = loads_of(plan, found)
    except PlanError as error:
        findings.problem("shards", [str(error)])
    objects = plan.source.length if found is None else len(found)
    if objects is not None:
        findings.problems += idle(plan, shards, objects, "items" if found is None else "files")
    if isinstance(plan.source, Files) and plan.mode == "contiguous" and plan.shard.num_shards > 1 and found is not None:
        refusal = plan.source.format.not_splittable(found[0].path, plan.shard.num_shards)
        findings.problem("shards", [] if refusal is None else [str(refusal)])
    findings.notes += uneven(shards, "shard")
    return replace(
        report,
        objects=objects,
        bytes=sum(one.size or 0 for one in found or ()),
        unsized=sum(one.size is None for one in found or ()),
        shards=shards,
    )


def _through_stages(plan: Plan, heads: Heads, findings: _Findings, deadline_s: float) -> int | None:
    """Run the records through the stages; return how many items came out."""
    if not heads.records or not (plan.worker or plan.after):
        return None
    rehearsed = rehearse(plan, heads.records, deadline_s)
    findings.problem("stages", rehearsed.failures)
    if rehearsed.late:
        findings.notes.append(f"the stages weren't through with {len(heads.records)} records within {deadline_s:g} s")
    return rehearsed.outputs


def _impatient(access: Access, deadline_s: float) -> Access:
    """Return how bytes are had for a look: nothing is kept, and servers have less time to answer."""
    http, most_s = access.http or HttpOptions(), PATIENCE * deadline_s
    http = replace(
        http,
        timeout_s=min(http.timeout_s, most_s),
        connect_timeout_s=min(http.connect_timeout_s, most_s),
        deadline_s=min(http.deadline_s, most_s),
    )
    return replace(access, http=http, cache_dir=None, cache_max_bytes=None)


def _check_cache(access: Access, findings: _Findings) -> None:
    if access.cache_dir is None:
        return
    folder = os.path.abspath(os.path.expanduser(access.cache_dir))  # noqa: PTH100, PTH111
    there = folder
    while not os.path.lexists(there) and there != os.path.dirname(there):  # noqa: PTH120
        there = os.path.dirname(there)  # noqa: PTH120
    if not os.path.isdir(there):  # noqa: PTH112
        findings.problem("cache", [f"cache_dir={folder} can't be made: {there} is no folder"])
    elif not os.access(there, os.W_OK | os.X_OK):
        findings.problem("cache", [f"cache_dir={folder} can't be written to: check the permissions of {there}"])


def _said(error: Exception, where: str = "") -> str:
    """Say what went wrong, and where if the message doesn't."""
    text = str(error) or type(error).__name__
    text = text if type(error).__module__.startswith("streamline") else f"{type(error).__name__}: {text}"
    return text if not where or where in text else f"{where}: {text}"
