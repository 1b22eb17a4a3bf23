"""Requests over one session: kept connections, names, certificates, proxies, redirects, time limits, and errors.

All time limits but that of a connection are our own. aiohttp's `sock_read` begins anew with each byte and with each
interim answer (100 Continue, 103 Early Hints), so a server could hold a request forever; its `total` goes on while the
training loop holds a block.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Mapping
from functools import partial
from time import monotonic
from urllib.request import getproxies, proxy_bypass

import aiohttp
import anyio
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from streamline.core.meters import Traffic
from streamline.core.threads import SerialExecutor
from streamline.errors import ReadError
from streamline.io.storage.http_response import retry_after_s, status_name
from streamline.io.storage.options import HttpOptions, check_proxy
from streamline.io.storage.retry import TransientError

BUFFER_BYTES = 256 * 1024
"""Where aiohttp stops the server; it holds up to twice as much."""

MAX_REDIRECTS = 10
"""More are a loop: browsers follow 20, and objects are one or two away."""

PLAIN = r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]*"

ENCODED = re.compile(rf"{PLAIN}(?:%[0-9A-Fa-f]{{2}}{PLAIN})*")
"""A URL that needs no quoting: it is sent as it is, for a signature covers every character."""


class HttpClient:
    """Sends requests. One for all flows of one event loop; opens nothing before the first request.

    Args:
      timeout: what the user calls `options.timeout_s`, for messages.
    """

    def __init__(self, options: HttpOptions, traffic: Traffic, timeout: str = "timeout_s") -> None:
        self._options = options
        self._timeout_name = timeout
        self._traffic = traffic
        self._sent = options.sent()
        self._opened: aiohttp.ClientSession | None = None
        self._opening = anyio.Lock()
        self._thread = SerialExecutor("streamline names")
        self._proxies: dict[tuple[str, str | None, int | None], str | None] = {}
        self._servers: dict[str, tuple[URL, str | None]] = {}

    async def get(
        self, url: str, headers: Mapping[str, str], *, within_s: float = math.inf, unpack: bool = False
    ) -> aiohttp.ClientResponse:
        """Return the answer to a request, after redirects; the caller closes it.

        Args:
          headers: of this request; what identifies comes on top, as far as the URL's own host is asked.
          within_s: seconds until the deadline; redirects come out of them.
          unpack: undo what Content-Encoding says, for bodies that have no positions.

        Raises:
          ReadError: no URL, a redirect that leads nowhere, a file of certificates that can't be read.
          TransientError: no connection, or no whole header of an answer, in time.
          aiohttp.ClientError, OSError: see `transient_error`.
        """
        session, ends = self._opened or await self._open(), monotonic() + within_s
        target, proxy = self._target(url)
        first = target
        for _ in range(MAX_REDIRECTS + 1):
            sent = {**self._sent, **headers} if self._sent and _same_host(first, target) else headers
            asking = session.get(target, headers=sent, proxy=proxy, allow_redirects=False, auto_decompress=unpack)
            with self._traffic.count_request():
                response = await self._in_time(asking, target, ends)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            response.release()
            target = _redirect_target(url, target, response.headers.get("Location"))
            proxy = self._proxy(target)
        raise ReadError(f"{url}: redirected {MAX_REDIRECTS} times, the last time to {target}: a loop?")

    async def aclose(self) -> None:
        session, self._opened = self._opened, None
        with anyio.CancelScope(shield=True):
            if session is not None:
                await session.close()
        self._thread.shutdown()

    async def _in_time(
        self, asking: Awaitable[aiohttp.ClientResponse], target: URL, ends: float
    ) -> aiohttp.ClientResponse:
        """Return an answer whose header has come whole, connecting included, within `timeout_s`, and before `ends`."""
        left_s, silence_s = ends - monotonic(), self._options.timeout_s
        try:
            async with asyncio.timeout(_finite(min(left_s, silence_s))) as limit:
                return await asking
        except TimeoutError:
            if not limit.expired():  # aiohttp's own, of the connection
                raise
            limit_s = f"{self._timeout_name}={silence_s:g} s"
            if left_s < silence_s:
                limit_s = f"the {max(0.0, left_s):.3g} s that deadline_s left"
            raise TransientError(
                f"the server stalled: no whole header of an answer came from {target.host}:{target.port} within "
                f"{limit_s}, connecting included"
            ) from None

    async def _open(self) -> aiohttp.ClientSession:
        async with self._opening:
            if self._opened is None:
                context: ssl.SSLContext | bool = True
                if self._options.ca_file is not None or self._options.client_cert is not None:
                    make = partial(_context, self._options)  # reads the system's certificates: 20 ms
                    context = await asyncio.get_running_loop().run_in_executor(self._thread, make)
                connect_s = _finite(self._options.connect_timeout_s)
                self._opened = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(resolver=_Resolver(self._thread), ssl=context, limit=0),
                    timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s),
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    read_bufsize=BUFFER_BYTES,
                )
            return self._opened

    def _target(self, url: str) -> tuple[URL, str | None]:
        """Return a URL as it is sent, and the proxy for it; a server that was seen before is not looked at again."""
        path = url.find("/", url.find("://") + 3)
        server = url[:path] if path > 0 else url  # what a URL's host depends on
        try:
            if path > 0 and server in self._servers:
                root, proxy = self._servers[server]
                if "?" in url or "#" in url or ENCODED.fullmatch(url) is None:
                    return _url(url), proxy
                return root.with_path(url[path:], encoded=True), proxy  # a tenth of the time that parsing takes
            target = _parse_url(url)
        except ValueError as error:
            raise ReadError(f"not a URL: {url}: {error}") from error
        proxy = self._proxy(target)
        if not set(server) & set("?#") and path > 0:
            self._servers[server] = _url(f"{server}/"), proxy
        return target, proxy

    def _proxy(self, url: URL) -> str | None:
        """Return the proxy for a URL: the one that was given, or the environment's.

        aiohttp's own `trust_env` asks two threads of the event loop's executor for each request, and they stay.
        """
        if self._options.proxy is not None:
            return self._options.proxy
        server = url.scheme, url.host, url.port
        if server not in self._proxies:
            self._proxies[server] = _proxy_of_environment(url)
        return self._proxies[server]


async def more_of(content: aiohttp.StreamReader, within_s: float) -> bytes:
    """Return what has come of a body, or else what comes next; nothing at its end.

    Raises:
      TimeoutError: no byte of content came in time; what frames it (the sizes of chunks) counts for nothing.
    """
    if (data := content.read_nowait()) or content.at_eof():
        return data
    async with asyncio.timeout(_finite(within_s)):
        return await content.readany()


def _finite(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds


def _url(text: str) -> URL:
    return URL(text, encoded=ENCODED.fullmatch(text) is not None)


def _parse_url(text: str) -> URL:
    url = _url(text)
    if not url.host or url.port is None:  # parsed only when they are asked for
        raise ValueError("a host is missing")
    return url


def _redirect_target(url: str, target: URL, location: str | None) -> URL:
    """Return where a redirect leads; not from https to http, where data could be replaced on the way."""
    if not location:
        raise ReadError(f"{url}: the server redirects, and doesn't say where to (no Location)")
    try:
        following = _parse_url(str(target.join(_url(location))))
    except ValueError:
        following = URL()
    if following.scheme not in ("http", "https"):
        raise ReadError(f"{url}: redirected to {location!r}, which is no http(s) URL")
    if target.scheme == "https" and following.scheme == "http":
        raise ReadError(f"{url}: redirected from https to {location}: if that is meant, read that URL")
    return following


def _same_host(first: URL, target: URL) -> bool:
    """Whether what identifies may be sent: to the same origin, or to its usual port for TLS."""
    if first is target:
        return True
    if first.host != target.host:
        return False
    return first.origin() == target.origin() or (first.scheme, first.port, target.port) == ("http", 80, 443)


def _proxy_of_environment(url: URL) -> str | None:
    if url.host is None or proxy_bypass(url.host if url.is_default_port() else f"{url.host}:{url.port}"):
        return None
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    check_proxy(f"the environment's proxy for {url.scheme}", proxy)
    return proxy


def _context(options: HttpOptions) -> ssl.SSLContext:
    """Return what servers are checked with. Blocks."""
    context = ssl.create_default_context()
    if options.ca_file is not None:
        try:
            context.load_verify_locations(options.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise _bad_file("ca_file", options.ca_file, error, "certificates") from error
    if options.client_cert is not None:
        given = options.client_cert
        cert, key = given if isinstance(given, tuple) else (given, None)
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise _bad_file("client_cert", cert, error, "a certificate with its key") from error
    return context


def _no_password() -> str:
    """Stand for the password of a key: OpenSSL would ask the terminal for it, and wait."""
    raise ValueError("its key is encrypted: store it decrypted, readable only by its user")


def _bad_file(option: str, file: str | os.PathLike[str], error: Exception, wanted: str) -> ReadError:
    why = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else str(error)
    return ReadError(f"HttpOptions({option}=): expected a PEM file with {wanted}, got {os.fspath(file)}: {why}")


class _Resolver(AbstractResolver):
    """Looks up names in a thread that ends with the session: the event loop's own would stay."""

    def __init__(self, thread: SerialExecutor) -> None:
        self._thread = thread

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        def look_up() -> list[ResolveResult]:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            return [_resolve_result(host, one[0], one[2], one[4]) for one in found]

        return await asyncio.get_running_loop().run_in_executor(self._thread, look_up)

    async def close(self) -> None:
        """Nothing is kept open."""


