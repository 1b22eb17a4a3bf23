"""What a source is: a stage without upstream, opened shard by shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from streamline.flow import Flow, Site
from streamline.index import Index
from streamline.states import Tree

__all__ = ["Mode", "Part", "Source"]

T = TypeVar("T")

Mode = Literal["interleaved", "contiguous", "file", "replicated"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a source one worker reads; what was written before `.shard` is in it.

    Attributes:
      mode: how the source is split, one of those it names in `modes`.
      index: of an indexable source, behind `.shuffle`, `.take`, `.skip` and `.repeat`.
      shuffle_seed: of `.shuffle_files`; None: files stay in the order of the listing.
      drop_remainder: leave out what would make some shards longer than others.
    """

    mode: Mode
    index: Index | None = None
    shuffle_seed: int | None = None
    drop_remainder: bool = False


@dataclass(frozen=True, kw_only=True)
class Source(ABC, Generic[T]):
    """Where items come from.

    Attributes:
      name: its part of a state is kept under it.
    """

    name: str

    modes: ClassVar[tuple[Mode, ...]]
    """How this kind of source can be split; without a `mode=`, `default_mode` says how it is."""

    indexable: ClassVar[bool] = False
    """Whether `.shuffle`, `.take`, `.skip` and `.repeat` before `.shard` act on its index."""

    listed: ClassVar[bool] = False
    """Whether it reads a list of files, which `.shuffle_files` permutes."""

    @abstractmethod
    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        """Return the flow of shard `site.shard`. No I/O: the first pull does it."""

    @property
    def default_mode(self) -> Mode:
        """How the source is split when nobody says."""
        return self.modes[0]

    @property
    def waits(self) -> bool:
        """Whether it does I/O: then a channel stands behind it, so that it reads ahead."""
        return False

    @property
    def length(self) -> int | None:
        """Items in all, where that is known without reading."""
        return None

    def resolved(self) -> Source[T]:
        """Return this source with what it reads found out: globs expanded, files looked up. May do (sync) I/O.

        Raises:
          ReadError: something is missing.
        """
        return self

    def listing(self) -> Any:
        """Return what is read, as JSON, to be bound into snapshots: paths and sizes, or a length. May look at files."""
        return {"length": self.length}

    @property
    def kind(self) -> str:
        """The function that made it: "from_items"."""
        return self.name

    def __str__(self) -> str:
        return self.kind if self.length is None else f"{self.kind} ({self.length:,} items)"

    def options(self) -> dict[str, Any]:
        """Return the options that change which items come, as JSON, for the fingerprint."""
        return {}
