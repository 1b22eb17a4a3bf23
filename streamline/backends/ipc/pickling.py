"""Items as bytes: a pickle, and beside it the memory of arrays, uncopied.

Plain pickle, in C, is tried first. Where it fails, or refers to a module that the other end doesn't have, cloudpickle
is used for the rest of the link: a link's items are mostly of one kind.

NumPy's own pickling shares the memory of plain, contiguous, writable arrays; others (subclasses, strided views,
`datetime64`) are copied two or three times, or arrive read-only. torch pickles a file per tensor. The reducers here
share the memory of all of them; the other end gets writable arrays of the same values, dtype and memory order. pyarrow
shares memory itself, but that of the whole table for a few rows: those are copied. NumPy, torch and pyarrow are never
imported to pack an item: where they aren't, there are no arrays, tensors or tables.
"""

from __future__ import annotations

import copyreg
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pickle import PickleBuffer
from struct import Struct
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from streamline.backends.ipc.columns import in_columns
from streamline.backends.ipc.messages import PackingError
from streamline.core.lazy_numpy import loaded_np, np

if TYPE_CHECKING:
    from streamline.backends.ipc.by_value import SentClasses

BESIDE = 1 << 12
"""Bytes of a buffer from which on it travels beside the pickle: copying smaller ones costs less than tracking
them (measured by bench/buffer_threshold.py)."""

SEARCHED = 1 << 14
"""Bytes of a pickle that is searched for module names; for longer ones the pickler's memo is faster."""

BUILT_IN = frozenset([str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float])
"""Types of most objects in a memo; importable everywhere."""


class PickledItems(NamedTuple):
    """Items as bytes.

    Attributes:
      pieces: of the pickle. A large `bytes` among the items is a piece, uncopied.
      buffers: beside it; the items' own memory.
    """

    pieces: list[bytes]
    buffers: list[memoryview]


class Pickling:
    """Packs the items of one end of a link; `pickle.loads` unpacks them, with arrays that are views of the buffers."""

    def __init__(self) -> None:
        self._sent_classes: SentClasses | None = None  # once cloudpickle is needed

    def dumps(self, items: Sequence[Any]) -> PickledItems:
        """Return the pickle, and the buffers beside it; raise `PackingError` if an item can't be pickled."""
        if type(items) is not list:
            items = list(items)
        if self._sent_classes is None:
            with suppress(Exception):  # the second try, or the search, raises
                pickled, memo = _plain(in_columns(items))
                if not _needs_cloudpickle(pickled, memo):
                    return pickled
        try:
            return self._by_value(items)
        except Exception as error:
            self._blame(items)
            raise PackingError(0, type(items).__name__) from error

    def fresh(self) -> Mapping[str, bytes]:
        """Return the definitions of classes to send before what was pickled since the last call."""
        return self._sent_classes.fresh() if self._sent_classes is not None else {}

    def _by_value(self, items: Sequence[Any]) -> PickledItems:
        from streamline.backends.ipc.by_value import ItemPickler, SentClasses

        sent = self._sent_classes or SentClasses()
        output = PickleBuffers()
        ItemPickler(output, output.take, reducers(), sent).dump(items)
        self._sent_classes = sent
        return output.pickled

    def _blame(self, items: Sequence[Any]) -> None:
        """Raise for the first item that can't be pickled."""
        from streamline.backends.ipc.unpicklable import pickling_error, unpicklable_part

        for index, item in enumerate(items):
            if pickling_error(item, self._dump_one) is not None:
                path = unpicklable_part(item, self._dump_one)
                part = path[-1][1] if path else item
                raise PackingError(index, type(part).__name__) from pickling_error(part, self._dump_one)

    def _dump_one(self, item: Any) -> None:
        self._by_value([item])


class PickleBuffers:
    """The output of a pickler."""

    def __init__(self) -> None:
        self.pickled = PickledItems([], [])

    def write(self, piece: bytes | bytearray | pickle.PickleBuffer) -> None:
        """Keep a piece: a frame of the pickle, or a large object, uncopied."""
        self.pickled.pieces.append(piece if type(piece) is bytes else bytes(piece))

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer beside the pickle; True: it is small, and goes into the pickle."""
        raw = buffer.raw()
        if raw.nbytes < BESIDE:
            return True
        self.pickled.buffers.append(raw)
        return False


def _plain(items: Any) -> tuple[PickledItems, Callable[[], dict[int, tuple[int, Any]]]]:
    output = PickleBuffers()
    pickler = pickle.Pickler(output, 5, buffer_callback=output.take)
    pickler.dispatch_table = reducers()
    pickler.dump(items)
    return output.pickled, pickler.memo.copy


def _needs_cloudpickle(pickled: PickledItems, memo: Callable[[], dict[int, tuple[int, Any]]]) -> bool:
    """Return whether a pickle refers to a module that only this process has: its script, or one registered by value.

    A short pickle is searched for the name (1 ns per byte; a false positive costs a second pickling); for a long one,
    the memo is.
    """
    cloudpickle = sys.modules.get("cloudpickle")
    names = ["__main__", *(cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ())]
    if len(pickled.pieces) == 1 and len(pickled.pieces[0]) <= SEARCHED:
        return any(name.encode() in pickled.pieces[0] for name in names)
    known = BUILT_IN | {loaded_np.ndarray}
    modules = {getattr(thing, "__module__", None) for _, thing in memo().values() if type(thing) not in known}
    return any(f"{module}.".startswith(f"{name}.") for module in modules for name in names)


Reducer = Callable[[Any], Any]

PLAIN = frozenset("biufcSUVMm")
"""Kinds of dtypes that are plain memory: not objects, nor variable-length strings."""


def reducers() -> dict[Any, Reducer]:
    """Return a dispatch table for a pickler; the user's `copyreg` entries take precedence."""
    table: dict[Any, Reducer] = {}
    if "numpy" in sys.modules:
        table = {loaded_np.ndarray: reduce_array, loaded_np.memmap: reduce_array}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor"):
        table[torch.Tensor] = reduce_tensor
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None and hasattr(pyarrow, "RecordBatch"):
        table[pyarrow.RecordBatch] = reduce_record_batch
        table[pyarrow.Table] = reduce_table
    table.update(copyreg.dispatch_table)
    return table


