"""A file with a line for each skipped item: none is missing, none is there twice, whatever happens to the run."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import streamline as sl
from streamline.core.text import REPR_BYTES, cut
from streamline.errors import DeadLetterError
from tests.laws.profile import examples

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}

LENGTH = 20


def check(item: int) -> int:
    if item % 3 == 1:
        raise ValueError(f"bad {item}")
    return item


def second(item: int) -> int:
    if item % 3 == 2:
        raise KeyError(item)
    return item


def letters_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bad_of(path: Path) -> list[tuple[str, str]]:
    return sorted((letter["stage"], letter["item"]) for letter in letters_of(path))


PIPES: dict[str, sl.Pipeline[Any]] = {
    "shards": sl.from_items(range(LENGTH)).shard(3, mode="contiguous").map(check).merge().map(second),
    "shuffle": sl.from_items(range(LENGTH)).map(check).shuffle(window=6).map(second),
    "threads": sl.from_items(range(LENGTH)).map(check, executor="thread", concurrency=2, ordered=False).map(second),
    "repeat": sl.from_items(range(LENGTH // 2)).map(check).map(second).repeat(2),
}


def all_bad(name: str) -> list[tuple[str, str]]:
    items = [*range(LENGTH // 2), *range(LENGTH // 2)] if name == "repeat" else range(LENGTH)
    return sorted(({1: "check", 2: "second"}[item % 3], repr(item)) for item in items if item % 3)


def test_a_line_says_what_where_when_and_why(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    pipe = sl.from_items(range(4)).shard(2).map(check)
    with pipe.open(**SKIP, epoch=3, dead_letters=path) as stream:
        assert list(stream) == [0, 3, 2]
        assert stream.errors.dead_letters == path
    (letter,) = letters_of(path)
    trace, time = letter.pop("traceback"), letter.pop("time")
    assert letter == {
        "dead_letter": 1, "epoch": 3, "passes": [], "rank": 0, "shard": 1, "stage": "check", "n": 1, "kind": "map",
        "items": 1, "position": "index 1 of items", "error": "ValueError", "message": "bad 1",
        "item": "1",
    }  # fmt: skip
    assert time.endswith("+00:00")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError(f"bad {item}")' in trace
    assert f"{os.sep}streamline{os.sep}transforms" not in trace
    assert "in map(check), shard 1 of 2" in trace


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PIPES)
@examples(5)
@given(stops=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4))
@example(stops=[(3, 3), (4, 2)])
def test_a_crash_and_a_resume_leave_no_line_twice_and_none_out(
    name: str, stops: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("letters") / "bad.jsonl"
    snapshot: sl.Snapshot | None = None
    for saved_at, crashed_behind in stops:
        with PIPES[name].open(**SKIP, dead_letters=path, resume=snapshot) as stream:
            list(islice(stream, saved_at))
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
            list(islice(stream, crashed_behind))  # the file is ahead of the snapshot now
        with path.open("ab") as file:
            file.write(b'{"dead_letter":1,"ep'[: saved_at * 4])  # a kill in the middle of a write
    with PIPES[name].open(**SKIP, dead_letters=path, resume=snapshot) as stream:
        list(stream)
        total = stream.errors.total
    assert bad_of(path) == all_bad(name)
    assert total == len(all_bad(name))


@pytest.mark.long
def test_a_killed_run_has_written_what_was_consumed(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    program = (
        "import os, signal, streamline as sl\n"
        f"pipe = sl.from_items(range(9000)).map(lambda item: 1 // (item % 3))\n"
        f"with pipe.open(on_error='skip', max_errors=None, dead_letters={str(path)!r}) as stream:\n"
        "    for count, _ in enumerate(stream, 1):\n"
        "        if count == 3000:\n"
        f"            stream.snapshot().save({str(tmp_path / 'ckpt')!r})\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=200)
    assert done.returncode == -9
    (file,) = (tmp_path / "ckpt").iterdir()
    snapshot = sl.Snapshot.load(tmp_path / "ckpt")
    counted = sum(snapshot.worker_states[0]["errors"].values())
    assert file.exists()
    assert len(letters_of(path)) == counted > 1000


def test_a_new_run_truncates_the_file_and_a_new_epoch_appends(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    pipe = sl.from_items(range(5)).map(check)
    for epoch, expected in ((0, [0, 0]), (1, [0, 0, 1, 1]), (2, [0, 0, 1, 1, 2, 2]), (1, [0, 0, 1, 1]), (0, [0, 0])):
        with pipe.open(**SKIP, epoch=epoch, dead_letters=path) as stream:
            assert list(stream) == [0, 2, 3]
        assert [letter["epoch"] for letter in letters_of(path)] == expected


@pytest.mark.parametrize("bad", [b'"\xff"', b"[" * 100_000, b'{"a": ', b"1, 2"])
def test_a_line_that_was_damaged_is_an_error_with_its_number(bad: bytes, tmp_path: Path) -> None:
    path, pipe = tmp_path / "bad.jsonl", sl.from_items(range(5)).map(check)
    with pipe.open(**SKIP, dead_letters=path) as stream:
        assert list(stream) == [0, 2, 3]
        snapshot = stream.snapshot()
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"item":"4"', b'"item":' + bad))
    with pytest.raises(DeadLetterError, match=r"bad\.jsonl line 2 is damaged: .*move the file away"):
        pipe.open(**SKIP, dead_letters=path, resume=snapshot).__enter__()


def test_each_of_several_ranks_has_a_file_of_its_own(tmp_path: Path) -> None:
    pipe = sl.from_items(range(6)).shard(2).map(check)
    for rank in (0, 1):
        letters = tmp_path / "bad.jsonl"
        with pipe.open(**SKIP, rank=rank, world_size=2, ends="allow", dead_letters=letters) as stream:
            list(stream)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad-rank-00000-of-00002.jsonl",
        "bad-rank-00001-of-00002.jsonl",
    ]
    assert bad_of(tmp_path / "bad-rank-00001-of-00002.jsonl") == [("check", "1")]


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Enormous:
    def __repr__(self) -> str:
        return "é" * 5000


class Surrogate:
    def __repr__(self) -> str:
        return "\ud800"


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def test_items_and_errors_that_cant_be_shown_dont_end_the_run(tmp_path: Path) -> None:
    def fails(item: Any) -> Any:
        raise HostileError

    path = tmp_path / "bad.jsonl"
    with sl.from_items([Hostile(), Enormous(), Surrogate()]).map(fails).open(**SKIP, dead_letters=path) as stream:
        assert list(stream) == []
    first, second, third = letters_of(path)
    assert first["item"] == "<Hostile whose repr raised RuntimeError>"
    assert first["message"] == "<HostileError whose str raised RuntimeError>"
    assert len(second["item"].encode()) <= REPR_BYTES
    assert second["item"].endswith("é…")
    assert third["item"] == "\\ud800"


@given(st.text(max_size=REPR_BYTES * 2))
@examples(30)
def test_a_repr_is_cut_to_a_kilobyte(text: str) -> None:
    found = cut(text)
    assert len(found.encode()) <= REPR_BYTES
    assert found == text or (found.endswith("…") and text.startswith(found[:-1]))


def test_another_file_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    for content in (b'{"text": "precious"}\n', b"precious", b"\n", b'{"dead_letter":1,"epoch":0}\n', b"{}\n"):
        path.write_bytes(content)
        with pytest.raises(DeadLetterError, match=rf"^{path} .*(another path|move the file away)$"):
            sl.from_items(range(3)).map(check).open(**SKIP, dead_letters=path).sync_stream()
        assert path.read_bytes() == content


def test_a_pipe_is_refused_and_its_reader_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bad.jsonl")
    with pytest.raises(sl.errors.DeadLetterError, match="is a named pipe, expected a regular file"):
        sl.from_items(range(9)).map(check).open(**SKIP, dead_letters=tmp_path / "bad.jsonl").sync_stream()


def test_a_place_where_nothing_can_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    pipe = sl.from_items(range(3)).map(check)
    for path in (tmp_path, tmp_path / "missing" / "bad.jsonl"):
        with pytest.raises(DeadLetterError, match="can't write dead letters") as caught:
            pipe.open(**SKIP, dead_letters=path).sync_stream()
        assert str(path) in str(caught.value)
    assert issubclass(DeadLetterError, OSError)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A disk that has room for ten bytes once it is full."""
    full = [False]
    write = os.write

    def writes(descriptor: int, data: Any) -> int:
        if not full[0] or not bytes(data).lstrip().startswith(b'{"dead'):
            if full[0] and b"shard" in bytes(data):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data)
        return write(descriptor, bytes(data)[:10])

    monkeypatch.setattr(os, "write", writes)
    yield full
    full[0] = False


