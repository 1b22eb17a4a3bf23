"""Line files: `read_lines` and `read_jsonl`.

A worker reads its files one after the other. Contiguous mode splits one file at byte offsets, unread: a shard owns the
lines that *begin* in its range, so it skips to the first line end from the byte before its range on, and reads its
last line to the end, wherever that is.

A resume seeks to its byte, or asks a server for the bytes from there on; a gzip file can only be read from its start,
so there a resume decompresses what is before its line once more, and drops it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.flow import Flow, ListsFlow, Site
from streamline.formats.lines import MAX_LINE_BYTES, Decode, decode_json, decode_text
from streamline.index import Bijection
from streamline.sharding import files_of
from streamline.sources import listings
from streamline.sources.base import Change, Mode, Part, Source, Split
from streamline.sources.paths import Paths, expand, given, is_url
from streamline.sources.pieces import named_gzip, not_splittable
from streamline.sources.positions import OVER, Place, begin_of
from streamline.sources.reader import FilePart, LineReader
from streamline.sources.storage import HttpOptions
from streamline.states import At, Json, Tree

__all__ = ["Files", "HttpOptions", "read_jsonl", "read_lines"]

T = TypeVar("T")


def read_lines(
    paths: Paths, *, name: str = "read_lines", http: HttpOptions | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Files[str]:
    """Return a source of the lines of text files, without their ends, "\\n" or "\\r\\n"; empty lines are items.

    Args:
      paths: local paths and globs, http(s) URLs, all with braces: part-{000..127}.txt; one or several.
      name: its part of a state is kept under it.
      http: how URLs are read.
      max_line_bytes: a longer line is an error; >= 1.
    """
    return _files("read_lines", decode_text, paths, name, http, max_line_bytes)


def read_jsonl(
    paths: Paths, *, name: str = "read_jsonl", http: HttpOptions | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Files[Any]:
    """Return a source of JSON values, one a line; blank lines are skipped. Arguments as for `read_lines`."""
    return _files("read_jsonl", decode_json, paths, name, http, max_line_bytes)


def _files(
    kind: str, decode: Decode[T], paths: Paths, name: str, http: HttpOptions | None, max_line_bytes: int
) -> Files[T]:
    if not isinstance(max_line_bytes, int) or isinstance(max_line_bytes, bool):
        raise PlanTypeError(f"expected max_line_bytes as an int, got {max_line_bytes!r}")
    if max_line_bytes < 1:
        raise PlanError(f"expected max_line_bytes >= 1, got {max_line_bytes}")
    if http is not None and not isinstance(http, HttpOptions):
        raise PlanTypeError(f"expected http as HttpOptions, got {type(http).__name__}")
    return Files(name=name, made_by=kind, decode=decode, paths=given(paths), http=http, max_line_bytes=max_line_bytes)


@dataclass(frozen=True, kw_only=True)
class Files(Source[T]):
    """Reads files of lines. State: `sources.positions`.

    Attributes:
      made_by: the public function.
      decode: makes items of lines.
      paths: as the user gave them.
      http: how URLs are read; None: as usual.
      max_line_bytes: a longer line is an error.
      found: the files that `paths` mean; None: nobody has looked yet. At a resume, those that the snapshot lists.
      gone: those of `found` that were there at the snapshot and are no more.
    """

    modes: ClassVar[tuple[Mode, ...]] = ("file", "contiguous", "replicated")
    listed: ClassVar[bool] = True
    changeable: ClassVar[tuple[str, ...]] = listings.CHANGES

    made_by: str
    decode: Decode[T] = field(repr=False)
    paths: tuple[str, ...]
    http: HttpOptions | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    found: tuple[str, ...] | None = None
    gone: frozenset[str] = frozenset()

    def resolved(self) -> Files[T]:
        """Return this source with its files looked up, once for all workers: a later look may find others.

        Raises:
          ReadError: as `expand`.
          PlanError: likewise.
        """
        if self.found is not None:
            return self
        if any(map(is_url, self.paths)):
            import_module("streamline.sources.http")  # takes 0.2 s: here, rather than in the event loop
        return replace(self, found=tuple(expand(self.paths)))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are read, in order, before any shuffle."""
        return tuple(expand(self.paths)) if self.found is None else self.found

    @property
    def default_mode(self) -> Mode:
        if self.found is not None:
            return "contiguous" if len(self.found) == 1 else "file"
        # Nothing is looked up before the plan is opened: until then, this is what the paths look like.
        return "contiguous" if len(self.paths) == 1 and not set(self.paths[0]) & set("*?[{") else "file"

    @property
    def waits(self) -> bool:
        return True

    @property
    def kind(self) -> str:
        return self.made_by

    @property
    def reread(self) -> str:
        return "seeks to its line (.gz: unpacks up to it)"

    def __str__(self) -> str:
        paths = self.paths if self.found is None else self.found
        first = f"{self.kind} {paths[0]!r}" if paths else self.kind
        return first if len(paths) < 2 else f"{first} and {len(paths) - 1:,} more"

    def listing(self) -> Any:
        """Return the files with their sizes in bytes, None for URLs: asking a server is not done here."""
        return [{"path": path, "size": None if is_url(path) else Path(path).stat().st_size} for path in self.files]

    def resumed(self, listing: Json) -> Files[T]:
        paths = listings.paths_of(listing)
        return self if paths is None else replace(self, found=paths, gone=frozenset(paths) - set(self.files))

    def changes(self, listing: Json, now: Json, split: Split) -> list[Change]:
        gone = frozenset(listings.paths_of(listing) or ()) - set(self.files)
        unread = split.passes or any(
            path in gone for shard, own in split.own.items() for path in self._unread(listing, split, shard, own)
        )
        return listings.changes(
            listing,
            now,
            one_split=split.part.mode == "contiguous" and split.num_shards > 1,
            unread_gone=unread,
        )

    def carried(self, listing: Json, now: Json) -> Json:
        return listings.carried(listing, now)

    @classmethod
    def reads_on(cls, own: Json) -> str:
        return listings.place_of(own)

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        parts = self._parts(site, part)
        begin = begin_of(parts[0].path if parts else None)
        left, place = _from(parts, begin if state is None else state[self.name], site, self.gone)
        demand = self.demand(site, state)
        reader = LineReader(self.name, self.decode, self.max_line_bytes, demand.meter)
        return ListsFlow(At(self.name, dict(place)), reader.lists(left, place, self.http, demand), demand)

    def _unread(self, listing: Json, split: Split, shard: int, own: Json) -> list[str]:
        """Return the files that a shard is in or has before it."""
        files = self.resumed(listing)._shares(split.part, shard, split.num_shards, (split.epoch,))
        place = own["file"] if own is not None else None
        return [] if own is not None and place is None else files[files.index(place) :] if place in files else files

    def _shares(self, part: Part, shard: int, num_shards: int, epoch: tuple[int, ...]) -> list[str]:
        """Return the files of which a shard reads all or something, in order, those that are gone included."""
        files = list(self.files)
        if part.shuffle_seed is not None and len(files) > 1:
            order = Bijection(len(files), (part.shuffle_seed, *epoch))(np.arange(len(files)))
            files = [files[index] for index in order.tolist()]
        if part.mode == "file" and num_shards > 1:
            return [files[index] for index in files_of(len(files), num_shards, shard)]
        return files

    def _parts(self, site: Site, part: Part) -> list[FilePart]:
        """Return what shard `site.shard` reads, in order, files that are gone included."""
        if part.drop_remainder:
            raise PlanError(
                f"{self.made_by} can't drop a remainder: how many lines there are is known when they are read"
            )
        files = self._shares(part, site.shard, site.num_shards, site.epoch)
        if part.mode == "contiguous" and site.num_shards > 1:
            return [_piece(files, site)]
        return [FilePart(path) for path in files]


def _piece(files: list[str], site: Site) -> FilePart:
    if len(files) > 1:
        raise PlanError(
            f"contiguous mode splits one file at byte offsets, and there are {len(files)}: "
            f'write .shard({site.num_shards}, mode="file"), whole files for each shard'
        )
    if named_gzip(files[0]):
        raise not_splittable(files[0], site.num_shards)
    return FilePart(files[0], site.shard, site.num_shards)


def _from(parts: list[FilePart], place: Place, site: Site, gone: frozenset[str]) -> tuple[list[FilePart], Place]:
    """Return the parts from the one on that `place` is in, without the files that are gone, and where to begin."""
    if place["file"] is None:
        return [], place
    for index, part in enumerate(parts):
        if part.path == place["file"]:
            left = [part for part in parts[index:] if part.path not in gone]
            if part.path in gone:
                place = begin_of(left[0].path) if left else OVER
            return left, place
    raise ResumeError(
        f"the snapshot stands in {place['file']} line {place['line']}, which is not among the {len(parts)} files of "
        f"shard {site.shard} of {site.num_shards}: was it renamed or removed, or have files been added?"
    )
