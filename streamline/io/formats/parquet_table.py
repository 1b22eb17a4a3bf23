"""A Parquet file that has been opened. Imports pyarrow: not to be imported in the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from streamline.errors import DataError, StreamlineError
from streamline.io.fetch.file import File, FilePart
from streamline.io.formats.columnar import STEP_BYTES, Columnar, DecodedRows, GroupedTable, RowGroup
from streamline.io.formats.columnar_selection import selection_of, within
from streamline.io.formats.sparse_file import AbsentFile, Span, SparseFile, coalesced
from streamline.sharding.split import contiguous

DICTIONARY_ROWS = 1024
"""Rows made at a time of texts that are kept once for all rows: no size says what they take together. A file of 258
bytes made 1.9 GB; fewer rows at a time would cost speed."""

BUFFER_BYTES = 256 * 1024
"""Read at a time of each column of a local file: without it, pyarrow reads all of a row group's column, and keeps it
until the group is done. 64 KiB to 4 MiB are as fast."""

MAGIC_BYTES = 4
"""What stands before the first column. It is read with that, so that a file of which all is wanted is read whole, and a
`cache_dir=` keeps it."""

PADDING_BYTES = 100
"""Read after a column: writers before PARQUET-816 forgot to count a header in its size, and pyarrow reads it."""


class ParquetTable(GroupedTable):
    """The footer of a file, parsed once, and a decoder of what is fetched of it.

    A local file is read by pyarrow itself: it asks for the same bytes, and saves a copy and the ways between threads.

    Args:
      footer: its end, at least all of the footer.
    """

    def __init__(self, format: Columnar, file: File, size: int, footer: bytes, first: int) -> None:
        self._path = file.path
        self._local = file.local
        self._size = size
        self._footer = footer
        self._tail = size - len(footer)
        self._sparse = SparseFile(size)
        self._source = pa.OSFile(self._path) if file.local else pa.PythonFile(self._sparse, mode="r")
        try:
            metadata = pq.read_metadata(pa.BufferReader(footer))
            self._file = pq.ParquetFile(
                self._source,
                metadata=metadata,
                buffer_size=BUFFER_BYTES if file.local else 0,
                pre_buffer=False,
                page_checksum_verification=True,
                coerce_int96_timestamp_unit="us",  # in nanoseconds, years before 1678 and after 2261 would be others
            )
            self._leaves = [self._file.schema.column(index).path for index in range(len(self._file.schema))]
            self.selection = selection_of(
                self._path,
                self._file.schema_arrow,
                lambda columns: self._file.read_row_groups([], columns=columns).schema,
                format.columns,
                format.expression,
                self._leaves,
            )
            self.groups = self._groups(format, file.part, first)
        except StreamlineError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise DataError(f"{self._path}: the footer can't be read: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._source.close()

    def _groups(self, format: Columnar, part: FilePart, first: int) -> list[RowGroup]:
        """Return the groups of a part of the file that have rows, and may have some that are wanted."""
        metadata, names = self._file.metadata, set(self.selection.read)
        read = [index for index, leaf in enumerate(self._leaves) if not names.isdisjoint(within(leaf))]
        owned = contiguous(metadata.num_row_groups, part.num_shards, part.shard)
        self._check(range(metadata.num_row_groups), read)
        kept = self._matching_groups(format)
        groups = (self._group(index, read, format.batch_rows) for index in owned if index >= first and index in kept)
        return [group for group in groups if group.rows]

    def _check(self, groups: range, read: list[int]) -> None:
        """Let pyarrow's reader look at the metadata of all columns: it fails on data, which aren't here, or on them.

        Asked in Python for the metadata of a column that are encrypted, or damaged to seem so, pyarrow ends
        the process (26.0: there is no `except +` in RowGroupMetaData.column).
        """
        if not groups:
            return
        data = AbsentFile(self._size)
        reader = pq.ParquetFile(pa.PythonFile(data, mode="r"), metadata=self._file.metadata, pre_buffer=True)
        try:  # it looks at the metadata of all columns before it asks for any data
            next(reader.iter_batches(row_groups=list(groups), columns=list(self.selection.read)), None)
        except EOFError as error:
            if error is not data.error:
                raise
        finally:
            data.error.__traceback__ = None
        expected = {leaf: self._file.schema.column(leaf).physical_type for leaf in read}
        for index in groups:  # of another type, it would end the process where its statistics are looked at
            group = self._file.metadata.row_group(index)
            for leaf, kind in expected.items():
                if (now := group.column(leaf).physical_type) != kind:
                    raise ValueError(f"row group {index}: a column of {kind} is said to be of {now}")

    def _matching_groups(self, format: Columnar) -> set[int]:
        """Return the groups that may have rows for which the filter is true, as their statistics say."""
        every = range(self._file.metadata.num_row_groups)
        if format.predicate is None or not every:
            return set(every)
        fragment = ds.ParquetFileFormat(coerce_int96_timestamp_unit="us").make_fragment(pa.BufferReader(self._footer))
        subset = fragment.subset(filter=self.selection.expression, schema=self._file.schema_arrow)
        return {group.id for group in subset.row_groups}

    def _group(self, index: int, read: list[int], batch_rows: int | None) -> RowGroup:
        group = self._file.metadata.row_group(index)
        columns = [group.column(leaf) for leaf in read]
        spans = coalesced([self._span(index, column) for column in columns])
        size = sum(column.total_uncompressed_size for column in columns)
        if group.num_rows < 0 or size < 0:
            raise DataError(f"{self._path} row group {index}: {group.num_rows} rows of {size} bytes: it is damaged")
        most = max(1, STEP_BYTES // max(1, len(columns)))  # of values that take no bytes, a file may have trillions
        if any(column.has_dictionary_page and column.physical_type.endswith("BYTE_ARRAY") for column in columns):
            most = min(most, DICTIONARY_ROWS)
        step = batch_rows or max(1, min(most, group.num_rows * STEP_BYTES // max(1, size)))
        here = self._local or all(start >= self._tail for start, _ in spans)  # a small file came whole with its footer
        return RowGroup(index, group.num_rows, () if here else tuple(spans), step)

    def _span(self, group: int, column: Any) -> Span:
        start = column.data_page_offset
        if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
            start = column.dictionary_page_offset
        stop = start + column.total_compressed_size
        if not 0 <= start < stop <= self._size:
            raise DataError(
                f"{self._path} row group {group}: column {column.path_in_schema!r} is said to be in bytes {start:,} to "
                f"{stop:,} of {self._size:,}: the footer is damaged, or the file was cut short"
            )
        return 0 if start <= MAGIC_BYTES else start, min(self._size, stop + PADDING_BYTES)

    def decode(self, group: RowGroup, data: Sequence[bytes], start: int) -> Iterator[DecodedRows]:
        if not self._local:
            pieces = ((start, piece) for (start, _), piece in zip(group.spans, data, strict=True))
            self._sparse.hold([(self._tail, self._footer), *pieces])
        batches = self._file.iter_batches(
            batch_size=group.step, row_groups=[group.index], columns=list(self.selection.read)
        )
        row = 0
        for batch in batches:
            begin, row = row, row + batch.num_rows
            if row > group.rows:
                raise ValueError(f"expected {group.rows:,} rows, found {row:,} or more")
            if row <= start:
                continue
            cut = max(0, start - begin)
            wanted, after = self.selection.of(batch.slice(cut) if cut else batch, begin + cut)
            yield DecodedRows(wanted, after, row)
