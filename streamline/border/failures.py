"""Failures across a border (a first version)."""

from __future__ import annotations

import pickle

from streamline.failing.failures import Failure

__all__ = ["carry", "carry_left_out", "delivered", "left_out"]


def carry(error: BaseException) -> bytes:
    """Return an error as bytes."""
    return pickle.dumps(error)


def delivered(data: bytes) -> BaseException:
    """Return an error."""
    error: BaseException = pickle.loads(data)
    return error


def carry_left_out(failure: Failure) -> bytes:
    """Return what is said of an item."""
    return pickle.dumps(failure)


def left_out(data: bytes) -> Failure:
    """Return what is said of an item."""
    failure: Failure = pickle.loads(data)
    return failure
