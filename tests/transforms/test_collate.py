"""Items into batches and back: every kind of item, and what does not fit together."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError, ResumeError
from streamline.transforms.collate import as_list, empty_batch, stack, unstack


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    image: Any
    label: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    label: Any


@dataclass
class Counted:
    """A dataclass whose `__init__` doesn't take all its fields."""

    text: Any
    size: Any = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.text)


def plain(value: Any) -> Any:
    """Return a batch or an item with arrays as lists, so that `==` compares them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, Sample | Frozen):
        return type(value)(plain(value.image), plain(value.label))
    return value


# Each kind


@pytest.mark.parametrize("dtype", ["bool", "u1", "i4", "i8", "f2", "f4", "f8", "c8", "S3", "U3", "M8[s]", ">i4"])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0), (2, 3, 4)])
def test_arrays_are_stacked_along_a_new_first_axis(dtype: str, shape: tuple[int, ...]) -> None:
    items = [np.ones(shape, dtype="i4").astype(dtype) for _ in range(4)]
    batch = stack(items)
    assert batch.shape == (4, *shape)
    assert batch.dtype == np.result_type(np.dtype(dtype))  # in the machine's own order of bytes
    assert all(np.array_equal(ours, item) for ours, item in zip(unstack(batch), items, strict=True))


def test_a_batch_has_a_memory_of_its_own() -> None:
    item = np.zeros(3)
    batch = stack([item])
    item[0] = 7
    assert batch.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("items", "expected", "dtype"),
    [
        ([1, 2], [1, 2], "int64"),
        ([1.5, 2], [1.5, 2.0], "float64"),
        ([True, False], [True, False], "bool"),
        ([True, 2], [1, 2], "int64"),
        ([1j, 2], [1j, 2], "complex128"),
        ([np.float32(1), np.float32(2)], [1, 2], "float32"),
        ([np.uint8(1), np.uint8(2)], [1, 2], "uint8"),
        ([np.bool_(True)], [True], "bool"),
        ([np.array(1, "i2"), np.array(2, "i2")], [1, 2], "int16"),
        ([np.uint64(2**63), np.uint64(3)], [2**63, 3], "uint64"),
        ([2**53 + 1, 0.5], [2**53, 0.5], "float64"),
    ],
)
def test_numbers_become_an_array(items: list[Any], expected: list[Any], dtype: str) -> None:
    batch = stack(items)
    assert batch.tolist() == expected
    assert batch.dtype == dtype


@pytest.mark.parametrize(
    "items",
    [["a", "b"], [b"a", b""], [None, None], ["a", None, b"c"], [{1}, {2}], [[1, 2], [3]], [[], []], [{}, {}], [(), ()]],
    ids=str,
)
def test_all_else_becomes_a_list(items: list[Any]) -> None:
    """Lists too: their lengths vary, and a batch that is a list of columns could not be told from one of items."""
    assert stack(items) == items
    assert list(unstack(stack(items))) == items


def test_dicts_are_stacked_key_by_key_whatever_the_order_of_keys() -> None:
    batch = stack([{"x": 1, "y": "a"}, {"y": "b", "x": 2}, OrderedDict(x=3, y="c")])
    assert plain(batch) == {"x": [1, 2, 3], "y": ["a", "b", "c"]}
    assert list(unstack(batch)) == [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}, {"x": 3, "y": "c"}]


def test_tuples_and_named_tuples_are_stacked_part_by_part() -> None:
    batch = stack([(1, "a"), (2, "b")])
    assert type(batch) is tuple
    assert plain(batch) == ([1, 2], ["a", "b"])
    named = stack([Pair(1, "a"), Pair(2, "b")])
    assert type(named) is Pair
    assert plain(named) == Pair([1, 2], ["a", "b"])
    assert list(unstack(named)) == [Pair(1, "a"), Pair(2, "b")]


@pytest.mark.parametrize("kind", [Sample, Frozen])
def test_dataclasses_are_stacked_field_by_field(kind: Callable[..., Any]) -> None:
    items = [kind(np.full(2, n), f"label {n}") for n in range(3)]
    batch = stack(items)
    assert isinstance(batch, kind)  # type: ignore[arg-type]
    assert plain(batch) == kind([[0, 0], [1, 1], [2, 2]], ["label 0", "label 1", "label 2"])
    assert [plain(item) for item in unstack(batch)] == [plain(item) for item in items]
    assert plain(items[0]) == kind([0, 0], "label 0"), "the first item was changed"


def test_a_dataclass_need_not_take_all_its_fields() -> None:
    items = [Counted("a"), Counted("bcd")]
    batch = stack(items)
    assert (batch.text, batch.size.tolist()) == (["a", "bcd"], [1, 3])
    assert list(unstack(batch)) == items


def test_containers_in_containers_are_stacked_to_the_bottom() -> None:
    items = [{"in": Pair(np.full(2, n), (n, f"{n}")), "out": Sample(n % 2 == 0, None)} for n in range(2)]
    batch = stack(items)
    expected = {"in": Pair([[0, 0], [1, 1]], ([0, 1], ["0", "1"])), "out": Sample([True, False], [None, None])}
    assert plain(batch) == expected
    assert [plain(item) for item in unstack(batch)] == [plain(item) for item in items]


def test_as_list_is_the_list_itself() -> None:
    items = [1, "a"]
    assert as_list(items) is items


# What doesn't fit together


def test_ragged_arrays_are_refused_with_their_shapes() -> None:
    with pytest.raises(DataError, match=r"got \(2, 3\), \(2, 4\): pad or crop .* \.batch\(collate=None\)"):
        stack([np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((2, 3))])
    with pytest.raises(DataError, match=r"got \(\), \(3,\)"):
        stack([np.zeros(3), 1])
    with pytest.raises(DataError, match=r"got \(\), \(3,\)"):
        stack([1, np.zeros(3)])
    with pytest.raises(DataError, match=r"got \(\), \(3,\)"):
        stack([np.zeros(3), np.zeros(())])
    with pytest.raises(DataError, match=r"got \(1,\), \(2,\), \(3,\)"):
        stack([np.zeros(2), np.zeros(1), np.zeros(3)])  # as many numbers as three of the first


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"x": 1}, {"x": 1, "y": 2}], r"\['x'\] and \['x', 'y'\]"),
        ([{"x": 1}, {"y": 1}], r"\['x'\] and \['y'\]"),
        ([{}, {"y": 1}], r"\[\] and \['y'\]"),
        ([(1, 2), (1,)], "2 and 1"),
        ([(), (1,)], "0 and 1"),
        ([1, None], "int, NoneType"),
        ([None, 1], "NoneType, int"),
        ([1, "a"], "int, str"),
        ([np.zeros(2), [0, 0]], "ndarray, list"),
        ([{"x": 1}, None], "dict, NoneType"),
        ([(1, 2), [1, 2]], "tuple, list"),
        ([(1, 2), Pair(1, 2)], "tuple, Pair"),
        ([Sample(1, 2), Frozen(1, 2)], "Sample, Frozen"),
        ([Sample(1, 2), {"image": 1, "label": 2}], "Sample, dict"),
        ([{"x": 1}, {"x": "1"}], "int, str"),
    ],
    ids=str,
)
def test_items_that_are_not_alike_are_refused_with_what_differs(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        stack(items)


@pytest.mark.parametrize(
    "batch", [3, "abc", b"abc", None, np.float32(1), np.array(1), object()], ids=lambda value: type(value).__name__
)
def test_what_is_no_batch_can_not_be_taken_apart(batch: Any) -> None:
    with pytest.raises(PlanTypeError, match=f"got {type(batch).__name__}"):
        list(unstack(batch))


def test_a_batch_with_columns_of_two_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(unstack({"x": [1, 2], "y": [1]}))


# Integers beyond int64


BIG = [3, 12345678901234567890, 2**63 + 1, 7]
AS_ARRAYS = [np.array([3]), np.array([2**63], np.uint64)]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (BIG, BIG),
        ([2**63], [2**63]),
        ([np.int64(3), 2**64 - 1], [3, 2**64 - 1]),
        ([np.uint64(2**63 + 1), 3], [2**63 + 1, 3]),
        ([np.uint64(2**63 + 1), np.int64(3), True], [2**63 + 1, 3, 1]),
        (AS_ARRAYS, [[3], [2**63]]),
        ([np.array(3), 2**63], [3, 2**63]),
        ([np.ma.array([3], mask=[True]), np.ma.array([2**63], np.uint64)], [[None], [2**63]]),
    ],
    ids=str,
)
def test_integers_beyond_int64_are_uint64_with_a_word_as_others_have_int64(items: list[Any], expected: Any) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"a batch has uint64 at item\['id'\], and .* int64: make them np\.uint64 in a"
    ):
        batch = stack([{"id": item} for item in items])["id"]
    assert batch.dtype == np.uint64
    assert batch.tolist() == expected


def test_a_field_of_numpy_s_uint64_is_that_in_every_batch_without_a_word() -> None:
    batches = list(sl.from_items(BIG).map(np.uint64).batch(1))
    assert [(str(batch.dtype), batch.tolist()) for batch in batches] == [("uint64", [item]) for item in BIG]


@pytest.mark.parametrize(
    "items",
    [
        [-1, 2**63],
        [2**64],
        [2**80, 1],
        [-(2**63) - 1, 0],
        [np.int64(-1), np.uint64(1)],
        [np.uint64(1), -1],
        [np.array(-1), np.array(1, np.uint64)],
    ],
    ids=str,
)
def test_integers_that_no_dtype_holds_are_refused_with_their_field(items: list[Any]) -> None:
    lows, highs = int(min(items)), int(max(items))
    message = r"integers of one dtype \(int64, or uint64 where none is negative\)"
    with pytest.raises(DataError, match=rf"{message} at item\['a'\]\[1\]\.label, got {lows} and {highs}: "):
        stack([{"a": (0, Sample(0, item))} for item in items])
    with pytest.raises(DataError, match=rf"{message}, got {lows} and {highs}: "):
        stack(items)


def test_values_that_numpy_can_not_stack_fail_with_their_field() -> None:
    with pytest.raises(TypeError) as caught:
        stack([{"a": np.array(["2026-01-01"], "M8[s]")}, {"a": np.zeros(1)}])
    assert caught.value.__notes__ == ["in a batch of ndarray at item['a']"]


# Arrays that are more than their values


class Tagged(np.ndarray):
    """A class that doesn't say how it is stacked."""


