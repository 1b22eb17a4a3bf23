"""How states and failures cross: copied into bytes and made anew, or handed over as they are."""

from __future__ import annotations

from typing import Any

from streamline.backends.ipc.exceptions import carry, delivered
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import Carried
from streamline.backends.ipc.skipped_items import carry_left_out, left_out
from streamline.backends.ipc.state_codec import Columns, Dumper
from streamline.core.error_policy import Failure
from streamline.core.flow import Chunk
from streamline.core.state import State, States
from streamline.errors import WorkerDied

__all__ = ["StatesIn", "StatesOut", "failure_in", "failure_out", "left_out_in", "left_out_out"]


class StatesOut:
    """The states of one worker, on the side where they are made.

    Args:
      choosing: whether the worker's flow chooses.
    """

    def __init__(self, link: Link, choosing: bool) -> None:
        self._dumper = Dumper(choosing) if link.copies else None

    def column(self, chunk: Chunk[Any]) -> Carried:
        """Return the states of a chunk as they cross."""
        return (chunk.states, chunk.after) if self._dumper is None else self._dumper.dump(chunk)

    def state(self, state: State) -> Carried:
        """Return one state as it crosses."""
        return state if self._dumper is None else self._dumper.dump_state(state)


class StatesIn:
    """The states of one worker, on the side where they arrive.

    Args:
      choosing: whether the worker's flow chooses.
    """

    def __init__(self, choosing: bool) -> None:
        self._columns = Columns(choosing)

    def column(self, carried: Carried, count: int) -> tuple[States, State | None]:
        """Return the states behind `count` items, and the progress behind them all."""
        if isinstance(carried, bytes):
            return self._columns.load(carried, count)
        states, after = carried
        return states, after

    def state(self, carried: Carried) -> State:
        """Return the state where the worker was opened."""
        return self._columns.load_state(carried) if isinstance(carried, bytes) else carried

    def restarted(self, at: State) -> None:
        """Say that the worker goes on elsewhere, opened at this state."""
        self._columns.restarted(at)


def failure_out(link: Link, failure: BaseException) -> Carried:
    """Return a failure as it crosses."""
    if not link.copies:
        return failure
    return carry(failure, link.host, trace=not isinstance(failure, WorkerDied))  # ours says where by itself


def failure_in(carried: Carried) -> BaseException:
    """Return a failure that has crossed."""
    return delivered(carried) if isinstance(carried, bytes) else carried


def left_out_out(link: Link, failure: Failure) -> Carried:
    """Return what is said of an item that was left out, as it crosses."""
    return carry_left_out(failure, link.host) if link.copies else failure


def left_out_in(carried: Carried) -> Failure:
    """Return the same, behind the border."""
    return left_out(carried) if isinstance(carried, bytes) else carried
