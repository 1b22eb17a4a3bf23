"""What a script holds runs in processes as it runs inline; one start of a process for all of it."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.shared import for_session

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


REFUSED = {
    "cache_that_says_it_is_another": r"function cache_that_says_it_is_another .* a cache that functools.wraps has made",
    "context_variable": r"the global variable VARIABLE: a _contextvars.ContextVar",
    "frompyfunc": r"the global variable plus: a numpy.ufunc",
    "json_decoder": r"the global variable decode: json.decoder.JSONDecoder, .*\.scan_once",
    "msgspec_decoder": r"the global variable DECODER: a msgspec.json.Decoder",
    "singledispatch": r"function encode .* a singledispatch function is found by its name alone, in a module",
    "singledispatchmethod": r"the global variable visitor: .*\.visit: .* a singledispatch function",
    "weak_references": r"the global variable weak: a weakref.ReferenceType",
}
"""Shapes that stay in the script's process, and what is said of them; docs/workers.md lists them."""


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return what the script printed, which one test process has run for all."""
    path = for_session(tmp_path_factory, "shapes.json")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(printed())
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


def printed() -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    strict = ["-W", "error", "-W", "ignore::ResourceWarning"]  # of the database that is not closed
    done = subprocess.run([sys.executable, *strict, str(SCRIPT)], capture_output=True, text=True, env=env, timeout=200)
    assert done.stderr == ""
    json.loads(done.stdout)
    return done.stdout


@pytest.mark.parametrize("shape", sorted(SHAPES - REFUSED.keys()))
def test_a_shape_of_a_script_runs_in_a_process_as_inline(shape: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[shape]["process"] == outcomes[shape]["inline"]
    assert "Error" not in outcomes[shape]["inline"]


@pytest.mark.parametrize("shape", sorted(REFUSED))
def test_a_shape_that_can_not_be_sent_is_refused_with_the_way_out(
    shape: str, outcomes: dict[str, dict[str, str]]
) -> None:
    said = outcomes[shape]["process"]
    assert said.startswith("PlanError: this plan can't be sent to another process: stage")
    assert re.search(REFUSED[shape], said)
    assert "or in a module, which processes import" in said
    assert "Error" not in outcomes[shape]["inline"]


def test_all_shapes_were_looked_at(outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes.keys() == SHAPES
