"""Ranks publish to rank 0's page: whatever they send, and whatever becomes of either end, no stream waits for it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest

import streamline as sl
from streamline.backends.network.connections import dial
from streamline.backends.network.handshake import HandshakeError, PeerHello
from streamline.errors import HostError, PlanError
from streamline.observe import exporters, page, rank_lines, rank_publishing
from streamline.observe.page import LivePage, RankFeed, page_place
from streamline.observe.rank_lines import MOST_LINE_BYTES, RankLine, StageLine, StreamLine, encoded
from streamline.observe.rank_publishing import JobRanks, RankPublisher, Whereabouts, job_ranks
from tests.kit import LONGEST_S
from tests.page_kit import update, updates
from tests.sharding.kit import MemoryStore

KEY = "0123456789abcdef0123456789abcdef"
PIPE = sl.from_items(range(600)).shard(64).map(abs).merge()
HERE = f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.1"
"""An address of this machine at which no other process listens."""

BOARD = "streamline/page 127.0.0.1:0/[{}, []]"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "EVERY_S", 0.01)
    monkeypatch.setattr(rank_publishing, "EVERY_S", 0.01)
    monkeypatch.setattr(rank_publishing, "PAUSES_S", (0.001, 0.01))
    monkeypatch.setattr(page, "SHARE", 1.0)
    monkeypatch.setattr(rank_publishing, "SHARE", 1.0)
    monkeypatch.setattr(rank_publishing, "LOOK_SHARE", 1.0)


class Job:
    """Rank 0 of a job in this process, with a page."""

    def __init__(self, world_size: int, store: MemoryStore | None = None) -> None:
        self.world_size = world_size
        self.store = store or MemoryStore()

    def open(self, rank: int, **options: Any) -> Any:
        ends = sl.Ends("allow", self.store)
        return PIPE.open(rank=rank, world_size=self.world_size, ends=ends, page=True, **options)

    @contextmanager
    def rank_0(self) -> Iterator[Any]:
        """Open rank 0, and wait until the others can find it."""
        self.store.called.clear()
        with self.open(0) as stream:
            assert self.store.called.wait(LONGEST_S)
            self.url = stream.page
            yield stream

    @property
    def where(self) -> Whereabouts:
        return msgspec.json.decode(self.store.values[BOARD.format(self.world_size)], type=Whereabouts)

    def dial(self, ticket: str, key: bytes | None = None, role: Any = "rank", node: str = "node", pid: int = 7) -> Any:
        hello = PeerHello(role=role, node=node, pid=pid, ticket=ticket)
        sock = dial((self.where.hosts[0], self.where.port), key or self.where.key, hello)
        sock.settimeout(LONGEST_S)
        return sock

    def join(self, rank: int, **options: Any) -> socket.socket:
        """Return the connection of a rank that is let in."""
        sock: socket.socket = self.dial(f"{rank}/{self.world_size}", **options)
        assert sock.recv(1000) == b"\n"
        return sock

    def until(self, what: Callable[[dict[int, Any]], bool]) -> dict[int, Any]:
        """Return the rows of the map, by rank, once they are as they should be."""
        with closing(updates(self.url)) as found:  # type: ignore[type-var]
            for text in found:
                for one in json.loads(text)["ranks"]["maps"]:
                    rows = {row["rank"]: row for row in one["rows"]}
                    if what(rows):
                        return rows
        raise AssertionError("the page has closed")


def statuses(rows: dict[int, Any]) -> list[str]:
    return [row["status"] for row in rows.values()]


def said(items: int = 10, rate: float = 5.0, name: str = "items", label: str = "map(a)") -> RankLine:
    return RankLine(1.0, 1.0, (StreamLine(name, 0, items, 10.0, rate, 0.5, stages=(StageLine(label, 0.5),)),))


# Ranks come and go ----------------------------------------------------------------------------------------------------
def test_all_ranks_are_on_the_page_of_rank_0_and_leave_it() -> None:
    job, before = Job(3), threading.active_count()
    with job.rank_0() as first:
        assert statuses(job.until(lambda rows: bool(rows[0]["cells"]))) == ["live", "missing", "missing"]
        with job.open(1) as second, job.open(2) as third:
            assert (second.page, third.page) == (None, None)
            assert [next(stream) for stream in (first, second, third)] == [0, 1, 2]
            rows = job.until(lambda rows: all(row["cells"] for row in rows.values()))
            assert {row["who"] for row in rows.values()} == {f"{socket.gethostname()}, pid {os.getpid()}"}
            (one,) = update(job.url)["ranks"]["maps"]
            assert set(one["columns"]) <= {*map(str, first.stats().stages), "other ranks", "other"}
        assert statuses(job.until(lambda rows: statuses(rows)[1:] == ["ended", "ended"])) == ["live", "ended", "ended"]
        with job.open(2):
            job.until(lambda rows: statuses(rows)[1:] == ["ended", "live"])
    assert threading.active_count() == before


def test_ranks_that_come_first_find_the_page_when_it_is_there() -> None:
    job = Job(2)
    with job.open(1) as early:
        assert next(early) == 1
        for _ in range(2):  # rank 0 is restarted, at another port and with another key
            with job.rank_0():
                job.until(lambda rows: bool(rows[1]["cells"]))
        assert list(early) == list(range(3, 600, 2))


def test_lines_may_come_torn_together_and_late() -> None:
    job = Job(2)
    with job.rank_0(), job.join(1) as rank:
        line = encoded(said(1))
        for byte in line:
            rank.sendall(bytes([byte]))
        job.until(lambda rows: rows[1]["rate"] == 5)
        rank.sendall(encoded(said(2, rate=6)) * 100 + encoded(said(3, rate=7)) + line[:20])
        job.until(lambda rows: rows[1]["rate"] == 7)
        rank.sendall(line[20:])
        job.until(lambda rows: rows[1]["rate"] == 5)


def test_a_rank_that_dies_is_lost_and_its_successor_takes_its_place() -> None:
    job = Job(2)
    with job.rank_0():
        with job.join(1, pid=11) as rank:
            rank.sendall(encoded(said(rate=3)))
            job.until(lambda rows: rows[1]["rate"] == 3)
        assert job.until(lambda rows: rows[1]["status"] == "lost")[1]["who"] == "node, pid 11"
        (one,) = update(job.url)["ranks"]["maps"]
        assert one["headline"]["words"] == "Rank 1 is lost"
        with job.join(1, pid=12) as rank:
            rank.sendall(encoded(said(rate=4)))
            assert job.until(lambda rows: rows[1]["rate"] == 4)[1]["who"] == "node, pid 12"


def test_a_rank_that_says_nothing_is_silent_and_another_may_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_lines, "SILENT_S", -3.0)
    job = Job(2)
    with job.rank_0(), job.join(1, pid=11) as silent:
        silent.sendall(encoded(said()))
        job.until(lambda rows: rows[1]["status"] == "silent")
        with job.join(1, pid=12) as rank:
            job.until(lambda rows: rows[1]["who"] == "node, pid 12")
            assert silent.recv(1) == b""  # what it would send is no longer of a rank
            rank.sendall(encoded(said()))


def test_the_same_process_may_come_again_at_any_time() -> None:
    job = Job(2)
    with job.rank_0(), job.join(1) as old, job.join(1) as new:
        assert old.recv(1) == b""
        new.sendall(encoded(said(rate=3)))
        job.until(lambda rows: rows[1]["rate"] == 3)


def test_sixty_four_ranks_are_on_one_page() -> None:
    job = Job(64)
    with job.rank_0(), ExitStack() as ranks:
        for rank in range(1, 64):
            ranks.enter_context(job.join(rank)).sendall(encoded(said(rate=rank)))
        rows = job.until(lambda rows: all(rows[rank]["rate"] == rank for rank in range(1, 64)))
        assert statuses(rows) == ["live"] * 64


# Who is let in --------------------------------------------------------------------------------------------------------
def test_a_wrong_key_is_refused() -> None:
    job = Job(2)
    with job.rank_0() as stream:
        with pytest.raises(HandshakeError):
            job.dial("1/2", key=b"x" * 32)
        assert statuses(job.until(lambda rows: bool(rows[0]["cells"]))) == ["live", "missing"]
        assert list(stream) == list(range(0, 600, 2))


@pytest.mark.parametrize(
    ("ticket", "why"),
    [
        ("1/3", "the page is of a job of 2 ranks, and this is rank 1 of 3"),
        ("2/2", "this is rank 2 of 2"),
        ("0/2", "this is rank 0 of 2"),
        ("-1/2", "this is where the ranks of a job publish"),
        ("", "this is where the ranks of a job publish"),
        ("9" * 200 + "/2", "this is where the ranks of a job publish"),
    ],
)
def test_what_is_no_rank_of_the_job_is_refused(ticket: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    with job.rank_0(), job.dial(ticket) as sock:
        assert why in sock.makefile().read()
        job.until(lambda rows: rows[1]["status"] == "missing")
    assert "a rank on node, pid 7, is refused: " in caplog.text
    assert why in caplog.text


def test_an_agent_of_a_cluster_is_no_rank() -> None:
    job = Job(2)
    with job.rank_0(), job.dial("1/2", role="control") as sock:
        assert sock.makefile().read() == "this is where the ranks of a job publish\n"


def test_a_rank_that_is_there_already_is_refused() -> None:
    job = Job(2)
    with job.rank_0(), job.join(1, pid=11) as rank:
        rank.sendall(encoded(said(rate=3)))
        with job.dial("1/2", pid=12) as other:
            assert "two processes have been given this rank" in other.makefile().read()
        assert job.until(lambda rows: rows[1]["rate"] == 3)[1]["who"] == "node, pid 11"


@pytest.mark.parametrize(
    "wrong",
    [
        b"\n", b"<html>\n", b'{"every_s": NaN}\n', b"[" * 10_000 + b"\n", b'{"streams": [["a", -1]]}\n',
        b"x" * 10_000_000, b"x" * (MOST_LINE_BYTES + 1) + b"\n", encoded(said()) * 3 + b"\xff\n",
    ],
)  # fmt: skip
def test_what_is_no_line_ends_its_connection_and_nothing_else(wrong: bytes, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(4)
    with job.rank_0() as stream, job.join(2) as good, job.join(1) as bad:
        with suppress(ConnectionError):  # it is closed before all is sent
            bad.sendall(wrong)
            assert bad.recv(1) == b""
        good.sendall(encoded(said(rate=3)))
        assert job.until(lambda rows: rows[2]["rate"] == 3)[1]["status"] == "lost"
        assert list(stream) == list(range(0, 600, 4))
    assert caplog.text.count("a rank on node, pid 7, is refused: it sends") == 1


def test_markup_and_control_characters_stay_text() -> None:
    job = Job(2)
    name = "<script>\x1b[2J\r\n\ndata: x"
    with job.rank_0(), job.join(1) as rank:
        rank.sendall(encoded(said(rate=3, label=name)))
        job.until(lambda rows: rows[1]["rate"] == 3)
        (one,) = update(job.url)["ranks"]["maps"]
        assert name in one["columns"]
        with closing(updates(job.url, "top")) as found:  # type: ignore[type-var]
            text = next(found)
        assert "exposed wait, items, 2 ranks" in text
        assert all("\n" not in line for line in text.splitlines())


# The streams wait for nothing -----------------------------------------------------------------------------------------
def test_without_rank_0_a_stream_goes_on_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_publishing, "PATIENCE_S", 0.0)
    tried = threading.Semaphore(0)
    look = rank_publishing.RankPublisher._say

    def counted(self: RankPublisher, error: Exception) -> None:
        look(self, error)
        tried.release()

    monkeypatch.setattr(rank_publishing.RankPublisher, "_say", counted)
    with Job(2).open(1) as stream:
        for _ in range(5):
            assert tried.acquire(timeout=LONGEST_S)
        assert list(stream) == list(range(1, 600, 2))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "rank 1 isn't on the page of rank 0, and tries again: rank 0 hasn't said where it is: is page= given there, "
        "too, and the same?"
    ]


class Full(socket.socket):
    """One end of a connection whose buffers are full."""

    def __init__(self) -> None:
        here, self.other = socket.socketpair()
        super().__init__(fileno=here.detach())
        self.sends = threading.Event()
        self.other.sendall(b"\n")  # it is let in
        self.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self.send(b"x" * 10_000)

    def sendall(self, *data: Any) -> None:
        self.sends.set()
        super().sendall(*data)

    def close(self) -> None:
        self.other.close()
        super().close()


def test_where_rank_0_takes_nothing_no_line_waits_and_closing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_publishing, "SEND_S", 600.0)
    monkeypatch.setattr(rank_publishing, "CLOSE_S", 0.01)
    full, made = Full(), []

    def make() -> tuple[StreamLine, ...]:
        made.append(1)
        return ()

    monkeypatch.setattr(rank_publishing, "dial", lambda *_, **options: full)
    where = Whereabouts(("127.0.0.1",), 1, KEY.encode())
    with closing(RankPublisher(JobRanks(1, 2, fixed=where), make)) as publisher:
        assert full.sends.wait(LONGEST_S)
    publisher._thread.join(LONGEST_S)  # it was cut off: by itself, it would send for ten minutes
    assert not publisher._thread.is_alive()
    assert made == [1]  # the next line is made when this one has been sent


@pytest.mark.parametrize("what", ["raises", "garbage", "nothing", "no host", "no port"])
def test_a_store_that_is_of_no_use_is_asked_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "garbage": b"\xff", "nothing": None, "no host": b'{"hosts": [], "port": 1, "key": ""}',
        "no port": b'{"hosts": ["127.0.0.1"], "port": 70000, "key": ""}',
    }  # fmt: skip
    asked = threading.Semaphore(0)

    class Board:
        def post(self, text: str) -> object:
            raise OSError(text)

        def look(self) -> bytes | None:
            asked.release()
            if what == "raises":
                raise RuntimeError("the store is gone")
            return answers[what]

    with closing(RankPublisher(JobRanks(1, 2, board=Board()), tuple)):
        for _ in range(3):
            assert asked.acquire(timeout=LONGEST_S)


def test_a_store_that_takes_nothing_leaves_rank_0_its_own_page() -> None:
    class Deaf(MemoryStore):
        def set(self, key: str, value: str) -> None:
            self.called.set()
            raise ConnectionError("the store is gone")

    with Job(2, Deaf()).rank_0() as stream:
        events = (json.loads(text)["events"] for text in updates(stream.page))
        event = next(found for found in events if found)[0]["text"]
        assert event == "the other ranks can't be told where the page is: the store is gone"
        assert list(stream) == list(range(0, 600, 2))


# Where they meet ------------------------------------------------------------------------------------------------------
def test_a_loader_publishes_between_its_epochs_too() -> None:
    job = Job(2)
    ends = sl.Ends("allow", job.store)  # of which steps_per_epoch= leaves the store as it is
    with job.rank_0(), PIPE.loader(rank=1, world_size=2, ends=ends, page=True, steps_per_epoch=10) as loader:
        for epoch in range(2):
            assert len(list(loader)) == 10
            job.until(lambda rows: rows[1]["status"] == "live")
            assert (loader.epoch, loader.page) == (epoch + 1, None)
    assert [one for one in exporters._exporters if one.startswith("page")] == []


def test_an_address_and_a_key_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    job = Job(2)
    options: Any = {"world_size": 2, "ends": "allow", "page": f"{HERE}:8600"}
    with PIPE.open(rank=1, **options), PIPE.open(rank=0, **options) as stream:
        job.url = stream.page
        assert job.url.startswith(f"http://{HERE}:8600/")
        assert statuses(job.until(lambda rows: bool(rows[1]["cells"]))) == ["live", "live"]


def test_ranks_that_know_of_no_way_have_a_page_each(caplog: pytest.LogCaptureFixture) -> None:
    options: Any = {"world_size": 2, "ends": "allow", "page": True}
    with PIPE.open(rank=1, **options) as stream:
        assert update(str(stream.page))["ranks"] is None
    assert "this page shows rank 1 alone. Each rank has a page of its own" in caplog.text


@pytest.mark.parametrize(
    ("address", "environ", "where"),
    [
        (("10.0.0.1", 8600), {}, Whereabouts(("10.0.0.1",), 8601, KEY.encode())),
        (("0.0.0.0", 8600), {"MASTER_ADDR": "node0"}, Whereabouts(("node0",), 8601, KEY.encode())),
        (("127.0.0.1", 0), {}, None),
        (("127.0.0.1", 8600), {"STREAMLINE_KEY": ""}, None),
    ],
)
def test_where_rank_0_is_follows_from_the_page_s_address(
    address: tuple[str, int], environ: dict[str, str], where: Whereabouts | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"STREAMLINE_KEY": KEY, **environ}.items():
        monkeypatch.setenv(name, value)
    assert job_ranks(1, 2, address, None).fixed == where
    assert job_ranks(0, 1, address, None) == JobRanks(0, 1, address[0])


def test_addresses_at_which_rank_0_cannot_be_found_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        PlanError, match=r'rank 1 of 2 is to find rank 0 there, .* page="node0:8600", or set MASTER_ADDR'
    ):
        job_ranks(1, 2, ("0.0.0.0", 8600), None)
    with pytest.raises(PlanError, match="there is none after 65535"):
        page_place("127.0.0.1:65535", 1, 2)
    monkeypatch.setenv("STREAMLINE_KEY", "short")
    with pytest.raises(HostError, match="STREAMLINE_KEY"):
        page_place("127.0.0.1:8600", 1, 2)


def test_rank_0_listens_for_its_own_machine_if_all_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    board: Any = object()
    fixed = Whereabouts(("node0",), 8601, b"")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert JobRanks(0, 2, board=board).listens_at == ("127.0.0.1", 0)
    assert JobRanks(0, 4, board=board).listens_at == ("0.0.0.0", 0)
    assert JobRanks(0, 4, "::1", board=board).listens_at == ("::", 0)
    assert JobRanks(0, 4, "127.0.0.1", fixed=fixed).listens_at == ("127.0.0.1", 8601)
    assert JobRanks(0, 4, "node0", fixed=fixed).listens_at == ("0.0.0.0", 8601)


def test_what_listens_for_ranks_and_cannot_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    handlers, before = list(logging.getLogger("streamline").handlers), threading.active_count()
    with (
        socket.create_server((HERE, 8601)),
        pytest.raises(HostError, match=f"can't listen at {HERE}:8601"),
    ):
        PIPE.open(rank=0, world_size=2, ends="allow", page=f"{HERE}:8600").__enter__()
    assert threading.active_count() == before
    assert logging.getLogger("streamline").handlers == handlers
    assert not any(isinstance(one, LivePage | RankFeed) for one in exporters._exporters.values())


def test_a_fork_holds_no_connection_and_goes_on_here() -> None:
    """A worker of a trainer that outlives its rank would keep the connection, and the rank would not be lost."""
    job = Job(2)
    with job.rank_0(), job.open(1):
        job.until(lambda rows: bool(rows[1]["cells"]))
        (feed,) = (one for one in exporters._exporters.values() if isinstance(one, RankFeed))
        (here,) = (one for one in exporters._exporters.values() if isinstance(one, LivePage))
        assert here._ranks is not None
        ends = feed._publisher._sock, here._ranks._connections[1]._sock
        assert all(sock is not None and sock.fileno() >= 0 for sock in ends)
        pid = os.fork()
        if not pid:
            os._exit(sum(sock is None or sock.fileno() >= 0 for sock in ends))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        last = here._ranks._connections[1].seen.at
        job.until(lambda rows: here._ranks is not None and here._ranks._connections[1].seen.at > last)


RANK = """
import sys
import streamline as sl
pipe = sl.from_items(range(10**9)).shard(2).map(abs).merge()
with pipe.open(rank=1, world_size=2, ends="allow", page=sys.argv[1]) as stream:
    next(stream)
    sys.stdin.read()
"""


def test_another_process_is_on_the_page_until_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    address, job = f"{HERE}:8600", Job(2)
    with PIPE.open(rank=0, world_size=2, ends="allow", page=address) as stream:
        job.url = stream.page
        with subprocess.Popen([sys.executable, "-c", RANK, address], stdin=subprocess.PIPE) as process:
            rows = job.until(lambda rows: bool(rows[1]["cells"]))
            assert rows[1]["who"] == f"{socket.gethostname()}, pid {process.pid}"
            process.send_signal(signal.SIGKILL)
        job.until(lambda rows: rows[1]["status"] == "lost")
        assert list(stream) == list(range(0, 600, 2))
