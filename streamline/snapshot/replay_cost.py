"""What a resume reads and computes again, read out of a snapshot alone: each kind of stage says it of its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from streamline.core.state import Json, Tree
from streamline.core.text import Entry
from streamline.snapshot.snapshot import Snapshot
from streamline.transforms.base import stage_class

__all__ = ["behind_merge", "of_worker", "section"]


def of_worker(snapshot: Snapshot, tree: Tree) -> Iterator[str]:
    """Yield what stages of a worker do again at its state, in the plan's order."""
    return _lines(section(snapshot.fingerprint, 0, 1), tree)


def behind_merge(snapshot: Snapshot) -> Iterator[str]:
    """Yield what stages after the merge of a rank do again at its state, and what the merge does first."""
    own = snapshot.state[snapshot.merge]
    if count := sum(own["strict_to"]) - sum(snapshot.produced) if "strict_to" in own else len(own.get("replay", ())):
        items = f"{count:,} item{'s' * (count != 1)}"
        yield f"{snapshot.merge}: takes {items} again, in the order in which it took them before"
    before = [str(entry.get("name")) for entry in section(snapshot.fingerprint, 0, 1) if _has_function(entry)]
    yield from _lines(section(snapshot.fingerprint, 2), snapshot.stages, before)


def _lines(stages: Sequence[Entry], tree: Tree, before: Sequence[str] = ()) -> Iterator[str]:
    before = list(before)
    for entry in stages:
        name, options = str(entry.get("name")), entry.get("options")
        cls = stage_class(str(entry.get("kind")), options if isinstance(options, dict) else {})
        if name in tree and (again := _again(cls, tree[name])):
            yield f"{name}: {again}" + (f"; before it, {', '.join(before)} " + _work(before) if before else "")
        if _has_function(entry):
            before.append(name)


def _work(names: list[str]) -> str:
    return "computes them again" if len(names) == 1 else "compute them again"


def _again(cls: Any, own: Json) -> str | None:
    """Ask the stage; a state that is not of its shape, as of another version, says nothing."""
    try:
        found: str | None = cls.replay_cost(own)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    return found


def _has_function(entry: Entry) -> bool:
    options = entry.get("options")
    return isinstance(options, dict) and ("fn" in options or "collate" in options)


def section(entries: Sequence[Entry], *sections: int) -> list[Entry]:
    """Return the entries before the shard (0), of the workers (1), after the merge (2); without the source."""
    found, at = [], 0
    for number, entry in enumerate(entries):
        name = entry.get("name")
        if (at, name) in ((0, "shard"), (1, "merge")):
            at += 1
        elif number and at in sections:
            found.append(entry)
    return found
