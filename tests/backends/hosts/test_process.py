"""Host processes: what they see, what they die of, and that nothing is left of them."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.plan_shipping import Shipped
from streamline.errors import HostError
from tests.laws.profile import long_but

ROOT = Path(__file__).parents[3]

NewEcho = Callable[..., Any]


def test_a_child_is_what_it_ought_to_be(new_echo: NewEcho, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    echo = new_echo(2, env={"MKL_NUM_THREADS": "3"})

    def look() -> Any:
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        names = (
            "CUDA_VISIBLE_DEVICES",
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "MALLOC_TRIM_THRESHOLD_",
        )
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return os.getpid(), Path.cwd(), sys.path, [os.environ[name] for name in names], ignored, set(masked)

    pid, directory, path, seen, ignored, masked = echo.call(look)
    assert (pid, directory, path) == (echo.host.pid, Path.cwd(), sys.path)
    assert seen == ["", "1", "3", "1", str(256 << 20)], "without the last one, freed memory is faulted in again"
    assert ignored
    assert not masked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert echo.host.exit is None
    assert 10e6 < echo.host.resident_bytes() < 500e6
    assert "in main" in echo.host.stacks()


def test_the_stacks_of_a_child_that_holds_the_lock(new_echo: NewEcho, shipped: Shipped) -> None:
    echo = new_echo()

    def stick() -> None:
        import re

        print("stuck", flush=True)
        re.match("(a+)+$", "a" * 60 + "b")  # takes for ever, and keeps the interpreter's lock

    echo.send(stick)
    wait_for(lambda: "in stick" in echo.host.stacks())
    echo.host.kill()
    assert echo.host.wait(200)
    assert echo.host.exit == "signal 9 (SIGKILL)"
    assert echo.host.stacks() == ""
    assert echo.sock.recv(1) == b""
    with echo.host.link(shipped) as late:
        assert late.recv(1) == b""  # a dead process may be handed a link: it is at its end


def test_a_child_that_exits_while_it_is_asked_for_its_stacks_has_none(
    new_echo: NewEcho, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed_meanwhile(begin: int) -> str:
        raise ValueError("I/O operation on closed file")

    echo = new_echo()
    with monkeypatch.context() as patch:
        patch.setattr(echo.host._child, "read_stacks", closed_meanwhile)
        assert echo.host.stacks() == ""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _exit_3() -> None:
    os._exit(3)


def _segfault() -> None:
    vars(faulthandler)["_sigsegv"]()


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize(("die", "end"), [(_exit_3, "exit code 3"), (_segfault, "signal 11 (SIGSEGV)")])
def test_what_it_said_before_a_crash_arrives(
    new_echo: NewEcho, capsys: pytest.CaptureFixture[str], die: Callable[[], None], end: str
) -> None:
    echo = new_echo(5)
    called: list[str] = []
    echo.host.on_exit(lambda: called.append("gone"))

    def talk() -> None:
        import sys

        for number in range(1000):
            print("line", number)
        print("no newline", end="", flush=True, file=sys.stderr)
        die()

    echo.send(talk)
    assert echo.host.wait(200)
    echo.host.close()
    out, err = capsys.readouterr()
    assert out == "".join(f"[process 5] line {number}\n" for number in range(1000))
    assert err == "[process 5] no newline\n"
    assert echo.host.exit == end
    assert ("Segmentation fault" in echo.host.crash and "in talk" in echo.host.crash) == (die is _segfault)
    assert called == ["gone"]


def test_closing_lets_what_runs_end_and_kills_what_does_not(new_echo: NewEcho) -> None:
    echoes = [new_echo(number) for number in range(2)]
    assert [echo.call(int) for echo in echoes] == [0, 0]

    def stay() -> None:
        import threading

        threading.Thread(target=time.sleep, args=(60,)).start()  # not a daemon: it would keep an interpreter

    echoes[0].call(stay)
    echoes[0].sock.close()
    for echo in echoes:  # the second one's run goes on
        echo.host.leave()
    echoes[0].host.close(20)
    echoes[1].host.close(0.1)
    assert [echo.host.exit for echo in echoes] == ["exit code 0", "signal 9 (SIGKILL)"]
    for echo in echoes:
        echo.host.close()


def test_a_host_that_is_garbage_collected_leaks_nothing(echo_importable: None) -> None:
    host = HostProcess(0, entry_point="echo_host:serve_socket")
    pid = host.pid
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del host
        gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # neither it nor a zombie


def test_processes_that_come_and_go_leave_no_descriptor(echo_importable: None, shipped: Shipped) -> None:
    def open_close(kill: bool) -> None:
        host = HostProcess(0, entry_point="echo_host:serve_socket")
        host.link(shipped).close()
        if kill:
            host.kill()
        host.close(0)

    open_close(False)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    for round_ in range(6):
        open_close(kill=round_ % 2 == 0)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_a_fork_of_the_parent_neither_keeps_nor_kills_its_children(new_echo: NewEcho) -> None:
    echo = new_echo()
    assert echo.call(int) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "this process is multi-threaded": that is the point
        pid = os.fork()
    if not pid:
        code = 1
        try:
            echo.host._child.abandon()
            code = 0 if echo.host._child.stdio.sock.fileno() < 0 else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert echo.call(int) == 0


# Errors at start ------------------------------------------------------------------------------------------------------


def test_no_interpreter_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(
        HostError, match=r"process 4 can't be started: there is no Python at sys.executable = '/nowhere"
    ):
        HostProcess(4)


def test_no_descriptors_is_an_error_that_says_so() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest
    os.close(free)
    said = set()
    for room in (2, 8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + room, hard))
        try:
            HostProcess(1).close(0)
        except HostError as error:
            said.add(str(error).partition(" (")[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said == {"process 1 can't be started: Too many open files"}


def test_a_child_that_can_not_begin_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    host = HostProcess(3, entry_point="no_such_module:attend")
    assert host.wait(200)
    assert host.exit == "exit code 1"
    host.close()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


# The parent's death ---------------------------------------------------------------------------------------------------

PARENT = """
import os, re, signal, sys, time
sys.path.insert(0, {here!r})
from echo_client import Echo
from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.plan_shipping import ship

