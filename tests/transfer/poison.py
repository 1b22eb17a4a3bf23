"""Memory that a transfer lends, full of a wrong number as soon as it is given back: what is read too late is seen."""

from __future__ import annotations

import pytest

from streamline.backends.ipc.shared_memory import HEAD, SlabLease
from streamline.transfer.pinned_memory import _Block
from tests.transfer.fake_torch import POISON


def poison_what_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite blocks of pinned memory, and slabs of processes, when the last view of them is gone."""
    block_returned, slab_returned = _Block._returned, SlabLease._return

    def poisoned_block(block: _Block, ref: object) -> None:
        if block._memory is not None:
            block._memory[:] = POISON
        block_returned(block, ref)

    def poisoned_slab(lease: SlabLease, ref: object) -> None:
        lease._whole[HEAD:] = POISON
        slab_returned(lease, ref)

    monkeypatch.setattr(_Block, "_returned", poisoned_block)
    monkeypatch.setattr(SlabLease, "_return", poisoned_slab)
