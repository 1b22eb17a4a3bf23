"""Opening a pipeline of files that a server has to be asked for, in the very event loop that the server runs in."""

import asyncio
import logging
import re
import threading
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import streamline as sl
from streamline.core import byte_budget as budget
from streamline.errors import ClosedError, CodeChangedWarning, PlanError, ReadError, ResumeError
from streamline.io.storage import resolve as finding
from streamline.io.storage.options import HttpOptions
from tests.laws.profile import covering
from tests.servers.nginx import Nginx
from tests.servers.s3 import Bucket

LINES = ["a", "b", "c", "d"]


async def never(*_: Any) -> None:
    """Answer nothing."""
    await asyncio.Event().wait()


def three(server: Any, **options: Any) -> Any:
    server.objects = {"0.txt": b"a\nb\n", "1.txt": b"", "2.txt": b"c\nd"}
    return sl.read_lines(server.url("{0..2}.txt"), **options).shard(1)


@pytest.mark.parametrize("backend", [sl.Inline(), sl.Threads(1)], ids=["inline", "threads"])
async def test_a_loop_goes_on_while_its_own_server_is_asked(server: Any, backend: Any) -> None:
    opened = three(server).open(backend=backend)
    assert server.requests == []
    async with opened as stream:
        assert len(server.requests) == 3
        assert [line async for line in stream] == LINES
        (reads,) = stream.stats().reads
        assert reads.requests == len(server.requests)
        snapshot = stream.snapshot()
    assert [(entry["size"], entry.get("etag")) for entry in snapshot.listing] == [(4, '"v1"'), (0, None), (3, '"v1"')]


async def test_without_a_with_the_first_item_waits_for_the_answers(server: Any) -> None:
    stream: Any = aiter(three(server))
    assert stream.stats().reads == ()
    assert server.requests == []
    assert await anext(stream) == "a"
    assert len(stream.snapshot().listing) == 3
    assert [line async for line in stream] == LINES[1:]
    assert [line async for line in three(server)] == LINES


async def test_a_snapshot_before_the_first_item_has_the_listing(server: Any) -> None:
    unbegun: Any = aiter(three(server))
    way = r"open it with `async with pipe.open\(\) as stream`, or take an item first"
    with pytest.raises(PlanError, match=rf"snapshot\(\): the stream hasn't begun, and has no state yet: {way}"):
        unbegun.snapshot()
    async with three(server).open() as stream:
        snapshot = stream.snapshot()
    assert len(snapshot.listing) == 3
    async with three(server).open(resume=snapshot) as stream:
        assert [line async for line in stream] == LINES


async def test_a_resume_at_every_line_asks_anew(server: Any) -> None:
    for taken in range(len(LINES) + 1):
        async with three(server).open() as stream:
            assert [await anext(stream) for _ in range(taken)] == LINES[:taken]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        async with three(server).open(resume=snapshot) as stream:
            assert [line async for line in stream] == LINES[taken:]


async def test_what_is_wrong_with_the_data_comes_out_of_the_with(server: Any) -> None:
    pipe = three(server)
    async with pipe.open() as stream:
        await anext(stream)
        snapshot = stream.snapshot()
    server.objects["2.txt"] = b"longer now"
    opened = pipe.open(resume=snapshot)
    with pytest.raises(ResumeError, match=r"2\.txt was .*3 bytes.* is .*10 bytes"):
        await opened.__aenter__()
    with pytest.raises(ResumeError, match=r"2\.txt was"):
        await opened.__aenter__()
    del server.objects["1.txt"]
    with pytest.raises(ReadError, match=r"1\.txt: .*404"):
        async with pipe.open():
            pass


