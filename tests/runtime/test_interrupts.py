"""Ctrl-C at every place of the code that a plain loop runs through: no item is lost, none comes twice.

`Strikes` raises KeyboardInterrupt at a place and is done; the loop goes on, up to the next place. After each, the state
counts what the loop has got, and nothing else. CPython handles a signal at fewer places than these: where a Python
function begins, where a loop jumps back, and after a call; a test with real signals is at the end.
"""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import _base as futures
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import anyio
import pytest
from rich.console import Console

import streamline as sl
from streamline.backends.network.connections import Listener
from streamline.core import forks, threads
from streamline.core.atomic_file import read_own, replace_file
from streamline.core.forks import ForkSafeLock
from streamline.core.threads import new_event_loop
from streamline.errors import ReplicaStalled
from streamline.observe import contention
from streamline.training import replica_shares
from streamline.training.replica_shares import Notifier

Trace: TypeAlias = "Callable[[FrameType, str, Any], Any]"

FOLDER = str(Path(sl.__file__).parent)
LONG = pytest.mark.long
BY_OPCODES = [False, pytest.param(True, marks=LONG)]
HOSTS = [sl.Threads(1), pytest.param(sl.Processes(1), marks=LONG)]
TAKING = ["_fetch_part", "part", "_part_at_hand", "_load", "then", "_go_on"]
HANDOVER = [*TAKING, "_part_of_steps", "_wait_list", "_fetch", "_over", "_end"]
PIPE = sl.from_items(range(23)).shuffle(seed=1).shard(2).shuffle(window=3).merge().batch(2, collate=None)


@pytest.fixture(autouse=True)
def _nothing_stays_handled() -> Iterator[None]:
    """Else it would be the context of each later exception of this process: hundreds of tracebacks for one failure."""
    yield
    assert sys.exception() is None


@pytest.fixture(autouse=True)
def _no_lock_stays_taken() -> Iterator[None]:
    """At the end of a `with` a strike leaves its lock taken; no signal is handled there."""
    yield
    for lock in list(forks._owned):
        while isinstance(lock, ForkSafeLock) and lock._is_owned():  # type: ignore[attr-defined]
            lock.release()


MACHINERY = [
    "supervise",
    "start",
    "_begin",
    "fill_channel",
    "drive",
    "pump",
    "_packet",
    "_pull",
    "aclose",
    "close",
    "_run",
]


async def nothing(item: int) -> int:
    return item


class Strikes:
    """Raises KeyboardInterrupt in streamline's code, in this thread: at each line, or at each opcode, `times` times.

    Args:
      functions: the names of those in which it does; none: in all.
      also: a file outside streamline in which it does, too.
    """

    def __init__(self, *functions: str, opcodes: bool = False, times: int = 2, also: str = FOLDER) -> None:
        self._functions = functions
        self._files = FOLDER, also
        self._event = "opcode" if opcodes else "line"
        self._times = times
        self._hits = Counter[tuple[CodeType, int]]()
        self._begin, self._each = self._begins, self._strikes  # Python forgets them when one of them raises

    @property
    def count(self) -> int:
        return sum(self._hits.values())

    @property
    def struck(self) -> set[str]:
        """The names of the functions in which it has struck."""
        return {code.co_name for code, _ in self._hits}

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Strike once, at the first place that it hasn't struck as often as it should; swallow that."""
        before = sys.gettrace()
        gc.disable()  # struck frames are in cycles on 3.12: a finalizer would be struck, and Python drops that
        sys.settrace(self._begin)
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
            gc.enable()

    def _begins(self, frame: FrameType, event: str, arg: object) -> Trace | None:
        code = frame.f_code
        if not code.co_filename.startswith(self._files) or (self._functions and code.co_name not in self._functions):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self._event == "opcode", self._event == "line"
        return self._each

    def _strikes(self, frame: FrameType, event: str, arg: object) -> Trace:
        place = frame.f_code, frame.f_lasti if event == "opcode" else frame.f_lineno
        if event == self._event and self._hits[place] < self._times:
            self._hits[place] += 1
            raise KeyboardInterrupt
        return self._each


