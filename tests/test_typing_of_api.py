"""What users write is understood by a type checker: T flows from the source to the loop."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import streamline

ROOT = Path(__file__).parent.parent
USES = Path(__file__).with_name("typing_of_api.py")


def test_mypy_agrees_with_every_use() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", str(USES)]  # strict, by pyproject.toml
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_is_used_there() -> None:
    tree = ast.parse(USES.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(streamline.__all__) - used <= {"__version__", "errors"}


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(streamline.__file__).parent / "py.typed").is_file()
