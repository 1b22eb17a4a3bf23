"""Metrics: what is exported is what `stats` says, by the parsers and readers of those who take it."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

import streamline as sl
from streamline.core.figures import ChannelStats, Detail, Figures, HostStats, ReadStats, StageStats
from streamline.errors import HostError, PlanError, PlanTypeError
from streamline.observe import exporters, web_server
from streamline.observe.exporters import ExportedStream, exposition
from streamline.observe.metrics import METRICS, Kind, scalars
from streamline.observe.stats import Stats

PARTS = (
    StageStats(
        name='de"co\\de\n', kind="map", workers=2, concurrency=3, items=100, bytes=2_000, busy_s=1.5, wait_input_s=0.25,
        wait_output_s=0.125, errors=4, held_s=1.0, details=(Detail("served", 7.0, "web"),),
    ),
    ChannelStats(name="decode", items=90, depth=5, peak=9, capacity=16, channels=2),
    HostStats(
        number=3, kind="process", pid=1, items=80, bytes=9_000, busy_s=0.75, wait_input_s=0.5, wait_output_s=0.0625,
        restarts=2, resident_bytes=1 << 20,
    ),
    ReadStats("read_jsonl", 10, 1, 5_000, 6, 3, 4_000, 11),
)  # fmt: skip

STATS = Stats(
    elapsed_s=12.0,
    items=64,
    consumer_wait_s=3.0,
    stages=(PARTS[0],),
    channels=(PARTS[1],),
    hosts=(PARTS[2],),
    reads=(PARTS[3],),
)

NOT_EXPORTED = {"tuning",
    "first", "cpus", "stages", "channels", "hosts", "reads", "consumer_held_s", "dropped", "padded",  # of the stream
    "contention",
    "name", "kind", "number", "executor", "ordered", "per_worker", "details", "workers", "concurrency",  # of a stage
    "peak", "capacity", "pid", "node", "shard", "shared", "shards", "copied_bytes", "slabs_made", "slabs_reused",
    "arrival_s", "alive",
}  # fmt: skip
"""Fields that are labels, or parts of other values, or of use to those who measure streamline itself only."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """Return samples as Prometheus's own parser reads them."""
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def exported(stats: Stats = STATS, name: str = "s") -> ExportedStream:
    return ExportedStream(name, 0, lambda: stats)


ADDRESS = "127.0.0.1:0"


def server() -> web_server.WebServer:
    """Return what listens for the streams that are open at `ADDRESS`."""
    endpoint = exporters._exporters[ADDRESS]
    assert isinstance(endpoint, exporters.PrometheusEndpoint)
    return endpoint._server


def scraped(path: str = "/metrics", **options: Any) -> str:
    request = urllib.request.Request(server().url + path, **options)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def pipe(length: int = 60) -> sl.Pipeline[int]:
    return sl.from_items(range(length)).shard(2).map(abs).merge()


# The table ------------------------------------------------------------------------------------------------------------
def test_names_units_and_kinds_are_those_of_opentelemetry_and_prometheus() -> None:
    assert (
        len({metric.name for metric in METRICS}) == len({metric.prometheus_name for metric in METRICS}) == len(METRICS)
    )
    for metric in METRICS:
        assert re.fullmatch(r"streamline(\.[a-z]+)+", metric.name)
        assert metric.kind in get_args(Kind)
        assert metric.unit in {"s", "By", "1"} or re.fullmatch(r"\{[a-z]+\}", metric.unit)
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
        assert metric.description.endswith(".")


def test_every_figure_is_exported_or_named_as_one_that_is_not() -> None:
    values = set(scalars(STATS).values())
    for part in (*PARTS, STATS):
        names = {field.name for field in fields(part)} - NOT_EXPORTED
        missing = {name for name in names if float(getattr(part, name)) not in values}
        assert not missing, f"{type(part).__name__}: {missing}"
    assert {field.name for field in fields(Figures)} <= {field.name for field in fields(Stats)}


def test_the_last_seconds_are_ten_or_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "FRESH_S", 0.0)
    clock = [0.0]
    stream = ExportedStream("s", 0, lambda: Stats(elapsed_s=clock[0], items=0, consumer_wait_s=0.0))

    def window_at(now: float) -> float:
        clock[0] = now
        return stream.read().lately.elapsed_s

    assert [window_at(now) for now in (1.0, 2.0, 9.0)] == [1.0, 2.0, 9.0]
    assert [window_at(now) for now in (11.0, 12.0, 13.0)] == [10.0, 10.0, 11.0]
    assert [window_at(now) for now in (100.0, 101.0, 111.0)] == [87.0, 1.0, 10.0]