class Measured(np.ndarray):
    """A class that does."""

    unit: str

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        assert func is np.stack
        made = np.stack([np.asarray(item) for item in args[0]]).view(Measured)
        made.unit = args[0][0].unit
        return made


def test_masks_are_kept() -> None:
    masked = np.ma.array([1, 2, 3], mask=[False, True, False])
    for others in ([masked], [np.array([4, 5, 6])]):
        batch = stack([{"x": masked}, *({"x": other} for other in others)])["x"]
        theirs = np.ma.stack([masked, *others])
        assert type(batch) is np.ma.MaskedArray
        assert batch.dtype == np.int64
        assert batch.tolist() == theirs.tolist()
        assert next(row.tolist() for row in unstack(batch)) == [1, None, 3]


def test_a_class_of_arrays_is_kept_as_it_says_or_refused_and_never_stripped() -> None:
    measured = np.ones(2).view(Measured)
    measured.unit = "m"
    batch = stack([measured, measured])
    assert (type(batch), batch.unit, batch.shape) == (Measured, "m", (2, 2))
    record = np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)])
    for odd in (np.ones(2).view(Tagged), record, np.ma.masked):
        with pytest.raises(DataError, match=rf"plain or masked arrays at item\[0\], got {type(odd).__name__}: "):
            stack([(odd,)])
    with pytest.raises(DataError, match="plain or masked arrays, got ndarray, Measured"):
        stack([np.ones(2), measured])
    with pytest.raises(DataError, match="plain or masked arrays, got float, MaskedConstant"):
        stack([1.5, np.ma.masked])


