import asyncio
import gzip
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

import streamline as sl
from streamline.core.meters import Traffic
from streamline.errors import PlanError, PlanTypeError, ReadError
from streamline.io.storage import http
from streamline.io.storage import retry as attempts
from streamline.io.storage.http import HttpStorage
from streamline.io.storage.http_client import HttpClient
from streamline.io.storage.http_response import retry_after_s
from streamline.io.storage.options import HttpOptions
from streamline.sources import http_stream as http_reader
from tests.laws.profile import in_turn, sampled

DATA = b"".join(b"line %d\n" % number for number in range(8))


@pytest.fixture
async def storage() -> AsyncIterator[HttpStorage]:
    storage = HttpStorage(HttpOptions(retries=3, timeout_s=5))
    yield storage
    await storage.aclose()


async def read(storage: HttpStorage, url: str, start: int = 0, stop: int | None = None) -> bytes:
    async with aclosing(storage.blocks(url, start, stop)) as blocks:
        found = [block async for block in blocks]
    assert all(found)
    return b"".join(found)


@pytest.fixture
def url(server: Any) -> str:
    server.objects["x.txt"] = DATA
    return str(server.url("x.txt"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, None), (0, 2), (5, 9), (len(DATA), None), (4, 4), (2, 999)])
@pytest.mark.parametrize("ranges", [True, False])
async def test_any_bytes_can_be_read(
    storage: HttpStorage, server: Any, url: str, start: int, stop: int | None, ranges: bool
) -> None:
    server.script = [server.faulty(ranges=ranges)]
    assert await read(storage, url, start, stop) == DATA[start:stop]


@pytest.mark.parametrize("chunks", [0, 1, 7])
async def test_a_part_that_ends_properly_before_what_its_header_told_is_gone_on_with(
    storage: HttpStorage, server: Any, url: str, chunks: int
) -> None:
    """In chunks, only Content-Range says how much there is to come."""
    server.script = [server.faulty(chunked=True, chunks=chunks)]
    assert await read(storage, url, 3, 30) == DATA[3:30]
    assert [request.start for request in server.requests] == [3, 3 + chunks]
    server.script = [server.faulty(chunked=True, chunks=0)] * 9
    with pytest.raises(ReadError, match="failed 4 times in a row at byte 3: the body ended at byte 3, expected 30"):
        await read(storage, url, 3, 30)
    server.script.clear()


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize(("cut", "etag"), in_turn(range(len(DATA)), ['"v1"', 'W/"v1"', None]))
async def test_a_connection_cut_after_any_byte_resumes_there(
    storage: HttpStorage, server: Any, url: str, cut: int, etag: str | None
) -> None:
    server.script = [server.faulty(cut=cut, etag=etag), server.faulty(etag=etag)]
    assert await read(storage, url) == DATA
    assert [request.start for request in server.requests] == [0, cut]
    if cut and etag == '"v1"':
        assert server.requests[1].headers["if-range"] == etag
    else:  # a weak ETag may not be used to go on with
        assert "if-range" not in server.requests[1].headers


@pytest.mark.parametrize("cut", sampled(range(1, len(DATA)), 5))
async def test_a_server_that_ignores_range_sends_again_what_is_skipped(
    storage: HttpStorage, server: Any, url: str, cut: int
) -> None:
    server.script = [server.faulty(cut=cut, ranges=False), server.faulty(ranges=False)]
    assert await read(storage, url) == DATA


async def test_a_chunked_body_ends_where_it_says(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(chunked=True)]
    assert await read(storage, url) == DATA


@pytest.mark.parametrize("cut", [0, 5, 6 * 20 + 2, 6 * len(DATA), 6 * len(DATA) + 2])
async def test_a_chunked_body_that_is_cut_is_resumed(storage: HttpStorage, server: Any, url: str, cut: int) -> None:
    server.script = [server.faulty(chunked=True, cut=cut)]
    assert await read(storage, url) == DATA


async def test_byte_by_byte_is_fine(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty("drip")]
    assert await read(storage, url) == DATA
    assert len(server.requests) == 1


