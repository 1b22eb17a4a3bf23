"""Machines in network namespaces of this one, behind a switch: their links can be cut, and all that runs there frozen.

A namespace has an interface and an address of its own, so what a cut link doesn't carry is lost as it is in a network:
no end is told. That takes root, and Linux.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from tests.kit import LONGEST_S
from tests.servers.absent import absent

__all__ = ["Cut", "Machine", "machines_of_a_network"]

Cut = Literal["down", "nomaster"]
"""How a link is cut: its interface is set down, or it is taken from the switch, which no interface shows."""

_numbers = itertools.count()


class Machine:
    """One namespace, and what is run there."""

    def __init__(self, switch: str, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._switch = switch
        self._port = f"p{address.rpartition('.')[2]}"
        _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _ip("-n", name, "link", "set", interface, "up")
        self.join()

    def run(self, *command: str | os.PathLike[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program there."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)

    def cut(self, how: Cut) -> None:
        """Lose all that it sends and that is sent to it, until it joins again."""
        _ip("-n", self._switch, "link", "set", self._port, how)

    def join(self) -> None:
        """Attach it to the switch. Idempotent."""
        _ip("-n", self._switch, "link", "set", self._port, "master", "br0", "up")

    @property
    def pids(self) -> list[int]:
        """What runs there; asked for often, so without a program that tells it."""
        of_this, found = Path("/run/netns", self.name).stat(), []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):  # noqa: PTH208
            with suppress(OSError):  # it has just ended
                if os.path.samestat(Path(f"/proc/{pid}/ns/net").stat(), of_this):
                    found.append(pid)
        return found

    @property
    def hosts(self) -> list[int]:
        """The host processes there."""
        return [pid for pid in self.pids if b"streamline process" in _command_line(pid)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all that runs there."""
        for pid in self.pids:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

    def wait_until_empty(self) -> None:
        """Wait until nothing runs there any more."""
        deadline = time.monotonic() + LONGEST_S
        while pids := self.pids:
            assert time.monotonic() < deadline, f"{self.name} still runs {list(map(_command_line, pids))}"
            time.sleep(0.01)

    def remove(self) -> None:
        """Kill all that runs there, and delete it."""
        self.signal(signal.SIGKILL)
        _ip("netns", "del", self.name)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@contextmanager
def machines_of_a_network(names: Sequence[str]) -> Iterator[list[Machine]]:
    """Make a switch, and machines at it; at the end, whatever runs there is killed."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        absent("network namespaces need Linux, root, and `ip`: apt-get install iproute2")
    of_this = f"sl{os.getpid()}-{next(_numbers)}"
    switch, made = f"{of_this}-switch", list[Machine]()
    added = subprocess.run(["ip", "netns", "add", switch], capture_output=True, text=True)
    if added.returncode:  # root of a container, say
        absent(f"network namespaces can't be made here: {added.stderr}")
    try:
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            made.append(Machine(switch, f"{of_this}-{name}", f"10.77.0.{number}"))
        yield made
    finally:
        for machine in made:
            machine.remove()
        _ip("netns", "del", switch)
