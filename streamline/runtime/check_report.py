"""What a check has found, for a program and for a person."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from streamline.core.text import counted, in_bytes
from streamline.errors import CheckError, printable_lines

DEADLINE_S = 10.0
"""Seconds for reading, and as many for the stages: a server may have to wake up, and a person waits."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a run would fail on, or what is surely not meant.

    Attributes:
      what: "plan", "listing", "shards", "reading", "schema", "stages", "pickling" or "cache".
      message: what was expected, what arrived, what to do.
    """

    what: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one shard, or one rank, has to read; of one that is split unread, as far as can be said.

    Attributes:
      items: objects, or of a source without files, items; None: unknown yet.
      bytes: of its objects; None: of some, unknown.
    """

    items: int | None
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check has found. `print` it.

    Attributes:
      source: what is read, as the printed plan says it.
      files: whether it reads files; else `objects` are items.
      objects: that would be read in all; None: unknown yet.
      bytes: of those whose size is known.
      unsized: objects whose size isn't known.
      mode: how the source is split.
      shards: by shard, what it has to read.
      ranks: by rank, likewise.
      world_found_in: where the number of ranks was found: "given", "alone", …
      records: by object, or by item's place, its first record; of those few that were looked at.
      outputs: how many items the stages made of these; None: they were not run.
      problems: what a run would fail on.
      notes: what is worth knowing, and may well be meant.
      took_s: seconds that the check took.
    """

    source: str
    files: bool
    objects: int | None = None
    bytes: int = 0
    unsized: int = 0
    mode: str = ""
    shards: tuple[Load, ...] = ()
    ranks: tuple[Load, ...] = ()
    world_found_in: str = ""
    records: tuple[tuple[str, object], ...] = ()
    outputs: int | None = None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found that a run would fail on."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise what was found, if anything was.

        Raises:
          CheckError: its message names all problems.
        """
        if self.problems:
            raise CheckError("\n".join(f"{problem.what}: {problem.message}" for problem in self.problems))

    def __str__(self) -> str:
        lines = [f"{self.source}", *(f"  {name:<9} {text}" for name, text in self._facts())]
        lines += [f"  {'note':<9} {_indented(note)}" for note in self.notes]
        lines += [f"  PROBLEM   {problem.what}: {_indented(problem.message)}" for problem in self.problems]
        found = "no problems" if self.ok else counted(len(self.problems), "problem")
        return printable_lines("\n".join([*lines, f"{found} found in {self.took_s:.1f} s"]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _facts(self) -> list[tuple[str, str]]:
        what = "object" if self.files else "item"
        facts = [("reads", self._amount())] if self.objects is not None else []
        kind = "object" if self.files and self.mode == "file" else "item"
        if self.shards:
            facts.append(("shards", f"{len(self.shards):,} ({self.mode}), each {_spread(self.shards, kind)}"))
        if len(self.ranks) > 1:
            facts.append(("ranks", f"{len(self.ranks):,} ({self.world_found_in}), each {_spread(self.ranks, kind)}"))
        if self.records:
            seen = len(self.records)
            of = counted(seen, what) if self.objects is None else f"{seen:,} of {counted(self.objects, what)}"
            made = "" if self.outputs is None else f"; the stages made {counted(self.outputs, 'item')} of them"
            facts.append(("looked at", f"{'the first record of ' * self.files}{of}{made}"))
        return facts

    def _amount(self) -> str:
        if not self.files:
            return counted(self.objects or 0, "item")
        unknown = f", {self.unsized:,} of unknown size" if self.unsized else ""
        return f"{counted(self.objects or 0, 'object')}, {in_bytes(self.bytes)}{unknown}"


def known(values: Iterable[int | None]) -> list[int]:
    """Return the values if all are known, else none of them."""
    found = list(values)
    return [] if None in found else [value for value in found if value is not None]


def _spread(loads: tuple[Load, ...], kind: str) -> str:
    """Say what the loads are, from the least to the most."""
    said = []
    if items := known(load.items for load in loads):
        least, most = f"{min(items):,}", counted(max(items), kind)
        said.append(most if min(items) == max(items) else _range(least, most))
    if sizes := known(load.bytes for load in loads):
        said.append(_range(in_bytes(min(sizes)), in_bytes(max(sizes))))
    return ", ".join(said) or "of unknown size"


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")
