"""What a parent keeps of one child process: what joins the two, and the thread that listens.

Four descriptors join them: the control socket, over which links are handed; the socket of what the child says
(`streamline.hosts.talk`); the lifeline, a pipe whose other end the child has; and a file, in which the child writes its
stacks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from streamline.core.threads import start_thread
from streamline.errors import HostError
from streamline.hosts.child import HANDED
from streamline.hosts.interpreter import start
from streamline.hosts.shipping import memory_file
from streamline.hosts.surroundings import surroundings
from streamline.hosts.talk import NearTalk

__all__ = ["Child"]


EXIT_S = 5.0
"""How long a process may take to be gone behind a SIGKILL; one that is stuck in a driver may never be."""


class Child:
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
            self.talk = NearTalk(side, number)
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


_children: weakref.WeakSet[Child] = weakref.WeakSet()


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
