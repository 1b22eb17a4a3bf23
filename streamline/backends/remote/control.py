"""What a trainer and an agent ask of each other over their control connection: calls, which return nothing.

Both ends have proved that they know the key (`handshake`) before the first of these is unpickled. Hosts are numbered by
the trainer, anew for each that is started on an agent; payloads and questions are numbered, too. Rejected: msgspec,
which has no strings for paths and variables that aren't UTF-8, and would copy a plan for each agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol

from streamline.backends.hosts.process_main import ProcessEnv

DYING_S = 0.3
"""Seconds from the end of a link to the exit of its process: well under a millisecond if it died."""


class AgentCalls(Protocol):
    """What the trainer asks of an agent."""

    def attach(self, lost_after_s: float) -> None:
        """Is the first one: after so many seconds of silence the other machine counts as lost."""

    def start_host(self, host: int, number: int, env: Mapping[str, str], shared: bool) -> None:
        """Start a host process, which messages call `number`; `shared`: ranks share it."""

    def keep_payload(self, payload: int, data: Any) -> None:
        """Keep a shipped plan, a buffer, for the links of a run to come, until `drop_payload`."""

    def drop_payload(self, payload: int) -> None:
        """Drop the plan of a run that is over."""

    def open_link(self, host: int, link: int, ticket: str, payload: int, env: ProcessEnv) -> None:
        """Connect a host to the trainer's listener, with this ticket, and hand it the connection."""

    def reply(self, host: int, link: int, body: bytes) -> None:
        """Give a host the reply to its question."""

    def send_stacks(self, host: int) -> None:
        """Send the stacks of a host's threads."""

    def kill_host(self, host: int, broken: bool) -> None:
        """Send SIGKILL to a host.

        Args:
          broken: its connection broke: give it `DYING_S` to exit by itself, else its exit counts against nothing that
            ran.
        """

    def end_host(self, host: int, grace_s: float | None) -> None:
        """Ask a host to exit once its runs have ended; kill it after `grace_s` seconds, None: never."""

    def detach(self) -> None:
        """Is the last one: the trainer needs this agent no more."""


class TrainerCalls(Protocol):
    """What an agent tells the trainer."""

    def offered(self, hosts: int) -> None:
        """Is the first one: so many hosts may run there at once."""

    def host_started(self, host: int, pid: int, failure: str = "") -> None:
        """Note that a host's process runs; or why it can't be started."""

    def host_frame(self, host: int, kind: int, link: int, body: bytes) -> None:
        """Take what a host wrote or asked: a frame of `stdio_relay`."""

    def host_stacks(self, host: int, text: str) -> None:
        """Take the stacks of a host's threads."""

    def link_failed(self, ticket: str, why: str) -> None:
        """Note that a link couldn't be opened."""

    def host_exited(self, host: int, reason: str, crash: str, counts: bool) -> None:
        """Note that a host has exited, and its output was sent."""

    def alive(self, resident: Mapping[int, int]) -> None:
        """Comes every second: the resident memory of each host, in bytes."""

    def left(self, why: str) -> None:
        """Is the last one: the machine is needed for something else; its hosts end."""


class Call(NamedTuple):
    """A message: a method of the other end."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


P = ParamSpec("P")


def call(method: Callable[Concatenate[Any, P], None], *arguments: P.args, **options: P.kwargs) -> Call:
    """Return the message that calls a method, of `AgentCalls` or `TrainerCalls`, at the other end."""
    return Call(method.__name__, arguments, options)


def take(calls: type, receiver: Any, message: Any) -> None:
    """Call what a message says, if it is one of `calls`; `ValueError`: it isn't."""
    method, arguments, options = message
    if method.startswith("_") or method not in vars(calls):
        raise ValueError(f"there is no call {method!r}")
    getattr(receiver, method)(*arguments, **options)
