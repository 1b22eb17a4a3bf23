"""Exceptions as bytes: class, attributes, causes and groups arrive as they were raised.

Most exceptions can be pickled. Of the others class, arguments and attributes are pickled one by one; what can't be is
omitted and named in a note, and the exception is made without its `__init__`. If that fails, too, a `StageError` stands
for it. The sender loads all that it sends, to know in time what can't be loaded. Tracebacks are sent as a note.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import re
import traceback
from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple, cast

from streamline.backends.ipc.by_value import ValuePickler
from streamline.core.replay import KEY, FailedCall
from streamline.core.text import said
from streamline.core.tracebacks import ELSEWHERE, trace_of
from streamline.errors import StageError

__all__ = [
    "MOST_BYTES",
    "MOST_TEXT",
    "ExceptionParts",
    "pickle_exception",
    "pickle_or_none",
    "rebuild",
    "split_exception",
    "unpickle_exception",
]


MOST_ERRORS = 100
"""Exceptions sent together: causes, contexts, members of groups. The traceback's text has them all."""


MOST_TEXT = 1 << 16
"""Characters of a traceback, counted from its end: a message may be of any length."""


BARE = re.compile(r'^  File "(.+)", line (\d+), in .*\n(?!    )', re.MULTILINE)
"""A frame of a traceback without its line of source."""


APART = frozenset({KEY, "__notes__"})
"""Attributes that are sent separately."""


class _ExceptionRecord(NamedTuple):
    """One exception.

    Attributes:
      name: of its class, for messages.
      message: its text; of a group, without its members.
      notes: as they are.
      pickled: None: it can't be, or isn't equal when loaded.
      parts: None: not needed, or its class can't be sent.
      call: for `replay`; None: it has none, or it is too large.
      called: whether it has one.
      members: of a group, the numbers of its members.
      cause, context: their numbers; None: there is none.
      suppressed: whether the context isn't shown.
    """

    name: str
    message: str
    notes: list[str]
    pickled: bytes | None
    parts: ExceptionParts | None
    call: bytes | None
    called: bool
    members: list[int] | None
    cause: int | None
    context: int | None
    suppressed: bool


def pickle_exception(error: BaseException, host: str = "", *, trace: bool = True) -> bytes:
    """Return an exception as bytes. Never raises.

    Args:
      host: where it was raised, for messages: "process 2".
      trace: whether its traceback becomes a note.
    """
    where = f"{host or 'another process'} (pid {os.getpid()})"
    try:
        note = _traceback(error, where) if trace else None
    except BaseException as problem:  # formatting calls methods of the user's
        note = f"its traceback in {where} can't be shown: {type(problem).__name__}"
    try:
        return pickle.dumps((_records(error, where), note), 5)
    except BaseException:
        only = _ExceptionRecord(
            type(error).__qualname__, _message(error), [], None, None, None, False, None, None, None, True
        )
        return pickle.dumps(([only], note), 5)


def unpickle_exception(data: bytes) -> BaseException:
    """Return a new exception from the bytes of `pickle_exception`."""
    records, note = cast("tuple[list[_ExceptionRecord], str | None]", pickle.loads(data))
    if note is not None:
        records[0].notes.append(BARE.sub(_with_source, note))
    errors: dict[int, BaseException] = {}
    for at in range(len(records)):
        _make(at, records, errors)
    for at, record in enumerate(records):  # past what a class may do about it: it may be frozen
        cause = None if record.cause is None else errors[record.cause]
        context = None if record.context is None else errors[record.context]
        for name, value in (("cause", cause), ("context", context), ("suppress_context", record.suppressed)):
            vars(BaseException)[f"__{name}__"].__set__(errors[at], value)
    return errors[0]


# Pickling -------------------------------------------------------------------------------------------------------------
def _records(error: BaseException, where: str) -> list[_ExceptionRecord]:
    """Return an exception's record, followed by those that it refers to."""
    errors, numbers = [error], {id(error): 0}

    def number(of: BaseException | None) -> int | None:
        if of is None or (id(of) not in numbers and len(errors) >= MOST_ERRORS):
            return None
        if id(of) not in numbers:
            numbers[id(of)] = len(errors)
            errors.append(of)
        return numbers[id(of)]

    found = []
    for record in errors:  # it grows meanwhile
        members = None
        if isinstance(record, BaseExceptionGroup):
            numbered = [number(member) for member in record.exceptions]
            members = [member for member in numbered if member is not None]
        found.append(_record(record, members, number(record.__cause__), number(record.__context__), where))
    return found


def _record(
    error: BaseException, members: list[int] | None, cause: int | None, context: int | None, where: str
) -> _ExceptionRecord:
    pickled = None if members is not None else _pickled(error)
    parts = None if pickled is not None else _parts(error)
    notes = [note for note in getattr(error, "__notes__", None) or () if isinstance(note, str)]
    if parts is not None and parts.left:
        notes.append(f"left in {where}, since it can't be pickled: {', '.join(parts.left)}")
    call = vars(error).get(KEY)
    return _ExceptionRecord(
        name=_name(error),
        message=error.message if isinstance(error, BaseExceptionGroup) else _message(error),
        notes=notes,
        pickled=pickled,
        parts=parts,
        call=pickle_or_none((call.fn, call.given, call.outputs)) if isinstance(call, FailedCall) else None,
        called=KEY in vars(error),
        members=members,
        cause=cause,
        context=context,
        suppressed=error.__suppress_context__,
    )


