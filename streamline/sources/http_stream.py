"""A live source that is an endless HTTP response, as written in a plan, and its reader, connection after connection.

Bytes are read only when an item is asked for; the rest stays in the socket, and TCP slows the server down. After any
end of a response it connects again, after a pause that doubles while nothing comes; only a 204 to a request for events
ends the stream, as their standard says. An item that is cut off is dropped. A request that the server refuses (401,
404, ...) fails at once; transient failures are retried: until the server has answered once, as often as for a file, so
that a wrong URL fails in seconds; then for `give_up_s`.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from streamline.core.item_codec import Codec
from streamline.core.meters import Traffic
from streamline.core.options import check_int, check_seconds, type_and_repr
from streamline.core.pace import Pace
from streamline.core.state import Json
from streamline.errors import DataError, PlanError, PlanTypeError, ReadError, printable
from streamline.io.storage.http_response import refusal, status_name, understand
from streamline.io.storage.options import HttpOptions
from streamline.io.storage.paths import check_host, is_url
from streamline.io.storage.retry import TransientError
from streamline.sources.framing import FRAMINGS, MIME_TYPE, Framer, Framing, ServerSentEvent, SseFramer, framer_of
from streamline.sources.live import MarkedStream

if TYPE_CHECKING:
    import aiohttp

    from streamline.io.storage.http_client import HttpClient

logger = logging.getLogger("streamline.reading")  # as the docs call it

PAUSE_S = 0.5
"""The first pause before another connection, unless a `retry` field sets another one; doubled by each connection that
brings nothing, and up to a half is added at random, so that clients don't come back all at once."""

MAX_PAUSE_S = 30.0
"""The longest pause, unless the server asks for a longer one."""

MAX_RETRY_AFTER_S = 3600.0
"""The longest pause that an answer's Retry-After sets."""

PIECE_BYTES = 64 * 1024
"""Cut into items at once: some 0.2 ms of JSON."""


IDLE_TIMEOUT_S = 300.0
"""Seconds of silence after which a connection counts as dropped: servers that keep one open send something every 15 to
60 s (WHATWG HTML, 9.2.7, advises a comment every 15 s), and many proxies cut it after 60 s."""

GIVE_UP_S = 3600.0
"""Seconds of failures before a feed that has answered once fails: a server's update is over by then; for longer, a
waiting job costs more than one that is restarted and resumes."""

MAX_ITEM_BYTES = 16 * 2**20
"""The longest line or event by default: more is likely no such stream at all, and would be gathered in memory."""


@dataclass(frozen=True, kw_only=True)
class EndlessRequest:
    """The request, repeated for each connection.

    Attributes:
      idle_timeout_s: seconds of silence after which a connection counts as dropped; `math.inf`: none.
      give_up_s: seconds for which it may fail without an answer, once it has had one; `math.inf`: for ever.
      max_item_bytes: a longer line or event is an error.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
    """

    url: str = field(repr=False)  # it may hold a signature
    framing: Framing
    http: HttpOptions | None = None
    idle_timeout_s: float = IDLE_TIMEOUT_S
    give_up_s: float = GIVE_UP_S
    max_item_bytes: int = MAX_ITEM_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise PlanTypeError(f"stream_http(url) is one http(s) URL, got {type_and_repr(self.url)}")
        if not is_url(self.url):
            raise PlanError(
                f"stream_http(url) is one http(s) URL, got {self.url!r}: for another kind of feed write "
                "from_stream(feed), for files read_lines and the like"
            )
        check_host(self.url)
        if self.framing not in FRAMINGS:
            raise PlanError(f"stream_http(framing=) is one of {', '.join(FRAMINGS)}, got {type_and_repr(self.framing)}")
        if self.http is not None and not isinstance(self.http, HttpOptions):
            raise PlanTypeError(f"expected http as HttpOptions, got {type_and_repr(self.http)}")
        for option in ("idle_timeout_s", "give_up_s"):
            if (value := getattr(self, option)) != math.inf:
                check_seconds(f"stream_http({option}=)", value)
        check_int("stream_http(max_item_bytes=)", self.max_item_bytes, 1)


