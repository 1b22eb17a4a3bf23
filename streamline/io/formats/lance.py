"""Lance datasets: rows of one version, fragment by fragment. pylance is an extra, and imported late.

A dataset is a folder, or a prefix of an object store, which Lance lists and reads itself, in threads of its own. Its
files never change, and each version says which of them it consists of. So a version's number and the names of these
files tell one from any other, also from one of the same number in a dataset that was written anew.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from streamline.errors import ReadError
from streamline.io.fetch.file import File, FilePart
from streamline.io.formats.base import InThread
from streamline.io.formats.columnar import STEP_BYTES, Columnar, DecodedRows, GroupedTable, RowGroup
from streamline.io.storage.base import FoundObject
from streamline.sharding.split import contiguous

VERSION = r"^version (\d+) \([0-9a-f]{16}\)$"
"""How a version is written in a listing, in the place of an ETag: its number, and a digest of its files' names."""

STEP_ROWS = 4096
"""Rows decoded at a time at the most: a file's size says only how large rows are on average, compressed."""

AHEAD_BYTES = 16 * 2**20
"""What Lance may read ahead in each fragment that is open: its own 2 GiB are for one scan by all threads."""

BLOBS = {"blob_handling": "all_binary"}
"""Of columns that are stored apart, a scan gives places otherwise."""


@contextmanager
def calling() -> Iterator[None]:
    """Make a `ReadError` of a panic of Lance's, as on damaged files: it is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ReadError(f"Lance panicked, as on a damaged file: {error}") from error


@dataclass(frozen=True, kw_only=True)
class LanceFormat(Columnar):
    """Reads Lance datasets. Place: see `columnar`; a group is a shard's part of a fragment.

    Attributes:
      version: number or tag of the one that is read; None: the newest, when the pipeline is opened.
      storage_options: Lance's; they may hold secrets.
    """

    kind: ClassVar[str] = "read_lance"
    reread: ClassVar[str] = "seeks to its row"
    may_change: ClassVar[bool] = False
    unit: ClassVar[str] = "fragment"

    version: int | str | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def options(self) -> dict[str, Any]:
        return {key: value for key, value in super().options().items() if key != "batch_rows"}

    @calling()
    def found(self, path: str) -> FoundObject:
        """Return what is read of a dataset, its version as an ETag; a ReadError if it can't be opened. Blocks."""
        return FoundObject(path, etag=_version(self._open(path, self.version)))

    async def table(self, file: File, first: int, in_thread: InThread[Any]) -> GroupedTable:
        with calling():
            table: GroupedTable = await in_thread(lambda: LanceTable(self, file.part, first))
        return table

    @calling()
    def open_found(self, found: FoundObject) -> Any:
        """Return a dataset in the version that was found before. As `found`."""
        dataset = self._open(found.path, number_of(found.etag))
        if (now := _version(dataset)) != found.etag:
            raise ReadError(f"{found.path} was written anew: it was {found.etag}, and is {now}: begin anew")
        return dataset

    def _open(self, path: str, version: int | str | None) -> Any:
        import lance

        try:
            return lance.dataset(path, version=version, storage_options=dict(self.storage_options or {}))
        except Exception as error:  # of lance: ValueError for what isn't there, OSError, ...
            what = path if version is None else f"version {version} of {path}"
            gone = "" if version is None else "; tag the versions that runs read, so that no clean-up removes them"
            raise ReadError(f"can't open the Lance dataset {what}: {reason(error)}{gone}") from error


class LanceTable(GroupedTable):
    """One version of a dataset, opened."""

    def __init__(self, format: LanceFormat, part: FilePart, first: int) -> None:
        from streamline.io.formats.columnar_selection import selection_of  # imports pyarrow

        self._format = format
        self._found = part.found
        self._fragments: dict[int, tuple[Any, int]] = {}
        self.groups = groups = list[RowGroup]()
        dataset = format.open_found(part.found)
        self.selection = selection_of(
            part.found.path,
            dataset.schema,
            lambda columns: dataset.scanner(columns=columns, **BLOBS).projected_schema,
            format.columns,
            format.expression,
        )
        fragments = dataset.get_fragments()
        counts = [fragment.count_rows() for fragment in fragments]
        owned, end = contiguous(sum(counts), part.num_shards, part.shard), 0
        for index, (fragment, count) in enumerate(zip(fragments, counts, strict=True)):
            begin, end = end, end + count
            rows = range(max(owned.start, begin), min(owned.stop, end))
            if rows and index >= first:
                self._fragments[index] = fragment, rows.start - begin
                groups.append(RowGroup(index, len(rows), (), _step(fragment.metadata)))

    def decode(self, group: RowGroup, data: Sequence[bytes], start: int) -> Iterator[DecodedRows]:
        assert group.rows is not None
        fragment, first = self._fragments[group.index]
        wanted = {"columns": list(self.selection.read), "offset": first + start, "limit": group.rows - start}
        ahead = {"batch_size": group.step, "batch_readahead": 2, "io_buffer_size": AHEAD_BYTES}
        try:
            with calling():
                for batch in fragment.to_batches(**wanted, **ahead, **BLOBS):
                    begin, start = start, start + batch.num_rows
                    rows, after = self.selection.of(batch, begin)
                    yield DecodedRows(rows, after, start)
        except Exception as error:  # of lance: ArrowInvalid for anything
            self._format.open_found(self._found)  # a version that is gone is no damage
            raise ValueError(reason(error)) from error

    def close(self) -> None:
        self._fragments.clear()


def number_of(version: str | None) -> int:
    """Return the number in a version as it is listed."""
    found = re.match(VERSION, version or "")
    assert found is not None
    return int(found[1])


def _version(dataset: Any) -> str:
    digest = hashlib.sha256()
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        removed = metadata.deletion_file
        names = [*(file.path for file in metadata.files), removed and (removed.read_version, removed.id)]
        digest.update(repr((metadata.id, names)).encode())
    return f"version {dataset.version} ({digest.hexdigest()[:16]})"


def _step(metadata: Any) -> int:
    """Return how many rows of a fragment are decoded at a time."""
    size = sum(file.file_size_bytes or 0 for file in metadata.files)
    fit: int = metadata.physical_rows * STEP_BYTES // max(1, size)
    return max(1, min(STEP_ROWS, fit))


def reason(error: Exception) -> str:
    """Return what Lance says, without the lines of its source, which it adds."""
    return re.sub(r",? \S*/rust/\S+:\d+:\d+", "", str(error)) or type(error).__name__