def test_a_memory_map_is_a_plain_array_in_a_batch(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    batch = stack([np.load(tmp_path / "a.npy", mmap_mode="r")] * 2)
    assert (type(batch), batch.tolist()) == (np.ndarray, [[0, 1, 2]] * 2)


# There and back


def leaves() -> st.SearchStrategy[Callable[[], st.SearchStrategy[Any]]]:
    """Draw what makes leaves of one kind."""
    number = st.sampled_from([np.int64, np.float32, np.uint8, np.bool_])
    shape = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=3)
    array = st.builds(
        lambda dtype, shape: lambda: arrays.arrays(dtype, shape, elements={"allow_nan": False}), number, shape
    )
    kinds: list[st.SearchStrategy[Any]] = [
        st.integers(-(2**62), 2**62),
        st.booleans(),
        st.floats(allow_nan=False),
        st.text(max_size=3) | st.none() | st.binary(max_size=3),
        st.lists(st.integers(), max_size=3),
    ]
    return array | st.sampled_from([lambda kind=kind: kind for kind in kinds])


def shapes() -> st.SearchStrategy[Callable[[], st.SearchStrategy[Any]]]:
    """Draw what makes items of one shape: leaves in containers."""

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        two = st.tuples(inner, inner)
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda makes: lambda: st.tuples(*(make() for make in makes))),
            st.dictionaries(st.text(max_size=2), inner, max_size=3).map(
                lambda makes: lambda: st.fixed_dictionaries({key: make() for key, make in makes.items()})
            ),
            two.map(lambda makes: lambda: st.builds(Pair, makes[0](), makes[1]())),
            two.map(lambda makes: lambda: st.builds(Sample, makes[0](), makes[1]())),
            two.map(lambda makes: lambda: st.builds(Frozen, makes[0](), makes[1]())),
        )

    return st.recursive(leaves(), containers, max_leaves=5)


