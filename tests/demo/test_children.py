import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamline.demo import children
from streamline.demo.children import DemoError, training
from streamline.demo.report import TrainStep

STEP = '{"step": {"step": 1, "items": 32, "loss": 1.5, "chain": "a", "items_per_s": 1, "limit": "model", "waiting": 0}}'
END = '{"end": {"items_per_s": 1, "limit": "model", "waiting": 0, "weights": "b", "snapshot_bytes": 9}}'


@pytest.fixture
def trainer_does(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[subprocess.Popen[str]]]:
    """Put a few lines of Python in the trainer's place; the list is of the processes started."""

    def replace(code: str) -> list[subprocess.Popen[str]]:
        started: list[subprocess.Popen[str]] = []

        def start(module: str, arguments: list[str], *, errors: Any, stdin: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", "import os, sys, time, signal\n" + code]
            process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", process_group=0
            )
            started.append(process)
            return process

        monkeypatch.setattr(children, "start", start)
        return started

    return replace


Replace = Callable[[str], list[subprocess.Popen[str]]]


def test_steps_are_passed_on_as_they_come_and_kept(trainer_does: Replace, tmp_path: Path) -> None:
    trainer_does(f"print('{STEP}'); print('{END}'); sys.stderr.write('a warning')")
    seen: list[TrainStep] = []
    run = training([], errors=tmp_path / "log", on_step=seen.append)
    assert [step.loss for step in seen] == [1.5]
    assert run.steps == tuple(seen)
    assert run.end is not None
    assert (run.exit_code, run.killed, run.errors, run.end.weights) == (0, False, "a warning", "b")


def test_a_trainer_that_kills_itself_has_no_end(trainer_does: Replace, tmp_path: Path) -> None:
    trainer_does(f"print('{STEP}', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    run = training([], errors=tmp_path / "log", on_step=lambda step: None)
    assert (run.killed, run.end, len(run.steps)) == (True, None, 1)


def test_a_trainer_that_hangs_is_killed_and_named(
    trainer_does: Replace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "TRAINER_LIMIT_S", 0.3)
    [*_] = started = trainer_does("sys.stderr.write('stuck here'); sys.stderr.flush(); time.sleep(60)")
    with pytest.raises(DemoError, match=r"did not end within 0 s\n"):
        training([], errors=tmp_path / "log", on_step=lambda step: None)
    assert started[0].returncode is not None


@pytest.mark.parametrize(
    "code", ["print('hello', flush=True); time.sleep(60)", f"print('{STEP}', flush=True); time.sleep(60)"]
)
def test_a_trainer_is_killed_when_its_reader_fails(trainer_does: Replace, tmp_path: Path, code: str) -> None:
    started = trainer_does(code)

    def interrupt(step: TrainStep) -> None:
        raise KeyboardInterrupt

    with pytest.raises((DemoError, KeyboardInterrupt)):
        training([], errors=tmp_path / "log", on_step=interrupt)
    assert started[0].returncode is not None
