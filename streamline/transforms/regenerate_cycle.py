"""One cycle of a `.regenerate`: its items, the order in which they are served, and the states of the outputs.

A `Cycle` has the items, or the rows of blocks; a `CyclePlace` is what the states need to know of it, without items, so
that a state never keeps a cycle in memory. Both cross to other processes.

Blocks are arrays, or dicts and tuples of arrays, whose first axis is rows. Outputs are copies, so that the
arrays of one cycle can be reused for the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from streamline.core.flow import Site
from streamline.core.lazy_numpy import has_more, loaded_np, np
from streamline.core.place import Place, lent
from streamline.core.state import HeldSince, Over, State, Tree, part_json
from streamline.core.state_types import Count, FileName, Size, Unsigned
from streamline.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

Order: TypeAlias = "npt.NDArray[np.intp]"

Held: TypeAlias = "list[Any] | RowStore"

KIND = 0x7E6E
"""Unlike a shuffle's: with the same seed, the two in sequence must not undo one another."""


def order_of(length: int, seed: int | None, site: Site, cycle: int, serving: int) -> Order:
    """Return the order of a serving of a cycle: by (seed, epoch, shard, cycle, serving); no seed: as drawn."""
    if seed is None:
        return np.arange(length)
    entropy = np.random.SeedSequence([KIND, seed, site.num_shards, site.shard, cycle, serving, *site.epoch])
    return np.random.Generator(np.random.PCG64(entropy)).permutation(length)


@dataclass(frozen=True)
class CycleFileNames:
    """The names of the files of one drawing, so that a state can name those between two cycles.

    Attributes:
      whose: how they begin.
      token: random: another drawing overwrites nothing.
      first: the cycle that `given[0]` holds; later cycles than the given ones were written by this drawing.
      given: files that the state had at which it began. What is known of the upstream is its state after the last.
    """

    whose: str
    token: str
    first: int
    given: tuple[str, ...] = ()

    @property
    def given_to(self) -> int:
        """The first cycle that this drawing wrote itself."""
        return self.first + len(self.given)

    def of(self, cycle: int) -> str | None:
        """Return the file of a cycle; None: it was written by an earlier drawing."""
        if cycle < self.first:
            return None
        if cycle < self.given_to:
            return self.given[cycle - self.first]
        return f"{self.whose}.cycle-{cycle}.{self.token}.cycle"


