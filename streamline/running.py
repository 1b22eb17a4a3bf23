"""A plan that runs: what both kinds of stream have, and tell, in common."""

from __future__ import annotations

from os import PathLike
from typing import TypeVar

from streamline.cursor import Cursor
from streamline.failing.failures import ErrorReport
from streamline.gate import Gate
from streamline.meters.stats import Stats
from streamline.opening import Opening
from streamline.session import Session
from streamline.snapshot import Snapshot
from streamline.states import At
from streamline.watching.trace import MAX_BYTES, Trace

__all__ = ["Running"]

T = TypeVar("T")


class Running(Cursor[T]):
    """A place in the items of a plan that runs.

    Args:
      session: of this running; None: a new one.
    """

    def __init__(self, opening: Opening, session: Session | None = None) -> None:
        super().__init__(At("", None))  # until it begins
        self._opening = opening
        self._session = session or Session()
        self._session.leave_out(opening.errors(self._session.meters))

    @property
    def errors(self) -> ErrorReport:
        """The items that were left out so far because of an error, up to the last item received.

        Raises:
          DeadLetterError: one of them can't be written down.
        """
        self._session.errors.count(self.state)
        return self._session.errors.report()

    def stats(self) -> Stats:
        """Return what was counted so far, and what limits the stream: see docs/seeing.md. Also behind the end."""
        return self._session.meters.stats(self.at_hand)

    def trace(self, path: str | PathLike[str], *, max_bytes: int = MAX_BYTES) -> Trace:
        """Begin to write what every stage does and when, for https://ui.perfetto.dev; `docs/watching.md` explains it.

        It ends with the stream, or before: `with stream.trace("run.json"):`, or `.stop()`.

        Args:
          max_bytes: when the file has half of it, it becomes "run.previous.json", and another one begins; at least 1
            MiB.

        Raises:
          PlanError: another trace of this stream is being written, or a `max_bytes` that is too small.
          OSError: the file can't be made. Later ones, a full disk say, end the trace with a warning.
        """
        return self._opening.trace(self._session, path, max_bytes)

    def _snapshot(self, gate: Gate) -> Snapshot:
        """Return the state right after the last item received; `gate` is the consumer's."""
        state = self.state
        self._session.errors.count(state)  # so that no dead letter of what it counts can be missing
        return self._opening.snapshot(state, gate, self._session.journal)
