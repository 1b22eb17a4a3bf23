"""What seed 002 says of workers and their shards: three ways to split, one rule, and duplicates that nobody sees.

Each test quotes its sentence. Where another test keeps a promise already (pinned memory, persistent workers),
docs/seeds.md names that. `each_worker` runs each shard as a rank of its own, so that it is seen alone; these ranks need
not end together.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.sharding.split import contiguous
from tests.laws.profile import examples

LETTERS = list("ABCDEFGH")


def each_worker(pipe: sl.Pipeline[Any], num_workers: int) -> list[list[Any]]:
    """Return what each worker of a pipeline of so many shards reads."""
    found = []
    for worker in range(num_workers):
        with pipe.open(rank=worker, world_size=num_workers, ends="allow") as stream:
            found.append(list(stream))
    return found


class Streaming:
    """An iterable of which each iterator begins at the beginning, as an IterableDataset; counts them."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        yield from self.data


# Three sharding strategies ------------------------------------------------------------------------------------------


def test_by_remainder() -> None:
    """ "Worker 0: [A, C, E, G] (items 0, 2, 4, 6), Worker 1: [B, D, F, H]"."""
    pipe = sl.from_items(LETTERS).shard(2)
    assert each_worker(pipe, 2) == [list("ACEG"), list("BDFH")]
    assert list(pipe) == LETTERS  # "unique, complete", and in the dataset's order


def test_by_remainder_of_a_stream_without_an_index() -> None:
    """ "yield from (x for i, x in enumerate(data) if i % num_workers == worker_id)"."""
    pipe = sl.from_iterable(lambda: (letter for letter in LETTERS)).shard(2)
    assert each_worker(pipe, 2) == [list("ACEG"), list("BDFH")]
    assert list(pipe) == LETTERS


def test_by_contiguous_block() -> None:
    """ "Worker 0: [A, B], Worker 1: [C, D], Worker 2: [E, F], Worker 3: [G, H]"."""
    pipe = sl.from_items(LETTERS).shard(4, mode="contiguous")
    assert each_worker(pipe, 4) == [list("AB"), list("CD"), list("EF"), list("GH")]
    assert list(pipe) == list("ACEGBDFH")


def test_by_file(tmp_path: Path) -> None:
    """ "Worker 0: reads file1 ... Worker 3: reads file4"."""
    for number in range(1, 5):
        (tmp_path / f"file{number}").write_text(f"{number}a\n{number}b\n")
    pipe = sl.read_lines(tmp_path / "file*").shard(4)
    assert "shard into 4 (file)" in str(pipe)
    assert each_worker(pipe, 4) == [[f"{number}a", f"{number}b"] for number in range(1, 5)]
    assert each_worker(sl.read_lines(tmp_path / "file*").shard(3), 3) == [
        ["1a", "1b", "4a", "4b"],
        ["2a", "2b"],
        ["3a", "3b"],
    ]


def complete_code_pattern(total: int, n_workers: int, wid: int) -> range:
    """Which items a worker has, as the seed's complete code pattern computes it."""
    chunk, remainder = divmod(total, n_workers)
    start = wid * (chunk + 1) if wid < remainder else wid * chunk + remainder
    return range(start, start + chunk + (1 if wid < remainder else 0))


@examples(60)
@given(total=st.integers(0, 3000), num_workers=st.integers(1, 100))
def test_the_first_remainder_workers_get_one_extra_sample(total: int, num_workers: int) -> None:
    """The complete code pattern, at any length and number of workers."""
    for worker in range(num_workers):
        assert contiguous(total, num_workers, worker) == complete_code_pattern(total, num_workers, worker)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_what_a_block_of_equal_chunks_leaves_out_is_left_out_where_that_is_said(drop_remainder: bool) -> None:
    """ "chunk = len(data) // num_workers" alone loses the last 2 of 10: here that is `drop_remainder=True`."""
    blocks = each_worker(sl.from_items(range(10)).shard(4, mode="contiguous", drop_remainder=drop_remainder), 4)
    if drop_remainder:
        assert blocks == [[0, 1], [2, 3], [4, 5], [6, 7]]
    else:
        assert blocks == [list(complete_code_pattern(10, 4, worker)) for worker in range(4)]


