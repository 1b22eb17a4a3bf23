"""Prints, logging records and questions of a host process, relayed to its parent over one socket.

Each is one frame; frames keep their order. The child writes from any thread, and waits until it is written: so what was
written before a crash arrives. The parent reads in a thread per process, never in an event loop: a busy loop would
keep the child waiting.
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
from functools import partial
from typing import Any, TypeAlias

Answer: TypeAlias = Callable[[Any], Any]
"""Answers a run's questions, in the thread of its process; what it raises is raised at the question."""

Frames: TypeAlias = Callable[[int, int, bytes], object]
"""Is given each frame: its kind, the link that it belongs to, its body."""

HEADER = struct.Struct("<BQI")  # kind, the link it belongs to, bytes that follow

STDOUT, STDERR, RECORD, QUESTION, OVER = range(5)

READ_BYTES = 1 << 16


# In the child ---------------------------------------------------------------------------------------------------------
_answers: ContextVar[Answer] = ContextVar("streamline_answers")


def asker() -> Answer | None:
    """Return what asks the consumer of the calling task's run, blocking, in any thread; None: it is in this process.

    It raises what the answering function raised, or a `ConnectionError` if the parent has exited.
    """
    return _answers.get(None)


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
        """Replace `sys.stdout`, `sys.stderr` and the root logger's handlers."""
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._stream(STDOUT), self._stream(STDERR)
        self._handler = _Handler(self, self._number)
        logging.root.handlers[:] = [self._handler]
        os.register_at_fork(after_in_child=self._forked)

    def bind_task(self, link: int) -> None:
        """Let `asker()` in the calling task, and those that it starts, ask the run of this link."""
        _answers.set(partial(self.ask, link))

    def send_frame(self, kind: int, body: bytes, link: int = 0) -> None:
        """Send a frame; drop it if the parent has exited."""
        with contextlib.suppress(OSError), self._sending:
            self._sock.sendall(HEADER.pack(kind, link, len(body)) + body)

    def end_questions(self, link: int) -> None:
        """Say that a run asks nothing any more."""
        self.send_frame(OVER, b"", link)

    def ask(self, link: int, question: object) -> Any:
        from streamline.backends.ipc.by_value import dumps  # not at the top: few ask

        body = dumps(question)
        with self._asking:  # one at a time, so the next answer is this one's
            self.send_frame(QUESTION, body, link)
            _, _, size = HEADER.unpack(self._receive(HEADER.size))
            answer, error = pickle.loads(self._receive(size))
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Flush the streams."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code has closed it, or put another in its place
                stream.flush()

    def _stream(self, kind: int) -> io.TextIOWrapper:
        buffer = io.BufferedWriter(_Raw(self, kind))
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def _receive(self, size: int) -> bytes:
        data = self._sock.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionError("the parent process has hung up")
        return data

    def _forked(self) -> None:
        """Leave the socket to the parent of this fork: two writers would mix frames."""
        if self._streams is not None:
            sys.stdout, sys.stderr = self._streams
        if self._handler is not None:
            logging.root.removeHandler(self._handler)
        self._sock.close()


class _Raw(io.RawIOBase):
    """The raw stream of a child's `sys.stdout` or `sys.stderr`."""

    def __init__(self, stdio: ChildStdio, kind: int) -> None:
        self._stdio = stdio
        self._kind = kind

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 + self._kind  # the inherited descriptor, for writes from C

    def write(self, data: Any) -> int:
        self._stdio.send_frame(self._kind, bytes(data))
        return len(data)


class _Handler(logging.Handler):
    """Sends records as `logging.handlers.QueueHandler` does, with the traceback's text beside the message."""

    def __init__(self, stdio: ChildStdio, number: int) -> None:
        super().__init__()
        self._stdio = stdio
        self._process = f"streamline process {number}"
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
            fields["processName"] = self._process
            if record.exc_info and not record.exc_text:
                fields["exc_text"] = self._formatter.formatException(record.exc_info)
            self._stdio.send_frame(RECORD, _plain(fields))
        except Exception:  # a message that doesn't fit its arguments, say
            self.handleError(record)


