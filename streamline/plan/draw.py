"""A plan as a picture: Mermaid text, or SVG. Both draw the same pieces.

In SVG, widths of text are estimated: what would not fit is cut, and is whole in a tooltip. Colours follow the reader's
light or dark scheme; a background of its own keeps it readable on any page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from streamline.core.text import shorten
from streamline.errors import PlanError, printable
from streamline.plan.plan import Plan
from streamline.plan.topology import Part, PlannedChannel, sources, stage_lines, topology

MOST_LABEL_CHARS = 60
"""Characters of a label in Mermaid, which wraps nothing: longer ones are cut."""

WIDTH, MARGIN, LINE, TITLE, PAD, GAP = 560, 16, 22, 20, 12, 30
"""In px, as all sizes."""

CHARS = {"text": 8.6, "note": 7.2}
"""Width of a character of 14 and of 12 px, as a wide sans-serif (DejaVu Sans) has it on average."""

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
class Box:
    """A small title, if any, and lines of (text, note), the note small and at the right."""

    title: str
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Arrow:
    """From the piece above to the one below, with a label in a pill, or bare."""

    label: str = ""


@dataclass(frozen=True)
class Group:
    """Boxes and arrows within a dashed frame; `many`: drawn as a deck of cards."""

    title: str
    parts: Sequence[Box | Arrow]
    many: bool = False


Piece = Box | Arrow | Group


@dataclass(frozen=True, repr=False)
class Drawing:
    """A picture of a plan: what runs in which task, the channels between them, what each holds at most.

    As text it is Mermaid; a notebook shows it as SVG.
    """

    plan: Plan

    @property
    def mermaid(self) -> str:
        """A Mermaid flowchart: boxes are tasks, rounded ones are channels."""
        nodes, links = list(_mermaid(list(_pieces(self.plan)))), list[str]()
        lines: list[str] = []
        for node in nodes:
            if node.startswith(("[", "(")):
                at = len(links)
                links.append(f"  n{at - 1} --> n{at}")
                node = f"n{at}{node}"
            lines.append(f"  {node}")
        return "\n".join(["flowchart TB", *lines, *links[1:]]) + "\n"

    @property
    def svg(self) -> str:
        """The same as an SVG document; follows the reader's light or dark scheme."""
        return column(f"streamline: {self.plan.source.kind}", list(_pieces(self.plan)))

    def save(self, path: str | Path) -> None:
        """Write it to a file: `.svg`, or `.mmd`, `.mermaid`, or `.md` with the Mermaid text in a block.

        Raises:
          PlanError: another suffix.
          OSError: the file can't be written.
        """
        suffix = Path(path).suffix.lower()
        if suffix == ".svg":
            text = self.svg
        elif suffix in (".mmd", ".mermaid"):
            text = self.mermaid
        elif suffix == ".md":
            text = f"```mermaid\n{self.mermaid}```\n"
        else:
            raise PlanError(f"a drawing is saved as .svg, .mmd, .mermaid or .md, and {str(path)!r} ends in {suffix!r}")
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return self.mermaid

    def __repr__(self) -> str:
        return f"<Drawing of a plan that reads {self.plan.source.name}: print it as Mermaid, or .save('plan.svg')>"

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.mermaid}


def _pieces(plan: Plan) -> Iterator[Piece]:
    parts, n = topology(plan), plan.shard.num_shards
    each = " each" if n > 1 else ""
    lines = [text.replace("  ", "· ") for text in sources(plan)] + [text for _, text in stage_lines(plan.before)]
    if plan.sharded:
        lines += [f"shard into {n:,}"]
    notes = [""] * (len(lines) - 1) + [_how_split(plan) if plan.sharded else ""]
    yield Box("source", list(zip(lines, notes, strict=True)))
    queues = [part for part in parts.feed if isinstance(part, PlannedChannel)]
    more = ", more while another starves" if n > 1 and (plan.source.most_ahead or 0) > plan.feed_capacity else ""
    yield Arrow(f"up to {queues[0]}{each}{more}" if queues else "")
    title = "one worker" if n == 1 else f"a worker for each shard: {n:,} of these"
    yield Group(title, list(_section_pieces(parts.worker)), n > 1)
    yield Arrow(f"up to {parts.worker_end}{each}")
    yield from _section_pieces(parts.after)
    if not parts.after:
        yield Box("in the consumer's task; in a plain loop, beside it", [(str(plan.merge), "")])
        yield Arrow()
    yield Box("", [("your loop", "" if parts.bridge is None else f"up to {parts.bridge} more in a plain loop")])


def _how_split(plan: Plan) -> str:
    """Return how a worker's part is chosen, if the mode's name doesn't say it."""
    names = {
        "replicated": f"each worker reads all, keeps one in {plan.shard.num_shards:,}",
        "shared": "one reader for all, in turn",
        "custom": "it splits itself",
    }
    return names.get(plan.mode, f"mode {plan.mode}")


def _section_pieces(parts: Sequence[Part]) -> Iterator[Box | Arrow]:
    for part in parts:
        if isinstance(part, PlannedChannel):
            yield Arrow(f"up to {part}")
        else:
            title = f"task, {part.at_once} at once" if part.at_once else "task"
            yield Box(title, [(text, f"holds up to {held:,}" if held else "") for text, held in part.stages])