def test_without_workers_everything_is_yielded() -> None:
    """ "num_workers=0: yield everything"."""
    assert list(sl.from_items(LETTERS)) == LETTERS
    assert list(sl.from_iterable(lambda: LETTERS).debug()) == LETTERS


# The rule -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["interleaved", "contiguous", "file", "replicated"])
def test_union_is_the_dataset_and_intersection_is_empty(mode: Any, tmp_path: Path) -> None:
    """ "Union of all shards = full dataset (no gaps). Intersection of shards = empty (no overlaps)"."""
    letters = list(string.ascii_lowercase[:10])
    pairs = [letters[at : at + 2] for at in range(0, 10, 2)]
    for pair in pairs:
        (tmp_path / f"{pair[0]}.txt").write_text("\n".join(pair))
    others: dict[str, sl.Pipeline[str]] = {
        "replicated": sl.from_iterable(lambda: letters),
        "file": sl.read_lines(tmp_path / "*.txt"),
    }
    for num_workers in (1, 2, 3, 8, 11):
        pipe = others.get(mode, sl.from_items(letters)).shard(num_workers, mode=mode)
        assert Counter(chain.from_iterable(each_worker(pipe, num_workers))) == Counter(letters)
        assert sorted(pipe) == letters


# Duplicates ---------------------------------------------------------------------------------------------------------


def seen_and_unique(batches: Any) -> tuple[int, int]:
    """Return what the seed prints to find duplicates: len(seen), len(set(seen))."""
    seen: list[Any] = []
    for batch in batches:
        seen.extend(batch)
    return len(seen), len(set(seen))


@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(2)], ids=str)
def test_an_iterable_in_two_workers_has_no_duplicates(backend: Any) -> None:
    """ "Full duplication" there; here each worker keeps its stride of what it iterates."""
    stream = Streaming(LETTERS)
    pipe = sl.from_iterable(lambda: iter(stream)).shard(2).merge().batch(4, collate=None)
    with pipe.open(backend=backend) as batches:
        assert seen_and_unique(batches) == (8, 8)
    assert stream.begun == 2
    assert "each item is read 2 times: by every worker, which keeps one item in 2" in str(pipe)


def test_an_iterable_on_two_ranks_without_a_shard_is_refused() -> None:
    """ "No error or warning is raised" there; here the error says what would happen, and the way out."""
    for pipe in (sl.from_iterable(lambda: iter(LETTERS)), sl.from_items(LETTERS)):
        for rank in range(2):
            with pytest.raises(PlanError, match=r"each of the 2 ranks would read everything.*\.shard\("):
                pipe.open(rank=rank, world_size=2)


def test_an_iterator_that_workers_would_share_is_refused() -> None:
    """An iterator is no factory: two workers of it would each get what the other hasn't."""
    with pytest.raises(PlanTypeError, match="is a function"):
        sl.from_iterable(iter(LETTERS))  # type: ignore[arg-type]


# Workers ------------------------------------------------------------------------------------------------------------


async def test_workers_prefetch_while_the_consumer_computes() -> None:
    """ "By the time the GPU finishes batch 1, batch 2 is already queued"."""
    made: list[int] = []

    def load(item: int) -> int:
        made.append(item)
        return item

    async with sl.from_items(range(400)).shard(2).map(load).merge().batch(4, collate=None).open() as stream:
        assert await anext(stream) == [0, 1, 2, 3]
        await anyio.wait_all_tasks_blocked()  # the consumer computes, and asks for nothing
        assert set(made) >= set(range(8))
