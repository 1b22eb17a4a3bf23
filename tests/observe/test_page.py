"""The live page: what it shows is what stats say; who may not see it doesn't; nothing on it holds up a stream."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

import streamline as sl
from streamline.cli import main
from streamline.core.cpus import cpu_s
from streamline.core.figures import ChannelStats, Detail, HostStats, ReadStats, StageStats
from streamline.errors import HostError, PlanError, PlanTypeError
from streamline.observe import exporters, page
from streamline.observe.page import EventLog, LivePage, StreamFacts, page_place, stream_text, stream_update
from streamline.observe.stats import Stats
from streamline.observe.verdict import Verdict
from tests.page_kit import asked, update, updates

PLACE = "page 127.0.0.1:0"


def pipe(length: int = 60) -> sl.Pipeline[int]:
    return sl.from_items(range(length)).shard(2).map(abs).merge()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "EVERY_S", 0.01)
    monkeypatch.setattr(page, "MOST_TIME_SHARE", math.inf)


# What it shows --------------------------------------------------------------------------------------------------------
def test_a_stream_is_shown_while_it_runs_and_no_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with pipe().open(page=True) as stream:
        assert stream.page is not None
        assert f"page at {stream.page}\n" in capsys.readouterr().err
        items = [next(stream) for _ in range(10)]
        saved = stream.snapshot().save(tmp_path / "run.json")
        (shown,) = update(stream.page)["streams"]
        assert 10 <= shown["items"] <= 60 == shown["length"]
        assert [stage["label"] for stage in shown["stages"]] == [str(stage) for stage in stream.stats().stages]
        assert [stage["in_workers"] for stage in shown["stages"]] == [True, True, False]
        assert (shown["snapshot"]["where"], shown["snapshot"]["bytes"]) == (str(saved), saved.stat().st_size)
        items += list(stream)
    assert items == list(range(60))
    ended: Any = stream
    assert ended.page is None
    assert threading.active_count() == before
    assert PLACE not in exporters._exporters


async def test_an_async_stream_and_one_that_has_no_page() -> None:
    async with pipe().open(page=True) as stream, pipe().open() as other:
        assert stream.page is not None
        assert other.page is None


def test_what_is_left_of_a_resumed_stream_is_known() -> None:
    with pipe().open() as stream:
        for _ in range(25):
            next(stream)
        snapshot = stream.snapshot()
    with pipe().open(resume=snapshot, page=True) as stream:
        next(stream)
        assert update(str(stream.page))["streams"][0]["length"] == 35


def test_streams_share_a_page_and_a_loader_keeps_it_between_epochs() -> None:
    before = threading.active_count()
    loader = pipe().loader(page=True)
    url = loader.page
    assert url is not None
    assert update(url)["streams"] == []
    for epoch in range(2):
        iterator = iter(loader)
        next(iterator)
        with pipe().open(page=True) as stream:
            assert stream.page == url == loader.page
            streams = update(url)["streams"]
            assert [(one["name"], one["epoch"]) for one in streams] == [("items", epoch), ("items 2", 0)]
        assert list(iterator) == list(range(1, 60))
    assert update(url)["streams"] == []
    loader.close()
    assert loader.page is None
    assert threading.active_count() == before


def test_a_loader_that_is_dropped_closes_its_page() -> None:
    loader = pipe().loader(page=True)
    assert loader.page
    del loader
    gc.collect()
    assert PLACE not in exporters._exporters


def test_metrics_are_served_behind_the_same_token() -> None:
    with pipe().open(page=True) as stream:
        next(stream)
        assert 'streamline_consumer_items_total{stream="items"' in asked(str(stream.page), "metrics")[0]


BUSY = Stats(
    elapsed_s=100.0,
    items=50,
    consumer_wait_s=90.0,
    stages=(
        StageStats(
            name="a\x1b[2J", kind="map", workers=2, concurrency=3, items=60, busy_s=540.0, wait_input_s=30.0,
            wait_output_s=12.0, errors=4, executor="task",
            details=(
                Detail("weight", 3.0, "web", "now"), Detail("weight", 1.0, "code", "now"),
                Detail("served", 45.0, "web"), Detail("served", 15.0, "code"),
            ),
        ),
    ),
    channels=(ChannelStats(name="a\x1b[2J", items=50, depth=8, capacity=10, channels=2),),
    hosts=(HostStats(number=3, kind="process", pid=1, restarts=2, resident_bytes=1 << 20, items=7, shards=(0, 1)),),
    reads=(ReadStats("read_jsonl", 200, 1, 5_000, 6, 3, 4_000, 11),),
)  # fmt: skip


def test_an_update_says_what_the_stats_say() -> None:
    about = StreamFacts(
        epoch=3, length=150, working={3: "map(a) of shard 1 for 2 s"}, workers=frozenset({BUSY.stages[0].name})
    )
    found = stream_update(BUSY, BUSY.since(Stats(elapsed_s=0, items=0, consumer_wait_s=0)), about, {3: 0.5})
    assert (found["waits"], found["rate"], found["length"], found["eta_s"]) == (0.9, 0.5, 150, 200.0)
    (stage,) = found["stages"]
    shares = stage["busy"], stage["no_input"], stage["no_room"]
    assert shares == pytest.approx((0.9, 0.05, 0.02))
    assert (stage["slots"], stage["rate"], stage["errors"]) == (6, 0.6, 4)
    assert [(one["depth"], one["capacity"], one["fill"]) for one in found["channels"]] == [(8, 20, 0.4)]
    (host,) = found["hosts"]
    assert (host["cpu"], host["memory"], host["restarts"], host["at"]) == (0.5, 1 << 20, 2, "map(a) of shard 1 for 2 s")
    (read,) = found["reads"]
    assert (read["in_flight"], read["requests_s"], read["bytes_s"]) == (11, 2.0, 50.0)
    assert (read["retries"], read["hits"], read["misses"]) == (1, 6, 3)
    parts = [(part["name"], part["wanted"], part["served"]) for part in found["mixtures"][0]["parts"]]
    assert parts == [("web", 0.75, 0.75), ("code", 0.25, 0.25)]


@pytest.mark.parametrize(
    ("about", "rule", "how", "words", "advice"),
    [
        (StreamFacts(), "calls", "slow", "map(d) limits", "try more: about 2.0 x"),
        (StreamFacts(), "consumer", "good", "The pipeline keeps up", ""),
        (StreamFacts(stalled="for 40 s: shard 3"), "calls", "stalled", "Nothing comes", ""),
        (StreamFacts(ended=True, stalled="x"), "calls", "ended", "The stream has ended", ""),
        (StreamFacts(), "", "slow", "The consumer waits 90 % of its time", ""),
    ],
)
def test_the_headline_is_the_verdict(
    about: StreamFacts, rule: str, how: str, words: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: Any = {"what": "map(d) limits", "why": "busy 90 %", "advice": "try more: about 2.0 x"}
    verdict = Verdict(rule=rule, stage="map(d)", **parts) if rule else None
    monkeypatch.setattr(Stats, "verdict", verdict)
    found = page.headline(BUSY, BUSY, about)
    assert (found["how"], found["words"], found["advice"]) == (how, words, advice)


def test_a_stream_that_gives_nothing_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.runtime.run.STALLED_S", 0.0)
    go_on, stuck = threading.Event(), threading.Event()

    def held(item: int) -> int:
        stuck.set()
        go_on.wait()
        return item

    stalled = sl.from_items(range(2)).map(held, executor="thread", concurrency=1)
    with stalled.open(page=True) as stream:
        consumer = threading.Thread(target=next, args=(stream,))
        consumer.start()
        stuck.wait()
        with closing(updates(str(stream.page))) as found:  # type: ignore[type-var]
            verdicts = (json.loads(one)["streams"][0]["verdict"] for one in found)
            verdict = next(one for one in verdicts if one["how"] != "starting")  # the consumer asks at some time
        go_on.set()
        consumer.join()
    assert verdict["how"] == "stalled"
    assert "map(held) has been in one call" in verdict["rest"]


def test_cpu_time_is_read_of_processes_that_are_there() -> None:
    own = cpu_s(os.getpid())
    assert own is not None
    assert own > 0
    assert cpu_s(2**22 + 1) is None


# The log --------------------------------------------------------------------------------------------------------------
def test_warnings_are_events_and_only_while_there_is_a_page() -> None:
    logger = logging.getLogger("streamline.watchdog")
    logger.warning("before")
    with pipe().open(page=True) as stream:
        logger.warning("waited %s", "<b>40 s</b>")
        logger.info("nothing")
        found = update(str(stream.page))["events"]
        assert [(one["level"], one["text"]) for one in found] == [("warning", "waited <b>40 s</b>")]
    assert not any(isinstance(one, EventLog) for one in logging.getLogger("streamline").handlers)


@pytest.mark.long
def test_a_program_without_logging_still_sees_warnings_on_stderr() -> None:
    program = (
        "import logging, streamline as sl\n"
        "log = logging.getLogger('streamline.watchdog')\n"
        "with sl.from_items(range(3)).open(page=True), sl.from_items(range(3)).open(page='127.0.0.1:0'):\n"
        "    log.warning('seen once')\n"
        "    logging.basicConfig(format='configured %(message)s')\n"
        "    log.warning('so too')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert done.stderr.splitlines()[1:] == ["seen once", "configured so too"]


# Who asks what they shouldn't -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/", {}, 403),
        ("/events", {}, 403),
        ("/metrics", {}, 403),
        ("/TOKEN", {}, 403),
        ("/wrong/", {}, 403),
        ("/%ff%00/", {}, 403),
        ("/TOKENx/", {}, 403),
        ("/TOKEN/../page.py", {}, 404),
        ("/TOKEN/..%2fpage.py", {}, 404),
        ("/TOKEN//etc/passwd", {}, 404),
        ("/TOKEN/page_files/page.js", {}, 404),
        ("/TOKEN/", {"headers": {"Host": "evil.example"}}, 403),
        ("/TOKEN/events", {"headers": {"Origin": "http://evil.example"}}, 403),
        ("/TOKEN/events", {"headers": {"Origin": "null"}}, 403),
        ("/TOKEN/", {"method": "POST", "data": b"x"}, 405),
    ],
)
def test_other_requests_are_refused(path: str, options: dict[str, Any], status: int) -> None:
    with pipe().open(page=True) as stream:
        base, token = str(stream.page).rstrip("/").rsplit("/", 1)
        request = urllib.request.Request(base + path.replace("TOKEN", token), **options)
        with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(request, timeout=60):
            pytest.fail("it is let in")  # unread: updates have no end
        with closing(refused.value):
            assert refused.value.code == status
            assert token not in refused.value.read().decode()
        assert list(stream) == list(range(60))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost x\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"400"),
        (bytes(99), b"400"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
            b"403",
        ),
    ],
)
@pytest.mark.parametrize("option", ["page", "metrics"])
def test_what_is_no_request_is_answered_and_nothing_is_printed(
    option: str, request_: bytes, status: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    places: dict[str, dict[str, Any]] = {"page": {"page": True}, "metrics": {"metrics": f"127.0.0.1:{free_port()}"}}
    with pipe().open(**places[option]) as stream:
        address = urlsplit(stream.page or f"http://{places[option]['metrics']}")
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(request_)
            assert b"".join(iter(lambda: client.recv(1 << 16), b"")).split()[1] == status
    assert [line for line in capfd.readouterr().err.splitlines() if "page at" not in line] == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_fault_of_the_page_itself_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamline.observe.page.asked_by_address", lambda request: 1 // 0)
    with pipe().open(page=True) as stream, pytest.raises(urllib.error.HTTPError, match="500") as failed:
        urllib.request.urlopen(str(stream.page), timeout=60)
    failed.value.close()
    assert "ZeroDivisionError" in caplog.text


def test_tokens_are_compared_in_constant_time_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("streamline.observe.page.hmac.compare_digest", compare)
    with pipe().open(page=True) as one, pipe().open(page="localhost:0") as two:
        tokens = {str(stream.page).split("/")[3] for stream in (one, two)}
        assert len(tokens) == 2
        assert min(map(len, tokens)) >= 20
        asked(str(one.page))
    assert len(compared) == 1


def test_files_come_with_a_policy_and_without_the_stream_s_names() -> None:
    for name in page.FILES:
        with sl.from_items(range(3), name="secret").open(page=True) as stream:
            text, headers = asked(str(stream.page), name)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
        assert "secret" not in text
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http:", "https:"):
            assert way not in text
        assert "<style" not in text
        assert "<script>" not in text


def test_slow_clients_hold_up_neither_the_stream_nor_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SLOW_S", 0.05)
    monkeypatch.setattr(page, "MOST_TIME_SHARE", 0.01)  # as it is
    clients = []
    with pipe(5_000).open(page=True) as stream:
        next(stream)
        host, path = str(stream.page).removeprefix("http://").split("/", 1)
        name, port = host.split(":")
        for number in range(200):
            client = socket.create_connection((name, int(port)), timeout=60)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line = f"GET /{path}events HTTP/1.1\r\nHost: {host}\r\n" + "\r\n" * (number % 2)
            clients.append(client)
            try:
                client.sendall(line.encode())
            except ConnectionError:
                continue  # a further one has taken its place
        assert [next(stream) for _ in range(4_000)] == list(range(1, 4_001))
        with closing(updates(str(stream.page))) as found:  # type: ignore[type-var]
            assert any(json.loads(text)["streams"][0]["items"] >= 4_001 for text in found)
        assert list(stream) == list(range(4_001, 5_000))
    for client in clients:
        client.close()


def test_huge_stats_make_a_bounded_update(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "n" * 5_000
    many = 10_000
    huge = Stats(
        elapsed_s=10.0, items=5, consumer_wait_s=1.0,
        stages=tuple(StageStats(name=f"{name}{at}", kind="map") for at in range(many)),
        channels=tuple(ChannelStats(name=f"{name}{at}", capacity=1) for at in range(many)),
        hosts=tuple(HostStats(number=at, kind="process", restarts=at % 7) for at in range(many)),
        reads=tuple(ReadStats(f"{name}{at}", 1) for at in range(many)),
    )  # fmt: skip
    monkeypatch.setattr(Stats, "verdict", None)
    found = stream_update(huge, huge, StreamFacts(), {})
    text = json.dumps(found)
    assert len(text) < 2_000_000
    assert found["more_stages"] == many - page.MOST_STAGES
    assert found["more_hosts"] == many - page.MOST_HOSTS
    assert {host["restarts"] for host in found["hosts"]} == {6}  # those that were replaced most
    assert len(stream_text({"stream": "s", "rank": "0"}, huge, huge, StreamFacts()).split("\n")) < 1000


def test_reading_takes_a_hundredth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_TIME_SHARE", 0.01)
    clock = [100.0]
    monkeypatch.setattr(page, "perf_counter", lambda: clock[0])
    with pipe().open(page=True):
        server = exporters._exporters[PLACE]
        assert isinstance(server, LivePage)
        read = []

        def slowly() -> list[Any]:
            read.append(clock[0])
            clock[0] += 2.0  # seconds that it takes
            return []

        monkeypatch.setattr(server, "_read", slowly)
        for _ in range(500):
            server._update("events")
            clock[0] += 1.0
        assert read == [100.0, 300.0, 500.0]


def test_nobody_looks_and_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(LivePage, "_read", lambda self: read.append(self))
    with pipe().open(page=True) as stream:
        asked(str(stream.page))
        assert list(stream) == list(range(60))
    assert read == []


# Options --------------------------------------------------------------------------------------------------------------
def test_what_is_no_place_for_a_page_is_refused() -> None:
    assert page_place(False) is None
    for wrong in (None, 8600, b"x"):
        with pytest.raises(PlanTypeError, match=r'\.open\(page=\) is True, False or "HOST:PORT"'):
            pipe().open(page=wrong)  # type: ignore[arg-type]
    for place in ("8600", "127.0.0.1", ":1", "localhost:70000"):
        with pytest.raises(PlanError, match=r"\.open\(page=\) is an address"):
            pipe().open(page=place)


@pytest.mark.parametrize("opened", ["stream", "loader"])
def test_an_address_that_is_taken_is_refused_and_nothing_is_left(opened: str) -> None:
    handlers = list(logging.getLogger("streamline").handlers)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address, before = f"127.0.0.1:{taken.getsockname()[1]}", threading.active_count()
        with pytest.raises(HostError, match="can't listen at"):
            pipe().open(page=address).__enter__() if opened == "stream" else next(iter(pipe().loader(page=address)))
        assert threading.active_count() == before
    assert logging.getLogger("streamline").handlers == handlers


# The terminal ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page close with its third update."""
    made, left = LivePage._update, [3]

    def last(self: LivePage, kind: str) -> bytes:
        left[0] -= 1
        if not left[0]:
            self._server.close()
        return made(self, kind)

    monkeypatch.setattr(LivePage, "_update", last)


@pytest.mark.usefixtures("brief")
def test_top_prints_updates_until_the_page_closes() -> None:
    with pipe().open(page=True) as stream:
        next(stream)
        result = CliRunner().invoke(main, ["top", str(stream.page)])
    assert result.exit_code == 0
    assert result.output.count("items, epoch 0: ") >= 2
    assert "map(abs)" in result.output
    assert result.output.endswith("The page has closed.\n")


def test_top_says_that_there_is_no_page() -> None:
    with pipe().open(page=True) as stream:
        url = str(stream.page)
        for wrong in (url.replace(url.split("/")[3], "wrong"), "nonsense", "http://127.0.0.1:1/x/"):
            result = CliRunner().invoke(main, ["top", wrong])
            assert result.exit_code == 1
            assert f"there is no page at {wrong}" in result.output


@pytest.mark.usefixtures("brief")
def test_what_names_would_do_to_a_terminal_is_escaped() -> None:
    with sl.from_items(range(3), name="a\x1b[2J").open(page=True) as stream:
        next(stream)
        result = CliRunner().invoke(main, ["top", str(stream.page)])
    assert "\x1b" not in result.output
    assert "a\\x1b[2J" in result.output
