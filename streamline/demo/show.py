"""What the demo shows: a live line while it runs, a table at the end."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from streamline.demo.children import TrainerRun
from streamline.demo.corpus import Corpus
from streamline.demo.report import TrainStep

PLAIN_LINE_EVERY_S = 2.0
DIGEST_CHARS = 12
LAST_LOSSES = 20


def status(step: TrainStep) -> str:
    """Return the part of the live line that changes."""
    return f"{step.items_per_s:,.0f} items/s  loss {step.loss:.2f}  limit: {step.limit} ({step.waiting:.0%} waiting)"


class Display:
    """One line for the run in progress: drawn anew on a terminal, printed now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._name, self._total = "", 0
        self._printed_at = 0.0

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, name: str, total: int) -> None:
        """Start the line of the next run, which is to come to batch `total`."""
        self._name, self._total = name, total
        self._task = self._live.add_task(f"{name:<13}", total=total, status="starting")
        self._printed_at = time.monotonic()

    def step(self, step: TrainStep) -> None:
        """Show the step that was just reported."""
        self._live.update(self._task, completed=step.step, status=status(step))
        now = time.monotonic()
        if not self.console.is_terminal and (step.step == self._total or now - self._printed_at >= PLAIN_LINE_EVERY_S):
            self._printed_at = now
            self.console.print(f"{self._name:<13} {step.step:>4}/{self._total}  {status(step)}", soft_wrap=True)


def corpus_line(corpus: Corpus, version: str) -> str:
    """Return one line on what is streamed."""
    return (
        f"Python {version}'s standard library: {corpus.files} files, {corpus.text_bytes / 1e6:.1f} MB of text, "
        f"{corpus.records:,} records in {len(corpus.shards)} shards ({corpus.stored_bytes / 1e6:.1f} MB gzipped)"
    )


def table(runs: dict[str, TrainerRun]) -> Table:
    """Return the runs side by side; a run without steps shows dashes."""
    view = Table(title="one training, without and with a kill")
    view.add_column("")
    for name in runs:
        view.add_column(name)
    columns = [column(run) for run in runs.values()]
    for row in columns[0]:
        view.add_row(row, *(cells[row] for cells in columns))
    return view


def column(run: TrainerRun) -> dict[str, str]:
    """Return the table's cells about one run."""
    last = run.steps[-1] if run.steps else None
    end = run.end
    about = end or last
    losses = [step.loss for step in run.steps]
    first_loss, last_losses = losses[:1], losses[-LAST_LOSSES:]
    return {
        "ended": "by SIGKILL" if run.killed else f"exit code {run.exit_code}",
        "batches": f"{run.steps[0].step} to {last.step}" if last else "-",
        "items/s": f"{about.items_per_s:,.0f}" if about else "-",
        "loss": f"{first_loss[0]:.2f} → {sum(last_losses) / len(last_losses):.2f}" if losses else "-",
        "limited by": about.limit if about else "-",
        "waiting for data": f"{about.waiting:.0%}" if about else "-",
        "snapshot": f"{end.snapshot_bytes:,} bytes" if end else "-",
        "batches SHA-256": last.chain[:DIGEST_CHARS] if last else "-",
        "model SHA-256": end.weights[:DIGEST_CHARS] if end else "-",
    }
