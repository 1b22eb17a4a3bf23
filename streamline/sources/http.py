"""http(s) URLs, streamed; a dropped connection resumes at its byte.

Success: the body comes in one answer. A drop, a stall or a busy server: asked again for the bytes from where it broke,
of the same version (`Range` with `If-Range`), after a pause that doubles; attempts are counted while no byte comes. A
server that ignores `Range` sends all of it again, and what is known is skipped. The end is where the length says, or
where a chunked body says that it ends; nothing else is.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.request import getproxies, proxy_bypass

import aiohttp
import anyio
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from streamline.errors import ReadError
from streamline.sources.answers import Answer, TransientError, Version, ask, understand
from streamline.sources.http_options import HttpOptions
from streamline.sources.one_thread import OneThread

__all__ = ["HttpStorage"]

CONNECT_S = 30.0
"""Seconds for a connection to come about, if `HttpOptions.timeout_s` isn't less."""

BACKOFF_S = 0.25
"""The first pause before another attempt; each doubles it, and a random part of up to a half is taken off.

Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (there: equal jitter)."""

MAX_BACKOFF_S = 20.0

MAX_RETRY_AFTER_S = 60.0
"""The longest pause that a server may ask for: it is counted as an attempt, so more would look like hanging."""

BUFFER_BYTES = 256 * 1024
"""Where aiohttp stops the server; it holds up to twice as much."""

TRANSIENT = (
    TransientError,
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    aiohttp.ClientResponseError,
    OSError,
)
"""What another try may not find again ..."""

FINAL = (aiohttp.TooManyRedirects, aiohttp.ClientConnectorCertificateError)
"""... and which of those it would."""

ENCODED = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*")
"""A URL that needs no quoting: it is sent as it is, for a signature covers every character."""


