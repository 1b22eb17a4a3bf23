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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import msgspec

from streamline.core.cpus import cpu_s
from streamline.core.error_policy import ErrorReport
from streamline.core.figures import FROM_HOST, ChannelStats, HostStats, ReadStats, StageStats, label
from streamline.core.options import parse_address, type_and_repr
from streamline.core.text import safe_text, shorten
from streamline.errors import PlanTypeError, printable_lines
from streamline.observe.exporters import CONTENT_TYPE, ExportedStream, Exporter, Reading, asked_by_address, exporter_at
from streamline.observe.stats import Stats
from streamline.observe.tables import table
from streamline.observe.verdict import CONSUMER, WAITS

if TYPE_CHECKING:
    from aiohttp import web

    from streamline.observe.tuner import TuningStep

logger = logging.getLogger("streamline.page")  # as the docs call it

ANYWHERE = "127.0.0.1:0"
"""Where `page=True` is: on this machine only, at any free port."""

EVERY_S = 1.0

MOST_TIME_SHARE = 0.01
"""The most of the time that goes into reading figures."""

SLOW_S = 10.0
"""Seconds that a client may take for one update."""

MOST_STREAMS, MOST_STAGES, MOST_HOSTS, MOST_PARTS, MOST_EVENTS = 16, 200, 256, 64, 100
"""What one update has."""

MOST_CHARS = 600
"""Of one text in an update."""

STALLED_S = 5.0
"""A wait for one item that is worth the headline."""

FILES = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}

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
      working: what each host is at, by its number: "map(decode) of shard 3 for 2 s".
      stalled: for how long the consumer has waited, and what for; "": it hasn't waited for long.
      ended: it has ended, or is closed.
      snapshot: the last one: when it was taken and saved, in seconds since 1970, its bytes, where it is.
      steps: the last turns of its knobs.
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
    steps: Sequence[TuningStep] = ()


def page_place(page: object) -> str | None:
    """Return what exporters call the place that `page=` names; None: there is none. Raises `PlanError`."""
    if page is False:
        return None
    if page is not True and not isinstance(page, str):
        raise PlanTypeError(
            f'.open(page=) is True, False or "HOST:PORT", where the page is to be, got {type_and_repr(page)}'
        )
    address = ANYWHERE if page is True else page
    parse_address(".open(page=)", address)
    return f"page {address}"


def open_page(place: str) -> LivePage:
    """Open the page at a place. Raises `HostError`."""
    return LivePage(parse_address(".open(page=)", place.removeprefix("page ")))


