"""A live source's journal on disk: what was read survives a kill at any moment.

Each item is written before the feed is asked for its next one. The directory has `journal.json` (id, shards, first
item, the snapshot it was trimmed for), segments, and a lock. A segment is removed when a snapshot that has passed it
is stored.

A segment is a log of `core.record_file`. Its first frame is the header, JSON; each other one is an item: uint32 shard,
then `item_codec.to_bytes`. Only the last segment may have a torn tail.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec

from streamline.core.atomic_file import (
    free_lock,
    lock_file,
    make_directory,
    open_own,
    read_own,
    replace_file,
    sync_and_close,
    sync_directory,
    write_all,
)
from streamline.core.item_codec import EncodedItem, decode_json, from_bytes, to_bytes
from streamline.core.record_file import DamagedFrameError, frame, frames
from streamline.core.state import Json, Tree
from streamline.errors import JournalError, ResumeError
from streamline.sources.journal import Entry, Journal, Places, SavedJournal

SEGMENT_BYTES = 8 * 2**20
"""A segment is closed after so many bytes: trimming removes whole segments, and fsync of one takes some 10 ms."""


class DiskJournal(Journal):
    """A journal in a directory, which is made if it isn't there: locked, read, and ready to be appended to.

    Args:
      saved: the journal in the snapshot that is resumed; None: there is none.
      entries: the items in that snapshot, if its journal was in memory.
      mark_of: returns the mark of an item, see `SavedJournal`.

    Attributes:
      backlog: the items to be fed before those that the feed gives from now on.

    Raises:
      JournalError: damaged, locked by another opening, unreadable, or it doesn't have what a resume needs.
      ResumeError: snapshot and journal don't belong together.
    """

    def __init__(
        self,
        directory: Path,
        places: Places,
        saved: SavedJournal | None,
        entries: Sequence[Entry],
        state: Tree | None,
        mark_of: Callable[[EncodedItem], Json] = lambda written: None,
    ) -> None:
        self._directory = directory
        self._lock: int | None = None
        self._mutex = threading.Lock()  # the reader appends, the consumer trims, perhaps in another thread
        self._file: int | None = None
        self._given: dict[int, int] = {}
        self._written = 0
        self._segments: list[SegmentHeader] = []
        self._closed = False
        self._mark_of = mark_of
        self.backlog: list[Entry] = []
        self.keeper = self
        super().__init__(places, secrets.token_hex(16) if saved is None else saved.id)
        with DiskErrors(directory, "open"):
            make_directory(directory)
            if not self._take_lock():
                raise JournalError(
                    f"the journal in {directory} is in use, by another process or another opening: each needs its own"
                )
            try:
                self._open(saved, entries, places.passed(state))
            except BaseException:
                self.close()
                raise

    # Opening ----------------------------------------------------------------------------------------------------------

    def _open(self, saved: SavedJournal | None, entries: Sequence[Entry], passed: dict[int, int | float]) -> None:
        about = read_about(self._directory)
        if about is None or not about.begun:
            self._create(saved, entries, passed)
            return
        if saved is not None and saved.id != about.id:
            raise ResumeError(
                f"the snapshot belongs to another journal ({saved.id}) than the one in {self._directory} ({about.id}): "
                "give the directory that it was taken with"
            )
        if about.shards != list(self.places.shards):
            raise ResumeError(
                f"the journal in {self._directory} was written for the shards {about.shards}, and these are "
                f"{list(self.places.shards)}: resume with the .shard and the ranks that it was begun with"
            )
        self.id = about.id
        segments = read_files(self._directory, about)
        self._segments = [segment.header for segment in segments if segment.header is not None]
        if saved is None and about.first:
            raise JournalError(
                f"the journal in {self._directory} begins after item {about.first:,}: what is before was trimmed when "
                f"a snapshot was saved ({about.trimmed_for}). Resume from that one, or from a later one; to begin "
                "anew, remove the directory"
            )
        given = self._gather(segments, passed, about)
        there = segments[-1].read if segments else about.first
        beyond = {shard: max(0, int(n) - given[shard]) for shard, n in passed.items() if n != math.inf}
        if saved is not None and saved.read - there > sum(beyond.values()):
            self._too_short(saved, there, segments)
        mend_files(self._directory, segments)
        self.read = max(there, 0 if saved is None else saved.read)
        self.next, self.mark = self._next_turn(segments, saved)
        self._roll({shard: n + beyond.get(shard, 0) for shard, n in given.items()}, self.read, there)

    def _create(self, saved: SavedJournal | None, entries: Sequence[Entry], passed: dict[int, int | float]) -> None:
        """Begin a journal; the items in the snapshot come first."""
        if saved is not None and saved.stored:
            raise ResumeError(
                f"the snapshot's items are in a journal on disk, and there is none in {self._directory}: give "
                "from_stream(journal=) the directory that it was taken with"
            )
        given = {shard: 0 if passed[shard] == math.inf else int(passed[shard]) for shard in self.places.shards}
        first = self.read = 0 if saved is None else saved.read - len(entries)
        if saved is not None:
            self.next, self.mark = saved.next, saved.mark
        why = "" if saved is None else "the one that this journal was begun with"
        self._write_about(first, why, begun=False)
        for path in files_in(self._directory):
            path.unlink()
        self._roll(given, self.read, self.read)
        for entry in entries:
            self.append(entry)
        self.backlog = list(entries)
        self.sync()
        self._write_about(first, why)

    def _gather(
        self, segments: Sequence[JournalSegment], passed: dict[int, int | float], about: About
    ) -> dict[int, int]:
        """Make the backlog, the items that no worker has passed; return how many items each shard was fed."""
        given = dict.fromkeys(self.places.shards, 0)
        need = dict(passed)
        for segment in segments:
            header = segment.header
            assert header is not None
            for shard in given:
                given[shard] = header.given[shard]
            for shard, written in segment.records:
                ordinal = given[shard]
                given[shard] += 1
                if ordinal < need[shard]:
                    continue
                if ordinal > need[shard]:
                    self._lacks(shard, need[shard], about)
                need[shard] += 1
                self.backlog.append(Entry(shard, ordinal, written, shard))
        for shard, first in need.items():
            if first < given[shard]:
                self._lacks(shard, first, about)
        return given

    def _lacks(self, shard: int, ordinal: int | float, about: About) -> NoReturn:
        why = (
            f" since a later snapshot was saved ({about.trimmed_for}): resume from that one"
            if about.trimmed_for
            else ""
        )
        raise JournalError(
            f"the journal in {self._directory} doesn't have item {ordinal:,} of shard {shard} any more, where the "
            f"snapshot stands{why}"
        )

    def _too_short(self, saved: SavedJournal, there: int, segments: Sequence[JournalSegment]) -> NoReturn:
        """Raise for a journal that ends before what the snapshot needs; the message names file and byte.

        Items lost in a power cut may be missing if the snapshot's state has passed them all. How many items a worker
        that has ended was fed is unknown, so missing ones count as needed then.
        """
        path, byte = (segments[-1].path, segments[-1].end) if segments else (segment_path(self._directory, there), 0)
        way_out = f"resume from a snapshot that was taken when at most {there:,} items were read"
        if not saved.stored:
            way_out = "give another directory as journal=: the snapshot has the items itself"
        raise JournalError(
            f"the journal is too short for the snapshot: {path} is whole up to byte {byte:,}, item {there:,} of the "
            f"feed, but the snapshot was taken when {saved.read:,} items were read, and needs some of the missing "
            f"{saved.read - there:,}. The file was cut, later files are gone, or this is an older copy: put back a "
            f"copy of {self._directory} that is as new as the snapshot, or {way_out}"
        )

    def _next_turn(self, segments: Sequence[JournalSegment], saved: SavedJournal | None) -> tuple[int, Json]:
        """Return the shard whose turn is next after all items read (it may have ended), and the last item's mark."""
        shards = list(self.places.shards)
        if saved is not None and (not segments or saved.read >= segments[-1].read):
            return (saved.next if segments else self.next), saved.mark
        for segment in reversed(segments):
            if segment.records:
                shard, written = segment.records[-1]
                return shards[(shards.index(shard) + 1) % len(shards)], self._mark_of(written)
        header = segments[-1].header if segments else None
        return (self.next, None) if header is None else (header.next, header.mark)

    # Running ----------------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        with DiskErrors(self._directory, "write to"), self._mutex:
            if self._file is None:
                raise JournalError(f"the journal in {self._directory} is closed")
            content = record(entry.shard, entry.written)
            write_all(self._file, content)
            self._written += len(content)
            self._given[entry.shard] += 1
            self.read += 1
            self.next, self.mark = entry.next, entry.mark
            if self._written >= SEGMENT_BYTES:
                self._roll(dict(self._given), self.read, self.read)

    def entry(self, state: Tree) -> Json:
        return self._json(self.places.passed(state), self.read, self.next, self.mark, None)

    def sync(self) -> None:
        """Block until what was written would survive a power cut; a JournalError if the disk fails. From any thread."""
        with self._mutex:
            if self._file is None:
                return
            descriptor = os.dup(self._file)  # fsync takes long, and the reader may close its own meanwhile
        with DiskErrors(self._directory, "write to"):
            sync_and_close(descriptor)

    before_store = sync

    def after_store(self, state: Tree, where: str) -> None:
        """Remove the files that the snapshot of this state has passed, unless another opening uses them by now."""
        passed = self.places.passed(state)
        with DiskErrors(self._directory, "trim"), self._mutex:
            if self._closed and not self._take_lock():
                return  # the opening that has the lock trims at its own saves
            try:
                self._trim(passed, where)
            finally:
                if self._closed:
                    self._free_lock()

    def _trim(self, passed: dict[int, int | float], where: str) -> None:
        if self._closed and ((about := read_about(self._directory)) is None or about.first != self._segments[0].read):
            return  # another opening has trimmed it since
        whole = 0
        while whole + 1 < len(self._segments) and all(
            given <= passed[shard] for shard, given in self._segments[whole + 1].given.items()
        ):
            whole += 1
        if not whole:
            return
        gone, self._segments = self._segments[:whole], self._segments[whole:]
        self._write_about(self._segments[0].read, where)
        for header in gone:
            with suppress(FileNotFoundError):
                segment_path(self._directory, header.read).unlink()
        sync_directory(self._directory)

    def close(self) -> None:
        """Make durable what was written, close the files, release the lock. Idempotent."""
        with self._mutex:
            self._closed = True
            descriptor, self._file = self._file, None
            try:
                if descriptor is not None:
                    with DiskErrors(self._directory, "write to"):
                        sync_and_close(descriptor)
            finally:
                self._free_lock()

    def _take_lock(self) -> bool:
        """Lock the directory for this opening; False: another one, in any process, has the lock."""
        try:
            self._lock = lock_file(self._directory / "lock")
        except ImportError:  # pragma: no cover - Windows
            raise JournalError("from_stream(journal=) needs a system with flock: leave it out here") from None
        return self._lock is not None

    def _free_lock(self) -> None:
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            free_lock(descriptor)

    def _roll(self, given: dict[int, int], read: int, after: int) -> None:
        """Begin a new segment, or continue the last one if it is empty."""
        self._given = dict(given)
        self._written = 0
        again = bool(self._segments) and self._segments[-1].read == read
        before, self._file = self._file, None
        if before is not None:
            sync_and_close(before)  # before there is another one: only the last file's tail may be torn
        flags = os.O_WRONLY | os.O_APPEND | (0 if again else os.O_CREAT | os.O_EXCL)
        self._file = open_own(segment_path(self._directory, read), flags)
        if not again:
            header = SegmentHeader(self.id, read, after, dict(given), self.next, self.mark)
            write_all(self._file, header.begin())
            sync_directory(self._directory)
            self._segments.append(header)

    def _write_about(self, first: int, trimmed_for: str, *, begun: bool = True) -> None:
        about = msgspec.structs.asdict(About(1, self.id, list(self.places.shards), begun, first, trimmed_for))
        replace_file(self._directory / ABOUT, json.dumps(about, indent=1).encode() + b"\n")


