"""What breaks between client and server: the file's records come out, or a clear error does; never a short stream."""

from __future__ import annotations

import gzip
import json
import logging
import math
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

import streamline as sl
from streamline.errors import DataError, ReadError
from streamline.io.storage import retry as attempts
from streamline.io.storage.http import HttpStorage
from streamline.io.storage.options import HttpOptions
from tests.laws.profile import covering, sampled
from tests.servers.faults import (
    Fault,
    Faults,
    busy,
    cut,
    drip,
    flipped,
    garbage,
    replaced,
    reset,
    silence,
    told,
)
from tests.servers.nginx import Nginx

DATA = b"".join(b"line %d\n" % number for number in range(8))
LINES = DATA.decode().splitlines()
PACKED = gzip.compress(DATA, mtime=0)
OPTIONS = HttpOptions(retries=3, timeout_s=5)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)


@pytest.fixture(scope="module", autouse=True)
def _files(nginx: Nginx) -> None:
    nginx.put("x.txt", DATA)
    nginx.put("x.gz", PACKED)


@pytest.fixture
async def storage() -> AsyncIterator[HttpStorage]:
    storage = HttpStorage(OPTIONS)
    yield storage
    await storage.aclose()


async def bytes_of(storage: HttpStorage, url: str, etag: str | None = None) -> bytes:
    async with aclosing(storage.blocks(url, etag=etag)) as blocks:
        return b"".join([block async for block in blocks])


def records(url: str, **options: Any) -> tuple[list[str], Exception | None]:
    """Return the lines that come out of the public API, and what it fails with."""
    found: list[str] = []
    try:
        with sl.read_lines(url, http=HttpOptions(**{"retries": 3, "timeout_s": 5, **options})).open() as stream:
            found.extend(stream)
    except (ReadError, DataError) as error:
        return found, error
    return found, None


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("breaks", [cut, reset])
@pytest.mark.parametrize("path", ["x.txt", "noranges/x.txt", "chunked/x.txt"])
async def test_an_answer_that_breaks_after_any_byte_is_gone_on_with(
    storage: HttpStorage, faults: Faults, breaks: Callable[[int], Fault], path: str
) -> None:
    """Bytes of the head, too; a chunked body that nothing identifies is refused rather than gone on with."""
    lengths: list[int] = []

    async def measured(answer: bytes, writer: Any) -> None:
        lengths.append(len(answer))
        writer.write(answer)

    faults.script = [measured]
    assert await bytes_of(storage, faults.url(path)) == DATA
    for sent in sampled(range(lengths[0]), 7 if breaks is cut and path == "x.txt" else 29):
        faults.script = [breaks(sent)]
        try:
            found = await bytes_of(storage, faults.url(path))
        except ReadError as error:
            found = DATA if "neither goes on from there nor tells" in str(error) and "chunked" in path else b""
        assert found == DATA, sent