class Signals:
    """Raises KeyboardInterrupt where CPython handles a signal: as a function begins, and after a call of one in C.

    At each such place of streamline's once; then again in what cleans up after that, so many lines later.
    """

    def __init__(self) -> None:
        self._places = set[tuple[CodeType, int]]()
        self._after = 0

    @property
    def struck(self) -> set[str]:
        """The names of the functions in which it has struck."""
        return {code.co_name for code, _ in self._places}

    @contextmanager
    def armed(self, after: int | None) -> Iterator[None]:
        """Strike at the first place that isn't struck yet, and again `after` so many lines; swallow that."""
        self._after = -1 if after is None else after
        gc.disable()
        sys.setprofile(self._first)
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            gc.enable()

    def _first(self, frame: FrameType, event: str, arg: object) -> None:
        place = frame.f_code, frame.f_lasti
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(FOLDER) and place not in self._places:
            self._places.add(place)
            above: FrameType | None = frame
            while above is not None and self._after >= 0:
                above.f_trace = self._again
                above = above.f_back
            sys.settrace(self._again if self._after >= 0 else None)
            raise KeyboardInterrupt

    def _again(self, frame: FrameType, event: str, arg: object) -> Trace | None:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        self._after -= event == "line"
        if self._after < 0:
            raise KeyboardInterrupt
        return self._again


def by_for(items: Iterator[int], got: list[int]) -> None:
    for item in items:
        got.append(item)  # noqa: PERF402 - extend() would lose them: it has them before the list has


def by_next(items: Iterator[int], got: list[int]) -> None:
    with suppress(StopIteration):
        while True:
            got.append(next(items))


def struck_until_its_end(
    strikes: Strikes, items: Iterator[int], got: list[Any], take: Callable[..., None], check: Callable[[], None]
) -> None:
    """Let `take` take all items, struck wherever it can be; `check` is called behind each strike."""
    before = None
    while before != strikes.count:
        before = strikes.count
        try:
            raise LookupError
        except LookupError:  # struck where one ends, Python keeps what was handled; after this handler it is gone
            with strikes.armed():
                take(items, got)
        check()


@pytest.mark.parametrize("opcodes", BY_OPCODES)
@pytest.mark.parametrize("take", [by_for, by_next])
def test_a_stream(take: Callable[..., None], opcodes: bool) -> None:
    strikes, got = Strikes(opcodes=opcodes), list[int]()
    with sl.from_items(range(60)).open() as stream:

        def check() -> None:
            assert (stream.count, stream.snapshot().produced) == (len(got), [len(got)])

        struck_until_its_end(strikes, stream, got, take, check)
    assert got == list(range(60))
    if not opcodes or sys.version_info[:2] != (3, 12):  # which begins late to trace opcodes
        assert strikes.struck >= {"part", "_load", "then", "note_consumed", "take", "wait", "_go_on", "_end"}


@pytest.mark.parametrize("opcodes", BY_OPCODES)
@pytest.mark.parametrize("steps", [None, pytest.param(5, marks=LONG)])
def test_an_epoch_of_a_loader_that_is_gone_on_with(steps: int | None, opcodes: bool) -> None:
    with PIPE.loader(steps_per_epoch=steps) as loader:
        whole = [list(loader) for _ in range(3)]
    strikes = Strikes(*HANDOVER if opcodes else (), opcodes=opcodes, times=1)
    with PIPE.loader(steps_per_epoch=steps) as loader:
        for epoch in range(3):
            got = list[Any]()

            def check(epoch: int = epoch, got: list[Any] = got) -> None:
                state = loader.state_dict()
                behind = (epoch, len(got)) if len(got) < len(whole[epoch]) else (epoch + 1, 0)
                assert (state["epoch"], state["step"]) == behind

            batches: Iterator[Any] = iter(loader)
            struck_until_its_end(strikes, batches, got, by_for, check)
            assert got == whole[epoch]
    if not opcodes or sys.version_info[:2] != (3, 12):
        assert strikes.struck >= {"_fetch_part", "_over", "_end"}


