"""Short pipelines of numbers, and a stage that holds three: what the laws of passes that are read again share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import streamline as sl
from streamline.pipeline import Pipeline

__all__ = ["AnyPipeline", "in_threes", "numbers"]

AnyPipeline = Pipeline[Any]


@sl.stage(state=dict)
async def in_threes(items: AsyncIterator[Any], *, state: dict[str, Any]) -> AsyncIterator[Any]:
    held = state.setdefault("held", [])
    async for item in items:
        held.append(item)
        if len(held) == 3:
            for one in held:
                yield one
            held.clear()
    for one in held:
        yield one
    held.clear()


def numbers(length: int, start: int = 0) -> AnyPipeline:
    return sl.from_items(range(start, start + length))
