"""A snapshot as text: whose it is, of which plan and data, and the position of each shard.

A stage may keep anything in its state: unknown values are shown as JSON, cut short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from streamline.core.error_policy import counts_in
from streamline.core.state import Json, Tree, with_skips
from streamline.core.state_types import check_type
from streamline.core.text import quantity, some
from streamline.errors import printable
from streamline.snapshot.explain import merge_replays, worker_replays
from streamline.snapshot.snapshot import Snapshot
from streamline.snapshot.steps import RecordedStep, StepRecords
from streamline.sources.journal import SavedJournal

SHORT_CHARS = 60
FILE_KEYS = ("file", "path", "url")

MOST_FILES = 8
"""Files that are listed one by one."""


def report(snapshot: Snapshot, width: int = 120) -> str:
    """Return `describe` as plain text, at most `width` characters wide."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(describe(snapshot))
    return "\n".join(printable(line).rstrip() for line in capture.get().split("\n")[:-1]) + "\n"


def describe(snapshot: Snapshot) -> RenderableType:
    """Return what `streamline inspect` prints, of a rank's snapshot or of a whole job's."""
    job = snapshot.rank is None
    shards = f"{snapshot.num_shards} shards" if job else f"{len(snapshot.shards)} of {snapshot.num_shards} shards"
    whose = f"all {snapshot.world_size} ranks" if job else f"rank {snapshot.rank} of {snapshot.world_size}"
    parts: list[RenderableType] = [
        Text(f"streamline snapshot, format {snapshot.version}", style="bold"),
        _facts(
            ("where", f"epoch {snapshot.epoch}, {whose}, {shards}"),
            ("items", f"{sum(snapshot.produced):,} taken from the workers by {snapshot.merge}"),
            ("data", _listing(snapshot.listing)),
            *_files(snapshot.listing),
            *_journal(snapshot.journal),
        ),
        Text(),
        _section("plan", _plan(snapshot)),
        _shards(snapshot),
    ]
    for part in snapshot.parts or (snapshot,):
        if states := [_state(name, own) for name, own in part.stages.items() if _is_set(own)]:
            title = f"after the merge{f', rank {part.rank}' * job}"
            parts += [_section(title, states), Text()]
    return Group(*parts, _section("a resume", _resume(snapshot)))


def _resume(snapshot: Snapshot) -> Iterator[str]:
    """Say what a resume reads and computes again; shards that do the same are in one line."""
    doing: dict[str, list[int]] = {}
    for shard, tree in zip(snapshot.shards, snapshot.worker_states, strict=True):
        for line in worker_replays(snapshot, tree):
            doing.setdefault(line, []).append(shard)
    for line, shards in doing.items():
        yield f"{'shard' if len(shards) == 1 else 'shards'} {', '.join(map(str, shards))}: {line}"
    after = [(part.rank, line) for part in snapshot.parts or (snapshot,) for line in merge_replays(part)]
    yield from (f"after the merge, rank {rank}: {line}" for rank, line in after)
    if not doing and not after:
        yield "computes nothing again that was delivered"


