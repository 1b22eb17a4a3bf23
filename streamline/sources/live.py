"""`from_stream` as written in a plan: an async iterable that can't be read again.

One reader serves all workers of a rank (`streamline.sources.live_reader`); a journal keeps each item until the consumer
has passed it (`streamline.sources.journal`). A worker is opened on its queue, a `FedSource`.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from streamline.core.channel import Inbox
from streamline.core.flow import Flow, Site
from streamline.core.item_codec import Codec, EncodedItem
from streamline.core.meters import Traffic
from streamline.core.options import check_function, check_int, is_async
from streamline.core.state import Json, Tree
from streamline.core.state_types import Count
from streamline.errors import PlanError, PlanTypeError
from streamline.sources.base import Mode, Part, Source
from streamline.sources.single_use import check_not_over


@dataclass(frozen=True, kw_only=True, eq=False)
class FedSource(Source[Any]):
    """One worker's queue."""

    kind: ClassVar[str] = "from_stream"
    modes: ClassVar[tuple[Mode, ...]] = ("shared",)

    inbox: Inbox[Any]

    def listing(self) -> None:
        """A feed has no length and no files."""

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[Any]:
        return self.inbox


T = TypeVar("T")

MAX_AHEAD = 65_536
"""Items that may wait for a worker while another one starves, so a worker may drop so many in a row. Small items take
some 100 bytes each, so those of 16 workers some 100 MB."""

MAX_AHEAD_BYTES = 256 * 2**20
"""Bytes that may wait for all workers of a rank; large items reach this long before `MAX_AHEAD`."""


class MarkedStream(ABC, Generic[T]):
    """A stream whose server can go on after an item's *mark*. Frozen, pickles, does no I/O.

    The journal keeps the mark of the last item read; a resume begins after it.

    Attributes:
      kind: the public function that makes it: "stream_http".
    """

    kind: ClassVar[str]

    @abstractmethod
    def after(self, mark: Json, traffic: Traffic) -> AsyncIterator[T]:
        """Return the items after the one of `mark`; None: from where the server begins. `traffic` counts requests."""

    @abstractmethod
    def mark(self, item: T) -> Json:
        """Return what makes the server go on after an item; None: nothing."""

    def prepare(self) -> None:
        """Import slow modules before the event loop runs."""

    def options(self) -> dict[str, Any]:
        """Return the options that change which items come, as JSON, for the fingerprint."""
        return {}


class CountedStream(ABC, Generic[T]):
    """A stream that a resume begins after the number of items read since the feed began."""

    @abstractmethod
    def after(self, read: int) -> AsyncIterator[T]:
        """Return the items after the first `read`."""


