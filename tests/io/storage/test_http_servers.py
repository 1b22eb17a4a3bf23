"""With a real nginx: certificates, credentials, redirects, names, encodings. What is wrong is said, with what to do."""

from __future__ import annotations

import asyncio
import errno
import gzip
import os
import pickle
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

import streamline as sl
from streamline.core.meters import Traffic
from streamline.errors import PlanError, ReadError
from streamline.io.storage import retry as attempts
from streamline.io.storage.http import HttpStorage
from streamline.io.storage.http_client import HttpClient
from streamline.io.storage.options import HttpOptions
from streamline.io.storage.paths import given_paths
from tests.servers.nginx import Nginx
from tests.serving import Server

DATA = b"".join(b"line %d\n" % number for number in range(1000))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module", autouse=True)
def _files(nginx: Nginx) -> None:
    nginx.put("x.txt", DATA)
    nginx.put("x.txt.gz", gzip.compress(DATA))
    nginx.put("empty.txt", b"")


async def got(url: str, start: int = 0, stop: int | None = None, **options: Any) -> bytes:
    """Return bytes of an object, read with options of its own."""
    storage = HttpStorage(HttpOptions(**{"retries": 1, "timeout_s": 5, **options}))
    async with aclosing(storage), aclosing(storage.blocks(url, start, stop)) as blocks:
        return b"".join([block async for block in blocks])


@pytest.mark.one_in(7, 4)
@pytest.mark.parametrize("where", ["", "noranges/", "chunked/", "gzip/", "slow/"])
@pytest.mark.parametrize("port", ["plain", "tls"])
async def test_what_a_server_does_its_own_way_brings_the_same_bytes(nginx: Nginx, where: str, port: str) -> None:
    url = nginx.url(f"{where}x.txt", port)
    for start, stop in ((0, None), (7, None), (7, 700), (len(DATA) - 1, None)):
        assert await got(url, start, stop, ca_file=nginx.home / "ca.pem") == DATA[start:stop]
    assert await got(nginx.url(f"{where}empty.txt", port), ca_file=nginx.home / "ca.pem") == b""


async def test_time_may_be_endless(nginx: Nginx) -> None:
    inf = float("inf")
    assert await got(nginx.url("x.txt"), timeout_s=inf, connect_timeout_s=inf, deadline_s=inf) == DATA


async def test_what_a_server_insists_on_compressing_is_refused(nginx: Nginx) -> None:
    with pytest.raises(ReadError, match=r"packed/x\.txt: the server sends it compressed \(Content-Encoding: gzip\)"):
        await got(nginx.url("packed/x.txt"))


async def test_an_endless_body_is_unpacked(nginx: Nginx) -> None:
    async with aclosing(HttpClient(HttpOptions(), Traffic())) as client:
        for path in ("packed/x.txt", "chunked/x.txt"):
            response = await client.get(nginx.url(path), {"Accept": "*/*"}, unpack=True)
            assert await response.read() == DATA
            response.close()


# Certificates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "ca", "says"),
    [
        ("tls", None, r"is not trusted: .*: if it is the right server, give its CA.*HttpOptions\(ca_file="),
        ("tls", "other-ca.pem", r"is not trusted: .*ca_file"),
        ("expired", "ca.pem", "is not trusted: certificate has expired: it must be renewed; .*this machine's clock"),
        ("named", "ca.pem", "is not trusted: .*[mM]ismatch.*: read it by a name that the certificate is for"),
        ("mutual", "ca.pem", r"400 Bad Request \(400 No required SSL certificate was sent\)"),
    ],
)
async def test_a_certificate_that_is_not_trusted_is_an_error_at_once(
    nginx: Nginx, port: str, ca: str | None, says: str
) -> None:
    url = nginx.url("x.txt", port)
    with pytest.raises(ReadError, match=says) as failed:
        await got(url, ca_file=ca and nginx.home / ca)
    assert str(failed.value).startswith(url)
    assert "failed 2 times" not in str(failed.value)


@pytest.mark.parametrize("pair", [True, False])
async def test_a_client_shows_its_certificate(nginx: Nginx, pair: bool) -> None:
    client = str(nginx.home / "client.pem")
    options: dict[str, Any] = {"ca_file": nginx.home / "ca.pem", "client_cert": (client, client) if pair else client}
    assert await got(nginx.url("x.txt", "mutual"), **options) == DATA


