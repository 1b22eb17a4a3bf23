"""`.cache`: keeps one pass of the upstream for later passes, so that `.cache().repeat(3)` reads it once.

One read of the upstream that is kept is a *drawing*. In memory, it belongs to one shard of the run
(`Session.per_source`), and the next pass finds it there; a pass that was left before its end is drawn again, from the
same state. A new run draws anew. On disk (`streamline.transforms.cache_disk`), the drawing belongs to the folder.

State: the upstream's at the start of the drawing's pass (a mark, `Since`), its epoch, the drawing's number, and how
many items of this pass were served. A resume in memory draws again what was served, and keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, StageRun
from streamline.core.pace import Pace
from streamline.core.state import Since, SkipCounts, Tree, consumed_of, read_again, skips_in, with_skips
from streamline.core.tree import nbytes
from streamline.errors import CacheFull, PlanError, ResumeError
from streamline.sources.base import Source
from streamline.transforms.base import Stage
from streamline.transforms.cache_disk import (
    CacheState,
    PassHistory,
    Passing,
    PassPlace,
    ServedStates,
    gives_fewer,
    open_on_disk,
)
from streamline.transforms.cache_files import CacheFiles

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cache(Stage[T, T]):
    """Serves one pass of the upstream again and again.

    Attributes:
      max_bytes: kept in each worker; None: no bound.
      path: of the folder to keep it in; None: in memory.
      of: digest of the stages upstream, to which files belong; set when the plan is opened.
      chosen: whether a stage upstream chooses an order that another run would choose differently; likewise.
    """

    kind: ClassVar[str] = "cache"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "added": "the items from here on are kept, and come again in the passes after this one",
        "removed": "the items from here on are read anew in each pass",
    }
    state_type: ClassVar[Any] = Passing
    uncounted_options = ("max_bytes", "path", "of", "chosen")
    one_to_one = True
    rewinds = True

    max_bytes: int | None = None
    path: str | None = None
    of: str = "0" * 16
    chosen: bool = False

    def check_live(self, source: Source[Any]) -> None:
        raise PlanError(f".cache keeps a pass for the next one, and {source.kind} has only one: leave it out")

    def without_disk(self) -> Cache[T]:
        return replace(self, path=None)

    @classmethod
    def replay_cost(cls, own: Passing) -> str | None:
        again = own.served - (own.kept or 0)
        return f"draws the {again:,} items of its pass again that were delivered, to keep them" if again > 0 else None

    @classmethod
    def held_items(cls, own: Passing) -> str | None:
        if own.served and own.kept:
            return f"has served {own.served:,} items of a pass that is in its files"
        return cls.replay_cost(own)

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        own: Passing | None = self.part_of(state)
        site = upstream.site
        history = PassHistory.of(self.name, site, own)
        if self.path is not None:
            whose = self.path, str(self), self.name, self.of, site.shard, site.num_shards
            run_over = partial(self.run_over, site=site, state=state, own=own)
            files = CacheFiles(*whose, self.max_bytes)
            return open_on_disk(self.name, self.chosen, own, files, run_over, history, upstream, state)
        if own is not None and own.kept:
            raise ResumeError(
                f"the snapshot's pass of {self} is in the files of a folder: resume it with .cache(path=) as it was"
            )
        before: _CachedPass[T] | None = history.kept if state is None else None
        if before is not None and before.ended:
            kept = before
        elif before is not None:  # left before its end
            kept = before.again(site.skipped)
        else:
            epoch = site.epoch if own is None else tuple(own.epoch)
            kept = _CachedPass(self, upstream.at(replace(site, epoch=epoch)), state)
        history.kept, history.clear = kept, kept.items.clear
        served, reading = 0 if own is None else own.served, _CachingFlow(kept)
        place = PassPlace(self.name, site.epoch, Passing(0, list(kept.opener.site.epoch), history.drawing or 0))
        run = self.run_over(reading, site, state, own)
        begin = CacheState(place, served, Since(kept.begin, kept.now))
        return ListsFlow(begin, self._serve(run, kept, place, served), run, reading)

    async def _serve(self, run: StageRun[T], kept: _CachedPass[T], place: PassPlace, served: int) -> Lists[T]:
        pace = Pace()
        while len(kept.items) < served:
            if await run.upstream.pull(served - len(kept.items)) is None:
                raise ResumeError(gives_fewer(str(self), served, len(kept.items)))
            await pace.maybe_yield()
        if served:  # no later item may come to report what was skipped among these
            yield Chunk((), (), CacheState(place, served, Since(kept.begin, kept.now)))
        while True:
            if served < len(kept.items):
                items: Sequence[T] = kept.items[served : served + run.want]
                chunk = Chunk(items, ServedStates(place, served, Since(kept.begin, kept.now)))
            elif (drawn := await run.upstream.pull(run.want)) is not None:
                items = drawn.items
                after = None
                if drawn.progress is not None:
                    after = CacheState(place, served + len(items), Since(kept.begin, drawn.progress))
                chunk = Chunk(items, ServedStates(place, served, kept.begin, drawn.states), after)
            else:
                return
            served += len(items)
            yield chunk
            await pace.maybe_yield()


class _CachedPass(Generic[T]):
    """A drawing in memory, and the flow that the rest of it comes from.

    Attributes:
      opener: of the upstream, in that pass.
      mark: where it is opened; None: at the beginning.
      begin: the upstream's state there; `now`: after what was drawn.
      flow: the upstream, until it has been closed.
      ended: the drawing is complete.
      rest: drawn, but not kept for lack of room.
    """

    def __init__(self, stage: Cache[T], opener: Opener[T], mark: Tree | None) -> None:
        self.opener = opener
        self.mark = mark
        self.items: list[T] = []
        self.ended = False
        self.rest: Chunk[T] | None = None
        self.flow: Flow[T] = opener(mark)
        self.begin = self.now = self.flow.state
        self._stage = stage
        self._bytes = 0

    def again(self, skipped: Mapping[tuple[int, str], SkipCounts]) -> _CachedPass[T]:
        """Return a drawing of the same items, of which so many were skipped before: they are only tried again."""
        site, mark = self.opener.site, self.mark
        before = site.skipped if mark is None else {(site.shard, name): n for name, n in skips_in(mark).items()}
        counts = read_again(before, {key: consumed_of(count) for key, count in skipped.items()})
        if mark is not None:
            mark = with_skips(mark, {name: count for (_, name), count in counts.items()})
        return _CachedPass(self._stage, self.opener.at(replace(site, skipped=counts)), mark)

    def keep(self, chunk: Chunk[T]) -> Chunk[T]:
        """Keep what was drawn as far as there is room, and return that; the others become `rest`.

        Raises:
          CacheFull: there is no room for the first item.
        """
        most = self._stage.max_bytes
        if most is not None:
            count = self._fitting(chunk.items, most)
            if count < len(chunk.items):
                if not count:
                    raise CacheFull(
                        f"{self._stage} of shard {self.opener.site.shard} holds {len(self.items):,} items of "
                        f"{self._bytes:,} bytes, and the next one has {nbytes(chunk.items[0]):,}: a pass doesn't fit "
                        f"into max_bytes={most:,}. Raise it, put .cache before what makes items large, or leave it "
                        "out: each pass is read anew then"
                    )
                self.rest = chunk.part(count, len(chunk.items))
                chunk = chunk.part(0, count)
        self.items.extend(chunk.items)
        self.now = chunk.end
        return chunk

    def _fitting(self, items: Sequence[T], most: int) -> int:
        """Return how many of these there is room for; counts their bytes."""
        for count, item in enumerate(items):
            if self._bytes + (size := nbytes(item)) > most:
                return count
            self._bytes += size
        return len(items)


class _CachingFlow(Flow[T]):
    """Keeps items as they are read from the upstream. `aclose` releases the drawing."""

    def __init__(self, kept: _CachedPass[T]) -> None:
        super().__init__(kept.now)
        self._kept: _CachedPass[T] | None = kept

    async def _next(self, limit: int) -> Chunk[T] | None:
        kept = self._kept
        if kept is None or kept.ended:
            return None
        kept.flow.reader = self.reader
        chunk = await kept.flow.pull(limit) if kept.rest is None else kept.rest
        if chunk is None:
            kept.ended = True
            return None
        return kept.keep(chunk)

    async def aclose(self) -> None:
        await super().aclose()
        if self._kept is not None:
            await self._kept.flow.aclose()
            self._kept = None
