"""Jobs of several ranks, for the tests of hosts and of other machines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.backends.hosts.job_kit import RankForks, StartJob, running


@pytest.fixture(scope="session")
def rank_forks() -> Iterator[RankForks]:
    forks = RankForks()
    yield forks
    forks.close()


@pytest.fixture
def job(rank_forks: RankForks) -> StartJob:
    return partial(running, rank_forks)
