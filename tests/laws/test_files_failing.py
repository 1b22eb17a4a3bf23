"""Random pipelines over files with bad records, or that are gone: what comes before, the error, what is skipped.

`STREAMLINE_EXAMPLES=50 pytest tests/laws/test_files_failing.py` searches deeper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, ReadError
from streamline.pipeline import Pipeline
from streamline.testing.laws import ExpectedItems, same
from streamline.testing.oracle import Oracle
from streamline.testing.steps import steps
from tests.copying_backend import Copying
from tests.laws.failing import Runs, failing_steps, insist
from tests.laws.files import Case, cases
from tests.laws.profile import examples, short
from tests.laws.written import BROKEN, Broken, Written

pytestmark = pytest.mark.long

seeds = st.integers(0, 1000)
lists = st.sampled_from([1, 2, 3, 256])
backends: st.SearchStrategy[Backend] = st.sampled_from([sl.Inline(), sl.Inline(), Copying(2), sl.Threads(2)])
any_step = st.one_of(steps(), failing_steps())
all_through = steps().filter(lambda step: not step.text.startswith((".take", ".repeat")))
"""Stages that take each item once, whatever becomes of it."""


def read_up_to_failure(items: Iterator[Any]) -> tuple[list[Any], Exception | None]:
    """Return what comes, and what it ends with."""
    found: list[Any] = []
    try:
        for item in items:
            found.append(item)  # noqa: PERF402 - what came before a failure counts
    except Exception as failure:
        return found, failure
    return found, None


def truth(pipe: Pipeline[Any]) -> tuple[list[Any], Exception | None]:
    with Oracle(pipe) as oracle:
        return read_up_to_failure(iter(oracle))


def insist_same_failure(failure: Exception | None, expected: Exception | None, folder: Path) -> None:
    if isinstance(expected, Broken):
        assert isinstance(failure, DataError | ReadError), failure
        assert f"{folder}/" in str(failure)
        return
    assert (type(failure), str(failure)) == (type(expected), str(expected))


@examples(25)
@given(cases(choosing=False, most=20, stages=2, formats=BROKEN, before=False, step=any_step), lists, backends)
def test_what_is_before_a_failure_comes_then_the_error_and_a_run_behind_it_goes_on(
    case: Case, most: int, backend: Backend
) -> None:
    expected, error = truth(case.plain)
    with case.written() as (pipe, folder), short(LIST_ITEMS=most), TemporaryDirectory() as letters:
        with pipe.open(backend=backend) as stream:
            items, failure = read_up_to_failure(stream)
            if failure is not None:
                with pytest.raises(type(failure)) as again:
                    next(stream)
                assert again.value is failure
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        assert same(items, expected), (items, expected, failure)
        insist_same_failure(failure, error, folder)
        whole, parts = Runs(Path(letters, "whole.jsonl")), Runs(Path(letters, "parts.jsonl"), backend=backend)
        whole.part(pipe, None, None)
        parts.items = items
        parts.part(pipe, snapshot, None)
        insist(whole, parts, choosing=False)


def without(file: Written) -> Written:
    """Return a file as if its bad records had never been."""
    starts = file.starts or [0] * len(file.items)
    good = [(item, at) for item, at in zip(file.items, starts, strict=True) if not isinstance(item, Broken)]
    return replace(file, items=[item for item, _ in good], starts=file.starts and [at for _, at in good])


@examples(25)
@given(cases(choosing=False, most=20, stages=2, formats=BROKEN, before=False, step=all_through), seeds, lists, backends)
def test_each_bad_record_is_skipped_and_counted_once_however_a_run_is_interrupted(
    case: Case, seed: int, most: int, backend: Backend
) -> None:
    dice, plan = Random(seed), case.plain.plan
    expected, _ = truth(replace(case, files=tuple(map(without, case.files))).plain)
    bad = sum(isinstance(item, Broken) for file in case.files for item in file.items)
    bad *= plan.shard.num_shards if plan.mode == "replicated" else 1
    with case.written() as (pipe, _), short(LIST_ITEMS=most), TemporaryDirectory() as letters:
        whole, parts = Runs(Path(letters, "whole.jsonl")), Runs(Path(letters, "parts.jsonl"), backend=backend)
        whole.part(pipe, None, None)
        ExpectedItems(expected, choosing=False).insist_whole("Order", "without what is bad", [], whole.items)
        assert whole.errors == bad
        snapshot = None
        for count in (*(dice.randrange(len(expected) // 2 + 2) for _ in range(5)), None):
            snapshot = parts.part(pipe, snapshot, count, dice.randrange(3) if count else 0)
            snapshot = sl.Snapshot.from_json(snapshot.to_json())
        insist(whole, parts, choosing=False)


@examples(20)
@given(cases(choosing=False, most=15, stages=2, before=False), seeds, lists, backends)
def test_what_is_before_a_file_that_is_gone_comes_then_the_error(
    case: Case, seed: int, most: int, backend: Backend
) -> None:
    assume(case.composition.pipeline.plan.mode != "contiguous")
    gone = Random(seed).randrange(len(case.files))
    files = list(case.files)
    files[gone] = replace(files[gone], items=[Broken(case.names[gone])])
    expected, error = truth(replace(case, files=tuple(files)).plain)
    with case.written() as (pipe, folder), short(LIST_ITEMS=most):
        opened = pipe.open(backend=backend)
        (folder / case.names[gone]).unlink()
        with opened as stream:
            items, failure = read_up_to_failure(stream)
        assert same(items, expected)
        assert error is None or f"{folder / case.names[gone]}" in str(failure)
        insist_same_failure(failure, error, folder)
