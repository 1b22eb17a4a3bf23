"""The journal on disk: a kill loses nothing that was read and doubles nothing; nothing is damaged in silence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.core.atomic_file import write_all
from streamline.core.item_codec import EncodedItem
from streamline.snapshot.inspection import report
from streamline.sources import disk_journal as directory_module
from streamline.sources.disk_journal import MAGIC, DiskJournal, SegmentHeader, read_segment, record
from streamline.sources.journal import Places, kept_of

from .live_kit import Pipe, Tape, rest, some


def pipe_over(tape: Tape, path: Path, shards: int = 2, kind: Any = "strict") -> Pipe:
    return sl.from_stream(tape, journal=path).shard(shards).merge(kind)


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.segment"))


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a new file every few items."""
    monkeypatch.setattr(directory_module, "SEGMENT_BYTES", 150)


async def crash_after(pipe: Pipe, count: int, snapshot: sl.Snapshot | None = None) -> list[Any]:
    """Return the next items of a run that takes no snapshot: what it read is in the journal alone."""
    seen, _ = await some(pipe, count, snapshot)
    return seen


async def test_a_crash_before_the_first_save_feeds_everything_again(tmp_path: Path) -> None:
    tape = Tape(30, hold_at=20)
    pipe = pipe_over(tape, tmp_path)
    assert await crash_after(pipe, 12) == list(range(12))
    assert tape.at > 12
    tape.hold_at = None
    assert await rest(pipe, None) == list(range(30))
    assert tape.at == 30


async def test_a_crash_after_a_snapshot_loses_and_doubles_nothing(tmp_path: Path) -> None:
    tape = Tape(60, hold_at=40)
    pipe = pipe_over(tape, tmp_path / "journal", 3).map(lambda x: x)
    async with pipe.open() as stream:
        head = [await anext(stream) for _ in range(10)]
        snapshot = stream.snapshot()
        snapshot.save(tmp_path / "ckpt.json")
        _ = [await anext(stream) for _ in range(15)]
    snapshot = sl.Snapshot.load(tmp_path / "ckpt.json")
    assert snapshot.journal is not None
    assert snapshot.journal["stored"]
    assert await crash_after(pipe, 20, snapshot) == list(range(10, 30))  # and a crash of the resumed run
    tape.hold_at = None
    assert head + await rest(pipe, snapshot) == list(range(60))


