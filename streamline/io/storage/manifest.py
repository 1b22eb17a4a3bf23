"""The manifest of a folder of shards that a job has written: which of them count, and where its stream stood then.

JSON with a checksum, replaced as a whole: that is what commits a shard. A job of one rank has `manifest.json`; of
several, each rank has its own. Readers take the files that the manifests name, and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from streamline.core.item_codec import decode_json
from streamline.core.state import digest
from streamline.core.state_types import Count, Size
from streamline.errors import ReadError

MAGIC = "streamline_manifest"

VERSION = 1

NAME = re.compile(r"manifest(?:-(\d{5,})-of-(\d{5,}))?\.json")

HEAD = f'{{"{MAGIC}"'.encode()
"""How such a file begins: other programs call files of their own manifest.json, too."""


class WrittenShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard that counts: its file's name, the items in it, and its size."""

    name: str
    items: Size
    bytes: Size


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank of a job has written.

    Attributes:
      format: what its shards' names end with: "jsonl", "jsonl.gz".
      run: how often the job has been begun or resumed, before this time.
      complete: whether the rank has written all that its stream gave.
      common: what all shards have in common, as their encoder keeps it: columns, say.
      snapshot: of the stream, right after the last item of the last shard.
    """

    format: str
    rank: Count
    world_size: Size
    run: Count = 0
    complete: bool = False
    common: Any = None
    shards: list[WrittenShard] = []
    snapshot: Any = None

    @property
    def items(self) -> int:
        return sum(shard.items for shard in self.shards)

    @property
    def size(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def content(self) -> bytes:
        """Return the content of its file."""
        body = msgspec.to_builtins(msgspec.structs.replace(self, snapshot=None))
        body["snapshot"] = self.snapshot  # with integers that msgspec has no room for
        return json.dumps({MAGIC: VERSION, "sha256": digest(body), "body": body}).encode() + b"\n"


def manifest_name(rank: int, world_size: int) -> str:
    return "manifest.json" if world_size == 1 else f"manifest-{rank:05d}-of-{world_size:05d}.json"


def parse_manifest(content: bytes, path: str) -> Manifest:
    """Return the manifest in a file's content; a ReadError if it is damaged, of a later version, or something else."""

    def read(envelope: Any) -> Manifest:
        version, told, body = (envelope[key] for key in (MAGIC, "sha256", "body"))
        if version != VERSION:
            raise ReadError(f"{path} is of version {version!r}, and this streamline reads {VERSION}: upgrade it")
        if digest(body) != told:
            raise ReadError(f"{path} is damaged, or was edited: its checksum is another one; write the folder anew")
        return msgspec.convert(body, Manifest)

    what = f"{path} is no manifest of written shards, or is damaged"
    return decode_json(content, read, lambda why: ReadError(f"{what}: {why}; write the folder anew"))


def may_be_manifest(path: str) -> bool:
    """Whether a path's last part is such a name; whether the file is a manifest, its first bytes say."""
    return NAME.fullmatch(path.rpartition("/")[2]) is not None


def manifests_among(names: Iterable[str]) -> list[str]:
    """Return the names that are those of manifests, sorted."""
    return sorted(name for name in names if NAME.fullmatch(name))


def world_sizes(names: Iterable[str]) -> set[int]:
    """Return of how many ranks the jobs are whose manifests are among the names of a folder."""
    found = map(NAME.fullmatch, names)
    return {int(name[2]) if name[2] else 1 for name in found if name is not None}


def shards_of(folder: str, parts: Iterable[Manifest], *, whole: bool) -> list[WrittenShard]:
    """Return the shards that manifests name, in the order of ranks and of writing.

    Args:
      folder: for messages.
      whole: whether they are all that the folder has, and a rank's may not be missing.

    Raises:
      ReadError: the job isn't complete, ranks are missing, or they don't belong together.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    sizes, formats = ({getattr(part, name) for part in parts} for name in ("world_size", "format"))
    if len(sizes) > 1 or len(formats) > 1:
        differ = f"{sorted(sizes)} ranks" if len(sizes) > 1 else f"formats {sorted(formats)}"
        raise ReadError(f"{folder} holds the manifests of several jobs, of {differ}: remove all but one job's")
    unfinished = [part.rank for part in parts if not part.complete]
    missing = sorted(set(range(parts[0].world_size if whole else 0)) - {part.rank for part in parts})
    if unfinished or missing:
        ranks = "" if parts[0].world_size == 1 else f" (ranks {', '.join(map(str, (unfinished + missing)[:10]))})"
        raise ReadError(
            f"{folder} isn't written to its end{ranks}: run the job again with resume=True (--resume); or read the "
            "files that are there by their names"
        )
    return [shard for part in parts for shard in part.shards]


def check_size(path: str, size: int | None, shard: WrittenShard) -> None:
    """Refuse a shard whose size is not as it was written, with a ReadError."""
    if size is not None and size != shard.bytes:
        raise ReadError(
            f"{path} has {size:,} bytes, and {shard.bytes:,} were written: it has been replaced or cut short"
        )
