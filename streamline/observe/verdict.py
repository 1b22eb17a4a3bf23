"""The verdict: which stage limits a stream, and what to do about it, in one line. Pure: figures in, a verdict out.

A *load* is the share of the time for which something was busy: an event loop, which all inline functions in it share,
or the calls that a stage may have in progress at once (`Loads`). The rules are those of docs/seeing.md, tried in the
order of `RULES`; the first that applies wins. Making the most loaded part faster helps until the next one is as loaded:
that bounds every estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from streamline.core.figures import Figures, StageStats, ThreadStats, per_s
from streamline.core.text import quantity

MOST_FACTOR = 8
"""The most calls at once, for each there are now, that is advised in one step."""


WAYS_OUT = {
    "map": "{threads}",
    "batch": ".batch(collate=None) and the collating in .map({threads})",
    "bucket_by_length": ".bucket_by_length(collate=None) and the collating in .map({threads})",
    "flat_map": ".map({threads}) that returns lists, and .unbatch()",
    "unbatch": ".map({threads}) that returns lists, and .unbatch()",
    "from_items": "from_items(range(len(data))) and .map(data.__getitem__, {threads})",
    "filter": "a .map({threads}) before it that does the slow part",
    "source": "yielding what is to be read, and the reading in .map({threads})",
    "from_iterable": "a factory that yields what is to be read, and the reading in .map({threads})",
}


def way_out(kind: str, calls: int) -> str:
    """Return how the work of an inline function of a kind of stage gets off the event loop, to so many threads."""
    way = WAYS_OUT.get(kind, "its slow part in a .map({threads})")
    return way.format(threads=f'executor="thread", concurrency={calls}')


LARGER = {
    "map": "let a call do several items (batched=256)",
    "gather": "a larger batched=",
    "scatter": "a larger batched=",
    "from_items": "give what it reads a __getitems__, which takes a list of indices",
    "from_iterable": "let it yield lists, and .unbatch() after it",
    "source": "let it yield lists, and .unbatch() after it",
    "batch": "larger batches",
    "bucket_by_length": "larger batches",
    "unbatch": "larger batches",
    "filter": "filter lists in a .map, between .batch(collate=None) and .unbatch()",
}
"""How one call of an inline function does several items, by kind of stage."""

LARGER_CALLS = "let a call do several items (.batch before it, .unbatch after)"


def more_at_once(stage: StageStats, more: int) -> str:
    """Return how a stage that is awaited gets more done at once."""
    if stage.executor != "inline":
        return f"concurrency={stage.concurrency * more}"
    if stage.kind == "source" or stage.kind.startswith("read_"):
        what = "" if stage.kind == "source" else " files or connections"
        return f".shard({stage.workers * more}), so that as many{what} are read at once"
    if stage.kind == "from_iterable":
        return "an iterable that names what is to be read, and the reading in .map(concurrency=), several at once"
    return "its slow part in a .map(concurrency=) before it, where several items are at work at once"


FULL_LOAD = 0.85
"""An event loop with this load delays all that is awaited, so it is looked at before what is awaited."""


class Loads:
    """Figures as shares of the time that has passed."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.stages = figures.stages
        self.elapsed_s = figures.elapsed_s
        self.waits = figures.waits
        self.ranks_wait = min(1.0, figures.ranks_wait_s / self.elapsed_s)
        self.body_holds = min(1.0, figures.consumer_held_s / self.elapsed_s)
        self.arrivals_hold = sum(host.arrival_s for host in figures.hosts) / self.elapsed_s
        self.loop = figures.contention.loop
        self.stages_hold = self.arrivals_hold + sum(self.holds(stage) for stage in self.stages if not stage.hosts)
        self.hosted_hold = sum(self.holds(stage) for stage in self.stages if stage.hosts)

    def holds(self, stage: StageStats) -> float:
        """The share of the time for which a stage held the event loop; the event loops of its hosts, on average."""
        return stage.held_s / (self.elapsed_s * max(1, stage.hosts))

    def loop_of(self, stage: StageStats) -> float:
        """The share of the time for which the event loop that a stage runs in was held by stages."""
        return self.hosted_hold if stage.hosts else self.stages_hold

    def load(self, stage: StageStats) -> float:
        """The load of a stage's calls."""
        return stage.busy_s / (self.elapsed_s * stage.slots)

    def awaited(self, stage: StageStats) -> float:
        """The load of a stage that doesn't hold the loop, or the part of it that doesn't."""
        return (stage.busy_s - stage.held_s) / (self.elapsed_s * stage.slots)

    def full(self, stage: StageStats) -> float:
        """The share for which a stage's results found no room."""
        return stage.wait_output_s / (self.elapsed_s * stage.slots)

    def limited(self, stage: StageStats) -> float:
        """The share for which a stage's calls waited for permits of a limit."""
        return stage.limited_s / (self.elapsed_s * stage.slots)

    def call_s(self, stage: StageStats) -> float:
        """Seconds that a call of an inline function takes."""
        at = self.stages.index(stage)
        calls = (
            self.stages[at - 1].items
            if at and stage.kind in ("filter", "flat_map", "unbatch", "scatter")
            else stage.items
        )
        return stage.held_s / max(1, calls)

    def contended_share(self, seconds: float) -> float:
        """The share that seconds are of those in which it was seen what slows all stages alike; 0: of too few."""
        looked_s = self.figures.contention.looked_s
        return seconds / looked_s if looked_s >= CONTENDED_S else 0.0

    @property
    def gil(self) -> float:
        """The share of looks that found the GIL held."""
        seen = self.figures.contention
        return seen.gil_waits / max(1, seen.gil_looks)

    def take_turns(self, *others: ThreadStats) -> bool:
        """Whether the pipeline's threads and `others` compute one at a time, with the GIL: on one core all together."""
        own = [each for each in self.figures.contention.threads if each.name.startswith(OWN_THREADS)]
        compute = self.contended_share(sum(each.cpu_s for each in (*own, *others)))
        could = self.contended_share(sum(each.runnable_s for each in (*own, *others)))  # if a core were free
        return self.gil >= GIL_HELD and could >= 0.4 and compute <= 1.2

    @property
    def heaviest(self) -> StageStats | None:
        return max(self.stages, key=self.holds, default=None)

    def next_limit(self, but: StageStats, *, loop: bool = False) -> float:
        """The highest load when a stage is out of the way: of the consumer, another stage, or the loop without it.

        Args:
          loop: whether it is the loop that it is to be taken off.
        """
        full = self.loop_of(but) if loop and self.loop_of(but) >= FULL_LOAD else 0.0
        delays = {bool(but.hosts): full}  # what is awaited in the same loop lasts longer by it
        others = [self.awaited(stage) - delays.get(bool(stage.hosts), 0.0) for stage in self.stages if stage is not but]
        out = self.holds(but) if loop else 0.0
        own, hosted = (
            (self.stages_hold, self.hosted_hold - out) if but.hosts else (self.stages_hold - out, self.hosted_hold)
        )
        return max([0.01, 1 - self.waits, own, hosted, *others])

    def rest_of_rank(self, but: StageStats) -> float:
        """The highest load that stays when all that workers do goes elsewhere."""
        at = next((at for at, stage in enumerate(self.stages) if stage.kind == "merge"), len(self.stages))
        downstream = [max(self.holds(stage), self.awaited(stage)) for stage in self.stages[at:] if stage is not but]
        return max([0.01, 1 - self.waits, sum(map(self.holds, self.stages[at:])), *downstream])

    def in_workers(self, stage: StageStats) -> bool:
        at = self.stages.index(stage)
        return not any(before.kind == "merge" for before in self.stages[:at])


