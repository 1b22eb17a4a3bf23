"""The live page: what streams of this process do, in a browser or a terminal.

Its server runs in a thread of its own. Figures are read while a client watches, for all clients at once, and in at most
one hundredth of the time; a client that doesn't take them is dropped, and the stream never waits for one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from streamline.core.counters import BORDER, label
from streamline.core.cpus import cpu_s
from streamline.core.error_policy import ErrorReport
from streamline.core.options import given, parse_address
from streamline.core.text import said
from streamline.errors import PlanTypeError, printable_lines
from streamline.observe.exporters import (
    CONTENT_TYPE,
    ExportedStream,
    Exporter,
    asked_by_address,
    exposition,
    kept,
)
from streamline.observe.figures import ChannelStats, HostStats, StageStats
from streamline.observe.stats import Stats
from streamline.observe.tables import table
from streamline.observe.verdict import WAITS

if TYPE_CHECKING:
    from aiohttp import web

    from streamline.observe.tuner import TuningStep

logger = logging.getLogger("streamline.page")  # as the docs call it

ANYWHERE = "127.0.0.1:0"
"""Where `page=True` is: on this machine only, at any free port."""

EVERY_S = 1.0

SHARE = 0.01
"""The most of the time that goes into reading figures."""

SLOW_S = 10.0
"""Seconds that a client may take for one update."""

MOST_STREAMS, MOST_STAGES, MOST_HOSTS, MOST_PARTS, MOST_EVENTS = 16, 200, 256, 64, 100
"""What one update has; of the rest there is the number."""

MOST_CHARS = 600
"""Of one text in an update."""

STALLED_S = 5.0
"""A wait for one item that is worth the headline."""

FILES = {"": "page.html", "page.css": "page.css", "page.js": "page.js"}

TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, kw_only=True)
class StreamFacts:
    """What a page shows of a stream besides its figures.

    Attributes:
      length: items that it gives in all; None: that isn't known.
      workers: names of the stages that run in workers.
      branches: of a mixture, by name of a component's stage, the component.
      errors: items that were skipped.
      working: what each host is at, by its number: "map(decode) of shard 3 for 2 s".
      stalled: for how long the consumer has waited, and what for; "": it hasn't waited for long.
      ended: it has ended, or is closed.
      snapshot: the last one: when it was taken and saved, in seconds since 1970, its bytes, where it is.
      turns: of its knobs, the last ones, with when they were, in seconds since 1970.
    """

    epoch: int = 0
    world_size: int = 1
    length: float | None = None
    workers: frozenset[str] = frozenset()
    branches: Mapping[str, str] = field(default_factory=dict)
    errors: ErrorReport = field(default_factory=ErrorReport)
    working: Mapping[int, str] = field(default_factory=dict)
    stalled: str = ""
    ended: bool = False
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    turns: Sequence[tuple[float, TuningStep]] = ()


def page_place(page: object) -> str | None:
    """Return what exporters call the place that `page=` names; None: there is none. Raises `PlanError`."""
    if page is False:
        return None
    if page is not True and not isinstance(page, str):
        raise PlanTypeError(f'.open(page=) is True, False or "HOST:PORT", where the page is to be, got {given(page)}')
    address = ANYWHERE if page is True else page
    parse_address(".open(page=)", address)
    return f"page {address}"


def open_page(place: str) -> LivePage:
    """Open the page at a place. Raises `HostError`."""
    return LivePage(parse_address(".open(page=)", place.removeprefix("page ")))


def page_url(place: str | None) -> str | None:
    """Return the address of a page, with its token; None: it isn't open."""
    page = None if place is None else kept(place)
    return page.url if isinstance(page, LivePage) else None


