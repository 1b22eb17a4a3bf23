"""A device as a transfer sees it: found when a pipeline is opened; in each running, something moves batches there.

The host's own memory: the reference, which the other devices are compared with. Batches stay what they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from streamline.core.counters import Detail, Details, Tells

__all__ = ["Copies", "HostMemory", "Mover", "Target"]


class Copies:
    """What is counted of the copies of one running.

    Attributes:
      copied_bytes: to the device; in the host's memory, what couldn't be taken as it was.
      device_waited_s: for the device to be done with a buffer, before the next batch could be written into it; None:
        its library doesn't say.
    """

    __slots__ = ("copied_bytes", "device_waited_s")

    def __init__(self, device_waited_s: float | None = None) -> None:
        self.copied_bytes = 0
        self.device_waited_s = device_waited_s

    def waited(self, spent_s: float) -> None:
        """The device was waited for."""
        self.device_waited_s = (self.device_waited_s or 0.0) + spent_s

    def details(self) -> Details:
        """Tell the stage's meter."""
        copied, waited_s = Detail("copied_bytes", self.copied_bytes), self.device_waited_s
        return (copied,) if waited_s is None else (copied, Detail("device_waited_s", waited_s))


class Mover(ABC):
    """Moves the batches of one running, one after the other. Made without touching the device.

    Success: `move` returns what the channel carries. Failure: it raises at its batch, and what it had begun is waited
    for before its memory serves again. Close: nothing of it is at work on the device any more, and its memory is free.

    Attributes:
      hands_over: whether the consumer, in its own thread, has to call `arrived` with what `move` returned.
      tells: what is counted of its copies; None: it makes none.
    """

    hands_over = False
    tells: Tells | None = None

    @abstractmethod
    def move(self, batch: Any) -> Any:
        """Return the batch on the device, or what `arrived` makes it of; its copies may still be on their way.

        Called in a thread, never in two at once; where batches are in place already, in the event loop's.

        Raises:
          DataError: the device has no such arrays; the message says where in the batch.
          What the device's library raises, with a note that says where in the batch.
        """

    def arrived(self, moved: Any) -> Any:
        """Return the batch, once it is the consumer's turn. In its thread; doesn't wait.

        Ctrl-C may come in the middle of it, or right behind it: then it is called again, with the same or with what it
        has returned.
        """
        return moved

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End. Idempotent, from any thread; waits for copies that are on their way."""


class Target(ABC):
    """A device that is there. Comparable: two that are equal are the same one."""

    @abstractmethod
    def mover(self, depth: int) -> Mover:
        """Return what moves the batches of one running, of which up to `depth` are on their way."""


@dataclass(frozen=True)
class HostMemory(Target):
    """Nothing is moved."""

    def mover(self, depth: int) -> Mover:
        return _NoMove()


class _NoMove(Mover):
    def move(self, batch: Any) -> Any:
        return batch
