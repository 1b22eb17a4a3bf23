"""How a plan travels to the host processes: pickled once, into a nameless file that all of them map.

Arrays stand in the file as they are, and a host maps them copy-on-write: a dataset in the plan costs its memory once,
not once per host. Memory maps of files travel as path and offset: the child maps the same pages. Functions and classes
that a child couldn't import (of the main module, a notebook, a test) travel by value. What can't be pickled is searched
for, and named in the error.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import functools
import hashlib
import importlib.machinery
import mmap
import os
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile
from typing import Any, Protocol, TypeAlias

import cloudpickle

from streamline.backends.ipc.by_value import LOCKS, PRIMITIVES, ValuePickler
from streamline.backends.ipc.pickling import PickleBuffers, PickledItems, write
from streamline.backends.ipc.unpicklable import kind_of, pickling_error, unpicklable_part
from streamline.core.forks import ForkSafeLock
from streamline.core.lazy_numpy import loaded_np, np
from streamline.errors import HostError, PlanError, users_level
from streamline.plan.fingerprint import code_hash


def mapped_again(array: np.ndarray[Any, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return a `__reduce__` value that maps the file of `array` again; None: it maps none.

    Views of a memory map count, too. A map in mode "c" doesn't: what was written to it is in no file.
    """
    root = _root(array)
    if root is None or type(array) not in (np.memmap, np.ndarray) or not array.size or array.dtype.hasobject:
        return None
    modes = {"r": "r", "r+": "r+", "w+": "r+"}
    if root.mode not in modes or root.filename is None or not os.path.exists(root.filename):  # noqa: PTH110 - a string
        return None
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    before = sum(-step for step in reach if step < 0)
    size = before + sum(step for step in reach if step > 0) + array.itemsize
    begin = root.offset + _address(array) - _address(root) - before
    place = (str(root.filename), modes[root.mode], begin, size)
    look = (type(array) is np.memmap, before, array.shape, array.strides, array.dtype, array.flags.writeable)
    return _mapped, (place, look)


def _root(array: np.ndarray[Any, Any]) -> Any:
    """Return the memory map that `array` is a view of, as it was opened."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) else None


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _mapped(place: tuple[str, Any, int, int], look: tuple[bool, int, Any, Any, Any, bool]) -> np.ndarray[Any, Any]:
    path, mode, begin, size = place
    as_map, first, shape, strides, dtype, writeable = look
    whole: Any = np.memmap(path, np.uint8, mode, offset=begin, shape=(size,))
    kind: Any = np.memmap if as_map else np.ndarray
    array: Any = np.ndarray.__new__(kind, shape, dtype, buffer=whole, offset=first, strides=strides)
    if as_map:
        array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, begin + first, mode
    array.flags.writeable = writeable
    return array  # type: ignore[no-any-return]


MOST_BYTES = 64 << 20
"""Bytes of a plan without a warning: they take some 50 ms to write, and are seldom a dataset by mistake."""

NO_ROOM = {errno.EFBIG, errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE}

InBand: TypeAlias = Callable[[pickle.PickleBuffer], bool]
"""Returns whether a buffer goes into the pickle, and not beside it."""

Keeps: TypeAlias = Callable[[object], bool]
"""Returns whether a computed value is sent."""

_registering = ForkSafeLock()  # reentrant: an object's `__reduce__` may pickle a part of the plan
"""cloudpickle's registry of modules by value is global."""


class HasFileno(Protocol):
    """A shipped payload."""

    def fileno(self) -> int: ...


class Shipped:
    """A payload in a nameless file of `nbytes`, freed with its last descriptor; `close` doesn't wait for collection."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Close its descriptor; hosts that have one keep it. Idempotent."""
        self._closer()
        self._fd = -1


def ship(payload: object, *, alike: bool = False) -> Shipped:
    """Pickle `payload` for any number of hosts.

    Args:
      alike: so that what is the same in two processes of a program has the same `digest`: without values that
        properties have computed, and with one identity of each class that is sent by value.

    Raises:
      PlanError: it can't be pickled; the message names the part and its stage.
      HostError: no memory or descriptors are left.
    """
    try:
        pickled = _pickled(payload, alike=alike)
    except Exception as error:
        raise PlanError(_why_unsendable(payload, error)) from error
    with _new_file() as fd, open(fd, "wb", closefd=False) as file:
        nbytes = write(pickled, file)
    if nbytes > MOST_BYTES:
        warnings.warn(
            f"this plan holds {nbytes:,} bytes of data, which are sent to every process that runs it: give the source "
            "a path instead, or an np.memmap (np.load(path, mmap_mode='r')), which costs nothing to send",
            stacklevel=users_level(),
        )
    return Shipped(fd, nbytes)


