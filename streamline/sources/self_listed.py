"""Data sets that say themselves what there is to read: Lance's versions, and the index of MDS shards.

Of Lance datasets, what a snapshot lists is the version of each, and a resume reads that one. The index of a folder of
MDS shards says which there are, how large they are, and their hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from typing import Annotated, Any, ClassVar

import msgspec

from streamline.core.item_codec import decode_json
from streamline.core.meters import Traffic
from streamline.core.state import Json
from streamline.errors import ReadError
from streamline.io.formats.lance import VERSION, LanceFormat, number_of
from streamline.io.formats.mds import SUFFIX, MdsFormat
from streamline.io.storage.base import FoundObject
from streamline.io.storage.paths import check_once, is_pattern, is_url
from streamline.io.storage.resolve import content_of, find, in_one_thread
from streamline.sources.base import Change, Mode, Split
from streamline.sources.files import Files

LATER = (
    "version= asks for another one than the snapshot's: leave it out, and a resume reads on in the old one, as long as "
    "it is there"
)


class ListedVersion(msgspec.Struct):
    """An entry of a snapshot's listing."""

    path: str
    etag: Annotated[str, msgspec.Meta(pattern=VERSION)]


@dataclass(frozen=True, kw_only=True)
class LanceDatasets(Files[dict[str, Any]]):
    """Reads Lance datasets, each in one version. State: a place of the format."""

    kind: ClassVar[str] = LanceFormat.kind  # a property there
    listing_type: ClassVar[Any] = list[ListedVersion]

    format: LanceFormat

    @property
    def is_remote(self) -> bool:
        return self.found is None  # importing lance takes long, too

    def resolved(self, traffic: Traffic | None = None) -> LanceDatasets:
        return replace(self, found=self.files)

    async def aresolved(self, traffic: Traffic | None = None) -> LanceDatasets:
        return await in_one_thread(partial(self.resolved, traffic))

    @property
    def files(self) -> tuple[FoundObject, ...]:
        if self.found is not None:
            return self.found
        paths = [path for given in self.paths for path in sorted(glob(given)) or [given]]  # noqa: PTH207
        check_once(paths)
        return tuple(map(self.format.found, paths))

    def look_up(self, places: Sequence[int], answers: dict[int, FoundObject | Exception], within_s: float) -> None:
        answers.update({at: self.files[at] for at in places})  # a version was found, or the pipeline isn't open

    def resumed(self, listing: Json) -> LanceDatasets:
        gone = super().resumed(listing).gone
        return replace(self, found=tuple(map(FoundObject.of, listing)), gone=gone)

    def changes(self, listing: Json, now: Json, split: Split) -> list[Change]:
        """Return the differences that matter: a version that is later than the snapshot's isn't read."""
        before, asked = {entry["path"]: entry for entry in listing}, self.format.version is not None
        today = [before[one["path"]] if not asked and _later(one, before) else one for one in now]
        found = super().changes(listing, today, split)
        return [replace(one, then=LATER) if asked and one.what == "changed_files" else one for one in found]

    def carry_listing(self, listing: Json, now: Json) -> Json:
        return listing


def _later(entry: dict[str, Any], before: dict[str, dict[str, Any]]) -> bool:
    old = before.get(entry["path"])
    return old is not None and number_of(entry["etag"]) > number_of(old["etag"])


INDEX = "index.json"

UNREAD = ("br", "snappy")
"""Compressions of streaming's that aren't read; a level may follow: "br:11"."""


class IndexedFile(msgspec.Struct):
    """A file as the index has it."""

    basename: str
    bytes: int
    hashes: dict[str, str] = {}


class IndexedShard(msgspec.Struct):
    """A shard: its content, and, where it is compressed, what was made of it."""

    raw_data: IndexedFile
    format: str = "mds"
    compression: str | None = None
    zip_data: IndexedFile | None = None


class MdsIndex(msgspec.Struct):
    """An index.json (mosaicml/streaming, streaming/base/format)."""

    shards: list[IndexedShard]


