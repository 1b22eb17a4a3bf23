"""What is alive of the things that a pipeline made, counted by weak references."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from streamline.core.threads import threadsafe_call

__all__ = ["Live"]

T = TypeVar("T")


class Live:
    """How many are alive of what was noted.

    Attributes:
      most: so many were at the most.
    """

    def __init__(self) -> None:
        self._refs: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._on_none: Callable[[], object] = lambda: None
        self.most = 0

    def note(self, made: T, number: int = 0) -> T:
        """Count this one, which is number `number`, for as long as it lives."""
        key = id(made)
        self._refs[key] = weakref.ref(made, lambda _: self._gone(key)), number
        self.most = max(self.most, len(self._refs))
        return made

    @property
    def count(self) -> int:
        return len(self._refs)

    def before(self, number: int) -> int:
        """Return how many are alive of those before this number."""
        return sum(one < number for _, one in list(self._refs.values()))

    async def none(self) -> None:
        """Wait until none is alive.

        Raises:
          TimeoutError: some are kept.
        """
        gone, wake = anyio.Event(), threadsafe_call()
        self._on_none = lambda: wake(gone.set)
        if self._refs:
            with anyio.fail_after(200):
                await gone.wait()
        self._on_none = lambda: None

    def _gone(self, key: int) -> None:
        del self._refs[key]
        if not self._refs:
            self._on_none()
