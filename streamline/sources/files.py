"""A source that reads a list of files, split over shards, one after the other or several in turn.

`streamline.io.formats` makes items of a file, `streamline.io.fetch` fetches its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import msgspec

from streamline.core.flow import Flow, Lists, ListsFlow, Site, StageContext
from streamline.core.knobs import Knob
from streamline.core.lazy_numpy import np
from streamline.core.meters import Traffic
from streamline.core.state import At, Json, Tree
from streamline.core.state_types import Count, check_type
from streamline.errors import PlanError, ResumeError, printable
from streamline.io.fetch.fetcher import Fetcher
from streamline.io.fetch.file import FilePart
from streamline.io.formats.base import Format, Place
from streamline.io.storage.base import FoundObject
from streamline.io.storage.options import Access
from streamline.io.storage.paths import is_remote
from streamline.io.storage.resolve import afind, find, look_up
from streamline.sharding.index import Bijection
from streamline.sharding.split import files_of
from streamline.sources import listings
from streamline.sources.base import Change, Mode, Part, Source, Split
from streamline.sources.interleave import ShardPlace, in_turn

T = TypeVar("T")

ASKING_SHARE = 0.8
"""The part of a check's deadline after which a request gives up: its message tells more than that time is up."""


class ListedFile(msgspec.Struct):
    """An entry of a snapshot's listing."""

    path: str
    size: Count | None = None
    etag: str | None = None


class InTurn(msgspec.Struct):
    """The state of a shard that reads several files in turn: a place in each of them, and the next file."""

    slots: list[Any]
    next: str | None


MOST_READS = 256
"""Requests of one source at once in one process, as a tuner lets them be."""


