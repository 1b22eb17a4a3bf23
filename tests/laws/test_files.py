"""Random pipelines over files of every format: what plain libraries read, resumed anywhere, whoever runs the workers.

`STREAMLINE_EXAMPLES=50 pytest tests/laws/test_files.py` searches deeper.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.state import At
from streamline.io.formats import base as steps
from streamline.io.formats import lines as positions
from streamline.sources import interleave
from streamline.testing.checks import check_resume
from streamline.testing.steps import DICE
from tests.copying_backend import Copying
from tests.io.formats.records import put
from tests.laws.files import Case, cases, number_of
from tests.laws.profile import examples, short
from tests.laws.written import ENDS

seeds = st.integers(0, 1000)
lists = st.sampled_from([1, 2, 3, 256])


@examples(6)
@given(cases(choosing=False, most=12, stages=2), seeds, lists)
def test_strict_pipelines_over_files_resume_exactly(case: Case, seed: int, most: int) -> None:
    with case.written() as (pipe, _), short(LIST_ITEMS=most):
        check_resume(pipe, expected=case.plain, seed=seed)


@pytest.mark.long
@examples(3)
@given(cases(choosing=True, most=12, stages=2), seeds, lists)
def test_choosing_pipelines_over_files_lose_and_double_nothing(case: Case, seed: int, most: int) -> None:
    DICE.seed(seed)
    with case.written() as (pipe, _), short(LIST_ITEMS=most):
        check_resume(pipe, expected=case.plain, seed=seed)


@pytest.mark.long
@examples(2)
@given(cases(most=10, stages=2), seeds, st.sampled_from([1, 2, 4]))
def test_files_keep_the_laws_on_hosts_that_copy(case: Case, seed: int, hosts: int) -> None:
    DICE.seed(seed)
    with case.written() as (pipe, _):
        check_resume(pipe, expected=case.plain, seed=seed, backend=Copying(hosts))


@pytest.mark.long
@examples(2)
@given(cases(most=10, stages=2), seeds)
def test_files_keep_the_laws_on_threads(case: Case, seed: int) -> None:
    DICE.seed(seed)
    with case.written() as (pipe, _):
        check_resume(pipe, expected=case.plain, seed=seed, backend=sl.Threads(2))


@pytest.mark.long
def test_files_keep_the_laws_in_processes(processes: Backend) -> None:
    @examples(2)
    @given(cases(most=8, stages=1, grains=["as ever"]), seeds)
    def check(case: Case, seed: int) -> None:
        DICE.seed(seed)
        with case.written() as (pipe, _):
            check_resume(pipe, expected=case.plain, seed=seed, backend=processes, generations=2)

    check()


# What the kit notices -------------------------------------------------------------------------------------------------


def later(module: Any, name: str, key: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets the places of a format be one too far, at `key`, but for those behind a file."""
    sound = getattr(module, name)

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def wrong(self: Any, index: Any) -> Any:
            place = sound(self, index)
            if isinstance(place, At) and key in (own := dict(place.json()["x"])) and own["file"] is not None:
                own[key] += 1
                return At("x", own)
            return {**place, key: place[key] + 1} if isinstance(place, dict) else place

        patch.setattr(module, name, wrong)

    return mutate


def unturned(patch: pytest.MonkeyPatch) -> None:
    """Let interleaved files forget whose turn it is."""

    def wrong(self: Any, index: int) -> Any:
        full, last = divmod(index + self._start, len(self._columns))
        states = [column.state_after(full + (slot <= last)) for slot, column in enumerate(self._columns)]
        return interleave._InterleavedState(self._name, states, self._following, states[last])

    patch.setattr(interleave._InterleavedStates, "__getitem__", wrong)


MUTANTS: dict[str, tuple[Any, dict[str, Any], Callable[[pytest.MonkeyPatch], None]]] = {
    "bytes of lines": (sl.read_lines, {}, later(positions.LineSlice, "after", "byte")),
    "rows of arrays": (sl.read_npy, {}, later(steps.IndexedStates, "__getitem__", "row")),
    "rows of groups": (sl.read_parquet, {}, later(steps.IndexedStates, "__getitem__", "row")),
    "turns of files": (sl.read_lines, {"interleave": 2}, unturned),
}


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_place_that_is_wrong_breaks_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    read, options, mutate = MUTANTS[mutant]
    paths = few(tmp_path, read)
    pipe = read(paths, name="x").shard(1, mode="file", **options).map(number_of)
    check_resume(pipe)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"^Resume: "):
        check_resume(pipe)


def few(folder: Path, read: Any) -> list[Path]:
    """Write two files of a few items."""
    paths = [folder / "a", folder / "b"]
    for number, path in enumerate(paths):
        values = list(range(10 * number, 10 * number + 4))
        with path.open("wb") as file:
            if read is sl.read_npy:
                np.save(file, np.array(values))
            elif read is sl.read_parquet:
                pq.write_table(pa.table({"id": values}), file)
            else:
                file.writelines(b"%d\n" % value for value in values)
    return paths


# A finished file is not opened again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENDS)
def test_behind_the_last_item_of_a_file_a_resume_does_not_open_it_again(tmp_path: Path, kind: str) -> None:
    read, dump = ENDS[kind]
    paths = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(paths):
        put(path, dump(list(range(4 * number, 4 * number + 4))))
    pipe = read(paths, name="x").shard(1, mode="file")
    with pipe.open() as stream:
        for expected in (*[paths[0]] * 3, paths[1], *[paths[1]] * 3, None):
            next(stream)
            where = sl.Snapshot.from_json(stream.snapshot().to_json()).worker_states[0]["x"]
            assert where["file"] == (None if expected is None else str(expected))
