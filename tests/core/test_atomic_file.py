"""Files that are whole or not there: a failure, an interrupt and a kill at every system call."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from streamline.core import atomic_file
from streamline.core.atomic_file import UnsafeFileError, read_own, replace_file, write_parts

OLD, NEW = b"old" * 1000, b"new" * 2000
STEPS = ["open", "write", "fsync", "close", "replace", "close", "open", "fsync", "close"]
RENAME = STEPS.index("replace")


class Disk:
    """Stands before the system calls of a save, and fails one of them.

    Attributes:
      calls: the names of those made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._fail_at = fail_at
        self._error = error
        for name in set(STEPS):
            monkeypatch.setattr(os, name, self._checked(name, getattr(os, name)))
        close = self._checked("close", FileIO.close)

        class File(FileIO):
            def close(self) -> None:
                None if self.closed else close(self)

        monkeypatch.setattr(atomic_file, "FileIO", File)

    def _checked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 != self._fail_at or self._error is None:
                return call(*args)
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])  # a disk fills in the middle of a write
            if name == "close":
                call(*args)
            raise self._error

        return checked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.json"


def content(path: Path) -> bytes:
    """Return what the file holds, and see that nothing lies beside it."""
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    return path.read_bytes()


def open_files() -> set[Path]:
    return set(Path("/dev/fd").iterdir())


def test_the_file_is_on_disk_before_it_is_renamed_and_its_name_afterwards(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    replace_file(path, NEW)
    assert disk.calls == STEPS
    assert content(path) == NEW


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_failure_at_any_step_is_raised_and_leaves_a_whole_file_alone(step: int, code: int, path: Path) -> None:
    replace_file(path, OLD)
    before = open_files()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, step, OSError(code, os.strerror(code)))
        with pytest.raises(OSError, match=os.strerror(code)) as failure:
            replace_file(path, NEW)
    assert failure.value.errno == code
    assert disk.calls[: step + 1] == STEPS[: step + 1]
    assert content(path) == (OLD if step <= RENAME else NEW)
    assert open_files() == before


@pytest.mark.parametrize("step", range(RENAME + 1))
def test_a_first_file_that_fails_leaves_nothing(step: int, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, step, OSError(errno.ENOSPC, "full"))
        with pytest.raises(OSError, match="full"):
            replace_file(path, NEW)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_an_interrupt_at_any_step_leaves_a_whole_file_alone(step: int, path: Path) -> None:
    replace_file(path, OLD)
    before = open_files()
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, step, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            replace_file(path, NEW)
    assert content(path) == (OLD if step <= RENAME else NEW)
    assert open_files() == before


