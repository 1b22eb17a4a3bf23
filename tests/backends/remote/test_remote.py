"""Workers on other machines, which are this one: the same items, what they print, what goes wrong."""

from __future__ import annotations

import itertools
import os
import random
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import anyio
import numpy as np
import pytest
from click.testing import CliRunner

import streamline as sl
import streamline.backends.remote.agent as agents_side
import streamline.backends.remote.remote as trainers_side
from streamline.backends.base import Backend
from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.plan_shipping import ship
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.backends.network.connections import Introduction, Listener, UnreachableError
from streamline.backends.network.handshake import PeerHello, read_key
from streamline.backends.network.tls import Certificates
from streamline.backends.remote.agent import Agent
from streamline.backends.remote.agents import Agents, AttachedAgent, CarriedPlan
from streamline.backends.remote.control import AgentCalls, Call, TrainerCalls, call
from streamline.backends.remote.remote import RemoteHost
from streamline.cli import main
from streamline.core.options import parse_address
from streamline.errors import HostError, PlanError
from streamline.pipeline import Pipeline
from tests.backends.remote.machines import KEY, agent_process, free_address, key_file, machines
from tests.certificates import tls_folder
from tests.laws.profile import FACTOR

DIALLER = Introduction(("localhost", 1), b"", PeerHello(role="control", node="node7", pid=1))

LENGTH = 3000


