"""What is shipped arrives: by value what a child can't import, arrays once, memory maps for nothing."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import mmap
import os
import pickle
import queue
import re
import socket
import sqlite3
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.hosts.plan_shipping import MOST_BYTES, dumps, importable, ship
from streamline.backends.ipc.pickling import load
from streamline.backends.ipc.unpicklable import MOST_TRIED
from streamline.errors import PlanError

NewEcho = Callable[..., Any]


def there_and_back(payload: Any) -> Any:
    shipped = ship(payload)
    try:
        return load(os.dup(shipped.fileno()))
    finally:
        shipped.close()


def doubled(n: int) -> int:
    return 2 * n


class Scale:
    def __init__(self, by: int) -> None:
        self.by = by

    def times(self, n: int) -> int:
        return n * self.by


def zoo() -> list[Callable[[int], int]]:
    factor = 2

    class Local:
        def __call__(self, n: int) -> int:
            return n * factor

    exec_module = types.ModuleType("made_by_exec")
    sys.modules["made_by_exec"] = exec_module
    exec("TWO = 2\ndef by_two(n):\n    return n * TWO", exec_module.__dict__)
    return [
        doubled,
        lambda n: n * factor,
        Local(),
        functools.partial(lambda factor, n: n * factor, 2),
        Scale(2).times,
        exec_module.by_two,
    ]


@pytest.mark.long
def test_functions_that_a_child_can_not_import_go_by_value(new_echo: NewEcho) -> None:
    try:
        functions = zoo()
        results = new_echo().call(lambda: [function(21) for function in functions])
    finally:
        del sys.modules["made_by_exec"]
    assert results == [42] * len(functions)


@sl.source(state=dict)
async def rows(*, state: dict[str, int], shard: int, num_shards: int) -> AsyncIterator[int]:
    for n in range(state.get("n", 0), 4):
        state["n"] = n + 1
        yield n


@sl.stage(state=dict)
async def negated(items: AsyncIterator[int], *, state: dict[str, int]) -> AsyncIterator[int]:
    async for item in items:
        yield -item


@pytest.mark.long
def test_a_plan_of_custom_stages_goes_by_value(new_echo: NewEcho) -> None:
    plan = rows().through(negated).map(lambda n: n + 1).plan
    costly = ("xml", "urllib.request", "http", "rich", "aiohttp", "aiofiles")
    seen = new_echo().call(lambda: (plan.names, [name for name in costly if name in sys.modules]))
    assert seen == (plan.names, [])


def test_stages_after_the_merge_are_not_sent(processes: Backend) -> None:
    with (
        socket.socket() as model,
        sl.from_items(range(4))
        .shard(2)
        .map(abs)
        .merge()
        .map(lambda n: (n, model.fileno() >= 0))
        .open(backend=processes) as stream,
    ):
        assert list(stream) == [(n, True) for n in range(4)]


IDLE = (
    "numpy",
    "cloudpickle",
    "statistics",
    "difflib",
    "streamline.backends.hosts.plan_shipping",
    "streamline.backends.hosts.restarts",
    "streamline.backends.ipc.by_value",
    "streamline.core.cpus",
    "streamline.core.dead_letters",
    "streamline.core.item_codec",
    "streamline.io.storage.base",
    "streamline.observe",
    "streamline.pipeline",
    "streamline.plan.rules",
    "streamline.sources.live",
)
"""What a host needs for some plans, or never; "streamline.observe" with all that is in it."""


def test_a_host_imports_nothing_that_it_has_no_use_for() -> None:
    seen = (
        f"[name for name in __import__('sys').modules if (name + '.').startswith({tuple(f'{name}.' for name in IDLE)})]"
    )
    with sl.from_items([seen]).map(eval).open(backend=sl.Processes(1)) as stream:  # no function of a test
        assert list(stream) == [[]]


def test_a_module_is_importable_where_a_new_interpreter_finds_the_same(tmp_path: Path) -> None:
    assert all(map(importable, (os, sys, np, np.linalg, sl, socket)))
    lost = tmp_path / "lost.py"
    lost.write_text("x = 1")
    other = tmp_path / "json.py"
    other.write_text("x = 1")
    for path, name in ((lost, "lost"), (lost, "streamline.lost"), (other, "pytest")):
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(name)
        sys.modules[name] = module
        try:
            assert not importable(module)
        finally:
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before


def test_functions_of_importable_modules_go_by_name() -> None:
    assert len(dumps(socket.create_connection)) < 100
    assert b"create_connection" in dumps(socket.create_connection)


# Data -----------------------------------------------------------------------------------------------------------------


def test_arrays_arrive_as_views_that_one_host_can_write_to_alone() -> None:
    array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    frozen = np.ones(5000)
    frozen.flags.writeable = False
    shipped = ship({"a": array, "f": frozen, "tiny": np.arange(3)})
    first, second = (load(os.dup(shipped.fileno())) for _ in range(2))
    shipped.close()
    shipped.close()
    assert shipped.nbytes < array.nbytes + frozen.nbytes + 20_000
    first["a"][:] = -1
    np.testing.assert_array_equal(second["a"], array)
    np.testing.assert_array_equal(second["f"], frozen)
    assert not second["f"].flags.writeable
    assert second["a"].ctypes.data % mmap.PAGESIZE == 0


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda a: a,
    "slice": lambda a: a[3:20],
    "columns": lambda a: a[:, 5:7],
    "strided": lambda a: a[::3, ::2],
    "backwards": lambda a: a[::-1, ::-2],
    "transposed": lambda a: a.T,
    "reshaped": lambda a: a.reshape(-1)[7:],
    "element": lambda a: a[3:4, 2:3],
    "other type": lambda a: a.view(np.uint8),
    "plain": lambda a: np.asarray(a)[4:],
    "0-d": lambda a: a[1, 2, ...],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_memory_map_travels_as_a_path(tmp_path: Path, mode: Any, view: str) -> None:
    path = tmp_path / "array.bin"
    np.arange(512 * 1024, dtype=np.int32).tofile(path)
    array = VIEWS[view](np.memmap(path, np.int32, mode, offset=4096 + 8, shape=(500, 1000)))
    shipped = ship(array)
    arrived = load(os.dup(shipped.fileno()))
    shipped.close()
    assert shipped.nbytes < 2000
    np.testing.assert_array_equal(arrived, array)
    assert (type(arrived), arrived.dtype, arrived.strides) == (type(array), array.dtype, array.strides)
    assert arrived.flags.writeable == array.flags.writeable


def test_a_memory_map_that_may_differ_from_its_file_travels_as_data(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.zeros(10_000))
    array = np.load(path, mmap_mode="c")
    array[0] = 1
    assert there_and_back(array)[0] == 1
    gone = np.load(path, mmap_mode="r")
    path.unlink()
    assert there_and_back(gone).sum() == 0


def test_much_data_is_warned_of_where_the_user_called() -> None:
    with pytest.warns(UserWarning, match=r"67,1\d\d,\d{3} bytes .* np.memmap") as caught:
        ship(bytes(MOST_BYTES)).close()
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


# What can't be pickled ------------------------------------------------------------------------------------------------


def unsendable_functions() -> dict[str, tuple[Callable[[int], int], str]]:
    sock = socket.socket()
    sock.close()

    names: dict[str, Any] = {"__name__": "of_no_file", "DB": sqlite3.connect(":memory:"), "cache": functools.cache}
    names["DB"].close()
    exec("def uses_global(n):\n    return DB, n", names)
    exec("def inside(n):\n    return [(lambda: DB)() for _ in range(n)]", names)
    exec("@cache\ndef cached(n):\n    return DB, n\ndef calls(n):\n    return cached(n)", names)

    class Holder:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.sock = sock

        def call(self, n: int) -> int:
            return n

    class Slotted:
        __slots__ = ("before", "sock")

        def __init__(self) -> None:
            self.sock = sock

        def __call__(self, n: int) -> int:
            return n

    class Registered:
        """Says of itself only what its class keeps."""

        last: Any = None
        queue: Any = queue.SimpleQueue()

        def call(self, n: int) -> int:
            return n

    Registered.last = Registered()

    return {
        "closure": (lambda n: n + sock.fileno(), "variable sock: a socket.socket can't"),
        "global": (names["uses_global"], "global variable DB: a sqlite3.Connection can't"),
        "global of a function inside": (names["inside"], "global variable DB: a sqlite3.Connection can't"),
        "global of a cached function": (
            names["calls"],
            "function cached .*global variable DB: a sqlite3.Connection can't",
        ),
        "partial": (functools.partial(lambda sock, n: n, sock), "argument 0 of the partial: a socket.socket can't"),
        "method": (Holder().call, r"\.sock: a socket.socket can't"),
        "slot": (Slotted(), r"\.sock: a socket.socket can't"),
        "class": (Registered().call, r"its class .*Registered: \.queue: a _queue.SimpleQueue can't"),
    }


@pytest.mark.one_in(8, 2)
@pytest.mark.parametrize("kind", list(unsendable_functions()))
def test_what_can_not_be_sent_is_named(kind: str) -> None:
    function, said = unsendable_functions()[kind]
    with pytest.raises(PlanError, match=rf"sent to another process: .*stage 'culprit' \(\.map\).*{said}") as caught:
        ship({"plan": sl.from_items([1]).map(doubled).map(function, name="culprit").plan})
    assert "backend=Inline()" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_an_open_file_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, pytest.raises(PlanError, match=r"variable log: a _io.TextIOWrapper"):
        ship(sl.from_items([1]).map(lambda n: log.write(str(n))).plan)


def test_nothing_stays_registered_by_value() -> None:
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    assert pickle.loads(dumps(doubled))(2) == 4
    assert cloudpickle.list_registry_pickle_by_value() == before


class OwnLocal(threading.local):
    def __init__(self, n: int) -> None:
        self.n = n


OF_THIS_PROCESS: dict[str, Callable[[], Any]] = {
    "TextIOWrapper": Path(__file__).open,
    "Thread": threading.Thread,
    "Queue": queue.Queue,
    "ThreadPoolExecutor": lambda: ThreadPoolExecutor(1),
    "generator": lambda: (n for n in range(3)),
    "OwnLocal": lambda: OwnLocal(3),
    "HostPool": lambda: sl.Threads(1).pool(),
    "Loader": lambda: sl.from_items([1]).loader(),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", OF_THIS_PROCESS)
def test_what_belongs_to_a_process_is_refused_at_open_and_by_check(kind: str) -> None:
    """A copy would be something else: a copied queue has no reader."""
    with contextlib.ExitStack() as closing:
        thing = OF_THIS_PROCESS[kind]()
        closing.callback(getattr(thing, "close", lambda: None))
        pipe = sl.from_items([1]).map(lambda n: (thing, n)[1], name="culprit")
        said = rf"stage 'culprit' .*its variable thing: a [\w.]*\b{kind} can't be pickled"
        with pytest.raises(PlanError, match=said):
            ship(pipe.plan)
        assert re.search(said, str(pipe.check(backend=sl.Processes(1))))


class Peer:
    """One of many that know each other."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.tail: Any = None
        peers.append(self)


