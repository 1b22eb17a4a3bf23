"""On a GPU: run by hand where there is one, `python -m pytest tests/transfer/on_gpu.py`; not collected otherwise.

It fails where there is none, or no torch or JAX for it: nothing in here is to be passed over in silence.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.transfer.cuda import CudaCopier
from tests.backends.hosts.disturbing import children, leaves_nothing_shared, quiet
from tests.transfer.arrays import nested, odd_arrays
from tests.transfer.poison import poison_what_is_returned

ROW = 1 << 18
SIZE = 4
BATCHES = 24
NBYTES = SIZE * ROW * 4

BACKENDS: dict[str, Any] = {"inline": sl.Inline(), "threads": sl.Threads(2), "processes": sl.Processes(2)}


def torch() -> Any:
    found = importlib.import_module("torch")
    assert found.cuda.is_available(), "this is for a machine with a GPU"
    return found


@pytest.fixture(scope="session", autouse=True)
def drivers() -> None:
    """Let the libraries open what they keep: a test that is the first to use them leaks nothing."""
    library = torch()
    square = library.ones(64, 64).pin_memory().cuda()
    library.cuda.Event().record()
    (square @ square).sum().item()
    importlib.import_module("jax.numpy").ones(4).sum().block_until_ready()


def row(number: int) -> Any:
    return np.full(ROW, number, np.float32)


def batches(shards: int = 2) -> sl.Pipeline[Any]:
    """Return batches of 4 MiB: in each, row k is full of the number of its item."""
    return sl.from_items(range(SIZE * BATCHES)).shard(shards).map(row).batch(SIZE)


def figures(stream: Any) -> dict[str, float]:
    (stage,) = (stage for stage in stream.stats().stages if stage.kind == "transfer")
    return {detail.name: detail.value for detail in stage.details}


class Checker:
    """Works on each batch for long, on the current stream, and reads it only then: what comes too late is seen."""

    def __init__(self) -> None:
        self._square = torch().ones(2048, 2048, device="cuda")
        self._found: list[Any] = []

    def __call__(self, batch: Any) -> None:
        for _ in range(1 + len(self._found) % 5):
            self._square @ self._square
        self._found.append((batch.amin(dim=1), batch.amax(dim=1)))

    def numbers(self) -> list[list[int]]:
        """What the rows of each batch are full of; -1: of more than one number."""
        pairs = [(low.tolist(), high.tolist()) for low, high in self._found]
        return [[int(a) if a == b else -1 for a, b in zip(low, high, strict=True)] for low, high in pairs]


def plain_numbers(pipe: sl.Pipeline[Any]) -> list[list[int]]:
    return [batch[:, 0].astype(int).tolist() for batch in pipe]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_batch_is_overwritten_while_it_is_copied_or_computed_with(depth: int) -> None:
    """Poison: each batch is one number, and must still be that number after long work on the consumer's stream."""
    library, count = torch(), 60
    batches = [np.full(1 << (18 + at % 6), at, np.float32) for at in range(count)]
    square = library.ones(2048, 2048, device="cuda")
    sums: list[tuple[Any, Any]] = []
    for batch in sl.from_items(batches).transfer("cuda", depth=depth):
        for _ in range(1 + len(sums) % 3):
            square @ square
        sums.append((batch.min(), batch.max()))
        del batch  # its memory may go to the next one, after that work
    assert [(float(low), float(high)) for low, high in sums] == [(at, at) for at in range(count)]


