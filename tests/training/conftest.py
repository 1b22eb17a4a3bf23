"""Makes the kit of these tests importable, and lets threads end however busy the machine is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # `tests` is installed nowhere

import streamline.backends.threads
import streamline.runtime.loop_thread
import streamline.training.passes
import streamline.training.replica_dispatch
from tests.kit import LONGEST_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no close return before its threads have ended, because the machine does much else."""
    for module in (
        streamline.backends.threads,
        streamline.runtime.loop_thread,
        streamline.training.passes,
        streamline.training.replica_dispatch,
    ):
        monkeypatch.setattr(module, "EXIT_S", LONGEST_S)
