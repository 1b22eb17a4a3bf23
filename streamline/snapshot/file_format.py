"""The file format of snapshots: JSON that a person can read, with a checksum. Pure.

A file is an object of three entries: `streamline_snapshot` (the format's version), `sha256` (of the canonical JSON of
the body), and `body`. The envelope and the checksum's rule are for life; a new version changes the body only. Each
rank has a file, named for it, in a directory for a step of training.

The text is the standard library's, not msgspec's: states hold integers of 128 bits (random generators) and file names
that are not UTF-8, and both must come back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path

from streamline.core.item_codec import decode_json
from streamline.core.state import Json, digest
from streamline.errors import SnapshotError

FORMAT_VERSION = 1
"""Since streamline 0.1.0. Versions under development, before it, also wrote 2."""

MAGIC = "streamline_snapshot"

LINE_DEPTH = 5
"""Containers up to this depth are on lines of their own: envelope, body, state, merge, workers; one line a worker."""

PLAIN_TYPES = frozenset({str, int, bool, type(None)})
"""Types that JSON always has, and most values are of."""

_SEAL = ',"sha256":"'
_ENTRIES = {MAGIC, "sha256", "body"}
_START, _END = f'{{\n "{MAGIC}"'.encode(), b"\n }\n}\n"


def one_line(body: dict[str, Json]) -> str:
    """Return a body as one line of JSON. Raises `SnapshotError`: it holds what JSON would lose or change."""
    _check_savable(body)
    return json.dumps(body, separators=(",", ":"))


def encode(body: dict[str, Json]) -> bytes:
    _check_savable(body)
    return (_lines({MAGIC: FORMAT_VERSION, "sha256": digest(body), "body": body}) + "\n").encode()


def decode(content: bytes, path: Path) -> Json:
    """Return the body in a file's content. Raises `SnapshotError`: empty, cut short, damaged, or no snapshot."""
    if not content.strip(b"\0 \t\r\n"):
        raise SnapshotError(f"{path} is empty ({len(content)} bytes, none of them text): use an earlier snapshot")
    return decode_json(content, partial(_open_envelope, path), partial(_refusal, content, path))


def _open_envelope(path: Path, envelope: Json) -> Json:
    if not isinstance(envelope, dict) or MAGIC not in envelope:
        raise SnapshotError(f'{path} is JSON, but no streamline snapshot: it has no "{MAGIC}" entry')
    check_version(envelope[MAGIC], path)
    if envelope.keys() != _ENTRIES:
        raise SnapshotError(f"{path} is damaged: expected the entries {sorted(_ENTRIES)}, found {sorted(envelope)}")
    body = envelope["body"]
    if envelope["sha256"] != (expected := digest(body)):
        raise SnapshotError(
            f"{path} is damaged, or was edited: its checksum is {envelope['sha256']}, its content's {expected}; "
            "use an earlier snapshot"
        )
    return body


def seal(text: str, others: Json) -> str:
    """Return the text of a JSON object with a checksum as its last entry: of the text, and of what is stored with it.

    In the text, because trainers store a flat dict whose keys must stay the same from one version to the next.
    """
    return f'{text[:-1]}{_SEAL}{digest([text, others])}"}}'


def unseal(text: str, others: Json, what: str) -> str:
    """Return the text that `seal` was given."""
    inner, seal, rest = text.rpartition(_SEAL)
    if not seal:
        raise SnapshotError(f"{what} is damaged, or was edited: it has no checksum; use an earlier one")
    found, expected = rest.removesuffix('"}'), digest([f"{inner}}}", others])
    if found != expected:
        raise SnapshotError(
            f"{what} is damaged, or was edited: its checksum is {found[:64]}, its content's {expected}; "
            "use an earlier one"
        )
    return f"{inner}}}"


def check_version(version: Json, what: object) -> None:
    """Refuse a version that this code doesn't read; `what` has it."""
    if type(version) is not int or version < 1:
        raise SnapshotError(f"{what} is damaged: its format's version is {version!r}")
    if version != FORMAT_VERSION:
        raise SnapshotError(
            f"{what} is of format {version}, and this streamline reads format {FORMAT_VERSION}: upgrade streamline, "
            "unless a version before 0.1.0 wrote it: that one can't be resumed"
        )


