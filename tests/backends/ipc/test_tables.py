"""Tables and record batches of pyarrow cross as memory: that of the rows that they show."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamline.backends.ipc.pickling import BESIDE, PickledItems, Pickling, reducers

ROWS = 20 * BESIDE


def columns(rows: int) -> dict[str, Any]:
    lists = pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, dtype=np.int32), pa.array(np.arange(2 * rows)))
    return {
        "number": pa.array(np.arange(rows), mask=np.arange(rows) % 5 == 0),
        "text": pa.array([f"text {n}" for n in range(rows)]),
        "kind": pa.array([f"k{n % 3}" for n in range(rows)]).dictionary_encode(),
        "list": lists,
        "box": pa.FixedSizeListArray.from_arrays(np.arange(4 * rows, dtype=np.float32), 4),
        "point": pa.StructArray.from_arrays([pa.array(np.arange(rows) / 2), lists], names=["x", "of"]),
        "flag": pa.array(np.arange(rows) % 2 == 0),
        "nothing": pa.nulls(rows),
    }


WHOLE = pa.table(columns(ROWS))
(BATCH,) = WHOLE.to_batches()


def size(pickled: PickledItems) -> int:
    return sum(map(len, pickled.pieces)) + sum(buffer.nbytes for buffer in pickled.buffers)


def there(pickled: PickledItems) -> Any:
    buffers = [memoryview(bytearray(buffer)) for buffer in pickled.buffers]
    (arrived,) = pickle.loads(b"".join(pickled.pieces), buffers=buffers)
    return arrived


def test_there_are_tables_only_where_pyarrow_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pa.RecordBatch in reducers()
    monkeypatch.delitem(sys.modules, "pyarrow")
    assert pa.RecordBatch not in reducers()
    assert "pyarrow" not in sys.modules
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())  # what an import that is under way looks like
    assert pa.RecordBatch not in reducers()


@pytest.mark.parametrize("what", [WHOLE, BATCH, pa.concat_tables([WHOLE, WHOLE])], ids=["table", "batch", "chunks"])
def test_all_of_it_crosses_beside_the_pickle_without_a_copy(what: Any) -> None:
    pickled = Pickling().dumps([what])
    inside = sum(map(len, pickled.pieces))
    assert inside < 20_000
    assert size(pickled) < 1.01 * what.nbytes + 20_000
    first = what.column("box").chunk(0) if isinstance(what, pa.Table) else what.column("box")
    address = first.values.buffers()[1].address
    assert address in [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in pickled.buffers]
    assert there(pickled).equals(what)


@pytest.mark.parametrize("what", [WHOLE, BATCH, pa.concat_tables([WHOLE, WHOLE])], ids=["table", "batch", "chunks"])
@pytest.mark.parametrize("first", [0, 1, 1003, ROWS - 5])
def test_of_some_rows_only_their_memory_crosses(what: Any, first: int) -> None:
    some = what.slice(first, 100)
    pickled = Pickling().dumps([some])
    assert size(pickled) < 4 * some.nbytes + 20_000 < what.nbytes / 50
    assert there(pickled).equals(some)
    assert there(pickled).schema.equals(some.schema)


def test_what_has_no_rows_or_no_columns_crosses_too() -> None:
    for what in (WHOLE.slice(0, 0), BATCH.slice(7, 0), pa.table({}), pa.record_batch([], schema=pa.schema([]))):
        assert there(Pickling().dumps([what])).equals(what)


def test_metadata_and_columns_of_one_name_arrive() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), False, {"k": "v"}), pa.field("a", pa.int64())], {"of": "all"})
    batch = pa.record_batch([pa.array(range(ROWS)), pa.array(range(ROWS))], schema=schema).slice(5, 5)
    arrived = there(Pickling().dumps([batch]))
    assert arrived.equals(batch, check_metadata=True)