@pytest.mark.parametrize("at_most", [1, 7])
async def test_a_server_may_give_less_than_the_range(storage: HttpStorage, server: Any, url: str, at_most: int) -> None:
    server.script = [server.faulty(at_most=at_most)] * 60
    assert await read(storage, url, 1) == DATA[1:]


async def test_a_range_without_a_total_goes_on_until_nothing_is_behind(
    storage: HttpStorage, server: Any, url: str
) -> None:
    server.script = [server.faulty(total="*", at_most=30)] * 60
    assert await read(storage, url, 1) == DATA[1:]


async def test_progress_resets_the_count_of_attempts(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(cut=1), server.faulty("status", code="503 Busy")] * 30
    assert await read(storage, url) == DATA


@pytest.mark.parametrize(
    "code", ["408 Timeout", "429 Slow down", "500 Oops", "502 Bad", "503 Busy", "504 Late", "599 ?"]
)
async def test_a_busy_server_is_asked_again(storage: HttpStorage, server: Any, url: str, code: str) -> None:
    server.script = [server.faulty("status", code=code)] * 3
    assert await read(storage, url) == DATA
    assert (await storage.stat(url)).size == len(DATA)


async def test_a_server_that_stays_busy_is_an_error(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(cut=9)] + [server.faulty("status", code="503 Busy")] * 99
    with pytest.raises(ReadError, match=r"x\.txt: failed 4 times in a row at byte 9: .*503 Service Unavailable"):
        await read(storage, url)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("401 No", "credentials.*HttpOptions"),
        ("403 No", "403 Forbidden.*signed URL has expired"),
        ("404 No", "404 Not Found.*check the URL"),
        ("410 No", "check the URL"),
        ("400 No", "400 Bad Request"),
        ("304 No", "304"),
    ],
)
async def test_a_refusal_fails_at_once_with_what_to_do(
    storage: HttpStorage, server: Any, url: str, code: str, advice: str
) -> None:
    server.script = [server.faulty("status", code=code)] * 99
    with pytest.raises(ReadError, match=rf"x\.txt: the server answered.*{advice}"):
        await read(storage, url)
    assert len(server.requests) == 1
    with pytest.raises(ReadError, match=advice):
        await storage.stat(url)


async def test_a_content_length_that_is_too_long_is_never_an_end(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(told=len(DATA) + 10, ranges=False)] * 99
    with pytest.raises(ReadError, match=f"failed 4 times in a row at byte {len(DATA)}"):
        await read(storage, url)


async def test_a_content_length_that_shrinks_is_an_error(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(told=len(DATA) + 10)]
    with pytest.raises(ReadError, match=rf"has {len(DATA)} bytes|had {len(DATA) + 10} bytes and has {len(DATA)}"):
        await read(storage, url)


async def test_more_than_the_content_length_is_never_an_end(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(told=len(DATA) - 10)] * 99
    with pytest.raises(ReadError):
        await read(storage, url)


async def test_a_body_without_length_or_chunks_is_refused(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(length=False)]
    with pytest.raises(ReadError, match="a broken connection would look like the end"):
        await read(storage, url)


@pytest.mark.parametrize("ranges", [True, False])
async def test_another_version_on_the_way_names_both(storage: HttpStorage, server: Any, url: str, ranges: bool) -> None:
    server.script = [server.faulty(cut=9), server.faulty(etag='"v2"', ranges=ranges)]
    with pytest.raises(ReadError, match=r'changed while it was read, at byte 9: its ETag was "v1" and is "v2"'):
        await read(storage, url)


async def test_another_version_before_the_first_byte_is_no_change(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty(cut=0), server.faulty(etag='"v2"')]
    assert await read(storage, url) == DATA


async def test_another_date_or_length_is_another_version(storage: HttpStorage, server: Any, url: str) -> None:
    dates = [("Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT",), ("Last-Modified: Tue, 02 Jan 2024 00:00:00 GMT",)]
    server.script = [server.faulty(cut=9, etag=None, headers=date, ranges=False) for date in dates]
    with pytest.raises(ReadError, match=r"last modified Mon.*and now Tue"):
        await read(storage, url)
    assert server.requests[1].headers["if-range"] == dates[0][0].partition(": ")[2]
    server.script = [server.faulty(cut=9, etag=None), server.faulty(etag=None, content=DATA + b"x")]
    with pytest.raises(ReadError, match=f"had {len(DATA)} bytes and has {len(DATA) + 1}"):
        await read(storage, url)


