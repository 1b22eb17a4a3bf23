"""A live source's journal on disk: what was read outlives a kill at any moment.

Each item is written before the feed is asked for its next one, so whoever is asked may take the one before for kept. A
directory holds `journal.json` (whose it is, where it begins, which snapshot it was trimmed behind), files of items
(`streamline.sources.segments`), and a lock. Whole files are removed when a snapshot that has passed them is stored.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from streamline.core.atomic_file import make_directory, open_own, sync_directory
from streamline.core.item_codec import EncodedItem
from streamline.core.state import Json, Tree
from streamline.errors import JournalError, ResumeError
from streamline.sources.journal import Entry, Journal, Kept, Places
from streamline.sources.journal_files import (
    About,
    DiskErrors,
    Lock,
    files_in,
    mend_files,
    read_about,
    read_files,
    segment_path,
)
from streamline.sources.segments import Header, Segment, record

__all__ = ["SEGMENT_BYTES", "DiskJournal"]

SEGMENT_BYTES = 8 * 2**20
"""A file is closed behind so many bytes: what is let go of is let go of in such pieces, and fsync of one takes some
10 ms on a disk."""


class DiskJournal(Journal):
    """A journal in a directory, opened: locked, read, and ready to be appended to.

    Args:
      directory: made if it isn't there.
      kept: the snapshot's that is resumed; None: there is none.
      entries: the items in that snapshot: of a journal in memory that goes on on disk.
      state: the snapshot's.
      mark_of: returns the mark of an item, see `Kept`.

    Attributes:
      backlog: the items that are to be fed before what the feed gives from now on.

    Raises:
      JournalError: damaged, locked by another opening, unreadable, or it doesn't have what a resume needs.
      ResumeError: snapshot and journal don't belong together.
    """

    def __init__(
        self,
        directory: Path,
        places: Places,
        kept: Kept | None,
        entries: Sequence[Entry],
        state: Tree | None,
        mark_of: Callable[[EncodedItem], Json] = lambda written: None,
    ) -> None:
        self._directory = directory
        self._lock = Lock(directory)
        self._mutex = threading.Lock()  # appends are the reader's, trims the consumer's, who may be another thread
        self._file: int | None = None
        self._given: dict[int, int] = {}
        self._written = 0
        self._segments: list[Header] = []
        self._closed = False
        self._mark_of = mark_of
        self.backlog: list[Entry] = []
        self.keeper = self
        super().__init__(places, secrets.token_hex(16) if kept is None else kept.id)
        with DiskErrors(directory, "open"):
            make_directory(directory)
            if not self._lock.take():
                raise JournalError(
                    f"the journal in {directory} is in use, by another process or another opening: each needs its own"
                )
            try:
                self._open(kept, entries, places.passed(state))
            except BaseException:
                self.close()
                raise

    # Opening ----------------------------------------------------------------------------------------------------------

    def _open(self, kept: Kept | None, entries: Sequence[Entry], passed: dict[int, int | float]) -> None:
        about = read_about(self._directory)
        if about is None or not about.begun:
            self._create(kept, entries, passed)
            return
        if kept is not None and kept.id != about.id:
            raise ResumeError(
                f"the snapshot belongs to another journal ({kept.id}) than the one in {self._directory} ({about.id}): "
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
        if kept is None and about.first:
            raise JournalError(
                f"the journal in {self._directory} begins behind item {about.first:,}: what is before was trimmed when "
                f"a snapshot was saved ({about.trimmed_for}). Resume from that one, or from a later one; to begin "
                "anew, remove the directory"
            )
        given = self._gather(segments, passed, about)
        there = segments[-1].read if segments else about.first
        beyond = {shard: max(0, int(n) - given[shard]) for shard, n in passed.items() if n != math.inf}
        if kept is not None and kept.read - there > sum(beyond.values()):
            self._too_short(kept, there, segments)
        mend_files(self._directory, segments)
        self.read = max(there, 0 if kept is None else kept.read)
        self.next, self.mark = self._next_behind(segments, kept)
        self._roll({shard: n + beyond.get(shard, 0) for shard, n in given.items()}, self.read, there)

    def _create(self, kept: Kept | None, entries: Sequence[Entry], passed: dict[int, int | float]) -> None:
        """Begin a journal; the items of a snapshot that kept them itself come first."""
        if kept is not None and kept.stored:
            raise ResumeError(
                f"the snapshot's items are in a journal on disk, and there is none in {self._directory}: give "
                "from_stream(journal=) the directory that it was taken with"
            )
        given = {shard: 0 if passed[shard] == math.inf else int(passed[shard]) for shard in self.places.shards}
        first = self.read = 0 if kept is None else kept.read - len(entries)
        if kept is not None:
            self.next, self.mark = kept.next, kept.mark
        why = "" if kept is None else "the one that this journal was begun with"
        self._write_about(first, why, begun=False)
        for path in files_in(self._directory):
            path.unlink()
        self._roll(given, self.read, self.read)
        for entry in entries:
            self.append(entry)
        self.backlog = list(entries)
        self.sync()
        self._write_about(first, why)

    def _gather(self, segments: Sequence[Segment], passed: dict[int, int | float], about: About) -> dict[int, int]:
        """Make the backlog: what the positions have not passed; return how many items each shard was handed.

        Raises:
          JournalError: something that they have not passed isn't there.
        """
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

    def _too_short(self, kept: Kept, there: int, segments: Sequence[Segment]) -> NoReturn:
        """Refuse a journal that ends before what the snapshot needs, by file and byte.

        What a power cut took may be missing if the snapshot's state has passed all of it. How many items a worker that
        has ended was handed isn't known, so what is missing counts as needed then.
        """
        path, byte = (segments[-1].path, segments[-1].end) if segments else (segment_path(self._directory, there), 0)
        way_out = f"resume from a snapshot that was taken when at most {there:,} items were read"
        if not kept.stored:
            way_out = "give another directory as journal=: the snapshot has the items itself"
        raise JournalError(
            f"the journal is too short for the snapshot: {path} is whole up to byte {byte:,}, item {there:,} of the "
            f"feed, but the snapshot was taken when {kept.read:,} items were read, and needs some of the missing "
            f"{kept.read - there:,}. The file was cut, later files are gone, or this is an older copy: put back a copy "
            f"of {self._directory} that is as new as the snapshot, or {way_out}"
        )

    def _next_behind(self, segments: Sequence[Segment], kept: Kept | None) -> tuple[int, Json]:
        """Return the shard whose turn is next behind all that was read, and the mark of the last item.

        The reader passes over shards that ended.
        """
        shards = list(self.places.shards)
        if kept is not None and (not segments or kept.read >= segments[-1].read):
            return (kept.next if segments else self.next), kept.mark
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
            _write(self._file, content)
            self._written += len(content)
            self._given[entry.shard] += 1
            self.read += 1
            self.next, self.mark = entry.next, entry.mark
            if self._written >= SEGMENT_BYTES:
                self._roll(dict(self._given), self.read, self.read)

    def entry(self, state: Tree) -> Json:
        return self._json(self.places.passed(state), self.read, self.next, self.mark, None)

    def sync(self) -> None:
        """Wait until what was written would survive a power cut. From any thread.

        Raises:
          JournalError: the disk failed.
        """
        with self._mutex:
            if self._file is None:
                return
            descriptor = os.dup(self._file)  # fsync takes long, and the reader may close its own meanwhile
        with DiskErrors(self._directory, "write to"):
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def storing(self) -> None:
        """A snapshot is about to be stored: what it refers to is made durable first."""
        self.sync()

    def stored(self, state: Tree, where: str) -> None:
        """Remove the files that the snapshot of this state has passed, if no other opening uses them by now."""
        passed = self.places.passed(state)
        with DiskErrors(self._directory, "trim"), self._mutex:
            if self._closed and not self._lock.take():
                return  # the opening that has it now trims at its own saves
            try:
                self._trim(passed, where)
            finally:
                if self._closed:
                    self._lock.free()

    def _trim(self, passed: dict[int, int | float], where: str) -> None:
        if self._closed and ((about := read_about(self._directory)) is None or about.first != self._segments[0].read):
            return  # somebody else has trimmed it since
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
        """Make durable what was written, close the files, and let others have the directory. Idempotent."""
        with self._mutex:
            self._closed = True
            descriptor, self._file = self._file, None
            try:
                if descriptor is not None:
                    with DiskErrors(self._directory, "write to"):
                        _sync_and_close(descriptor)
            finally:
                self._lock.free()

    def _roll(self, given: dict[int, int], read: int, behind: int) -> None:
        """Begin a new file, or go on with the last one if nothing was written into it yet."""
        self._given = dict(given)
        self._written = 0
        again = bool(self._segments) and self._segments[-1].read == read
        before, self._file = self._file, None
        if before is not None:
            _sync_and_close(before)  # before there is another one: only the last file's tail may be torn
        flags = os.O_WRONLY | os.O_APPEND | (0 if again else os.O_CREAT | os.O_EXCL)
        self._file = open_own(segment_path(self._directory, read), flags)
        if not again:
            header = Header(self.id, read, behind, dict(given), self.next, self.mark)
            _write(self._file, header.begin())
            sync_directory(self._directory)
            self._segments.append(header)

    def _write_about(self, first: int, trimmed_for: str, *, begun: bool = True) -> None:
        about = About(1, self.id, list(self.places.shards), begun, first, trimmed_for)
        about.write(self._directory)


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
