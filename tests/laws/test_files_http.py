"""Random pipelines over files on a server that breaks its answers at random: the same items, from any state on.

`STREAMLINE_EXAMPLES=50 pytest tests/laws/test_files_http.py` searches deeper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core import byte_budget as budget
from streamline.io.fetch import request as requests
from streamline.io.storage import retry as attempts
from streamline.pipeline import Pipeline
from streamline.sources.files import Files
from streamline.testing.checks import check_resume
from streamline.testing.steps import DICE
from tests.copying_backend import Copying
from tests.laws.files import GRAINS, Case, cases
from tests.laws.profile import examples
from tests.laws.written import REMOTE
from tests.serving import PATIENT, Server, breaking, serving

pytestmark = pytest.mark.long

seeds = st.integers(0, 1000)
parts = st.sampled_from([None, 60, 500, 5000])
"""Bytes that one request asks for; None: as ever."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@contextmanager
def served(
    server: Server, case: Case, seed: int, part_bytes: int | None, share: float = 0.3
) -> Iterator[Pipeline[Any]]:
    """Put the files on a server that breaks a share of its answers, and return the pipeline over them."""
    server.objects = {name: file.data for name, file in zip(case.names, case.files, strict=True)}
    server.otherwise = breaking(seed, share)
    pipe = case.over(server.url)
    source = pipe.source
    assert isinstance(source, Files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempts, "BACKOFF_S", 0.0)
        for module, constants in GRAINS[case.grain].items():
            for constant, value in constants.items():
                patch.setattr(module, constant, value)
        if part_bytes is not None:
            patch.setattr(budget, "PART_BYTES", part_bytes)
            patch.setattr(budget, "MIN_PART_BYTES", part_bytes)
            patch.setattr(requests, "GUESS_BYTES", 5)
        yield replace(pipe, source=replace(source, access=replace(source.access, http=PATIENT)))


@examples(5)
@given(case=cases(choosing=False, most=8, stages=2, formats=REMOTE), seed=seeds, part_bytes=parts)
def test_strict_pipelines_over_http_resume_exactly(
    server: Server, case: Case, seed: int, part_bytes: int | None
) -> None:
    with served(server, case, seed, part_bytes) as pipe:
        check_resume(pipe, expected=case.plain, seed=seed, generations=2)


@examples(2)
@given(case=cases(choosing=True, most=8, stages=2, formats=REMOTE), seed=seeds, part_bytes=parts)
def test_choosing_pipelines_over_http_lose_and_double_nothing(
    server: Server, case: Case, seed: int, part_bytes: int | None
) -> None:
    DICE.seed(seed)
    with served(server, case, seed, part_bytes) as pipe:
        check_resume(pipe, expected=case.plain, seed=seed, generations=2)


@examples(2)
@given(
    case=cases(most=6, stages=1, formats=REMOTE),
    seed=seeds,
    part_bytes=parts,
    backend=st.sampled_from([sl.Threads(2), Copying(2)]),
)
def test_files_over_http_keep_the_laws_on_hosts(
    server: Server, case: Case, seed: int, part_bytes: int | None, backend: Backend
) -> None:
    DICE.seed(seed)
    with served(server, case, seed, part_bytes) as pipe:
        check_resume(pipe, expected=case.plain, seed=seed, backend=backend, generations=2)