LEAST_S, LEAST_ITEMS = 0.2, 8
"""Less than this says nothing: a dropped connection, a function's first call, a machine that was busy elsewhere."""

WAITS = 0.1
"""A consumer that waits for a smaller share of its time has nothing to gain."""

LOADED = 0.6
"""From this load on, a part of the pipeline may be what limits it; true limits are at 0.9, noise takes some of it."""

UNEVEN_FACTOR = 3.0
"""How much slower than the others a worker has to be."""

RARE = 0.1
"""A filter that keeps a smaller share of what it sees is selective."""

REPEATED = 0.1
"""A source whose requests are repeats to this share asks more of a server than it bears, or of one that fails."""

TINY_S = 0.00001
"""A call that takes less than this isn't worth a hop to a thread: several items a call are."""

OWN_THREADS = "streamline"
"""How the names of the pipeline's threads begin."""

GIL_HELD = 0.2
"""Looks that find the GIL held, as a share: a thread that computes in Python keeps it for all but moments. Where cores
are busy, it doesn't always get one in the moment that a look leaves it."""

CONTENDED = 0.2
"""All stages are slowed alike by what takes this share of the time."""

CONTENDED_S = 1.0
"""Seconds for which that has to be seen: a garbage collection, or a burst of another program, takes part of one."""

