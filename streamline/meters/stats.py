"""The frozen picture of a stream that users get."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from streamline.core.meters import Meters
from streamline.meters.figures import Figures, between
from streamline.meters.picture import collect
from streamline.meters.tables import table
from streamline.meters.verdict import Verdict, judge

__all__ = ["Stats", "stats_of"]


@dataclass(frozen=True, kw_only=True)
class Stats(Figures):
    """A stream at one moment, since it was opened; `str` is a table with the verdict.

    Attributes:
      first: as it stood when the consumer got its first list; None: before. The verdict leaves this warm-up out.
    """

    first: Figures | None = field(default=None, repr=False, compare=False)

    @property
    def verdict(self) -> Verdict | None:
        """What limits the stream, since its first list; None: nothing does, or it is too early to say."""
        return None if self.first is None else judge(between(self.first, self))

    def since(self, earlier: Stats) -> Stats:
        """Return what was added since `earlier`, a picture of the same stream: a window.

        Depths and peaks of channels are those of now.
        """
        begin = Figures(elapsed_s=0, items=0, consumer_wait_s=0) if earlier.first is not None else None
        if begin is None and self.first is not None:
            begin = between(earlier, self.first)
        return Stats(**vars(between(earlier, self)), first=begin)

    def __str__(self) -> str:
        verdict = self.verdict
        return table(self) + (f"\n{verdict}" if verdict is not None else "")

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"


def stats_of(meters: Meters, at_hand: int = 0) -> Stats:
    """Return what was counted so far.

    Args:
      meters: with `collect` as their `on_first_list`.
      at_hand: items of the consumer's list that it has not seen yet.
    """
    figures = collect(meters)
    return Stats(**{**vars(figures), "items": figures.items - at_hand}, first=meters.first)
