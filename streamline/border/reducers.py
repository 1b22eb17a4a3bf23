"""How arrays and tensors are taken apart for pickle, so that their memory travels beside the pickle, once.

NumPy does it for plain, contiguous, writable arrays. The rest it copies two or three times (subclasses, strided views,
`datetime64` and whatever else refuses the buffer protocol), or they arrive as read-only; torch pickles a whole file per
tensor. Here all of them hand out their memory. The other side gets arrays of the same values, dtype and memory order,
always writable, over the memory that it is given.

pyarrow hands its memory out by itself, but of a few rows of a table it hands out all of the table: those are copied.

torch and pyarrow are not imported for it: where nobody has, there are no tensors, and no tables.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import numpy as np

__all__ = ["reducers"]

Reducer = Callable[[Any], Any]

PLAIN = frozenset("biufcSUVMm")
"""Kinds of dtypes whose memory is all there is to them. Not objects, nor NumPy's strings of any length."""


def reducers() -> dict[Any, Reducer]:
    """Return a dispatch table for a pickler: what `copyreg` knows comes first, it is the user's word."""
    table: dict[Any, Reducer] = {np.ndarray: reduce_array, np.memmap: reduce_array}
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
    """As `__reduce_ex__`. A memory map crosses as the data that it shows, not as a file."""
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
    """Return an array without gaps, and the same memory in C order: of a mere transposition nothing is copied."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    packed = array.transpose(order)
    if packed.flags.c_contiguous:
        return array, packed
    copy = np.ascontiguousarray(array)
    return copy, copy


def _memory(array: Any) -> PickleBuffer:
    """Return the memory of a contiguous array, as one that may be written to: what arrives over it can."""
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    try:
        return PickleBuffer(array)
    except (
        ValueError
    ):  # datetime64, records that hold some, dtypes of other packages: the protocol has no name for them
        return PickleBuffer(array.ravel(order="K").view(np.uint8))


class _Writable:
    """Shows a read-only array as a writable one, to pickle, which marks what it wrote as read-only otherwise."""

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
    """As `__reduce_ex__`, for tensors that are nothing but memory of the CPU; the rest torch takes apart itself."""
    import torch

    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.__dict__ or tensor._backward_hooks:
        return tensor.__reduce_ex__(5)
    data = tensor.detach().resolve_conj().resolve_neg()
    order = sorted(range(data.dim()), key=lambda axis: -data.stride(axis))
    packed = data.permute(order)
    if not packed.is_contiguous():
        data = packed = data.contiguous()
    strides = None if data.is_contiguous() else tuple(data.stride())
    memory = PickleBuffer(packed.reshape(-1).view(torch.uint8).numpy())
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
    """As `__reduce_ex__`; the memory of the rows that it shows, and not much beside."""
    return _apart(batch).__reduce_ex__(5)


def reduce_table(table: Any) -> Any:
    """As `reduce_record_batch`."""
    import pyarrow

    if _dense_enough(table):
        return table.__reduce_ex__(5)
    return pyarrow.Table.from_batches([_apart(batch) for batch in table.to_batches()], table.schema).__reduce_ex__(5)


def _apart(batch: Any) -> Any:
    """Return a batch that shows less than half of its memory with memory of its own."""
    import pyarrow

    if _dense_enough(batch):
        return batch
    columns = [pyarrow.concat_arrays([column]) for column in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)


def _dense_enough(batch: Any) -> bool:
    """Whether it is less work to send all of a batch's memory than to copy what it shows, and send that."""
    return bool(batch.get_total_buffer_size() <= 2 * batch.nbytes)
