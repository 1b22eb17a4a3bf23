"""The options that all `read_*` take alike: how http(s) URLs and object stores are reached, and what is kept on disk.

Apart from the reading, because importing aiohttp takes 0.2 s.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, TypedDict
from urllib.parse import urlsplit

from streamline.core.options import check_flag, check_int, check_seconds, type_and_repr
from streamline.errors import PlanError, PlanTypeError, install, printable
from streamline.io.storage.base import ADDED, Storage

CONCURRENCY = 64
"""Requests in flight: with 30 ms for each, some 2,000 objects a second; twice as many gained nothing on two cores."""


class AccessOptions(TypedDict, total=False):
    """What all `read_*` take alike, as keywords. What each means is said at `Access`."""

    http: HttpOptions | None
    concurrency: int
    cache_dir: str | os.PathLike[str] | None
    cache_max_bytes: int | None
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Access:
    """How files are reached. Pickles, and opens nothing.

    Attributes:
      http: how http(s) URLs are read; None: as usual. Its `retries` and `timeout_s` count for object stores too.
      concurrency: requests that one source may have in flight in one process, >= 1.
      cache_dir: a folder on local disk, one that only this user can write to, in which remote objects are kept;
        processes and jobs may share it. None: nothing is kept. Local files never are.
      cache_max_bytes: what it may hold: beyond, the objects used least recently go; >= 1. None: no limit.
      storage_options: how object stores are reached, by obstore's names: "region", "endpoint", "access_key_id",
        "skip_signature", "allow_http", …; None: as the environment says.
      added: the storages that users have registered, so that a process that gets the plan has them, too.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
    """

    http: HttpOptions | None = None
    concurrency: int = CONCURRENCY
    cache_dir: str | os.PathLike[str] | None = None
    cache_max_bytes: int | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    added: Mapping[str, Callable[[Any], Storage]] = field(default_factory=ADDED.copy, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.http is not None and not isinstance(self.http, HttpOptions):
            raise PlanTypeError(f"expected http as HttpOptions, got {type_and_repr(self.http)}")
        check_int("concurrency", self.concurrency, 1)
        _check_cache(self.cache_dir, self.cache_max_bytes)
        if self.storage_options is not None:
            check_storage_options(self.storage_options)

    def without_cache(self, within_s: float) -> Access:
        """Return this access with nothing kept on disk, and requests that give up after `within_s` at the latest."""
        http = self.http or HttpOptions()
        limits = {name: min(getattr(http, name), within_s) for name in ("timeout_s", "connect_timeout_s", "deadline_s")}
        return replace(self, http=replace(http, **limits), cache_dir=None, cache_max_bytes=None)


def _check_cache(cache_dir: object, max_bytes: object) -> None:
    if cache_dir is not None and (
        not isinstance(cache_dir, (str, os.PathLike)) or not isinstance(os.fspath(cache_dir), str)
    ):
        raise PlanTypeError(f"expected cache_dir as str or os.PathLike, got {type_and_repr(cache_dir)}")
    if cache_dir is not None and (not os.fspath(cache_dir) or "://" in str(cache_dir) or "\0" in str(cache_dir)):
        raise PlanError(f"expected cache_dir as a folder on local disk, got {str(cache_dir)!r}")
    if max_bytes is not None:
        check_int("cache_max_bytes", max_bytes, 1)
        if cache_dir is None:
            raise PlanError("cache_max_bytes= needs a cache_dir=, the folder that it bounds")


TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""A header's name (RFC 9110, 5.6.2)."""

UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What no header's value may hold: a line end would begin another header."""

