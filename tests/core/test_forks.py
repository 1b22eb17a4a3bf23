"""Copies of a process speak for no stream: where user code returns twice in a thread of ours, or in the consumer's."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.ipc import shared_memory as slabs
from streamline.backends.ipc.messages import Shutdown
from streamline.backends.ipc.socket_link import SocketLink
from streamline.core.forks import ForkSafeLock
from streamline.errors import ClosedError
from streamline.training.shared_iterator import SharedSyncIterator

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ITEMS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[Backend]:
    with sl.Processes(1) as opened:
        with sl.from_items([1]).open(backend=opened) as stream:
            list(stream)
        yield opened


@pytest.fixture(params=["processes", "threads", "inline"])
def backend(request: pytest.FixtureRequest, pool: Backend) -> Backend:
    return {"processes": pool, "threads": sl.Threads(1), "inline": sl.Inline()}[request.param]


# In a worker ----------------------------------------------------------------------------------------------------------


def forking(fork: Callable[[], int] = os.fork, end: Callable[[], object] = lambda: None) -> Callable[[int], int]:
    """Return a function that forks at one item, and says at the last one how the copy has ended."""
    copies: list[int] = []

    def call(n: int) -> int:
        if n == 2:
            copies.append(fork())
            if not copies[0]:
                end()
        return os.waitstatus_to_exitcode(os.waitpid(copies[0], 0)[1]) if n == ITEMS - 1 else n

    return call


def fails() -> None:
    raise ValueError("of the copy")


def mapped(**options: Any) -> Callable[[Any], sl.Pipeline[int]]:
    return lambda pipe: pipe.map(forking(), **options)


def awaited(pipe: sl.Pipeline[int]) -> sl.Pipeline[int]:
    call = forking()

    async def function(n: int) -> int:
        return call(n)

    return pipe.map(function)


def generated(pipe: sl.Pipeline[int]) -> sl.Pipeline[int]:
    call = forking()

    def function(n: int) -> Iterator[int]:
        yield call(n)

    return pipe.flat_map(function)


def own_stage(pipe: sl.Pipeline[int]) -> sl.Pipeline[int]:
    call = forking()

    @sl.stage(state=dict)
    async def stage(items: AsyncIterator[int], *, state: dict[str, int]) -> AsyncIterator[int]:
        async for item in items:
            yield call(item)

    return pipe.through(stage)


WAYS: dict[str, Callable[[sl.Pipeline[int]], sl.Pipeline[int]]] = {
    "map": mapped(),
    "map in a thread": mapped(executor="thread", concurrency=1),
    "async map": awaited,
    "flat_map": generated,
    "own stage": own_stage,
}


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_ends_where_user_code_returns_in_it(way: str, backend: Backend) -> None:
    pipe = WAYS[way](sl.from_items(range(ITEMS)))
    with pipe.open(backend=backend) as stream:
        assert list(stream) == [*range(ITEMS - 1), 0]


@pytest.mark.parametrize(
    ("fork", "end", "code"),
    [
        (lambda: pty.fork()[0], lambda: None, 0),
        (os.fork, fails, 1),
        (os.fork, sys.exit, 1),
        (os.fork, lambda: os._exit(7), 7),
        (os.fork, lambda: os.kill(os.getpid(), signal.SIGKILL), -9),
    ],
    ids=["pty", "raises", "sys.exit", "exits by itself", "killed"],
)
def test_a_copy_ends_in_every_way_and_says_nothing(
    fork: Callable[[], int], end: Callable[[], object], code: int, pool: Backend
) -> None:
    with sl.from_items(range(ITEMS)).map(forking(fork, end)).open(backend=pool) as stream:
        assert list(stream) == [*range(ITEMS - 1), code]


def test_children_of_user_code_that_never_return_work_as_ever(pool: Backend) -> None:
    def call(n: int) -> tuple[int, list[int], int]:
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=abs, args=(n,))
        child.start()
        child.join()
        with fork.Pool(1) as children:
            found = children.map(abs, [-n])
        ran = subprocess.run(["true"], preexec_fn=lambda: None, check=False)
        return child.exitcode or 0, found, ran.returncode

    with sl.from_items([3, 4]).map(call).open(backend=pool) as stream:
        assert list(stream) == [(0, [3], 0), (0, [4], 0)]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="how a copy's end is noticed here")
def test_a_copy_that_never_returns_ends_with_its_host() -> None:
    def call(n: int) -> int:
        pid = os.fork()
        while not pid:
            signal.pause()
        return pid

    with sl.from_items([1]).map(call).open(backend=sl.Processes(1)) as stream:
        copy = os.pidfd_open(next(stream))
        assert not select.select([copy], [], [], 0)[0]
    ended, _, _ = select.select([copy], [], [], 30)
    os.close(copy)
    assert ended


# In the consumer's process --------------------------------------------------------------------------------------------


def in_a_fork(work: Callable[[], object]) -> None:
    """Do something in a copy of this process."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextmanager
