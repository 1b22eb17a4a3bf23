"""Items into a batch, and a batch into items: what `.batch(collate="stack")` and `.unbatch()` do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeAlias

from streamline.core.blame import saved_as, stage_name
from streamline.core.lazy_numpy import has_more, loaded_np, np
from streamline.core.place import Place
from streamline.core.tree import field_names, parts_of, with_parts
from streamline.errors import DataError, PlanTypeError

Array: TypeAlias = "np.ndarray[Any, Any]"


@saved_as("as_list")
def as_list(items: list[Any]) -> list[Any]:
    return items


@saved_as("stack")
def stack(items: list[Any], place: Place | None = None) -> Any:
    """Return one batch of items that look alike.

    Args:
      items: at least one. NumPy arrays, numbers, bools and torch tensors are stacked along a new first axis; dicts,
        (named) tuples and dataclasses are stacked part by part; str, bytes, None, lists and all else become a list.
        Where there is a tensor in an item, numbers, bools and arrays of all its parts become tensors, too.
      place: where large arrays are written; None: in ordinary memory.

    Returns:
      As the items, each array [batch, *shape] in a memory of its own.

    Raises:
      DataError: shapes, types, keys or lengths differ; the message shows them, and the part.
    """
    return _stack(items, _holds_tensor(items[0]), place)


@saved_as("stack_tensors")
def stack_tensors(items: list[Any], place: Place | None = None) -> Any:
    """Return the same, of tensors throughout. Imports torch."""
    import_module("torch")
    return _stack(items, True, place)


def shown_collate(collate: Callable[[list[Any]], Any]) -> list[str]:
    """Return `collate=` for a printed plan; nothing of the default."""
    if collate is stack:
        return []
    names: dict[object, str] = {as_list: "None", stack_tensors: "'torch'"}
    return [f"collate={names.get(collate) or stage_name(collate)}"]


WAY_OUT = " in a .map before .batch, or keep them apart with .batch(collate=None)"


def _unlike(where: str, what: str, found: str, way: str = "") -> DataError:
    """Return the error of items that can't be stacked, `where` in an item: "['image'][0]"."""
    return DataError(f"a batch needs {what}{where and f' at item{where}'}, got {found}{way}")


def _stack(items: list[Any], tensors: bool, place: Place | None, where: str = "") -> Any:
    first, types = items[0], set(map(type, items))
    if len(types) > 1:
        tensors = tensors or any(map(_is_tensor, items))
        _check_types(items, where)
    if tensors and any(map(has_more, types)):
        raise _unlike(where, "plain arrays for tensors", _names(items), f": .filled() or np.asarray them{WAY_OUT}")
    if len(types) > 1 and any(map(_is_tensor, items)):
        torch = sys.modules["torch"]
        return _try_stack(lambda mixed: torch.stack([torch.as_tensor(item) for item in mixed]), items, where)
    if isinstance(first, bool | int | float | complex | loaded_np.ndarray | loaded_np.generic):
        made = _try_stack(partial(_stack_values, types=types, place=place, where=where), items, where)
        return _tensor_of(made) if tensors else made
    if _is_tensor(first):
        torch = sys.modules["torch"]
        stack_all = partial(_stack_tensors, place=place) if types == {torch.Tensor} else torch.stack
        return _try_stack(stack_all, items, where)
    if isinstance(first, Mapping) and _alike(items, lambda item: sorted(item, key=str), where):
        return {key: _stack([item[key] for item in items], tensors, place, f"{where}[{key!r}]") for key in first}
    if isinstance(first, tuple) and _alike(items, len, where):
        named = hasattr(first, "_fields")
        parts = [(f".{name}" if named else f"[{name}]") for name in getattr(first, "_fields", range(len(first)))]
        columns = zip(parts, zip(*items, strict=True), strict=True)
        made = [_stack(list(column), tensors, place, where + part) for part, column in columns]
        return type(first)(*made) if named else tuple(made)
    if names := field_names(first):
        fields = {name: [getattr(item, name) for item in items] for name in names}
        return with_parts(first, {name: _stack(fields[name], tensors, place, f"{where}.{name}") for name in names})
    return items  # also what has no parts: a batch of them would not know how many they were


