"""On a GPU: run by hand where there is one, `python -m pytest tests/transfer/on_gpu.py`; not collected otherwise.

It fails where there is none: nothing in here is to be passed over in silence.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import streamline as sl


def torch() -> Any:
    found = importlib.import_module("torch")
    assert found.cuda.is_available(), "this is for a machine with a GPU"
    return found


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_batch_is_overwritten_while_it_is_copied_or_computed_with(depth: int) -> None:
    """Poison: each batch is one number, and must still be that number after long work on the consumer's stream."""
    library, count = torch(), 60
    batches = [np.full(1 << (18 + at % 6), at, np.float32) for at in range(count)]
    square = library.ones(2048, 2048, device="cuda")
    sums: list[tuple[Any, Any]] = []
    for batch in sl.from_items(batches).transfer("cuda", depth=depth):
        for _ in range(1 + len(sums) % 3):
            square @ square
        sums.append((batch.min(), batch.max()))
        del batch  # its memory may go to the next one, after that work
    assert [(float(low), float(high)) for low, high in sums] == [(at, at) for at in range(count)]


def test_a_stream_of_ones_own_waits_for_its_batch() -> None:
    library = torch()
    side = library.cuda.Stream()
    pipe = sl.from_items([np.full(1 << 22, at, np.int32) for at in range(30)]).transfer("cuda")
    with library.cuda.stream(side):
        got = [batch.sum() for batch in pipe]
    assert [int(total) for total in got] == [at << 22 for at in range(30)]


def test_it_resumes_exactly() -> None:
    torch()
    plain = sl.from_items(range(18)).shard(3).batch(2)
    expected = [batch.tolist() for batch in plain]
    for taken in range(len(expected) + 1):
        with plain.transfer("cuda").open() as stream:
            assert [next(stream).tolist() for _ in range(taken)] == expected[:taken]
            snapshot = stream.snapshot()
        with plain.transfer("cuda").open(resume=snapshot) as stream:
            assert [batch.tolist() for batch in stream] == expected[taken:]


def test_out_of_memory_comes_out_at_its_batch() -> None:
    library = torch()
    items: list[Any] = [np.zeros(4, np.uint8), {"big": np.broadcast_to(np.uint8(0), (1 << 42,))}]
    with sl.from_items(items).transfer("cuda").open() as stream:
        next(stream)
        with pytest.raises((library.OutOfMemoryError, RuntimeError, MemoryError)):
            next(stream)


def test_pinned_memory_is_given_back() -> None:
    library = torch()
    before = library.cuda.memory_allocated()
    for _ in range(5):
        with sl.from_items([np.zeros(1 << 24, np.uint8)] * 8).transfer("cuda").open() as stream:
            next(stream)
    library.cuda.synchronize()
    assert library.cuda.memory_allocated() == before