WORTH = 1.1
"""A speed-up below this isn't worth a line."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits a stream; `str` is all of it in one line.

    Attributes:
      rule: which one spoke, by its name in `RULES`.
      stage: the stage as printed, "map(decode)"; None: the consumer, or what slows all stages alike.
      what: in a few words: "map(decode) limits".
      why: what was seen.
      advice: what to try.
      speedup: how many times as fast the stream may get if the advice is taken, at the most; None: there is none.
    """

    rule: str
    stage: str | None
    what: str
    why: str
    advice: str
    speedup: float | None = None

    @property
    def line(self) -> str:
        """All of it for a person."""
        return f"{self.what}: {self.why}; {self.advice}"

    def __str__(self) -> str:
        return self.line


class Finding(NamedTuple):
    """What a rule says; see `Verdict`, whose `why` also says how long the consumer waits."""

    stage: StageStats | None
    what: str
    why: str
    advice: str
    speedup: float | None = None


def verdict_of(figures: Figures) -> Verdict | None:
    """Return what limits a stream; None: nothing does, or the figures say too little."""
    if figures.elapsed_s < LEAST_S or figures.items < LEAST_ITEMS or (found := limit_of(figures)) is None:
        return None
    rule, (stage, what, why, advice, speedup) = found
    if speedup is not None and speedup < WORTH:
        return None
    if rule != CONSUMER:
        why = f"{why}; the consumer waits {_percent(figures.waits)} of its time"
    name = None if stage is None else str(stage)
    return Verdict(rule=rule, stage=name, what=what, why=why, advice=advice, speedup=speedup)


def limit_of(figures: Figures) -> tuple[str, Finding] | None:
    """Return the rule that applies, and what it says, however little the figures say; None: none does."""
    loads = Loads(figures)
    return next(((name, found) for name, rule in RULES.items() if (found := rule(loads)) is not None), None)


def _consumer(loads: Loads) -> Finding | None:
    if loads.waits >= WAITS:
        return None
    why = f"it waits {_percent(loads.waits)} of its time, so the pipeline keeps up"
    return Finding(None, "the consumer limits", why, "nothing to do here")


def _other_ranks(loads: Loads) -> Finding | None:
    """Others have not said yet whether they have another item, and all end together."""
    if loads.ranks_wait < loads.waits / 2:
        return None
    return Finding(
        None,
        "the other ranks limit",
        f"{_percent(loads.ranks_wait)} of the time, one of them has no other item yet, and all end together",
        "with metrics= on all ranks, the dashboard of docs/metrics.md names the slowest",
    )


def _body(loads: Loads) -> Finding | None:
    """The loop's body and the pipeline take turns in one event loop."""
    most = max(map(loads.holds, loads.stages), default=0.0)
    if loads.body_holds < max(0.3, most) or loads.body_holds + loads.stages_hold < FULL_LOAD:
        return None
    speedup = 1 / max(1 - loads.waits, loads.stages_hold)
    return Finding(
        None,
        "the body of the `async for` limits",
        f"it holds the event loop {_percent(loads.body_holds)} of the time, and the pipeline stands still meanwhile",
        f"try a plain `for`, whose pipeline runs in a thread of its own: {_about(speedup)}",
        speedup,
    )


def _memory(loads: Loads) -> Finding | None:
    """Programs wait for memory: pages are freed, and read again soon after."""
    share = loads.contended_share(loads.figures.contention.memory_wait_s)
    if share < CONTENDED:
        return None
    return Finding(
        None,
        "the machine's memory limits",
        f"{_percent(share)} of the time programs wait for pages that have to be freed first",
        "hold less (smaller windows of shuffles, batches and caches, fewer processes, a smaller memory=), or get more "
        "of it",
    )


def _quota(loads: Loads) -> Finding | None:
    """The control group's CPU time is used up before its period ends: everything stands still until the next one."""
    seen = loads.figures.contention
    share = seen.quota_throttled / max(1, seen.quota_periods)
    if seen.looked_s < CONTENDED_S or share < CONTENDED:
        return None
    return Finding(
        None,
        "the CPU quota of this container limits",
        f"it is used up in {_percent(share)} of its periods, and all threads stand still until the next one",
        f"more threads and processes don't help: a larger quota does ({quantity(loads.figures.cpus, 'CPU')} now; in "
        "Kubernetes, resources.limits.cpu)",
    )


