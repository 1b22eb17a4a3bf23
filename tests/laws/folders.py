"""Pipelines that keep a pass on disk, each opening of which finds another folder: with the files of some moment.

What a run has written by the time that it hands out a state is what a kill leaves there. A resume of the state may find
just that; or also what other runs of the same plan have written since, before and beside it; or damaged files; or none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.core.flow import Flow
from streamline.core.state import State
from streamline.core.tasks import Tasks
from streamline.pipeline import Pipeline
from streamline.testing.subjects import PipelineSubject, Subject
from streamline.transforms.cache import Cache
from streamline.transforms.cache_files import ROOT

__all__ = ["ANYHOW", "SOUND", "Folders", "Kept", "kept_in"]

SOUND = ("then", "all", "all")

ANYHOW = (*SOUND, "none", "damaged", "damaged")
"""What a resume may find, where the pass can be drawn again as it was."""

LINK = re.compile("([0-9a-f]{16})-([0-9a-f]{16})")
"""The ids of the block before one, and its own, in its file's name."""


class Folders:
    """Every file that was ever written, and which of them were there when a state was handed out.

    Args:
      root: for the folders.
      dice: chooses what an opening finds.
      kinds: what a resume may find, those to choose from. The beginning of a run may find anything.

    Attributes:
      here: the folder of the opening that is the last one.
    """

    def __init__(self, root: Path, dice: Random, kinds: Sequence[str] = ANYHOW) -> None:
        self._root, self._dice, self._kinds = root, dice, kinds
        self._written = root / "written"
        self._written.mkdir()
        self._then: dict[str, list[str]] = {}
        self._made = 0
        self._empty = False
        self.here = root / "none yet"

    @classmethod
    @contextmanager
    def made(cls, seed: int, kinds: Sequence[str] = ANYHOW) -> Iterator[Folders]:
        """Return such, which are gone behind the block."""
        with TemporaryDirectory() as root:
            yield cls(Path(root), Random(seed), kinds)

    def note(self, text: str) -> None:
        """A state is handed out, with this text."""
        there = [path.name for path in self.here.glob("*.cache")] if self.here.exists() else []
        for name in there:
            if not (self._written / name).exists():
                os.link(self.here / name, self._written / name)
        self._then.setdefault(text, there)

    def fill(self, text: str | None) -> Path:
        """Make the folder that an opening at this state finds, and return it."""
        if self._empty:
            self._insist_rooted()
        kind = self._dice.choice(self._kinds) if text is not None else self._dice.choice(ANYHOW)
        everything = [path.name for path in self._written.iterdir()]
        then = self._dice.choice([[], *self._then.values()]) if text is None else self._then[text]
        found = {"none": [], "then": then, "all": everything}.get(kind) or self._dice.choice((then, everything))
        self.here = self._root / f"{self._made} {kind}"
        self._made, self._empty = self._made + 1, kind == "none"
        self.here.mkdir()
        for name in [] if kind == "none" else sorted(found):
            os.link(self._written / name, self.here / name)
        for name in self._dice.sample(found, min(len(found), self._dice.randint(1, 3))) if kind == "damaged" else ():
            self._damage(self.here / name)
        return self.here

    def _insist_rooted(self) -> None:
        """Insist that each block that was written stands behind another one that is there: else it is waste."""
        chains = [match.groups() for path in self.here.iterdir() if (match := LINK.search(path.name))]
        there = {ROOT, *(block for _, block in chains)}
        assert all(before in there for before, _ in chains), sorted(path.name for path in self.here.iterdir())

    def _damage(self, path: Path) -> None:
        content, dice = bytearray(path.read_bytes()), self._dice
        path.unlink()
        at, how = dice.randrange(len(content)), dice.choice(("bit", "short", "gone", "long"))
        if how == "bit":
            content[at] ^= 1 << dice.randrange(8)
        elif how == "short":
            del content[at:]
        elif how == "long":
            content += b"x"
        if how != "gone":
            path.write_bytes(content)


def kept_in(pipe: Pipeline[Any], folder: Path) -> Pipeline[Any]:
    """Return a pipeline whose caches on disk are in this folder."""
    stages = (
        replace(stage, path=str(folder)) if isinstance(stage, Cache) and stage.path else stage for stage in pipe.stages
    )
    return replace(pipe, stages=tuple(stages))


class Kept(Subject):
    """A pipeline, whose caches on disk are in another folder at each opening."""

    def __init__(self, pipeline: Pipeline[Any], folders: Folders, backend: Backend | None = None) -> None:
        self._pipeline, self._folders, self._backend = pipeline, folders, backend or Inline()
        self._first = PipelineSubject(pipeline, self._backend)

    @property
    def hosted(self) -> bool:  # type: ignore[override]
        return self._first.hosted

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return self._first.copies

    def open(self, tasks: Tasks, text: str | None) -> Flow[Any]:
        pipe = kept_in(self._pipeline, self._folders.fill(text))
        return PipelineSubject(pipe, self._backend).open(tasks, text)

    def write(self, state: State) -> str:
        text = self._first.write(state)
        self._folders.note(text)
        return text

    def __str__(self) -> str:
        return f"{self._first}, in {self._folders.here.name}"
