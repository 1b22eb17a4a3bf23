"""A host that is a process of its own: started, handed links, asked for its stacks, killed, waited for.

Success: `start` returns while the child is still importing, and a link may be handed over at once. Failure: a child
that dies closes its links, so each running reads the end of its own; `exit` says what it died of. Ends: `close` lets it
finish, then kills it; a host that nobody holds kills its child; when this process dies, however, the kernel kills the
child.

How a host process is started: a new interpreter, which inherits its descriptors and nothing else.

It is not a fork (this process has threads, and locks that they hold), and not one of `multiprocessing`'s, which imports
the user's main module again: scripts without a guard and notebooks would not work.

What a parent keeps of one child process: what joins the two, and the thread that listens.

Four descriptors join them: the control socket, over which links are handed; the socket of what the child says
(`streamline.backends.hosts.stdio_relay`); the lifeline, a pipe whose other end the child has; and a file, in which the
child writes its stacks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

from streamline.backends.hosts.plan_shipping import Shipped, memory_file
from streamline.backends.hosts.process_env import environment, surroundings
from streamline.backends.hosts.process_main import HANDED, STACKS_SIGNAL
from streamline.backends.hosts.stdio_relay import Answer, ParentStdio
from streamline.core.threads import start_thread
from streamline.errors import HostError

__all__ = ["ChildProcess", "HostProcess", "start"]


def start(number: int, env: Mapping[str, str], attend: str, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the interpreter of host `number`, which inherits `fds` and nothing else."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    arguments = ", ".join(map(repr, (number, attend, *fds)))
    program = (
        f"'streamline process {number}'; import sys; sys.path[:] = {path!r}; "
        f"from streamline.backends.hosts.process_main import main; main({arguments})"
    )
    with _sigint_blocked():
        return subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program],  # type: ignore[attr-defined]
            stdin=subprocess.DEVNULL,
            env=environment(env),
            pass_fds=fds,
        )


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread: a child started meanwhile has it blocked from its first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


EXIT_S = 5.0
"""How long a process may take to be gone behind a SIGKILL; one that is stuck in a driver may never be."""


class ChildProcess:
    """One child process. The thread holds this, never the `HostProcess`: so one that is dropped is noticed."""

    def __init__(self, number: int, env: Mapping[str, str], attend: str) -> None:
        self._number = number
        self._owner = os.getpid()
        self.gone = threading.Event()
        self.crash = ""
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self._nears: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        with ExitStack() as theirs, ExitStack() as ours:
            self.control, far_control = _pair(ours, theirs)
            side, far_side = _pair(ours, theirs)
            far_lifeline, self._lifeline = os.pipe()
            theirs.callback(os.close, far_lifeline)
            ours.callback(os.close, self._lifeline)
            self.stacks = memory_file(f"streamline stacks {number}")
            ours.callback(os.close, self.stacks)
            self.talk = ParentStdio(side, number)
            fds = (far_control.fileno(), far_side.fileno(), far_lifeline, self.stacks)
            self.popen = start(number, env, attend, fds)
            ours.callback(_reap, self.popen)
            self._pidfd = _pidfd(self.popen.pid)
            if self._pidfd is not None:
                ours.callback(os.close, self._pidfd)
            self._ear = threading.Thread(target=self._listen, name=f"streamline process {number}", daemon=True)
            start_thread(self._ear)
            self._ours = ours.pop_all()
        _children.add(self)

    def hand(self, number: int, near: socket.socket, far: socket.socket, payload: int) -> None:
        """Send the child one end of a link, with what it serves."""
        around = pickle.dumps(surroundings())
        message = memoryview(HANDED.pack(number, len(around)) + around)
        try:
            sent = socket.send_fds(self.control, [message], [far.fileno(), payload])
            if sent < len(message):
                self.control.sendall(message[sent:])
        except (BrokenPipeError, ConnectionResetError):
            return  # it is dead; `far` is closed, and whoever has `near` reads the end
        except OSError as error:
            near.close()
            closed = self.control.fileno() < 0
            why = "it was closed" if closed else f"{error.strerror or error}"
            raise HostError(f"process {self._number} can't be handed another stream: {why}") from error
        self._nears.add(near)
        if self.gone.is_set():
            self._hang_up()

    def on_exit(self, call: Callable[[], object]) -> None:
        with self._lock:
            if not self.gone.is_set():
                self._calls.append(call)
                return
        call()

    def written(self, begin: int) -> str:
        """Return what the child has written to the file of stacks from there on."""
        size = os.fstat(self.stacks).st_size
        return os.pread(self.stacks, size - begin, begin).decode("utf-8", "replace")

    def abandon(self) -> None:
        """Kill the child and leave nothing; a fork of this process leaves it alone."""
        if os.getpid() == self._owner:
            self.popen.kill()
            self.end()

    def end(self) -> None:
        """Kill the child if it still runs, and close everything. Idempotent."""
        if not self.gone.is_set():
            self.popen.kill()
            self.gone.wait(EXIT_S)
        if threading.current_thread() is not self._ear:
            self._ear.join(EXIT_S)
        with self._lock:
            ours, self._ours = self._ours, ExitStack()
        ours.close()
        _children.discard(self)

    def forget(self) -> None:
        """Let go of what a fork of this process has inherited: the lifeline must have one holder only."""
        for fd in (self.control.detach(), self.talk.sock.detach(), self._lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _listen(self) -> None:
        """Pass on what the child says until it is gone; then tell whoever wants to know."""
        try:
            self._until_exit()
            self.popen.wait()
            while self.talk.read(wait=False):  # what it said last
                pass
            self.talk.end()
            self.crash = self._crash()
        finally:
            self._hang_up()
            with self._lock:
                self.gone.set()
                calls = list(self._calls)
            for call in calls:
                call()

    def _until_exit(self) -> None:
        """Return when the process has ended, or, where that can't be waited for, when nobody talks any more."""
        if self._pidfd is None:
            while self.talk.read(wait=True):
                pass
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self.talk.sock, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._pidfd in ready:
                return
            if not self.talk.read(wait=False):
                poll.unregister(self.talk.sock)

    def _crash(self) -> str:
        _, fatal, text = self.written(0).rpartition("Fatal Python error")
        return fatal + text if fatal else ""  # else stacks that somebody has asked for

    def _hang_up(self) -> None:
        """End the links of a process that is gone: one that it has forked may hold their far ends."""
        for near in list(self._nears):
            with contextlib.suppress(OSError):  # closed already
                near.shutdown(socket.SHUT_RDWR)


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _forked() -> None:
    for child in list(_children):
        child.forget()


