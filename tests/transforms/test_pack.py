"""Documents in blocks: what a block holds, where a resume goes on, and what is no document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.testing.checks import check_resume
from tests.laws.profile import examples

documents = st.lists(st.integers(0, 9).flatmap(lambda n: st.just(list(range(n)))), max_size=7)


def lists(blocks: Any) -> list[list[list[int]]]:
    return [[block[key].tolist() for key in ("tokens", "segment_ids", "positions")] for block in blocks]


def shown(block: dict[str, Any]) -> str:
    return str([(key, str(array.dtype), array.tolist()) for key, array in block.items()])


def test_a_block_says_which_token_is_of_which_document() -> None:
    pipe = sl.from_items([[11, 12, 13], [], [21], [31, 32, 33, 34, 35, 36]]).pack(4, eos=9)
    assert lists(pipe) == [
        [[11, 12, 13, 9], [1, 1, 1, 1], [0, 1, 2, 3]],
        [[21, 9, 31, 32], [1, 1, 2, 2], [0, 1, 0, 1]],
        [[33, 34, 35, 36], [1, 1, 1, 1], [0, 1, 2, 3]],
        [[9, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
    ]


@examples(10)
@given(documents, st.integers(1, 8), st.sampled_from([None, 7]), st.booleans())
def test_blocks_are_those_of_the_oracle_and_a_resume_is_exact_after_each(
    docs: list[list[int]], length: int, eos: int | None, drop: bool
) -> None:
    check_resume(
        sl.from_items([np.array(doc, np.uint16) for doc in docs]).pack(length, eos=eos, drop_remainder=drop).map(shown)
    )


def test_nothing_is_lost_of_long_and_of_many_documents() -> None:
    sizes = [0, 100_000, *([1] * 700), 3, 0, 70_000]
    docs = [np.arange(size, dtype=np.int32) for size in sizes]
    blocks = list(sl.from_items(docs).shard(1).pack(64))
    tokens = np.concatenate([block["tokens"][block["segment_ids"] > 0] for block in blocks])
    assert np.array_equal(tokens, np.concatenate(docs))
    assert all(len(array) == 64 for block in blocks for array in block.values())
    assert [len(np.unique(block["segment_ids"])) for block in blocks].count(64) >= 9


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_the_dtype_of_the_documents_is_kept(dtype: str) -> None:
    docs = [np.arange(5).astype(dtype), [], np.arange(3).astype(dtype)]
    blocks = list(sl.from_items(docs).pack(3, eos=1))
    assert {str(block["tokens"].dtype) for block in blocks} == {dtype}
    assert {str(block[key].dtype) for block in blocks for key in ("segment_ids", "positions")} == {"int32"}


def test_a_resume_reads_one_document_again_and_no_more() -> None:
    read: list[int] = []

    def document(n: int) -> list[int]:
        read.append(n)
        return [n] * 5

    pipe = sl.from_items(range(20)).map(document).pack(8)
    with pipe.open() as stream:
        first = [next(stream) for _ in range(4)]  # 32 tokens: six documents, and two tokens of the seventh
        snapshot = stream.snapshot()
    assert snapshot.worker_states[0]["pack"] == {"token": 2, "dtype": "int64"}
    assert "reads one document again, and passes over the 2 tokens" in str(pipe.explain(snapshot))
    read.clear()
    rest = list(pipe.open(resume=snapshot).sync_stream())
    assert min(read) == 6
    assert lists([*first, *rest]) == lists(pipe)


def test_documents_in_a_field_of_dicts() -> None:
    pipe = sl.from_items([{"ids": [1, 2]}, {"ids": (3,)}]).pack(2, "ids")
    assert lists(pipe) == [[[1, 2], [1, 1], [0, 1]], [[3, 0], [1, 0], [0, 0]]]


def test_fields_that_no_block_has_are_named_in_one_warning() -> None:
    items = [{"labels": [0, 1], "ids": [1, 2], "text": "a"}, {"labels": [5], "ids": [3], "text": "b"}]
    match = r"\.pack\(key='ids'\) leaves out 'labels', 'text' of each item, which no block has: if this is right, "
    with pytest.warns(RuntimeWarning, match=match) as told:
        assert lists(sl.from_items(items).pack(2, "ids")) == [[[1, 2], [1, 1], [0, 1]], [[3, 0], [1, 0], [0, 0]]]
    assert len(told) == 1
    assert lists(sl.from_items(items).map(lambda item: item["ids"]).pack(2))


@pytest.mark.parametrize(
    ("item", "key", "words"),
    [
        ("abc", None, "expected tokens, a list or an array of ints, got a str"),
        (7, None, "got a int"),
        ([1.5], None, r"got a list of float64, shape \(1,\)"),
        ([[1], [2, 3]], None, "got a ragged list"),
        (np.zeros((2, 3), int), None, r"got an array of int64, shape \(2, 3\)"),
        (np.zeros(2, np.float32), None, r"an array of float32, shape \(2,\)"),
        (np.ma.array([1, 2], mask=[False, True]), None, r"got a MaskedArray of int64, shape \(2,\)"),
        ({"ids": [1]}, None, r"got a dict: say which field with \.pack\(key=\)"),
        ({"ids": [1]}, "tokens", r"expected a dict with 'tokens', as \.pack\(key=\) says, got one of 'ids'"),
        ([1], "tokens", "expected a dict with 'tokens'"),
        (np.zeros(2, np.int8), None, "expected tokens of int64, as in the documents before, got int8"),
    ],
)
def test_what_is_no_document_fails_after_the_blocks_before_it(item: Any, key: str | None, words: str) -> None:
    docs = [[1, 2, 3], item, [4, 5, 6]]
    before = {key: docs[0]} if key else docs[0]
    pipe = sl.from_items([before, *docs[1:]]).pack(2, key)
    with pipe.open() as stream:
        assert next(stream)["tokens"].tolist() == [1, 2]
        snapshot = stream.snapshot()
        with pytest.raises(PlanTypeError, match=words) as error:
            next(stream)
    assert "in pack, shard 0 of 1" in error.value.__notes__[0]
    assert "at index 1 of items: " in error.value.__notes__[0]
    with pipe.open(resume=snapshot) as stream, pytest.raises(PlanTypeError, match=words):
        next(stream)


def test_a_document_that_is_left_out_is_counted_and_cuts_nothing() -> None:
    pipe = sl.from_items([[1, 2, 3], "bad", [4, 5], "bad", [6]]).pack(2)
    expected = [[1, 2], [3, 4], [5, 6]]
    for stop in range(4):
        with pipe.open(on_error="skip") as stream:
            first = [next(stream)["tokens"].tolist() for _ in range(stop)]
            snapshot = stream.snapshot()
        with pipe.open(resume=snapshot, on_error="skip") as stream:
            assert first + [block["tokens"].tolist() for block in stream] == expected
            assert stream.errors.total == 2


def test_an_eos_that_the_dtype_does_not_hold_is_an_error() -> None:
    with pytest.raises(PlanTypeError, match=r"a dtype that holds \.pack\(eos=300\), got uint8"):
        list(sl.from_items([np.zeros(3, np.uint8)]).pack(2, eos=300))


def test_what_is_dropped_at_the_end_is_counted() -> None:
    with sl.from_items([[1, 2, 3, 4, 5]]).pack(3, drop_remainder=True).open() as stream:
        assert len(list(stream)) == 1
        assert stream.snapshot().worker_states[0]["pack"]["dropped"] == 2


def test_another_length_may_be_accepted_in_the_middle_of_a_document() -> None:
    items = sl.from_items([[1, 2, 3, 4, 5, 6, 7]])
    with items.pack(3).open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    with pytest.raises(ResumeError, match=r'accept=\["pack.length"\]'):
        items.pack(2).open(resume=snapshot)
    rest = items.pack(2).open(resume=snapshot, accept=["pack.length"]).sync_stream()
    assert [block["tokens"].tolist() for block in rest] == [[4, 5], [6, 7]]
    for other in (items.pack(3, eos=0), items):
        with pytest.raises(ResumeError, match=r"this can't:\n    pack\.(eos|removed)"):
            other.open(resume=snapshot)


def test_a_document_that_has_become_shorter_is_refused() -> None:
    lengths = [5]
    pipe = sl.from_items([0]).map(lambda _: [1] * lengths[0], name="document").pack(3)
    with pipe.open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    lengths[0] = 2
    with pytest.raises(ResumeError, match="had delivered 3 tokens of a document, and the one that is there now has 2"):
        list(pipe.open(resume=snapshot).sync_stream())


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 2, "eos": -1}, {"length": 2.0}, {"length": 2, "key": 1}])
def test_options_are_checked_where_they_are_written(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"\.pack\("):
        sl.from_items([[1]]).pack(**options)