async def test_what_can_not_be_recognised_is_not_gone_on_with(storage: HttpStorage, server: Any, url: str) -> None:
    blind = {"chunked": True, "etag": None, "ranges": False}
    server.script = [server.faulty(cut=60, **blind), server.faulty(**blind)]
    with pytest.raises(ReadError, match="neither goes on from there nor tells"):
        await read(storage, url)


@pytest.mark.parametrize("told", ["bytes 0-9/72", "bytes 9-3/72", "bytes 9-80/72", "items 9-71/72", "bytes */72", ""])
async def test_an_answer_with_another_range_than_asked_for_is_an_error(
    storage: HttpStorage, server: Any, url: str, told: str
) -> None:
    code = "206 Partial Content"
    server.script = [server.faulty("status", code=code, headers=(f"Content-Range: {told}",) if told else ())]
    with pytest.raises(ReadError, match="asked for bytes from 9 on"):
        await read(storage, url, 9)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_start_after_the_end_is_an_error(
    storage: HttpStorage, server: Any, url: str, ranges: bool, chunked: bool
) -> None:
    server.script = [server.faulty(ranges=ranges, chunked=chunked)]
    with pytest.raises(ReadError, match=f"has {len(DATA)} bytes, expected more than 1,000"):
        await read(storage, url, 1000)


async def test_a_proxy_of_the_environment_is_asked(
    storage: HttpStorage, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.base)
    server.objects["http://far.example/x.txt"] = DATA
    assert await read(storage, "http://far.example/x.txt") == DATA
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.objects["x.txt"] = DATA
    assert await read(storage, server.url("x.txt")) == DATA


async def test_a_refused_connection_is_an_error(storage: HttpStorage, server: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x"
        with pytest.raises(ReadError, match="failed 4 times in a row at byte 0: Cannot connect") as failed:
            await read(storage, url)
    assert isinstance(failed.value.__cause__, aiohttp.ClientConnectorError)


@pytest.mark.parametrize("url", ["http://", "http://h:99999999/", "http://[::1/x"])
async def test_what_is_no_url_is_an_error_at_once(storage: HttpStorage, url: str) -> None:
    with pytest.raises(ReadError, match="http"):
        await read(storage, url)


async def test_names_are_looked_up_and_the_thread_for_that_ends(storage: HttpStorage, server: Any, url: str) -> None:
    before = set(threading.enumerate())
    assert await read(storage, url.replace("127.0.0.1", "localhost")) == DATA
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "streamline names"
    await storage.aclose()
    thread.join()


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "br", "zstd", "deflate", "gzip, gzip", "rot13"])
async def test_what_is_compressed_on_the_way_is_refused(
    storage: HttpStorage, server: Any, url: str, encoding: str
) -> None:
    server.script = [server.faulty(content=gzip.compress(DATA), headers=(f"Content-Encoding: {encoding}",))] * 2
    with pytest.raises(ReadError, match=rf"x\.txt: .*Content-Encoding: {encoding}"):
        await read(storage, url)
    with pytest.raises(ReadError, match="asked for as it is"):
        await storage.stat(url)
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("x.txt", "identity"), ("x.txt", "aws-chunked"), ("x.GZ", "gzip"), ("x.gz", "x-gzip"), ("x.zst?v=1.x", "zstd")],
)
async def test_an_encoding_that_says_what_the_name_says_is_the_objects_own(
    storage: HttpStorage, server: Any, name: str, encoding: str
) -> None:
    server.script = [server.faulty(content=DATA, headers=(f"Content-Encoding: {encoding}",))]
    assert await read(storage, server.url(name)) == DATA


@pytest.mark.parametrize("name", ["ö ü.txt", "a b.txt", "100%.txt", "a%20b.txt", "x+y&z=1.txt", "日本.txt"])
async def test_names_are_quoted_where_they_need_it(storage: HttpStorage, server: Any, name: str) -> None:
    server.objects[name] = server.objects["a b.txt"] = DATA
    assert await read(storage, server.url(name)) == DATA


