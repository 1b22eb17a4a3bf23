"""Naming the culprit: the user's own exception, with a note that says where."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from asyncio import CancelledError
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest

from streamline.core.blame import blame, cancellation_requested, function_name
from streamline.core.flow import Site
from streamline.core.replay import FailedCall
from streamline.core.state import At
from streamline.core.tasks import Session, Tasks
from streamline.errors import StageError
from streamline.io.formats.whole_files import WholeFile

SITE = Site(Tasks(None, Session()), shard=3, num_shards=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ValueError, KeyError, KeyboardInterrupt, SystemExit, RecursionError, MemoryError])
def test_an_exception_keeps_its_identity_and_gets_a_note_of_its_place(kind: type[BaseException]) -> None:
    error = kind("x")
    assert blame(error, "map(tokenize)", SITE, At("rows", {"file": "a.jsonl", "line": 18})) is error
    assert error.__notes__ == [f"in map(tokenize), shard 3 of 8 (pid {os.getpid()}), at file a.jsonl, line 18"]


def test_where_no_item_is_at_fault_none_is_named() -> None:
    error = blame(ValueError(), "map(f)", SITE, None)
    assert error.__notes__ == [f"in map(f), shard 3 of 8 (pid {os.getpid()})"]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, CancelledError, GeneratorExit])
def test_what_looks_like_an_end_becomes_a_failure(kind: type[BaseException]) -> None:
    """▲ Passed on as it is, the loop would end cleanly and a trainer would save its model."""
    error = kind("x")
    found = blame(error, "map(f)", SITE, At("items", 4))
    assert isinstance(found, StageError)
    assert found.__cause__ is error
    assert kind.__name__ in str(found)
    assert found.__notes__ == [f"in map(f), shard 3 of 8 (pid {os.getpid()}), at item 4 of items, counted from 1"]


def test_a_subclass_of_what_looks_like_an_end_is_none_either() -> None:
    class MyStop(StopIteration):
        pass

    assert isinstance(blame(MyStop(), "map(f)", SITE, None), StageError)


class Callable_:  # noqa: N801 - a stand-in
    def __call__(self, item: Any) -> Any:
        return item

    def method(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (len, "len"),
        (str.upper, "str.upper"),
        (Callable_, "Callable_"),
        (Callable_(), "Callable_"),
        (Callable_().method, "Callable_.method"),
        (functools.partial(len), "partial"),
        (function_name, "function_name"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_function_is_called_by_its_qualified_name(fn: object, expected: str) -> None:
    assert function_name(fn) == expected


@pytest.mark.parametrize("comprehensions", ["<listcomp>.", "<setcomp>.<dictcomp>."])
def test_a_function_that_a_comprehension_made_is_called_the_same_by_every_python(comprehensions: str) -> None:
    """3.11 counts the comprehension (here set by hand, for whichever runs this), 3.12 doesn't (PEP 709)."""
    [made] = [lambda x: x for _ in range(1)]
    expected = f"{sys._getframe().f_code.co_qualname}.<locals>.<lambda>"
    assert function_name(made) == expected
    made.__qualname__ = expected.replace("<lambda>", f"{comprehensions}<lambda>")
    assert function_name(made) == expected


def test_a_name_that_is_no_string_is_none() -> None:
    class Odd:
        __qualname__ = "Odd"

    odd = Odd()
    odd.__qualname__ = 3  # type: ignore[assignment]
    assert function_name(odd).endswith("Odd")


# Cancellation: asked for, or out of user code


async def test_a_cancelled_error_that_was_not_requested_is_no_cancellation() -> None:
    assert not cancellation_requested(CancelledError())
    assert not cancellation_requested(ValueError())


async def test_one_that_a_scope_asked_for_is() -> None:
    found: list[bool] = []

    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep(1)
        except CancelledError as error:
            found.append(cancellation_requested(error))
            raise
    assert found == [True]


async def test_one_that_the_task_was_asked_for_is() -> None:
    found: list[bool] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        except CancelledError as error:
            found.append(cancellation_requested(error))
            raise

    task = asyncio.create_task(work())
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    with pytest.raises(CancelledError):
        await task
    assert found == [True]


@dataclass
class Sample:
    image: bytes
    label: int


class Broken:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (57, "57"),
        ({"id": 57, "text": "x" * 100}, f"{{'id': 57, 'text': '{'x' * 27}...{'x' * 28}'}}"),
        (list(range(10**6)), "[0, 1, 2, 3, ...]"),
        (bytes(2**20), "<1,048,576 bytes>"),
        ({"image": bytearray(3)}, "{'image': <3 bytes>}"),
        (np.zeros((2, 2)), "array([[0., 0.], [0., 0.]])"),
        (WholeFile("a.jpg", bytes(2**24)), "WholeFile(path='a.jpg', data=<16,777,216 bytes>)"),
        (Sample(bytes(9), 1), "Sample(image=<9 bytes>, label=1)"),
        ("two\nlines", "'two\\nlines'"),
        ([["a" * 60] * 4] * 4, None),
    ],
)
def test_a_note_shows_the_item_in_a_line(item: object, shown: str | None) -> None:
    call = FailedCall(len, item)
    (note,) = blame(ValueError(), "map(f)", SITE, At("items", 4), call).__notes__
    _, _, found = note.partition("counted from 1: ")
    assert "\n" not in found
    assert len(found) <= 200
    assert shown in (None, found)


def test_an_item_whose_repr_fails_hides_no_error() -> None:
    (note,) = blame(ValueError(), "map(f)", SITE, None, FailedCall(len, Broken())).__notes__
    assert "<Broken instance at" in note
