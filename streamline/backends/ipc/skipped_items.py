"""Records of items that were left out, on their way across a border."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple, cast

from streamline.backends.ipc.exceptions import MOST_TEXT, carry, delivered, dumped
from streamline.core.error_policy import Failure
from streamline.core.text import REPR_BYTES, cut, said

__all__ = ["carry_left_out", "left_out"]


class _SentFailure(NamedTuple):
    """A `Failure`; of its item what can be sent, or how it looks."""

    stage: str
    kind: str
    shard: int
    position: str
    items: int
    error: bytes
    trace: str
    item: bytes | None
    shown: str


class _RemoteItem:
    """In the place of an item that stayed in its process: looks like it."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


class _Text(traceback.TracebackException):
    """A traceback of another process, as text."""

    def __init__(self, error: BaseException, text: str) -> None:
        super().__init__(type(error), error, None)
        self._text = text

    def format(self, **options: Any) -> Any:
        yield self._text


def carry_left_out(failure: Failure, host: str = "") -> bytes:
    """Return the record of an item that was left out, for `left_out`. Never raises.

    An item that can't be pickled, or is larger than 1 MiB, stays where it is; its `repr` is sent, as much of it as a
    dead letter keeps.
    """
    item = dumped(failure.item)
    return pickle.dumps(
        _SentFailure(
            stage=failure.stage,
            kind=failure.kind,
            shard=failure.shard,
            position=failure.position,
            items=failure.items,
            error=carry(failure.error, host, trace=False),
            trace=_text(failure),
            item=item,
            shown="" if item is not None else _shown(failure.item),
        ),
        5,
    )


def left_out(data: bytes) -> Failure:
    """Return the record that was carried."""
    record = cast(_SentFailure, pickle.loads(data))
    error = delivered(record.error)
    if not isinstance(error, Exception):
        raise TypeError(f"an item is left out because of an Exception, got {error!r}")
    item: Any = _RemoteItem(record.shown)
    if record.item is not None:
        try:
            item = pickle.loads(record.item)
        except Exception as problem:
            item = _RemoteItem(f"<an item that can't be had: {type(problem).__name__}>")
    return Failure(
        stage=record.stage,
        kind=record.kind,
        shard=record.shard,
        position=record.position,
        item=item,
        error=error,
        items=record.items,
        trace=_Text(error, record.trace),
    )


def _text(failure: Failure) -> str:
    try:
        return failure.traceback[-MOST_TEXT:]
    except BaseException as problem:  # methods of the user's
        return f"its traceback can't be shown: {type(problem).__name__}\n"


def _shown(item: Any) -> str:
    """Return how an item looks, without making a text of hundreds of megabytes first where that can be helped."""
    if isinstance(item, bytes | bytearray | str) and len(item) > REPR_BYTES:
        item = item[: REPR_BYTES + 1]
    try:
        return cut(said(item, repr))
    except BaseException as problem:  # as above
        return f"<{type(item).__name__} whose repr raised {type(problem).__name__}>"
