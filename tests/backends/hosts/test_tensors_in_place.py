"""Batches of tensors that are written where the consumer reads them, and are as by `torch.stack`."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.backends.ipc import shared_memory
from streamline.backends.ipc.messages import ItemsMessage
from streamline.backends.ipc.socket_link import ReceivedItems, SocketLink
from streamline.errors import DataError
from streamline.transforms import collate
from streamline.transforms.collate import stack

torch: Any = pytest.importorskip("torch")

FLOATS = 1 << 17
SIZE = 8
BATCHES = 20
KIB = 1 << 10

KEPT: list[Any] = []  # in a host: what its stage keeps


def row(number: int) -> Any:
    return torch.full((FLOATS,), number, dtype=torch.bfloat16)


def expected(number: int) -> Any:
    return torch.stack([row(SIZE * number + at) for at in range(SIZE)])


def keep(batch: Any) -> Any:
    """Keep all, and insist on what was kept."""
    KEPT.append(batch if len(KEPT) % 2 else batch.view(torch.int16).numpy())
    for number, kept in enumerate(KEPT):
        kept = kept if number % 2 else torch.from_numpy(kept).view(torch.bfloat16)
        assert torch.equal(kept, expected(number)), number
    return batch


def plus_one(batch: Any) -> Any:
    batch["x"] += 1
    return batch


def batches() -> sl.Pipeline[Any]:
    return sl.from_items(range(SIZE * BATCHES)).map(row).batch(SIZE)


def both(number: int) -> Any:
    return {"x": row(number), "number": number}


PIPES: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "batch": batches,
    "changed by a map": lambda: sl.from_items(range(SIZE * BATCHES)).map(both).batch(SIZE).map(plus_one),
}


@pytest.mark.parametrize("name", PIPES)
def test_batches_of_tensors_leave_a_process_without_a_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, copied, unpack = 0, 0, SocketLink.unpack

    def counting(link: SocketLink, packed: Any) -> list[Any]:
        nonlocal arrived, copied
        assert isinstance(packed, ReceivedItems)
        arrived, copied = arrived + packed.nbytes, copied + packed.copied_bytes
        return unpack(link, packed)

    monkeypatch.setattr(SocketLink, "unpack", counting)
    with PIPES[name]().open(backend=sl.Processes(1)) as stream:
        for batch in stream:
            del batch
    assert arrived > BATCHES * SIZE * FLOATS * 2
    assert copied < 100_000


@pytest.mark.parametrize("stage", [keep, None], ids=["a stage keeps all", "none does"])
def test_what_is_held_of_tensors_is_never_overwritten(stage: Callable[[Any], Any] | None) -> None:
    pipe = batches() if stage is None else batches().map(stage)
    held = []
    with pipe.open(backend=sl.Processes(1)) as stream:
        for number, batch in enumerate(stream):
            assert torch.equal(batch, expected(number))
            batch.fill_(-number)  # the consumer's own: the host doesn't see it
            held.append(batch[3:, 7::2] if number % 2 else batch.untyped_storage())
            del batch
    for number, view in enumerate(held):
        kept = view if number % 2 else torch.empty(0, dtype=torch.bfloat16).set_(view)
        assert (kept == -number).all()
    assert len(held) == BATCHES


# Which tensors, and how they are held ---------------------------------------------------------------------------------
class OddMemory:
    """A place that lends memory at an odd address."""

    def empty(self, nbytes: int) -> Any:
        return np.full(nbytes + 7, 0xDB, np.uint8)[7:]


IMAGE = torch.arange(3 * 4 * 5.0).reshape(3, 4, 5)
ONE = torch.ones(1, 2, 1, 1).to(memory_format=torch.channels_last)  # contiguous, with strides of its own

IN_PLACE: dict[str, list[Any]] = {
    **{str(kind): [IMAGE.to(kind), IMAGE.to(kind) + 1] for kind in (torch.bfloat16, torch.complex64, torch.uint8)},
    "others are strided": [IMAGE, torch.ones(5, 4, 3).permute(2, 1, 0)],
    "scalars": [torch.tensor(1), torch.tensor(2)],
    "bool": [IMAGE > 3, IMAGE > 4],
    "gray": [IMAGE[:1], IMAGE[1:2]],
    "conj": [torch.complex(IMAGE, IMAGE).conj(), torch.complex(IMAGE, -IMAGE)],
    "negative": [torch.complex(IMAGE, IMAGE).conj().imag.contiguous(), IMAGE],
}
AS_EVER: dict[str, list[Any]] = {
    "requires grad": [torch.ones(3), torch.ones(3, requires_grad=True)],
    "strided": [IMAGE.permute(2, 1, 0), IMAGE.permute(2, 1, 0)],
    "strides of its own": [ONE, ONE],
    "parameters": [torch.nn.Parameter(torch.ones(3))] * 2,
    "dtypes": [torch.ones(3), torch.ones(3, dtype=torch.float64)],
    "meta": [torch.ones(3, device="meta")] * 2,
}


@pytest.mark.parametrize("name", [*IN_PLACE, *AS_EVER])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_batch_in_place_is_what_torch_makes(name: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "LEAST_TENSORS", 1)
    monkeypatch.setattr(collate, "LEAST_TENSOR", 1)
    rows = (IN_PLACE | AS_EVER)[name]
    with mode():
        theirs, ours = torch.stack(rows), stack(rows, OddMemory())
    for look in ("dtype", "device", "shape", "layout", "requires_grad", "is_leaf", "_base"):
        assert getattr(ours, look) == getattr(theirs, look), look
    for look in ("is_inference", "is_conj", "is_neg", "_is_view"):
        assert getattr(ours, look)() == getattr(theirs, look)(), look
    if theirs.layout == torch.strided and theirs.is_cpu:
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
        storage = ours.untyped_storage()
        assert storage.nbytes() == theirs.untyped_storage().nbytes()
        assert storage.resizable() is (name not in IN_PLACE), "NumPy's memory isn't"


def test_ragged_tensors_are_refused_with_their_shapes_in_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "LEAST_TENSORS", 1)
    monkeypatch.setattr(collate, "LEAST_TENSOR", 1)
    with pytest.raises(DataError, match=r"got \(3, 4, 5\), \(4, 5\)"):
        stack([IMAGE, IMAGE[0]], OddMemory())


def in_storage(tensor: Any) -> Callable[[], bytes]:
    storage = tensor.untyped_storage()
    return lambda: torch.empty(0).set_(storage).numpy().tobytes()


def in_graph(tensor: Any) -> Callable[[], bytes]:
    """Only autograd holds it."""
    weight = torch.ones((), requires_grad=True)
    made = tensor.float() if tensor.dtype != torch.float32 else weight * tensor
    return lambda: torch.autograd.grad(made.sum(), weight, retain_graph=True)[0].numpy().tobytes()


def set_to(tensor: Any) -> Callable[[], bytes]:
    other = torch.empty(0).set_(tensor)
    return lambda: other.numpy().tobytes()


def suspended(tensor: Any) -> Callable[[], bytes]:
    def frame() -> Iterator[bytes]:
        mine = tensor[1:]
        while True:
            yield mine.numpy().tobytes()

    generator = frame()
    return lambda: next(generator)


HOLDERS: dict[str, Callable[[Any], Callable[[], bytes]]] = {
    "view": lambda tensor: tensor[1:, ::2].numpy().tobytes,
    "dtype": lambda tensor: tensor.view(torch.int16).numpy().tobytes,
    "numpy": lambda tensor: tensor.numpy()[1:].tobytes,
    "memoryview": lambda tensor: memoryview(tensor.numpy()).tobytes,
    "dlpack": lambda tensor: np.from_dlpack(tensor)[1:].tobytes,
    "dlpack of torch": lambda tensor: torch.from_dlpack(tensor).numpy().tobytes,
    "detached": lambda tensor: tensor.detach().t().numpy().tobytes,
    "data": lambda tensor: tensor.data.numpy().tobytes,
    "storage": in_storage,
    "set": set_to,
    "graph": in_graph,
    "generator": suspended,
    "unbound": lambda tensor: tensor.unbind()[2].numpy().tobytes,
}


@pytest.mark.parametrize("end", ["near", "far"])
@pytest.mark.parametrize("how", HOLDERS)
async def test_a_slab_is_used_again_only_when_no_tensor_lies_in_it(
    how: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "LENT_BYTES", KIB)
    monkeypatch.setattr(collate, "LEAST_TENSORS", KIB)
    near, far = (SocketLink(sock, pool_bytes=KIB << 10) for sock in socket.socketpair(socket.AF_UNIX))

    async def crossed(value: int, hold: bool) -> tuple[Any, Any]:
        """Return what holds a batch at the near end, and the batch at the far end."""
        batch = stack([torch.full((KIB << 2,), float(value))] * 4, near.place)
        reader = HOLDERS[how](batch) if hold else None
        packed = near.pack([batch])
        del batch
        near.send(ItemsMessage(1, packed, b""))
        del packed
        (message,) = await far.receive()
        assert isinstance(message, ItemsMessage)
        assert isinstance(message.packed, ReceivedItems)
        assert (message.packed.copied_bytes < KIB) is not hold, "copied if, and only if, it is held"
        (arrived,) = far.unpack(message.packed)
        return reader, arrived

    with closing(near), closing(far):
        reader, arrived = await crossed(1, end == "near")
        if end == "far":
            reader = HOLDERS[how](arrived)
        else:
            arrived.fill_(3)
        del arrived
        before = reader()
        for value in range(10, 20):
            _, other = await crossed(value, hold=False)
            assert (other == value).all()
            del other
            assert reader() == before
        assert near._pool.nbytes <= 3 * 80 * KIB, "slabs are used again"
    gc.collect()
    assert reader() == before


def test_small_batches_are_as_ever_and_one_that_torch_moves_lets_go_of_its_slab() -> None:
    pool = shared_memory.SlabPool(64 << 20)
    assert stack([torch.zeros(100)] * 8000, pool).untyped_storage().resizable()
    assert stack([torch.zeros(1 << 15)] * 8, pool).untyped_storage().resizable()
    assert stack([torch.eye(3).to_sparse()] * 2, pool).is_sparse
    large = stack([torch.zeros(1 << 17)] * 8, pool)
    assert [slab.held for slab in pool._lent] == [True]
    large.share_memory_()
    assert not large.any()
    assert [slab.held for slab in pool._lent] == [False]
    pool.close()
