"""What runs workers elsewhere: a thread or a process, as a running sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from streamline.border.link import Link

__all__ = ["Host"]


class Host(ABC):
    """One host. It may serve several runnings, in several event loops: its methods may be called from any thread.

    Attributes:
      number: among its backend's, from 0 on.
      closed: it was asked to end, and connects no more.
    """

    number: int
    closed: bool

    @property
    @abstractmethod
    def name(self) -> str:
        """How messages call it: "process 2, pid 4711"."""

    @abstractmethod
    def connect(self, payload: Any) -> Link:
        """Return the near end of a new link; start the host if it doesn't run. Doesn't wait for it.

        Args:
          payload: what `streamline.hosts.far.serve` is given at the far end.

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