async def test_a_date_names_a_version_where_there_is_no_etag(server: Any) -> None:
    def dated(day: int) -> Any:
        return server.faulty(etag=None, headers=(f"Last-Modified: Mon, 0{day} Jan 2024 00:00:00 GMT",))

    server.objects = {"x.txt": b"a\nb\nc\n"}
    server.otherwise = dated(1)
    pipe = sl.read_lines(server.url("x.txt"))
    async with pipe.open() as stream:
        assert await anext(stream) == "a"
        snapshot = stream.snapshot()
    assert ',"etag":"' in snapshot.to_json()
    without = sl.Snapshot.from_json(re.sub(r',"etag":"[^"]*"', "", snapshot.to_json()))
    server.otherwise = dated(2)
    with pytest.raises(
        ResumeError, match=r"was \(6 bytes, Last-Modified: Mon, 01 .* is \(6 bytes, Last-Modified: Mon, 02"
    ):
        await pipe.open(resume=snapshot).__aenter__()
    for known, otherwise in ((snapshot, dated(1)), (snapshot, None), (without, dated(2))):
        server.otherwise = otherwise  # as ever; with an ETag now; before dates were kept
        async with pipe.open(resume=known) as stream:
            assert [line async for line in stream] == ["b", "c"]


async def test_many_urls_are_asked_for_their_versions_if_each_must_have_one(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "MOST_ASKED", 2)
    for strict in (False, True):
        pipe = three(server, http=HttpOptions(require_validator=strict))
        async with pipe.open() as stream:
            assert [entry.get("etag") for entry in stream.snapshot().listing] == (
                ['"v1"', None, '"v1"'] if strict else [None] * 3
            )


async def test_a_loop_over_a_file_that_is_missing_fails_for_ever(server: Any) -> None:
    stream: Any = aiter(sl.read_lines(server.url("gone")).shard(1))
    for _ in range(2):
        with pytest.raises(ReadError, match="404"):
            await anext(stream)
    assert len(server.requests) == 1
    await stream.aclose()


async def test_what_needs_no_look_is_refused_at_open(server: Any) -> None:
    pipe: Any = three(server)
    with pytest.raises(PlanError, match="1 shards for 2 ranks"):
        pipe.open(rank=0, world_size=2)
    with pytest.raises(PlanError, match="memory"):
        pipe.open(memory=0)
    assert server.requests == []


async def test_local_files_are_looked_at_when_open_is_called(tmp_path: Any) -> None:
    with pytest.raises(ReadError, match="gone"):
        sl.read_lines(tmp_path / "gone").open()