def in_python():
    print("stuck", flush=True)
    while True: pass

def in_c():
    print("stuck", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")  # keeps the interpreter's lock

def stopped():
    print("stuck", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

hosts = [HostProcess(number, entry_point="echo_host:serve_socket") for number in range(3)]
for host, stick in zip(hosts, (in_python, in_c, stopped)):
    Echo(host, ship(None)).send(stick)
print(*(host.pid for host in hosts), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread watches, which can't end what is stuck in C")
def test_children_that_are_stuck_are_gone_when_the_parent_is_killed() -> None:
    program = PARENT.format(here=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(4)]
        (pids,) = (list(map(int, line.split())) for line in lines if line[0].isdigit())
        assert sum("stuck" in line for line in lines) == 3
        parent.kill()
        parent.wait()
        wait_for(lambda: not any(alive(pid) for pid in pids))  # promised: 2 s


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


CTRL_C = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
from echo_client import Echo
from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.plan_shipping import ship

signal.signal(signal.SIGINT, lambda *_: None)
host = HostProcess(0, entry_point="echo_host:serve_socket")
for _ in range(100):
    os.killpg(0, signal.SIGINT)
    time.sleep(0.003)
print(Echo(host, ship(None)).call(int))
host.close()
"""


@pytest.mark.long
def test_ctrl_c_never_reaches_a_child() -> None:
    program = CTRL_C.format(here=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, start_new_session=True, timeout=200
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


# Ways to run ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import streamline as sl
print("main runs")

class Mine:
    def __init__(self, n):
        self.n = n

def make(n):
    print("made", n)
    return Mine(n)

with sl.from_items([1, 2]).map(make).map(lambda mine: mine).open(backend=sl.Processes(1)) as stream:
    made = list(stream)

print([(isinstance(mine, Mine), mine.n) for mine in made])
"""

WAYS = {
    "path": ["-X", "dev", "{path}"],
    "module": ["-X", "dev", "-m", "program"],
    "stdin": ["-X", "dev", "-i", "-"],
    "console": [
        "-X",
        "dev",
        "-c",
        "import code, pathlib; code.InteractiveConsole().runcode(pathlib.Path('program.py').read_text())",
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("way", long_but(["path"], WAYS))
def test_the_main_module_needs_no_guard(way: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    arguments = [argument.format(path=path) for argument in WAYS[way]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    text = path.read_text() if way == "stdin" else None
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, env=env, input=text, timeout=200
    )
    if way != "stdin":  # an interactive interpreter writes its prompts there
        assert done.stderr == ""
    lines = ["main runs", "[process 0] made 1", "[process 0] made 2", "[(True, 1), (True, 2)]"]
    assert done.stdout.splitlines() == lines, done.stderr
