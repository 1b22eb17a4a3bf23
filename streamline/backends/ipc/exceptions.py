"""Failures as bytes: exceptions arrive as they were raised, with causes and groups, and their traceback as a note.

Most can be pickled. One that can't, or isn't the same when loaded, goes as its class, arguments and attributes, and is
made without its `__init__`: without the attributes if one of them can't be pickled, and with its text in the place of
arguments that can't be. If its class can't be sent, a `StageError` stands for it. The sender loads all that it sends,
to know in time what can't be loaded.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import re
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from streamline.core.error_policy import Failure
from streamline.core.replay import CALL_ATTRIBUTE, FailedCall
from streamline.core.text import REPR_BYTES, cut, safe_text
from streamline.core.tracebacks import TRACEBACK_NOTE, trace_of
from streamline.errors import StageError, WorkerDied

if TYPE_CHECKING:
    from streamline.backends.ipc.messages import Encoded


class LinkEnd(Protocol):
    """The part of a `Link` that is used here."""

    copies: ClassVar[bool]
    host: str


def encode_failure(link: LinkEnd, failure: BaseException) -> Encoded:
    """Return a failure for a message: bytes where the link copies, else itself."""
    if not link.copies:
        return failure
    return pickle_exception(failure, link.host, trace=not isinstance(failure, WorkerDied))  # its message says where


def decode_failure(encoded: Encoded) -> BaseException:
    return unpickle_exception(encoded) if isinstance(encoded, bytes) else encoded


def encode_skipped(link: LinkEnd, failure: Failure) -> Encoded:
    return pickle_skipped(failure, link.host) if link.copies else failure


def decode_skipped(encoded: Encoded) -> Failure:
    return unpickle_skipped(encoded) if isinstance(encoded, bytes) else encoded


MOST_ERRORS = 100
"""Exceptions sent together: causes, contexts, members of groups. The traceback's text has them all."""

MOST_TEXT = 1 << 16
"""Characters of a traceback, counted from its end: a message may be of any length."""

MOST_BYTES = 1 << 20
"""Bytes of a failed item that are sent with its failure, for people to look at."""

BARE_FRAME = re.compile(r'^  File "(.+)", line (\d+), in .*\n(?!    )', re.MULTILINE)
"""A frame of a traceback without its line of source."""


@dataclass
class _ExceptionRecord:
    """One exception.

    Attributes:
      name: of its class, for messages.
      message: its text; of a group, without its members.
      pickled: the exception, or (class, arguments, attributes); None: its class can't be sent.
      call: for `replay`; None: it has none; empty: it can't be sent.
      members: of a group; None: it is none.
      suppressed: whether the context isn't shown.
    """

    name: str
    message: str
    notes: list[str] = field(default_factory=list)
    pickled: bytes | None = None
    call: bytes | None = None
    members: list[_ExceptionRecord] | None = None
    cause: _ExceptionRecord | None = None
    context: _ExceptionRecord | None = None
    suppressed: bool = True


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
        return pickle.dumps(([_ExceptionRecord(type(error).__qualname__, _message(error))], note), 5)


def unpickle_exception(data: bytes) -> BaseException:
    records, note = cast("tuple[list[_ExceptionRecord], str | None]", pickle.loads(data))
    if note is not None:
        records[0].notes.append(BARE_FRAME.sub(_with_source, note))
    errors: dict[int, BaseException] = {}
    for record in records:
        _make(record, errors)
    for record in records:  # past what a class may do about it: it may be frozen
        cause, context = (None if it is None else errors[id(it)] for it in (record.cause, record.context))
        for name, value in (("cause", cause), ("context", context), ("suppress_context", record.suppressed)):
            vars(BaseException)[f"__{name}__"].__set__(errors[id(record)], value)
    return errors[id(records[0])]


