"""Random pipelines over small files of every format, and the same over their items as plain libraries read them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from hypothesis import strategies as st

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.state import At, CountedStates, Tree
from streamline.errors import PlanError
from streamline.io.formats import array_record, hdf5, lance, mds, npy, parquet_table
from streamline.io.formats import columnar as arrow_groups
from streamline.io.formats import columnar as arrow_items
from streamline.io.formats import csv as csv_files
from streamline.io.formats import line_decoding as lines
from streamline.io.formats.whole_files import WholeFile
from streamline.io.storage import local
from streamline.pipeline import Pipeline
from streamline.sharding.index import Bijection
from streamline.sources.base import Mode, Part, Source
from streamline.testing.compositions import Composition, continued
from streamline.testing.steps import Step, steps_before
from tests.io.formats.records import put
from tests.laws.written import FORMATS, Broken, Format, Written, numbered

__all__ = ["Case", "cases", "number_of", "turned"]

T = TypeVar("T")

GRAINS: dict[str, dict[Any, dict[str, int]]] = {
    "as ever": {},
    "small": {
        lines: {"FIRST_SLICE_BYTES": 2, "SLICE_BYTES": 2},
        csv_files: {"SLICE_BYTES": 2},
        local: {"FIRST_BLOCK_BYTES": 3, "BLOCK_BYTES": 4},
        arrow_groups: {"STEP_BYTES": 100},
        arrow_items: {"CALL_BYTES": 1},
        npy: {"BLOCK_BYTES": 30, "BLOCK_ROWS": 3},
        hdf5: {"OBJECT_ROWS": 3, "FETCH_BYTES": 512, "BLOCK_BYTES": 30},
        array_record: {"BLOCK_BYTES": 30},
        lance: {"STEP_ROWS": 2},
        mds: {"BLOCK_BYTES": 30},
    },
    "medium": {
        lines: {"FIRST_SLICE_BYTES": 7, "SLICE_BYTES": 40},
        csv_files: {"SLICE_BYTES": 30},
        local: {"FIRST_BLOCK_BYTES": 600, "BLOCK_BYTES": 50},
        arrow_groups: {"STEP_BYTES": 10},
    },
}
"""How large the pieces are in which files are read: by module, the constants."""


def number_of(item: Any) -> int:
    """Return a number that says all of an item: what the kit's stages work on."""
    if isinstance(item, Broken):
        raise item
    if isinstance(item, WholeFile):
        item = (Path(item.path).name, item.data)
    return zlib.crc32(repr(item).encode()) % 10_007


@dataclass(frozen=True, kw_only=True)
class Plain(Source[Any]):
    """The items of files as plain libraries read them: what the oracle takes for true."""

    modes: ClassVar[tuple[Mode, ...]] = ("file", "contiguous", "replicated")
    listed: ClassVar[bool] = True

    files: tuple[Written, ...]

    @property
    def default_mode(self) -> Mode:
        return "contiguous" if len(self.files) == 1 else "file"

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[Any]:
        context = StageContext(site)

        async def lists() -> Lists[Any]:
            if items := self._items(site, part):
                yield Chunk(items, CountedStates(self.name, 1))

        return ListsFlow(At(self.name, 0), lists(), context)

    def _items(self, site: Site, part: Part) -> list[Any]:
        if part.mode == "contiguous" and site.num_shards > 1:
            return self.files[0].share(site.shard, site.num_shards)
        files = list(self.files)
        if part.shuffle_seed is not None and len(files) > 1:
            order = Bijection(len(files), (part.shuffle_seed, *site.epoch))(np.arange(len(files)))
            files = [files[index] for index in order.tolist()]
        if part.mode == "file":
            files = files[site.shard :: site.num_shards]
        items = turned([file.items for file in files], part.interleave)
        bad = next((at for at, item in enumerate(items) if isinstance(item, Broken)), None)
        if part.mode != "replicated" or bad is None:
            return items
        return items[:bad] + [items[bad]] * site.num_shards  # each worker comes to it, and takes every n-th from here


def turned(unopened: list[list[T]], k: int) -> list[T]:
    """Return the items of lists, k of them in turn; where one ends, the next follows."""
    waiting = [list(items) for items in unopened]
    slots = [waiting.pop(0) for _ in range(min(k, len(waiting)))]
    found: list[T] = []
    while slots:
        slot = slots.pop(0)
        while not slot and waiting:
            slot = waiting.pop(0)
        if slot:
            found.append(slot.pop(0))
            slots.append(slot)
    return found


