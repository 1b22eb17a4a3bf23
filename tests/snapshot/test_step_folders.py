"""A folder of steps: the newest snapshot that all ranks have saved is found, and old ones are removed when told to."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from itertools import count, product
from pathlib import Path

import pytest

import streamline as sl
from streamline.errors import PlanError, SnapshotError
from streamline.snapshot import snapshot as snapshot_module
from streamline.snapshot.snapshot import Snapshot

PIPE = sl.from_items(range(100)).shard(4)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is a second older than the next one that is saved."""
    seconds, save = count(10**9), snapshot_module._replace

    def saving(path: object, written: Path, content: bytes) -> None:
        save(str(path), written, content)
        os.utime(written, (0, next(seconds)))

    monkeypatch.setattr(snapshot_module, "_replace", saving)


def at(step: int, rank: int = 0, world_size: int = 1, epoch: int = 0) -> Snapshot:
    with PIPE.open(rank=rank, world_size=world_size, epoch=epoch) as stream:
        for _ in range(step):
            next(stream)
        return stream.snapshot()


def save(folder: Path, steps: list[int], world_size: int = 1, keep: int | None = None) -> None:
    for step, rank in product(steps, range(world_size)):
        at(step, rank, world_size).save(folder / f"step-{step}", keep=keep)


def left(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted(folder.iterdir())}


def test_the_latest_is_that_of_the_highest_step_and_says_where_it_is(tmp_path: Path) -> None:
    assert Snapshot.latest(tmp_path / "none") is None
    assert Snapshot.latest(tmp_path) is None
    save(tmp_path, [9, 10, 2])
    (tmp_path / "notes").mkdir()
    (tmp_path / "model.pt").write_bytes(b"weights")
    found = Snapshot.latest(tmp_path)
    assert found == at(10)
    assert found is not None
    assert found.path == tmp_path / "step-10"
    at(3, epoch=1).save(tmp_path / "next")
    assert Snapshot.latest(str(tmp_path)) == at(3, epoch=1)
    with PIPE.open(resume=Snapshot.latest(tmp_path)) as stream:
        assert len(list(stream)) == 97


def test_a_directory_of_one_step_is_a_folder_too(tmp_path: Path) -> None:
    save(tmp_path, [5])
    assert Snapshot.latest(tmp_path / "step-5") == at(5)


def test_only_what_all_ranks_have_saved_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    at(4, 1, 3).save(tmp_path / "step-4")
    assert Snapshot.latest(tmp_path) is None
    assert "step-4 lacks the snapshots of some ranks: of 3 ranks, 0, 2" in caplog.text
    save(tmp_path, [5, 6], 3)
    at(7, 0, 3).save(tmp_path / "step-7")
    found = Snapshot.latest(tmp_path)
    assert found is not None
    assert found.path == tmp_path / "step-6"
    assert Snapshot.latest(tmp_path, rank=2) == at(6, 2, 3)
    with PIPE.open(resume=found, rank=1, world_size=3) as stream:
        assert stream.snapshot() == at(6, 1, 3)


@pytest.mark.parametrize("damage", [lambda text: text[:-20], lambda text: text.replace("21", "12", 1), lambda _: ""])
def test_damage_falls_back_and_is_logged_and_alone_it_is_an_error(
    damage: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, [20, 21])
    for step, expected in ((21, at(20)), (20, None)):
        file = tmp_path / f"step-{step}" / "rank-00000-of-00001.json"
        file.write_text(damage(file.read_text()))
        if expected is not None:
            assert Snapshot.latest(tmp_path) == expected
            assert any("passed over" in record.message for record in caplog.records) or step == 21
    with pytest.raises(SnapshotError, match="step-2"):
        Snapshot.latest(tmp_path)


