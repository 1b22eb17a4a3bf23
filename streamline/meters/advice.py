"""What a verdict advises: how the work of a stage gets out of the way of the others."""

from __future__ import annotations

import math

from streamline.meters.figures import StageStats

__all__ = ["MOST", "THREADABLE", "calls_for", "if_threads", "more_at_once", "several", "way_out"]

MOST = 8
"""The most calls at once, for each there are now, that is advised in one step."""

THREADABLE = ("map",)
"""Stages that take `executor="thread"` themselves."""


def way_out(kind: str, calls: int) -> str:
    """Return how the work of an inline function of a kind of stage gets off the event loop.

    Args:
      kind: "map", "batch", "from_items".
      calls: threads that are advised.
    """
    threads = f'executor="thread", concurrency={calls}'
    if kind == "map":
        return threads
    if kind in ("batch", "bucket_by_length"):
        return f".{kind}(collate=None) and the collating in .map({threads})"
    if kind in ("flat_map", "unbatch"):
        return f".map({threads}) that returns lists, and .unbatch()"
    if kind == "from_items":
        return f"from_items(range(len(data))) and .map(data.__getitem__, {threads})"
    if kind == "filter":
        return f"a .map({threads}) before it that does the slow part"
    if kind == "source":
        return f"yielding what is to be read, and the reading in .map({threads})"
    if kind == "from_iterable":
        return f"a factory that yields what is to be read, and the reading in .map({threads})"
    return f"its slow part in a .map({threads})"


def several(kind: str) -> str:
    """Return how one call of an inline function of a kind of stage does several items."""
    if kind == "from_items":
        return "give what it reads a __getitems__, which takes a list of indices"
    if kind in ("from_iterable", "source"):
        return "let it yield lists, and .unbatch() behind it"
    if kind in ("batch", "bucket_by_length", "unbatch"):
        return "larger batches"
    if kind == "filter":
        return "filter lists in a .map, between .batch(collate=None) and .unbatch()"
    return "let a call do several items (.batch before it, .unbatch behind)"


def more_at_once(stage: StageStats, more: int) -> str:
    """Return how a stage that is awaited gets more done at once."""
    if stage.executor != "inline":
        return f"concurrency={stage.concurrency * more}"
    if stage.kind.startswith("read_"):
        return f".shard({stage.workers * more}), so that as many files or connections are read at once"
    if stage.kind == "source":
        return f".shard({stage.workers * more}), so that as many are read at once"
    if stage.kind == "from_iterable":
        return "an iterable that names what is to be read, and the reading in .map(concurrency=), several at once"
    return "its slow part in a .map(concurrency=) before it, where several items are at work at once"


def if_threads(stage: StageStats) -> str:
    return " if it waits or releases the GIL" if stage.executor == "thread" else ""


def calls_for(wanted: float) -> int:
    """How many threads are needed for so many times the speed; at least 2."""
    return max(2, min(MOST, math.ceil(wanted)))
