"""Snapshots on disk: where they go, that they survive, and that what is wrong with them is said."""

import errno
import json
import os
import random
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamline.errors import SnapshotError
from streamline.snapshot.file_format import FORMAT_VERSION, encode
from streamline.snapshot.snapshot import Snapshot

FIRST_RANK = "rank-00000-of-00001.json"


def make(rank: int = 0, world_size: int = 1, num_shards: int = 3, mark: int = 0) -> Snapshot:
    """A small snapshot; `mark` tells one from another."""
    shards = range(rank, num_shards, world_size)
    workers = {
        str(shard): {"rows": {"file": f"ä{shard}.jsonl", "byte": 2**40 + shard}, "map": shard} for shard in shards
    }
    own = {"next_worker": 0, "produced": {str(shard): mark for shard in shards}, "replay": [], "workers": workers}
    return Snapshot(
        version=FORMAT_VERSION,
        fingerprint=[{"kind": "read_jsonl", "name": "rows", "options": {}}],
        listing=[{"path": "ä0.jsonl", "size": 500}],
        epoch=1,
        rank=rank,
        world_size=world_size,
        num_shards=num_shards,
        state={"merge": own, "take": 17},
        merge="merge",
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Where it is saved


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("snap.json", "snap.json"),
        ("a/b/snap.json", "a/b/snap.json"),
        ("ckpt", f"ckpt/{FIRST_RANK}"),
        ("ckpt/", f"ckpt/{FIRST_RANK}"),
        ("run.v2/", f"run.v2/{FIRST_RANK}"),
        ("a/b/ckpt", f"a/b/ckpt/{FIRST_RANK}"),
        ("there.json", f"there.json/{FIRST_RANK}"),
        ("there.d", f"there.d/{FIRST_RANK}"),
        ("", FIRST_RANK),
    ],
)
def test_a_path_means_a_file_or_a_directory(
    given: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").mkdir()
    (tmp_path / "there.d").mkdir()
    assert make().save(given) == Path(file)
    assert Snapshot.load(file) == Snapshot.load(given) == make()
    assert Snapshot.load(Path(given)) == make()


def test_a_path_that_could_mean_either_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"to be a file or a directory\? End it in '.json' or in '/'"):
        make().save(tmp_path / "model.ckpt")
    assert names(tmp_path) == []


def test_the_file_is_named_for_the_rank(tmp_path: Path) -> None:
    assert make(rank=3, world_size=8, num_shards=9).save(tmp_path).name == "rank-00003-of-00008.json"


