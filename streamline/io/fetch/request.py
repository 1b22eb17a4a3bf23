"""One request for the bytes of a remote file: what is asked, what has come, and what its answer means for the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable
from typing import Any, Protocol

from streamline.core.byte_budget import Account
from streamline.errors import ClosedError, ReadError, printable
from streamline.io.storage.base import FoundObject, Storage

GUESS_BYTES = 256 * 2**10
"""What an answer of unknown size is taken to hold at least, until it says so: what a connection buffers anyway."""


class Owner(Protocol):
    """The reader that a request is made for."""

    account: Account

    def is_first(self, request: Request) -> bool:
        """Whether the reader waits for this request, or will next."""

    def learn(self, request: Request, found: FoundObject, rest: bool) -> None:
        """Learn what an answer says of the object; `rest`: it ends before the object does."""

    def again(self, request: Request) -> None:
        """Make this request later: there is no room now for what it turned out to hold."""

    def streams(self, request: Request) -> None:
        """Read this object as one stream instead, at the reader's own pace."""

    def arrived(self, request: Request) -> None:
        """There is more of `request`, or it is over."""


class Request:
    """Bytes `start` to `stop` of an object.

    Attributes:
      stop: None: nothing is known of the object, so its first part is asked for.
      charge: bytes that its owner's account holds for it.
      blocks: what has come and was not taken yet.
      hidden: whether `blocks` may still be thrown away: it is unknown yet whether they are the object's only part.
      over: whether nothing more will come.
      error: why not.
    """

    __slots__ = (
        "_dropped",
        "_etag",
        "_got",
        "_part",
        "blocks",
        "charge",
        "error",
        "hidden",
        "over",
        "owner",
        "path",
        "start",
        "stop",
        "storage",
        "untold",
    )

    def __init__(
        self,
        owner: Owner,
        storage: Storage,
        found: FoundObject,
        start: int,
        stop: int | None,
        part_bytes: int,
        charge: int,
    ) -> None:
        self.owner = owner
        self.storage = storage
        self.path = found.path
        self._dropped = False
        self.start = start
        self.stop = stop
        self.untold = stop is None
        self._etag = found.etag
        self._part = part_bytes
        self._got = 0
        self.charge = charge
        self.blocks: deque[bytes] = deque()
        self.hidden = False
        self.over = False
        self.error: Exception | None = None

    async def run(self) -> None:
        """Make the request; what goes wrong, `error` says. Cancellation: it is not over."""
        self._got, self.hidden, self._dropped = 0, False, False
        try:
            if self.untold and not hasattr(self.storage, "fetch"):
                self._look(await self.storage.stat(self.path))
            if not self._dropped:
                await self._fetch()
            if not self._dropped and self.stop is not None and self._got != self.stop - self.start:
                end = self.start + self._got
                raise ReadError(
                    f"{printable(self.path)} ends at byte {end:,}, expected {self.stop:,}: has it been replaced?"
                )
        except Exception as error:
            self.fail(error)
        else:
            if not self._dropped:
                self._complete()

    def fail(self, error: Exception) -> None:
        """End with an error, after what has come."""
        self.error = error
        self._complete()

    def lost(self) -> None:
        """The task that was to make this request is gone: its reader is leaving, or the loop ends."""
        if not self.over:
            self.fail(ClosedError("the stream is closed"))

    def restart_as_stream(self) -> None:
        """Throw away what has come, and let the reader read the object by itself."""
        self._as_stream()

    def begins(self, found: FoundObject, end: int | None, ranged: bool) -> bool:
        """Take what an answer says of itself.

        Args:
          found: of the object.
          end: the offset after its last byte; None: unknown.
          ranged: whether it is what was asked for, and not the whole object.

        Returns:
          Whether its bytes are wanted.
        """
        if not self.untold:
            return True
        if end is None:
            self.hidden = True
            return not self.owner.is_first(self) or self._as_stream()
        rest = found.size is None or end < found.size
        count = end - self.start
        if (rest and found.etag is None) or (not ranged and count > self._part):
            return self._as_stream()
        if not self._charged(count):
            return False
        self.untold = False
        self.stop = end
        self.owner.learn(self, found, rest)
        return True

    def put(self, block: bytes) -> bool:
        """Take the next block; return whether more is wanted."""
        self._got += len(block)
        self.blocks.append(block)
        if not self.hidden:
            self.owner.arrived(self)
        elif self._got > self.charge and (self._got > self._part or not self._charged(2 * self._got)):
            return self._as_stream()
        return True

    async def _fetch(self) -> None:
        stop = self.start + self._part if self.stop is None else self.stop
        if (fetch := getattr(self.storage, "fetch", None)) is not None:
            made: Awaitable[Any] = fetch(self.path, self.start, stop, self._etag, self)
            await made
        elif stop > self.start:
            self.put(await self.storage.read(self.path, self.start, stop, self._etag))

    def _look(self, found: FoundObject) -> None:
        if found.size is not None and self.start > found.size:
            what, most = printable(self.path), found.size
            raise ReadError(f"{what} has {most:,} bytes, expected more than {self.start:,}: has it been replaced?")
        self._etag = self._etag or found.etag
        self.begins(found, None if found.size is None else min(found.size, self.start + self._part), True)
        if found.size is None and not self._dropped:
            self._as_stream()

    def _complete(self) -> None:
        if self.hidden or self.untold:
            self.hidden = self.untold = False
            self.owner.account.take(self._got - self.charge, True)
            self.charge = self._got
        self.over = True
        self.owner.arrived(self)

    def _charged(self, count: int) -> bool:
        account = self.owner.account
        if count <= self.charge:
            account.give(self.charge - count)
        elif not account.take(count - self.charge, self.owner.is_first(self)):
            account.give(self.charge)
            self.charge = count
            self._dropped = True
            self.blocks.clear()
            self.owner.again(self)
            return False
        self.charge = count
        return True

    def _as_stream(self) -> bool:
        self.owner.account.give(self.charge)
        self.charge = 0
        self._dropped = True
        self.blocks.clear()
        self.owner.streams(self)
        return False


def expected(found: FoundObject, start: int, stop: int | None, part_bytes: int, usual: int) -> int:
    """Return what the answer to a request is taken to hold, until it says so.

    Taken for too little, answers would come that there is no room for, and be thrown away with their connections.

    Args:
      stop: None: the object's first part is asked for.
      usual: what the last such part held.
    """
    if stop is not None:
        return stop - start
    if found.size is not None:
        return max(0, min(found.size - start, part_bytes))
    return max(GUESS_BYTES, min(usual, part_bytes))
