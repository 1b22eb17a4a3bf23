"""Pickling by value: what another process can't import, or what pickle can't copy but the other end can make again.

Classes that the other end can't import (of a script, a notebook, a function's body): cloudpickle sends such a class
with every pickle, and overwrites the attributes of the class that the other end already has. In a plan, which is sent
once, it may. In items, failures and states (`ItemPickler`) a class goes by cloudpickle's identity for it, and an end
that knows the identity uses its own class; its definition is sent once a link (`SentClasses`), or with what refers to
it. Functions go by name, and by value only where nothing has that name.

Recreated, in a plan: caches of functions, which start empty, locks, which are free, and a `threading.local`, which
holds nothing. Refused, since a copy would mislead: what ties threads or processes together (queues, threads, executors,
child processes), and what stands for something outside (open files, sockets, connections).
"""

from __future__ import annotations

import concurrent.futures
import copyreg
import functools
import gc
import inspect
import io
import operator
import pickle
import queue
import struct
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import cloudpickle
import msgspec
from cloudpickle import cloudpickle as inner

Callback = Callable[[Any], Any]

_definitions: dict[str, bytes] = {}
"""Of classes that other processes have defined for this one, by identity; loaded when needed."""


class SentClasses:
    """The classes that one end has defined for the other."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._fresh: dict[str, bytes] = {}
        self._identities: WeakKeyDictionary[type, str] = WeakKeyDictionary()

    def fresh(self) -> dict[str, bytes]:
        """Return definitions since the last call, by identity; send them before what was pickled with them."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def mention(self, cls: type) -> str | None:
        """Return the identity of a class, defined if it is new; None: it can be imported."""
        identity = self._identities.get(cls)
        if identity is None:
            if inner._should_pickle_by_reference(cls):
                return None
            identity = self._identities[cls] = inner._get_or_create_tracker_id(cls)
        if identity not in self._known:
            self._known.add(identity)
            try:
                file = io.BytesIO()
                ItemPickler(file, sent=self, whole=cls).dump(cls)
            except BaseException:
                self._known.discard(identity)
                raise
            self._fresh[identity] = file.getvalue()
        return identity


define = _definitions.update
"""Called with the definitions that another process has sent."""


def class_of(identity: str, definitions: Mapping[str, bytes] = types.MappingProxyType({})) -> type:
    """Return the class of this identity: this process's own, else as the other end has defined it."""
    known: type | None = inner._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if known is not None:
        return known
    define(definitions)
    return cloudpickle.loads(_definitions[identity])  # type: ignore[no-any-return]


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle's pickler, which also recreates the types named here."""

    with_locks = True

    def __init__(self, file: Any, protocol: int = 5, buffer_callback: Callable[[Any], Any] | None = None) -> None:
        super().__init__(file, protocol, buffer_callback)
        self._kinds: dict[type, Recreate | None] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType:
            if is_dispatcher(obj) and not self.has_name(obj):
                raise pickle.PicklingError("a singledispatch function is found by its name alone, in a module")
            return super().reducer_override(obj)
        if obj is sys.stdout or obj is sys.stderr:
            return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
        try:
            recreate = self._kinds[kind]
        except KeyError:
            recreate = self._kinds[kind] = self._recreate(kind)
        if recreate is None or (recreate in OF_THREADS and not self.with_locks):
            reduced = super().reducer_override(obj)
            if isinstance(reduced, tuple) and reduced[0] is inner._make_skeleton_class and "__slots__" in vars(obj):
                return (_struct if isinstance(obj, msgspec.StructMeta) else _slotted)(obj, *reduced)
            return reduced
        if recreate is _own_reduce:
            reduced = obj.__reduce_ex__(5)
            return reduced if not isinstance(reduced, str) else self._by_name(obj, reduced)
        if recreate is not _refused and (home := self.home(obj)) is not None:
            return _attribute, home
        return recreate(obj)

    def imports(self, module: types.ModuleType) -> bool:
        """Return whether the other end can import this module."""
        return module.__name__ not in ("__main__", "__mp_main__") and sys.modules.get(module.__name__) is module

    def home(self, obj: Any) -> tuple[types.ModuleType, str] | None:
        """Return a module that the other end imports, and the object's name in it."""
        name = getattr(obj, "__qualname__", None)
        if isinstance(name, str) and self.has_name(obj):
            return sys.modules[obj.__module__], name
        return None

    def has_name(self, obj: Any) -> bool:
        """Return whether the other end finds the object by its own name."""
        module = sys.modules.get(obj.__module__ or "")
        return module is not None and _attribute(module, obj.__qualname__) is obj and self.imports(module)

    def unnamed(self, obj: Any, module: str, name: str) -> Any:
        """Return the reduction of an object that names itself in a module that the other end can't import."""
        return _find_by_name, (module, name)

    def _recreate(self, kind: type) -> Recreate | None:
        """Return how objects of a type are recreated; None: by pickle."""
        if (found := EXACT.get(kind)) is not None:
            return found
        if has_refused_name(kind):
            return _refused
        if kind in self.dispatch_table or issubclass(kind, type):
            return DERIVED.get(kind)
        own = kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__
        for base in kind.__mro__:
            if base in DERIVED and (base is kind or not own):
                return DERIVED[base]
        return _own_reduce if own else None

    def _by_name(self, obj: Any, name: str) -> Any:
        # Python 3.14's `whichmodule` insists that the object is there; a host has those of a script nowhere
        where = getattr(obj, "__module__", None) or pickle.whichmodule(obj, name)  # type: ignore[attr-defined]
        module = sys.modules.get(where)
        return name if module is not None and self.imports(module) else self.unnamed(obj, where, name)


