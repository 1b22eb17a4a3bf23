"""Where the metrics of running streams are read: at an address, by Prometheus, or by OpenTelemetry's meter provider.

Nothing is sent from here, and nothing runs between two readings: a scraper, or a reader of OpenTelemetry's SDK, asks
for the figures in a thread of its own. All streams of this process that name the same place share it.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from streamline.core.forks import ForkSafeLock
from streamline.core.options import check_installed, parse_address, type_and_repr
from streamline.errors import PlanTypeError, printable_lines
from streamline.observe.metrics import METRICS, Metric
from streamline.observe.stats import Stats

if TYPE_CHECKING:
    from aiohttp import web
    from opentelemetry.metrics import CallbackOptions, Observation

logger = logging.getLogger("streamline.metrics")  # as the docs call it

WINDOW_S = 10.0
"""What "the last seconds" are, at least: as long as readings lie apart, if that is longer."""

FRESH_S = 0.1
"""For so long a reading is used again: one collection of OpenTelemetry asks for each metric by itself."""

OPENTELEMETRY = "opentelemetry"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus's text format."""


class Reading(NamedTuple):
    """The figures of a stream: since it was opened, and of its last seconds."""

    stats: Stats
    lately: Stats


class ExportedStream:
    """A stream whose metrics are exported. From any thread.

    Attributes:
      labels: what all of its values bear.
      about: returns what is shown of it besides its figures; None: nothing is.
    """

    def __init__(
        self, name: str, rank: int, stats: Callable[[], Stats], about: Callable[[], Any] | None = None
    ) -> None:
        self.about = about
        self.labels = {"stream": printable_lines(name), "rank": str(rank)}
        self._stats = stats
        self._lock = threading.Lock()
        self._earlier = deque([Stats(elapsed_s=0, items=0, consumer_wait_s=0)])
        self._read_at = -FRESH_S
        self._reading: Reading | None = None

    def read(self) -> Reading:
        with self._lock:
            now = perf_counter()
            if self._reading is None or now - self._read_at >= FRESH_S:
                self._read_at = now
                self._reading = self._read()
            return self._reading

    def _read(self) -> Reading:
        stats, earlier = self._stats(), self._earlier
        while len(earlier) > 1 and (
            stats.elapsed_s - earlier[1].elapsed_s >= WINDOW_S
            or stats.elapsed_s - earlier[0].elapsed_s >= 2 * WINDOW_S  # it wasn't read for long
        ):
            earlier.popleft()
        lately = stats.since(earlier[0])
        earlier.append(stats)
        return Reading(stats, lately)


class Exporter(ABC):
    """A place where metrics are read.

    Attributes:
      users: streams that export to it, and what keeps it between two of them.
      streams: those that export to it; the list is replaced, as other threads read it.
    """

    def __init__(self) -> None:
        self.users = set[object]()
        self.streams: list[ExportedStream] = []

    def add(self, stream: ExportedStream) -> None:
        """Export a stream; a further one of the same name gets a number."""
        name, labels = stream.labels["stream"], [one.labels for one in self.streams]
        numbers = count(2)
        while stream.labels in labels:
            stream.labels["stream"] = f"{name} {next(numbers)}"
        self.streams = [*self.streams, stream]

    def remove(self, stream: ExportedStream) -> None:
        self.streams = [one for one in self.streams if one is not stream]

    def exposition(self) -> str:
        return exposition([(stream.labels, stream.read()) for stream in self.streams])

    @abstractmethod
    def close(self) -> bool:
        """Close it, after its last user; return False to keep it for others that come. Idempotent."""


