"""The base class of sources, which are opened shard by shard, and how a source says that its data have changed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import msgspec

from streamline.core.duplicate_check import Beginning, DuplicateCheck
from streamline.core.flow import Flow, Site, StageContext
from streamline.core.knobs import Knob
from streamline.core.meters import Traffic
from streamline.core.state import Json, Tree
from streamline.core.state_types import Count, check_type

if TYPE_CHECKING:
    from streamline.io.storage.base import FoundObject
    from streamline.sharding.index import Index

T = TypeVar("T")

Mode = Literal["interleaved", "contiguous", "file", "replicated", "custom", "shared"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a source that one worker reads, with the stages before `.shard` applied.

    Attributes:
      mode: how the source is split, one of those it names in `modes`.
      index: of an indexable source, after `.shuffle`, `.take`, `.skip` and `.repeat`.
      shuffle_seed: of `.shuffle_files`; None: files stay in the order of the listing.
      drop_remainder: leave out what would make some shards longer than others.
      interleave: files that a worker reads in turn.
    """

    mode: Mode
    index: Index | None = None
    shuffle_seed: int | None = None
    drop_remainder: bool = False
    interleave: int = 1


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a snapshot's run split the source, and how far each shard was read.

    Attributes:
      part: as every worker had it.
      own: by shard of this rank, the source's own part of the state; None: at the beginning.
      moved_by: the stage before the shard by which an item's place depends on the number of items; None: there is none.
      passes: whether a `.repeat` stands somewhere, so that some workers may be in another pass than the first.
    """

    part: Part
    num_shards: int
    epoch: int
    own: Mapping[int, Json]
    moved_by: str | None
    passes: bool


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference between the data that a snapshot lists and the data that are there now.

    Attributes:
      what: its name in `open(accept=)`, after the source's name.
      lines: the difference, a line each.
      then: what comes out if it is accepted; or why it can't be, and the way out.
      possible: whether it can be accepted.
      steady: whether items that a stage rereads are still there, unchanged.
    """

    what: str
    lines: tuple[str, ...]
    then: str
    possible: bool
    steady: bool = True


EPOCH_PASSES = 2**32
"""Passes of a repeat that an epoch's number has room for."""


def epoch_number(epoch: tuple[int, ...]) -> int:
    """Return the number of an epoch: different for each pass, and the loader's where nothing repeats.

    Of (loader epoch, pass, ...), each further pass fills 32 bits: (2,) is 2, (0, 3) is 3, (2, 3) is 2 * 2**32 + 3.
    """
    number = 0
    for part in epoch:
        number = number * EPOCH_PASSES + part
    return number


