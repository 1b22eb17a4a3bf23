"""Items to bytes and back: arrays and tensors of every kind, and what can't be pickled."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from streamline.backends.ipc import pickling
from streamline.backends.ipc.by_value import define
from streamline.backends.ipc.messages import PackingError
from streamline.backends.ipc.pickling import BESIDE, Pickling

ROOT = Path(__file__).parents[3]


def there(items: list[Any], near: Pickling | None = None) -> Any:
    """Return items as they arrive over memory of their own."""
    near = near or Pickling()
    pieces, buffers = near.dumps(items)
    define(near.fresh())
    return pickle.loads(b"".join(pieces), buffers=[memoryview(bytearray(buffer)) for buffer in buffers])


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    return bool(type(left) is type(right) and (left == right or left != left))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Sample:
    image: Any
    label: int


dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.byte_string_dtypes(max_len=5),
    hnp.unicode_string_dtypes(max_len=5),
    hnp.array_dtypes(),
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of all dtypes, shapes and memory orders, with any memory in them; some are read-only, some are views."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    if draw(st.booleans()) and shape:
        shape = (draw(st.integers(1, 300)), *shape[1:])
    dtype = draw(dtypes)
    count = int(np.prod(shape)) * dtype.itemsize
    memory = np.resize(np.frombuffer(draw(st.binary(min_size=1, max_size=40)), np.uint8) & 0x3F, count)
    array = np.ndarray(shape, dtype, memory.tobytes()).copy(order=draw(st.sampled_from("CF")))
    if shape:
        axes = draw(st.permutations(range(len(shape))))
        steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, -1]), min_size=len(shape), max_size=len(shape)))
        array = array.transpose(axes)[tuple(slice(None, None, step) for step in steps)]
    array.flags.writeable = draw(st.booleans())
    return array


items = st.recursive(
    st.one_of(arrays(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.builds(Pair, inner, inner),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.lists(items, max_size=4))
def test_what_arrives_is_what_was_sent(sent: list[Any]) -> None:
    assert same(there(sent), sent)


@settings(max_examples=60, deadline=None)
@given(arrays())
def test_arrays_arrive_writable_in_the_same_memory_order_and_independent(array: Any) -> None:
    before = array.tobytes()
    (got,) = there([array])
    assert got.flags.writeable
    assert got.flags.c_contiguous or not array.flags.c_contiguous
    assert got.flags.f_contiguous or not array.flags.f_contiguous
    got.fill(np.zeros((), got.dtype)[()])
    assert array.tobytes() == before


def test_the_memory_of_large_arrays_travels_beside_the_pickle_without_a_copy() -> None:
    picture = np.zeros((3, 64, 64), np.uint8)
    day = np.zeros(BESIDE, "datetime64[s]")
    records = np.zeros(BESIDE, [("at", "M8[ns]"), ("x", "f4", (3,))])
    read_only = np.zeros(BESIDE)
    read_only.flags.writeable = False
    sent: list[Any] = [
        picture,
        picture.transpose(1, 2, 0),
        np.asfortranarray(np.ones((64, 64))),
        day,
        records,
        read_only,
    ]
    (data,), buffers = Pickling().dumps(sent)
    assert len(data) < 2000
    assert [len(buffer) for buffer in buffers] == [array.nbytes for array in sent]
    for array, buffer in zip(sent, buffers, strict=True):
        assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))
    got = pickle.loads(data, buffers=buffers)
    assert got[1].strides == sent[1].strides
    assert got[2].flags.f_contiguous


def test_small_arrays_are_part_of_the_pickle() -> None:
    _, buffers = Pickling().dumps([np.zeros(BESIDE - 1, np.uint8), np.zeros(0), np.float32(3)])
    assert buffers == []


def test_a_view_with_gaps_takes_no_more_room_than_it_shows() -> None:
    table = np.zeros((1000, 1000), np.float32)
    for view in (table[::10, ::10], np.broadcast_to(table[0], (50, 1000))):
        _, buffers = Pickling().dumps([view])
        assert [len(buffer) for buffer in buffers] == [view.nbytes]
        assert same(there([view]), [view])


def test_a_memory_map_arrives_as_the_data_it_shows(tmp_path: Path) -> None:
    data = np.memmap(tmp_path / "x", np.float32, "w+", shape=(100, 100))
    data[:] = np.arange(10_000).reshape(100, 100)
    rows, whole = there([data[3], data])
    assert type(rows) is type(whole) is np.ndarray
    assert rows.tolist() == data[3].tolist()
    whole[:] = 0
    assert data[3, 3] == 303


class Named(np.ndarray[Any, Any]):
    pass


def test_subclasses_of_arrays_keep_their_type() -> None:
    named = np.arange(2000.0).view(Named)
    masked = np.ma.masked_array([1, 2, 3], [False, True, False])
    table = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    got = there([named, masked, table])
    assert [type(array) for array in got] == [Named, np.ma.MaskedArray, np.rec.recarray]
    assert got[0].tolist() == named.tolist()
    assert got[1].tolist() == [1, None, 3]
    assert got[2].b == [2.0]


def test_arrays_of_objects_and_of_strings_of_any_length_arrive() -> None:
    things = np.array([None, "a", {1: 2}], dtype=object)
    texts = np.array(["a", "b" * 100], dtype=np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else things
    got = there([things, texts])
    assert got[0].tolist() == things.tolist()
    assert got[1].tolist() == texts.tolist()


def test_large_bytes_are_not_copied() -> None:
    large = bytes(200_000)
    pieces, _ = Pickling().dumps([1, large, "a" * 100_000, [large]])
    assert sum(piece is large for piece in pieces) == 1
    sent = [1, large, "a" * 100_000, [large], bytearray(200_000)]
    assert there(sent) == sent


def test_buffers_that_stay_in_the_pickle_may_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "BESIDE", 1 << 30)
    (got,) = there([np.ones(50_000)])
    assert got.flags.writeable
    assert got.tolist() == [1.0] * 50_000


def test_an_array_sent_twice_in_one_list_is_one_array_there() -> None:
    array = np.zeros(BESIDE)
    first, second = there([array, {"again": array}])
    assert second["again"] is first


def test_the_users_own_reducers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import copyreg

    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (sum, (array.tolist(),)))
    assert there([np.arange(4)]) == [6]


# Classes that the other end can't import ------------------------------------------------------------------------------


def test_local_classes_and_lambdas_cross_and_are_the_same_class_here() -> None:
    @dataclass
    class Local:
        x: Any

        def twice(self) -> Any:
            return Local(self.x * 2)

    near = Pickling()
    for n in range(3):
        one, function = there([Local(n), lambda n=n: n], near)
        assert type(one) is Local
        assert one.twice() == Local(2 * n)
        assert function() == n


def test_a_class_is_defined_once_a_link() -> None:
    class Local:
        pass

    one = Pickling()
    one.dumps([Local()])
    assert len(one.fresh()) == 1
    (data,), _ = one.dumps([Local(), Local()])
    assert not one.fresh()
    assert len(data) < 400


def test_once_it_is_needed_cloudpickle_stays_for_that_link() -> None:
    one: Any = Pickling()
    one.dumps([1])
    assert not one.fresh()
    one.dumps([lambda: 1])
    assert type(one._sent_classes).__name__ == "SentClasses"
    assert there([1, np.ones(3), "a"], one)[2] == "a"


SCRIPT = """
import enum, pickle, subprocess, sys
from dataclasses import dataclass
import cloudpickle
from streamline.backends.ipc.by_value import define
from streamline.backends.ipc.pickling import Pickling

