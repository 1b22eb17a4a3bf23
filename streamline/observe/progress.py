"""The progress of a stream: a few live lines on a terminal or in a notebook, else a log line now and then.

The display draws in a thread of its own, so that a terminal that is stuck stops nothing else. It holds a function that
returns the figures, not the stream, which can therefore be dropped. A failure of the display ends the display alone.

Everything goes to stderr. What the program prints meanwhile, or logs there, stands above the lines.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from html import escape
from importlib import import_module
from textwrap import wrap
from threading import Event, Thread, current_thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, TypeAlias

from streamline.core.figures import ChannelStats, per_s
from streamline.core.forks import ForkSafeLock
from streamline.core.text import shorten
from streamline.core.threads import start_thread
from streamline.errors import printable
from streamline.observe.stats import Stats
from streamline.observe.tables import brief

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

logger = logging.getLogger("streamline.progress")  # as the docs call it

REFRESH_S = 0.25

LOG_EVERY_S = 30.0

NOW_S = 3.0
"""What "now" means, of a rate."""

EXIT_S = 1.0
"""How long a close waits for a terminal that doesn't take what is written to it."""

NAME_CHARS, BAR_CHARS = 12, 5
"""Of a channel: four of them fit into 80 columns."""

MOST_DETAILS = 2
"""Stages of which is drawn what only they count."""

Show: TypeAlias = "Callable[[Text], object]"
"""Draws a text in place of the one before it."""

_beginning = ForkSafeLock()


class Progress:
    """The progress of one stream.

    Args:
      stats: returns the figures; called from another thread, some times a second.
    """

    _on_screen: ClassVar[Thread | None] = None
    """What was shown last; on screen as long as the thread lives."""

    def __init__(self, stats: Callable[[], Stats], epoch: int = 0) -> None:
        self._stats = stats
        self._epoch = epoch
        self._seen: deque[tuple[float, int]] = deque()
        self._ended = Event()
        self._thread: Thread | None = None
        self._logged_at = perf_counter()

    def start(self) -> None:
        """Begin to show it: on the terminal, if stderr is one and no other stream is shown there."""
        if (console := console_of(sys.stderr)) is None:
            return
        with _beginning:
            if Progress._on_screen is not None and Progress._on_screen.is_alive():
                return
            try:
                display = _in_notebook() if console.is_jupyter else _on_terminal(console)
                in_context = copy_context().run  # a notebook's kernel keeps there which cell is running
                work = self._main, console, display
                thread = Thread(target=in_context, args=work, name="streamline progress", daemon=True)
                Progress._on_screen = self._thread = thread  # before it runs: Ctrl-C may come in the middle of this
                start_thread(thread)
            except Exception as error:  # no more threads, an interpreter that exits, a notebook without a front end
                self._thread = None
                logger.warning("no progress display: %s: %s", type(error).__name__, error)

    def stop(self) -> None:
        """End it: the live lines are taken away, one that sums up stays. From any thread; idempotent."""
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not current_thread() and thread.is_alive():
            thread.join(EXIT_S)

    def at_chunk_boundary(self, _: object = None) -> None:
        """Log a line, if nothing is shown and the last one is a while ago. In the consumer's thread, once a list."""
        now = perf_counter()
        if self._thread is None and now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            stats = self._stats()
            logger.info("%s", "; ".join(str(part) for part in (summary(stats, self._epoch), stats.verdict) if part))

    def _main(self, console: Console, display: AbstractContextManager[Show]) -> None:
        from rich.text import Text

        try:
            with display as show:
                show(self._lines(console))
                while not self._ended.wait(REFRESH_S):
                    show(self._lines(console))
            last = summary(self._stats(), self._epoch)
            if console.is_jupyter:
                show(Text(last))
            else:
                console.print(last, highlight=False, markup=False, soft_wrap=True)
        except Exception as error:  # a closed stderr, an unknown TERM: no reason to stop training
            logger.warning("the progress display ended: %s: %s", type(error).__name__, error)

    def _lines(self, console: Console) -> Text:
        stats, seen = self._stats(), self._seen
        seen.append((stats.elapsed_s, stats.items))
        while len(seen) > 2 and seen[1][0] <= stats.elapsed_s - NOW_S:
            seen.popleft()
        took, items = stats.elapsed_s - seen[0][0], stats.items - seen[0][1]
        return lines(stats, items / took if took > 0 else None, self._epoch, console.width - 1)


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


