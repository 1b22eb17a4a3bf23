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
    for part in ("Usage:", "exact resume", "demo", "inspect", "steps", "check", "run", "--version"):
        assert part in result.output


@pytest.mark.parametrize("command", ["demo", "inspect", "steps", "check", "run", "top"])
def test_each_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.output


def test_without_a_command_help_is_shown() -> None:
    result = run()
    assert "Usage:" in result.output
    assert "Traceback" not in result.output


def test_version_is_the_packages_and_says_which_distribution_that_is() -> None:
    assert run("--version").output == f"streamline-data, version {sl.__version__}\n"


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


def test_recorded_steps_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in (0, 1):
        Path(f"part-{part}.txt").write_text("".join(f"{part}.{line}\n" for line in range(6)))
    with sl.read_lines("part-*.txt").shard(2).merge().batch(4).open(record=sl.Recorder("steps")) as stream:
        assert len(list(stream)) == 3
    result = run("steps", "steps", "1..3")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "step 1: epoch 0, rank 0 of 1, opening 1",
        "  shard 0: 2 items; part-0.txt, line 2, byte 8 -> part-0.txt, line 4, byte 16",
        "  shard 1: 2 items; part-1.txt, line 2, byte 8 -> part-1.txt, line 4, byte 16",
        "step 2: epoch 0, rank 0 of 1, opening 1",
        "  shard 0: 2 items; part-0.txt, line 4, byte 16 -> part-0.txt, line 6, byte 24",
        "  shard 1: 2 items; part-1.txt, line 4, byte 16 -> part-1.txt, line 6, byte 24",
        "rank 0: 1 step of 1..3 not recorded: 3; recorded are 0..2",
    ]
    assert run("steps", "steps", "7", "--rank", 0).exit_code == 1
    assert run("steps", tmp_path / "none", "7").exit_code == 1
    assert run("steps", "steps", "7..3").exit_code == 2


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
    assert done.stdout == f"streamline-data, version {sl.__version__}\n"
    assert done.stderr == ""


@pytest.mark.long
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


JOB = """
import os, signal
from pathlib import Path
import streamline as sl

def fails(item):
    return 1 / (item - 5)

def interrupts(item):
    if item == 9 and not Path("interrupted").exists():
        Path("interrupted").touch()
        os.kill(os.getpid(), signal.SIGINT)
    return item

def pipe():
    return sl.from_items(range(20)).shard(2)

def double(item):
    return 2 * item

doubled = pipe().map(double)
failing = pipe().map(fails)
interrupted = pipe().map(interrupts)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def test_a_job_is_run_and_run_again(job: Path) -> None:
    done = run("run", "job.py:pipe", "--to", "out", "--shard-bytes", "10", "--backend", "threads:2")
    assert (done.exit_code, done.output) == (0, "out: 20 items in 5 shards, 50 bytes\n")
    assert list(sl.read_jsonl("out")) == list(range(20))
    again = run("run", "job.py:pipe", "--to", "out", "--resume")
    assert (again.exit_code, again.output.endswith("by earlier runs: nothing to do\n")) == (0, True)
    refused = run("run", "job.py:pipe", "--to", "out")
    assert (refused.exit_code, "resume=True (--resume)" in refused.output) == (1, True)
    assert run("run", "job.py:pipe", "--to", "gz", "--compression", "gzip").exit_code == 0
    assert list(sl.read_jsonl("gz/*.jsonl.gz")) == list(range(20))
    assert run("run", "job.py:pipe", "--to", "npy", "--format", "npy", "--shard-bytes", "1KiB").exit_code == 0
    assert list(sl.read_npy("npy")) == list(range(20))


def test_processes_get_the_functions_of_the_file(job: Path) -> None:
    done = run("run", "job.py:doubled", "--to", "out", "--backend", "processes:1")
    assert (done.exit_code, list(sl.read_jsonl("out"))) == (0, list(range(0, 40, 2)))


def test_a_failure_of_the_job_is_shown_with_how_to_go_on(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = run("run", "job.py:failing", "--to", "out", "--shard-bytes", "8")
    assert done.exit_code == 1
    said = done.output + capfd.readouterr().err
    for part in ("ZeroDivisionError", "job.py", "at index 5 of items: 5", "whole shards", "--resume"):
        assert part in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shard-bytes", "2x"], "expected a number of bytes"),
        (["--shard-bytes", "0"], "expected a number of bytes"),
        (["--backend", "processes"], "expected inline, threads:N or processes:N"),
        (["--backend", "gpus:2"], "expected inline, threads:N or processes:N"),
        (["--format", "csv"], "'csv' is not one of"),
        (["--compression", "foo"], "is None or one of 'gzip', 'zstd', got 'foo'"),
        (["--format", "npy", "--compression", "gzip"], "compression"),
    ],
)
def test_a_wrong_option_of_a_job_is_told_what_is_right(job: Path, options: list[str], said: str) -> None:
    done = run("run", "job.py:pipe", "--to", "out", *options)
    assert (done.exit_code, said in done.output, (job / "out").exists()) == (2, True, False)


@pytest.mark.parametrize(("text", "size"), [("100", 100), ("3B", 3), ("1K", 1000), ("2MiB", 2 << 20), ("1gb", 10**9)])
def test_sizes_have_units(job: Path, text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, object] = {}

    def write(self: object, *_: object, **options: object) -> None:
        found.update(options)
        raise sl.errors.PlanError("that is all")

    monkeypatch.setattr(sl.Pipeline, "write", write)
    assert run("run", "job.py:pipe", "--to", "out", "--shard-bytes", text).exit_code == 1
    assert found["shard_bytes"] == size


@pytest.mark.long
def test_ctrl_c_stops_a_job_where_resume_goes_on(job: Path) -> None:
    command = [sys.executable, "-m", "streamline", "run", "job.py:interrupted", "--to", "out", "--shard-bytes", "8"]
    stopped = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (stopped.returncode, "--resume goes on" in stopped.stderr) == (130, True)
    done = run("run", "job.py:interrupted", "--to", "out", "--shard-bytes", "8", "--resume")
    assert (done.exit_code, list(sl.read_jsonl("out"))) == (0, list(range(20)))