def held_elsewhere(*locks: Any) -> Iterator[None]:
    """Let another thread hold some locks."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_link_that_is_closed_in_a_fork_goes_on_here() -> None:
    near, far = socket.socketpair()
    link = SocketLink(near)
    in_a_fork(link.close)
    link.send(Shutdown())
    assert far.recv(1 << 10)
    link.close()
    far.close()


def test_what_a_fork_lets_go_of_is_still_held_here() -> None:
    pool = slabs.SlabPool(1 << 20)
    slab = pool.take(1 << 16)
    assert slab is not None
    assert slab.descriptor.fd is not None
    views = [slabs.SlabLease(slab.descriptor.fd, slab.size).lend(1 << 16)]
    slab.descriptor.close()
    in_a_fork(views.clear)
    before = slab.free
    views.clear()
    assert (before, slab.free) == (False, True)
    pool.close()


def test_a_fork_is_lent_no_memory_that_is_lent_here() -> None:
    pool = slabs.SlabPool(8 << 20)
    freed = pool.empty(1 << 20)
    assert freed is not None
    del freed

    def work() -> None:
        with pool._lock:  # not the one that a thread of the parent may have held
            assert pool.empty(1 << 20) is None, "else both write there"

    with pool._lock:
        in_a_fork(work)
    assert pool.empty(1 << 20) is not None
    pool.close()


def read(backend: Backend, what: str) -> tuple[Any, Any]:
    pipe = sl.from_items(range(400))
    if what == "loader":
        loader = pipe.loader(backend=backend)
        return loader, iter(loader)
    if what == "replicator":
        replicator = sl.StreamReplicator(pipe, 1, backend=backend)
        return replicator, replicator.replica(0)
    stream = pipe.debug() if what == "debug" else pipe.open(backend=backend).sync_stream()
    return stream, iter(stream) if what == "loop" else stream


@pytest.mark.parametrize("what", ["stream", "loop", "debug", "loader", "replicator"])
def test_what_was_open_before_a_fork_is_refused_there_and_goes_on_here(what: str, pool: Backend) -> None:
    opened, items = read(pool, what)
    held = [next(items) for _ in range(3)]

    def go_on() -> None:
        with pytest.raises(ClosedError, match=f"belongs to process {os.getppid()}, which this one"):
            next(items)
        opened.close()

    in_a_fork(go_on)
    assert held + list(items) == list(range(400))
    opened.close()


def test_a_loader_is_closed_in_a_fork_whatever_another_thread_held_then() -> None:
    """An epoch that is opened ahead is, in the loop's thread: the copy waited for ever."""
    loader = sl.from_items(range(400)).shard(1).loader(backend=sl.Threads(1))
    passes = loader._passes
    assert passes._pool is not None
    with held_elsewhere(passes._lock, passes._pool._lock):
        in_a_fork(loader.close)
    assert list(loader) == list(range(400))
    loader.close()


def module_locks() -> list[Any]:
    """Return the locks of modules of the package, of whatever kind."""
    package = Path(sl.__file__).parent
    locks = []
    for path in package.rglob("*.py"):
        for name in re.findall(r"^(\w+)\b[^=\n]* = [\w.]*Lock\(\)", path.read_text(), re.MULTILINE):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            locks.append(getattr(importlib.import_module(module), name))
    return locks


def test_a_lock_of_a_module_is_free_in_a_fork_whatever_thread_held_it() -> None:
    locks = module_locks()
    assert len(locks) == 10

    def take() -> None:
        for lock in locks:
            with lock, lock:
                pass

    with held_elsewhere(*locks):
        in_a_fork(take)


def test_a_lock_that_its_own_thread_holds_at_a_fork_is_left_in_both() -> None:
    lock = ForkSafeLock()
    with lock:
        child = os.fork()
    if not child:
        with lock:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with lock:
        pass


def test_no_function_of_python_runs_while_a_lock_is_taken_or_released() -> None:
    """A signal may strike where one begins: in an `__exit__`, the lock would stay locked."""
    lock, called = ForkSafeLock(), list[str]()

    def take() -> None:
        with lock, lock:
            pass

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: called.append(frame.f_code.co_name))
    try:
        take()
    finally:
        sys.settrace(before)
    assert called == ["take"]


def test_a_dataset_is_read_in_a_fork_whatever_another_thread_held() -> None:
    data = sl.StreamDataset(lambda: range(4))
    items = iter(data)
    assert next(items) == 0
    assert isinstance(data._drawn, SharedSyncIterator)

    def go_on() -> None:
        assert next(items) == 1
        data.reset()

    with held_elsewhere(data._lock, data._drawn._lock):
        in_a_fork(go_on)
    assert list(items) == [1, 2, 3]


async def test_an_async_stream_is_refused_in_a_fork(pool: Backend) -> None:
    async with sl.from_items(range(400)).open(backend=pool) as stream:
        first = await anext(stream)

        def go_on() -> None:
            with pytest.raises(ClosedError, match="belongs to process"):
                stream.__anext__().send(None)

        in_a_fork(go_on)
        assert [first, *[item async for item in stream]] == list(range(400))
