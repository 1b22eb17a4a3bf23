"""Pipelines on several machines: the items, order and states of one, and the store asked once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

import streamline as sl
from streamline.core.meters import Traffic
from streamline.core.tls import Certificates
from streamline.errors import HostError, PlanError, PlanTypeError
from streamline.io.peers.client import PeerClient
from streamline.io.peers.node import Where, node_of, released
from streamline.io.peers.peer import check_peers
from streamline.io.storage.options import Access
from streamline.io.storage.registry import Storages
from tests.backends.remote.machines import KEY, free_address, key_file
from tests.certificates import tls_folder
from tests.servers.s3 import Bucket, bucket, s3_endpoint
from tests.serving import serving_objects

__all__ = ["bucket", "s3_endpoint"]

MACHINES = 3


@pytest.fixture
def served() -> Iterator[Any]:
    objects = {f"/{part}.txt": b"".join(b"%d-%d\n" % (part, i) for i in range(300)) for part in range(6)}
    with serving_objects(objects) as made:
        yield made


def sent(served: Any) -> int:
    """Return the bytes that the server has sent since the last time, but for looks at an ETag."""
    found: int = sum(size for size in served.sent if size > 1)
    served.sent.clear()
    return found


@contextmanager
def up(folders: list[Path], peers: list[str], tls: Path | None = None, **options: Any) -> Iterator[None]:
    """Let a process of each machine serve, as one does that still reads something else."""
    with start_blocking_portal() as portal, ExitStack() as stack:
        for folder in folders:
            origin = Storages(Access(cache_dir=folder, **options), Traffic())
            node = node_of(Where(str(folder), check_peers(peers), KEY.encode(), Certificates.of(tls)), origin)
            stack.callback(portal.call, released, node, origin)
            node.ready.result()
            assert node.serves()
        yield


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    return [tmp_path / str(number) for number in range(MACHINES)]


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tls_folder(tmp_path / "tls") if request.param else None


def test_machines_that_read_the_same_fetch_each_byte_once_together(
    served: Any, folders: list[Path], tls: Path | None
) -> None:
    peers = [free_address() for _ in folders]
    alone = list(sl.read_lines(f"{served.base}/{{0..5}}.txt").shard(2))
    once = sent(served)

    def read(folder: Path) -> tuple[list[str], Any, str]:
        pipe = sl.read_lines(f"{served.base}/{{0..5}}.txt", cache_dir=str(folder), peers=peers, tls=tls).shard(2)
        with pipe.open() as stream:
            items = list(stream)
            (reads,) = stream.stats().reads
            return items, reads, str(stream.stats())

    with up(folders, peers, tls), ThreadPoolExecutor(MACHINES) as threads:
        found = list(threads.map(read, folders))
    assert [items for items, _, _ in found] == [alone] * MACHINES
    assert sent(served) == once
    assert sum(reads.peer_hits + reads.cache_hits for _, reads, _ in found) == 6 * MACHINES
    assert all("bytes from peers" in shown for _, reads, shown in found if reads.peer_hits)
    assert sum(reads.peer_misses for _, reads, _ in found) == 0


def test_processes_of_one_machine_fetch_each_byte_once_together(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: Path | None
) -> None:
    """Without peers, each fetches what another one is writing."""
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    once = sum(map(len, served.objects.values()))
    peers = f"127.0.0.1:{free_address().rpartition(':')[2]}"
    pipe = sl.read_lines(f"{served.base}/{{0..5}}.txt", cache_dir=tmp_path, peers=peers, tls=tls)
    pipe = pipe.shard(2, mode="replicated")
    with up([tmp_path], [peers], tls), pipe.open(backend=sl.Processes(2)) as stream:
        assert len(list(stream)) == 1800
        assert sent(served) == once
        (reads,) = stream.stats().reads
    assert reads.peer_hits >= 6


def test_what_one_machine_fetches_for_another_stands_in_its_stats(served: Any, folders: list[Path]) -> None:
    """The server counts in the stream of its own process."""
    peers = free_address()
    pipe = sl.read_lines(f"{served.base}/{{0..5}}.txt", cache_dir=folders[0], peers=peers)
    with pipe.open() as stream:
        assert len(list(stream)) == 1800
        (reads,) = stream.stats().reads
    total = sum(map(len, served.objects.values()))
    assert (reads.peer_hits, reads.peer_bytes) == (6, total)
    assert reads.requests == 6 + 6  # the looks, and the objects
    assert sent(served) == total


def test_a_snapshot_is_the_same_with_peers_and_without(served: Any, folders: list[Path]) -> None:
    peers, paths = [free_address()], f"{served.base}/{{0..5}}.txt"
    plain = sl.read_lines(paths).shard(2)
    shared = sl.read_lines(paths, cache_dir=folders[0], peers=peers).shard(2)
    expected = list(plain)
    for first, second in ((plain, shared), (shared, plain)):
        with first.open() as stream:
            begun = [next(stream) for _ in range(777)]
            snapshot = stream.snapshot()
        with second.open(resume=snapshot) as stream:
            assert begun + list(stream) == expected


def test_objects_of_a_store_are_fetched_once_too(bucket: Bucket, folders: list[Path]) -> None:
    bucket.put_all({f"d/{part}.txt": b"one\ntwo\n" * (part + 1) for part in range(6)})
    peers = [free_address() for _ in folders]
    options = {"storage_options": bucket.options, "peers": peers}

    def read(folder: Path) -> tuple[list[str], Any]:
        with sl.read_lines(f"{bucket.url}/d/*", cache_dir=str(folder), **options).open() as stream:  # type: ignore[arg-type]
            return list(stream), stream.stats().reads[0]

    with up(folders, peers, storage_options=bucket.options), ThreadPoolExecutor(MACHINES) as threads:
        found = list(threads.map(read, folders))
    assert all(items == found[0][0] for items, _ in found)
    assert len(found[0][0]) == 42
    assert sum(reads.peer_misses for _, reads in found) == 0
    assert sum(reads.peer_hits + reads.cache_hits for _, reads in found) == 6 * MACHINES


def test_a_key_file_serves_as_the_environment_does(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAMLINE_KEY", raising=False)
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "peers": free_address()}
    with pytest.raises(HostError, match="machines need a common key"):
        list(sl.read_lines(f"{served.base}/0.txt", **options))
    pipe = sl.read_lines(f"{served.base}/0.txt", key_file=key_file(tmp_path), **options)
    with pipe.open() as stream:
        assert len(list(stream)) == 300
        assert stream.stats().reads[0].peer_hits == 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"peers": "a:1"}, PlanError, "needs a cache_dir="),
        ({"peers": 5, "cache_dir": "x"}, PlanTypeError, "expected peers as"),
        ({"peers": "a", "cache_dir": "x"}, PlanError, "peers is an address"),
        ({"key_file": "key", "cache_dir": "x"}, PlanError, "needs peers="),
        ({"tls": "tls", "cache_dir": "x"}, PlanError, "tls= needs peers="),
        ({"tls": 5, "peers": "a:1", "cache_dir": "x"}, PlanTypeError, "expected tls"),
        ({"key_file": 5, "peers": "a:1", "cache_dir": "x"}, PlanTypeError, "expected key_file"),
    ],
)
def test_options_are_checked_where_they_are_written(options: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        Access(**options)


def test_access_with_peers_pickles_and_a_look_before_a_run_joins_none() -> None:
    access = Access(cache_dir="x", peers=("a:1", "b:2"), key_file="key")
    assert pickle.loads(pickle.dumps(access)) == access
    assert access.without_cache(5).peers is None


async def test_what_only_looks_joins_no_peers(served: Any, folders: list[Path]) -> None:
    storages = Storages(Access(cache_dir=folders[0], peers=free_address()))
    storage: Any = storages.of(f"{served.base}/0.txt")
    assert (await storage.stat(f"{served.base}/0.txt")).size == len(served.objects["/0.txt"])
    assert isinstance(storage._peers, PeerClient)
    assert storage._peers._node is None
    await storages.aclose()


def test_a_folder_without_certificates_is_the_error_of_the_stream(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "peers": free_address(), "tls": tmp_path}
    with pytest.raises(HostError, match=r"tls\.crt and tls\.key in .* can't be used: No such file"):
        list(sl.read_lines(f"{served.base}/0.txt", **options))