async def test_a_signed_url_is_sent_as_it_is(storage: HttpStorage, server: Any) -> None:
    path = "x%2Fy.txt?X-Signature=a%2Bb%3D&d=%7Ee"
    for _ in range(2):  # of a server that is known, URLs are made in another way
        with pytest.raises(ReadError, match="404"):
            await read(storage, server.url(path))
    assert [request.path for request in server.requests] == ["x/y.txt?X-Signature=a+b=&d=~e"] * 2


@pytest.mark.parametrize("path", ["/a%2Fb", "//a/../b", "/100%", "/ö?x=%2F#y", "/a;b=c?", "/%7ea", ""])
async def test_a_url_of_a_known_server_is_what_it_is_of_another(path: str) -> None:
    client = HttpClient(HttpOptions(), Traffic())
    url = f"http://Host.example:80{path}"
    first, second = client._target(url), client._target(url)
    await client.aclose()
    assert first == second
    assert str(first[0]) == str(second[0])
    assert first[0].raw_path_qs == second[0].raw_path_qs


async def test_a_url_without_a_path_is_the_servers_root_after_others_too(
    storage: HttpStorage, server: Any, url: str
) -> None:
    server.objects[""] = b"the root"
    assert await read(storage, url) == DATA
    assert await read(storage, server.base) == b"the root"


async def test_credentials_in_a_url_are_sent_as_a_header(storage: HttpStorage, server: Any, url: str) -> None:
    assert await read(storage, url.replace("http://", "http://me:secret@")) == DATA
    assert server.requests[0].headers["authorization"].startswith("Basic ")


async def test_headers_are_sent_with_every_request(server: Any, url: str) -> None:
    storage = HttpStorage(HttpOptions(headers={"Authorization": "Bearer me"}))
    server.script = [server.faulty(cut=9)]
    async with aclosing(storage):
        assert await read(storage, url) == DATA
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer me"] * 2


@pytest.mark.parametrize("ranges", [True, False])
async def test_the_size_is_asked_for(storage: HttpStorage, server: Any, url: str, ranges: bool) -> None:
    server.objects["empty"] = b""
    server.script = [server.faulty(ranges=ranges)] * 2
    assert (await storage.stat(url)).size == len(DATA)
    assert (await storage.stat(server.url("empty"))).size == 0
    server.script = [server.faulty(chunked=True, ranges=False)]
    assert (await storage.stat(url)).size is None


async def test_leaving_in_the_middle_closes_the_connection(storage: HttpStorage, server: Any, url: str) -> None:
    server.script = [server.faulty("stall", sent=9)]  # ends when the client has gone
    blocks = storage.blocks(url)
    assert await anext(blocks) == DATA[:9]
    await blocks.aclose()


