"""The folder of the cache: whole or not there, bounded, shared, whatever is killed or damaged."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from streamline.errors import ReadError
from streamline.io.storage import object_cache_folder as cache_folder
from streamline.io.storage.object_cache_folder import FOLDER, TRAILER, CacheFolder, digest
from tests.laws.profile import examples

A, B, C = (digest(f"http://host/{name}", '"v1"') for name in "abc")


def keep(folder: CacheFolder, name: str, data: bytes) -> bool:
    """Put an object in, as the cache does."""
    part = folder.begin(name)
    if part is None:
        return False
    if not folder.fits(len(data)) or not folder.admit(len(data)):
        part.drop()
        return False
    part.write(0, data)
    part.keep(len(data))
    return True


def content(folder: CacheFolder, name: str) -> bytes | None:
    kept = folder.open(name)
    if kept is None:
        return None
    try:
        return kept.read(0, kept.size)
    finally:
        kept.close()


def names(folder: CacheFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def test_what_is_kept_is_there(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path))
    assert content(folder, A) is None
    assert keep(folder, A, b"hello")
    assert keep(folder, B, b"")
    assert (content(folder, A), content(folder, B)) == (b"hello", b"")
    assert content(CacheFolder(str(tmp_path)), A) == b"hello"


def test_another_version_is_another_object() -> None:
    assert len({digest("a", "b"), digest("ab", ""), digest("", "ab"), digest("a", "c")}) == 4


@pytest.mark.parametrize("url", ["http://h/../../etc/passwd", "/etc/passwd", "s3://b/..", "h\0x", "ü", "a" * 9999])
def test_no_url_names_a_file_outside(tmp_path: Path, url: str) -> None:
    folder = CacheFolder(str(tmp_path / "cache"))
    assert keep(folder, digest(url, '"../../v"'), b"data")
    assert [path.parent for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "cache" / FOLDER]


def test_a_part_is_never_served_and_goes_when_it_is_dropped(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path))
    part = folder.begin(A)
    assert part is not None
    part.write(0, b"half")
    assert content(folder, A) is None
    part.drop()
    part.drop()
    assert names(folder) == set()


def test_one_writes_an_object_and_others_do_not_wait(tmp_path: Path) -> None:
    first, second = CacheFolder(str(tmp_path)), CacheFolder(str(tmp_path))
    part = first.begin(A)
    assert part is not None
    assert second.begin(A) is None
    CacheFolder(str(tmp_path))  # one that opens it leaves it alone
    part.write(0, b"data")
    part.keep(4)
    assert second.begin(A) is None
    assert content(second, A) == b"data"
    assert names(first) == {f"{A}.object"}


def test_a_part_whose_writer_is_gone_is_removed_by_the_next_who_looks(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path))
    (folder.path / f"{A}.part").write_bytes(b"left")
    CacheFolder(str(tmp_path))
    assert names(folder) == set()


def test_a_part_whose_writer_is_gone_is_begun_anew(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path))
    (folder.path / f"{A}.part").write_bytes(b"left after, and longer")
    assert keep(folder, A, b"new")
    assert content(folder, A) == b"new"


def test_what_was_written_out_of_order_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    folder = CacheFolder(str(tmp_path))
    keep(folder, A, b"in order")
    assert not synced
    part = folder.begin(B)
    assert part is not None
    part.write(3, b"def")
    part.write(0, b"abc")
    part.keep(6)
    assert len(synced) == 1
    assert content(folder, B) == b"abcdef"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cut", range(TRAILER.size + 6))
def test_a_file_cut_anywhere_is_not_served(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    folder = CacheFolder(str(tmp_path))
    keep(folder, A, b"hello")
    path = folder.path / f"{A}.object"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut < len(whole) else whole + b"!")
    assert content(folder, A) is None
    assert "damaged" in caplog.text
    assert names(folder) == set()
    assert keep(folder, A, b"hello")
    assert content(folder, A) == b"hello"


def test_the_object_used_least_recently_goes_first(tmp_path: Path) -> None:
    data, limit = b"x" * 100, 400
    folder = CacheFolder(str(tmp_path), limit)
    for at, name in enumerate((A, B, C)):
        assert keep(folder, name, data)
        os.utime(folder.path / f"{name}.object", ns=(0, at))
    assert content(folder, A) == data  # used now
    assert keep(folder, digest("d", "d"), data)
    assert content(folder, B) is None
    assert content(folder, A) == data


def test_an_object_that_is_evicted_under_its_reader_stays_readable(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path), 200)
    keep(folder, A, b"x" * 100)
    kept = folder.open(A)
    assert kept is not None
    keep(folder, B, b"y" * 100)
    assert content(folder, A) is None
    assert kept.read(0, 100) == b"x" * 100
    kept.close()
    kept.close()


def test_an_object_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path), 1000)
    keep(folder, A, b"x" * 100)
    assert not keep(folder, B, b"y" * 1001)
    assert content(folder, A) is not None
    part = folder.begin(C)  # nor is one whose size nobody knows
    assert part is not None
    written = 0
    while folder.admit(100):
        part.write(written, b"z" * 100)
        written += 100
    part.drop()
    assert written <= 1000


def test_other_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path), 300)
    mine = [
        tmp_path / "thesis.tex",
        folder.path / "thesis.tex",
        folder.path / "x.part",
        folder.path / f"{A}.object.bak",
    ]
    for path in mine:
        path.write_bytes(b"x" * 1000)
    (folder.path / f"{C}.object").symlink_to(mine[0])
    assert keep(folder, A, b"x" * 100)
    assert keep(folder, B, b"x" * 200)
    assert all(path.exists() for path in mine)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadError, match=r"can't make .*file/objects-v1 for cache_dir=: Not a directory"):
        CacheFolder(str(tmp_path / "file"))


def planted(path: Path, kind: str) -> None:
    """Put something that is no file of this user where a file is looked for."""
    if kind == "a symbolic link":
        path.symlink_to(path.parent.parent / "victim")
    elif kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.write_bytes(b"data" + TRAILER.pack(cache_folder.MAGIC, 4))
        os.chown(path, 12345, -1)


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a directory", "belongs to user 12345"])
@pytest.mark.parametrize("end", ["object", "part"])
def test_what_others_have_planted_is_neither_followed_nor_waited_for_nor_read(
    tmp_path: Path, kind: str, end: str
) -> None:
    if kind.startswith("belongs") and os.geteuid():
        pytest.skip("only root can give a file away")
    victim, folder = tmp_path / "victim", CacheFolder(str(tmp_path))
    victim.write_bytes(b"precious")
    planted(folder.path / f"{A}.{end}", kind)
    with pytest.raises(
        ReadError, match=rf"objects-v1, of cache_dir=, has .*{A}\.{end} .*{kind}.*name (another|a) directory"
    ):
        folder.open(A)
    keep(folder, A, b"data")
    CacheFolder(str(tmp_path))
    assert victim.read_bytes() == b"precious"


def test_a_part_that_is_a_second_name_of_another_file_leaves_that_alone(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", CacheFolder(str(tmp_path))
    victim.write_bytes(b"precious")
    os.link(victim, folder.path / f"{A}.part")
    assert keep(folder, A, b"data")
    assert content(folder, A) == b"data"
    assert victim.read_bytes() == b"precious"


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    folder = CacheFolder(str(tmp_path))
    os.chown(folder.path, 12345, -1)
    with pytest.raises(ReadError, match=r"objects-v1 belongs to user 12345, .*name a folder of your own"):
        CacheFolder(str(tmp_path))
    stat = os.fstat

    def squashed(fd: int) -> Any:  # as of a server that gives root's files to another user
        return os.stat_result([*stat(fd)[:4], 12345, *stat(fd)[5:]])

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", squashed)
        CacheFolder(str(tmp_path))


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_a_full_disk_is_said_once_and_what_is_there_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CacheFolder(str(tmp_path))
    keep(folder, A, b"there")

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        part = folder.begin(B)
        if part is not None:
            with pytest.raises(OSError, match="No space left") as caught:
                part.write(0, b"data")
            folder.failed(caught.value)
            part.drop()
    assert folder.begin(C) is None
    folder.failed(OSError(errno.ENOSPC, "No space left on device"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "going on without keeping more" in caplog.text
    assert content(folder, A) == b"there"


KILLED = """
import os, signal, sys
from pathlib import Path
from streamline.io.storage import object_cache_folder as cache_folder
from streamline.io.storage.object_cache_folder import CacheFolder, digest

