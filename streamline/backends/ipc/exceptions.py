"""Exceptions, on their way across a border.

The user's own exception is to arrive: its class, attributes and causes. Most can be pickled. Of the others each part is
sent by itself, what can't be sent is left behind and named in a note, and the exception is made without its `__init__`.
What can't be had even so arrives as a `StageError` that says what it was. The far end loads all that it sends, so that
it learns in time what doesn't arrive as it was.

Tracebacks stay behind. What they say is a note, of the exception that failed the flow.

Exceptions in parts, for those that can't be pickled: class, arguments, attributes, each by itself.
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
from streamline.core.error_policy import trace_of
from streamline.core.replay import KEY, FailedCall
from streamline.core.text import said
from streamline.core.tracebacks import ELSEWHERE
from streamline.errors import StageError

__all__ = ["MOST_BYTES", "MOST_TEXT", "ExceptionParts", "carry", "delivered", "dumped", "parts_of", "rebuilt"]


MOST_ERRORS = 100
"""Exceptions that travel together: causes, contexts, members of groups. The text of the traceback has them all."""


MOST_TEXT = 1 << 16
"""Characters of a traceback, from its end: an exception's message may be of any length."""


BARE = re.compile(r'^  File "(.+)", line (\d+), in .*\n(?!    )', re.MULTILINE)
"""A frame of a traceback without its line of source."""


APART = frozenset({KEY, "__notes__"})
"""Attributes that travel by themselves."""


class _One(NamedTuple):
    """One exception.

    Attributes:
      name: of its class, for a person.
      message: likewise; of a group, its own.
      notes: as they are.
      pickled: None if it can't be, or doesn't come back as it was.
      parts: None if that isn't needed, or not even its class can be sent.
      call: what `replay` calls, and the item; None: it has none, or it is too large.
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


def carry(error: BaseException, host: str = "", *, trace: bool = True) -> bytes:
    """Return an exception for `delivered`. Never raises.

    Args:
      host: where it was raised, for a person: "process 2".
      trace: whether its traceback becomes a note.
    """
    where = f"{host or 'another process'} (pid {os.getpid()})"
    try:
        note = _traceback(error, where) if trace else None
    except BaseException as problem:  # formatting calls methods of the user's
        note = f"its traceback in {where} can't be shown: {type(problem).__name__}"
    try:
        return pickle.dumps((_family(error, where), note), 5)
    except BaseException:
        only = _One(type(error).__qualname__, _message(error), [], None, None, None, False, None, None, None, True)
        return pickle.dumps(([only], note), 5)


def delivered(data: bytes) -> BaseException:
    """Return the exception that was carried, a new one at each call."""
    family, note = cast("tuple[list[_One], str | None]", pickle.loads(data))
    if note is not None:
        family[0].notes.append(BARE.sub(_with_source, note))
    errors: dict[int, BaseException] = {}
    for at in range(len(family)):
        _make(at, family, errors)
    for at, one in enumerate(family):  # past what a class may do about it: it may be frozen
        cause = None if one.cause is None else errors[one.cause]
        context = None if one.context is None else errors[one.context]
        for name, value in (("cause", cause), ("context", context), ("suppress_context", one.suppressed)):
            vars(BaseException)[f"__{name}__"].__set__(errors[at], value)
    return errors[0]


# The far end ----------------------------------------------------------------------------------------------------------
def _family(error: BaseException, where: str) -> list[_One]:
    """Return an exception, and those that it leads to, behind it."""
    errors, numbers = [error], {id(error): 0}

    def number(of: BaseException | None) -> int | None:
        if of is None or (id(of) not in numbers and len(errors) >= MOST_ERRORS):
            return None
        if id(of) not in numbers:
            numbers[id(of)] = len(errors)
            errors.append(of)
        return numbers[id(of)]

    found = []
    for one in errors:  # it grows meanwhile
        members = None
        if isinstance(one, BaseExceptionGroup):
            numbered = [number(member) for member in one.exceptions]
            members = [member for member in numbered if member is not None]
        found.append(_one(one, members, number(one.__cause__), number(one.__context__), where))
    return found


def _one(error: BaseException, members: list[int] | None, cause: int | None, context: int | None, where: str) -> _One:
    pickled = None if members is not None else _pickled(error)
    parts = None if pickled is not None else _parts(error)
    notes = [note for note in getattr(error, "__notes__", None) or () if isinstance(note, str)]
    if parts is not None and parts.left:
        notes.append(f"left behind in {where}, since it can't be pickled: {', '.join(parts.left)}")
    call = vars(error).get(KEY)
    return _One(
        name=_name(error),
        message=error.message if isinstance(error, BaseExceptionGroup) else _message(error),
        notes=notes,
        pickled=pickled,
        parts=parts,
        call=dumped((call.fn, call.given, call.outputs)) if isinstance(call, FailedCall) else None,
        called=KEY in vars(error),
        members=members,
        cause=cause,
        context=context,
        suppressed=error.__suppress_context__,
    )


def _pickled(error: BaseException) -> bytes | None:
    """Return an exception as its own methods pickle it, if it comes back as it was."""
    try:
        blob = pickle.dumps(error, 5)
        back = pickle.loads(blob)
        same = type(back) is type(error) and pickle.dumps(back.args, 5) == pickle.dumps(error.args, 5)
        return blob if same and vars(back).keys() == vars(error).keys() else None
    except BaseException:  # methods of the user's
        return None


def _parts(error: BaseException) -> ExceptionParts | None:
    try:
        parts = parts_of(error, APART)
        if parts is not None:
            rebuilt(parts, "", None if not isinstance(error, BaseExceptionGroup) else [*error.exceptions])
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
    """Return what Python would print, from the user's own frames on where there are any."""
    trace = trace_of(error)
    if not trace.stack:
        trace = traceback.TracebackException.from_exception(error)
    trace.__notes__ = None  # they travel by themselves
    text = "".join(trace.format()).rstrip("\n")
    if len(text) > MOST_TEXT:
        text = "…" + text[-MOST_TEXT:]
    return f"{ELSEWHERE}{where}:\n{text}"


