"""The agent of a machine: what `streamline worker` runs. It starts host processes for a trainer, and speaks for them.

The agent dials the trainer, once for control and once more for each link of a host, and hands the connected socket of a
link to its host: items don't pass through the agent, and it answers though user code in a host holds that interpreter's
lock. TLS can't be handed over: for an encrypted link, the host gets a socket that isn't connected, and dials itself.
Its hosts are those of `Processes`, and end with it. Success: the trainer detaches; then the agent dials again, for as
long as `run_agent` is told to. Failure: without the trainer all hosts are killed at once; then the agent dials for
`REDIAL_S` more, and ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.plan_shipping import Shipped, keep
from streamline.backends.hosts.process_main import ProcessEnv
from streamline.backends.hosts.stdio_relay import OVER
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.backends.network.connections import Introduction, UnreachableError
from streamline.backends.network.handshake import PeerHello
from streamline.backends.network.tls import Certificates
from streamline.backends.remote.control import DYING_S, AgentCalls, TrainerCalls, call, take
from streamline.backends.remote.network_link import LOST_AFTER_S, watch_peer
from streamline.core.text import quantity
from streamline.core.threads import start_thread
from streamline.errors import HostError

logger = logging.getLogger("streamline.agent")

BEAT_S = 1.0
"""Seconds between two `Alive`; precedent: Ray's heartbeats."""

REDIAL_S = 1.2
"""Seconds to dial again after the trainer is lost: a connection may have broken, and the trainer be there."""

ENDING_S = 3.5
"""Of `lost_after_s`, what an agent needs beside the wait for an acknowledgement to have ended by then, where the
trainer's machine is silent: up to `BEAT_S` until it sends anything, 0.2 s until the kernel sends that again and begins
to count, `REDIAL_S`, and the end of an interpreter. The kernel sends again after 0.2, 0.6, 1.4, 3, 6.2, 12.6 s, so of
the default 10 s no attempt is lost."""

ENTRY_POINT = "streamline.backends.remote.network_link:serve_network"

SHARED_ENTRY_POINT = "streamline.backends.hosts.shared_runs:serve_network"


class _Hosted:
    """One host process of this agent, and the agent's handles of its links."""

    def __init__(self, process: HostProcess) -> None:
        self.process = process
        self.broken = False  # killed since its connection broke
        self.links: dict[int, socket.socket] = {}