def _mermaid(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield the lines of a flowchart, its nodes without numbers."""
    for piece in pieces:
        if isinstance(piece, Group):
            yield f'subgraph workers["{_escaped(piece.title)}"]'
            yield from _mermaid(piece.parts)
            yield "end"
        elif isinstance(piece, Box):
            title = [f"<i>{_escaped(piece.title)}</i>"] if piece.title else []
            labels = [_escaped(text) + (f" · <i>{_escaped(note)}</i>" if note else "") for text, note in piece.lines]
            yield f'["{"<br/>".join(title + labels)}"]'
        elif piece.label:
            yield f'(["{_escaped(piece.label)}"])'


def _escaped(words: str) -> str:
    """Return a label without the syntax of Mermaid, HTML and Markdown."""
    words = shorten(printable(words), MOST_LABEL_CHARS)
    return "".join(char if char.isalnum() or char in " (),.=…:/-" else f"#{ord(char)};" for char in words)


# SVG ------------------------------------------------------------------------------------------------------------------
def column(title: str, pieces: Sequence[Piece]) -> str:
    """Return the pieces from top to bottom as one SVG document; `title` is for screen readers."""
    body, end = _stack(pieces, MARGIN, MARGIN, WIDTH - 2 * MARGIN)
    height = end + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img"><title>{_safe(title)}</title><style>{STYLE}</style>\n'
        f'<rect class="sl-page" width="{WIDTH}" height="{height:g}" rx="10"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _stack(pieces: Sequence[Piece], x: float, y: float, width: float) -> tuple[list[str], float]:
    """Return the elements of pieces, one below the other, and their lower end."""
    out: list[str] = []
    for piece in pieces:
        draw = _box if isinstance(piece, Box) else _arrow if isinstance(piece, Arrow) else _group
        elements, y = draw(piece, x, y, width)  # type: ignore[arg-type]
        out += elements
    return out, y


def _box(box: Box, x: float, y: float, width: float) -> tuple[list[str], float]:
    at, room = y + PAD + 11, width - 2 * PAD
    out: list[str] = []
    if box.title:
        out.append(_text("note", x + PAD, at - 2, box.title, room))
        at += TITLE
    for text, note in box.lines:
        free = room
        if note:
            out.append(_text("note", x + width - PAD, at, note, room * 0.6, "end"))
            free -= min(_columns(note) * CHARS["note"], room * 0.6) + PAD
        out.append(_text("text", x + PAD, at, text, free))
        at += LINE
    end = at + PAD - 15
    return [_rect("box", x, y, width, end - y, 8), *out], end


def _arrow(arrow: Arrow, x: float, y: float, width: float) -> tuple[list[str], float]:
    x += width / 2
    if not arrow.label:
        return [_shaft(x, y + 2, y + GAP - 2)], y + GAP
    wide, top, end = min(_columns(arrow.label) * CHARS["note"] + 28, width), y + GAP / 2, y + GAP + 34
    pill = _rect("pill", x - wide / 2, top, wide, 26, 13)
    label = _text("note", x, top + 17, arrow.label, wide - 20, "middle", ' font-size="12"')
    return [_shaft(x, y + 2, top - 1), pill, label, _shaft(x, top + 27, end - 2)], end


def _shaft(x: float, top: float, bottom: float) -> str:
    head = f"M{x - 4:g} {bottom - 5:g}L{x:g} {bottom:g}L{x + 4:g} {bottom - 5:g}"
    return f'<path class="sl-line" d="M{x:g} {top:g}V{bottom:g}{head}"/>'


def _group(group: Group, x: float, y: float, width: float) -> tuple[list[str], float]:
    deck = 8 if group.many else 0
    width -= deck
    inner, end = _stack(group.parts, x + PAD, y + PAD + TITLE, width - 2 * PAD)
    end += PAD
    cards = [_rect("deck", x + by, y + by, width, end - y, 10) for by in ((8, 4) if group.many else ())]
    title = _text("note", x + PAD, y + PAD + 8, group.title, width - 2 * PAD)
    return [*cards, _rect("group", x, y, width, end - y, 10), title, *inner], end + deck


def _rect(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    return f'<rect class="sl-{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def _text(kind: str, x: float, y: float, words: str, room: float, anchor: str = "start", style: str = "") -> str:
    """Return one line of text, cut to `room` px; a tooltip has all of it."""
    words = printable(words)
    shown = _cut(words, max(4, int(room / CHARS[kind])))
    tip = "" if shown == words else f"<title>{_safe(words)}</title>"
    return f'<text class="sl-{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{_safe(shown)}{tip}</text>'


def _columns(words: str) -> int:
    """Return the width of a text in characters; those of East Asian scripts count two."""
    return sum(2 if east_asian_width(char) in "WF" else 1 for char in words)


def _cut(words: str, most: int) -> str:
    if _columns(words) <= most:
        return words
    while _columns(words) > most - 1:
        words = words[:-1]
    return f"{words}…"


def _safe(words: str) -> str:
    return escape(printable(words), quote=False)
