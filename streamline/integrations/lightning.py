"""Lightning: `trainer.fit(model, LightningLoader(pipe.loader()))`. Its checkpoints hold the loader's state.

Lightning fetches a batch ahead where it doesn't know how many there are, and saves in between: a plain loader's state
would be one batch further than the model. It saves what `state_dict` returns, and loads it before it begins.
"""

from __future__ import annotations

from streamline.integrations.views import OneAhead

__all__ = ["LightningLoader"]


class LightningLoader(OneAhead):  # type: ignore[type-arg]
    """A loader for Lightning's trainer, whose resume (`fit(ckpt_path=)`) goes on with the next batch, exactly."""
