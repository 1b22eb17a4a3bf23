"""Machines that come and go while a stream runs, and are told by a signal that they have to."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest

import streamline as sl
from streamline.backends.hosts.placement import Placement
from streamline.errors import HostError, PlanError
from tests.backends.remote.machines import agent_process, free_address, key_file
from tests.laws.profile import FACTOR

LENGTH = 20_000


class Site:
    """A port to dial, and the agents that have."""

    def __init__(self, folder: Path, agents: ExitStack) -> None:
        self.address = free_address()
        self.key = key_file(folder)
        self._agents = agents

    def remote(self, hosts: int | tuple[int, int]) -> sl.Remote:
        return sl.Remote(hosts, listen=self.address, key_file=self.key)

    def agent(self) -> subprocess.Popen[bytes]:
        return self._agents.enter_context(agent_process(self.address, self.key, hosts=1))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as agents:
        yield Site(tmp_path, agents)


def pipeline(length: int = LENGTH) -> sl.Pipeline[tuple[int, int]]:
    return sl.from_items(range(length)).shard(4).shuffle(window=8).map(lambda item: (item, os.getpid())).merge()


def in_order(got: list[tuple[int, int]], length: int = LENGTH) -> bool:
    return [item for item, _ in got] == [item for item, _ in pipeline(length)]


def endless() -> sl.Pipeline[tuple[int, int]]:
    """So long that whoever waits for another process to give an item gets one."""
    return pipeline(10**9)


@pytest.mark.long
def test_a_machine_that_comes_gets_work_and_one_that_is_told_to_leave_loses_it(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    first = site.agent()
    got: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "streamline.hosts"), endless().open(backend=site.remote((1, 3))) as stream:
        got.append(next(stream))
        site.agent()
        while got[-1][1] == got[0][1]:
            got.append(next(stream))
        stats = stream.stats()
        there = [host for host in stats.hosts if host.alive]
        assert [host.node for host in there] == [os.uname().nodename] * 2
        assert f"on {os.uname().nodename}, pid " in str(stats)
        assert "(1 more hosts have not come yet)" in str(stats)
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 1
        alone = 0
        while alone < 8_000:  # the first one's last items may be on their way
            got.append(next(stream))
            alone = alone + 1 if got[-1][1] == got[-2][1] else 0
        snapshot = stream.snapshot()
    assert "is lost (it was asked to leave: SIGTERM), and 1 host with it" in caplog.text
    with endless().open(resume=snapshot) as stream:
        got += [next(stream) for _ in range(100)]
    with endless().open() as stream:
        assert all(item == next(stream)[0] for item, _ in got)


@pytest.mark.long
def test_fewer_machines_than_the_fewest_are_an_error_that_counts_those_that_came(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_ready = Placement.host_ready

    def is_the_last(self: Placement, home: Any) -> None:
        self._elasticity = self._elasticity._replace(timeout_s=0.0)
        host_ready(self, home)

    monkeypatch.setattr(Placement, "host_ready", is_the_last)
    site.agent()
    words = r"only 1 of the 2 hosts that Remote\(\(2, 4\)\) needs at least have come within 300 s .* Agents: 1 attached"
    with pipeline().open(backend=site.remote((2, 4))) as stream, pytest.raises(HostError, match=words):
        list(stream)


@pytest.mark.long
def test_work_begins_with_the_fewest_and_waits_for_another_when_one_of_them_dies(site: Site) -> None:
    agents = [site.agent(), site.agent()]
    got = []
    with pipeline().open(backend=site.remote((2, 8))) as stream:
        for item in stream:
            got.append(item)
            if len(got) in (4_000, 10_000):
                agents.pop(0).kill()
                agents.append(site.agent())
    assert in_order(got)


@pytest.mark.long
def test_a_pool_and_a_loader_use_machines_that_come_and_go(site: Site) -> None:
    first = site.agent()
    with site.remote((1, 4)) as pool, pipeline().open(backend=pool) as one, pipeline().open(backend=pool) as other:
        site.agent()
        got, others = [], []
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            got.append(mine)
            others.append(theirs)
            if number == 9_000:
                first.terminate()
        assert in_order(got)
        assert in_order(others)
    assert first.wait() == 1
    with pipeline(5_000).loader(backend=site.remote((1, 4))) as loader:
        for _ in range(2):
            got = []
            for item in loader:
                got.append(item)
                if len(got) == 100:
                    site.agent()
            assert [number for number, _ in sorted(got)] == list(range(5_000))


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ((0, 3), r"Remote\(hosts\) is at least 1, got 0"),
        ((5, 2), r"Remote\(hosts\) is \(fewest, most\), got \(5, 2\): write \(2, 5\)"),
        (3.0, r"Remote\(hosts\) is an integer, or two in a tuple, \(fewest, most\), got float 3.0"),
        ("8", r"Remote\(hosts\) is an integer, or two in a tuple, \(fewest, most\), got str '8'"),
        ([2, 4], r"Remote\(hosts\) is an integer, or two in a tuple, \(fewest, most\), got list \[2, 4\]"),
        ((1, 2, 3), r"Remote\(hosts\) is an integer, or two in a tuple, \(fewest, most\), got tuple \(1, 2, 3\)"),
        ((1, 2.5), r"Remote\(hosts\) is an integer, got float 2.5"),
        (None, r"Remote\(hosts\) is an integer, got NoneType None"),
    ],
)
def test_a_range_of_hosts_is_checked_where_it_is_written(hosts: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sl.Remote(hosts)


@pytest.mark.long
@pytest.mark.parametrize(("merge", "seed"), [("strict", 0), ("best_effort", 1)])
def test_machines_that_come_and_go_at_random_change_no_item(
    site: Site, merge: Literal["strict", "best_effort"], seed: int
) -> None:
    """Killed, or told to leave; with snapshots that go to this process and back."""
    dice = random.Random(seed)
    length = 2_000 if FACTOR == 1 else 10_000
    pipe = sl.from_items(range(length)).shard(5).shuffle(window=16).map(lambda item: item).merge(merge)
    agents, snapshot = [site.agent()], None
    got: list[int] = []
    while True:
        here = dice.random() < 0.3
        with pipe.open(resume=snapshot, backend=sl.Inline() if here else site.remote((1, 3))) as stream:
            stop = len(got) + dice.randrange(300, 2_000)
            while len(got) < stop and (item := next(stream, None)) is not None:
                got.append(item)
                if dice.random() < 0.003:
                    agents.append(site.agent())
                    if len(agents) > 3:
                        agents.pop(dice.randrange(2)).send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM]))
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        if len(got) < stop:
            break
    if merge == "strict":
        assert got == list(pipe)
    else:
        assert sorted(got) == list(range(length))
