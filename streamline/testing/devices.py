"""A device that is nowhere: as slow to reach as any, for laws that a transfer has to keep without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamline.pipeline import Pipeline
from streamline.transfer.base import Mover, Target
from streamline.transfer.stage import Transfer

__all__ = ["Elsewhere", "to_elsewhere"]


@dataclass(frozen=True)
class Elsewhere(Target):
    """A device that has to be waited for; batches stay what they are.

    Attributes:
      error: what it fails with at `failing`; None: it doesn't.
    """

    failing: Any = None
    error: Exception | None = None

    def mover(self, depth: int) -> Mover:
        return _Stays(self)


class _Stays(Mover):
    def __init__(self, target: Elsewhere) -> None:
        self._target = target

    def move(self, batch: Any) -> Any:
        if self._target.error is not None and batch == self._target.failing:
            raise self._target.error
        return batch


def to_elsewhere(pipe: Pipeline[Any], target: Target | None = None, depth: int = 2) -> Pipeline[Any]:
    """Return a pipeline with a transfer as it is to a GPU: in a thread, behind a channel of its own."""
    merged = pipe if pipe.merging is not None else pipe.merge()
    return merged._with(Transfer(name="transfer", device="cuda", depth=depth, target=target or Elsewhere()))