def test_a_failure_comes_out_even_if_the_temporary_can_not_be_removed(path: Path) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.EROFS, "read-only by now")

    replace_file(path, OLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", broken)
        Disk(patch, RENAME, OSError(errno.EIO, "the first failure"))
        with pytest.raises(OSError, match="the first failure"):
            replace_file(path, NEW)
    assert path.read_bytes() == OLD
    left = [other.name for other in path.parent.iterdir() if other != path]
    assert [(name[0], name[-4:]) for name in left] == [(".", ".tmp")]


def test_a_write_that_took_only_a_part_is_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    replace_file(path, NEW)
    assert content(path) == NEW


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_can_not_sync_directories_will_do(code: int, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, STEPS.index("fsync", RENAME), OSError(code, "no"))
        replace_file(path, NEW)
    assert content(path) == NEW


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let the kernel itself refuse to write beyond `size_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_a_part_and_then_no_more_leaves_the_old_file(path: Path) -> None:
    replace_file(path, OLD)
    with largest_file(300), pytest.raises(OSError, match="File too large"):
        replace_file(path, NEW)
    assert content(path) == OLD


def test_missing_directories_are_made_and_each_name_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync = atomic_file.sync_directory

    def noted(path: Path) -> None:
        synced.append(path)
        sync(path)

    monkeypatch.setattr(atomic_file, "sync_directory", noted)
    replace_file(tmp_path / "a" / "b" / "file.json", NEW)
    assert synced == [tmp_path / "a", tmp_path, tmp_path / "a" / "b"]


def test_a_link_is_replaced_not_what_it_points_to(tmp_path: Path) -> None:
    target, link = tmp_path / "step-1.json", tmp_path / "latest.json"
    target.write_bytes(OLD)
    link.symlink_to(target)
    replace_file(link, NEW)
    assert (target.read_bytes(), link.read_bytes()) == (OLD, NEW)


KILLED = """
import os, signal, sys
from io import FileIO
from pathlib import Path
from streamline.core import atomic_file

calls = kill_at = 0

def counted(name, call):
    def step(*args):
        global calls
        calls += 1
        if calls - 1 == kill_at:
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args)
    return step

for name in ("open", "write", "fsync", "close", "replace"):
    setattr(os, name, counted(name, getattr(os, name)))

class File(FileIO):
    def close(self, close=counted("close", FileIO.close)):
        None if self.closed else close(self)

atomic_file.FileIO = File

for kill_at, path in enumerate(sys.argv[1:]):  # each in a copy of this process, which starts sooner
    if not (child := os.fork()):
        atomic_file.replace_file(Path(path), b"new" * 2000)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files that were to be replaced, each in a folder of its own, by a process that was killed at this step."""
    paths = [tmp_path_factory.mktemp("killed") / "file.json" for _ in STEPS]
    for path in paths:
        replace_file(path, OLD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", KILLED, *map(str, paths)], env=environment, timeout=200, check=True)
    return paths


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_kill_at_any_step_leaves_a_whole_file(step: int, killed: list[Path]) -> None:
    path = killed[step]
    assert path.read_bytes() == (OLD if step <= RENAME else NEW)
    left = [other.name for other in path.parent.iterdir() if other != path]
    assert len(left) == (0 < step <= RENAME)
    replace_file(path.with_name("another.json"), NEW)
    path.with_name("another.json").unlink()
    assert [other.name for other in path.parent.iterdir() if other != path] == left
    replace_file(path, NEW)
    assert content(path) == NEW


def test_what_a_kill_has_left_is_removed_by_the_next_write_of_the_same_family(path: Path) -> None:
    left, file, lock = atomic_file._new(path.parent, atomic_file._begin("blocks"))
    file.close()
    write_parts(path, [NEW], "others")
    write_parts(path, [NEW], "blocks")
    assert left.exists()  # somebody is writing it
    assert lock is not None
    lock.close()  # as a kill does
    write_parts(path, [NEW], "others")
    assert left.exists()
    write_parts(path, [NEW], "blocks")
    assert content(path) == NEW


def test_a_temporary_being_written_is_kept_by_another_save_of_the_same_file(path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield NEW
        replace_file(path, OLD)
        assert path.read_bytes() == OLD
        yield NEW

    write_parts(path, parts())
    assert content(path) == 2 * NEW


def test_a_lock_is_free_although_a_starting_child_has_a_copy_of_it(path: Path) -> None:
    """Between fork and exec a child has all descriptors of its parent."""
    lock = atomic_file.lock_file(path)
    assert lock is not None
    copy = os.dup(lock)
    assert atomic_file.lock_file(path) is None
    atomic_file.free_lock(lock)
    again = atomic_file.lock_file(path)
    assert again is not None
    atomic_file.free_lock(again)
    os.close(copy)


def test_without_locks_a_file_is_written_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    replace_file(path, NEW)
    assert content(path) == NEW


def test_in_a_directory_that_others_write_to_only_own_files_are_opened(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    path = tmp_path / "file"
    path.write_bytes(OLD)
    os.chown(path, 12345, -1)
    assert read_own(path) == OLD  # root, who may write here alone, has put it there
    tmp_path.chmod(0o1777)
    with pytest.raises(UnsafeFileError, match="file belongs to user 12345, and this process is of user 0: name a dir"):
        read_own(path)
    os.chown(path, 0, -1)
    assert read_own(path) == OLD
