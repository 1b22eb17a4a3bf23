"""The same with torch itself, where it is installed: on the CPU, and staging for CUDA with stand-ins for its streams.

What a GPU does is in `on_gpu.py`, which runs where there is one: `python -m pytest tests/transfer/on_gpu.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.errors import PlanError
from streamline.transfer.cuda import CudaCopier
from streamline.transfer.pinned_ring import RingMover
from streamline.transforms.collate import stack
from tests.transfer.arrays import nested, odd_arrays


def test_arrays_of_any_layout_become_tensors_without_a_word() -> None:
    torch = pytest.importorskip("torch")
    arrays = odd_arrays()
    (got,) = sl.from_items([[*arrays, nested()]]).transfer(torch.device("cpu"))
    for array, tensor in zip(arrays, got[:-1], strict=True):
        assert tensor.dtype == getattr(torch, array.dtype.name)
        assert (tensor.shape, tensor.tolist()) == (array.shape, array.tolist())
    assert got[-1]["sample"].image.dtype == torch.uint8


def test_a_build_without_cuda_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: see on_gpu.py")
    with pytest.raises(PlanError, match=r'\.transfer\("cuda"\): torch .* can use no CUDA device here'):
        sl.from_items([1]).transfer("cuda").open()


def test_whatever_is_staged_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    copier = _without_a_gpu(monkeypatch, torch)
    mover = RingMover(copier, 2)
    table = torch.arange(6).reshape(2, 3)
    batch = [
        *odd_arrays(),
        *[table, table.T, torch.tensor(3), torch.zeros(2, 0), torch.ones(3, dtype=torch.bfloat16)],
        *[torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.eye(3).to_sparse()],
        *[torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last)],
    ]
    for _ in range(3):
        got = mover.arrived(mover.move(batch))
        for before, after in zip(batch, got, strict=True):
            assert isinstance(after, torch.Tensor)
            assert after.shape == before.shape
            if isinstance(before, np.ndarray):
                assert after.tolist() == before.tolist()
            else:
                assert (after.dtype, after.layout) == (before.dtype, before.layout)
                assert after.requires_grad == before.requires_grad
                assert torch.equal(_dense(after), _dense(before))
    assert copier.size(table, "batch") == table.nbytes
    for other in (table.T, torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2), requires_grad=False)):
        assert copier.size(other, "batch") == 0, "more than memory was staged"
    mover.close()


def test_types_that_numpy_has_from_elsewhere_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, types = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    for plain in (np.arange(4), np.arange(8)[::2], np.array(1.5), np.zeros((0, 2))):
        array = plain.astype(types.bfloat16)
        mover = RingMover(_without_a_gpu(monkeypatch, torch), 2)
        for got in (next(iter(sl.from_items([array]).transfer("cpu"))), mover.arrived(mover.move(array))):
            assert got.dtype == torch.bfloat16
            assert (got.shape, got.tolist()) == (array.shape, plain.tolist())
        mover.close()
        monkeypatch.undo()


@pytest.mark.parametrize("tensors", [False, True])
def test_batches_in_lent_memory_are_not_staged(monkeypatch: pytest.MonkeyPatch, tensors: bool) -> None:
    torch = pytest.importorskip("torch")
    mover = RingMover(_without_a_gpu(monkeypatch, torch), 2)
    assert mover.details is not None
    row = np.arange(1 << 18, dtype=np.float32)
    for number in range(4):
        batch = stack([torch.from_numpy(row + number) if tensors else row + number] * 4, mover.place)
        got = mover.arrived(mover.move({"x": batch}))["x"]
        assert torch.equal(got, torch.from_numpy(row + number).expand(4, -1))
        del batch, got
    assert [detail.value for detail in mover.details()][:2] == [4 * 4 * row.nbytes, 0]
    mover.close()


def _dense(tensor: Any) -> Any:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _without_a_gpu(monkeypatch: pytest.MonkeyPatch, torch: Any) -> CudaCopier:
    """Return a copier that copies within the host's memory, at once."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    stand_ins = {
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "Stream": lambda device: None,
        "Event": lambda blocking: event,
        "current_stream": lambda device: SimpleNamespace(wait_event=lambda event: None),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    copier = CudaCopier(0)
    copier._device = torch.device("cpu")
    return copier
