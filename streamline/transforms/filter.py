"""Dropping items, with progress, so that a resume doesn't read again what was dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from streamline.flow import Chunk, Lists, Run
from streamline.states import Picked
from streamline.transforms.base import Stage
from streamline.transforms.calls import not_awaited, results

__all__ = ["Filter"]

ASYNC_VERDICT = "it would always be true; await it in a .map before, and filter by what that returns"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Filter(Stage[T, T]):
    """Keeps the items for which `fn` is true."""

    survives: ClassVar[Mapping[str, str]] = {
        "fn": "the items from here on are those that the new function keeps",
        "added": "the items from here on are filtered",
        "removed": "the items from here on come unfiltered",
    }

    fn: Callable[[T], object]

    async def lists(self, run: Run[T]) -> Lists[T]:
        async with aclosing(results(run, self.fn, str(self))) as parts:
            async for chunk, verdicts in parts:
                if (problem := not_awaited(str(self), verdicts, ASYNC_VERDICT)) is not None:
                    raise problem
                kept = [index for index, verdict in enumerate(verdicts) if verdict]
                if len(kept) == len(chunk.items):
                    yield chunk
                else:
                    yield Chunk([chunk.items[index] for index in kept], Picked(chunk.states, kept), chunk.end)
                del chunk, verdicts  # the reader has it: items are not kept while the next are made