def test_a_person_can_read_the_file(tmp_path: Path) -> None:
    text = make().save(tmp_path).read_text("ascii")
    assert json.loads(text).keys() == {"streamline_snapshot", "sha256", "body"}
    assert '  "epoch": 1,\n' in text
    assert re.findall(r'^     "\d": (\{"rows": .*\}),?$', text, re.MULTILINE) == [
        json.dumps(state) for state in make().worker_states
    ]


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = make().save(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_save_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    for mark in range(3):
        make(mark=mark).save(tmp_path)
        assert Snapshot.load(tmp_path) == make(mark=mark)
        assert names(tmp_path) == [FIRST_RANK]


# Saving that fails


@pytest.mark.parametrize(
    ("call", "code"),
    [("open", errno.EACCES), ("write", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EROFS)],
)
def test_a_disk_that_refuses_is_named_with_its_reason_and_the_old_snapshot_stays(
    call: str, code: int, tmp_path: Path
) -> None:
    make(mark=1).save(tmp_path)

    def refuse(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        reason = re.escape(f"{tmp_path}: {os.strerror(code)}; one that was there is still whole")
        with pytest.raises(SnapshotError, match=reason) as failure:
            make(mark=2).save(tmp_path)
    assert isinstance(failure.value.__cause__, OSError)
    assert names(tmp_path) == [FIRST_RANK]
    assert Snapshot.load(tmp_path) == make(mark=1)


NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Let root, who may write anywhere, be nobody for a while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_directory_without_permission_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as folder:  # nobody may not look into pytest's own
        path = Path(folder)
        make(mark=1).save(path)
        path.chmod(0o555)
        with unprivileged(), pytest.raises(SnapshotError, match=r"Permission denied"):
            make(mark=2).save(path)
        assert Snapshot.load(path) == make(mark=1)
        path.chmod(0o755)


def test_a_directory_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match=r"file/ckpt: Not a directory"):
        make().save(tmp_path / "file" / "ckpt")


SAVER = """
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from streamline.snapshot.snapshot import Snapshot

first = Snapshot.load(sys.argv[1])
for epoch in range(first.epoch + 1, 1_000_000):
    replace(first, epoch=epoch).save(sys.argv[1])
    print(epoch, flush=True)
"""


@pytest.mark.long
def test_kills_at_random_moments_never_lose_a_save_that_has_returned(tmp_path: Path) -> None:
    """A few hundred saves of a larger snapshot, 8 kills; what earlier ones left behind lies about."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    chance = random.Random(1)
    large = replace(make(), listing=[{"path": f"part-{n:05d}.jsonl", "size": n} for n in range(300)])
    large.save(tmp_path)
    for _ in range(8):
        command = [sys.executable, "-c", SAVER, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        returned = [int(process.stdout.readline()) for _ in range(chance.randrange(1, 60))][-1]
        process.kill()
        returned = max([returned, *map(int, process.communicate()[0].split())])
        saved = Snapshot.load(tmp_path)
        assert saved == replace(large, epoch=saved.epoch)
        assert saved.epoch in (returned, returned + 1)


# Files that are not what they should be


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return make().save(tmp_path / "snapshot.json")


def test_a_missing_file_is_an_error_unless_it_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    with pytest.raises(SnapshotError, match=rf"no snapshot at {path}: no such file or directory .*missing_ok=True"):
        Snapshot.load(path)
    assert Snapshot.load(path, missing_ok=True) is None


def test_a_missing_or_empty_directory_is_as_good_as_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"no file is named rank-\*-of-\*.json \(a first run: missing_ok=True\)"):
        Snapshot.load(tmp_path)
    assert Snapshot.load(tmp_path, missing_ok=True) is None
    assert Snapshot.load(tmp_path / "ckpt/", missing_ok=True) is None


def test_a_directory_with_other_names_in_it_shows_them(tmp_path: Path) -> None:
    make().save(tmp_path / "mine.json")
    with pytest.raises(SnapshotError, match=r"but mine.json: is it one of these\?"):
        Snapshot.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is no streamline snapshot"),
        (b'{"a": 1}', "is JSON, but no streamline snapshot"),
        (b'{"streamline_snapshot": 9}', "upgrade streamline"),
        (b'{"streamline_snapshot": 1}', "is damaged"),
        (b'{\n "streamline_snapshot": 1', "is cut short"),
    ],
)
@pytest.mark.parametrize("missing_ok", [False, True])
def test_a_bad_file_is_an_error_that_names_it_also_where_it_may_be_missing(
    content: bytes, message: str, missing_ok: bool, saved: Path
) -> None:
    saved.write_bytes(content)
    with pytest.raises(SnapshotError, match=rf"^{saved} {message}|^{saved} .*{message}"):
        Snapshot.load(saved, missing_ok=missing_ok)


def test_a_sound_file_with_another_content_is_an_error_that_names_it(saved: Path) -> None:
    saved.write_bytes(encode({**json.loads(make().to_json()), "rank": 7}))
    with pytest.raises(SnapshotError, match=rf"^{saved}: not a snapshot: rank 7 of 1"):
        Snapshot.load(saved)


def test_a_file_that_can_not_be_read_is_an_error(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", forbidden)
        with pytest.raises(SnapshotError, match=rf"can't read a snapshot from {saved}: Permission denied"):
            Snapshot.load(saved, missing_ok=True)


def test_a_pipe_is_an_error_and_its_writer_is_not_waited_for(saved: Path) -> None:
    saved.unlink()
    os.mkfifo(saved)
    with pytest.raises(SnapshotError, match=rf"{saved}: snapshot\.json is a named pipe, expected a regular file"):
        Snapshot.load(saved)


def test_a_path_through_a_file_is_an_error(saved: Path) -> None:
    with pytest.raises(SnapshotError, match=r"Not a directory"):
        Snapshot.load(saved / "ckpt", missing_ok=True)


# Many ranks


def save_ranks(directory: Path, world_size: int, ranks: list[int] | None = None, **changes: Any) -> None:
    for rank in range(world_size) if ranks is None else ranks:
        replace(make(rank, world_size, num_shards=12), **changes).save(directory)


def test_each_rank_gets_its_own(tmp_path: Path) -> None:
    save_ranks(tmp_path, 4)
    for rank in range(4):
        assert Snapshot.load(tmp_path, rank=rank) == make(rank, 4, num_shards=12)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (-1, r"no snapshot of rank -1: this one holds all of 4 ranks"),
        (4, r"no snapshot of rank 4: this one holds all of 4 ranks"),
    ],
)
def test_one_that_is_there_must_be_asked_for(rank: int | None, message: str, tmp_path: Path) -> None:
    save_ranks(tmp_path, 4)
    with pytest.raises(SnapshotError, match=message):
        Snapshot.load(tmp_path, rank=rank)


def test_without_a_rank_the_whole_job_is_loaded_and_each_rank_finds_its_part(tmp_path: Path) -> None:
    save_ranks(tmp_path, 4)
    job = Snapshot.load(tmp_path)
    assert (job.rank, job.world_size) == (None, 4)
    assert [job.part(rank) for rank in range(4)] == list(job.parts) == [make(rank, 4, 12) for rank in range(4)]
    assert list(job.shards) == list(range(12))
    assert [state["map"] for state in job.worker_states] == list(range(12))
    assert job.produced == [0] * 12
    assert repr(job) == "<Snapshot: epoch 1, 4 ranks, 0 items merged>"
    for part in job.parts:
        assert part.part(part.rank or 0) is part


@pytest.mark.parametrize("what", ["next_worker", "stages"])
def test_what_each_rank_has_of_its_own_a_job_has_not(what: str, tmp_path: Path) -> None:
    save_ranks(tmp_path, 4)
    with pytest.raises(SnapshotError, match=r"each of the 4 ranks has its own .*: ask snapshot\.part\(rank\)"):
        getattr(Snapshot.load(tmp_path), what)


def test_a_rank_that_a_snapshot_does_not_hold_is_an_error(tmp_path: Path) -> None:
    save_ranks(tmp_path, 2)
    with pytest.raises(SnapshotError, match=r"no snapshot of rank 2: this one holds all of 2 ranks"):
        Snapshot.load(tmp_path).part(2)
    with pytest.raises(SnapshotError, match=r"no snapshot of rank 0: this one holds rank 1 of 2 ranks"):
        make(1, 2).part(0)


def test_a_job_is_saved_as_it_was_loaded(tmp_path: Path) -> None:
    save_ranks(tmp_path / "a", 3)
    job = Snapshot.load(tmp_path / "a")
    assert job.save(tmp_path / "b/") == tmp_path / "b"
    assert names(tmp_path / "b") == names(tmp_path / "a")
    assert exactly(Snapshot.load(tmp_path / "b")) == exactly(job)


def exactly(job: Snapshot) -> list[str]:
    return [part.to_json() for part in job.parts]


def test_a_job_goes_into_no_single_file_and_no_single_text(tmp_path: Path) -> None:
    save_ranks(tmp_path / "a", 3)
    job = Snapshot.load(tmp_path / "a")
    with pytest.raises(SnapshotError, match=r"is one file, and there are 3 ranks: give a directory"):
        job.save(tmp_path / "b.json")
    with pytest.raises(SnapshotError, match=r"each snapshot\.part\(rank\)"):
        job.to_json()
    assert names(tmp_path) == ["a"]


def test_more_ranks_than_shards_are_a_job_too(tmp_path: Path) -> None:
    for rank in range(3):
        make(rank, 3, num_shards=2).save(tmp_path)
    job = Snapshot.load(tmp_path)
    assert job.produced == [0, 0]
    assert job.part(2).worker_states == []


def test_hashes_of_code_may_differ_between_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        entry = {**make().fingerprint[0], "code": {"fn": f"cpython-31{rank}-O0:{rank}"}}
        replace(make(rank, 2), fingerprint=[entry]).save(tmp_path)
    assert Snapshot.load(tmp_path).part(1).fingerprint[0]["code"] == {"fn": "cpython-311-O0:1"}


def test_a_file_of_another_rank_is_an_error(tmp_path: Path) -> None:
    path = make(2, 4).save(tmp_path / "mine.json")
    assert Snapshot.load(path) == Snapshot.load(path, rank=2) == make(2, 4)
    with pytest.raises(SnapshotError, match=r"no snapshot of rank 1: this one holds rank 2 of 4 ranks"):
        Snapshot.load(path, rank=1)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({6: [0, 2, 5]}, r"lacks the snapshots of some ranks: of 6 ranks, 1, 3, 4\."),
        ({100: [3]}, r"of 100 ranks, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10 and 89 more\."),
        ({3: [2], 2: [0]}, r"of 2 ranks, 1; of 3 ranks, 0, 1\."),
    ],
)
@pytest.mark.parametrize("missing_ok", [False, True])
def test_missing_ranks_are_named(saved: dict[int, list[int]], message: str, missing_ok: bool, tmp_path: Path) -> None:
    for world_size, ranks in saved.items():
        save_ranks(tmp_path, world_size, ranks)
    with pytest.raises(SnapshotError, match=message):
        Snapshot.load(tmp_path, rank=0, missing_ok=missing_ok)


def test_of_two_world_sizes_the_complete_one_is_taken(tmp_path: Path) -> None:
    save_ranks(tmp_path, 2)
    save_ranks(tmp_path, 3, [0, 1])
    assert Snapshot.load(tmp_path, rank=1) == make(1, 2, num_shards=12)


def test_two_complete_world_sizes_are_an_error_that_names_both(tmp_path: Path) -> None:
    save_ranks(tmp_path, 3)
    save_ranks(tmp_path, 2)
    with pytest.raises(SnapshotError, match=r"holds snapshots of 2 and of 3 ranks, each complete"):
        Snapshot.load(tmp_path, rank=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": 2}, r"ranks 0 and 1 don't belong together, they differ in epoch \(1 and 2\)"),
        ({"fingerprint": []}, r"differ in fingerprint: give"),
        ({"listing": None}, r"differ in listing: give"),
    ],
)
def test_ranks_of_different_runs_are_an_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_ranks(tmp_path, 3)
    save_ranks(tmp_path, 3, [1], **changes)
    with pytest.raises(SnapshotError, match=message):
        Snapshot.load(tmp_path, rank=0)


def test_ranks_of_different_shards_are_an_error(tmp_path: Path) -> None:
    save_ranks(tmp_path, 3)
    make(2, 3, num_shards=6).save(tmp_path)
    with pytest.raises(SnapshotError, match=r"ranks 0 and 2 .* differ in num_shards \(12 and 6\)"):
        Snapshot.load(tmp_path, rank=0)


def test_a_file_that_was_renamed_is_an_error(tmp_path: Path) -> None:
    save_ranks(tmp_path, 2)
    (tmp_path / "rank-00000-of-00002.json").rename(tmp_path / "rank-00001-of-00002.json")
    save_ranks(tmp_path, 2, [0])
    with pytest.raises(SnapshotError, match=r"as rank-00001-of-00002.json, and it is of rank 0 of 2: was"):
        Snapshot.load(tmp_path, rank=0)


def test_one_damaged_rank_fails_them_all(tmp_path: Path) -> None:
    save_ranks(tmp_path, 3)
    (tmp_path / "rank-00002-of-00003.json").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"rank-00002-of-00003.json is empty"):
        Snapshot.load(tmp_path, rank=0)


@pytest.mark.parametrize(
    "name",
    [
        ".streamline-0123456789abcdef.tmp",
        "rank-00000-of-00001.json.tmp",
        "rank-00000-of-00001.json~",
        "rank-0-of-2.json",
        "rank-00005-of-00002.json",
        "model.safetensors",
    ],
)
def test_other_files_in_a_directory_are_ignored(name: str, tmp_path: Path) -> None:
    make().save(tmp_path)
    (tmp_path / name).write_text("{")
    assert Snapshot.load(tmp_path) == make()