root, DATA = Path(sys.argv[1]), b"0123456789" * 5
NAMES = [digest(str(i), "v") for i in range(4)]
CALLS = ["open", "pwrite", "fsync", "close", "utime", "pread", "fstat"]

def content(folder, name):
    kept = folder.open(name)
    if kept is None:
        return None
    data = kept.read(0, kept.size)
    kept.close()
    return data

def work(directory):
    folder = CacheFolder(directory, 200)
    for name in NAMES + NAMES[:2]:
        content(folder, name)
        part = folder.begin(name)
        if part is not None and folder.admit(50):
            part.write(25, DATA[25:])
            part.write(0, DATA[:25])
            part.keep(50)

def child(directory, step):
    left = step
    def counted(fn):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return fn(*args, **kwargs)
        return call
    os.fsync = lambda fd: None  # takes long, and a kill doesn't need it
    for call in CALLS:
        setattr(os, call, counted(getattr(os, call)))
    Path.rename, Path.unlink = counted(Path.rename), counted(Path.unlink)
    work(directory)
    os._exit(7)

step = 0
while True:
    directory = str(root / str(step))
    pid = os.fork()
    if not pid:
        child(directory, step)
    _, status = os.waitpid(pid, 0)
    made = list(Path(directory).rglob("*.object"))
    folder = CacheFolder(directory, 200)
    assert not list(folder.path.glob("*.part")), f"step {step}: a part is left"
    for name in NAMES:
        assert content(folder, name) in (None, DATA), f"step {step}: half an object"
    work(directory)
    assert content(folder, NAMES[1]) == DATA, f"step {step}: it doesn't recover"
    assert sum(path.stat().st_size for path in folder.path.iterdir()) <= 200
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 7
        break
    step += 1
