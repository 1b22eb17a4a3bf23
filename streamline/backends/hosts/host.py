"""A host: a thread or process that runs workers, as the consumer side sees it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from streamline.backends.ipc.link import Link
from streamline.core.counters import HostKind


class HostExit(NamedTuple):
    """How a host ended.

    Attributes:
      reason: for a person: "signal 9 (SIGKILL)".
      output: what it wrote, such as the stacks of a crash.
      counts: whether what it ran may have ended it; else its machine or the network did.
    """

    reason: str
    output: str = ""
    counts: bool = True


class Host(ABC):
    """One host. It may serve several runs in several event loops; its methods are thread-safe.

    Attributes:
      number: 0-based, among its backend's.
      closed: it was asked to end; `connect` raises.
    """

    kind: ClassVar[HostKind] = "thread"
    number: int
    closed: bool

    @property
    def pid(self) -> int | None:
        """Its process's id; None before it is started."""
        return os.getpid()

    @property
    def node(self) -> str:
        """The machine that it runs on; "": this one, or none yet."""
        return ""

    def resident_bytes(self) -> int:
        """Return its resident memory; 0 if it shares this process's, or isn't running."""
        return 0

    @property
    @abstractmethod
    def name(self) -> str:
        """How messages call it: "process 2, pid 4711"."""

    def start(self) -> None:  # noqa: B027 - a thread needs none
        """Begin to start if that takes time; returns at once. Raises `HostError`; once closed, `ClosedError`."""

    @abstractmethod
    async def connect(self, payload: Any, answer: Callable[[Any], Any] | None = None) -> Link:
        """Return the consumer's end of a new link, starting the host if needed.

        Waits for a machine to run it, if it runs on another one, but not for its start.

        Args:
          payload: what `host_server.serve` gets in the host.
          answer: answers the questions of a host in another process, one at a time, in any thread.
        """

    @abstractmethod
    def exit_reason(self, link: Link) -> HostExit:
        """Make sure that the host of a closed link has ended; return why. Blocks. The next `connect` starts another."""

    @abstractmethod
    def kill(self, link: Link) -> None:
        """Kill the host of a link; where that can't be done, close the link."""

    @abstractmethod
    def stacks(self) -> str:
        """Return the stacks of its threads, or why there are none. Blocks."""

    @abstractmethod
    def leave(self) -> None:
        """Ask the host to end, with all that it runs, without waiting. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End the host and wait for it. Idempotent. Blocks."""
