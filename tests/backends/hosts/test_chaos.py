"""Processes that are killed, stopped, and end themselves at random moments: the stream is the run_uninterrupted one.

`STREAMLINE_CHAOS_S` is how long it goes on for each pipeline; the figures are printed (`pytest -s`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from tests.backends.hosts.disturbing import Chaos, leaves_nothing_shared, quiet, recoveries
from tests.backends.remote.machines import machines
from tests.laws.profile import FACTOR

CHAOS_S = float(os.environ.get("STREAMLINE_CHAOS_S", "1"))
EVERY_S = 0.5
KILLS = 2
"""At the least, however long they take."""

LENGTH = 2_000_000

pytestmark = pytest.mark.long


def dangerous(marks: str) -> Any:
    """Return a function that ends its process now and then; what it returns says nothing of that."""

    def of(item: int) -> np.ndarray[Any, Any]:
        if random.random() < 0.0003:
            os._exit(3)
        if item % 1009 == 500:
            mark = Path(marks, str(item))
            if not mark.exists():
                mark.touch()
                ctypes.string_at(0)
        time.sleep(0.0005)
        return np.full(12_000 if item % 3 else 3, item, np.float32)  # through shared memory, and not

    return of


def harmless(item: int) -> np.ndarray[Any, Any]:
    return np.full(12_000 if item % 3 else 3, item, np.float32)


def digest(items: list[Any]) -> str:
    return hashlib.sha256(
        b"".join(bytes(item[:1]) + bytes(item[-1:]) + bytes([item.size % 251]) for item in items)
    ).hexdigest()


def shuffled(fn: Any) -> sl.Pipeline[Any]:
    return sl.from_items(range(LENGTH)).shard(4).shuffle(window=32, seed=1).map(fn).merge()


def freely(fn: Any) -> sl.Pipeline[Any]:
    return sl.from_items(range(LENGTH)).shard(4).map(fn).merge("best_effort", max_skips_per_round=2)


def processes(_: Path) -> AbstractContextManager[Backend]:
    return nullcontext(sl.Processes(2, max_restarts=10))


def remote(folder: Path) -> AbstractContextManager[Backend]:
    return machines(folder, agents=2, hosts=1)


PLANS, PLACES = (shuffled, freely), (processes, remote)

CASES = list(product(PLANS, PLACES) if FACTOR > 1 else zip(PLANS, PLACES, strict=True))
"""Each once; each with each other, if there is time."""


@pytest.mark.timeout(CHAOS_S * 10 + 600)
@pytest.mark.parametrize(("make", "where"), CASES, ids=lambda made: made.__name__)
def test_chaos_changes_nothing(
    make: Any,
    where: Callable[[Path], AbstractContextManager[Backend]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = make(dangerous(str(tmp_path)))
    got: list[Any] = []
    with quiet(caplog), leaves_nothing_shared(), recoveries(monkeypatch) as took_s, where(tmp_path) as backend:
        stop = time.monotonic() + CHAOS_S
        with Chaos(5, EVERY_S, lambda: len(got)) as chaos, pipe.open(backend=backend) as stream:
            for item in stream:
                got.append(item[[0, -1]].repeat(1 if item.size == 3 else 2))
                if time.monotonic() > stop and chaos.struck.get("SIGKILL", 0) >= KILLS:
                    break
        del item, stream
    seconds = took_s()
    at = [f"{seconds[len(seconds) * percent // 100]:.2f}" for percent in (50, 90, 99)] if seconds else []
    print(f"{len(got)} items; {chaos.struck}; {len(seconds)} recoveries of workers; seconds of 50, 90, 99 %: {at}")
    if make is shuffled:
        whole = make(harmless).first(len(got))
        assert digest(got) == digest([item[[0, -1]].repeat(1 if item.size == 3 else 2) for item in whole])
        return
    counts = Counter(int(item[0]) for item in got)
    assert max(counts.values()) == 1
    for worker in range(4):  # each worker's items, in its order, none left out
        mine = [item for item in counts if item % 4 == worker]
        assert mine == list(range(worker, worker + 4 * len(mine), 4))
    assert all(item.size == (2 if item[0] % 3 == 0 else 4) and item[0] == item[-1] for item in got)
