"""http(s) URLs, streamed; a dropped connection resumes at its byte.

After a drop, a stall or an answer of a busy server, the bytes from there on are requested again, of the same version
(`Range` with `If-Range`), after a pause that doubles (`retry`). Where a server ignores `Range`, all of it comes again,
and what is known is skipped. A body ends only where its length says, or its last chunk.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
from aiohttp.http_exceptions import HttpProcessingError

from streamline.core.meters import Traffic
from streamline.errors import ReadError, printable
from streamline.io.storage.base import Arrival, FoundObject, Storage, check_listed, join_blocks, too_short
from streamline.io.storage.http_client import HttpClient, more_of, transient_error
from streamline.io.storage.http_response import Answer, Version, ask, refusal, understand
from streamline.io.storage.options import HttpOptions
from streamline.io.storage.retry import Attempts, TransientError

logger = logging.getLogger("streamline.reading")  # as the docs call it

REQUEST_ERRORS = (aiohttp.ClientError, TransientError, OSError)
"""What a request may fail with; which of them may pass is `transient_error`."""

UNKNOWN_SIZE = sys.maxsize
"""The end of an object of unknown size."""

REFUSAL_BYTES = 4096
"""How much of a refusal is looked at for what it says ..."""

REFUSAL_S = 2.0
"""... and for how long."""

UNNAMED: set[str] = set()
"""Hosts for which this process has logged that they name no versions."""


class HttpStorage(Storage):
    """Reads URLs over one session, which keeps its connections for the next file."""

    def __init__(self, options: HttpOptions, traffic: Traffic | None = None) -> None:
        self._options = options
        self._traffic = traffic or Traffic()
        self._client = HttpClient(options, self._traffic)
        self._listed: dict[str, int | None] = {}

    def note(self, found: FoundObject) -> None:
        self._listed[found.path] = found.size

    async def stat(self, url: str) -> FoundObject:
        """Return an object's size and ETag, where the server says them.

        Asks for its first byte, which signed URLs allow where HEAD is refused.
        """
        attempts = self._attempts(url)
        one = _Try(0, attempts)
        while True:
            async with one:
                one.response, answer = await self._request(url, 0, 1, None, attempts)
                return FoundObject(url, answer.version.total, answer.version.tag, ranged=not answer.whole)

    async def blocks(
        self, url: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        attempts, listed = self._attempts(url), self._listed.get(url)
        one, known = _Try(start, attempts), Version.of(etag, listed)
        while stop is None or one.position < stop:
            async with one:
                one.response, answer = await self._request(url, one.position, stop, known, attempts)
                if answer.stop == one.position:
                    return
                end = UNKNOWN_SIZE if stop is None else stop
                body = _Body(one.response, answer, one.position, end, attempts, self._options.timeout_s, listed)
                while block := await body.next():
                    one.position += len(block)
                    known = known if known is not None and known.tag else answer.version
                    attempts.progress()
                    yield block
                    attempts.wanted()
                if answer.whole or one.position == answer.version.total:
                    return

    async def read(self, url: str, start: int, stop: int | None, etag: str | None = None) -> bytes:
        async with aclosing(self.blocks(url, start, stop, etag)) as blocks:
            return join_blocks(printable(url), [block async for block in blocks], start, stop)

    async def fetch(self, url: str, start: int, stop: int, etag: str | None, arrival: Arrival) -> None:
        """Pass bytes `start` to `stop` of an object to `arrival` as they come.

        Raises:
          ReadError: as for `blocks`; what came before was passed to `arrival`.
        """
        attempts, listed = self._attempts(url), self._listed.get(url)
        one, end = _Try(start, attempts), stop if arrival.stop is None else arrival.stop
        known = Version.of(etag, listed)
        while one.position < end:
            async with one:
                one.response, answer = await self._request(url, one.position, end, known, attempts)
                version = answer.version
                if one.position == start:
                    found = FoundObject(url, version.total, version.tag)
                    if not arrival.begins(found, answer.stop, not answer.whole):
                        return
                    end = UNKNOWN_SIZE if arrival.stop is None else arrival.stop
                    known = known if known is not None and known.tag else version
                body = _Body(one.response, answer, one.position, end, attempts, self._options.timeout_s, listed)
                while one.position < end and (block := await body.next()):
                    one.position += len(block)
                    attempts.forgive()
                    if not arrival.put(block):
                        return
                if answer.whole or one.position == version.total:
                    return

    async def aclose(self) -> None:
        await self._client.aclose()

    def _attempts(self, url: str) -> Attempts:
        return Attempts(printable(url), self._options.retries, self._options.deadline_s, self._traffic)

    async def _request(
        self, url: str, position: int, stop: int | None, known: Version | None, attempts: Attempts
    ) -> tuple[aiohttp.ClientResponse, Answer]:
        response = await self._client.get(url, ask(position, stop, known), within_s=attempts.left_s)
        status = response.status
        try:
            if 400 <= status < 500 and status not in (408, 416, 429):
                raise refusal(attempts.what, status, await _content(response))
            strict = self._options.require_validator
            answer = understand(attempts.what, status, response.headers, position, known, strict)
            if status != 416 and answer.version.tag is None:
                _note_unnamed(response.url.authority, attempts.what)
            return response, answer
        except BaseException:
            response.close()
            raise


def _note_unnamed(host: str, url: str) -> None:
    """Say, once for each host, that an object can be replaced in silence."""
    if host not in UNNAMED:
        UNNAMED.add(host)
        logger.warning(
            "%s: the server tells neither an ETag nor a Last-Modified that is a second old: if an object of %s is "
            "replaced by one of the same length, while it is read or before a resume, old and new data are mixed "
            "unnoticed. HttpOptions(require_validator=True) refuses such objects",
            url,
            host,
        )


async def _content(response: aiohttp.ClientResponse) -> str:
    """Return how the content of a refusal begins, if it comes at once."""
    content = b""
    with anyio.move_on_after(REFUSAL_S):
        try:
            content = await response.content.read(REFUSAL_BYTES)
        except REQUEST_ERRORS as error:
            return f"its content was cut short: {error}"
    return content.decode(errors="replace")


@dataclass(slots=True)
class _Try:
    """The tries of one request, each in an `async with`: closes the answer, and waits after a failure that may pass.

    Attributes:
      position: of the next byte.
      response: the answer, as soon as there is one.
    """

    position: int
    attempts: Attempts
    response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        response, self.response = self.response, None
        if response is not None and not response.closed:  # one that was read to its end has given its connection back
            response.close()
        if not isinstance(error, REQUEST_ERRORS):
            return False
        await self.attempts.back_off(transient_error(self.attempts.what, error), self.position, error)
        return True


@dataclass(slots=True)
class _Body:
    """What an answer brings of bytes `position` to `stop`."""

    response: aiohttp.ClientResponse
    answer: Answer
    position: int
    stop: int
    attempts: Attempts
    timeout_s: float
    listed: int | None
    _at: int = 0
    _protocol: Any = None

    def __post_init__(self) -> None:
        self._at = self.answer.first
        self._protocol = None if self.response.connection is None else self.response.connection.protocol

    async def next(self) -> bytes:
        """Return the next block; an empty one at the end.

        Raises:
          TransientError: the body broke off, or stalled.
          ReadError: it is longer than the server said, or the object shorter than expected; it came too slowly.
        """
        begin = self._at
        while begin < self.stop and (data := await self._more()):
            self._at += len(data)
            self.attempts.arrived(len(data))
            if self.position <= begin and self._at <= self.stop:
                return data
            if block := data[max(0, self.position - begin) : max(0, self.stop - begin)]:
                return block
            begin = self._at
        if begin < self.stop:
            self._check_end()
        return b""

    async def _more(self) -> bytes:
        try:
            return await more_of(self.response.content, min(self.timeout_s, self.attempts.left_s))
        except TimeoutError:
            self.attempts.arrived(0)
            raise TransientError(f"the server stalled: nothing came for timeout_s={self.timeout_s:g} s") from None

    def _check_end(self) -> None:
        at, stop = self._at, self.answer.stop
        if self._protocol is not None and isinstance(self._protocol.exception(), HttpProcessingError):
            raise ReadError(  # what followed is no answer
                f"{self.response.url}: expected the end at byte {at:,}, as the server said, got more"
            )
        if stop is not None and at != stop:
            raise TransientError(f"the body ended at byte {at:,}, expected {stop:,} as the server said")
        if self.answer.whole:
            check_listed(self.attempts.what, self.listed, at)
        if at < self.position:
            raise too_short(str(self.response.url), at, self.position)
