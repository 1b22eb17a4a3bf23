"""What is installed under which name, and that every hint says so: on the index, streamline is another project."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamline.errors import DISTRIBUTION, install

ROOT = Path(__file__).parent.parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

EXTRAS = set(PROJECT["project"]["optional-dependencies"])

NAME = re.compile(r"\bstreamline(-[a-z]+)?\\?\[([\w,{}-]+)\\?\]")
"""A distribution with extras, also in a regular expression, as tests have it."""

INSTALLED = re.compile(r"pip install [^\n`]*?['\" ](streamline[\w-]*)")


def texts() -> Iterator[tuple[str, str]]:
    """Yield the files in which somebody may look for what to install, by name."""
    folders = [
        path
        for name in ("streamline", "docs", "examples", "bench", "tests", ".ci")
        for path in (ROOT / name).rglob("*")
    ]
    for path in [*folders, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        if path.suffix in ("", ".md", ".py", ".sh", ".toml", ".yaml", ".yml") and path.is_file():
            yield str(path.relative_to(ROOT)), path.read_text()


def test_the_distribution_is_called_what_the_hints_say_and_the_script_is_not() -> None:
    assert PROJECT["project"]["name"] == DISTRIBUTION == "streamline-data"
    assert PROJECT["project"]["scripts"] == {"streamline": "streamline.cli:main"}
    assert install("zstd") == "pip install 'streamline-data[zstd]'"


def test_no_hint_names_another_project_or_an_extra_that_is_none() -> None:
    found = [(file, *named) for file, text in texts() for named in NAME.findall(text)]
    assert len(found) > 30, "it looks where the hints are"
    assert [one for one in found if one[1] != "-data"] == []
    assert [one for one in found if "{" not in one[2] and not set(one[2].split(",")) <= EXTRAS] == []
    names = [(file, name) for file, text in texts() for name in INSTALLED.findall(text)]
    assert [one for one in names if one[1] != DISTRIBUTION] == []


@pytest.mark.long
def test_messages_take_the_name_from_one_constant() -> None:
    found = []
    for path in sorted((ROOT / "streamline").rglob("*.py")):
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            path.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and id(node) not in prose and DISTRIBUTION in str(node.value)
        ]
    assert found == ["errors.py"]


def test_what_developers_install_is_no_part_of_the_package() -> None:
    groups = PROJECT["dependency-groups"]
    assert set(groups) == {"bench", "dev", "ray-tests", "trainers"}
    assert EXTRAS.isdisjoint(groups)
    assert [one for group in groups.values() for one in group if str(one).startswith("streamline")] == []
    extras = re.findall(r"--editable '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert len(extras) == 1
    assert set(extras[0].split(",")) <= EXTRAS
