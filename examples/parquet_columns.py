"""Two columns of a wide Parquet file, and the rows that a filter wants: what isn't asked for isn't read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import streamline as sl

ROWS, GROUPS = 4000, 8


def write_table(path: Path) -> None:
    """Write 8 row groups of 500 rows, of the years 2016 to 2023: sorted, as tables often are by time."""
    random = np.random.default_rng(0)
    table = pa.table(
        {
            "id": np.arange(ROWS),
            "year": 2016 + np.arange(ROWS) // (ROWS // GROUPS),
            "text": [f"text {row}" for row in range(ROWS)],
            "thumbnail": [random.bytes(200) for _ in range(ROWS)],  # most of the file, and never touched
        }
    )
    pq.write_table(table, path, row_group_size=ROWS // GROUPS)


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


with tempfile.TemporaryDirectory() as scratch:
    path = Path(scratch, "texts.parquet")
    write_table(path)

    # Rows, as dicts. Of the 8 row groups, 6 are never fetched: their statistics say that they have no such year.
    wanted = sl.read_parquet(path, columns=["id", "text"], filter=pc.field("year").isin([2017, 2022])).shard(2).merge()
    with wanted.open() as stream:
        first = [next(stream) for _ in range(321)]
        snapshot = stream.snapshot()
    print(first[0])
    print(wanted.explain(snapshot))
    with wanted.open(resume=snapshot) as stream:
        rest = list(stream)
    print("each wanted row, once:", sorted(ids(first + rest)) == [*range(500, 1000), *range(3000, 3500)])

    # Record batches, which NumPy sees without a copy: for arithmetic on columns, far faster than rows.
    total = sum(
        int(batch.column("year").to_numpy().sum()) for batch in sl.read_parquet(path, columns=["year"], batch_rows=256)
    )
    print("mean year:", total / ROWS)
