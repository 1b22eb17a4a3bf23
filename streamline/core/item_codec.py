"""Encodings of items and states for files: JSON, and the bytes of arrays. Never pickle: loading can't run code.

- Caches and spills: a form is a JSON value, or a list that begins with its kind: an array, a NumPy number, bytes, or a
  container. Arrays come back C-ordered; tuples, and keys of JSON's types, as they were.
- A live source's items are encoded when they are read, since the user may change them in place later: immutable values
  as they are, other JSON values as text, an array as an npy file. What would come back as something else (a tuple, a
  key that is no string, an object) is refused: `encode=` and `decode=` convert it.
- States of other libraries' iterables: JSON text, bytes and tuples wrapped.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple, TypeAlias, TypeVar

from streamline.core.lazy_numpy import has_more, loaded_np, np
from streamline.core.state import Json
from streamline.errors import DataError, JournalError, PlanTypeError, StreamlineError

R = TypeVar("R")


def decode_json(content: bytes | bytearray | str, read: Callable[[Any], R], wrong: Callable[[str], Exception]) -> R:
    """Return `read(value)` of a JSON value; if that fails, raise what `wrong` makes of the reason."""
    try:
        return read(json.loads(content.decode() if isinstance(content, bytes | bytearray) else content))
    except StreamlineError:
        raise
    except RecursionError:
        raise wrong("it is nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise wrong(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}") from error


Read = Callable[[memoryview], None]

Buffer: TypeAlias = "np.ndarray[Any, Any] | np.generic | bytes"
"""The items' own buffers: a reference each, until they are written."""


