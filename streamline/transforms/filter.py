"""Dropping items, with progress, so that a resume doesn't read again what was dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.core.blame import blame
from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.pace import map_in_slices
from streamline.core.replay import Adapter, FailedCall
from streamline.core.state import Picked
from streamline.transforms.base import Stage

ASYNC_VERDICT = "it would always be true; await it in a .map before, and filter by what that returns"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Filter(Stage[T, T]):
    """Keeps the items for which `fn` is true."""

    kind: ClassVar[str] = "filter"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "fn": "the items from here on are those that the new function keeps",
        "added": "the items from here on are filtered",
        "removed": "the items from here on come unfiltered",
    }

    fn: Callable[[T], object]

    async def lists(self, run: StageRun[T]) -> Lists[T]:
        async with aclosing(map_in_slices(run, self.fn, str(self), ASYNC_VERDICT)) as parts:
            async for chunk, verdicts in parts:
                try:
                    kept = [index for index, verdict in enumerate(verdicts) if verdict]
                except Exception:  # an array, say, has no truth value: `_filter_chunk` finds the first one
                    async for part in self._filter_chunk(run, chunk, verdicts):
                        yield part
                else:
                    yield _kept(chunk, kept)
                    del kept
                del chunk, verdicts  # release the items while the next are made

    async def _filter_chunk(self, run: StageRun[T], chunk: Chunk[T], verdicts: Sequence[object]) -> Lists[T]:
        """Yield what is kept of a chunk, up to the first verdict without a truth value that isn't skipped."""
        kept: list[int] = []
        begin = 0
        for index, verdict in enumerate(verdicts):
            try:
                if verdict:
                    kept.append(index - begin)
                continue
            except Exception as error:
                error.add_note(f"expected true or false of {self}'s function, got {type(verdict).__name__}")
                failure = blame(
                    error, str(self), run.site, chunk.states[index], FailedCall(_AsBool(self.fn), chunk.items[index])
                )
            if index > begin:
                yield _kept(chunk.part(begin, index - begin), kept)
            run.skip_or_raise(failure, chunk.items[index], chunk.states[index])
            kept, begin = [], index + 1
        if begin < len(verdicts):
            yield _kept(chunk.part(begin, len(verdicts) - begin), kept)
        else:
            yield Chunk((), (), chunk.end)


class _AsBool(Adapter):
    """Calls a function for the truth value of its result; a replay calls this."""

    def __init__(self, fn: Callable[[Any], object]) -> None:
        self.fn = fn

    def __call__(self, given: Any) -> bool:
        return bool(self.fn(given))

    def around(self, fn: Callable[[Any], object]) -> Callable[[Any], bool]:
        return _AsBool(fn)


def _kept(chunk: Chunk[T], kept: Sequence[int]) -> Chunk[T]:
    if len(kept) == len(chunk.items):
        return chunk
    return Chunk([chunk.items[index] for index in kept], Picked(chunk.states, kept), chunk.end)