class HttpStorage:
    """Reads URLs over one session, which keeps its connections for the next file."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._opened: aiohttp.ClientSession | None = None
        self._names = OneThread("streamline names")

    async def size(self, url: str) -> int | None:
        """Return an object's size in bytes; asks for its first byte, which signed URLs allow where HEAD is refused."""
        attempts = _Attempts(url, self._options.retries)
        while True:
            try:
                response, answer = await self._request(url, 0, 1, None)
            except (aiohttp.ClientError, TransientError, OSError) as error:
                await attempts.failed(error, 0)
            else:
                response.close()
                return answer.version.total

    async def blocks(self, url: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start` to `stop` (None: the end) of an object, as they arrive.

        Raises:
          ReadError: the server refuses, goes on failing, or has another version now than when reading began.
        """
        attempts = _Attempts(url, self._options.retries)
        position = start
        known: Version | None = None
        while stop is None or position < stop:
            response: aiohttp.ClientResponse | None = None
            try:
                response, answer = await self._request(url, position, stop, known)
                if answer.stop == position:
                    return
                async with aclosing(_body(response, answer, position, stop)) as body:
                    async for block in body:
                        position += len(block)
                        known = known or answer.version
                        attempts.progress()
                        yield block
                if answer.whole or position == answer.version.total:
                    return
            except (aiohttp.ClientError, TransientError, OSError) as error:
                await attempts.failed(error, position)
            finally:
                if response is not None:
                    response.close()

    async def aclose(self) -> None:
        """Close the session and its connections."""
        session, self._opened = self._opened, None
        with anyio.CancelScope(shield=True):
            if session is not None:
                await session.close()
        self._names.shutdown()

    async def _request(
        self, url: str, position: int, stop: int | None, known: Version | None
    ) -> tuple[aiohttp.ClientResponse, Answer]:
        target = _target(url)
        response = await self._session.get(target, headers=ask(position, stop, known), proxy=_proxy(target))
        try:
            return response, understand(url, response.status, response.headers, position, known)
        except BaseException:
            response.close()
            raise

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            silence_s = self._options.timeout_s
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=_Names(self._names)),
                timeout=aiohttp.ClientTimeout(sock_connect=min(CONNECT_S, silence_s), sock_read=silence_s),
                headers=self._options.headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=BUFFER_BYTES,
            )
        return self._opened


def _target(url: str) -> URL:
    try:
        target = URL(url, encoded=ENCODED.fullmatch(url) is not None)
        target.port  # noqa: B018 - parsed only when it is asked for
    except ValueError as error:
        raise ReadError(f"not a URL: {url}: {error}") from error
    return target


def _proxy(url: URL) -> str | None:
    """Return the proxy that the environment names for a URL.

    aiohttp's own `trust_env` asks two threads of the event loop's executor for each request, and they stay.
    """
    if url.host is None or proxy_bypass(url.host):
        return None
    return getproxies().get(url.scheme)


async def _body(
    response: aiohttp.ClientResponse, answer: Answer, position: int, stop: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield what an answer brings of bytes `position` to `stop`."""
    protocol = None if response.connection is None else response.connection.protocol
    at = answer.first
    async for data in response.content.iter_any():
        begin, at = at, at + len(data)
        if block := data[max(0, position - begin) : None if stop is None else max(0, stop - begin)]:
            yield block
        if stop is not None and at >= stop:
            return
    if protocol is not None and isinstance(protocol.exception(), HttpProcessingError):  # what came behind is no answer
        raise ReadError(f"{response.url}: expected the end at byte {at:,}, as the server had told, got more")
    if answer.stop is not None and at != answer.stop:
        raise TransientError(f"the body ended at byte {at:,}, expected {answer.stop:,} as the server had told")
    if at < position:
        raise ReadError(f"{response.url} has {at:,} bytes, expected more than {position:,}: has it been replaced?")


class _Attempts:
    """Counts attempts without progress, and waits between them."""

    def __init__(self, url: str, retries: int) -> None:
        self._url = url
        self._retries = retries
        self._failed = 0

    def progress(self) -> None:
        """Take note of a byte."""
        self._failed = 0

    async def failed(self, error: Exception, position: int) -> None:
        """Wait before the next attempt.

        Raises:
          ReadError: there is none.
        """
        if isinstance(error, ReadError):
            raise error
        if isinstance(error, FINAL) or not isinstance(error, TRANSIENT):
            raise ReadError(f"{self._url}: {_said(error)}") from error
        self._failed += 1
        if self._failed > self._retries:
            tries = "once" if self._failed == 1 else f"{self._failed} times in a row"
            raise ReadError(f"{self._url}: failed {tries} at byte {position:,}: {_said(error)}") from error
        pause_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (self._failed - 1)) * random.uniform(0.5, 1)
        asked_s = error.retry_after_s if isinstance(error, TransientError) else None
        await anyio.sleep(pause_s if asked_s is None else max(pause_s, min(asked_s, MAX_RETRY_AFTER_S)))


def _said(error: Exception) -> str:
    if isinstance(error, aiohttp.TooManyRedirects):
        return f"redirected {len(error.history)} times, the last time to {error.history[-1].url}: a loop?"
    if isinstance(error, aiohttp.SocketTimeoutError):
        return "the server stalled: nothing came for timeout_s"
    return str(error) or type(error).__name__


class _Names(AbstractResolver):
    """Looks up names in a thread that ends with the session: the event loop's own would stay."""

    def __init__(self, thread: OneThread) -> None:
        self._thread = thread

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        def look_up() -> list[ResolveResult]:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            return [_resolved(host, one[0], one[2], one[4]) for one in found]

        return await asyncio.get_running_loop().run_in_executor(self._thread, look_up)

    async def close(self) -> None:
        """Nothing is kept open."""


def _resolved(host: str, family: int, proto: int, address: tuple[object, ...]) -> ResolveResult:
    numeric, port = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)  # type: ignore[arg-type]
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=numeric, port=int(port), family=family, proto=proto, flags=flags)