def test_a_step_that_was_saved_after_a_further_one_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, [30, 50])
    assert Snapshot.latest(tmp_path) == at(50)
    assert not caplog.records
    save(tmp_path, [40])  # a run that has gone back to 30
    assert Snapshot.latest(tmp_path) == at(50)
    assert "step-50 is the furthest snapshot, and" in caplog.text
    assert "step-40 was saved after it" in caplog.text


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"can't read snapshots in .*file: Not a directory"):
        Snapshot.latest(tmp_path / "file")


def test_keep_removes_what_is_older_than_the_last_complete_ones(tmp_path: Path) -> None:
    save(tmp_path, [1, 2, 3], keep=2)
    assert list(left(tmp_path)) == ["step-2", "step-3"]
    (tmp_path / "step-2" / "model.pt").write_bytes(b"weights")
    save(tmp_path, [4, 5], keep=1)
    assert left(tmp_path) == {"step-2": ["model.pt"], "step-5": ["rank-00000-of-00001.json"]}
    assert Snapshot.latest(tmp_path) == at(5)


def test_each_rank_removes_its_own_and_never_one_of_the_last_complete_ones(tmp_path: Path) -> None:
    """Whatever rank is killed before it saves, the others have not removed what a resume needs."""
    for step in range(1, 5):
        for rank in range(3):
            at(step, rank, 3).save(tmp_path / f"step-{step}", keep=1)
            found = Snapshot.latest(tmp_path)
            assert found == (None if (step, rank) < (1, 2) else found)
            if (step, rank) >= (1, 2):
                assert found is not None
                assert found.step == (step if rank == 2 else step - 1)
    files = [f"rank-{rank:05}-of-00003.json" for rank in range(3)]
    assert left(tmp_path) == {"step-3": files[:2], "step-4": files}


def test_keep_of_a_smaller_job_removes_what_a_larger_one_has_left(tmp_path: Path) -> None:
    save(tmp_path, [1], 4)
    save(tmp_path, [2, 3], 2, keep=1)
    assert [name for name, files in left(tmp_path).items() if files] == ["step-2", "step-3"]
    save(tmp_path, [4], 2, keep=1)
    assert "step-2" not in left(tmp_path)


def test_a_run_that_began_anew_keeps_what_it_saves(tmp_path: Path) -> None:
    save(tmp_path, [50, 60])
    save(tmp_path, [1], keep=1)
    assert list(left(tmp_path)) == ["step-1"]


def test_keep_touches_nothing_but_directories_of_the_same_name(tmp_path: Path) -> None:
    for other in ("old-1", "step", "step-x", "step-1-best"):
        at(1).save(tmp_path / other)
    save(tmp_path, [1, 2, 3], keep=1)
    assert list(left(tmp_path)) == ["old-1", "step", "step-1-best", "step-3", "step-x"]


@pytest.mark.parametrize("path", ["ckpt/", "ckpt/step-3.json"])
def test_keep_needs_a_directory_for_each_step(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SnapshotError, match=r'is no directory of one step: save to f"ckpt/step-\{step\}/"'):
        at(1).save(path, keep=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2"])
def test_what_is_no_number_of_steps_is_refused(keep: object, tmp_path: Path) -> None:
    with pytest.raises((PlanError, TypeError), match=r"save\(keep=\)"):
        at(1).save(tmp_path / "step-1", keep=keep)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_removed_stays_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, [1, 2])

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.WARNING):
        save(tmp_path, [3], keep=1)
    assert "a snapshot that is older than the last 1 can't be removed: [Errno 13] Permission denied" in caplog.text
    assert list(left(tmp_path)) == ["step-1", "step-2", "step-3"]


def test_a_whole_jobs_snapshot_is_kept_like_its_ranks(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        Snapshot.of_job([at(step, rank, 2) for rank in range(2)]).save(tmp_path / f"step-{step}", keep=2)
    assert list(left(tmp_path)) == ["step-2", "step-3"]
    found = Snapshot.latest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert json.loads(found.part(0).to_json())["step"] == 3
