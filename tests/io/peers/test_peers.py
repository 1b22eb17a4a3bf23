"""Machines that read the same objects: the store sends each byte once; whatever a peer does, the bytes are right."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamline.core.handshake import MISFIT, PeerHello
from streamline.core.listener import Listener
from streamline.core.tls import Certificates
from streamline.errors import ReadError
from streamline.io.peers import client as asking
from streamline.io.peers import node as nodes
from streamline.io.peers.peer import chosen, look_up
from streamline.io.storage.object_cache import CachedStorage
from streamline.io.storage.object_cache_folder import digest
from tests.backends.remote.machines import free_address
from tests.certificates import tls_folder
from tests.io.peers.group import DATA, KEY, URL, Machine, Store, content, etag_of, serving
from tests.kit import LONGEST_S

Listed = tuple[tuple[str, int], ...]


def addresses(count: int) -> Listed:
    return tuple(("127.0.0.1", int(free_address().rpartition(":")[2])) for _ in range(count))


def files(root: Path, kind: str) -> list[Path]:
    return list(root.rglob(f"*.{kind}"))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Certificates | None:
    """What peers say to each other is the same with TLS."""
    return Certificates.of(tls_folder(tmp_path / "tls")) if request.param else None


@pytest.fixture
async def group(store: Store, tmp_path: Path, tls: Certificates | None) -> AsyncIterator[list[Machine]]:
    """Three machines, all of which serve; the first one is to fetch DATA for all."""
    listed = addresses(3)
    async with AsyncExitStack() as stack:
        made = [Machine(store, tmp_path / str(number), listed, tls=tls) for number in range(3)]
        for machine in made:
            await stack.enter_async_context(serving(machine))
        ranking = look_up(listed)
        first = chosen(ranking, digest(URL, etag_of(DATA)))
        assert first is not None
        yield sorted(made, key=lambda machine: machine is not made[ranking.index(first)])
    assert not files(tmp_path, "part")


async def test_machines_at_once_ask_the_store_once(group: list[Machine], store: Store) -> None:
    store.objects = {f"far://{number}": random.Random(number).randbytes(20_000 + number) for number in range(12)}
    clients = [machine.client() for machine in group for _ in range(2)]
    found = await asyncio.gather(*(content(client, path) for path in store.objects for client in clients))
    assert found == [data for data in store.objects.values() for _ in clients]
    assert sorted(store.log) == [(path, 0, len(data)) for path, data in sorted(store.objects.items())]
    traffics = [client.cache.traffic for client in clients]
    assert all(traffic.peer_hits + traffic.hits == 12 and not traffic.peer_misses for traffic in traffics)


async def test_ranges_that_overlap_are_asked_for_once(group: list[Machine], store: Store) -> None:
    draw = random.Random(0)
    spans = [tuple(sorted(draw.sample(range(len(DATA) + 1), 2))) for _ in range(40)]
    clients = [machine.client() for machine in group]
    found = await asyncio.gather(*(draw.choice(clients).read(URL, start, stop) for start, stop in spans))
    assert found == [DATA[start:stop] for start, stop in spans]
    wanted = set().union(*(range(start, stop) for start, stop in spans))
    sent = [byte for _, start, stop in store.log for byte in range(start, stop or len(DATA))]
    assert sorted(sent) == sorted(wanted)


async def test_a_machine_that_comes_later_asks_only_for_the_version(group: list[Machine], store: Store) -> None:
    assert await content(group[0].client()) == DATA
    store.log.clear()
    late = group[1].client()
    assert await content(late, start=5) == DATA[5:]
    assert await content(late) == DATA
    assert store.log == []
    assert (late.cache.traffic.peer_hits, late.cache.traffic.peer_bytes) == (2, 2 * len(DATA) - 5)


async def test_what_a_peer_sent_is_kept_here_too(group: list[Machine], tmp_path: Path) -> None:
    clients = [machine.client() for machine in group]
    for client in clients:
        assert await content(client) == DATA
        await client.cache.settle()
    with anyio.fail_after(LONGEST_S):
        while len(files(tmp_path, "object")) < 3:  # noqa: ASYNC110 - a server keeps one, in a thread of its own
            await anyio.sleep(0.005)
    assert len(files(tmp_path, "object")) == 3
    for client in clients:
        before = client.cache.traffic.peer_hits, client.cache.traffic.hits
        assert await content(client) == DATA
        assert (client.cache.traffic.peer_hits, client.cache.traffic.hits) == (before[0], before[1] + 1)


async def test_a_slow_reader_holds_no_other_one_up(group: list[Machine], store: Store) -> None:
    slow, quick = group[0].client(), group[1].client()
    async with aclosing(slow.blocks(URL)) as blocks:
        await anext(blocks)
        assert await content(quick) == DATA
    assert store.log == [(URL, 0, len(DATA))]


async def test_what_nobody_waits_for_is_not_fetched_further(group: list[Machine], store: Store) -> None:
    store.gate = asyncio.Semaphore(0)
    reads = [asyncio.ensure_future(content(machine.client())) for machine in group]
    server = nodes._nodes[group[0].where]._server
    while sum(pull.users for pull in list(server._pulls.values())) < len(reads) or not store.log:  # noqa: ASYNC110
        await asyncio.sleep(0.001)  # its thread asks the store, and hears of the readers one by one
    for left in range(2, -1, -1):
        assert server._pulls
        reads[left].cancel()
        await asyncio.gather(reads[left], return_exceptions=True)
    while server._pulls:  # noqa: ASYNC110 - it hears of it, in its thread
        await asyncio.sleep(0.001)
    assert store.log == [(URL, 0, len(DATA))]


async def test_a_replaced_object_is_the_error_that_it_is_without_peers(group: list[Machine], store: Store) -> None:
    old = etag_of(DATA)
    store.objects[URL] = b"new"
    with pytest.raises(ReadError, match="its ETag was"):
        await group[0].client().read(URL, 0, 3, old)
    assert await content(group[1].client()) == b"new"
    store.objects[URL] = b"newer"
    assert await content(group[1].client()) == b"newer"
    assert await group[2].client().read(URL, 0, 3, etag_of(b"new")) == b"new"  # a peer has it


async def test_an_object_that_is_replaced_amid_a_fetch_ends_as_without_peers(
    group: list[Machine], store: Store
) -> None:
    storage = group[0].client()
    etag = (await storage.stat(URL)).etag
    original = Store.blocks

    async def replaced(self: Store, *args: Any) -> Any:
        async with aclosing(original(self, *args)) as blocks:
            async for block in blocks:
                yield block
                self.objects[URL] = b"new" + DATA[3:]

    store.blocks = replaced.__get__(store)  # type: ignore[method-assign]
    with pytest.raises(ReadError, match="its ETag was"):
        await storage.read(URL, 0, len(DATA), etag)


async def test_a_store_that_fails_is_asked_by_who_wants_it(group: list[Machine], store: Store) -> None:
    store.failing = True
    storage = group[0].client()
    with pytest.raises(ReadError, match="the store failed"):
        await content(storage)
    store.failing = False
    assert await content(storage) == DATA
    assert storage.cache.traffic.peer_hits == 1  # no peer is at fault


async def test_what_cannot_be_written_is_read_from_the_store(
    group: list[Machine], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    for machine in group:
        storage = machine.client()
        assert await content(storage) == DATA
        assert storage.cache.traffic.peer_hits == 0


async def test_a_url_with_a_password_or_a_signature_is_told_to_no_peer(
    group: list[Machine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = group[0].client()

    async def never(*_: Any) -> None:
        raise AssertionError("it was asked")

    monkeypatch.setattr(asking.PeerClient, "_piece", never)
    for path in ("https://user:password@host/object", "https://host/object?signature=1"):
        store.objects[path] = DATA
        assert await content(storage, path) == DATA


# A peer that fails ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "STALL_S", 0.3)
    monkeypatch.setattr(asking, "CONNECT_S", 0.3)


async def beside(store: Store, folder: Path, peer: str, tls: Certificates | None = None) -> CachedStorage:
    """Return a storage of a machine that knows one peer."""
    host, _, port = peer.rpartition(":")
    return Machine(store, folder, ((host, int(port)),), tls=tls).client()


async def closed(storage: CachedStorage) -> None:
    await storage.aclose()
    await storage.cache.aclose()


class Cutting:
    """Forwards connections to a peer, and after so many bytes of its answers cuts them off, or falls silent."""

    def __init__(self, port: int, *, silent: bool = False) -> None:
        self._port = port
        self._silent = silent
        self.left = 0
        self.came = 0

    async def __aenter__(self) -> Cutting:
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
        there = asyncio.ensure_future(self._copy(reader, ours))
        try:
            left = self.left
            while data := await theirs.read(left or 1):
                self.came += len(data)
                writer.write(data[:left])
                left -= len(data)
                if left <= 0:
                    break
            if self._silent:
                await self._over.wait()
        finally:
            there.cancel()
            ours.close()
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)


SMALL = b"0123456789" * 20


async def test_a_peer_that_is_cut_at_any_byte_costs_nothing_but_a_request(
    tmp_path: Path, tls: Certificates | None
) -> None:
    store = Store({URL: SMALL})
    far = Machine(store, tmp_path / "far", addresses(1), tls=tls)
    async with serving(far), Cutting(far.where.listed[0][1]) as proxy:
        at, cut = 0, True
        while cut:
            proxy.left, proxy.came = at, 0
            storage = await beside(store, tmp_path / f"near {at}", proxy.address, tls)
            assert await content(storage) == SMALL, at
            cut = not storage.cache.traffic.peer_hits
            await closed(storage)
            at += 7 if tls is None else 43
    assert at > 400  # the handshake, the header, the bytes


async def test_a_peer_that_falls_silent_at_any_byte_is_given_up(tmp_path: Path, quick: None) -> None:
    store = Store({URL: SMALL})
    far = Machine(store, tmp_path / "far", addresses(1))
    async with serving(far), Cutting(far.where.listed[0][1], silent=True) as proxy:
        for at in range(0, 600, 150):
            proxy.left = at
            storage = await beside(store, tmp_path / f"near {at}", proxy.address)
            assert await content(storage) == SMALL
            assert await content(storage, start=5) == SMALL[5:]  # without waiting again
            assert storage.cache.traffic.peer_misses == 1
            await closed(storage)


class Impostor:
    """A peer that knows the key, and answers what a test says."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def __aenter__(self) -> Impostor:
        (self._address,) = addresses(1)
        self.address = "{}:{}".format(*self._address)
        self._listener = Listener(self._address, KEY, self._connected)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    def _connected(self, sock: socket.socket, *_: object) -> None:
        with sock:
            sock.recv(65536)
            sock.sendall(self._answer)


