"""What a check says of pipelines that would fail, and of those that wouldn't."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.errors import CheckError, PlanError, PlanTypeError
from streamline.io.storage import resolve as finding
from streamline.runtime import check as checking
from tests.serving import serving_objects


def write(folder: Path, count: int = 4, rows: int = 3, **extra: Any) -> str:
    """Write JSON lines, and return their glob."""
    for part in range(count):
        lines = [json.dumps({"text": f"{part}-{row}", "label": row, **extra}) for row in range(rows)]
        (folder / f"part-{part:03}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "part-*.jsonl")


def text_of(record: dict[str, Any]) -> str:
    text: str = record["text"]
    return text


def whats(report: sl.Report) -> list[str]:
    return [problem.what for problem in report.problems]


def said(report: sl.Report) -> str:
    return "\n".join(problem.message for problem in report.problems)


def test_a_sound_pipeline(tmp_path: Path) -> None:
    pipe = sl.read_jsonl(write(tmp_path, 8)).shard(4).map(text_of).merge().batch(2)
    report = pipe.check(world_size=2)
    assert report.ok
    report.raise_for_problems()
    assert (report.objects, report.unsized, len(report.records), report.outputs) == (8, 0, 8, 4)
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert [load.items for load in report.shards] == [2] * 4
    assert [load.items for load in report.ranks] == [4] * 2
    assert str(report).splitlines()[0].startswith("read_jsonl ")
    for part in ("8 objects", "4 (file), each 2 objects", "2 (given), each 4 objects", "8 of 8", "no problems"):
        assert part in str(report)
    assert report.records[0] == (str(tmp_path / "part-000.jsonl"), {"text": "0-0", "label": 0})


def test_a_glob_without_a_match(tmp_path: Path) -> None:
    report = sl.read_jsonl(str(tmp_path / "*.jsonl")).shard(4).check()
    assert whats(report) == ["listing"]
    assert "no file matches" in said(report)
    with pytest.raises(CheckError, match="no file matches"):
        report.raise_for_problems()


def test_more_shards_than_files(tmp_path: Path) -> None:
    report = sl.read_jsonl(write(tmp_path, 3)).shard(8).check()
    assert whats(report) == ["shards"]
    assert "8 shards for 3 files: 5 workers would have nothing to read: write .shard(3)" in said(report)


def test_more_ranks_than_shards_and_the_rest_is_looked_at_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "part-9.jsonl").write_text("{broken\n")
    report = sl.read_jsonl(write(tmp_path, 3)).shard(2).check(world_size=4)
    assert whats(report) == ["plan", "reading"]
    assert "2 shards for 4 ranks" in said(report)


def test_an_unsharded_pipeline_on_several_ranks(tmp_path: Path) -> None:
    assert "each of the 4 ranks would read everything" in said(sl.read_jsonl(write(tmp_path)).check(world_size=4))


@pytest.mark.parametrize(("value", "kind"), [("5", "str"), ([5], "list")])
def test_mixed_schemas(tmp_path: Path, value: Any, kind: str) -> None:
    glob = write(tmp_path, 5)
    (tmp_path / "part-004.jsonl").write_text(json.dumps({"text": "x", "label": value}))
    report = sl.read_jsonl(glob).check()
    assert whats(report) == ["schema"]
    assert f"'label' is int and {kind}" in said(report)
    assert "part-004" in said(report)


def test_an_optional_key_is_noted(tmp_path: Path) -> None:
    glob = write(tmp_path, 5)
    (tmp_path / "part-004.jsonl").write_text('{"text": "x"}')
    report = sl.read_jsonl(glob).check()
    assert report.ok
    assert "has no 'label'" in "".join(report.notes)


def test_damaged_heads_are_named_file_by_file(tmp_path: Path) -> None:
    glob = write(tmp_path, 3)
    (tmp_path / "part-001.jsonl").write_text("{broken\n")
    (tmp_path / "part-003.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 100)[:12])
    report = sl.read_jsonl([glob, str(tmp_path / "*.gz")]).check()
    assert whats(report) == ["reading", "reading"]
    assert "part-001.jsonl" in report.problems[0].message
    assert "part-003.jsonl.gz" in report.problems[1].message


def test_files_without_records(tmp_path: Path) -> None:
    glob = write(tmp_path, 3, rows=0)
    assert "there are no records" in said(sl.read_jsonl(glob).check())
    write(tmp_path, 2)
    report = sl.read_jsonl(glob).check()
    assert report.ok
    assert "1 of those looked at have no records" in "".join(report.notes)


def test_a_stage_that_raises_is_named_with_the_file(tmp_path: Path) -> None:
    glob = write(tmp_path, 5)
    (tmp_path / "part-002.jsonl").write_text('{"label": 1}\n')
    report = sl.read_jsonl(glob).shard(2).filter(bool).map(text_of).check()
    assert whats(report) == ["stages"]
    assert "part-002.jsonl, map(text_of) raised KeyError: 'text'" in said(report)


def test_a_ragged_batch_is_found_among_the_first_records(tmp_path: Path) -> None:
    import numpy as np

    glob = write(tmp_path, 4)
    report = (
        sl.read_jsonl(glob).map(lambda record: np.zeros(len(record["text"]) + int(record["text"][0]))).batch(4).check()
    )
    assert whats(report) == ["stages"]
    assert "together, the first records fail" in said(report)


def test_an_endless_pipeline_ends(tmp_path: Path) -> None:
    report = sl.read_jsonl(write(tmp_path, 2)).shard(2).repeat().map(text_of).check()
    assert report.ok
    assert report.outputs == checking.MOST_OUTPUTS


def test_a_stage_that_hangs_is_noted_and_left() -> None:
    leave = threading.Event()
    report = sl.from_items([1]).map(lambda _: leave.wait()).check(deadline_s=0.4)
    leave.set()
    assert report.ok
    assert "weren't through" in "".join(report.notes)


@pytest.mark.long
def test_a_check_beyond_its_deadline_leaves_the_exit_quiet(python: Callable[..., str]) -> None:
    """The function hangs for ever, in a daemon thread: the interpreter ends, and nothing stands on stderr."""
    script = """
