"""A plan as a picture: Mermaid text for what renders it, SVG for everything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamline.errors import PlanError
from streamline.plan import svg
from streamline.plan.plan import Plan
from streamline.plan.topology import Part, PlannedChannel, Task, Topology, sources, topology, written
from streamline.sources.live import Live

__all__ = ["Drawing", "draw"]


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
        return _mermaid(self.plan, topology(self.plan))

    @property
    def svg(self) -> str:
        """The same as an SVG document; follows the reader's light or dark scheme."""
        return svg.column(f"streamline: {self.plan.source.kind}", _column(self.plan, topology(self.plan)))

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


def draw(plan: Plan) -> Drawing:
    """Return a picture of a plan. Nothing is looked up, nothing runs."""
    return Drawing(plan)


# What both say ------------------------------------------------------------------------------------------------------
def _source(plan: Plan) -> list[tuple[str, str]]:
    """Return the source, what stands before the shard, and how it is split."""
    n = plan.shard.num_shards
    lines = [
        *((text.replace("  ", "· "), "") for text in sources(plan)),
        *((text, "") for _, text in written(plan.before)),
    ]
    if plan.sharded:
        lines.append((f"shard into {n:,}", HOW.get(plan.mode, "mode {mode}").format(n=n, mode=plan.mode)))
    return lines


HOW = {
    "replicated": "each worker reads all, keeps one in {n:,}",
    "shared": "one reader for all, in turn",
    "custom": "it splits itself",
}
"""What a split means where its mode's name doesn't say it."""


def _feed(plan: Plan, parts: Topology) -> str:
    """Say what is between the reader of a live source and a worker; nothing of any other source."""
    tubes = [tube for tube in parts.feed if isinstance(tube, PlannedChannel)]
    if not tubes or not isinstance(plan.source, Live):
        return ""
    more = ", more while another starves" if plan.source.max_ahead > tubes[0].items else ""
    return _tube(tubes[0]) + (f" each{more}" if parts.workers > 1 else "")


def _worker_title(parts: Topology) -> str:
    return "one worker" if parts.workers == 1 else f"a worker for each shard: {parts.workers:,} of these"


def _task_title(task: Task) -> str:
    return f"task, {task.at_once} at once" if task.at_once else "task"


def _holds(held: int) -> str:
    return f"holds up to {held:,}" if held else ""


def _tube(tube: PlannedChannel) -> str:
    return f"up to {tube}"


def _border(parts: Topology) -> str:
    return "" if parts.border is None else f"up to {parts.border} more in a plain loop"


# SVG ----------------------------------------------------------------------------------------------------------------
def _column(plan: Plan, parts: Topology) -> list[svg.SvgBox | svg.SvgArrow | svg.SvgGroup]:
    pieces: list[svg.SvgBox | svg.SvgArrow | svg.SvgGroup] = [
        svg.SvgBox("source", _source(plan)),
        svg.SvgArrow(_feed(plan, parts)),
    ]
    last = parts.worker[-1]
    pieces.append(svg.SvgGroup(_worker_title(parts), _pieces(parts.worker[:-1]), parts.workers > 1))
    each = " each" if parts.workers > 1 else ""
    pieces.append(svg.SvgArrow(f"{_tube(last)}{each}" if isinstance(last, PlannedChannel) else ""))
    if parts.after:
        pieces += _pieces(parts.after)
    else:
        pieces += [
            svg.SvgBox("in the consumer's task; in a plain loop, beside it", [(parts.merge, "")]),
            svg.SvgArrow(),
        ]
    pieces.append(svg.SvgBox("", [("your loop", _border(parts))]))
    return pieces


def _pieces(parts: tuple[Part, ...]) -> list[svg.SvgBox | svg.SvgArrow]:
    pieces: list[svg.SvgBox | svg.SvgArrow] = []
    for part in parts:
        if isinstance(part, PlannedChannel):
            pieces.append(svg.SvgArrow(_tube(part)))
        else:
            pieces.append(svg.SvgBox(_task_title(part), [(text, _holds(held)) for text, held in part.stages]))
    return pieces


# Mermaid ------------------------------------------------------------------------------------------------------------
def _mermaid(plan: Plan, parts: Topology) -> str:
    chart = _Chart()
    chart.box(["<b>source</b>", *(_label(text, note) for text, note in _source(plan))])
    if feed := _feed(plan, parts):
        chart.pill(feed)
    last = parts.worker[-1]
    chart.lines.append(f'  subgraph workers["{_escaped(_worker_title(parts))}"]')
    chart.parts(parts.worker[:-1])
    chart.lines.append("  end")
    each = " each" if parts.workers > 1 else ""
    if isinstance(last, PlannedChannel):
        chart.pill(f"{_tube(last)}{each}")
    if parts.after:
        chart.parts(parts.after)
    else:
        chart.box([_escaped(parts.merge)])
    border = _border(parts)
    chart.box(["your loop", *([f"<i>{_escaped(border)}</i>"] if border else [])])
    return "flowchart TB\n" + "\n".join([*chart.lines, *chart.links]) + "\n"


class _Chart:
    """Nodes numbered as they come, each linked to the one before."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.links: list[str] = []
        self._count = 0

    def parts(self, parts: tuple[Part, ...]) -> None:
        for part in parts:
            if isinstance(part, PlannedChannel):
                self.pill(_tube(part))
            else:
                stages = [_label(text, _holds(held)) for text, held in part.stages]
                self.box([f"<i>{_escaped(_task_title(part))}</i>", *stages])

    def box(self, labels: list[str]) -> None:
        self._node(f'["{"<br/>".join(labels)}"]')

    def pill(self, label: str) -> None:
        self._node(f'(["{_escaped(label)}"])')

    def _node(self, shape: str) -> None:
        self.lines.append(f"  n{self._count}{shape}")
        if self._count:
            self.links.append(f"  n{self._count - 1} --> n{self._count}")
        self._count += 1


def _label(text: str, note: str) -> str:
    return _escaped(text) + (f" · <i>{_escaped(note)}</i>" if note else "")


def _escaped(words: str) -> str:
    """Return a label in which nothing is syntax: neither Mermaid's, HTML's nor Markdown's."""
    words = words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"
    return "".join(char if char.isalnum() or char in " (),.=…:/-" else f"#{ord(char)};" for char in words)