def page_url(place: str | None) -> str | None:
    """Return the address of a page, with its token; None: it isn't open."""
    page = None if place is None else exporter_at(place)
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
            file, kind = FILES[name]
            body = (Path(__file__).parent / "page_files" / file).read_bytes()
            return web.Response(body=body, headers={**HEADERS, "Content-Type": kind})
        if name == "metrics":
            return web.Response(body=self.exposition().encode(), headers={**HEADERS, "Content-Type": CONTENT_TYPE})
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
            self._bodies[kind] = UPDATES[kind](self)
            self._due = max(self._due, began + (perf_counter() - began) / MOST_TIME_SHARE)
        return self._bodies[kind]

    def for_script(self) -> bytes:
        seen = self._read()
        streams = [
            {"name": one.labels["stream"], "rank": int(one.labels["rank"])}
            | stream_update(*reading, about, self._cpu.of(reading.stats.hosts))
            for one, reading, about in seen
        ]
        update = {"time": time.time(), "streams": streams, "events": self._events(seen)}
        return b"data: " + msgspec.json.encode(update) + b"\n\n"

    def for_terminal(self) -> bytes:
        """Return an update for `streamline top`."""
        seen = self._read()
        texts = [stream_text(one.labels, *reading, about) for one, reading, about in seen]
        events = self._events(seen)[: MOST_EVENTS // 10]
        clocks = [time.strftime("%H:%M:%S", time.localtime(event["at"])) for event in events]
        texts.append("\n".join(f"{clock} {event['text']}" for clock, event in zip(clocks, events, strict=True)))
        lines = "\n\n".join(texts).split("\n")
        return "".join(f"data: {_cut(line)}\n" for line in lines).encode() + b"\n"

    def _read(self) -> list[tuple[ExportedStream, Reading, StreamFacts]]:
        shown = self.streams[:MOST_STREAMS]
        return [(one, one.read(), StreamFacts() if one.about is None else one.about()) for one in shown]

    def _events(self, seen: Iterable[tuple[ExportedStream, Reading, StreamFacts]]) -> list[dict[str, Any]]:
        """Return the last ones, the newest first: warnings, and turns of knobs."""
        steps = [step for _, _, about in seen for step in about.steps]
        events = [*self._log.events, *({"at": one.time, "level": "info", "text": _cut(str(one))} for one in steps)]
        return sorted(events, key=lambda event: -event["at"])[:MOST_EVENTS]


UPDATES = {"events": LivePage.for_script, "top": LivePage.for_terminal}
"""Addresses that send updates."""


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


class EventLog(logging.Handler):
    """Keeps the last warnings of streamline: a worker replaced, a stall named. Others get them as before."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = _cut(record.getMessage())
            self.events.append({"at": record.created, "level": record.levelname.lower(), "text": text})
        except Exception:
            self.handleError(record)
        if not _has_other(record.name, self) and logging.lastResort is not None:
            logging.lastResort.handle(record)  # as without this one: a program that has set up no logging sees it


def _has_other(name: str, mine: logging.Handler) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(one, EventLog) for one in logger.handlers) or logger.handlers[:1] not in ([], [mine]):
            return True
        logger = logger.parent if logger.propagate else None
    return False


# What is shown --------------------------------------------------------------------------------------------------------
def stream_update(stats: Stats, lately: Stats, about: StreamFacts, cpu: Mapping[int, float]) -> dict[str, Any]:
    """Return what one update says of a stream. Bounded, whatever the plan has."""
    left = None if about.length is None or about.length == math.inf else max(0.0, about.length - stats.items)
    stages = list(zip(stats.stages[:MOST_STAGES], lately.stages, strict=False))
    found = {
        "epoch": about.epoch,
        "world_size": about.world_size,
        "elapsed_s": stats.elapsed_s,
        "items": stats.items,
        "rate": lately.rate,
        "waits": lately.waits,
        "waits_in_all": stats.waits,
        "length": None if left is None else about.length,
        "eta_s": left / lately.rate if left is not None and lately.rate > 0 and not about.ended else None,
        "verdict": headline(stats, lately, about),
        "stages": [_stage(stage, now, lately.elapsed_s, about) for stage, now in stages],
        "more_stages": max(0, len(stats.stages) - MOST_STAGES),
        "channels": [_channel(channel) for channel in stats.channels[:MOST_STAGES]],
        "hosts": [_host(host, about, cpu) for host in _first_hosts(stats.hosts)],
        "more_hosts": max(0, len(stats.hosts) - MOST_HOSTS),
        "reads": [_read(read, now, lately) for read, now in zip(stats.reads[:MOST_PARTS], lately.reads, strict=False)],
        "mixtures": [_mixture(stage, now) for stage, now in stages if _of_parts(stage, "weight")],
        "errors": _errors(about.errors),
        "snapshot": dict(about.snapshot),
    }
    return cast("dict[str, Any]", _bounded(found))


def headline(stats: Stats, lately: Stats, about: StreamFacts) -> dict[str, str]:
    """Return the verdict for someone who has a second: how it is ("good", "slow", "stalled"), a few words, the rest."""
    verdict = lately.verdict or stats.verdict
    how, words, rest, advice, stage = "slow", f"The consumer waits {100 * lately.waits:.0f} % of its time", "", "", ""
    if about.ended:
        how, words = "ended", "The stream has ended"
    elif about.stalled:
        how, words, rest = "stalled", "Nothing comes", about.stalled
    elif stats.items == 0:
        how, words, rest = "starting", "Starting", "no item has come yet"
    elif verdict is None:
        how, rest = "good" if lately.waits < WAITS else "slow", "no stage stands out"
    elif verdict.rule == CONSUMER:
        how, words, rest = "good", "The pipeline keeps up", verdict.why
    else:
        words = verdict.what.replace("the ", "The ", 1) if verdict.what.startswith("the ") else verdict.what
        rest, advice, stage = verdict.why, verdict.advice, verdict.stage or ""
    return {"how": how, "words": words, "rest": rest, "advice": advice, "stage": stage}


def _stage(stage: StageStats, now: StageStats, elapsed_s: float, about: StreamFacts) -> dict[str, Any]:
    most_s = elapsed_s * max(1, stage.slots)
    return {
        "name": stage.name,
        "label": str(stage),
        "branch": about.branches.get(stage.name, ""),
        "in_workers": stage.name in about.workers,
        "workers": stage.workers,
        "slots": stage.slots,
        "rate": _ratio(now.items, elapsed_s),
        "busy": _share(now.busy_s, most_s),
        "no_input": _share(now.wait_input_s, most_s),
        "no_room": _share(now.wait_output_s, most_s),
        "errors": stage.errors,
    }


def _channel(channel: ChannelStats) -> dict[str, Any]:
    most = channel.capacity * channel.channels
    after = channel.name.removesuffix(FROM_HOST)
    return {"after": after, "depth": channel.depth, "capacity": most, "fill": _share(channel.depth, most)}


def _first_hosts(hosts: tuple[HostStats, ...]) -> list[HostStats]:
    """Return those that are shown: those that were replaced first."""
    return sorted(hosts, key=lambda host: (-host.restarts, host.number))[:MOST_HOSTS]


def _host(host: HostStats, about: StreamFacts, cpu: Mapping[int, float]) -> dict[str, Any]:
    return {
        "name": host.name,
        "alive": host.alive,
        "cpu": cpu.get(host.number),
        "memory": host.resident_bytes or None,
        "restarts": host.restarts,
        "at": about.working.get(host.number, ""),
    }


def _read(read: ReadStats, now: ReadStats, lately: Stats) -> dict[str, Any]:
    return {
        "name": read.name,
        "requests_s": _ratio(now.requests, lately.elapsed_s),
        "in_flight": read.in_flight,
        "bytes_s": _ratio(now.bytes, lately.elapsed_s),
        "retries": read.retries,
        "hits": read.cache_hits,
        "misses": read.cache_misses,
    }


def _mixture(stage: StageStats, now: StageStats) -> dict[str, Any]:
    """Return the weights of a mixture's components: as they are wanted, and as they were served lately."""
    weights, served, items = _of_parts(stage, "weight"), _of_parts(now, "served"), _of_parts(stage, "served")
    parts = [
        {
            "name": part,
            "wanted": _share(weight, sum(weights.values())),
            "served": _share(served.get(part, 0.0), sum(served.values())),
            "items": items.get(part, 0),
        }
        for part, weight in list(weights.items())[:MOST_PARTS]
    ]
    return {"name": stage.name, "parts": parts}


def _of_parts(stage: StageStats, name: str) -> dict[str, float]:
    return {detail.part: detail.value for detail in stage.details if detail.name == name}


def _errors(report: ErrorReport) -> dict[str, Any]:
    return {
        "total": report.total,
        "stages": [{"name": name, "items": count} for name, count in list(report.stages.items())[:MOST_PARTS]],
        "file": None if report.dead_letters is None else str(report.dead_letters),
        "last": [
            {
                "stage": label(failure.stage, failure.kind),
                "shard": failure.shard,
                "position": failure.position,
                "message": f"{type(failure.error).__qualname__}: {safe_text(failure.error, str)}",
            }
            for failure in reversed(report.last)
        ],
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, _ratio(part, whole)))


