"""`.merge` as written in a plan; `streamline.merge.base` has the flows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from streamline.core.channel import Inbox
from streamline.core.options import check_int
from streamline.core.state import Json
from streamline.errors import PlanError
from streamline.merge.base import BestEffortMerge, MergeFlow, StrictMerge

__all__ = ["BestEffort", "Merge", "Strict", "merge_of"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Strict:
    """A strict merge, as written in a plan."""

    name: str
    chooses: ClassVar[bool] = False

    def open(self, inboxes: Sequence[Inbox[T]], own: Json | None) -> MergeFlow[T]:
        """Return the merge of the workers' inboxes, at its own part of a state or at the beginning."""
        return StrictMerge(self.name, inboxes, own)


@dataclass(frozen=True, kw_only=True)
class BestEffort:
    """A best-effort merge, as written in a plan; see `BestEffortMerge` for the options."""

    name: str
    max_skips_per_round: int
    max_lead: int
    chooses: ClassVar[bool] = True

    def open(self, inboxes: Sequence[Inbox[T]], own: Json | None) -> MergeFlow[T]:
        """Return the merge of the workers' inboxes, at its own part of a state or at the beginning."""
        return BestEffortMerge(
            self.name, inboxes, own, max_skips_per_round=self.max_skips_per_round, max_lead=self.max_lead
        )


Merge = Strict | BestEffort


def merge_of(kind: str, max_skips_per_round: int | None, max_lead: int | None) -> Merge:
    """Return the merge that `.merge` with these options means.

    Raises:
      PlanError: an unknown kind, an option that the kind doesn't have, or one out of range.
    """
    if kind == "strict":
        if max_skips_per_round is not None or max_lead is not None:
            raise PlanError("max_skips_per_round and max_lead are options of .merge('best_effort')")
        return Strict(name="merge")
    if kind != "best_effort":
        raise PlanError(f".merge is 'strict' or 'best_effort', got {kind!r}")
    skips = 2 if max_skips_per_round is None else max_skips_per_round
    lead = 8 if max_lead is None else max_lead
    skips = check_int(".merge(max_skips_per_round=)", skips, 0)
    lead = check_int(".merge(max_lead=)", lead, 1)
    return BestEffort(name="merge", max_skips_per_round=skips, max_lead=lead)