# The near end ---------------------------------------------------------------------------------------------------------
def _with_source(frame: re.Match[str]) -> str:
    """Return a frame with its line: this process has the source of a notebook's cells, the other one only files."""
    line = linecache.getline(frame[1], int(frame[2])).strip()
    return f"{frame[0]}    {line}\n" if line else frame[0]


def _make(at: int, family: list[_One], errors: dict[int, BaseException]) -> BaseException:
    """Return exception number `at`; of a group, its members are made first."""
    if at not in errors:
        members = family[at].members
        made = None if members is None else [_make(member, family, errors) for member in members]
        errors[at] = _loaded(family[at], made)
    return errors[at]


def _loaded(one: _One, members: list[BaseException] | None) -> BaseException:
    error = _attempt(one, members)
    if error is None:
        what = "" if one.members is None else f", a group of {len(one.members)}"
        error = StageError(f"{one.name}{what}: {one.message}")
        one.notes.append(f"this stands for a {one.name}, which can't be had outside of its process")
    if one.notes:
        vars(error)["__notes__"] = one.notes
    if one.called:
        vars(error)[KEY] = None if one.call is None else _call(one.call)
    return error


def _attempt(one: _One, members: list[BaseException] | None) -> BaseException | None:
    try:
        if one.pickled is not None:
            return cast(BaseException, pickle.loads(one.pickled))
        return None if one.parts is None else rebuilt(one.parts, one.message, members)
    except KeyboardInterrupt:  # somebody's own, now
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


class ExceptionParts(NamedTuple):
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


def parts_of(error: BaseException, without: frozenset[str]) -> ExceptionParts | None:
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
    return ExceptionParts(kind, tuple(args), attributes, left)


def rebuilt(parts: ExceptionParts, message: str = "", members: list[BaseException] | None = None) -> BaseException:
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