class Cycled(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stage's part of a saved state: outputs served of a cycle that is drawn again, or that is in files."""

    cycle: Count
    served: Count
    of: Count | msgspec.UnsetType = msgspec.UNSET
    seed: Unsigned | msgspec.UnsetType | None = msgspec.UNSET
    reuse: Size | msgspec.UnsetType = msgspec.UNSET
    skip: Count = 0
    epoch: list[Unsigned] = []
    files: list[FileName] | None = None

    @classmethod
    def before(cls, cycle: int, skip: int = 0) -> Cycled:
        """Return the part before a cycle is drawn."""
        return cls(cycle, 0, 0, None, 1, skip)

    def __post_init__(self) -> None:
        if self.files is not None:
            return
        if self.of is msgspec.UNSET or self.seed is msgspec.UNSET or self.reuse is msgspec.UNSET:
            raise ValueError("Expected `files`, or `of`, `seed` and `reuse`")
        if self.served > self.of * self.reuse:
            raise ValueError(f"Expected at most {self.of * self.reuse} outputs of a cycle, got {self.served} served")


@dataclass(eq=False, kw_only=True)
class CyclePlace:
    """Where a cycle lies in its upstream, and how it is served.

    Attributes:
      number: of the cycle, from 0.
      begin: the upstream's state at its beginning, a mark; `skip` rows of what comes then were the cycle's before.
      end: the upstream's state after it; where the last block wasn't used up, the one before that block, of which
        `used` rows are its own.
      now: the upstream's state after all that was read for it.
      of: items of the cycle, or rows; 0: there is no cycle yet, or its file wasn't read yet.
      outputs: of one serving.
      seed: None: in the order in which they came.
      reuse: servings.
      epoch: in which it is served.
      file: where it is kept; None: it isn't, a resume draws it again.
      names: of the files; None: there are none.
    """

    number: int
    epoch: tuple[int, ...]
    begin: State
    end: State
    now: State
    skip: int = 0
    used: int = 0
    of: int = 0
    outputs: int = 0
    seed: int | None = None
    reuse: int = 1
    file: str | None = None
    names: CycleFileNames | None = None

    @property
    def total(self) -> int:
        """Outputs of all servings."""
        return self.outputs * self.reuse

    def state(self, name: str, served: int) -> State:
        """Return the state of the stage called `name` after so many outputs of this cycle."""
        if self.file is not None:
            return CycleFileState(name, self, served)
        if served == self.total:
            end = self.end if not self.used else HeldSince(self.end, self.now)
            return Over(name, Cycled.before(self.number + 1, self.used), end)
        own = Cycled(self.number, served, self.of, self.seed, self.reuse, self.skip)
        return Over(name, own, HeldSince(self.begin, self.now))


class CycleFileState(Over):
    """After some outputs of a cycle that is in a file: the upstream's part is its state after what is in files.

    A flow that goes back to here from a later cycle finds the files of all that lie between.
    """

    __slots__ = ("_place", "_served")

    def __init__(self, name: str, place: CyclePlace, served: int) -> None:
        super().__init__(name, None, place.now)
        self._place = place
        self._served = served

    def json(self, until: State | None = None) -> Tree:
        place, last = self._place, (self if until is None else cast(CycleFileState, until.latest))._place
        number, served = place.number, self._served
        if place.file is None or (served == place.total and not place.used and place.of):
            number, served = number + 1, 0
        assert place.names is not None
        assert last.names is not None
        between = range(number, max(last.number, last.names.given_to - 1) + 1)
        files = [last.names.of(cycle) or place.names.of(cycle) for cycle in between]
        tree = last.now.json()
        tree[self.name] = part_json(Cycled(number, served, epoch=list(place.epoch), files=list(filter(None, files))))
        return tree


class Cycle:
    """What was drawn, and its place."""

    def __init__(self, place: CyclePlace, held: Held) -> None:
        self.place = place
        self.held = held
        self._served: tuple[int, Order] | None = None
        self._items: npt.NDArray[np.object_] | None = None

    def stop(self, first: int, most: int) -> int:
        """Return where up to `most` outputs from number `first` on end, which are of one serving."""
        return min(first + most, (first // self.place.outputs + 1) * self.place.outputs)

    def outputs(self, first: int, stop: int, site: Site) -> Sequence[Any]:
        """Return the outputs from number `first` on to `stop`, of one serving."""
        place, held = self.place, self.held
        serving, start = divmod(first, place.outputs)
        stop -= first - start
        if isinstance(held, list) and place.seed is None:
            return held[start:stop]
        if self._served is None or self._served[0] != serving:
            self._served = serving, order_of(place.of, place.seed, site, place.number, serving)
        order = self._served[1]
        if isinstance(held, RowStore):
            return [held.block(order, number, site.tasks.session.place) for number in range(start, stop)]
        if self._items is None:  # references that NumPy gathers, three times as fast as a list's
            self._items, self.held = np.fromiter(held, object, len(held)), []
        picked: list[Any] = self._items.take(order[start:stop]).tolist()
        return picked


Array: TypeAlias = "npt.NDArray[Any]"

Form: TypeAlias = "tuple[Any, ...]"
"""What blocks of one stream have in common: structure, types, and shapes after the first axis."""

WAY_OUT = "make blocks of NumPy arrays in a .map before .regenerate(block=), or leave out block="


class RowStore:
    """Room for `size` rows of blocks that are alike."""

    def __init__(self, size: int, block: int) -> None:
        self.block_rows = block
        self.size = size
        self._form: Form | None = None
        self._columns: list[Array] = []
        self.filled = 0

    @classmethod
    def holding(cls, whole: Any, block: int) -> RowStore:
        """Return the rows of a block, in its own memory."""
        columns, form = columns_of(whole)
        rows = cls(len(columns[0]), block)
        rows._form, rows._columns, rows.filled = form, columns, rows.size
        return rows

    @property
    def missing(self) -> int:
        """Rows that there is still room for."""
        return self.size - self.filled

    @property
    def outputs(self) -> int:
        """Blocks that come out of one serving; the last one may be short."""
        return -(-self.filled // self.block_rows)

    def add(self, block: Any, skip: int) -> int:
        """Copy the rows of a block from row `skip` on, as many as there is room for; return how many the block has."""
        columns, form = columns_of(block)
        if form != self._form:
            self._take_form(columns, form)
        rows = len(columns[0])
        count = max(0, min(self.missing, rows - skip))
        for mine, its in zip(self._columns, columns, strict=True):
            mine[self.filled : self.filled + count] = its[skip : skip + count]
        self.filled += count
        return rows

    def _take_form(self, columns: list[Array], form: Form) -> None:
        if self.filled:
            raise DataError(
                f".regenerate(block=) needs blocks that are alike: expected {self._form}, got {form}; {WAY_OUT}"
            )
        self._form = form
        self._columns = [np.empty((self.size, *column.shape[1:]), column.dtype) for column in columns]

    def block(self, order: Order, number: int, place: Place | None = None) -> Any:
        """Return block `number` of this order, in a memory of its own: large arrays where `place` says."""
        picked = order[number * self.block_rows : (number + 1) * self.block_rows]
        return _block_of(self._form or (), iter([_rows_of(column, picked, place) for column in self._columns]))

    def whole(self) -> Any:
        """Return all rows as one block, in this memory."""
        return _block_of(self._form or (), iter([column[: self.filled] for column in self._columns]))

    def clear(self) -> None:
        """Drop the rows; keep the memory."""
        self.filled = 0

    def drop(self) -> None:
        """Drop the rows and their memory."""
        self._columns, self.filled = [], 0


def _rows_of(column: Array, picked: Order, place: Place | None) -> Array:
    """Return these rows of a column, copied."""
    rows = lent(place, (len(picked), *column.shape[1:]), column.dtype)
    mode: Any = "raise" if rows is None else "clip"  # NumPy copies into `out` once more if it is to raise
    return column.take(picked, 0, rows, mode)


def columns_of(block: Any) -> tuple[list[Array], Form]:
    """Return the arrays of a block, and its form."""
    columns: list[Array] = []
    form = _form_of(block, columns)
    if not columns or len({len(column) for column in columns}) > 1:
        found = ", ".join(str(len(column)) for column in columns) or "no array"
        raise DataError(f".regenerate(block=) needs blocks of as many rows in each array, got {found}; {WAY_OUT}")
    return columns, form


def part(block: Any, start: int) -> Any:
    """Return a block's rows from `start` on, in its own memory."""
    columns, form = columns_of(block)
    return _block_of(form, iter([column[start:] for column in columns]))


def _form_of(block: Any, columns: list[Array]) -> Form:
    if isinstance(block, loaded_np.ndarray) and block.ndim and not has_more(type(block)):
        columns.append(block)
        return "array", block.dtype, block.shape[1:]
    if isinstance(block, dict):
        return "dict", tuple(block), tuple(_form_of(value, columns) for value in block.values())
    if isinstance(block, tuple):
        return "tuple", type(block), tuple(_form_of(value, columns) for value in block)
    raise DataError(
        ".regenerate(block=) needs blocks: NumPy arrays, or dicts and tuples of them, whose first axis are rows; got "
        f"{type(block).__name__}; {WAY_OUT}"
    )


def _block_of(form: Form, columns: Iterator[Array]) -> Any:
    if form[0] == "array":
        return next(columns)
    parts = [_block_of(inner, columns) for inner in form[2]]
    if form[0] == "dict":
        return dict(zip(form[1], parts, strict=True))
    return form[1](*parts) if hasattr(form[1], "_fields") else tuple(parts)
