"""Small arrays cross in columns, and nothing shows it: not their memory, nor which of them are the same."""

from __future__ import annotations

import copyreg
import math
import pickle
from collections import OrderedDict
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from streamline.backends.ipc.columns import in_columns
from streamline.backends.ipc.pickling import Pickling

ROW = np.arange(6, dtype=np.int32)
SWAPPED, LABELLED = ROW.dtype.newbyteorder(), np.dtype("i4", metadata={"at": 1})


class Pair(NamedTuple):
    first: Any
    second: Any


class Sub(np.ndarray[Any, Any]):
    pass


def frozen(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    row.flags.writeable = False
    return row


COLUMNS: dict[str, list[Any]] = {
    "arrays": [ROW + at for at in range(12)],
    "of two axes": [np.full((2, 3), at, np.float16) for at in range(12)],
    "read-only": [frozen(ROW + at) for at in range(12)],
    "views of one memory": list(np.arange(36, dtype=np.int64).reshape(12, 3)),
    "bits": [np.array([math.nan, -0.0, at]) for at in range(12)],
    "dicts": [{"x": ROW + at, "y": at < ROW, "z": at, "name": f"{at}", "none": None} for at in range(12)],
    "tuples": [(np.float32(at), ROW + at, b"", at % 2 == 0) for at in range(12)],
    "several types beside": [(ROW + at, at if at % 2 else float(at)) for at in range(12)],
}


def there(items: list[Any]) -> Any:
    """Return items as they arrive over memory of their own."""
    pieces, buffers = Pickling().dumps(items)
    return pickle.loads(b"".join(pieces), buffers=[memoryview(bytearray(buffer)) for buffer in buffers])


def leaves(items: Any) -> list[Any]:
    if isinstance(items, dict | list | tuple):
        return [leaf for part in (items.values() if isinstance(items, dict) else items) for leaf in leaves(part)]
    return [items]


def shown(items: Any) -> Any:
    """Return all that can be seen of items, and compared."""
    if isinstance(items, np.ndarray):
        return items.dtype, items.shape, items.tobytes()
    if isinstance(items, dict):
        return type(items), [(type(key), key, shown(value)) for key, value in items.items()]
    return type(items), list(map(shown, items)) if isinstance(items, list | tuple) else items


@pytest.mark.parametrize("name", COLUMNS)
def test_items_in_columns_arrive_as_they_were_in_memory_of_their_own(name: str) -> None:
    items = COLUMNS[name]
    assert in_columns(items) is not items
    arrived = there(items)
    assert shown(arrived) == shown(items)
    found = [leaf for leaf in leaves(arrived) if isinstance(leaf, np.ndarray)]
    assert all(array.flags.writeable and array.base is None for array in found)
    assert not any(np.shares_memory(one, other) for one, other in combinations(found, 2))


def of(make: Any, count: int = 12) -> list[Any]:
    return [make(at) for at in range(count)]


OTHERWISE: dict[str, list[Any]] = {
    "few": of(lambda at: ROW + at, 11),
    "nothing": [],
    "a subclass": of(lambda at: (ROW + at).view(Sub)),
    "objects": of(lambda at: np.array([at, None])),
    "records": of(lambda at: np.array([(at, 1)], "i4,i4")),
    "times": of(lambda at: np.array([at], "M8[s]")),
    "strings": of(lambda at: np.array([f"{at}"])),
    "another order of bytes": of(lambda at: (ROW + at).astype(SWAPPED)),
    "metadata": of(lambda at: np.array([at], LABELLED)),
    "no axes": of(lambda at: np.array(at)),
    "no elements": of(lambda at: np.zeros((3, 0))),
    "Fortran order": of(lambda at: np.asfortranarray(np.ones((2, 3)) * at)),
    "Fortran order among them": of(lambda at: np.ones((2, 3), order="F" if at else "C")),
    "a subclass among them": of(lambda at: ((ROW + at).view(Sub) if at else ROW, 1)),
    "two kinds of dict": of(lambda at: OrderedDict(x=ROW + at) if at else {"x": ROW}),
    "strides": of(lambda at: np.arange(12)[at % 2 :: 2]),
    "large": of(lambda at: np.full(1024, at, np.int32)),
    "several shapes": of(lambda at: np.zeros(at + 1)),
    "several shapes of equal strides": of(lambda at: np.zeros((at + 1, 2))),
    "several dtypes": of(lambda at: np.zeros(2, "f8" if at % 2 else "i8")),
    "several types": [*of(lambda at: ROW + at), 5],
    "a named tuple": of(lambda at: Pair(ROW + at, at)),
    "tuples of several lengths": of(lambda at: (ROW + at, *range(at))),
    "a dict of another kind": of(lambda at: OrderedDict(x=ROW + at)),
    "keys in another order": of(lambda at: {"x": ROW + at, "y": 1} if at % 2 else {"y": 1, "x": ROW + at}),
    "equal keys of other types": of(lambda at: {1: ROW + at} if at % 2 else {True: ROW + at}),
    "a list beside": of(lambda at: {"x": ROW + at, "y": [at]}),
    "a list beside, later": of(lambda at: (ROW + at, [at] if at else 0)),
    "a string in place of an array": of(lambda at: (ROW + at, ROW + at if at else "")),
    "no array": of(lambda at: (at, at)),
    "an empty one beside": of(lambda at: (ROW + at, np.zeros(0))),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_items_are_pickled_as_they_are(name: str) -> None:
    items = OTHERWISE[name]
    assert in_columns(items) is items
    if name != "objects":
        assert shown(there(items)) == shown(items)


@pytest.mark.parametrize("wrap", [lambda row: row, lambda row: (row, 1), lambda row: {"x": row}])
def test_an_array_that_comes_twice_is_one_at_the_other_end(wrap: Any) -> None:
    shared = ROW + 1
    items = [wrap(shared), *of(lambda at: wrap(ROW + at)), wrap(shared)]
    assert in_columns(items) is items
    first, *_, last = (leaves(item)[0] for item in there(items))
    assert first is last


def test_an_array_that_comes_twice_in_an_item_is_one_at_the_other_end() -> None:
    arrived = there([{"x": row, "y": row} for row in of(lambda at: ROW + at)])
    assert all(item["x"] is item["y"] for item in arrived)


def reduced(array: np.ndarray[Any, Any]) -> Any:
    return np.full, (array.shape, array.size)


def test_what_is_registered_for_arrays_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, reduced)
    assert shown(there(of(lambda at: ROW + at))) == shown(of(lambda at: np.full(6, 6)))


kinds = st.sampled_from([bool, np.int8, np.int32, np.float32, np.float64, np.complex64])
rows = st.one_of(hnp.arrays(kinds, 3), hnp.arrays(kinds, hnp.array_shapes(min_dims=0, min_side=0, max_side=2)))
parts = st.one_of(rows, rows, st.integers(), st.text(max_size=1), st.lists(rows, max_size=1))
alike = kinds.flatmap(lambda kind: st.lists(hnp.arrays(kind, 3), min_size=12, max_size=12))
mixed = st.lists(st.one_of(rows, st.tuples(rows, parts), st.fixed_dictionaries({"x": rows, "y": parts})), max_size=12)


@pytest.mark.long
@given(st.one_of(alike, mixed), st.lists(parts, min_size=12, max_size=12))
def test_all_lists_arrive_as_they_were(items: list[Any], more: list[Any]) -> None:
    pairs = list(zip(items, more, strict=False))
    for sent in (items, pairs, [{"x": x, "y": y} for x, y in pairs]):
        assert shown(there(sent)) == shown(sent)
