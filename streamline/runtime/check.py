"""A dry run of a plan: what it would read, and what it would fail on, in seconds.

Reads the listing, the sizes that it lacks, and the first record of a few files, concurrently and within a deadline;
then runs these records through the stages. Nothing is written: no cache, no journal, no dead letters. A live source
isn't read: its items can't be read again.
"""

from __future__ import annotations

import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import islice
from time import perf_counter
from typing import Any

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.backends.processes import Processes
from streamline.core.options import check_int, check_seconds
from streamline.core.tasks import Session
from streamline.core.text import in_bytes, quantity
from streamline.core.threads import start_thread
from streamline.errors import CheckError, PlanError, printable_lines
from streamline.io.storage.base import FoundObject
from streamline.plan.length import all_known
from streamline.plan.plan import Plan, Shard
from streamline.runtime.open import Opened, idle_workers, prepare
from streamline.runtime.run import OpenOptions
from streamline.sharding.ranks import find_rank
from streamline.sharding.split import byte_range, files_of, shards_of_rank
from streamline.sources.items import Items

MOST_FIRST_RECORDS = 8
"""Files whose first record is read, or items."""

MOST_SIZES = 1000
"""Objects whose sizes are requested, if the listing lacks them: with 64 at once and 30 ms each, half a second."""

MOST_OUTPUTS = 256
"""Items that the stages may give: a `.repeat()` has no end."""

MOST_LISTED = 5
"""Problems of a kind, and keys in a message, that are listed one by one."""

UNEVEN_RATIO = 2.0
"""The report has a note if the largest shard has so many times the bytes of the smallest."""