def keep(data: bytes) -> Shipped:
    """Keep a payload that another machine has pickled, for any number of hosts here; `HostError` as of `ship`."""
    with _new_file() as fd, open(fd, "wb", closefd=False) as file:
        file.write(data)
    return Shipped(fd, len(data))


@contextmanager
def _new_file() -> Iterator[int]:
    """Give a nameless file for a payload, which is closed if that fails."""
    fd = None
    try:
        fd = memory_file("streamline plan")
        yield fd
    except BaseException as error:
        if fd is not None:
            os.close(fd)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise HostError(
                f"the plan can't be written to memory that processes share: {error.strerror} (limits: `ulimit -f` for "
                "the size of a file, which counts for such memory, too, `ulimit -v` for memory, `ulimit -n` for "
                "descriptors)"
            ) from error
        raise


def digest(shipped: HasFileno) -> bytes:
    """Return what is the same for two plans only if they are, of this process or another one of the same program.

    Plans that are the same may differ in it, by the order of a set of strings, say: then they are taken for two.
    """
    with mmap.mmap(shipped.fileno(), 0, prot=mmap.PROT_READ) as whole:
        return hashlib.sha256(whole).digest()


def memory_file(name: str) -> int:
    """Return a descriptor of a new nameless file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def dumps(payload: object) -> bytes:
    """Return `payload` pickled as by `ship`, buffers included."""
    return b"".join(_pickled(payload, lambda _: True).pieces)


def _pickled(payload: object, in_band: InBand | None = None, *, alike: bool = False) -> PickledItems:
    """Return `payload` pickled; the second time, if need be, without cached values that can't be."""
    if alike:
        return _pickled_once(payload, in_band, lambda _: False, alike=True)
    with contextlib.suppress(Exception):  # the second try raises
        return _pickled_once(payload, in_band)
    return _pickled_once(payload, in_band, lambda value: pickling_error(value, dumps) is None)


_named: dict[str, int] = {}
"""How many classes of a name and code have been given an identity."""


def _identify(cls: type) -> None:
    """Give a class that is sent by value an identity, the same in each process of a program.

    It is what an object of the class is known by where it arrives. By itself cloudpickle takes a random one, and what a
    host has made for one process would be of an unknown class in another.
    """
    inner = cloudpickle.cloudpickle
    with inner._DYNAMIC_CLASS_TRACKER_LOCK:
        if cls in inner._DYNAMIC_CLASS_TRACKER_BY_CLASS:
            return
        name = f"{cls.__module__} {cls.__qualname__} {code_hash(cls)}"
        number = _named[name] = _named.get(name, 0) + 1
        identity = hashlib.sha256(f"{name} {number}".encode()).hexdigest()[:32]
        inner._DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = identity
        inner._DYNAMIC_CLASS_TRACKER_BY_ID[identity] = cls


def _pickled_once(
    payload: object, in_band: InBand | None, keeps: Keeps | None = None, *, alike: bool = False
) -> PickledItems:
    output = PickleBuffers()
    with _registering:
        pickler = PlanPickler(output, in_band or output.take, keeps, alike=alike)
        try:
            pickler.dump(payload)
        finally:
            for module in pickler.by_value:
                cloudpickle.unregister_pickle_by_value(module)
    return output.pickled


