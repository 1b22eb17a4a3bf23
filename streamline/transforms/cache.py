"""Keeping one pass of the upstream in memory, for the passes behind it: `.cache().repeat(3)` reads it once.

What was drawn belongs to the running (`Session.shares`), one for each shard, and the next pass finds it there. A pass
that was left before its end is drawn again, as it was. A running that is opened anew draws anew.

State: the upstream's at the start of that pass (a mark, `Since`), its epoch, and how many items were served
of this pass. A resume has nothing in memory: it draws again what was served, and keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from streamline.errors import CacheFull, ResumeError
from streamline.flow import Chunk, Flow, Lists, ListsFlow, Opener, Run
from streamline.pace import Pace
from streamline.sizes import nbytes
from streamline.states import Json, Over, Since, State, States, Tree
from streamline.transforms.base import Stage

__all__ = ["Cache"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cache(Stage[T, T]):
    """Serves one pass of the upstream again and again, up to `max_bytes` of it (None: no bound) in each worker."""

    survives: ClassVar[Mapping[str, str]] = {
        "added": "the items from here on are kept, and come again in the passes behind this one",
        "removed": "the items from here on are read anew in each pass",
    }

    max_bytes: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def num_outputs(self, items: float) -> float | None:
        return items

    @classmethod
    def again(cls, own: Json) -> str | None:
        if not own or not own["served"]:
            return None
        return f"draws the {own['served']:,} items of its pass again that were delivered, to keep them"

    @classmethod
    def holds(cls, own: Json) -> str | None:
        return cls.again(own)

    @property
    def rewinds(self) -> bool:
        return True

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        site = upstream.site
        own = None if state is None else state.get(self.name)
        shares, key = site.tasks.session.shares, f"cache {self.name} of shard {site.shard}"
        before: _Kept[T] | None = shares.get(key) if state is None else None
        if before is not None and before.ended:
            kept = before
        elif before is not None:  # that pass was left before its end
            kept = _Kept(self, before.opener, before.mark)
        else:
            epoch = site.epoch if own is None else tuple(own["epoch"])
            kept = _Kept(self, upstream.at(replace(site, epoch=epoch)), state)
        shares[key] = kept
        served, reading = 0 if own is None else own["served"], _Reading(kept)
        run = self.run_over(reading, site, state, own)
        return ListsFlow(kept.state(served, kept.begin), self._serve(run, kept, served), run, reading)

    async def _serve(self, run: Run[T], kept: _Kept[T], served: int) -> Lists[T]:
        pace = Pace()
        while len(kept.items) < served:
            if await run.upstream.pull(served - len(kept.items)) is None:
                raise ResumeError(
                    f"{self} had served {served:,} items of a pass, and only {len(kept.items):,} of them can be drawn "
                    "again: what is before it gives fewer than it did"
                )
            await pace.breathe()
        if served:  # there may be no item behind these to say what was left out among them
            yield Chunk((), (), kept.state(served, kept.now))
        while True:
            if served < len(kept.items):
                items: Sequence[T] = kept.items[served : served + run.want]
                chunk = Chunk(items, _Served(self.name, kept, served, None))
            elif (drawn := await run.upstream.pull(run.want)) is not None:
                items = drawn.items
                after = None if drawn.after is None else kept.state(served + len(items), drawn.after)
                chunk = Chunk(items, _Served(self.name, kept, served, drawn.states), after)
            else:
                return
            served += len(items)
            yield chunk
            await pace.breathe()


class _Kept(Generic[T]):
    """What was drawn of one pass, and where more of it comes from.

    Attributes:
      opener: of the upstream, in that pass.
      mark: where it is opened; None: at the beginning.
      begin: the upstream's state there; `now`: behind what was drawn.
      flow: the upstream, until it has been closed.
      ended: it is all here.
    """

    def __init__(self, stage: Cache[T], opener: Opener[T], mark: Tree | None) -> None:
        self.opener = opener
        self.mark = mark
        self.items: list[T] = []
        self.ended = False
        self.flow: Flow[T] = opener(mark)
        self.begin = self.now = self.flow.state
        self._stage = stage
        self._bytes = 0

    def state(self, served: int, now: State) -> State:
        """Return the stage's state behind so many items of a pass, when the upstream stood at `now`."""
        return _state(self._stage.name, self.opener.site.epoch, self.begin, served, now)

    def keep(self, chunk: Chunk[T]) -> None:
        """Add what was drawn.

        Raises:
          CacheFull: it is more than may be kept.
        """
        most = self._stage.max_bytes
        if most is not None:
            size = sum(map(nbytes, chunk.items))
            if self._bytes + size > most:
                raise CacheFull(
                    f"{self._stage} of shard {self.opener.site.shard} holds {len(self.items):,} items of "
                    f"{self._bytes:,} bytes, and the next {len(chunk.items):,} have {size:,}: a pass doesn't fit into "
                    f"max_bytes={most:,}. Raise it, put .cache before what makes items large, or leave it out: each "
                    "pass is read anew then"
                )
            self._bytes += size
        self.items.extend(chunk.items)
        self.now = chunk.end


class _Reading(Flow[T]):
    """What is not kept yet: it is kept as it is read."""

    def __init__(self, kept: _Kept[T]) -> None:
        super().__init__(kept.now)
        self._kept = kept

    async def _next(self, limit: int) -> Chunk[T] | None:
        kept = self._kept
        if kept.ended:
            return None
        kept.flow.reader = self.reader
        if (chunk := await kept.flow.pull(limit)) is None:
            kept.ended = True
        else:
            kept.keep(chunk)
        return chunk

    async def aclose(self) -> None:
        await super().aclose()
        await self._kept.flow.aclose()


def _state(name: str, epoch: tuple[int, ...], begin: State, served: int, now: State) -> State:
    return Over(name, {"served": served, "epoch": list(epoch)}, Since(begin, now))


class _Served:
    """The states of a list: of items that were kept before, or as they were drawn. Nothing of what is kept."""

    __slots__ = ("_begin", "_epoch", "_first", "_name", "_now", "_states")

    def __init__(self, name: str, kept: _Kept[Any], first: int, states: States | None) -> None:
        self._name, self._epoch, self._begin = name, kept.opener.site.epoch, kept.begin
        self._first, self._states, self._now = first, states, kept.now

    def __getitem__(self, index: int, /) -> State:
        now = self._now if self._states is None else self._states[index]
        return _state(self._name, self._epoch, self._begin, self._first + index + 1, now)
