"""A stage of one's own that remembers something: texts packed into lines of a given length, resumed exactly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import streamline as sl

TEXT = "the quick brown fox jumps over the lazy dog and runs away from seven very small but angry birds"


@sl.stage(state=dict, snapshot_every=4)
async def packed(words: AsyncIterator[str], *, state: dict[str, Any], width: int) -> AsyncIterator[str]:
    """Yield lines of at most `width` characters. What waits for its line to fill is in `state`, and nowhere else."""
    async for word in words:
        line = state.get("line", "")
        if line and len(line) + 1 + len(word) > width:
            state["line"] = word  # before the next input is asked for: there, the state must be complete
            yield line
        else:
            state["line"] = f"{line} {word}".strip()
    if state.get("line"):
        yield state["line"]


def main() -> None:
    pipe = sl.from_items(TEXT.split()).through(packed, width=24)
    whole = list(pipe)
    for line in whole:
        print(f"| {line:<24} |")

    exact = True
    for position in range(len(whole) + 1):  # stop after each line, and go on in another run
        with pipe.open() as stream:
            before = [next(stream) for _ in range(position)]
            saved = stream.snapshot().to_json()
        with pipe.open(resume=sl.Snapshot.from_json(saved)) as stream:
            exact = exact and before + list(stream) == whole
    print(f"resumed after each of {len(whole)} lines, exact: {exact}")
    print("what a snapshot holds:", sl.Snapshot.from_json(saved).worker_states[0])


if __name__ == "__main__":
    main()
