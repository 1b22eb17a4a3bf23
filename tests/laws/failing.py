"""Steps on which user code fails for some items, by content: in every resume it is the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio.lowlevel
from hypothesis import strategies as st

from streamline.testing.steps import DICE, Step, each, number

__all__ = ["failing_steps"]


def check(item: Any) -> Any:
    if number(item) % 5 == 1:
        raise ValueError(f"no {item!r}, please")
    return item


async def check_slowly(item: Any) -> Any:
    for _ in range(number(item) * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return check(item)


async def check_anyhow(item: Any) -> Any:
    for _ in range(DICE.randrange(6)):
        await anyio.lowlevel.checkpoint()
    return check(item)


def not_third(item: Any) -> bool:
    return bool(number(check(item)) % 3)


def two(item: Any) -> Iterator[Any]:
    yield item
    if number(item) % 5 == 2:
        raise ValueError("the second of the two")
    yield each(lambda x: x + 100_000, item)


def together(items: list[Any]) -> list[Any]:
    if number(items) % 4 == 1:
        raise ValueError("not together")
    return items


def refuse(item: Any) -> Any:
    raise ValueError("none at all")


def noisy_check(item: Any, *, rng: Any) -> Any:
    draw = int(rng.integers(100))
    return each(lambda x: x + 10_000 * draw, check(item))


@st.composite
def failing_steps(draw: st.DrawFn) -> Step:
    """A stage that fails for some items. What it drops depends on the item, not on batches behind choices."""
    calls = draw(st.integers(1, 5))
    ordered = draw(st.booleans())
    return draw(
        st.sampled_from(
            [
                Step(".map(check)", lambda p: p.map(check), whole=True),
                Step(".map(refuse)", lambda p: p.map(refuse), whole=True),
                Step(
                    f".map(check_slowly, concurrency={calls})",
                    lambda p: p.map(check_slowly, concurrency=calls),
                    whole=True,
                ),
                Step(
                    f".map(check_anyhow, concurrency={calls}, ordered=False)",
                    lambda p: p.map(check_anyhow, concurrency=calls, ordered=False),
                    whole=True,
                ),
                Step(
                    f".map(check, executor='thread', concurrency={calls}, ordered={ordered})",
                    lambda p: p.map(check, executor="thread", concurrency=calls, ordered=ordered),
                    whole=True,
                ),
                Step(".map(noisy_check, seed=1)", lambda p: p.map(noisy_check, seed=1), ordered=True, whole=True),
                Step(".filter(not_third)", lambda p: p.filter(not_third), whole=True),
                Step(".flat_map(two)", lambda p: p.flat_map(two), whole=True, grows=2),
                Step(
                    f".batch({calls}, collate=together)",
                    lambda p: p.batch(calls, collate=together),
                    ordered=True,
                    whole=True,
                ),
            ]
        )
    )
