"""States and failures on a link: encoded as bytes where the link copies, else passed as they are."""

from __future__ import annotations

from typing import Any

from streamline.backends.ipc.exceptions import pickle_exception, unpickle_exception
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import Encoded
from streamline.backends.ipc.skipped_items import pickle_skipped, unpickle_skipped
from streamline.backends.ipc.state_codec import ColumnDecoder, ColumnEncoder
from streamline.core.error_policy import Failure
from streamline.core.flow import Chunk
from streamline.core.state import State, States
from streamline.errors import WorkerDied

__all__ = ["StatesDecoder", "StatesEncoder", "decode_failure", "decode_skipped", "encode_failure", "encode_skipped"]


class StatesEncoder:
    """Encodes the states of one worker, in the host.

    Args:
      with_log: whether the worker has a log of choices (`streamline.core.choices`).
    """

    def __init__(self, link: Link, with_log: bool) -> None:
        self._dumper = ColumnEncoder(with_log) if link.copies else None

    def column(self, chunk: Chunk[Any]) -> Encoded:
        """Return the encoded states of a chunk."""
        return (chunk.states, chunk.after) if self._dumper is None else self._dumper.dump(chunk)

    def state(self, state: State) -> Encoded:
        """Return one encoded state."""
        return state if self._dumper is None else self._dumper.dump_state(state)


class StatesDecoder:
    """Decodes the states of one worker, in the consumer.

    Args:
      with_log: as of `StatesEncoder`.
    """

    def __init__(self, with_log: bool) -> None:
        self._columns = ColumnDecoder(with_log)

    def column(self, encoded: Encoded, count: int) -> tuple[States, State | None]:
        """Return the states of `count` items, and the progress after them."""
        if isinstance(encoded, bytes):
            return self._columns.load(encoded, count)
        states, after = encoded
        return states, after

    def state(self, encoded: Encoded) -> State:
        """Return the state that the worker was opened at."""
        return self._columns.load_state(encoded) if isinstance(encoded, bytes) else encoded

    def restarted(self, at: State) -> None:
        """Expect states of a new host, where the worker was opened at this state."""
        self._columns.restarted(at)


def encode_failure(link: Link, failure: BaseException) -> Encoded:
    """Return an encoded failure."""
    if not link.copies:
        return failure
    return pickle_exception(failure, link.host, trace=not isinstance(failure, WorkerDied))  # its message says where


def decode_failure(encoded: Encoded) -> BaseException:
    """Return a decoded failure."""
    return unpickle_exception(encoded) if isinstance(encoded, bytes) else encoded


def encode_skipped(link: Link, failure: Failure) -> Encoded:
    """Return the encoded record of a skipped item."""
    return pickle_skipped(failure, link.host) if link.copies else failure


def decode_skipped(encoded: Encoded) -> Failure:
    """Return the decoded record of a skipped item."""
    return unpickle_skipped(encoded) if isinstance(encoded, bytes) else encoded
