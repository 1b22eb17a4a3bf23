"""One cycle of a `.regenerate`: its items, the order in which they are served, the states of the outputs, its file.

A `Cycle` has the items, or the rows of blocks; a `CyclePlace` is what the states need to know of it, without items, so
that a state never keeps a cycle in memory. Both cross to other processes.

Blocks are arrays, or containers of arrays, whose first axis is rows. Outputs are copies, so that the arrays of a cycle
can be reused for the next.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import msgspec

from streamline.core.flow import Site
from streamline.core.item_codec import Read, unpack, unpack_all
from streamline.core.lazy_numpy import has_more, loaded_np, np
from streamline.core.place import Lender, Place, lent
from streamline.core.record_file import DamagedError, pack_parts, read_pack, whose, write_pack
from streamline.core.state import HeldSince, Json, Over, State, Tree, part_json
from streamline.core.state_types import Count, FileName, Size, Unsigned
from streamline.core.tree import replaced
from streamline.errors import DataError, ReadError, ResumeError

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


class CyclePart(msgspec.Struct, frozen=True, omit_defaults=True):
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
    def before(cls, cycle: int, skip: int = 0) -> CyclePart:
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
      begin: the upstream's state at its beginning, a mark; `skip` rows of what comes then were the cycle's before.
      end: the upstream's state after it; where the last block wasn't used up, the one before that block, of which
        `used` rows are its own.
      now: the upstream's state after all that was read for it.
      of: items of the cycle, or rows; 0: there is no cycle yet, or its file wasn't read yet.
      outputs: of one serving.
      seed: None: in the order in which they came.
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
            return Over(name, CyclePart.before(self.number + 1, self.used), end)
        own = CyclePart(self.number, served, self.of, self.seed, self.reuse, self.skip)
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
        tree[self.name] = part_json(CyclePart(number, served, epoch=list(place.epoch), files=list(filter(None, files))))
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
            memory = site.tasks.session.services.get(Lender).place
            return [held.block(order, number, memory) for number in range(start, stop)]
        if self._items is None:  # references that NumPy gathers, three times as fast as a list's
            self._items, self.held = np.fromiter(held, object, len(held)), []
        picked: list[Any] = self._items.take(order[start:stop]).tolist()
        return picked


# Rows of blocks -------------------------------------------------------------------------------------------------------

Array: TypeAlias = "npt.NDArray[Any]"

Form: TypeAlias = "list[tuple[str, Any, tuple[int, ...]]]"
"""What blocks of one stream have in common: of each array where it is, its type, and its shape after the first axis."""

WAY_OUT = "make blocks of NumPy arrays in a .map before .regenerate(block=), or leave out block="


class RowStore:
    """Room for `size` rows of blocks that are alike."""

    def __init__(self, size: int, block: int) -> None:
        self.block_rows = block
        self.size = size
        self.filled = 0
        self._form: Form | None = None
        self._whole: Any = None  # a block of `size` rows
        self._columns: list[Array] = []  # its arrays

    @classmethod
    def holding(cls, whole: Any, block: int) -> RowStore:
        """Return the rows of a block, in its own memory."""
        columns, form = columns_of(whole)
        rows = cls(len(columns[0]), block)
        rows._form, rows._whole, rows._columns, rows.filled = form, whole, columns, rows.size
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
            if self.filled:
                raise DataError(
                    f".regenerate(block=) needs blocks that are alike: expected {self._form}, got {form}; {WAY_OUT}"
                )
            self._whole = _each(block, lambda column: np.empty((self.size, *column.shape[1:]), column.dtype))
            self._columns, self._form = columns_of(self._whole)
        rows = len(columns[0])
        count = max(0, min(self.missing, rows - skip))
        for mine, its in zip(self._columns, columns, strict=True):
            mine[self.filled : self.filled + count] = its[skip : skip + count]
        self.filled += count
        return rows

    def block(self, order: Order, number: int, place: Place | None = None) -> Any:
        """Return block `number` of this order, in a memory of its own: large arrays where `place` says."""
        rows = order[number * self.block_rows : (number + 1) * self.block_rows]
        return _each(self._whole, lambda column: _copy_of(column, rows, place))

    def whole(self) -> Any:
        """Return all rows as one block, in this memory."""
        return _each(self._whole, lambda column: column[: self.filled])

    def clear(self) -> None:
        """Drop the rows; keep the memory."""
        self.filled = 0

    def drop(self) -> None:
        """Drop the rows and their memory."""
        self._whole, self._columns, self.filled = None, [], 0


def _copy_of(column: Array, rows: Order, place: Place | None) -> Array:
    copy = lent(place, (len(rows), *column.shape[1:]), column.dtype)
    mode: Any = "raise" if copy is None else "clip"  # NumPy copies into `out` once more if it is to raise
    return column.take(rows, 0, copy, mode)


def _each(block: Any, change: Callable[[Array], Array]) -> Any:
    """Return a block with each of its arrays changed."""
    return replaced(block, lambda column, _: change(column))


def rows_from(block: Any, start: int) -> Any:
    """Return a block's rows from `start` on, in its own memory."""
    return _each(block, lambda column: column[start:])


