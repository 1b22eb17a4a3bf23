"""Do rows of tables come faster than by the iterators that people write: `iterrows`, one row at a time?"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

ROWS = 50_000


@cache
def arrow(rows: int) -> Any:
    """Return a table of 6 columns: numbers and text."""
    columns: dict[str, Any] = {"id": range(rows), **{f"x{at}": [n / 7 for n in range(rows)] for at in range(3)}}
    columns["text"] = [f"sample {n} of {rows}" for n in range(rows)]
    columns["kind"] = [f"kind {n % 7}" for n in range(rows)]
    return peer("pyarrow").table(columns)


@cache
def pandas(rows: int) -> Any:
    return peer("pandas").DataFrame(arrow(rows).to_pydict())


def tally(rows: Iterable[Any]) -> Tally:
    count = total = 0
    for row in rows:
        count += 1
        total += row["id"]
    return Tally(count, total)


def iterrows(rows: int) -> Tally:
    return tally(row for _, row in pandas(rows).iterrows())


def one_by_one(rows: int) -> Tally:
    table = arrow(rows)
    return tally(table.slice(at, 1).to_pylist()[0] for at in range(rows))


def at_once(rows: int) -> Tally:
    return tally(arrow(rows).to_pylist())


def _streamed(pipe: sl.Pipeline[Any]) -> Tally:
    with pipe.open() as stream:
        return tally(stream)


def from_pandas(rows: int) -> Tally:
    return _streamed(sl.from_pandas(pandas(rows)))


def from_arrow(rows: int) -> Tally:
    return _streamed(sl.from_arrow(arrow(rows)))


def shuffled(rows: int) -> Tally:
    return _streamed(sl.from_arrow(arrow(rows)).shuffle(seed=0))


def expected(rows: int) -> Tally:
    return Tally(rows, rows * (rows - 1) // 2)


PANDAS_OWN, ARROW_OWN, ARROW_WHOLE = "pandas, iterrows()", "pyarrow, a slice of one row each", "pyarrow, to_pylist()"

SUITES = (
    Suite(
        question="Tables: do the rows of a pandas DataFrame come faster than by iterating it?",
        unit="items/s",
        floor=PANDAS_OWN,
        expected=expected,
        smoke_items=2000,
        note="6 columns. Whole runs, opening and closing included.",
        cases=(
            Case(PANDAS_OWN, iterrows, ROWS, peers=("pandas",), prepare=pandas),
            Case("streamline, from_pandas", from_pandas, ROWS, (at_least(5, PANDAS_OWN),), ("pandas",), prepare=pandas),
        ),
    ),
    Suite(
        question="Tables: do the rows of an Arrow table come faster than one by one?",
        unit="items/s",
        floor=ARROW_OWN,
        expected=expected,
        smoke_items=2000,
        note="6 columns. Whole runs, opening and closing included; `to_pylist()` has all rows in memory at once.",
        cases=(
            Case(ARROW_OWN, one_by_one, ROWS, prepare=arrow),
            Case(ARROW_WHOLE, at_once, 4 * ROWS, prepare=arrow),
            Case("streamline, from_arrow", from_arrow, 4 * ROWS, (at_least(5, ARROW_OWN),), prepare=arrow),
            Case("streamline, from_arrow, shuffled", shuffled, 4 * ROWS, prepare=arrow),
        ),
    ),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