import threading
import streamline as sl
pipe = sl.from_items([1]).map(lambda _: threading.Event().wait())
print(*pipe.check(deadline_s=0.8).notes)
"""
    assert "the stages weren't through with 1 records within 0.8 s" in python(script)


def test_a_device_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    report = sl.read_jsonl(write(tmp_path)).map(len).transfer("cuda:99").check()
    assert whats(report) == ["plan"]


@pytest.mark.long
def test_what_does_not_pickle(tmp_path: Path) -> None:
    sock = socket.socket()
    sock.close()
    pipe = sl.read_jsonl(write(tmp_path)).shard(2).map(lambda record: (sock, record)[1])
    report = pipe.check(backend=sl.Processes(2))
    assert whats(report) == ["pickling"]
    assert "its variable sock: a socket.socket can't be pickled" in said(report)
    report = pipe.check()
    assert report.ok
    assert "can't run in processes" in "".join(report.notes)
    assert pipe.check(backend=sl.Threads(2)).notes == ()


def test_sources_without_files() -> None:
    report = sl.from_items(range(10)).shard(2).map(str).check()
    assert (report.ok, report.objects, report.outputs) == (True, 10, 8)
    assert "10 items" in str(report)
    assert "2 shards for 1 items" in said(sl.from_items([1]).shard(2).check())
    assert "there are no records" in said(sl.from_items([]).check())
    assert sl.from_iterable(lambda: iter(range(5))).shard(2).check().ok

    def fails() -> Any:
        raise RuntimeError("no database")

    assert "no database" in said(sl.from_iterable(fails).check())


def test_a_live_source_is_not_read() -> None:
    read = []

    async def feed() -> AsyncIterator[int]:
        read.append(1)
        yield 1

    report = sl.from_stream(feed).map(str).check()
    assert (report.ok, read) == (True, [])
    assert "it is live: nothing was read" in str(report)


async def test_it_works_in_a_running_loop(tmp_path: Path) -> None:
    assert sl.read_jsonl(write(tmp_path)).map(text_of).check().ok


def test_a_shuffled_and_replicated_one(tmp_path: Path) -> None:
    glob = write(tmp_path, 4)
    assert sl.read_jsonl(glob).shuffle_files(seed=1).shard(2).shuffle(window=4).check().ok
    report = sl.read_jsonl(glob).take(2).shard(2, mode="replicated").map(text_of).check()
    assert (report.ok, report.outputs) == (True, 4)


def test_one_file_that_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    report = sl.read_jsonl(str(tmp_path / "a.jsonl.gz")).shard(4).check()
    assert "be split into 4 shards" in said(report)
    assert len(report.problems) == 1


def test_a_cache_dir_that_cannot_be_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    glob = write(tmp_path, 2)
    before = sorted(tmp_path.rglob("*"))
    report = sl.read_jsonl(glob, cache_dir=tmp_path / "part-000.jsonl" / "cache").check()
    assert whats(report) == ["cache"]
    assert sl.read_jsonl(glob, cache_dir=tmp_path / "new" / "cache").check().ok
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "error"),
    [({"world_size": 0}, PlanError), ({"world_size": "2"}, PlanTypeError), ({"deadline_s": 0}, PlanError)],
)
def test_options_are_checked(options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        sl.from_items([1]).check(**options)


def test_many_problems_of_a_kind_are_cut_short(tmp_path: Path) -> None:
    for at in range(8):
        (tmp_path / f"{at}.jsonl").write_text("{broken")
    report = sl.read_jsonl(str(tmp_path / "*.jsonl")).check()
    assert len(report.problems) == 6
    assert report.problems[-1].message == "… and 3 more"


# Over HTTP ------------------------------------------------------------------------------------------------------------


def test_one_missing_among_many_urls_is_found(tmp_path: Path) -> None:
    objects = {f"/{at:03}.jsonl": b'{"a": 1}\n' * (at + 1) for at in range(20)}
    with serving_objects(objects) as server:
        report = sl.read_jsonl(f"{server.base}/{{000..020}}.jsonl").shard(4).check()
        assert whats(report) == ["listing"]
        assert "020.jsonl" in said(report)
        report = sl.read_jsonl(f"{server.base}/{{000..019}}.jsonl", cache_dir=tmp_path / "cache").shard(4).check()
    assert report.ok
    assert (report.objects, report.bytes, report.unsized) == (20, sum(map(len, objects.values())), 0)
    assert not (tmp_path / "cache").exists()


def test_what_no_listing_has_looked_at_is_looked_at_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "MOST_ASKED", 0)
    objects = {f"/{at:03}.jsonl": b'{"a": 1}\n' * (at + 1) for at in range(20)}
    with serving_objects(objects) as server:
        report = sl.read_jsonl(f"{server.base}/{{000..021}}.jsonl").shard(4).check()
    assert (report.objects, report.bytes, report.unsized) == (22, sum(map(len, objects.values())), 2)
    assert whats(report) == ["reading", "reading"]
    assert "020.jsonl" in said(report)
    assert "021.jsonl" in said(report)


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pipe = sl.read_jsonl(f"http://127.0.0.1:{silent.getsockname()[1]}/x.jsonl")
        report = pipe.check(deadline_s=0.3)
        assert whats(report) == ["listing"]
        assert "x.jsonl" in said(report)
        monkeypatch.setattr(finding, "MOST_ASKED", 0)
        report = pipe.check(deadline_s=0.3)
        assert whats(report) == ["reading"]
        assert "x.jsonl" in said(report)
