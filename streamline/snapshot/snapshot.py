"""Snapshots: where a run stands, as JSON, in files that are either whole or not there.

JSON, never pickle: loading can't run code. A rank's snapshot is one file. The directory to which all ranks of one step
of training save holds the job's snapshot: it is loaded as one, and each rank resumes from its part. Ranks don't write
at the same moment, so a crash between two saves calls for a directory for each step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import msgspec

from streamline.core.atomic_file import open_regular, replace_file
from streamline.core.item_codec import decode_json
from streamline.core.options import check_int
from streamline.core.state import Json, Tree
from streamline.core.state_types import Count, MergePart, Range, Size, Unsigned, check_type
from streamline.core.text import some
from streamline.errors import SnapshotError
from streamline.snapshot.file_format import (
    MAGIC,
    check_version,
    complete_set,
    decode,
    encode,
    file_name,
    missing_snapshot,
    one_line,
    target,
)
from streamline.snapshot.step_folders import check_numbered, complete_sets, remove_older

logger = logging.getLogger(__name__)

AnyPath: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True, slots=True, repr=False)
class Snapshot:
    """Where a run stands: what resumes right *after* the last item that it delivered. Of one rank, or of a whole job.

    It shares its trees with what made it; both leave them as they are.

    Attributes:
      version: of the format.
      fingerprint: the plan, one object per stage in order: "kind", "name", "options", and "code", hashes of its
        functions' code by option.
      listing: the data: files and sizes, or a length; None where the source can't tell.
      epoch: 0-based.
      rank: 0-based among `world_size`; None: of the whole job.
      world_size: ranks in the job.
      num_shards: shards in the whole job.
      state: the last flow's, keyed by stage name; in the merge's entry, "produced" and "workers" are keyed by shard.
        Of a whole job there is the merge's entry only, with all shards, without what each rank has of its own.
      merge: the name of the merge's entry in `state`.
      parts: of a whole job, the ranks' snapshots, in order; of a rank, none. Not written: it is what files hold.
      journal: of a live source: the items that were read and that a resume needs, or the name of the journal on disk
        that has them; None for any other source.
      step: items that the stream has given of its epoch, which is the number of the next one, from 0 on; None: it was
        of a job whose ranks are at different steps.
      left_out: steps whose items are never given, as [first, stop]; some may still be to come. See `open(skip_steps=)`.
      path: the file or directory that it was loaded from; None: it wasn't. Not written.
      keepers: what keeps on disk what snapshots refer to: `before_store()` is called before this one is stored, to
        make that durable, and `after_store(state, where)` after, to release what no later resume needs. Not written.
    """

    version: Count
    fingerprint: list[dict[str, Json]]
    listing: list[dict[str, Json]] | dict[str, Json] | None
    epoch: Unsigned
    rank: Count | None
    world_size: Size
    num_shards: Size
    state: dict[str, Json]
    merge: str
    journal: dict[str, Json] | None = None
    step: Count | None = None
    left_out: list[list[int]] = field(default_factory=list)
    parts: tuple[Snapshot, ...] = field(default=(), compare=False, kw_only=True, metadata={"written": False})
    path: Path | None = field(default=None, compare=False, kw_only=True, metadata={"written": False})
    keepers: tuple[Any, ...] = field(default=(), compare=False, kw_only=True, metadata={"written": False})

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {
            name: getattr(self, name) for name in (*WRITTEN_FIELDS, "parts")
        }  # a journal on disk is its own process's
        return partial(Snapshot, **kept), ()

    @classmethod
    def of_job(cls, parts: Sequence[Snapshot]) -> Snapshot:
        """Return the snapshot of a whole job out of those of its ranks, in order.

        Raises:
          SnapshotError: some are missing, or they don't belong together.
        """
        _check_one_run(parts, "these")
        first = parts[0]
        if len(parts) == 1:
            return first
        own: dict[str, Json] = {"produced": {}, "workers": {}}
        for shard in range(first.num_shards):
            theirs = parts[shard % len(parts)].state[first.merge]
            for key, values in own.items():
                values[str(shard)] = theirs[key][str(shard)]
        common = {name: getattr(first, name) for name in ("version", "fingerprint", "listing", "epoch", "num_shards")}
        steps = {part.step for part in parts}
        return cls(
            **common,
            rank=None,
            world_size=len(parts),
            state={first.merge: own},
            merge=first.merge,
            step=first.step if len(steps) == 1 else None,
            parts=tuple(parts),
        )

    def part(self, rank: int) -> Snapshot:
        """Return the snapshot of one rank: out of a job's, its part; of a rank's own, itself.

        Raises:
          SnapshotError: this is another rank's, or there is no such rank.
        """
        for part in self.parts or (self,):
            if part.rank == rank:
                return part
        held = "all" if self.rank is None else f"rank {self.rank}"
        raise SnapshotError(f"no snapshot of rank {rank}: this one holds {held} of {self.world_size} ranks")

    @property
    def shards(self) -> range:
        """The shards of this rank, or of the job; `produced` and `worker_states` are in this order."""
        if self.rank is None:
            return range(self.num_shards)
        return range(self.rank, self.num_shards, self.world_size)

    @property
    def next_worker(self) -> int:
        """The worker whose turn it is, as an index into `shards`.

        Raises:
          SnapshotError: of a whole job, each rank has its own.
        """
        self._of_one_rank("next worker")
        return int(self.state[self.merge]["next_worker"])

    @property
    def produced(self) -> list[int]:
        """Items that the merge has taken from each worker, in the order of `shards`."""
        own = self.state[self.merge]["produced"]
        return [own[str(shard)] for shard in self.shards]

    @property
    def worker_states(self) -> list[dict[str, Json]]:
        """The state of each worker, in the order of `shards`, keyed by stage name."""
        own = self.state[self.merge]["workers"]
        return [own[str(shard)] for shard in self.shards]

    @property
    def flow_state(self) -> dict[str, Json]:
        """The state of a rank as flows write it: the merge's counts and workers as lists, in shard order."""
        own = {**self.state[self.merge], "produced": self.produced, "workers": self.worker_states}
        return {**self.state, self.merge: own}

    def at_state(self, flow_state: Tree, step: int | None) -> Snapshot:
        """Return the snapshot of another state of the same run of a rank."""
        return replace(self, state=by_shard(flow_state, self.merge, self.shards), step=step, path=None)

    @property
    def stages(self) -> dict[str, Json]:
        """The states of the stages after the merge, by name.

        Raises:
          SnapshotError: of a whole job, each rank has its own.
        """
        self._of_one_rank("stages after the merge")
        return {name: own for name, own in self.state.items() if name != self.merge}

    def _of_one_rank(self, what: str) -> None:
        if self.rank is None:
            raise SnapshotError(f"each of the {self.world_size} ranks has its own {what}: ask snapshot.part(rank)")

    def __repr__(self) -> str:
        items = sum(self.produced)
        whose = f"{self.world_size} ranks" if self.rank is None else f"rank {self.rank} of {self.world_size}"
        return f"<Snapshot: epoch {self.epoch}, {whose}, {items:,} items merged>"

    def to_json(self) -> str:
        """Return the snapshot as one line of JSON.

        Raises:
          SnapshotError: a stage's state holds what JSON would lose or change: a tuple, a key that is no string, NaN;
            or it is a whole job's.
        """
        if self.rank is None:
            raise SnapshotError("the text is of one rank's snapshot: write that of each snapshot.part(rank)")
        return one_line(_body_of(self))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Return the snapshot that `to_json` wrote.

        Raises:
          SnapshotError: the text is anything else; the message says which entry.
        """
        return decode_json(text, _snapshot_of, lambda why: SnapshotError(f"not a snapshot: expected JSON ({why})"))

    def save(self, path: AnyPath, *, keep: int | None = None) -> Path:
        """Write the snapshot, durably: when this returns, it survives a kill and a power cut.

        A kill before that leaves what was there, and a temporary, which the next save to the same file removes.

        Args:
          path: ends in ".json": that file. A directory (one that exists, or a path that ends in a separator or has no
            suffix) gets a file named for the rank. What is missing of the path is made. A whole job's snapshot goes
            into a directory only: the files of all ranks, one after the other.
          keep: of directories like "ckpt/step-1200/", one for each step: remove this rank's files from those that were
            saved before the last `keep` that all ranks have saved to; a directory that is empty then, too. None: none.

        Returns:
          The file; of a whole job, the directory.

        Raises:
          SnapshotError: a full or read-only disk, say, which a retry may find mended; what was there is still whole.
            A whole job's, to one file. With `keep`, a path whose last part has no number in its name.
          JournalError: likewise, of a live source's journal on disk.
        """
        if keep is not None:
            check_int("save(keep=)", keep, 1)
            check_numbered(Path(path))
        saved = self._save_parts(path) if self.rank is None else self._save(path, self.rank)
        if keep is not None:
            ranks = range(self.world_size) if self.rank is None else range(self.rank, self.rank + 1)
            remove_older(saved if saved.is_dir() else saved.parent, ranks, self.world_size, keep)
        return saved

    def _save(self, path: AnyPath, rank: int) -> Path:
        content = encode(_body_of(self))
        with _translate_errors(path):
            written = target(path, file_name(rank, self.world_size))
        self.store_with(lambda: _replace(path, written, content), str(written))
        return written

    def _save_parts(self, path: AnyPath) -> Path:
        files = {target(path, file_name(part.rank or 0, part.world_size)) for part in self.parts}
        if len(files) < len(self.parts):
            raise SnapshotError(f"{path} is one file, and there are {self.world_size} ranks: give a directory")
        for part in self.parts:
            saved = part.save(path)
        return saved.parent

    def saved(self) -> None:
        """Say that this snapshot is stored durably, where `to_json()` was stored in a place of the user's own.

        A live source's journal on disk then releases what only earlier snapshots need: those can't be resumed any more.
        `save` says it itself. Without such a journal, and for a snapshot that was loaded, nothing happens.

        Raises:
          JournalError: the journal can't be written.
        """
        self.store_with(lambda: None, "a place of the user's own")

    def store_with(self, store: Callable[[], object], where: str) -> None:
        """Call `store`, which stores this snapshot durably in `where`, and notify the keepers before and after.

        Raises:
          JournalError: a live source's journal can't be written.
          As `store`.
        """
        for keeper in self.keepers:
            keeper.before_store()
        store()
        for keeper in self.keepers:
            keeper.after_store(self.flow_state, where)

    @overload
    @classmethod
    def load(cls, path: AnyPath, *, missing_ok: Literal[False] = False, rank: int | None = None) -> Snapshot: ...
    @overload
    @classmethod
    def load(cls, path: AnyPath, *, missing_ok: bool, rank: int | None = None) -> Snapshot | None: ...
    @classmethod
    def load(cls, path: AnyPath, *, missing_ok: bool = False, rank: int | None = None) -> Snapshot | None:
        """Read a snapshot, and check that it is whole; in a directory, that all ranks' are there and of one run.

        Args:
          path: a file, or a directory that `save` was given.
          missing_ok: return None where there is nothing at all; what is there must still be sound.
          rank: whose. None: a directory of several ranks is loaded as the whole job's snapshot. `open(resume=)` takes
            the part of its own rank out of it, so that every rank may run the same line.

        Raises:
          SnapshotError: missing, empty, cut short, damaged, something else, of another format, or ranks that don't fit
            together.
        """
        location = Path(path)
        try:
            parts = _read_all(location)
        except OSError as error:
            raise SnapshotError(f"can't read a snapshot from {location}: {error.strerror or error}") from error
        if not parts and not missing_ok:
            raise SnapshotError(missing_snapshot(location))
        try:
            whole = None
            if parts:
                whole = parts[0] if len(parts) == 1 else cls.of_job(parts)
            found = whole if whole is None or rank is None else whole.part(rank)
            return found if found is None else replace(found, path=location)
        except SnapshotError as error:
            raise SnapshotError(f"{location}: {error}") from None

    @classmethod
    def latest(cls, folder: AnyPath, *, rank: int | None = None) -> Snapshot | None:
        """Read the furthest snapshot that all ranks have saved, of a folder with a directory for each step.

        A directory that lacks the files of some ranks is passed over, and so is one with a damaged file, while there is
        another one; both are logged. The snapshot's `path` says which it is: a model's checkpoint of the same step may
        lie there, too.

        Args:
          folder: "ckpt/", of "ckpt/step-1200/" and others; or a directory with the files of all ranks.
          rank: as in `load`.

        Returns:
          The snapshot of the highest epoch and step; None: no step was saved by all ranks, so this is a first run.

        Raises:
          SnapshotError: what there is is damaged, or can't be read.
        """
        damage: SnapshotError | None = None
        try:
            directories = complete_sets(Path(folder))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotError(f"can't read snapshots in {folder}: {error.strerror or error}") from error
        for directory in directories:
            try:
                return cls.load(directory, rank=rank)
            except SnapshotError as error:
                damage = damage or error
                logger.warning("passed over: %s", error)
        if damage is not None:
            raise damage
        return None


def by_shard(state: Tree, merge: str, shards: range) -> Tree:
    """Return a rank's state as flows write it, with the merge's lists keyed by shard: ranks share no key."""
    own = dict(state[merge])
    names = list(map(str, shards))
    for key in ("produced", "workers"):
        own[key] = dict(zip(names, own[key], strict=True))
    return {**state, merge: own}


WRITTEN_FIELDS = tuple(field.name for field in fields(Snapshot) if field.metadata.get("written", True))

OPTIONAL_FIELDS = ("journal", "step", "left_out")
"""Fields that are written unless they are None or empty."""


def _body_of(snapshot: Snapshot) -> dict[str, Json]:
    body = {name: getattr(snapshot, name) for name in WRITTEN_FIELDS}
    return {name: value for name, value in body.items() if name not in OPTIONAL_FIELDS or value not in (None, [])}


def _snapshot_of(body: Json) -> Snapshot:
    """Return the snapshot with these fields, each of which must be there and of its type, and no other."""
    if isinstance(body, dict) and MAGIC in body:
        raise SnapshotError("this is the text of a snapshot file: use Snapshot.load(path)")
    version = body.get("version") if isinstance(body, dict) else None
    if isinstance(version, int):
        check_version(version, "the snapshot")
    if isinstance(body, dict) and (unknown := body.keys() - set(WRITTEN_FIELDS)):
        raise SnapshotError(f"not a snapshot: unknown entries {', '.join(sorted(unknown))}")
    try:
        snapshot = msgspec.convert(body, Snapshot)
    except msgspec.ValidationError as error:
        raise SnapshotError(f"not a snapshot: {error}") from None
    if snapshot.rank is None:
        raise SnapshotError("not a snapshot: it says no rank")
    if snapshot.rank >= snapshot.world_size:
        raise SnapshotError(f"not a snapshot: rank {snapshot.rank} of {snapshot.world_size}")
    check_type(snapshot.left_out, list[Range], "the steps that are left out")
    _check_merge(snapshot)
    return snapshot


def _check_merge(snapshot: Snapshot) -> None:
    """Check that the merge's part has one worker for each shard of the rank."""
    try:
        own = msgspec.convert(snapshot.state.get(snapshot.merge), MergePart)
    except msgspec.ValidationError as error:
        raise SnapshotError(f"not a snapshot: in the state of the merge, {snapshot.merge!r}: {error}") from None
    workers = len(snapshot.shards)
    named = workers == len(own.workers) and own.workers.keys() == {str(shard) for shard in snapshot.shards}
    if not named or own.produced.keys() != own.workers.keys() or own.next_worker >= max(workers, 1):
        raise SnapshotError(
            f"not a snapshot: expected {workers:,} workers under {snapshot.merge!r}, of shards "
            f"{some(snapshot.shards) or 'none'}; found {len(own.produced)} counts and {len(own.workers)} "
            f"states, of shards {', '.join(sorted({*own.produced, *own.workers})[:10]) or 'none'}, and worker "
            f"{own.next_worker} as the next"
        )


