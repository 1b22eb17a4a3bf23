"""Ranks of one machine that share hosts on others: one of them listens for agents, and passes links on."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.backends.hosts.job_kit import StartJob, end, rest_of
from tests.backends.hosts.shared_rank import LENGTH
from tests.backends.remote.machines import agent_process, free_address, key_file

ALL = list(range(LENGTH))

pytestmark = pytest.mark.long


def remote(folder: Path) -> dict[str, Any]:
    return {
        "kind": "Remote",
        "n": 2,
        "listen": free_address(),
        "key_file": os.fspath(key_file(folder)),
        "shared": "node",
        "start_timeout_s": 200,
        "env": {"READS": os.fspath(folder / "reads")},
    }


@pytest.mark.parametrize("pipe", ["items", "arrays"])
def test_hosts_elsewhere_are_shared_and_read_once(job: StartJob, tmp_path: Path, pipe: str) -> None:
    backend = remote(tmp_path)
    with job(tmp_path) as made, agent_process(backend["listen"], Path(backend["key_file"])):
        ranks = made.opened(2, pipe, backend=backend)
        expected = ALL if pipe == "items" else [[number, number] for number in ALL]
        assert rest_of(*ranks) == [expected] * 2
        assert made.reads == Counter(ALL)
        assert ranks[0].hosts() == ranks[1].hosts()
        end(made, *ranks)


def test_when_the_owner_dies_another_rank_listens_for_the_agents(job: StartJob, tmp_path: Path) -> None:
    backend = remote(tmp_path)
    address, key = backend["listen"], Path(backend["key_file"])
    with job(tmp_path) as made, agent_process(address, key):
        owner, one = made.opened(2, backend=backend)
        owner.send_signal(signal.SIGKILL)
        with agent_process(address, key):  # the first one may have given up by then
            assert rest_of(one) == [ALL]
        end(made, one)