def columns_of(block: Any) -> tuple[list[Array], Form]:
    """Return the arrays of a block, and its form."""
    columns: list[Array] = []
    form: Form = []

    def look(column: Any, where: str) -> Any:
        if not isinstance(column, loaded_np.ndarray) or not column.ndim or has_more(type(column)):
            raise DataError(
                ".regenerate(block=) needs blocks: NumPy arrays, or dicts, lists and tuples of them, whose first axis "
                f"are rows; got {type(column).__name__} as {where}; {WAY_OUT}"
            )
        columns.append(column)
        form.append((where, column.dtype, column.shape[1:]))
        return column

    replaced(block, look, "block")
    if not columns or len({len(column) for column in columns}) > 1:
        found = ", ".join(str(len(column)) for column in columns) or "no array"
        raise DataError(f".regenerate(block=) needs blocks of as many rows in each array, got {found}; {WAY_OUT}")
    return columns, form


# Files ----------------------------------------------------------------------------------------------------------------

MAGIC = b"streamline cycle 1\n"

WRITER = ".regenerate(spill=)"

_NAME = re.compile(
    r"(?P<whose>.+\.shard-\d+-of-\d+)\.epoch-(?P<epoch>[\d-]+)\.cycle-(?P<cycle>\d+)\.[0-9a-f]{16}\.cycle"
)


class SpilledCycle(NamedTuple):
    """A cycle as it stands in a file.

    Attributes:
      items: its items; of a block form, all rows as one block.
      rest: the rows of the last block that it had no room for; None: there are none.
      of: items, or rows.
    """

    items: list[Any]
    rest: Any
    of: int
    seed: int | None
    reuse: int


