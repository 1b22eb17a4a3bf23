"""What messages are made of."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import streamline as sl
from streamline.core.flow import Site
from streamline.core.process_random import Look
from streamline.errors import ReadError, printable


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://h/x?a=1&author=me&monkey=2", "http://h/x?a=1&author=me&monkey=2"),
        ("http://me:PW@h/x", "http://…@h/x"),
        ("http:///u:PW@h", "http:///…@h"),
        ("see HTTPS://token@h/x, or it fails", "see HTTPS://…@h/x, or it fails"),
        ("s3://me:PW@bucket/x", "s3://…@bucket/x"),
        ("abfss://container@account/x", "abfss://container@account/x"),
        ("hf://datasets/me/data@main/x and me@h", "hf://datasets/me/data@main/x and me@h"),
        ("http://h/x?X-Amz-Signature=PW&b=2", "http://h/x?X-Amz-Signature=…&b=2"),
        ("http://h/x?sv=1&sig=PW%2B==.", "http://h/x?sv=1&sig=…."),
        ("http://h/x?ACCESS_TOKEN=PW#z", "http://h/x?ACCESS_TOKEN=…#z"),
        ("http://h/x?key=PW&AWSAccessKeyId=PW", "http://h/x?key=…&AWSAccessKeyId=…"),
        ("['http://h/x?sig=PW', 'http://h/y?sig=PW']", "['http://h/x?sig=…', 'http://h/y?sig=…']"),
        ('["http://h/x?sig=PW","http://h/y?sig=PW"]', '["http://h/x?sig=…","http://h/y?sig=…"]'),
        ("http://x/a\x1b[31m\u202e?sig=PW&y=\x9b", r"http://x/a\x1b[31m\u202e?sig=…&y=\x9b"),
    ],
)
def test_a_url_is_shown_without_what_opens_doors(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", ["?sig", "&sig", "sig", "?sig='", "http:", "://:", ":", "@", "'"])
def test_text_of_a_server_is_made_printable_in_time_that_grows_with_its_length(part: str) -> None:
    begun = time.process_time()
    printable(f"https://?token={part * 100_000}!")
    assert time.process_time() - begun < 5, "it takes some 0.1 s; minutes, where the time grows with the square"


def test_an_error_shows_no_secret_of_a_url_however_it_is_printed() -> None:
    error = ReadError("http:///u:PW@h/x?sig=PW: a\udce9")
    assert str(error) == r"http:///…@h/x?sig=…: a\udce9"
    assert "PW" not in repr(error)
    assert "PW" not in repr([pickle.loads(pickle.dumps(error))])


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