class Length(msgspec.Struct):
    """The listing of data that is identified by its length."""

    length: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Source(ABC, Generic[T]):
    """Where items come from; its part of a state is kept under `name`."""

    name: str

    kind: ClassVar[str]
    """What snapshots and printed plans call it, by the function that makes it: "from_items". Saved, so it stays when
    the class is renamed. A class that sets none is called after itself."""

    modes: ClassVar[tuple[Mode, ...]] = ("custom",)
    """How this kind of source can be split; `default_mode` is the one without `mode=`. "custom": it splits itself."""

    indexable: ClassVar[bool] = False
    """Whether `.shuffle`, `.take`, `.skip` and `.repeat` before `.shard` act on its index."""

    listed: ClassVar[bool] = False
    """Whether it reads a list of files, which `.shuffle_files` permutes."""

    changeable: ClassVar[tuple[str, ...]] = ()
    """What a `Change` of its data may be called."""

    state_type: ClassVar[Any] = Any
    """The type of its part of a worker's state, as `msgspec.convert` takes it."""

    listing_type: ClassVar[Any] = Length | None
    """Likewise, of its listing in a snapshot."""

    is_live: ClassVar[bool] = False
    """Whether it can be read once, by one reader for all workers of a rank."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in cls.__dict__:
            cls.kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def within(self, component: str) -> Self:
        """Return it with the names of all its parts, also of what it is made of, as those of a component."""
        return replace(self, name=f"{component}/{self.name}")

    def check_run(self, epoch: int, world_size: int) -> None:
        """Check that it can be read in this epoch, on so many ranks; a PlanError if not, with the way out."""

    def check_states(self, split: Split, listing: Json) -> None:
        """Check the workers' parts of a snapshot, whose `listing` is checked; a SnapshotError if one is damaged."""
        for shard, own in split.own.items():
            check_type(own, self.state_type, f"the state of {self.name!r} in shard {shard}")

    def check_listing(self, listing: Json) -> None:
        """Check a snapshot's listing against this kind of source; a SnapshotError if it is damaged."""
        check_type(listing, self.listing_type, f"what it lists of {self.name!r}")

    def check_within(self, split: Split) -> None:
        """Check that no worker's state is beyond the end, where that is known; plan and data are the snapshot's.

        Raises:
          SnapshotError: one does.
        """

    @abstractmethod
    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        """Return the flow of shard `site.shard`. No I/O: the first pull does it."""

    def first_items(self, site: Site, state: Tree | None) -> Callable[[Sequence[object]], bool] | None:
        """Return what looks for duplicates among a shard's first items, to be called with them while it returns True.

        None: this is the only shard, or not where it begins.
        """
        if state is not None or site.num_shards == 1 or any(site.epoch[1:]):
            return None
        session = site.tasks.session
        where = session.where.partition(",")[0]  # without the process's id: the words are the same in each epoch
        check = session.services.get(DuplicateCheck, session.hooks.on_chunk_boundary)
        return check.first_items(Beginning(self.name, site.shard, site.epoch, where))

    def context(self, site: Site, state: Tree | None) -> StageContext:
        """Return what the generator of this source's items is given, opened at `state`."""
        return StageContext(site, site.meter(self.name, self.kind), site.skips(self.name, self.kind, state))

    @property
    def survives_kill(self) -> bool:
        """Whether a resume finds again what was read after its snapshot, also after a kill."""
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its parts, in the order in which items pass through them."""
        return (self.name,)

    @property
    def in_flight(self) -> int:
        """Items that it may hold in each worker."""
        return 0

    @property
    def default_mode(self) -> Mode:
        return self.modes[0]

    @property
    def waits(self) -> bool:
        """Whether it does I/O: then it fills a channel, and reads ahead."""
        return False

    @property
    def ahead_bytes(self) -> int | None:
        """Bytes of items that may wait in its channel, one item at least; None: no bound."""
        return None

    @property
    def most_ahead(self) -> int | None:
        """Of a live source: items that may wait for one worker while another one starves."""
        return None

    def how_read(self, num_shards: int) -> str:
        """Say what isn't obvious of how the shards are read, for a printed plan; "" if nothing."""
        return ""

    @property
    def reread(self) -> str:
        """What a resume does to get back to its place, for a printed plan: "seeks to its byte"."""
        return ""

    @property
    def length(self) -> int | None:
        """Items in all, where that is known without reading."""
        return None

    def num_outputs(self, part: Part, shard: int, num_shards: int) -> float | None:
        """Return how many items one shard reads: a whole number, `math.inf` for no end; None: unknown yet."""
        return None

    @property
    def is_remote(self) -> bool:
        """Whether `resolved` would ask servers or stores, which may take long."""
        return False

    def resolved(self, traffic: Traffic | None = None) -> Source[T]:
        """Return this source with what it reads resolved: globs expanded, files looked up. May do sync I/O.

        Args:
          traffic: counts requests to servers and stores; None: they aren't counted.

        Raises:
          ReadError: something is missing.
        """
        return self

    async def aresolved(self, traffic: Traffic | None = None) -> Source[T]:
        """As `resolved`, without blocking asyncio's loop; for a source that `is_remote`."""
        return self.resolved(traffic)

    def check_split(self, mode: Mode, num_shards: int) -> None:
        """Check that this (resolved) source can be split into so many shards, as far as known without reading.

        Raises:
          PlanError: it can't be; with the way out.
        """

    def listing(self) -> Any:
        """Return what is read, as JSON, for snapshots: paths and sizes, or a length. May look at files."""
        return {"length": self.length}

    def __str__(self) -> str:
        return self.kind if self.length is None else f"{self.kind} ({self.length:,} items)"

    def options(self) -> dict[str, Any]:
        """Return the options that change which items come, as JSON, for the fingerprint."""
        return {}

    def functions(self) -> dict[str, Any]:
        """Return the user's functions that are in no option, by argument: their code is compared at a resume."""
        return {}

    @property
    def listed_files(self) -> Sequence[FoundObject] | None:
        """The files that it reads, in order, before any shuffle; None: it has no list of files. May look at them."""
        return None

    @property
    def local_files(self) -> Sequence[FoundObject]:
        """The local files that it reads, as the listing found them: a worker needs them under the same paths."""
        return ()

    @property
    def same_columns(self) -> bool:
        """Whether the records of all files must have the same keys."""
        return False

    @property
    def cache_dir(self) -> str | None:
        """The folder of this machine in which it keeps what it reads; None: there is none."""
        return None

    def only(self, at: int) -> Source[T]:
        """Return a source that reads one of its `listed_files` and no other."""
        raise TypeError(f"{self.kind} has no list of files")

    def for_check(self, deadline_s: float) -> Source[T]:
        """Return this source as `Pipeline.check` reads it: nothing is written, and requests give up by the deadline."""
        return self

    def look_up(self, places: Sequence[int], answers: dict[int, FoundObject | Exception], within_s: float) -> None:
        """Ask for the sizes of some of its `listed_files`; put each answer, or failure, under the file's place.

        Blocks until all have answered, or for `within_s`.
        """

    def drawn(self) -> Json:
        """Return what else determines the items of a pass, as JSON, but may change before a resume."""
        return None

    def map_plans(self, bind: Callable[[Any], Any]) -> Source[T]:
        """Return this (resolved) source with `bind` done to the plans that it is made of."""
        return self

    @property
    def knob(self) -> Knob | None:
        """What of it a tuner may turn while it runs, as of a stage. None: nothing."""
        return None

    @property
    def made_of(self) -> Sequence[tuple[str, str, Any]]:
        """Return what a source of several is made of, for a printed plan: name, a note ("weight 3, "), plan."""
        return ()

    def resumed(self, listing: Json) -> Source[T]:
        """Return this (resolved) source as it goes on with the data that a snapshot lists."""
        return self

    def changes(self, listing: Json, now: Json, split: Split) -> list[Change]:
        """Return how the data of today's listing differ from those that a snapshot lists."""
        if listing == now:
            return []
        then = "a state says nothing about other data: begin anew, without resume="
        return [Change(what="data", lines=(f"it had {listing}, now there is {now}",), then=then, possible=False)]

    def carry_listing(self, listing: Json, now: Json) -> Json:
        """Return the listing for snapshots of a run that resumed with the data of `listing`; `now` is today's."""
        return now

    def migrate_state(self, own: Json, listing: Json, now: Json) -> Json:
        """Return its part of a state, of a run over the data of `listing`, for a run over today's, `now`."""
        return own

    def reads_on(self, own: Json) -> str:
        """Say where a worker reads on, and what it takes to get there, for a person."""
        return "the beginning" if own is None else f"{own}"
