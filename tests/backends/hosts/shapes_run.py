"""What scripts hold, one shape a function, each run inline and in a process: prints both outcomes as JSON.

It is run as a script, without a guard: all that it defines goes to the process by value.
"""

# mypy: ignore-errors

import abc
import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import json
import logging
import operator
import re
import sqlite3
import struct
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from logging import _lock as lock_of_logging  # a module's own, under another name

import anyio
import msgspec
import numpy as np

import streamline as sl

SHAPES: dict[str, Callable[[int], typing.Any]] = {}


def shape(function):
    SHAPES[function.__name__] = function
    return function


# Wrappers of functions ------------------------------------------------------------------------------------------------


@shape
@functools.cache
def cache(n):
    return n * 2


@shape
@functools.lru_cache(maxsize=7, typed=True)
def lru_cache(n):
    return n, lru_cache.cache_info().maxsize, lru_cache.cache_parameters()["typed"]


@shape
def cache_in_a_helper(n):
    return helper(n)


def helper(n):
    return cache(n) + 1


SHAPES["cache_in_a_partial"] = functools.partial(cache)


@shape
@functools.cache
def cache_that_calls_itself(n):
    return n if n < 2 else cache_that_calls_itself(n - 1) + cache_that_calls_itself(n - 2)


class Methods:
    def __init__(self, by):
        self.by = by

    @functools.lru_cache  # noqa: B019
    def cached(self, n):
        return n * self.by

    @classmethod
    @functools.cache
    def of_class(cls, n):
        return cls.__name__, n

    @staticmethod
    @functools.cache
    def static(n):
        return n + 200

    @functools.cached_property
    def table(self):
        return list(range(self.by))

    @property
    @functools.cache  # noqa: B019
    def cached_getter(self):
        return self.by

    def add(self, a, b):
        return a + b

    add_two = functools.partialmethod(add, 2)


methods = Methods(3)
SHAPES["cached_method"] = methods.cached


@shape
def cached_methods(n):
    return methods.cached(n), Methods.of_class(n), Methods.static(n), methods.cached_getter, methods.add_two(n)


@shape
def cached_property(n):
    return methods.table


class Client:
    def __init__(self):
        self.lock = threading.Lock()
        self.settings = "kept"

    @functools.cached_property
    def connection(self):
        return sqlite3.connect(":memory:", check_same_thread=False)

    @functools.cached_property
    def made(self):
        return 1


used = Client()
used.connection  # noqa: B018 - the one that this process has made stays here
used.made = 2  # what can be sent is


@shape
def cached_property_in_use(n):
    return used.connection.execute("select ?", (n,)).fetchone(), used.made, used.settings


@functools.cache
def db():
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("create table lines (n)")
    return connection


db()


@shape
def cached_connection(n):
    return db().execute("select ?", (n,)).fetchone()


def deco(function):
    memo = functools.lru_cache(None)(lambda n: function(n) + 1000)
    return functools.wraps(function)(memo)


@shape
@deco
def cache_that_says_it_is_another(n):
    return n


@functools.wraps(cache)
def wraps(n):
    return cache(n) + 5


SHAPES["wraps"] = wraps


@functools.singledispatch
def encode(value):
    return "other"


@encode.register
def _(value: int):
    return f"int {value}"


@encode.register(list)
def _(value):
    return [encode(part) for part in value]


encode.note = "kept"


@shape
def singledispatch(n):
    return encode([n, "a", [n]]), encode.__name__, encode.note


class Visitor:
    @functools.singledispatchmethod
    def visit(self, value):
        return "other"

    @visit.register
    def _(self, value: int):
        return value + 1


visitor = Visitor()


@shape
def singledispatchmethod(n):
    return visitor.visit(n), visitor.visit(None)


plus = np.frompyfunc(lambda a, b: a + b, 2, 1)
vector = np.vectorize(lambda a: a + 1)
vector([1])


@shape
def frompyfunc(n):
    return plus(n, 1), list(plus([1, 2], n)), np.add(n, 1).item()


