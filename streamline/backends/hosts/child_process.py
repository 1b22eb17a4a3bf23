"""A host process, seen from its parent: started, given links, asked for its stacks, killed, waited for.

Success: `start` returns while the child is still importing, and may be followed by `link` at once. Failure: when a
child dies its links close, and `exit` says why. End: `close` lets it finish, then kills it; a `HostProcess` that is
garbage collected kills its child; when this process dies, the kernel kills the child.

The child is a new interpreter that inherits its descriptors only. Rejected: a fork (this process has threads, and locks
that they hold), and `multiprocessing`, which imports the user's main module again. Four descriptors join the two: the
control socket, which passes links; the stdio socket (`streamline.backends.hosts.stdio_relay`); the lifeline, a pipe
whose other end the parent has; and a file for the child's stacks.
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
from io import FileIO
from pathlib import Path
from types import MappingProxyType

from streamline.backends.hosts.plan_shipping import Shipped, memory_file
from streamline.backends.hosts.process_env import ProcessEnv, environment, process_env
from streamline.backends.hosts.process_main import LINK_HEADER, STACKS_SIGNAL
from streamline.backends.hosts.stdio_relay import Answer, Frames, HostOutput, ParentStdio, Relay
from streamline.core.cleanup import Cleanup
from streamline.core.threads import start_thread, undisturbed
from streamline.errors import HostError


def start(number: int, env: Mapping[str, str], entry_point: str, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the interpreter of host `number`, which inherits `fds` and nothing else."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    arguments = ", ".join(map(repr, (number, entry_point, *fds)))
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
"""Seconds for a process to exit after SIGKILL; one that is stuck in a driver may never."""


class ChildProcess:
    """The parent's part of one child. Its thread refers to this, so that the `HostProcess` can be collected."""

    def __init__(self, number: int, env: Mapping[str, str], entry_point: str, output: Frames | None) -> None:
        self._number = number
        self._owner = os.getpid()
        self.gone = threading.Event()
        self.crash = ""
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self._watched: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        with ExitStack() as theirs, ExitStack() as ours:
            self.control, child_control = _pair(ours, theirs)
            parent_stdio, child_stdio = _pair(ours, theirs)
            child_lifeline, self._lifeline = map(FileIO, os.pipe(), ("rb", "wb"))
            theirs.enter_context(child_lifeline)
            ours.enter_context(self._lifeline)
            stacks = ours.enter_context(FileIO(memory_file(f"streamline stacks {number}"), "r+"))
            self.stacks = stacks.fileno()
            self.stdio = ParentStdio(parent_stdio)
            self.output = HostOutput(f"[process {number}] ", self.stdio.reply)
            self._frames = output or self.output.frame
            fds = (child_control.fileno(), child_stdio.fileno(), child_lifeline.fileno(), self.stacks)
            self.popen = start(number, env, entry_point, fds)
            ours.callback(_reap, self.popen)
            self._pidfd = _pidfd(self.popen.pid)
            self._ours: list[socket.socket | FileIO] = [self.control, parent_stdio, self._lifeline, stacks]
            if self._pidfd is not None:
                self._ours.append(ours.enter_context(FileIO(self._pidfd)))
            self._listener = threading.Thread(target=self._listen, name=f"streamline process {number}", daemon=True)
            start_thread(self._listener)
            ours.pop_all()
        _children.add(self)

    def send_link(
        self, number: int, watched: socket.socket, host_end: socket.socket, payload: int, *arguments: object
    ) -> None:
        """Send the child its end of a link, and its payload; `watched` is shut down when the child has exited.

        Args:
          arguments: a `ProcessEnv`, and further ones of the entry point.
        """
        body = pickle.dumps(arguments)
        message = memoryview(LINK_HEADER.pack(number, len(body)) + body)
        try:
            sent = socket.send_fds(self.control, [message], [host_end.fileno(), payload])
            if sent < len(message):
                self.control.sendall(message[sent:])
        except (BrokenPipeError, ConnectionResetError):
            return  # it is dead; the consumer's end reads the end of the link
        except OSError as error:
            watched.close()
            closed = self.control.fileno() < 0
            why = "it was closed" if closed else f"{error.strerror or error}"
            raise HostError(f"process {self._number} can't be handed another stream: {why}") from error
        self._watched.add(watched)
        if self.gone.is_set():
            self._hang_up()

    def on_exit(self, call: Callable[[], object]) -> None:
        with self._lock:
            if not self.gone.is_set():
                self._calls.append(call)
                return
        call()

    def written(self, begin: int) -> str:
        """Return what the child has written to its file of stacks from `begin` on."""
        size = os.fstat(self.stacks).st_size
        return os.pread(self.stacks, size - begin, begin).decode("utf-8", "replace")

    def abandon(self) -> None:
        """Kill the child and close everything; in a fork of this process, do nothing."""
        if os.getpid() == self._owner:
            self.popen.kill()
            self.end()

    def end(self) -> None:
        """Kill the child if it still runs, and close everything. Idempotent."""
        if not self.gone.is_set():
            self.popen.kill()
            self.gone.wait(EXIT_S)
        if threading.current_thread() is not self._listener:
            self._listener.join(EXIT_S)
        for each in self._ours:
            each.close()
        _children.discard(self)

    def forget(self) -> None:
        """Close what a fork of this process inherited: the lifeline must have one holder."""
        for fd in (self.control.detach(), self.stdio.sock.detach()):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._lifeline.close()

    def _listen(self) -> None:
        """Relay the child's output until it has exited, then call the `on_exit` callbacks."""
        try:
            self._until_exit()
            self.popen.wait()
            while self.stdio.read(self._frames, wait=False):  # its last output
                pass
            self.output.end()
            self.crash = self._crash()
        finally:
            self._hang_up()
            with self._lock:
                self.gone.set()
                calls = list(self._calls)
            for call in calls:
                call()

    def _until_exit(self) -> None:
        """Return when the process has exited; without a pidfd, when its stdio socket closes."""
        if self._pidfd is None:
            while self.stdio.read(self._frames, wait=True):
                pass
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self.stdio.sock, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._pidfd in ready:
                return
            if not self.stdio.read(self._frames, wait=False):
                poll.unregister(self.stdio.sock)

    def _crash(self) -> str:
        _, fatal, text = self.written(0).rpartition("Fatal Python error")
        return fatal + text if fatal else ""  # else stacks that were asked for

    def _hang_up(self) -> None:
        """Close the links of an exited process: a fork of it may hold their other ends."""
        for sock in list(self._watched):
            with contextlib.suppress(OSError):  # closed already
                sock.shutdown(socket.SHUT_RDWR)


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _forked() -> None:
    for child in list(_children):
        child.forget()


