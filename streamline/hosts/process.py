"""A host that is a process of its own: started, handed links, asked for its stacks, killed, waited for.

Success: `start` returns while the child is still importing, and a link may be handed over at once. Failure: a child
that dies closes its links, so each running reads the end of its own; `exit` says what it died of. Ends: `close` lets it
finish, then kills it; a host that nobody holds kills its child; when this process dies, however, the kernel kills the
child.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from streamline.errors import HostError
from streamline.hosts.child import STACKS_SIGNAL
from streamline.hosts.parent import Child
from streamline.hosts.shipping import Shipped
from streamline.hosts.talk import Answer

__all__ = ["HostProcess"]

STACKS_S = 1.0
"""How long a child may take to write its stacks. It takes about 1 ms, unless it is stopped."""


class HostProcess:
    """One child process.

    Args:
      number: tells it from the others, in messages.
      env: of its environment, what is to be other than here. By default it sees no GPU, and BLAS runs one thread.
      attend: what runs a running's workers there, as "module:function"; see `streamline.hosts.attending`.
    """

    def __init__(
        self,
        number: int,
        env: Mapping[str, str] = MappingProxyType({}),
        *,
        attend: str = "streamline.hosts.attending:attend",
    ) -> None:
        self.number = number
        self._env = dict(env)
        self._attend = attend
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._links = 0

    def __repr__(self) -> str:
        if self._child is None:
            return f"<process {self.number}, not started>"
        return f"<process {self.number}, pid {self.pid}, {self.exit or 'running'}>"

    def start(self) -> None:
        """Start it, and return at once. Thread-safe; once.

        Raises:
          HostError: there is no interpreter to start, or no room for another process or its descriptors.
        """
        with self._lock:
            if self._child is not None:
                raise HostError(f"process {self.number} was started already")
            try:
                self._child = Child(self.number, self._env, self._attend)
            except MemoryError as error:
                raise HostError(f"process {self.number} can't be started: out of memory (`ulimit -v`)") from error
            except OSError as error:
                raise HostError(_why_not_started(self.number, error)) from error
        # Not at the interpreter's exit: whoever still runs there would see it die, and say so; the kernel sees to it.
        weakref.finalize(self, Child.abandon, self._child).atexit = False

    def link(self, shipped: Shipped, answer: Answer | None = None) -> socket.socket:
        """Hand over a new link and what it serves; return its near end. Thread-safe.

        To a process that is dead a link can be handed, too: it is at its end.

        Args:
          answer: what the running answers when it is asked, in a thread of this host's; see `talk.asker`.
        """
        child = self._started()
        near, far = socket.socketpair()
        with far, self._lock:
            self._links += 1
            if answer is not None:
                child.talk.answer(self._links, answer)
            child.hand(self._links, near, far, shipped.fileno())
        return near

    @property
    def pid(self) -> int:
        """Of the child, dead or alive."""
        return self._started().popen.pid

    @property
    def exit(self) -> str | None:
        """What it ended with, "exit code 3" or "signal 9 (SIGKILL)"; None while it runs."""
        return _told(self._started().popen.poll())

    @property
    def crash(self) -> str:
        """What the interpreter wrote when it crashed: the stacks of all threads behind a segmentation fault, say."""
        child = self._started()
        return child.crash if child.gone.is_set() else ""

    def on_exit(self, call: Callable[[], object]) -> None:
        """Call this when the process is gone, in a thread of this host's; at once if it is gone already."""
        self._started().on_exit(call)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._started().popen.kill()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is gone, and all that it said has been passed on; return whether it is."""
        return self._started().gone.wait(timeout)

    def leave(self) -> None:
        """Tell it to go as soon as its runnings have ended; returns at once, and may be called again."""
        if self._child is not None:
            self._child.control.close()

    def close(self, timeout: float = 5.0) -> None:
        """Let it go; kill it if that takes longer than `timeout` seconds. Idempotent."""
        if self._child is not None:
            self.leave()
            self._child.gone.wait(timeout)
            self._child.end()

    def stacks(self) -> str:
        """Return the Python stacks of all its threads, also while C code holds the interpreter's lock.

        Empty if it is gone, stopped, or not that far yet.
        """
        child = self._started()
        begin = os.fstat(child.stacks).st_size
        if child.popen.poll() is not None:
            return ""
        child.popen.send_signal(STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_S
        text, pause_s = "", 0.001
        while not _whole(text) and time.monotonic() < deadline and not child.gone.is_set():
            time.sleep(pause_s)  # nothing tells that somebody has written to a file
            pause_s *= 2
            text = child.written(begin)
        return text

    def resident_bytes(self) -> int:
        """Return its resident memory; 0 when it is gone. Pages that it shares with others count."""
        child = self._started()
        if child.popen.poll() is not None:
            return 0
        if sys.platform != "linux":
            told = subprocess.run(["ps", "-o", "rss=", "-p", str(self.pid)], capture_output=True, text=True)
            return 1024 * int(told.stdout or 0)
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):  # it ends just now
            return 0

    def _started(self) -> Child:
        if self._child is None:
            raise HostError(f"process {self.number} has not been started")
        return self._child


def _whole(stacks: str) -> bool:
    """Tell whether faulthandler has come to its end: the main thread comes last, and in it the frame of `-c`."""
    return stacks.endswith(("in <module>\n", "...\n"))


def _told(code: int | None) -> str | None:
    if code is None or code >= 0:
        return None if code is None else f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a realtime signal
        return f"signal {-code}"


def _why_not_started(number: int, error: OSError) -> str:
    said = f"process {number} can't be started: "
    if not sys.executable or not Path(sys.executable).exists():
        return f"{said}there is no Python at sys.executable = {sys.executable!r}; set it to the interpreter to use"
    return f"{said}{error.strerror or error} (limits: `ulimit -n` for descriptors, `ulimit -u` for processes)"
