"""A dry run of a plan: what it would read, and what it would fail on, found in seconds.

Reads the listing, the sizes that it lacks, and the first record of a few files, side by side and within a deadline.
The records then go through the stages, in a thread: what raises on them would raise in the run. Nothing is written: no
cache, no journal, no dead letters. A live source isn't read: what is read of it is gone.
"""

from __future__ import annotations

import math
import os
import re
import threading
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import anyio
from anyio.abc import TaskGroup

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.backends.processes import Processes
from streamline.core.flow import Site
from streamline.core.options import check_int, check_seconds
from streamline.core.tasks import Session, Tasks
from streamline.core.threads import start_thread
from streamline.errors import PlanError
from streamline.io.fetch.fetcher import SharedStorages
from streamline.io.storage.base import FoundObject
from streamline.io.storage.options import Access, HttpOptions
from streamline.io.storage.registry import Storages
from streamline.plan.plan import Plan, Shard
from streamline.runtime.check_report import DEADLINE_S, Load, Problem, Report
from streamline.runtime.debug import DebugStream
from streamline.runtime.open import OpenOptions, prepare
from streamline.sharding.ranks import find_rank
from streamline.sharding.split import byte_range, files_of, shards_of_rank
from streamline.sources.base import Part, Source
from streamline.sources.files import Files
from streamline.sources.items import Items
from streamline.sources.live import Live
from streamline.transforms.base import Stage
from streamline.transforms.cache import Cache
from streamline.transforms.regenerate import Regenerate

__all__ = [
    "UNEVEN",
    "Heads",
    "Mixed",
    "Rehearsed",
    "check",
    "idle",
    "loads_of",
    "look",
    "mixed",
    "pickles",
    "ranks_of",
    "rehearse",
    "spread",
    "uneven",
]


UNEVEN = 2.0
"""How many times the least shard's bytes the largest has before that is worth a note: the run takes as long as it."""


def loads_of(plan: Plan, found: Sequence[FoundObject] | None) -> tuple[Load, ...]:
    """Return what each shard has to read.

    Args:
      found: the source's files, as they are listed; None: it has none.
    """
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
    """Return what each rank has to read, all its shards together."""
    return tuple(
        _sum([shards[shard] for shard in shards_of_rank(len(shards), rank, world_size)]) for rank in range(world_size)
    )


def idle(plan: Plan, shards: Sequence[Load], objects: int, kind: str) -> list[Problem]:
    """Return what is wrong if some shards have nothing to read."""
    empty = sum(load.items == 0 or load.bytes == 0 for load in shards)
    if not objects or not empty or len(shards) == 1:
        return []
    if any(load.items is None for load in shards):
        message = f"{empty:,} of {len(shards):,} shards have nothing to read: the file has too few bytes to be split so"
        return [Problem(what="shards", message=message)]
    message = (
        f"{len(shards):,} shards for {objects:,} {kind}: {empty:,} workers would have nothing to read: "
        f"write .shard({objects}) or fewer"
    )
    ways = [] if plan.source.listed is False else ["or split the data into more files"]
    return [Problem(what="shards", message=", ".join([message, *ways]))]


def uneven(loads: Sequence[Load], who: str) -> list[str]:
    """Return a note if some have much more to read than others."""
    sizes = [load.bytes for load in loads if load.bytes is not None]
    counts = [load.items for load in loads if load.items is not None]
    amounts = sizes if len(sizes) == len(loads) else counts
    if len(amounts) < max(2, len(loads)) or not min(amounts) or max(amounts) < UNEVEN * min(amounts):
        return []
    return [
        f"the largest {who} has {max(amounts) / min(amounts):.1f} times as much to read as the smallest: "
        "the run takes as long as the largest"
    ]


def _load(found: Sequence[FoundObject]) -> Load:
    return _sum([Load(items=1, bytes=one.size) for one in found])


def _sum(loads: Sequence[Load]) -> Load:
    items = [load.items for load in loads if load.items is not None]
    sizes = [load.bytes for load in loads if load.bytes is not None]
    return Load(
        items=sum(items) if len(items) == len(loads) else None, bytes=sum(sizes) if len(sizes) == len(loads) else None
    )


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
        findings.problem("listing", [_problem_line(error)])
        return report
    plan = replace(plan, source=source)
    report = replace(report, source=str(source), mode=plan.mode)
    try:
        prepare(plan, OpenOptions(rank=rank, world_size=world_size), backend=backend or Inline())
        ranks = find_rank(rank, world_size)
    except Exception as error:
        findings.problem("plan", [_problem_line(error)])
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
    findings.problem("reading", [_problem_line(error, where) for where, error in heads.failures])
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


def _problem_line(error: Exception, where: str = "") -> str:
    """Say what went wrong, and where if the message doesn't."""
    text = str(error) or type(error).__name__
    text = text if type(error).__module__.startswith("streamline") else f"{type(error).__name__}: {text}"
    return text if not where or where in text else f"{where}: {text}"


AT_ONCE = 64
"""Sizes that are asked for at once."""