OURS = {"range", "if-range", "accept-encoding", "content-length", "transfer-encoding"}
"""Headers that say which bytes are asked for: another value would bring other bytes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class HttpOptions:
    """How http(s) URLs are read. Pickles; prints without its secrets.

    What identifies (`headers`, `auth`) is sent to the hosts of the URLs that are read, and not to another one that they
    redirect to.

    Attributes:
      retries: attempts after the first that may fail in a row without a byte of progress, >= 0.
      timeout_s: seconds of silence after which a connection counts as dropped, and the most that a request may wait for
        the whole header of its answer, connecting included; > 0; `math.inf` for none.
      connect_timeout_s: seconds that a connection may take to come about, name look-up and TLS included; likewise.
      deadline_s: seconds that each MiB (or what is left, if it is less) may take of the server, with all attempts,
        redirects and pauses; likewise. The time in which the training loop holds a block doesn't count.
      require_validator: refuse, with a `ReadError`, an object for which the server sends neither an ETag nor a
        Last-Modified, so that it could be replaced in silence; and ask all URLs for theirs when a pipeline is opened,
        also more than 1,000. False: the log says, once for each host, that this is so.
      headers: sent with every request: `{"X-Api-Key": "…"}`.
      auth: (user, password), or a bearer token.
      proxy: URL of the proxy, "http://user:password@host:3128"; None: as the environment says (`HTTPS_PROXY`,
        `HTTP_PROXY`, `NO_PROXY`).
      ca_file: certificates (PEM) that are trusted as well as the system's: a company's CA, a server's self-signed one.
      client_cert: certificate that the client shows, with its key: a PEM file of both, or (certificate, key).

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
    """

    retries: int = 5
    timeout_s: float = 60.0
    connect_timeout_s: float = 30.0
    deadline_s: float = 300.0
    require_validator: bool = False
    headers: Mapping[str, str] | None = None
    auth: tuple[str, str] | str | None = None
    proxy: str | None = None
    ca_file: str | os.PathLike[str] | None = None
    client_cert: str | os.PathLike[str] | tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None

    def __post_init__(self) -> None:
        check_int("HttpOptions(retries=)", self.retries, 0)
        for name in ("timeout_s", "connect_timeout_s", "deadline_s"):
            if getattr(self, name) != math.inf:
                check_seconds(f"HttpOptions({name}=)", getattr(self, name))
        check_flag("HttpOptions(require_validator=)", self.require_validator)
        if self.headers is not None:
            _check_headers(self.headers)
        if self.auth is not None:
            _check_auth(self.auth)
            if any(name.lower() == "authorization" for name in self.headers or ()):
                raise PlanError("HttpOptions(auth=) is the header Authorization: give one of the two")
        if self.proxy is not None:
            if not isinstance(self.proxy, str):
                raise PlanTypeError(f"HttpOptions(proxy=) is a string, got {type(self.proxy).__name__}")
            check_proxy("HttpOptions(proxy=)", self.proxy)
        if self.ca_file is not None:
            _check_file("HttpOptions(ca_file=)", self.ca_file)
        if self.client_cert is not None:
            given = self.client_cert
            for file in given if isinstance(given, tuple) and len(given) == 2 else (given,):
                _check_file("HttpOptions(client_cert=)", file)

    def __repr__(self) -> str:
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        if self.headers is not None:
            given["headers"] = dict.fromkeys(self.headers, "…")
        if self.auth is not None:
            given["auth"] = "…"
        if self.proxy is not None:
            given["proxy"] = printable(self.proxy)
        return f"HttpOptions({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def sent(self) -> dict[str, str]:
        """Return the headers that identify, secrets among them."""
        sent = dict(self.headers or {})
        if isinstance(self.auth, str):
            sent["Authorization"] = f"Bearer {self.auth}"
        elif self.auth is not None:
            sent["Authorization"] = "Basic " + base64.b64encode(":".join(self.auth).encode()).decode()
        return sent


def check_proxy(option: str, proxy: str) -> None:
    """Insist on the URL of an HTTP proxy. It may hold a password, and is in no message."""
    wanted = f'{option} is a URL, "http://host:3128" or "http://user:password@host:3128"'
    try:
        parts = urlsplit(proxy)
        parts.port  # noqa: B018 - parsed only when it is asked for
    except ValueError:
        raise PlanError(f"{wanted}, got something else") from None
    if parts.scheme.startswith("socks"):
        raise PlanError(f"{wanted}, got {parts.scheme}://, which isn't supported: put an HTTP proxy before it")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PlanError(f"{wanted}, got something else")


def _check_headers(headers: object) -> None:
    """Insist on strings by name; a value may be a secret, and is in no message."""
    wanted = 'HttpOptions(headers=) is a mapping of strings to strings, {"Authorization": "Bearer …"}'
    if not isinstance(headers, Mapping):
        raise PlanTypeError(f"{wanted}, got {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str):
            raise PlanTypeError(f"{wanted}, got the name {name!r}, which is of type {type(name).__name__}")
        if not isinstance(value, str):
            raise PlanTypeError(f"{wanted}, got a value of type {type(value).__name__} for {name!r}")
        if not TOKEN.fullmatch(name):
            raise PlanError(f"{wanted}, got the name {name!r}, which no header can have")
        if UNPRINTABLE.search(value):
            raise PlanError(f"{wanted}, got a line's end or another control character in the value of {name!r}")
        if name.lower() in OURS:
            raise PlanError(f"{wanted}; {name!r} can't be given: which bytes are asked for is said there")


def _check_auth(auth: object) -> None:
    """Insist on a user and a password, or a token, and show neither."""
    wanted = "HttpOptions(auth=) is (user, password), or a bearer token as str"
    parts = auth if isinstance(auth, tuple) else (auth,)
    if not all(isinstance(one, str) for one in parts) or (isinstance(auth, tuple) and len(parts) != 2):
        raise PlanTypeError(f"{wanted}, got {type(auth).__name__}")
    if len(parts) == 2 and ":" in parts[0]:
        raise PlanError(f"{wanted}, got a user with a colon, which would begin the password (RFC 7617)")
    if not any(parts) or any(UNPRINTABLE.search(one) for one in parts):
        raise PlanError(f"{wanted}, got an empty one, or one with a line's end or another control character in it")


def _check_file(option: str, file: object) -> None:
    if not isinstance(file, (str, os.PathLike)) or not os.fspath(file):
        raise PlanTypeError(f"{option} is the path of a PEM file, got {type(file).__name__}")


NESTED = ("client_options", "credential_provider")
"""What obstore takes beside its configuration."""

CLIENT = frozenset(
    (
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "root_certificate",
        "randomize_addresses",
        "read_timeout",
        "timeout",
        "user_agent",
    )
)
"""What belongs to `client_options`, and may be written beside the rest. Source: obstore 0.12, `ClientConfig`; in the
configuration itself, obstore panics at them."""

MOST_SECONDS_TEXT = "30 days"
"""obstore's own limit for a request with all of its body is 30 s: a consumer that trains meanwhile takes longer. What
stalls is noticed by `read_timeout`."""


def check_storage_options(options: object) -> None:
    """Insist on a mapping by name; a value may be a secret, and is in no message."""
    wanted = 'storage_options= is a mapping by name, {"region": "eu-central-1"}'
    if not isinstance(options, Mapping):
        raise PlanTypeError(f"{wanted}, got {type(options).__name__}")
    for name in options:
        if not isinstance(name, str):
            raise PlanTypeError(f"{wanted}, got the name {name!r}, which is of type {type(name).__name__}")
    if not isinstance(options.get("client_options", {}), Mapping):
        raise PlanTypeError('storage_options={"client_options": …} is a mapping by name')


def open_store(base: str, options: Mapping[str, Any], http: HttpOptions) -> Any:
    """Return obstore's store of the bucket at URL `base`. It connects when first asked, and tries nothing twice."""
    try:
        obstore = import_module("obstore.store")
        base_error = import_module("obstore.exceptions").BaseError
    except ImportError as error:
        raise PlanError(f"{base}: object stores need obstore: {install('stores')}") from error
    client: dict[str, Any] = {"timeout": MOST_SECONDS_TEXT, "read_timeout": _span(http.timeout_s)}
    client["connect_timeout"] = _span(http.connect_timeout_s)
    client |= {name: value for name, value in options.items() if name in CLIENT}
    client |= options.get("client_options", {})
    config = {name: value for name, value in options.items() if name not in CLIENT and name not in NESTED}
    provider = options.get("credential_provider")
    try:
        return obstore.from_url(
            base,
            config=config,
            client_options=client,
            retry_config={"max_retries": 0},  # we count them, and resume at the byte
            **({} if provider is None else {"credential_provider": provider}),
        )
    except (base_error, TypeError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        if "Account must be specified" in said:
            way = 'set AZURE_STORAGE_ACCOUNT_NAME, or storage_options={"account_name": …}'
            raise PlanError(f"{base} can't be opened without the name of its account: {way}") from None
        raise PlanError(f"{base} can't be opened with storage_options of {sorted(options)}: {said}") from None


def _span(seconds: float) -> str:
    return MOST_SECONDS_TEXT if seconds == math.inf else f"{max(1, round(seconds * 1000))} ms"
