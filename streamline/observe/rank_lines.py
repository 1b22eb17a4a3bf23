"""What ranks tell rank 0 of their streams, a line at a time, and what is made of all lines. Pure.

The *exposed wait* of a stage is the share of the time for which the consumer waited for it: work that isn't hidden
behind the consumer's own. It is found by a walk from the consumer up: while that waits, the task that gives it items is
at work in one of its stages, or has no input; the latter is divided over the task before it in the same way. Exposed
waits add up to the consumer's, with what no stage accounts for.

A rank is named as the slowest if its items cost the consumer more waiting than the median rank's. Ranks that train
together take their steps together, so their rates are alike, and the wait is on the slow one only; where each goes at
its own pace, all wait for all of their time, and the slow one waits longer for an item. The wait for an item says both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, NamedTuple

import msgspec

from streamline.core.counters import BORDER
from streamline.core.text import clean, some
from streamline.observe.figures import Figures, StageStats
from streamline.observe.verdict import WAITS

MOST_RANKS = 1024
"""Ranks that one page has; of the others it says how many there are."""

MOST_LINE_BYTES = 128 * 1024
"""Of one line. What is in it is bounded so that it can't be longer, whatever its texts are made of."""

MOST_STREAMS, MOST_STAGES = 4, 32
"""Of a rank, and of each of its streams, that a line has."""

MOST_COLUMNS = 16
"""Stages of a map; what else the consumer waited for is one column."""

SHOWN = 0.005
"""The share for which some rank waits for a stage that has a column: less would be 0 % on all of them."""

MOST_COMPARED = 4
"""Stages of the slowest rank that are set beside those of the median rank."""

LABEL_CHARS, WORDS_CHARS = 60, 300

SILENT_S = 5.0
"""Seconds beyond three missed lines, after which a rank is silent."""

APART = 1.5
"""How many times the median rank's wait, or time for an item, is worth a name."""

ALIKE = 2.0
"""How far apart such times of a rank's stages may lie, if something slows all of them down: a slow function holds up
what is awaited beside it, but less than itself."""

ENOUGH_S = 3.0
"""Seconds of a stream, after its first items, that say something about its rank."""

COUNTS = 0.05
"""A stage that works for a smaller share of the time says nothing about its rank."""

RANKS, REST = "other ranks", "other"
"""The columns of the wait for other ranks to have another item, and of what nothing that is shown accounts for."""

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Label = Annotated[str, msgspec.Meta(max_length=LABEL_CHARS)]
_Words = Annotated[str, msgspec.Meta(max_length=WORDS_CHARS)]


class StageLine(msgspec.Struct, frozen=True, array_like=True):
    """A stage in the last seconds.

    Attributes:
      exposed: the share of the time for which the consumer waited for it.
      busy_s, bytes: of each of its items.
      items: for each one that the consumer got.
    """

    label: _Label
    exposed: _Share = 0.0
    busy_s: _Number = 0.0
    items: _Number = 0.0
    bytes: _Number = 0.0

    @property
    def share(self) -> float:
        """Seconds of its work for an item that the consumer gets."""
        return self.busy_s * self.items


class StreamLine(msgspec.Struct, frozen=True, array_like=True):
    """A stream in the last seconds; `items` since it was opened.

    Attributes:
      over_s: how many seconds these are, those before its first items left out.
      waits: the share of the time for which the consumer waited; `for_ranks`: for other ranks to have another item.
      verdict: how it is, in a word; then as a page's headline has it: words, rest, advice.
      stages: in the plan's order, the source first.
    """

    name: _Label
    epoch: _Count = 0
    items: _Count = 0
    over_s: _Number = 0.0
    rate: _Number = 0.0
    waits: _Share = 0.0
    for_ranks: _Share = 0.0
    retries_s: _Number = 0.0
    verdict: tuple[_Label, _Words, _Words, _Words] = ("", "", "", "")
    stages: Annotated[tuple[StageLine, ...], msgspec.Meta(max_length=MOST_STAGES)] = ()

    @property
    def ended(self) -> bool:
        return self.verdict[0] == "ended"

    @property
    def settled(self) -> bool:
        """Whether it gave as many items before: what was read ahead at the beginning is none of these."""
        return self.items >= 2 * self.rate * self.over_s

    @property
    def own(self) -> float:
        """The share of the time for which the consumer waited, other ranks aside."""
        return max(0.0, self.waits - self.for_ranks)

    @property
    def wait_s(self) -> float:
        """Seconds that the consumer waits for an item, other ranks aside; infinite: it waits, and gets none."""
        if self.rate > 0:
            return self.own / self.rate
        return math.inf if self.own > 0 else 0.0