def test_scalars_are_a_flat_dict_of_numbers() -> None:
    found = scalars(STATS)
    assert found["streamline.consumer.items"] == 64
    assert found["streamline.consumer.wait.share"] == 0.25
    assert found["streamline.channel.depth/decode"] == 5
    assert found["streamline.channel.capacity/decode"] == 32
    assert found["streamline.host.time/process 3/no_input"] == 0.5
    assert found["streamline.source.cache.hits/read_jsonl"] == 6
    assert all(type(value) is float for value in found.values())


def test_docs_have_the_whole_table() -> None:
    page = Path("docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(streamline\.[a-z.]+)` \| (\w+) \| `([^`]+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert [tuple(row) for row in rows] == [
        (
            metric.name,
            metric.kind,
            metric.unit,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.description.removesuffix("."),
        )
        for metric in METRICS
    ]


# Prometheus -----------------------------------------------------------------------------------------------------------
def test_prometheus_reads_what_the_stats_say() -> None:
    samples = parsed(exposition([(one.labels, one.read()) for one in (exported(), exported(name="t"))]))
    for metric in METRICS:
        for labels, value in metric.points(STATS, STATS):
            own = dict(zip(metric.labels, labels, strict=True))
            for stream in ("s", "t"):
                assert (
                    samples[metric.prometheus_name, frozenset({**own, "stream": stream, "rank": "0"}.items())] == value
                )
    assert len(samples) == 2 * len(scalars(STATS))


def test_a_stream_is_scraped_while_it_runs_and_no_longer() -> None:
    before = threading.active_count()
    with pipe().open(metrics=ADDRESS) as stream:
        items = [next(stream) for _ in range(10)]
        samples = parsed(scraped())
        labels = frozenset({"stream": "items", "rank": "0"}.items())
        assert 10 <= samples["streamline_consumer_items_total", labels] <= 60
        items += list(stream)
    assert items == list(range(60))
    assert threading.active_count() == before
    assert ADDRESS not in exporters._exporters


async def test_an_async_stream_is_scraped_too() -> None:
    async with pipe().open(metrics=ADDRESS) as stream:
        assert await anext(stream) == 0
        assert parsed(await asyncio.to_thread(scraped))
        assert [item async for item in stream] == list(range(1, 60))


def test_streams_share_an_address_and_are_told_apart() -> None:
    with pipe().open(metrics=ADDRESS) as one, pipe().open(metrics=ADDRESS) as two:
        next(one), next(two)
        names = {dict(labels)["stream"] for _, labels in parsed(scraped())}
        assert names == {"items", "items 2"}
        one.close()
        assert {dict(labels)["stream"] for _, labels in parsed(scraped())} == {"items 2"}


def test_a_loader_keeps_its_address_between_epochs() -> None:
    before = threading.active_count()
    loader = pipe().loader(metrics=ADDRESS)
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
        assert parsed(scraped())
        assert list(iterator) == list(range(1, 60))
        assert parsed(scraped()) == {}
    loader.close()
    assert threading.active_count() == before


def test_a_loader_that_is_dropped_frees_its_address() -> None:
    loader = pipe().loader(metrics=ADDRESS)
    assert next(iter(loader)) == 0
    assert scraped()
    del loader
    gc.collect()
    assert ADDRESS not in exporters._exporters


@pytest.mark.parametrize("opened", ["stream", "loader"])
def test_an_address_that_is_taken_is_refused_and_nothing_is_left(opened: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address, before = f"127.0.0.1:{taken.getsockname()[1]}", threading.active_count()
        enter: Callable[[], Any] = {
            "stream": lambda: pipe().open(metrics=address).__enter__(),
            "loader": lambda: next(iter(pipe().loader(metrics=address))),
        }[opened]
        with pytest.raises(HostError, match=rf"can't listen at {re.escape(address)}: Address already in use"):
            enter()
        assert threading.active_count() == before


def test_what_is_no_place_for_metrics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanTypeError, match='"HOST:PORT", where Prometheus asks, or "opentelemetry", got bool True'):
        pipe().open(metrics=True)  # type: ignore[arg-type]
    for wrong in ("9464", "127.0.0.1", "localhost:http", ":9464", "localhost:70000"):
        with pytest.raises(PlanError, match=r'\.open\(metrics=\) is an address such as "0.0.0.0:7077"'):
            pipe().open(metrics=wrong)
    monkeypatch.setattr("streamline.core.options.find_spec", lambda _: None)
    with pytest.raises(PlanError, match=r"pip install 'streamline-data\[opentelemetry\]'"):
        pipe().open(metrics="opentelemetry")


