"""A stage, a source, a format and a storage, each one file outside the package: everything works on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import streamline as sl
from streamline.errors import PlanError, PlanTypeError, ReadError, SnapshotError
from streamline.io.storage.base import Storage
from streamline.io.storage.registry import storage
from streamline.pipeline import Pipeline
from streamline.readers import pipeline_of
from streamline.snapshot.inspection import report
from streamline.testing import check_resume, check_stage, oracle
from tests.extending.own_format import Records
from tests.extending.own_source import Squares
from tests.extending.own_stage import EveryNth
from tests.extending.own_storage import ZipStorage

Pipe = Pipeline[Any]


def test_a_run_may_change_its_state_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EveryNth, "initial_state", {"seen": 0})
    stage = EveryNth[Any](n=2)
    stage.part_of(None)["seen"] = 5
    assert stage.part_of(None) == {"seen": 0}


def own_stage(folder: Path) -> Pipe:
    return sl.from_items(range(40)).shard(3).through(EveryNth(n=3)).merge().through(EveryNth(n=2), name="halved")


def own_source(folder: Path) -> Pipe:
    return Pipeline(Squares(count=20)).shard(3).merge()


def own_format(folder: Path) -> Pipe:
    for part in range(4):
        (folder / f"{part}.bin").write_bytes(b"".join(b"%d-%02d" % (part, row) for row in range(part + 3)))
    return pipeline_of(Records(size=4), f"{folder}/*.bin").shard(2).merge()


def own_storage(folder: Path) -> Pipe:
    with ZipFile(folder / "data.zip", "w") as archive:
        for part in range(4):
            archive.writestr(f"part-{part}.txt", "".join(f"{part}-{row}\n" for row in range(part + 3)))
    return sl.read_lines(f"zip://{folder}/data.zip!part-*.txt").shard(2).merge()


KINDS = {make.__name__: make for make in (own_stage, own_source, own_format, own_storage)}

LINES = {
    "own_stage": "every_nth(n=3)",
    "own_source": "squares",
    "own_format": "read_records '",
    "own_storage": "read_lines 'zip://",
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pipe(kind: str, tmp_path: Path) -> Pipe:
    return KINDS[kind](tmp_path)


def test_what_it_delivers_is_what_the_oracle_says(pipe: Pipe) -> None:
    found = list(pipe)
    assert len(found) >= 7
    assert found == oracle(pipe)


def test_it_is_printed_and_drawn(pipe: Pipe, kind: str, tmp_path: Path) -> None:
    assert LINES[kind] in repr(pipe)
    name = LINES[kind].split("(")[0].split(" ")[0]
    assert name in str(pipe.draw()).replace("#95;", "_")
    pipe.draw().save(tmp_path / "plan.svg")
    assert name in (tmp_path / "plan.svg").read_text()


def test_it_is_checked(pipe: Pipe) -> None:
    found = pipe.check(world_size=2)
    assert found.problems == ()
    assert len(found.records) >= 4


def test_it_runs_in_the_calling_thread(pipe: Pipe) -> None:
    with pipe.debug() as stream:
        assert list(stream) == oracle(pipe)


@pytest.mark.one_in(3)
def test_it_resumes_on_every_backend(pipe: Pipe, backend: Any) -> None:
    whole = oracle(pipe)
    with pipe.open(backend=backend) as stream:
        begun = [next(stream) for _ in range(5)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    with pipe.open(backend=backend, resume=snapshot) as stream:
        assert begun + list(stream) == whole


def test_its_snapshot_is_explained(pipe: Pipe) -> None:
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    explanation = pipe.explain(snapshot)
    assert explanation.fits
    assert "reads on at" in str(explanation)
    assert pipe.source.name in report(snapshot)


@pytest.mark.one_in(3, 1)
def test_it_keeps_the_laws(pipe: Pipe) -> None:
    check_resume(pipe, generations=3)


def test_an_own_stage_keeps_the_laws_of_a_stage() -> None:
    check_stage(EveryNth(n=3), range(12), behind_choices=False, generations=2)


def test_a_changed_option_of_an_own_stage_is_refused() -> None:
    with sl.from_items(range(9)).through(EveryNth(n=3)).open() as stream:
        snapshot = stream.snapshot()
    with pytest.raises(sl.errors.ResumeError, match="every_nth"):
        sl.from_items(range(9)).through(EveryNth(n=2)).open(resume=snapshot)


def test_a_damaged_state_of_an_own_stage_is_named() -> None:
    pipe = sl.from_items(range(9)).through(EveryNth(n=3))
    with pipe.open() as stream:
        next(stream)
        text = stream.snapshot().to_json()
    damaged = sl.Snapshot.from_json(text)
    damaged.worker_states[0]["every_nth"] = -1
    with pytest.raises(SnapshotError, match="every_nth"):
        pipe.open(resume=damaged)


def test_a_stage_has_its_options_already() -> None:
    with pytest.raises(PlanTypeError, match=r"through\(every_nth\) takes no n="):
        sl.from_items(range(9)).through(EveryNth(n=3), n=2)


def test_a_scheme_of_our_own_is_not_replaced() -> None:
    for scheme in ("s3", "HTTP", "file", "a b"):
        with pytest.raises(PlanError, match="a scheme that streamline doesn't read itself"):
            storage(scheme)


def test_a_storage_without_listings_says_so(tmp_path: Path) -> None:
    @storage("unlisted")
    class Unlisted(ZipStorage):
        list = Storage.list

    with pytest.raises(ReadError, match="no listings of unlisted://: give a list of paths, or braces"):
        sl.read_lines("unlisted://a!*.txt").first(1)
