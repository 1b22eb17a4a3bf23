"""What seed 002 warns of, in torch itself: workers of a DataLoader that all stream everything. And here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import streamline as sl
from streamline.errors import PlanError
from streamline.training.torch_dataset import TorchDataset

DATA = range(8)


class Unsharded(IterableDataset):  # type: ignore[misc]  # torch isn't typed here
    def __iter__(self) -> Iterator[int]:
        yield from DATA


def seen_and_unique(loader: Any) -> tuple[int, int]:
    """Return what the seed prints: len(seen), len(set(seen))."""
    seen: list[int] = []
    for batch in loader:
        seen.extend(batch.tolist())
    return len(seen), len(set(seen))


def test_what_torch_doubles_silently_is_dealt_out_here_or_refused() -> None:
    """ "16 - looks right", "8 - only 8 unique values, duplication confirmed", and "no error or warning is raised"."""
    assert seen_and_unique(DataLoader(Unsharded(), batch_size=4, num_workers=2)) == (16, 8)
    dealt = sl.from_iterable(lambda: DATA).shard(2).merge().batch(4)
    assert seen_and_unique(DataLoader(TorchDataset(dealt), batch_size=None, num_workers=2)) == (8, 8)
    whole = sl.from_iterable(lambda: DATA).batch(4)
    with pytest.raises(PlanError, match=r"write \.shard\(2\) or more"):
        seen_and_unique(DataLoader(TorchDataset(whole), batch_size=None, num_workers=2))
