"""A host process, seen from its parent: started, given links, asked for its stacks, killed, waited for.

Success: a `HostProcess` is there while its child is still importing, and may be given a link at once. Failure: when a
child dies its links close, and `exit` says why. End: `close` lets it finish, then kills it; a `HostProcess` that is
garbage collected kills its child; when this process dies, the kernel kills the child.

The child is a new interpreter that inherits its descriptors only. Rejected: a fork (this process has threads, and locks
that they hold), and `multiprocessing`, which imports the user's main module again. Four descriptors join the two: the
control connection, which passes links; the stdio connection (`streamline.backends.hosts.stdio_relay`); the lifeline, a
pipe whose other end the parent has; and a file for the child's stacks.
"""

from __future__ import annotations

import contextlib
import os
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
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from types import MappingProxyType

from streamline.backends.hosts.plan_shipping import Shipped, memory_file
from streamline.backends.hosts.process_main import STACKS_SIGNAL, ProcessEnv, process_env
from streamline.backends.hosts.stdio_relay import Answer, Frames, HostOutput, Relay
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.core.cleanup import Cleanup
from streamline.core.forks import disown_in_copies
from streamline.core.threads import run_uninterrupted, start_thread
from streamline.errors import HostError

GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Hidden: a context on a GPU costs half a gigabyte, and loading data needs none."""

LIBRARIES = ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "BLIS_NUM", "NUMEXPR_NUM", "VECLIB_MAXIMUM")

THREADS = tuple(f"{library}_THREADS" for library in LIBRARIES)
"""Set to 1: there are as many processes as cores."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""glibc's thresholds: by default each array of 128 KiB or more is returned to the system, and the next one faults its
pages in again: batches of 3 MiB took 1.7 times the CPU."""


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
            env={**ALLOCATOR, **os.environ, **dict.fromkeys(GPUS, ""), **dict.fromkeys(THREADS, "1"), **env},
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


class _End:
    """The end of a child. Thread-safe.

    Attributes:
      come: set when it has exited, and its output is relayed.
      crash: what the interpreter wrote when it crashed.
      links: shut down at the end: a fork of the child may hold their other ends.
    """

    def __init__(self) -> None:
        self.come = threading.Event()
        self.crash = ""
        self.links: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    def then(self, call: Callable[[], object]) -> None:
        """Call `call` in the thread that learns of the end; at once, if it has come."""
        with self._lock:
            if not self.come.is_set():
                self._calls.append(call)
                return
        call()

    def reach(self) -> None:
        self.hang_up()
        with self._lock:
            self.come.set()
            calls = list(self._calls)
        for call in calls:
            call()

    def hang_up(self) -> None:
        for sock in list(self.links):
            with contextlib.suppress(OSError):  # closed already
                sock.shutdown(socket.SHUT_RDWR)


class _Child:
    """A child, and the thread that relays its output, which refers to this and not to the `HostProcess`."""

    def __init__(self, number: int, env: Mapping[str, str], entry_point: str, output: Frames | None) -> None:
        self._owner = os.getpid()
        self.end = _End()
        with ExitStack() as theirs, ExitStack() as ours:
            self.control, child_control = _pair(ours, theirs)
            self.stdio, child_stdio = _pair(ours, theirs)
            child_lifeline, lifeline = map(FileIO, os.pipe(), ("rb", "wb"))
            theirs.enter_context(child_lifeline)
            ours.enter_context(lifeline)
            self.stacks = ours.enter_context(FileIO(memory_file(f"streamline stacks {number}"), "r+"))
            self.output = HostOutput(f"[process {number}] ", lambda _, reply: self.stdio.send(reply))
            self._frame = output or self.output.frame
            fds = (child_control.fileno(), child_stdio.fileno(), child_lifeline.fileno(), self.stacks.fileno())
            self.popen = start(number, env, entry_point, fds)
            ours.callback(_reap, self.popen)
            self._files: list[socket.socket | FileIO] = [self.control.sock, self.stdio.sock, lifeline, self.stacks]
            if (pidfd := _pidfd(self.popen.pid)) is not None:
                self._files.append(ours.enter_context(FileIO(pidfd)))
            listen = partial(self._listen, pidfd)
            self._listener = threading.Thread(target=listen, name=f"streamline process {number}", daemon=True)
            start_thread(self._listener)
            ours.pop_all()
        disown_in_copies(self)

    def read_stacks(self, begin: int) -> str:
        """Return what the child has written to its file of stacks from `begin` on."""
        size = os.fstat(self.stacks.fileno()).st_size
        return os.pread(self.stacks.fileno(), size - begin, begin).decode("utf-8", "replace")

    def abandon(self) -> None:
        """Kill the child and close everything; in a fork of this process, do nothing."""
        if os.getpid() == self._owner:
            self.close()

    def close(self) -> None:
        """Kill the child if it still runs, and close everything. Idempotent."""
        if not self.end.come.is_set():
            self.popen.kill()
            self.end.come.wait(EXIT_S)
        if threading.current_thread() is not self._listener:
            self._listener.join(EXIT_S)
        self.disown()

    def disown(self) -> None:
        """Close this process's ends; in a fork of it, too: the lifeline must have one holder."""
        for each in self._files:
            each.close()

    def _listen(self, pidfd: int | None) -> None:
        try:
            self._relay(pidfd)
            self.popen.wait()
            self.output.end()
            _, fatal, text = self.read_stacks(0).rpartition("Fatal Python error")
            self.end.crash = fatal + text if fatal else ""  # else stacks that were asked for
        finally:
            self.end.reach()

    def _relay(self, pidfd: int | None) -> None:
        """Return when the process has exited and its output is read; without a pidfd, when its output ends."""
        poll = select.poll()
        poll.register(self.stdio.sock, select.POLLIN)
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        while True:
            if self.stdio.sock.fileno() not in [fd for fd, _ in poll.poll()]:
                return
            try:
                self._frame(*self.stdio.receive())
            except EOFError:
                if pidfd is None:
                    return
                poll.unregister(self.stdio.sock)


