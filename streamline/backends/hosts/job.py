"""The directory in which the processes of one job on one machine find each other.

A job is, in this order:

1. what `STREAMLINE_JOB` says; with a "/" in it, it is the directory itself;
2. a run of Ray Train, by its name and its driver;
3. a run of torchrun, by its id and its master's address;
4. a SLURM step, unless Ray was started in it, whose processes may be of several jobs;
5. the processes of one `MASTER_ADDR` and `MASTER_PORT`.

Else nothing says which processes belong together, and this one shares with none.

The directory is this user's alone: a symbolic link, one of another user, or one that others may write to or look into
is refused. In it each kind of backend has a socket, the key for it, and a lock, held for the moment in which a process
connects, or finds that nothing listens and takes over. The last process removes it all. What a job has left whose
processes were all killed at once, the next one of its name uses again, or the next one of another name removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path

from streamline.backends.network.handshake import read_key
from streamline.core.atomic_file import is_open_as, open_own
from streamline.errors import HostError
from streamline.sharding.ranks import ray_train_context

logger = logging.getLogger("streamline.hosts")

NAMES = (
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of launchers, of which all must be set; a static run of torchrun has the id "none"."""

MOST_PATH = 100
"""Bytes of a path of a Unix socket; Linux takes 107, macOS 103."""


def in_a_job(environ: Mapping[str, str]) -> bool:
    """Return whether anything says which processes are of one job; else the log says so, once."""
    if environ.get("STREAMLINE_JOB") or _launched_as(environ):
        return True
    _say_alone()
    return False


@cache
def _say_alone() -> None:
    logger.info(
        'shared="node": nothing says which processes are of one job, so this one shares with none: start them with '
        "torchrun, srun or Ray Train, or set STREAMLINE_JOB to the same name in each"
    )


