"""Makes `bench` importable: it is no part of the installed package."""

import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="session", autouse=True)
def _tracker() -> None:
    """Start what multiprocessing keeps for the life of the process: a helper of its own, and a pipe to it."""
    resource_tracker.ensure_running()