@contextmanager
def _on_terminal(console: Console) -> Iterator[Show]:
    """Draw in place; what else is written to the terminal stands above."""
    from rich.live import Live

    # What goes to a file or a pipe stays what it is; on the same terminal it would tear the lines.
    redirect = sys.stdout is not None and sys.stdout.isatty()
    outputs = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    drawing = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=redirect, redirect_stderr=True)
    with drawing as live:
        console.show_cursor(True)  # a program that is killed leaves the terminal as it is
        for handler in logging.getLogger().handlers:  # they hold the stderr that was there when they were made
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in outputs:
                moved.append((handler, handler.stream))
                handler.setStream(getattr(sys, outputs[id(handler.stream)]))
        try:
            yield lambda text: live.update(text, refresh=True)
        finally:
            for handler, stream in moved:
                handler.setStream(stream)


def _in_notebook() -> AbstractContextManager[Show]:
    """Draw under a notebook's cell, by IPython alone: rich's own display would need ipywidgets."""
    display = import_module("IPython.display")
    handle = display.display(display.HTML(""), display_id=True)
    return nullcontext(lambda text: handle.update(display.HTML(f"<pre>{escape(text.plain)}</pre>")))


def lines(stats: Stats, now: float | None, epoch: int, width: int) -> Text:
    """Return what is drawn: figures, channels, what only some stages count, the verdict.

    Args:
      now: items per second at the moment; None: not known yet.
      width: columns; a line that is longer ends with "…".
    """
    from rich.text import Text

    waits, skipped = stats.waits, _skipped(stats)
    figures = [
        Text(f"{stats.items:,} items", "bold cyan"),
        Text("" if now is None else f"{per_s(now)}/s now"),
        Text(f"{per_s(stats.rate)}/s avg" if stats.elapsed_s > 0 else ""),
        Text(f"waits {waits:.0%}", "yellow" if waits > 0.1 else "green"),
        Text(f"{skipped:,} skipped" if skipped else "", "bold red"),
        Text(clock(stats.elapsed_s)),
        Text(f"epoch {epoch}", "dim"),
    ]
    drawn = [Text("  ").join(filter(None, figures))]
    if channels := [_bar(channel) for channel in stats.channels if channel.capacity]:
        drawn.append(Text("  ").join(channels))
    drawn += [Text(printable(brief(stage)), "dim") for stage in stats.stages if stage.details][:MOST_DETAILS]
    if stats.verdict is not None:
        verdict = wrap(str(stats.verdict), max(width, 2), max_lines=2, placeholder="…")
        drawn += [Text(line, "bold") for line in verdict]
    for line in drawn:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(drawn)


def _bar(channel: ChannelStats) -> Text:
    """Return how full a kind of channel is: "fetch ━━─── 49%"."""
    from rich.text import Text

    share = min(1.0, channel.depth / max(1, channel.capacity * channel.channels))
    full = round(share * BAR_CHARS)
    name = shorten(printable(channel.name), NAME_CHARS)
    bar = (("━" * full, "cyan"), ("─" * (BAR_CHARS - full), "dim"))
    return Text.assemble((f"{name} ", "dim"), *bar, f" {share:>3.0%}")


def summary(stats: Stats, epoch: int) -> str:
    """Return one line that says how far a stream is, and how fast."""
    rate = f", {per_s(stats.rate)}/s" if stats.elapsed_s > 0 else ""
    skipped = f", {_skipped(stats):,} skipped" if _skipped(stats) else ""
    waited = f"; the consumer waited {stats.waits:.0%}"
    return f"streamline, epoch {epoch}: {stats.items:,} items in {clock(stats.elapsed_s)}{rate}{skipped}{waited}"


def clock(seconds: float) -> str:
    """Return a duration as "0:02:13"."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _skipped(stats: Stats) -> int:
    return sum(stage.errors for stage in stats.stages)