class ItemPickler(ValuePickler):
    """Pickles items, failures, states: classes by identity, functions by name, each with what defines it.

    Args:
      sent: what the other end has been sent of classes; None: definitions go into this pickle.
      table: how to reduce other types.
      whole: the class that is being defined.
    """

    def __init__(
        self,
        file: Any,
        callback: Callback | None = None,
        table: Mapping[Any, Any] | None = None,
        sent: SentClasses | None = None,
        whole: type | None = None,
    ) -> None:
        # before __init__, which looks for it
        self.dispatch_table = {**self._dispatch_table, **copyreg.dispatch_table, **(table or {})}
        super().__init__(file, 5, callback)
        self.with_locks = whole is not None
        self._sent = sent
        self._whole = whole

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj is not self._whole:
            sent = self._sent or SentClasses()
            identity = sent.mention(obj)
            if identity is not None:
                return class_of, (identity,) if self._sent else (identity, sent.fresh())
        elif isinstance(obj, FunctionType) and self._whole is None and "<locals>" not in obj.__qualname__:
            module, name = obj.__module__, obj.__qualname__
            if isinstance(module, str) and _named(module, name) is not obj:
                return _own_function, (module, name, obj.__code__.co_code, dumps(obj))
        return super().reducer_override(obj)


def _own_function(module: str, qualname: str, code: bytes, value: bytes) -> Any:
    """Return this process's function of that name, if its code is the same."""
    found = _named(module, qualname)
    return found if isinstance(found, FunctionType) and found.__code__.co_code == code else pickle.loads(value)


Recreate = Callable[[Any], Any]
"""Returns what `__reduce__` would."""

DISPATCHER_CODE = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]
"""The code of all functions that `singledispatch` makes."""


def dumps(obj: object) -> bytes:
    """Return an object pickled, buffers included."""
    file = io.BytesIO()
    ValuePickler(file).dump(obj)
    return file.getvalue()


def _attribute(module: types.ModuleType | None, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _named(module: str, name: str) -> Any:
    """Return what has this name in an imported module; None: nothing."""
    return _attribute(sys.modules.get(module), name)


def _find_by_name(module: str, name: str) -> Any:
    """Return what has this name in the unpickling process."""
    if (found := _named(module, name)) is None:
        raise AttributeError(f"there is no {name} in {module}, which another process has sent by name")
    return found


def _slotted(cls: type, make: Any, arguments: Any, state: Any, *others: Any) -> Any:
    """A class with `__slots__`, as cloudpickle reduces it: it makes them plain attributes, and its items have none."""
    if typing.NamedTuple in arguments[2]:  # it makes its slots itself
        return make, arguments, state, *others
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)  # of slots, of `__dict__` and `__weakref__`
    slots = [name for name, it in vars(cls).items() if isinstance(it, kinds) and it.__name__ == name]
    attributes = {name: value for name, value in state[0].items() if name not in slots}
    arguments = (*arguments[:3], {**arguments[3], "__slots__": tuple(slots)}, *arguments[4:])
    return make, arguments, (attributes, state[1]), *others


def _struct(cls: Any, make: Any, arguments: Any, state: Any, *others: Any) -> Any:
    """A `msgspec.Struct`, as cloudpickle reduces it: made with its fields and config; types and methods come after."""
    hints, config = inspect.get_annotations(cls), cls.__struct_config__
    fields = [field for field in msgspec.structs.fields(cls) if field.name in hints]
    options = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    options["rename"] = {field.name: field.encode_name for field in fields}
    options["kw_only"] = any(field.name not in cls.__match_args__ for field in fields)
    made = functools.partial(
        _new_struct, arguments[0], options, [(it.name, it.default, it.default_factory) for it in fields]
    )
    if "__post_init__" in vars(cls):  # it is looked for as the class is made
        arguments[3]["__post_init__"] = operator.methodcaller("__post_init__")
    hints = {**hints, **{field.name: field.type for field in fields}}  # no texts: the other end lacks a script's names
    return make, (made, *arguments[1:]), ({**state[0], "__annotations__": hints}, state[1]), *others


def _new_struct(kind: Any, options: Any, fields: Any, name: str, bases: Any, namespace: Any) -> Any:
    field: Any = msgspec.field
    made = {name: field(default=value, default_factory=factory) for name, value, factory in fields}
    return kind(name, bases, {**namespace, "__annotations__": dict.fromkeys(made, Any), **made}, **options)


