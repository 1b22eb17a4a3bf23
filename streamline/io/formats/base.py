"""What a format is: it turns a file's bytes into items, from any of its positions on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from streamline.core.flow import Lists, StageContext
from streamline.core.state import At, Json, State, States
from streamline.core.state_types import Count
from streamline.errors import PlanError
from streamline.io.formats.compression import compression_of_name, not_splittable

if TYPE_CHECKING:
    from streamline.io.fetch.fetcher import Fetcher
    from streamline.io.fetch.file import File, FilePart

T = TypeVar("T")

AHEAD_BYTES = 16 * 2**20
"""Large items that wait for the next stage: more of them would only leave the cache; one is always admitted."""

InThread: TypeAlias = Callable[[Callable[[], T]], Awaitable[T]]
"""Runs what does I/O, or takes long."""

Place: TypeAlias = "dict[str, Json]"
"""Where a reader stands: {"file": path, ...}; what else is in it is the format's. A file of None: nothing is left."""


@dataclass(frozen=True, kw_only=True)
class Format(ABC, Generic[T]):
    """Makes items out of one file at a time. Frozen, pickles, does no I/O of its own.

    Attributes:
      kind: the public function: "read_lines".
      reread: what a resume does to get back to its place, for a printed plan.
      same_columns: whether the records of all files must have the same keys.
      sequential: whether a file is read from its place on as one stream, so that the next files can be fetched ahead.
      counts: what a place has besides its file: all 0 before a file's first item.
      splits: whether shards can share a file that isn't compressed.
    """

    kind: ClassVar[str]
    reread: ClassVar[str]
    same_columns: ClassVar[bool] = False
    sequential: ClassVar[bool] = True
    counts: ClassVar[tuple[str, ...]] = ()
    splits: ClassVar[bool] = False

    @property
    def ahead_bytes(self) -> int | None:
        """Bytes that items may hold while they wait for the next stage, where items may be large; None: not counted."""
        return None

    def begin(self, path: str | None) -> Place:
        """Return the place before the first item of a file; of None: nothing is left."""
        return {"file": path, **dict.fromkeys(self.counts, 0)}

    async def lists(
        self, fetcher: Fetcher, parts: Sequence[FilePart], place: Place, name: str, context: StageContext
    ) -> Lists[T]:
        """Yield the items of files, one file after the other, from `place` in the first on. As `chunks`."""
        async with fetcher:
            for index in range(len(parts)):
                begin = self.begin(parts[index].path) if index else place
                after = self.begin(parts[index + 1].path if index + 1 < len(parts) else None)
                async with aclosing(self.chunks(fetcher.file(index), begin, after, name, context)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    @abstractmethod
    def chunks(self, file: File, begin: Place, after: Place, name: str, context: StageContext) -> Lists[T]:
        """Yield the items of a file, or of the shard's part of it, from `begin` on, each with the state after it.

        Args:
          file: what is read; `file.part` says whether it is shared.
          begin: a place in it.
          after: the place after the file: that of its last item, wherever it is known to be the last.
          name: of the source; states are kept under it.
          context: decides what is done about a record that can't be decoded.

        Raises:
          DataError: a record that can't be decoded, unless it is to be left out; what is before it has been yielded.
          ReadError: the file can't be read.
        """

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        """Return why a file can't be shared by several shards, as far as its name says; None: it can."""
        if self.splits:
            kind = compression_of_name(path)
            return None if kind is None else not_splittable(path, num_shards, kind)
        return PlanError(
            f"{path} can't be split into {num_shards} shards ({self.kind}): split it into several files, or write "
            f'.shard({num_shards}, mode="replicated"): each shard reads all of it'
        )

    @property
    def place_type(self) -> Any:
        """What a place is in a saved state, as `msgspec.convert` takes it: its file, and counts."""
        return msgspec.defstruct("Place", [("file", str | None), *((key, Count) for key in self.counts)])

    def grows(self, path: str) -> bool:
        """Whether a file that has grown since a snapshot can be read on from its place."""
        return False

    def options(self) -> dict[str, Any]:
        """Return the options that change which items come, as JSON, for the fingerprint."""
        return {}

    def functions(self) -> dict[str, Any]:
        """Return the user's functions among the options, by argument."""
        return {}

    def stands(self, place: Place) -> str:
        """Return where a place is, and what it takes to get there, for messages."""
        if place["file"] is None:
            return "nothing is left"
        return ", ".join([place["file"], *(f"{key} {value:,}" for key, value in place.items() if key != "file")])


@dataclass(slots=True, eq=False)
class IndexedStates:
    """A column of states: after item i of a list, `place` with each key of `columns` set to its value i.

    Attributes:
      last: the place after the last item, where that is another one: the next group's, the next file's.
    """

    name: str
    place: Place
    columns: Mapping[str, Sequence[Json]]
    last: Place | None = None

    def __getitem__(self, index: int, /) -> State:
        place = self.place | {key: values[index] for key, values in self.columns.items()}
        return At(self.name, place if self.last is None or index != self._count - 1 else self.last, place)

    def trimmed(self, first: int, count: int) -> States:
        last = self.last if first + count == self._count else None
        columns = {key: values[first : first + count] for key, values in self.columns.items()}
        return IndexedStates(self.name, self.place, columns, last)

    @property
    def _count(self) -> int:
        return len(next(iter(self.columns.values())))