HANGS_S = 2.0
"""How much longer than its deadline a look may take before it hangs: in a function of the user that doesn't return."""


@dataclass
class Heads:
    """What was found.

    Attributes:
      records: (where it is from, the record), in order.
      empty: what has no record.
      sizes: of objects, in bytes, as far as the server has said, by path.
      failures: (where, what went wrong), in order.
      late: what didn't answer in time.
    """

    records: list[tuple[str, Any]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[str, Exception]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of `count` indices: the first, the last, and some between."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def look(source: Source[Any], part: Part, places: Sequence[int], sized: Sequence[int], deadline_s: float) -> Heads:
    """Read first records, in a thread and an event loop of their own: this may be called in a running one.

    Args:
      source: resolved.
      part: how it is read if it has no files: then the first `len(places)` items are.
      places: of the files whose first record is read.
      sized: of those whose sizes are asked for.
      deadline_s: for all of it.
    """
    heads = Heads()
    thread = threading.Thread(
        target=anyio.run, args=(_look_at_heads, heads, source, part, places, sized, deadline_s), daemon=True
    )
    start_thread(thread)
    thread.join(deadline_s + HANGS_S)
    if thread.is_alive():
        heads.late.append(source.name)
    return heads


async def _look_at_heads(
    heads: Heads, source: Source[Any], part: Part, places: Sequence[int], sized: Sequence[int], deadline_s: float
) -> None:
    async with anyio.create_task_group() as group:
        tasks = Tasks(group, Session(metered=False))  # else all files would be one stage
        try:
            looking = _Looking(heads, tasks, anyio.current_time() + deadline_s)
            await looking.all(source, part, places, sized)
        finally:
            tasks.finished()
            group.cancel_scope.cancel()


class _Looking:
    def __init__(self, heads: Heads, tasks: Tasks, deadline: float) -> None:
        self._heads = heads
        self._tasks = tasks
        self._deadline = deadline
        self._slots = anyio.Semaphore(AT_ONCE)
        self._found: dict[int, list[tuple[str, Any]]] = {}
        self._failed: dict[int, tuple[str, Exception]] = {}

    async def all(self, source: Source[Any], part: Part, places: Sequence[int], sized: Sequence[int]) -> None:
        """Look at everything, side by side."""
        async with anyio.create_task_group() as group:
            if not isinstance(source, Files):
                group.start_soon(self._items, source, part, len(places))
            else:
                self._files(group, source, places, sized)
        self._heads.records = [record for _, found in sorted(self._found.items()) for record in found]
        self._heads.failures = [failed for _, failed in sorted(self._failed.items(), key=lambda item: item[0])]

    def _files(self, group: TaskGroup, source: Files[Any], places: Sequence[int], sized: Sequence[int]) -> None:
        for at in places:
            one = replace(source, found=(source.files[at],))
            group.start_soon(self._head, at, source.files[at].path, one, Part(mode="file"))
        lease = SharedStorages(self._tasks.session, source.name, source.access)
        group.start_soon(self._sizes, lease, [(at, source.files[at]) for at in sized])

    async def _items(self, source: Source[Any], part: Part, count: int) -> None:
        await self._head(0, source.name, source, part, count)

    async def _head(self, at: int, where: str, source: Source[Any], part: Part, count: int = 1) -> None:
        found: list[tuple[str, Any]] = []

        async def read() -> None:
            flow = source.open(Site(self._tasks, 0, 1), part)
            try:
                async for item in flow:
                    found.append((where if count == 1 else f"item {len(found)} of {where}", item))
                    if len(found) >= count:
                        return
                if not found:
                    self._heads.empty.append(where)
            finally:
                with anyio.CancelScope(shield=True):
                    await flow.aclose()

        await self._within(at, where, read)
        self._found[at] = found

    async def _sizes(self, lease: SharedStorages, files: list[tuple[int, FoundObject]]) -> None:
        try:
            async with anyio.create_task_group() as group:
                for at, found in files:
                    stat = partial(self._size, lease.storages, found.path)
                    group.start_soon(self._within, at, found.path, stat)
        finally:
            with anyio.CancelScope(shield=True):
                await lease.aclose()

    async def _size(self, storages: Storages, path: str) -> None:
        async with self._slots:
            size = (await storages.of(path).stat(path)).size
        if size is not None:
            self._heads.sizes[path] = size

    async def _within(self, at: int, where: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` until the deadline; of its failures, each file has one."""
        with anyio.CancelScope(deadline=self._deadline) as scope:
            try:
                await work()
            except anyio.get_cancelled_exc_class():
                raise
            except Exception as error:
                self._failed.setdefault(at, (where, error))
        if scope.cancelled_caught and where not in self._heads.late:
            self._heads.late.append(where)


MOST_OUTPUTS = 256
"""Items that are taken: a `.repeat()` has no end."""


STAGE = re.compile(r"in (.+), shard \d+ of \d+ \(")


@dataclass
class Rehearsed:
    """How it went.

    Attributes:
      outputs: items that came out.
      failures: for a person.
      late: whether it wasn't through in time.
    """

    outputs: int = 0
    failures: tuple[str, ...] = ()
    late: bool = False


def rehearse(plan: Plan, records: Sequence[tuple[str, Any]], deadline_s: float) -> Rehearsed:
    """Run records through the stages, all of them together, and if that fails, those of each file alone.

    Args:
      plan: its source and sharding are left out.
      records: (where it is from, the record).
      deadline_s: after which it is left to itself, in a thread that doesn't keep the interpreter.
    """
    rehearsed = Rehearsed()

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rehearsed.outputs, failure = _run(plan, [record for _, record in records])
            if failure is not None:
                rehearsed.failures = _who_fails(plan, records) or (f"together, the first records fail: {failure}",)

    thread = threading.Thread(target=work, daemon=True)
    start_thread(thread)
    thread.join(deadline_s)
    rehearsed.late = thread.is_alive()
    return rehearsed


def pickles(plan: Plan, backend: Backend | None) -> str | None:
    """Return why a plan can't be sent to the processes of a backend; None: it can."""
    backend = backend or Processes(1)
    if not isinstance(backend, Processes):
        return None
    session = Session()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backend.payload(plan, session, 1)
    except Exception as error:
        return f"{error}" or type(error).__name__
    finally:
        session.close()
    return None


def _who_fails(plan: Plan, records: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    found = []
    for where, record in records:
        _, failure = _run(plan, [record])
        if failure is not None:
            found.append(f"on the first record of {where}, {failure}")
    return tuple(found)


def _run(plan: Plan, records: list[Any]) -> tuple[int, str | None]:
    """Return how many items came out, and what went wrong, if anything did."""
    source = Items(name=plan.source.name, items=records)
    worker, after = (tuple(map(_unkept, section)) for section in (plan.worker, plan.after))
    alone = replace(plan, source=source, before=(), shard=Shard(), sharded=True, worker=worker, after=after)
    opening = prepare(alone, OpenOptions(rank=0, world_size=1), backend=Inline())
    outputs = 0
    with closing(DebugStream[Any](opening)) as stream:
        try:
            for _ in islice(stream, MOST_OUTPUTS):
                outputs += 1
        except Exception as error:
            return outputs, _rehearsal_line(error)
    return outputs, None


def _unkept(stage: Stage[Any, Any]) -> Stage[Any, Any]:
    """Return a stage that writes nothing down."""
    if isinstance(stage, Cache):
        return replace(stage, path=None)
    return replace(stage, spill=None) if isinstance(stage, Regenerate) else stage


def _rehearsal_line(error: Exception) -> str:
    """Say what was raised, and by which stage."""
    notes = [match[1] for note in getattr(error, "__notes__", ()) if (match := STAGE.match(note))]
    return f"{notes[0] if notes else 'a stage'} raised {type(error).__name__}: {error}"


SHOWN_COLUMNS = 5
"""Keys that a message names."""


Mixed = tuple[str, bool]
"""What differs, and whether whoever reads one record's way fails on the other; else it may be meant."""


def mixed(records: Sequence[tuple[str, object]], *, columns: bool) -> list[Mixed]:
    """Return how records differ from the first one.

    Args:
      records: (where it is from, the record).
      columns: whether all files must have the same keys: tables; else some keys may be optional.
    """
    if not records:
        return []
    first, model = records[0]
    shape = _shape(model)
    found = [_differs(first, shape, where, _shape(record), columns) for where, record in records[1:]]
    return [difference for difference in found if difference is not None]


def _differs(first: str, one: Any, where: str, other: Any, columns: bool) -> Mixed | None:
    if not isinstance(one, dict) or not isinstance(other, dict):
        if not _compatible(one, other):
            return f"the first record of {first} is {_shape_line(one)}, that of {where} is {_shape_line(other)}", True
        return None
    wrong = [key for key in one.keys() & other.keys() if not _compatible(one[key], other[key])]
    if wrong:
        keys = ", ".join(f"{key!r} is {one[key]} and {other[key]}" for key in sorted(wrong, key=str)[:SHOWN_COLUMNS])
        return f"the first records of {first} and {where} differ: {keys}", True
    if one.keys() != other.keys():
        said = [f"{where} has no {_keys(one.keys() - other.keys())}"] if one.keys() - other.keys() else []
        said += [f"{first} has no {_keys(other.keys() - one.keys())}"] if other.keys() - one.keys() else []
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


def _compatible(one: Any, other: Any) -> bool:
    if isinstance(one, dict) or isinstance(other, dict):
        return False
    return one == other or "NoneType" in (one, other) or {one, other} == {"int", "float"}


def _shape_line(shape: Any) -> str:
    return "a mapping" if isinstance(shape, dict) else str(shape)


def _keys(keys: Any) -> str:
    names = sorted(map(repr, keys))
    return ", ".join(names[:SHOWN_COLUMNS]) + (
        f" and {len(names) - SHOWN_COLUMNS:,} more" if len(names) > SHOWN_COLUMNS else ""
    )
