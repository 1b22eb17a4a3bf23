"""docs/seeds.md names code and tests that are there, every test of a seed, and every criterion of seed 001."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import streamline

TESTS = Path(__file__).parent
PACKAGE = Path(streamline.__file__).parent
PAGE = (TESTS.parent / "docs" / "seeds.md").read_text(encoding="utf-8")

NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "::" in line
]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the test functions of a file; none if it isn't there."""
    if not path.is_file():
        return frozenset()
    found = ast.parse(path.read_text(encoding="utf-8")).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in found if isinstance(node, kinds) and node.name.startswith("test"))


def test_every_row_has_a_promise_code_and_a_test() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        promise, code, tests = row
        assert promise
        assert re.fullmatch(r"`[\w/]+\.py`(, `[\w/]+\.py`)*", code), row
        assert re.fullmatch(r"`[\w/]+\.py::\w+`(, `[\w/]+\.py::\w+`)*", tests), row


def test_every_test_that_is_named_exists() -> None:
    assert [f"{file}::{name}" for file, name in NAMED if name not in names_in(TESTS / file)] == []


def test_every_module_that_is_named_exists() -> None:
    named = {name for row in ROWS for name in re.findall(r"`([\w/]+\.py)`", row[1])}
    assert [name for name in sorted(named) if not (PACKAGE / name).is_file()] == []


@pytest.mark.parametrize("file", ["test_seeds.py", "trainers/test_seed_002_duplicates.py"])
def test_every_test_of_a_seed_is_on_the_page(file: str) -> None:
    assert names_in(TESTS / file) <= {name for of, name in NAMED if of == file}


def test_every_criterion_of_seed_001_has_its_row() -> None:
    assert {promise.split(":")[0] for promise, _, _ in ROWS} >= set("12345678")
