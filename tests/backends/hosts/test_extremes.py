"""Items of all sizes, and consumers of all kinds: everything arrives, and no more is on the way than was promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.hosts.pool import BYTES_ON_THE_WAY
from streamline.backends.hosts.remote_worker import RemoteWorker
from streamline.errors import TransportError
from tests.backends.hosts.disturbing import leaves_nothing_shared

MB = 1 << 20


def of_size(nbytes: int) -> Callable[[int], np.ndarray[Any, Any]]:
    return lambda item: np.full(nbytes, item % 251, np.uint8)


def items(count: int, fn: Callable[[int], Any]) -> sl.Pipeline[Any]:
    return sl.from_items(range(count)).shard(2).map(fn).merge()


@pytest.mark.parametrize("empty", [b"", np.zeros((0, 3)), None], ids=["bytes", "array", "None"])
def test_items_of_nothing_arrive(empty: Any, processes: Backend) -> None:
    with items(1000, lambda _: empty).open(backend=processes) as stream:
        found = list(stream)
    assert len(found) == 1000
    assert all(type(item) is type(empty) and np.shape(item) == np.shape(empty) for item in found)


def test_thousands_of_tiny_items_arrive(processes: Backend) -> None:
    with items(20_000, abs).open(backend=processes) as stream:
        assert list(stream) == list(range(20_000))


@pytest.mark.long
def test_an_item_that_is_larger_than_all_that_may_be_on_the_way_arrives() -> None:
    with leaves_nothing_shared():
        with items(3, of_size(BYTES_ON_THE_WAY + MB)).open(backend=sl.Processes(1)) as stream:
            for number, item in enumerate(stream):
                assert (item[0], item[-1], item.size) == (number, number, BYTES_ON_THE_WAY + MB)
        del item, stream


@pytest.mark.long
def test_a_consumer_that_keeps_everything_keeps_it_unchanged() -> None:
    with leaves_nothing_shared():
        with items(300, of_size(MB)).open(backend=sl.Processes(1)) as stream:  # more than the memory that is shared
            kept = list(stream)
        assert all(item[0] == item[-1] == number % 251 for number, item in enumerate(kept))
        del kept, stream


def alternating(item: int) -> np.ndarray[Any, Any]:
    return np.zeros(16 if item < 200 else 4 * MB, np.uint8)


@pytest.mark.long
@pytest.mark.parametrize(
    "fn", [pytest.param(of_size(4 * MB), marks=pytest.mark.long), alternating], ids=["large", "tiny, then large"]
)
def test_no_more_bytes_wait_for_a_slow_consumer_than_may(
    fn: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    most, take = [0], RemoteWorker.items

    def items_arrive(self: RemoteWorker[Any], *args: Any) -> None:
        take(self, *args)
        most.append(self._credit.in_flight.size)

    monkeypatch.setattr(RemoteWorker, "items", items_arrive)
    with items(260, fn).open(backend=sl.Processes(1)) as stream:
        for number, _ in enumerate(stream):
            if not number % 50:
                with stream.paused():
                    pass  # as long as it takes, nothing is taken
    assert max(most) <= BYTES_ON_THE_WAY // 2  # of each of two workers


class Unpicklable:
    """Can leave nothing."""

    def __init__(self, item: int) -> None:
        self.item = item

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class Unreadable:
    """Can't be made again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_item_that_cannot_be_pickled_is_named_after_those_before_it(processes: Backend) -> None:
    found: list[int] = []
    pipe = items(20, lambda item: Unpicklable(item) if item == 7 else item)
    with pipe.open(backend=processes) as stream, pytest.raises(TransportError, match="Unpicklable") as caught:
        found.extend(stream)
    assert found == list(range(7))
    assert "map(<lambda>)" in str(caught.value)


def test_an_item_that_cannot_be_unpickled_raises(processes: Backend) -> None:
    pipe, raising = items(20, lambda item: Unreadable() if item == 7 else item), pytest.raises(TransportError)
    with pipe.open(backend=processes) as stream, raising as caught:
        list(stream)
    assert "can't be made again" in str(caught.value)
