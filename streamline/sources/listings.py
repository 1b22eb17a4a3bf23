"""What has happened to a list of files between a snapshot and its resume, and what that means. Pure.

A listing is a list of objects: "path", "size" in bytes or None, and whatever else tells one content from another. An
epoch goes on over the files of its snapshot, in their order there: so each file stays in its shard, whatever has come
or gone. Snapshots of such a run carry that listing on, with the sizes of today.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamline.sources.base import Change
from streamline.sources.pieces import named_gzip
from streamline.states import Json

__all__ = ["CHANGES", "carried", "changes", "paths_of", "place_of"]

CHANGES = ("new_files", "removed_files", "changed_files", "order")

SHOWN = 10
"""Files that a refusal names, of each kind of difference."""


def paths_of(listing: Json) -> tuple[str, ...] | None:
    """Return the files of a listing, in order; None if it is no list of files."""
    if not isinstance(listing, list) or not all(isinstance(entry.get("path"), str) for entry in listing):
        return None
    return tuple(entry["path"] for entry in listing)


def carried(before: Json, now: Json) -> Json:
    """Return the files of `before`, as they are in `now`; those that are gone as they were."""
    if paths_of(before) is None:
        return now
    present = {entry["path"]: entry for entry in now}
    return [present.get(entry["path"], entry) for entry in before]


def changes(before: Json, now: Json, *, one_split: bool, unread_gone: bool) -> list[Change]:
    """Return the differences between a snapshot's listing and today's.

    Args:
      before: the snapshot's.
      now: today's.
      one_split: whether one file is split at byte offsets.
      unread_gone: whether a file that is gone has not been read to its end.
    """
    if paths_of(before) is None:
        then = "a state says nothing about other data: begin anew, without resume="
        lines = (f"it had {before}, now there are {len(now)} files",)
        return [] if before == now else [Change(what="data", lines=lines, then=then, possible=False)]
    old, new = ({entry["path"]: entry for entry in listing} for listing in (before, now))
    found = [
        _new([path for path in new if path not in old], new),
        _removed([path for path in old if path not in new], unread_gone),
        _changed([path for path in new if path in old and _differ(old[path], new[path])], old, new, one_split),
    ]
    if not any(found) and list(old) != list(new):
        lines = ("the same files are listed in another order",)
        then = "this epoch goes on in the order of the snapshot"
        return [Change(what="order", lines=lines, then=then, possible=True)]
    return [change for change in found if change is not None]


def place_of(own: Json) -> str:
    """Say where a reader stands, and what it takes to get there."""
    if own is None:
        return "the beginning"
    if not isinstance(own, dict) or not {"file", "line", "byte"} <= own.keys():
        return str(own)
    if own["file"] is None:
        return "nothing is left"
    place = f"{own['file']}, line {own['line']:,}, byte {own['byte']:,}"
    if not own["byte"]:
        return place
    how = f"decompresses {own['byte']:,} bytes to get there" if named_gzip(own["file"]) else "seeks"
    return f"{place} ({how})"


def _new(paths: list[str], new: dict[str, Any]) -> Change | None:
    then = "this epoch goes on over the files of the snapshot, the new ones come in the next epoch"
    lines = _lines(f"new file {path}{_size(new[path])}" for path in paths)
    return Change(what="new_files", lines=lines, then=then, possible=True) if paths else None


def _removed(paths: list[str], unread: bool) -> Change | None:
    then = "they are skipped: a shard that stood in one goes on with its next file, every other file stays in its shard"
    lines = _lines(f"file {path} is gone" for path in paths)
    return Change(what="removed_files", lines=lines, then=then, possible=True, steady=not unread) if paths else None


def _changed(paths: list[str], old: dict[str, Any], new: dict[str, Any], one_split: bool) -> Change | None:
    if not paths:
        return None
    lines = _lines(f"file {path} was{_size(old[path])}, is{_size(new[path])}" for path in paths)
    then, possible = "what was added is read where a file has not been left behind, each from its byte on", True
    bad = [path for path in paths if not _grew(old[path], new[path])]
    zipped = [path for path in paths if named_gzip(path)]
    if bad:
        then, possible = f"{bad[0]} has not grown, so it is another one: put the old one back, or begin anew", False
    elif zipped:
        then, possible = f"{zipped[0]} is compressed, so its end may have been passed already: begin anew", False
    elif one_split:
        then = "the byte ranges of its shards move with its size: put the old file back, or begin anew"
        possible = False
    return Change(what="changed_files", lines=lines, then=then, possible=possible)


def _differ(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return any(old[key] != new[key] for key in old.keys() & new.keys())


def _grew(old: dict[str, Any], new: dict[str, Any]) -> bool:
    before, now = old.get("size"), new.get("size")
    return isinstance(before, int) and isinstance(now, int) and now > before


def _size(entry: dict[str, Any]) -> str:
    rest = {key: value for key, value in entry.items() if key != "path" and value is not None}
    size = rest.pop("size", None)
    words = ([f"{size:,} bytes"] if isinstance(size, int) else []) + [f"{key} {value}" for key, value in rest.items()]
    return f" ({', '.join(words)})" if words else ""


def _lines(lines: Iterable[str]) -> tuple[str, ...]:
    found = list(lines)
    return (*found[:SHOWN], *([f"… and {len(found) - SHOWN:,} more"] if len(found) > SHOWN else []))
