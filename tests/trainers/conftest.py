"""What torch and multiprocessing keep for the life of the process begins before a test is looked at for leaks."""

from __future__ import annotations

from multiprocessing import resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def _warm_up_processes(_warm_up: None) -> None:
    resource_tracker.ensure_running()