STAGE_NOTE = re.compile(r"in (.+), shard \d+ of \d+ \(")
"""The note of an exception that names its stage."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a run would fail on, or what is wait_shielded a mistake.

    Attributes:
      what: "plan", "listing", "shards", "reading", "schema", "stages", "pickling" or "cache".
      message: what was expected, what arrived, what to do.
    """

    what: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one shard, or one rank, has to read, as far as that is known without reading.

    Attributes:
      items: objects, or of a source without files, items; None: unknown.
      bytes: of its objects; None: some are unknown.
    """

    items: int | None
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check has found. `print` it.

    Attributes:
      source: what is read, as in the printed plan.
      files: whether it reads files; else `objects` are items.
      objects: that would be read in all; None: unknown.
      bytes: of those whose size is known.
      unsized: objects whose size isn't known.
      mode: how the source is split.
      shards: by shard, what it has to read.
      ranks: by rank, likewise.
      world_found_in: where the number of ranks was found: "given", "alone", …
      records: the first records that were read, after their object or item number.
      outputs: how many items the stages made of these; None: they were not run.
      problems: what a run would fail on.
      notes: what may be a mistake.
      took_s: seconds that the check took.
    """

    source: str
    files: bool
    objects: int | None = None
    bytes: int = 0
    unsized: int = 0
    mode: str = ""
    shards: tuple[Load, ...] = ()
    ranks: tuple[Load, ...] = ()
    world_found_in: str = ""
    records: tuple[tuple[str, object], ...] = ()
    outputs: int | None = None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise if there are problems. Raises `CheckError`: its message names all problems."""
        if self.problems:
            raise CheckError("\n".join(f"{problem.what}: {problem.message}" for problem in self.problems))

    def __str__(self) -> str:
        lines = [f"{self.source}", *(f"  {name:<9} {text}" for name, text in self._facts())]
        lines += [f"  {'note':<9} {_indented(note)}" for note in self.notes]
        lines += [f"  PROBLEM   {problem.what}: {_indented(problem.message)}" for problem in self.problems]
        found = "no problems" if self.ok else quantity(len(self.problems), "problem")
        return printable_lines("\n".join([*lines, f"{found} found in {self.took_s:.1f} s"]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _facts(self) -> list[tuple[str, str]]:
        what = "object" if self.files else "item"
        facts = [("reads", self._amount())] if self.objects is not None else []
        kind = "object" if self.files and self.mode == "file" else "item"
        if self.shards:
            facts.append(("shards", f"{len(self.shards):,} ({self.mode}), each {_spread(self.shards, kind)}"))
        if len(self.ranks) > 1:
            facts.append(("ranks", f"{len(self.ranks):,} ({self.world_found_in}), each {_spread(self.ranks, kind)}"))
        if self.records:
            seen = len(self.records)
            of = quantity(seen, what) if self.objects is None else f"{seen:,} of {quantity(self.objects, what)}"
            made = "" if self.outputs is None else f"; the stages made {quantity(self.outputs, 'item')} of them"
            first = "the first record of " if self.files else ""
            facts.append(("looked at", f"{first}{of}{made}"))
        return facts

    def _amount(self) -> str:
        if not self.files:
            return quantity(self.objects or 0, "item")
        unknown = f", {self.unsized:,} of unknown size" if self.unsized else ""
        return f"{quantity(self.objects or 0, 'object')}, {in_bytes(self.bytes)}{unknown}"


def _spread(loads: tuple[Load, ...], kind: str) -> str:
    """Return the range of the loads as text."""
    said = []
    if items := all_known([load.items for load in loads]):
        least, most = f"{min(items):,}", quantity(max(items), kind)
        said.append(most if min(items) == max(items) else _range(least, most))
    if sizes := all_known([load.bytes for load in loads]):
        said.append(_range(in_bytes(min(sizes)), in_bytes(max(sizes))))
    return ", ".join(said) or "of unknown size"


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")


Records = list[tuple[str, Any]]
"""Each record, after where it is from."""


@dataclass
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, what: str, messages: Sequence[str]) -> None:
        """Add problems of one kind, without repetitions: the first few, and how many more there are."""
        messages = [message for message in messages if all(message != one.message for one in self.problems)]
        self.problems += [Problem(what=what, message=message) for message in messages[:MOST_LISTED]]
        if len(messages) > MOST_LISTED:
            self.problems.append(Problem(what=what, message=f"… and {len(messages) - MOST_LISTED:,} more"))


def check(plan: Plan, *, world_size: int | None, backend: Backend | None, deadline_s: float) -> Report:
    """Return what is found, problems included. Raises `PlanError`: `world_size` or `deadline_s` out of range."""
    if world_size is not None:
        world_size = check_int(".check(world_size=)", world_size, 1)
    check_seconds(".check(deadline_s=)", deadline_s)
    began = perf_counter()
    findings = _Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = _examine(plan, findings, world_size, backend, deadline_s)
    problems, notes = tuple(findings.problems), tuple(findings.notes)
    return replace(report, problems=problems, notes=notes, took_s=perf_counter() - began)


def _examine(
    plan: Plan, findings: _Findings, world_size: int | None, backend: Backend | None, deadline_s: float
) -> Report:
    rank = None if world_size is None else 0
    report = Report(source=str(plan.source), files=plan.source.listed, mode=plan.mode)
    _check_folder(plan.source.cache_dir, findings)
    try:
        source = plan.source.for_check(deadline_s).resolved()
    except Exception as error:
        findings.problem("listing", [_problem_line(error)])
        return report
    plan = replace(plan, source=source)
    report = replace(report, source=str(source), mode=plan.mode)
    try:
        prepare(plan, OpenOptions.of(backend=backend or Inline(), rank=rank, world_size=world_size, ends="allow"))
        ranks = find_rank(rank, world_size)
    except Exception as error:
        findings.problem("plan", [_problem_line(error)])
        ranks = None
    reason = _pickling_failure(plan, backend)
    if reason is not None and backend is not None:
        findings.problem("pickling", [reason])
    elif reason is not None:
        findings.notes.append(f"it can't run in processes: {reason}")
    if plan.mode == "shared":
        findings.notes.append("it is live: nothing was read, for that would be gone")
        return report
    records, files = _look(plan, findings, deadline_s)
    report = replace(_with_loads(report, plan, files, findings), records=tuple(records))
    if ranks is not None and report.shards:
        report = replace(report, ranks=ranks_of(report.shards, ranks.world_size), world_found_in=ranks.found_in)
        if ranks.world_size > 1:
            findings.notes += uneven(report.ranks, "rank")
    if not records or not (plan.worker or plan.after):
        return report
    return replace(report, outputs=_rehearse(plan, records, findings, deadline_s))


def _check_folder(cache_dir: str | None, findings: _Findings) -> None:
    if cache_dir is None:
        return
    folder = os.path.abspath(os.path.expanduser(cache_dir))  # noqa: PTH100, PTH111
    there = folder
    while not os.path.lexists(there) and there != os.path.dirname(there):  # noqa: PTH120
        there = os.path.dirname(there)  # noqa: PTH120
    if not os.path.isdir(there):  # noqa: PTH112
        findings.problem("cache", [f"cache_dir={folder} can't be made: {there} is no folder"])
    elif not os.access(there, os.W_OK | os.X_OK):
        findings.problem("cache", [f"cache_dir={folder} can't be written to: check the permissions of {there}"])


def _pickling_failure(plan: Plan, backend: Backend | None) -> str | None:
    """Return why a plan can't be sent to the processes of a backend; None: it can, or needn't be."""
    backend = backend or Processes(1)
    if not isinstance(backend, Processes):
        return None
    with closing((session := Session()).hooks):
        try:
            backend.payload(plan, session, 1)
        except Exception as error:
            return f"{error}" or type(error).__name__
    return None


# First records ------------------------------------------------------------------------------------------------------


class _OutOfTimeError(Exception):
    pass


def _first(plan: Plan, most: int, take: Callable[[Any], object], until: float) -> None:
    """Call `take` with the first items of a plan. Raises `_OutOfTimeError`: an item came after `until`."""
    opened = Opened[Any](plan, OpenOptions.of(rank=0, world_size=1, stall_s=None))
    with closing(opened.sync_stream(most_ahead=MOST_FIRST_RECORDS)) as stream:
        stream.leave_at_exit()
        for item in islice(stream, most):
            if perf_counter() > until:
                raise _OutOfTimeError
            take(item)


def _side_by_side(works: Sequence[Callable[[], object]], until: float) -> list[BaseException | None]:
    """Run each in a daemon thread, as user code may hang; return what each raised, or an `_OutOfTimeError`."""
    outcomes: list[BaseException | None] = [_OutOfTimeError()] * len(works)

    def run(at: int) -> None:
        try:
            works[at]()
        except BaseException as error:
            outcomes[at] = error
        else:
            outcomes[at] = None

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(works))]
    for thread in threads:
        start_thread(thread)
    for thread in threads:
        thread.join(max(0.0, until - perf_counter()))
    return list(outcomes)


def _look(plan: Plan, findings: _Findings, deadline_s: float) -> tuple[Records, list[FoundObject] | None]:
    """Read first records, and request the sizes that are unknown; return the records, and the files with sizes."""
    source, until = plan.source, perf_counter() + deadline_s
    before = plan.before if source.indexable else ()
    alone = replace(plan, before=before, shard=Shard(), sharded=False, worker=(), after=())
    if (found := source.listed_files) is None:
        files, count, unsized = None, MOST_FIRST_RECORDS, []
        names, plans = {0: source.name}, {0: alone}
    else:
        files, count = list(found), 1
        names = {at: file.path for at, file in enumerate(files)}
        plans = {at: replace(alone, source=source.only(at)) for at in spread(len(files), MOST_FIRST_RECORDS)}
        unsized = [at for at, file in enumerate(files) if file.size is None]
        unsized = [unsized[at] for at in spread(len(unsized), MOST_SIZES)]
    read: dict[int, list[Any]] = {at: [] for at in plans}
    answers: dict[int, FoundObject | Exception] = {}
    works = [partial(_first, one, count, read[at].append, until) for at, one in plans.items()]
    asking = partial(source.look_up, unsized, answers, deadline_s)
    outcomes = _side_by_side([*works, asking] if unsized else works, until)
    failures: dict[int, BaseException] = {at: error for at, error in zip(plans, outcomes, strict=False) if error}
    for at in unsized:
        answer = answers.get(at, outcomes[-1] or _OutOfTimeError())
        if isinstance(answer, BaseException):
            failures.setdefault(at, answer)
        elif files is not None:
            files[at] = replace(files[at], size=answer.size)
    _say_failures([(names[at], failures[at]) for at in sorted(failures)], findings, deadline_s)
    records: Records = []
    for at, items in read.items():
        for number, item in enumerate(items):
            records.append((names[at] if count == 1 else f"item {number} of {names[at]}", item))
    empty = [names[at] for at, items in read.items() if not items and at not in failures]
    if empty and not records and not failures:
        findings.problem("reading", ["there are no records: " + ", ".join(empty[:MOST_LISTED])])
    elif empty:
        findings.notes.append(f"{len(empty)} of those looked at have no records: {', '.join(empty[:MOST_LISTED])}")
    differences = mismatches(records, columns=source.same_columns)
    findings.problem("schema", [message for message, fails in differences if fails])
    findings.notes += [message for message, fails in differences if not fails][:MOST_LISTED]
    return records, files


def _say_failures(failures: list[tuple[str, BaseException]], findings: _Findings, deadline_s: float) -> None:
    late = [where for where, error in failures if isinstance(error, _OutOfTimeError)]
    findings.problem("reading", [_problem_line(error, where) for where, error in failures if where not in late])
    findings.problem("reading", [f"{where} gave no answer within {deadline_s:g} s" for where in late])


def _problem_line(error: BaseException, where: str = "") -> str:
    """Return an error as a line, with where it happened, unless its message says that."""
    text = str(error) or type(error).__name__
    text = text if type(error).__module__.startswith("streamline") else f"{type(error).__name__}: {text}"
    return text if not where or where in text else f"{where}: {text}"


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of `count` indices: the first, the last, and some between."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def _rehearse(plan: Plan, records: Records, findings: _Findings, deadline_s: float) -> int:
    """Run the records through the stages together and, if that fails, each alone; return how many items came out."""
    until = perf_counter() + deadline_s
    worker, after = (tuple(stage.without_disk() for stage in section) for section in (plan.worker, plan.after))
    alone = replace(plan, before=(), shard=Shard(), sharded=True, worker=worker, after=after)
    outputs: list[None] = []
    failures: list[str] = []

    def failure(some: Records, take: Callable[[Any], object] = lambda _: None) -> str | None:
        if perf_counter() > until:
            raise _OutOfTimeError
        items = Items(name=plan.source.name, items=[record for _, record in some])
        try:
            _first(replace(alone, source=items), MOST_OUTPUTS, take, until)
        except _OutOfTimeError:
            raise
        except Exception as error:
            if any(one.message == _problem_line(error) for one in findings.problems):
                return None  # the plan can't be opened, as another problem says
            notes = [match[1] for note in getattr(error, "__notes__", ()) if (match := STAGE_NOTE.match(note))]
            return f"{notes[0] if notes else 'a stage'} raised {type(error).__name__}: {error}"
        return None

    def work() -> None:
        together = failure(records, lambda _: outputs.append(None))
        if together is None:
            return
        each = [(where, failure([(where, record)])) for where, record in records]
        failures.extend(f"on the first record of {where}, {why}" for where, why in each if why is not None)
        if not failures:
            failures.append(f"together, the first records fail: {together}")

    (outcome,) = _side_by_side([work], until)
    findings.problem("stages", failures)
    if outcome is not None:
        findings.notes.append(f"the stages weren't through with {len(records)} records within {deadline_s:g} s")
    return len(outputs)


# What each shard reads ----------------------------------------------------------------------------------------------


def _with_loads(report: Report, plan: Plan, files: list[FoundObject] | None, findings: _Findings) -> Report:
    """Return a report with what each shard reads."""
    shards: tuple[Load, ...] = ()
    try:
        shards = loads_of(plan, files)
        plan.source.check_split(plan.mode, plan.shard.num_shards)
    except PlanError as error:
        findings.problem("shards", [str(error)])
    objects = plan.source.length if files is None else len(files)
    if objects is not None:
        findings.problems += idle(plan, shards, objects, "items" if files is None else "files")
    findings.notes += uneven(shards, "shard")
    total, unsized = sum(one.size or 0 for one in files or ()), sum(one.size is None for one in files or ())
    return replace(report, objects=objects, bytes=total, unsized=unsized, shards=shards)


def loads_of(plan: Plan, found: Sequence[FoundObject] | None) -> tuple[Load, ...]:
    """Return what each shard has to read; `found` are the source's files; None: it has none."""
    num_shards = plan.shard.num_shards
    if found is None:
        part = plan.part((0,))
        counts = [plan.source.num_outputs(part, shard, num_shards) for shard in range(num_shards)]
        return tuple(Load(items=int(n) if n is not None and n < math.inf else None, bytes=None) for n in counts)
    if plan.mode == "contiguous" and num_shards > 1 and len(found) == 1:
        size = found[0].size
        spans = [(0, 0) if size is None else byte_range(size, num_shards, shard) for shard in range(num_shards)]
        return tuple(Load(items=None, bytes=None if size is None else stop - start) for start, stop in spans)
    if plan.mode == "file" and num_shards > 1:
        return tuple(_load([found[at] for at in files_of(len(found), num_shards, s)]) for s in range(num_shards))
    return (_load(found),) * num_shards


