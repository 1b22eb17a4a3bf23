"""A device as a transfer sees it: found when a pipeline is opened; in each running, something moves batches there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["Mover", "Target"]


class Mover(ABC):
    """Moves the batches of one running, one after the other. Made without touching the device.

    Success: `move` returns what the channel carries. Failure: it raises at its batch, and what it had begun is waited
    for before its memory serves again. Close: nothing of it is at work on the device any more, and its memory is free.

    Attributes:
      hands_over: whether the consumer, in its own thread, has to call `arrived` with what `move` returned.
    """

    hands_over = False

    @abstractmethod
    def move(self, batch: Any) -> Any:
        """Return the batch on the device, or what `arrived` makes it of; its copies may still be on their way.

        Called in a thread, never in two at once; where batches are in place already, in the event loop's.

        Raises:
          DataError: the device has no such arrays; the message says where in the batch.
          What the device's library raises, with a note that says where in the batch.
        """

    def arrived(self, moved: Any) -> Any:
        """Return the batch, once it is the consumer's turn. In its thread; doesn't wait."""
        return moved

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End. Idempotent, from any thread; waits for copies that are on their way."""


class Target(ABC):
    """A device that is there. Comparable: two that are equal are the same one."""

    @abstractmethod
    def mover(self, depth: int) -> Mover:
        """Return what moves the batches of one running, of which up to `depth` are on their way."""
