"""The directory of a job: what it is called, whose it must be, and what is left of it."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamline.backends.hosts import job
from streamline.backends.hosts.job import JobDirectory, in_a_job, job_directory
from streamline.errors import HostError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def job_at(path: Path) -> JobDirectory:
    return JobDirectory("kind", {"STREAMLINE_JOB": os.fspath(path)})


def test_ranks_of_one_job_have_one_directory_and_other_jobs_another() -> None:
    jobs = [
        TORCHRUN,
        {**TORCHRUN, "MASTER_PORT": "29501"},
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "7"},
        SLURM,
        {**SLURM, "SLURM_STEP_ID": "1"},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"STREAMLINE_JOB": "7"},
    ]
    assert len({job_directory(environ)[0] for environ in jobs}) == len(jobs)
    for environ in jobs:
        assert job_directory({**environ, "RANK": "0"}) == job_directory({**environ, "RANK": "1"})
        assert not job_directory(environ)[1]
    assert job_directory({**TORCHRUN, **SLURM}) == job_directory(TORCHRUN)
    assert job_directory({**TORCHRUN, "STREAMLINE_JOB": "7"}) == job_directory({"STREAMLINE_JOB": "7"})


def test_a_path_is_the_directory_itself(tmp_path: Path) -> None:
    assert job_directory({"STREAMLINE_JOB": os.fspath(tmp_path / "here")}) == (tmp_path / "here", True)
    with pytest.raises(HostError, match=r"a name, or a path from the root on, got '\./here'"):
        job_directory({"STREAMLINE_JOB": "./here"})


def test_without_a_job_a_process_shares_with_none(caplog: pytest.LogCaptureFixture) -> None:
    job._say_alone.cache_clear()
    with caplog.at_level("INFO", "streamline.hosts"):
        assert not in_a_job({"RANK": "0", "MASTER_ADDR": "node0", "SLURM_JOB_ID": "7"})
        assert not in_a_job({**SLURM, "RAY_RAYLET_PID": "9"})  # Ray was started in that step
        assert not in_a_job({})
    assert [record.getMessage().partition(", so")[0] for record in caplog.records] == [
        'shared="node": nothing says which processes are of one job'
    ]
    for environ in (TORCHRUN, SLURM, {"STREAMLINE_JOB": "7"}):
        assert in_a_job(environ)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: folder)
        yield Path(folder)


def test_the_directory_is_made_for_this_user_and_removed_whole(temporary: Path) -> None:
    made = JobDirectory("kind", {"STREAMLINE_JOB": "name"})
    with made.locked():
        key = made.new_key()
        assert len(key) == 64
        assert made.key() == key
        assert stat.S_IMODE(made.directory.stat().st_mode) == 0o700
        assert [path for path in made.directory.iterdir() if path.stat().st_mode & 0o077] == []
        made.remove()
    assert not list(temporary.iterdir())


def test_another_kind_of_backend_in_it_stays(temporary: Path) -> None:
    one, two = (JobDirectory(kind, {"STREAMLINE_JOB": "name"}) for kind in ("one", "two"))
    assert one.directory == two.directory
    with one.locked(), two.locked():  # neither waits for the other
        one.new_key()
        two.new_key()
        one.remove()
        assert two.key()
        two.remove()
    assert not list(temporary.iterdir())


def left_by_a_dead_process(name: str, kind: str = "kind") -> JobDirectory:
    made = JobDirectory(kind, {"STREAMLINE_JOB": name})
    with made.locked(), socket.socket(socket.AF_UNIX) as server:
        made.new_key()
        server.bind(os.fspath(made.socket))
    return made


def test_what_dead_jobs_have_left_is_removed_and_what_others_use_stays(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_dead_process("dead")
    left_by_a_dead_process("dead", "another kind")
    locked, listening, half = (left_by_a_dead_process(name) for name in ("locked", "listening", "half"))
    left_by_a_dead_process("half", "another kind")
    half.socket.unlink()
    listening.socket.unlink()
    (temporary / f"streamline-{os.getuid()}-made just now").mkdir()
    monkeypatch.setattr(socket, "gethostname", lambda: "another machine")
    elsewhere = left_by_a_dead_process("elsewhere")
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: os.fspath(temporary))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as waiting, locked.locked():
        server.bind(os.fspath(listening.socket))
        server.listen(0)
        waiting.connect(os.fspath(listening.socket))  # it is stopped: there is no room for another
        job.remove_dead_jobs()
        assert set(temporary.iterdir()) == {at.directory for at in (locked, listening, elsewhere)}
        assert all(len(list(at.directory.iterdir())) == 3 for at in (locked, listening, elsewhere))


def test_a_link_in_the_place_of_a_dead_jobs_directory_is_left_alone(temporary: Path) -> None:
    precious = left_by_a_dead_process("job").directory.rename(temporary / "precious")
    (temporary / f"streamline-{os.getuid()}-link").symlink_to(precious)
    job.remove_dead_jobs()
    assert len(list(precious.iterdir())) == 3


@pytest.mark.parametrize("unsafe", ["link", "file", "open", "foreign"])
def test_a_directory_that_is_not_this_users_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsafe: str
) -> None:
    made, expected = job_at(tmp_path / "job"), ""
    if unsafe == "link":
        made.directory.symlink_to(tmp_path)
        expected = "is a symbolic link"
    elif unsafe == "file":
        made.directory.touch()
        expected = "is no directory"
    elif unsafe == "open":
        made.directory.mkdir()
        made.directory.chmod(0o750)
        expected = r"may be used by others \(mode 750, expected 700\)"
    else:
        made.directory.mkdir(mode=0o700)
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        expected = f"belongs to user {other - 1}, and this process is of user {other}"
    before = sorted(tmp_path.iterdir())
    with (
        pytest.raises(HostError, match=f"job {expected}: .* set STREAMLINE_JOB to another name or path"),
        made.locked(),
    ):
        raise AssertionError("it was used")
    assert sorted(tmp_path.iterdir()) == before


def test_a_lock_or_key_that_is_a_link_is_refused(tmp_path: Path) -> None:
    made, precious = job_at(tmp_path / "job"), tmp_path / "precious"
    precious.touch()
    with made.locked():
        made.new_key()
        made.remove()
    (lock,) = {path.with_suffix(".lock") for path in [made.socket]}
    lock.symlink_to(precious)
    with pytest.raises(HostError, match=r"\.lock can't be used"), made.locked():
        raise AssertionError("it was used")


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    made, expected = (
        job_at(tmp_path / "absent" / "job"),
        "there is no [^ ]*/absent, which the job's directory is made in",
    )
    with pytest.raises(HostError, match=expected), made.locked():
        raise AssertionError("it was used")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="too long a path for a socket: set STREAMLINE_JOB, or TMPDIR, to a shorter"):
        job_at(tmp_path / ("long" * 30))


def test_a_stale_socket_is_no_process_that_listens(tmp_path: Path) -> None:
    made = job_at(tmp_path / "job")
    with made.locked():
        assert made.connect() is None
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.fspath(made.socket))
            server.listen()
            found = made.connect()
            assert found is not None
            found.close()
        assert made.connect() is None
        assert made.socket.exists()
    made.remove_if_dead()
    assert not list(made.directory.iterdir())


def test_a_lock_that_is_removed_while_another_waits_for_it_is_made_anew(tmp_path: Path) -> None:
    """The one that waits must not go on with a file that has no name: a third would find none, and go on, too."""
    made, waiting, went_on = job_at(tmp_path / "job"), threading.Event(), threading.Event()
    flock = fcntl.flock

    def noted(descriptor: int, operation: int) -> None:
        waiting.set()
        flock(descriptor, operation)

    def wait() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fcntl, "flock", noted)
            with made.locked():
                assert made.directory.joinpath(made.socket.with_suffix(".lock").name).exists()
                went_on.set()

    with made.locked():
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        made.remove()
    thread.join()
    assert went_on.is_set()
