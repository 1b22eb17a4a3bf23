"""`.cache`: keeps one pass of the upstream for later passes, so that `.cache().repeat(3)` reads it once.

State: the upstream's at the start of the drawing's pass (a mark, `Since`), its epoch, the drawing's number, and how
many items of this pass were served; with files, what `streamline.transforms.cache_disk` says. A new run draws anew,
unless the pass is in files. A resume in memory draws again what was served, and keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from streamline.core.flow import Flow, ListsFlow, Opener
from streamline.core.state import Tree
from streamline.errors import PlanError, ResumeError
from streamline.sources.base import Source
from streamline.transforms.base import Stage
from streamline.transforms.cache_disk import DiskPass
from streamline.transforms.cache_files import CacheFiles
from streamline.transforms.cache_pass import CachePass, MemoryDrawing, MemoryPass, PassHistory, PassPart, PassPlace

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cache(Stage[T, T]):
    """Serves one pass of the upstream again and again.

    Attributes:
      max_bytes: kept in each worker; None: no bound.
      path: of the folder to keep it in; None: in memory.
      upstream_digest: of the stages upstream, to which files belong; set when the plan is opened.
      chosen: whether a stage upstream chooses an order that another run would choose differently; likewise.
    """

    kind: ClassVar[str] = "cache"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "added": "the items from here on are kept, and come again in the passes after this one",
        "removed": "the items from here on are read anew in each pass",
    }
    state_type: ClassVar[Any] = PassPart
    uncounted_options = ("max_bytes", "path", "upstream_digest", "chosen")
    one_to_one = True
    rewinds = True

    max_bytes: int | None = None
    path: str | None = None
    upstream_digest: str = "0" * 16
    chosen: bool = False

    def check_live(self, source: Source[Any]) -> None:
        raise PlanError(f".cache keeps a pass for the next one, and {source.kind} has only one: leave it out")

    def without_disk(self) -> Cache[T]:
        return replace(self, path=None)

    @classmethod
    def replay_cost(cls, own: PassPart) -> str | None:
        again = own.served - (own.kept or 0)
        return f"draws the {again:,} items of its pass again that were delivered, to keep them" if again > 0 else None

    @classmethod
    def held_items(cls, own: PassPart) -> str | None:
        if own.served and own.kept:
            return f"has served {own.served:,} items of a pass that is in its files"
        return cls.replay_cost(own)

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        site = upstream.site
        own: PassPart | None = self.part_of(state)
        history = PassHistory.of(self.name, site, own)
        run_over = partial(self.run_over, site=site, state=state, own=own)
        serving: CachePass[T]
        if self.path is not None:
            shard = site.shard, site.num_shards
            files = CacheFiles(self.path, str(self), self.name, self.upstream_digest, *shard, self.max_bytes)
            serving = DiskPass(self.name, files, history, run_over, upstream, state, own, self.chosen)
        else:
            drawing = self._drawing(upstream, state, own, history)
            epoch = drawing.opener.site.epoch
            place = PassPlace(name=self.name, epoch=epoch, number=site.epoch, drawing=history.drawing or 0)
            served = 0 if own is None else own.served
            serving = MemoryPass(str(self), run_over(drawing.flow), place, served, drawing)
        return ListsFlow(serving.state(), serving.lists(), serving.run, serving.flow)

    def _drawing(
        self, upstream: Opener[T], state: Tree | None, own: PassPart | None, history: PassHistory
    ) -> MemoryDrawing[T]:
        """Return the drawing that a pass in memory serves: that of the pass before, or a new one."""
        if own is not None and own.kept:
            raise ResumeError(
                f"the snapshot's pass of {self} is in the files of a folder: resume it with .cache(path=) as it was"
            )
        site, drawing = upstream.site, history.kept if state is None else None
        if drawing is None:
            epoch = site.epoch if own is None else tuple(own.epoch)
            drawing = MemoryDrawing(upstream.at(replace(site, epoch=epoch)), state, self.max_bytes)
        elif not drawing.complete:  # left before its end
            drawing = drawing.again(site.skipped)
        history.kept = drawing
        return drawing
