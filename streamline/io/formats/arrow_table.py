"""An Arrow IPC file or stream that has been opened. Imports pyarrow: not to be imported in the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from streamline.errors import DataError, StreamlineError
from streamline.io.fetch.file import File
from streamline.io.formats.arrow_messages import PREFIX_BYTES, Message, MessageBlock
from streamline.io.formats.columnar import STEP_BYTES, Columnar, DecodedRows, GroupedTable, RowGroup
from streamline.io.formats.columnar_selection import selection_of
from streamline.io.formats.sparse_file import SparseFile, from_start
from streamline.sharding.split import contiguous


class _ArrowTable(GroupedTable):
    def _select(self, format: Columnar, path: str, schema: Any) -> None:
        self._batch_rows = format.batch_rows
        self.selection = selection_of(path, schema, lambda _: schema, format.columns, format.expression)
        fields = sorted({schema.get_field_index(name) for name in self.selection.read})
        self.options = ipc.IpcReadOptions(included_fields=fields, use_threads=True)

    def _rows_of(self, batch: Any, start: int) -> Iterator[DecodedRows]:
        """Yield the rows of a batch from row `start` on, checked: damaged offsets would be read as addresses."""
        batch.validate(full=True)
        rows, step = batch.num_rows, self._batch_rows or STEP_BYTES  # of nulls, a message may have trillions
        for first in range(start - start % step, rows, step):
            begin, stop = max(start, first), min(rows, first + step)
            wanted, after = self.selection.of(batch.slice(begin, stop - begin), begin)
            if self.selection.expression is None and wanted.num_rows < rows and self._batch_rows is not None:
                wanted = _apart(wanted)
            yield DecodedRows(wanted, after, stop)


def _apart(batch: Any) -> Any:
    """Return a slice with buffers of its own: pickled, it would take all that it was cut from along."""
    return pa.RecordBatch.from_arrays([pa.concat_arrays([column]) for column in batch.columns], schema=batch.schema)


class FileTable(_ArrowTable):
    """The footer of an Arrow file, and a decoder of what is fetched of it.

    Args:
      footer: its end, at least all of the footer.
      held: the dictionaries, with where they are; of a local file none.
      found: where the record batches are.
    """

    def __init__(
        self,
        format: Columnar,
        file: File,
        size: int,
        footer: bytes,
        held: Sequence[tuple[int, bytes]],
        found: Sequence[MessageBlock],
        first: int,
    ) -> None:
        self._held = [(size - len(footer), footer), *held]
        self._sparse = SparseFile(size)
        self._sparse.hold(self._held)
        self._source = pa.OSFile(file.path) if file.local else pa.PythonFile(self._sparse, mode="r")
        try:
            schema = ipc.open_file(self._source).schema
            self._select(format, file.path, schema)
            self._reader = ipc.open_file(self._source, options=self.options)
            if self._reader.num_record_batches != len(found):
                raise ValueError(f"expected {self._reader.num_record_batches} record batches, found {len(found)}")
        except Exception as error:
            self.close()
            if isinstance(error, StreamlineError):
                raise
            raise DataError(f"{file.path}: the footer can't be read: {type(error).__name__}: {error}") from error
        part = file.part
        owned = contiguous(len(found), part.num_shards, part.shard)
        tail = size - len(footer)  # a small file came whole with its footer
        spans = [() if file.local or block.start >= tail else ((block.start, block.stop),) for block in found]
        if spans and spans[0] and not held:
            spans[0] = ((from_start(found[0].start), found[0].stop),)
        self._found = found
        self.groups = [RowGroup(index, None, spans[index], 0) for index in owned if index >= first]

    def decode(self, group: RowGroup, data: Sequence[bytes], start: int) -> Iterator[DecodedRows]:
        if data:
            ((begin, _),) = group.spans
            at = self._found[group.index].start - begin + PREFIX_BYTES
            length = int.from_bytes(data[0][at - 4 : at], "little")
            group.rows = Message.of(data[0][at : at + length]).rows
            self._sparse.hold([*self._held, (begin, data[0])])
        batch = self._reader.get_batch(group.index)
        group.rows = batch.num_rows
        yield from self._rows_of(batch, start)

    def close(self) -> None:
        self._source.close()


class StreamTable(_ArrowTable):
    """The schema of an Arrow stream, and a decoder of a batch, whose data are all messages that it depends on, and its.

    Args:
      message: the schema's, whole.
    """

    def __init__(self, format: Columnar, path: str, message: bytes) -> None:
        try:
            self._select(format, path, ipc.open_stream(pa.BufferReader(message)).schema)
        except StreamlineError:
            raise
        except Exception as error:
            raise DataError(f"{path}: the schema can't be read: {type(error).__name__}: {error}") from error
        self.groups = ()

    def decode(self, group: RowGroup, data: Sequence[bytes], start: int) -> Iterator[DecodedRows]:
        stream = ipc.open_stream(pa.BufferReader(b"".join(data)), options=self.options)
        yield from self._rows_of(stream.read_next_batch(), start)