class RankLine(msgspec.Struct, frozen=True):
    """What a rank says each time.

    Attributes:
      every_s: until its next line.
      cores: that its process keeps busy, its hosts aside.
      over: it publishes nothing more: its streams are closed.
    """

    every_s: _Number = 1.0
    cores: _Number = 0.0
    streams: Annotated[tuple[StreamLine, ...], msgspec.Meta(max_length=MOST_STREAMS)] = ()
    over: bool = False


_decoder = msgspec.json.Decoder(RankLine)


def encoded(line: RankLine) -> bytes:
    """Return a line as it is sent, with its end."""
    return msgspec.json.encode(line) + b"\n"


def decoded(line: bytes) -> RankLine:
    """Return what was said; `ValueError`: it is no line."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def short(text: str, chars: int) -> str:
    """Return text of at most so many characters, which can be written as UTF-8."""
    text = clean(text[: chars + 1])
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


# Of one rank ----------------------------------------------------------------------------------------------------------
def exposed_waits(figures: Figures, branches: Set[str] = frozenset()) -> dict[str, float]:
    """Return the share of the time for which the consumer waited for each stage, by its name.

    Args:
      branches: names of the stages of a mixture's components, which run side by side.
    """
    elapsed_s = figures.elapsed_s
    if elapsed_s <= 0:
        return {}
    waits = min(1.0, max(0.0, figures.consumer_wait_s - figures.ranks_wait_s) / elapsed_s)
    found: dict[str, float] = {}
    tasks = list(_tasks(figures, branches))
    if tasks:  # a last stage that has no room while the consumer waits isn't what it waits for
        no_room = tasks[-1][-1].wait_output_s / (elapsed_s * max(1, tasks[-1][-1].workers))
        waits = max(0.0, min(waits, 1.0 - no_room))
    for task in reversed(tasks):
        idle, busy = _idle(task[0], elapsed_s), {stage.name: _work(stage, elapsed_s) for stage in task}
        first = task is tasks[0]
        whole = sum(busy.values()) + (0.0 if first else idle)
        if whole <= 0:
            continue
        found |= {name: waits * share / whole for name, share in busy.items()}
        waits = 0.0 if first else waits * idle / whole
    return found


def _tasks(figures: Figures, branches: Set[str]) -> Iterator[list[StageStats]]:
    """Yield the stages that run in one task, from the source on; those of components together, as the first."""
    ends = {channel.name.removesuffix(BORDER) for channel in figures.channels}
    task: list[StageStats] = [stage for stage in figures.stages if stage.name in branches]
    for stage in figures.stages:
        if stage.name not in branches:
            if stage.kind == "merge" and task:
                yield task
                task = []
            task.append(stage)
            if stage.name in ends:
                yield task
                task = []
    if task:
        yield task


def _idle(stage: StageStats, elapsed_s: float) -> float:
    """Return the share of the time for which a call of a stage, in a worker, had no input: then its input limits."""
    return min(1.0, stage.wait_input_s / (elapsed_s * max(1, stage.workers)))


def _work(stage: StageStats, elapsed_s: float) -> float:
    limited_s = sum(detail.value for detail in stage.details if detail.name == "limited_s")
    return min(1.0, (stage.busy_s + limited_s) / (elapsed_s * max(1, stage.slots)))


def stream_line(
    name: str, epoch: int, items: int, lately: Figures, verdict: Mapping[str, str], branches: Set[str] = frozenset()
) -> StreamLine:
    """Return what a line says of a stream.

    Args:
      lately: its last seconds, those before its first items left out.
      verdict: a page's headline of it.
    """
    elapsed_s, each = lately.elapsed_s or math.inf, max(1, lately.items)
    exposed = exposed_waits(lately, branches)
    stages = lately.stages
    if len(stages) > MOST_STAGES:
        most = sorted(stages[1:], key=lambda stage: (exposed.get(stage.name, 0.0), stage.busy_s), reverse=True)
        kept = {stage.name for stage in most[: MOST_STAGES - 1]}
        stages = tuple(stage for at, stage in enumerate(stages) if not at or stage.name in kept)
    return StreamLine(
        name=short(name, LABEL_CHARS),
        epoch=epoch,
        items=items,
        over_s=lately.elapsed_s,
        rate=lately.items / elapsed_s,
        waits=min(1.0, lately.consumer_wait_s / elapsed_s),
        for_ranks=min(1.0, lately.ranks_wait_s / elapsed_s),
        retries_s=sum(read.retries for read in lately.reads) / elapsed_s,
        verdict=(
            short(verdict["how"], LABEL_CHARS),
            *(short(verdict[part], WORDS_CHARS) for part in ("words", "rest", "advice")),  # type: ignore[arg-type]
        ),
        stages=tuple(
            StageLine(
                short(str(stage), LABEL_CHARS),
                min(1.0, exposed.get(stage.name, 0.0)),
                stage.busy_s / max(1, stage.items),
                stage.items / each,
                stage.bytes / max(1, stage.items),
            )
            for stage in stages
        ),
    )


# Of all ranks ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SeenRank:
    """What rank 0 knows of a rank.

    Attributes:
      line: its last one; None: none has come yet.
      at: when that came, or it connected, in seconds of any clock.
      connected: it is.
    """

    node: str
    pid: int
    line: RankLine | None
    at: float
    connected: bool = True

    def status(self, now: float) -> str:
        """Return "live", "silent", "lost", or "ended"."""
        if self.line is not None and self.line.over:
            return "ended"
        if not self.connected:
            return "lost"
        every_s = 1.0 if self.line is None else self.line.every_s
        return "silent" if now - self.at > 3 * every_s + SILENT_S else "live"

    @property
    def streams(self) -> tuple[StreamLine, ...]:
        return () if self.line is None or self.line.over else self.line.streams

    @property
    def who(self) -> str:
        return f"{self.node}, pid {self.pid}"

    def stream(self, name: str) -> StreamLine | None:
        """Return its stream of a name; None: it has none, or is done."""
        return next((stream for stream in self.streams if stream.name == name), None)


class SlowRank(NamedTuple):
    """The rank that the others wait for.

    Attributes:
      why, advice: in words.
      compared: what it is, of this rank, and of the median of the others.
    """

    rank: int
    why: str
    advice: str
    compared: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        return "; ".join(filter(None, (f"rank {self.rank} is the slowest: {self.why}", self.advice)))


def slowest(name: str, seen: Mapping[int, SeenRank], now: float) -> SlowRank | None:
    """Return the rank whose stream of a name stands out, and why; None: none does."""
    lines = {rank: line for rank, line in live(name, seen, now).items() if line.over_s >= ENOUGH_S and not line.ended}
    found = {rank: line for rank, line in lines.items() if line.own >= WAITS}
    if len(lines) < 2 or not found:
        return None
    rank = max(found, key=lambda rank: found[rank].wait_s)
    line, others = lines[rank], [other for one, other in lines.items() if one != rank]
    if not line.wait_s > APART * median(other.wait_s for other in others):
        return None
    cores = {one: said.cores for one in lines if (said := seen[one].line) is not None}
    own, usual = cores.pop(rank), median(cores.values())
    waits = median(other.own for other in others)
    why = (
        f"{seen[rank].who}: its consumer waits {100 * line.own:.0f} % of its time, the median rank's "
        f"{100 * waits:.0f} %; {_why(line, others, own, usual)}; {line.verdict[1]}"
    )
    return SlowRank(rank, why, line.verdict[3], tuple(_compared(line, others, own, usual)))


def live(name: str, seen: Mapping[int, SeenRank], now: float) -> dict[int, StreamLine]:
    """Return the streams of a name, by rank, of the ranks that publish."""
    lines = {rank: one.stream(name) for rank, one in sorted(seen.items()) if one.status(now) == "live"}
    return {rank: line for rank, line in lines.items() if line is not None}


def _why(line: StreamLine, others: Sequence[StreamLine], cores: float, usual_cores: float) -> str:
    if line.rate <= 0:
        return "it has given no item in the last seconds"
    read, usual_read = _of_source(line, others, lambda stage: stage.items)
    if line.settled and read >= APART * usual_read > 0:
        return (
            f"it reads {read:,.1f} items for each one that it gives, the median rank {usual_read:,.1f}: its shards "
            "keep fewer; divide the data more evenly"
        )
    size, usual_size = _of_source(line, others, lambda stage: stage.bytes)
    if size >= APART * usual_size > 0:
        return f"its items are {_times(size, usual_size)} as large as the median rank's; divide the data more evenly"
    ratios = {stage.label: _ratio(stage, others) for stage in line.stages if stage.share * line.rate >= COUNTS}
    if len(ratios) > 1 and min(ratios.values()) >= APART and max(ratios.values()) <= ALIKE * min(ratios.values()):
        busy = f" (it keeps {cores:.1f} cores busy, the median rank {usual_cores:.1f})"
        return (
            f"each of its stages takes {min(ratios.values()):.1f} x the time of the median rank for an item, or more: "
            f"other threads hold the GIL, other programs its machine, or that is slower{busy}"
        )
    stage = max(line.stages, key=lambda stage: stage.exposed, default=None)
    if stage is None or _ratio(stage, others) < APART:
        return "none of its stages takes much longer than on the median rank"
    storage = stage is line.stages[0] and stage.label.startswith("read_")
    retries = f", with {line.retries_s:.1f} retries a second" if line.retries_s >= 0.1 else ""
    return (
        f"{stage.label} takes {_times(stage.busy_s, _usual(stage, others))} the time of the median rank "
        f"for an item{retries}" + ": its storage, or the way there, is slower" * storage
    )


def _of_source(
    line: StreamLine, others: Sequence[StreamLine], what: Callable[[StageLine], float]
) -> tuple[float, float]:
    """Return a figure of the first stage: of a rank, and of the median of the others."""
    if not line.stages:
        return 0.0, 0.0
    usual = [
        what(other.stages[0]) for other in others if other.stages and other.stages[0].label == line.stages[0].label
    ]
    return what(line.stages[0]), median(usual) if usual else 0.0


def _usual(stage: StageLine, others: Sequence[StreamLine]) -> float:
    """Return the seconds of work for an item on the median of the other ranks that have a stage."""
    times = [other.busy_s for line in others for other in line.stages if other.label == stage.label]
    return median(times) if times else 0.0


def _ratio(stage: StageLine, others: Sequence[StreamLine]) -> float:
    usual = _usual(stage, others)
    return stage.busy_s / usual if usual > 0 else math.inf if stage.busy_s > 0 else 1.0


def _times(one: float, other: float) -> str:
    return f"{one / other:,.1f} x" if other > 0 and one / other < 100 else "more than 100 x"


def _compared(
    line: StreamLine, others: Sequence[StreamLine], cores: float, usual_cores: float
) -> Iterator[tuple[str, str, str]]:
    def usual(what: Callable[[StreamLine], float]) -> float:
        return median(what(other) for other in others)

    yield "items/s", f"{line.rate:,.1f}", f"{usual(lambda one: one.rate):,.1f}"
    yield "consumer waits", f"{100 * line.own:.0f} %", f"{100 * usual(lambda one: one.own):.0f} %"
    yield "waits for an item", _ms(line.wait_s), _ms(usual(lambda one: one.wait_s))
    yield "cores busy", f"{cores:.1f}", f"{usual_cores:.1f}"
    busy = [stage for stage in line.stages if stage.exposed >= 0.01 or stage.share * line.rate >= COUNTS]
    for stage in sorted(busy, key=lambda stage: -stage.exposed)[:MOST_COMPARED]:
        yield f"{stage.label}, an item", _ms(stage.busy_s), _ms(_usual(stage, others))
    for what, of in (("read for an item", lambda stage: stage.items), ("bytes of one read", lambda stage: stage.bytes)):
        one, other = _of_source(line, others, of)
        if one >= APART * other > 0:
            yield what, f"{one:,.1f}", f"{other:,.1f}"
    retries = line.retries_s, usual(lambda one: one.retries_s)
    if any(retries):
        yield "retries/s", f"{retries[0]:.1f}", f"{retries[1]:.1f}"


def _ms(seconds: float) -> str:
    return "-" if not math.isfinite(seconds) else f"{1000 * seconds:,.3g} ms"


def headline(name: str, seen: Mapping[int, SeenRank], slow: SlowRank | None, now: float) -> dict[str, str] | None:
    """Return what is wrong with a job at a glance, as a page's headlines have it; None: nothing."""
    for status, words in (("lost", "lost"), ("silent", "silent")):
        gone = [rank for rank in sorted(seen) if seen[rank].status(now) == status]
        if gone:
            one = seen[gone[0]]
            rest = f"rank {gone[0]} ({one.who}) has said nothing for {now - one.at:,.0f} s"
            return _headline("stalled", f"{_ranks(gone)} {words}", rest)
    lines = {rank: line for rank in sorted(seen) if (line := seen[rank].stream(name)) is not None}
    stalled = [rank for rank, line in lines.items() if line.verdict[0] == "stalled"]
    stalled = [
        rank for rank in stalled if lines[rank].own >= lines[rank].for_ranks
    ] or stalled  # the others wait for it
    if stalled:
        line = lines[stalled[0]]
        rest = f"rank {stalled[0]} ({seen[stalled[0]].who}): {line.verdict[2]}"
        return _headline("stalled", f"{_ranks(stalled)} stalled", rest, line.verdict[3])
    return None if slow is None else _headline("slow", f"Rank {slow.rank} is the slowest", slow.why, slow.advice)


