"""The demo from beginning to end: train once undisturbed, once with a SIGKILL half-way and a resume, and compare."""

from __future__ import annotations

import math
import platform
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from streamline.demo.children import DemoError, TrainerRun, serving, training
from streamline.demo.corpus import Corpus, write_corpus
from streamline.demo.feed import BATCH_SIZE, RECORD_BYTES
from streamline.demo.report import difference
from streamline.demo.show import Display, corpus_line, table

LATENCY_MS = 20.0  # a request, as from an object store in the same region
INTERRUPTED = 130  # what shells report for Ctrl-C


@dataclass(frozen=True)
class Size:
    """How much to do."""

    max_files: int | None
    shards: int
    window: int
    save_every: int


FULL = Size(max_files=None, shards=16, window=1024, save_every=25)
QUICK = Size(max_files=60, shards=8, window=64, save_every=8)


def run_demo(quick: bool = False, console: Console | None = None) -> int:
    """Run the demo and print what it did and found.

    Args:
      quick: a tenth of the library, in a few seconds.
      console: where to print; None for stdout.

    Returns:
      An exit code: 0 if the resumed run equals the undisturbed one, 1 if not or if a step failed, 130 if interrupted.
    """
    console = Console(highlight=False) if console is None else console
    start = time.monotonic()
    try:
        with signals_as_interrupts(), temporary_folder() as folder:
            runs, problem = train_twice(folder, QUICK if quick else FULL, console)
    except (DemoError, OSError) as error:
        console.print(f"FAILED: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: the server is stopped and the temporary folder removed")
        return INTERRUPTED
    console.print(table(runs))
    seconds = time.monotonic() - start
    if problem is not None:
        console.print(f"FAILED: {problem} ({seconds:.0f} s)", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(
        f"Killed and resumed, the training got the same {len(runs['uninterrupted'].steps)} batches and "
        f"ended with the same model as the uninterrupted one, bit for bit ({seconds:.0f} s).",
        soft_wrap=True,
        style="green",
    )
    return 0


def train_twice(folder: Path, size: Size, console: Console) -> tuple[dict[str, TrainerRun], str | None]:
    """Do the runs; return them by name, and the first difference, if there is one.

    Raises:
      DemoError: a run did not end as it should.
    """
    shards = folder / "shards"
    shards.mkdir()
    corpus = write_corpus(shards, shards=size.shards, chunk_chars=RECORD_BYTES, max_files=size.max_files)
    console.print(corpus_line(corpus, platform.python_version()), soft_wrap=True)
    batches = math.ceil(corpus.records / BATCH_SIZE)
    die_at = kill_step(batches, size.save_every)
    with (
        serving(shards, latency_ms=LATENCY_MS, errors=folder / "server.log") as url,
        Display(console) as display,
    ):
        plan = f"at {url}, {LATENCY_MS:.0f} ms a request; the second run kills itself at batch {die_at} of {batches}"
        console.print(plan, soft_wrap=True)

        def train(name: str, checkpoints: str, total: int, *more: str) -> TrainerRun:
            display.begin(name, total)
            numbers = {"--shards": size.shards, "--window": size.window, "--save-every": size.save_every}
            options = [word for option, number in numbers.items() for word in (option, str(number))]
            arguments = [url, str(folder / checkpoints), *options, *more]
            return training(arguments, errors=folder / "trainer.log", on_step=display.step)

        whole = finished("uninterrupted", train("uninterrupted", "undisturbed", batches), first=1)
        check_all_delivered(whole, corpus)
        killed = train("killed", "disturbed", die_at, "--die-at", str(die_at))
        check_killed(killed, die_at)
        saved = die_at // size.save_every * size.save_every
        resumed = finished("resumed", train("resumed", "disturbed", batches), first=saved + 1)
    runs = {"uninterrupted": whole, "killed": killed, "resumed": resumed}
    return runs, compare(whole, killed, resumed)


def kill_step(batches: int, save_every: int) -> int:
    """Return a batch half-way that is behind a snapshot and before the next: some work is lost, and must be redone."""
    step = batches // 2
    if step <= save_every:
        raise DemoError(
            f"{batches} batches are too few to kill and resume one half-way, with a snapshot every {save_every}"
        )
    return step + 1 if step % save_every == 0 else step


def finished(name: str, run: TrainerRun, first: int) -> TrainerRun:
    """Return a run that began with batch `first` and came to its end; refuse any other."""
    if run.exit_code != 0 or run.end is None:
        raise DemoError(f"the {name} run ended with exit code {run.exit_code}\n{run.errors}")
    if not run.steps or run.steps[0].step != first:
        began = f"with batch {run.steps[0].step}" if run.steps else "with none"
        raise DemoError(f"the {name} run was to begin with batch {first}, and began {began}")
    return run


def check_killed(run: TrainerRun, die_at: int) -> None:
    """Refuse a run that ended other than by SIGKILL at batch `die_at`."""
    last = run.steps[-1].step if run.steps else 0
    if not run.killed or last != die_at:
        raise DemoError(
            f"expected death by SIGKILL at batch {die_at}, got exit code {run.exit_code} at batch {last}\n{run.errors}"
        )


def check_all_delivered(whole: TrainerRun, corpus: Corpus) -> None:
    """Refuse an uninterrupted run that is itself incomplete: two equal halves would prove nothing."""
    if whole.steps[-1].items != corpus.records:
        raise DemoError(f"the uninterrupted run delivered {whole.steps[-1].items} of {corpus.records} records")


def compare(whole: TrainerRun, killed: TrainerRun, resumed: TrainerRun) -> str | None:
    """Return what differs first, and from which batch, or None."""
    problem = difference(whole.steps, killed.steps + resumed.steps)
    if problem is not None:
        return problem
    assert whole.end is not None
    assert resumed.end is not None
    if whole.end.weights != resumed.end.weights:
        return f"the digest of the model differs: {resumed.end.weights} != {whole.end.weights}, with equal batches"
    return None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a folder that is gone afterwards, also under a second Ctrl-C, which `TemporaryDirectory` can't take."""
    folder = Path(tempfile.mkdtemp(prefix="streamline-demo-"))
    try:
        yield folder
    finally:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            shutil.rmtree(folder)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a closed terminal) unwind as Ctrl-C does, so that they leave nothing behind either.

    The first is enough: those behind it are passed over, or they would strike while we clean up. Where one is ignored,
    as SIGHUP is under nohup, it stays so.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # elsewhere Python allows no handlers
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