# Arrays ---------------------------------------------------------------------------------------------------------------
def reduce_array(array: np.ndarray[Any, Any]) -> Any:
    """As `__reduce_ex__`. A memory map is sent as its data, not as a file."""
    dtype = array.dtype
    if dtype.kind not in PLAIN or dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(5)
    flags = array.flags
    if flags.c_contiguous:
        return np.ndarray, (array.shape, dtype, _memory(array))
    if not flags.f_contiguous:
        array, packed = _dense(array)
        if packed.flags.c_contiguous and array is packed:
            return np.ndarray, (array.shape, dtype, _memory(array))
        return np.ndarray, (array.shape, dtype, _memory(packed), 0, array.strides)
    return np.ndarray, (array.shape, dtype, _memory(array), 0, array.strides)


def _dense(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a dense array, and its memory in C order; a mere transposition isn't copied."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    packed = array.transpose(order)
    if packed.flags.c_contiguous:
        return array, packed
    copy = np.ascontiguousarray(array)
    return copy, copy


def _memory(array: Any) -> PickleBuffer:
    """Return the memory of a contiguous array, marked writable, as the received array is to be."""
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    try:
        return PickleBuffer(array)
    except ValueError:  # the protocol has no name for datetime64, records that hold some, dtypes of other packages
        return PickleBuffer(array.ravel(order="K").view(np.uint8))


class _Writable:
    """Shows a read-only array as writable: else pickle would mark the buffer as read-only."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        size = array.nbytes
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (array.__array_interface__["data"][0], False),
        }


# Tensors --------------------------------------------------------------------------------------------------------------
def reduce_tensor(tensor: Any) -> Any:
    """As `__reduce_ex__`, for plain CPU tensors; others are left to torch."""
    import torch

    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_nested or tensor.__dict__ or tensor._backward_hooks:
        return tensor.__reduce_ex__(5)
    data = tensor.detach().resolve_conj().resolve_neg()
    order = sorted(range(data.dim()), key=lambda axis: -data.stride(axis))
    packed = data.permute(order)
    if not packed.is_contiguous():
        data = packed = data.contiguous()
    strides = None if data.is_contiguous() else tuple(data.stride())
    flat = packed.as_strided((packed.numel(),), (1,))  # of one element, a contiguous tensor may have any stride
    memory = PickleBuffer(flat.view(torch.uint8).numpy())
    return make_tensor, (memory, tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad)


def make_tensor(
    memory: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None, requires_grad: bool
) -> Any:
    """Return a tensor over this memory."""
    import torch

    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(memory, dtype=dtype)
        tensor = tensor.view(shape) if strides is None else tensor.as_strided(shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


# Tables ---------------------------------------------------------------------------------------------------------------
def reduce_record_batch(batch: Any) -> Any:
    """As `__reduce_ex__`, without most of the memory of other rows."""
    return _apart(batch).__reduce_ex__(5)


def reduce_table(table: Any) -> Any:
    """As `reduce_record_batch`."""
    import pyarrow

    if _dense_enough(table):
        return table.__reduce_ex__(5)
    return pyarrow.Table.from_batches([_apart(batch) for batch in table.to_batches()], table.schema).__reduce_ex__(5)


def _apart(batch: Any) -> Any:
    """Return a batch that uses less than half of its buffers copied, others as they are."""
    import pyarrow

    if _dense_enough(batch):
        return batch
    columns = [pyarrow.concat_arrays([column]) for column in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)


def _dense_enough(batch: Any) -> bool:
    """Return whether sending all of a batch's buffers is cheaper than copying the part in use."""
    return bool(batch.get_total_buffer_size() <= 2 * batch.nbytes)


# In a file ------------------------------------------------------------------------------------------------------------
FOOTER = Struct("<QQ")  # where the table of buffers begins, bytes of the pickle

ENTRY = Struct("<QQ?")  # where a buffer begins, its bytes, whether it is read-only


def write(pickled: PickledItems, file: BinaryIO) -> int:
    """Write the pickle, the buffers, the table of their offsets; return the bytes written."""
    file.writelines(pickled.pieces)
    size = file.tell()
    entries = []
    for view in pickled.buffers:
        begin = -(-file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE
        file.seek(begin)
        file.write(view)
        entries.append(ENTRY.pack(begin, view.nbytes, view.readonly))
    table = file.tell()
    file.write(b"".join(entries) + FOOTER.pack(table, size))
    return file.tell()


def load(fd: int) -> Any:
    """Return what was written, and close `fd`; its arrays are copy-on-write views of the file. Raises as unpickling."""
    try:
        mapped = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)
    table, size = FOOTER.unpack(mapped[-FOOTER.size :])
    buffers = []
    for begin, nbytes, readonly in ENTRY.iter_unpack(mapped[table : -FOOTER.size]):
        view = mapped[begin : begin + nbytes]
        buffers.append(view.toreadonly() if readonly else view)
    return pickle.loads(mapped[:size], buffers=buffers)