def _collector(loads: Loads) -> Finding | None:
    """Python's garbage collector stops all threads."""
    share = loads.contended_share(loads.figures.contention.collecting_s)
    if share < CONTENDED:
        return None
    speedup = 1 / max(1 - share, 1 - loads.waits)
    return Finding(
        None,
        "Python's garbage collector limits",
        f"it stops all threads of this process {_percent(share)} of the time",
        "keep fewer small objects (arrays in place of lists and dicts), or call gc.freeze() once all that stays is "
        f"loaded: {_about(speedup)} at the most",
        speedup,
    )


def _gil(loads: Loads) -> Finding | None:
    """A thread that isn't the pipeline's computes in Python, also while the consumer waits, and others want the GIL."""
    seen = loads.figures.contention
    others = [each for each in seen.threads if each.number != loads.loop and not each.name.startswith(OWN_THREADS)]
    hog = max(others, key=lambda each: each.runnable_s, default=None)
    if hog is None or not loads.take_turns(hog):
        return None
    share = loads.contended_share(hog.runnable_s)
    if share < 0.5 or share - (1 - loads.waits) < 0.3:  # what it does while it doesn't wait is the consumer's own work
        return None
    return Finding(
        None,
        f"the thread {hog.name!r} limits",
        f"it computes {_percent(share)} of the time, and holds the GIL for which the pipeline's threads wait",
        "let it sleep, or run it in a process of its own; with backend=sl.Processes(n), workers have a GIL of their "
        "own",
    )


def _cores(loads: Loads) -> Finding | None:
    """The event loop's thread could run most of the time, and for much of that no core is free."""
    own = next((each for each in loads.figures.contention.threads if each.number == loads.loop), None)
    if own is None:
        return None
    waits, computes = map(loads.contended_share, (own.core_wait_s, own.cpu_s))
    if waits < 0.3 or waits < computes or waits + computes < LOADED:
        return None
    return Finding(
        None,
        "the machine's cores limit",
        f"the event loop waits for one {_percent(waits)} of the time, while other programs, threads or processes of "
        "this one compute",
        f"let fewer of them run at once, or give this one cores of its own ({quantity(loads.figures.cpus, 'CPU')} now)",
    )


def _uneven(loads: Loads) -> Finding | None:
    """One worker's stage is loaded, and slower than those of the others."""
    found = [(load, stage, slow) for stage in loads.stages for load, slow in _slowest(loads, stage)]
    if not found:
        return None
    load, stage, slow = max(found, key=lambda one: one[0])
    others = [worker for worker in stage.per_worker if worker is not slow]
    usual = median(_each(worker) for worker in others if worker.items)
    ratio = _each(slow) / usual if usual else math.inf
    rest = max(worker.busy_s for worker in others) / (loads.elapsed_s * stage.concurrency)
    speedup = min(ratio, load / max(rest, 1 - loads.waits, 0.01))
    strict = any(merge.kind == "merge" and merge.ordered for merge in loads.stages)
    way = (
        '.merge("best_effort", max_lead=) bridges its slow stretches'
        if strict
        else "a larger max_lead= bridges longer slow stretches"
    )
    times = f"{ratio:.0f} x" if ratio < 100 else "more than 100 x"
    return Finding(
        stage,
        f"{stage} of shard {slow.shard} limits",
        f"busy {_percent(load)}, {times} the time of the others for an item, and the merge waits for it",
        f"{way}, .shard({2 * stage.workers}) splits its work: {_about(speedup)} if it kept up",
        speedup,
    )


def _slowest(loads: Loads, stage: StageStats) -> list[tuple[float, StageStats]]:
    """Return the load of the stage's slowest worker and that worker, if it alone is what the others wait for."""
    workers = stage.per_worker
    if len(workers) < 2:
        return []
    slow = max(workers, key=lambda worker: worker.busy_s)
    load = slow.busy_s / (loads.elapsed_s * stage.concurrency)
    others = [_each(worker) for worker in workers if worker is not slow and worker.items]
    if load < LOADED or not others or _each(slow) < UNEVEN_FACTOR * median(others):
        return []
    if median(worker.busy_s for worker in workers if worker is not slow) > slow.busy_s / 2:
        return []
    return [(load, slow)]


def _each(worker: StageStats) -> float:
    """Seconds of work for an item."""
    return worker.busy_s / max(1, worker.items)


