"""The difference of two trees of JSON, as JSON that compresses well. Pure.

`apply_change(old, change(old, new))` is `new`; `pack_changes` writes a change in few bytes. Consecutive states share
most objects, so identical objects are skipped. Numbers are written as differences. If a list's items change alike, as
workers do, each field is a column: `{"line": [1, 1, 1], "byte": [61, 58, 73]}` in place of three objects.

| written | means |
|---|---|
| `3` | an integer that is larger by 3 |
| `{"line": 1}` | an object in which these entries have changed |
| `["=", value]` | another value, or a new entry |
| `["-"]` | an entry that is gone |
| `["*", places, column]` | a list, of which the items at some places have changed |
| `["+", dropped, more]` | a list without its first items, and with more after its last |

Places are run lengths: items to skip, items that have changed, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import is_, is_not
from typing import Any, TypeAlias, cast

from msgspec import msgpack

from streamline.core.state import Json, Tree

Change: TypeAlias = Json
REMOVED: Change = ["-"]


def change(old: Json, new: Json) -> Change | None:
    """Return the change from `old` to `new`; None: they are the same."""
    if new is old:
        return None
    if type(new) is not type(old):
        return ["=", new]
    if type(new) is dict:
        return _of_objects(old, new)
    if type(new) is list:
        return _of_lists(old, new)
    if type(new) is int:
        return new - old or None
    return ["=", new] if repr(new) != repr(old) else None  # 0.0 equals -0.0


def apply_change(old: Json, found: Change | None) -> Json:
    """Return `old` with a change; unchanged parts are shared. Raises `LookupError`, `TypeError` or `ValueError`."""
    if found is None:
        return old
    if type(found) is int:
        if type(old) is not int:
            raise TypeError(f"a number is to be added to {old!r}")
        return old + found
    if type(found) is dict:
        return _apply_to_object(old, found)
    kind, *args = found
    if kind == "=":
        return args[0]
    if type(old) is not list:
        raise TypeError(f"a change of a list, and {old!r} is none")
    if kind == "+":
        return old[args[0] :] + args[1]
    if kind != "*":
        raise ValueError(f"no change: {found!r}")
    new, places = list(old), list(_from_lengths(args[0]))
    for place, one in zip(places, _rows(args[1], len(places)), strict=True):
        new[place] = apply_change(new[place], one)
    return new


def pack_changes(changes: list[Change]) -> bytes:
    """Return changes as MessagePack; as JSON, with integers of more than 64 bits or names that are not UTF-8."""
    try:
        return msgpack.encode(changes)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(changes, separators=(",", ":")).encode()


def unpack_changes(data: bytes) -> list[Change]:
    """Return what `pack_changes` was given. Raises `ValueError`: it isn't from `pack_changes`."""
    return cast("list[Change]", json.loads(data) if data[:1] == b"[" else msgpack.decode(data, type=list))


def _of_objects(old: Tree, new: Tree) -> Change | None:
    found = {name: REMOVED for name in old if name not in new}
    for name, value in new.items():
        if name not in old:
            found[name] = ["=", value]
        elif (inner := change(old[name], value)) is not None:
            found[name] = inner
    return found or None


def _apply_to_object(old: Tree, found: Tree) -> Tree:
    new = dict(old)
    for name, inner in found.items():
        if inner == REMOVED:
            del new[name]
        elif name in new:
            new[name] = apply_change(new[name], inner)
        else:
            kind, new[name] = inner
            if kind != "=":
                raise ValueError(f"no new entry: {inner!r}")
    return new


def _of_lists(old: Sequence[Json], new: Sequence[Json]) -> Change | None:
    if len(new) == len(old):
        others = compress(count(), map(is_not, new, old))
        found = {place: inner for place in others if (inner := change(old[place], new[place])) is not None}
        return ["*", _as_lengths(list(found)), _columns(list(found.values()))] if found else None
    dropped = max(0, len(old) - len(new))
    kept = len(old) - dropped
    if _same(old[dropped:], new[:kept]):
        return ["+", dropped, new[kept:]]
    return ["=", new]


def _same(old: Sequence[Json], new: Sequence[Json]) -> bool:
    """Whether two lists of one length are the same; False if unsure. 1 equals True, so equality is not enough."""
    if all(map(is_, old, new)):
        return True
    return old == new and set(map(type, old)) == set(map(type, new)) == {int}


def _as_lengths(places: Sequence[int]) -> list[int]:
    """Return rising places as run lengths: to skip, to take, in turn."""
    lengths: list[int] = []
    after = 0
    for place in places:
        if place == after and lengths:
            lengths[-1] += 1
        else:
            lengths += [place - after, 1]
        after = place + 1
    return lengths


def _from_lengths(lengths: Sequence[int]) -> Iterator[int]:
    at = 0
    for passed, taken in zip(lengths[::2], lengths[1::2], strict=True):
        yield from range(at + passed, at + passed + taken)
        at += passed + taken


def _columns(rows: list[Change]) -> Change:
    """Return changes as an object of columns, if they are objects with the same entries."""
    first = rows[0]
    if type(first) is dict and all(type(row) is dict and row.keys() == first.keys() for row in rows):
        return {name: _columns([row[name] for row in rows]) for name in first}
    return rows


def _rows(columns: Change, number: int) -> list[Change]:
    """Return the changes that `_columns` was given."""
    if type(columns) is not dict:
        return cast("list[Any]", columns)
    inner = [_rows(column, number) for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*inner, strict=True)]