def _refusal(content: bytes, path: Path, why: str) -> SnapshotError:
    """Return the error for a file's content that is not JSON."""
    if not content.startswith(_START) and not _START.startswith(content):
        return SnapshotError(f"{path} is no streamline snapshot: expected JSON ({why})")
    if not content.endswith(_END):
        return SnapshotError(f"{path} is cut short after {len(content):,} bytes: use an earlier snapshot")
    return SnapshotError(f"{path} is damaged ({why}): use an earlier snapshot")


def _check_savable(body: dict[str, Json]) -> None:
    if found := _unsavable(body):
        raise SnapshotError(f"this snapshot can't be JSON: {found}")


def _unsavable(value: Json) -> str | None:
    """Say what in a tree JSON would lose or change, and where: "['a'][0] is of type tuple"; None: nothing."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f" has the key {key!r}, which would come back as a string"
    elif value is None or isinstance(value, str | int):
        return None
    elif isinstance(value, float):
        return None if math.isfinite(value) else f" is {value}, which JSON has no word for"
    elif not isinstance(value, list):
        return f" is of type {type(value).__name__}; keep dicts, lists, strings, numbers, booleans and None"
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if type(child) not in PLAIN_TYPES and (found := _unsavable(child)):
            return f"[{key!r}]{found}"
    return None


def _lines(value: Json, indent: str = "") -> str:
    """Return JSON for people: a container without containers is one line. `json.dumps(indent=)` is much slower."""
    children: Iterable[Json] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if len(indent) == LINE_DEPTH or not any(isinstance(child, dict | list) for child in children):
        return json.dumps(value)
    deeper = indent + " "
    if isinstance(value, dict):
        opening, closing = "{}"
        parts = [f"{json.dumps(key)}: {_lines(child, deeper)}" for key, child in value.items()]
    else:
        opening, closing = "[]"
        parts = [_lines(child, deeper) for child in value]
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{closing}"


_FILE_NAME = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.json")


def file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


def target(path: str | os.PathLike[str], name: str) -> Path:
    """Return the file to save to: `path`, or one called `name` in it."""
    given, location = os.fspath(path), Path(path)
    if location.is_dir() or given.endswith(("/", os.sep)):
        return location / name
    if given.endswith(".json"):
        return location
    if location.suffix:
        raise SnapshotError(f"is {given!r} to be a file or a directory? End it in '.json' or in '/'")
    return location / name


def rank_files(directory: Path) -> dict[Path, tuple[int, int]]:
    """Return the files in a directory that are named for a rank, with the rank and the number of ranks."""
    named = ((path, _FILE_NAME.fullmatch(path.name)) for path in directory.iterdir())
    return {path: (int(match[1]), int(match[2])) for path, match in named if match is not None}


def complete_set(directory: Path) -> list[Path]:
    """Return the files of all ranks, by rank; none where there are none.

    Raises `SnapshotError`: some are missing, or several sets are complete. Incomplete sets beside one are ignored.
    """
    found: dict[int, set[int]] = {}
    for rank, size in rank_files(directory).values():
        if rank < size:
            found.setdefault(size, set()).add(rank)
    whole = [size for size, ranks in sorted(found.items()) if len(ranks) == size]
    if len(whole) > 1:
        sizes = " and of ".join(map(str, whole))
        raise SnapshotError(f"{directory} holds snapshots of {sizes} ranks, each complete: remove all but one set")
    if found and not whole:
        absent = "; ".join(f"of {size} ranks, {_missing_ranks(size, ranks)}" for size, ranks in sorted(found.items()))
        raise SnapshotError(f"{directory} lacks the snapshots of some ranks: {absent}. Use an earlier directory")
    return [directory / file_name(rank, size) for size in whole for rank in range(size)]


def _missing_ranks(size: int, ranks: set[int]) -> str:
    """Return the first missing ranks as text; a file's name may claim any number of them."""
    first = list(islice((rank for rank in range(size) if rank not in ranks), 10))
    more = size - len(ranks) - len(first)
    return ", ".join(map(str, first)) + (f" and {more} more" if more else "")


def missing_snapshot(location: Path) -> str:
    """Say that there is no snapshot, and what is there."""
    if not location.is_dir():
        return f"no snapshot at {location}: no such file or directory (a first run: missing_ok=True)"
    others = sorted(path.name for path in location.glob("*.json"))
    hint = f", but {', '.join(others[:5])}: is it one of these?" if others else " (a first run: missing_ok=True)"
    return f"no snapshot in {location}: no file is named rank-*-of-*.json{hint}"