def _stack_values(items: list[Any], types: set[type], place: Place | None, where: str) -> Array:
    """Return numbers or arrays as one array, exactly: of integers beyond int64, NumPy would make floats or objects."""
    if masks := any(map(has_more, types)):
        made = _stack_subclass(items, types, where)
    elif types == {np.ndarray}:
        made = _stack_arrays(items, place)
    else:
        made = (np.stack if isinstance(items[0], np.ndarray) else np.asarray)(items)  # of numbers 10 x as fast
    if made.dtype.kind in "fO" and all(isinstance(item, int) or np.asarray(item).dtype.kind in "biu" for item in items):
        bounds = [int(bound) for item in items if np.ma.count(item) for bound in (np.min(item), np.max(item))]
        if min(bounds, default=0) < 0 or max(bounds, default=0) >= 2**64:
            what = "integers of one dtype (int64, or uint64 where none is negative)"
            raise _unlike(where, what, f"{min(bounds)} and {max(bounds)}", f": make them floats or texts{WAY_OUT}")
        made = (np.ma if masks else np).stack([np.asanyarray(item, np.uint64) for item in items])
    if made.dtype == np.uint64 and any(getattr(item, "dtype", None) != np.uint64 for item in items):
        what = f"a batch has uint64{where and f' at item{where}'}, and batches of smaller integers int64"
        warnings.warn(f"{what}: make them np.uint64 in a .map before .batch", RuntimeWarning, stacklevel=2)
    return made


def _stack_subclass(items: list[Any], types: set[type], where: str) -> Array:
    """Return masked arrays, or those of a class that says itself how they are stacked, as one; never as a plain one."""
    masks = {kind for kind in types if issubclass(kind, np.ma.MaskedArray) and kind is not type(np.ma.masked)}
    if not any(map(has_more, types - masks)):
        return np.ma.stack(items)
    if len(types) == 1 and type(items[0]).__array_function__ is not np.ndarray.__array_function__:
        return np.stack(items)
    raise _unlike(where, "plain or masked arrays", _names(items), f": .filled() or np.asarray them{WAY_OUT}")


PAGE_BYTES = 4096

APART_BYTES = 128
"""Where an address written to is fewer bytes after the one read from, modulo a page, the processor takes what it reads
for what it just wrote: copies by `rep movsb` run at down to a tenth of their speed (`python -m bench copies`)."""

LEAST_BYTES = 2048
"""Of a row, from which on glibc copies by `rep movsb`."""


def empty_batch(count: int, first: Array, dtype: np.dtype[Any], place: Place | None = None) -> Array:
    """Return uninitialised memory for `count` rows like `first`, into which they are copied at full speed.

    Of large rows it begins at a cache line, in a block that is 192 bytes larger.
    """
    shape, nbytes = (count, *first.shape), count * first.size * dtype.itemsize
    memory = None if place is None else place.empty(nbytes + 64 + APART_BYTES)
    if memory is None:
        if nbytes < count * LEAST_BYTES:
            return np.empty(shape, dtype)
        memory = np.empty(nbytes + 64 + APART_BYTES, np.uint8)
    return np.ndarray(shape, dtype, memory, _start(memory, first.ctypes.data))


def _start(memory: Array, source: int) -> int:
    """Return where in `memory` to write what is read from this address."""
    address = memory.ctypes.data
    start = -address % 64
    return start + APART_BYTES if (address + start - source) % PAGE_BYTES < APART_BYTES else start


def _stack_arrays(rows: list[Array], place: Place | None) -> Array:
    """Return what `np.stack` does, of arrays that are of no subclass."""
    first = rows[0]
    dtype = np.result_type(first, first)  # in the machine's own order of bytes
    plain = not dtype.hasobject and dtype.names is first.dtype.metadata is None and first.ndim and first.nbytes
    plain = plain and first.flags.c_contiguous and len({row.strides for row in rows}) == 1
    if not plain or len(set(map(len, rows))) > 1:
        return np.stack(rows)
    batch = empty_batch(len(rows), first, dtype, place)
    try:
        np.concatenate(rows, out=batch.reshape(-1, *first.shape[1:]), casting="equiv")
    except (TypeError, ValueError):  # of several dtypes, or shapes
        return np.stack(rows)
    return batch


LEAST_TENSORS = 1 << 21
"""Bytes of a batch of tensors from which on it is written in place: of CPU time at both ends, 18 MiB take 1.8 ms in
place of 3.8 so, 4 MiB 0.4-0.6 in place of 0.6-0.7, 2 MiB as much, 1 MiB a tenth more."""

LEAST_TENSOR = 1 << 13
"""Of each of them: so many of 2 KiB take a tenth more."""

_TENSOR_KIND = attrgetter("dtype", "requires_grad")


