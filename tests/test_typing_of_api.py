"""What users write is understood by a type checker: mypy checks `typing_of_api.py`, with all files (`make check`)."""

from __future__ import annotations

import ast
from pathlib import Path

import streamline

ROOT = Path(__file__).parent.parent
USES = Path(__file__).with_name("typing_of_api.py")


def test_every_public_name_is_used_there() -> None:
    tree = ast.parse(USES.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(streamline.__all__) - used <= {"__version__", "errors"}


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(streamline.__file__).parent / "py.typed").is_file()
