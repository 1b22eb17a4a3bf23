"""`streamline check FILE.py:pipe`: what is named, and what is said if it isn't there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from streamline.cli import main, named
from streamline.errors import PlanError
from streamline.pipeline import Pipeline

SCRIPT = """
import sys
from dataclasses import dataclass
import streamline as sl
import neighbour

@dataclass
class Options:
    size: int = 2

def double(n):
    return n * neighbour.FACTOR

pipe = sl.from_items([1, 2, 3]).shard(2).map(double)
empty = sl.from_items([])
number = 5
arguments = list(sys.argv)

def made():
    return pipe

def needs(path):
    return pipe

async def slow():
    return pipe

def broken():
    raise KeyError("nothing here")

class Group:
    inner = pipe

if __name__ == "__main__":
    raise SystemExit("it trains")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("FACTOR = 2\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in {"neighbour", "train", "streamline_check_train"} - before:
        sys.modules.pop(name, None)


def check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


@pytest.mark.parametrize("name", ["pipe", "made", "Group.inner"])
def test_a_sound_pipeline_exits_with_0(script: Path, name: str) -> None:
    result = check(f"{script}:{name}")
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("from_items", "3 items", "2 (interleaved)", "no problems found"):
        assert part in result.output


def test_problems_exit_with_1(script: Path) -> None:
    result = check(f"{script}:empty")
    assert result.exit_code == 1
    assert "PROBLEM   reading: there are no records" in result.output
    result = check(f"{script}:pipe", "--world-size", 4)
    assert result.exit_code == 1
    assert "2 shards for 4 ranks" in result.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "say which pipeline of"),
        (":missing", "has no 'missing'; pipelines there: empty, pipe"),
        (":number", "is no pipeline, but of type int; pipelines there: empty, pipe"),
        (":needs", "can't be called without arguments: missing a required argument: 'path'"),
        (":slow", "slow in"),
        (":broken", "raised KeyError: 'nothing here'"),
        (":Options", "is no pipeline, but of type Options"),
    ],
)
def test_what_is_no_pipeline_is_said(script: Path, name: str, said: str) -> None:
    result = check(f"{script}{name}")
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_missing_file_or_module(tmp_path: Path) -> None:
    assert "no such file: nowhere.py (seen from" in check("nowhere.py:pipe").output
    assert "there is no module nowhere.at.all" in check("nowhere.at.all:pipe").output
    assert "there is no module nowhere: give FILE.py:name" in check("nowhere:pipe").output
    assert "expected FILE.py:name" in check(":pipe").output
    (tmp_path / "notes.txt").write_text("")
    assert "is no Python file" in check(f"{tmp_path / 'notes.txt'}:pipe").output


def test_a_file_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def (")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    assert "raised SyntaxError" in check(f"{tmp_path}/wrong.py:pipe").output
    result = check(f"{tmp_path}/ends.py:pipe")
    assert result.exit_code == 1
    assert 'ended the program (exit code 3): put what runs it under if __name__ == "__main__"' in result.output


def test_a_module_that_can_be_imported(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    assert isinstance(named("train:pipe", Pipeline), Pipeline)
    assert isinstance(named("train.py:pipe", Pipeline), Pipeline)


def test_it_leaves_the_search_path_and_the_arguments_as_they_were(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["streamline", "check", "x"])
    before = list(sys.path)
    named(f"{script}:pipe", Pipeline)
    assert (sys.path, sys.argv) == (before, ["streamline", "check", "x"])
    assert sys.modules["streamline_check_train"].arguments == ["streamline"]
    with pytest.raises(PlanError):
        named(f"{script}:missing", Pipeline)
    assert sys.path == before
