"""States across a border (a first version)."""

from __future__ import annotations

import pickle
from typing import Any

from streamline.flow import Chunk
from streamline.states import State, States

__all__ = ["Columns", "dump", "dump_state"]


def dump(chunk: Chunk[Any]) -> bytes:
    """Return a chunk's states."""
    return pickle.dumps((chunk.states, chunk.after), 5)


def dump_state(state: State) -> bytes:
    """Return one state."""
    return pickle.dumps(state, 5)


class Columns:
    """States of one worker."""

    def __init__(self, choosing: bool) -> None:
        self.choosing = choosing

    def load(self, data: bytes, count: int) -> tuple[States, State | None]:
        """Return a chunk's states."""
        states, after = pickle.loads(data)
        return states, after

    def load_state(self, data: bytes) -> State:
        """Return one state."""
        state: State = pickle.loads(data)
        return state

    def restarted(self, at: State) -> None:
        """The worker goes on elsewhere."""
