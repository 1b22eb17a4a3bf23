"""What a host process says besides items: prints, logging records, and questions that the parent answers.

All of it crosses one socket, in the order in which it was said, each as one frame. The child writes from any thread,
and waits until it is written: so what was said before a crash arrives. The parent reads in one thread a process, never
in an event loop: a loop that is busy would keep the child waiting.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

__all__ = ["Answer", "ChildStdio", "ConsumerCalls", "ParentStdio", "asker"]


Answer: TypeAlias = Callable[[Any], Any]
"""Answers a running's questions, in a thread of its process's; what it raises is raised where it was asked."""


HEADER = struct.Struct("<BQI")  # kind, the link it belongs to, bytes that follow


STDOUT, STDERR, RECORD, QUESTION, OVER = range(5)


READ_BYTES = 1 << 16


# In the child ---------------------------------------------------------------------------------------------------------
class ConsumerCalls:
    """Asks the running whose worker runs here; may be called in any thread, and waits for the answer."""

    def __init__(self, talk: ChildStdio, link: int) -> None:
        self._talk = talk
        self._link = link

    def __call__(self, question: object) -> Any:
        """Return the parent's answer.

        Raises:
          What the answer's function raised there. `ConnectionError`: there is no parent any more.
        """
        return self._talk.ask(self._link, question)


_asker: ContextVar[ConsumerCalls] = ContextVar("streamline_asker")


def asker() -> ConsumerCalls | None:
    """Return what asks the running that the calling task belongs to; None where it runs in this process."""
    return _asker.get(None)


class ChildStdio:
    """The child's end."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self._sock = sock
        self._number = number
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._streams: tuple[Any, Any] | None = None
        self._handler: logging.Handler | None = None
        sock.set_inheritable(False)

    def begin(self) -> None:
        """Put this in the place of `sys.stdout`, `sys.stderr` and the root logger's handlers."""
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._stream(STDOUT), self._stream(STDERR)
        self._handler = _Handler(self, self._number)
        logging.root.handlers[:] = [self._handler]
        os.register_at_fork(after_in_child=self._forked)

    def belongs(self, link: int) -> None:
        """Let the calling task, and those that it starts, ask by `asker()` the running that has this link."""
        _asker.set(ConsumerCalls(self, link))

    def say(self, kind: int, body: bytes, link: int = 0) -> None:
        """Send a frame; where nobody listens any more, it is dropped."""
        with contextlib.suppress(OSError), self._sending:
            self._sock.sendall(HEADER.pack(kind, link, len(body)) + body)

    def over(self, link: int) -> None:
        """Say that a running asks nothing any more."""
        self.say(OVER, b"", link)

    def ask(self, link: int, question: object) -> Any:
        from streamline.backends.ipc.by_value import dumps  # not at the top: few ask

        body = dumps(question)
        with self._asking:  # one at a time, so the next answer is this one's
            self.say(QUESTION, body, link)
            _, _, size = HEADER.unpack(self._receive(HEADER.size))
            answer, error = pickle.loads(self._receive(size))
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Send what is in the streams' buffers."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code has closed it, or put another in its place
                stream.flush()

    def _stream(self, kind: int) -> io.TextIOWrapper:
        buffer = io.BufferedWriter(_Raw(self, kind))
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def _receive(self, size: int) -> bytes:
        data = self._sock.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionError("the process that this one works for has hung up")
        return data

    def _forked(self) -> None:
        """Leave the socket to the process that this one was forked from: two writers would cut each other's frames."""
        if self._streams is not None:
            sys.stdout, sys.stderr = self._streams
        if self._handler is not None:
            logging.root.removeHandler(self._handler)
        self._sock.close()


class _Raw(io.RawIOBase):
    """What is under a child's `sys.stdout` or `sys.stderr`."""

    def __init__(self, talk: ChildStdio, kind: int) -> None:
        self._talk = talk
        self._kind = kind

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 + self._kind  # what was there before, for those who write past Python

    def write(self, data: Any) -> int:
        self._talk.say(self._kind, bytes(data))
        return len(data)


