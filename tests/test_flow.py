"""What every flow has beside its items: the state behind them, and marks."""

from __future__ import annotations

import anyio

import streamline as sl
from streamline.flow import Site
from streamline.sources.base import Part
from streamline.tasks import Tasks


async def test_a_mark_resumes_where_it_was_taken_however_far_the_flow_has_gone() -> None:
    async with anyio.create_task_group() as group:
        flow = sl.from_items(range(10)).source.open(Site(Tasks(group)), Part(mode="interleaved"))
        await flow.pull(3)
        mark = flow.state
        await flow.pull(4)
        assert flow.state.json() == {"items": 7}
        assert flow.since(mark).json() == mark.json() == {"items": 3}
        await flow.aclose()
