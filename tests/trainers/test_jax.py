"""JAX: a loop that is killed and resumed; and two processes whose batches are one array."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.kit import HERE, check_kill_and_resume


def test_a_jax_loop(tmp_path: Path) -> None:
    check_kill_and_resume("jax_run", tmp_path)


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    """Return what each of two processes found."""
    with tempfile.TemporaryDirectory() as folder:  # a short path: there is a socket in it
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-W", "ignore", "-m", "tests.trainers.jax_ranks_run", folder]
        programs = [
            subprocess.Popen([*command, str(process)], cwd=HERE.parents[1], env=environment, stderr=subprocess.PIPE)
            for process in range(2)
        ]
        try:
            said = [program.communicate()[1] for program in programs]
        finally:
            for program in programs:
                program.kill()  # one alone waits for the other
        assert [program.returncode for program in programs] == [0, 0], b"\n".join(said)[-3000:]
        yield [json.loads(Path(folder, f"{process}.json").read_text()) for process in range(2)]


def test_ranks_are_jaxs_processes(found: list[Any]) -> None:
    assert [one["rank"] for one in found] == [[0, 2], [1, 2]]


def test_batches_of_all_processes_are_one_array_of_which_each_has_its_own_rows(found: list[Any]) -> None:
    one, other = (process["batches"] for process in found)
    assert len(one) == len(other) == 3
    for mine, theirs in zip(one, other, strict=True):
        both = mine["here"] + theirs["here"]
        assert mine["shapes"] == theirs["shapes"] == [[4, 2], [4]]
        assert mine["totals"] == theirs["totals"] == [2 * sum(both), sum(both)]
    rows = [row for batch in one + other for row in batch["here"]]
    assert len(set(rows)) == len(rows) == 12
    assert [name for batch in one + other for name in batch["names"]] == [f"row {row}" for row in rows]


def test_arrays_that_are_jaxs_already_are_parts_too(found: list[Any]) -> None:
    expected = [[[2], 2 * at + 1 + 2 * at] for at in range(6)]
    assert [one["on device"] for one in found] == [expected, expected]


def test_processes_that_share_the_rows_are_one_rank(found: list[Any]) -> None:
    one, other = (process["shared"] for process in found)
    assert one == other
    assert [batch["shapes"] for batch in one] == [[[2, 2], [2]]] * 6
    assert [batch["totals"][1] for batch in one] == [sum(batch["here"]) for batch in one]


def test_each_process_resumes_with_its_own_rows(found: list[Any]) -> None:
    for one in found:
        assert one["resumed"] == [batch["here"] for batch in one["batches"]]


def test_ends_that_can_not_be_counted_are_refused_where_there_is_no_store(found: list[Any]) -> None:
    for one in found:
        assert 'ends="drop": the 2 ranks (jax.distributed) are to end together' in one["not counted"]
        assert "give a store" in one["not counted"]
