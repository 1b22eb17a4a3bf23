"""What can go wrong. One base, few classes; each message says what was expected, what arrived and what to do.

A user's own exception is never wrapped: it reaches the consumer as it is, with notes. The classes here are for what
streamline itself finds.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path

__all__ = [
    "CacheFull",
    "CheckError",
    "ClosedError",
    "CodeChangedWarning",
    "DataError",
    "DeadLetterError",
    "DuplicateWarning",
    "HostError",
    "JournalError",
    "PausedError",
    "PlanError",
    "PlanTypeError",
    "RanksError",
    "ReadError",
    "RecordError",
    "ReplicaStalled",
    "ResumeError",
    "SnapshotError",
    "StageError",
    "StreamlineError",
    "TooManyErrors",
    "TransportError",
    "WorkerDied",
    "WorkerStarved",
    "WriteError",
]


class StreamlineError(Exception):
    """The base of everything raised by streamline itself. Its text has no secrets of URLs, see `printable`."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class PlanError(StreamlineError, ValueError):
    """The pipeline as written can't mean what it says: raised where it is written, before anything runs."""


class PlanTypeError(PlanError, TypeError):
    """An option of the wrong type; otherwise as `PlanError`."""


class StageError(StreamlineError, RuntimeError):
    """User code raised what Python reads as an end or a cancellation (`StopIteration`, `StopAsyncIteration`,
    `CancelledError`): passed on as it is, the loop would end cleanly and a trainer would save its model.

    The original is the `__cause__`. Precedent: PEP 479.
    """


class DataError(StreamlineError, ValueError):
    """A record that can't be decoded: the message names file, line and byte. Reading again finds it again.

    Or an item that can't be written as the format wants it; the message has its number and its type.
    """


class ReadError(StreamlineError, OSError):
    """Data that can't be had: missing, forbidden, cut short, or a server that failed after the retries.

    Unlike `DataError` the bytes never arrived; a later run may fare better.
    """


class WriteError(StreamlineError, OSError):
    """Shards that can't be written: a full disk, no permission, a folder that holds something else or has a writer.

    What the folder's manifests name is whole. Unlike `DataError`, which also says that an item can't be written in a
    format, the items are not at fault.
    """


class CheckError(StreamlineError):
    """A check before the run found what the run would fail on. The message names it all."""


class SnapshotError(StreamlineError):
    """A snapshot file that is damaged, truncated, of another format, or can't be written."""


class JournalError(StreamlineError):
    """A live source's journal on disk that is damaged, can't be written, or is in another process's hands."""


class RecordError(StreamlineError, OSError):
    """A record of steps that can't be written, or doesn't have the steps that it is asked for; or they can't be given
    again."""


class ResumeError(StreamlineError, ValueError):
    """A sound snapshot that belongs to another plan or other data than the one it is given to."""


class CacheFull(StreamlineError, MemoryError):  # noqa: N818 - it names a state
    """A pass that is larger than `.cache(max_bytes=)` allows. The message says how much was kept, and what to do."""


class CodeChangedWarning(UserWarning):
    """A resume after which a function does something else than in the run that the snapshot was taken of.

    Not an error: that is how a run resumes after a fix. What was delivered stays as it was.
    """


class RanksError(StreamlineError, RuntimeError):
    """Ranks that were to end together can't: one of them says nothing, or has other items than it was counted to have.

    Nothing is lost: a snapshot includes the last item that was given.
    """


class DuplicateWarning(UserWarning):
    """Two shards of a source that splits itself begin with the same items: each reads everything, perhaps.

    Raised, where a filter makes an error of it, from the consumer's loop; the stream has failed then.
    """


class WorkerStarved(StreamlineError, RuntimeError):  # noqa: N818 - it names a state, as the design does
    """A worker of a live source is given items and lets none through, and too much waits for the others meanwhile.

    Nothing is lost: a resume with another merge, or with more room, goes on.
    """


class ReplicaStalled(StreamlineError, RuntimeError):  # noqa: N818 - it names a state
    """A replica of a stream isn't read any more: its reader has stopped for too long, or is gone, and others wait.

    Unlike `WorkerStarved` it is the program around the stream that is at fault, not its items.

    Attributes:
      replica: its number.
    """

    def __init__(self, message: str, *, replica: int = 0) -> None:
        super().__init__(message)
        self.replica = replica


