"""What caches on disk need wherever laws are checked: folders, blocks of few items, and no syncs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest

from streamline.transforms import cache_disk as disk
from tests.laws.stages import Folder


@pytest.fixture(scope="session", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    Folder.root = tmp_path_factory.mktemp("caches")
    yield
    Folder.root = None


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk, "BLOCK_ITEMS", 4)
    monkeypatch.setattr(disk, "BLOCK_S", math.inf)
    with monkeypatch.context() as quick:
        quick.setattr(os, "fsync", lambda descriptor: None)  # some thousand files: only a power cut would tell
        yield