@dataclass(frozen=True, kw_only=True)
class Files(Source[T]):
    """Reads files. State: a place of the format.

    Attributes:
      found: the files that `paths` match; None: not looked up yet. At a resume, those that the snapshot lists.
      gone: those of `found` that no longer exist.
    """

    modes: ClassVar[tuple[Mode, ...]] = ("file", "contiguous", "replicated")
    listed: ClassVar[bool] = True
    changeable: ClassVar[tuple[str, ...]] = listings.CHANGES
    listing_type: ClassVar[Any] = list[ListedFile]

    format: Format[T]
    paths: tuple[str, ...] = field(repr=False)  # they may hold signatures
    access: Access = field(default_factory=Access)
    found: tuple[FoundObject, ...] | None = field(default=None, repr=False)
    gone: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def knob(self) -> Knob | None:
        written = self.access.concurrency
        if written == 1 or not any(map(is_remote, self.paths)):
            return None
        return Knob(stage=self.name, kind="reads", written=written, most=max(written, MOST_READS), items_each=0)

    @property
    def is_remote(self) -> bool:
        return self.found is None and any(map(is_remote, self.paths))

    def resolved(self, traffic: Traffic | None = None) -> Files[T]:
        """Return this source with its files looked up, once for all workers: a later look may find others."""
        return self if self.found is not None else replace(self, found=find(self.paths, self.access, traffic))

    async def aresolved(self, traffic: Traffic | None = None) -> Files[T]:
        return self if self.found is not None else replace(self, found=await afind(self.paths, self.access, traffic))

    @property
    def files(self) -> tuple[FoundObject, ...]:
        return find(self.paths, self.access) if self.found is None else self.found

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
    def ahead_bytes(self) -> int | None:
        return self.format.ahead_bytes

    @property
    def kind(self) -> str:  # type: ignore[override]  # its format's
        return self.format.kind

    @property
    def reread(self) -> str:
        return self.format.reread

    @property
    def listed_files(self) -> tuple[FoundObject, ...]:
        return self.files

    @property
    def local_files(self) -> tuple[FoundObject, ...]:
        return tuple(found for found in self.files if "://" not in found.path and found.path not in self.gone)

    @property
    def same_columns(self) -> bool:
        return self.format.same_columns

    @property
    def cache_dir(self) -> str | None:
        return None if self.access.cache_dir is None else os.fspath(self.access.cache_dir)

    def only(self, at: int) -> Files[T]:
        return replace(self, found=(self.files[at],))

    def for_check(self, deadline_s: float) -> Files[T]:
        return replace(self, access=self.access.without_cache(ASKING_SHARE * deadline_s))

    def look_up(self, places: Sequence[int], answers: dict[int, FoundObject | Exception], within_s: float) -> None:
        look_up({at: self.files[at].path for at in places}, self.access, answers, within_s)

    def options(self) -> dict[str, Any]:
        return self.format.options()

    def functions(self) -> dict[str, Any]:
        return self.format.functions()

    def __str__(self) -> str:
        paths = self.paths if self.found is None else [found.path for found in self.found]
        first = printable(f"{self.kind} {paths[0]!r}") if paths else self.kind
        return first if len(paths) < 2 else f"{first} and {len(paths) - 1:,} more"

    def check_split(self, mode: Mode, num_shards: int) -> None:
        if mode != "contiguous" or num_shards == 1:
            return
        if len(self.files) > 1:
            raise PlanError(
                f"contiguous mode splits one file, and there are {len(self.files)}: "
                f'write .shard({num_shards}, mode="file"), whole files for each shard'
            )
        if (refusal := self.format.not_splittable(self.files[0].path, num_shards)) is not None:
            raise refusal

    def listing(self) -> Any:
        """Return the files with their sizes in bytes and their ETags, as far as known."""
        return [found.json() for found in self.files]

    def check_states(self, split: Split, listing: Json) -> None:
        place = self.format.place_type
        for shard, own in split.own.items():
            where = f"the state of {self.name!r} in shard {shard}"
            in_turn = split.part.interleave != 1
            if in_turn:
                check_type(own, InTurn, where)
            for one in own["slots"] if in_turn else [own]:
                check_type(one, place, where)

    def resumed(self, listing: Json) -> Files[T]:
        if listings.paths_of(listing) is None:
            return self
        now = {found.path: found for found in self.files}
        found = tuple(now.get(entry["path"]) or FoundObject.of(entry) for entry in listing)
        return replace(self, found=found, gone=frozenset(one.path for one in found) - now.keys())

    def changes(self, listing: Json, now: Json, split: Split) -> list[Change]:
        gone = frozenset(listings.paths_of(listing) or ()) - {found.path for found in self.files}
        unread = split.passes or any(
            path in gone for shard, own in split.own.items() for path in self._unread(listing, split, shard, own)
        )
        return listings.changes(
            listing,
            now,
            one_split=split.part.mode == "contiguous" and split.num_shards > 1,
            unread_gone=unread,
            grows=self.format.grows,
        )

    def carry_listing(self, listing: Json, now: Json) -> Json:
        return listings.carried(listing, now)

    def reads_on(self, own: Json) -> str:
        if own is None or "slots" not in own:
            return "the beginning" if own is None else self.format.stands(own)
        slots = [self.format.stands(place) for place in own["slots"] if place["file"] is not None]
        slots += [] if own["next"] is None else [f"next {own['next']}"]
        return "; ".join(slots) or self.format.stands(self.format.begin(None))

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        parts = self._parts(site, part)
        if part.interleave > 1:
            return self._open_in_turn(parts, site, part.interleave, state)
        place = self.format.begin(parts[0].path if parts else None) if state is None else state[self.name]
        left, place = self._from(parts, place, site)
        context = self.context(site, state)
        return ListsFlow(At(self.name, dict(place)), self._lists(left, place, context), context)

    def _open_in_turn(self, parts: list[FilePart], site: Site, interleave: int, state: Tree | None) -> Flow[T]:
        own = None if state is None else state[self.name]
        turns = self._turns(parts, interleave) if own is None else self._turns_at(parts, site, own)
        context = self.context(site, state)
        by_path = {part.path: part for part in parts}
        lists = in_turn(self.name, turns, lambda place: self._lists([by_path[place["file"]]], place, context))
        return ListsFlow(At(self.name, turns.json() if own is None else own), lists, context)

    def _turns(self, parts: list[FilePart], interleave: int) -> ShardPlace:
        places = [self.format.begin(part.path) for part in parts if part.path not in self.gone]
        return ShardPlace(tuple(places[:interleave]), tuple(places[interleave:]))

    def _turns_at(self, parts: list[FilePart], site: Site, own: Json) -> ShardPlace:
        """Return the place of a shard at a state; a slot whose file is gone has a place in no file."""
        slots: list[Place] = []
        for place in own["slots"]:
            _, found = self._from(parts, place, site)
            slots.append(found if found["file"] == place["file"] else self.format.begin(None))
        following = self.format.begin(own["next"])
        waiting, _ = self._from(parts, following, site)
        return ShardPlace(tuple(slots), tuple(self.format.begin(part.path) for part in waiting))

    def _lists(self, parts: list[FilePart], place: Place, context: StageContext) -> Lists[T]:
        fetcher = Fetcher(self.name, context.site, self.access, parts, sequential=self.format.sequential)
        return self.format.lists(fetcher, parts, place, self.name, context)

    def _unread(self, listing: Json, split: Split, shard: int, own: Json) -> list[str]:
        """Return the files that a shard has not read to their end."""
        shares = self.resumed(listing)._shares(split.part, shard, split.num_shards, (split.epoch,))
        files = [found.path for found in shares]
        if own is None:
            return files
        places = [place["file"] for place in own["slots"]] if "slots" in own else []
        first = own["next"] if "slots" in own else own["file"]
        left = [] if first is None else files[files.index(first) :] if first in files else files
        return [path for path in places if path is not None] + left

    def _shares(self, part: Part, shard: int, num_shards: int, epoch: tuple[int, ...]) -> list[FoundObject]:
        """Return the files of which a shard reads all or a part, in order, with those that are gone."""
        files = self.files
        mine = files_of(len(files), num_shards, shard) if part.mode == "file" else range(len(files))
        if part.shuffle_seed is None or len(files) < 2:
            return [files[index] for index in mine]
        order = Bijection(len(files), (part.shuffle_seed, *epoch))(np.asarray(mine))
        return [files[index] for index in order.tolist()]

    def _parts(self, site: Site, part: Part) -> list[FilePart]:
        """Return what shard `site.shard` reads, in order, with files that are gone."""
        if part.drop_remainder:
            raise PlanError(f"{self.kind} can't drop a remainder: how many items there are is known when they are read")
        files = self._shares(part, site.shard, site.num_shards, site.epoch)
        if part.mode == "contiguous" and site.num_shards > 1:
            self.check_split(part.mode, site.num_shards)
            return [FilePart(files[0], site.shard, site.num_shards)]
        return [FilePart(found) for found in files]

    def _from(self, parts: list[FilePart], place: Place, site: Site) -> tuple[list[FilePart], Place]:
        """Return the parts from the one on that `place` is in, without those that are gone, and where to begin."""
        if place["file"] is None:
            return [], place
        for index, part in enumerate(parts):
            if part.path == place["file"]:
                left = [part for part in parts[index:] if part.path not in self.gone]
                if part.path in self.gone:
                    place = self.format.begin(left[0].path if left else None)
                return left, place
        raise ResumeError(
            f"the snapshot stands in {self.format.stands(place)}, which is not among the {len(parts)} files of "
            f"shard {site.shard} of {site.num_shards}: was it renamed or removed, or have files been added?"
        )
