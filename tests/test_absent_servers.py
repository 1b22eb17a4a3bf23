"""Where neither root nor a package manager is there: tests that need a server are named as not run; in CI they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest
from tests.conftest import pytest_terminal_summary
from tests.servers.absent import absent

@pytest.mark.parametrize("number", [1, 2])
def test_of_nginx(number):
    absent("nginx isn't here: install it")

def test_of_azurite():
    absent("Azurite isn't here: install it, too")

def test_of_neither():
    pass

def test_of_another_platform():
    pytest.skip("only elsewhere")
"""


def run(tmp_path: Path, ci: str) -> tuple[int, str]:
    """Return the exit code of pytest over those tests, and what it says after its dots."""
    (tmp_path / "conftest.py").write_text(TESTS)
    (tmp_path / "test_it.py").write_text("from conftest import *\n")
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_it.py"]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout


@pytest.mark.long
def test_tests_without_their_server_are_counted_and_named_at_the_end(tmp_path: Path) -> None:
    code, said = run(tmp_path, "")
    assert code == 0
    told = said.partition("not run =")[2].splitlines()[1:5]
    assert told == [
        "2 tests were not run: nginx isn't here: install it",
        "  test_it.py::test_of_nginx (2)",
        "1 test was not run: Azurite isn't here: install it, too",
        "  test_it.py::test_of_azurite",
    ]
    assert "1 passed, 4 skipped" in said


@pytest.mark.long
def test_in_ci_they_fail(tmp_path: Path) -> None:
    code, said = run(tmp_path, "true")
    assert code == 1
    assert "Azurite isn't here: install it, too; with CI=true all tests must run" in said
    assert "3 failed, 1 passed, 1 skipped" in said