@dataclass(frozen=True, repr=False)
class Case:
    """A random pipeline over files that are not written yet.

    Attributes:
      composition: over files of a folder that isn't there.
      files: what is to be written.
      grain: which of `GRAINS`.
    """

    composition: Composition
    format: Format
    files: tuple[Written, ...]
    grain: str

    def __repr__(self) -> str:
        held = [(file.suffix, file.items) for file in self.files]
        return f"{self.composition.text}, {self.grain} pieces, of {held}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # for hypothesis, which would print all fields
        printer.text(repr(self))

    @property
    def names(self) -> list[str]:
        """The files' names, in order."""
        return [f"{number:02}{file.suffix}" for number, file in enumerate(self.files)]

    @property
    def plain(self) -> Pipeline[Any]:
        """The same stages over the items, as plain libraries read them."""
        items = [
            [WholeFile(name, item.data) if isinstance(item, WholeFile) else item for item in file.items]
            for name, file in zip(self.names, self.files, strict=True)
        ]
        files = [replace(file, items=own) for file, own in zip(self.files, items, strict=True)]
        pipe = self.composition.pipeline
        return replace(pipe, source=Plain(name=pipe.source.name, files=tuple(files)))

    def over(self, where: Callable[[str], str]) -> Pipeline[Any]:
        """Return the pipeline over its files as they are called there."""
        source = self.format.read([where(name) for name in self.names]).plan.source
        return replace(self.composition.pipeline, source=source)

    @contextmanager
    def written(self) -> Iterator[tuple[Pipeline[Any], Path]]:
        """Write the files, and return the pipeline over them, and their folder."""
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            for name, file in zip(self.names, self.files, strict=True):
                put(Path(folder, name), file.data)
            for module, constants in GRAINS[self.grain].items():
                for constant, value in constants.items():
                    patch.setattr(module, constant, value)
            patch.setattr(parquet_table, "STEP_BYTES", arrow_groups.STEP_BYTES)
            yield self.over(lambda name: str(Path(folder, name))), Path(folder)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    choosing: bool | None = None,
    most: int = 20,
    stages: int = 3,
    formats: Sequence[Format] = FORMATS,
    grains: Sequence[str] = tuple(GRAINS),
    before: bool = True,
    step: st.SearchStrategy[Step] | None = None,
) -> Case:
    """Random pipelines over random files.

    Args:
      choosing: as `compositions`.
      most: items in all files, about.
      stages: before the merge, and behind it, at the most.
      formats: those to choose from.
      grains: likewise.
      before: whether stages may stand before the shard.
      step: steps to choose from; None: all.
    """
    format = draw(st.sampled_from(formats))
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, max(1, 2 * most // count)), min_size=count, max_size=count))
    files = tuple(format.write(draw, numbers) for numbers in numbered(sizes))
    made = draw(continued(draw(_begun(format, files, before)), choosing=choosing, stages=stages, step=step))
    return Case(made, format, files, draw(st.sampled_from(grains)))


@st.composite
def _begun(draw: st.DrawFn, format: Format, files: tuple[Written, ...], before: bool) -> Composition:
    """Files, what stands before the shard, the shard, and what makes numbers of items."""
    items = sum(len(file.items) for file in files)
    pipe = format.read([f"nowhere/{number}" for number in range(len(files))])
    made = Composition(pipe, f"{format.text} of {[len(file.items) for file in files]}", items)
    if draw(st.booleans()):
        seed = draw(st.integers(0, 3))
        made = Composition(made.pipeline.shuffle_files(seed=seed), f"{made.text}.shuffle_files(seed={seed})", items)
    modes: list[Mode] = ["file", "file", "replicated"]
    if len(files) == 1 and (files[0].starts is not None or files[0].groups is not None):
        modes += ["contiguous"] * 3
    mode, shards = draw(st.sampled_from(modes)), draw(st.integers(1, 5))
    turns = draw(st.sampled_from([1, 2, 3, 7])) if mode == "file" else 1
    made = made.with_steps(draw(st.lists(steps_before(indexable=False), max_size=2 if before else 0)))
    try:
        sharded = made.pipeline.shard(shards, mode=mode, interleave=turns)
    except PlanError:  # what stands before it needs another mode
        sharded, mode, turns = made.pipeline.shard(shards, mode="replicated"), "replicated", 1
    text = f"{made.text}.shard({shards}, {mode}, interleave={turns}).map(number_of)"
    return Composition(sharded.map(number_of), text, made.most)