class Spill:
    """The folder in which one stage of one shard keeps its cycles, one a file, written atomically, with a checksum.

    A cycle is written and synced before the first of its items leaves the stage, so the file that a state refers to
    exists whenever the process dies. Its name is random in part: a run that goes back to an older snapshot, and draws
    other items, overwrites nothing that another snapshot refers to.
    """

    def __init__(self, folder: str, name: str, site: Site) -> None:
        self._folder = Path(folder)
        self._whose = whose(name, site.shard, site.num_shards)
        self._threads = site.tasks.threads

    def names(self, epoch: tuple[int, ...], first: int, given: tuple[str, ...]) -> CycleFileNames:
        """Return the names of the files of a drawing that begins at cycle `first` with the `given` files."""
        return CycleFileNames(f"{self._whose}.epoch-{'-'.join(map(str, epoch))}", os.urandom(8).hex(), first, given)

    async def write(self, name: str, kept: SpilledCycle) -> None:
        """Keep a cycle, durably."""
        await self._threads.run(partial(self._write, self._folder / name, kept), "a file")

    async def read(self, name: str) -> SpilledCycle:
        """Return the cycle in a file; a ResumeError if it is not there, or damaged."""
        return await self._threads.run(partial(self._read, self._folder / name), "a file")

    def _write(self, path: Path, kept: SpilledCycle) -> None:
        body = {"of": kept.of, "seed": kept.seed, "reuse": kept.reuse}
        parts = pack_parts(MAGIC, WRITER, kept.items, body, rest=kept.rest)
        try:
            write_pack(path, parts, self._whose)
        except OSError as error:
            raise ReadError(
                f"can't keep a cycle in {path}: {error.strerror or error}; .regenerate(spill=) needs a folder that it "
                "can write, with room for the cycles between two saved snapshots"
            ) from error

    def _read(self, path: Path) -> SpilledCycle:
        def unpacked(body: Json, read: Read) -> SpilledCycle:
            items = unpack_all(body["items"], read)
            return SpilledCycle(items, unpack(body["rest"], read), body["of"], body["seed"], body["reuse"])

        try:
            return read_pack(path, MAGIC, unpacked)
        except DamagedError as error:
            raise ResumeError(
                f"the snapshot's cycle in {path} {error}: use a copy of it, or another snapshot"
            ) from error.__cause__
        except OSError as error:
            raise ResumeError(
                f"the snapshot's cycle can't be read from {path}: {error.strerror or error}. It is there until two "
                "later snapshots are saved: resume a later one"
            ) from error


class SpillKeeper:
    """Removes, whenever a snapshot was saved, the cycles that none needs any more. In the consumer's process.

    Args:
      folders: of the stages that keep their cycles, by name; those of a mixture's components too.
      merge: its name: that of the workers' entry in a state.
      shards: of this rank.
    """

    def __init__(
        self, folders: Mapping[str, str], merge: str, shards: Sequence[int], num_shards: int, rank: int, ranks: int
    ) -> None:
        self._folders = folders
        self._merge = merge
        self._of_workers = [(shard, num_shards) for shard in shards]
        self._of_rank = (rank, ranks)
        self._before: set[str] = set()

    def before_store(self) -> None:
        """Nothing to do: the files are durable already."""

    def after_store(self, state: Tree, where: str) -> None:
        """Remove the cycles before the state of a stored snapshot, except those of the snapshot before it."""
        workers = zip(self._of_workers, state[self._merge]["workers"], strict=True)
        needed: set[str] = set()
        for (shard, of), tree in (*workers, (self._of_rank, state)):
            owns = _with_components(tree)
            for name, folder in self._folders.items():
                own = owns.get(name)
                if isinstance(own, dict) and "files" in own:
                    needed.update(own["files"])
                    _tidy(folder, whose(name, shard, of), own, self._before)
        self._before = needed


def _with_components(tree: Tree) -> Tree:
    """Return the parts of a state, with those of a source's components, whose stages have names of their own."""
    found: Tree = {}
    for own in tree.values():
        of = own.get("of") if isinstance(own, dict) else None
        for part in of.values() if isinstance(of, dict) else ():
            found |= _with_components(part) if isinstance(part, dict) else {}
    return found | tree


def _tidy(folder: str, mine: str, own: Json, keep: Collection[str]) -> None:
    """Remove the files of cycles before that of `own`. What can't be removed is tried again next time."""
    stands, needed = (own["epoch"], own["cycle"]), {*own["files"], *keep}
    with suppress(OSError):
        for path in list(Path(folder).iterdir()):
            found = _NAME.fullmatch(path.name)
            if found is None or found["whose"] != mine or path.name in needed:
                continue
            if ([int(number) for number in found["epoch"].split("-")], int(found["cycle"])) < stands:
                path.unlink(missing_ok=True)