@pytest.mark.one_in(4, 2)
@pytest.mark.parametrize("looks_too", [True, False])
@pytest.mark.parametrize("name", ["x.txt", "x.gz"])
def test_records_are_the_files_whatever_breaks(faults: Faults, name: str, looks_too: bool) -> None:
    faults.looks_too = looks_too
    for sent in sampled(range(0, 320, 9), 2):
        faults.script = [cut(sent), reset(sent // 2), busy()]
        assert records(faults.url(name)) == (LINES, None), sent


def test_bursts_of_503_are_waited_out_and_too_many_are_an_error(faults: Faults) -> None:
    faults.script = [busy(), busy("429 Too Many Requests", "Retry-After: 0"), busy()]
    assert records(faults.url("x.txt")) == (LINES, None)
    faults.script = [busy()] * 99
    found, error = records(faults.url("x.txt"))
    assert (found, len(faults.script)) == ([], 95)
    assert "failed 4 times in a row at byte 0: the server answered 503 Service Unavailable" in str(error)


@pytest.mark.parametrize(("more", "times", "name"), covering([-60, -1, 1, 1000], [1, 99], ["x.txt", "x.gz"]))
def test_a_wrong_length_is_never_an_end(faults: Faults, more: int, times: int, name: str) -> None:
    """What is cut off at -1 is the last line's end: HTTP itself ignores it after an answer (RFC 9112, 2.2)."""
    faults.script = [told(more)] * times
    found, error = records(faults.url(name))
    assert found == LINES[: len(found)]
    assert error is not None or found == LINES
    if times == 99 and (name, more) != ("x.txt", -1):
        assert error is not None
        assert name in str(error)


def test_dripping_is_slow_and_right(faults: Faults) -> None:
    faults.script = [drip]
    assert records(faults.url("x.txt")) == (LINES, None)
    assert len(faults.requests) == 1


@pytest.mark.long
def test_a_bit_that_flips_in_a_gzip_file_is_found(faults: Faults) -> None:
    for byte in range(10, len(PACKED)):  # after its head, where a few bits mean nothing
        faults.script = [flipped(byte)]
        _, error = records(faults.url("x.gz"))
        assert isinstance(error, DataError), byte
        assert "x.gz" in str(error)


@pytest.mark.parametrize("sent", [250, 280, 300])
def test_an_object_replaced_while_it_is_read_names_both_etags(nginx: Nginx, faults: Faults, sent: int) -> None:
    nginx.put("new.txt", DATA)
    faults.script = [replaced(sent, lambda: nginx.put("new.txt", DATA + b"more\n"))]
    found, error = records(faults.url("new.txt"))
    assert found == LINES[: len(found)]
    assert f"new.txt changed {'since it was listed' if sent == 250 else 'while it was read, at byte'}" in str(error)
    assert str(error).count('"') == 4  # two ETags


async def test_another_version_than_the_listing_says_names_both(storage: HttpStorage, nginx: Nginx) -> None:
    etag = (await storage.stat(nginx.url("x.txt"))).etag
    assert await bytes_of(storage, nginx.url("x.txt"), etag) == DATA
    with pytest.raises(ReadError, match=rf'changed since it was listed: its ETag was "v0" and is {etag}'):
        await bytes_of(storage, nginx.url("x.txt"), '"v0"')
    with pytest.raises(ReadError, match=r'its ETag was "v0" and is'):
        await storage.read(nginx.url("x.txt"), 3, 9, '"v0"')


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff" * 500,
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 2xx OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-"
        + b"9" * 5000
        + b"/*\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nabc",
        b"HTTP/1.1 503 Busy\r\nRetry-After: " + b"9" * 5000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nRetry-After: Mon, 99 Foo 99999 99:99:99 +99999\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
    ids=lambda data: data[:40].decode(errors="replace") + str(len(data)),
)
@pytest.mark.parametrize("times", [1, 99])
def test_garbage_is_no_answer(faults: Faults, data: bytes, times: int) -> None:
    faults.script = [garbage(data)] * times
    found, error = records(faults.url("x.txt"))
    assert (found == LINES) == (error is None)
    assert error is None or (found == [] and isinstance(error, ReadError) and "x.txt" in str(error))
    assert times == 1 or error is not None


def test_what_a_port_for_tls_says_to_plain_http_is_named(faults: Faults) -> None:
    faults.script = [garbage(bytes.fromhex("15030300020246"))]  # an alert: protocol_version
    found, error = records(faults.url("x.txt"))
    assert found == []
    assert "that port speaks TLS: is it an https:// URL?" in str(error)
    assert len(faults.requests) == 1


@pytest.mark.parametrize("data", [b"HTTP/1.1 9x\r\n\r\n", bytes.fromhex("15030300020246")], ids=["garbage", "TLS"])
def test_a_traceback_shows_no_signature_nor_do_the_errors_that_caused_it(faults: Faults, data: bytes) -> None:
    faults.script = [garbage(data)] * 2
    _, error = records(faults.url("x.txt?X-Amz-Signature=s3cret"), retries=0)
    shown = "".join(traceback.format_exception(error))
    assert "x.txt?X-Amz-Signature=…" in shown
    assert "s3cret" not in shown


def test_a_server_that_never_answers_meets_the_deadline(faults: Faults) -> None:
    faults.script = [silence(0)] * 99
    found, error = records(faults.url("x.txt"), retries=99, timeout_s=0.05, deadline_s=0.2)
    assert found == []
    assert "gave up at byte 0" in str(error)
    assert "deadline_s=0.2 leaves" in str(error)


def test_progress_that_is_too_slow_meets_the_deadline(faults: Faults) -> None:
    """A byte for each connection would go on for ever."""
    faults.script = [silence(270)] * 99
    found, error = records(faults.url("x.txt"), retries=99, timeout_s=0.05, deadline_s=0.3)
    assert found == LINES[: len(found)]
    assert "deadline_s=0.3" in str(error)


def test_a_wait_that_the_deadline_forbids_is_an_error_at_once(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "monotonic", lambda: 0.0)
    faults.script = [busy("429 Too Many Requests", "Retry-After: 3600")]
    found, error = records(faults.url("x.txt"))
    assert found == []
    assert "deadline_s=300 leaves 300.0 s: the server answered 429 Too Many Requests, and asks to wait 3,600 s" in str(
        error
    )


def test_the_time_in_which_nothing_is_wanted_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(attempts, "monotonic", lambda: now[0])
    made = attempts.Attempts("x", 1, deadline_s=10)
    now[0] = 4
    made.arrived(10)
    made.progress()
    now[0] = 1000
    made.wanted()
    assert made.left_s == 6
    now[0] = 1005
    made.arrived(2**20)  # a MiB: the clock begins anew
    assert made.left_s == 10
    made.progress()
    made.wanted()
    now[0] = 1016
    with pytest.raises(ReadError, match="too slow: 5 bytes in deadline_s=10 s, expected a MiB"):
        made.arrived(5)
    assert attempts.Attempts("x", 1).left_s == math.inf


def test_tries_again_are_counted_and_logged_without_secrets(
    faults: Faults, caplog: pytest.LogCaptureFixture, nginx: Nginx
) -> None:
    faults.script = [cut(270), busy(), cut(280)]
    options = HttpOptions(retries=3, auth="secret", headers={"X-Key": "secret"})
    with (
        caplog.at_level(logging.INFO, "streamline.reading"),
        sl.read_lines(faults.url("x.txt?X-Amz-Signature=secret&v=1"), http=options).open() as stream,
    ):
        assert list(stream) == LINES
        (reads,) = stream.stats().reads
        assert (reads.name, reads.requests, reads.retries) == ("read_lines", 5, 3)  # one at opening
        assert reads.bytes >= len(DATA)
        assert "asked of servers by" in str(stream.stats())
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    assert "x.txt?X-Amz-Signature=…&v=1: try 2 at byte" in caplog.messages[0]
    assert "503 Service Unavailable" in caplog.messages[1]
    assert "secret" not in caplog.text


def test_any_backend_reads_the_same_with_the_same_options_and_counts(
    backend: Any, nginx: Nginx, faults: Faults
) -> None:
    for part in range(4):
        nginx.put(f"token/p-{part}.txt", b"".join(b"%d\n" % (part * 100 + row) for row in range(50)))
        nginx.put(f"p-{part}.txt", b"".join(b"%d\n" % (part * 100 + row) for row in range(50)))
    faults.script = [cut(300)]
    pipe = sl.read_jsonl(faults.url("token/p-{0..3}.txt"), http=HttpOptions(auth="secret")).shard(4).merge()
    with pipe.open(backend=backend) as stream:
        assert list(stream) == [part * 100 + row for row in range(50) for part in range(4)]
        (reads,) = stream.stats().reads
    assert (reads.requests, reads.retries) == (4 + 5, 1)
    assert len(faults.requests) == 5


def test_a_resume_through_a_broken_proxy_gives_the_rest(faults: Faults) -> None:
    pipe = sl.read_lines(faults.url("x.gz"), http=OPTIONS)
    for taken in range(len(LINES)):
        faults.script = [cut(290)]
        with pipe.open() as stream:
            assert [next(stream) for _ in range(taken)] == LINES[:taken]
            snapshot = json.loads(json.dumps(stream.snapshot().to_json()))
        faults.script = [reset(280), busy()]
        with pipe.open(resume=sl.Snapshot.from_json(snapshot)) as stream:
            assert list(stream) == LINES[taken:]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("port", ["ranges", "noranges"])
def test_a_large_file_of_records_over_bad_lines_is_whole(nginx: Nginx, faults: Faults, port: str) -> None:
    """In parts that are fetched ahead, and from a server that has none: each answer breaks another way."""
    rows = 30_000
    nginx.put("large.jsonl", b"".join(b'{"row": %d, "text": "%s"}\n' % (row, b"x" * 40) for row in range(rows)))
    size = (nginx.root / "large.jsonl").stat().st_size
    faults.script = [cut(300_000), busy(), reset(700_001), silence(123_456), cut(0), cut(size), reset(1_000_000)]
    path = "large.jsonl" if port == "ranges" else "noranges/large.jsonl"
    with sl.read_jsonl(faults.url(path), http=HttpOptions(retries=5, timeout_s=0.3)).open() as stream:
        assert [record["row"] for record in stream] == list(range(rows))
        (reads,) = stream.stats().reads
    assert reads.retries >= 3  # a cut after what is left is none