@dataclass(frozen=True, kw_only=True)
class Live(Source[T]):
    """Items as they arrive. State of a worker: items consumed of those that it was fed.

    Attributes:
      stream: an async iterable, a function that returns one, a `MarkedStream` or a `CountedStream`.
      max_ahead: items that may wait for one worker while another one starves.
      max_ahead_bytes: bytes that may wait for all workers of a rank; every worker may have one item.
      partitioned: each rank has a feed of its own.
      journal: a directory; None: what was read is kept in memory.
      taken: not empty once an opening has read `stream`, an iterator, which can be read once.
    """

    modes: ClassVar[tuple[Mode, ...]] = ("shared",)
    state_type: ClassVar[Any] = Count
    is_live: ClassVar[bool] = True

    stream: Callable[[], AsyncIterable[T]] | AsyncIterable[T] | MarkedStream[T] | CountedStream[T]
    codec: Codec = field(default_factory=Codec)
    max_ahead: int = MAX_AHEAD
    max_ahead_bytes: int = MAX_AHEAD_BYTES
    partitioned: bool = False
    journal: str | None = None
    taken: list[bool] = field(default_factory=list, compare=False, repr=False)

    @property
    def kind(self) -> str:  # type: ignore[override]  # its stream's
        return self.stream.kind if isinstance(self.stream, MarkedStream) else "from_stream"

    def __str__(self) -> str:
        return str(self.stream) if isinstance(self.stream, MarkedStream) else self.kind

    @property
    def survives_kill(self) -> bool:
        return self.journal is not None

    def resolved(self, traffic: Traffic | None = None) -> Live[T]:
        """Return this source; imports what its stream needs, rather than in the event loop."""
        if isinstance(self.stream, MarkedStream):
            self.stream.prepare()
        return self

    @property
    def reread(self) -> str:
        return "is fed from the journal first"

    def reads_on(self, own: Json) -> str:
        return f"item {own or 0:,} of those that it is handed, the journal's first"

    def listing(self) -> None:
        """A feed has no length and no files."""

    def options(self) -> dict[str, Any]:
        own = self.stream.options() if isinstance(self.stream, MarkedStream) else {}
        return {"partitioned": self.partitioned, "encode": self.codec.encode, "decode": self.codec.decode, **own}

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[T]:
        """Raise: one reader for all workers distributes the items."""
        raise TypeError("a live source is read by its feed; workers are opened on the feed's source")

    @property
    def most_ahead(self) -> int:
        return self.max_ahead

    def how_read(self, num_shards: int) -> str:
        kept = "in memory" if self.journal is None else f"in {self.journal}"
        whom = f"handed out to {num_shards:,} workers in turn" if num_shards > 1 else "for one worker"
        return f": read once by one reader, {whom}; journalled {kept}"

    def check_run(self, epoch: int, world_size: int) -> None:
        self.check_unread()
        if epoch:
            raise PlanError(
                f"a live source has one epoch, 0, and no epoch {epoch}: a feed is read once, and its end is the "
                "end. Leave epoch= out; epochs of a feed that goes on are .loader(steps_per_epoch=n)"
            )
        if world_size > 1 and not self.partitioned:
            raise PlanError(
                f"each of the {world_size} ranks would read the same feed, and be handed the same items: give each "
                f"rank a feed of its own and say {self.kind}(partitioned=True), or open(rank=0, world_size=1) if that "
                "is meant"
            )

    def directory(self, site: Site) -> Path | None:
        """Return where the journal of a rank is kept."""
        if self.journal is None:
            return None
        return Path(self.journal, f"rank-{site.shard:05d}-of-{site.num_shards:05d}" if self.partitioned else "")

    def check_unread(self) -> None:
        if self.taken:
            raise PlanError(
                f"from_stream was given an iterator ({type(self.stream).__name__}), which an earlier opening of this "
                "pipeline has read: give it a function that makes a new one: from_stream(lambda: connect())"
            )

    def mark(self, item: T) -> Json:
        """Return the mark of an item that was read, see `MarkedStream`."""
        return self.stream.mark(item) if isinstance(self.stream, MarkedStream) else None

    def mark_of(self, written: EncodedItem) -> Json:
        return self.mark(self.codec.read(written)) if isinstance(self.stream, MarkedStream) else None

    def begin(self, mark: Json, read: int, traffic: Traffic) -> AsyncIterator[T]:
        """Return the reader's iterator, after `mark` or `read` items where the stream has marks or numbers. User code.

        Raises:
          PlanTypeError: the function returned something else than an async iterable.
          PlanError: it returned an async generator that has ended.
        """
        stream: Any = self.stream
        if isinstance(stream, MarkedStream):
            return stream.after(mark, traffic)
        if isinstance(stream, CountedStream):
            return stream.after(read)
        if not isinstance(stream, AsyncIterable):
            stream = stream()
            if inspect.iscoroutine(stream):
                stream.close()
            if not isinstance(stream, AsyncIterable):
                raise PlanTypeError(f"expected from_stream's function to return {_expected_text(stream)}")
        elif isinstance(stream, AsyncIterator):
            self.check_unread()
            self.taken.append(True)
        check_not_over("from_stream", stream)
        return aiter(stream)


def live_of(
    name: str,
    stream: object,
    *,
    encode: Callable[[Any], Any] | None,
    decode: Callable[[Any], Any] | None,
    max_ahead: int,
    max_ahead_bytes: int,
    partitioned: bool,
    journal: object,
) -> Live[Any]:
    """Return the source for these options of `from_stream`, or of the function that made `stream`, once checked."""
    kind = stream.kind if isinstance(stream, MarkedStream) else "from_stream"
    if not isinstance(stream, AsyncIterable | MarkedStream | CountedStream) and (
        not callable(stream) or inspect.iscoroutinefunction(stream)
    ):
        raise PlanTypeError(f"from_stream reads {_expected_text(stream)}")
    if (encode is None) != (decode is None):
        raise PlanError("give from_stream encode= and decode= together: what one writes down, the other reads again")
    for option, fn in (("encode", encode), ("decode", decode)):
        if fn is not None:
            check_function(f"from_stream({option}=)", fn)
            if is_async(fn):
                raise PlanTypeError(f"from_stream({option}=) is a sync function: do what waits in the stream itself")
    max_ahead = check_int(f"{kind}(max_ahead=)", max_ahead, 1)
    max_ahead_bytes = check_int(f"{kind}(max_ahead_bytes=)", max_ahead_bytes, 1)
    if not isinstance(partitioned, bool):
        raise PlanTypeError(f"{kind}(partitioned=) is a bool, got {type(partitioned).__name__} {partitioned!r}")
    if journal is not None and (not isinstance(journal, str | os.PathLike) or not os.fspath(journal)):
        raise PlanTypeError(f"{kind}(journal=) is a directory, got {type(journal).__name__} {journal!r}")
    return Live(
        name=name,
        stream=stream,
        codec=Codec(encode, decode),
        max_ahead=max_ahead,
        max_ahead_bytes=max_ahead_bytes,
        partitioned=partitioned,
        journal=None if journal is None else str(os.fspath(journal)),
    )


def _expected_text(found: object) -> str:
    got = f"an async iterable, or a function that returns one, got {type(found).__name__}"
    if inspect.iscoroutine(found) or inspect.iscoroutinefunction(found):
        return f"{got} (async): write an async generator that awaits it: async for x in await connect(): yield x"
    return (
        f"{got}: what can be read again is for from_iterable or from_items; a sync iterator that waits would hold the "
        "event loop, so wrap it in an async generator that calls anyio.to_thread.run_sync(next, iterator)"
    )