def ranks_of(shards: Sequence[Load], world_size: int) -> tuple[Load, ...]:
    return tuple(
        _sum([shards[shard] for shard in shards_of_rank(len(shards), rank, world_size)]) for rank in range(world_size)
    )


def idle(plan: Plan, shards: Sequence[Load], objects: int, kind: str) -> list[Problem]:
    """Return a problem if some shards have nothing to read."""
    empty = sum(load.items == 0 or load.bytes == 0 for load in shards)
    if not objects or not empty or len(shards) == 1:
        return []
    if any(load.items is None for load in shards):
        message = f"{empty:,} of {len(shards):,} shards have nothing to read: the file has too few bytes to be split so"
        return [Problem(what="shards", message=message)]
    message = idle_workers(len(shards), objects, kind, empty, splittable=plan.source.listed)
    return [Problem(what="shards", message=message)]


def uneven(loads: Sequence[Load], who: str) -> list[str]:
    """Return a note if some have much more to read than others."""
    amounts = all_known([load.bytes for load in loads]) or all_known([load.items for load in loads]) or []
    if len(amounts) < 2 or not min(amounts) or max(amounts) < UNEVEN_RATIO * min(amounts):
        return []
    return [
        f"the largest {who} has {max(amounts) / min(amounts):.1f} times as much to read as the smallest: "
        "the run takes as long as the largest"
    ]