@shape
def vectorize(n):
    return vector([n]).tolist()


class CallDecorator:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function
        self.lock = threading.Lock()

    def __call__(self, n):
        with self.lock:
            return self.function(n)


@shape
@CallDecorator
def decorated_by_a_class(n):
    return n + 3


@contextlib.contextmanager
def manager(n):
    yield n + 1


@shape
def contextmanager(n):
    with manager(n) as made:
        return made


# Locks, and what belongs to a thread ----------------------------------------------------------------------------------

LOCK, RLOCK, CONDITION, EVENT = threading.Lock(), threading.RLock(), threading.Condition(), threading.Event()
SEMAPHORE, BARRIER, BOUNDED = threading.Semaphore(2), threading.Barrier(1), threading.BoundedSemaphore(1)


@shape
def locks(n):
    with LOCK, RLOCK, RLOCK, CONDITION, SEMAPHORE, SEMAPHORE, BOUNDED:
        CONDITION.notify_all()
        BARRIER.wait()
        EVENT.set()
        return n, EVENT.is_set()


held = threading.RLock()


@shape
def lock_that_is_held_here(n):
    if not held.acquire(blocking=False):
        return "it arrived as it was"
    held.release()
    return n


class Locked:
    of_class = threading.Lock()

    def __init__(self):
        self.lock = threading.RLock()
        self.same = self.lock

    def __call__(self, n):
        with self.lock, self.of_class:
            return n, self.lock is self.same


SHAPES["object_with_locks"] = Locked()


@shape
def lock_of_an_imported_module(n):
    return lock_of_logging is logging._lock


SHAPES["one_object_by_two_ways"] = functools.partial(lambda c, lock, n: (c is cache, lock is LOCK), cache, LOCK)

async_locks = asyncio.Lock(), asyncio.Semaphore(2), asyncio.Condition(), asyncio.BoundedSemaphore(1)
async_event = asyncio.Event()


@shape
async def locks_of_asyncio(n):
    async with async_locks[0], async_locks[1], async_locks[2], async_locks[3]:
        async_event.set()
        return await async_event.wait(), n


anyio_locks = anyio.Lock(), anyio.Semaphore(2), anyio.Condition(), anyio.CapacityLimiter(3)
anyio_event = anyio.Event()
anyio_event.set()


@shape
async def locks_of_anyio(n):
    async with anyio_locks[0], anyio_locks[1], anyio_locks[2], anyio_locks[3]:
        await anyio_event.wait()
        return n, anyio_locks[3].total_tokens


class OwnLocal(threading.local):
    def __init__(self):
        self.n = 7


LOCAL, OWN_LOCAL = threading.local(), OwnLocal()
LOCAL.of_main = 1


@shape
def thread_local(n):
    LOCAL.n = n
    return LOCAL.n, OWN_LOCAL.n, hasattr(LOCAL, "of_main")


VARIABLE, BARE = contextvars.ContextVar("variable", default=5), contextvars.ContextVar[int]("bare")


@shape
def context_variable(n):
    return VARIABLE.get(), VARIABLE.name, BARE.get(3)


# Classes --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    n: int | None
    tags: list[str] = dataclasses.field(default_factory=list)
    lock = threading.Lock()

    @functools.cached_property
    def twice(self):
        return cache(self.n)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    n: int
    m: int = 2


@shape
def dataclass(n):
    return dataclasses.astuple(Plain(n)), repr(dataclasses.replace(Frozen(n), m=3))


@shape
def dataclass_as_an_item(n):
    return Plain(n), Frozen(n)


@dataclasses.dataclass(slots=True, weakref_slot=True)
class Slotted:
    n: int
    m: int = 2


class Private:
    __slots__ = {"__twice": "private", "n": "counted"}

    def __init__(self, n):
        self.n, self.__twice = n, 2 * n

    def __repr__(self):
        return f"{type(self).__name__} {self.n} {self.__twice} {getattr(self, '__dict__', None)}"


class Inheriting(Private):
    __slots__ = ()


