"""What every flow has beside its items: the state after them, and marks."""

from __future__ import annotations

import weakref

import anyio

import streamline as sl
from streamline.core.flow import Chunk, Flow, Site
from streamline.core.state import At
from streamline.core.tasks import Tasks
from streamline.sources.base import Part


class Item:
    pass


class Lists(Flow[Item]):
    """Gives three items, however few are wanted."""

    made: tuple[weakref.ref[Item], ...] = ()

    async def _next(self, limit: int) -> Chunk[Item] | None:
        items = [Item(), Item(), Item()]
        self.made = tuple(map(weakref.ref, items))
        return Chunk(items, [At("items", number) for number in (1, 2, 3)])


async def test_a_flow_that_is_closed_keeps_no_item_that_was_not_asked_for() -> None:
    flow = Lists(At("items", 0))
    assert await flow.pull(1) is not None
    await flow.aclose()
    assert [made() for made in flow.made] == [None] * 3
    assert flow.state.json() == {"items": 1}


async def test_progress_after_a_list_comes_with_its_last_part_only() -> None:
    chunk = Chunk([1, 2, 3], [At("items", number) for number in (1, 2, 3)], At("items", 9))
    assert [chunk.part(start, 1).end.json() for start in range(3)] == [{"items": number} for number in (1, 2, 9)]


async def test_a_mark_resumes_where_it_was_taken_however_far_the_flow_has_gone() -> None:
    async with anyio.create_task_group() as group:
        flow = sl.from_items(range(10)).source.open(Site(Tasks(group)), Part(mode="interleaved"))
        await flow.pull(3)
        mark = flow.state
        await flow.pull(4)
        assert flow.state.json() == {"items": 7}
        assert flow.since(mark).json() == mark.json() == {"items": 3}
        await flow.aclose()
