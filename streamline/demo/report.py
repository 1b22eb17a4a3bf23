"""What the trainer tells its parent: one JSON object a line on stdout, and the judgement over two runs of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TrainStep:
    """One batch, after the model has learnt from it."""

    step: int  # of the whole training, from 1
    items: int  # so far, in the whole training
    loss: float
    chain: str  # SHA-256 over all batches so far
    items_per_s: float  # of late
    limit: str  # of late: what takes the most time
    waiting: float  # of late: the share of the time that the model waits for data


@dataclass(frozen=True)
class RunEnd:
    """The last line of a run that came to its end."""

    items_per_s: float
    limit: str
    waiting: float
    weights: str  # SHA-256 over weights and optimiser
    snapshot_bytes: int  # the last one's size


def send(line: TrainStep | RunEnd) -> None:
    """Print a line for the parent. A parent that is gone ends the trainer with BrokenPipeError."""
    kind = "end" if isinstance(line, RunEnd) else "step"
    sys.stdout.write(json.dumps({kind: asdict(line)}) + "\n")
    sys.stdout.flush()


def parse(line: str) -> TrainStep | RunEnd:
    """Return what `send` printed.

    Raises:
      ValueError: something else was printed.
    """
    try:
        [(kind, fields)] = json.loads(line).items()
        return RunEnd(**fields) if kind == "end" else TrainStep(**fields)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"expected a line of the trainer's report, got {line!r}") from error


def difference(expected: Iterable[TrainStep], seen: Iterable[TrainStep]) -> str | None:
    """Return where the batches seen first differ from those expected of the same step, or None.

    A batch that is seen twice (before the kill, and after the resume) must be as expected both times.

    Args:
      expected: every step of the uninterrupted run.
      seen: the steps of the run that was killed and of the one that resumed it, one after the other.
    """
    wanted = {step.step: step for step in expected}
    missing = dict(wanted)
    for step in seen:
        missing.pop(step.step, None)
        want = wanted.get(step.step)
        if want is None:
            return f"batch {step.step} is one too many: the uninterrupted run has {len(wanted)}"
        if want.chain != step.chain:
            return f"the digest of what was delivered differs from batch {step.step} on: {step.chain} != {want.chain}"
        if want.loss != step.loss:
            return f"the loss differs at batch {step.step}, on the same data: {step.loss} != {want.loss}"
    if missing:
        return f"batch {min(missing)} was never delivered, and {len(missing) - 1} more"
    return None