class TransportError(StreamlineError, TypeError):
    """An item that can't cross from a worker's process: it can't be pickled there, or can't be made again here."""


class WorkerDied(StreamlineError, RuntimeError):  # noqa: N818 - it says what happened
    """A worker's process died again and again, and the worker gave nothing in between: killed, crashed, out of memory.

    Nothing is lost: what it gave is in the snapshot, and a resume begins after it.

    Attributes:
      shard: the worker's.
      process: the number of the process among its backend's, from 0 on.
      exit: what the process ended with, for a person: "signal 11 (SIGSEGV)", "exit code 3".
      position: of the item at fault in the source, or of the last one that arrived; "" where it isn't known.
    """

    def __init__(
        self,
        message: str,
        *,
        shard: int = 0,
        process: int = 0,
        exit: str = "",
        position: str = "",
    ) -> None:
        super().__init__(message)
        self.shard = shard
        self.process = process
        self.exit = exit
        self.position = position


class ClosedError(StreamlineError, RuntimeError):
    """A stream that was closed, or whose pull was cut off inside, was asked for another item."""


class PausedError(StreamlineError, RuntimeError):
    """A stream that is paused was asked for another list of items, or to pause once more.

    Unlike `ClosedError` it changes nothing: once the `paused()` block is left, the stream goes on.
    """


class TooManyErrors(StreamlineError, RuntimeError):  # noqa: N818 - there were many
    """More items were skipped than `max_errors` allows. The `__cause__` is the last of their errors.

    Unlike the error itself, which `on_error="raise"` lets through, this one says that there were many.
    """


class DeadLetterError(StreamlineError, OSError):
    """The file of dead letters can't be read or written, or is something else. The items are not at fault."""


class HostError(StreamlineError, RuntimeError):
    """A process for workers, or a thread, that can't be started or used as it is. User code is not at fault."""


DISTRIBUTION = "streamline-data"
"""What this package is called where packages are installed from: "streamline" is another project's there."""


def install(extra: str) -> str:
    """Return the command that installs what an extra brings, for messages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


PACKAGE = str(Path(__file__).parent)


def users_level() -> int:
    """Return the `stacklevel` of a warning: that of the code, seen from the caller, that isn't ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


USER = re.compile(
    r"""(https?:/{0,9})[^/?#\s"<>]{0,999}@|(://)[^/?#\s"<>@:]{0,999}:[^/?#\s"<>]{0,999}@""", re.IGNORECASE
)
"""What identifies in a URL; in abfss://CONTAINER@ACCOUNT nothing does."""

SECRET = re.compile(
    r"""([?&](?:[^=&?#\s]{0,64}(?:sig|token|secret|passw|pwd|credential|auth(?!or)|jwt|(?:api|access)-?_?key)"""
    r"""[^=&?#\s]{0,64}|key|code|pass)=)(?:[^&#\s"<>]*[^&#\s"<>',.:;)\]}])?""",
    re.IGNORECASE,
)
"""Parts of a query that open a door: X-Amz-Signature, sig (Azure), access_token, X-Goog-Credential, ...
Punctuation at the end of a value belongs to the sentence around the URL."""


def printable(text: str) -> str:
    """Return text that has names from elsewhere (paths, URLs, what a server says) as everything that prints shows it.

    Passwords and signatures in URLs become "…". What would act on a terminal, or can't be written as UTF-8, is escaped
    as Python writes it in a string: control characters (ESC, line ends, tabs), format characters (overrides of the
    direction of writing, zero width), line and paragraph separators, lone surrogates, unassigned code points.
    Everything else stays as it is, blanks and backslashes included: `é`, `東京` and a name without such characters read
    as before. For messages, logs and pictures; not for what is saved or opened, since it can't be undone.
    """
    if "@" in text or "?" in text:  # as in few: patterns take 2 µs
        text = SECRET.sub(r"\1…", USER.sub(r"\1\2…@", text))
    if text.isprintable():
        return text
    return "".join(map(_printable, text))


def printable_lines(text: str) -> str:
    """Return text of several lines, each `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def _printable(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # blanks of all widths
        return character
    return character.encode("unicode_escape").decode("ascii")