@contextmanager
def _translate_errors(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SnapshotError(
            f"can't save a snapshot to {path}: {error.strerror or error}; one that was there is still whole"
        ) from error


def _replace(path: AnyPath, written: Path, content: bytes) -> None:
    with _translate_errors(path):
        replace_file(written, content)


def _read_all(location: Path) -> list[Snapshot]:
    """Return the snapshot in a file, or those of all ranks in a directory, by rank; none where there is nothing."""
    if location.is_dir():
        parts = [_read(path) for path in complete_set(location)]
        _check_one_run(parts, location)
        return parts
    try:
        return [_read(location)]
    except FileNotFoundError:
        return []


def _read(path: Path) -> Snapshot:
    with FileIO(open_regular(path, os.O_RDONLY)) as file:
        body = decode(file.read(), path)
    try:
        return _snapshot_of(body)
    except (SnapshotError, RecursionError) as error:
        raise SnapshotError(f"{path}: {error}") from None


def _check_one_run(snapshots: Sequence[Snapshot], where: object) -> None:
    size = len(snapshots)
    for rank, snapshot in enumerate(snapshots):
        if (snapshot.rank, snapshot.world_size) != (rank, size):
            raise SnapshotError(
                f"{where}: expected the snapshot of rank {rank} of {size} as {file_name(rank, size)}, and it is of "
                f"rank {snapshot.rank} of {snapshot.world_size}: was it renamed?"
            )
        for name in ("epoch", "num_shards", "fingerprint", "listing", "merge"):
            first, this = (_comparable(name, getattr(one, name)) for one in (snapshots[0], snapshot))
            if first != this:
                shown = f" ({first} and {this})" if isinstance(this, int) else ""
                raise SnapshotError(
                    f"{where}: the snapshots of ranks 0 and {rank} don't belong together, they differ in "
                    f"{name}{shown}: give each step of training its own directory"
                )


def _comparable(name: str, value: Any) -> Any:
    """Return a field without what may differ between ranks: the hashes of code may be of different Pythons."""
    return [{**entry, "code": None} for entry in value] if name == "fingerprint" else value
