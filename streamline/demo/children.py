"""The demo's two child processes. None outlives its `with` block or call, nor, at the latest, the parent itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from streamline.demo.report import RunEnd, TrainStep, parse

# Several times what the slowest machine we know takes: only a trainer that hangs meets it.
TRAINER_LIMIT_S = 120.0


SERVER_EXIT_S = 5.0


class DemoError(Exception):
    """A step of the demo failed; unlike a difference between two runs, which is the demo's result."""


@dataclass(frozen=True)
class TrainerRun:
    """What one trainer process did."""

    steps: tuple[TrainStep, ...]
    end: RunEnd | None  # None: it did not come to its end
    exit_code: int  # negative: the signal that killed it
    errors: str  # what it wrote to stderr

    @property
    def killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL


def start(module: str, arguments: list[str], *, errors: IO[bytes], stdin: int) -> subprocess.Popen[str]:
    """Start `python -m module`: a new interpreter, never a fork of this one."""
    environment = dict(os.environ)
    # The child must find the same package, wherever this one was imported from.
    package_parent = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH")]))
    # One thread for the matrix products: the other core belongs to the data, and a sum split in two rounds otherwise.
    for library in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM"):
        environment[f"{library}_NUM_THREADS"] = "1"
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=errors,
        encoding="utf-8",
        env=environment,
        process_group=0,  # Ctrl-C goes to the parent alone, which ends its children in order
    )


@contextmanager
def serving(directory: Path, *, latency_ms: float, errors: Path) -> Iterator[str]:
    """Serve the files of `directory` over HTTP and give the base URL."""
    arguments = [str(directory), "--latency-ms", str(latency_ms)]
    with (
        errors.open("wb") as log,
        start("streamline.demo.server", arguments, errors=log, stdin=subprocess.PIPE) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            if not port.isdigit():
                raise DemoError(f"expected the server to print its port, got {port!r}\n{errors.read_text()}")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stdin.close()
            try:
                server.wait(SERVER_EXIT_S)
            except BaseException:  # it doesn't end, or a second Ctrl-C came while waiting
                server.kill()
                raise


def training(arguments: list[str], *, errors: Path, on_step: Callable[[TrainStep], None]) -> TrainerRun:
    """Run a trainer process to its end, however that comes, and return what it reported.

    Raises:
      DemoError: it printed something that is no report, or did not end in time.
    """
    steps: list[TrainStep] = []
    end: RunEnd | None = None
    with (
        errors.open("wb") as log,
        start("streamline.demo.train", arguments, errors=log, stdin=subprocess.DEVNULL) as trainer,
        killing_after(trainer, TRAINER_LIMIT_S) as late,
    ):
        assert trainer.stdout is not None
        for line in trainer.stdout:
            try:
                report = parse(line)
            except ValueError as error:
                raise DemoError(str(error)) from error
            if isinstance(report, RunEnd):
                end = report
            else:
                steps.append(report)
                on_step(report)
        exit_code = trainer.wait()
    if late.is_set():
        raise DemoError(f"the trainer did not end within {TRAINER_LIMIT_S:.0f} s\n{errors.read_text()}")
    return TrainerRun(tuple(steps), end, exit_code, errors.read_text())


@contextmanager
def killing_after(process: subprocess.Popen[str], limit_s: float) -> Iterator[threading.Event]:
    """Kill `process` when the body takes longer than `limit_s` (which sets the event), or raises."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit_s, kill)
    timer.daemon = True  # an interrupt may come before it can be cancelled
    try:
        timer.start()
        yield late
    except BaseException:
        process.kill()
        raise
    finally:
        timer.cancel()
