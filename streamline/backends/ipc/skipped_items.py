"""Records of skipped items as bytes: for `SkippedItem`, and for questions to an `on_error` handler."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple, cast

from streamline.backends.ipc.exceptions import MOST_TEXT, pickle_exception, pickle_or_none, unpickle_exception
from streamline.core.error_policy import Failure
from streamline.core.text import REPR_BYTES, cut, said

__all__ = ["pickle_skipped", "unpickle_skipped"]


class _SentFailure(NamedTuple):
    """A `Failure`; its item pickled, or its repr."""

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
    """Stands for an item that stayed in its process, with its repr."""

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


def pickle_skipped(failure: Failure, host: str = "") -> bytes:
    """Return the pickled record of a skipped item. Never raises.

    Of an item that can't be pickled, or is larger than 1 MiB, the `repr` is sent, cut as in a dead letter.
    """
    item = pickle_or_none(failure.item)
    return pickle.dumps(
        _SentFailure(
            stage=failure.stage,
            kind=failure.kind,
            shard=failure.shard,
            position=failure.position,
            items=failure.items,
            error=pickle_exception(failure.error, host, trace=False),
            trace=_text(failure),
            item=item,
            shown="" if item is not None else _shown(failure.item),
        ),
        5,
    )


def unpickle_skipped(data: bytes) -> Failure:
    """Return the record of `pickle_skipped`."""
    record = cast(_SentFailure, pickle.loads(data))
    error = unpickle_exception(record.error)
    if not isinstance(error, Exception):
        raise TypeError(f"an item is skipped because of an Exception, got {error!r}")
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
    """Return an item's repr, cut; avoids a repr of hundreds of megabytes where possible."""
    if isinstance(item, bytes | bytearray | str) and len(item) > REPR_BYTES:
        item = item[: REPR_BYTES + 1]
    try:
        return cut(said(item, repr))
    except BaseException as problem:  # as above
        return f"<{type(item).__name__} whose repr raised {type(problem).__name__}>"
