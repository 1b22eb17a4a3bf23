"""What another machine lacks is named before the first item."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

import streamline as sl
from streamline.backends.remote import network_link
from streamline.errors import HostError
from streamline.io.storage.base import FoundObject
from streamline.pipeline import Pipeline
from tests.backends.remote.machines import agent_process, free_address, key_file

LINES = 300


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of this machine in a folder of its own."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "here_only.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("here_only")
    del sys.modules["here_only"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for part in range(4):
        (folder / f"{part % 2}").mkdir(parents=True, exist_ok=True)
        (folder / f"{part % 2}" / f"{part}.txt").write_text("".join(f"{line}\n" for line in range(LINES)))
    return folder


class Elsewhere:
    """Opens a pipeline here, and changes the disk before the agent comes: as if it were that of another machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, pipe: Pipeline[Any], change: Callable[[], object]) -> list[Any]:
        address, key = free_address(), key_file(self._folder)
        with pipe.open(backend=sl.Remote(1, listen=address, key_file=key)) as stream:
            change()
            with agent_process(address, key):
                return list(stream)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path)


@pytest.mark.long
def test_a_module_that_is_not_there_is_named_with_the_machine(module: ModuleType, elsewhere: Elsewhere) -> None:
    pipe = sl.from_items(range(9)).shard(1).map(module.double)
    with pytest.raises(HostError, match=r"the machine \S+ can't load .* No module named 'here_only'.*by_value"):
        elsewhere.run(pipe, lambda: shutil.rmtree(Path(str(module.__file__)).parent))


@pytest.mark.long
def test_an_older_module_there_is_named_with_what_it_lacks(module: ModuleType, elsewhere: Elsewhere) -> None:
    def age() -> None:
        shutil.rmtree(Path(str(module.__file__)).parent / "__pycache__", ignore_errors=True)
        Path(str(module.__file__)).write_text("")

    pipe = sl.from_items(range(9)).shard(1).map(module.double)
    with pytest.raises(HostError, match=r"Can't get attribute 'double' on <module 'here_only'.*same versions"):
        elsewhere.run(pipe, age)


@pytest.mark.long
def test_a_module_by_value_need_not_be_there(module: ModuleType, elsewhere: Elsewhere) -> None:
    cloudpickle.register_pickle_by_value(module)
    try:
        pipe = sl.from_items(range(9)).shard(1).map(module.double)
        assert elsewhere.run(pipe, lambda: shutil.rmtree(Path(str(module.__file__)).parent)) == list(range(0, 18, 2))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.long
def test_a_folder_that_is_not_there_is_found_before_the_first_item(files: Path, elsewhere: Elsewhere) -> None:
    pipe = sl.read_lines(files / "*" / "*.txt").shard(1)
    with pytest.raises(HostError, match=rf"the machine \S+ has no file {re.escape(str(files))}/1/1.txt.*object store"):
        elsewhere.run(pipe, lambda: shutil.rmtree(files / "1"))


@pytest.mark.long
def test_a_shorter_copy_is_another_file(files: Path, elsewhere: Elsewhere) -> None:
    other = files / "0" / "2.txt"
    pipe = sl.mix({"a": sl.read_lines(files / "1" / "*.txt"), "b": sl.read_lines(files / "0" / "*.txt")}, seed=1).shard(
        1
    )
    with pytest.raises(HostError, match=r"has another file \S*/0/2.txt: it has 2 bytes there, and 1,090 here"):
        elsewhere.run(pipe, lambda: other.write_text("0\n"))


@pytest.mark.long
def test_a_file_may_have_grown_and_one_that_is_gone_here_is_not_asked_for(files: Path, elsewhere: Elsewhere) -> None:
    paths = sorted(files.glob("*/*.txt"))
    with sl.read_lines(paths).shard(1).open() as stream:
        first = [next(stream) for _ in range(LINES)]
        snapshot = stream.snapshot()
    assert first[-1] == f"{LINES - 1}"
    paths[0].unlink()
    address, key = free_address(), key_file(files)
    pipe = sl.read_lines(paths[1:]).shard(1)
    backend = sl.Remote(1, listen=address, key_file=key)
    with pipe.open(backend=backend, resume=snapshot, accept=["read_lines.removed_files"]) as stream:
        paths[1].write_text(paths[1].read_text() + "more\n")
        with agent_process(address, key):
            assert len(list(stream)) == 3 * LINES + 1


@pytest.mark.long
def test_a_memory_map_that_is_not_there_is_named(tmp_path: Path, elsewhere: Elsewhere) -> None:
    np.save(path := tmp_path / "rows.npy", np.arange(100))
    pipe = sl.from_items(np.load(path, mmap_mode="r")).shard(1)
    with pytest.raises(HostError, match=r"has no file \S+rows.npy, which the pipeline maps"):
        elsewhere.run(pipe, path.unlink)


def test_of_many_files_one_of_each_folder_is_looked_for_first() -> None:
    found = [FoundObject(f"/data/{number % 90}/{number}") for number in range(10_000)]
    looked = [one.path for one in network_link._looked_for(found)]
    assert len(looked) == network_link.MOST_FILES
    assert looked[:91] == [*(f"/data/{number}/{number}" for number in range(90)), "/data/0/90"]


def test_a_file_that_may_not_be_looked_at_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    assert network_link._lack(FoundObject(str(file / "below"))) == f"can't read {file / 'below'}: Not a directory"
