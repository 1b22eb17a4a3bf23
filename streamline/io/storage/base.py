"""What a storage is: the interface between formats and what holds the files. List, look at, stream, read a range."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, TypeAlias, TypeVar

import anyio

from streamline.errors import ReadError, WriteError

MODIFIED = "Last-Modified: "
"""How `FoundObject.etag` begins where it is a date: an ETag begins with a quote."""


@dataclass(frozen=True, slots=True)
class FoundObject:
    """What is known of an object, from a listing or an answer.

    Attributes:
      path: local path or URL, as it is opened, and as states name it.
      size: in bytes; None: unknown.
      etag: tells one version from another: an ETag, or `MODIFIED` and a date, where a server tells only that;
        None: unknown, or there is none (local files).
      ranged: whether its server is known to send parts of it; not saved.
    """

    path: str
    size: int | None = None
    etag: str | None = None
    ranged: bool = field(default=False, compare=False)

    def json(self) -> dict[str, Any]:
        """Return this as an entry of a snapshot's listing."""
        entry: dict[str, Any] = {"path": self.path, "size": self.size}
        return entry if self.etag is None else {**entry, "etag": self.etag}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> FoundObject:
        """Return what an entry of a listing says."""
        return cls(entry["path"], entry.get("size"), entry.get("etag"))


Version: TypeAlias = "dict[str, str]"
"""What a store tells the versions of an object by."""


class Arrival(Protocol):
    """What a storage with a `fetch` hands bytes to: one request's answer tells what the object is, before they come.

    Attributes:
      stop: the offset at which they end; None: that is not known yet, or at the object's end.
    """

    stop: int | None

    def begins(self, found: FoundObject, end: int | None, ranged: bool) -> bool:
        """Take what the answer says: of the object, where its bytes end (None: unknown), and whether others follow.

        Returns:
          Whether its bytes are wanted.
        """

    def put(self, block: bytes) -> bool:
        """Take the next bytes; return whether more are wanted."""


class ShardFile(Protocol):
    """A shard that is being written, `size` bytes so far; it has no name yet."""

    size: int

    def write(self, content: bytes | memoryview, /) -> None:
        """Append bytes."""

    def write_start(self, content: bytes, /) -> None:
        """Write over the first bytes, which are there already."""

    def discard(self) -> None:
        """Remove it. Idempotent."""


class Storage(Protocol):
    """Objects by path. Shared by the flows of one event loop that read with the same `Access`.

    One of your own extends this, overrides `stat` and `blocks` (and `list`, for globs), and is registered by
    `@streamline.io.storage.registry.storage("scheme")`.

    A storage of objects whose sizes are not listed may have a `fetch(path, start, stop, etag, arrival)`, which learns
    of an object from the answer to its first request; without it, `stat` is asked before.
    """

    async def list(self, pattern: str) -> list[FoundObject]:
        """Return the objects that a glob matches, sorted by path; none is no error here.

        Raises:
          ReadError: it can't be listed: credentials, no such bucket, a scheme without listings.
        """
        raise ReadError(f"there are no listings of {pattern.partition('://')[0]}://: give a list of paths, or braces")

    def note(self, found: FoundObject) -> None:
        """Learn what a listing says of an object that is about to be read: of another size, it is refused."""
        return

    async def stat(self, path: str) -> FoundObject:
        """Return what is known of an object.

        Raises:
          ReadError: as for `blocks`.
        """

    def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start` to `stop` (None: the end) in blocks of bounded size, none of them empty, as they come.

        Args:
          etag: of the version that is wanted; None: any, but one from start to end.

        Raises:
          ReadError: the object can't be read, is another version than wanted, changed on the way, or has no byte
            `start`. Being cut short is never an end.
        """

    async def read(self, path: str, start: int, stop: int | None, etag: str | None = None) -> bytes:
        """Return bytes `start` to `stop` (None: the end) as one piece: what `blocks` would yield, joined.

        Raises:
          ReadError: as for `blocks`; fewer bytes than `stop - start` are there.
        """
        async with aclosing(self.blocks(path, start, stop, etag)) as blocks:
            return join_blocks(path, [block async for block in blocks], start, stop)

    async def upload(self, path: str, file: IO[bytes], size: int) -> None:
        """Write an object of `size` bytes out of a file, whole or not at all; one of that name is replaced.

        Raises:
          WriteError: it can't be written; after a failure on the way, it may have been.
        """
        raise _read_only(path)

    async def replace(self, path: str, content: bytes, version: Version | None) -> Version:
        """Write an object whole or not at all, if what is there is of this version (None: nothing is).

        Returns:
          Its new version.

        Raises:
          WriteError: another version is there; or it can't be written.
        """
        raise _read_only(path)

    async def look(self, path: str) -> tuple[bytes, Version] | None:
        """Return an object to be replaced, and its version; None: there is none.

        Raises:
          WriteError: it can't be read.
        """
        raise _read_only(path)

    async def remove(self, path: str) -> None:
        """Remove an object, if it is there.

        Raises:
          WriteError: it can't be removed.
        """
        raise _read_only(path)

    async def aclose(self) -> None:
        """Close what is open. Idempotent."""


ADDED: dict[str, Callable[[Any], Storage]] = {}
"""What makes the storages that users have registered, by their schemes. Called with the source's `Access`."""


def _read_only(path: str) -> WriteError:
    return WriteError(f"{path.partition('://')[0]}:// can't be written to: give a local folder, s3://, gs:// or az://")


def join_blocks(path: str, blocks: Sequence[bytes], start: int, stop: int | None) -> bytes:
    data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
    if stop is not None and len(data) != stop - start:
        raise ReadError(f"{path} ends at byte {start + len(data):,}, expected {stop:,}: has it been replaced?")
    return data


def too_short(what: str, size: object, start: int) -> ReadError:
    """Return the error for an object that has no byte `start`; `what` it is, as messages show it."""
    has = "an unknown number of" if size is None else f"{size:,}"
    return ReadError(f"{what} has {has} bytes, expected more than {start:,}: has it been replaced?")


def check_listed(what: str, listed: int | None, size: int | None) -> None:
    """Refuse an object whose size isn't the one that was listed; None: not known. `what` it is, as `too_short`."""
    if listed is not None and size is not None and listed != size:
        raise ReadError(
            f"{what} changed since it was listed: it had {listed:,} bytes and has {size:,}; begin anew, or read a copy"
        )


R = TypeVar("R")

IN_FLIGHT = 64
"""Questions in flight: at 30 ms each, a thousand take half a second."""


async def together(calls: Sequence[Callable[[], Awaitable[R]]]) -> list[R]:
    """Return what each call returns, in order; at most `IN_FLIGHT` run at a time, and a failure cancels the others."""
    found: dict[int, R] = {}
    failures: list[Exception] = []
    waiting = iter(enumerate(calls))

    async def work() -> None:
        for at, call in waiting:
            try:
                found[at] = await call()
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()
                return

    async with anyio.create_task_group() as group:
        for _ in range(min(IN_FLIGHT, len(calls))):
            group.start_soon(work)
    if failures:
        raise failures[0]
    return [found[at] for at in range(len(calls))]