@pytest.mark.long
@given(data=st.data())
def test_a_batch_taken_apart_is_the_items_that_it_was_made_of(data: Any) -> None:
    make = data.draw(shapes())
    items = data.draw(st.lists(make(), min_size=1, max_size=5))
    assert [plain(item) for item in unstack(stack(list(items)))] == [plain(item) for item in items]


# Tensors


class FakeTensor:
    """As much of a tensor as `stack` and `unstack` see."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.data

    def __iter__(self) -> Iterator[FakeTensor]:
        return map(FakeTensor, self.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeTensor) and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


def _torch_stack(tensors: list[FakeTensor]) -> FakeTensor:
    if len({tensor.shape for tensor in tensors}) > 1:
        raise RuntimeError("stack expects each tensor to be equal size")
    return FakeTensor(np.stack([tensor.data for tensor in tensors]))


def _as_tensor(item: Any) -> FakeTensor:
    return item if isinstance(item, FakeTensor) else FakeTensor(item)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = SimpleNamespace(Tensor=FakeTensor, stack=_torch_stack, from_numpy=FakeTensor, as_tensor=_as_tensor)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.usefixtures("torch")
def test_tensors_are_stacked_by_torch() -> None:
    items = [{"x": FakeTensor([1, 2]), "y": 1}, {"x": FakeTensor([3, 4]), "y": 2}]
    batch = stack(items)
    assert batch == {"x": FakeTensor([[1, 2], [3, 4]]), "y": FakeTensor([1, 2])}
    assert stack([1, FakeTensor(2)]) == FakeTensor([1, 2])


@pytest.mark.usefixtures("torch")
def test_ragged_tensors_are_refused_with_their_shapes() -> None:
    with pytest.raises(DataError, match=r"got \(2,\), \(3,\)"):
        stack([FakeTensor([1, 2]), FakeTensor([1, 2, 3])])
    with pytest.raises(DataError, match=r"got \(\), \(2,\)"):
        stack([FakeTensor([1, 2]), 3])
    with pytest.raises(DataError, match="FakeTensor, str"):
        stack([FakeTensor([1, 2]), "a"])


def test_torch_is_never_imported_for_it() -> None:
    before = "torch" in sys.modules
    stack([np.zeros(2)])
    stack(["a"])
    assert ("torch" in sys.modules) == before


def test_real_tensors_are_stacked() -> None:
    torch = pytest.importorskip("torch")
    batch = stack([{"x": torch.ones(2)}, {"x": torch.zeros(2)}])
    assert batch["x"].shape == (2, 2)
    assert [item["x"].tolist() for item in unstack(batch)] == [[1, 1], [0, 0]]


ITEMS: list[Any] = [{"n": n, "f": n / 2, "b": n > 1, "a": np.full(2, n, "f4"), "s": "ab"[n % 2]} for n in range(3)]


def test_beside_a_tensor_numbers_bools_and_arrays_become_tensors_and_texts_a_list() -> None:
    torch = pytest.importorskip("torch")
    batch = stack([{**item, "deep": (Sample(torch.ones(2), item["n"]),)} for item in ITEMS])
    dtypes = {name: part.dtype for name, part in batch.items() if isinstance(part, torch.Tensor)}
    assert dtypes == {"n": torch.int64, "f": torch.float64, "b": torch.bool, "a": torch.float32}
    assert batch["s"] == ["a", "b", "a"]
    assert batch["deep"][0].label.tolist() == [0, 1, 2]
    assert isinstance(stack(ITEMS)["n"], np.ndarray)
    assert stack([1, torch.tensor(2)]).tolist() == [1, 2]
    assert isinstance(stack([{"n": 1, "list": [torch.ones(1)]}] * 2)["n"], np.ndarray), "a list isn't stacked"
    parts = stack([(Sample(1, torch.ones(2)), {"n": 1j})])
    assert isinstance(parts[0].image, torch.Tensor)
    assert parts[1]["n"].dtype == torch.complex128


def test_collate_torch_makes_tensors_throughout_and_is_no_other_plan_after_accept() -> None:
    torch = pytest.importorskip("torch")
    pipe = sl.from_items(ITEMS).batch(3, collate="torch")
    (batch,) = pipe
    assert {name for name, part in batch.items() if not isinstance(part, torch.Tensor)} == {"s"}
    assert torch.equal(next(iter(sl.from_items([1, 2]).batch(2, collate="torch"))), torch.tensor([1, 2]))
    assert "batch(size=3, collate='torch')" in str(pipe)
    odd: list[Any] = [{"t": np.datetime64("2026-01-01"), "w": np.ones(1, ">i4"), "o": np.float128(1)}]
    (other,) = sl.from_items(odd).batch(1, collate="torch")
    assert (type(other["t"]), other["w"].dtype, type(other["o"])) == (np.ndarray, torch.int32, np.ndarray)
    assert other["w"].tolist() == [[1]]
    with sl.from_items(ITEMS).batch(1).open() as stream:
        next(stream)
        snapshot = stream.snapshot()
    with pytest.raises(ResumeError, match=r"accept=\[\"batch.collate\"\]"):
        pipe.open(resume=snapshot)
    again = sl.from_items(ITEMS).batch(1, collate="torch")
    with again.open(resume=snapshot, accept=["batch.collate"]) as stream:
        assert [part["n"].tolist() for part in stream] == [[1], [2]]


def test_tensors_of_a_process_are_tensors_here() -> None:
    torch = pytest.importorskip("torch")
    pipe = sl.from_items(ITEMS).shard(2).batch(1, collate="torch").merge()
    with pipe.open(backend=sl.Processes(1)) as stream:
        found = list(stream)
    assert [batch["n"].tolist() for batch in found] == [[0], [1], [2]]
    assert all(isinstance(batch["a"], torch.Tensor) for batch in found)


def test_collate_torch_without_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.transforms.batch.find_spec", lambda name: None)
    with pytest.raises(
        PlanError, match=r"'torch' needs torch, which is not installed: pip install 'streamline-data\[torch\]'"
    ):
        sl.from_items(ITEMS).batch(3, collate="torch")


def test_tensors_hold_uint64_and_refuse_masks_and_what_they_have_no_room_for() -> None:
    torch = pytest.importorskip("torch")
    with pytest.warns(RuntimeWarning, match="a batch has uint64, and"):
        (batch,) = sl.from_items(BIG).batch(4, collate="torch")
    assert (batch.dtype, batch.tolist()) == (torch.uint64, BIG)
    with pytest.raises(DataError, match=r"plain arrays for tensors at item\['m'\], got MaskedArray: \.filled"):
        stack([{"m": np.ma.array([1, 2], mask=[False, True]), "t": torch.ones(1)}])
    with pytest.raises(ValueError, match="Overflow") as caught:
        stack([{"m": torch.tensor(1)}, {"m": 2**63}])
    assert caught.value.__notes__ == ["in a batch of Tensor, int at item['m']"]


# As np.stack


STRUCTURE = np.dtype([("a", "i1"), ("b", ">f8")])  # no padding: that is left as it is
DTYPES: list[Any] = ["bool", "f4", "c16", "U3", "M8[s]", ">i4", "O", "V7", STRUCTURE, np.dtype("i4", metadata={"x": 1})]
SHAPES = [(), (1,), (0,), (2, 0), (5, 1), (4, 1, 3), (1, 1, 900), (64, 3, 33)]
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": np.array,
    "F": lambda array: np.array(array, order="F"),
    "reversed": lambda array: array[::-1] if array.ndim else array,
    "strided": lambda array: np.repeat(array, 2, 0)[::2] if array.ndim else array,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_are_stacked_as_by_numpy_bit_for_bit(dtype: Any) -> None:
    for shape in SHAPES:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype("i4")
        array = np.zeros(shape, dtype) if np.dtype(dtype).kind == "V" else array.astype(dtype)
        for ways in (["C"], ["C", "C"], ["F", "F"], ["C", "F"], ["reversed", "C"], ["strided"]):
            rows = [LAYOUTS[way](array) for way in ways]
            ours, theirs = stack(rows), np.stack(rows)
            assert type(ours) is type(theirs)
            assert (ours.dtype, ours.dtype.metadata) == (theirs.dtype, theirs.dtype.metadata)
            assert (ours.shape, ours.strides, ours.flags.aligned) == (theirs.shape, theirs.strides, True)
            assert ours.dtype.hasobject or ours.tobytes() == theirs.tobytes()
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("dtypes", [("i4", "f4"), ("f8", "f4"), (">i4", "i4"), ("U3", "U5"), ("M8[s]", "M8[ms]"), "iO"])
def test_arrays_of_several_dtypes_are_stacked_as_by_numpy(dtypes: tuple[str, str]) -> None:
    rows = [np.zeros(700, "i4").astype(dtype) for dtype in dtypes]
    ours, theirs = stack(rows), np.stack(rows)
    assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


@pytest.mark.parametrize("offset", [1, 16, 31, 128, 2048, 4095])
def test_a_batch_of_large_rows_begins_where_its_copies_are_fast(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a few bytes after its first row, modulo a page; at a cache line, in hardly more memory."""
    block, room = np.zeros(1 << 15, np.uint8), np.empty(1 << 15, np.uint8)
    row = block[offset : offset + 4096]
    sizes = set()
    for apart in range(0, 4096, 16):
        memory = room[(row.ctypes.data - room.ctypes.data) % 4096 + apart :]

        def empty(size: int, _: object, memory: Any = memory) -> Any:
            sizes.add(size)
            return memory[:size]

        monkeypatch.setattr("streamline.transforms.collate.np.empty", empty)
        address = empty_batch(3, row, row.dtype).ctypes.data
        assert (address - row.ctypes.data) % 4096 >= 128
        assert address % 64 == 0
    assert max(sizes) <= 3 * 4096 + 256


def test_a_batch_of_small_rows_is_an_array_as_by_numpy() -> None:
    batch = stack([np.zeros(100, "u1")] * 64)
    assert batch.flags.owndata
