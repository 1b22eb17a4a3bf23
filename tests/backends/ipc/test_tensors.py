"""Tensors cross as memory, as arrays do; torch's own pickle of each is a file of its own."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from streamline.backends.ipc.pickling import BESIDE, Pickling, reducers


def there(*items: Any) -> Any:
    pieces, buffers = Pickling().dumps(items)
    return pickle.loads(b"".join(pieces), buffers=[memoryview(bytearray(buffer)) for buffer in buffers])


def test_there_are_tensors_only_where_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        pass

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert Tensor not in reducers()
    assert "torch" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    assert Tensor in reducers()


def test_real_tensors_of_all_kinds_arrive() -> None:
    torch = pytest.importorskip("torch")
    n = BESIDE
    kinds = ["bfloat16", "float16", "float32", "float64", "uint8", "int64", "bool", "complex64"]
    for size in (4, n):
        sent = [(torch.arange(size) % 7).to(getattr(torch, kind)) for kind in kinds]
        for before, after in zip(sent, there(*sent), strict=True):
            assert before.dtype == after.dtype
            assert torch.equal(before, after)
            after.zero_()
            assert before.any()
    table = torch.arange(4 * 6 * 5 * 7, dtype=torch.bfloat16).reshape(4, 6, 5, 7).repeat(4, 1, 1, 1)
    views = [
        table.to(memory_format=torch.channels_last),
        table.permute(2, 0, 3, 1),
        table[::2, :, 1:, ::3],
        table[0, 0, 0, 0],
        table[:0],
        table.expand(2, *table.shape),
        torch.complex(torch.ones(n), torch.ones(n)).conj(),
        torch.zeros(3, 0),
        torch.tensor(3),
    ]
    for before, after in zip(views, there(*views), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)
    assert there(views[0])[0].is_contiguous(memory_format=torch.channels_last)


def test_real_tensors_of_one_element_or_none_arrive_whatever_their_stride() -> None:
    torch = pytest.importorskip("torch")
    tokens = torch.arange(3 * BESIDE)
    views = [
        tokens[::BESIDE][:1],
        tokens[2 :: tokens.numel()],
        tokens[tokens.numel() :: 4],
        tokens.float()[:: tokens.numel()].requires_grad_(),
        tokens.to(torch.complex64)[:: tokens.numel()].conj().imag,
        tokens.reshape(3, 1, -1).transpose(0, 2)[:1, :, 2:],
        tokens.reshape(3, 1, -1)[:, :, ::BESIDE],
    ]
    for before, after in zip(views, there(*views), strict=True):
        assert (before.dtype, before.requires_grad) == (after.dtype, after.requires_grad)
        assert torch.equal(before, after)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_real_nested_tensors_arrive() -> None:
    torch = pytest.importorskip("torch")
    parts = [torch.arange(float(BESIDE)), torch.arange(2.0)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        (after,) = there(nested)
        assert after.layout is layout
        assert all(map(torch.equal, after.unbind(), parts))


def test_real_tensors_keep_what_training_needs_and_share_no_more_than_they_show() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.zeros(BESIDE, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(BESIDE))
    rows = torch.zeros(10_000, 8)[:1000]
    labelled = torch.zeros(3)
    labelled.label = "a"
    sparse = torch.eye(3).to_sparse()
    (data,), buffers = Pickling().dumps([weight, parameter, rows, labelled, sparse])
    assert [len(buffer) for buffer in buffers] == [4 * BESIDE, 4 * BESIDE, 32_000]
    got = pickle.loads(data, buffers=[memoryview(bytearray(buffer)) for buffer in buffers])
    assert got[0].requires_grad
    assert got[0].is_leaf
    assert type(got[1]) is torch.nn.Parameter
    assert torch.equal(got[2], rows)
    assert got[3].label == "a"
    assert torch.equal(got[4].to_dense(), torch.eye(3))
