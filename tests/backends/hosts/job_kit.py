"""Jobs of several rank processes on this machine, for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.backends.hosts.shared_rank import SHARDS

PROGRAM = Path(__file__).with_name("shared_rank.py")


class RankForks:
    """A process that forks the ranks of all jobs: they cost the imports of one. See `shared_rank.forked`."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, os.fspath(PROGRAM), str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def start(self, environ: dict[str, str], stdin: int, stdout: int) -> int:
        """Return the pid of another rank, which has this environment."""
        socket.send_fds(self._orders, [json.dumps(environ).encode()], [stdin, stdout])
        return int(self._orders.recv(64))

    def wait(self, pid: int) -> int:
        """Return the exit code of a rank that ends."""
        self._orders.send(str(pid).encode())
        return int(self._orders.recv(64))

    def close(self) -> None:
        self._orders.close()
        assert self._process.wait() == 0


class RankProcess:
    """A rank; each method of `RankProgram` is one here, by `do`."""

    def __init__(self, forks: RankForks, environ: dict[str, str]) -> None:
        self.first: list[Any] = []
        stdin, asking = os.pipe()
        answering, stdout = os.pipe()
        self._forks = forks
        self._asking, self._answering = os.fdopen(asking, "w"), os.fdopen(answering)
        self._pid = forks.start(environ, stdin, stdout)
        self._code: int | None = None
        os.close(stdin)
        os.close(stdout)

    def ask(self, method: str, **arguments: Any) -> None:
        """Send a command, without waiting for its answer."""
        print(json.dumps([method, arguments]), file=self._asking, flush=True)

    def answer(self) -> Any:
        """Return the answer to a command; AssertionError: it has failed."""
        answer = json.loads(self._answering.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def do(self, method: str, **arguments: Any) -> Any:
        self.ask(method, **arguments)
        return self.answer()

    def open(self, pipe: str = "items", name: str = "s", **options: Any) -> None:
        options.setdefault("backend", {"shared": "node"})
        self.do("open", name=name, pipe=pipe, **options)

    def take(self, items: int | None = None, name: str = "s", **options: Any) -> list[Any]:
        taken: list[Any] = self.do("take", name=name, items=items, **options)
        return taken

    def hosts(self) -> list[int]:
        pids: list[int] = self.do("hosts", name="s")
        return pids

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)
        if number == signal.SIGKILL:
            self._wait()

    def end(self) -> int:
        """Let it end, with all that it has open."""
        self._asking.close()
        return self._wait()

    def close(self) -> None:
        if self._code is None:
            self.send_signal(signal.SIGKILL)
        self._asking.close()
        self._answering.close()

    def _wait(self) -> int:
        self._code = self._forks.wait(self._pid)
        return self._code


class RankJob:
    """The ranks of one job, and what they have read.

    Attributes:
      directory: where they meet.
    """

    def __init__(self, forks: RankForks, folder: Path, **environ: str) -> None:
        self.directory = folder / "job"
        self._reads = folder / "reads"
        self._environ = {**os.environ, "STREAMLINE_JOB": os.fspath(self.directory), "READS": os.fspath(self._reads)}
        self._environ.update(environ)
        self._forks = forks
        self._ranks: list[RankProcess] = []
        self._hosts: set[int] = set()

    def start(self, count: int = 1) -> list[RankProcess]:
        ranks = [RankProcess(self._forks, self._environ) for _ in range(count)]
        self._ranks += ranks
        return ranks

    def opened(self, count: int, pipe: str = "items", **options: Any) -> list[RankProcess]:
        """Start ranks that open the same, of which the first owns the hosts; each takes an item of each shard.

        So each has joined all workers before another one can have ended.
        """
        ranks = self.start(count)
        for rank in ranks:
            rank.open(pipe, **options)
            rank.first = rank.take(SHARDS)
            self._hosts.update(rank.hosts())
        return ranks

    @property
    def reads(self) -> Counter[int]:
        """How often each item was made."""
        return Counter(map(int, self._reads.read_text().split())) if self._reads.exists() else Counter()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def check_nothing_left(self, seconds: float = 60.0) -> None:
        """Insist that no host lives, and nothing is in the job's directory."""
        deadline = time.monotonic() + seconds
        while left := [pid for pid in self._hosts if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"hosts are left: {left}"
            time.sleep(0.01)
        assert not self.directory.exists() or not list(self.directory.iterdir())


StartJob = Callable[..., AbstractContextManager[RankJob]]
"""The fixture `job`: `running`, of the forks of this session."""


@contextmanager
def running(forks: RankForks, folder: Path, **environ: str) -> Iterator[RankJob]:
    """Yield a job; its processes are gone afterwards."""
    made = RankJob(forks, folder, **environ)
    try:
        yield made
    finally:
        made.close()


def rest_of(*ranks: RankProcess, **options: Any) -> list[list[Any]]:
    """Let ranks read on to the end at the same time; return all that each of them has read."""
    for rank in ranks:
        rank.ask("take", name="s", **options)
    return [rank.first + rank.answer() for rank in ranks]


def end(made: RankJob, *ranks: RankProcess) -> None:
    for rank in ranks:
        assert rank.end() == 0
    made.check_nothing_left()