def bytes_of(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer, C-ordered; copied if they weren't."""
    if isinstance(buffer, bytes):
        return memoryview(buffer)
    array = np.ascontiguousarray(buffer).reshape(-1)
    return array.view(np.uint8).data if array.dtype.itemsize else memoryview(b"")


def pack(value: Any, buffers: list[Buffer], writer: str) -> Json:
    """Return the form of `value`, and append its buffers. Raises `DataError`, naming the `writer`: it has no form."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, loaded_np.ndarray | loaded_np.generic) and (descr := dtype_to_json(value)) is not None:
        buffers.append(value)
        return ["a" if isinstance(value, np.ndarray) else "n", descr, list(value.shape)]
    if kind is bytes:
        buffers.append(value)
        return ["b", len(value)]
    if kind is list or kind is tuple:
        return ["l" if kind is list else "t", [pack(part, buffers, writer) for part in value]]
    if kind is dict and all(key is None or type(key) in (bool, int, float, str) for key in value):
        return ["d", list(value), [pack(part, buffers, writer) for part in value.values()]]
    what = f"an array of {value.dtype}" if kind is loaded_np.ndarray else kind.__name__
    raise DataError(
        f"{writer} writes down numbers, strings, bytes, NumPy arrays, and lists, tuples and dicts of them; got {what}: "
        f"turn it into one of them in a .map before {writer.partition('(')[0]}, and back after it"
    )


def unpack(form: Json, read: Read) -> Any:
    """Return what `pack` was given; `read` fills a buffer with the next bytes."""
    if not isinstance(form, list):
        return form
    kind, *rest = form
    if kind in ("a", "n"):
        array: np.ndarray[Any, Any] = np.empty(rest[1], dtype_of(rest[0]))
        if array.nbytes:
            read(array.reshape(-1).view(np.uint8).data)
        return array if kind == "a" else array[()]
    if kind == "b":
        content = bytearray(rest[0])
        read(memoryview(content))
        return bytes(content)
    if kind == "d":
        return dict(zip(rest[0], (unpack(part, read) for part in rest[1]), strict=True))
    parts = [unpack(part, read) for part in rest[0]]
    return parts if kind == "l" else tuple(parts)


def unpack_all(forms: list[Json], read: Read) -> list[Any]:
    """Return the values of these forms, and empty the list: each form is released when its item is made."""
    forms[:] = forms[::-1]
    return [unpack(forms.pop(), read) for _ in range(len(forms))]


def dtype_to_json(array: np.ndarray[Any, Any] | np.generic) -> Json:
    """Return NumPy's description of an array's type, as JSON; None: it isn't restorable: objects, masks, fields that
    overlap or aren't in the order of their bytes.
    """
    if array.dtype.hasobject or has_more(type(array)):
        return None
    try:
        return _lists(np.lib.format.dtype_to_descr(array.dtype))
    except ValueError:
        return None


def _lists(descr: Any) -> Json:
    return [_lists(part) for part in descr] if isinstance(descr, list | tuple) else descr


def dtype_of(descr: Json) -> np.dtype[Any]:
    """Return the type of a description: a name, or [[name, or [title, name], type, shape], …]."""
    found: np.dtype[Any] = np.lib.format.descr_to_dtype(_tuples(descr))
    return found


def _tuples(descr: Json) -> Any:
    if isinstance(descr, str):
        return descr
    fields = []
    for name, kind, *shape in descr:
        name = tuple(name) if isinstance(name, list) else name
        fields.append((name, _tuples(kind), *map(tuple, shape)))
    return fields


# Items of live sources ------------------------------------------------------------------------------------------------

WAY_OUT = "give from_stream encode= (item -> JSON value, bytes or array) and decode= (the inverse)"

KEPT_BITS = 64
"""Integers of up to so many bits stay integers; larger ones become text once, not at each snapshot."""

SMALL_BYTES = 16
"""The size that a number, a bool or None counts as."""


class EncodedItem(NamedTuple):
    """An item of `kind` "v": a scalar as it is; "j": JSON text; "b": bytes; "a": an npy file."""

    kind: str
    value: Any

    @property
    def size(self) -> int:
        """Its size in bytes, about."""
        return len(self.value) if isinstance(self.value, str | bytes) else SMALL_BYTES


class Codec(NamedTuple):
    """How items are encoded and decoded: by the user's functions, if there are any."""

    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None

    def write(self, item: Any) -> EncodedItem:
        """Return `item` encoded. Raises a PlanTypeError that says why it can't be, and what to do."""
        if self.encode is None:
            return write(item)
        form = self.encode(item)
        try:
            return write(form)
        except PlanTypeError as error:
            raise PlanTypeError(
                f"what from_stream's encode= made of {type(item).__name__} can't be kept: {error}"
            ) from None

    def read(self, written: EncodedItem) -> Any:
        form = read(written)
        return form if self.decode is None else self.decode(form)


def write(item: Any) -> EncodedItem:
    """Return a JSON value, bytes or an array, encoded."""
    kind = type(item)
    if item is None or kind is str or kind is bool or (kind is float and math.isfinite(item)):
        return EncodedItem("v", item)
    if kind is int and item.bit_length() < KEPT_BITS:
        return EncodedItem("v", item)
    if kind is bytes:
        return EncodedItem("b", item)
    if "numpy" in sys.modules and kind is loaded_np.ndarray:
        return EncodedItem("a", _npy(item))
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
    return EncodedItem("j", text)


def read(written: EncodedItem) -> Any:
    """Return an item as `write` was given it. Raises `JournalError`: it can't be decoded."""
    if written.kind == "j":
        return decode_json(written.value, lambda item: item, _unreadable)
    if written.kind == "a":
        try:
            return np.load(BytesIO(written.value), allow_pickle=False)
        except Exception as error:  # of NumPy's parser, on garbage: ValueError, SyntaxError, RecursionError, ...
            raise _unreadable(str(error)) from error
    return written.value


def _unreadable(why: str) -> JournalError:
    return JournalError(f"an item in a journal isn't as it was written: {why}; use an earlier copy")


def to_json(written: EncodedItem) -> Json:
    """Return an encoded item for a snapshot: a scalar as itself, anything else as [kind, text]."""
    kind, value = written
    if kind == "v":
        return value
    return [kind, value if kind == "j" else base64.b64encode(value).decode("ascii")]


def from_json(form: Json) -> EncodedItem:
    if not isinstance(form, list | dict):
        return EncodedItem("v", form)
    if isinstance(form, list) and len(form) == 2 and isinstance(form[1], str) and form[0] in ("j", "b", "a"):
        kind, text = form
        return EncodedItem(kind, text if kind == "j" else base64.b64decode(text, validate=True))
    raise ValueError(f"expected an item or [kind, text], got {str(form)[:60]}")


def to_bytes(written: EncodedItem) -> bytes:
    """Return an encoded item for a journal on disk: its kind, a byte, and its content."""
    kind, value = written
    if kind == "v":
        kind, value = "j", json.dumps(value)
    content: bytes = value.encode() if kind == "j" else value
    return kind.encode() + content


def from_bytes(content: bytes) -> EncodedItem:
    """Return what `to_bytes` was given; a scalar as JSON text."""
    kind, value = content[:1].decode("latin-1"), content[1:]
    if kind not in ("j", "b", "a"):
        raise JournalError(f"an item of kind {kind!r}, which this streamline doesn't know: upgrade streamline")
    return EncodedItem(kind, value.decode() if kind == "j" else value)


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
    """Say what in a value JSON would lose or change, and where; "": nothing."""
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


# States of other libraries --------------------------------------------------------------------------------------------

BYTES, TUPLE = "__bytes__", "__tuple__"
"""The key of an object with one entry, which stands for bytes, or for a tuple."""


def state_text(state: Any, where: str) -> str:
    """Return a state as JSON text, the same for equal states. Raises `PlanTypeError`: an entry can't be JSON."""
    return json.dumps(_wrap(state, where), separators=(",", ":"))


def state_from_json(state: Json) -> Any:
    if isinstance(state, list):
        return [state_from_json(item) for item in state]
    if not isinstance(state, dict):
        return state
    if len(state) == 1:
        if BYTES in state:
            return base64.b64decode(state[BYTES])
        if TUPLE in state:
            return tuple(state_from_json(item) for item in state[TUPLE])
    return {key: state_from_json(item) for key, item in state.items()}


def _wrap(value: Any, where: str) -> Json:
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is list:
        return [_wrap(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if type(value) is tuple:
        return {TUPLE: [_wrap(item, f"{where}[{at}]") for at, item in enumerate(value)]}
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, dict) and all(type(key) is str for key in value) and not {BYTES, TUPLE} & set(value):
        return {key: _wrap(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise PlanTypeError(
        f"{where} is {_describe(value)}, which JSON can't hold, and a snapshot is JSON: have the factory return "
        "something that keeps it elsewhere (shuffle with .shuffle(window=), say), or iter(...) of it: then it has no "
        "state, and a resume iterates from the start"
    )


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        keys = [key for key in value if type(key) is not str or key in (BYTES, TUPLE)]
        return f"a dict with the key {keys[0]!r}"
    return f"{value!r}" if isinstance(value, float) else f"a {type(value).__module__}.{type(value).__qualname__}"
