"""What is said unasked while a stream runs, once, in the log."""

from __future__ import annotations

import logging

from streamline.core.counters import HOLD_S, StageMeter
from streamline.meters.advice import way_out

__all__ = ["HoldHint"]


logger = logging.getLogger("streamline.hints")  # as the docs call it


class HoldHint:
    """Warns of a stage whose function holds the consumer's own event loop; of each stage once a stream."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, meter: StageMeter, held_s: float) -> None:
        if meter.name in self._told:
            return
        self._told.add(meter.name)
        logger.warning(
            "%s held the event loop for %.2f s (more than %g s), and with it everything else that runs there: try %s",
            meter,
            held_s,
            HOLD_S,
            way_out(meter.kind, 2),
        )