@dataclass(frozen=True, kw_only=True)
class MdsShards(Files[dict[str, Any]]):
    """Reads MDS shards: those that paths name, or of folders. State: a place of the format."""

    kind: ClassVar[str] = MdsFormat.kind  # a property there

    format: MdsFormat

    @property
    def default_mode(self) -> Mode:
        return "file" if self.found is None and any(map(_is_folder, self.paths)) else super().default_mode

    @property
    def files(self) -> tuple[FoundObject, ...]:
        found = self.resolved().found
        assert found is not None
        return found

    def resolved(self, traffic: Traffic | None = None) -> MdsShards:
        if self.found is not None:
            return self
        found, hashes = list[FoundObject](), dict[str, Mapping[str, str]]()
        for path in self.paths:
            if _is_folder(path):
                files, indexed = self._in_folder(path, traffic)
                hashes |= indexed
            else:
                files = find((path,), self.access, traffic)
            found += files
        check_once(file.path for file in found)
        return replace(self, found=tuple(found), format=replace(self.format, hashes=hashes))

    async def aresolved(self, traffic: Traffic | None = None) -> MdsShards:
        return await in_one_thread(partial(self.resolved, traffic))

    def _in_folder(
        self, path: str, traffic: Traffic | None
    ) -> tuple[tuple[FoundObject, ...], dict[str, Mapping[str, str]]]:
        """Return the shards of a folder, and the hashes of their contents, where it has an index."""
        folder = path.removesuffix(INDEX).rstrip("/")
        index = f"{folder}/{INDEX}"
        try:
            (file,) = find((index,), self.access, traffic)
        except ReadError:
            if path.endswith(INDEX) or is_url(path):
                raise
            return find((f"{folder}/*{SUFFIX}",), self.access, traffic), {}
        shards = _parse_index(content_of(file.path, self.access, traffic), index)
        packed = [shard.zip_data or shard.raw_data for shard in shards]
        try:
            found = self._find_listed(folder, packed, index, traffic)
        except ReadError as missing:  # streaming may have unpacked them, and removed what it unpacked
            try:
                found = self._find_listed(folder, [shard.raw_data for shard in shards], index, traffic)
            except ReadError:
                raise missing from missing.__cause__
        return found, {file.path: shard.raw_data.hashes for file, shard in zip(found, shards, strict=True)}

    def _find_listed(
        self, folder: str, files: list[IndexedFile], index: str, traffic: Traffic | None
    ) -> tuple[FoundObject, ...]:
        try:
            found = find([f"{folder}/{file.basename}" for file in files], self.access, traffic) if files else ()
        except ReadError as error:
            raise ReadError(
                f"{error}; {index} lists it: copy it there again, or give the shards that there are"
            ) from error
        for each, file in zip(found, files, strict=True):
            if each.size not in (None, file.bytes):
                raise ReadError(
                    f"{each.path} has {each.size:,} bytes, and {file.bytes:,} as {index} says: it was cut short, or "
                    "written anew without its index"
                )
        return found


def _is_folder(path: str) -> bool:
    return SUFFIX not in path


def _parse_index(content: bytes, path: str) -> list[IndexedShard]:
    what = f"{path} is no index of MDS shards, or is damaged"
    read = partial(msgspec.convert, type=MdsIndex)
    index: MdsIndex = decode_json(content, read, lambda why: ReadError(f"{what}: {why}; write it anew"))
    for shard in index.shards:
        how = (shard.compression or "").partition(":")[0]
        if shard.format != "mds" or how in UNREAD:
            raise ReadError(f"{path} lists shards of {how or shard.format}, which aren't read: convert them")
        for file in (shard.raw_data, shard.zip_data or shard.raw_data):
            if ".." in file.basename.split("/") or file.basename.startswith("/") or is_pattern(f"s3://{file.basename}"):
                raise ReadError(f"{path} lists {file.basename!r}, which is no name of a file in its folder")
    return index.shards
