"""A host that is a process, as runnings see it: started at the first link, and started anew when it has died."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from streamline.border.link import Link
from streamline.border.wire import SocketLink
from streamline.core.counters import HostKind
from streamline.errors import ClosedError
from streamline.hosts.host import Host
from streamline.hosts.process import HostProcess
from streamline.hosts.shipping import Shipped

__all__ = ["ProcessHost"]

DYING_S = 0.3
"""How long a process may take to be gone behind the end of its links: well under a millisecond, if that is why."""

DEATH_S = 5.0
"""How long to wait for a process that was killed; one that is stuck in a driver may never go."""


class ProcessHost(Host):
    """A process, or the one that has taken its place.

    Args:
      env: of its environment, what is to be other than here.
    """

    kind: ClassVar[HostKind] = "process"

    def __init__(self, number: int, env: Mapping[str, str]) -> None:
        self.number = number
        self.closed = False
        self._env = env
        self._lock = threading.RLock()  # the collector may close it, in whatever this thread is at
        self._process: HostProcess | None = None
        self._used = False  # whether the process was given anything to do
        self._behind: weakref.WeakKeyDictionary[Link, HostProcess] = weakref.WeakKeyDictionary()

    @property
    def name(self) -> str:
        process = self._process
        return f"process {self.number}" + ("" if process is None else f", pid {process.pid}")

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        with self._lock:
            self._running()

    def connect(self, payload: Shipped, answer: Callable[[Any], Any] | None = None) -> Link:
        with self._lock:
            process = self._running()
            link = SocketLink(process.link(payload, answer))
            self._behind[link] = process
            self._used = True
            return link

    def _running(self) -> HostProcess:
        """Return the process, started if there is none; under the lock."""
        if self.closed:
            raise ClosedError(f"process {self.number} was closed with its pool")
        if self._process is None or self._process.exit is not None:
            process = HostProcess(self.number, self._env)
            process.start()
            self._process = process
            self._used = False
        return self._process

    def fell(self, link: Link) -> str:
        process = self._behind[link]
        hung_up = not process.wait(DYING_S)
        if hung_up:
            process.kill()
            process.wait(DEATH_S)
        exit_, crash = process.exit or "nothing: it can't be killed", process.crash
        if hung_up:
            exit_ += ", since it had hung up"
        process.close(0.0)
        with self._lock:
            if self._process is process:
                self._process = None
        return f"{exit_}\n{crash}" if crash else exit_

    def kill(self, link: Link) -> None:
        self._behind[link].kill()

    def stacks(self) -> str:
        process = self._process
        return ("" if process is None else process.stacks()) or "it doesn't answer: it is stopped, or just starting"

    def resident_bytes(self) -> int:
        process = self._process
        return 0 if process is None else process.resident_bytes()

    def leave(self) -> None:
        with self._lock:
            self.closed = True
            process = self._process
        if process is not None:
            process.leave()
        for link in list(self._behind):  # else it would wait for its runnings to end by themselves
            link.close()

    def close(self) -> None:
        self.leave()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close() if self._used else process.close(0.0)
