"""The host's own memory: the reference, which the other devices are compared with. Batches stay what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamline.transfer.base import Mover, Target

__all__ = ["Host"]


@dataclass(frozen=True)
class Host(Target):
    """Nothing is moved."""

    def mover(self, depth: int) -> Mover:
        return _Stays()


class _Stays(Mover):
    def move(self, batch: Any) -> Any:
        return batch
