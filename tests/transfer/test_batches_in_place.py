"""Batches that a GPU's copies read where they were written: counted, and with memory that is poisoned when it is free.

torch is a stand-in whose copies read by pointer, when somebody waits for them.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.backends.base import Backend
from tests.backends.hosts.disturbing import children, leaves_nothing_shared, quiet
from tests.laws.profile import covering
from tests.transfer.fake_torch import FakeTorch
from tests.transfer.poison import poison_what_is_returned

ROW = 1 << 16
SIZE = 4
BATCHES = 12
NBYTES = SIZE * ROW * 4

BACKENDS = ["inline", "threads", "processes"]

KEPT: list[Any] = []


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """Also poisons blocks and slabs, and looks for what the driver would have complained of."""
    module = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", module)
    poison_what_is_returned(monkeypatch)
    KEPT.clear()
    with leaves_nothing_shared():
        yield module
    gc.collect()  # a failure may hold its batch
    assert not module.cuda.faults
    assert not module.cuda.registered, "registered for ever"


@pytest.fixture
def on(processes: Backend) -> dict[str, Backend]:
    """The backends by name; the processes are those of all tests."""
    return {"inline": sl.Inline(), "threads": sl.Threads(2), "processes": processes}


def row(number: int) -> Any:
    return np.full(ROW, number, np.float32)


def batches(shards: int = 1) -> sl.Pipeline[Any]:
    return sl.from_items(range(SIZE * BATCHES)).shard(shards).map(row).batch(SIZE)


def keep(batch: Any) -> Any:
    """Keep all, and insist on what was kept."""
    KEPT.append(batch)
    for number, kept in enumerate(KEPT):
        assert (kept[:, ::1000] == [[SIZE * number + at] for at in range(SIZE)]).all(), number
    return batch


def numbers(batch: Any) -> list[int]:
    """What a batch's rows are full of; -1: it isn't whole."""
    batch.torch.cuda.current_stream(batch.device).run()
    low, high = batch.data.min(axis=1), batch.data.max(axis=1)
    return [int(least) if least == most else -1 for least, most in zip(low, high, strict=True)]


def whole(count: int = BATCHES) -> list[list[int]]:
    return [list(range(SIZE * number, SIZE * (number + 1))) for number in range(count)]


def figures(stream: Any) -> dict[str, float]:
    (stage,) = (stage for stage in stream.stats().stages if stage.kind == "transfer")
    return {detail.name: detail.value for detail in stage.details}


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("keeps", [False, True], ids=["", "the loop keeps all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_byte_is_copied_between_collate_and_the_device(
    torch: FakeTorch, on: dict[str, Backend], backend: str, keeps: bool
) -> None:
    with batches().transfer("cuda").open(backend=on[backend]) as stream:
        found = [numbers(batch) for batch in (list(stream) if keeps else stream)]
        counted = figures(stream)
    assert found == whole()
    assert counted["copied_bytes"] == NBYTES * BATCHES
    assert counted["staged_bytes"] == 0, "1.0 bytes copied by the CPU for each that reached the device: collate's own"
    assert bool(torch.cuda.unregistered) == (backend == "processes")


def parts(number: int) -> Any:
    return {"x": row(number), "y": (row(number).astype(np.int16), number), "name": "a"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_are_where_they_were_written_and_small_ones_staged(
    torch: FakeTorch, on: dict[str, Backend], backend: str
) -> None:
    pipe = sl.from_items(range(SIZE * BATCHES)).shard(1).map(parts).batch(SIZE).transfer("cuda")
    with pipe.open(backend=on[backend]) as stream:
        for number, batch in enumerate(stream):
            assert numbers(batch["x"]) == numbers(batch["y"][0]) == batch["y"][1].tolist() == whole()[number]
            assert batch["name"] == ["a"] * SIZE
        assert figures(stream)["staged_bytes"] == SIZE * 8 * BATCHES


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after_merge", [False, True])
def test_a_stage_that_keeps_its_batches_keeps_them_as_they_are(
    torch: FakeTorch, on: dict[str, Backend], backend: str, after_merge: bool
) -> None:
    pipe = batches().merge().map(keep) if after_merge else batches().map(keep)
    own = sl.Processes(1) if backend == "processes" else on[backend]  # what it keeps ends with it
    with pipe.transfer("cuda").open(backend=own) as stream:
        assert [numbers(batch) for batch in stream] == whole()
    if backend != "processes" or after_merge:
        assert len(KEPT) == BATCHES
        keep(KEPT.pop())
        KEPT.clear()


def document(number: int) -> Any:
    return np.arange(number, 20_000, dtype=np.int64)


def pieces(item: Any) -> list[Any]:
    """The arrays of an item, on the CPU."""
    if isinstance(item, dict | tuple):
        return [piece for part in (item.values() if isinstance(item, dict) else item) for piece in pieces(part)]
    if isinstance(item, np.ndarray):
        return [item]
    item.torch.cuda.current_stream(item.device).run()
    return [item.data]


OTHERS: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "pack": lambda: sl.from_items(range(200)).shard(1).map(document).pack(1 << 17, eos=1),
    "pack of full blocks": lambda: sl.from_items(range(30)).shard(1).map(document).pack(1 << 16, drop_remainder=True),
    "regenerate": lambda: batches().regenerate(SIZE * 5, block=SIZE, reuse=2),
    "regenerate ahead": lambda: batches().regenerate(SIZE * 5, block=SIZE, overlap=True),
    "regenerate, of parts": lambda: (
        batches().map(lambda batch: {"x": batch, "y": (batch * 2,)}).regenerate(24, block=4)
    ),
}
"""Stages that write where the copies read, as `.batch` does."""


@pytest.mark.one_in(7, 1)
@pytest.mark.parametrize(("backend", "name", "keeps"), covering(BACKENDS, OTHERS, ["", "the loop keeps all"]))
def test_no_byte_of_other_stages_is_staged(
    torch: FakeTorch, on: dict[str, Backend], backend: str, name: str, keeps: str
) -> None:
    pipe, nbytes = OTHERS[name](), 0
    with pipe.transfer("cuda").open(backend=on[backend]) as stream:
        for item, plain in zip(list(stream) if keeps else stream, pipe, strict=True):
            for piece, twin in zip(pieces(item), pieces(plain), strict=True):
                assert (piece == twin).all()
                nbytes += twin.nbytes
        assert figures(stream)["copied_bytes"] == nbytes
        assert figures(stream)["staged_bytes"] == 0


def test_blocks_of_a_pack_that_share_memory_are_staged(torch: FakeTorch) -> None:
    pipe = sl.from_items(range(30)).map(document).pack(1 << 14)
    with pipe.transfer("cuda").open() as stream:
        for block, plain in zip(stream, pipe, strict=True):
            assert all((piece == twin).all() for piece, twin in zip(pieces(block), pieces(plain), strict=True))
        assert figures(stream)["staged_bytes"] == figures(stream)["copied_bytes"] > 0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "rows of it": lambda batch: batch[1:3],
    "strided": lambda batch: batch[:, ::2],
    "transposed back": lambda batch: batch.T,
    "of the other byte order": lambda batch: batch.astype(">f4"),
    "read-only": lambda batch: batch.setflags(write=False) or batch,
    "another dtype": lambda batch: batch.view(np.uint8),
    "twice": lambda batch: [batch, batch[:2]],
    "nothing of it": lambda batch: batch[:0],
}


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", ["inline", "processes"])
def test_whatever_of_a_batch_is_passed_on_arrives_as_it_was(
    torch: FakeTorch, on: dict[str, Backend], backend: str, change: str
) -> None:
    changed = CHANGES[change]
    plain = [np.stack([row(number) for number in rows]) for rows in whole()]
    with batches().merge().map(changed).transfer("cuda").open(backend=on[backend]) as stream:
        found = list(stream)
        for batch, expected in zip(found, map(changed, plain), strict=True):
            pairs = zip(batch, expected, strict=True) if change == "twice" else [(batch, expected)]
            for got, array in pairs:
                torch.cuda.current_stream(got.device).run()
                assert (got.data == array).all()
                assert got.data.shape == array.shape
        staged = change in ("strided", "transposed back", "of the other byte order", "read-only")
        assert bool(figures(stream)["staged_bytes"]) == staged


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_that_are_left_out_give_their_memory_back(
    torch: FakeTorch, on: dict[str, Backend], backend: str
) -> None:
    def seldom(batch: Any) -> bool:
        return bool(batch[0, 0] % (4 * SIZE) == 0)

    pipe = batches().filter(seldom).transfer("cuda")
    with pipe.open(backend=on[backend]) as stream:
        assert [numbers(batch) for batch in stream] == whole()[::4]
        assert figures(stream)["staged_bytes"] == 0
    assert len(torch.cuda.pinned_on) <= BATCHES // 2, "blocks aren't used again"


def test_batches_that_fail_give_their_memory_back(torch: FakeTorch) -> None:
    def fails(batch: Any) -> Any:
        if batch[0, 0] % (3 * SIZE):
            raise LookupError(batch.shape)
        return batch

    with batches().map(fails).transfer("cuda").open(on_error="skip") as stream:
        assert [numbers(batch) for batch in stream] == whole()[::3]
        assert stream.errors.total == BATCHES - 4
        assert figures(stream)["staged_bytes"] == 0


def test_a_gpu_without_memory_fails_at_its_batch_and_goes_on_after_it(torch: FakeTorch, processes: Backend) -> None:
    torch.left = 3 * NBYTES
    with batches().transfer("cuda").open(backend=processes) as stream:
        assert [numbers(next(stream)) for _ in range(3)] == whole(3)
        with pytest.raises(torch.OutOfMemoryError):
            next(stream)
        snapshot = stream.snapshot()
    torch.left = torch.memory
    with batches().transfer("cuda").open(backend=processes, resume=snapshot) as stream:
        assert [numbers(batch) for batch in stream] == whole()[3:]


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_may_be_left_and_resumed_at_any_batch(torch: FakeTorch, on: dict[str, Backend], backend: str) -> None:
    pipe = batches(2).transfer("cuda", depth=3)
    plain = [numbers(batch) for batch in pipe]
    for taken in range(0, BATCHES, 1 if backend == "inline" else 4):
        with pipe.open(backend=on[backend]) as stream:
            assert [numbers(next(stream)) for _ in range(taken)] == plain[:taken]
            snapshot = stream.snapshot()
        assert not torch.cuda.registered
        with pipe.open(backend=on[backend], resume=snapshot) as stream:
            assert [numbers(batch) for batch in stream] == plain[taken:]


@pytest.mark.long
def test_hosts_may_be_killed_while_their_slabs_are_copied_from(
    torch: FakeTorch, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    with quiet(caplog), batches().transfer("cuda").open(backend=sl.Processes(1, max_restarts=20)) as stream:
        for number, batch in enumerate(stream):
            found.append(batch)
            if number % 4 == 1:
                for child in children():
                    os.kill(child, signal.SIGKILL)
    assert [numbers(batch) for batch in found] == whole()


def test_slabs_that_the_driver_refuses_are_staged_and_that_is_said_once(
    torch: FakeTorch, processes: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.refusing = "register"
    caplog.set_level(logging.WARNING, "streamline.transfer")
    with batches().transfer("cuda").open(backend=processes) as stream:
        assert [numbers(batch) for batch in stream] == whole()
        assert figures(stream)["staged_bytes"] == figures(stream)["copied_bytes"] == NBYTES * BATCHES
    (record,) = [record for record in caplog.records if record.name == "streamline.transfer"]
    assert record.getMessage().startswith("transfer: the driver doesn't register the memory shared with a process (Ru")


def test_to_the_cpu_nothing_is_pinned_registered_or_copied(torch: FakeTorch, processes: Backend) -> None:
    with batches().transfer("cpu").open(backend=processes) as stream:
        assert [int(batch.data[0, 0]) for batch in stream] == [rows[0] for rows in whole()]
        assert figures(stream) == {"copied_bytes": 0}, "arrays of a process are other arrays than those of this one"
    assert not torch.cuda.pinned_on
    assert not torch.cuda.unregistered
