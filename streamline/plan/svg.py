"""A column of boxes as SVG: titles, lines of text, groups, and what is between them. Knows nothing of pipelines.

Widths of text are estimated, since nothing here can measure it: what would not fit is cut, and stands whole in a
tooltip. Colours follow the reader's light or dark scheme; a background of its own keeps it readable on any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from unicodedata import east_asian_width

__all__ = ["SvgArrow", "SvgBox", "SvgGroup", "column"]


WIDTH = 560


MARGIN = 16


LINE = 22


TITLE = 20


PAD = 12


GAP = 30


CHAR = 8.6
"""Width of a character of 14 px in px, as a wide sans-serif (DejaVu Sans) has it on average."""


SMALL_CHAR = 7.2
"""The same of 12 px."""


STYLE = """
.sl-page{fill:#ffffff}.sl-box{fill:#f3f6fb;stroke:#5b7aa8}.sl-group{fill:#fafbfc;stroke:#9aa7b8;stroke-dasharray:5 4}
.sl-deck{fill:#fafbfc;stroke:#c3ccd8}.sl-pill{fill:#fff4d6;stroke:#b98a1d}.sl-line{stroke:#5f6b7a;fill:none}
.sl-head{fill:#5f6b7a}.sl-text{fill:#16202c}.sl-note{fill:#55606e}
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
.sl-text{font-size:14px}.sl-note{font-size:12px}
@media (prefers-color-scheme:dark){.sl-page{fill:#12161c}.sl-box{fill:#1d2838;stroke:#7d9ccb}
.sl-group{fill:#171c24;stroke:#66758a}.sl-deck{fill:#171c24;stroke:#3d4757}.sl-pill{fill:#3a3113;stroke:#d0a63c}
.sl-line{stroke:#a3afbd}.sl-head{fill:#a3afbd}.sl-text{fill:#e8edf3}.sl-note{fill:#a9b4c1}}
"""


@dataclass(frozen=True)
class SvgBox:
    """A box of its own colour.

    Attributes:
      title: small, on top; none if empty.
      lines: (text, note), the note small and at the right.
    """

    title: str
    lines: Sequence[tuple[str, str]]

    @property
    def height(self) -> float:
        """In px."""
        return 2 * PAD + LINE * len(self.lines) + (TITLE if self.title else 0) - 4


@dataclass(frozen=True)
class SvgArrow:
    """From what is before to what is behind: with a label in a pill, or bare."""

    label: str = ""

    @property
    def height(self) -> float:
        """In px."""
        return GAP + 34 if self.label else GAP


@dataclass(frozen=True)
class SvgGroup:
    """Boxes and arrows within a dashed frame; drawn as a deck of cards where there are several of it."""

    title: str
    parts: Sequence[SvgBox | SvgArrow] = field(default_factory=tuple)
    many: bool = False

    @property
    def height(self) -> float:
        """In px."""
        return sum(part.height for part in self.parts) + TITLE + 2 * PAD + (8 if self.many else 0)


def column(title: str, parts: Sequence[SvgBox | SvgArrow | SvgGroup]) -> str:
    """Return the parts from top to bottom as one SVG document.

    Args:
      title: for those who don't see it.
    """
    height = sum(part.height for part in parts) + 2 * MARGIN
    body: list[str] = []
    at: float = MARGIN
    for part in parts:
        body += _part(part, MARGIN, at, WIDTH - 2 * MARGIN)
        at += part.height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img"><title>{_safe(title)}</title><style>{STYLE}</style>\n'
        f'<rect class="sl-page" width="{WIDTH}" height="{height:g}" rx="10"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _part(part: SvgBox | SvgArrow | SvgGroup, x: float, y: float, width: float) -> list[str]:
    if isinstance(part, SvgBox):
        return _box(part, x, y, width)
    if isinstance(part, SvgArrow):
        return _arrow(part, x + width / 2, y, width)
    return _group(part, x, y, width)


def _box(box: SvgBox, x: float, y: float, width: float) -> list[str]:
    out = [_rect("box", x, y, width, box.height, 8)]
    at = y + PAD + 9
    if box.title:
        out.append(_text("note", x + PAD, at, box.title, width - 2 * PAD))
        at += TITLE
    for text, note in box.lines:
        room = width - 2 * PAD
        if note:
            out.append(_text("note", x + width - PAD, at + 2, note, room * 0.6, "end"))
            room -= min(_columns(note) * SMALL_CHAR, room * 0.6) + PAD
        out.append(_text("text", x + PAD, at + 2, text, room))
        at += LINE
    return out


def _arrow(arrow: SvgArrow, x: float, y: float, width: float) -> list[str]:
    if not arrow.label:
        return _shaft(x, y + 2, y + arrow.height - 2)
    wide = min(_columns(arrow.label) * SMALL_CHAR + 28, width)
    top = y + GAP / 2
    return [
        *_shaft(x, y + 2, top - 1),
        _rect("pill", x - wide / 2, top, wide, 26, 13),
        _text("note", x, top + 17, arrow.label, wide - 20, "middle", "sl-text"),
        *_shaft(x, top + 27, y + arrow.height - 2),
    ]


def _shaft(x: float, top: float, bottom: float) -> list[str]:
    head = f"M{x - 4:g} {bottom - 5:g}L{x:g} {bottom:g}L{x + 4:g} {bottom - 5:g}"
    return [f'<path class="sl-line" d="M{x:g} {top:g}V{bottom:g}{head}"/>']


def _group(group: SvgGroup, x: float, y: float, width: float) -> list[str]:
    out: list[str] = []
    height = group.height
    if group.many:
        width, height = width - 8, height - 8
        out += [_rect("deck", x + 8, y + 8, width, height, 10), _rect("deck", x + 4, y + 4, width, height, 10)]
    out.append(_rect("group", x, y, width, height, 10))
    out.append(_text("note", x + PAD, y + PAD + 8, group.title, width - 2 * PAD))
    at = y + PAD + TITLE
    for part in group.parts:
        out += _part(part, x + PAD, at, width - 2 * PAD)
        at += part.height
    return out


def _rect(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    return f'<rect class="sl-{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def _text(kind: str, x: float, y: float, words: str, room: float, anchor: str = "start", more: str = "") -> str:
    """Return one line of text, cut to what `room` px hold; whole, it is in the tooltip."""
    shown = _cut(words, max(4, int(room / (CHAR if kind == "text" else SMALL_CHAR))))
    tip = "" if shown == words else f"<title>{_safe(words)}</title>"
    style = ' font-size="12"' if more else ""
    return f'<text class="sl-{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{_safe(shown)}{tip}</text>'


def _columns(words: str) -> int:
    """Return how wide a text is, in characters; those of East Asian scripts count two."""
    return sum(2 if east_asian_width(char) in "WF" else 1 for char in words)


def _cut(words: str, most: int) -> str:
    if _columns(words) <= most:
        return words
    while _columns(words) > most - 1:
        words = words[:-1]
    return f"{words}…"


def _safe(words: str) -> str:
    """Return text as XML takes it: escaped, and without characters that XML has no place for."""
    return escape("".join(char if char.isprintable() else "·" for char in words), quote=False)
