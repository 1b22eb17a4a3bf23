"""Snapshots: where a run of one rank stands, as JSON, in a file that is either whole or not there.

JSON, never pickle: loading can't run code. A directory holds the files of all ranks of one step of training; a step's
files are not written together, so one directory for each step is what survives a crash between two ranks' saves.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, overload

import msgspec

from streamline.durable import replace_file
from streamline.envelope import FORMAT_VERSION, MAGIC, check_version, decode, encode, one_line
from streamline.errors import SnapshotError
from streamline.states import Json

__all__ = ["FORMAT_VERSION", "Snapshot"]

_FILE_NAME = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.json")

AnyPath: TypeAlias = "str | os.PathLike[str]"
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _Merge(msgspec.Struct):
    """What is read out of the merge's state; the rest is the merge's own business."""

    next_worker: Count
    produced: list[Count]
    workers: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, repr=False)
class Snapshot:
    """Where a run of one rank stands: what resumes right *after* the last item that it delivered.

    It shares its trees with whoever made it; both leave them as they are.

    Attributes:
      version: of the format.
      fingerprint: the plan, one object per stage in order: "kind", "name", "options".
      listing: the data: files and sizes, or a length; None where the source can't tell.
      epoch: 0-based.
      rank: 0-based among `world_size`.
      world_size: ranks in the job.
      num_shards: shards in the whole job.
      state: the last flow's, keyed by stage name.
      merge: the name of the merge's entry in `state`.
    """

    version: Count
    fingerprint: list[dict[str, Json]]
    listing: list[dict[str, Json]] | dict[str, Json] | None
    epoch: Count
    rank: Count
    world_size: Size
    num_shards: Size
    state: dict[str, Json]
    merge: str

    @property
    def shards(self) -> range:
        """The shards of this rank, one worker each; `produced` and `worker_states` are in this order."""
        return range(self.rank, self.num_shards, self.world_size)

    @property
    def next_worker(self) -> int:
        """The worker whose turn it is, as an index into `shards`."""
        return int(self.state[self.merge]["next_worker"])

    @property
    def produced(self) -> list[int]:
        """Items that the merge has taken from each worker, in shard order."""
        return list(self.state[self.merge]["produced"])

    @property
    def worker_states(self) -> list[dict[str, Json]]:
        """The state of each worker, in shard order, keyed by stage name."""
        return list(self.state[self.merge]["workers"])

    @property
    def stages(self) -> dict[str, Json]:
        """The states of the stages after the merge, by name."""
        return {name: own for name, own in self.state.items() if name != self.merge}

    def __repr__(self) -> str:
        items = sum(self.produced)
        return f"<Snapshot: epoch {self.epoch}, rank {self.rank} of {self.world_size}, {items:,} items merged>"

    def to_json(self) -> str:
        """Return the snapshot as one line of JSON.

        Raises:
          SnapshotError: a stage's state holds what JSON would lose or change: a tuple, a key that is no string, NaN.
        """
        return one_line(_body_of(self))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Return the snapshot that `to_json` wrote.

        Raises:
          SnapshotError: the text is anything else; the message says which entry.
        """
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SnapshotError(f"not a snapshot: expected JSON ({error})") from None
        if isinstance(body, dict) and MAGIC in body:
            raise SnapshotError("this is the text of a snapshot file: use Snapshot.load(path)")
        return _snapshot_of(body)

    def save(self, path: AnyPath) -> Path:
        """Write the snapshot, durably: when this returns, it survives a kill and a power cut.

        Args:
          path: ends in ".json": that file. A directory (one that exists, or a path that ends in a separator or has no
            suffix) gets a file named for the rank. What is missing of the path is made.

        Returns:
          The file.

        Raises:
          SnapshotError: a full or read-only disk, say, which a retry may find mended; what was there is still whole.
        """
        content = encode(_body_of(self))
        try:
            target = _target(path, _file_name(self.rank, self.world_size))
            replace_file(target, content)
        except OSError as error:
            raise SnapshotError(
                f"can't save a snapshot to {path}: {error.strerror or error}; one that was there is still whole"
            ) from error
        return target

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
          rank: whose; may be left out where there is only one.

        Raises:
          SnapshotError: missing, empty, cut short, damaged, something else, too new, or ranks that don't fit together.
        """
        location = Path(path)
        try:
            snapshots = _read_all(location)
        except OSError as error:
            raise SnapshotError(f"can't read a snapshot from {location}: {error.strerror or error}") from error
        if snapshots:
            return _of_rank(snapshots, rank, location)
        if missing_ok:
            return None
        raise SnapshotError(_nothing_at(location))


def _body_of(snapshot: Snapshot) -> dict[str, Json]:
    return {field.name: getattr(snapshot, field.name) for field in fields(snapshot)}


def _snapshot_of(body: Json) -> Snapshot:
    """Return the snapshot with these fields, each of which must be there and of its type, and no other."""
    version = body.get("version") if isinstance(body, dict) else None
    if isinstance(version, int):
        check_version(version, "the snapshot")
    try:
        snapshot = msgspec.convert(body, Snapshot)
    except msgspec.ValidationError as error:
        raise SnapshotError(f"not a snapshot: {error}") from None
    if unknown := body.keys() - {field.name for field in fields(Snapshot)}:
        raise SnapshotError(f"not a snapshot: unknown entries {', '.join(sorted(unknown))}")
    if snapshot.rank >= snapshot.world_size:
        raise SnapshotError(f"not a snapshot: rank {snapshot.rank} of {snapshot.world_size}")
    _check_merge(snapshot)
    return snapshot


def _check_merge(snapshot: Snapshot) -> None:
    """Refuse a snapshot whose merge has not one worker for each shard of the rank."""
    try:
        own = msgspec.convert(snapshot.state.get(snapshot.merge), _Merge)
    except msgspec.ValidationError as error:
        raise SnapshotError(f"not a snapshot: in the state of the merge, {snapshot.merge!r}: {error}") from None
    here = len(snapshot.shards)
    if not len(own.produced) == len(own.workers) == here or own.next_worker >= max(here, 1):
        raise SnapshotError(
            f"not a snapshot: expected {here} workers under {snapshot.merge!r}, found {len(own.produced)} counts and "
            f"{len(own.workers)} states, and worker {own.next_worker} as the next"
        )


def _file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


def _target(path: AnyPath, file_name: str) -> Path:
    """Return the file to save to."""
    given, target = os.fspath(path), Path(path)
    if target.is_dir() or given.endswith(("/", os.sep)):
        return target / file_name
    if given.endswith(".json"):
        return target
    if target.suffix:
        raise SnapshotError(f"is {given!r} to be a file or a directory? End it in '.json' or in '/'")
    return target / file_name


def _read_all(location: Path) -> list[Snapshot]:
    """Return the snapshot in a file, or those of all ranks in a directory, by rank; none where there is nothing."""
    if location.is_dir():
        snapshots = [_decoded(path) for path in _complete_set(location)]
        _check_one_run(snapshots, location)
        return snapshots
    try:
        return [_decoded(location)]
    except FileNotFoundError:
        return []


def _decoded(path: Path) -> Snapshot:
    body = decode(path.read_bytes(), path)
    try:
        return _snapshot_of(body)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None


def _complete_set(directory: Path) -> list[Path]:
    """Return the files of all ranks, by rank. Files of another world size may lie about, but not a whole set."""
    found: dict[int, set[int]] = {}
    for path in directory.iterdir():
        if match := _FILE_NAME.fullmatch(path.name):
            rank, size = int(match[1]), int(match[2])
            if rank < size:
                found.setdefault(size, set()).add(rank)
    missing = {size: [rank for rank in range(size) if rank not in ranks] for size, ranks in sorted(found.items())}
    whole = [size for size, ranks in missing.items() if not ranks]
    if len(whole) > 1:
        sizes = " and of ".join(map(str, whole))
        raise SnapshotError(f"{directory} holds snapshots of {sizes} ranks, each complete: remove all but one set")
    if found and not whole:
        absent = "; ".join(f"of {size} ranks, {_some(ranks)}" for size, ranks in missing.items())
        raise SnapshotError(f"{directory} lacks the snapshots of some ranks: {absent}. Use an earlier directory")
    return [directory / _file_name(rank, size) for size in whole for rank in range(size)]


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:10]))
    return shown if len(ranks) <= 10 else f"{shown} and {len(ranks) - 10} more"


def _check_one_run(snapshots: list[Snapshot], directory: Path) -> None:
    for rank, snapshot in enumerate(snapshots):
        if (snapshot.rank, snapshot.world_size) != (rank, len(snapshots)):
            name = _file_name(rank, len(snapshots))
            raise SnapshotError(
                f"{directory / name} is of rank {snapshot.rank} of {snapshot.world_size}: was it renamed?"
            )
        for name in ("epoch", "num_shards", "fingerprint", "listing"):
            first, this = getattr(snapshots[0], name), getattr(snapshot, name)
            if first != this:
                shown = f" ({first} and {this})" if isinstance(this, int) else ""
                raise SnapshotError(
                    f"{directory}: the snapshots of ranks 0 and {rank} don't belong together, they differ in "
                    f"{name}{shown}: give each step of training its own directory"
                )


def _of_rank(snapshots: list[Snapshot], rank: int | None, location: Path) -> Snapshot:
    if rank is None:
        if len(snapshots) > 1:
            raise SnapshotError(f"{location} holds the snapshots of {len(snapshots)} ranks: say which, with rank=")
        return snapshots[0]
    for snapshot in snapshots:
        if snapshot.rank == rank:
            return snapshot
    held = ", ".join(str(snapshot.rank) for snapshot in snapshots[:10])
    raise SnapshotError(
        f"{location} has no snapshot of rank {rank}; of {snapshots[0].world_size} ranks, it holds {held}"
    )


def _nothing_at(location: Path) -> str:
    if not location.is_dir():
        return f"no snapshot at {location}: no such file or directory (a first run: missing_ok=True)"
    others = sorted(path.name for path in location.glob("*.json"))
    hint = f", but {', '.join(others[:5])}: is it one of these?" if others else " (a first run: missing_ok=True)"
    return f"no snapshot in {location}: no file is named rank-*-of-*.json{hint}"
