"""What a trainer and an agent say to each other over their control connection, and how it is framed.

Both ends have proved that they know the key (`handshake`) before the first of these is unpickled. Hosts are numbered by
the trainer, anew for each that is started on an agent; payloads and questions are numbered, too.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from streamline.backends.hosts.process_env import ProcessEnv

SIZES = struct.Struct("<QQ")
"""Bytes of a message, pickled, and of the one buffer that may follow it."""

PIECE = 1 << 20
"""Bytes that the other end must take within the socket's timeout: a plan may be large, and a network slow."""

DYING_S = 0.3
"""Seconds from the end of a link to the exit of its process: well under a millisecond if it died."""


# From the trainer to the agent ----------------------------------------------------------------------------------------
class Attach(NamedTuple):
    """The first message; `lost_after_s`: seconds of silence after which the other machine counts as lost."""

    lost_after_s: float


class StartHost(NamedTuple):
    """Start a host process, which messages call `number`."""

    host: int
    number: int
    env: Mapping[str, str]


class Payload(NamedTuple):
    """A shipped plan, a buffer, for the links of a run to come; kept until `DropPayload`."""

    payload: int
    data: Any


class DropPayload(NamedTuple):
    """The run is over."""

    payload: int


class OpenLink(NamedTuple):
    """Connect a host to the trainer's listener, with this ticket, and hand it the connection."""

    host: int
    link: int
    ticket: str
    payload: int
    env: ProcessEnv


class Reply(NamedTuple):
    """The reply to a question of a host."""

    host: int
    link: int
    body: bytes


class StacksOf(NamedTuple):
    """Ask for the stacks of a host's threads; `HostStacks` is the answer."""

    host: int


class KillHost(NamedTuple):
    """Send SIGKILL to a host.

    Attributes:
      broken: its connection broke: give it `DYING_S` to exit by itself, else its exit counts against nothing that ran.
    """

    host: int
    broken: bool


class EndHost(NamedTuple):
    """Ask a host to exit once its runs have ended; `grace_s`: seconds until it is killed, None: forever."""

    host: int
    grace_s: float | None


class Detach(NamedTuple):
    """The trainer needs this agent no more."""


# From the agent to the trainer ----------------------------------------------------------------------------------------
class Offer(NamedTuple):
    """The first message: how many hosts may run here at once."""

    hosts: int


class HostStarted(NamedTuple):
    """A host's process runs; or `failure` says why it can't be started."""

    host: int
    pid: int
    failure: str = ""


class HostFrame(NamedTuple):
    """What a host wrote or asked: a frame of `stdio_relay`."""

    host: int
    kind: int
    link: int
    body: bytes


class HostStacks(NamedTuple):
    """The stacks of a host's threads."""

    host: int
    text: str


class LinkFailed(NamedTuple):
    """A link couldn't be opened."""

    ticket: str
    why: str


class HostExited(NamedTuple):
    """A host has exited, and its output was sent."""

    host: int
    reason: str
    crash: str
    counts: bool


class Alive(NamedTuple):
    """Sent every second: the resident memory of each host, in bytes."""

    resident: Mapping[int, int]


class Leave(NamedTuple):
    """The last message: this machine is needed for something else; its hosts end."""

    why: str


class ControlConnection:
    """One end: `send` in any thread, `receive` in one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; drop it if the other end is gone. Blocks while it is slow."""
        buffers: list[pickle.PickleBuffer] = []
        data = memoryview(pickle.dumps(message, 5, buffer_callback=buffers.append))
        body = buffers[0].raw() if buffers else memoryview(b"")
        with self._sending:
            try:
                self.sock.sendall(SIZES.pack(len(data), len(body)))
                for part in (data, body):
                    for begin in range(0, len(part), PIECE):
                        self.sock.sendall(part[begin : begin + PIECE])
            except OSError:
                self.hang_up()  # a part of it may have left

    def receive(self) -> Any:
        """Return the next message; `EOFError`: the other end is gone, or silent for longer than it may be."""
        size, body = SIZES.unpack(self._exactly(SIZES.size))
        data = self._exactly(size)
        return pickle.loads(data, buffers=[self._exactly(body)] if body else None)

    def hang_up(self) -> None:
        """Wake the thread that receives. Idempotent."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, filled = memoryview(data), 0
        while filled < nbytes:
            try:
                received = self.sock.recv_into(view[filled:])
            except OSError as error:
                raise EOFError(str(error)) from error
            if not received:
                raise EOFError("it hung up")
            filled += received
        return data