class WithDict(Private):
    __slots__ = ("__dict__", "extra")

    def __init__(self, n):
        super().__init__(n)
        self.extra, self.free = n, n


@shape
def slots_of_items(n):
    return Slotted(n), weakref.ref(Slotted(n))(), Private(n), Inheriting(n), WithDict(n), WithDict(n).extra


@shape
def slots_of_generics(n):
    return SlottedBox(n)


class Shape(msgspec.Struct, tag="shape", rename="camel", array_like=True, frozen=True, cache_hash=True):
    own_name: int
    parts: list["Shape"] = []
    made: dict[int, str] = msgspec.field(default_factory=lambda: {1: "a"}, name="it")

    def grown(self):
        return msgspec.structs.replace(self, parts=[Shape(self.own_name + 1)])


class Square(Shape, kw_only=True, forbid_unknown_fields=True, order=True):
    side: float
    parts: list[int] = msgspec.field(default_factory=lambda: [7])
    limit: typing.ClassVar[int] = 3

    def __post_init__(self):
        if self.side > self.limit:
            raise ValueError(f"{self.side} is more than {self.limit}")


@shape
def structs_as_items(n):
    return Shape(n), Shape(n).grown(), Square(n, side=1.5), Crate(Shape(n)), Mutable(n)


@shape
def structs(n):
    shape, square = Shape(n).grown(), Square(n, side=n / 2)
    shape.parts[0].parts.append(shape.parts[0])
    coded = msgspec.json.encode(shape.parts[0].made), msgspec.json.encode([Shape(n), Crate(n), Mutable(n)])
    read = (
        msgspec.json.decode(coded[1], type=tuple[Shape, Crate[int], Mutable]),
        hash(Shape(n, (), ())) == hash(Shape(n, (), ())),
    )
    kept = [kind.__struct_config__ for kind in (Shape, Square, Crate, Mutable)]
    texts = [str([getattr(it, name) for name in dir(it) if name[0] != "_"]) for it in kept]
    refused = []
    for side in (9.0, "x"):
        try:
            msgspec.convert(["shape", n, {}, [], side], Square)
        except (ValueError, TypeError) as error:
            refused.append(str(error))
    return square, str(Square.__signature__), square < Square(n, side=2), read, texts, refused, coded, Mutable(n).free()


class Point(typing.NamedTuple):
    x: int
    y: int = 0


Pair = collections.namedtuple("Pair", "a b")


@shape
def named_tuple(n):
    return tuple(Point(n)), Pair(n, 1)._asdict()


class Color(enum.Enum):
    RED = 1
    GREEN = 2

    def nice(self):
        return self.name.lower()


class Bits(enum.Flag):
    A = enum.auto()
    B = enum.auto()


@shape
def enumeration(n):
    return Color(1).nice(), str(Bits.A | Bits.B), Color.RED is Color["RED"]


class Base(abc.ABC):
    registry: typing.ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls):
        Base.registry[cls.__name__] = cls

    @abc.abstractmethod
    def run(self, n): ...


class Child(Base):
    def run(self, n):
        return n, sorted(Base.registry)


@shape
def abstract_class(n):
    return Child().run(n)


class Meta(type):
    def __new__(mcls, name, bases, namespace):
        return super().__new__(mcls, name, bases, {**namespace, "added": name})


class WithMeta(metaclass=Meta):
    pass


@shape
def metaclass(n):
    return WithMeta.added


T, P, Ts = typing.TypeVar("T"), typing.ParamSpec("P"), typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)


class Box(typing.Generic[T]):
    def __init__(self, value: T):
        self.value = value


class Crate(msgspec.Struct, typing.Generic[T], weakref=True, omit_defaults=True):
    held: T
    of: str | None = None


class Mutable(msgspec.Struct, dict=True, tag=lambda name: name.lower(), tag_field="kind"):
    n: int

    def free(self):
        self.extra = self.n
        return vars(self), weakref.ref(Crate(1))() is None


class SlottedBox(Box[int]):
    __slots__ = "label"

    def __repr__(self):
        return f"{self.value} {self.__orig_bases__}"


