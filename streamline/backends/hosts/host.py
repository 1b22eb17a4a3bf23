"""What runs workers elsewhere: a thread or a process, as a running sees it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from streamline.backends.ipc.link import Link
from streamline.core.counters import HostKind

__all__ = ["Host"]


class Host(ABC):
    """One host. It may serve several runnings, in several event loops: its methods may be called from any thread.

    Attributes:
      number: among its backend's, from 0 on.
      closed: it was asked to end, and connects no more.
    """

    kind: ClassVar[HostKind] = "thread"
    number: int
    closed: bool

    @property
    def pid(self) -> int | None:
        """Of the process that it is, or is in; None: it hasn't been started."""
        return os.getpid()

    def resident_bytes(self) -> int:
        """Return how much memory it holds; 0 where it has none of its own, or isn't there."""
        return 0

    @property
    @abstractmethod
    def name(self) -> str:
        """How messages call it: "process 2, pid 4711"."""

    def start(self) -> None:  # noqa: B027 - a thread needs none
        """Begin to start, if that takes a while and it doesn't run yet; returns at once.

        Raises:
          HostError: it can't be started.
          ClosedError: it is closed.
        """

    @abstractmethod
    def connect(self, payload: Any, answer: Callable[[Any], Any] | None = None) -> Link:
        """Return the near end of a new link; start the host if it doesn't run. Doesn't wait for it.

        Args:
          payload: what `streamline.backends.hosts.host_server.serve` is given at the far end.
          answer: to what a far end in another process asks; called in any thread, one question after the other.

        Raises:
          ClosedError: it is closed.
        """

    @abstractmethod
    def fell(self, link: Link) -> str:
        """Make sure that the host behind a link that is closed has gone; return what it ended with, for a person.

        What it wrote about that, the stacks behind a crash, say, stands in the lines behind the first.
        May take a moment. The next `connect` starts another one.
        """

    @abstractmethod
    def kill(self, link: Link) -> None:
        """End the host behind a link, whatever it is at; where that can't be done, the link."""

    @abstractmethod
    def stacks(self) -> str:
        """Return what its threads are at, as Python prints it; or why that can't be told. May take a moment."""

    @abstractmethod
    def leave(self) -> None:
        """Ask the host to end, with all that it runs; don't wait. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End the host, and wait for that. Idempotent; may take a moment."""