@pytest.mark.long
def test_in_a_cyclic_graph_the_shortest_path_to_the_culprit_is_found_in_bounded_time() -> None:
    peers: list[Peer] = []
    for _ in range(30):
        Peer(peers)
    peers[-1].tail = SimpleNamespace(feed=queue.Queue())
    said = r"its variable peers: \[29\]: \.tail: \.feed: a queue\.Queue can't be pickled"
    with pytest.raises(PlanError, match=said):
        ship(sl.from_items([1]).map(lambda _: peers).plan)
    peers[-1].tail = {number: [queue.Queue()] for number in range(MOST_TRIED)}
    with pytest.raises(PlanError, match=r"its variable peers: \[29\]: \.tail: a dict can't be pickled"):
        ship(sl.from_items([1]).map(lambda _: peers).plan)


@pytest.mark.long
def test_the_shell_of_a_notebook_is_refused_by_its_name() -> None:
    shell: Any = type("InteractiveShell", (), {"__module__": "IPython.core.interactiveshell", "sent": queue.Queue()})
    derived: Any = type("KernelShell", (shell,), {"get_ipython": lambda self: self})
    get_ipython = derived().get_ipython
    with pytest.raises(
        PlanError, match=r"its variable get_ipython: \S*KernelShell, whose method .* belongs to the proc"
    ):
        ship(sl.from_items([1]).map(lambda _: get_ipython()).plan)


@pytest.mark.long
def test_the_way_out_of_what_can_not_be_sent_works(new_echo: NewEcho) -> None:
    @functools.cache
    def get() -> sqlite3.Connection:
        return sqlite3.connect(":memory:")

    connection = get()
    connection.close()
    with pytest.raises(PlanError, match=re.escape("`@functools.cache def get(): return ...` that makes it, and get()")):
        ship((get, connection))
    assert new_echo().call(lambda: get().execute("select 1").fetchone()) == (1,)
