"""Raw items of a live source, written down as they were when they were read: the user may change them in place later.

What is immutable is kept; another JSON value becomes its text, an array the bytes of an npy file. What would come back
as something else (a tuple, a key that is no string, an object) is refused: `encode=` and `decode=` say how it is
written. Never pickle: loading can't run code.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from streamline.errors import JournalError, PlanTypeError
from streamline.states import Json

__all__ = ["Codec", "Written", "from_bytes", "from_json", "read", "to_bytes", "to_json", "write"]

WAY_OUT = "give from_stream encode= (item -> JSON value, bytes or array) and decode= (the inverse)"

KEPT_BITS = 64
"""Integers of up to so many bits are kept; the digits of larger ones are computed at once, not at each snapshot."""

SMALL_BYTES = 16
"""What a number, a bool or None counts as."""


class Written(NamedTuple):
    """An item, written down.

    Attributes:
      kind: "v": a str, int, float, bool or None as it is; "j": JSON text; "b": bytes; "a": an npy file.
    """

    kind: str
    value: Any

    @property
    def size(self) -> int:
        """About how many bytes it is."""
        return len(self.value) if isinstance(self.value, str | bytes) else SMALL_BYTES


class Codec(NamedTuple):
    """How items are written down and read again: the user's functions, if there are any."""

    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None

    def write(self, item: Any) -> Written:
        """Return `item`, written down.

        Raises:
          PlanTypeError: it can't be, as it is; the message says what to do.
        """
        if self.encode is None:
            return write(item)
        form = self.encode(item)
        try:
            return write(form)
        except PlanTypeError as error:
            raise PlanTypeError(
                f"what from_stream's encode= made of {type(item).__name__} can't be kept: {error}"
            ) from None

    def read(self, written: Written) -> Any:
        """Return the item that was written."""
        form = read(written)
        return form if self.decode is None else self.decode(form)


def write(item: Any) -> Written:
    """Return a JSON value, bytes or an array, written down.

    Raises:
      PlanTypeError: it is something else.
    """
    kind = type(item)
    if item is None or kind is str or kind is bool or (kind is float and math.isfinite(item)):
        return Written("v", item)
    if kind is int and item.bit_length() < KEPT_BITS:
        return Written("v", item)
    if kind is bytes:
        return Written("b", item)
    if kind is np.ndarray:
        return Written("a", _npy(item))
    try:
        found = _not_json(item)
        text = "" if found else json.dumps(item, separators=(",", ":"))
    except RecursionError:
        found = ": it is nested too deeply, or in itself"
    except ValueError as error:  # an integer of more than 4,300 digits
        found = f": {error}"
    if found:
        raise PlanTypeError(
            f"a live item must be written down in case that it is needed again, and this one of type {kind.__name__} "
            f"can't be{found}; {WAY_OUT}"
        )
    return Written("j", text)


def read(written: Written) -> Any:
    """Return what `write` was given."""
    if written.kind == "j":
        return json.loads(written.value)
    if written.kind == "a":
        return np.load(BytesIO(written.value), allow_pickle=False)
    return written.value


def to_json(written: Written) -> Json:
    """Return an item as it stands in a snapshot: a scalar as itself, anything else as [kind, text]."""
    kind, value = written
    if kind == "v":
        return value
    return [kind, value if kind == "j" else base64.b64encode(value).decode("ascii")]


def from_json(form: Json) -> Written:
    """Return what `to_json` was given.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(form, list | dict):
        return Written("v", form)
    if isinstance(form, list) and len(form) == 2 and isinstance(form[1], str) and form[0] in ("j", "b", "a"):
        kind, text = form
        return Written(kind, text if kind == "j" else base64.b64decode(text, validate=True))
    raise ValueError(f"expected an item or [kind, text], got {str(form)[:60]}")


def to_bytes(written: Written) -> bytes:
    """Return an item as it stands in a journal on disk: its kind, a byte, and what it is."""
    kind, value = written
    if kind == "v":
        kind, value = "j", json.dumps(value)
    content: bytes = value.encode() if kind == "j" else value
    return kind.encode() + content


def from_bytes(content: bytes) -> Written:
    """Return what `to_bytes` was given; a scalar as its JSON text.

    Raises:
      JournalError: it is of a kind that this code doesn't know.
    """
    kind, value = content[:1].decode("latin-1"), content[1:]
    if kind not in ("j", "b", "a"):
        raise JournalError(f"an item of kind {kind!r}, which this streamline doesn't know: upgrade streamline")
    return Written(kind, value.decode() if kind == "j" else value)


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    content = BytesIO()
    try:
        np.save(content, array, allow_pickle=False)
    except ValueError as error:  # objects
        raise PlanTypeError(
            f"a live item, an array of {array.dtype}, can't be written down: {error}; {WAY_OUT}"
        ) from None
    return content.getvalue()


def _not_json(value: Any) -> str:
    """Say what in a value JSON would lose or change, and where; "" if nothing."""
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return ""
    if kind is dict:
        for key, child in value.items():
            if type(key) is not str:
                return f": it has the key {key!r}, which would come back as a string"
            if found := _not_json(child):
                return f", [{key!r}]{found}"
        return ""
    if kind is list:
        for index, child in enumerate(value):
            if found := _not_json(child):
                return f", [{index}]{found}"
        return ""
    return f": expected JSON's types, bytes or a NumPy array, got {kind.__name__}"