async def test_being_cancelled_while_waiting_for_a_byte_leaves_nothing(server: Any, url: str) -> None:
    storage = HttpStorage(HttpOptions())
    server.script = [server.faulty("stall")]
    task = asyncio.ensure_future(read(storage, url))
    await server.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await storage.aclose()


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("soon", None),
        ("Mon, 01 Jan 2024 00:00:30 GMT", 30.0),
        ("Sun, 31 Dec 2023 0:0:0 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(told: str | None, seconds: float | None) -> None:
    assert retry_after_s(told, datetime(2024, 1, 1, tzinfo=UTC)) == seconds


async def test_the_pause_grows_and_a_server_can_ask_for_more(
    storage: HttpStorage, server: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    monkeypatch.setattr(attempts, "BACKOFF_S", 1.0)
    server.script = [server.faulty("status", code="503 Busy", headers=(told,)) for told in ("X: y", "Retry-After: 7")]
    assert await read(storage, url) == DATA
    assert 0.5 <= pauses[0] <= 1
    assert 8 <= pauses[1] <= 9


@pytest.mark.parametrize("options", [{"retries": -1}, {"timeout_s": 0}, {"timeout_s": float("nan")}])
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"at least 0|more than 0"):
        HttpOptions(**options)


def test_a_header_that_is_refused_keeps_its_secret() -> None:
    with pytest.raises(PlanTypeError) as refused:
        HttpOptions(headers={"Authorization": b"secret"})  # type: ignore[dict-item]
    assert "secret" not in str(refused.value)


def test_a_connection_may_be_silent_for_ever() -> None:
    assert HttpOptions(timeout_s=float("inf")).timeout_s == float("inf")


async def test_a_real_server_is_read_and_resumed(storage: HttpStorage, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(DATA)
    (tmp_path / "empty.txt").write_bytes(b"")

    async def serve_file(request: web.Request) -> web.FileResponse:
        return web.FileResponse(tmp_path / request.match_info["name"])

    app = web.Application()
    app.router.add_get("/{name}", serve_file)  # HEAD too
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=1e6)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await read(storage, f"{base}/x.txt") == DATA
        assert await read(storage, f"{base}/x.txt", 9) == DATA[9:]
        assert await read(storage, f"{base}/x.txt", len(DATA)) == b""
        assert await read(storage, f"{base}/empty.txt") == b""
        assert (await storage.stat(f"{base}/empty.txt")).size == 0
        await storage.aclose()  # one that waited for the server to hang up would hang
    finally:
        await runner.cleanup()


OLD, NEW = "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT", "Last-Modified: Tue, 02 Jan 2024 00:00:00 GMT"
NOW = "Date: Mon, 01 Jan 2024 00:00:00 GMT"


@pytest.mark.parametrize(
    ("etag", "headers", "named"),
    [
        ('"v1"', (), '"v1"'),
        ('W/"v1"', (OLD,), 'W/"v1"'),
        (None, (OLD,), OLD),
        (None, (OLD, NOW.replace("01 Jan", "02 Jan")), OLD),
        (None, (OLD, NOW), None),  # another change within that second would have the same date
        (None, (OLD, "Date: yesterday"), OLD),
        (None, ("Content-MD5: Q2hlY2sgSW50ZWdyaXR5IQ==",), None),
        (None, (), None),
    ],
)
async def test_an_object_of_which_nothing_names_the_version_is_refused_on_demand(
    server: Any, url: str, etag: str | None, headers: tuple[str, ...], named: str | None
) -> None:
    server.otherwise = server.faulty(etag=etag, headers=headers)
    async with aclosing(HttpStorage(HttpOptions())) as storage:
        assert (await storage.stat(url)).etag == named
        assert await read(storage, url) == DATA
    async with aclosing(HttpStorage(HttpOptions(require_validator=True))) as storage:
        if named is not None:
            assert (await storage.stat(url)).etag == named
            assert await read(storage, url, 3) == DATA[3:]
            return
        for asked in (storage.stat(url), read(storage, url), storage.read(url, 3, 9)):
            with pytest.raises(ReadError, match=r"neither an ETag nor a Last-Modified .* leave require_validator out"):
                await asked


@pytest.mark.parametrize(("first", "then"), [('"v1"', None), (None, '"v1"')])
async def test_a_version_that_is_named_in_another_way_is_refused_on_demand(
    server: Any, url: str, first: str | None, then: str | None
) -> None:
    """As where two servers of one name are set up differently: nothing tells whether they have the same object."""
    headers = {None: (OLD,), '"v1"': ()}
    script = [server.faulty(cut=9, etag=first, headers=headers[first], ranges=False)]
    script += [server.faulty(etag=then, headers=headers[then], ranges=False)]
    for strict in (True, False):
        server.script = list(script)
        async with aclosing(HttpStorage(HttpOptions(require_validator=strict))) as storage:
            if not strict:
                assert await read(storage, url) == DATA
                continue
            with pytest.raises(
                ReadError, match=r"expected an? (ETag|Last-Modified), as the server sent before, got none"
            ):
                await read(storage, url)


async def test_a_date_names_the_version_of_parts_that_are_read_one_by_one(
    storage: HttpStorage, server: Any, url: str
) -> None:
    server.otherwise = server.faulty(etag=None, headers=(OLD,))
    etag = (await storage.stat(url)).etag
    assert await storage.read(url, 0, 9, etag) == DATA[:9]
    server.otherwise = server.faulty(etag=None, headers=(NEW,))
    with pytest.raises(ReadError, match=r"it was last modified Mon, 01 Jan .* and now Tue, 02 Jan"):
        await storage.read(url, 9, 20, etag)


async def test_that_replacements_are_not_noticed_is_said_once_for_each_host(
    storage: HttpStorage, server: Any, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "UNNAMED", set())
    server.objects["empty"] = b""
    server.otherwise = server.faulty(etag=None)
    assert (await storage.stat(server.url("empty"))).size == 0  # 416, which need not name any version
    assert caplog.messages == []
    for _ in range(3):
        await read(storage, url)
        await read(storage, url.replace("127.0.0.1", "localhost"))
    assert [re.findall(r"an object of (\S+) is replaced", message) for message in caplog.messages] == [
        [url.split("/")[2]],
        [url.split("/")[2].replace("127.0.0.1", "localhost")],
    ]
    assert "HttpOptions(require_validator=True) refuses" in caplog.text


ODD = ["\x01", "\x1b[31m", "\x9b31m", "\u202e", "\udcff", "\\", "é"]
"""Control characters, escape sequences in 7 and 8 bits, an override, what is no UTF-8; and two that are harmless."""


def sending(head: str, body: str = "") -> Any:
    """Return a behaviour: an answer as it is written here, and a connection that breaks."""

    async def behave(_: Any, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\n\r\n{body}".encode(errors="surrogateescape"))

    return behave


@pytest.mark.one_in(3)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["ETag", "Last-Modified"])
async def test_a_version_of_any_characters_is_gone_on_with_and_shown(
    storage: HttpStorage, server: Any, url: str, name: str, odd: str
) -> None:
    """Nothing is sent back that can't be: aiohttp refuses it, with an error of its own."""
    head, rest = f"{name}: a{odd}b\r\nContent-Length: 9", "line 0\nli"
    server.script = [sending(f"200 OK\r\n{head}", rest[:3]), sending(f"200 OK\r\n{head}", rest)]
    assert await read(storage, url, stop=9) == rest.encode()
    assert ("if-range" in server.requests[1].headers) == (odd == "é")
    server.script = [sending(f"200 OK\r\n{head}", rest[:3]), sending(f"200 OK\r\n{name}: c\r\nContent-Length: 9", rest)]
    with pytest.raises(ReadError, match="changed while it was read") as caught:
        await read(storage, url, stop=9)
    assert str(caught.value).isprintable()
    server.script = [sending(f"200 OK\r\n{head}", rest)]
    assert ((await storage.stat(url)).etag or "").isprintable()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("odd", ODD[:5])
async def test_nothing_that_a_server_says_acts_on_a_terminal(
    server: Any, url: str, odd: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(http_reader, "PAUSE_S", 0.0)
    answers = [
        f"503 a{odd}b\r\nRetry-After: {odd}",
        f"200 OK\r\nContent-Encoding: a{odd}b\r\nContent-Length: 3",
        f"206 OK\r\nContent-Range: a{odd}b\r\nContent-Length: 3",
        f"302 OK\r\nLocation: ftp://a{odd}b\r\nContent-Length: 0",
        f"302 OK\r\nLocation: /a{odd}b\r\nContent-Length: 0\r\nConnection: close",
        "404 OK\r\nContent-Length: 99",
        f"200 OK\r\nContent-Type: text/a{odd}b\r\nContent-Length: 99",
        f"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{odd}",
        f"200 OK\r\na{odd}b: x",
        f"2{odd}",
    ]
    for answer in answers:
        server.otherwise = sending(answer, f"<title>a{odd}b</title>")
        async with aclosing(HttpStorage(HttpOptions(retries=1))) as storage:
            with pytest.raises(ReadError) as caught:
                await read(storage, url)
        assert str(caught.value).isprintable(), answer
        with pytest.raises(ReadError) as caught:
            async with sl.stream_http(url, framing="sse", http=HttpOptions(retries=1)).open() as stream:
                await anext(stream)
        assert str(caught.value).isprintable(), answer
    assert [text for text in caplog.messages if not text.isprintable()] == []
    assert len(caplog.messages) > 5
