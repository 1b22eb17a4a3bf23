"""How a stream gets on, while it runs: a few live lines on a terminal or in a notebook, else a log line now and then.

The display has a thread of its own, which does all that is drawn, so that a terminal that is stuck stops nothing else.
It knows what tells it the figures, not the stream: a stream that is dropped ends it. What fails in it, ends it alone.

Everything goes to stderr. What the program prints meanwhile, or logs there, stands above the lines.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from html import escape
from importlib import import_module
from io import StringIO
from threading import Event, Lock, Thread, current_thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

from streamline.observe.figures import ChannelStats
from streamline.observe.stats import Stats
from streamline.observe.tables import brief

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

__all__ = ["Progress", "summary"]


logger = logging.getLogger("streamline.progress")  # as the docs call it


REFRESH_S = 0.25


LOG_EVERY_S = 30.0


NOW_S = 3.0
"""What "now" means, of a rate."""


EXIT_S = 1.0
"""How long a close waits for a terminal that doesn't take what is written to it."""


BARS = ((20, 8), (12, 5), (8, 3))
"""How long the name and the bar of a channel are, at most: the first that lets all of them stand in one line."""


MOST_DETAILS = 2
"""Stages of which is drawn what only they count."""


NOTEBOOK_CHARS = 110
"""Columns of a line in a notebook, which doesn't say how wide it is."""


_on_screen = Lock()


class Progress:
    """The progress of one stream.

    Args:
      stats: tells the figures; called from another thread, some times a second.
      epoch: as the stream was opened at.
    """

    def __init__(self, stats: Callable[[], Stats], epoch: int = 0) -> None:
        self._stats = stats
        self._epoch = epoch
        self._rate = Rate()
        self._ended = Event()
        self._thread: Thread | None = None
        self._logged_at = perf_counter()

    def start(self) -> None:
        """Begin to show it: on the terminal, if stderr is one and no other stream is shown there."""
        console = console_of(sys.stderr)
        if console is None or not _on_screen.acquire(blocking=False):
            return
        try:
            lines = _Lines(self._stats, self._rate, self._epoch)
            live = _Notebook(lines) if console.is_jupyter else _LiveLines(console, lines)
            in_context = copy_context().run  # a notebook's kernel keeps there which cell is running
            thread = Thread(target=in_context, args=(self._main, live), name="streamline progress", daemon=True)
            thread.start()
        except Exception as error:  # no more threads, an interpreter that exits, a notebook without a front end
            _on_screen.release()
            logger.warning("no progress display: %s: %s", type(error).__name__, error)
            return
        self._thread = thread

    def stop(self) -> None:
        """End it: the live lines are taken away, one that sums up stays. From any thread; idempotent."""
        self._ended.set()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(EXIT_S)

    def at_chunk_boundary(self, _: object = None) -> None:
        """Log a line, if nothing is shown and the last one is a while ago. In the consumer's thread, once a list."""
        now = perf_counter()
        if self._thread is None and now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            stats = self._stats()
            self._rate.add(stats.elapsed_s, stats.items)
            logger.info("%s", "; ".join(part for part in (summary(stats, self._epoch), _verdict(stats)) if part))

    def _main(self, live: _LiveLines | _Notebook) -> None:
        try:
            with live:
                while not self._ended.wait(REFRESH_S):
                    live.refresh()
            live.leave(summary(self._stats(), self._epoch))
        except Exception as error:  # a closed stderr, an unknown TERM: no reason to stop training
            logger.warning("the progress display ended: %s: %s", type(error).__name__, error)
        finally:
            _on_screen.release()


def console_of(stream: TextIO | None) -> Console | None:
    """Return a console on which lines can be drawn again and again; None: this is a file, a pipe, a dumb terminal."""
    from rich.console import Console

    try:
        console = Console(file=stream, stderr=True)
        if console.is_jupyter:
            return console
        # rich takes FORCE_COLOR for a terminal, also of a file.
        return console if stream is not None and stream.isatty() and not console.is_dumb_terminal else None
    except ValueError:  # it is closed
        return None