os.register_at_fork(after_in_child=_forked)


def _pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    consumer_end, host_end = socket.socketpair()
    return ours.enter_context(consumer_end), theirs.enter_context(host_end)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has exited; None: not supported."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Kill it if it still runs; leave no zombie."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
        process.wait(EXIT_S)


STACKS_S = 1.0
"""Seconds for a child to write its stacks; takes about 1 ms, unless it is stopped."""


class HostProcess:
    """One child process.

    Args:
      number: its number in messages.
      env: environment variables to change.
      entry_point: serves a link there, as "module:function".
      output: given the frames that the child writes; None: they are printed, logged and answered here.
    """

    def __init__(
        self,
        number: int,
        env: Mapping[str, str] = MappingProxyType({}),
        *,
        entry_point: str = "streamline.backends.hosts.host_server:serve_socket",
        output: Frames | None = None,
    ) -> None:
        self.number = number
        self._env = dict(env)
        self._entry_point = entry_point
        self._output = output
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._links = 0

    def __repr__(self) -> str:
        if self._child is None:
            return f"<process {self.number}, not started>"
        return f"<process {self.number}, pid {self.pid}, {self.exit or 'running'}>"

    def start(self) -> None:
        """Start it, once; doesn't wait. Thread-safe. `HostError`: no interpreter, or no room for another process."""
        with self._lock:
            if self._child is not None:
                raise HostError(f"process {self.number} was started already")
            try:
                undisturbed(self._begin)
            except MemoryError as error:
                raise HostError(f"process {self.number} can't be started: out of memory (`ulimit -v`)") from error
            except OSError as error:
                raise HostError(_why_not_started(self.number, error)) from error

    def _begin(self) -> None:
        self._child = child = ChildProcess(self.number, self._env, self._entry_point, self._output)
        # Not at the interpreter's exit: runs that are still open would log its death; the kernel kills it then.
        Cleanup(self, ChildProcess.abandon, child).not_at_exit()

    def link(
        self, shipped: Shipped, answer: Answer | Relay | None = None, env: ProcessEnv | None = None
    ) -> socket.socket:
        """Pass a new link and its payload; return the consumer's end. Thread-safe. In a dead process, it is closed.

        Args:
          answer: answers the questions of `stdio_relay.asker`, in a thread of its own.
          env: of the consumer; None: this process is.
        """
        child = self._started()
        consumer_end, host_end = socket.socketpair()
        with host_end, self._lock:
            self._links += 1
            if answer is not None:
                child.output.answer(self._links, answer)
            child.send_link(self._links, consumer_end, host_end, shipped.fileno(), env or process_env())
        return consumer_end

    def link_over(self, sock: socket.socket, number: int, shipped: Shipped, env: ProcessEnv, *more: object) -> None:
        """Pass a connected socket as link `number`, as `link` does. It is shut down when the process has exited.

        Args:
          more: arguments of the entry point, which are pickled.
        """
        self._started().send_link(number, sock, sock, shipped.fileno(), env, *more)

    def reply(self, link: int, reply: bytes) -> None:
        """Send the reply to a question that went to `output`; `OSError`: the process has exited."""
        self._started().stdio.reply(link, reply)

    @property
    def pid(self) -> int:
        """Of the child, dead or alive."""
        return self._started().popen.pid

    @property
    def exit(self) -> str | None:
        """ "exit code 3" or "signal 9 (SIGKILL)"; None while it runs."""
        return _exit_text(self._started().popen.poll())

    @property
    def crash(self) -> str:
        """What the interpreter wrote when it crashed, such as the stacks of a segmentation fault."""
        child = self._started()
        return child.crash if child.gone.is_set() else ""

    def on_exit(self, call: Callable[[], object]) -> None:
        """Call `call` when the process has exited, in another thread; at once if it has already."""
        self._started().on_exit(call)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._started().popen.kill()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has exited and its output is relayed; return whether it has."""
        return self._started().gone.wait(timeout)

    def leave(self) -> None:
        """Ask it to exit once its runs have ended, without waiting. Idempotent."""
        if self._child is not None:
            self._child.control.close()

    def close(self, timeout: float = 5.0) -> None:
        """Ask it to exit, and kill it after `timeout` seconds. Idempotent."""
        if self._child is not None:
            self.leave()
            self._child.gone.wait(timeout)
            self._child.end()

    def stacks(self) -> str:
        """Return the Python stacks of all its threads, also while C code holds the interpreter's lock.

        Empty if it has exited, is stopped, or is still starting.
        """
        child = self._started()
        begin = os.fstat(child.stacks).st_size
        if child.popen.poll() is not None:
            return ""
        child.popen.send_signal(STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_S
        text, pause_s = "", 0.001
        while not _complete(text) and time.monotonic() < deadline and not child.gone.is_set():
            time.sleep(pause_s)  # a write to a file can't be waited for
            pause_s *= 2
            text = child.written(begin)
        return text

    def resident_bytes(self) -> int:
        """Return its resident memory, shared pages included; 0 once it has exited."""
        child = self._started()
        if child.popen.poll() is not None:
            return 0
        if sys.platform != "linux":
            output = subprocess.run(["ps", "-o", "rss=", "-p", str(self.pid)], capture_output=True, text=True)
            return 1024 * int(output.stdout or 0)
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):  # it exits just now
            return 0

    def _started(self) -> ChildProcess:
        if self._child is None:
            raise HostError(f"process {self.number} has not been started")
        return self._child


def _complete(stacks: str) -> bool:
    """Return whether faulthandler has finished: the main thread comes last, and in it the frame of `-c`."""
    return stacks.endswith(("in <module>\n", "...\n"))


def _exit_text(code: int | None) -> str | None:
    if code is None or code >= 0:
        return None if code is None else f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a realtime signal
        return f"signal {-code}"


def _why_not_started(number: int, error: OSError) -> str:
    failed = f"process {number} can't be started: "
    if not sys.executable or not Path(sys.executable).exists():
        return f"{failed}there is no Python at sys.executable = {sys.executable!r}; set it to the interpreter to use"
    return f"{failed}{error.strerror or error} (limits: `ulimit -n` for descriptors, `ulimit -u` for processes)"