@dataclass(frozen=True)
class HttpFeed(MarkedStream[Any]):
    """The items of a URL's response. The mark of a server-sent event is its id."""

    kind: ClassVar[str] = "stream_http"

    request: EndlessRequest

    def __str__(self) -> str:
        return printable(f"{self.kind} {self.request.url!r} ({self.request.framing})")

    def options(self) -> dict[str, Any]:
        return {"framing": self.request.framing}

    def prepare(self) -> None:
        import_module("streamline.io.storage.http_client")  # aiohttp takes 0.2 s

    def after(self, mark: Json, traffic: Traffic) -> AsyncIterator[Any]:
        return read(self.request, mark if isinstance(mark, str) else "", traffic)

    def mark(self, item: Any) -> Json:
        return (item.id or None) if isinstance(item, ServerSentEvent) else None


def codec_of(framing: Framing) -> Codec:
    return Codec(list, _event) if framing == "sse" else Codec()


def _event(form: list[str]) -> ServerSentEvent:
    return ServerSentEvent(*form)


async def read(request: EndlessRequest, last_id: str, traffic: Traffic) -> AsyncGenerator[Any, None]:
    """Yield the items of a feed, after the event `last_id` where the server knows it; "": from where it begins.

    Raises:
      ReadError: the server refuses, or has failed for too long.
      DataError: the bytes are no item.
    """
    from streamline.io.storage.http_client import HttpClient

    options = replace(request.http or HttpOptions(), timeout_s=request.idle_timeout_s)
    client = HttpClient(options, traffic, "idle_timeout_s")
    reader = _FeedReader(request, client, traffic, options.retries, last_id)
    try:
        while not reader.over:
            async with aclosing(reader.connection()) as items:
                async for item in items:
                    yield item
            if not reader.over:
                await reader.pause()
    finally:
        await client.aclose()


