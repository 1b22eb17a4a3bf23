"""Accelerate: `accelerator.register_for_checkpointing(AccelerateLoader(pipe.loader()))`.

Accelerate asks each process for its state, and writes down that of the first one: a plain loader's place on all other
ranks would not be in the checkpoint.
"""

from __future__ import annotations

from streamline.integrations.views import OfAllRanks

__all__ = ["AccelerateLoader"]


class AccelerateLoader(OfAllRanks):  # type: ignore[type-arg]
    """A loader whose place on all ranks is in Accelerate's checkpoints; `save_state` is called on all of them."""