class _LiveLines:
    """Lines that are drawn anew in place, and what else is written to the terminal, above them."""

    def __init__(self, console: Console, lines: Any) -> None:
        from rich.live import Live

        self._console = console
        # What goes to a file or a pipe stays what it is; on the same terminal it would tear the lines.
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._live = Live(
            lines,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=on_terminal,
            redirect_stderr=True,
        )
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def refresh(self) -> None:
        self._live.refresh()

    def leave(self, text: str) -> None:
        """Write the line that stays, once the live ones are gone."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> _LiveLines:
        outputs = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        self._live.start(refresh=True)
        self._console.show_cursor(True)  # a program that is killed leaves the terminal as it is
        for handler in logging.getLogger().handlers:  # they hold the stderr that was there when they were made
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in outputs:
                now = getattr(sys, outputs[id(handler.stream)])
                if now is not handler.stream:
                    self._handlers.append((handler, handler.stream))
                    handler.setStream(now)
        return self

    def __exit__(self, *_: object) -> None:
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._live.stop()


class _Notebook:
    """Lines under a notebook's cell, drawn anew in place. By IPython alone: rich's own would need ipywidgets."""

    def __init__(self, lines: Any) -> None:
        display = import_module("IPython.display")
        self._html = display.HTML
        self._lines = lines
        self._handle = display.display(self._html(""), display_id=True)

    def refresh(self) -> None:
        from rich.console import Console

        console = Console(file=StringIO(), width=NOTEBOOK_CHARS, force_terminal=False, force_jupyter=False)
        with console.capture() as drawn:
            console.print(self._lines)
        self.leave(drawn.get().rstrip())

    def leave(self, text: str) -> None:
        """Show this instead of what is there."""
        self._handle.update(self._html(f"<pre>{escape(text)}</pre>"))

    def __enter__(self) -> _Notebook:
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        """What is there stays until something else is shown."""


class Rate:
    """Items per second over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, at: float, items: int) -> float | None:
        """Take note of a count, and return the rate; None as long as there is nothing to compare with."""
        seen = self._seen
        seen.append((at, items))
        while len(seen) > 2 and seen[1][0] <= at - NOW_S:
            seen.popleft()
        took = at - seen[0][0]
        return (items - seen[0][1]) / took if took > 0 else None


class _Lines:
    """What is drawn: figures, channels, what only some stages count, the verdict; each in a line that fits."""

    def __init__(self, stats: Callable[[], Stats], rate: Rate, epoch: int) -> None:
        self._stats = stats
        self._rate = rate
        self._epoch = epoch

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        stats, width = self._stats(), options.max_width - 1  # a full line makes some terminals scroll
        parts = list(figures(stats, self._rate.add(stats.elapsed_s, stats.items), self._epoch))
        while len(parts) > 1 and _wide(parts) > width:
            parts.pop()
        lines = [Text("  ").join(parts)]
        if tubes := [channel for channel in stats.channels if channel.capacity]:
            lines.append(Text("  ").join(bars(tubes, width)))
        lines += [Text(brief(stage), style="dim") for stage in stats.stages if stage.details][:MOST_DETAILS]
        if verdict := _verdict(stats):
            lines += Text(verdict, style="bold").wrap(console, width)[:2]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
            yield line


def figures(stats: Stats, now: float | None, epoch: int) -> Iterator[Text]:
    """Yield the figures, the most important one first."""
    from rich.text import Text

    yield Text(f"{stats.items:,} items", style="bold cyan")
    if now is not None:
        yield Text(f"{_per_s(now)} now")
    if stats.elapsed_s > 0:
        yield Text(f"{_per_s(stats.items / stats.elapsed_s)} avg")
    yield Text(f"waits {_waits(stats):.0%}", style="yellow" if _waits(stats) > 0.1 else "green")
    if skipped := _skipped(stats):
        yield Text(f"{skipped:,} skipped", style="bold red")
    yield Text(clock(stats.elapsed_s))
    yield Text(f"epoch {epoch}", style="dim")


def bars(channels: Sequence[ChannelStats], width: int) -> list[Text]:
    """Return how full each kind of channel is, and "+3" for those that don't fit into a line."""
    from rich.text import Text

    for name_chars, bar_chars in BARS:
        parts = [bar(channel, name_chars, bar_chars) for channel in channels]
        if _wide(parts) <= width:
            return parts
    count = len(parts)
    while len(parts) > 1 and _wide(parts) > width - 5:
        parts.pop()
    return [*parts, Text(f"+{count - len(parts)}", style="dim")]


def bar(channel: ChannelStats, name_chars: int, bar_chars: int) -> Text:
    """Return how full a kind of channel is: "fetch ━━━━──── 49%"."""
    from rich.text import Text

    share = min(1.0, channel.depth / max(1, channel.capacity * channel.channels))
    full = round(share * bar_chars)
    name = channel.name if len(channel.name) <= name_chars else f"{channel.name[: name_chars - 1]}…"
    return Text.assemble(
        (f"{name} ", "dim"), ("━" * full, "cyan"), ("─" * (bar_chars - full), "dim"), f" {share:>3.0%}"
    )


def _wide(parts: Sequence[Text]) -> int:
    """Return how many columns parts take, two blanks apart."""
    return sum(part.cell_len + 2 for part in parts) - 2


def summary(stats: Stats, epoch: int) -> str:
    """Return one line that says how far a stream is, and how fast."""
    rate = f", {_per_s(stats.items / stats.elapsed_s)}" if stats.elapsed_s > 0 else ""
    skipped = f", {_skipped(stats):,} skipped" if _skipped(stats) else ""
    waited = f"; the consumer waited {_waits(stats):.0%}"
    return f"streamline, epoch {epoch}: {stats.items:,} items in {clock(stats.elapsed_s)}{rate}{skipped}{waited}"


def clock(seconds: float) -> str:
    """Return a duration as "0:02:13"."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _verdict(stats: Stats) -> str:
    return "" if stats.verdict is None else str(stats.verdict)


def _waits(stats: Stats) -> float:
    return min(1.0, stats.consumer_wait_s / stats.elapsed_s) if stats.elapsed_s > 0 else 0.0


def _skipped(stats: Stats) -> int:
    return sum(stage.errors for stage in stats.stages)


def _per_s(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