@dataclass
class _FeedReader:
    """One reading of a feed; `over`: the server has ended the stream."""

    request: EndlessRequest
    client: HttpClient
    traffic: Traffic
    retries: int
    last_id: str
    over: bool = False
    _asked_s: float = 0.0
    _fruitless: int = 0  # connections in a row that brought no byte
    _failed: int = 0  # attempts in a row without an answer
    _answered_at: float | None = None  # when the server last answered; None: never
    _why: str = ""

    def __post_init__(self) -> None:
        self._url = printable(self.request.url)
        self._retry_s = PAUSE_S

    async def connection(self) -> AsyncGenerator[Any, None]:
        """Yield the items of one more connection, up to its end or failure."""
        import aiohttp

        framer = framer_of(self.request.framing, self.request.max_item_bytes, self.last_id)
        response: aiohttp.ClientResponse | None = None
        self._asked_s = 0.0
        try:
            response = await self._open()
            if self.over:
                return
            async with aclosing(self._items(response, framer)) as items:
                async for item in items:
                    yield item
        except (aiohttp.ClientError, TransientError, OSError) as error:
            self._failure(error)
        finally:
            if response is not None:
                response.close()
            self._learn(framer)

    async def pause(self) -> None:
        """Wait before the next connection, and log why."""
        pause_s = min(max(MAX_PAUSE_S, self._retry_s), self._retry_s * 2 ** min(self._fruitless, 30))
        pause_s = max(pause_s * random.uniform(1, 1.5), self._asked_s)
        self._fruitless += 1
        self.traffic.retries += bool(self._failed)
        logger.log(
            logging.WARNING if self._failed else logging.INFO,
            "%s: %s; connecting again in %.2f s",
            self._url,
            self._why,
            pause_s,
        )
        await anyio.sleep(pause_s)

    async def _open(self) -> aiohttp.ClientResponse:
        """Return the answer to another request; `over` if that is the last one.

        Raises:
          TransientError: a retry may succeed.
          ReadError: it would not.
        """
        request = self.request
        headers = {}
        if request.framing == "sse":
            headers = {"Accept": MIME_TYPE, "Cache-Control": "no-cache"}
            if self.last_id:
                headers["Last-Event-ID"] = self.last_id
        response = await self.client.get(request.url, headers, unpack=True)
        try:
            self.over = self._ends(response)
        except BaseException:
            response.close()
            raise
        self._failed = 0
        return response

    def _ends(self, response: aiohttp.ClientResponse) -> bool:
        """Return whether an answer says that there is nothing more to come, ever."""
        url, status, kind = self._url, response.status, printable(response.content_type)
        if status == 204:
            return self.request.framing == "sse"
        if 400 <= status < 500 and status not in (408, 429):
            raise refusal(url, status)
        if status not in (200, 408, 429) and status < 500:
            raise ReadError(f"{url}: expected an endless answer, got {status_name(status)}: is it the right URL?")
        if status != 200:
            understand(url, status, response.headers, 0, None)
        if self.request.framing == "sse" and kind != MIME_TYPE:
            raise ReadError(
                f"{url}: expected server-sent events ({MIME_TYPE}), the server sends {kind}: check the URL and the "
                'credentials, or read it with another framing="lines", "jsonl" or "bytes"'
            )
        return False

    async def _items(self, response: aiohttp.ClientResponse, framer: Framer[Any]) -> AsyncGenerator[Any, None]:
        """Yield the items of an answer that has begun."""
        pace, received = Pace(), 0
        try:
            while data := await self._more(response):
                self._fruitless = 0
                self.traffic.bytes += len(data)
                for at in range(0, len(data), PIECE_BYTES):
                    piece = data[at : at + PIECE_BYTES]
                    for item in framer.feed(piece):
                        yield item
                    received += len(piece)
                    await pace.maybe_yield()
            self._why = "the server has ended its answer"
            if _whole(response):
                for item in framer.finish():
                    yield item
        except DataError as error:
            way_out = ""
            if self.request.framing == "jsonl":
                way_out = '; with framing="lines" and .map(json.loads, on_error="skip") such lines can be left out'
            raise DataError(
                f"{self._url}, after byte {received:,} of a connection: {error}{way_out}"
            ) from error.__cause__
        finally:
            self._answered_at = monotonic()

    async def _more(self, response: aiohttp.ClientResponse) -> bytes:
        from streamline.io.storage.http_client import more_of

        try:
            return await more_of(response.content, self.request.idle_timeout_s)
        except TimeoutError:
            raise TransientError("nothing came for idle_timeout_s") from None

    def _failure(self, error: Exception) -> None:
        import aiohttp

        from streamline.io.storage.http_client import transient_error

        url = self._url
        if self._answered_at is not None and isinstance(error, aiohttp.ClientConnectorDNSError):
            found = TransientError(f"the name {error.host} can't be looked up any more")
        else:
            found = transient_error(url, error)
        self._why = str(found)
        self._asked_s = min(found.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
        self._failed += 1
        if self._answered_at is None and self._failed > self.retries:
            raise ReadError(f"{url}: failed {self._failed} times, and has never answered: {self._why}") from found
        if self._answered_at is not None and (down_s := monotonic() - self._answered_at) > self.request.give_up_s:
            raise ReadError(
                f"{url}: no answer for {down_s:,.0f} s, {self._failed} attempts, the last one: {self._why}. Nothing is "
                "lost: resume when the server is back, or raise give_up_s"
            ) from found

    def _learn(self, framer: Framer[Any]) -> None:
        """Keep what the next connection needs, and drop the rest."""
        if isinstance(framer, SseFramer):
            self.last_id = framer.last_id
            self._retry_s = self._retry_s if framer.retry_s is None else framer.retry_s
        if framer.waiting:
            self._why += f"; {framer.waiting:,} bytes of an unfinished {framer.unit} were dropped"


def _whole(response: aiohttp.ClientResponse) -> bool:
    """Whether an ended answer is known to be complete; others may have been cut off."""
    chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
    return chunked or "Content-Length" in response.headers
