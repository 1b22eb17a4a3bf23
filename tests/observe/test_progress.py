"""The progress display: on terminals of every kind, in files, and when it can't be had."""

from __future__ import annotations

import gc
import io
import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
from rich.console import Console

import streamline as sl
from streamline.core.figures import ChannelStats, Detail, StageStats
from streamline.errors import PlanTypeError
from streamline.observe import progress
from streamline.observe.progress import Progress, clock, console_of, summary
from streamline.observe.stats import Stats

LONGEST_S = 200.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Judged(Stats):
    """Figures with a verdict."""

    verdict: Any = None


BUSY = Judged(
    elapsed_s=133.0,
    items=12_345_678,
    consumer_wait_s=20.0,
    stages=(StageStats(name="decode", kind="map", errors=3), StageStats(name="batch", kind="batch")),
    channels=(
        ChannelStats(name="read_jsonl", depth=800, capacity=512, channels=2),
        ChannelStats(name="fetch_the_remote_documents", depth=30, capacity=384),
        ChannelStats(name="worker", depth=0, capacity=64),
    ),
    verdict="map(decode) limits: concurrency=8 may give up to 1.9 x as much",
)


class Told:
    """Tells figures, and when it was asked so often."""

    def __init__(self, stats: Stats = BUSY, times: int = 3) -> None:
        self.stats = stats
        self.times = times
        self.asked = 0
        self.enough = threading.Event()

    def __call__(self) -> Stats:
        self.asked += 1
        if self.asked >= self.times:
            self.enough.set()
        return self.stats


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw often, as a terminal that exists would be drawn on, whatever the tests run under."""
    monkeypatch.setattr(progress, "REFRESH_S", 0.005)
    monkeypatch.setattr(progress, "EXIT_S", LONGEST_S)  # however busy the machine is
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Make stderr a terminal, and give what reads all that was written to it, once it is closed."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:
                return
            if not data:
                return
            written.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    file = os.fdopen(theirs, "w")

    def close() -> str:
        if not file.closed:
            file.close()
            reader.join(LONGEST_S)
        return b"".join(written).decode()

    monkeypatch.setattr(sys, "stderr", file)
    try:
        yield close
    finally:
        close()
        os.close(ours)


def test_a_terminal_shows_it_live_and_keeps_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told()
    with terminal(monkeypatch) as close:
        shown = Progress(told)
        shown.start()
        assert told.enough.wait(LONGEST_S)
        shown.stop()
        shown.stop()
        text = close()
    plain = ESCAPES.sub("", text)
    assert "12,345,678 items" in plain
    assert "map(decode) limits" in plain
    last = plain.replace("\r", "").rstrip("\n").split("\n")[-1]
    assert "streamline, epoch 0: 12,345,678 items in 0:02:13, 92,825/s, 3 skipped; the consumer waited 15%" in last
    assert text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h"), "the cursor stays hidden"
    assert capsys.readouterr().out == ""


def test_the_cursor_is_never_left_hidden_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is killed can't show it again."""
    told = Told(times=5)
    with terminal(monkeypatch) as close:
        shown = Progress(told)
        shown.start()
        assert told.enough.wait(LONGEST_S)
        sys.stderr.write("<mark>")
        shown.stop()
        text = close().split("<mark>")[0]
    assert text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h")


def test_prints_and_logs_stand_above_it_and_stdout_stays_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told()
    with terminal(monkeypatch) as close:
        before = sys.stderr
        handler = logging.StreamHandler()
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        shown = Progress(told)
        shown.start()
        assert told.enough.wait(LONGEST_S)
        assert handler.stream is sys.stderr is not before
        logging.getLogger("user").warning("a log line")
        print("on stderr", file=sys.stderr)
        print("on stdout")
        shown.stop()
        assert handler.stream is sys.stderr is before
        lines = [line.strip() for line in ESCAPES.sub("", close()).replace("\r", "\n").split("\n")]
    assert "a log line" in lines
    assert "on stderr" in lines
    assert capsys.readouterr().out == "on stdout\n"