def _bounded(update: Any) -> Any:
    """Return an update with all of its texts printable, and cut."""
    if isinstance(update, str):
        return _cut(update)
    if isinstance(update, list):
        return [_bounded(one) for one in update]
    return {name: _bounded(one) for name, one in update.items()} if isinstance(update, dict) else update


def _cut(text: str) -> str:
    return shorten(printable_lines(text), MOST_CHARS)


def stream_text(labels: Mapping[str, str], stats: Stats, lately: Stats, about: StreamFacts) -> str:
    """Return the same for a terminal: the verdict, and the table of `stats`. Bounded, too."""
    verdict = headline(stats, lately, about)
    parts = filter(None, (verdict["words"], verdict["rest"], verdict["advice"]))
    rank = f", rank {labels['rank']} of {about.world_size}" if about.world_size > 1 else ""
    length = "" if about.length is None else f" of {about.length:,.0f}"
    few = replace(
        lately,
        stages=lately.stages[:MOST_STAGES],
        channels=lately.channels[:MOST_STAGES],
        hosts=tuple(_first_hosts(lately.hosts)),
        reads=lately.reads[:MOST_PARTS],
    )
    head = f"{labels['stream']}{rank}, epoch {about.epoch}: {stats.items:,}{length} items"
    return f"{verdict['how'].upper()}: {'; '.join(parts)}\n{head}\n{table(few)}"
