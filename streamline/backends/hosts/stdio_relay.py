"""Prints, logging records and questions of a host process, relayed to its parent over one connection.

Each is a frame: its kind, the number of the link that it belongs to, its body. Frames keep their order. The child
writes from any thread, and waits until it is written: so what was written before a crash arrives. The parent reads in a
thread per process, never in an event loop: a busy loop would keep the child waiting. Questions have no other way: the
thread that asks and waits may be the one of the event loop, which reads the links.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from streamline.backends.ipc.control_connection import ControlConnection
from streamline.core.forks import disown_in_copies

Answer: TypeAlias = Callable[[Any], Any]
"""Answers a run's questions, in the thread of its process; what it raises is raised at the question."""

Frames: TypeAlias = Callable[[int, int, bytes], object]
"""Is given each frame."""

STDOUT, STDERR, RECORD, QUESTION, OVER = range(5)


# In the child ---------------------------------------------------------------------------------------------------------
_answers: ContextVar[Answer] = ContextVar("streamline_answers")


def asker() -> Answer | None:
    """Return what asks the consumer of the calling task's run, blocking, in any thread; None: it is in this process.

    It raises what the answering function raised, or a `ConnectionError` if the parent has exited.
    """
    return _answers.get(None)


class ChildStdio:
    """The child's end, in place of `sys.stdout`, `sys.stderr` and the root logger's handlers."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self._connection = ControlConnection(sock)
        self._asking = threading.Lock()
        self._inherited = sys.stdout, sys.stderr
        self._handler = _Handler(self, number)
        sys.stdout, sys.stderr = _text(self, STDOUT), _text(self, STDERR)
        logging.root.handlers[:] = [self._handler]
        disown_in_copies(self)

    def bind_task(self, link: int) -> None:
        """Let `asker()` in the calling task, and those that it starts, ask the run of this link."""
        _answers.set(partial(self.ask, link))

    def send_frame(self, kind: int, body: bytes, link: int = 0) -> None:
        """Send a frame; drop it if the parent has exited."""
        self._connection.send((kind, link, body))

    def ask(self, link: int, question: object) -> Any:
        from streamline.backends.ipc.by_value import dumps  # not at the top: few ask

        body = dumps(question)
        with self._asking:  # one at a time, so the next answer is this one's
            self.send_frame(QUESTION, body, link)
            try:
                answer, error = pickle.loads(self._connection.receive())
            except EOFError:
                raise ConnectionError("the parent process has hung up") from None
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Flush the streams."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code has closed it, or put another in its place
                stream.flush()

    def disown(self) -> None:
        """Leave the connection to the parent of this fork: two writers would mix frames."""
        sys.stdout, sys.stderr = self._inherited
        logging.root.removeHandler(self._handler)
        self._connection.close()


def _text(stdio: ChildStdio, kind: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_Raw(stdio, kind))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


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
    """Sends records as `logging.handlers.SocketHandler` does; extras that can't be pickled, as their repr."""

    def __init__(self, stdio: ChildStdio, number: int) -> None:
        super().__init__()
        self._stdio = stdio
        self._process = f"streamline process {number}"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {**vars(record), "msg": record.getMessage(), "args": None, "exc_info": None}
            fields["processName"] = self._process
            if record.exc_info and not record.exc_text:
                fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
            self._stdio.send_frame(RECORD, pickle.dumps({name: _picklable(value) for name, value in fields.items()}))
        except Exception:  # a message that doesn't fit its arguments, say
            self.handleError(record)


def _picklable(value: object) -> object:
    if value is None or type(value) in (str, int, float):
        return value
    try:
        pickle.dumps(value)
    except Exception:
        return repr(value)
    return value


# In the parent --------------------------------------------------------------------------------------------------------
class Relay(NamedTuple):
    """Passes the questions of one run on, as they are, to the process that it belongs to.

    Attributes:
      ask: called with each question, and what takes the reply; must not wait for it.
      over: called when the run has ended, or the host.
    """

    ask: Callable[[bytes, Callable[[bytes], object]], object]
    over: Callable[[], object]


class HostOutput:
    """What a host process writes and asks, in the consumer's process. Call `frame` in one thread, `answer` in any.

    Args:
      mark: begins each line that is printed.
      reply: called with a link and the reply to its question.
    """

    def __init__(self, mark: str, reply: Callable[[int, bytes], object]) -> None:
        self._mark = mark
        self._reply = reply
        self._answers: dict[int, Answer | Relay] = {}
        self._lines = {STDOUT: bytearray(), STDERR: bytearray()}

    def answer(self, link: int, by: Answer | Relay) -> None:
        """Answer the questions of the run with this link."""
        self._answers[link] = by

    def frame(self, kind: int, link: int, body: bytes) -> None:
        """Print it, log it or answer it."""
        if kind in self._lines:
            self._print(kind, body)
        elif kind == RECORD:
            _log(body)
        elif kind == OVER:
            self._over(link)
        elif isinstance(by := self._answers.get(link), Relay):
            by.ask(body, partial(self._reply, link))
        else:
            self._reply(link, reply_to(by, body))

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


def _log(body: bytes) -> None:
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
        failure = RuntimeError(f"the answer can't be sent to the process that asked: {error or answer!r} ({cause})")
        return dumps((None, failure))