# The directory --------------------------------------------------------------------------------------------------------

ABOUT = "journal.json"

_NAME = re.compile(r"[0-9]{20}\.segment")
"""Other files are ignored: "0 (copy).segment", say."""


class About(msgspec.Struct, forbid_unknown_fields=True):
    """The content of `journal.json`.

    Attributes:
      begun: the first files are complete; else the journal is begun again, as nothing was read yet.
      first: items that were read before the first one still here.
      trimmed_for: the snapshot that was stored before the last trim; "": nothing was trimmed.
    """

    streamline_journal: int
    id: str
    shards: list[int]
    begun: bool
    first: int
    trimmed_for: str


class DiskErrors:
    """Turns an OSError in a `with` block into a JournalError that names the journal and the operation."""

    def __init__(self, directory: Path, what: str) -> None:
        self._directory = directory
        self._what = what

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise JournalError(
                f"can't {self._what} the journal in {self._directory}: {error.strerror or error}"
            ) from error


def segment_path(directory: Path, read: int) -> Path:
    """Return where the segment is that begins after item `read` of the feed."""
    return directory / f"{read:020d}.segment"


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.segment") if _NAME.fullmatch(path.name))


def read_about(directory: Path) -> About | None:
    """Return the content of `journal.json`; None: there is no journal.

    Raises:
      JournalError: it is damaged or missing, or of a newer format.
    """
    path = directory / ABOUT
    try:
        content = read_own(path)
    except FileNotFoundError:
        if files_in(directory):
            raise JournalError(f"{directory} has files of a journal, but no {ABOUT}: use a copy of it") from None
        return None
    read = partial(msgspec.convert, type=About)
    about: About = decode_json(content, read, lambda why: JournalError(f"{path} is damaged: {why}; use a copy of it"))
    if about.streamline_journal != 1:
        raise JournalError(f"{path} is of format {about.streamline_journal}: upgrade streamline")
    return about