@pytest.mark.parametrize("keeps", [False, True], ids=["", "the loop keeps all"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lent_memory_is_read_before_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch, backend: str, depth: int, keeps: bool
) -> None:
    poison_what_is_returned(monkeypatch)
    expected, checker, kept = plain_numbers(batches()), Checker(), list[Any]()
    with leaves_nothing_shared(), batches().transfer("cuda", depth=depth).open(backend=BACKENDS[backend]) as stream:
        for batch in stream:
            checker(batch)
            if keeps:
                kept.append(batch)
            del batch
        counted = figures(stream)
    assert checker.numbers() == expected
    assert all(part[:, 0].int().tolist() == numbers for part, numbers in zip(kept, expected, strict=False))
    assert counted["copied_bytes"] == NBYTES * BATCHES
    if backend != "threads":  # two threads may be further ahead than there is pinned memory for
        assert counted["staged_bytes"] == 0, "the CPU copied a batch once more"


@pytest.mark.parametrize("backend", ["inline", "processes"])
def test_what_is_registered_is_unregistered(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    held: dict[int, int] = {}
    register, unregister = CudaCopier.register, CudaCopier.unregister

    def registers(copier: CudaCopier, address: int, size: int) -> None:
        register(copier, address, size)
        held[address] = size
        seen.append(size)

    def unregisters(copier: CudaCopier, address: int) -> None:
        unregister(copier, address)
        del held[address]

    monkeypatch.setattr(CudaCopier, "register", registers)
    monkeypatch.setattr(CudaCopier, "unregister", unregisters)
    for _ in range(4):
        seen: list[int] = []
        with leaves_nothing_shared(), batches().transfer("cuda").open(backend=BACKENDS[backend]) as stream:
            next(stream)
        assert bool(seen) == (backend == "processes")
    assert not held


def test_hosts_may_be_killed_while_their_slabs_are_copied_from(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_what_is_returned(monkeypatch)
    checker = Checker()
    with quiet(caplog), batches().transfer("cuda").open(backend=sl.Processes(2, max_restarts=40)) as stream:
        for number, batch in enumerate(stream):
            checker(batch)
            if number % 4 == 1:
                for child in children():
                    os.kill(child, signal.SIGKILL)
    assert checker.numbers() == plain_numbers(batches())


def test_a_driver_that_refuses_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    """What `cudaHostRegister` raised must not be raised again by work that comes after it in the same thread."""
    library, copier = torch(), CudaCopier(0)
    memory = np.zeros(1 << 21, np.uint8)
    copier.register(memory.ctypes.data, memory.nbytes)
    try:
        with pytest.raises(library.cuda.CudaError):
            copier.register(memory.ctypes.data, memory.nbytes)
        made = library.arange(12, device="cuda").reshape(3, 4).T.contiguous()  # kernels, whose launch is looked at
        library.cuda.synchronize()
        assert made.tolist() == np.arange(12).reshape(3, 4).T.tolist()
    finally:
        copier.unregister(memory.ctypes.data)


def test_slabs_that_the_driver_refuses_are_staged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = CudaCopier.register

    def twice(copier: CudaCopier, address: int, size: int) -> None:
        register(copier, address, size)
        try:
            register(copier, address, size)
        finally:
            copier.unregister(address)

    monkeypatch.setattr(CudaCopier, "register", twice)
    caplog.set_level(logging.WARNING, "streamline.transfer")
    checker = Checker()
    with batches().transfer("cuda").open(backend=sl.Processes(1)) as stream:
        for batch in stream:
            checker(batch)
        assert figures(stream)["staged_bytes"] == figures(stream)["copied_bytes"]
    assert checker.numbers() == plain_numbers(batches())
    (record,) = [record for record in caplog.records if record.name == "streamline.transfer"]
    assert "the driver doesn't register the memory shared with a process" in record.getMessage()


def sees_a_gpu(number: int) -> int:
    return int(torch_of_a_worker().cuda.is_available())


def torch_of_a_worker() -> Any:
    return importlib.import_module("torch")


def test_workers_see_no_gpu() -> None:
    torch()
    found = sl.from_items(range(4)).shard(2).map(sees_a_gpu).merge().batch(2).transfer("cuda")
    with found.open(backend=sl.Processes(2)) as stream:
        assert [batch.tolist() for batch in stream] == [[0, 0], [0, 0]]


def odd_tensors() -> list[Any]:
    library = torch()
    table = library.arange(6).reshape(2, 3)
    return [
        *[table, table.T, library.tensor(3), library.zeros(2, 0), library.ones(3, dtype=library.bfloat16)],
        *[library.ones(2, requires_grad=True), library.nn.Parameter(library.ones(2)), library.eye(3).to_sparse()],
        library.ones(2, dtype=library.complex64).conj(),
        library.rand(8, 3, 64, 64).to(memory_format=library.channels_last),
        library.rand(1 << 20).pin_memory(),
        library.rand(1 << 20, device="cuda"),
        library.ones(2, 3, dtype=library.float8_e4m3fn),
    ]


def test_arrays_and_tensors_of_any_layout_arrive_as_they_were() -> None:
    library = torch()
    batch = [*odd_arrays(), *odd_tensors()]
    for got in sl.from_items([batch] * 5).transfer("cuda"):
        for before, after in zip(batch, got, strict=True):
            assert (after.device.type, after.shape) == ("cuda", before.shape)
            if isinstance(before, np.ndarray):
                assert after.tolist() == before.tolist()
            else:
                assert (after.dtype, after.layout, after.stride()) == (before.dtype, before.layout, before.stride())
                assert library.equal(_dense(after).cpu(), _dense(before).cpu())
    (got,) = sl.from_items([nested()]).transfer("cuda")
    assert got["sample"].image.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert got["pair"].right["deep"].shape == (2, 0)


def _dense(tensor: Any) -> Any:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.float() if dense.element_size() == 1 else dense


def test_a_stream_of_ones_own_waits_for_its_batch() -> None:
    library = torch()
    side = library.cuda.Stream()
    pipe = sl.from_items([np.full(1 << 22, at, np.int32) for at in range(30)]).transfer("cuda")
    with library.cuda.stream(side):
        got = [batch.sum() for batch in pipe]
    assert [int(total) for total in got] == [at << 22 for at in range(30)]


def test_it_resumes_exactly() -> None:
    torch()
    plain = sl.from_items(range(18)).shard(3).batch(2)
    expected = [batch.tolist() for batch in plain]
    for taken in range(len(expected) + 1):
        with plain.transfer("cuda").open() as stream:
            assert [next(stream).tolist() for _ in range(taken)] == expected[:taken]
            snapshot = stream.snapshot()
        with plain.transfer("cuda").open(resume=snapshot) as stream:
            assert [batch.tolist() for batch in stream] == expected[taken:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_may_be_left_while_copies_run(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """What the loop has stays right when the stream is closed, and its memory is written by what comes next."""
    poison_what_is_returned(monkeypatch)
    expected, library = plain_numbers(batches()), torch()
    for taken in (0, 1, 2, 5):
        checker = Checker()
        with leaves_nothing_shared(), batches().transfer("cuda", depth=4).open(backend=BACKENDS[backend]) as stream:
            for _ in range(taken):
                checker(next(stream))
        library.full((NBYTES * 4,), 7, dtype=library.uint8, device="cuda")
        assert checker.numbers() == expected[:taken]


def test_out_of_memory_comes_out_at_its_batch() -> None:
    library = torch()
    items: list[Any] = [np.zeros(4, np.uint8), {"big": np.broadcast_to(np.uint8(0), (1 << 42,))}]
    with sl.from_items(items).transfer("cuda").open() as stream:
        next(stream)
        with pytest.raises((library.OutOfMemoryError, RuntimeError, MemoryError)):
            next(stream)


def test_a_full_gpu_fails_at_its_batch_and_goes_on_after_it() -> None:
    library = torch()
    expected = plain_numbers(batches())
    library.cuda.empty_cache()  # what earlier tests left would be used
    free, _ = library.cuda.mem_get_info()
    kept: list[Any] = []
    with batches().transfer("cuda", depth=1).open() as stream:
        kept.append(next(stream))
        ballast = library.empty(free - (1 << 28), dtype=library.uint8, device="cuda")
        library.cuda.set_per_process_memory_fraction(library.cuda.memory_reserved() / library.cuda.mem_get_info()[1])
        try:
            with pytest.raises(library.OutOfMemoryError):
                kept.extend(stream)
            snapshot = stream.snapshot()
        finally:
            library.cuda.set_per_process_memory_fraction(1.0)
            del ballast
    with batches().transfer("cuda").open(resume=snapshot) as stream:
        kept += stream
    assert [batch[:, 0].int().tolist() for batch in kept] == expected


@pytest.mark.parametrize("backend", ["inline", "processes"])
def test_memory_is_given_back(backend: str) -> None:
    library = torch()
    before = library.cuda.memory_allocated()
    for _ in range(5):
        with batches().transfer("cuda").open(backend=BACKENDS[backend]) as stream:
            next(stream)
    library.cuda.synchronize()
    assert library.cuda.memory_allocated() == before


def test_each_replica_has_batches_of_its_own_on_the_gpu() -> None:
    torch()
    replicator = sl.StreamReplicator(batches().merge(), 2)
    found: dict[int, list[list[int]]] = {}

    def read(replica: int) -> None:
        checker = Checker()
        with replicator.pipeline(replica).transfer("cuda").open() as stream:
            for batch in stream:
                checker(batch)
        found[replica] = checker.numbers()

    with replicator:
        threads = [threading.Thread(target=read, args=(replica,)) for replica in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {replica: plain_numbers(batches())[replica::2] for replica in range(2)}


def test_epochs_of_a_loader() -> None:
    torch()
    loader = batches().transfer("cuda").loader(backend=sl.Processes(2))
    for _ in range(3):
        checker = Checker()
        for batch in loader:
            checker(batch)
        assert checker.numbers() == plain_numbers(batches())


def test_a_graph_may_be_captured_beside_copies() -> None:
    """With capture errors of the capturing thread only, as docs/transfer.md has it."""
    library = torch()
    static, total = library.zeros(SIZE, ROW, device="cuda"), library.zeros(SIZE, device="cuda")
    graph, expected = library.cuda.CUDAGraph(), plain_numbers(batches())
    found: list[list[int]] = []
    with batches().transfer("cuda", depth=2).open(backend=sl.Processes(2)) as stream:
        first = next(stream)
        with library.cuda.graph(graph, capture_error_mode="thread_local"):
            total.copy_(static.sum(dim=1))
        for batch in (first, *stream):
            static.copy_(batch)
            graph.replay()
            found.append((total / ROW).int().tolist())
    assert found == expected


def test_a_training_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    torch()
    run: Callable[..., str] = partial(_trained, tmp_path)
    whole = run("a.pt", -1, 0)
    run("b.pt", 17, -signal.SIGKILL)
    assert run("b.pt", -1, 0) == whole


def _trained(folder: Path, checkpoint: str, die: int, exit_code: int) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.transfer.gpu_run", str(folder / checkpoint), str(die)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == exit_code, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_jax_reads_lent_memory_before_it_is_written_again(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    jax = importlib.import_module("jax")
    device = jax.devices("gpu")[0]
    poison_what_is_returned(monkeypatch)
    with leaves_nothing_shared(), batches().transfer(device, depth=3).open(backend=BACKENDS[backend]) as stream:
        found = [(batch.min(axis=1), batch.max(axis=1)) for batch in stream]
    numbers = [[int(a) if a == b else -1 for a, b in zip(*map(np.asarray, pair), strict=True)] for pair in found]
    assert numbers == plain_numbers(batches())
