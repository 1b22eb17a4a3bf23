"""A few records through the stages of a plan, in a thread: what raises on them would raise in the run."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.backends.processes import Processes
from streamline.core.session import Session
from streamline.core.threads import start_thread
from streamline.debug import DebugStream
from streamline.opened import Begin, prepare
from streamline.plan.plan import Plan, Shard
from streamline.sources.items import Items
from streamline.transforms.base import Stage
from streamline.transforms.cache import Cache
from streamline.transforms.regenerate import Regenerate

__all__ = ["Rehearsed", "pickles", "rehearse"]


MOST_OUTPUTS = 256
"""Items that are taken: a `.repeat()` has no end."""


STAGE = re.compile(r"in (.+), shard \d+ of \d+ \(")


@dataclass
class Rehearsed:
    """How it went.

    Attributes:
      outputs: items that came out.
      failures: for a person.
      late: whether it wasn't through in time.
    """

    outputs: int = 0
    failures: tuple[str, ...] = ()
    late: bool = False


def rehearse(plan: Plan, records: Sequence[tuple[str, Any]], deadline_s: float) -> Rehearsed:
    """Run records through the stages, all of them together, and if that fails, those of each file alone.

    Args:
      plan: its source and sharding are left out.
      records: (where it is from, the record).
      deadline_s: after which it is left to itself, in a thread that doesn't keep the interpreter.
    """
    rehearsed = Rehearsed()

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rehearsed.outputs, failure = _run(plan, [record for _, record in records])
            if failure is not None:
                rehearsed.failures = _who_fails(plan, records) or (f"together, the first records fail: {failure}",)

    thread = threading.Thread(target=work, daemon=True)
    start_thread(thread)
    thread.join(deadline_s)
    rehearsed.late = thread.is_alive()
    return rehearsed


def pickles(plan: Plan, backend: Backend | None) -> str | None:
    """Return why a plan can't be sent to the processes of a backend; None: it can."""
    backend = backend or Processes(1)
    if not isinstance(backend, Processes):
        return None
    session = Session()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backend.payload(plan, session, 1)
    except Exception as error:
        return f"{error}" or type(error).__name__
    finally:
        session.close()
    return None


def _who_fails(plan: Plan, records: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    found = []
    for where, record in records:
        _, failure = _run(plan, [record])
        if failure is not None:
            found.append(f"on the first record of {where}, {failure}")
    return tuple(found)


def _run(plan: Plan, records: list[Any]) -> tuple[int, str | None]:
    """Return how many items came out, and what went wrong, if anything did."""
    source = Items(name=plan.source.name, items=records)
    worker, after = (tuple(map(_unkept, section)) for section in (plan.worker, plan.after))
    alone = replace(plan, source=source, before=(), shard=Shard(), sharded=True, worker=worker, after=after)
    opening = prepare(alone, Begin(rank=0, world_size=1), backend=Inline())
    outputs = 0
    with closing(DebugStream[Any](opening)) as stream:
        try:
            for _ in islice(stream, MOST_OUTPUTS):
                outputs += 1
        except Exception as error:
            return outputs, _said(error)
    return outputs, None


def _unkept(stage: Stage[Any, Any]) -> Stage[Any, Any]:
    """Return a stage that writes nothing down."""
    if isinstance(stage, Cache):
        return replace(stage, path=None)
    return replace(stage, spill=None) if isinstance(stage, Regenerate) else stage


def _said(error: Exception) -> str:
    """Say what was raised, and by which stage."""
    notes = [match[1] for note in getattr(error, "__notes__", ()) if (match := STAGE.match(note))]
    return f"{notes[0] if notes else 'a stage'} raised {type(error).__name__}: {error}"