@settings(deadline=None, max_examples=12, database=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=6),
    kind=st.sampled_from(["strict", "best_effort"]),
    shards=st.integers(1, 3),
    before=st.sampled_from(["", "flat_map", "shuffle", "unordered"]),
    uvloop=st.booleans(),
)
def test_runs_that_end_anyhow_resume_from_the_last_save(
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[tuple[int, bool]],
    kind: Any,
    shards: int,
    before: str,
    uvloop: bool,
) -> None:
    async def later(x: int) -> int:
        await anyio.lowlevel.checkpoint()
        return x

    async def main() -> None:
        tape = Tape(50)
        pipe: Pipe = sl.from_stream(tape, journal=path).shard(shards)
        if before == "flat_map":
            pipe = pipe.flat_map(lambda x: [x, x])
        elif before == "shuffle":
            pipe = pipe.shuffle(window=4)
        elif before == "unordered":
            pipe = pipe.map(later, concurrency=3, ordered=False)
        pipe = pipe.merge(kind)
        kept: list[int] = []
        snapshot = None
        for count, saves in runs:
            seen, taken = await some(pipe, count, snapshot)
            if saves:
                kept += seen
                snapshot = taken
                taken.saved()
        kept += await rest(pipe, snapshot)
        assert sorted(kept) == sorted(list(range(50)) * (2 if before == "flat_map" else 1))

    path = tmp_path_factory.mktemp("journal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory_module, "SEGMENT_BYTES", 200)
        anyio.run(main, backend_options={"use_uvloop": uvloop})
    shutil.rmtree(path)


async def test_an_item_is_on_disk_before_the_feed_is_asked_for_the_next_one(tmp_path: Path) -> None:
    on_disk: list[int] = []

    async def feed() -> Any:
        for x in range(20):
            yield x
            (path,) = segments(tmp_path)
            on_disk.append(len(read_segment(path, last=True).records))

    assert await rest(sl.from_stream(feed, journal=tmp_path).shard(2).merge(), None) == list(range(20))
    assert on_disk == list(range(1, 21))


@pytest.mark.usefixtures("small_segments")
async def test_a_save_removes_the_files_it_has_passed_and_an_earlier_snapshot_is_refused(tmp_path: Path) -> None:
    tape = Tape(200, hold_at=100)
    journal = tmp_path / "journal"
    pipe = pipe_over(tape, journal)
    async with pipe.open() as stream:
        early = stream.snapshot()
        _ = [await anext(stream) for _ in range(80)]
        await tape.held.wait()
        before = len(segments(journal))
        late = stream.snapshot()
        late.save(tmp_path / "late.json")
        left = segments(journal)
        assert 1 < len(left) < before / 2
        assert 60 < int(left[0].stem) <= 80
    tape.hold_at = None
    with pytest.raises(sl.errors.JournalError, match=r"item 0 of shard \d any more.*late\.json.*resume from that one"):
        await rest(pipe, early)
    with pytest.raises(sl.errors.JournalError, match=r"begins after item \d+: .*late\.json.*Resume from that one"):
        await rest(pipe, None)
    assert await rest(pipe, sl.Snapshot.load(tmp_path / "late.json")) == list(range(80, 200))


@pytest.mark.usefixtures("small_segments")
async def test_a_save_after_the_loop_trims_too_and_so_does_a_place_of_the_users_own(tmp_path: Path) -> None:
    tape = Tape(100)
    pipe = pipe_over(tape, tmp_path)
    async with pipe.open() as stream:
        _ = [await anext(stream) for _ in range(50)]
    snapshot = stream.snapshot()
    many = len(segments(tmp_path))
    snapshot.saved()
    assert len(segments(tmp_path)) < many
    assert "own" in json.loads((tmp_path / "journal.json").read_text())["trimmed_for"]
    async with pipe.open(resume=snapshot) as stream:
        _ = [await anext(stream) for _ in range(10)]
        left = segments(tmp_path)
        snapshot.saved()  # of a run that is over, while another one has the journal
        assert segments(tmp_path) == left


@pytest.mark.usefixtures("small_segments")
async def test_a_worker_that_has_ended_keeps_no_file(tmp_path: Path) -> None:
    tape = Tape(400)
    pipe = sl.from_stream(tape, journal=tmp_path).shard(2).filter(lambda x: x % 2 == 0 or x > 300).take(100)
    pipe = pipe.merge("best_effort", max_lead=500)
    async with pipe.open() as stream:
        seen = [await anext(stream) for _ in range(120)]
        stream.snapshot().saved()
    assert len(seen) == len(set(seen))
    assert int(segments(tmp_path)[0].stem) > 100


async def test_a_snapshot_and_a_journal_belong_together(tmp_path: Path) -> None:
    tape = Tape(30)
    pipe = pipe_over(tape, tmp_path / "a")
    _, snapshot = await some(pipe, 5)
    with pytest.raises(sl.errors.ResumeError, match=r"on disk, and there is none in .*b"):
        await rest(pipe_over(tape, tmp_path / "b"), snapshot)
    shutil.rmtree(tmp_path / "b")
    await some(pipe_over(Tape(10), tmp_path / "b"), 5)
    with pytest.raises(sl.errors.ResumeError, match="belongs to another journal"):
        await rest(pipe_over(tape, tmp_path / "b"), snapshot)
    with pytest.raises(sl.errors.ResumeError, match=r"give from_stream\(journal=\) the directory"):
        await rest(sl.from_stream(tape).shard(2).merge(), snapshot)
    with pytest.raises(sl.errors.ResumeError, match=r"written for the shards \[0, 1\]"):
        await rest(pipe_over(tape, tmp_path / "a", 3), None)


async def test_a_run_that_kept_its_items_in_memory_goes_on_with_a_journal_on_disk(tmp_path: Path) -> None:
    tape = Tape(50)
    head, snapshot = await some(sl.from_stream(tape).shard(2).merge(), 7)
    pipe = pipe_over(tape, tmp_path)
    more = await crash_after(pipe, 5, snapshot)
    assert more == list(range(7, 12))
    assert head + await rest(pipe, snapshot) == list(range(50))  # the same snapshot again: the journal is its own


async def test_a_kill_while_a_journal_is_begun_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(50, hold_at=15)
    async with sl.from_stream(tape).shard(2).merge().open() as stream:
        _ = [await anext(stream) for _ in range(7)]
        await tape.held.wait()
    snapshot = stream.snapshot()
    for step in range(1, 10):  # a header, and 8 items
        path = tmp_path / str(step)
        calls = 0

        def failing(descriptor: int, content: bytes, step: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls == step:
                os.write(descriptor, content[:3])
                raise KeyboardInterrupt  # as a kill: nothing behind it is done
            os.write(descriptor, content)

        with monkeypatch.context() as patch:
            patch.setattr(directory_module, "write_all", failing)
            with pytest.raises(KeyboardInterrupt):
                await some(pipe_over(tape, path), 0, snapshot)
        assert (await crash_after(pipe_over(tape, path), 3, snapshot)) == [7, 8, 9]


async def test_one_opening_at_a_time(tmp_path: Path) -> None:
    pipe = pipe_over(Tape(30), tmp_path)
    async with pipe.open() as stream:
        assert await anext(stream) == 0
        with pytest.raises(sl.errors.JournalError, match="in use, by another process or another opening"):
            async with pipe.open():
                pass
    assert len(await rest(pipe, None)) == 30


async def test_ranks_have_directories_of_their_own(tmp_path: Path) -> None:
    tapes = [Tape(20), Tape(20)]
    for rank, tape in enumerate(tapes):
        pipe = sl.from_stream(tape, journal=tmp_path, partitioned=True).shard(4).merge()
        async with pipe.open(rank=rank, world_size=2, ends="allow") as stream:
            assert [await anext(stream) for _ in range(5)] == list(range(5))
    assert sorted(os.listdir(tmp_path)) == ["rank-00000-of-00002", "rank-00001-of-00002"]  # noqa: PTH208


async def test_a_full_disk_is_a_failure_of_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(100)
    written = 0
    write = write_all

    def full(descriptor: int, content: bytes) -> None:
        nonlocal written
        written += 1
        if written == 20:
            os.write(descriptor, content[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(descriptor, content)

    pipe = pipe_over(tape, tmp_path)
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(directory_module, "write_all", full)
        with pytest.raises(sl.errors.JournalError, match=r"can't write to the journal in .*No space left"):  # noqa: PT012
            async with pipe.open() as stream:
                async for x in stream:
                    seen.append(x)  # noqa: PERF401
    assert seen == list(range(18))  # a header, and 18 items
    snapshot = stream.snapshot()
    assert await rest(pipe, snapshot) == list(range(19, 100))  # item 18 was never taken for kept


async def test_a_disk_that_fails_to_sync_is_a_failure_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    tape = Tape(100, hold_at=30)
    pipe = pipe_over(tape, tmp_path)
    with pytest.raises(sl.errors.JournalError, match="Input/output error"):  # noqa: PT012
        async with pipe.open() as stream:
            monkeypatch.setattr(os, "fsync", broken)
            async for _ in stream:
                pass
    monkeypatch.undo()


async def test_a_save_that_cannot_trim_says_so_and_the_snapshot_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "SEGMENT_BYTES", 150)
    pipe = pipe_over(Tape(100), tmp_path / "journal")
    async with pipe.open() as stream:
        _ = [await anext(stream) for _ in range(50)]
        snapshot = stream.snapshot()
        with monkeypatch.context() as patch:

            def stuck(self: Path, missing_ok: bool = False) -> None:
                raise OSError(errno.EROFS, "Read-only file system")

            patch.setattr(Path, "unlink", stuck)
            with pytest.raises(sl.errors.JournalError, match=r"can't trim the journal .*Read-only"):
                snapshot.save(tmp_path / "ckpt.json")
    assert await rest(pipe, sl.Snapshot.load(tmp_path / "ckpt.json")) == list(range(50, 100))


async def test_inspect_names_the_journal(tmp_path: Path) -> None:
    _, snapshot = await some(pipe_over(Tape(30, hold_at=10), tmp_path), 5)
    assert snapshot.journal is not None
    assert f"on disk, of id {snapshot.journal['id']}; {snapshot.journal['read']} read in all" in report(snapshot)


# Damage ---------------------------------------------------------------------------------------------------------------


async def test_cut_at_every_byte_it_has_every_whole_item_before_the_cut(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    tape = Tape(12, lambda x: {"x": x, "pad": "é" * x})
    await rest(pipe_over(tape, whole), None)
    (path,) = segments(whole)
    content = path.read_bytes()
    ends = [len(content)]
    for x in reversed(range(12)):
        ends.append(ends[-1] - len(record(x % 2, EncodedItem("j", json.dumps(tape.item(x), separators=(",", ":"))))))
    ends.reverse()  # ends[k]: the file with k items
    for cut in range(len(content) + 1):
        items = sum(cut >= end for end in ends[1:])
        path.write_bytes(content[:cut])
        found = read_segment(path, last=True)
        assert [json.loads(written.value) for _, written in found.records] == [tape.item(x) for x in range(items)]
        assert found.end in (0, ends[items])
    for cut in (0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[3] - 1, ends[3], ends[3] + 13, len(content) - 1):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        (copy / path.name).write_bytes(content[:cut])
        items = sum(cut >= end for end in ends[1:])
        more = Tape(items + 2, tape.item)
        more.at = items
        assert await rest(pipe_over(more, copy), None) == [tape.item(x) for x in range(items + 2)]
        shutil.rmtree(copy)


async def test_zeros_after_the_last_item_are_a_power_cuts_tail(tmp_path: Path) -> None:
    await rest(pipe_over(Tape(5), tmp_path), None)
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(100))
    assert await rest(pipe_over(Tape(0), tmp_path), None) == list(range(5))


def _flip(content: bytes, byte: int) -> bytes:
    return content[:byte] + bytes([content[byte] ^ 0x10]) + content[byte + 1 :]


async def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file_and_a_byte_before_it(tmp_path: Path) -> None:
    await rest(pipe_over(Tape(4), tmp_path), None)
    (path,) = segments(tmp_path)
    content = path.read_bytes()
    for byte in range(len(content)):
        path.write_bytes(_flip(content, byte))
        with pytest.raises(sl.errors.JournalError, match=rf"{path.name} is damaged at byte (\d+)") as caught:
            read_segment(path, last=True)
        named = int(str(caught.value).split("at byte ")[1].split(":")[0])
        assert named <= byte
    path.write_bytes(_flip(content, len(content) // 2))
    with pytest.raises(sl.errors.JournalError, match="damaged at byte"):
        await rest(pipe_over(Tape(0), tmp_path), None)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: segments(path)[2].unlink(), "a file is missing"),
        (lambda path: segments(path)[0].unlink(), "a file is missing"),
        (lambda path: os.truncate(segments(path)[1], 200), "not the journal's last one"),
        (lambda path: os.truncate(segments(path)[1], 3), "doesn't begin as"),
        (lambda path: (path / "journal.json").unlink(), "no journal.json"),
        (lambda path: (path / "journal.json").write_text("{}"), r"journal\.json is damaged"),
        (lambda path: (path / "journal.json").write_text("["), r"journal\.json is damaged"),
        (
            lambda path: (path / "journal.json").write_text(
                (path / "journal.json").read_text().replace('"streamline_journal": 1', '"streamline_journal": 2')
            ),
            "upgrade streamline",
        ),
    ],
)
async def test_damage_is_an_error_that_names_the_file(
    tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    path = tmp_path / "journal"
    await rest(pipe_over(Tape(60), path), None)
    assert len(segments(path)) > 4
    damage(path)
    with pytest.raises(sl.errors.JournalError, match=words):
        await rest(pipe_over(Tape(0), path), None)


@pytest.mark.usefixtures("small_segments")
async def test_all_files_gone_after_a_trim_is_an_error(tmp_path: Path) -> None:
    pipe = pipe_over(Tape(60), tmp_path)
    async with pipe.open() as stream:
        _ = [await anext(stream) for _ in range(40)]
        snapshot = stream.snapshot()
        snapshot.saved()
    for path in segments(tmp_path):
        path.unlink()
    with pytest.raises(sl.errors.JournalError, match=r"files of the journal in .* are missing"):
        await rest(pipe, snapshot)


@pytest.mark.usefixtures("small_segments")
async def test_a_power_cut_that_took_what_the_snapshot_has_passed_loses_nothing(tmp_path: Path) -> None:
    tape = Tape(60, hold_at=30)
    pipe = pipe_over(tape, tmp_path)
    seen, snapshot = await some(pipe, 30)
    for path in segments(tmp_path)[2:]:
        path.unlink()  # as if they had never been synced
    tape.hold_at = None
    more, later = await some(pipe, 10, snapshot)
    assert seen + more == list(range(40))
    assert await rest(pipe, later) == list(range(40, 60))


async def saved_at_each_item(path: Path, count: int) -> tuple[list[sl.Snapshot], list[int]]:
    """Run a feed that is at most 2 items ahead; return a snapshot before each item, and how many were read by then."""
    wanted, snapshots = anyio.Event(), []
    taken = 0

    async def feed() -> Any:
        nonlocal wanted
        for x in range(count):
            while x > taken + 1:
                wanted = anyio.Event()
                await wanted.wait()
            yield x

    async with sl.from_stream(feed, journal=path).shard(2).merge().open() as stream:
        for x in range(count):
            snapshots.append(stream.snapshot())
            assert await anext(stream) == x
            taken += 1
            wanted.set()
            await anyio.wait_all_tasks_blocked()
        snapshots.append(stream.snapshot())
    return snapshots, [snapshot.journal["read"] for snapshot in snapshots if snapshot.journal]


def layout(path: Path, files: dict[str, bytes]) -> None:
    """Let a journal's directory hold these files, and nothing else."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)


@pytest.mark.long
async def test_cut_at_every_byte_a_journal_suffices_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole, copy, count = tmp_path / "whole", tmp_path / "copy", 7
    snapshots, read = await saved_at_each_item(whole, count)
    assert read == [0, 3, 4, 5, 6, 7, 7, 7]
    (path,) = segments(whole)
    about, content = (whole / "journal.json").read_bytes(), path.read_bytes()
    size = len(record(0, EncodedItem("v", 0)))
    start = len(content) - count * size
    ends = list(range(start + size, len(content) + 1, size))
    (source,) = snapshots[0].worker_states[0]
    places, outcomes = Places(source, snapshots[0].merge, [0, 1]), Counter[bool]()
    for cut in range(len(content) + 1):
        there, byte = sum(cut >= end for end in ends), max(end for end in (0, start, *ends) if end <= cut)
        for passed, snapshot in enumerate(snapshots):
            layout(copy, {"journal.json": about, path.name: content[:cut]})
            state = snapshot.flow_state
            kept, entries = kept_of(snapshot.journal, state, places)
            lacks = there < read[passed] and passed < read[passed]
            outcomes[lacks] += 1
            if lacks:
                at = rf"{path.name} is whole up to byte {byte}, item {there} "
                with pytest.raises(sl.errors.JournalError, match=rf"{at}.* when {read[passed]} items were"):
                    DiskJournal(copy, places, kept, entries, state)
                assert (copy / path.name).read_bytes() == content[:cut]
                continue
            journal = DiskJournal(copy, places, kept, entries, state)
            journal.close()
            assert sorted(json.loads(entry.written.value) for entry in journal.backlog) == list(range(passed, there))
    assert min(outcomes.values()) > 500


@pytest.mark.usefixtures("small_segments")
async def test_an_older_copy_of_a_journal_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tape, path, old = Tape(60, hold_at=20), tmp_path / "journal", tmp_path / "old"
    pipe = pipe_over(tape, path)

    async def read_all(snapshot: sl.Snapshot | None) -> sl.Snapshot:
        async with pipe.open(resume=snapshot) as stream:
            await anext(stream)
            await tape.held.wait()
            return stream.snapshot()

    early = await read_all(None)
    shutil.copytree(path, old)
    tape.hold_at, tape.held = 40, anyio.Event()
    late = await read_all(early)
    segments(path)[-1].unlink()
    with pytest.raises(
        sl.errors.JournalError, match=r"item 3\d of the feed, .* when 40 items were read.* later files are gone"
    ):
        await rest(pipe, late)
    shutil.rmtree(path)
    shutil.copytree(old, path)
    with pytest.raises(
        sl.errors.JournalError, match=r"segment is whole up to byte \d+, item 20 .*at most 20 items were read"
    ):
        await rest(pipe, late)
    tape.at, tape.hold_at = 20, None
    assert await rest(pipe, early) == list(range(1, 60))  # and that way out works


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe"])
@pytest.mark.parametrize("name", ["lock", "journal.json", f"{0:020}.segment"])
async def test_what_others_have_planted_is_neither_followed_nor_waited_for(
    tmp_path: Path, kind: str, name: str
) -> None:
    path, outside = tmp_path / "journal" / name, tmp_path / "outside"
    pipe = pipe_over(Tape(5), path.parent)
    await rest(pipe, None)
    path.rename(outside)
    path.symlink_to(outside) if "link" in kind else os.mkfifo(path)
    before = outside.read_bytes()
    with pytest.raises(
        sl.errors.JournalError, match=rf"can't open the journal .*{name} is {kind}, expected a regular file"
    ):
        await rest(pipe, None)
    assert outside.read_bytes() == before


async def test_a_copy_of_a_file_that_a_file_manager_made_is_left_alone(tmp_path: Path) -> None:
    await rest(pipe_over(Tape(5), tmp_path), None)
    (path,) = segments(tmp_path)
    copies = [tmp_path / "0 (copy).segment", tmp_path / f"{path.stem} (copy).segment", tmp_path / "9.segment"]
    for copy in copies:
        shutil.copy(path, copy)
    assert await rest(pipe_over(Tape(0), tmp_path), None) == list(range(5))
    assert all(copy.exists() for copy in copies)


async def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(sl.errors.JournalError, match="can't open the journal"):
        await rest(pipe_over(Tape(3), tmp_path / "file"), None)
    assert MAGIC in SegmentHeader("x", 0, 0, {0: 0}, 0).begin()
