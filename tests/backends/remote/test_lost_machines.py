"""Hosts, agents, machines, links and trainers are lost or frozen at random, and come back: no item is lost or twice.

`STREAMLINE_EXAMPLES=50 pytest -s tests/backends/remote/test_lost_machines.py` strikes some hundred times, and prints
the figures.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import streamline as sl
from tests.backends.remote import recording_trainer
from tests.backends.remote.machines import key_file
from tests.backends.remote.network import Cut, Machine, machines_of_a_network
from tests.backends.remote.recording_trainer import SHARDS, Kind, pipeline
from tests.kit import LONGEST_S
from tests.laws.profile import FACTOR

NODES = 3
PORT = 7077

pytestmark = pytest.mark.long
LOST_AFTER_S = 2.0
"""Where machines are lost at random; the least that is possible."""

STRIKES = min(20, int(2 * FACTOR))
"""In one run."""

RUNS = max(1, int(FACTOR / 12))
"""Of each kind, with other seeds."""


class Job:
    """A trainer on one machine, and an agent on each of the others, started again when they have exited."""

    def __init__(
        self, folder: Path, machines: list[Machine], kind: Kind, dice: random.Random, lost_after_s: float
    ) -> None:
        self.machine, *self.nodes = machines
        self.folder = folder
        self.kind = kind
        self.hosts = dice.choice([(2, 2), (1, 4), (3, 3)])
        self.lost_after_s = lost_after_s
        self._key = key_file(folder)
        self._dice = dice
        self._address = f"{self.machine.address}:{PORT}"
        self._log = (folder / "log").open("wb")
        self.backend = "Remote"
        self.trainer = self._trainer()
        self.agents = [self.agent(node) for node in self.nodes]

    def _trainer(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, recording_trainer.__file__, str(self.folder), self.kind, self.backend]
        options = [self._address, *map(str, (*self.hosts, self.lost_after_s))] if self.backend == "Remote" else []
        return self.machine.run(*command, *options, stderr=self._log)

    def agent(self, node: Machine) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "streamline",
            "worker",
            "--connect",
            self._address,
            "--key-file",
            str(self._key),
        ]
        return node.run(*command, "--hosts", "2", stderr=self._log)

    def restart(self) -> None:
        """Start again what has exited; a trainer that ran on the nodes, now and then on its own machine."""
        if (code := self.trainer.poll()) is not None:
            assert code == -signal.SIGKILL, f"the trainer exits with {code}\n{self.log}"
            others = ["Inline", "Processes"] if self.backend == "Remote" else []
            self.backend = self._dice.choice(["Remote", *others])
            self.trainer = self._trainer()
        for number, agent in enumerate(self.agents):
            if agent.poll() is not None:
                self.agents[number] = self.agent(self.nodes[number])

    @property
    def given(self) -> list[int]:
        """The items that the trainer has written."""
        data = (self.folder / "items").read_bytes()
        given: list[int] = np.frombuffer(data[: len(data) // 8 * 8], recording_trainer.ITEM).tolist()
        return given

    @property
    def log(self) -> str:
        """What trainer and agents have logged, the end of it."""
        return (self.folder / "log").read_text()[-8000:]

    def wait_for_more(self) -> float:
        """Return the seconds until the trainer has written a further item."""
        path, begun = self.folder / "items", time.monotonic()
        before = path.stat().st_size if path.exists() else 0
        while (took_s := time.monotonic() - begun) < LONGEST_S:
            self.restart()
            size = path.stat().st_size if path.exists() else 0
            if size > before:
                return took_s
            before = size  # a trainer that begins anew cuts off what its snapshot doesn't know
            pause(0.01)
        raise AssertionError(f"nothing has come for {took_s:.0f} s\n{self.log}")

    def finish(self) -> list[int]:
        """Let the trainer end; return the items."""
        (self.folder / "stop").touch()
        assert self.trainer.wait(LONGEST_S) == 0, self.log
        return self.given

    def close(self) -> None:
        """Kill trainer and agents; their hosts end with them."""
        for process in (self.trainer, *self.agents):
            process.kill()
            process.wait()
        self._log.close()


class Strikes:
    """What happens to a job: strikes of random kinds, sometimes one before the last is over.

    Attributes:
      struck: how often, by kind.
      last: the kinds of the last strike.
    """

    def __init__(self, job: Job, dice: random.Random) -> None:
        self.struck: Counter[str] = Counter()
        self.last: list[str] = []
        self._job = job
        self._dice = dice
        self._quick: dict[str, Callable[[], object]] = {
            "host killed": self._kill_host,
            "agent killed": lambda: self._agent().kill(),
            "agent told to leave": lambda: self._agent().terminate(),
        }
        if job.kind != "live":  # what was read of it is gone
            self._quick["trainer killed"] = self._kill_trainer
        self._slow: dict[str, Callable[[], object]] = {
            "node cut off": lambda: self._cut(self._node()),
            "trainer cut off": lambda: self._cut(job.machine),
            "node frozen": lambda: self._freeze(self._node()),
            "trainer frozen": lambda: self._freeze(job.machine),
            "agent frozen": self._freeze_agent,
        }

    def strike(self) -> None:
        """Strike once, or twice at once; what runs on no node can only be killed."""
        self.last = []
        on_nodes = self._job.backend == "Remote"
        self._one_of({**self._quick, **self._slow} if on_nodes else {"trainer killed": self._kill_trainer})

    def _one_of(self, kinds: dict[str, Callable[[], object]]) -> None:
        kind = self._dice.choice(sorted(kinds, key=lambda kind: (self.struck[kind], self._dice.random()))[:3])
        self.struck[kind] += 1
        self.last.append(kind)
        kinds[kind]()

    def _node(self) -> Machine:
        return self._dice.choice(self._job.nodes)

    def _agent(self) -> subprocess.Popen[bytes]:
        return self._dice.choice(self._job.agents)

    def _kill_host(self) -> None:
        hosts = [pid for node in self._job.nodes for pid in node.hosts]
        if hosts:
            os.kill(self._dice.choice(hosts), signal.SIGKILL)

    def _kill_trainer(self) -> None:
        self._job.trainer.kill()
        self._job.trainer.wait()

    def _cut(self, machine: Machine) -> None:
        machine.cut(self._dice.choice(get_args(Cut)))
        self._for_some_time()
        machine.join()

    def _freeze(self, machine: Machine) -> None:
        machine.signal(signal.SIGSTOP)
        self._for_some_time()
        machine.signal(signal.SIGCONT)

    def _freeze_agent(self) -> None:
        agent = self._agent()
        agent.send_signal(signal.SIGSTOP)
        self._for_some_time()
        agent.send_signal(signal.SIGCONT)

    def _for_some_time(self) -> None:
        """Let a strike last, mostly until a machine counts as lost; another one may come meanwhile."""
        lasts_s = self._dice.choice([0.3, 1.2, 1.6, 2.0]) * LOST_AFTER_S
        first_s = self._dice.random() * lasts_s
        pause(first_s)
        if self._dice.random() < 0.3:
            self._one_of(self._quick)
        pause(lasts_s - first_s)


def pause(seconds: float) -> None:
    """Let time pass: strikes come at random moments."""
    threading.Event().wait(seconds)


@contextmanager
def job(folder: Path, kind: Kind, dice: random.Random, lost_after_s: float = LOST_AFTER_S) -> Iterator[Job]:
    with machines_of_a_network(["trainer", *(f"node{number}" for number in range(NODES))]) as machines:
        running = Job(folder, machines, kind, dice, lost_after_s)
        try:
            yield running
        finally:
            for machine in machines:
                machine.signal(signal.SIGCONT)
            running.close()
            for machine in machines:
                machine.wait_until_empty()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.parametrize("kind", get_args(Kind))
def test_machines_that_are_lost_in_any_way_change_nothing(kind: Kind, seed: int, tmp_path: Path) -> None:
    dice = random.Random(f"{kind} {seed}")
    with job(tmp_path, kind, dice) as running:
        running.wait_for_more()
        strikes, slowest = Strikes(running, dice), (0.0, "")
        for _ in range(STRIKES):
            pause(dice.random())
            strikes.strike()
            slowest = max(slowest, (running.wait_for_more(), " and ".join(strikes.last)))
        got = running.finish()
    print(
        f"{kind}, {running.hosts} hosts, {len(got)} items; {strikes.struck.total()} strikes: {dict(strikes.struck)}; "
        f"the next item after at most {slowest[0]:.2f} s ({slowest[1]})"
    )
    if kind == "live":
        assert got == list(range(len(got)))
    elif kind == "strict":
        assert got == pipeline(kind, lambda index: index).first(len(got))
    else:
        assert len(set(got)) == len(got)
        for shard in range(SHARDS):
            mine = [item for item in got if item % SHARDS == shard]
            assert mine == list(itertools.islice(itertools.count(shard, SHARDS), len(mine)))


@pytest.mark.parametrize("how", ["its process is killed", "its machine is silent"])
def test_nothing_is_left_lost_after_s_after_the_trainers_death(how: str, tmp_path: Path) -> None:
    """At the default, as docs/cluster.md promises; a cut that lasts less loses nothing.

    Half as long again is granted to processes that exit on a machine that does much else; `test_remote` adds up what an
    agent waits for.
    """
    lost_after_s = sl.Remote(1).lost_after_s
    with job(tmp_path, "strict", random.Random(how), lost_after_s) as running:
        running.wait_for_more()
        before = [node.pids for node in running.nodes]
        assert all(before)
        if "silent" in how:
            running.machine.cut("nomaster")
            pause(0.2 * lost_after_s)
            running.machine.join()
            running.wait_for_more()
            assert [node.pids for node in running.nodes] == before
            running.machine.cut("nomaster")  # nothing says that it ends
        died = time.monotonic()
        running.trainer.kill()
        hosts_s = agents_s = 0.0
        while any(node.pids for node in running.nodes) and agents_s < 1.5 * lost_after_s:
            agents_s = time.monotonic() - died
            hosts_s = agents_s if any(node.hosts for node in running.nodes) else hosts_s
            pause(0.05)
        print(f"{how}: no host after {hosts_s:.1f} s, no agent after {agents_s:.1f} s")
        assert [node.pids for node in running.nodes] == [[]] * NODES
        assert [agent.wait() for agent in running.agents] == [1] * NODES
