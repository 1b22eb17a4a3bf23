"""Running pipelines in tests: on every loop, as async and as plain iterators, and in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no package

from tests.runtime.kit import LOOPS, AsyncTest, run_on

SLOW = re.compile(r"Executing <.*> took \d+\.\d+ seconds")
"""What asyncio's debug mode says where a step took more than 0.1 s: on a busy machine any may. What these tests guard
is everything else that it says: coroutines never awaited, resources never closed."""


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[AsyncTest], None]:
    """Run a coroutine function to its end on each event loop; one that hangs, or leaves a task, fails."""
    return lambda test: run_on(request.param, test)


@pytest.fixture
def start_python(tmp_path: Path) -> Callable[..., AbstractContextManager[subprocess.Popen[str]]]:
    """Start a script in a Python of its own, its output in pipes; one that hangs is killed."""

    @contextmanager
    def start(script: str, *options: str, stdin: int | None = None) -> Iterator[subprocess.Popen[str]]:
        path = tmp_path / "script.py"
        path.write_text(script)
        environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(
            [sys.executable, *options, str(path)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    return start


@pytest.fixture
def python(start_python: Callable[..., AbstractContextManager[subprocess.Popen[str]]]) -> Callable[..., str]:
    """Run a script in a Python of its own, and return what it printed; anything on its stderr fails."""

    def run(script: str, *options: str, code: int = 0, limit_s: float = 200) -> str:
        with start_python(script, *options) as process:
            output, errors = process.communicate(timeout=limit_s)
        told = [line for line in errors.splitlines() if not SLOW.fullmatch(line)]
        assert told == []
        assert process.returncode == code
        return output

    return run
