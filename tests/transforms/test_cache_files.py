"""The files of a cache: which of them make a pass, and what a folder in which things go wrong may do to it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamline as sl
from streamline.core.record_file import DamagedError
from streamline.errors import ReadError
from streamline.transforms.cache_files import ROOT, BlockInfo, CacheBlock, CacheFiles, FoundBlocks


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("streamline.transforms.cache_disk.BLOCK_ITEMS", 4)
    with monkeypatch.context() as quick:
        quick.setattr(os, "fsync", lambda descriptor: None)
        yield


def block(id: str, before: str, stop: int, *, end: bool = False, drawing: int = 0) -> CacheBlock:
    return CacheBlock(Path(id), drawing, stop, before, id, end, 100)


def test_a_pass_is_the_whole_one_else_the_longest_in_any_order_of_the_listing() -> None:
    whole = [block("a", ROOT, 4), block("c", "a", 8, end=True)]
    as_long = [block("d", "a", 8)]
    longer = [*as_long, block("e", "d", 12)]
    other = [block("b", "a", 8, end=True)]
    later = [block("f", ROOT, 40, end=True, drawing=1)]
    for blocks, expected in (
        (whole + as_long, "ac"),
        (whole + longer, "ac"),
        (whole[:1] + longer, "ade"),
        (whole + other, "ac"),
        (whole + later, "ac"),
        (later, ""),
    ):
        for listed in permutations(blocks):
            assert "".join(one.id for one in FoundBlocks(listed, 1).beyond(ROOT, 0)) == expected


def test_a_chain_that_lacks_a_block_is_none() -> None:
    found = FoundBlocks([block("a", ROOT, 4), block("c", "b", 12)], 0)
    assert [one.id for one in found.chain("a") or []] == ["a"]
    assert found.chain("c") is None
    assert found.chain("x") is None
    assert found.chain(ROOT) == []


DAMAGE = {
    "key": (b'"items":', b'"itens":'),
    "no shape": (b',[3]]', b"]"),
    "shape of another type": (b",[3]]", b",{ }]"),
    "shape that nothing holds": (b",[3]]", b",[99999999999999999]]"),
    "type that is none": (b'"<i8"', b'"??8"'),
    "type that is no expression": (b'"<i8"', b'"01i8"'),
    "size that no index is": (b'["b",2]', b'["b",' + b"9" * 30 + b"]"),
    "depth": (b'"items":', b'"items":' + b"[" * 200_000),
    "text": (b'"items":', b'"it\xffms":'),
    "no JSON": (b'"items":', b'"items";'),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_header_of_whatever_garbage_is_damage(kind: str, tmp_path: Path) -> None:
    files = CacheFiles(str(tmp_path), "cache", "cache", "0" * 16, 0, 1)
    held = BlockInfo([np.arange(3), b"ab"], (0,), {"items": 2})
    written = files.write(CacheBlock(Path(), 0, 2, ROOT, "1" * 16, True, 0), held, 0)
    content = written.path.read_bytes()
    length, at = int.from_bytes(content[26:34], "little"), 34
    header = content[at : at + length].replace(*DAMAGE[kind])
    assert header != content[at : at + length]
    written.path.write_bytes(content[:26] + len(header).to_bytes(8, "little") + header + content[at + length :])
    with pytest.raises(DamagedError, match="is damaged"):
        files.read(written)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], "its checksum is another one"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "its checksum is another one"),
        (lambda content: content + b"x", "its checksum is another one"),
        (lambda content: content[:-1], "is cut short"),
        (lambda content: b"x" + content[1:], "doesn't begin as such a file does"),
    ],
    ids=["an item's last bit", "the checksum", "long", "short", "the beginning"],
)
def test_a_block_of_which_anything_has_changed_is_damaged(change: Any, why: str, tmp_path: Path) -> None:
    files = CacheFiles(str(tmp_path), "cache", "cache", "0" * 16, 0, 1)
    held = BlockInfo([np.arange(3), b"ab"], (0,), {"items": 2})
    written = files.write(CacheBlock(Path(), 0, 2, ROOT, "1" * 16, True, 0), held, 0)
    assert files.read(written).items[1] == b"ab"
    written.path.write_bytes(change(written.path.read_bytes()))
    with pytest.raises(DamagedError, match=why):
        files.read(written)


def test_what_cannot_be_read_is_an_error_and_no_damage(tmp_path: Path) -> None:
    pipe = sl.from_items(range(10)).cache(path=tmp_path)
    list(pipe)
    (path,) = tmp_path.glob("*.000000000008.*")
    path.unlink()
    path.mkdir()
    with pytest.raises(ReadError, match=re.escape(f"can't read {path} of cache")):
        list(pipe)


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path: Path, kind: str) -> None:
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    pipe = sl.from_items(range(10)).cache(path=folder)
    list(pipe)
    (path,) = folder.glob("*.000000000008.*")
    path.rename(outside)
    path.symlink_to(outside) if "link" in kind else os.mkfifo(path)
    with pytest.raises(
        ReadError, match=rf"can't read {re.escape(str(path))} of cache: .* is {kind}, expected a regular"
    ):
        list(pipe)


def test_damaged_and_old_files_that_cannot_be_removed_harm_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = sl.from_items(range(10)).cache(path=tmp_path)
    list(pipe)
    (path,) = tmp_path.glob("*.000000000008.*")
    path.write_bytes(path.read_bytes()[:-1])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert list(pipe) == list(range(10))
        with pipe.open() as stream:
            assert list(stream) == list(range(10))
            stream.reset_cache()
        assert list(pipe) == list(range(10))
    assert list(pipe) == list(range(10))


def test_files_that_go_while_a_folder_is_looked_at_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = sl.from_items(range(10)).cache(path=tmp_path)
    list(pipe)
    scan = os.scandir

    @contextmanager
    def removing(folder: Any) -> Iterator[Iterator[Any]]:
        with scan(folder) as entries:
            yield (gone(entry) for entry in entries)

    def gone(entry: Any) -> Any:
        if ".000000000008." in entry.name:
            Path(entry.path).unlink()
        return entry

    with monkeypatch.context() as patch:
        patch.setattr("streamline.transforms.cache_files.os.scandir", removing)
        assert list(pipe) == list(range(10))
    assert list(pipe) == list(range(10))


def test_a_new_drawing_removes_the_old_one_of_its_own_cache_only(tmp_path: Path) -> None:
    ours = sl.from_items(range(10)).cache(path=tmp_path)
    theirs = sl.from_items(range(12)).cache(path=tmp_path)
    _ = list(ours), list(theirs)
    kept = set(tmp_path.iterdir())
    with ours.open() as stream:
        list(stream)
        stream.reset_cache()
    list(ours)
    left = kept & set(tmp_path.iterdir())
    assert len(left) == 4