def pickle_or_none(thing: Any, *, bounded: bool = True) -> bytes | None:
    """Return the pickled thing; None: it can't be loaded, here at least, or is `bounded` and over `MOST_BYTES`."""
    from streamline.backends.ipc.by_value import ItemPickler  # not at the top: hosts start sooner

    for pickler in (partial(pickle.Pickler, protocol=5), ItemPickler):
        buffer = _Bounded() if bounded else io.BytesIO()
        try:
            pickler(buffer).dump(thing)
            pickle.loads(buffer.getvalue())
        except OverflowError:
            return None
        except BaseException:  # whatever the user's own methods raise
            continue
        return buffer.getvalue()
    return None


class _Bounded(io.BytesIO):
    """Takes no more than `MOST_BYTES`."""

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise OverflowError(f"more than {MOST_BYTES:,} bytes")
        return super().write(data)


# Pickling -------------------------------------------------------------------------------------------------------------
def _records(error: BaseException, where: str) -> list[_ExceptionRecord]:
    """Return an exception's record, followed by those that it refers to."""
    errors, records = [error], {id(error): _record(error, where)}

    def record_of(other: BaseException | None) -> _ExceptionRecord | None:
        if other is not None and id(other) not in records and len(errors) < MOST_ERRORS:
            records[id(other)] = _record(other, where)
            errors.append(other)
        return records.get(id(other))

    for one in errors:  # it grows meanwhile
        record = records[id(one)]
        record.cause, record.context = record_of(one.__cause__), record_of(one.__context__)
        if isinstance(one, BaseExceptionGroup):
            record.members = [it for it in map(record_of, one.exceptions) if it is not None]
    return list(records.values())


def _record(error: BaseException, where: str) -> _ExceptionRecord:
    """Return the record of one exception by itself."""
    notes = [note for note in getattr(error, "__notes__", None) or () if isinstance(note, str)]
    pickled, left_out = _pickled(error)
    if left_out:
        notes.append(f"left in {where}, since it can't be pickled: {left_out}")
    call = vars(error).get(CALL_ATTRIBUTE)
    sent = pickle_or_none((call.fn, call.given, call.outputs)) if isinstance(call, FailedCall) else None
    return _ExceptionRecord(
        name=_name(error),
        message=error.message if isinstance(error, BaseExceptionGroup) else _message(error),
        notes=notes,
        pickled=pickled,
        call=(sent or b"") if CALL_ATTRIBUTE in vars(error) else None,
        suppressed=error.__suppress_context__,
    )


def _pickled(error: BaseException) -> tuple[bytes | None, str]:
    """Return an exception as it is pickled for a record, and what is left out of it, in words."""
    members = [*error.exceptions] if isinstance(error, BaseExceptionGroup) else None
    whole = _whole(error) if members is None else None
    if whole is not None:
        return whole, ""
    with suppress(BaseException):  # methods of the user's
        args, attributes = _parts(error)
        names = ", ".join(attributes)
        for parts, left_out in (
            ((args, attributes), ""),
            ((args, {}), f"its attributes {names}"),
            (((_message(error),), {}), f"its arguments, its attributes {names}"),
        ):
            pickled = pickle_or_none((type(error), *parts), bounded=False)
            if pickled is not None:
                _rebuilt(pickle.loads(pickled), "", members)
                return pickled, left_out
    return None, ""


def _whole(error: BaseException) -> bytes | None:
    """Return an exception pickled, if it is the same when loaded."""
    try:
        blob = pickle.dumps(error, 5)
        back = pickle.loads(blob)
        same = type(back) is type(error) and pickle.dumps(back.args, 5) == pickle.dumps(error.args, 5)
        return blob if same and vars(back).keys() == vars(error).keys() else None
    except BaseException:  # methods of the user's
        return None