print(step)
"""


@pytest.mark.long
def test_killed_before_any_call_to_the_system_it_serves_no_half_object_and_recovers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60  # so many places there were


HAMMER = """
import random, sys
from contextlib import suppress
from streamline.io.storage.object_cache_folder import CacheFolder, digest

folder, rng = CacheFolder(sys.argv[1], 40_000), random.Random(int(sys.argv[2]))
for _ in range(300):
    at = rng.randrange(30)
    name, data = digest(str(at), "v"), bytes([at]) * (1000 + 100 * at)
    kept = folder.open(name)
    if kept is not None:
        assert kept.size == len(data)
        assert kept.read(0, kept.size) == data
        kept.close()
    elif (part := folder.begin(name)) is not None:
        if folder.admit(len(data)):
            part.write(0, data)
            part.keep(len(data)) if rng.random() < 0.9 else part.drop()
        else:
            part.drop()
used = 0
for path in folder.path.iterdir():
    with suppress(FileNotFoundError):  # another one has just finished it, or made room
        used += path.stat().st_size
assert used <= 40_000, used
"""


@pytest.mark.long
def test_many_processes_share_a_folder(tmp_path: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", HAMMER, str(tmp_path), str(seed)], stderr=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    for process in running:
        _, said = process.communicate(timeout=200)
        assert (process.returncode, said) == (0, "")
    folder = CacheFolder(str(tmp_path), 40_000)
    assert not list(folder.path.glob("*.part"))
    assert list(folder.path.glob("*.object"))


class FolderMachine(RuleBasedStateMachine):
    """Two processes' views of a folder against a plain dict: what is served is what was put in."""

    limit = 1000

    @initialize()
    def make(self) -> None:
        self.root = Path(os.environ["PYTEST_CACHE_ROOT"]) / str(id(self))
        self.folders = [CacheFolder(str(self.root), self.limit) for _ in range(2)]
        self.parts: dict[str, tuple[Any, bytes]] = {}

    @rule(who=st.integers(0, 1), which=st.integers(0, 5), size=st.integers(0, 400))
    def begin(self, who: int, which: int, size: int) -> None:
        name, data = digest(str(which), str(size // 200)), bytes([which + 1]) * (size // 200 * 150)
        part = self.folders[who].begin(name)
        if name in self.parts:
            assert part is None
        elif part is not None:
            self.parts[name] = (part, data)
            half = len(data) // 2
            if self.folders[who].admit(len(data)):
                part.write(half, data[half:])
                part.write(0, data[:half])
            else:
                self.parts.pop(name)[0].drop()

    @rule(finish=st.booleans())
    def end(self, finish: bool) -> None:
        for name, (part, data) in list(self.parts.items())[:1]:
            del self.parts[name]
            if finish:
                part.keep(len(data))
                assert content(self.folders[0], name) == data
            else:
                part.drop()

    @rule(which=st.integers(0, 9), keep=st.integers(0, 200))
    def damage(self, which: int, keep: int) -> None:
        paths = sorted(self.folders[0].path.glob("*.object"))
        if paths:
            path = paths[which % len(paths)]
            path.write_bytes(path.read_bytes()[:-1][:keep])

    @rule()
    def reopen(self) -> None:
        self.folders[1] = CacheFolder(str(self.root), self.limit)

    @rule(who=st.integers(0, 1), which=st.integers(0, 5), version=st.integers(0, 2))
    def look(self, who: int, which: int, version: int) -> None:
        found = content(self.folders[who], digest(str(which), str(version)))
        assert found in (None, bytes([which + 1]) * (version * 150))

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "root"):
            used = sum(path.stat().st_size for path in self.folders[0].path.iterdir())
            assert used <= self.limit + self.limit // cache_folder.LOOKS_PER_FOLDER

    def teardown(self) -> None:
        for part, _ in getattr(self, "parts", {}).values():
            part.drop()


def test_any_order_of_calls_serves_what_was_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # takes long, and only a power cut needs it
    run_state_machine_as_test(FolderMachine, settings=cast(Any, examples(25)))