# Who asks what they shouldn't -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/", {}, 404),
        ("/metrics/../../etc/passwd", {}, 404),
        ("/metrics", {"headers": {"Host": "evil.example"}}, 403),
        ("/metrics", {"headers": {"Host": "127.0.0.1.evil.example:80"}}, 403),
        ("/metrics", {"method": "POST", "data": b"x"}, 405),
    ],
)
def test_other_requests_are_refused(path: str, options: dict[str, Any], status: int) -> None:
    with pipe().open(metrics=ADDRESS) as stream:
        next(stream)
        with pytest.raises(urllib.error.HTTPError) as refused:
            scraped(path, **options)
        with closing(refused.value):
            assert refused.value.code == status
        port = server().url.rpartition(":")[2]
        assert scraped(headers={"Host": f"localhost:{port}"})


def test_silent_and_slow_clients_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "MOST_CONNECTIONS", 4)
    clients = []
    with pipe().open(metrics=ADDRESS) as stream:
        next(stream)
        for number in range(40):
            client = socket.create_connection(server()._socket.getsockname(), timeout=60)
            clients.append(client)
            with suppress(ConnectionError):
                client.sendall(
                    [
                        b"",
                        b"GET /metrics HTTP/1.1\r\n",
                        b"\x16\x03garbage\r\n\r\n",
                        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
                    ][number % 4]
                )
        assert parsed(scraped())
        assert list(stream) == list(range(1, 60))
    for client in clients:
        client.close()


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_connects_while_it_is_closed_is_not_left_waiting(turns: int) -> None:
    """It is accepted, or its request has come, so many turns of the loop before the server ends."""
    clients: list[socket.socket] = []

    def connects(left: int) -> None:
        assert at._loop is not None
        assert at._over is not None
        if not clients:
            clients.append(socket.create_connection(at._socket.getsockname(), timeout=60))
            clients[0].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if left:
            at._loop.call_soon(connects, left - 1)
        else:
            at._over.set()

    with pipe().open(metrics=ADDRESS):
        assert scraped()
        at = server()
        assert at._loop is not None
        at._loop.call_soon_threadsafe(connects, turns)
        at._thread.join()
    (client,) = clients
    client.setblocking(False)
    with closing(client), suppress(ConnectionResetError):
        while client.recv(65536):
            continue


def test_a_fork_does_not_hold_the_address() -> None:
    with pipe().open(metrics=ADDRESS) as stream:
        next(stream)
        listening = server()._socket
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later: there are threads
            child = os.fork()
        if not child:
            os._exit(int(listening.fileno() >= 0 or bool(exporters._exporters)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert scraped()


# The last seconds -----------------------------------------------------------------------------------------------------
def test_the_last_seconds_are_those_since_a_reading_ten_seconds_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "FRESH_S", 0.0)
    clock = iter([0.0, 1.0, 4.0, 11.0, 13.0, 14.5, 60.0])
    stream = ExportedStream("s", 0, lambda: Stats(elapsed_s=next(clock), items=0, consumer_wait_s=0.0))
    windows = [stream.read().lately.elapsed_s for _ in range(7)]
    assert windows == [0.0, 1.0, 4.0, 10.0, 12.0, 10.5, 45.5]
    assert len(stream._earlier) <= 4


def test_readings_that_come_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "FRESH_S", 1e9)
    asked = []
    stream = ExportedStream("s", 0, lambda: asked.append(1) or STATS)  # type: ignore[func-returns-value]
    stream._read_at = -2e9
    assert stream.read() is stream.read()
    assert len(asked) == 1


# OpenTelemetry --------------------------------------------------------------------------------------------------------
PROGRAM = """
import warnings
from opentelemetry import metrics
import streamline as sl
from streamline.observe.metrics import METRICS

pipe = sl.from_items(range(60)).shard(2).map(abs).merge()
with pipe.open(metrics="opentelemetry") as stream:
    first = next(stream)  # no SDK yet: nothing is read
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    with pipe.open(metrics="opentelemetry") as other:
        assert [next(other) for _ in range(30)] == list(range(30))
        for resource in reader.get_metrics_data().resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        print(scope.scope.name, metric.name, metric.unit, type(metric.data).__name__, point.value,
                              sorted(point.attributes.items()), sep="|")
    list(stream)
assert reader.get_metrics_data() is None or not any(
    metric.data.data_points
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
)
"""


@pytest.mark.long
def test_opentelemetry_reads_them_once_the_program_has_set_a_provider() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == {"streamline"}
    table = {metric.name: metric for metric in METRICS}
    for _, name, unit, data, _, labels in rows:
        assert table[name].unit == unit
        assert data == {"counter": "Sum", "gauge": "Gauge"}[table[name].kind]
        assert {"stream", "rank", *table[name].labels} == {label for label, _ in eval(labels)}
    items = {row[5]: float(row[4]) for row in rows if row[1] == "streamline.consumer.items"}
    assert items["[('rank', '0'), ('stream', 'items')]"] >= 1
    assert items["[('rank', '0'), ('stream', 'items 2')]"] >= 30
