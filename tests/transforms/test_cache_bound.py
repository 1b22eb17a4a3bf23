"""What caches keep is bounded in bytes, whatever items and bounds are, and the stream is exact up to the bound."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.core.tree import nbytes
from streamline.errors import CacheFull
from streamline.pipeline import Pipeline
from streamline.testing.scripted import scripted
from streamline.transforms import cache
from streamline.transforms import cache_disk as disk
from streamline.transforms.cache_files import CacheBlock, CacheFiles
from streamline.transforms.cache_pass import MemoryPass
from tests.laws.profile import examples

lengths = st.lists(st.sampled_from([0, 1, 7, 50, 400]), max_size=14)

paces = st.lists(st.integers(0, 3), max_size=4)


def items_of(lengths: Sequence[int]) -> list[bytes]:
    return [bytes([number]) * length for number, length in enumerate(lengths)]


def read(pipe: Pipeline[Any], resume: sl.Snapshot | None = None) -> tuple[list[Any], sl.Snapshot, bool]:
    """Return what a stream gives, the state after it, and whether there was room for all."""
    found: list[Any] = []
    with pipe.open(resume=resume) as stream:
        try:
            found.extend(stream)
        except CacheFull:
            return found, sl.Snapshot.from_json(stream.snapshot().to_json()), False
        return found, sl.Snapshot.from_json(stream.snapshot().to_json()), True


@examples(60)
@given(lengths, st.sampled_from([0.0, 0.4, 0.8, 1.0, 1.2]), paces)
def test_in_memory_what_fits_is_kept_and_delivered_and_no_byte_more(
    lengths: list[int], share: float, paces: list[int]
) -> None:
    items = items_of(lengths)
    most = max(1, int(share * sum(map(nbytes, items))))
    fitting = sum(total <= most for total in accumulate(map(nbytes, items)))
    kept = [0]

    class Watched(MemoryPass[Any]):
        async def draw(self, limit: int) -> Any:
            try:
                return await super().draw(limit)
            finally:
                kept.append(sum(map(nbytes, self._drawing.items)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "MemoryPass", Watched)
        source = scripted(items, schedule=paces)
        found, snapshot, whole = read(source.cache(max_bytes=most).repeat(2))
        assert max(kept) == sum(map(nbytes, items[:fitting])) <= most
    assert whole == (fitting == len(items))
    assert found == (items * 2 if whole else items[:fitting])
    if not whole:
        assert found + read(source.cache(max_bytes=10_000).repeat(2), snapshot)[0] == items * 2


@examples(50)
@given(lengths, st.integers(-300, 300), st.sampled_from([1, 2, 5, 16384]), paces)
def test_on_disk_a_pass_is_kept_if_its_files_fit_and_no_byte_more_is_written(
    lengths: list[int], less: int, block: int, paces: list[int]
) -> None:
    items, source = items_of(lengths), scripted(items_of(lengths), schedule=paces)
    with TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        free, folder = Path(temporary, "free"), Path(temporary, "bounded")
        patch.setattr(disk, "BLOCK_ITEMS", block)
        patch.setattr(os, "fsync", lambda descriptor: None)
        assert read(source.cache(path=free).repeat(2))[0] == items * 2
        size = held(free)
        most = max(1, size - less if less > -300 else size)
        write = CacheFiles.write

        def watched(files: CacheFiles, *args: Any) -> CacheBlock:
            try:
                return write(files, *args)
            finally:
                assert not folder.exists() or held(folder) <= most

        with patch.context() as bounded:
            bounded.setattr(CacheFiles, "write", watched)
            for _ in range(2):  # and what is there is served, and not written beyond either
                found, snapshot, whole = read(source.cache(path=folder, max_bytes=most).repeat(2))
                assert whole == (size <= most)
                assert found == (items * 2 if whole else items[: len(found)])
        if not whole:
            assert found + read(source.cache(path=folder).repeat(2), snapshot)[0] == items * 2


def held(folder: Path) -> int:
    """Return the bytes of what is in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())