class LivePage(Exporter):
    """The page of all streams that name its place.

    Attributes:
      url: of the page, with the token that lets in: "http://127.0.0.1:8600/TOKEN/".
    """

    def __init__(self, address: tuple[str, int]) -> None:
        from streamline.observe.web_server import WebServer

        super().__init__()
        self._token = secrets.token_urlsafe(16)
        self._log = EventLog()
        self._bodies: dict[str, bytes] = {}
        self._due = -math.inf
        self._cpu = CpuShares()
        self._server = WebServer(address, self._answer)
        self.url = f"{self._server.url}/{self._token}/"
        logging.getLogger("streamline").addHandler(self._log)
        print(f"streamline: page at {self.url}", file=sys.stderr)

    def close(self) -> bool:
        logging.getLogger("streamline").removeHandler(self._log)
        self._server.close()
        return True

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        _, _, rest = request.path.partition("/")
        token, slash, name = rest.partition("/")
        if not asked_by_address(request):
            return web.Response(status=403, headers=HEADERS, text="ask for this machine by its address\n")
        if request.headers.get("Origin", f"http://{request.host}") != f"http://{request.host}":
            return web.Response(status=403, headers=HEADERS, text="other pages may not ask\n")
        if not slash or not hmac.compare_digest(token.encode(), self._token.encode()):
            return web.Response(status=403, headers=HEADERS, text="the page's address has a token: see stream.page\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={**HEADERS, "Allow": "GET, HEAD"})
        if name in FILES:
            return web.Response(body=_file(FILES[name]), headers={**HEADERS, "Content-Type": _type(FILES[name])})
        if name == "metrics":
            text = exposition(self.readings()).encode()
            return web.Response(body=text, headers={**HEADERS, "Content-Type": CONTENT_TYPE})
        if name in UPDATES:
            return await self._send_updates(request, name)
        return web.Response(status=404, headers=HEADERS, text="there is nothing of that name\n")

    async def _send_updates(self, request: web.BaseRequest, kind: str) -> web.StreamResponse:
        """Send an update a second, as server-sent events, until the client has gone, or doesn't take one in time."""
        from aiohttp import web

        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            while request.method == "GET":
                await asyncio.wait_for(response.write(self._update(kind)), SLOW_S)
                await asyncio.sleep(max(EVERY_S, self._due - perf_counter()))
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        return response

    def _update(self, kind: str) -> bytes:
        """Return the present update, made once for all clients, and again when it is due."""
        began = perf_counter()
        if began >= self._due:
            self._bodies.clear()
        if kind not in self._bodies:
            self._bodies[kind] = UPDATES[kind](self._shown(tables=kind == "top"))
            self._due = max(self._due, began + (perf_counter() - began) / SHARE)
        return self._bodies[kind]

    def _shown(self, *, tables: bool) -> dict[str, Any]:
        shown = self.streams[:MOST_STREAMS]
        streams = [self._stream(stream, tables=tables) for stream in shown]
        turns = [turn for stream in shown if stream.about is not None for turn in stream.about().turns]
        events = [*self._log.events(), *(LoggedEvent(at, "info", _cut(str(step)))._asdict() for at, step in turns)]
        return {
            "time": time.time(),
            "streams": streams,
            "more_streams": max(0, len(self.streams) - MOST_STREAMS),
            "events": sorted(events, key=lambda event: -event["at"])[:MOST_EVENTS],
        }

    def _stream(self, stream: ExportedStream, *, tables: bool) -> dict[str, Any]:
        reading, about = stream.read(), stream.about() if stream.about is not None else StreamFacts()
        of_terminal = {"table": text_table(reading.lately)} if tables else {}
        return {"name": stream.labels["stream"], "rank": int(stream.labels["rank"]), **of_terminal} | shown(
            reading.stats, reading.lately, about, self._cpu.of(reading.stats.hosts)
        )


def _as_json(shown: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(shown) + b"\n\n"


def _as_text(shown: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + line.encode() + b"\n" for line in text_lines(shown)) + b"\n"


UPDATES: dict[str, Callable[[dict[str, Any]], bytes]] = {"events": _as_json, "top": _as_text}
"""Addresses that send updates: for the page's script, and for a terminal."""


@cache
def _file(name: str) -> bytes:
    return (Path(__file__).parent / "page_files" / name).read_bytes()


def _type(name: str) -> str:
    return TYPES[Path(name).suffix]


class CpuShares:
    """The cores that processes of this machine keep busy, between one look and the next."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}

    def of(self, hosts: Iterable[HostStats]) -> dict[int, float]:
        """Return them by number of the host; of those on other machines, and of threads, nothing."""
        found: dict[int, float] = {}
        for host in hosts:
            if host.pid is None or host.node or host.kind != "process" or not host.alive:
                continue
            used_s, now = cpu_s(host.pid), perf_counter()
            if used_s is None:
                continue
            at, before_s = self._before.get(host.pid, (now, used_s))
            self._before[host.pid] = now, used_s
            if now > at:
                found[host.number] = max(0.0, used_s - before_s) / (now - at)
        return found


class LoggedEvent(NamedTuple):
    """A line of streamline's log."""

    at: float
    level: str
    text: str


class EventLog(logging.Handler):
    """Keeps the last warnings of streamline: a worker replaced, a stall named. Others get them as before."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[LoggedEvent] = deque(maxlen=MOST_EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._kept.append(LoggedEvent(record.created, record.levelname.lower(), _cut(record.getMessage())))
        except Exception:
            self.handleError(record)
        if not _has_other(record.name, self) and logging.lastResort is not None:
            logging.lastResort.handle(record)  # as without this one: a program that has set up no logging sees it

    def events(self) -> list[dict[str, Any]]:
        """Return them, the last one first."""
        return [event._asdict() for event in reversed(tuple(self._kept))]


def _has_other(name: str, mine: logging.Handler) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(one, EventLog) for one in logger.handlers) or logger.handlers[:1] not in ([], [mine]):
            return True
        logger = logger.parent if logger.propagate else None
    return False


# What is shown --------------------------------------------------------------------------------------------------------
def shown(stats: Stats, lately: Stats, about: StreamFacts, cpu: Mapping[int, float]) -> dict[str, Any]:
    """Return what one update says of a stream. Bounded, whatever the plan has."""
    rate = lately.items / lately.elapsed_s if lately.elapsed_s > 0 else 0.0
    left = None if about.length is None or about.length == math.inf else max(0.0, about.length - stats.items)
    hosts, stages = stats.hosts, stats.stages
    return {
        "epoch": about.epoch,
        "world_size": about.world_size,
        "elapsed_s": stats.elapsed_s,
        "items": stats.items,
        "rate": rate,
        "waits": _share(lately.consumer_wait_s, lately.elapsed_s),
        "waits_in_all": _share(stats.consumer_wait_s, stats.elapsed_s),
        "length": None if left is None else about.length,
        "eta_s": left / rate if left is not None and rate > 0 and not about.ended else None,
        "verdict": headline(stats, lately, about),
        "stages": _stages(stats, lately, about),
        "more_stages": max(0, len(stages) - MOST_STAGES),
        "channels": [_channel(channel, stages) for channel in stats.channels[:MOST_STAGES]],
        "hosts": [_host(host, about, cpu) for host in _first_hosts(hosts)],
        "more_hosts": max(0, len(hosts) - MOST_HOSTS),
        "reads": list(_reads(stats, lately)),
        "mixtures": list(_mixtures(stats, lately)),
        "errors": _errors(about.errors),
        "snapshot": {name: _cut(one) if isinstance(one, str) else one for name, one in about.snapshot.items()},
    }


def text_table(lately: Stats) -> str:
    """Return the table of `stats`, or what of it an update may have."""
    few = replace(lately, stages=lately.stages[:MOST_STAGES], channels=lately.channels[:MOST_STAGES])
    few = replace(few, hosts=tuple(_first_hosts(few.hosts)), reads=few.reads[:MOST_PARTS])
    return "\n".join(map(_cut, table(few).split("\n")))


def headline(stats: Stats, lately: Stats, about: StreamFacts) -> dict[str, str]:
    """Return the verdict for someone who has a second: how it is ("good", "slow", "stalled"), a few words, the rest."""
    waits = _share(lately.consumer_wait_s, lately.elapsed_s)
    verdict = lately.verdict or stats.verdict
    if about.ended:
        return _headline("ended", "The stream has ended")
    if about.stalled:
        return _headline("stalled", "Nothing comes", about.stalled)
    if stats.items == 0:
        return _headline("starting", "Starting", "no item has come yet")
    if verdict is None:
        words = f"The consumer waits {100 * waits:.0f} % of its time"
        return _headline("good" if waits < WAITS else "slow", words, "no stage stands out")
    if verdict.rule == "consumer":
        return _headline("good", "The pipeline keeps up", verdict.line)
    words, _, rest = verdict.line.partition(": ")
    why, _, advice = rest.partition("of its time; ")
    why = f"{why}of its time" if advice else why
    return _headline("slow", words, why, advice, verdict.stage or "")


def _headline(how: str, words: str, rest: str = "", advice: str = "", stage: str = "") -> dict[str, str]:
    words = words[:1].upper() + words[1:] if words.startswith("the ") else words
    parts = {"how": how, "words": words, "rest": rest, "advice": advice, "stage": stage}
    return {name: _cut(part) for name, part in parts.items()}


def _stages(stats: Stats, lately: Stats, about: StreamFacts) -> list[dict[str, Any]]:
    shown = zip(stats.stages[:MOST_STAGES], lately.stages, strict=False)
    return [_stage(stage, now, lately.elapsed_s, about) for stage, now in shown]


def _stage(stage: StageStats, now: StageStats, elapsed_s: float, about: StreamFacts) -> dict[str, Any]:
    most_s = elapsed_s * max(1, stage.slots)
    return {
        "name": _cut(stage.name),
        "label": _cut(str(stage)),
        "kind": stage.kind,
        "branch": _cut(about.branches.get(stage.name, "")),
        "in_workers": stage.name in about.workers,
        "workers": stage.workers,
        "slots": stage.slots,
        "items": stage.items,
        "rate": now.items / elapsed_s if elapsed_s > 0 else 0.0,
        "busy": _share(now.busy_s, most_s),
        "no_input": _share(now.wait_input_s, most_s),
        "no_room": _share(now.wait_output_s, most_s),
        "errors": stage.errors,
    }


def _channel(channel: ChannelStats, stages: Iterable[StageStats]) -> dict[str, Any]:
    most = channel.capacity * channel.channels
    return {
        "after": _cut(channel.name.removesuffix(BORDER)),
        "border": channel.name.endswith(BORDER),
        "depth": channel.depth,
        "capacity": most,
        "fill": _share(channel.depth, most),
    }


def _first_hosts(hosts: tuple[HostStats, ...]) -> list[HostStats]:
    """Return those that are shown: those that were replaced first."""
    return sorted(hosts, key=lambda host: (-host.restarts, host.number))[:MOST_HOSTS]


def _host(host: HostStats, about: StreamFacts, cpu: Mapping[int, float]) -> dict[str, Any]:
    return {
        "name": _cut(host.name),
        "alive": host.alive,
        "cpu": cpu.get(host.number),
        "memory": host.resident_bytes or None,
        "restarts": host.restarts,
        "items": host.items,
        "workers": len(host.shards),
        "at": _cut(about.working.get(host.number, "")),
    }


def _reads(stats: Stats, lately: Stats) -> Iterator[dict[str, Any]]:
    elapsed_s = lately.elapsed_s or math.inf
    for read, now in list(zip(stats.reads, lately.reads, strict=False))[:MOST_PARTS]:
        yield {
            "name": _cut(read.name),
            "requests": read.requests,
            "requests_s": now.requests / elapsed_s,
            "in_flight": read.in_flight,
            "bytes_s": now.bytes / elapsed_s,
            "retries": read.retries,
            "hits": read.cache_hits,
            "misses": read.cache_misses,
        }


def _mixtures(stats: Stats, lately: Stats) -> Iterator[dict[str, Any]]:
    """Yield the weights of each mixture's components: as they are wanted, and as they were served lately."""
    for stage, now in zip(stats.stages[:MOST_STAGES], lately.stages, strict=False):
        weights = {one.part: one.value for one in stage.details if one.name == "weight"}
        if not weights:
            continue
        served = {one.part: one.value for one in now.details if one.name == "served"}
        of_all = {one.part: one.value for one in stage.details if one.name == "served"}
        yield {
            "name": _cut(stage.name),
            "parts": [
                {
                    "name": _cut(part),
                    "wanted": _share(weight, sum(weights.values())),
                    "served": _share(served.get(part, 0.0), sum(served.values())),
                    "items": of_all.get(part, 0),
                }
                for part, weight in list(weights.items())[:MOST_PARTS]
            ],
        }


def _errors(report: ErrorReport) -> dict[str, Any]:
    return {
        "total": report.total,
        "stages": [{"name": _cut(name), "items": count} for name, count in list(report.stages.items())[:MOST_PARTS]],
        "file": None if report.dead_letters is None else _cut(str(report.dead_letters)),
        "last": [
            {
                "stage": _cut(label(failure.stage, failure.kind)),
                "shard": failure.shard,
                "position": _cut(failure.position),
                "message": _cut(f"{type(failure.error).__qualname__}: {said(failure.error, str)}"),
            }
            for failure in reversed(report.last)
        ],
    }


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _cut(text: str) -> str:
    text = printable_lines(text)
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"


def text_lines(shown: dict[str, Any]) -> Iterator[str]:
    """Yield the lines for a terminal, of streams with their `text_table`."""
    for stream in shown["streams"]:
        whose = f", rank {stream['rank']} of {stream['world_size']}" if stream["world_size"] > 1 else ""
        verdict = stream["verdict"]
        said = "; ".join(filter(None, (verdict["words"], verdict["rest"], verdict["advice"])))
        yield from f"{verdict['how'].upper()}: {said}".split("\n")
        yield f"{stream['name']}{whose}, epoch {stream['epoch']}{_progress(stream)}"
        yield from stream["table"].split("\n")
        yield from _last_lines(stream, shown["time"])
        yield ""
    for event in shown["events"][: MOST_EVENTS // 10]:
        yield from f"{time.strftime('%H:%M:%S', time.localtime(event['at']))} {event['text']}".split("\n")


def _progress(stream: dict[str, Any]) -> str:
    if stream["length"] is None:
        return f": {stream['items']:,} items"
    eta = "" if stream["eta_s"] is None else f", {stream['eta_s']:,.0f} s left"
    return f": {stream['items']:,} of {stream['length']:,.0f} items{eta}"


def _last_lines(stream: dict[str, Any], now: float) -> Iterator[str]:
    snapshot, errors = stream["snapshot"], stream["errors"]
    if snapshot.get("taken_at"):
        saved = f", saved {now - snapshot['saved_at']:,.0f} s ago in {snapshot['where']}" * bool(snapshot["saved_at"])
        yield f"last snapshot taken {now - snapshot['taken_at']:,.0f} s ago{saved}"
    if errors["total"]:
        yield f"{errors['total']:,} items were skipped"
    for letter in errors["last"]:
        yield from f"  {letter['stage']} of shard {letter['shard']}: {letter['message']}".split("\n")