def _load(found: Sequence[FoundObject]) -> Load:
    return _sum([Load(items=1, bytes=one.size) for one in found])


def _sum(loads: Sequence[Load]) -> Load:
    items, sizes = all_known([load.items for load in loads]), all_known([load.bytes for load in loads])
    return Load(items=None if items is None else sum(items), bytes=None if sizes is None else sum(sizes))


# Whether records are alike --------------------------------------------------------------------------------------------


Mismatch = tuple[str, bool]
"""What differs, and whether code for one record fails on the other; else it may be intended."""


def mismatches(records: Sequence[tuple[str, object]], *, columns: bool) -> list[Mismatch]:
    """Return how records, after where they are from, differ from the first one; in `columns`, no key is optional."""
    if not records:
        return []
    first, model = records[0]
    shape = _shape(model)
    found = [_mismatch(first, shape, where, _shape(record), columns) for where, record in records[1:]]
    return [difference for difference in found if difference is not None]


def _mismatch(first: str, one: Any, where: str, other: Any, columns: bool) -> Mismatch | None:
    if not isinstance(one, dict) or not isinstance(other, dict):
        shapes = ["a mapping" if isinstance(shape, dict) else shape for shape in (one, other)]
        found = f"the first record of {first} is {shapes[0]}, that of {where} is {shapes[1]}", True
        return None if "a mapping" not in shapes and _compatible(*shapes) else found
    wrong = [key for key in one.keys() & other.keys() if not _compatible(one[key], other[key])]
    if wrong:
        keys = ", ".join(f"{key!r} is {one[key]} and {other[key]}" for key in sorted(wrong, key=str)[:MOST_LISTED])
        return f"the first records of {first} and {where} differ: {keys}", True
    only = (where, one.keys() - other.keys()), (first, other.keys() - one.keys())
    if said := [f"{lacking} has no {_keys(keys)}" for lacking, keys in only if keys]:
        return f"the first records differ: {', '.join(said)}", columns or not one.keys() & other.keys()
    return None


def _shape(record: object) -> Any:
    """Return a record's type, or by key those of its values."""
    if isinstance(record, Mapping):
        return {key: _type(value) for key, value in record.items()}
    return _type(record)


def _type(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"


def _compatible(one: str, other: str) -> bool:
    return one == other or "NoneType" in (one, other) or {one, other} == {"int", "float"}


def _keys(keys: Any) -> str:
    names = sorted(map(repr, keys))
    return ", ".join(names[:MOST_LISTED]) + (
        f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    )