os.register_at_fork(after_in_child=_forked)


def _pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    return ours.enter_context(near), theirs.enter_context(far)


def _pidfd(pid: int) -> int | None:
    """Return what becomes readable when the process ends; None where there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Kill it if it still runs; leave no zombie."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel: nobody can help that
        process.wait(EXIT_S)


STACKS_S = 1.0
"""How long a child may take to write its stacks. It takes about 1 ms, unless it is stopped."""


class HostProcess:
    """One child process.

    Args:
      number: tells it from the others, in messages.
      env: of its environment, what is to be other than here. By default it sees no GPU, and BLAS runs one thread.
      attend: what runs a running's workers there, as "module:function"; see `streamline.backends.hosts.host_server`.
    """

    def __init__(
        self,
        number: int,
        env: Mapping[str, str] = MappingProxyType({}),
        *,
        attend: str = "streamline.backends.hosts.host_server:attend",
    ) -> None:
        self.number = number
        self._env = dict(env)
        self._attend = attend
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
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
                self._child = ChildProcess(self.number, self._env, self._attend)
            except MemoryError as error:
                raise HostError(f"process {self.number} can't be started: out of memory (`ulimit -v`)") from error
            except OSError as error:
                raise HostError(_why_not_started(self.number, error)) from error
        # Not at the interpreter's exit: whoever still runs there would see it die, and say so; the kernel sees to it.
        weakref.finalize(self, ChildProcess.abandon, self._child).atexit = False

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

    def _started(self) -> ChildProcess:
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