def _resolve_result(host: str, family: int, proto: int, address: tuple[object, ...]) -> ResolveResult:
    numeric, port = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)  # type: ignore[arg-type]
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=numeric, port=int(port), family=family, proto=proto, flags=flags)


NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL calls an answer that isn't TLS, by its version."""

TLS_ALERT = r"b'\x15\x03"
"""How aiohttp shows the beginning of what servers that speak TLS say to plain HTTP (RFC 8446, 5.1 and 6)."""

MAY_PASS = (socket.EAI_AGAIN, getattr(socket, "EAI_FAIL", socket.EAI_AGAIN))
"""Name look-ups that failed, rather than having found no such name."""


def transient_error(url: str, error: Exception) -> TransientError:
    """Return why another try may fare better. A `ReadError` isn't raised from an error that has the URL in its text.

    Args:
      url: `printable`.

    Raises:
      ReadError: it wouldn't.
    """
    if isinstance(error, ReadError):
        raise error
    if isinstance(error, TransientError):
        return error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        raise ReadError(f"{url}: {_certificate(error)}") from error
    if isinstance(error, aiohttp.ClientConnectorSSLError) and getattr(error.os_error, "reason", None) in NO_TLS:
        raise ReadError(f"{url}: {error.host}:{error.port} doesn't speak TLS: is it an http:// URL?") from error
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return _name(url, error)
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return _proxy(url, error)
    if isinstance(error, aiohttp.ClientResponseError) and TLS_ALERT in error.message:
        raise ReadError(f"{url}: that port speaks TLS: is it an https:// URL?") from None
    if isinstance(error, aiohttp.InvalidURL):
        raise ReadError(f"{url}: not a URL: {error}") from None
    return TransientError(_reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection came about within connect_timeout_s"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"what the server sent is no HTTP answer: {' '.join(error.message.split())[:200]}"
    if isinstance(error, aiohttp.ClientPayloadError):
        cause = error.__cause__
        why = cause.message if isinstance(cause, HttpProcessingError) else str(cause or error)
        return f"the body broke off: {' '.join(why.split())[:200]}"
    return str(error) or type(error).__name__


def _certificate(error: aiohttp.ClientConnectorCertificateError) -> str:
    found = error.certificate_error
    why = getattr(found, "verify_message", "") or str(found)
    code = getattr(found, "verify_code", 0)
    who = f"the certificate of {error.host}:{error.port} is not trusted: {why}"
    if code in (9, 10):  # X509_V_ERR_CERT_NOT_YET_VALID, _HAS_EXPIRED
        return f"{who}: it must be renewed; if it shouldn't be due, check this machine's clock"
    if code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH
        return f"{who}: read it by a name that the certificate is for"
    return f'{who}: if it is the right server, give its CA\'s certificate: http=HttpOptions(ca_file="ca.pem")'


def _name(url: str, error: aiohttp.ClientConnectorDNSError) -> TransientError:
    why = error.os_error.strerror or str(error.os_error)
    if error.os_error.errno in MAY_PASS:
        return TransientError(f"the name {error.host} can't be looked up: {why}")
    raise ReadError(f"{url}: no such host: {error.host} ({why}): check its spelling, and this machine's DNS") from error


def _proxy(url: str, error: aiohttp.ClientHttpProxyError) -> TransientError:
    said = f"the proxy answered {status_name(error.status)}"
    if error.status in (408, 429) or error.status >= 500:
        wait = None if error.headers is None else error.headers.get("Retry-After")
        return TransientError(said, retry_after_s(wait))
    advice = "give user and password in its URL" if error.status == 407 else "ask those who run it"
    raise ReadError(f"{url}: {said}: {advice}, http=HttpOptions(proxy=…) or the environment's") from None
