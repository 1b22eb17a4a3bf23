"""Exposed waits: the consumer's wait, divided over the stages that it waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.core.figures import ChannelStats, Detail, Figures, StageStats
from streamline.observe.metrics import exposed_waits

SOURCE = StageStats(name="items", kind="from_items")
MAP = StageStats(name="decode", kind="map")
MERGE = StageStats(name="merge", kind="merge")
BATCH = StageStats(name="batch", kind="batch")


def ten_seconds(*stages: StageStats, waits: float, after: tuple[str, ...] = ()) -> Figures:
    """Ten seconds in which the consumer waits a share; a channel stands after each of the stages named."""
    channels = tuple(ChannelStats(name=name) for name in after)
    return Figures(elapsed_s=10.0, items=100, consumer_wait_s=10 * waits, stages=stages, channels=channels)


def spent(
    stage: StageStats, busy: float = 0.0, no_input: float = 0.0, no_room: float = 0.0, **other: Any
) -> StageStats:
    stage = replace(stage, **other)
    return replace(
        stage,
        busy_s=10 * busy * stage.slots, wait_input_s=10 * no_input * stage.workers,
        wait_output_s=10 * no_room * stage.workers,
    )  # fmt: skip


CHAIN = spent(SOURCE, 0.2), spent(MAP, 0.6), spent(MERGE, no_input=0.75), spent(BATCH, 0.25)

EXPOSED = {
    "all in one task": (ten_seconds(*CHAIN[:2], waits=0.4), {"items": 0.1, "decode": 0.3}),
    "what waits for input passes it on": (
        ten_seconds(*CHAIN, waits=0.8, after=("decode", "batch")),
        {"merge": 0, "batch": 0.2, "items": 0.15, "decode": 0.45},
    ),
    "work that is hidden": (ten_seconds(*CHAIN, waits=0.0, after=("decode", "batch")), dict.fromkeys(
        ("items", "decode", "merge", "batch"), 0
    )),
    "a last stage that has no room": (
        ten_seconds(spent(SOURCE, 0.1, no_room=0.9), waits=0.4, after=("items",)), {"items": 0.1}
    ),
    "many workers, many calls": (
        ten_seconds(
            spent(SOURCE, 0.1, workers=4), spent(MAP, 0.9, no_input=0.1, workers=4, concurrency=8),
            spent(MERGE, no_input=1.0), waits=1.0, after=("items", "decode"),
        ),
        {"items": 0.1, "decode": 0.9, "merge": 0},
    ),
    "waits for permits are a stage's own": (
        ten_seconds(SOURCE, spent(MAP, details=(Detail("limited_s", 5.0),)), waits=0.5), {"items": 0, "decode": 0.5}
    ),
    "nothing accounts for it": (ten_seconds(SOURCE, MAP, waits=0.5), {}),
    "no time has passed": (Figures(elapsed_s=0.0, items=0, consumer_wait_s=0.0, stages=(SOURCE,)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPOSED)
def test_waits_are_divided_over_the_stages_that_are_waited_for(name: str) -> None:
    figures, expected = EXPOSED[name]
    assert exposed_waits(figures) == pytest.approx(expected)


def test_components_of_a_mixture_are_side_by_side() -> None:
    web, code = spent(SOURCE, 0.1, name="web/items"), spent(SOURCE, 0.4, name="code/items")
    mix = StageStats(name="mix", kind="mix")
    figures = ten_seconds(web, code, mix, spent(MERGE, no_input=1.0), waits=1.0)
    found = exposed_waits(figures)
    assert found["code/items"] == pytest.approx(4 * found["web/items"])


seconds = st.floats(0, 1e9)
stages = st.builds(
    StageStats,
    name=st.sampled_from("abcd"), kind=st.sampled_from(["map", "merge", "batch", "mix"]), workers=st.integers(0, 4),
    concurrency=st.integers(0, 4), busy_s=seconds, wait_input_s=seconds, wait_output_s=seconds,
)  # fmt: skip


@given(
    st.lists(stages, max_size=6, unique_by=lambda stage: stage.name),
    st.sets(st.sampled_from("abcd")), seconds, seconds,
)  # fmt: skip
def test_exposed_waits_never_exceed_the_consumer_s(
    stages: list[StageStats], ends: set[str], elapsed_s: float, wait_s: float
) -> None:
    channels = tuple(ChannelStats(name=name) for name in ends)
    figures = Figures(
        elapsed_s=elapsed_s, items=1, consumer_wait_s=wait_s, stages=tuple(stages), channels=channels
    )  # fmt: skip
    found = exposed_waits(figures)
    assert all(share >= 0 for share in found.values())
    assert sum(found.values()) <= min(1.0, wait_s / elapsed_s if elapsed_s else 0) + 1e-9
