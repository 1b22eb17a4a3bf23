"""A real mesh of four processes, in torch: two ranks for the data, each shared by two processes for tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from tests.trainers.kit import HERE, ITEMS, uneven

RANKS = [(0, 1), (2, 3)]
"""The processes of each rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the four processes have left what they found and saved."""
    folder = tmp_path_factory.mktemp("mesh")
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainers.mesh_run", str(folder)]
    ended = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """Return what each process found."""
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(4)]


def test_processes_of_one_rank_are_given_the_same_and_ranks_together_everything_once(found: list[Any]) -> None:
    whole = [[item for item, _ in one["counted"][0]["items"]] for one in found]
    for one, other in RANKS:
        assert whole[one] == whole[other]
    assert len(whole[0]) == 16
    assert sorted(whole[0] + whole[2]) == list(range(ITEMS))


@pytest.mark.parametrize(
    ("name", "agreed", "counts"), [("counted", "beforehand", (10, 16)), ("found out", "on the way", (5, 6))]
)
def test_ranks_end_together_over_the_dimension_of_the_data(
    found: list[Any], name: str, agreed: str, counts: tuple[int, int]
) -> None:
    for one, other in RANKS:
        assert found[one][name] == found[other][name]
    drop, pad = ([one[name][at] for one in found] for at in (-2, -1))
    assert {stream["agreed"] for stream in drop + pad} == {agreed}
    assert [len(stream["items"]) for stream in drop] == [counts[0]] * 4
    assert [len(stream["items"]) for stream in pad] == [counts[1]] * 4
    again = [[item for item, padding in stream["items"] if padding] for stream in pad]
    assert again[0] == []
    assert again[2] == [item for item, _ in pad[2]["items"][: counts[1] - counts[0]]]


def test_without_a_mesh_or_with_all_of_it_as_one_dimension_each_process_is_a_rank(found: list[Any]) -> None:
    for name in ("without a mesh", "flattened"):
        assert sorted(item for one in found for item in one[name]) == list(range(ITEMS))
    assert [one["flattened"] for one in found] == [one["without a mesh"] for one in found]


def test_what_is_refused_says_what_to_do(found: list[Any]) -> None:
    for one in found:
        assert one["whole"].startswith(".open(mesh=) has 2 dimensions (dp, tp): give the one over which the data is")
        best_effort, unordered, feed = one["choosers"]
        assert "the best-effort merge chooses an order, and each of them another one" in best_effort
        assert "map(abs) chooses an order" in unordered
        assert "a feed is read once, by one of them" in feed
        assert one["choosers alone"] == "not refused"


@pytest.mark.parametrize("name", ["resumed", "checkpointed"])
def test_a_resume_goes_on_exactly_though_processes_of_one_rank_save_the_same_thing(found: list[Any], name: str) -> None:
    whole = [[item for item, _ in one["counted"][0 if name == "resumed" else 1]["items"]] for one in found]
    assert [before + behind for before, behind in (one[name] for one in found)] == whole


def test_a_snapshot_of_all_of_them_is_of_the_ranks_and_resumes_on_one(folder: Path, found: list[Any]) -> None:
    assert sorted(path.name for path in (folder / "ckpt").iterdir()) == [
        "rank-00000-of-00002.json",
        "rank-00001-of-00002.json",
    ]
    with uneven().open(resume=sl.Snapshot.load(folder / "ckpt"), rank=0, world_size=1) as stream:
        rest = list(stream)
    assert sorted(rest + found[0]["resumed"][0] + found[2]["resumed"][0]) == list(range(ITEMS))


def test_each_process_writes_dead_letters_of_its_own(folder: Path, found: list[Any]) -> None:
    letters = {path.name: len(path.read_text().splitlines()) for path in folder.glob("bad*")}
    assert letters == {
        "bad-rank-00000-of-00002-process-00000.jsonl": 0,
        "bad-rank-00000-of-00002-process-00001.jsonl": 0,
        "bad-rank-00001-of-00002-process-00002.jsonl": 1,
        "bad-rank-00001-of-00002-process-00003.jsonl": 1,
    }
    assert [len(one["skipped"]) for one in found] == [16, 16, 9, 9]