def read_files(directory: Path, about: About) -> list[JournalSegment]:
    """Read all segments but a kill's leftovers; a JournalError if one is damaged, missing, or of another journal."""
    segments: list[JournalSegment] = []
    paths = files_in(directory)
    for path in paths:
        last = path is paths[-1]
        if not last and int(path.stem) < about.first:
            continue  # a kill came between a trim's two steps
        segment = read_segment(path, last=last)
        if segment.header is None:
            continue  # a kill came while it was begun
        if segment.header.id != about.id:
            raise JournalError(f"{path} is of another journal ({segment.header.id}): it doesn't belong here")
        expected, found = about.first, segment.header.read
        if segments:
            expected, found = segments[-1].read, segment.header.after
        if expected != found:
            raise JournalError(
                f"{path} goes on after item {found:,}, and what is before it ends after item {expected:,}: a file is "
                f"missing, or was cut; use a copy of {directory}"
            )
        segments.append(segment)
    if not segments and about.first:
        raise JournalError(f"the files of the journal in {directory} are missing: use a copy of it")
    return segments


def mend_files(directory: Path, segments: Sequence[JournalSegment]) -> None:
    """Cut off a torn tail, and remove all files but these. A journal that is refused stays unchanged."""
    sound = {segment.path for segment in segments}
    for path in files_in(directory):
        if path not in sound:
            path.unlink()
    for segment in segments:
        if segment.size > segment.end:
            descriptor = open_own(segment.path, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, segment.end)
            finally:
                os.close(descriptor)


