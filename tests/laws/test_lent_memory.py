"""Stages that write where a place says keep the laws where all memory is lent, used again, and poisoned in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamline.core.place import Lender
from streamline.testing.checks import check_stage
from streamline.transfer import pinned_memory
from streamline.transfer.pinned_memory import PinnedMemory, _Block
from streamline.transforms import pack
from tests.laws.profile import GENERATIONS
from tests.laws.stages import ORDERED, STAGES

POISON = 0xDB

NAMES = [name for name in (*STAGES, *ORDERED) if name.startswith(("pack", "regenerate rows"))]


class Heap:
    """Lends ordinary memory, and counts the bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def allocate(self, size: int) -> Any:
        self.nbytes += size
        return np.full(size, POISON, np.uint8)

    def register(self, address: int, size: int) -> None:
        raise AssertionError("nothing is shared")

    def unregister(self, address: int) -> None:
        raise AssertionError("nothing is registered")


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heap]:
    """What is lent to all runs, however little they ask for."""
    heap = Heap()
    place, returned = PinnedMemory(heap, 4), _Block._returned

    def poisoned(block: _Block, ref: object) -> None:
        if block._memory is not None:
            block._memory[:] = POISON
        returned(block, ref)

    monkeypatch.setattr(_Block, "_returned", poisoned)
    monkeypatch.setattr(pinned_memory, "LEAST_LENT", 1)
    monkeypatch.setattr(pack, "TOGETHER_TOKENS", 1)
    monkeypatch.setattr(Lender.__init__, "__defaults__", (place, None))
    yield heap
    place.close()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_stage_keeps_the_laws_in_lent_memory(name: str, heap: Heap) -> None:
    check_stage((STAGES | ORDERED)[name], range(12), behind_choices=False, generations=GENERATIONS)
    assert 0 < heap.nbytes < 1 << 20, "lent, and used again"