def exposition(readings: Sequence[tuple[Mapping[str, str], Reading]]) -> str:
    """Return the metrics of streams, each with its labels, in Prometheus's text format."""
    lines = []
    for metric in METRICS:
        name = metric.prometheus_name
        lines += [f"# HELP {name} {metric.description}\n", f"# TYPE {name} {metric.kind}\n"]
        for stream, reading in readings:
            for labels, value in metric.read(stream, *reading):
                text = ",".join(f'{label}="{_escape(one)}"' for label, one in labels.items())
                lines.append(f"{name}{{{text}}} {value!r}\n")
    return "".join(lines)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class PrometheusEndpoint(Exporter):
    """Gives the metrics in Prometheus's text format, at http://ADDRESS/metrics."""

    def __init__(self, address: tuple[str, int]) -> None:
        from streamline.observe.web_server import WebServer

        super().__init__()
        self._server = WebServer(address, self._answer)
        logger.info("metrics at %s/metrics", self._server.url)

    def close(self) -> bool:
        self._server.close()
        return True

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        if not asked_by_address(request):
            return web.Response(status=403, text="ask for this machine by its address\n")
        if request.path != "/metrics":
            return web.Response(status=404, text="/metrics is all there is here\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        return web.Response(body=self.exposition().encode(), headers={"Content-Type": CONTENT_TYPE})


def asked_by_address(request: web.BaseRequest) -> bool:
    """Whether a request to this machine's loopback address says so: else a page in a browser here has sent it."""
    ours = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if ours is None or not ip_address(ours[0]).is_loopback:
        return True
    host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
    return host in ("localhost", ours[0], f"[{ours[0]}]")


class OpenTelemetryExporter(Exporter):
    """Instruments of OpenTelemetry's API; a process has them once, since they can't be taken back.

    Until the program sets a meter provider, they do nothing.
    """

    def __init__(self) -> None:
        from opentelemetry.metrics import get_meter

        super().__init__()
        meter = get_meter("streamline")
        create = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for metric in METRICS:
            create[metric.kind](metric.name, [partial(self._observe, metric)], metric.unit, metric.description)

    def close(self) -> bool:
        return False

    def _observe(self, metric: Metric, _: CallbackOptions) -> Iterator[Observation]:
        from opentelemetry.metrics import Observation

        for stream in self.streams:
            for labels, value in metric.read(stream.labels, *stream.read()):
                yield Observation(value, labels)


_exporters: dict[str, Exporter] = {}

_joining = ForkSafeLock()

os.register_at_fork(after_in_child=_exporters.clear)  # those are the parent's


def check_metrics(option: str, to: object) -> None:
    """Refuse what is no place for metrics. Raises `PlanError`."""
    if not isinstance(to, str):
        raise PlanTypeError(
            f'{option} is "HOST:PORT", where Prometheus asks, or "{OPENTELEMETRY}", got {type_and_repr(to)}'
        )
    if to == OPENTELEMETRY:
        check_installed(f'{option[:-1]}"{OPENTELEMETRY}")', "opentelemetry", "opentelemetry-api", "opentelemetry")
    else:
        parse_address(option, to)


def _open(to: str) -> Exporter:
    return OpenTelemetryExporter() if to == OPENTELEMETRY else PrometheusEndpoint(parse_address("metrics=", to))


def keep(to: str, make: Callable[[str], Exporter] = _open) -> Callable[[], None]:
    """Keep a place open, until the function that this returns is called. Raises `HostError`.

    Args:
      to: what the streams that share it call it.
      make: opens it, for the first one of them.
    """
    user = object()
    with _joining:
        exporter = _exporters.get(to)
        if exporter is None or (not exporter.users and exporter.close()):  # Ctrl-C has cut off its close
            exporter = _exporters[to] = make(to)
        exporter.users.add(user)

    def release() -> None:
        with _joining:  # nothing is forgotten before it is done: what Ctrl-C cuts off is done again
            exporter.users.discard(user)
            if not exporter.users and exporter.close() and _exporters.get(to) is exporter:
                del _exporters[to]

    return release


def exporter_at(to: str) -> Exporter | None:
    return _exporters.get(to)


def export(to: str, stream: ExportedStream, make: Callable[[str], Exporter] = _open) -> Callable[[], None]:
    """Export a stream, until the function that this returns is called, once or more; else as `keep`."""
    release = keep(to, make)
    exporter = _exporters[to]
    exporter.add(stream)

    def end() -> None:
        exporter.remove(stream)
        release()

    return end
