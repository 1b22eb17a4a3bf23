"""Options are checked where they are written."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from streamline.errors import PlanError, PlanTypeError

__all__ = ["check_ago", "check_function", "check_int", "check_seconds", "check_seed", "given", "is_async"]


def check_int(option: str, value: object, least: int | None) -> None:
    """Insist on an integer of at least `least`; None: on any.

    Raises:
      PlanTypeError: it is no integer; a bool is none.
      PlanError: it is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanTypeError(f"{option} is an integer, got {type(value).__name__} {value!r}")
    if least is not None and value < least:
        raise PlanError(f"{option} is at least {least}, got {value}")


def check_ago(option: str, value: object) -> None:
    """Insist on 0 or 1: states further back are not kept.

    Raises:
      PlanTypeError: it is no integer.
      PlanError: it is another.
    """
    check_int(option, value, 0)
    if value not in (0, 1):
        raise PlanError(f"{option} is 0 or 1, got {value}: states further back are not kept")


def check_seed(option: str, value: object) -> None:
    """Insist on a seed: an integer of 0 or more, as NumPy wants it."""
    check_int(option, value, 0)


def check_seconds(option: str, value: object) -> None:
    """Insist on a time: a finite number of seconds, more than 0.

    Raises:
      PlanTypeError: it is no number; a bool is none.
      PlanError: it is 0, negative, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanTypeError(f"{option} is a number of seconds, got {type(value).__name__} {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise PlanError(f"{option} is a finite number of seconds, more than 0, got {value}")


def check_function(option: str, value: object) -> None:
    """Insist on something that can be called.

    Raises:
      PlanTypeError: it can't be.
    """
    if not callable(value):
        raise PlanTypeError(f"{option} is a function, got {type(value).__name__} {value!r}")


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether `fn`, a function or a callable object, is written with `async def`, or says so by `is_async`."""
    if getattr(fn, "is_async", False) is True:
        return True
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def given(value: object) -> str:
    """Say what arrived, in a line."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else f'{text[:59]}…'}"