def test_a_full_disk_fails_the_stream_and_what_it_left_is_repaired(tmp_path: Path, full_disk: list[bool]) -> None:
    path = tmp_path / "bad.jsonl"
    pipe = sl.from_items(range(9)).map(check)
    with pipe.open(**SKIP, dead_letters=path) as stream:
        assert next(stream) == 0
        snapshot = stream.snapshot()
        full_disk[0] = True
        with pytest.raises(DeadLetterError, match="No space left on device") as caught:
            list(stream)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(DeadLetterError):
            next(stream)
    full_disk[0] = False
    assert path.read_bytes().endswith(b'{"dead_let')
    with pipe.open(**SKIP, dead_letters=path, resume=snapshot) as stream:
        list(stream)
    assert bad_of(path) == [("check", "1"), ("check", "4"), ("check", "7")]


def test_a_file_that_ends_before_the_snapshot_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, pipe = tmp_path / "bad.jsonl", sl.from_items(range(9)).map(check)
    with pipe.open(**SKIP, dead_letters=path) as stream:
        assert [next(stream) for _ in range(4)] == [0, 2, 3, 5]
        snapshot = stream.snapshot()
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (2, 1, 0):
        caplog.clear()
        path.write_bytes(b"".join(lines[:kept]))
        with pipe.open(**SKIP, dead_letters=path, resume=snapshot):
            said = [record.getMessage() for record in caplog.records if "before the snapshot" in record.getMessage()]
        assert len(said) == (kept < 2)
        assert all(
            f"check has skipped 2 items in shard 0, and the file has lines up to number {kept}." in x for x in said
        )


def test_a_disk_that_is_full_at_the_close_is_said_in_the_log(
    tmp_path: Path, full_disk: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with sl.from_items(range(9)).map(check).open(**SKIP, dead_letters=tmp_path / "bad.jsonl") as stream:
        assert [next(stream), next(stream)] == [0, 2]
        full_disk[0] = True
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "No space left on device" in caplog.records[0].getMessage()


def test_the_log_says_where_the_letters_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bad.jsonl"
    with sl.from_items(range(9)).map(check).open(**SKIP, dead_letters=path) as stream:
        list(stream)
    assert [record.getMessage() for record in caplog.records] == [f"3 items were skipped: check 3; see {path}"]
