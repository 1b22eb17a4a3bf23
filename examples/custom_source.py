"""A source of one's own: a table that is read page by page, resumed in the middle of a page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio

import streamline as sl
from streamline.testing import check_resume

ROWS = 40
asked: list[int] = []
"""The pages that the table was asked for."""


async def fetch(page: int, size: int) -> list[str]:
    """Return one page of a table that is somewhere else: none after the last."""
    asked.append(page)
    await anyio.sleep(0.001)
    return [f"row {row}" for row in range(page * size, min((page + 1) * size, ROWS))]


@sl.source(state=dict)
async def table(*, state: dict[str, Any], shard: int, num_shards: int, size: int) -> AsyncIterator[str]:
    """Yield the rows of every `num_shards`-th page. Where it stands is in `state`: a page, and the rows done of it."""
    state.setdefault("page", shard)
    state.setdefault("done", 0)
    while rows := await fetch(state["page"], size):
        for row in rows[state["done"] :]:
            state["done"] += 1  # first: the dict at a yield is what resumes after it
            if state["done"] == len(rows):
                state.update(page=state["page"] + num_shards, done=0)
            yield row


def main() -> None:
    pipe = table(size=6).shard(2)
    with pipe.open() as stream:
        before = [next(stream) for _ in range(27)]
        saved = stream.snapshot().to_json()

    asked.clear()
    with pipe.open(resume=sl.Snapshot.from_json(saved)) as stream:
        rest = list(stream)
    print("where the workers stood:", *sl.Snapshot.from_json(saved).worker_states)
    print("pages asked for after the resume:", *sorted(asked))
    print("every row exactly once:", sorted(before + rest) == sorted(f"row {row}" for row in range(ROWS)))

    check_resume(pipe)
    print("resumed from everywhere, exact: True")


if __name__ == "__main__":
    main()