def _stack_tensors(rows: list[Any], place: Place | None) -> Any:
    """Return what `torch.stack` does, of tensors that are of no subclass."""
    torch, first, memory = sys.modules["torch"], rows[0], None
    plain = place is not None and first.is_cpu and first.layout is torch.strided
    plain = plain and not (first.is_quantized or first.is_nested) and first.is_contiguous()
    nbytes = len(rows) * first.nbytes if plain and first.nbytes >= LEAST_TENSOR else 0
    if place is not None and nbytes >= LEAST_TENSORS and set(map(_TENSOR_KIND, rows)) == {(first.dtype, False)}:
        memory = place.empty(nbytes + 64 + APART_BYTES)
    if memory is None:
        return torch.stack(rows)
    start = _start(memory, first.data_ptr())
    storage = torch.from_numpy(memory[start : start + nbytes]).untyped_storage()
    batch = torch.empty(0, dtype=first.dtype, device="cpu").set_(storage, 0, (len(rows), *first.shape))
    if batch.stride()[1:] != first.stride():  # of axes of length 1
        return torch.stack(rows)
    return torch.stack(rows, out=batch)


def unstack(batch: Any) -> Iterable[Any]:
    """Return the items of what `stack` or `as_list` made; a PlanTypeError if it is no batch: a number, a string."""
    if isinstance(batch, list):
        return batch
    if (isinstance(batch, loaded_np.ndarray) and batch.ndim) or _is_tensor(batch):
        rows: Iterator[Any] = iter(batch)
        return rows
    if isinstance(batch, Mapping):
        return (dict(zip(batch, row, strict=True)) for row in _rows(batch.values()))
    if isinstance(batch, tuple):
        rows = _rows(batch)
        return (type(batch)(*row) for row in rows) if hasattr(batch, "_fields") else rows
    if names := field_names(batch):
        columns = _rows(getattr(batch, name) for name in names)
        return (with_parts(batch, dict(zip(names, row, strict=True))) for row in columns)
    raise PlanTypeError(
        f".unbatch expected a batch (list, array, dict, tuple or dataclass), got {type(batch).__name__}"
    )


def _rows(columns: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*(unstack(column) for column in columns), strict=True)


def _try_stack(stack_all: Callable[[list[Any]], Any], items: list[Any], where: str) -> Any:
    try:
        return stack_all(items)
    except DataError:
        raise
    except (ValueError, RuntimeError, TypeError) as error:  # NumPy's, torch's
        shapes = sorted({str(tuple(np.shape(item))) for item in items})
        if len(shapes) == 1:
            error.add_note(f"in a batch of {_names(items)}{where and f' at item{where}'}")
            raise
        raise _unlike(where, "arrays of one shape", ", ".join(shapes), f": pad or crop them{WAY_OUT}") from error


def _tensor_of(array: Any) -> Any:
    """Return a tensor in the same memory; texts, times and objects stay arrays."""
    if array.dtype.kind not in "biufc":
        return array
    try:
        return sys.modules["torch"].from_numpy(
            array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        )
    except TypeError:  # a type that torch doesn't have
        return array


def _holds_tensor(item: Any) -> bool:
    """Whether there is a tensor among the parts that are stacked one by one."""
    if "torch" not in sys.modules:
        return False
    parts = () if isinstance(item, list) else parts_of(item) or ()
    return _is_tensor(item) or any(_holds_tensor(part) for _, part in parts)


def _alike(items: list[Any], shape: Callable[[Any], Any], where: str) -> Any:
    """Return what `shape` says of all items."""
    found = [shape(item) for item in items]
    for other in found:
        if other != found[0]:
            raise _unlike(where, "items of one structure", f"{found[0]} and {other}")
    return found[0]


def _check_types(items: list[Any], where: str) -> None:
    """Insist that all items are stacked in the same way: [1, None] would be an array of objects, [None, 1] a list."""
    kinds = set(map(_type_of, items))
    if len(kinds) > 1 and not kinds <= {"array", "tensor"}:
        raise _unlike(where, "items of one type", _names(items), f": make them alike{WAY_OUT}")


def _names(items: list[Any]) -> str:
    return ", ".join(dict.fromkeys(type(item).__name__ for item in items))


def _type_of(item: Any) -> object:
    if isinstance(item, bool | int | float | complex | loaded_np.ndarray | loaded_np.generic):
        return "array"
    if _is_tensor(item):
        return "tensor"
    if isinstance(item, Mapping):
        return Mapping
    if isinstance(item, tuple) or field_names(item):
        return type(item)
    return object


def _is_tensor(item: Any) -> bool:
    torch = sys.modules.get("torch")  # not imported for this: where there is a tensor, it is
    return torch is not None and isinstance(item, torch.Tensor)
