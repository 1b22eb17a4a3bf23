"""A snapshot for a person, at three in the morning: whose it is, of which plan and data, and where each shard stands.

States are the stages' own business, so anything may stand in them: what is not understood is shown as JSON, cut short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamline.snapshot import Snapshot
from streamline.states import Json, Tree

__all__ = ["describe", "report"]

SHORT_CHARS = 60
FILE_KEYS = ("file", "path", "url")


def report(snapshot: Snapshot, width: int = 120) -> str:
    """Return `describe` as plain text, at most `width` characters wide."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(describe(snapshot))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def describe(snapshot: Snapshot) -> RenderableType:
    """Return what `streamline inspect` prints."""
    shards = f"{len(snapshot.shards)} of {snapshot.num_shards} shards"
    parts: list[RenderableType] = [
        Text(f"streamline snapshot, format {snapshot.version}", style="bold"),
        _Facts(
            ("where", f"epoch {snapshot.epoch}, rank {snapshot.rank} of {snapshot.world_size}, {shards}"),
            ("items", f"{sum(snapshot.produced):,} taken from the workers by {snapshot.merge}"),
            ("data", _listing(snapshot.listing)),
        ).table,
        Text(),
        _section("plan", _plan(snapshot)),
        Text(),
        _shards(snapshot),
    ]
    if snapshot.stages:
        parts.append(_section("after the merge", (_state(name, own) for name, own in snapshot.stages.items())))
    return Group(*parts)


class _Facts:
    """Names and what they are, in two columns."""

    def __init__(self, *facts: tuple[str, str]) -> None:
        self.table = Table.grid(padding=(0, 2))
        for name, value in facts:
            self.table.add_row(_text(f"  {name}"), _text(value))


def _section(title: str, lines: Iterable[str]) -> RenderableType:
    return Group(Text(title, style="bold"), *(_text(f"  {line}") for line in lines))


def _text(words: str) -> Text:
    """Return `words` as they are: no markup, and nothing that a terminal would obey."""
    return Text("".join(char if char.isprintable() else ascii(char)[1:-1] for char in words), overflow="fold")


def _plan(snapshot: Snapshot) -> Iterator[str]:
    for number, stage in enumerate(snapshot.fingerprint, 1):
        kind, name = str(stage.get("kind", "?")), str(stage.get("name", ""))
        title = kind if name.startswith(kind) or not name else f"{kind}({name})"
        options = stage.get("options") or ""
        yield f"{number:>2}. {title}  {_words(options) or _short(options)}".rstrip()


def _listing(listing: Json) -> str:
    """Say in one line what the data was."""
    if listing is None:
        return "not recorded"
    if isinstance(listing, dict):
        return f"{listing['length']:,} items" if _is_count(listing.get("length")) else _short(listing)
    if not listing:
        return "no files"
    names = [str(entry.get("path", _short(entry))) for entry in listing]
    ends = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    sizes = [entry.get("size") for entry in listing]
    size = f", {sum(sizes):,} bytes" if all(map(_is_count, sizes)) else ""
    return f"{len(names):,} {'file' if len(names) == 1 else 'files'}{size}: {ends}"


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shards(snapshot: Snapshot) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("shard", justify="right")
    table.add_column("items", justify="right")
    table.add_column("reads on from", overflow="fold")
    table.add_column("stages", overflow="fold")
    source = _source(snapshot)
    rows = zip(snapshot.shards, snapshot.produced, snapshot.worker_states, strict=True)
    for worker, (shard, produced, tree) in enumerate(rows):
        position, rest = _split(tree, source)
        mark = "next > " if worker == snapshot.next_worker else ""
        table.add_row(f"{mark}{shard}", f"{produced:,}", _text(position), _text(rest))
    if not snapshot.worker_states:
        return Text("no shard is this rank's\n")
    return table


def _source(snapshot: Snapshot) -> str | None:
    """Return the name of the plan's first stage: the source."""
    return str(snapshot.fingerprint[0].get("name")) if snapshot.fingerprint else None


def _split(tree: Tree, source: str | None) -> tuple[str, str]:
    """Return a worker's place in its source, and the states of its stages."""
    if source not in tree:
        source = next(iter(tree), None)  # a state is written from the source on
    position = "the beginning" if source is None else _position(tree[source])
    return position, "; ".join(_state(name, own) for name, own in tree.items() if name != source)


def _position(own: Json) -> str:
    """Return a source's state in words: "train.jsonl, line 18, byte 1,204"."""
    if own is None:
        return "the beginning"
    if _is_count(own):
        return f"item {own:,}"
    return _words(own) or _short(own)


def _state(name: str, own: Json) -> str:
    """Return a stage's state in words: "shuffle: window 3, served 120"."""
    return f"{name}: {f'{own:,}' if _is_count(own) else _words(own) or _short(own)}"


def _words(own: Json) -> str | None:
    """Return a flat object as words; None for anything else."""
    if not isinstance(own, dict) or not own or any(isinstance(value, dict | list) for value in own.values()):
        return None
    return ", ".join(
        str(value) if key in FILE_KEYS else f"{key} {f'{value:,}' if _is_count(value) else _short(value)}"
        for key, value in own.items()
    )


def _short(value: Json) -> str:
    """Return a value as JSON, cut short in the middle of what is too long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= SHORT_CHARS:
        return text
    return f"{text[: SHORT_CHARS * 2 // 3]}… ({len(text):,} characters)"
