"""Options are checked where they are written, and each message names its option."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from streamline.core.options import check_function, check_int, check_seed
from streamline.errors import PlanError, PlanTypeError, StreamlineError


@pytest.mark.parametrize(("value", "least"), [(0, 0), (1, 0), (5, 5), (2**70, 1), (-3, -3)])
def test_integers_that_are_large_enough_pass(value: int, least: int) -> None:
    check_int("n", value, least)


@pytest.mark.parametrize(("value", "least"), [(-1, 0), (0, 1), (4, 5)])
def test_smaller_ones_are_refused(value: int, least: int) -> None:
    with pytest.raises(PlanError, match=rf"^\.batch\(size\) is at least {least}, got {value}$") as found:
        check_int(".batch(size)", value, least)
    assert isinstance(found.value, ValueError)
    assert not isinstance(found.value, TypeError)


@pytest.mark.parametrize("value", [1.0, "1", None, True, False, [1]], ids=repr)
def test_what_is_no_integer_is_a_type_error(value: Any) -> None:
    with pytest.raises(PlanTypeError, match=rf"^n is an integer, got {type(value).__name__} ") as found:
        check_int("n", value, 0)
    assert isinstance(found.value, TypeError)
    assert isinstance(found.value, ValueError)
    assert isinstance(found.value, StreamlineError)


def test_a_seed_is_what_numpy_takes() -> None:
    check_seed("seed", 0)
    check_seed("seed", 2**128)
    with pytest.raises(PlanError, match="seed is at least 0"):
        check_seed("seed", -1)
    with pytest.raises(PlanTypeError):
        check_seed("seed", None)


class Callable_:  # noqa: N801 - a stand-in
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "value", [len, lambda: 0, int, functools.partial(int), Callable_()], ids=lambda value: type(value).__name__
)
def test_whatever_can_be_called_is_a_function(value: Any) -> None:
    check_function("fn", value)


@pytest.mark.parametrize("value", [None, 3, "len", [len]], ids=repr)
def test_what_can_not_be_called_is_a_type_error(value: Any) -> None:
    with pytest.raises(PlanTypeError, match=rf"^fn is a function, got {type(value).__name__}"):
        check_function("fn", value)