COUNT = 0

class Colour(enum.Enum):
    RED = 1

class Base:
    def count(self):
        global COUNT
        COUNT += 1
        return super().__repr__()

@dataclass
class Sample(Base):
    x: object
    colour: Colour = Colour.RED

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.sample = Sample(a)

def work(n):
    class Inner(Sample):
        pass
    class Other:
        def make(self):
            return Inner(3)
    return [Sample(Sample(n)), Odd(1, 2), Inner(n), Other(), Colour.RED]

CHILD = '''
import sys, pickle
import cloudpickle
from streamline.backends.ipc.by_value import define
from streamline.backends.ipc.pickling import Pickling
work, fed, definitions = pickle.load(sys.stdin.buffer)
pickling = Pickling()
define(definitions)
sample, _ = pickle.loads(fed)
assert type(sample) is work.__globals__["Sample"], type(sample)
lists = [pickling.dumps(work(n)) for n in (1, 2)]
pickle.dump((pickling.fresh(), lists), sys.stdout.buffer)
'''
PAD = "x" * int(sys.argv[1])
near = Pickling()
fed = b"".join(near.dumps([Sample(0), PAD])[0])
payload = cloudpickle.dumps((work, fed, near.fresh()))
done = subprocess.run([sys.executable, "-c", CHILD], input=payload, capture_output=True)
assert done.returncode == 0, done.stderr.decode()
definitions, lists = pickle.loads(done.stdout)
define(definitions)
method = Base.count
for pieces, _ in lists:
    sample, odd, inner, other, colour = pickle.loads(b"".join(pieces))
    assert type(sample) is Sample and type(sample.x) is Sample and sample.colour is Colour.RED
    assert type(odd) is Odd and type(odd.sample) is Sample and odd.args == (1, 2)
    assert isinstance(inner, Sample) and colour is Colour.RED
    assert isinstance(other.make(), Sample)
    sample.count()
    inner.count()
assert Base.count is method, "the script's own class was written to"
assert COUNT == 4, COUNT
print("well")
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pad", [0, 100_000], ids=["short", "long"])
def test_a_scripts_own_classes_come_back_as_its_own_and_untouched(tmp_path: Path, pad: int) -> None:
    """Instances, nested ones, exceptions, members of an enum, subclasses made in the child."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path), str(pad)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.stdout, done.stderr) == ("well\n", "")


# What can't cross -----------------------------------------------------------------------------------------------------


def iter_nothing() -> Iterator[None]:
    yield


class Refusing:
    def __reduce__(self) -> Any:
        raise KeyError("no")


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (iter_nothing(), "generator"),
        ({"a": [1, threading.Lock()]}, "lock"),
        (Sample(threading.Lock(), 1), "lock"),
        (Refusing(), "Refusing"),
    ],
    ids=["generator", "nested", "dataclass", "reduce"],
)
def test_the_item_at_fault_is_named(item: Any, kind: str) -> None:
    with pytest.raises(PackingError) as caught:
        Pickling().dumps([1, "a", item, Refusing()])
    assert (caught.value.index, caught.value.kind) == (2, kind)
    assert caught.value.__cause__ is not None


def test_a_list_too_deep_to_pickle_is_an_error_like_any_other() -> None:
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(PackingError):
        Pickling().dumps([0, deep])
    while deep:  # freeing it must not recurse either
        deep = deep[0]


def test_what_unpickling_raises_is_raised() -> None:
    (data,), _ = Pickling().dumps([OrderedDict()])
    with pytest.raises((ImportError, AttributeError)):
        pickle.loads(data.replace(b"OrderedDict", b"OrderedLost"), buffers=[])


# Tensors --------------------------------------------------------------------------------------------------------------


def test_torch_is_not_imported_for_it() -> None:
    before = "torch" in sys.modules
    there([np.zeros(BESIDE), "a", Sample(None, 1)])
    assert ("torch" in sys.modules) == before
