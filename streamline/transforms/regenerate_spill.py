"""The files of `.regenerate(spill=)`: one cycle each, written atomically, with a checksum.

A cycle is written and synced before the first of its items leaves the stage, so the file that a state refers to exists
whenever the process dies. Its name is random in part: a run that goes back to an older snapshot, and draws other items,
overwrites nothing that another snapshot refers to.

`Snapshot.save` (or `saved`) removes the files of cycles before its own, except those that the snapshot saved before it
refers to. A run that never saves a snapshot keeps all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from streamline.core.flow import Site
from streamline.core.item_codec import Read, unpack, unpack_all
from streamline.core.record_file import DamagedError, packed, read_packed, whose, write_packed
from streamline.core.state import Json, Tree
from streamline.core.threads import ThreadPool
from streamline.errors import ReadError, ResumeError
from streamline.transforms.regenerate_cycle import CycleFileNames

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
    """The folder in which one stage of one shard keeps its cycles."""

    def __init__(self, folder: str, name: str, site: Site) -> None:
        self._folder = Path(folder)
        self._whose = whose(name, site.shard, site.num_shards)

    def names(self, epoch: tuple[int, ...], first: int, given: tuple[str, ...]) -> CycleFileNames:
        """Return the names of the files of a drawing that begins at cycle `first` with the `given` files."""
        return CycleFileNames(f"{self._whose}.epoch-{'-'.join(map(str, epoch))}", os.urandom(8).hex(), first, given)

    async def write(self, name: str, kept: SpilledCycle, threads: ThreadPool) -> None:
        """Keep a cycle, durably."""
        await threads.run(partial(_write, self._folder / name, kept, self._whose), "a file")

    async def read(self, name: str, threads: ThreadPool) -> SpilledCycle:
        """Return the cycle in a file.

        Raises:
          ResumeError: it is not there, or damaged.
        """
        return await threads.run(partial(_read, self._folder / name), "a file")


def _write(path: Path, kept: SpilledCycle, family: str) -> None:
    body = {"of": kept.of, "seed": kept.seed, "reuse": kept.reuse}
    parts = packed(MAGIC, WRITER, kept.items, body, rest=kept.rest)
    try:
        write_packed(path, parts, family)
    except OSError as error:
        raise ReadError(
            f"can't keep a cycle in {path}: {error.strerror or error}; .regenerate(spill=) needs a folder that it can "
            "write, with room for the cycles between two saved snapshots"
        ) from error


def _read(path: Path) -> SpilledCycle:
    def unpacked(body: Json, read: Read) -> SpilledCycle:
        items = unpack_all(body["items"], read)
        return SpilledCycle(items, unpack(body["rest"], read), body["of"], body["seed"], body["reuse"])

    try:
        return read_packed(path, MAGIC, unpacked)
    except DamagedError as error:
        raise ResumeError(
            f"the snapshot's cycle in {path} {error}: use a copy of it, or another snapshot"
        ) from error.__cause__
    except OSError as error:
        raise ResumeError(
            f"the snapshot's cycle can't be read from {path}: {error.strerror or error}. It is there until two later "
            "snapshots are saved: resume a later one"
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

    def storing(self) -> None:
        """Nothing to do: the files are durable already."""

    def stored(self, state: Tree, where: str) -> None:
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
