"""What went wrong on the way to a server, said for a person: whether another try may help, and what else does."""

from __future__ import annotations

import re
import socket
import ssl

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from streamline.errors import ReadError, printable
from streamline.storage.answers import retry_after_s, status_name
from streamline.storage.attempts import TransientError

__all__ = ["judged", "shown"]

USER = re.compile(r"(?<=://)[^/?#]*@")
SECRET = re.compile(r"([?&][^=&#]*(?:sig|token|secret|password|credential|api-?_?key)[^=&#]*=)[^&#]*", re.IGNORECASE)
"""Parts of a query that open a door: X-Amz-Signature, sig (Azure), access_token, X-Goog-Credential, ..."""

NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL calls an answer that isn't TLS, by its version."""

TLS_ALERT = r"b'\x15\x03"
"""How aiohttp shows the beginning of what servers that speak TLS say to plain HTTP (RFC 8446, 5.1 and 6)."""

MAY_PASS = (socket.EAI_AGAIN, getattr(socket, "EAI_FAIL", socket.EAI_AGAIN))
"""Name look-ups that failed, rather than having found no such name."""


def shown(url: str) -> str:
    """Return a URL as messages and logs show it: without password and signature, printable."""
    if "?" not in url and "@" not in url:  # as most: patterns would take 2 µs of each request
        return printable(url)
    return printable(SECRET.sub(r"\1…", USER.sub("…@", url)))


def judged(url: str, error: Exception) -> TransientError:
    """Return why another try may fare better.

    Args:
      url: as `shown`.

    Raises:
      ReadError: it wouldn't.
    """
    if isinstance(error, (ReadError, TransientError)):
        return _again(error)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        raise ReadError(f"{url}: {_certificate(error)}") from error
    if isinstance(error, aiohttp.ClientConnectorSSLError) and _reason(error) in NO_TLS:
        raise ReadError(f"{url}: {error.host}:{error.port} doesn't speak TLS: is it an http:// URL?") from error
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return _name(url, error)
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return _proxy(url, error)
    if isinstance(error, aiohttp.ClientResponseError) and TLS_ALERT in error.message:
        raise ReadError(f"{url}: that port speaks TLS: is it an https:// URL?") from error
    if isinstance(error, aiohttp.InvalidURL):
        raise ReadError(f"{url}: not a URL: {error}") from error
    return TransientError(_said(error))


def _again(error: ReadError | TransientError) -> TransientError:
    if isinstance(error, ReadError):
        raise error
    return error


def _said(error: Exception) -> str:
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


def _reason(error: aiohttp.ClientConnectorSSLError) -> str:
    return str(getattr(error.os_error, "reason", "")) if isinstance(error.os_error, ssl.SSLError) else ""


def _name(url: str, error: aiohttp.ClientConnectorDNSError) -> TransientError:
    why = error.os_error.strerror or str(error.os_error)
    if error.os_error.errno in MAY_PASS:
        return TransientError(f"the name {error.host} can't be looked up: {why}")
    raise ReadError(f"{url}: no such host: {error.host} ({why}): check its spelling, and this machine's DNS") from error


def _proxy(url: str, error: aiohttp.ClientHttpProxyError) -> TransientError:
    said = f"the proxy answered {status_name(error.status)}"
    if error.status in (408, 429) or error.status >= 500:
        told = None if error.headers is None else error.headers.get("Retry-After")
        return TransientError(said, retry_after_s(told))
    advice = "give user and password in its URL" if error.status == 407 else "ask those who run it"
    raise ReadError(f"{url}: {said}: {advice}, http=HttpOptions(proxy=…) or the environment's") from error
