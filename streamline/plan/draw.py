"""A plan as a picture: Mermaid text for what renders it, SVG for everything else. Both draw the same pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamline.errors import PlanError
from streamline.plan.plan import Plan
from streamline.plan.svg import Arrow, Box, Group, Piece, column
from streamline.plan.topology import Part, PlannedChannel, sources, topology, written

LONGEST = 60
"""Characters of a label in Mermaid, which wraps nothing: longer ones are cut."""


@dataclass(frozen=True)
class Drawing:
    """A picture of a plan: what runs in which task, the channels between them, what each holds at the most.

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

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.mermaid}


def _pieces(plan: Plan) -> Iterator[Piece]:
    """Yield what both pictures show, from top to bottom."""
    parts, n = topology(plan), plan.shard.num_shards
    each = " each" if n > 1 else ""
    lines = [text.replace("  ", "· ") for text in sources(plan)] + [text for _, text in written(plan.before)]
    if plan.sharded:
        lines += [f"shard into {n:,}"]
    notes = [""] * (len(lines) - 1) + [_how_split(plan) if plan.sharded else ""]
    yield Box("source", list(zip(lines, notes, strict=True)))
    queues = [part for part in parts.feed if isinstance(part, PlannedChannel)]
    more = ", more while another starves" if n > 1 and (plan.source.most_ahead or 0) > plan.feed_capacity else ""
    yield Arrow(f"up to {queues[0]}{each}{more}" if queues else "")
    title = "one worker" if n == 1 else f"a worker for each shard: {n:,} of these"
    yield Group(title, list(_shown(parts.worker)), n > 1)
    yield Arrow(f"up to {parts.worker_end}{each}")
    yield from _shown(parts.after)
    if not parts.after:
        yield Box("in the consumer's task; in a plain loop, beside it", [(str(plan.merge), "")])
        yield Arrow()
    yield Box("", [("your loop", "" if parts.border is None else f"up to {parts.border} more in a plain loop")])


def _how_split(plan: Plan) -> str:
    """Say how a worker's part is chosen, where the mode's name doesn't say it."""
    names = {
        "replicated": f"each worker reads all, keeps one in {plan.shard.num_shards:,}",
        "shared": "one reader for all, in turn",
        "custom": "it splits itself",
    }
    return names.get(plan.mode, f"mode {plan.mode}")


def _shown(parts: Sequence[Part]) -> Iterator[Box | Arrow]:
    for part in parts:
        if isinstance(part, PlannedChannel):
            yield Arrow(f"up to {part}")
        else:
            title = f"task, {part.at_once} at once" if part.at_once else "task"
            yield Box(title, [(text, f"holds up to {held:,}" if held else "") for text, held in part.stages])


def _mermaid(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield the lines of a flowchart, its nodes without their numbers."""
    for piece in pieces:
        if isinstance(piece, Group):
            yield f'subgraph workers["{_escaped(piece.title)}"]'
            yield from _mermaid(piece.parts)
            yield "end"
        elif isinstance(piece, Box):
            title = [f"<i>{_escaped(piece.title)}</i>"] if piece.title else []
            labels = [f"{_escaped(text)}{f' · <i>{_escaped(note)}</i>' * bool(note)}" for text, note in piece.lines]
            yield f'["{"<br/>".join(title + labels)}"]'
        elif piece.label:
            yield f'(["{_escaped(piece.label)}"])'


def _escaped(words: str) -> str:
    """Return a label in which nothing is syntax: neither Mermaid's, HTML's nor Markdown's."""
    words = words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"
    return "".join(char if char.isalnum() or char in " (),.=…:/-" else f"#{ord(char)};" for char in words)
