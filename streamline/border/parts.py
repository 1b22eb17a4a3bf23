"""Exceptions in parts, for those that can't be pickled: class, arguments, attributes, each by itself."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from streamline.border.origins import ValuePickler

__all__ = ["MOST_BYTES", "Parts", "dumped", "parts_of", "rebuilt"]


DESCRIPTORS = MemberDescriptorType, GetSetDescriptorType


FIRST = ("args", "message", "exceptions")
"""What an exception is made of; the last two of a group."""


MOST_BYTES = 1 << 20
"""Of an item that failed, so much may travel with its failure: it is for people to look at."""


class _Bounded(io.BytesIO):
    """Takes no more than `MOST_BYTES`."""

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise OverflowError(f"more than {MOST_BYTES:,} bytes")
        return super().write(data)


def dumped(thing: Any, *, bounded: bool = True) -> bytes | None:
    """Return what `pickle.loads` makes the thing of again, here at least; None: there is nothing like that.

    Args:
      bounded: None, too, if it is more than `MOST_BYTES`.
    """
    for pickler in (pickle.Pickler, ValuePickler):
        buffer = _Bounded() if bounded else io.BytesIO()
        try:
            pickler(buffer, 5).dump(thing)
            pickle.loads(buffer.getvalue())
        except OverflowError:
            return None
        except BaseException:  # whatever the user's own methods raise
            continue
        return buffer.getvalue()
    return None


class Parts(NamedTuple):
    """An exception in parts.

    Attributes:
      kind: its class, pickled.
      args: pickled; text in the place of those that can't be.
      attributes: by name, pickled.
      left: what was left behind: "conn (a socket)".
    """

    kind: bytes
    args: tuple[bytes, ...]
    attributes: dict[str, bytes]
    left: list[str]


def parts_of(error: BaseException, without: frozenset[str]) -> Parts | None:
    """Return an exception in parts; None: not even its class can be sent.

    Args:
      without: attributes that are of no interest.
    """
    cls = type(error)
    kind = dumped(cls, bounded=False)
    if kind is None:
        return None
    args, attributes, left = [], {}, []
    for at, argument in enumerate([] if isinstance(error, BaseExceptionGroup) else error.args):
        blob = dumped(argument, bounded=False)
        if blob is None:
            left.append(f"args[{at}] ({_a(argument)})")
            blob = pickle.dumps(f"<{_a(argument)}>")
        args.append(blob)
    for name, value in _attributes(error):
        if name in without:
            continue
        blob = dumped(value, bounded=False)
        if blob is None:
            left.append(f"{name} ({_a(value)})")
        else:
            attributes[name] = blob
    return Parts(kind, tuple(args), attributes, left)


def rebuilt(parts: Parts, message: str = "", members: list[BaseException] | None = None) -> BaseException:
    """Return the exception again, made without its `__init__`; of a group, of these members.

    Raises:
      Whatever the user's own methods raise.
    """
    cls = pickle.loads(parts.kind)
    base = next(kind for kind in cls.__mro__ if kind.__module__ == "builtins")
    args = [pickle.loads(blob) for blob in parts.args] if members is None else [message, members]
    error: BaseException = base.__new__(cls, *args)
    try:
        base.__init__(error, *args)  # an OSError's errno, say, is set there
    except TypeError:
        error.args = tuple(args)
    for name, blob in parts.attributes.items():
        _set(error, name, pickle.loads(blob))
    return error


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield attributes: also those in slots, and those that built-in exceptions keep elsewhere."""
    yield from vars(error).items()
    for name in _slots(type(error)):
        try:
            value = getattr(error, name)
        except BaseException:  # not set
            continue
        if value is not None:
            yield name, value


def _slots(cls: type) -> dict[str, Any]:
    """Return the descriptors of attributes that are not in the exception's dict."""
    found: dict[str, Any] = {}
    for kind in reversed(cls.__mro__):
        found.update((name, it) for name, it in vars(kind).items() if isinstance(it, DESCRIPTORS))
    first = FIRST if issubclass(cls, BaseExceptionGroup) else FIRST[:1]
    return {name: it for name, it in found.items() if name not in first and not name.startswith("__")}


def _set(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute past what a class may do about it: it may be frozen."""
    descriptor = _slots(type(error)).get(name)
    if descriptor is None:
        vars(error)[name] = value
        return
    try:
        descriptor.__set__(error, value)
    except (AttributeError, TypeError):
        return  # read-only, and set by the arguments


def _a(thing: object) -> str:
    """Return what a thing is: "a socket"."""
    return f"a {type(thing).__qualname__}" if not isinstance(thing, FunctionType) else "a function"
