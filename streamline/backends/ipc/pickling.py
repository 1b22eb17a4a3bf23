"""Items to bytes and back: a pickle, and beside it the memory of arrays, untouched.

Plain pickle, in C, is tried first. Where it fails, or speaks of a module that the other end doesn't have, cloudpickle
takes over for the rest of the link: a link's items are mostly of one kind.

How arrays and tensors are taken apart for pickle, so that their memory travels beside the pickle, once.

NumPy does it for plain, contiguous, writable arrays. The rest it copies two or three times (subclasses, strided views,
`datetime64` and whatever else refuses the buffer protocol), or they arrive as read-only; torch pickles a whole file per
tensor. Here all of them hand out their memory. The other side gets arrays of the same values, dtype and memory order,
always writable, over the memory that it is given.

pyarrow hands its memory out by itself, but of a few rows of a table it hands out all of the table: those are copied.

torch and pyarrow are not imported for it: where nobody has, there are no tensors, and no tables.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamline.backends.ipc.messages import PackingError

if TYPE_CHECKING:
    from streamline.backends.ipc.by_value import SentClasses

__all__ = ["BESIDE", "PickledItems", "Pickling", "reducers"]


BESIDE = 1 << 12
"""Bytes of a buffer from which on it travels beside the pickle: for smaller ones copying costs less than keeping
count (measured by bench/buffer_threshold.py)."""


SEARCHED = 1 << 14
"""Bytes of a pickle that is searched for the names of modules; a longer one costs more than asking the pickler."""


BUILT_IN = frozenset([str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, np.ndarray])
"""Types of most of what a pickler remembers; they are everywhere."""


DEPTH = 8
"""Containers within containers that are searched for what can't be pickled."""


class PickledItems(NamedTuple):
    """Items as bytes.

    Attributes:
      pieces: of the pickle. A large `bytes` among the items is a piece, itself: nothing was copied.
      buffers: beside it; the items' own memory.
    """

    pieces: list[bytes]
    buffers: list[memoryview]


class Pickling:
    """Packs the items of one end of a link, and unpacks those of the other."""

    def __init__(self) -> None:
        self._told: SentClasses | None = None  # once cloudpickle is needed
        self._definitions: dict[str, bytes] = {}
        self._classes: dict[str, type] = {}

    def dumps(self, items: Sequence[Any]) -> PickledItems:
        """Return the pickle, and the buffers beside it.

        Raises:
          PackingError: one of them can't be pickled.
        """
        if type(items) is not list:
            items = list(items)
        if self._told is None:
            with suppress(Exception):  # whatever a class's own code raises: the second try, or the search, says what
                pickled, memo = _plain(items)
                if not _speaks_of_others(pickled, memo):
                    return pickled
        try:
            return self._by_value(items)
        except Exception as error:
            self._blame(items)
            raise PackingError(0, type(items).__name__) from error

    def loads(self, data: bytes | memoryview, buffers: Sequence[memoryview]) -> list[Any]:
        """Return the items; arrays are views of the buffers.

        Raises:
          What unpickling raises.
        """
        with self._recalling():
            items: list[Any] = pickle.loads(data, buffers=buffers)
        return items

    def fresh(self) -> Mapping[str, bytes]:
        """Return the definitions of classes that must cross before what was pickled since the last call."""
        return self._told.fresh() if self._told is not None else {}

    def define(self, definitions: Mapping[str, bytes]) -> None:
        """Take the other end's definitions; they are looked at when they are needed."""
        self._definitions.update(definitions)

    def _recalling(self) -> Any:
        if not self._definitions:
            return nullcontext()
        from streamline.backends.ipc.by_value import recalling

        return recalling(self._definitions, self._classes)

    def _by_value(self, items: Sequence[Any]) -> PickledItems:
        from streamline.backends.ipc.by_value import ByValue, SentClasses

        told = self._told or SentClasses()
        into = _Into()
        ByValue(into, told, reducers(), into.takes).dump(items)
        self._told = told
        return into.pickled

    def _blame(self, items: Sequence[Any]) -> None:
        """Raise for the first item that can't be pickled."""
        for index, item in enumerate(items):
            error = self._failure(item)
            if error is not None:
                culprit, why = self._culprit(item, error, DEPTH)
                raise PackingError(index, type(culprit).__name__) from why

    def _failure(self, thing: Any) -> Exception | None:
        try:
            self._by_value([thing])
        except Exception as error:
            return error
        return None

    def _culprit(self, thing: Any, error: Exception, depth: int) -> tuple[Any, Exception]:
        """Return the innermost part that can't be pickled, and why."""
        for part in _parts(thing) if depth else ():
            why = self._failure(part)
            if why is not None:
                return self._culprit(part, why, depth - 1)
        return thing, error


class _Into:
    """What a pickler writes into."""

    def __init__(self) -> None:
        self.pickled = PickledItems([], [])

    def write(self, piece: bytes | bytearray | pickle.PickleBuffer) -> None:
        """Keep a piece: a frame of the pickle, or a large object that a frame would have to copy."""
        self.pickled.pieces.append(piece if type(piece) is bytes else bytes(piece))

    def takes(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer, beside the pickle; True: it's small, and part of it."""
        raw = buffer.raw()
        if raw.nbytes < BESIDE:
            return True
        self.pickled.buffers.append(raw)
        return False


def _plain(items: Sequence[Any]) -> tuple[PickledItems, Callable[[], dict[int, tuple[int, Any]]]]:
    into = _Into()
    pickler = pickle.Pickler(into, 5, buffer_callback=into.takes)
    pickler.dispatch_table = reducers()
    pickler.dump(items)
    return into.pickled, pickler.memo.copy


def _speaks_of_others(pickled: PickledItems, memo: Callable[[], dict[int, tuple[int, Any]]]) -> bool:
    """Whether a pickle refers to a module that only this process has: its script, or one registered with cloudpickle.

    A short pickle is searched for the name; if it is no more than a text that contains it, cloudpickle does what pickle
    would have. That is slow for a long one: 1 ns a byte. There, what the pickler remembers is looked at.
    """
    cloudpickle = sys.modules.get("cloudpickle")
    names = ["__main__", *(cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ())]
    if len(pickled.pieces) == 1 and len(pickled.pieces[0]) <= SEARCHED:
        return any(name.encode() in pickled.pieces[0] for name in names)
    modules = {getattr(thing, "__module__", None) for _, thing in memo().values() if type(thing) not in BUILT_IN}
    return any(f"{module}.".startswith(f"{name}.") for module in modules for name in names)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif is_dataclass(thing) and not isinstance(thing, type):
        yield from (getattr(thing, field.name) for field in fields(thing))
    else:
        yield from getattr(thing, "__dict__", {}).values()


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