def _pickled(error: BaseException) -> bytes | None:
    """Return an exception pickled, if it is the same when loaded."""
    try:
        blob = pickle.dumps(error, 5)
        back = pickle.loads(blob)
        same = type(back) is type(error) and pickle.dumps(back.args, 5) == pickle.dumps(error.args, 5)
        return blob if same and vars(back).keys() == vars(error).keys() else None
    except BaseException:  # methods of the user's
        return None


def _parts(error: BaseException) -> ExceptionParts | None:
    try:
        parts = split_exception(error, APART)
        if parts is not None:
            rebuild(parts, "", None if not isinstance(error, BaseExceptionGroup) else [*error.exceptions])
    except BaseException:
        return None
    return parts


def _message(error: BaseException) -> str:
    try:
        return said(error, str)
    except BaseException as problem:  # it may even say KeyboardInterrupt
        return f"<{type(error).__name__} whose str raised {type(problem).__name__}>"


def _name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _traceback(error: BaseException, where: str) -> str:
    """Return the traceback as Python prints it, from the user's first frame on if there is one."""
    trace = trace_of(error)
    if not trace.stack:
        trace = traceback.TracebackException.from_exception(error)
    trace.__notes__ = None  # sent separately
    text = "".join(trace.format()).rstrip("\n")
    if len(text) > MOST_TEXT:
        text = "…" + text[-MOST_TEXT:]
    return f"{ELSEWHERE}{where}:\n{text}"


# Unpickling -----------------------------------------------------------------------------------------------------------
def _with_source(frame: re.Match[str]) -> str:
    """Return a frame with its line: this process has the source of a notebook's cells, the other one only files."""
    line = linecache.getline(frame[1], int(frame[2])).strip()
    return f"{frame[0]}    {line}\n" if line else frame[0]


def _make(at: int, records: list[_ExceptionRecord], errors: dict[int, BaseException]) -> BaseException:
    """Return exception number `at`; of a group, its members are made first."""
    if at not in errors:
        members = records[at].members
        made = None if members is None else [_make(member, records, errors) for member in members]
        errors[at] = _loaded(records[at], made)
    return errors[at]


def _loaded(record: _ExceptionRecord, members: list[BaseException] | None) -> BaseException:
    error = _attempt(record, members)
    if error is None:
        what = "" if record.members is None else f", a group of {len(record.members)}"
        error = StageError(f"{record.name}{what}: {record.message}")
        record.notes.append(f"this stands for a {record.name}, which can't be had outside of its process")
    if record.notes:
        vars(error)["__notes__"] = record.notes
    if record.called:
        vars(error)[KEY] = None if record.call is None else _call(record.call)
    return error


def _attempt(record: _ExceptionRecord, members: list[BaseException] | None) -> BaseException | None:
    try:
        if record.pickled is not None:
            return cast(BaseException, pickle.loads(record.pickled))
        return None if record.parts is None else rebuild(record.parts, record.message, members)
    except KeyboardInterrupt:  # of this process's user
        raise
    except BaseException:  # methods of the user's
        return None


def _call(pickled: bytes) -> FailedCall | None:
    try:
        return FailedCall(*pickle.loads(pickled))
    except Exception:  # methods of the item's
        return None


DESCRIPTORS = MemberDescriptorType, GetSetDescriptorType


FIRST = ("args", "message", "exceptions")
"""Constructor arguments of an exception; the last two of a group."""


MOST_BYTES = 1 << 20
"""Bytes of a failed item that are sent with its failure, for people to look at."""


class _Bounded(io.BytesIO):
    """Takes no more than `MOST_BYTES`."""

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise OverflowError(f"more than {MOST_BYTES:,} bytes")
        return super().write(data)


def pickle_or_none(thing: Any, *, bounded: bool = True) -> bytes | None:
    """Return the pickled thing, if it can be loaded, here at least; else None.

    Args:
      bounded: also None if it is larger than `MOST_BYTES`.
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


class ExceptionParts(NamedTuple):
    """An exception in parts.

    Attributes:
      kind: its class, pickled.
      args: pickled; text in place of those that can't be.
      attributes: by name, pickled.
      left: what was omitted: "conn (a socket)".
    """

    kind: bytes
    args: tuple[bytes, ...]
    attributes: dict[str, bytes]
    left: list[str]


def split_exception(error: BaseException, without: frozenset[str]) -> ExceptionParts | None:
    """Return an exception in parts; None: its class can't be sent.

    Args:
      without: attributes to omit.
    """
    cls = type(error)
    kind = pickle_or_none(cls, bounded=False)
    if kind is None:
        return None
    args, attributes, left = [], {}, []
    for at, argument in enumerate([] if isinstance(error, BaseExceptionGroup) else error.args):
        blob = pickle_or_none(argument, bounded=False)
        if blob is None:
            left.append(f"args[{at}] ({_described(argument)})")
            blob = pickle.dumps(f"<{_described(argument)}>")
        args.append(blob)
    for name, value in _attributes(error):
        if name in without:
            continue
        blob = pickle_or_none(value, bounded=False)
        if blob is None:
            left.append(f"{name} ({_described(value)})")
        else:
            attributes[name] = blob
    return ExceptionParts(kind, tuple(args), attributes, left)


def rebuild(parts: ExceptionParts, message: str = "", members: list[BaseException] | None = None) -> BaseException:
    """Return the exception, made without its `__init__`; a group, of these members.

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
    """Yield attributes, including slots and those that built-in exceptions keep in C."""
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


def _described(thing: object) -> str:
    """Return a thing's type for messages: "a socket"."""
    return f"a {type(thing).__qualname__}" if not isinstance(thing, FunctionType) else "a function"
