"""Ranks in threads of one process, and a store in memory over which they agree."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import streamline as sl

T = TypeVar("T")


class MemoryStore:
    """What torch's `HashStore` is: the reference of `streamline.sharding.ends.Store`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.calls = 0
        self.called = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.called.set()
        with self._lock:
            self.calls += 1
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            self.calls += 1
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.calls += 1
            now = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(now).encode()
            return now

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            self.calls += 1
            return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self.values.pop(key, None) is not None


def on_ranks(ranks: int, work: Callable[[int], T]) -> list[T]:
    """Return what `work` returns on each rank, all at the same time; a failure of any comes out."""
    found: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as failure:
            found[rank] = _Failure(failure)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one_found in found:
        if isinstance(one_found, _Failure):
            raise one_found.failure
    return found


class _Failure:
    def __init__(self, failure: BaseException) -> None:
        self.failure = failure


def together(
    pipe: sl.Pipeline[Any],
    ranks: int,
    ends: sl.Ends,
    most: int | None = None,
    resume: sl.Snapshot | None = None,
    **options: Any,
) -> list[tuple[list[Any], list[bool], sl.Snapshot, sl.EndsReport]]:
    """Return of each rank its items (`most` at the most), which of them are padding, its snapshot and its report."""

    def work(rank: int) -> tuple[list[Any], list[bool], sl.Snapshot, sl.EndsReport]:
        items: list[Any] = []
        padding: list[bool] = []
        with pipe.open(rank=rank, world_size=ranks, ends=ends, resume=resume, **options) as stream:
            while most is None or len(items) < most:
                try:
                    items.append(next(stream))
                except StopIteration:
                    break
                padding.append(stream.padding)
            return items, padding, sl.Snapshot.from_json(stream.snapshot().to_json()), stream.ends

    return on_ranks(ranks, work)
