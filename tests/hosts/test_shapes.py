"""What a script holds runs in processes as it runs inline; one start of a process for all of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("shapes_run.py")

SHAPES = {
    decorated.name
    for decorated in ast.parse(SCRIPT.read_text()).body
    if isinstance(decorated, ast.FunctionDef | ast.AsyncFunctionDef)
    and any(isinstance(by, ast.Name) and by.id == "shape" for by in decorated.decorator_list)
} | {
    "cache_in_a_partial",
    "cached_method",
    "closure",
    "itemgetter",
    "lambda",
    "object_with_locks",
    "one_object_by_two_ways",
    "wraps",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    strict = ["-W", "error", "-W", "ignore::ResourceWarning"]  # of the database that nobody closes
    done = subprocess.run([sys.executable, *strict, str(SCRIPT)], capture_output=True, text=True, env=env, timeout=55)
    assert done.stderr == ""
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_shape_of_a_script_runs_in_a_process_as_inline(shape: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[shape]["process"] == outcomes[shape]["inline"]
    assert "Error" not in outcomes[shape]["inline"]


def test_all_shapes_were_looked_at(outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes.keys() == SHAPES
