"""The command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import streamline as sl
from streamline.cli import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    pipe = sl.from_items(list(range(10)), name="numbers").shard(2).map(str).merge().batch(2)
    with pipe.open() as stream:
        next(stream)
        return stream.snapshot().save(tmp_path / "run.json")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag: str) -> None:
    result = run(flag)
    assert result.exit_code == 0
    for part in ("Usage:", "exact resume", "demo", "inspect", "check", "--version"):
        assert part in result.output


@pytest.mark.parametrize("command", ["demo", "inspect", "check"])
def test_each_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.output


def test_without_a_command_help_is_shown() -> None:
    result = run()
    assert "Usage:" in result.output
    assert "Traceback" not in result.output


def test_version_is_the_packages() -> None:
    assert run("--version").output == f"streamline, version {sl.__version__}\n"


def test_a_snapshot_is_printed_for_a_person(snapshot: Path) -> None:
    result = run("inspect", snapshot)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("shard", "numbers", "batch"):
        assert part in result.output


def test_what_file_names_would_do_to_a_terminal_is_escaped_wherever_they_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "\x1b[31m"
    folder.mkdir()
    path = folder / "\x1b]0;title\x07\u202e\udcff.jsonl"
    path.write_text("1\nno JSON\n")
    pipe = sl.read_jsonl(path)
    said = [str(pipe), str(pipe.check())]
    for failing in (pipe, pipe.map(lambda item: item[0]), sl.read_lines(folder / "missing")):
        with pytest.raises((TypeError, sl.errors.StreamlineError), match=r"expected|subscriptable|no file") as caught:
            list(failing)
        said += [str(caught.value), *getattr(caught.value, "__notes__", ())]
    with pipe.open(on_error="skip", dead_letters=folder / "bad.jsonl") as stream:
        list(stream)
        said += [str(stream.stats()), str(stream.errors)]
        saved = stream.snapshot().save(tmp_path / "run.json")
    said += [run("inspect", saved).output, run("inspect", path).output, run("inspect", folder / "none").output]
    said += [record.getMessage() for record in caplog.records]
    assert sum("\\x1b[31m" in text or "\\x1b]0;title\\x07\\u202e\\udcff" in text for text in said) >= 10
    assert [text for text in said if not set(text) <= {"\n"} | {char for char in text if char.isprintable()}] == []


def test_a_directory_of_snapshots_is_printed_rank_by_rank(tmp_path: Path) -> None:
    pipe = sl.from_items(list(range(10))).shard(2)
    for rank in range(2):
        with pipe.open(rank=rank, world_size=2) as stream:
            next(stream)
            stream.snapshot().save(tmp_path / "ckpt")
    whole = run("inspect", tmp_path / "ckpt")
    assert whole.exit_code == 0
    assert "all 2 ranks" in whole.output
    result = run("inspect", tmp_path / "ckpt", "--rank", 1)
    assert result.exit_code == 0
    assert "rank 1 of 2" in result.output
    beyond = run("inspect", tmp_path / "ckpt", "--rank", 2)
    assert beyond.exit_code == 1
    assert beyond.stderr.startswith("Error: ")


@pytest.mark.parametrize("columns", [60, 80, 120, 500])
def test_a_report_is_as_wide_as_the_terminal(snapshot: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    output = run("inspect", snapshot).output
    assert max(map(len, output.splitlines())) <= min(columns, 160)
    assert output.endswith("again that was delivered\n")


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "missing.json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert "missing.json" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "binary"])
def test_a_damaged_file_is_a_clear_error(snapshot: Path, damage: str) -> None:
    whole = snapshot.read_bytes()
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "changed": whole.replace(b"numbers", b"numberz", 1),
        "empty": b"",
        "binary": bytes(range(256)),
    }
    snapshot.write_bytes(damaged[damage])
    result = run("inspect", snapshot)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert snapshot.name in result.stderr


@pytest.mark.parametrize("arguments", [["inspect"], ["nothing"], ["inspect", "x", "--rank", "one"], ["--nothing"]])
def test_a_wrong_call_is_told_what_is_right(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize("command", [["-m", "streamline"]])
def test_it_runs_as_a_module(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command, "--version"], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == f"streamline, version {sl.__version__}\n"
    assert done.stderr == ""


def test_a_snapshot_is_inspected_by_a_program_that_has_made_no_pipeline(tmp_path: Path) -> None:
    with sl.from_items(range(20)).shuffle(window=8, seed=1).open() as stream:
        next(stream)
        stream.snapshot().save(tmp_path / "one.json")
    done = subprocess.run(
        [sys.executable, "-m", "streamline", "inspect", str(tmp_path / "one.json")],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert "shuffle: reads the 8 items of window 0 again" in done.stdout


def test_nothing_that_data_says_acts_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text(
        "import streamline as sl\n"
        "def fail(item):\n"
        "    raise ValueError(item)\n"
        "pipe = sl.from_items(['a\\x1b[31mb\\x9b\\u202e\\nc']).map(fail)\n"
        "def broken():\n"
        "    raise sl.errors.PlanError('a\\x1b[31mb\\nc')\n"
    )
    for name, kept in (("pipe", r"a\x1b[31mb\x9b\u202e"), ("broken", r"a\x1b[31mb")):
        result = run("check", f"{tmp_path / 'plan.py'}:{name}")
        assert result.exit_code == 1
        assert kept in result.output
        assert all(line.isprintable() for line in result.output.split("\n"))