def _parts(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what to make an exception of: arguments of the built-in class that it is derived from, and attributes."""
    _, args, *more = _built_in(type(error)).__reduce__(error)  # the name of an OSError's file is among them
    state = object.__getstate__(error)  # slots are in a tuple's second part
    slots = state[1] if isinstance(state, tuple) else {}
    attributes = {**vars(error), **(more[0] if more else {}), **slots}
    args = () if isinstance(error, BaseExceptionGroup) else args
    return args, {name: it for name, it in attributes.items() if name not in (CALL_ATTRIBUTE, "__notes__")}


def _built_in(cls: type[BaseException]) -> Any:
    return next(kind for kind in cls.__mro__ if kind.__module__ == "builtins")


def _message(error: BaseException) -> str:
    try:
        return safe_text(error, str)
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
    return f"{TRACEBACK_NOTE}{where}:\n{text}"


# Unpickling -----------------------------------------------------------------------------------------------------------
def _with_source(frame: re.Match[str]) -> str:
    """Return a frame with its line: this process has the source of a notebook's cells, the other one only files."""
    line = linecache.getline(frame[1], int(frame[2])).strip()
    return f"{frame[0]}    {line}\n" if line else frame[0]


def _make(record: _ExceptionRecord, errors: dict[int, BaseException]) -> BaseException:
    """Return the exception of a record; of a group, its members are made first."""
    if id(record) in errors:
        return errors[id(record)]
    members = None if record.members is None else [_make(member, errors) for member in record.members]
    error = _loaded(record, members)
    if error is None:
        what = "" if members is None else f", a group of {len(members)}"
        error = StageError(f"{record.name}{what}: {record.message}")
        record.notes.append(f"this stands for a {record.name}, which can't be had outside of its process")
    if record.notes:
        vars(error)["__notes__"] = record.notes
    if record.call is not None:
        vars(error)[CALL_ATTRIBUTE] = _call(record.call)
    errors[id(record)] = error
    return error


def _loaded(record: _ExceptionRecord, members: list[BaseException] | None) -> BaseException | None:
    try:
        loaded: Any = None if record.pickled is None else pickle.loads(record.pickled)
        return _rebuilt(loaded, record.message, members) if isinstance(loaded, tuple) else loaded
    except KeyboardInterrupt:  # of this process's user
        raise
    except BaseException:  # methods of the user's
        return None


def _rebuilt(parts: Any, message: str, members: list[BaseException] | None) -> BaseException:
    """Return an exception made without its `__init__`; a group, of these members."""
    cls, args, attributes = parts
    base = _built_in(cls)
    args = args if members is None else [message, members]
    error: BaseException = base.__new__(cls, *args)
    try:
        base.__init__(error, *args)  # an OSError's errno, say, is set there
    except TypeError:
        error.args = tuple(args)
    for name, value in attributes.items():
        with suppress(AttributeError, TypeError):  # read-only, and set by the arguments
            BaseException.__setattr__(error, name, value)  # past what a class may do about it: it may be frozen
    return error


def _call(pickled: bytes) -> FailedCall | None:
    try:
        return FailedCall(*pickle.loads(pickled))
    except Exception:  # methods of the item's; or it wasn't sent
        return None


# Skipped items --------------------------------------------------------------------------------------------------------
class _RemoteItem:
    """Stands for an item that stayed in its process, with its repr."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


class _TraceText(traceback.TracebackException):
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
    item, unset = pickle_or_none(failure.item), cast(Any, None)
    record = replace(failure, item=None if item is not None else _shown(failure.item), error=unset, trace=unset)
    return pickle.dumps((record, item, pickle_exception(failure.error, host, trace=False), _text(failure)), 5)


def unpickle_skipped(data: bytes) -> Failure:
    record, pickled, failed, text = cast("tuple[Failure, bytes | None, bytes, str]", pickle.loads(data))
    error = unpickle_exception(failed)
    if not isinstance(error, Exception):
        raise TypeError(f"an item is skipped because of an Exception, got {error!r}")
    item: Any = _RemoteItem(record.item)
    if pickled is not None:
        try:
            item = pickle.loads(pickled)
        except Exception as problem:
            item = _RemoteItem(f"<an item that can't be had: {type(problem).__name__}>")
    return replace(record, item=item, error=error, trace=_TraceText(error, text))


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
        return cut(safe_text(item, repr))
    except BaseException as problem:  # methods of the user's
        return f"<{type(item).__name__} whose repr raised {type(problem).__name__}>"