# The segments ---------------------------------------------------------------------------------------------------------

MAGIC = b"streamline journal 1\n"

_SHARD = struct.Struct("<I")

Record: TypeAlias = "tuple[int, EncodedItem]"


class SegmentHeader(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The first frame of a segment.

    Attributes:
      read: items that the feed had read before this file.
      after: items read by the end of the file before this one; less than `read` where a power cut took what a snapshot
        has passed.
      given: for each shard, items that its worker had been fed.
      next: the shard whose turn was next.
      mark: of the last item before this file, see `SavedJournal`.
    """

    id: str
    read: int
    after: int = msgspec.field(name="behind")
    given: dict[int, int]
    next: int
    mark: Any = None

    def begin(self) -> bytes:
        return MAGIC + frame(json.dumps(msgspec.to_builtins(self, str_keys=True)).encode())


class JournalSegment(msgspec.Struct):
    """A segment that was read.

    Attributes:
      header: None: cut short within it, so the file has no items.
      records: shard and item, in order.
      end: its sound bytes.
      size: its bytes; more than `end`: its tail is torn.
    """

    path: Path
    header: SegmentHeader | None
    records: list[Record]
    end: int
    size: int

    @property
    def read(self) -> int:
        """Items that the feed had read by its end."""
        return (self.header.read if self.header is not None else 0) + len(self.records)


def record(shard: int, written: EncodedItem) -> bytes:
    return frame(_SHARD.pack(shard) + to_bytes(written))


def read_segment(path: Path, *, last: bool) -> JournalSegment:
    """Read a segment; if it is the `last` one, its tail may be torn. A JournalError names the byte of other damage."""
    content, start = read_own(path), len(MAGIC)
    if not content.startswith(MAGIC):
        if last and (MAGIC.startswith(content) or not content.strip(b"\0")):
            return JournalSegment(path, None, [], 0, len(content))
        raise JournalError(f"{path} is damaged at byte 0: it doesn't begin as a journal's file does; use a copy of it")
    segment = JournalSegment(path, None, [], 0, len(content))
    try:
        for segment.end, payload in frames(content, start, last=last):
            if segment.header is None:
                segment.header = _header(payload, path)
            else:
                segment.records.append((_SHARD.unpack_from(payload)[0], from_bytes(payload[_SHARD.size :])))
    except DamagedFrameError as error:
        raise JournalError(
            f"{path} is damaged at byte {error.byte:,}: {error.what} is not as it was written. Use a copy of the "
            "journal; without one, cutting the file off at this byte loses the items after it"
        ) from None
    if segment.header is None and not last:
        raise JournalError(f"{path} is damaged at byte {start}: it has no header")
    return segment


def _header(payload: bytes, path: Path) -> SegmentHeader:
    what = f"{path} is damaged at byte {len(MAGIC)}: not a journal's header"
    read = partial(msgspec.convert, type=SegmentHeader, strict=False)
    header: SegmentHeader = decode_json(payload, read, lambda why: JournalError(f"{what} ({why})"))
    return header
