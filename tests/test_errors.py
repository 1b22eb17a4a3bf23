"""What messages are made of."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import streamline as sl
from streamline.core.flow import Site
from streamline.core.process_random import Look
from streamline.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("part-000.jsonl (copy) [1] 100%", "part-000.jsonl (copy) [1] 100%"),
        ("Größe 東京\u3000a\xa0b ∑ 🎉", "Größe 東京\u3000a\xa0b ∑ 🎉"),
        ("a\\b", "a\\b"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202egpj.exe\u2066", r"\u202egpj.exe\u2066"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_would_act_on_a_terminal_is_escaped_and_nothing_else(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown, "what is escaped stays as it is"
    shown.encode("utf-8")


CLEAR = "a\x1b[2Jb"
"""A name that clears a terminal, as a stage's may that is called as a file is."""


def code_changed() -> None:
    with sl.from_items(range(4)).map(lambda n: n, name=CLEAR).open() as stream:
        snapshot = stream.snapshot()
    with sl.from_items(range(4)).map(lambda n: n + 1, name=CLEAR).open(resume=snapshot):
        pass


def shards_begin_alike() -> None:
    @sl.source(state=dict)
    def whole(*, state: dict[str, Any], shard: int, num_shards: int) -> Iterator[int]:
        yield from range(100)

    list(whole(name=CLEAR).shard(2))


def resumed_from_its_start() -> None:
    async def through(flow: Any) -> AsyncIterator[Any]:
        async for item in flow:
            yield item

    through.__name__ = through.__qualname__ = CLEAR
    sl.from_items([1]).through(through)


def draws_from_a_shared_generator() -> None:
    look = Look(CLEAR, Site(SimpleNamespace(session=SimpleNamespace(where="process 0"))))  # type: ignore[arg-type]
    look.begin()
    random.random()
    look.end()


def state_that_stands_still() -> None:
    stateful: Any = type(CLEAR, (), {"__iter__": lambda self: iter(range(100)), "state_dict": lambda self: {}})
    stateful.load_state_dict = print
    list(sl.from_iterable(stateful))


@pytest.mark.parametrize(
    "warn",
    [code_changed, shards_begin_alike, resumed_from_its_start, draws_from_a_shared_generator, state_that_stands_still],
)
def test_names_in_warnings_are_escaped(warn: Callable[[], None]) -> None:
    with pytest.warns(Warning, match=r"a\\x1b") as caught:
        warn()
    assert [r"a\x1b[2Jb" in str(one.message) and "\x1b" not in str(one.message) for one in caught] == [True]