@pytest.mark.long
@pytest.mark.parametrize("steps", [None, pytest.param(5, marks=LONG)])
def test_a_loader_whose_state_is_loaded_into_another_one(steps: int | None) -> None:
    """The interrupt leaves the iteration: what it has given, and what the state says, go together."""
    with PIPE.loader(steps_per_epoch=steps) as loader:
        whole = [batch for _ in range(2) for batch in loader]
    strikes = Strikes(*set(HANDOVER) - {"_end"}, times=1)  # what a finalizer runs too, which can't raise
    state: dict[str, Any] | None = None
    got, before = list[Any](), -1
    while before != strikes.count or len(got) < len(whole):
        before = strikes.count
        with PIPE.loader(steps_per_epoch=steps) as loader:
            if state is not None:
                loader.load_state_dict(state)
            with strikes.armed():
                for _ in range(loader.epoch, 2):
                    for batch in loader:
                        got.append(batch)
            state = loader.state_dict()
        assert got == whole[: len(got)]
    assert strikes.count > 30


@pytest.mark.parametrize(
    ("backend", "take"),
    [(sl.Threads(2), by_for), *(pytest.param(hosts(2), by_next, marks=LONG) for hosts in (sl.Threads, sl.Processes))],
)
def test_a_stream_of_workers_in_threads_and_processes(backend: Any, take: Callable[..., None]) -> None:
    strikes, got = Strikes(times=1), list[int]()
    with sl.from_items(range(40)).shard(2).map(abs).merge().open(backend=backend) as stream:

        def check() -> None:
            assert (stream.count, sum(stream.snapshot().produced)) == (len(got), len(got))

        struck_until_its_end(strikes, stream, got, take, check)
    assert got == list(range(40))
    assert strikes.struck >= {"part", "_load", "then", "note_consumed", "take", "wait", "_go_on", "_end"}


@pytest.mark.long
@pytest.mark.parametrize("backend", [sl.Threads(2), sl.Processes(2)])
def test_a_loader_of_workers_in_threads_and_processes(backend: Any) -> None:
    strikes = Strikes(times=1)
    with sl.from_items(range(40)).shard(2).map(abs).merge().loader(backend=backend) as loader:
        for epoch in range(2):
            got = list[int]()

            def check(epoch: int = epoch, got: list[int] = got) -> None:
                state = loader.state_dict()
                assert (state["epoch"], state["step"]) == ((epoch, len(got)) if len(got) < 40 else (epoch + 1, 0))

            struck_until_its_end(strikes, iter(loader), got, by_for, check)
            assert got == list(range(40))
    assert strikes.struck >= {"_fetch_part", "_over", "_end"}


def test_replicas() -> None:
    strikes = Strikes()
    got = list[int](), list[int]()
    with sl.StreamReplicator(sl.from_items(range(40)), 2, capacity=20) as replicator:
        replicas = [replicator.replica(number) for number in range(2)]

        def check() -> None:
            assert replicator.state_dict()["taken"] == [replica.taken for replica in replicas] == [*map(len, got)]

        for replica, mine in zip(replicas, got, strict=True):
            struck_until_its_end(strikes, replica, mine, by_for, check)
    assert got == ([*range(0, 40, 2)], [*range(1, 40, 2)])
    assert strikes.struck >= {"__next__", "begin", "_ended"}


LENGTH = 120
"""So many that no place is left to strike a draw at when the iterator ends: a strike there can't be told from one in
the iterator's own code, which is said. Python 3.13 traces more opcodes than 3.11, for which 40 were enough."""