def _pair(ours: ExitStack, theirs: ExitStack) -> tuple[ControlConnection, socket.socket]:
    here, there = socket.socketpair()
    return ControlConnection(ours.enter_context(here)), theirs.enter_context(there)


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
    """One child process, which begins to start. Thread-safe.

    Args:
      number: its number in messages.
      env: environment variables to change. By default it sees no GPU, and BLAS runs one thread.
      entry_point: serves a link there, as "module:function".
      output: given the frames that the child writes; None: they are printed, logged and answered here.

    Raises:
      HostError: no interpreter, or no room for another process.
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
        self._links = count(1)
        self._child: _Child
        try:
            run_uninterrupted(partial(self._begin, env, entry_point, output))
        except MemoryError as error:
            raise HostError(f"process {number} can't be started: out of memory (`ulimit -v`)") from error
        except OSError as error:
            raise HostError(_why_not_started(number, error)) from error

    def _begin(self, env: Mapping[str, str], entry_point: str, output: Frames | None) -> None:
        self._child = child = _Child(self.number, env, entry_point, output)
        # Not at the interpreter's exit: runs that are still open would log its death; the kernel kills it then.
        Cleanup(self, _Child.abandon, child).not_at_exit()

    def __repr__(self) -> str:
        return f"<process {self.number}, pid {self.pid}, {self.exit or 'running'}>"

    def link(
        self, shipped: Shipped, answer: Answer | Relay | None = None, env: ProcessEnv | None = None
    ) -> socket.socket:
        """Pass a new link and its payload; return the consumer's end. In a dead process, it is closed.

        Args:
          answer: answers the questions of `stdio_relay.asker`, in a thread of its own.
          env: of the consumer; None: this process is.
        """
        consumer_end, host_end = socket.socketpair()
        number = next(self._links)
        if answer is not None:
            self._child.output.answer(number, answer)
        with host_end:
            self.link_over(host_end, number, shipped, env or process_env(), watched=consumer_end)
        return consumer_end

    def link_over(
        self,
        sock: socket.socket,
        number: int,
        shipped: Shipped,
        env: ProcessEnv,
        *more: object,
        watched: socket.socket | None = None,
    ) -> None:
        """Pass a connected socket as link `number`, as `link` does.

        Args:
          more: arguments of the entry point, which are pickled.
          watched: shut down when the process has exited; None: `sock` is.
        """
        watched = watched or sock
        child = self._child
        try:
            child.control.write((number, env, more), sock.fileno(), shipped.fileno())
        except (BrokenPipeError, ConnectionResetError):
            return  # it is dead; the consumer's end reads the end of the link
        except OSError as error:
            watched.close()
            why = "it was closed" if child.control.sock.fileno() < 0 else f"{error.strerror or error}"
            raise HostError(f"process {self.number} can't be handed another stream: {why}") from error
        child.end.links.add(watched)
        if child.end.come.is_set():
            child.end.hang_up()

    def reply(self, _: int, reply: bytes) -> None:
        """Send the reply to a question that went to `output`."""
        self._child.stdio.send(reply)

    @property
    def pid(self) -> int:
        """Of the child, dead or alive."""
        return self._child.popen.pid

    @property
    def exit(self) -> str | None:
        """ "exit code 3" or "signal 9 (SIGKILL)"; None while it runs."""
        code = self._child.popen.poll()
        if code is None or code >= 0:
            return None if code is None else f"exit code {code}"
        try:
            return f"signal {-code} ({signal.Signals(-code).name})"
        except ValueError:  # a realtime signal
            return f"signal {-code}"

    @property
    def crash(self) -> str:
        """What the interpreter wrote when it crashed, such as the stacks of a segmentation fault."""
        return self._child.end.crash

    def on_exit(self, call: Callable[[], object]) -> None:
        """Call `call` when the process has exited, in another thread; at once if it has already."""
        self._child.end.then(call)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._child.popen.kill()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has exited and its output is relayed; return whether it has."""
        return self._child.end.come.wait(timeout)

    def leave(self) -> None:
        """Ask it to exit once its runs have ended, without waiting. Idempotent."""
        self._child.control.sock.close()

    def close(self, timeout: float = 5.0) -> None:
        """Ask it to exit, and kill it after `timeout` seconds. Idempotent."""
        self.leave()
        self.wait(timeout)
        self._child.close()

    def stacks(self) -> str:
        """Return the Python stacks of all its threads, also while C code holds the interpreter's lock.

        Empty if it has exited, is stopped, or is still starting.
        """
        try:
            return self._ask_stacks()
        except (OSError, ValueError):  # it exits just now: its files are closed
            return ""

    def _ask_stacks(self) -> str:
        child = self._child
        begin = os.fstat(child.stacks.fileno()).st_size
        if child.popen.poll() is not None:
            return ""
        child.popen.send_signal(STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_S
        text, pause_s = "", 0.001
        while not _complete(text) and time.monotonic() < deadline and not child.end.come.is_set():
            time.sleep(pause_s)  # a write to a file can't be waited for
            pause_s *= 2
            text = child.read_stacks(begin)
        return text

    def resident_bytes(self) -> int:
        """Return its resident memory, shared pages included; 0 once it has exited."""
        if self._child.popen.poll() is not None:
            return 0
        if sys.platform != "linux":
            output = subprocess.run(["ps", "-o", "rss=", "-p", str(self.pid)], capture_output=True, text=True)
            return 1024 * int(output.stdout or 0)
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):  # it exits just now
            return 0


def _complete(stacks: str) -> bool:
    """Return whether faulthandler has finished: the main thread comes last, and in it the frame of `-c`."""
    return stacks.endswith(("in <module>\n", "...\n"))


def _why_not_started(number: int, error: OSError) -> str:
    failed = f"process {number} can't be started: "
    if not sys.executable or not Path(sys.executable).exists():
        return f"{failed}there is no Python at sys.executable = {sys.executable!r}; set it to the interpreter to use"
    return f"{failed}{error.strerror or error} (limits: `ulimit -n` for descriptors, `ulimit -u` for processes)"