def test_of_two_streams_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Told(), Told()
    with terminal(monkeypatch) as close:
        shown, other = Progress(first), Progress(second)
        shown.start()
        other.start()
        assert first.enough.wait(LONGEST_S)
        other.stop()
        shown.stop()
        assert second.asked == 0
        third = Progress(second)
        third.start()
        assert second.enough.wait(LONGEST_S)
        third.stop()
        close()


def test_what_fails_in_it_ends_it_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def fails() -> Stats:
        failed.set()
        raise ValueError("no figures")

    with terminal(monkeypatch) as close:
        shown = Progress(fails)
        shown.start()
        assert failed.wait(LONGEST_S)
        shown.stop()
        close()
    [record] = caplog.records
    assert record.getMessage() == "the progress display ended: ValueError: no figures"


def test_a_stderr_that_is_closed_meanwhile_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    with terminal(monkeypatch) as close, sl.from_items(range(1000)).open() as stream:
        shown = Progress(told)
        shown.start()
        assert told.enough.wait(LONGEST_S)
        close()
        assert list(stream) == list(range(1000))
        shown.stop()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_no_live_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    with terminal(monkeypatch) as close:
        assert console_of(sys.stderr) is None
        close()


def test_an_unknown_kind_of_terminal_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "no-such-terminal")
    told = Told()
    with terminal(monkeypatch) as close:
        shown = Progress(told)
        shown.start()
        assert told.enough.wait(LONGEST_S)
        shown.stop()
        assert "12,345,678 items" in ESCAPES.sub("", close())


class Closed(io.StringIO):
    def isatty(self) -> bool:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, io.StringIO(), Closed()])