def _headline(how: str, words: str, rest: str, advice: str = "") -> dict[str, str]:
    return {"how": how, "words": words, "rest": rest, "advice": advice, "stage": ""}


def _ranks(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]} is" if len(ranks) == 1 else f"Ranks {some(ranks)} are"


def shown_ranks(seen: Mapping[int, SeenRank], world_size: int, now: float) -> dict[str, Any]:
    """Return what one update says of all ranks: for each name of a stream, a map of exposed waits. Bounded."""
    counts: dict[str, int] = {}
    for one in seen.values():
        for stream in one.streams:
            counts[stream.name] = counts.get(stream.name, 0) + 1
    names = sorted(counts, key=lambda name: -counts[name])[:MOST_STREAMS]
    ranks = range(min(world_size, MOST_RANKS))
    missing = [rank for rank in ranks if rank not in seen]
    return {
        "world_size": world_size,
        "more": world_size - len(ranks),
        "missing": f"nothing has come from rank {some(missing)} yet: is page= given there, too?" if missing else "",
        "maps": [_map(name, seen, ranks, now) for name in names],
        "headline": None if names else headline("", seen, None, now),
    }


def _map(name: str, seen: Mapping[int, SeenRank], ranks: Iterable[int], now: float) -> dict[str, Any]:
    slow = slowest(name, seen, now)
    exposed: dict[str, float] = {}
    for line in live(name, seen, now).values():
        for stage in line.stages:
            exposed[stage.label] = max(exposed.get(stage.label, 0.0), stage.exposed)
    most = set(sorted(exposed, key=lambda label: -exposed[label])[:MOST_COLUMNS])
    columns = [label for label, share in exposed.items() if label in most and share >= SHOWN]
    return {
        "name": name,
        "columns": [*columns, RANKS, REST],
        "rows": [_row(rank, seen.get(rank), name, columns, now) for rank in ranks],
        "slowest": None if slow is None else {"rank": slow.rank, "compared": slow.compared},
        "headline": headline(name, seen, slow, now),
    }