class _Handler(logging.Handler):
    """Sends records as `logging.handlers.QueueHandler` does, with the traceback's text beside the message."""

    def __init__(self, talk: ChildStdio, number: int) -> None:
        super().__init__()
        self._talk = talk
        self._process = f"streamline process {number}"
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
            fields["processName"] = self._process
            if record.exc_info and not record.exc_text:
                fields["exc_text"] = self._formatter.formatException(record.exc_info)
            self._talk.say(RECORD, _plain(fields))
        except Exception:  # a message that doesn't fit its arguments, say
            self.handleError(record)


def _plain(fields: dict[str, object]) -> bytes:
    """Pickle a record's fields; of those that can't be, their repr."""
    try:
        return pickle.dumps(fields)
    except Exception:
        return pickle.dumps({name: _picklable(value) for name, value in fields.items()})


def _picklable(value: object) -> object:
    try:
        pickle.dumps(value)
    except Exception:
        return repr(value)
    return value


# In the parent --------------------------------------------------------------------------------------------------------
class ParentStdio:
    """The parent's end. `read` is called in one thread, `answer` in any."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self._mark = f"[process {number}] "
        self._answers: dict[int, Answer] = {}
        self._waiting = bytearray()
        self._lines = {STDOUT: bytearray(), STDERR: bytearray()}

    def answer(self, link: int, by: Answer) -> None:
        """Answer the questions that come from the running with this link."""
        self._answers[link] = by

    def read(self, *, wait: bool) -> bool:
        """Read once what is there, and pass on what is complete.

        Returns:
          False: nothing is there, or nothing will come any more.
        """
        try:
            data = self.sock.recv(READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return False
        self._waiting += data
        at = 0
        while len(self._waiting) - at >= HEADER.size:
            kind, link, size = HEADER.unpack_from(self._waiting, at)
            if len(self._waiting) - at < HEADER.size + size:
                break
            at += HEADER.size
            self._dispatch(kind, link, bytes(self._waiting[at : at + size]))
            at += size
        del self._waiting[:at]
        return bool(data)

    def end(self) -> None:
        """Print the lines that were never ended."""
        for kind, rest in self._lines.items():
            if rest:
                self._print(kind, b"\n")

    def _dispatch(self, kind: int, link: int, body: bytes) -> None:
        if kind in self._lines:
            self._print(kind, body)
        elif kind == RECORD:
            _handle(body)
        elif kind == QUESTION:
            with contextlib.suppress(OSError):  # it has died meanwhile
                reply = _reply(self._answers.get(link), body)
                self.sock.sendall(HEADER.pack(QUESTION, link, len(reply)) + reply)
        elif kind == OVER:
            self._answers.pop(link, None)

    def _print(self, kind: int, data: bytes) -> None:
        rest = self._lines[kind]
        rest += data
        whole, newline, left = rest.rpartition(b"\n")
        if not newline:
            return
        self._lines[kind] = bytearray(left)
        marked = "".join(f"{self._mark}{line}\n" for line in whole.decode("utf-8", "replace").split("\n"))
        stream = sys.stdout if kind == STDOUT else sys.stderr
        with contextlib.suppress(Exception):  # None, closed, or somebody's own that fails: nobody to tell
            stream.write(marked)


def _handle(body: bytes) -> None:
    """Give a record to the logger that it would have come to here."""
    try:
        record = logging.makeLogRecord(pickle.loads(body))
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
    except Exception:  # a filter that fails, an extra of a class that isn't here: listening goes on
        traceback.print_exc()


def _reply(by: Answer | None, body: bytes) -> bytes:
    """Return the answer to a question, or what was raised instead; classes of `__main__` go by value."""
    from streamline.backends.ipc.by_value import dumps  # not at the top: the child has no need of this half

    answer: Any = None
    error: BaseException | None = None
    try:
        if by is None:
            raise LookupError("nobody answers the questions of this running")
        answer = by(pickle.loads(body))
    except BaseException as raised:
        error = raised.with_traceback(None)
    try:
        return dumps((answer, error))
    except Exception as cause:
        told = RuntimeError(f"the answer can't be sent to the process that asked: {error or answer!r} ({cause})")
        return dumps((None, told))