def _facts(*facts: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(_text(f"  {name}"), _text(value))
    return table


def _section(title: str, lines: Iterable[str]) -> RenderableType:
    return Group(Text(title, style="bold"), *(Padding(_text(line), (0, 0, 0, 2)) for line in lines))


def _text(words: str) -> Text:
    """Return text without markup or control characters."""
    return Text(printable(words), overflow="fold")


def _plan(snapshot: Snapshot) -> Iterator[str]:
    for number, stage in enumerate(snapshot.fingerprint, 1):
        kind, name = str(stage.get("kind", "?")), str(stage.get("name", ""))
        title = kind if name.startswith(kind) or not name else f"{kind}({name})"
        options, hashes = stage.get("options") or "", stage.get("code")
        words = [_words(options) or _short(options)]
        if isinstance(hashes, dict):  # each begins with the Python that it is of
            words += [f"code of {key} {_short(value).rpartition(':')[2][:8]}" for key, value in hashes.items()]
        yield f"{number:>2}. {title}  {'; '.join(filter(None, words))}".rstrip()


def _files(listing: Json) -> Iterator[tuple[str, str]]:
    """Yield the first of several files, with their sizes."""
    if not isinstance(listing, list) or len(listing) <= 2:
        return
    for entry in listing[:MOST_FILES]:
        rest = {key: value for key, value in entry.items() if key != "path" and value is not None}
        size = rest.pop("size", None)
        shown = ""
        if size is not None:
            shown = quantity(size, "byte") if _is_count(size) else _short(size)
        yield "", f"{entry.get('path', '?')}  {shown}  {_words(rest) or ''}".rstrip()
    if len(listing) > MOST_FILES:
        yield "", f"… and {len(listing) - MOST_FILES:,} more"


def _listing(listing: Json) -> str:
    """Return a line about the data."""
    if listing is None or (isinstance(listing, dict) and all(value is None for value in listing.values())):
        return "not recorded"
    if isinstance(listing, dict):
        return quantity(listing["length"], "item") if _is_count(listing.get("length")) else _short(listing)
    if not listing:
        return "no files"
    names = [str(entry.get("path", _short(entry))) for entry in listing]
    ends = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    sizes = [entry.get("size") for entry in listing]
    size = f", {quantity(sum(sizes), 'byte')}" if all(map(_is_count, sizes)) else ""
    return f"{len(names):,} {'file' if len(names) == 1 else 'files'}{size}: {ends}"


def _journal(journal: Json) -> Iterator[tuple[str, str]]:
    """Yield a line about a live source's journal."""
    if journal is None:
        return
    check_type(journal, SavedJournal, "its journal")
    read = f"{journal['read']:,} read in all, shard {journal['next']} is next"
    if journal["stored"]:
        yield "journal", f"on disk, of id {journal['id']}; {read}"
        return
    items = [item for worker in journal["workers"] for item in worker["items"]]
    size = sum(
        len(item[-1] if isinstance(item, list) and item and isinstance(item[-1], str) else json.dumps(item))
        for item in items
    )
    yield "journal", f"{quantity(len(items), 'item')}, {quantity(size, 'byte')} here, not yet past every stage; {read}"


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shards(snapshot: Snapshot) -> RenderableType:
    if not snapshot.worker_states:
        return Text("\nno shard is this rank's\n")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("shard", justify="right")
    table.add_column("items", justify="right")
    table.add_column("reads on from", overflow="fold")
    table.add_column("stages", overflow="fold")
    parts = snapshot.parts or (snapshot,)
    next_ones = {part.shards[part.next_worker] for part in parts if part.worker_states}
    source = str(snapshot.fingerprint[0].get("name")) if snapshot.fingerprint else None
    for shard, produced, tree in zip(snapshot.shards, snapshot.produced, snapshot.worker_states, strict=True):
        shown = with_skips(tree, {})
        first = source if source in shown else next(iter(shown), None)  # a state is written from the source on
        position = "the beginning" if first is None else _position(shown.pop(first))
        shown["errors"] = counts_in(tree)
        rest = "; ".join(_state(name, own) for name, own in shown.items() if _is_set(own))
        mark = "next > " if shard in next_ones else ""
        table.add_row(f"{mark}{shard}", f"{produced:,}", _text(position), _text(rest))
    return table


def _position(own: Json) -> str:
    """Return a source's state as text: "train.jsonl, line 18, byte 1,204"."""
    if own is None:
        return "the beginning"
    if _is_count(own):
        return f"item {own:,}"
    return _words(own) or _short(own)


def _state(name: str, own: Json) -> str:
    """Return a stage's state as text: "shuffle: window 3, served 120"."""
    return f"{name}: {f'{own:,}' if _is_count(own) else _words(own) or _short(own)}"


def _is_set(own: Json) -> bool:
    """Whether a stage's state holds anything: an empty list of choices doesn't count."""
    return not isinstance(own, dict) or any(value not in ([], {}) for value in own.values())


def _words(own: Json) -> str | None:
    """Return a flat object as text, without empty values; None for anything else."""
    if not isinstance(own, dict):
        return None
    own = {key: value for key, value in own.items() if value not in ([], {})}
    if not own or any(isinstance(value, dict | list) for value in own.values()):
        return None
    return ", ".join(
        str(value) if key in FILE_KEYS else f"{key} {f'{value:,}' if _is_count(value) else _short(value)}"
        for key, value in own.items()
    )


def _short(value: Json) -> str:
    """Return a value as JSON, cut short."""
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if len(text) <= SHORT_CHARS:
        return text
    return f"{text[: SHORT_CHARS * 2 // 3]}… ({len(text):,} characters)"


# Recorded steps -------------------------------------------------------------------------------------------------------


def describe_steps(records: StepRecords, first: int, last: int, rank: int | None = None) -> Iterator[str]:
    """Yield what `streamline steps` prints, of one rank or all: how far each step has read each shard."""
    for one in records.ranks if rank is None else [rank]:
        steps = list(records.read(one, first, last))
        missing = sorted(set(range(first, last + 1)).difference(step.number for step in steps))
        for step in steps:
            yield from map(printable, _step(step))
        if missing:
            yield (
                f"rank {one}: {quantity(len(missing), 'step')} of {first}..{last} not recorded: {some(missing)}; "
                f"recorded are {records.extent(one)}"
            )


def _step(step: RecordedStep) -> Iterator[str]:
    before, after = step.snapshot_before, step.snapshot_after
    source = str(before.fingerprint[0].get("name"))
    counts = [now - then for then, now in zip(before.produced, after.produced, strict=True)]
    left_out = ", left out" if step.left_out else ""
    yield (
        f"step {step.number}: epoch {before.epoch}, rank {before.rank} of {before.world_size}, opening {step.run.run}"
        f"{left_out}"
    )
    if again := list(merge_replays(after)):
        yield "  its items were taken from the shards before, or in part: a stage after the merge holds items"
    rows = zip(before.shards, counts, before.worker_states, after.worker_states, strict=True)
    for shard, count, then, now in rows:
        if count or then != now:
            yield f"  shard {shard}: {quantity(count, 'item')}; {_movement(source, then, now)}"
            for name in now:
                if name != source and _is_set(now[name]) and now[name] != then.get(name):
                    yield f"    {_state(name, then.get(name))} -> {_state(name, now[name])}"
            yield from (f"    {line}" for line in _held_lines(after, now))
    for name, own in after.stages.items():
        if _is_set(own) and own != before.stages.get(name):
            yield f"  after the merge: {_state(name, before.stages.get(name))} -> {_state(name, own)}"
    yield from (f"  {line}" for line in again)


def _movement(source: str, then: Tree, now: Tree) -> str:
    """Return how far a shard's source was read: "a.txt, line 3, byte 18 -> a.txt, line 5, byte 30"."""
    begin, end = _position(then.get(source)), _place_reached(now.get(source))
    return f"{begin} -> {end}" if begin != end else f"from {begin} on"


def _place_reached(own: Json) -> str:
    """As `_position`, of a source that has given items."""
    ended = isinstance(own, dict) and own.get("file", "") is None
    return "the end" if ended else _position(own)


def _held_lines(after: Snapshot, tree: Tree) -> Iterator[str]:
    """Yield what a worker's stages hold: the step may have items from there."""
    for line in worker_replays(after, tree):
        yield f"after it, a resume: {line}"