def _row(rank: int, one: SeenRank | None, name: str, columns: Sequence[str], now: float) -> dict[str, Any]:
    """Return a rank's row: its cells in percent; none where it has said nothing of this stream."""
    if one is None:
        return {"rank": rank, "status": "missing", "who": "", "age_s": None, "rate": 0.0, "waits": 0, "cells": []}
    line, status, age_s = one.stream(name), one.status(now), round(max(0.0, now - one.at), 1)
    found = {"rank": rank, "status": status, "who": one.who, "age_s": age_s, "rate": 0.0, "waits": 0, "cells": []}
    if line is None:
        return found
    cells = [sum(stage.exposed for stage in line.stages if stage.label == label) for label in columns]
    cells.append(line.for_ranks)
    cells.append(max(0.0, line.waits - sum(cells)))
    percents = [round(100 * share) for share in cells]
    return found | {"rate": round(line.rate, 3), "waits": round(100 * line.waits), "cells": percents}


def rank_lines(shown: Mapping[str, Any], most_rows: int = 64) -> Iterator[str]:
    """Yield the lines of all maps for a terminal: of many ranks those where the consumer waits most."""
    for one in shown["maps"]:
        if one["headline"] is not None:
            parts = (one["headline"][part] for part in ("words", "rest", "advice"))
            yield f"{one['headline']['how'].upper()}: {'; '.join(filter(None, parts))}"
        widths = [max(6, min(20, len(label))) for label in one["columns"]]
        heads = [
            label[: width - 1] + "…" if len(label) > width else label
            for label, width in zip(one["columns"], widths, strict=True)
        ]
        yield f"exposed wait, {one['name']}, {shown['world_size']} ranks"
        yield "  ".join(["rank ", "  items/s", "waits", *map(str.rjust, heads, widths)])
        rows = sorted(sorted(one["rows"], key=lambda row: -row["waits"])[:most_rows], key=lambda row: row["rank"])
        for row in rows:
            yield _text_row(row, widths)
        if len(one["rows"]) > most_rows:
            yield f"and {len(one['rows']) - most_rows} more ranks, which wait less"
        if one["slowest"] is not None:
            for what, mine, usual in one["slowest"]["compared"]:
                yield f"  {what}: {mine} on rank {one['slowest']['rank']}, {usual} on the median rank"
    if not shown["maps"] and shown["headline"] is not None:
        yield f"STALLED: {shown['headline']['words']}; {shown['headline']['rest']}"
    if shown["missing"]:
        yield shown["missing"]
    if shown["more"]:
        yield f"{shown['more']:,} more ranks aren't shown"


def _text_row(row: Mapping[str, Any], widths: Sequence[int]) -> str:
    cells = [f"{cell} %" if cell else "·" for cell in row["cells"]]
    age = "" if row["age_s"] is None else f" for {row['age_s']:,.0f} s"
    status = "" if row["status"] == "live" else f"  {row['status']}{age * (row['status'] in ('lost', 'silent'))}"
    figures = [f"{row['rate']:9,.1f}", f"{row['waits']:3d} %"] if cells else [f"{'-':>9}", "    -"]
    who = f"  {row['who']}" if row["who"] else ""
    return "  ".join([f"{row['rank']:5d}", *figures, *map(str.rjust, cells, widths)]) + status + who