def answered(status: str = "206 Partial Content", body: bytes = SMALL, **headers: str) -> bytes:
    told = {
        "ETag": etag_of(SMALL),
        "Content-Range": f"bytes 0-{len(SMALL) - 1}/{len(SMALL)}",
        "Content-Length": str(len(SMALL)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in told.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode() + body


WRONG = {
    "another version": answered(ETag='"other"'),
    "no version": answered(ETag=""),
    "other bytes": answered(Content_Range=f"bytes 1-{len(SMALL)}/{len(SMALL)}"),
    "another size": answered(Content_Range=f"bytes 0-{len(SMALL) - 1}/{len(SMALL) + 1}"),
    "all of it": answered("200 OK"),
    "longer": answered(Content_Length="100000000000", body=SMALL * 2),
    "shorter": answered(Content_Length=str(len(SMALL) - 1), body=SMALL[:-1]),
    "cut": answered(body=SMALL[:-1]),
    "in chunks": answered(Content_Length="", Transfer_Encoding="chunked", body=b"c8\r\n" + SMALL + b"\r\n0\r\n\r\n"),
    "of no length": answered(Content_Length=""),
    "elsewhere": answered("302 Found", Location="http://127.0.0.1:1/"),
    "broken": answered("500 Broken"),
    "nothing": b"",
    "garbage": bytes(range(256)) * 20,
    "an endless header": b"HTTP/1.1 206 OK\r\nX: " + b"x" * 200_000,
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_answer_that_is_not_what_was_asked_for_is_not_believed(
    wrong: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store({URL: SMALL})
    async with Impostor(WRONG[wrong]) as peer:
        storage = await beside(store, tmp_path, peer.address)
        assert await content(storage) == SMALL
        assert (storage.cache.traffic.peer_hits, storage.cache.traffic.peer_misses) == (0, 1)
        assert len([record for record in caplog.records if "not asked for a while" in record.message]) == 1
        await closed(storage)


async def test_the_answer_that_the_wrong_ones_are_made_of_is_right(tmp_path: Path) -> None:
    async with Impostor(answered()) as peer:
        storage = await beside(Store({URL: SMALL}), tmp_path, peer.address)
        assert await content(storage) == SMALL
        assert storage.cache.traffic.peer_hits == 1
        await closed(storage)


async def test_a_peer_that_has_gone_is_replaced_by_the_next_of_the_ranking(
    group: list[Machine], store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.objects = {f"far://{number}": DATA for number in range(20)}
    listed = (*group[0].where.listed, *addresses(1))
    more = [Machine(store, Path(machine.where.folder, "more"), listed, tls=machine.where.tls) for machine in group]
    clients = [machine.client() for machine in more]
    for path in store.objects:
        await asyncio.gather(*(content(client, path) for client in clients))
    assert all(client.cache.traffic.peer_hits for client in clients)
    assert sum("is not asked for a while" in record.message for record in caplog.records) <= len(clients)
    for client in clients:
        await closed(client)


@pytest.mark.parametrize("key", [b"another key, as long as it", b""])
async def test_without_the_key_nothing_is_believed_and_nothing_is_served(
    store: Store, tmp_path: Path, key: bytes, caplog: pytest.LogCaptureFixture, tls: Certificates | None
) -> None:
    far = Machine(store, tmp_path / "far", addresses(1), tls=tls)
    async with serving(far):
        near = Machine(store, tmp_path / "near", far.where.listed, key or b"x" * 16, tls=tls).client()
        assert await content(near) == DATA
        assert (near.cache.traffic.peer_hits, near.cache.traffic.peer_misses) == (0, 1)
        assert "key" in caplog.text
        await closed(near)
        if not key:
            reader, writer = await asyncio.open_connection(*far.where.listed[0])
            writer.write(b"GET /objects/%064d HTTP/1.1\r\nHost: x\r\n\r\n" % 0)
            assert await reader.read() in (b"", MISFIT)
            writer.close()


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True), (True, None)])
async def test_a_peer_that_encrypts_otherwise_is_not_asked(
    store: Store, tmp_path: Path, near: bool, far: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """None: with a certificate that isn't trusted here."""
    trusted = Certificates.of(tls_folder(tmp_path / "tls"))
    theirs = Certificates.of(tls_folder(tmp_path / "other")) if far is None else trusted if far else None
    async with serving(Machine(store, tmp_path / "far", addresses(1), tls=theirs)) as node:
        (where,) = node.where.listed
        storage = await beside(store, tmp_path / "near", "{}:{}".format(*where), trusted if near else None)
        assert await content(storage) == DATA
        assert (storage.cache.traffic.peer_hits, storage.cache.traffic.peer_misses) == (0, 1)
        await closed(storage)
    words = "certificate is not trusted" if far is None else "give both tls= (--tls), or neither"
    assert [words in record.message for record in caplog.records if "not asked for a while" in record.message] == [True]


async def test_an_object_of_megabytes_comes_whole(group: list[Machine], store: Store) -> None:
    store.objects = {URL: random.Random(0).randbytes(5_000_003)}
    store.block = 300_000
    clients = [machine.client() for machine in group]
    for client in clients:
        assert await content(client) == store.objects[URL]
    traffics = [client.cache.traffic for client in clients]
    assert [traffic.peer_hits + traffic.hits for traffic in traffics] == [1, 1, 1]  # the one that fetches may have it
    assert sum(traffic.peer_hits for traffic in traffics) >= 2
    assert sum(traffic.peer_misses for traffic in traffics) == 0
    assert len(store.log) == 1


async def test_a_peer_that_drips_is_given_up_though_it_is_never_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the store would be: here the limit for a piece is cut short, and the peer answers for ever."""
    monkeypatch.setattr(asking, "PIECE_S", 0.3)
    over = threading.Event()

    def dripping(sock: socket.socket, *_: object) -> None:
        def drip() -> None:
            with sock, suppress(OSError):
                sock.recv(65536)
                for byte in answered():
                    sock.sendall(bytes([byte]))
                    if over.wait(0.01):
                        break

        threads.append(threading.Thread(target=drip))
        threads[-1].start()

    threads: list[threading.Thread] = []
    (address,) = addresses(1)
    listener = Listener(address, KEY, dripping)
    storage = await beside(Store({URL: SMALL}), tmp_path, "{}:{}".format(*address))
    assert await content(storage) == SMALL
    assert (storage.cache.traffic.peer_hits, storage.cache.traffic.peer_misses) == (0, 1)
    await closed(storage)
    listener.close()
    over.set()
    for thread in threads:
        thread.join()


async def test_hundreds_of_objects_at_once_leave_nothing_open(group: list[Machine], store: Store) -> None:
    store.objects = {f"far://{number}": b"%d" % number * 200 for number in range(150)}
    clients = [machine.client() for machine in group]
    found = await asyncio.gather(*(content(client, path) for client in clients for path in store.objects))
    assert found == [*store.objects.values()] * 3
    assert sorted(path for path, _, _ in store.log) == sorted(store.objects)
    for machine in group:
        assert not nodes._nodes[machine.where]._server._pulls


async def test_no_machine_asks_another_one_for_what_it_was_asked_for(
    group: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server asks its store only, so no two can wait for each other."""
    asked: list[str] = []
    original = asking.PeerClient._piece

    async def piece(self: asking.PeerClient, wanted: Any) -> bytes | None:
        asked.append(threading.current_thread().name)
        return await original(self, wanted)

    monkeypatch.setattr(asking.PeerClient, "_piece", piece)
    clients = [machine.client() for machine in group]
    assert await asyncio.gather(*map(content, clients)) == [DATA] * 3
    assert set(asked) == {threading.current_thread().name}


async def test_a_connection_that_comes_while_a_machine_leaves_is_closed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = socket.socketpair()
    close, hello = Listener.close, PeerHello(role="objects", node="near", pid=1)

    def late(listener: Listener) -> None:
        listener._on_peer(there, hello, "near")
        close(listener)

    monkeypatch.setattr(Listener, "close", late)
    machine = Machine(store, tmp_path, addresses(1))
    async with serving(machine):
        pass
    with here:
        here.settimeout(LONGEST_S)
        assert here.recv(1) == b""