@pytest.mark.parametrize("opcodes", BY_OPCODES)
@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=LONG)])
def test_a_stream_dataset_which_is_gone_on_with_here_or_elsewhere(worker: int, opcodes: bool) -> None:
    """Its iterator isn't streamline's code. Not struck is where a `with` releases a lock of all threads: only a trace
    function can raise there.
    """

    def dataset() -> sl.StreamDataset[int]:
        return sl.StreamDataset(lambda: iter(range(LENGTH)), worker, 2)

    functions = ["_fetch_part", "part", "_next", "_draw", "_mine", "_go_on", "_check", "_made", "_end", "_close"]
    strikes, got, shared = Strikes(*functions, opcodes=opcodes), list[int](), dataset()

    def check() -> None:
        other = dataset()
        other.load_state_dict(shared.state_dict())
        assert got + list(other) == list(range(worker, LENGTH, 2))

    before = -1
    while before != strikes.count:
        before = strikes.count
        struck_until_its_end(strikes, iter(shared), got, by_for, check)  # the iteration and the next one are struck
        with strikes.armed():
            by_for(iter(shared), got)
        check()
    assert got == list(range(worker, LENGTH, 2))
    if not opcodes or sys.version_info[:2] < (3, 12):  # these begin late to trace opcodes
        assert strikes.struck == {*functions}


def test_a_replica_that_makes_room_for_others() -> None:
    strikes, got = Strikes(times=3), list[int]()
    with sl.StreamReplicator(sl.from_items(range(60)), 1, capacity=2) as replicator:
        replica = replicator.replica(0)
        struck_until_its_end(strikes, replica, got, by_for, lambda: None)
    assert got == list(range(60))
    assert {"_make_room", "ring"} <= strikes.struck


def test_a_replica_that_waits_for_its_next_item_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in Python's own waits, out of which a RuntimeError may come: that an unlocked lock was released."""
    monkeypatch.setattr(replica_shares, "CTRL_C_S", 0.001)
    strikes, notifier, got = Strikes(opcodes=True, also=threading.__file__), Notifier(), list[int]()

    def take(_: Iterator[int], __: list[int]) -> None:
        looks = iter([False, True])
        notifier.wait_in_thread(lambda: next(looks))

    struck_until_its_end(strikes, iter([]), got, take, lambda: None)
    assert "wait_in_thread" in strikes.struck


def test_entering_and_leaving_a_pause() -> None:
    strikes, before = Strikes(times=1), None
    with sl.from_items(range(1_000)).open() as stream:
        got = [next(stream)]
        while before != strikes.count:
            before = strikes.count
            with strikes.armed(), stream.paused():
                pass
            gc.collect()  # what traces on 3.12 keeps the interrupted frames in a cycle, and with them the pause
            assert stream.snapshot().produced == [len(got)]
            got.append(next(stream))  # it goes on
        assert got + list(stream) == list(range(1_000))
    assert strikes.struck >= {"__enter__", "__exit__", "_leave", "resume"}


def test_a_snapshot() -> None:
    strikes, before = Strikes(times=1), None
    pipe = sl.from_items(range(1_000)).shard(2).shuffle(window=4).merge()
    with pipe.open() as stream:
        got = list(islice(stream, 3))
        while before != strikes.count:
            before, state = strikes.count, stream.snapshot()
            with strikes.armed():
                stream.snapshot()
            assert stream.snapshot() == state
            got.append(next(stream))
        assert got + list(stream) == list(pipe)
    assert strikes.count > 50


def test_a_debug_stream_whose_snapshot_is_gone_on_with() -> None:
    pipe = sl.from_items(range(12)).shard(2).shuffle(window=3).merge().batch(2, collate=None)
    strikes = Strikes(*TAKING, times=1)
    whole, got, before = list(pipe), list[Any](), -1
    snapshot: sl.Snapshot | None = None
    while before != strikes.count:
        before = strikes.count
        with pipe.debug(resume=snapshot) as stream:
            with strikes.armed():
                for batch in stream:
                    got.append(batch)
            snapshot = stream.snapshot()
        assert got == whole[: len(got)]
    assert got == whole
    assert strikes.count > 20


