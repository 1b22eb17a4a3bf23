"""Hosts that stay between epochs, and the next epoch opened ahead: nothing is different but when things are read."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import ClosedError, PlanTypeError, ReadError
from streamline.runtime.run import ResolvedRun, RunKeywords
from streamline.training.loader import Loader
from streamline.training.passes import _Next
from tests.backends.kit import AnyThreads
from tests.laws.profile import long_but
from tests.training.kit import CHOOSING, PIPE, POOL, epochs_of, flat, interrupted, quick, stops

WAIT_S = 200


class Calls:
    """A function that notes its calls, and can be waited for."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.threads: set[threading.Thread] = set()
        self._news = threading.Condition()

    def __call__(self, item: int) -> int:
        with self._news:
            self.counts[item] += 1
            self.threads.add(threading.current_thread())
            self._news.notify_all()
        return item

    def wait_for(self, calls: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: sum(self.counts.values()) >= calls, WAIT_S), self.counts


def threads() -> set[str]:
    """Return the names of those that are there but for those of the session's processes."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("streamline") and not name.startswith("streamline process")}


# What is read when ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [False, True])
def test_workers_read_ahead_into_the_next_epoch_while_the_last_items_are_used(cut: bool) -> None:
    calls = Calls()
    pipe = sl.from_items(range(8)).shard(2).map(calls).merge()
    if cut:  # then the workers don't come to their ends by themselves
        pipe = sl.from_items(range(400)).shard(2).map(calls).merge().take(8)
    with pipe.loader(backend=sl.Threads(2)) as loader:
        iteration = iter(loader)
        items = [next(iteration) for _ in range(7)]
        calls.wait_for(16)
        assert loader.state_dict()["epoch"] == 0
        assert items + list(iteration) == list(range(8))
        assert list(loader) == list(range(8))


def test_the_epoch_opened_ahead_is_the_one_that_is_used() -> None:
    calls = Calls()
    with sl.from_items(range(8)).shard(2).map(calls).merge().loader(backend=sl.Threads(2)) as loader:
        for epoch in range(4):
            assert list(loader) == list(range(8))
            calls.wait_for(8 * (epoch + 2))
    assert set(calls.counts.values()) == {5}, "each epoch was read once, and one more ahead"


@pytest.mark.parametrize(("stay", "hosts"), [(True, 2), (False, 8)])
def test_hosts_stay_between_epochs_unless_told_otherwise(stay: bool, hosts: int) -> None:
    calls = Calls()
    pipe = sl.from_items(range(8)).shard(2).map(calls).merge()
    with pipe.loader(backend=sl.Threads(2), persistent=stay) as loader:
        for _ in range(4):
            assert list(loader) == list(range(8))
        assert any("host" in name for name in threads()) == stay
        if stay:
            calls.wait_for(33)
    assert len(calls.threads) == hosts
    assert (sum(calls.counts.values()) == 32) == (not stay), "what doesn't stay reads nothing ahead"


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"backend": sl.Threads(1)}, True),
        ({"backend": sl.Processes(1)}, True),
        ({"backend": sl.Threads(1), "persistent": False}, False),
        ({"backend": sl.Threads(1), "steps_per_epoch": 3}, False),
        ({"backend": sl.Threads(1), "dead_letters": "x.jsonl", "on_error": "skip"}, False),
        ({"backend": sl.Inline()}, False),
        ({}, False),
    ],
)
def test_nothing_is_opened_ahead_where_it_would_be_noticed(
    options: Any, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loader: Loader[Any] = PIPE.loader(**options)
    assert loader._passes.ahead == ahead


def test_nothing_of_a_live_feed_is_opened_ahead() -> None:
    async def feed() -> Any:
        for item in range(3):
            yield item

    with sl.from_stream(feed).loader(steps_per_epoch=2, backend=sl.Threads(1)) as loader:
        assert not loader._passes.ahead
        assert list(loader) == [0, 1]


def test_persistent_is_true_or_false() -> None:
    with pytest.raises(PlanTypeError, match="persistent="):
        PIPE.loader(persistent="yes")  # type: ignore[arg-type]


# Exactness ------------------------------------------------------------------------------------------------------------

ways = st.lists(st.sampled_from(["inside", "behind", "before"]), min_size=8, max_size=8)


def options_of(kind: str, pool: Backend) -> RunKeywords:
    return {"backend": AnyThreads(2) if kind == "own" else pool}


@quick
@given(st.sampled_from(POOL), stops, ways, st.sampled_from(["own", "shared"]))
def test_epochs_interrupted_anywhere_are_the_uninterrupted_ones(
    make: Callable[[], sl.Pipeline[Any]], stops: list[int], how: list[str], kind: str
) -> None:
    pipe = make()
    whole = dict(enumerate(epochs_of(pipe.loader(), 3)))
    with sl.Threads(2) as pool:
        found = interrupted(pipe, 3, stops, how[: len(stops)], options_of(kind, pool))
    assert found == {epoch: items for epoch, items in whole.items() if items}


@quick
@given(st.sampled_from(CHOOSING), stops)
def test_where_the_order_is_open_interrupted_epochs_are_the_same_multisets(
    make: Callable[[], sl.Pipeline[Any]], stops: list[int]
) -> None:
    pipe = make()
    whole = epochs_of(pipe.loader(), 3)
    with sl.Threads(2) as pool:
        seen = interrupted(pipe, 3, stops, ["inside"] * len(stops), {"backend": pool})
    assert {epoch: Counter(items) for epoch, items in seen.items()} == dict(enumerate(map(Counter, whole)))


@pytest.mark.long
def test_epochs_in_processes_interrupted_anywhere_are_the_uninterrupted_ones(processes: Backend) -> None:
    whole = dict(enumerate(epochs_of(PIPE.loader(), 3)))
    for halts in ([], [0, 5, 0], [6, 6], [11, 1, 1, 4]):
        for how in ("inside", "behind"):
            assert interrupted(PIPE, 3, halts, [how] * len(halts), {"backend": processes}) == whole, (halts, how)


def test_every_state_is_what_it_is_without_hosts() -> None:
    def states(loader: Loader[Any]) -> list[Any]:
        found = [loader.state_dict(), loader.snapshot().to_json()]
        for _ in range(3):
            for item in loader:
                found += [item, loader.state_dict(), loader.snapshot().to_json()]
            found.append(loader.state_dict())
        return found

    with PIPE.loader(backend=sl.Threads(2)) as loader:
        assert states(loader) == states(PIPE.loader())


def test_break_goes_on_with_the_next_epoch() -> None:
    whole = epochs_of(PIPE.loader(), 5)
    with PIPE.loader(backend=sl.Threads(2)) as loader:
        for epoch in range(5):
            taken = []
            for item in loader:
                taken.append(item)
                if len(taken) == epoch + 1:
                    break
            assert taken == whole[epoch][: epoch + 1]


def test_an_iteration_that_gave_nothing_is_begun_again() -> None:
    whole = epochs_of(PIPE.loader(), 2)
    with PIPE.loader(backend=sl.Threads(2)) as loader:
        for _ in range(3):
            iter(loader)
        assert [list(loader), list(loader)] == whole


def test_another_epoch_than_was_opened_ahead() -> None:
    whole = epochs_of(PIPE.loader(), 8)
    with PIPE.loader(backend=sl.Threads(2)) as loader:
        assert list(loader) == whole[0]
        loader.set_epoch(5)  # 1 is there already
        assert list(loader) == whole[5]
        iteration = iter(loader)
        taken = [next(iteration)]
        loader.set_epoch(2)
        assert taken + list(iteration) == whole[6]
        assert list(loader) == whole[2]
        loader.set_epoch(3)  # as trainers do, before each
        assert list(loader) == whole[3]


def test_a_fixed_epoch_is_the_same_each_time() -> None:
    with PIPE.loader(backend=sl.Threads(2), fixed_epoch=True, epoch=3) as loader:
        first = list(loader)
        assert [list(loader) for _ in range(4)] == [first] * 4


def test_files_that_changed_since_they_were_opened_ahead_are_opened_anew(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")
    pipe = sl.read_lines(str(tmp_path / "*.txt")).shard(2, mode="file").merge()
    with pipe.loader(backend=sl.Threads(2)) as loader:
        assert list(loader) == ["1", "2"]
        (tmp_path / "b.txt").write_text("3\n4\n")
        assert sorted(loader) == ["1", "2", "3", "4"]
        (tmp_path / "a.txt").unlink()
        assert list(loader) == ["3", "4"]
        (tmp_path / "b.txt").unlink()
        with pytest.raises(ReadError):
            iter(loader)
        (tmp_path / "b.txt").write_text("5\n")
        assert list(loader) == ["5"]


def test_what_can_not_be_opened_ahead_is_told_to_whoever_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, session, main = epochs_of(PIPE.loader(), 2), ResolvedRun.session, threading.current_thread()

    def fragile(resolved: ResolvedRun, *args: Any) -> Any:
        if resolved.epoch == 1 and (broken or threading.current_thread() is not main):
            raise ReadError("no disk")
        return session(resolved, *args)

    broken = True
    monkeypatch.setattr(ResolvedRun, "session", fragile)
    with PIPE.loader(backend=sl.Threads(2)) as loader:
        assert list(loader) == whole[0]
        with pytest.raises(ReadError, match="no disk"):
            iter(loader)
        broken = False
        assert list(loader) == whole[1]


def test_a_failure_ahead_waits_for_its_turn() -> None:
    calls = Calls()

    def fragile(item: int) -> int:
        calls(item)
        if item == 5 and calls.counts[5] == 2:
            raise ZeroDivisionError("epoch 1")
        return item

    with sl.from_items(range(8)).shard(2).map(fragile).merge().loader(backend=sl.Threads(2)) as loader:
        iteration = iter(loader)
        items = [next(iteration)]
        calls.wait_for(14)  # the failing one is among them
        items += iteration
        assert items == list(range(8))
        items = []
        with pytest.raises(ZeroDivisionError, match="epoch 1"):
            items.extend(loader)
        assert items == list(range(5))
        assert list(loader) == list(range(8))


def test_only_the_epoch_that_is_used_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(ResolvedRun, "show", lambda resolved, session: shown.append(resolved.epoch))
    with PIPE.loader(backend=sl.Threads(2)) as loader:
        for epoch in range(3):
            iteration = iter(loader)
            assert shown == list(range(epoch + 1))
            list(iteration)


def test_the_figures_of_an_epoch_that_was_opened_ahead_begin_with_it() -> None:
    calls = Calls()
    with sl.from_items(range(8)).shard(2).map(calls).merge().loader(backend=sl.Threads(2)) as loader:
        list(loader)
        calls.wait_for(16)
        began = perf_counter()
        assert list(loader) == list(range(8))
        stats = loader.stats()
        assert stats is not None
        assert stats.items == 8
        assert stats.elapsed_s <= perf_counter() - began


# The end --------------------------------------------------------------------------------------------------------------


def test_close_ends_hosts_and_what_was_opened_ahead() -> None:
    for used in (0, 1, 6):
        loader = PIPE.loader(backend=sl.Threads(2))
        iteration = iter(loader)
        for _ in range(used):
            next(iteration)
        loader.close()
        assert not threads()
        assert loader.state_dict()["step"] == used
        with pytest.raises(ClosedError):
            iter(loader)
    loader = PIPE.loader(backend=sl.Threads(2))
    loader.close()
    assert loader.snapshot() == PIPE.loader().snapshot()


def test_a_pool_of_the_users_is_left_open() -> None:
    with sl.Threads(2) as pool:
        for persistent in (True, False):
            with PIPE.loader(backend=pool, persistent=persistent) as loader:
                first = list(loader)
            assert threads() == {"streamline host 0", "streamline host 1"}
        with PIPE.loader(backend=pool, epoch=0) as train, PIPE.loader(backend=pool, fixed_epoch=True) as valid:
            for epoch, whole in enumerate(epochs_of(PIPE.loader(), 3)):
                assert list(train) == whole, epoch
                assert list(valid) == first
        last = PIPE.loader(backend=pool)
        assert list(last) == first
    assert not threads(), "what was opened ahead ends with the pool"
    with pytest.raises(ClosedError, match="the pool of Threads"):
        iter(last)


def test_close_waits_for_what_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    session, reached, go_on = ResolvedRun.session, threading.Event(), threading.Event()

    def slow(resolved: ResolvedRun, *args: Any) -> Any:
        if resolved.epoch == 1:
            reached.set()
            assert go_on.wait(WAIT_S)
        return session(resolved, *args)

    monkeypatch.setattr(ResolvedRun, "session", slow)
    loader = PIPE.loader(backend=sl.Threads(2))
    iteration = iter(loader)
    next(iteration)
    assert reached.wait(WAIT_S)
    closing = threading.Thread(target=loader.close)
    closing.start()
    go_on.set()
    closing.join()
    assert not threads()


def test_ctrl_c_while_what_is_being_opened_is_waited_for_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, interrupts, wait = epochs_of(PIPE.loader(), 3), [True], _Next.wait

    def interrupted(coming: _Next[Any]) -> Any:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return wait(coming)

    with PIPE.loader(backend=sl.Threads(2)) as loader:
        assert list(loader) == whole[0]
        monkeypatch.setattr(_Next, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        assert (loader.epoch, loader.step) == (1, 0)
        assert [list(loader), list(loader)] == whole[1:]


@pytest.mark.parametrize("steps", [None, 3])
def test_a_loader_that_is_dropped_leaves_nothing(steps: int | None) -> None:
    loader = PIPE.loader(backend=sl.Threads(2), steps_per_epoch=steps)
    assert len(list(loader)) == (steps or 6)
    assert threads()
    del loader
    gc.collect()
    assert not threads()
    iteration: Any = iter(PIPE.loader(backend=sl.Threads(2), steps_per_epoch=steps))
    next(iteration)
    del iteration
    gc.collect()
    assert not threads()


@pytest.mark.long
def test_processes_stay_between_epochs_and_are_replaced_if_they_die_there() -> None:
    pipe = sl.from_items(range(12)).shard(2).map(lambda item: (item, os.getpid())).merge()
    with pipe.loader(backend=sl.Processes(2)) as loader:
        epochs = [list(loader) for _ in range(3)]
        assert [[item for item, _ in epoch] for epoch in epochs] == [list(range(12))] * 3
        (pids,) = {frozenset(pid for _, pid in epoch) for epoch in epochs}
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [item for item, _ in loader] == list(range(12))
        assert {pid for _, pid in loader}.isdisjoint(pids)


@pytest.mark.long
def test_many_epochs_leave_nothing() -> None:
    whole = flat(epochs_of(PIPE.loader(), 12))
    with PIPE.loader(backend=sl.Threads(2)) as loader:
        assert flat(epochs_of(loader, 12)) == whole
        assert len(threads()) <= 5, "two hosts, and the threads of the epoch ahead"


EXIT = """
import streamline as sl
loader = sl.from_items(range(8)).shard(2).merge().loader(backend=sl.{backend}(2))
list(loader)
kept = iter(loader)
next(kept)  # by now an epoch is being opened ahead
raise SystemExit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize("backend", long_but(["Threads"], ["Threads", "Processes"]))
def test_an_interpreter_that_exits_while_an_epoch_is_being_opened_ends(backend: str) -> None:
    program = [sys.executable, "-W", "error", "-c", EXIT.format(backend=backend)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=2 * WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_ctrl_c_while_the_thread_that_opens_ahead_starts_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real, struck = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        real(thread)
        if not struck.is_set():
            struck.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        _Next(PIPE.open, 1)
    assert struck.is_set()
