"""Batches that are written where the consumer reads them: without a copy, and never overwritten while one is held."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.backends.ipc.messages import PackedItems
from streamline.backends.ipc.shared_memory import SlabLease
from streamline.backends.ipc.socket_link import ReceivedItems, SocketLink
from streamline.errors import HostError
from tests.backends.hosts.disturbing import children, leaves_nothing_shared
from tests.kit import STANDING
from tests.laws.profile import FACTOR, long_but

FLOATS = 1 << 15
SIZE = 8
BATCHES = 24

KEPT: list[Any] = []  # in a host: what its stage keeps


def row(number: int) -> Any:
    return np.full(FLOATS, number, np.float32)


def made(number: int) -> Any:
    array = sl.empty((SIZE, FLOATS), np.float32)
    array[:] = np.arange(SIZE * number, SIZE * (number + 1))[:, None]
    return array


def plus_one(batch: Any) -> Any:
    batch += 1
    return batch


def keep(batch: Any) -> Any:
    """Keep all, and insist on what was kept."""
    KEPT.append(batch)
    for number, kept in enumerate(KEPT):
        assert (kept[:, ::1000] == expected(number)[:, ::1000]).all(), number
    return batch


def expected(number: int) -> Any:
    return np.stack([row(SIZE * number + at) for at in range(SIZE)])


def document(number: int) -> Any:
    return np.arange(FLOATS + number, dtype=np.int32)


def rows() -> sl.Pipeline[Any]:
    return sl.from_items(range(SIZE * BATCHES)).map(row)


def batches() -> sl.Pipeline[Any]:
    return rows().batch(SIZE)


class Both(NamedTuple):
    x: Any
    y: Any


def both(array: Any) -> Both:
    return Both(array, {"z": array[: FLOATS // 2]})


PIPES: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "batch": batches,
    "changed by a map": lambda: batches().map(plus_one),
    "in a thread": lambda: batches().map(plus_one, concurrency=2, executor="thread"),
    "prefetch": lambda: batches().prefetch(2),
    "take": lambda: batches().take(BATCHES - 1),
    "parts": lambda: rows().map(both).batch(SIZE),
    "pack": lambda: sl.from_items(range(SIZE * 20)).map(document).pack(SIZE * FLOATS, eos=1),
    "regenerate": lambda: batches().regenerate(SIZE * BATCHES, block=SIZE, shuffle=False),
    "regenerate, of parts": lambda: rows().map(both).batch(2).regenerate(96, block=SIZE, reuse=2),
    "empty": lambda: sl.from_items(range(BATCHES)).map(made),
}


@pytest.fixture(scope="module")
def process() -> Iterator[Backend]:
    """One that is up before a test begins; for all that leave it as it was."""
    with sl.Processes(1, env={STANDING: "1"}) as opened:
        with rows().take(1).open(backend=opened) as stream:
            list(stream)
        yield opened


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[ReceivedItems]:
    """What comes out of hosts."""
    seen: list[ReceivedItems] = []
    unpack = SocketLink.unpack

    def seeing(link: SocketLink, packed: PackedItems) -> list[Any]:
        assert isinstance(packed, ReceivedItems)
        seen.append(ReceivedItems(packed.count, packed.nbytes, (), packed.copied_bytes, packed.slabs))
        return unpack(link, packed)

    monkeypatch.setattr(SocketLink, "unpack", seeing)
    return seen


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("name", long_but(["batch", "in a thread", "pack", "regenerate, of parts", "empty"], PIPES))
def test_batches_leave_a_process_without_a_copy(name: str, process: Backend, arrived: list[ReceivedItems]) -> None:
    with PIPES[name]().open(backend=process) as stream:
        for batch in stream:
            del batch
        (host,) = stream.stats().hosts
    assert host.bytes == sum(packed.nbytes for packed in arrived) > 20 * SIZE * FLOATS * 4
    assert host.copied_bytes == sum(packed.copied_bytes for packed in arrived) < 100_000
    assert host.slabs_made == sum(packed.slabs[0] for packed in arrived)
    assert host.slabs_reused == sum(packed.slabs[1] for packed in arrived)
    assert host.slabs_made


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("stage", [keep, None], ids=["a stage keeps all", "none does"])
def test_what_is_held_is_never_overwritten(process: Backend, stage: Callable[[Any], Any] | None) -> None:
    pipe = batches() if stage is None else batches().map(stage)
    held = []
    with pipe.open(backend=sl.Processes(1) if stage else process) as stream:
        for number, batch in enumerate(stream):
            assert (batch == expected(number)).all()
            batch[:] = -number  # the consumer's own: the host doesn't see it
            held.append(batch[3:, 7::2] if number % 2 else memoryview(batch))
            del batch
    for number, view in enumerate(held):
        assert (np.asarray(view) == -number).all()
    assert len(held) == BATCHES


MADE = ("pack", "regenerate", "regenerate, of parts")
"""Of `PIPES`, what other stages than `.batch` make."""


def arrays(item: Any) -> list[Any]:
    """The arrays of an item."""
    if isinstance(item, np.ndarray):
        return [item]
    return [array for part in (item.values() if isinstance(item, dict) else item) for array in arrays(part)]


def same(item: Any, other: Any) -> bool:
    pairs = zip(arrays(item), arrays(other), strict=True)
    return all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in pairs)


def keep_parts(item: Any) -> Any:
    """Keep all, and insist on some of what was kept."""
    KEPT.append([(array, array.copy()) for array in arrays(item)])
    for kept in KEPT[-8:]:
        for array, twin in kept:
            assert (array == twin).all()
    return item


KEEPERS: dict[str, Callable[[sl.Pipeline[Any]], sl.Pipeline[Any]]] = {
    "none": lambda pipe: pipe,
    "a map": lambda pipe: pipe.map(keep_parts),
    "a cache": lambda pipe: pipe.cache().repeat(2),
}


HELD = [
    (name, keeper)
    for (at, name), (of, keeper) in product(enumerate(MADE), enumerate(KEEPERS))
    if FACTOR > 1 or keeper == "none" or of == at
]
"""Each stage without a keeper, and each keeper with one of them; with all, if there is time."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "keeper"), long_but([("pack", "none"), ("regenerate", "a map")], HELD))
def test_what_is_held_of_other_stages_is_never_overwritten(process: Backend, name: str, keeper: str) -> None:
    """At either end; the consumer writes to what it gets."""
    pipe, held = KEEPERS[keeper](PIPES[name]()), []
    with pipe.open(backend=sl.Processes(1) if keeper == "a map" else process) as stream:
        for number, (item, plain) in enumerate(zip(stream, pipe, strict=True)):
            assert same(item, plain), number
            for array in arrays(item):
                array[:] = -number
            held.append([array[array.shape[0] // 2 :] if number % 2 else memoryview(array) for array in arrays(item)])
            del item
        (host,) = stream.stats().hosts
    for number, views in enumerate(held):
        assert all((np.asarray(view) == -number).all() for view in views), number
    assert (host.copied_bytes > host.bytes / 2) == (keeper != "none"), "what a stage keeps is copied"


@pytest.mark.long
@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize("name", long_but(["batch"], ["batch", *MADE]))
def test_what_came_from_a_host_that_is_killed_stays_as_it_is(name: str) -> None:
    held = []
    with PIPES[name]().open(backend=sl.Processes(1, max_restarts=20)) as stream:
        for number, item in enumerate(stream):
            held.append(item)
            if number in (5, 13):
                for child in children():
                    os.kill(child, signal.SIGKILL)
    for item, plain in zip(held, PIPES[name](), strict=True):
        assert same(item, plain)


@pytest.mark.parametrize("name", long_but(["batch"], ["batch", *MADE]))
def test_memory_is_given_back(process: Backend, name: str) -> None:
    with leaves_nothing_shared(), PIPES[name]().open(backend=process) as stream:
        kept = [array[1:] for item in stream for array in arrays(item)]
        del kept


def resized(batch: Any) -> str:
    """Try to, in a host."""
    with pytest.raises(ValueError, match="does not own its data"):
        batch.resize((1, 1), refcheck=False)
    assert isinstance(batch.base, np.ndarray), "it lies in a slab"
    assert np.asarray(batch.base.base).dtype == object, "no other way to the memory"
    return str(batch.flags.writeable)


def test_such_an_array_cannot_be_resized_and_its_base_leads_nowhere(process: Backend) -> None:
    with batches().map(resized).open(backend=process) as stream:
        assert set(stream) == {"True"}


def test_empty_outside_of_a_process_is_ordinary_memory() -> None:
    shapes: list[Any] = [3, (2, 3), [4, 5], np.int64(7), ()]
    for shape in shapes:
        array = sl.empty(shape, "int16")
        assert array.shape == np.empty(shape).shape
        assert array.dtype == "int16"
        assert array.base is None


@pytest.mark.long
def test_where_the_consumer_has_no_memory_left_no_item_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a host: a batch that can't be taken in would be passed over as one that ends every process."""
    leases: list[SlabLease] = []

    class Lease(SlabLease):
        def __init__(self, *args: Any) -> None:
            if len(leases) == 3:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            super().__init__(*args)
            leases.append(self)

    found: list[Any] = []
    monkeypatch.setattr("streamline.backends.ipc.socket_link.SlabLease", Lease)
    with batches().open(backend=sl.Processes(1), on_error="skip") as stream:
        with pytest.raises(HostError, match="this process has no memory left"):
            found.extend(stream)  # it keeps all
        snapshot = stream.snapshot()
        assert stream.errors.total == 0
        assert stream.stats().hosts[0].restarts == 0
    leases.clear()
    monkeypatch.undo()
    with batches().open(resume=snapshot) as stream:
        found.extend(stream)
    assert all((batch == expected(number)).all() for number, batch in enumerate(found))
    assert len(found) == BATCHES
