"""What can go wrong. One base, few classes; each message says what was expected, what arrived and what to do.

A user's own exception is never wrapped: it reaches the consumer as it is, with notes. The classes here are for what
streamline itself finds.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "DataError",
    "PlanError",
    "PlanTypeError",
    "ReadError",
    "ResumeError",
    "SnapshotError",
    "StageError",
    "StreamlineError",
]


class StreamlineError(Exception):
    """The base of everything raised by streamline itself."""


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
    """A record that can't be decoded: the message names file, line and byte. Reading again finds it again."""


class ReadError(StreamlineError, OSError):
    """Data that can't be had: missing, forbidden, cut short, or a server that failed after the retries.

    Unlike `DataError` the bytes never arrived; a later run may fare better.
    """


class SnapshotError(StreamlineError):
    """A snapshot file that is damaged, truncated, too new, or can't be written."""


class ResumeError(StreamlineError, ValueError):
    """A sound snapshot that belongs to another plan or other data than the one it is given to."""


class ClosedError(StreamlineError, RuntimeError):
    """A stream that was closed, or whose pull was cut off inside, was asked for another item."""