@pytest.fixture(params=["plain", "tls"] if FACTOR > 1 else ["tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Most of what must hold, must hold with TLS and without; the pool below, and other files, are without."""
    return tls_folder(tmp_path / "tls") if request.param == "tls" else None


@pytest.fixture
def remote(tmp_path: Path, tls: Path | None) -> Iterator[sl.Remote]:
    with machines(tmp_path, tls=tls) as backend:
        yield backend


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Two hosts for tests that leave them as they are; up before a test begins, so that they are no test's leak."""
    with machines(tmp_path_factory.mktemp("keys")) as remote, remote as pool:
        with squares().open(backend=pool) as stream:
            list(stream)
        yield pool


def squares(length: int = LENGTH) -> Pipeline[int]:
    return sl.from_items(range(length)).shard(4).map(lambda item: item * item).merge()


def test_items_and_their_order_are_those_of_one_process(pool: Backend) -> None:
    with squares().open(backend=pool) as stream:
        assert list(stream) == [item * item for item in range(LENGTH)]


def test_large_arrays_arrive_aligned_writable_and_whole(pool: Backend) -> None:
    def fill(item: int) -> dict[str, Any]:
        return {"a": np.full((300_000 + item,), item, np.float32), "b": np.arange(item), "c": b"x" * 200_000}

    with sl.from_items(range(40)).shard(2).map(fill).merge().open(backend=pool) as stream:
        for item, got in enumerate(stream):
            assert got["a"].shape == (300_000 + item,)
            assert (got["a"] == item).all()
            assert got["a"].flags.aligned
            assert got["a"].flags.writeable
            assert got["a"].ctypes.data % 64 == 0
            assert (got["b"] == np.arange(item)).all()
            assert got["c"] == b"x" * 200_000


def test_prints_are_marked_with_process_and_machine(pool: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    def shout(item: int) -> int:
        print("item", item)
        return item

    with sl.from_items(range(2)).shard(1).map(shout).merge().open(backend=pool) as stream:
        assert list(stream) == [0, 1]
    out = ""
    while f"[process 0 on {os.uname().nodename}] item 1\n" not in out:  # it comes over another connection than items
        out += capsys.readouterr().out


def test_a_handler_of_errors_is_asked_over_the_network(pool: Backend) -> None:
    asked: list[int] = []

    def handle(failure: sl.Failure) -> Literal["skip"]:
        asked.append(failure.item)
        return "skip"

    def odd(item: int) -> int:
        return item // (item % 2)

    pipe = sl.from_items(range(10)).shard(1).map(odd).merge()
    with pipe.open(backend=pool, on_error=handle) as stream:
        assert list(stream) == [1, 3, 5, 7, 9]
    assert asked == [0, 2, 4, 6, 8]


@pytest.mark.long
def test_a_host_that_is_killed_is_replaced(tmp_path: Path, tls: Path | None) -> None:
    def die(item: int) -> int:
        mark = tmp_path / f"died at {item}"
        if item % 2000 == 350 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with machines(tmp_path, tls=tls) as remote:
        pipe = sl.from_items(range(LENGTH)).shard(4).shuffle(window=16).map(die).merge()
        with pipe.open(backend=remote) as stream:
            got = list(stream)
            restarts = sum(host.restarts for host in stream.stats().hosts)
    assert got == list(sl.from_items(range(LENGTH)).shard(4).shuffle(window=16).merge())
    assert restarts == len(list(tmp_path.glob("died at *"))) == 2


@pytest.mark.long
def test_an_agent_that_is_killed_counts_against_no_worker(tmp_path: Path, tls: Path | None) -> None:
    address, key = free_address(), key_file(tmp_path)
    remote = sl.Remote(2, listen=address, key_file=key, tls=tls)
    pipe = squares(30_000)
    got = []
    with ExitStack() as agents:
        victims = [agents.enter_context(agent_process(address, key, tls=tls)) for _ in range(3)][:2]
        with pipe.open(backend=remote) as stream:
            for item in stream:
                got.append(item)
                if len(got) % 10_000 == 2_000 and victims:
                    victims.pop().kill()
    assert got == [item * item for item in range(30_000)]


@pytest.mark.long
def test_an_agent_that_says_nothing_any_more_is_replaced(tmp_path: Path) -> None:
    address, key = free_address(), key_file(tmp_path)
    remote = sl.Remote(1, listen=address, key_file=key, lost_after_s=2.0)
    got = []
    with agent_process(address, key, hosts=1) as agent, squares(20_000).open(backend=remote) as stream:
        for item in stream:
            got.append(item)
            if len(got) == 1000:
                os.kill(agent.pid, signal.SIGSTOP)
                for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
                    os.kill(int(child), signal.SIGSTOP)
                with agent_process(address, key, hosts=1):
                    got += stream
    assert got == [item * item for item in range(20_000)]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(max(1, int(FACTOR))))
def test_connections_that_are_cut_anywhere_lose_and_repeat_nothing(
    tmp_path: Path, seed: int, tls: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (agents_side, trainers_side):
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    dice = random.Random(f"{seed} {tls is None}")
    cuts = [None, *(dice.choice([1, 150, 400, 3000, 20_000, 200_000]) + dice.randrange(50) for _ in range(12))]

    def fill(item: int) -> np.ndarray[Any, Any]:
        return np.full(5000 if item % 7 == 0 else 5, item)

    pipe = sl.from_items(range(2000)).shard(4).shuffle(window=8).map(fill).merge()
    with machines(tmp_path, cuts=cuts, tls=tls) as remote, pipe.open(backend=remote) as stream:
        got = [(int(item[0]), item.size) for item in stream]
    assert got == [(int(item[0]), item.size) for item in pipe]


@pytest.mark.long
def test_a_connection_that_is_cut_for_the_agent_alone_is_replaced(tmp_path: Path) -> None:
    """As by a tunnel or a proxy between the two, which keeps the trainer's half open."""
    pipe = sl.from_items(range(2000)).shard(4).map(lambda item: np.full(200, item)).merge()
    with (
        machines(tmp_path, cuts=[None, 50_000, 5_000], half_open=True, lost_after_s=2.0) as remote,
        pipe.open(backend=remote) as stream,
    ):
        assert [int(item[0]) for item in stream] == list(range(2000))


TRAINER = """
import sys
import streamline as sl

def fn(item):
    import os
    return os.getpid()

pipe = sl.from_items(range(10**9)).shard(2).map(fn).merge()
with pipe.open(backend=sl.Remote(2, listen=sys.argv[1], key_file=sys.argv[2])) as stream:
    print(next(stream), next(stream), flush=True)
    sys.stdin.read()
"""


@contextmanager
def exit_of_worker(address: str, key: Path) -> Iterator[list[int]]:
    """Run `streamline worker` in a thread; its patience lasts until the block ends. Yield where its exit code comes."""
    impatient, times, codes = threading.Event(), itertools.count(0, 1000), list[int]()
    clock = SimpleNamespace(monotonic=lambda: next(times) if impatient.is_set() else 0, sleep=impatient.wait)

    def work() -> None:
        result = CliRunner().invoke(main, ["worker", "--connect", address, "--key-file", str(key), "--hosts", "2"])
        codes.append(result.exit_code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agents_side, "time", clock)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield codes
        finally:
            impatient.set()
            thread.join()


@pytest.mark.long
def test_a_trainer_that_is_killed_leaves_nothing_on_other_machines(tmp_path: Path) -> None:
    address, key = free_address(), key_file(tmp_path)
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, address, str(key)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with trainer, exit_of_worker(address, key) as codes:
        assert trainer.stdout is not None
        hosts = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        trainer.kill()
        for host in hosts:
            assert select.select([host], [], [], 300)[0], "it still runs"
            os.close(host)
    assert codes == [1]


def test_a_trainer_that_falls_silent_before_it_says_how_long_it_may_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[float, bool]] = []
    monkeypatch.setattr(agents_side, "watch_peer", lambda _, after_s, *, busy: watched.append((after_s, busy)))
    here, there = socket.socketpair()
    with here, there:
        there.shutdown(socket.SHUT_RDWR)
        lost = agents_side.Agent(here, DIALLER, 1).serve()
    assert lost is not None
    lost_after_s = sl.Remote(1).lost_after_s
    assert watched == [(lost_after_s - agents_side.ENDING_S, True)]
    resent_s, exit_s = 0.2, 1.0
    assert watched[0][0] + agents_side.BEAT_S + resent_s + agents_side.REDIAL_S + exit_s <= lost_after_s


def test_after_a_loss_no_name_is_asked_for() -> None:
    """A server of names may not answer either; then an agent would stay."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        again = agents_side._where_connected(DIALLER, sock)
        assert again == DIALLER._replace(address=server.getsockname())
    with socket.socket() as unconnected:
        assert agents_side._where_connected(DIALLER, unconnected) == DIALLER


@pytest.mark.long
def test_an_agent_ends_well_some_time_after_its_trainer_has(tmp_path: Path) -> None:
    address, key = free_address(), key_file(tmp_path)
    with exit_of_worker(address, key) as codes:
        for _ in range(2):  # one agent serves several runs of a program
            with squares().open(backend=sl.Remote(2, listen=address, key_file=key)) as stream:
                assert len(list(stream)) == LENGTH
    assert codes == [0]


@pytest.mark.long
def test_an_agent_that_is_to_rejoin_serves_a_run_that_begins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []
    reached = agents_side._reached

    def noting(trainer: Introduction, patience_s: float) -> socket.socket:
        patience.append(patience_s)
        return reached(trainer, patience_s if len(patience) == 1 else 0.0)

    monkeypatch.setattr(agents_side, "_reached", noting)
    address, key = free_address(), key_file(tmp_path)
    options = ["--connect", address, "--key-file", str(key), "--hosts", "2", "--wait", "120", "--rejoin", "600"]
    with ThreadPoolExecutor(1) as pool:
        agent = pool.submit(CliRunner().invoke, main, ["worker", *options])
        with squares().open(backend=sl.Remote(2, listen=address, key_file=key)) as stream:
            assert len(list(stream)) == LENGTH
        assert agent.result().exit_code == 0
    assert patience == [120, 600]


def test_an_agent_that_dials_ends_at_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as process 1 of a container, which ignores it by default."""
    handled: list[object] = []

    def strike(_: float) -> None:
        handled.append(signal.getsignal(signal.SIGTERM))
        assert handled[0] is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(agents_side, "time", SimpleNamespace(monotonic=time.monotonic, sleep=strike))
    before = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(main, ["worker", "--connect", free_address(), "--key-file", str(key_file(tmp_path))])
    assert (result.exit_code, type(result.exception), len(handled)) == (1, SystemExit, 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_agent_says_once_why_it_dials_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    troubles, now = iter(["name not known"] * 3 + ["refused"] * 4), itertools.count(0.0, 0.5)

    def dial(connect_s: float) -> socket.socket:
        raise UnreachableError(next(troubles))

    monkeypatch.setattr(agents_side, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    with caplog.at_level("INFO", "streamline.agent"), pytest.raises(UnreachableError, match="refused"):
        agents_side._reached(SimpleNamespace(dial=dial), 6.0)  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [
        "name not known; dialling again, for up to 6 s",
        "refused; dialling again, for up to 2 s",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--connect", "127.0.0.1:1", "--wait", "0"], r"Error: 127\.0\.0\.1:1 can't be reached: .*refused"),
        (["--connect", "nowhere"], r'--connect is an address such as "0\.0\.0\.0:7077", got \'nowhere\''),
        (["--connect", "127.0.0.1:1", "--key-file", "/no/key"], r"the key can't be read: No such file .*/no/key"),
    ],
)
def test_the_command_says_what_is_wrong(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STREAMLINE_KEY", KEY)
    result = CliRunner().invoke(main, ["worker", *options])
    assert result.exit_code == 1
    assert re.search(words, result.output), result.output


@pytest.mark.long
def test_an_agent_with_another_key_is_told_so(remote: sl.Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    with squares().open(backend=remote) as stream:
        assert next(stream) == 0
        monkeypatch.setenv("STREAMLINE_KEY", "another key " * 4)
        more = [] if remote.tls is None else ["--tls", str(remote.tls)]
        result = CliRunner().invoke(main, ["worker", "--connect", remote.listen, *more])
    assert result.exit_code == 1
    assert "the other end has another key: give both the same --key-file or STREAMLINE_KEY" in result.output


@pytest.mark.long
def test_a_loader_keeps_its_hosts_between_epochs(remote: sl.Remote) -> None:
    pipe = sl.from_items(range(8)).shard(2).map(lambda item: (item, os.getpid())).merge()
    with pipe.loader(backend=remote) as loader:
        epochs = [list(loader) for _ in range(3)]
    assert [[item for item, _ in epoch] for epoch in epochs] == [list(range(8))] * 3
    assert len({pid for epoch in epochs for _, pid in epoch}) == 2


def test_a_pool_serves_several_streams_at_once(pool: Backend) -> None:
    with squares().open(backend=pool) as one, squares().open(backend=pool) as other:
        assert list(zip(one, other, strict=True)) == [(item * item, item * item) for item in range(LENGTH)]


def test_a_live_source_is_read_here_and_worked_on_there(pool: Backend) -> None:
    feed = iter(range(50))  # what was read once doesn't come again

    async def arriving() -> AsyncIterator[int]:
        for item in feed:
            yield item

    pipe = sl.from_stream(arriving).shard(2).map(lambda item: (item, os.getpid())).merge()
    with pipe.open(backend=pool) as stream:
        got = [next(stream) for _ in range(20)]
        snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert os.getpid() not in {pid for _, pid in got}
    with pipe.open(resume=snapshot) as stream:
        assert [item for item, _ in got] + [item for item, _ in stream] == list(range(50))


@pytest.mark.long
def test_a_call_that_kills_every_host_is_named(remote: sl.Remote) -> None:
    def deadly(item: int) -> int:
        if item == 7:
            os._exit(3)
        return item

    with (
        sl.from_items(range(20)).shard(2).map(deadly).merge().open(backend=remote) as stream,
        pytest.raises(sl.errors.WorkerDied, match="each time it had called deadly, on the same item"),
    ):
        list(stream)


def test_without_a_machine_the_error_says_who_came(tmp_path: Path) -> None:
    address, key = free_address(), key_file(tmp_path)
    remote = sl.Remote(1, listen=address, key_file=key, start_timeout_s=0.05)
    with (
        squares().open(backend=remote) as stream,
        pytest.raises(HostError, match=rf"no machine has run process 0 .* 0 attached.*--connect HOST:{address[10:]}"),
    ):
        list(stream)


@pytest.mark.long
def test_two_places_serve_two_of_three_hosts_until_one_more_comes(tmp_path: Path) -> None:
    with machines(tmp_path, hosts=2) as remote:
        more = sl.Remote(3, listen=remote.listen, key_file=remote.key_file)
        with squares().open(backend=more) as stream:
            assert next(stream) == 0
            with agent_process(remote.listen, tmp_path / "key", hosts=1):
                assert list(stream) == [item * item for item in range(1, LENGTH)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 0}, r"Remote\(hosts\) is at least 1"),
        ({"hosts": 2, "listen": "7077"}, r'Remote\(listen=\) is an address such as "0\.0\.0\.0:7077", got \'7077\''),
        ({"hosts": 2, "lost_after_s": 0.5}, r"Remote\(lost_after_s=\) is at least 2 seconds, got 0\.5"),
    ],
)
def test_options_are_checked_where_they_are_written(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sl.Remote(**options)


def test_a_key_is_needed_long_enough_and_only_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(key: Path | None) -> None:
        remote = sl.Remote(1, listen=free_address(), key_file=key)
        with squares().open(backend=remote):
            pytest.fail("it was opened")

    monkeypatch.delenv("STREAMLINE_KEY", raising=False)
    file = tmp_path / "key"
    with pytest.raises(HostError, match=r"can't be read: No such file"):
        opened(file)
    file.write_text(KEY)
    file.chmod(0o644)
    with pytest.raises(HostError, match=r"may be read by others: `chmod 600"):
        opened(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(HostError, match=r"has 5 bytes; at least 16"):
        opened(file)
    with pytest.raises(HostError, match=r"machines need a common key"):
        opened(None)


@pytest.mark.long
def test_a_plan_that_holds_much_is_sent_whole(tmp_path: Path, tls: Path | None) -> None:
    data = np.random.default_rng(0).integers(0, 255, 24 << 20, np.uint8)
    with (
        machines(tmp_path, lost_after_s=2.0, tls=tls) as remote,
        sl.from_items(data.reshape(24, -1)).shard(2).merge().open(backend=remote) as stream,
    ):
        for row, got in enumerate(stream):
            assert (got == data.reshape(24, -1)[row]).all()


def test_a_plan_is_read_once_for_all_agents_and_copied_for_none() -> None:
    plan = CarriedPlan(ship(bytes(1 << 20)))
    sent: list[Call] = []
    agents: list[Any] = [type("Taking", (), {"send": lambda _, message: sent.append(message)})() for _ in range(3)]
    for agent in agents * 2:
        plan.send(agent)
    assert len(sent) == 3
    assert len({id(message.arguments[1].raw().obj) for message in sent}) == 1
    here, there = socket.socketpair()
    near, far = ControlConnection(here), ControlConnection(there)
    with here, there:
        writing = threading.Thread(target=lambda: list(map(near.send, (sent[0], call(TrainerCalls.offered, 5)))))
        writing.start()
        assert bytes(far.receive().arguments[1]) == sent[0].arguments[1].raw()
        assert far.receive() == call(TrainerCalls.offered, 5)
        writing.join()


def test_half_a_message_ends_the_connection_at_both_ends() -> None:
    here, there = socket.socketpair()
    near, far = ControlConnection(here), ControlConnection(there)
    here.settimeout(0.01)
    more_than_a_socket_takes = bytes(8 << 20)
    near.send(call(AgentCalls.keep_payload, 1, more_than_a_socket_takes))  # while its other end reads nothing
    with here, there, pytest.raises(EOFError):
        far.receive()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_listens_for_itself(remote: sl.Remote) -> None:
    with squares().open(backend=remote) as stream:
        assert next(stream) == 0
        child = os.fork()
        if not child:
            try:
                squares().open(backend=remote).__enter__()  # the parent listens there
            except HostError as error:
                os._exit(0 if "in use" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(stream) == [item * item for item in range(1, LENGTH)]


@pytest.mark.long
def test_an_agent_that_attaches_while_a_stream_closes_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered, ended = Agents.offered, threading.Event()

    def late(self: Agents, agent: AttachedAgent) -> None:
        ended.wait()
        offered(self, agent)

    monkeypatch.setattr(Agents, "offered", late)
    others = {*threading.enumerate()}
    with machines(tmp_path) as remote:
        with squares().open(backend=remote):
            while not any(one.name.startswith("streamline agent on") for one in {*threading.enumerate()} - others):
                time.sleep(0.001)
        ended.set()  # `machines` waits for the agent's end


def test_a_host_that_can_not_be_started_there_is_named_and_counts_against_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HostProcess, *_: object, **__: object) -> None:
        raise HostError("no room for another process")

    async def too_late(_: float) -> NoReturn:
        raise TimeoutError

    monkeypatch.setattr(HostProcess, "__init__", fail)
    monkeypatch.setattr(trainers_side, "anyio", SimpleNamespace(fail_after=anyio.fail_after, sleep=too_late))
    with (
        machines(tmp_path) as remote,
        squares().open(backend=remote) as stream,
        pytest.raises(HostError, match=r"trouble: .*: no room for an"),
    ):
        list(stream)


@pytest.mark.long
def test_an_agent_without_room_for_the_plan_says_so_and_serves_the_next_run(tmp_path: Path) -> None:
    """It ended with a traceback, and the trainer only saw that it had gone."""
    address, key = free_address(), key_file(tmp_path)
    whole, room = [item * item for item in range(LENGTH)], resource.RLIMIT_FSIZE
    refused = pytest.raises(HostError, match=r"trouble: .*: a host has no link: .*File too large .*`ulimit -f`")
    with agent_process(address, key) as agent, sl.Remote(1, listen=address, key_file=key, start_timeout_s=5.0) as pool:
        while True:
            with suppress(HostError), squares().open(backend=pool) as stream:  # it may be late
                assert list(stream) == whole
                break
        before = resource.prlimit(agent.pid, room, (0, resource.RLIM_INFINITY))
        with squares().open(backend=pool) as stream, refused:
            list(stream)
        resource.prlimit(agent.pid, room, before)
        with squares().open(backend=pool) as stream:
            assert list(stream) == whole


@pytest.mark.long
@pytest.mark.parametrize("role", ["link", "node"])
def test_who_knows_the_key_but_no_ticket_is_hung_up_on(
    role: Any, remote: sl.Remote, tmp_path: Path, tls: Path | None
) -> None:
    where, secret, certificates = parse_address("", remote.listen), read_key(tmp_path / "key"), Certificates.of(tls)
    with squares().open(backend=remote) as stream:
        for ticket in ("", "0" * 32):
            hello = PeerHello(role=role, node="mad", pid=1, ticket=ticket)
            with Introduction(where, secret, hello, certificates).dial() as sock:
                assert sock.recv(1) == b""
        assert list(stream) == [item * item for item in range(LENGTH)]


def test_an_agent_leaves_whichever_of_its_threads_sigterm_interrupts() -> None:
    here, there = socket.socketpair()
    trainer, heard = ControlConnection(there), list[Any]()

    def strike() -> None:
        trainer.receive()  # its offer: it waits from now on
        while sys._current_frames()[threading.main_thread().ident or 0].f_code.co_name != "recv_fds":
            time.sleep(0.001)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        heard.extend(iter(trainer.receive, call(TrainerCalls.left, "SIGTERM")))  # heartbeats, until it leaves

    agent, thread = Agent(here, DIALLER, 1), threading.Thread(target=strike)
    with here, there, agents_side._on_sigterm(agent):
        thread.start()
        assert agent.serve() == "this machine was asked to leave: SIGTERM"
        thread.join()
    assert {message.method for message in heard} <= {"alive"}


@pytest.mark.long
def test_an_agent_that_talks_nonsense_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address, key = free_address(), key_file(tmp_path)
    remote = sl.Remote(1, listen=address, key_file=key)
    with squares().open(backend=remote) as stream:
        where, secret = parse_address("", address), read_key(key)
        with Introduction(where, secret, PeerHello(role="control", node="mad", pid=1)).dial() as sock:
            ControlConnection(sock).send(call(TrainerCalls.offered, 1))
            ControlConnection(sock).send("nonsense")
            while sock.recv(4096):  # until it is hung up on
                pass
        with agent_process(address, key):
            assert list(stream) == [item * item for item in range(LENGTH)]
    assert "can't be understood" in caplog.text


SECRET = b"what-nobody-else-may-read"


@pytest.mark.long
@pytest.mark.parametrize("tls", ["plain", "tls"], indirect=True)
def test_one_who_listens_in_between_reads_nothing_of_items_or_code(tmp_path: Path, tls: Path | None) -> None:
    passed = bytearray()

    def speak_of_it(item: int) -> bytes:
        if not item:
            print(SECRET.decode())
        return SECRET * (item + 1)

    with (
        machines(tmp_path, tls=tls, tap=passed.extend) as remote,
        sl.from_items(range(200)).shard(2).map(speak_of_it).merge().open(backend=remote) as stream,
    ):
        total = sum(map(len, stream))
    assert len(passed) > total == len(SECRET) * 200 * 201 // 2
    assert [secret in passed for secret in (SECRET, b"speak_of_it")] == [tls is None] * 2


@pytest.mark.parametrize("here", [False, True], ids=["trainer plain", "trainer tls"])
def test_an_agent_that_encrypts_where_its_trainer_does_not_is_told_so(tmp_path: Path, here: bool) -> None:
    """And the other way round; at once, though an agent waits for a trainer that isn't there yet."""
    folder, key = tls_folder(tmp_path / "tls"), key_file(tmp_path)
    address = free_address()
    options = ["--connect", address, "--key-file", str(key), *([] if here else ["--tls", str(folder)])]
    with squares().open(backend=sl.Remote(1, listen=address, key_file=key, tls=folder if here else None)):
        result = CliRunner().invoke(main, ["worker", *options])
    assert result.exit_code == 1
    assert re.search(r"encrypt.*: give both tls= \(--tls\), or neither", result.output)


@pytest.mark.parametrize("struck", ["the wait for its process", "the end of the listener"])
def test_a_close_that_ctrl_c_cuts_off_is_done_by_the_next_one(
    struck: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    address = free_address()
    host = sl.Remote(1, listen=address, key_file=key_file(tmp_path)).host(0)
    host.start()
    if struck == "the end of the listener":
        monkeypatch.setattr(Listener, "close", strike)
    else:
        process = SimpleNamespace(gone=SimpleNamespace(wait=strike), end=lambda grace_s: None)
        monkeypatch.setattr(RemoteHost, "_running", process)
    with pytest.raises(KeyboardInterrupt):
        host.close()
    monkeypatch.undo()
    host.close()
    Listener(parse_address("", address), b"", print).close()  # the port is free


def test_a_trainer_without_a_certificate_does_not_open(tmp_path: Path) -> None:
    remote = sl.Remote(1, listen=free_address(), key_file=key_file(tmp_path), tls=tmp_path / "none")
    with pytest.raises(HostError, match=r"tls\.crt and tls\.key in .*none can't be used: No such file"):
        squares().open(backend=remote).__enter__()
