"""The SLURM script of docs/cluster.md, run by bash with an `srun` and a `scontrol` of the test's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from streamline.cli import worker

PAGE = Path(__file__).parent.parent / "docs" / "cluster.md"

COMMANDS = {
    "scontrol": '[ "$*" = "show hostnames gpu[1-5]" ] && printf "gpu%s\\n" 1 2 3 4 5',
    "srun": 'printf "%s\\n" "$*" >> "$NOTES"',  # each step is one line
}


def script() -> str:
    section = PAGE.read_text(encoding="utf-8").partition("## SLURM\n")[2]
    return section.partition("```\n")[2].partition("```")[0]


@pytest.fixture
def steps(tmp_path: Path) -> list[tuple[dict[str, str], list[str]]]:
    """The steps that the script starts, the one on the first node first: the options of `srun`, and the command."""
    for name, body in COMMANDS.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        command.chmod(0o755)
    notes = tmp_path / "notes"
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NOTES": str(notes),
        "SLURM_JOB_NODELIST": "gpu[1-5]",
    }
    subprocess.run(["bash", "-eu"], input=script(), text=True, env=env, check=True, timeout=60)
    found = []
    for line in notes.read_text(encoding="utf-8").splitlines():
        words = line.split()
        options = [word for word in words if word.startswith("--")][: words.index(_command(words))]
        found.append((dict(option[2:].split("=") for option in options), words[len(options) :]))
    return sorted(found, key=lambda step: int(step[0]["relative"]))


def _command(words: list[str]) -> str:
    return next(word for word in words if not word.startswith("--"))


def test_the_steps_have_the_nodes_of_the_job_between_them(steps: list[tuple[dict[str, str], list[str]]]) -> None:
    asked = dict(word[2:].split("=") for word in script().splitlines()[1].split()[1:])
    nodes = [range(int(own["relative"]), int(own["relative"]) + int(own["nodes"])) for own, _ in steps]
    assert [node for step in nodes for node in step] == list(range(int(asked["nodes"])))
    for options, _ in steps:
        assert options["ntasks"] == options["nodes"], "one task a node"
        assert options["cpus-per-task"] == asked["cpus-per-task"], "a step doesn't inherit it"


def test_the_trainer_runs_where_the_agents_dial(steps: list[tuple[dict[str, str], list[str]]]) -> None:
    (first, training), (_, agents) = steps
    assert (first["relative"], training) == ("0", ["python", "train.py"])
    assert agents[:2] == ["streamline", "worker"]
    given = worker.make_context("worker", agents[2:]).params
    assert (given["connect"], given["key_file"], given["hosts"]) == ("gpu1:7077", "key", None)