async def test_tries_again_while_opening_are_counted_and_logged(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipe = three(server)
    server.script = [server.faulty("status", code="503 Busy")] * 2
    with caplog.at_level(logging.INFO, "streamline.reading"):
        async with pipe.open() as stream:
            assert len(server.requests) == 5
            assert [line async for line in stream] == LINES
            (reads,) = stream.stats().reads
    assert (reads.requests, reads.retries) == (len(server.requests), 2)
    assert sum("503" in message for message in caplog.messages) == 2


async def test_a_cancellation_while_asking_leaves_nothing(server: Any) -> None:
    opened = three(server).open()
    server.script = [never] * 3
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    entering = asyncio.ensure_future(opened.__aenter__())
    await server.arrived.wait()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # those of a pool end after its close
        assert not thread.is_alive()
    assert {task for task in asyncio.all_tasks() if "Server.handle" not in repr(task)} - tasks == set()
    server.script = []
    async with opened as stream:
        assert [line async for line in stream] == LINES


async def test_a_pull_that_is_cancelled_while_asking_has_no_effect(server: Any) -> None:
    stream: Any = aiter(three(server))
    server.script = [never] * 3
    pull = asyncio.ensure_future(anext(stream))
    await server.arrived.wait()
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    server.script = []
    assert [line async for line in stream] == LINES


async def test_a_stream_that_is_closed_while_it_asks_ends(server: Any) -> None:
    stream: Any = aiter(three(server))
    server.script = [never] * 3
    pull = asyncio.ensure_future(anext(stream))
    await server.arrived.wait()
    await stream.aclose()
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    with pytest.raises(ClosedError):
        await anext(stream)


async def test_a_changed_function_warns_where_the_with_stands(server: Any) -> None:
    pipe: Any = three(server)

    def made(how: str) -> Any:
        scope: dict[str, Any] = {"__name__": "scripts"}
        exec(f"def same(line):\n    return line.{how}()", scope)
        return scope["same"]

    async with pipe.map(made("upper")).open() as stream:
        await anext(stream)
        snapshot = stream.snapshot()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with pipe.map(made("lower")).open(resume=snapshot) as stream:
            assert [line async for line in stream] == ["b", "c", "d"]
    (warned,) = [warning for warning in caught if warning.category is CodeChangedWarning]
    assert warned.filename == __file__


async def test_sync_use_in_a_running_loop_waits_for_the_answers(nginx: Nginx) -> None:
    """A notebook's cell: its loop stands still, as in any sync call; the server is elsewhere."""
    nginx.put("cell-0.txt", b"a\nb\n")
    nginx.put("cell-1.txt", b"c\nd\n")
    pipe = sl.read_lines(nginx.url("cell-{0,1}.txt"), http=HttpOptions()).shard(1)
    with pipe.open() as stream:
        assert list(stream) == LINES
        assert stream.stats().reads[0].requests >= 2 + 2
    assert pipe.first(3) == LINES[:3]
    assert list(pipe) == LINES
    with pipe.debug() as debugged:
        assert list(debugged) == LINES
    with pipe.loader() as loader:
        assert [list(loader), list(loader)] == [LINES, LINES]
    assert pipe.check().ok
    with pytest.raises(ReadError, match="404"), sl.read_lines(nginx.url("nowhere.txt")).open():
        pass


async def test_a_glob_in_a_store_is_listed_beside_the_loop(bucket: Bucket, tmp_path: Any) -> None:
    bucket.put(p__0=b"a\n", p__1=b"b\n")
    (tmp_path / "2").write_bytes(b"c\nd\n")
    pipe = sl.read_lines([f"{bucket.url}/p/*", tmp_path / "*"], storage_options=bucket.options).shard(1)
    pipe = cloudpickle.loads(cloudpickle.dumps(pipe))
    async with pipe.open() as stream:
        assert [line async for line in stream] == LINES
    with pytest.raises(ReadError, match="no object matches"):
        async with sl.read_lines(f"{bucket.url}/q/*", storage_options=bucket.options).open():
            pass


LISTED = b"".join(b"line %03d\n" % number for number in range(100))

REPLACED = {
    "longer": LISTED + b"more\n",
    "shorter": b"other\n" * 50,
    "shorter, not cut at a line": LISTED[:-13],
    "nothing": b"",
}


def array_file(kind: str, content: bytes) -> bytes:
    made, rows = BytesIO(), np.frombuffer(content, np.uint8)
    if kind == "npy":
        np.save(made, rows)
    else:
        np.savez(made, rows=rows)
    return made.getvalue()


ANSWERS: dict[str, dict[str, Any]] = {
    "ranges": {},
    "no ranges": {"ranges": False},
    "chunks": {"chunked": True},
    "ranges of what is unknown": {"total": "*"},
    "chunks, no ranges": {"ranges": False, "chunked": True},
}
"""The last two don't tell how long the object is: its end does."""


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("kind", "answers", "replaced"),
    [
        *covering(["lines", "shards", "files", "npy", "npz", "kept"], list(ANSWERS)[:3], REPLACED),
        *covering(["lines", "files", "kept"], list(ANSWERS)[3:], REPLACED),
    ],
)
async def test_an_object_of_another_length_than_was_listed_is_an_error(
    server: Any, kind: str, answers: str, replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "PART_BYTES", 400)
    monkeypatch.setattr(budget, "MIN_PART_BYTES", 400)
    was, now = LISTED, REPLACED[replaced]
    if kind in ("npy", "npz"):
        was, now = (array_file(kind, content) for content in (was, now))
    server.otherwise = server.faulty(etag=None)
    server.objects = {"x": was}
    paths = server.url("x")
    pipes: dict[str, sl.Pipeline[Any]] = {
        "lines": sl.read_lines(paths),
        "shards": sl.read_lines(paths).shard(3),
        "files": sl.read_files(paths),
        "kept": sl.read_lines(paths, cache_dir=tmp_path),
    }
    async with pipes.get(kind, sl.read_npy(paths)).open() as stream:
        server.objects = {"x": now}
        server.otherwise = server.faulty(etag=None, **ANSWERS[answers])
        with pytest.raises(ReadError, match=rf"x changed .*: it had {len(was):,} bytes and has {len(now):,}"):
            _ = [item async for item in stream]
