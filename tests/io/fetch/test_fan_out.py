import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest

import streamline as sl
from streamline.core import byte_budget as budget
from streamline.core.knobs import KnobValues
from streamline.core.tasks import Session, Tasks, supervise
from streamline.errors import ReadError
from streamline.io.fetch import request as requests
from streamline.io.fetch.fetcher import SharedStorages
from streamline.io.fetch.file import File, FilePart
from streamline.io.fetch.read_ahead import ObjectReader, ReadAhead
from streamline.io.fetch.request import Request
from streamline.io.storage import resolve as finding
from streamline.io.storage.base import FoundObject
from streamline.io.storage.options import Access
from tests.kit import LONGEST_S, gone
from tests.laws.profile import covering

Read = Callable[..., Awaitable[Any]]


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for nothing when a pipeline is opened: what is counted and scripted here are the requests of the reading."""
    monkeypatch.setattr(finding, "MOST_ASKED", 0)


@pytest.fixture(params=[2, 64])
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Ask for a few bytes at a time."""
    count: int = request.param
    monkeypatch.setattr(budget, "PART_BYTES", count)
    monkeypatch.setattr(budget, "MIN_PART_BYTES", count)
    monkeypatch.setattr(requests, "GUESS_BYTES", 5)
    return count


def some_objects(count: int, most: int, seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {f"{number:03d}": rng.randbytes(rng.choice([0, 1, rng.randrange(most)])) for number in range(count)}


def files(server: Any, **options: Any) -> Any:
    return sl.read_files([server.url(path) for path in server.objects], **options).plan.source.resolved()


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("faulty", [{}, {"ranges": False}, {"etag": None}, {"chunked": True}, {"at_most": 3}])
async def test_files_of_any_size_come_whole_and_in_order(
    server: Any, read: Read, part_bytes: int, faulty: dict[str, Any]
) -> None:
    server.objects = some_objects(20, 40)
    server.script = [server.faulty(**faulty)] * 2000
    whole = await read(files(server, concurrency=4), mode="file")
    assert whole.failure is None
    assert [item.data for item in whole.items] == list(server.objects.values())
    assert [item.path for item in whole.items] == [server.url(path) for path in server.objects]


async def test_a_resume_at_every_file(server: Any, read: Read, part_bytes: int) -> None:
    server.objects = some_objects(8, 30)
    source = files(server, concurrency=3)
    whole = await read(source, mode="file")
    for done, state in enumerate([whole.begin, *whole.states]):
        assert (await read(source, state, mode="file")).items == whole.items[done:]


@pytest.mark.one_in(2, 1)
async def test_lines_of_many_files_read_ahead_are_those_of_each(server: Any, read: Read, part_bytes: int) -> None:
    rng = random.Random(1)
    texts = ["".join(f"{'x' * rng.randrange(9)}\n" for _ in range(rng.randrange(6))) for _ in range(12)]
    server.objects = {f"{number:02d}.txt": text.encode() for number, text in enumerate(texts)}
    source = sl.read_lines([server.url(path) for path in server.objects], concurrency=5).plan.source.resolved()
    lines = "".join(texts).splitlines()
    whole = await read(source, mode="file")
    assert whole.items == lines
    for done, state in enumerate(whole.states[::5]):
        assert (await read(source, state, mode="file")).items == lines[5 * done + 1 :]


async def test_a_failure_comes_after_all_items_before_it(server: Any, read: Read, part_bytes: int) -> None:
    server.objects = {f"{number}": b"%d" % number * 9 for number in range(8)}
    source = files(server, concurrency=8)
    del server.objects["5"]
    whole = await read(source, mode="file")
    assert [item.data[:1] for item in whole.items] == [b"0", b"1", b"2", b"3", b"4"]
    assert isinstance(whole.failure, ReadError)
    assert server.url("5") in str(whole.failure)


async def test_an_object_that_changes_between_two_parts_is_an_error(server: Any, read: Read, part_bytes: int) -> None:
    server.objects = {"a": b"x" * (part_bytes * 5)}
    server.script = [server.faulty(), server.faulty(), *[server.faulty(etag='"v2"')] * 9]
    whole = await read(files(server, concurrency=2), mode="file")
    assert whole.items == []
    assert '"v1"' in str(whole.failure)
    assert '"v2"' in str(whole.failure)


@pytest.mark.parametrize("etag", ['"v1"', None])
@pytest.mark.parametrize("at_most", [None, 100])
async def test_an_object_whose_size_no_answer_tells_is_read_whole(
    server: Any, read: Read, etag: str | None, at_most: int | None
) -> None:
    server.objects = {"a": b"x" * 289 + b"\n", "b": b"y\n"}
    server.otherwise = server.faulty(total="*", etag=etag, at_most=at_most)
    whole = await read(sl.read_lines([server.url("a"), server.url("b")]).plan.source.resolved(), mode="file")
    assert whole.failure is None
    assert whole.items == ["x" * 289, "y"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("missing", [None, "3"])
async def test_what_was_read_or_given_up_is_held_by_no_request(
    server: Any, read: Read, part_bytes: int, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks outlive what they have fetched: a request that one remembers would hold bytes beside the budget."""
    made: list[Request] = []

    def noted(*args: Any) -> Request:
        made.append(Request(*args))
        return made[-1]

    monkeypatch.setattr("streamline.io.fetch.read_ahead.Request", noted)
    server.objects = {f"{number}": b"x" * 40 for number in range(8)}
    source = files(server, concurrency=8)
    server.objects.pop(missing, None)
    whole = await read(source, mode="file")
    assert len(whole.items) == (8 if missing is None else int(missing))
    assert len(made) >= 8
    assert [request for request in made if request.blocks] == []


async def test_no_more_requests_are_in_flight_than_allowed(server: Any, read: Read) -> None:
    server.objects = {f"{number:02d}": b"x" for number in range(40)}
    now = most = 0

    async def counted(server: Any, request: Any, writer: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        now -= 1
        await server.serve(server, request, writer)

    server.script = [counted] * 40
    assert len((await read(files(server, concurrency=6), mode="file")).items) == 40
    assert 2 < most <= 6


async def test_another_number_of_requests_holds_from_the_next_one_on(server: Any, read: Read) -> None:
    server.objects = {f"{number:02d}": b"x" for number in range(40)}
    widths, held, found = KnobValues({"read_files": 4}), list[anyio.Event](), list[Any]()
    seen: list[int] = []

    async def hold(server: Any, request: Any, writer: Any) -> None:
        held.append(anyio.Event())
        seen.append(len(held))
        await held[-1].wait()
        await server.serve(server, request, writer)

    async def work() -> None:
        found.append(await read(files(server, concurrency=6), mode="file", widths=widths))

    server.script = [hold] * 40
    with anyio.fail_after(LONGEST_S):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await gone(lambda: set(range(4 - len(held))))
            widths.set({"read_files": 9})
            await gone(lambda: set(range(9 - len(held))))
            widths.set({"read_files": 2})
            while not found:
                if held:
                    held.pop(0).set()
                await anyio.lowlevel.checkpoint()
    assert seen[:9] == [*range(1, 10)]
    assert len(seen) == 40
    assert max(seen[9:]) <= 2
    assert [item.path for item in found[0].items] == [server.url(path) for path in server.objects]


@pytest.mark.parametrize("ranges", [True, False])
async def test_all_parts_of_a_file_are_asked_for_before_those_of_the_next(
    server: Any, part_bytes: int, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    monkeypatch.setattr(finding, "MOST_ASKED", 2)
    server.objects = {name: bytes([number]) * part_bytes * 3 for number, name in enumerate("ab")}
    server.script = [server.faulty()] * 2 + [server.faulty(ranges=ranges)] * 6
    async with sl.read_files([server.url(name) for name in "ab"], concurrency=3).open() as stream:
        assert [item.data async for item in stream] == list(server.objects.values())
    asked = [(request.path, request.headers.get("range")) for request in server.requests[2:]]
    spans = [f"bytes={first}-{first + part_bytes - 1}" for first in range(0, 3 * part_bytes, part_bytes)]
    assert set(asked[:3]) == {("a", span) for span in spans}
    assert set(asked[3:]) == {("b", span) for span in spans}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("memory", "concurrency", "faulty"), covering([1, 50, 10**9], [1, 2, 16], ["", "chunked", "no ranges"])
)
async def test_many_flows_over_a_small_budget_never_wait_for_each_other(
    server: Any, part_bytes: int, memory: int, concurrency: int, faulty: str
) -> None:
    server.objects = some_objects(18, 60, seed=3)
    server.script = [server.faulty(chunked=faulty == "chunked", ranges=faulty != "no ranges")] * 5000
    pipe = sl.read_files([server.url(path) for path in server.objects], concurrency=concurrency).shard(5).merge()
    with anyio.fail_after(200):
        async with pipe.open(memory=memory) as stream:
            assert [item.data async for item in stream] == list(server.objects.values())


class Crewed:
    """A session with its supervisor, and a file over it."""

    def __init__(self, memory: int = 10**9) -> None:
        self.session = Session(budget=budget.Budget(memory))
        self.stop = anyio.Event()

    async def run(self, work: Callable[[Tasks], Awaitable[None]]) -> None:
        async with anyio.create_task_group() as group:
            begun = anyio.Event()
            tasks: list[Tasks] = []

            def ready(made: Tasks) -> None:
                tasks.append(made)
                begun.set()

            group.start_soon(supervise, ready, self.stop, self.session)
            await begun.wait()
            try:
                await work(tasks[0])
            finally:
                self.stop.set()


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("memory", [1, 40, 10**9])
async def test_spans_come_whole_in_order(server: Any, part_bytes: int, memory: int) -> None:
    data = random.Random(2).randbytes(200)
    server.objects = {"a": data}
    spans = [(0, 3), (150, 200), (3, 3), (20, 90), (0, 200)]
    crewed = Crewed(memory)

    async def work(tasks: Tasks) -> None:
        lease = SharedStorages.lend(tasks.session, "x", Access(concurrency=4))
        path = server.url("a")
        file = File(FilePart(FoundObject(path)), lease.storages.of(path), lambda: lease.pool(tasks))
        assert (await file.found()).size == 200
        assert [piece async for piece in file.ranges(spans)] == [data[start:stop] for start, stop in spans]
        assert await file.read(7, 50) == data[7:50]
        assert tasks.session.budget.held == 0
        with pytest.raises(ReadError):
            await file.read(190, 210)
        await lease.release()
        assert tasks.session.budget.held == 0

    await crewed.run(work)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("taken", [1, 70, None])
@pytest.mark.parametrize("faulty", [{}, {"ranges": False}, {"etag": None}, {"chunked": True}])
async def test_after_an_object_that_was_read_in_blocks_the_account_holds_nothing(
    server: Any, part_bytes: int, taken: int | None, faulty: dict[str, Any]
) -> None:
    data = random.Random(6).randbytes(150)
    server.objects = {"a": data}
    server.script = [server.faulty(**faulty)] * 200
    crewed = Crewed()

    async def work(tasks: Tasks) -> None:
        lease = SharedStorages.lend(tasks.session, "x", Access(concurrency=4))
        path = server.url("a")
        line = ReadAhead(lease.pool(tasks))
        reading = ObjectReader(0, lease.storages.of(path), FoundObject(path))
        line.add(reading)
        found = b""
        async with aclosing(line.blocks(reading)) as stream:
            while (taken is None or len(found) < taken) and (block := await anext(stream, b"")):
                found += block
        assert data.startswith(found)
        assert taken is not None or found == data
        assert (line.account.held, tasks.session.budget.held) == (0, 0)
        await line.aclose()
        await lease.release()

    await crewed.run(work)


@pytest.mark.parametrize("taken", [0, 1, 3, 7])
async def test_a_stream_left_at_any_moment_leaves_nothing(server: Any, part_bytes: int, taken: int) -> None:
    server.objects = some_objects(12, 50, seed=4)
    stalled = 0

    async def some_stall(server: Any, request: Any, writer: Any) -> None:
        nonlocal stalled
        stalled += 1
        if stalled % 5 == 0 and taken < 7:
            await writer.wait_closed()
        else:
            await server.serve(server, request, writer)

    server.script = [some_stall] * 3000
    async with sl.read_files([server.url(path) for path in server.objects], concurrency=4).open() as stream:
        with anyio.move_on_after(0.05):
            for _ in range(taken):
                await anext(stream)


@pytest.mark.long
async def test_a_consumer_that_stops_stops_the_source(server: Any) -> None:
    server.objects = {f"{number:04d}": b"x" * 1000 for number in range(3000)}
    async with sl.read_files([server.url(path) for path in server.objects], concurrency=8).open(
        memory=20_000
    ) as stream:
        await anext(stream)
        await anyio.wait_all_tasks_blocked()
        asked = -1
        while asked != len(server.requests):
            asked = len(server.requests)
            await anyio.sleep(0.05)
        assert asked < 2000


async def test_a_pause_comes_to_rest_and_the_state_stays(server: Any) -> None:
    server.objects = {f"{number:03d}": b"x" * 10 for number in range(100)}
    async with sl.read_files([server.url(path) for path in server.objects], concurrency=8).open() as stream:
        await anext(stream)
        async with stream.paused():
            before = stream.snapshot().to_json()
            await anyio.sleep(0.05)
            assert stream.snapshot().to_json() == before
        assert len([item async for item in stream]) == 99


async def test_files_that_can_not_be_had_may_be_left_out(server: Any) -> None:
    server.objects = {f"{number}": b"%d" % number for number in range(6)}
    urls = [server.url(path) for path in server.objects]
    del server.objects["0"], server.objects["3"], server.objects["5"]
    async with sl.read_files(urls).open(on_error="skip") as stream:
        assert [item.data async for item in stream] == [b"1", b"2", b"4"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(4))
async def test_no_window_keeps_a_reader_waiting(
    server: Any, read: Read, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(budget, "PART_BYTES", rng.choice([8, 16, 64]))
    monkeypatch.setattr(budget, "MIN_PART_BYTES", 8)
    monkeypatch.setattr(requests, "GUESS_BYTES", rng.choice([1, 8, 100]))
    server.objects = some_objects(25, 100, seed)
    pipe = sl.read_files([server.url(path) for path in server.objects], concurrency=rng.choice([1, 2, 3, 8]))
    with anyio.fail_after(200):
        async with pipe.open(memory=rng.choice([16, 100, 300])) as stream:
            assert [item.data async for item in stream] == list(server.objects.values())


async def test_later_files_that_wait_for_bytes_do_not_delay_the_first_ones_next_part(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "PART_BYTES", 16)
    monkeypatch.setattr(budget, "MIN_PART_BYTES", 16)
    monkeypatch.setattr(requests, "GUESS_BYTES", 1)
    server.objects = {f"{number:02d}": b"x" * 64 for number in range(20)}
    with anyio.fail_after(200):
        pipe = sl.read_files([server.url(path) for path in server.objects], concurrency=8)
        async with pipe.open(memory=120) as stream:
            assert len([item async for item in stream]) == 20


@pytest.mark.long
async def test_local_files_come_several_at_a_time_and_fail_in_their_place(tmp_path: Any, read: Read) -> None:
    for number in range(600):
        (tmp_path / f"{number:03d}").write_bytes(b"%d" % number)
    source = sl.read_files(tmp_path / "*").plan.source.resolved()
    whole = await read(source, mode="file")
    assert [item.data for item in whole.items] == [b"%d" % number for number in range(600)]
    assert (await read(source, whole.states[298], mode="file")).items == whole.items[299:]
    (tmp_path / "400").unlink()
    broken = await read(source, mode="file")
    assert broken.items == whole.items[:400]
    assert "no such file" in str(broken.failure)


async def test_every_backend_gives_the_same_files(server: Any, backend: Any) -> None:
    server.objects = some_objects(30, 3000, seed=5)
    pipe = sl.read_files([server.url(path) for path in server.objects]).shard(3).merge()
    async with pipe.open(backend=backend) as stream:
        assert [item.data async for item in stream] == list(server.objects.values())


async def test_large_items_do_not_fill_the_channels(server: Any) -> None:
    server.objects = {f"{number:03d}": b"x" * 2**20 for number in range(200)}
    urls = [server.url(path) for path in server.objects]
    async with sl.read_files(urls, concurrency=4).open(memory=8 * 2**20) as stream:
        await anext(stream)
        asked = -1
        while asked != len(server.requests):
            asked = len(server.requests)
            await anyio.sleep(0.2)
        assert asked < 100


async def test_no_answer_is_thrown_away_for_want_of_room(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "MOST_ASKED", 1000)
    monkeypatch.setattr(budget, "PART_BYTES", 1000)
    monkeypatch.setattr(requests, "GUESS_BYTES", 1)
    again: list[Request] = []
    later = ReadAhead.again

    def noted(line: ReadAhead, request: Request) -> None:
        again.append(request)
        later(line, request)

    monkeypatch.setattr(ReadAhead, "again", noted)
    server.objects = {f"{number:02d}": bytes(900) for number in range(40)}
    pipe = sl.read_files([server.url(path) for path in server.objects], concurrency=32)
    async with pipe.open(memory=8000) as stream:
        assert [item.data async for item in stream] == list(server.objects.values())
    assert not again
