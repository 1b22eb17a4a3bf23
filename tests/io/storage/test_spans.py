from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamline.io.storage.object_cache import Spans
from tests.laws.profile import examples

SIZE = 12


@examples(200)
@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12))
def test_spans_are_the_set_of_their_bytes(added: list[tuple[int, int]]) -> None:
    spans, there = Spans(), set[int]()
    for start, stop in added:
        spans.add(start, stop)
        there |= set(range(start, stop))
        assert spans.from_start == (bool(there) and there == set(range(len(there))))
        for size in range(SIZE + 1):
            assert spans.cover(size) == (set(range(size)) <= there)