async def test_a_self_signed_certificate_is_trusted_as_its_own_ca(nginx: Nginx) -> None:
    url = nginx.url("x.txt", "tls").replace("127.0.0.1", "localhost")
    assert await got(url, ca_file=nginx.home / "ca.pem") == DATA


@pytest.mark.one_in(3)
@pytest.mark.parametrize("option", ["ca_file", "client_cert"])
@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
async def test_a_file_that_holds_no_certificate_is_named(
    nginx: Nginx, tmp_path: Path, option: str, content: bytes | None
) -> None:
    path = tmp_path / "x.pem"
    if content is not None:
        path.write_bytes(content)
    options: dict[str, Any] = {option: path}
    says = rf"HttpOptions\({option}=\): expected a PEM file with .*, got {path}: .*[a-z]+"
    with pytest.raises(ReadError, match=says):
        await got(nginx.url("x.txt", "tls"), **options)


async def test_an_encrypted_key_asks_nobody_for_its_password(nginx: Nginx, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    key = load_pem_private_key((nginx.home / "client.pem").read_bytes(), None)
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(ReadError, match="its key is encrypted"):
        await got(nginx.url("x.txt", "mutual"), client_cert=(nginx.home / "client.pem", locked))


async def test_http_on_a_port_for_tls_and_tls_on_one_for_http_are_named(nginx: Nginx) -> None:
    with pytest.raises(ReadError, match=r"plain HTTP request was sent to HTTPS port"):
        await got(nginx.url("x.txt", "tls").replace("https", "http"))
    with pytest.raises(ReadError, match=r"127\.0\.0\.1:\d+ doesn't speak TLS: is it an http:// URL\?"):
        await got(nginx.url("x.txt").replace("http", "https"))


# Names and addresses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (socket.EAI_NONAME, r"no such host: nowhere\.example .*check its spelling"),
        (socket.EAI_AGAIN, r"failed 2 times in a row at byte 0: the name nowhere\.example can't be looked up"),
    ],
)
async def test_a_name_that_is_not_found_is_an_error(monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    def look_up(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(code, "as the test says")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(ReadError, match=rf"http://nowhere\.example/x: {says}"):
        await got("http://nowhere.example/x")


async def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ReadError, match=r"nowhere\.invalid"):
        await got("http://nowhere.invalid/x", retries=0)


async def test_a_connection_that_does_not_come_about_is_an_error() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        others = [socket.socket() for _ in range(4)]
        for other in others:
            other.setblocking(False)
            assert other.connect_ex(full.getsockname()) in (0, errno.EINPROGRESS)
        with pytest.raises(ReadError, match="no connection came about within connect_timeout_s"):
            await got(f"http://127.0.0.1:{full.getsockname()[1]}/x", retries=0, connect_timeout_s=0.1)
        for other in others:
            other.close()


@pytest.mark.parametrize(
    "name", ["ö ü.txt", "a b.txt", "100%.txt", "a%20b.txt", "x+y&z=1.txt", "日本.txt", "a'b\".txt"]
)
async def test_files_are_found_by_any_name(nginx: Nginx, name: str) -> None:
    from urllib.parse import quote

    nginx.put(name, DATA)
    assert await got(nginx.url(quote(name))) == DATA
    if "%" not in name:
        assert await got(nginx.url(name)) == DATA  # quoted where it needs to be
    assert await got(nginx.url(quote(name) + "?version=1&x=%2F")) == DATA


# Credentials ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("private/x.txt", {"auth": ("me", "secret")}),
        ("private/x.txt", {"headers": {"Authorization": "Basic bWU6c2VjcmV0"}}),
        ("token/x.txt", {"auth": "secret"}),
        ("token/x.txt", {"headers": {"authorization": "Bearer secret"}}),
    ],
)
async def test_credentials_open_what_is_closed(nginx: Nginx, path: str, options: dict[str, Any]) -> None:
    assert await got(nginx.url(path), **options) == DATA
    with pytest.raises(
        ReadError, match=r'401 Unauthorized \(401 Authorization Required\): .*auth=\("user", "password"'
    ):
        await got(nginx.url(path))
    with pytest.raises(ReadError, match="401") as failed:
        await got(nginx.url(path), auth=("you", "sesame"))
    assert "sesame" not in str(failed.value)


