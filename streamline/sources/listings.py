"""Changes of a list of files between a snapshot and its resume, and their consequences. Pure.

A listing is a list of objects: "path", "size" in bytes or None, and "etag" where a store or a server gives one, or
"Last-Modified: " and a date instead. A value that one of two listings lacks is no difference. Local files have a size
only: a time of modification would refuse data that was copied to another machine.

A resumed epoch reads the files of its snapshot, in that order, so that each file stays in its shard; its snapshots keep
that listing, with today's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streamline.core.state import Json
from streamline.io.storage.base import MODIFIED
from streamline.sources.base import Change

CHANGES = ("new_files", "removed_files", "changed_files", "order")

NAMES = {"etag": "ETag"}

SHOWN_FILES = 10
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


def changes(
    before: Json, now: Json, *, one_split: bool, unread_gone: bool, grows: Callable[[str], bool]
) -> list[Change]:
    """Return the differences between a snapshot's listing and today's.

    Args:
      one_split: one file is split at byte offsets.
      unread_gone: a file that is gone has not been read to its end.
      grows: whether reading can go on in a file that has grown.
    """
    if paths_of(before) is None:
        then = "a state says nothing about other data: begin anew, without resume="
        lines = (f"it had {before}, now there are {len(now)} files",)
        return [] if before == now else [Change(what="data", lines=lines, then=then, possible=False)]
    old, new = ({entry["path"]: entry for entry in listing} for listing in (before, now))
    found = [
        _new([path for path in new if path not in old], new),
        _removal([path for path in old if path not in new], unread_gone),
        _replacement(
            [path for path in new if path in old and _differ(old[path], new[path])], old, new, one_split, grows
        ),
    ]
    if not any(found) and list(old) != list(new):
        lines = ("the same files are listed in another order",)
        then = "this epoch goes on in the order of the snapshot"
        return [Change(what="order", lines=lines, then=then, possible=True)]
    return [change for change in found if change is not None]


def _new(paths: list[str], new: dict[str, Any]) -> Change | None:
    then = "this epoch goes on over the files of the snapshot, the new ones come in the next epoch"
    lines = _lines(f"new file {path}{_size(new[path])}" for path in paths)
    return Change(what="new_files", lines=lines, then=then, possible=True) if paths else None


def _removal(paths: list[str], unread: bool) -> Change | None:
    then = "they are skipped: a shard that stood in one goes on with its next file, every other file stays in its shard"
    lines = _lines(f"file {path} is gone" for path in paths)
    return Change(what="removed_files", lines=lines, then=then, possible=True, steady=not unread) if paths else None


def _replacement(
    paths: list[str], old: dict[str, Any], new: dict[str, Any], one_split: bool, grows: Callable[[str], bool]
) -> Change | None:
    if not paths:
        return None
    lines = _lines(f"file {path} was{_size(old[path])}, is{_size(new[path])}" for path in paths)
    why_not = ""
    if replaced := [path for path in paths if _other_etag(old[path], new[path])]:
        why_not = (
            f"{replaced[0]} is another version, and nothing says that it begins as the old one did: put the old one "
            "back, or begin anew"
        )
    elif bad := [path for path in paths if not _grew(old[path], new[path])]:
        why_not = f"{bad[0]} has not grown, so it is another one: put the old one back, or begin anew"
    elif closed := [path for path in paths if not grows(path)]:
        why_not = f"{closed[0]} can't grow after what was read of it, as plain lines can: begin anew"
    elif one_split:
        why_not = "the byte ranges of its shards move with its size: put the old file back, or begin anew"
    then = why_not or "what was added is read where a shard is not past the file, each from its byte on"
    return Change(what="changed_files", lines=lines, then=then, possible=not why_not)


def _differ(old: dict[str, Any], new: dict[str, Any]) -> bool:
    others = (old.keys() & new.keys()) - {"etag"}
    return _other_etag(old, new) or any(None not in (old[key], new[key]) and old[key] != new[key] for key in others)


def _other_etag(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether both have an ETag, and not the same; a weak one ("W/...") says that the content is the same, too."""
    before, now = old.get("etag"), new.get("etag")
    if not isinstance(before, str) or not isinstance(now, str) or _is_date(before) != _is_date(now):
        return False
    return before.removeprefix("W/") != now.removeprefix("W/")


def _is_date(tag: str) -> bool:
    return tag.startswith(MODIFIED)


def _grew(old: dict[str, Any], new: dict[str, Any]) -> bool:
    before, now = old.get("size"), new.get("size")
    return isinstance(before, int) and isinstance(now, int) and now > before


def _size(entry: dict[str, Any]) -> str:
    rest = {key: value for key, value in entry.items() if key != "path" and value is not None}
    size = rest.pop("size", None)
    words = ([f"{size:,} bytes"] if isinstance(size, int) else []) + [
        str(value) if _is_date(str(value)) else f"{NAMES.get(key, key)} {value}" for key, value in rest.items()
    ]
    return f" ({', '.join(words)})" if words else ""


def _lines(lines: Iterable[str]) -> tuple[str, ...]:
    found = list(lines)
    return (*found[:SHOWN_FILES], *([f"… and {len(found) - SHOWN_FILES:,} more"] if len(found) > SHOWN_FILES else []))