@typing.runtime_checkable
class HasRun(typing.Protocol):
    def run(self, n): ...


class Typed(typing.TypedDict):
    a: int


def decorates(function: Callable[P, T], *args: *Ts) -> Callable[P, T]:
    return function


@shape
def generics(n: UserId) -> Box[int] | typing.Any:
    return Box[int](n).value, isinstance(Child(), HasRun), Typed(a=1), decorates(abs)(n), UserId(n)


class Descriptor:
    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, obj, owner=None):
        return self.name


class Described:
    attribute = Descriptor()

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        self._value = value


@shape
def descriptors(n):
    described = Described()
    described.value = n
    return described.value, described.attribute


class Single:
    lock = threading.Lock()
    instance: typing.Any = None

    def __new__(cls):
        with cls.lock:
            cls.instance = cls.instance or super().__new__(cls)
        return cls.instance


Single()


@shape
def singleton(n):
    return Single() is Single()


class Sentinel:
    def __reduce__(self):
        return "MISSING"


MISSING = Sentinel()


@shape
def sentinel(n, default=MISSING):
    return default is MISSING


@shape
def sentinel_as_an_item(n):
    return MISSING


class Key:
    pass


KEY = Key()
weak = weakref.ref(KEY)
by_weak_key, by_weak_value = weakref.WeakKeyDictionary({KEY: 1}), weakref.WeakValueDictionary({"a": KEY})
weak_set, dead = weakref.WeakSet([KEY]), weakref.ref(Key())


@shape
def weak_references(n):
    return weak() is KEY, by_weak_key[KEY], by_weak_value["a"] is KEY, KEY in weak_set, dead()


class Oops(Exception):  # noqa: N818
    lock = threading.Lock()

    @functools.cached_property
    def twice(self):
        return cache(self.args[0])


@shape
def exception_of_a_class(n):
    raise Oops(n)


# And the rest ---------------------------------------------------------------------------------------------------------

SHAPES["lambda"] = lambda n: n + 1


def closed_over(total):
    def inner(n):
        return n + total

    return inner


SHAPES["closure"] = closed_over(10)
SHAPES["itemgetter"] = functools.partial(lambda get, n: get([n, 6, 7, 8]), operator.itemgetter(0))

log = logging.getLogger("shapes")
adapter, stderr = logging.LoggerAdapter(log, {"a": 1}), sys.stderr


@shape
def loggers(n):
    adapter.debug("never seen")
    return log.name, stderr.fileno()


WORD, HEAD = re.compile(r"\w+"), struct.Struct("<I")
DECODER = msgspec.json.Decoder(list[int])


@shape
def compiled(n):
    return WORD.findall(f"a {n}"), HEAD.pack(n)


@shape
def msgspec_decoder(n):
    return DECODER.decode(b"[1]")


decode = json.JSONDecoder(object_hook=sorted).decode


@shape
def json_decoder(n):
    return decode('{"b": 1, "a": [2.5]}')


namespace, default_dict = types.SimpleNamespace(lock=threading.Lock()), collections.defaultdict(lambda: 3)


@shape
def namespaces(n):
    with namespace.lock:
        return default_dict[n]


def main() -> None:
    outcomes: dict[str, dict[str, str]] = {name: {} for name in SHAPES}
    with held, sl.Processes(1) as pool:
        for where, backend in (("process", pool), ("inline", sl.Inline())):
            if where == "inline":
                held.release()  # in whatever thread an inline worker runs
            for name, function in SHAPES.items():
                try:
                    with sl.from_items([1, 2]).map(function).open(backend=backend) as stream:
                        items = list(stream)
                    same = [item is MISSING or (type(item) is tuple and type(item[0]) is Plain) for item in items]
                    outcomes[name][where] = f"{items} {same}"
                except Exception as error:
                    twice = error.twice if isinstance(error, Oops) else None
                    outcomes[name][where] = f"{type(error).__name__}: {error} {twice}"
        held.acquire()
    print(json.dumps(outcomes))


main()