@pytest.mark.parametrize(
    ("path", "says"), [("denied/x", "403 Forbidden.*signed URL"), ("no", "404 Not Found.*the URL")]
)
async def test_a_refusal_is_an_error_at_once_with_what_to_do(nginx: Nginx, path: str, says: str) -> None:
    with pytest.raises(ReadError, match=says) as failed:
        await got(nginx.url(path))
    assert "times in a row" not in str(failed.value)


async def test_what_a_store_says_in_its_answer_is_in_the_error(server: Server) -> None:
    async def refuse(server: Server, request: Any, writer: asyncio.StreamWriter) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>Request has\n expired</Message></Error>"
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    server.script = [refuse]
    with pytest.raises(ReadError, match=r"403 Forbidden \(Request has expired\): check the credentials"):
        await got(server.url("x"))


async def test_what_comes_after_an_answer_is_not_taken_for_the_next(server: Server) -> None:
    """The rest of a body that is longer than its Content-Length comes late, on a connection that is kept."""
    server.objects = {"b": b"good"}

    async def two(server: Server, request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
        await writer.drain()
        await read.wait()
        writer.write(b"more\r\n")
        await writer.drain()
        sent.set()
        await writer.wait_closed()

    read, sent = asyncio.Event(), asyncio.Event()
    server.script = [two]
    async with aclosing(HttpStorage(HttpOptions(retries=1))) as storage:
        assert await storage.read(server.url("a"), 0, None) == b"good"
        read.set()
        await sent.wait()
        assert await storage.read(server.url("b"), 0, None) == b"good"
    assert len(server.requests) == 2


# Redirects -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/x.txt", "x.txt", "//{host}/x.txt", "{base}"])
async def test_a_redirect_is_followed_wherever_it_leads(server: Server, target: str) -> None:
    server.objects = {"x.txt": DATA}
    location = target.format(host=server.base.removeprefix("http://"), base=server.url("x.txt"))
    server.script = [server.faulty("status", code="307 Temporary Redirect", headers=(f"Location: {location}",))]
    assert await got(server.url("a"), headers={"X-Key": "me"}) == DATA
    assert [request.headers["x-key"] for request in server.requests] == ["me", "me"]


@asynccontextmanager
async def another(server: Server) -> AsyncIterator[Server]:
    """Run a second server, on another port: another origin."""
    made = Server(objects=dict(server.objects))
    listening = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.base = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        listening.close()


async def test_credentials_do_not_follow_to_another_host(server: Server) -> None:
    server.objects = {"x.txt": DATA}
    async with another(server) as other:
        headers = (f"Location: {other.url('x.txt')}",)
        server.script = [server.faulty("status", code="302 Found", headers=headers)]
        assert await got(server.url("x.txt"), auth=("me", "secret"), headers={"X-Key": "secret"}) == DATA
        assert server.requests[0].headers["authorization"].startswith("Basic ")
        assert not {"authorization", "x-key", "cookie"} & set(other.requests[0].headers)


@pytest.mark.parametrize(
    ("location", "says"),
    [
        (None, r"doesn't say where to \(no Location\)"),
        ("ftp://h/x", "'ftp://h/x', which is no http"),
        ("file:///etc/passwd", "no http"),
        ("http://[::1/x", "no http"),
        ("http://h:99999999/", "no http"),
    ],
)
async def test_a_redirect_that_leads_nowhere_is_an_error(server: Server, location: str | None, says: str) -> None:
    headers = () if location is None else (f"Location: {location}",)
    server.script = [server.faulty("status", code="302 Found", headers=headers)] * 2
    with pytest.raises(ReadError, match=says):
        await got(server.url("x.txt"))
    assert len(server.requests) == 1


async def test_a_redirect_loop_is_an_error(nginx: Nginx) -> None:
    with pytest.raises(ReadError, match=r"/loop/: redirected 10 times, the last time to .*/loop/: a loop\?"):
        await got(nginx.url("loop/"))


async def test_a_redirect_from_https_to_http_is_refused(nginx: Nginx) -> None:
    url = nginx.url(f"to/?url={nginx.url('x.txt')}", "tls")
    with pytest.raises(ReadError, match=r"redirected from https to http://.*: if that is meant, read that URL"):
        await got(url, ca_file=nginx.home / "ca.pem")


# Proxies -------------------------------------------------------------------------------------------------------------


async def test_a_proxy_is_asked_with_its_password(server: Server) -> None:
    server.objects = {"http://far.example/x.txt": DATA}
    proxy = server.base.replace("http://", "http://me:secret@")
    assert await got("http://far.example/x.txt", proxy=proxy) == DATA
    assert server.requests[0].headers["proxy-authorization"].startswith("Basic ")
    server.script = [server.faulty("status", code="407 Proxy Authentication Required")] * 2
    with pytest.raises(ReadError, match="407 Proxy Authentication Required: give the proxy credentials"):
        await got("http://far.example/x.txt", proxy=server.base)
    server.script = [server.faulty("status", code="407 Proxy Authentication Required")] * 2
    with pytest.raises(ReadError, match=r"the proxy answered 407 .*: give user and password in its URL") as failed:
        await got("https://far.example/x.txt", proxy=proxy)
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize("proxy", ["socks5://h:1", "http://", "ftp://h", "http://h:99999999", "h:3128"])
async def test_what_is_no_proxy_is_refused_where_it_is_written(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r'HttpOptions\(proxy=\) is a URL, "http://host:3128"'):
        HttpOptions(proxy=proxy)
    monkeypatch.setenv("http_proxy", proxy)
    if proxy != "h:3128":
        with pytest.raises(PlanError, match="the environment's proxy for http is a URL"):
            await got("http://far.example/x.txt")


# Secrets -------------------------------------------------------------------------------------------------------------

SECRET = HttpOptions(
    auth=("me", "s3cret"), headers={"X-Key": "s3cret"}, proxy="http://me:s3cret@h:1", ca_file="ca.pem", retries=2
)


def test_options_show_no_secret_and_pickle() -> None:
    assert repr(SECRET) == (
        "HttpOptions(retries=2, headers={'X-Key': '…'}, auth='…', proxy='http://…@h:1', ca_file='ca.pem')"
    )
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET
    pipe = sl.read_lines("http://h/x.txt", http=SECRET)
    assert "s3cret" not in f"{pipe}{pipe!r}{pipe.plan!r}"
    again = cloudpickle.loads(cloudpickle.dumps(pipe))
    assert again.plan.source.access.http == SECRET


def test_snapshots_hold_no_secret(nginx: Nginx) -> None:
    pipe = sl.read_lines(nginx.url("private/x.txt"), http=HttpOptions(auth=("me", "secret")))
    with pipe.open() as stream:
        next(stream)
        assert "secret" not in str(stream.snapshot().to_json())


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(PlanError, match=r"http://h/x@y and http=HttpOptions\(auth=") as refused:
        given_paths("http://me:s3cret@h/x@y")
    assert "s3cret" not in str(refused.value)
    assert given_paths("http://h/x@y?me:z@h") == ("http://h/x@y?me:z@h",)
    with pytest.raises(PlanError, match="follows a # is never sent"):
        given_paths("http://h/x#y")


@pytest.mark.parametrize(
    "options",
    [
        {"auth": ("a:b", "s3cret")},
        {"auth": ("s3cret",)},
        {"auth": ("a", b"s3cret")},
        {"auth": 7},
        {"auth": ""},
        {"auth": "s3cret\nX: y"},
        {"auth": "s3cret", "headers": {"authorization": "s3cret"}},
        {"headers": {"X-Key": "s3cret\r\nX: y"}},
        {"headers": {"X Key": "s3cret"}},
        {"headers": {"Range": "bytes=0-"}},
        {"headers": {"Accept-Encoding": "gzip"}},
        {"proxy": 7},
        {"proxy": "socks5://me:s3cret@h:1"},
        {"proxy": "me:s3cret"},
        {"ca_file": 7},
        {"ca_file": ""},
        {"client_cert": ("a", "b", "c")},
        {"client_cert": ("a", None)},
        {"connect_timeout_s": 0},
        {"deadline_s": -1},
        {"deadline_s": None},
    ],
)
def test_options_are_checked_where_they_are_written_and_no_secret_is_shown(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"HttpOptions\(") as refused:
        HttpOptions(**options)
    assert "s3cret" not in str(refused.value)


def test_no_file_of_certificates_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    assert HttpOptions(ca_file=tmp_path / "missing.pem").ca_file == tmp_path / "missing.pem"
    assert os.fspath(HttpOptions(client_cert="c.pem").client_cert) == "c.pem"  # type: ignore[arg-type]
