"""Errors, over hosts: who decides, what is counted, and what is said of where it happened."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.error_policy import Decision
from streamline.errors import TooManyErrors
from tests.copying_backend import Copying


@pytest.fixture
def backend(hosts: Backend) -> Backend:
    """Each kind of host in turn; processes that are up already."""
    return hosts


def invert(item: int) -> int:
    return 60 // item


PIPE = sl.from_items([1, 2, 0, 3, 0, 4] * 10).shard(3).map(invert)


@pytest.mark.one_in(2, 1)
def test_a_handler_runs_here_one_call_at_a_time(backend: Backend) -> None:
    """It appends to a list of this process, and needs no lock for what it reads and writes."""
    seen: list[sl.Failure] = []
    inside = threading.Lock()
    pids = set()

    def handler(failure: sl.Failure) -> Decision:
        assert inside.acquire(blocking=False)
        try:
            pids.add(os.getpid())
            seen.append(failure)
            return "skip" if isinstance(failure.error, ZeroDivisionError) else "raise"
        finally:
            inside.release()

    with PIPE.open(backend=backend, on_error=handler, max_errors=None) as stream:
        found = list(stream)
    assert Counter(found) == Counter([60, 30, 20, 15] * 10)
    assert pids == {os.getpid()}
    assert [(failure.stage, failure.item) for failure in seen] == [("invert", 0)] * 20


def test_what_a_handler_raises_is_the_failure_of_the_stream(backend: Backend) -> None:
    def handler(failure: sl.Failure) -> Decision:
        raise LookupError("no idea")

    with PIPE.open(backend=backend, on_error=handler) as stream, pytest.raises(LookupError, match="no idea") as found:
        list(stream)
    assert any("in the on_error handler" in note for note in found.value.__notes__)
    assert isinstance(found.value.__cause__, ZeroDivisionError)


@pytest.mark.one_in(2)
def test_reports_and_dead_letters_are_those_of_a_stream_without_hosts(backend: Backend, tmp_path: Path) -> None:
    def letters(backend: Backend, path: Path) -> tuple[Any, ...]:
        with PIPE.open(backend=backend, on_error="skip", max_errors=None, dead_letters=path) as stream:
            items = list(stream)
            report = stream.errors
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        letters = sorted((line["shard"], line["n"], line["position"], line["item"], line["message"]) for line in lines)
        return items, report.total, dict(report.stages), letters

    assert letters(backend, tmp_path / "there.jsonl") == letters(sl.Inline(), tmp_path / "here.jsonl")


def test_too_many_errors_fail_the_run_after_the_same_items(backend: Backend) -> None:
    with PIPE.open(backend=backend, on_error="skip", max_errors=5) as stream:
        with pytest.raises(TooManyErrors) as found:
            list(stream)
        assert isinstance(found.value.__cause__, ZeroDivisionError)
        assert stream.errors.total > 5


def test_a_note_says_in_which_host_it_happened_and_the_call_can_be_made_again(backend: Backend) -> None:
    with PIPE.open(backend=backend) as stream:
        with pytest.raises(ZeroDivisionError) as found:
            list(stream)
        host = stream.stats().hosts[0].name if not isinstance(backend, Copying) else "copying host 0"
    notes = [note for note in found.value.__notes__ if note.startswith("in map(invert), shard 2 of 3 (")]
    assert notes == [f"in map(invert), shard 2 of 3 ({host}), at index 2 of items: 0"]
    with pytest.raises(ZeroDivisionError):
        sl.replay(found.value)
    assert sl.replay(found.value, fn=lambda item: item) == 0
