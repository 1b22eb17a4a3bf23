"""Lance datasets as a source: what a snapshot lists is the version of each, and a resume reads that one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from typing import Annotated, Any, ClassVar

import msgspec

from streamline.core.meters import Traffic
from streamline.core.state import Json
from streamline.io.formats.lance import VERSION, LanceFormat, number_of
from streamline.io.storage.base import FoundObject
from streamline.io.storage.paths import check_once
from streamline.io.storage.resolve import in_one_thread
from streamline.sources.base import Change, Split
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
