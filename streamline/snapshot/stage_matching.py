"""Two fingerprints side by side: which stage of the one is which of the other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from streamline.core.text import Entry
from streamline.plan.fingerprint import sections
from streamline.transforms.base import Stage, stage_class

Two = tuple["Entry | None", "Entry | None"]


@dataclass(frozen=True)
class Pair:
    """An entry of the snapshot's fingerprint and the plan's that goes with it; one of them may be missing.

    Attributes:
      section: 0 before the shard, 1 the workers', 2 after the merge.
      source: whether it is the source.
    """

    its: Entry | None
    mine: Entry | None
    section: int
    source: bool = False

    @property
    def name(self) -> str:
        """The name, as it is now."""
        return str((self.mine or self.its or {}).get("name"))

    @property
    def is_stage(self) -> bool:
        """Whether it is a stage: neither the source nor the shard."""
        return not self.source and (self.mine or self.its or {}).get("kind") != "shard"

    @property
    def stage(self) -> type[Stage[Any, Any]]:
        """The class of the stage, as it is now."""
        return _class_of(self.mine or self.its or {})

    @property
    def its_stage(self) -> type[Stage[Any, Any]]:
        """The class of the stage, as it was."""
        return _class_of(self.its or self.mine or {})

    @property
    def changes(self) -> list[str]:
        """What has changed: "added", "removed", or "name" and options."""
        if self.its is None or self.mine is None:
            return ["added" if self.its is None else "removed"]
        if self.its.get("kind") != self.mine.get("kind"):
            return ["kind"]  # names and options of one say nothing about the other
        name = ["name"] * (self.its.get("name") != self.mine.get("name"))
        theirs, ours = self.its.get("options") or {}, self.mine.get("options") or {}
        missing = object()
        return name + [key for key in {**theirs, **ours} if theirs.get(key, missing) != ours.get(key, missing)]


def paired(theirs: Sequence[Entry], ours: Sequence[Entry]) -> Iterator[Pair]:
    """Yield the entries of both, in order; the sources first, which are always a pair."""
    yield Pair(theirs[0] if theirs else None, ours[0], 0, source=True)
    for section, (its, mine) in enumerate(zip(sections(theirs), sections(ours), strict=True)):
        yield from (Pair(*two, section) for two in _aligned(its, mine, _same, _kind))


def _aligned(theirs: list[Entry], ours: list[Entry], *keys: Callable[[Entry], Any]) -> Iterator[Two]:
    """Pair what has the same first key; what is between, by the next ones; the rest has no partner."""
    if not keys:
        yield from ((its, None) for its in theirs)
        yield from ((None, mine) for mine in ours)
        return
    key, *others = keys
    matcher = SequenceMatcher(None, list(map(key, theirs)), list(map(key, ours)), autojunk=False)
    for tag, first, stop, our_first, our_stop in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(theirs[first:stop], ours[our_first:our_stop], strict=True)
        else:
            yield from _aligned(theirs[first:stop], ours[our_first:our_stop], *others)


def _same(entry: Entry) -> Any:
    return (*_kind(entry), entry.get("name"))


def _kind(entry: Entry) -> Any:
    return entry.get("kind"), "window" in (entry.get("options") or {})


def _class_of(entry: Entry) -> type[Stage[Any, Any]]:
    return stage_class(str(entry.get("kind")), entry.get("options") or {})