class PlanPickler(ValuePickler):
    """Pickles what the children can't import by value, and memory maps by path.

    Args:
      keeps: which values of `cached_property` are sent; others are computed again. None: all are sent.
      alike: as in `ship`.
    """

    def __init__(self, file: Any, in_band: InBand, keeps: Keeps | None, *, alike: bool) -> None:
        super().__init__(file, 5, in_band)
        self.by_value: list[types.ModuleType] = []
        self._keeps = keeps
        self._alike = alike
        self._imported: dict[types.ModuleType, bool] = {}
        self._homes: dict[int, tuple[types.ModuleType, str]] | None = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, loaded_np.ndarray):
            restart = mapped_again(obj)
            return NotImplemented if restart is None else restart
        if isinstance(obj, types.FunctionType | type):
            self._look_at(sys.modules.get(obj.__module__ or ""))
            if self._alike and isinstance(obj, type) and not cloudpickle.cloudpickle._should_pickle_by_reference(obj):
                _identify(obj)
        elif isinstance(obj, types.ModuleType):
            self._look_at(sys.modules.get(obj.__name__))
        reduced = super().reducer_override(obj)
        keeps = self._keeps
        if keeps is not None and reduced is NotImplemented and (cached := _cached_values(obj)):
            return _without(obj, {name for name in cached if not keeps(cached[name])})
        return reduced

    def imports(self, module: types.ModuleType) -> bool:
        return module.__name__ != "__main__" and self._look_at(module)

    def home(self, obj: Any) -> tuple[types.ModuleType, str] | None:
        if (found := super().home(obj)) is not None:
            return found
        if self._homes is None:
            self._homes = _named_locks()
        where = self._homes.get(id(obj))
        return where if where is not None and self.imports(where[0]) else None

    def unnamed(self, obj: Any, module: str, name: str) -> Any:
        return copyreg.__newobj__, (type(obj),), obj.__getstate__()  # type: ignore[attr-defined]

    def _look_at(self, module: types.ModuleType | None) -> bool:
        """Return whether children can import a module; register one that they can't by value."""
        if module is None or module.__name__ == "__main__":
            return False
        if module not in self._imported:
            self._imported[module] = importable(module)
            if not self._imported[module] and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                self.by_value.append(module)
        return self._imported[module]


def _named_locks() -> dict[int, tuple[types.ModuleType, str]]:
    """Return where locks that are module attributes are, by `id`: they are imported, as what they guard is."""
    modules = [it for it in sys.modules.values() if isinstance(it, types.ModuleType) and it.__name__ != "__main__"]
    return {
        id(thing): (module, name)
        for module in modules
        for name, thing in list(vars(module).items())
        if type(thing) in (*LOCKS, *PRIMITIVES)
    }


def _cached_values(obj: Any) -> dict[str, Any]:
    """Return the values of an object's cached properties."""
    kind, values = type(obj), getattr(obj, "__dict__", {})
    return {
        name: value
        for name, value in values.items()
        if isinstance(getattr(kind, name, None), functools.cached_property)
    }


def _without(obj: Any, names: set[str]) -> Any:
    """Return an object's `__reduce_ex__` without some of its attributes."""
    reduced = obj.__reduce_ex__(5)
    state = reduced[2] if len(reduced) > 2 else None
    if not isinstance(state, dict):
        return reduced
    return *reduced[:2], {name: value for name, value in state.items() if name not in names}, *reduced[3:]


def importable(module: types.ModuleType) -> bool:
    """Return whether a new interpreter with this `sys.path` would import the same module by its name."""
    name = module.__name__
    if name.partition(".")[0] in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    if sys.modules.get(name) is not module:
        return False
    parent, _, leaf = name.rpartition(".")
    maker = sys.modules.get(parent)
    if maker is not None and not hasattr(maker, "__path__") and getattr(maker, leaf, None) is module:
        return importable(maker)  # a submodule made by an extension
    path, spec, full = None, None, ""
    for part in name.split("."):
        full = f"{full}.{part}" if full else part
        if (spec := _find_spec(full, path)) is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    return spec is not None and (file is None or spec.origin is None or _same(file, spec.origin))


def _find_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """Ask only the finders that a new interpreter has: those of .pth files, but not pytest's."""
    for finder in sys.meta_path:
        kind = finder if isinstance(finder, type) else type(finder)
        if kind is importlib.machinery.PathFinder or kind.__module__.startswith("__editable__"):
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None


def _same(file: str, origin: str) -> bool:
    try:
        return os.path.samefile(file, origin)  # noqa: PTH121 - strings are what modules have
    except OSError:  # in a zip file
        return file == origin


WAY_OUT = (
    "Make it in the process that uses it: a function `@functools.cache def get(): return ...` that makes it, and get() "
    "in its place; or in a module, which processes import. Or run the plan where nothing is sent: backend=Inline() or "
    "Threads(n)"
)


def _why_unsendable(payload: object, error: Exception) -> str:
    """Return the message for a payload that raised `error`."""
    path = unpicklable_part(payload, dumps)
    labels = dropwhile(lambda label: label.startswith("."), filter(None, (label for label, _ in path)))  # ours
    where = "".join(f"{label}: " for label in labels)
    return (
        f"this plan can't be sent to another process: {where}a {kind_of(path[-1][1] if path else payload)} can't be "
        f"pickled ({type(error).__name__}: {error}). {WAY_OUT}"
    )
