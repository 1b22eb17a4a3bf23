"""What a trainer and an agent say to each other over their control connection.

Both ends have proved that they know the key (`handshake`) before the first of these is unpickled. Hosts are numbered by
the trainer, anew for each that is started on an agent; payloads and questions are numbered, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from streamline.backends.hosts.process_main import ProcessEnv

DYING_S = 0.3
"""Seconds from the end of a link to the exit of its process: well under a millisecond if it died."""


# From the trainer to the agent ----------------------------------------------------------------------------------------
class Attach(NamedTuple):
    """The first message; `lost_after_s`: seconds of silence after which the other machine counts as lost."""

    lost_after_s: float


class StartHost(NamedTuple):
    """Start a host process, which messages call `number`; `shared`: ranks share it."""

    host: int
    number: int
    env: Mapping[str, str]
    shared: bool = False


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