def _launched_as(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of the launcher, and what they say; none, if there is none."""
    if run := _ray_train_run():
        return run
    started_by_ray = "RAY_RAYLET_PID" in environ
    known = [names for names in NAMES if not (started_by_ray and names[0].startswith("SLURM"))]
    found: Sequence[str] = next((names for names in known if all(environ.get(name) for name in names)), ())
    return [part for name in found for part in (name, environ[name])]


def _ray_train_run() -> list[str]:
    """Return what all workers of a trainer have in common; nothing, if this process is none of them."""
    context = ray_train_context()
    if context is None:
        return []
    import ray

    return ["Ray Train", str(context.get_experiment_name()), str(ray.get_runtime_context().get_job_id())]


def job_directory(environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the directory of this process's job, and whether the user has named it.

    Raises:
      HostError: `STREAMLINE_JOB` is a path, but not from the root on.
    """
    given = environ.get("STREAMLINE_JOB", "")
    if "/" in given:
        if not given.startswith("/"):
            raise HostError(f"STREAMLINE_JOB is a name, or a path from the root on, got {given!r}")
        return Path(given), True
    name = ["STREAMLINE_JOB", given] if given else _launched_as(environ)
    digest = hashlib.sha256("\0".join(name).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"{_prefix()}{digest}"), False


def _prefix() -> str:
    return f"streamline-{os.getuid()}-"


def _machine() -> str:
    """Return how the names of this machine's files begin: the directory may be on a file server."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:5]


def remove_dead_jobs() -> None:
    """Remove what other jobs of this user on this machine have left, if their processes were killed.

    Not those that were given a path, which nothing lists.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        for lock in directory.glob(f"{_machine()}*.lock"):
            with suppress(OSError, HostError):  # it is in use, or unsafe
                JobDirectory.of_lock(lock).remove_if_dead(wait=False)
        with suppress(OSError):  # something else is in it
            directory.rmdir()


class JobDirectory:
    """One kind of backend of a job on this machine; `kind`: those whose hosts can be shared have the same."""

    def __init__(self, kind: str, environ: Mapping[str, str]) -> None:
        directory, given = job_directory(environ)
        self._set(directory, _machine() + hashlib.sha256(kind.encode()).hexdigest()[:5], given=given)

    @classmethod
    def of_lock(cls, lock: Path) -> JobDirectory:
        """Return the one whose lock a file is."""
        job = cls.__new__(cls)
        job._set(lock.parent, lock.stem, given=False)
        return job

    def _set(self, directory: Path, stem: str, *, given: bool) -> None:
        self.directory, self._given = directory, given
        self.socket = self.directory / f"{stem}.sock"
        self._key, self._lock = self.directory / f"{stem}.key", self.directory / f"{stem}.lock"
        if len(os.fsencode(self.socket)) > MOST_PATH:
            raise HostError(
                f"{self.directory} is too long a path for a socket: set STREAMLINE_JOB, or TMPDIR, to a shorter one"
            )

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Make the directory, if it isn't there, and hold its lock: for moments.

        Raises:
          HostError: it is unsafe. BlockingIOError: another process has the lock, if this one doesn't wait.
        """
        descriptor = self._take_lock(fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            os.close(descriptor)

    def new_key(self) -> bytes:
        """Remove what a dead process has left, and return a new key, written for others; under the lock."""
        self.clear()
        with FileIO(open_own(self._key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_hex(32).encode())
        return self.key()

    def key(self) -> bytes:
        """Return the key of the process that listens; `HostError`: it can't be read, or isn't one."""
        return read_key(self._key)

    def connect(self, *, wait: bool = True) -> socket.socket | None:
        """Return a connection to the process that listens; None: none does. Under the lock.

        Raises:
          BlockingIOError: one does, but is stopped, and has no room for a connection, if this one doesn't wait.
        """
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(wait)
        try:
            sock.connect(os.fspath(self.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def clear(self) -> None:
        """Remove the socket and the key; under the lock."""
        for path in (self.socket, self._key):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all that is there of this kind, and the directory if nothing else is in it; under the lock."""
        self.clear()
        self._lock.unlink(missing_ok=True)  # a process that waits for it sees that this file is gone
        if not self._given:
            with suppress(OSError):  # another kind is in it
                self.directory.rmdir()

    def remove_if_dead(self, *, wait: bool = True) -> None:
        """Remove all, if no process listens; raises what `locked` and `connect` do."""
        with self.locked(wait=wait):
            sock = self.connect(wait=wait)
            if sock is None:
                self.remove()
            else:
                sock.close()

    def _take_lock(self, operation: int) -> int:
        while True:
            self._check_directory()
            try:
                descriptor = open_own(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # removed just now, by the last process that was there
                continue
            except OSError as error:
                raise HostError(f"{self._lock} can't be used: {error.strerror or error}") from error
            try:
                fcntl.flock(descriptor, operation)
                if is_open_as(descriptor, self._lock):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _check_directory(self) -> None:
        """See to it that the directory is there and is this user's alone."""
        try:
            with suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
            status = self.directory.lstat()
        except FileNotFoundError as error:
            if self.directory.parent.is_dir():
                return  # removed just now: the lock can't be made, and all begins anew
            raise HostError(f"there is no {self.directory.parent}, which the job's directory is made in") from error
        except OSError as error:
            raise HostError(f"the job's directory can't be made: {error.strerror}: {self.directory}") from error
        wrong = None
        if not stat.S_ISDIR(status.st_mode):
            wrong = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is no directory"
        elif status.st_uid != os.getuid():
            wrong = f"belongs to user {status.st_uid}, and this process is of user {os.getuid()}"
        elif status.st_mode & 0o077:
            wrong = f"may be used by others (mode {stat.S_IMODE(status.st_mode):o}, expected 700)"
        if wrong is not None:
            raise HostError(
                f"{self.directory} {wrong}: the processes of a job meet in a directory of their user's alone. Remove "
                "it, or set STREAMLINE_JOB to another name or path"
            )