def strike_debug(pipe: sl.Pipeline[Any], whole: list[Any], strikes: Strikes) -> Iterator[None]:
    """Open debug streams one after the other, each where the one that was struck stood; yield after each."""
    got, before = list[Any](), -1
    snapshot: sl.Snapshot | None = None
    while before != strikes.count:
        before = strikes.count
        stream = pipe.debug(resume=snapshot)
        with strikes.armed(), stream, strikes.armed():
            for item in stream:
                got.append(item)
        snapshot = stream.snapshot()
        stream.close()
        assert got == whole[: len(got)]
        yield
    assert got == whole


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # Ctrl-C came between its making and its run
def test_a_debug_stream_whose_machinery_is_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event loop is in this thread, so the strikes are in tasks, in what ends them, and in a close."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # in a finalizer, Python itself drops the interrupt
    pipe = sl.from_items(range(6)).shard(2).map(nothing).shuffle(window=2).merge()
    whole = list(pipe)
    strikes = Strikes(*MACHINERY, times=1)
    for _ in strike_debug(pipe, whole, strikes):
        pass
    assert strikes.struck >= set(MACHINERY)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.long
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_debug_stream_struck_at_any_line_leaves_any_outer_loop_as_it_was(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    pipe = sl.from_items(range(6)).shard(2).map(nothing).shuffle(window=2).merge()
    strikes = Strikes("run", "_leave", "_enter", "begin", "close", "_run", "_fetch", "_fetch_part", "part", times=1)

    async def outer() -> None:
        task, token = anyio.get_current_task(), anyio.lowlevel.current_token()
        for _ in strike_debug(pipe, list(pipe.debug()), strikes):
            assert (anyio.get_current_task(), anyio.lowlevel.current_token()) == (task, token)
        await anyio.lowlevel.checkpoint()

    anyio.run(outer, backend_options={"use_uvloop": loop == "uvloop"})
    assert strikes.struck >= {"run", "_leave", "_enter", "close"}


@pytest.mark.long
async def test_a_debug_stream_within_a_running_loop_leaves_it_as_it_was_and_loses_nothing(tmp_path: Path) -> None:
    """A notebook's cell, say. A merge that has chosen items passes the interrupt on, and so does a call in a thread."""
    for part in range(2):
        (tmp_path / f"{part}.jsonl").write_text("".join(f"{10 * part + row}\n" for row in range(3)))
    lines = sl.read_jsonl(f"{tmp_path}/*.jsonl").shard(2).map(nothing, concurrency=2).prefetch(2).merge()
    pipe = lines.map(abs, executor="thread").batch(2, collate=None)
    with pipe.open() as opened:
        whole = list(opened)
    strikes = Strikes("_leave", "_enter", "_steps", "_look", "_take_picked", "_pick", "call_all", times=1)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for _ in strike_debug(pipe, whole, strikes):
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
    assert strikes.struck >= {"_leave", "_enter", "_steps", "_look", "call_all"}
    await asyncio.sleep(0)


def test_a_debug_stream_is_closed_while_an_interrupt_of_the_loop_is_handled() -> None:
    closed = []

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(3):
                yield number
        finally:
            await asyncio.sleep(0)
            closed.append(number)

    with suppress(KeyboardInterrupt), sl.from_iterable(source).debug() as stream:
        next(stream)
        raise KeyboardInterrupt
    assert closed == [0]


OPENING = ["open", "__enter__", "sync_stream", "start", "start_thread", "begin", "show", "stop", "_end", "close"]
CLOSING = ["_end", "leave", "drop_next", "forget_next", "__call__", "detach"]

CLOSED = ["close", "wait", "__enter__"]


def opened_stream() -> None:
    with PIPE.open() as stream:
        next(stream)


def dropped_stream() -> None:
    for _ in PIPE:
        break


def opened_loader() -> None:
    with PIPE.loader() as loader:
        next(iter(loader))


def closed_loader() -> None:
    with PIPE.loader(backend=sl.Threads(2)) as loader:
        next(iter(loader))


def opened_replicator() -> None:
    with sl.StreamReplicator(range(6), 1) as replicator:
        next(replicator.replica(0))


def closed_replicator() -> None:
    async def source() -> AsyncIterator[int]:
        try:
            yield 0
        finally:
            await asyncio.sleep(0.02)  # so that the close has to wait

    with sl.StreamReplicator(source(), 1) as replicator:
        next(replicator.replica(0))


def stopped_twice() -> None:
    stream = PIPE.open().sync_stream()
    try:
        next(stream)
        stream.close()
    finally:
        stream.close()


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize(
    ("act", "functions"),
    [(opened_stream, OPENING), (dropped_stream, CLOSING)]
    + [
        pytest.param(act, OPENING, marks=LONG)
        for act in (dropped_stream, opened_loader, opened_replicator, stopped_twice)
    ]
    + [pytest.param(closed_loader, CLOSING, marks=LONG), pytest.param(closed_replicator, CLOSED, marks=LONG)],
)
def test_what_is_being_opened_or_closed_leaves_nothing(
    act: Callable[[], None], functions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture that looks for leaks says so."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # in a finalizer, Python itself drops the interrupt
    strikes = Strikes(*functions, opcodes=functions is CLOSED, times=1, also=futures.__file__)
    for _ in range(2):  # Python 3.13 traces no opcodes in a first run
        before = None
        while before != strikes.count:
            before = strikes.count
            try:
                raise LookupError
            except LookupError:  # as in `struck_until_its_end`
                with strikes.armed():
                    act()
    assert strikes.struck >= ({"start_thread", "close"} if functions is OPENING else {functions[0]})


def paged_stream() -> None:
    with PIPE.open(page=True) as stream:
        next(stream)


def paged_loader() -> None:
    with PIPE.loader(page=True) as loader:
        next(iter(loader))


def opened_listener() -> None:
    Listener(("127.0.0.1", 0), bytes(32), lambda *_: None).close()


def closed_pool() -> None:
    with sl.Threads(2) as pool, PIPE.open(backend=pool) as stream:
        next(stream)


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("act", [paged_stream, paged_loader, closed_pool])
@pytest.mark.parametrize("after", [None, *(pytest.param(lines, marks=LONG) for lines in (0, 3, 10, 30))])
def test_a_second_interrupt_in_the_clean_up_leaves_nothing_either(
    act: Callable[[], None], after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture that looks for leaks says so; `after` None: there is no second one."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    act()  # what is imported late: Python's import lock doesn't bear an interrupt
    signals, before = Signals(), -1
    while before != len(signals._places) and len(signals._places) < 150:
        before = len(signals._places)
        try:
            raise LookupError
        except LookupError:  # as in `struck_until_its_end`
            with signals.armed(after):
                act()
    assert len(signals._places) > 40


def async_stream() -> None:
    async def main() -> None:
        async with sl.from_items(range(6)).map(abs, executor="thread").open(backend=sl.Threads(1)) as stream:
            await anext(stream)

    asyncio.run(main())


@pytest.mark.parametrize("backend", [sl.Inline(), *HOSTS])
@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
def test_an_event_loop_that_is_closed_without_cancelling_its_tasks_leaves_nothing(
    library: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where a second Ctrl-C strikes `asyncio.run` in its end."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # coroutines that can't be closed any more
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)  # it says which tasks were pending
    loop = new_event_loop() if library == "uvloop" else asyncio.new_event_loop()

    async def begin() -> object:
        stream = (
            await sl.from_items(range(99)).map(abs, executor="thread").open(backend=backend, page=True).__aenter__()
        )
        await anext(stream)
        return stream

    stream = loop.run_until_complete(begin())
    loop.close()
    assert stream.page is None  # type: ignore[attr-defined]
    stream = None


@pytest.mark.parametrize("strikes", [1, pytest.param(2, marks=LONG), pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("backend", HOSTS)
def test_a_burst_of_interrupts_in_the_end_of_an_event_loop_leaves_nothing(
    backend: Any, cancelled: bool, closing: bool, strikes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each strikes the next wait of this thread, in the loop's last tasks and as it is closed."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)
    left, wait = [KeyboardInterrupt()] * strikes, threads.wait_interruptible

    def struck(*args: Any) -> Any:
        if left and threading.current_thread() is threading.main_thread():
            raise left.pop()
        return wait(*args)

    async def begin() -> object:
        stream = await sl.from_items(range(99)).shard(9).map(abs).merge().open(backend=backend).__aenter__()
        await anext(stream)
        if closing:
            closes.append(asyncio.create_task(stream.aclose()))
            await asyncio.sleep(0.001)
        return stream

    closes = list[object]()
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    monkeypatch.setattr(threads, "wait_interruptible", struck)
    for _ in range(4 if cancelled else 0):  # a cancellation passes shields, so the streams' own close is cut off
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with suppress(KeyboardInterrupt, RuntimeError):
            loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del stream


def save_and_load(path: Path) -> None:
    replace_file(path, b"new")
    assert read_own(path) == b"new"


def look_at_the_lock(_: Path) -> None:
    assert len(list(contention.gil_waits_s(2))) == 2


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("act", [save_and_load, look_at_the_lock])
def test_no_descriptor_is_left_by_an_interrupt_at_any_place(
    act: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture that looks for leaks says so; nor is a temporary, after the next save."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    signals, before = Signals(), -1
    while before != len(signals._places):
        before = len(signals._places)
        with signals.armed(None):
            act(tmp_path / "file")
    act(tmp_path / "file")
    assert len(list(tmp_path.iterdir())) <= 1
    assert len(signals._places) > 10


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("streamline loop", opened_stream),
        ("streamline opening", paged_stream),
        ("streamline web server", paged_stream),
        ("streamline opening", paged_loader),
        ("streamline replicator", opened_replicator),
        ("streamline listener", opened_listener),
        ("streamline host 0", async_stream),
    ],
)
def test_a_thread_that_an_interrupt_strikes_right_after_its_start_ends(
    name: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As do its port and its files: the fixture that looks for leaks says so."""
    start, struck = threading.Thread.start, list[str]()

    def start_and_strike(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == name and not struck:
            struck.append(name)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_strike)
    with pytest.raises(KeyboardInterrupt):
        act()
    assert struck == [name]


@pytest.mark.long
def test_an_iteration_that_is_dropped_has_ended_whatever_strikes_its_finalizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr("streamline.runtime.loop_thread.EXIT_S", 200.0)  # however busy the machine is
    strikes, before = Strikes("_dropped", "_leave", "leave", "stopped", times=1), None
    while before != strikes.count:
        before = strikes.count
        with PIPE.loader() as loader:
            batches = iter(loader)
            first = next(batches)
            with strikes.armed():
                del batches
            assert not any(thread.name == "streamline loop" for thread in threading.enumerate())
            assert loader.epoch == 1
            assert len([first, *loader]) == 13
    assert strikes.struck == {"_dropped", "_leave", "leave", "stopped"}


def test_a_dropped_replica_is_named_to_the_others_whatever_strikes_its_finalizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    strikes, before = Strikes("lose", "stop", "_finish", "leave", times=1), None
    while before != strikes.count:
        before = strikes.count
        replicator = sl.StreamReplicator(sl.from_items(range(60)), 2, capacity=1, stall_timeout=1)
        with replicator:
            replica, other = replicator.replica(0), replicator.replica(1)
            next(replica)
            with strikes.armed():
                del replica
            with pytest.raises(ReplicaStalled, match="replica 0 of 2 was dropped by its reader after 1 items"):
                list(other)
            assert replicator.stats()[0].standing == "lost"
    assert strikes.struck == {"lose", "stop", "_finish", "leave"}


def test_a_debug_stream_that_never_began_has_a_snapshot_of_its_beginning() -> None:
    pipe = sl.from_items(range(5))
    stream = pipe.debug()
    stream.close()
    assert list(pipe.open(resume=stream.snapshot()).sync_stream()) == list(range(5))


def test_what_is_at_work_is_not_copied() -> None:
    import copy

    with sl.from_items(range(5)).open() as stream, pytest.raises(TypeError, match="SyncStream is at work"):
        copy.copy(stream)


def next_of_a_stream(pipe: sl.Pipeline[int], begun: threading.Event, stall_s: float | None = None) -> None:
    with pipe.open(stall_s=stall_s) as stream:
        next(stream)


def enter_a_pause(pipe: sl.Pipeline[int], begun: threading.Event) -> None:
    with pipe.open() as stream:
        begun.wait()
        stream.paused(quiesce_timeout=200).__enter__()


def next_of_a_replica(pipe: sl.Pipeline[int], begun: threading.Event) -> None:
    with sl.StreamReplicator(pipe, 1) as replicator:
        next(replicator.replica(0))


def shown_stream() -> None:
    with PIPE.open(progress=True) as stream:
        next(stream)


@pytest.mark.long
def test_a_display_that_is_begun_leaves_the_screen_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr("streamline.observe.progress.console_of", lambda _: console)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    strikes, before = Strikes("show", "start", "start_thread", "stop", times=1), None
    while before != strikes.count:
        before = strikes.count
        with strikes.armed():
            shown_stream()
        with PIPE.open(progress=True):
            assert "streamline progress" in {thread.name for thread in threading.enumerate()}
    assert strikes.struck == {"show", "start", "start_thread", "stop"}


WAITING = {"take", "pause", "wait_in_thread"}


def functions_of(thread: threading.Thread) -> Iterator[str]:
    """Yield the names of the functions that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


@pytest.mark.parametrize(
    "wait", [next_of_a_stream, partial(next_of_a_stream, stall_s=200), enter_a_pause, next_of_a_replica]
)
def test_ctrl_c_that_does_not_wake_a_wait_ends_it(wait: Callable[..., None]) -> None:
    """One that comes just before the thread falls asleep; or one to another thread, as here: that can be aimed."""
    begun, left, over = threading.Event(), threading.Event(), threading.Event()
    heard = list[bool]()

    def hangs(item: int) -> int:
        begun.set()
        over.wait()
        return item

    def strike() -> None:
        begun.wait()
        while WAITING.isdisjoint(functions_of(threading.main_thread())) and not left.is_set():
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        heard.append(left.wait(200))
        over.set()

    thread = threading.Thread(target=strike)
    thread.start()
    with suppress(KeyboardInterrupt):
        wait(sl.from_items(range(9)).map(hangs, executor="thread"), begun)
    left.set()
    thread.join()
    assert heard == [True]


SIGNALS = """
import random, signal, sys
import streamline as sl

armed, strikes, chance = [], 0, random.Random(1)

def strike(*_):
    if armed and armed.pop():
        raise KeyboardInterrupt

def in_a_finalizer(unraisable):  # there Python itself drops any exception: as if no signal had come
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)

sys.unraisablehook = in_a_finalizer
signal.signal(signal.SIGALRM, strike)  # as Ctrl-C, but it can be aimed

def all_of(items, taken):
    global strikes
    item, most = -1, strikes + 150  # on a busy machine, there would be no end of them
    while True:
        try:
            if strikes < most:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-4))
            for item in items:
                pass
            armed.clear()
            break
        except KeyboardInterrupt:
            strikes += 1
            assert taken() == item + 1, (taken(), item)
    assert item == N - 1, item

def replicas(items):
    return sl.StreamReplicator(sl.from_items(range(items)), 1)

with replicas(9) as replicator:
    list(replicator.replica(0))  # whatever is imported late: Python's import lock doesn't bear an interrupt

N = 20_000
with sl.from_items(range(N)).open() as stream:
    all_of(stream, lambda: stream.snapshot().produced[0])
with sl.from_items(range(N)).loader() as loader:
    all_of(iter(loader), lambda: loader.snapshot().produced[0])
N = 5_000
with replicas(N) as replicator:
    replica = replicator.replica(0)
    all_of(replica, lambda: replicator.state_dict()["taken"][0])
print(strikes)
"""


@pytest.mark.long
def test_real_signals_at_any_time(python: Callable[..., str]) -> None:
    assert int(python(SIGNALS)) > 50