def _loop(loads: Loads) -> Finding | None:
    """An event loop is full, and a stage's inline function is what holds it."""
    stage = loads.heaviest
    if stage is None:
        return None
    body = 0.0 if stage.hosts else loads.body_holds
    total = loads.loop_of(stage) + body
    if total < LOADED or loads.holds(stage) < 0.3 or loads.holds(stage) < body:
        return None
    if total < FULL_LOAD and any(loads.awaited(other) > total for other in loads.stages):
        return None
    held, rest = loads.holds(stage), loads.next_limit(stage, loop=True)
    why = f"it holds {_loops(loads, stage)} {_percent(held)} of the time"
    if loads.call_s(stage) < TINY_S:
        why = f"{why}, with calls of {1e6 * loads.call_s(stage):.1f} µs"
        advice = f"{LARGER.get(stage.kind, LARGER_CALLS)}: {_about(1 / rest)} at the most"
        return Finding(stage, f"{stage} limits", why, advice, 1 / rest)
    calls = max(2, min(MOST_FACTOR, math.ceil(1 / rest)))
    speedup = min(1 / rest, calls / held) if stage.kind == "map" else 1 / rest  # the others get threads by a map
    more, faster = _more_hosts(loads, stage, rest)
    advice = (
        f"try {way_out(stage.kind, calls)}: {_about(speedup)} if it waits, up to the number of cores if it releases "
        f"the GIL, nothing if it computes in Python{more}"
    )
    return Finding(stage, f"{stage} limits", why, advice, max(speedup, faster))


def _loops(loads: Loads, stage: StageStats) -> str:
    """Return the event loops that a stage runs in."""
    if not stage.hosts:
        return "the event loop"
    kind = loads.figures.hosts[0].kind if loads.figures.hosts else "host"
    return f"the event loop of its {kind}" if stage.hosts == 1 else f"the event loops of {quantity(stage.hosts, kind)}"


def _more_hosts(loads: Loads, stage: StageStats, rest: float) -> tuple[str, float]:
    """Return what processes would do for a stage's inline function, and how much faster it gets; "": nothing."""
    kind = loads.figures.hosts[0].kind if stage.hosts and loads.figures.hosts else None
    now = stage.hosts if kind == "process" else 1
    rest = rest if kind == "process" else loads.rest_of_rank(stage)
    elsewhere = any(host.node for host in loads.figures.hosts)  # the CPUs of this machine are no limit
    count = min(MOST_FACTOR * now if elsewhere else loads.figures.cpus, MOST_FACTOR * now, math.ceil(now / rest))
    speedup = min(1 / rest, count / now)
    if not loads.in_workers(stage) or count <= now or speedup < WORTH:
        full = kind == "process" and now >= loads.figures.cpus and not elsewhere
        return (f" (its {quantity(now, 'process')} have all of the CPUs)" if full else ""), 0.0
    shards = f".shard({count}) and " if stage.workers < count else ""
    gil = " if it computes in Python" if kind == "thread" else ""
    hosts = f"{count} hosts" if elsewhere else f"backend=Processes({count})"
    return f"; or {shards}{hosts}: {_about(speedup)}{gil}", speedup


def _border(loads: Loads) -> Finding | None:
    """Taking in what hosts give keeps this process's event loop busy."""
    share = loads.arrivals_hold
    if loads.stages_hold < LOADED or share < 0.3 or share < max(map(loads.holds, loads.stages), default=0.0):
        return None
    hosts = loads.figures.hosts
    return Finding(
        None,
        "the border limits",
        f"taking in the items of {quantity(len(hosts), hosts[0].kind)} holds the event loop {_percent(share)} of the "
        "time",
        "let fewer and larger items cross (.batch before .merge(), arrays in place of many small objects)",
    )


def _calls_full(loads: Loads) -> Finding | None:
    """All calls of a stage, or all readers of a source, are at work nearly all of the time."""
    stage = max(loads.stages, key=loads.awaited, default=None)
    if stage is None or loads.awaited(stage) < LOADED:
        return None
    if stage.kind in ("from_stream", "stream_http"):
        why = (
            f"the feed gives {per_s(stage.items / loads.elapsed_s)} items/s and is waited for "
            f"{_percent(loads.awaited(stage))} of the time"
        )
        advice = "what it does for each item, if anything, belongs into .map(concurrency=)"
        return Finding(stage, f"{stage} limits", why, advice)
    rest = loads.next_limit(stage)
    if stage.executor == "thread" and stage.slots > 1 and loads.take_turns():
        return _threads_in_turn(loads, stage, rest)
    more = min(MOST_FACTOR, math.ceil(1 / rest))
    speedup = min(float(more), 1 / rest)
    why = f"busy {_percent(loads.awaited(stage))}{_repeats(loads, stage)}"
    if_threads = " if it waits or releases the GIL" if stage.executor == "thread" else ""
    advice = f"try {more_at_once(stage, more)}: {_about(speedup)}{if_threads}"
    return Finding(stage, f"{stage} limits", why, advice, speedup)