# Wrappers of functions ------------------------------------------------------------------------------------------------
def _cached(wrapper: Any) -> Any:
    """An lru_cache, over the function that it says it wraps."""
    if not any(it is wrapper.__wrapped__ for it in gc.get_referents(wrapper)):
        raise pickle.PicklingError(
            "a cache that functools.wraps has made look like another function doesn't tell its own"
        )
    maxsize, typed = wrapper.cache_parameters().values()
    attributes = {name: value for name, value in vars(wrapper).items() if name != "cache_parameters"}
    return _lru_cache, (wrapper.__wrapped__, maxsize, typed), attributes


def _lru_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _cached_property(descriptor: Any) -> Any:
    """A cached_property; that of Python 3.11 has a lock."""
    attributes = {name: value for name, value in vars(descriptor).items() if name not in ("func", "lock")}
    return functools.cached_property, (descriptor.func,), attributes


def _partial_method(method: Any) -> Any:
    """A partialmethod; that of Python 3.14 can't be made without its function."""
    return functools.partial(functools.partialmethod, method.func, *method.args, **method.keywords), ()


def _binary_format(compiled: struct.Struct) -> Any:
    return struct.Struct, (compiled.format,)


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _type_parameter(parameter: Any) -> Any:
    return type(parameter), (parameter.__name__,)


def _type_alias(alias: Any) -> Any:
    return type(alias), (alias.__name__, alias.__value__)


# Locks, and what belongs to a thread ----------------------------------------------------------------------------------
def _lock(lock: Any) -> Any:
    return threading.RLock if hasattr(lock, "_is_owned") else threading.Lock, ()


def _as_pickled(primitive: Any) -> Any:
    return primitive.__reduce_ex__(5)


def _local(local: Any) -> Any:
    """A thread's own: empty, as every other thread finds it."""
    try:
        inspect.signature(type(local).__init__).bind(local)
    except TypeError as error:
        raise pickle.PicklingError("a threading.local whose __init__ has arguments doesn't tell them") from error
    return type(local), ()


# Not to be copied -----------------------------------------------------------------------------------------------------
def is_refused(obj: object) -> bool:
    """Return whether an object is refused for what it is, whatever its parts are."""
    return isinstance(obj, REFUSED) or has_refused_name(type(obj)) or is_dispatcher(obj)


def has_refused_name(kind: type) -> bool:
    """Tell whether a type is one of those that are refused by name, or derived from one."""
    return any(_qualified(base) in REFUSED_NAMES for base in kind.__mro__)


def is_dispatcher(obj: object) -> bool:
    """Return whether `functools.singledispatch` has made a function."""
    return isinstance(obj, FunctionType) and obj.__code__ is DISPATCHER_CODE


def _refused(obj: Any) -> Any:
    """Raise for what belongs to this process."""
    kind = type(obj)
    raise pickle.PicklingError(f"a {kind.__module__}.{kind.__qualname__} belongs to the process that made it")


def _code_object(code: types.CodeType) -> Any:
    """With the file's name, for tracebacks with source lines: cloudpickle 3.1.3 leaves it out."""
    make, args = inner._code_reduce(code)
    return make, tuple(code.co_filename if arg == NO_FILE else arg for arg in args)


NO_FILE = "<dynamic-code>"


def _own_reduce(obj: Any) -> Any:
    """Marks types with a `__reduce__` of their own, which may name what the other end can't import."""


OF_THREADS = frozenset({_lock, _as_pickled, _local})
"""Recreated in a plan alone: in an item, a lock is its user's mistake."""

LOCKS = (type(threading.Lock()), type(threading.RLock()))

PRIMITIVES = (threading.Condition, threading.Semaphore, threading.BoundedSemaphore, threading.Event, threading.Barrier)
"""Written in Python, over locks."""

EXACT: dict[type, Recreate] = {
    types.CodeType: _code_object,
    struct.Struct: _binary_format,
    functools._lru_cache_wrapper: _cached,
    functools.cached_property: _cached_property,
    functools.partialmethod: _partial_method,
    typing.ParamSpec: _type_parameter,
    typing.TypeVarTuple: _type_parameter,
    **dict.fromkeys(LOCKS, _lock),
    **dict.fromkeys(PRIMITIVES, _as_pickled),
}


if hasattr(typing, "TypeAliasType"):
    EXACT[typing.TypeAliasType] = _type_alias


REFUSED = (
    *(threading.Thread, queue.Queue, queue.SimpleQueue, subprocess.Popen),
    *(concurrent.futures.Executor, concurrent.futures.Future, io.TextIOWrapper),
)

REFUSED_NAMES = {"IPython.core.interactiveshell.InteractiveShell"}
"""By the names of types: `get_ipython` is a method of one, which refers to the kernel, its sockets and the history."""

DERIVED: dict[type, Recreate] = {
    threading.local: _local,
    anyio.Semaphore: lambda it: (functools.partial(anyio.Semaphore, max_value=it.max_value), (it.value,)),
    anyio.CapacityLimiter: lambda it: (anyio.CapacityLimiter, (it.total_tokens,)),
    **dict.fromkeys(REFUSED, _refused),
}
"""By type, of classes that are derived from it, too, unless they say themselves how they are pickled."""