def _plain(fields: dict[str, object]) -> bytes:
    """Pickle a record's fields; those that can't be, as their repr."""
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
class Relay:
    """Passes the questions of one run on, as they are, to the process that it belongs to.

    Args:
      ask: called with each question; must not wait for its reply.
      over: called when the run has ended, or the host.

    Attributes:
      reply: takes the reply to a question; may raise `OSError`.
    """

    def __init__(self, ask: Callable[[bytes], object], over: Callable[[], object]) -> None:
        self.ask = ask
        self.over = over
        self.reply: Callable[[bytes], object] = lambda _: None


class HostOutput:
    """What a host process writes and asks, in the consumer's process. Call `frame` in one thread, `answer` in any.

    Args:
      mark: begins each line that is printed.
      reply: called with a link and the reply to its question; may raise `OSError`.
    """

    def __init__(self, mark: str, reply: Callable[[int, bytes], object]) -> None:
        self._mark = mark
        self._reply = reply
        self._answers: dict[int, Answer | Relay] = {}
        self._lines = {STDOUT: bytearray(), STDERR: bytearray()}

    def answer(self, link: int, by: Answer | Relay) -> None:
        """Answer the questions of the run with this link."""
        self._answers[link] = by
        if isinstance(by, Relay):
            by.reply = partial(self._reply, link)

    def frame(self, kind: int, link: int, body: bytes) -> None:
        """Print it, log it or answer it."""
        if kind in self._lines:
            self._print(kind, body)
        elif kind == RECORD:
            _handle(body)
        elif kind == QUESTION:
            by = self._answers.get(link)
            if isinstance(by, Relay):
                by.ask(body)
                return
            with contextlib.suppress(OSError):  # it has died meanwhile
                self._reply(link, reply_to(by, body))
        elif kind == OVER:
            self._over(link)

    def end(self) -> None:
        """Print unterminated lines; nothing is asked any more."""
        for kind, rest in self._lines.items():
            if rest:
                self._print(kind, b"\n")
        for link in list(self._answers):
            self._over(link)

    def _over(self, link: int) -> None:
        by = self._answers.pop(link, None)
        if isinstance(by, Relay):
            by.over()

    def _print(self, kind: int, data: bytes) -> None:
        rest = self._lines[kind]
        rest += data
        whole, newline, left = rest.rpartition(b"\n")
        if not newline:
            return
        self._lines[kind] = bytearray(left)
        marked = "".join(f"{self._mark}{line}\n" for line in whole.decode("utf-8", "replace").split("\n"))
        stream = sys.stdout if kind == STDOUT else sys.stderr
        with contextlib.suppress(Exception):  # None, closed, or a user's stream that fails
            stream.write(marked)


class ParentStdio:
    """The parent's end of the socket. `read` is called in one thread, `reply` in any."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._waiting = bytearray()

    def reply(self, link: int, reply: bytes) -> None:
        """Send the reply to a question; `OSError`: the child has exited."""
        self.sock.sendall(HEADER.pack(QUESTION, link, len(reply)) + reply)

    def read(self, to: Frames, *, wait: bool) -> bool:
        """Read once, and pass the complete frames on; False: nothing is there, or the child has hung up."""
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
            to(kind, link, bytes(self._waiting[at : at + size]))
            at += size
        del self._waiting[:at]
        return bool(data)


def _handle(body: bytes) -> None:
    """Pass a record to the logger of its name."""
    try:
        record = logging.makeLogRecord(pickle.loads(body))
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
    except Exception:  # a filter that fails, an extra of a class that isn't here: listening goes on
        traceback.print_exc()


def reply_to(by: Answer | None, body: bytes) -> bytes:
    """Return the pickled answer to a question, or what was raised; classes of `__main__` go by value."""
    from streamline.backends.ipc.by_value import dumps  # not at the top: the child has no need of this half

    answer: Any = None
    error: BaseException | None = None
    try:
        if by is None:
            raise LookupError("no handler answers the questions of this run")
        answer = by(pickle.loads(body))
    except BaseException as raised:
        error = raised.with_traceback(None)
    try:
        return dumps((answer, error))
    except Exception as cause:
        error_reply = RuntimeError(f"the answer can't be sent to the process that asked: {error or answer!r} ({cause})")
        return dumps((None, error_reply))