def _repeats(loads: Loads, stage: StageStats) -> str:
    """Return that much of what a source asks of servers has to be asked again."""
    asked = next((reads for reads in loads.figures.reads if reads.name == stage.name), None)
    if asked is None or asked.retries < REPEATED * asked.requests or not asked.retries:
        return ""
    return (
        f", {asked.retries:,} of its {asked.requests:,} requests were repeats: the server is busy, or drops "
        "connections (streamline.reading in the log says which)"
    )


def _threads_in_turn(loads: Loads, stage: StageStats, rest: float) -> Finding:
    """The threads of a stage's calls compute in Python, one at a time."""
    speedup = min(float(loads.figures.cpus), 1 / rest)
    processes = max(2, round(speedup))
    before = "" if loads.in_workers(stage) else ", before .merge()"
    why = "its threads compute in Python, and take turns with the GIL"
    advice = f"try .shard({processes}) and backend=sl.Processes({processes}){before}: {_about(speedup)}"
    return Finding(stage, f"{stage} limits", why, advice, speedup)


def _limited(loads: Loads) -> Finding | None:
    """Calls wait for permits of a limit that they share with others."""
    stage = max(loads.stages, key=loads.limited, default=None)
    if stage is None or loads.limited(stage) < 0.3:
        return None
    speedup = 1 / max(loads.awaited(stage), loads.next_limit(stage))
    why = f"its calls wait for permits {_percent(loads.limited(stage))} of the time"
    advice = f"a larger one, if what they call bears it: {_about(speedup)} at the most"
    return Finding(stage, f"the limit= of {stage} limits", why, advice, speedup)


def _order(loads: Loads) -> Finding | None:
    """Calls are idle because the results of slow ones are waited for."""
    held_up = [stage for stage in loads.stages if stage.executor != "inline" and loads.full(stage) >= 0.3]
    if not held_up:
        return None
    stage = max(held_up, key=loads.full)
    speedup = min(1 / max(loads.load(stage), 0.01), 1 / loads.next_limit(stage))
    way = "ordered=False" if stage.ordered else f"a time limit in the function, or concurrency={2 * stage.concurrency}"
    why = f"its calls are idle {_percent(loads.full(stage))} of the time while slow ones hold up the results after them"
    return Finding(stage, f"{stage} limits", why, f"try {way}: {_about(speedup)}", speedup)


def _selective(loads: Loads) -> Finding | None:
    """Nearly all that is read is dropped, and nothing takes long of an item."""
    heaviest = loads.heaviest
    if heaviest is not None and loads.holds(heaviest) >= 0.3 and loads.call_s(heaviest) >= TINY_S:
        return None
    if any(loads.awaited(stage) >= LOADED for stage in loads.stages):
        return None
    for before, stage in zip(loads.stages, loads.stages[1:], strict=False):
        if stage.kind == "filter" and before.items > 0 and loads.waits >= 0.5 and stage.items <= RARE * before.items:
            kept = f"1 of {before.items / stage.items:,.0f}" if stage.items else f"none of {before.items:,}"
            why = "all that is before it works for the others, too"
            return Finding(stage, f"{stage} keeps {kept} items", why, "drop them earlier, best where they are read")
    return None


CONSUMER, OTHER_RANKS = "consumer", "other ranks"

RULES: dict[str, Callable[[Loads], Finding | None]] = {
    CONSUMER: _consumer,
    OTHER_RANKS: _other_ranks,
    "loop body": _body,
    "memory": _memory,
    "quota": _quota,
    "collector": _collector,
    "gil": _gil,
    "cores": _cores,
    "uneven workers": _uneven,
    "selective filter": _selective,
    "border": _border,
    "loop": _loop,
    "limit": _limited,
    "calls": _calls_full,
    "order": _order,
}
"""By name, in the order in which they are tried."""

CONTENTION = frozenset({"memory", "quota", "collector", "gil", "cores"})
"""Those that speak of what slows all stages alike."""


def _percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f} %"


def _about(speedup: float) -> str:
    return f"about {speedup:.1f} x" if speedup < 10 else "10 x or more"