def test_where_there_is_no_terminal_nothing_is_drawn(stream: TextIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a CI's: colours, if you must, but no terminal
    assert console_of(stream) is None


def test_a_log_line_now_and_then_instead(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "perf_counter", lambda: now)
    told = Told()
    with caplog.at_level(logging.INFO, "streamline.progress"):
        shown = Progress(told)
        shown.start()
        for now in (101.0, 129.0, 130.0, 131.0, 159.0, 160.5):  # noqa: B007 - the clock reads it
            shown.at_chunk_boundary()
        shown.stop()
    assert [record.getMessage() for record in caplog.records] == [f"{summary(BUSY, 0)}; {BUSY.verdict}"] * 2
    assert told.asked == 2


# What is drawn ------------------------------------------------------------------------------------------------------


def drawn(stats: Stats, width: int) -> list[str]:
    return progress.lines(stats, None, 2, width - 1).plain.splitlines()


def test_figures_channels_and_the_verdict_have_a_line_each() -> None:
    assert drawn(BUSY, 160) == [
        "12,345,678 items  92,825/s avg  waits 15%  3 skipped  0:02:13  epoch 2",
        "read_jsonl ━━━━─ 78%  fetch_the_r… ─────  8%  worker ─────  0%",
        "map(decode) limits: concurrency=8 may give up to 1.9 x as much",
    ]


def test_in_80_columns_all_channels_are_there_and_a_long_verdict_has_two_lines() -> None:
    more = (*BUSY.channels, ChannelStats(name="last", depth=3, capacity=16))
    lines = drawn(Judged(**{**vars(BUSY), "channels": more, "verdict": "word " * 60}), 80)
    assert lines[1] == "read_jsonl ━━━━─ 78%  fetch_the_r… ─────  8%  worker ─────  0%  last ━──── 19%"
    assert len(lines) == 4
    assert all(len(line) < 80 for line in lines)


@pytest.mark.parametrize("width", [10, 20, 33, 40, 60])
def test_a_narrow_terminal_gets_what_fits(width: int) -> None:
    lines = drawn(BUSY, width)
    assert all(len(line) < width for line in lines)
    assert lines[0].startswith("12,345,6")


def test_what_isnt_there_has_no_line() -> None:
    assert drawn(Stats(elapsed_s=0.0, items=0, consumer_wait_s=0.0), 80) == ["0 items  waits 0%  0:00:00  epoch 2"]
    assert "skipped" not in drawn(Stats(elapsed_s=1, items=1, consumer_wait_s=0), 80)[0]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    counts = [(0.0, 0), (1.0, 100), *((float(second), 100 + (second - 1) * 10) for second in range(2, 10))]
    stats = iter([Stats(elapsed_s=at, items=items, consumer_wait_s=0.0) for at, items in counts])
    shown, console = Progress(lambda: next(stats)), Console(width=80)
    first, second, *_, last = [shown._lines(console).plain.splitlines()[0] for _ in counts]
    assert "now" not in first
    assert "  100/s now  " in second
    assert "  10/s now  " in last


def test_durations_are_read_as_clocks_show_them() -> None:
    assert [clock(seconds) for seconds in (0, 59.9, 133, 90_061)] == ["0:00:00", "0:00:59", "0:02:13", "25:01:01"]


# With streams -------------------------------------------------------------------------------------------------------


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def leave(how: str, pipe: sl.Pipeline[Any]) -> None:
    """Leave a plain loop."""
    if how == "end":
        with pipe.open(progress=True) as stream:
            assert len(list(stream)) == 100
    elif how == "break":
        with pipe.open(progress=True) as stream:
            next(stream)
            assert "streamline progress" in threads()
    elif how == "exception":
        with pytest.raises(KeyboardInterrupt), pipe.open(progress=True) as stream:
            interrupt(next(stream))
    else:
        dropped = pipe.open(progress=True).sync_stream()
        next(dropped)
        del dropped
        gc.collect()


@pytest.mark.parametrize("how", ["end", "break", "exception", "dropped"])
def test_however_a_loop_is_left_nothing_stays(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout
    with terminal(monkeypatch) as close:
        leave(how, sl.from_items(range(100)))
        assert "streamline progress" not in threads()
        text = close()
    assert "streamline, epoch 0: " in ESCAPES.sub("", text)
    assert text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h")
    assert sys.stdout is before


async def test_an_async_loop_shows_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as close:
        async with sl.from_items(range(100)).open(progress=True) as stream:
            await anext(stream)
            assert "streamline progress" in threads()
        assert "streamline progress" not in threads()
        assert "streamline, epoch 0: " in ESCAPES.sub("", close())


def test_without_a_terminal_a_stream_starts_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with sl.from_items(range(100)).open(progress=True) as stream:
        next(stream)
        assert "streamline progress" not in threads()
    assert capsys.readouterr() == ("", "")


def test_it_is_a_switch() -> None:
    with pytest.raises(PlanTypeError, match=r"\.open\(progress=\) is True or False, got str 'yes'"):
        sl.from_items(range(3)).open(progress="yes")  # type: ignore[arg-type]


def test_what_only_some_stages_count_has_a_line_for_each_of_the_first() -> None:
    cycles = StageStats(name="regenerate", kind="regenerate", details=(Detail("cycle", 3), Detail("waited_s", 0.5)))
    busy = replace(BUSY, stages=(*BUSY.stages, cycles, replace(cycles, name="again"), replace(cycles, name="third")))
    lines = drawn(busy, 70)
    assert [line.rstrip() for line in lines if "cycle" in line] == [
        "regenerate  cycle 3  waited 0.50 s",
        "regenerate(again)  cycle 3  waited 0.50 s",
    ]


def test_a_notebook_draws_anew_in_place_with_ipython_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich's own display wants ipywidgets there, and warns at every refresh without."""
    shown: list[str] = []
    cell: ContextVar[int] = ContextVar("cell")  # a kernel keeps there which cell is running
    cell.set(7)

    class Handle:
        def update(self, html: str) -> None:
            assert cell.get() == 7
            shown.append(html)

    def display(html: str, display_id: bool) -> Handle:
        assert display_id
        shown.append(html)
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with sl.from_items(range(6)).map(lambda item: item, name="a<b").open(progress=True) as stream:
        assert list(stream) == list(range(6))
    assert shown[0] == ""
    assert re.fullmatch(r"<pre>streamline, epoch 0: 6 items in .*; the consumer waited \d+%</pre>", shown[-1])
    assert all(html.startswith("<pre>") and html.count("<") == 2 for html in shown[1:])
    assert len(shown) >= 3


def test_a_notebook_without_ipython_does_without_a_display(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with sl.from_items(range(6)).open(progress=True) as stream:
        assert list(stream) == list(range(6))
    assert "no progress display: ModuleNotFoundError" in caplog.text
    shown = Progress._on_screen
    assert shown is None or not shown.is_alive(), "the next stream can't be shown"