class Agent(AgentCalls):
    """Serves one trainer over a connection on which the handshake is done, with at most `hosts` hosts at once."""

    def __init__(self, sock: socket.socket, trainer: Introduction, hosts: int) -> None:
        self._control = ControlConnection(sock)
        self._trainer = trainer
        self._offer = hosts
        self._hosts: dict[int, _Hosted] = {}
        self._payloads: dict[int, Shipped] = {}
        self._not_kept: dict[int, str] = {}  # why
        self._lost_after_s = 0.0
        self._over = threading.Event()
        self._detached = False
        self._left = ""

    def serve(self) -> str | None:
        """Serve the trainer until it detaches: None; else why it is lost. All hosts have ended then."""
        self._watch(LOST_AFTER_S)  # until it says how long
        _apart("heartbeat", self._beat)
        self._control.send(call(TrainerCalls.offered, self._offer))
        try:
            while not self._detached:
                take(AgentCalls, self, self._control.receive())
        except EOFError as error:
            return self._left or str(error)
        else:
            return None
        finally:
            self.close()

    @property
    def left(self) -> bool:
        """Whether it was asked to leave."""
        return bool(self._left)

    def leave(self, why: str) -> None:
        """Let the trainer know that this machine is taken away, and end; in any thread but that of `serve`."""
        self._left = f"this machine was asked to leave: {why}"
        self._control.send(call(TrainerCalls.left, why))
        self._control.hang_up()

    def close(self) -> None:
        """Kill all hosts, and hang up. Idempotent; in any thread."""
        self._over.set()
        hosts = list(self._hosts.values())
        for hosted in hosts:
            hosted.process.kill()
        for hosted in hosts:
            hosted.process.close(0.0)
        for payload in list(self._payloads.values()):
            payload.close()
        self._control.hang_up()

    # What the trainer asks for ----------------------------------------------------------------------------------------

    def attach(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._watch(lost_after_s)

    def detach(self) -> None:
        self._detached = True

    def _watch(self, lost_after_s: float) -> None:
        """Notice a silent trainer early enough to have ended after `lost_after_s`, unless that is short."""
        with suppress(OSError):  # it has gone already
            watch_peer(self._control.sock, max(lost_after_s - ENDING_S, lost_after_s / 2), busy=True)

    def start_host(self, host: int, number: int, env: Mapping[str, str], shared: bool) -> None:
        entry_point = SHARED_ENTRY_POINT if shared else ENTRY_POINT
        try:
            process = HostProcess(number, env, entry_point=entry_point, output=partial(self._frame, host))
        except HostError as error:
            self._control.send(call(TrainerCalls.host_started, host, 0, str(error)))
            return
        hosted = self._hosts[host] = _Hosted(process)
        self._control.send(call(TrainerCalls.host_started, host, process.pid))
        process.on_exit(partial(self._exited, host, hosted))

    def keep_payload(self, payload: int, data: Any) -> None:
        try:
            self._payloads[payload] = keep(data)
        except HostError as error:
            self._not_kept[payload] = str(error)

    def drop_payload(self, payload: int) -> None:
        self._not_kept.pop(payload, None)
        if (kept := self._payloads.pop(payload, None)) is not None:
            kept.close()

    def open_link(self, host: int, link: int, ticket: str, payload: int, env: ProcessEnv) -> None:
        _apart("link", partial(self._open, host, link, ticket, payload, env))

    def _open(self, host: int, link: int, ticket: str, payload: int, env: ProcessEnv) -> None:
        hosted, kept = self._hosts.get(host), self._payloads.get(payload)
        if (why := self._not_kept.get(payload)) is not None:
            self._control.send(call(TrainerCalls.link_failed, ticket, why))
        if hosted is None or kept is None:
            return  # the host has exited, which the trainer was told, or the run is over
        try:
            sock, introduction = self._link(ticket)
            watch_peer(sock, self._lost_after_s)
            hosted.links[link] = sock
            hosted.process.link_over(sock, link, kept, _here(env), introduction)
        except (HostError, OSError) as error:
            self._control.send(call(TrainerCalls.link_failed, ticket, str(error)))

    def _link(self, ticket: str) -> tuple[socket.socket, Introduction | None]:
        """Return a connection for a link; or a socket, and how the process that uses it connects it."""
        link = self._trainer._replace(hello=structs.replace(self._trainer.hello, role="link", ticket=ticket))
        if link.tls is None:
            return link.dial(), None
        ours = self._control.sock
        return socket.socket(ours.family, socket.SOCK_STREAM), link._replace(address=ours.getpeername())

    def reply(self, host: int, link: int, body: bytes) -> None:
        if (hosted := self._hosts.get(host)) is not None:
            hosted.process.reply(link, body)

    def send_stacks(self, host: int) -> None:
        if (hosted := self._hosts.get(host)) is not None:
            stacks = hosted.process.stacks
            _apart("stacks", lambda: self._control.send(call(TrainerCalls.host_stacks, host, stacks())))

    def kill_host(self, host: int, broken: bool) -> None:
        if (hosted := self._hosts.get(host)) is not None:
            _apart("kill", partial(_kill, hosted, broken))

    def end_host(self, host: int, grace_s: float | None) -> None:
        if (hosted := self._hosts.get(host)) is not None:
            hosted.process.leave()
            if grace_s is not None:
                _apart("end of a host", partial(hosted.process.close, grace_s))

    # What hosts do ----------------------------------------------------------------------------------------------------

    def _frame(self, host: int, kind: int, link: int, body: bytes) -> None:
        if kind == OVER and (hosted := self._hosts.get(host)) is not None:
            sock = hosted.links.pop(link, None)
            if sock is not None:
                sock.close()
        self._control.send(call(TrainerCalls.host_frame, host, kind, link, body))

    def _exited(self, host: int, hosted: _Hosted) -> None:
        self._hosts.pop(host, None)
        if not self._over.is_set():  # else this agent has killed it: its trainer knows
            process = hosted.process
            how = f"{process.exit}, since its connection broke" if hosted.broken else str(process.exit)
            self._control.send(call(TrainerCalls.host_exited, host, how, process.crash, not hosted.broken))
        for sock in list(hosted.links.values()):
            sock.close()
        hosted.process.close(0.0)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            hosts = list(self._hosts.items())
            resident = {host: hosted.process.resident_bytes() for host, hosted in hosts}
            self._control.send(call(TrainerCalls.alive, resident))


def _apart(name: str, work: Callable[[], object]) -> None:
    """Do work that may wait in a thread of its own."""
    start_thread(threading.Thread(target=work, name=f"streamline agent, {name}", daemon=True))


def _kill(hosted: _Hosted, broken: bool) -> None:
    if not (broken and hosted.process.wait(DYING_S)):
        hosted.broken = broken
        hosted.process.kill()


def _here(env: ProcessEnv) -> ProcessEnv:
    """Return what a host takes over of the trainer's process on this machine: of its paths, those that are here."""
    theirs = [entry or env.directory or "" for entry in env.path]
    return env._replace(
        path=[*sys.path, *(entry for entry in theirs if entry not in sys.path and Path(entry).exists())]
    )


# The command ----------------------------------------------------------------------------------------------------------
RETRY_S = 0.5
"""Seconds between two attempts to reach the trainer."""


def run_agent(
    address: tuple[str, int],
    key: bytes,
    hosts: int,
    *,
    tls: Certificates | None = None,
    wait_s: float = 300.0,
    rejoin_s: float | None = 5.0,
    ticket: str = "",
) -> str | None:
    """Serve the trainer at `address`, and the runs after that; return why it was lost, None if it detached.

    On SIGTERM, in a process's main thread, its hosts end at once; the trainer is told, and moves their workers.

    Args:
      hosts: that may run here at once.
      tls: None: nothing is encrypted.
      wait_s: seconds to wait for the trainer to listen.
      rejoin_s: seconds to dial again after it has detached: another of its runs may begin; `REDIAL_S` if it was lost.
        None: not at all.
      ticket: of the host that it was started for; it runs no other.

    Raises:
      HostError: it can't be reached, or refuses this agent.
    """
    hello = PeerHello(role="control", node=socket.gethostname(), pid=os.getpid(), ticket=ticket)
    first = trainer = Introduction(address, key, hello, tls)
    patience_s, lost = wait_s, None
    attached = False
    while True:
        try:
            sock = _reached(trainer, patience_s)
        except UnreachableError:
            if not attached:
                raise
            return lost
        attached = True
        logger.info("attached to the trainer at %s:%d, for up to %s", *address, quantity(hosts, "host"))
        again = _where_connected(trainer, sock)
        agent = Agent(sock, trainer, hosts)
        with _on_sigterm(agent):
            lost = agent.serve()
        sock.close()
        if agent.left or rejoin_s is None:
            return lost
        logger.info("the trainer %s", "has detached" if lost is None else f"is lost: {lost}")
        trainer, patience_s = (first, rejoin_s) if lost is None else (again, REDIAL_S)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end an agent that dials, too: process 1 of a container ignores it where nothing else is said.

    Not where a thread of a program is the agent.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _on_sigterm(agent: Agent) -> Iterator[None]:
    """Let a preemption of this machine be no surprise to the trainer; not where a thread of a program is the agent.

    The system may interrupt any thread for a signal, and the main one waits for the trainer: another one hears of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    here, there = socket.socketpair()
    there.setblocking(False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    told_before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    _apart("signals", partial(_leave_at_sigterm, agent, here))
    try:
        yield
    finally:
        signal.set_wakeup_fd(told_before)
        signal.signal(signal.SIGTERM, before)
        there.close()


def _leave_at_sigterm(agent: Agent, signals: socket.socket) -> None:
    with signals:
        while numbers := signals.recv(64):
            if signal.SIGTERM in numbers:
                agent.leave("SIGTERM")


def _where_connected(trainer: Introduction, sock: socket.socket) -> Introduction:
    """Return one that dials where a connection has led, without asking for an address: no server may answer."""
    try:
        return trainer._replace(address=sock.getpeername()[:2])
    except OSError:  # it is lost already
        return trainer


CONNECT_S = 10.0
"""Seconds for one attempt to connect, at the most; `LEAST_CONNECT_S`: of the last one, before the patience is over."""

LEAST_CONNECT_S = 0.5


def _reached(trainer: Introduction, patience_s: float) -> socket.socket:
    """Dial until the trainer listens; no attempt outlasts the patience where nothing answers at all."""
    deadline = time.monotonic() + patience_s
    said = ""
    while True:
        left_s = deadline - time.monotonic()
        try:
            return trainer.dial(connect_s=min(CONNECT_S, max(LEAST_CONNECT_S, left_s)))
        except UnreachableError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise
            if said != (said := str(error)):
                logger.info("%s; dialling again, for up to %.0f s", said, left_s)
            time.sleep(RETRY_S)
