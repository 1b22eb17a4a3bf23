"""What a process contends for, as Python and the kernel tell it."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from streamline.core.cpus import throttling
from streamline.observe import contention
from streamline.observe.contention import GIL_WAIT_S, ContentionMeter, gil_waits_s, memory_wait_s, threads


def refused(*_: object) -> int:
    raise FileNotFoundError


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ContentionMeter]:
    monkeypatch.setattr(contention, "LOOK_S", 0.0)
    before = list(gc.callbacks)
    yield ContentionMeter()
    gc.callbacks[:] = before


def test_collections_are_timed_from_the_first_look_on(meter: ContentionMeter) -> None:
    first = meter.read()
    gc.collect()
    assert meter.read().collecting_s > first.collecting_s == 0
    meter.read()
    assert len([each for each in gc.callbacks if each is meter._collector]) == 1


def test_a_look_is_used_again_for_a_while(meter: ContentionMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    first = meter.read()
    monkeypatch.setattr(contention, "LOOK_S", 1e9)
    assert meter.read() is first


def test_who_comes_while_another_thread_looks_gets_what_was_seen_before(meter: ContentionMeter) -> None:
    first = meter.read()
    found = []
    with meter._lock:
        thread = threading.Thread(target=lambda: found.append(meter.read()))
        thread.start()
        thread.join()
    assert found == [first]


def test_a_thread_that_computes_has_its_time_and_its_name() -> None:
    stop, begun = threading.Event(), threading.Event()

    def compute() -> None:
        while not stop.is_set():
            begun.set()

    thread = threading.Thread(target=compute, name="computing")
    thread.start()
    begun.wait()

    def times() -> float:
        return sum(each.runnable_s for each in threads() if each.name == "computing")

    first = times()
    while times() < first + 0.01:
        pass
    stop.set()
    thread.join()
    assert times() == 0


def test_a_thread_that_keeps_the_gil_is_seen() -> None:
    keep, stop = ctypes.PyDLL(None).usleep, threading.Event()  # it doesn't give the GIL up, and needs no core

    def hold() -> None:
        while not stop.is_set():
            keep(20_000)

    thread = threading.Thread(target=hold)
    thread.start()
    while min(gil_waits_s(3)) < GIL_WAIT_S:
        pass
    stop.set()
    thread.join()


def test_a_thread_that_computes_in_python_is_counted_as_keeping_the_gil(meter: ContentionMeter) -> None:
    stop = threading.Event()

    def compute() -> None:
        for number in itertools.count():
            if number % 100_000 == 0 and stop.is_set():
                return

    thread = threading.Thread(target=compute, name="exporter")
    thread.start()
    waits, first = 0, meter.read()
    while waits < 9:  # where cores are busy, it doesn't get one at each look
        seen = meter.read()
        waits = seen.gil_waits - first.gil_waits
    stop.set()
    thread.join()
    assert seen.gil_looks - first.gil_looks >= waits
    before, after = ([each for each in look.threads if each.name == "exporter"] for look in (first, seen))
    assert len(before) == len(after) == 1
    assert after[0].cpu_s > before[0].cpu_s


def test_waiting_for_a_core_is_not_waiting_for_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = itertools.count(step=1.0), itertools.count(step=0.75)
    monkeypatch.setattr(contention, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(contention, "_own_times", lambda: nullcontext(lambda: next(waited)))
    assert list(gil_waits_s(3)) == [0.25, 0.25, 0.25]


def test_what_a_thread_has_waited_for_a_core_is_told_by_the_system_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with contention._own_times() as waited_s:
        (own,) = (each for each in threads() if each.number == threading.get_native_id())
        assert 0 < own.core_wait_s <= waited_s()
    monkeypatch.setattr(contention, "FileIO", refused)
    with contention._own_times() as waited_s:
        assert waited_s() == 0


def test_pressure_is_that_of_the_control_group_else_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    some = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=5\n"
    files = {
        "/proc/self/cgroup": "0::/job\n",
        "/proc/pressure/memory": some.format(2_000_000),
        "/sys/fs/cgroup/job/memory.pressure": some.format(3_500_000),
    }
    monkeypatch.setattr(contention, "_text", lambda path: files.get(path, ""))
    for wanted in (3.5, 2.0, 0.0):
        contention._pressure_file.cache_clear()
        assert memory_wait_s() == wanted
        files.popitem()
    contention._pressure_file.cache_clear()


def test_the_periods_of_a_quota_are_read() -> None:
    assert throttling("usage_usec 5\nnr_periods 70\nnr_throttled 12\nthrottled_usec 9\n") == (70, 12)
    assert throttling("") == throttling("nr_periods\nnr_throttled x") == (0, 0)
