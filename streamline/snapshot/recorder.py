"""The recorder of steps: a stream's states before and after each item that it gives, in a file for each opening.

A step is one item that the consumer is given, such as a batch. A file has *blocks*, each a marker and frames
(`core.record_file`). The first frame of a block is the whole snapshot before its first step; each further one is a
step: the change of the state. The frames of a block are one deflated stream, flushed after each, so a kill loses none
that was written, and a file that is cut short is read up to its last whole frame. A damaged frame costs the steps up
to the next block. A block begins when the changes of the one before take `CHANGES_PER_HEAD` times as much as its
snapshot: a step is found in one block, and snapshots take one byte in sixteen.

A step is written right before its item is taken, so that one that kills the process is in the record. After Ctrl-C in
between, the same step comes again, and is not written twice; or the stream is closed, and the record says that it
wasn't given. Only for the last step before a SIGKILL, it is unknown whether it was given.

If Ctrl-C interrupts writing, the file's end is unknown: the next step begins a block, and later blocks override earlier
ones.

Where an order is chosen, by a best-effort merge say, the states don't tell which choices led from one to the other. So
a step also has the state before it with the choices made since (`State.json(until)`), which a replay repeats.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import MAX_WBITS, Z_SYNC_FLUSH, compressobj, decompressobj
from zlib import error as ZlibError  # noqa: N812 - it is a class

from streamline.core.atomic_file import make_directory, open_own, write_all
from streamline.core.options import type_and_repr
from streamline.core.record_file import DamagedFrameError, frame, frames
from streamline.core.state import Json, Reference, State, Tree
from streamline.errors import PlanError, PlanTypeError, RecordError, SnapshotError, printable
from streamline.plan.plan import Plan
from streamline.snapshot.changes import change, pack_changes
from streamline.snapshot.coordinator import SnapshotCoordinator
from streamline.transforms.repeat import Repeat

logger = logging.getLogger("streamline.recorder")

MARKER = b"\x93steps1\n"
"""The beginning of a block. Frames are deflated, so it is hardly ever found in one: that frame's checksum wouldn't fit,
and its steps would be missing."""

CHANGES_PER_HEAD = 16

LEVEL = 6
"""Of zlib: at level 4, the changes of 64 shards take 5 % more bytes, and 10 µs less."""

BEGIN, STEP, LEFT_OUT, END = b"B", b"S", b"L", b"E"
"""The first byte of a frame. After BEGIN and END comes a step's number: the block's first one, and the first one that
was not given."""

ANOTHER_PASS = "another pass"
"""In place of a step's choices, which are lost: another pass began with it."""

_NUMBER = struct.Struct("<Q")

_SYNC = b"\0\0\xff\xff"
"""The end of each flush, and so not written. Precedent: RFC 7692, section 7.2.1."""

_NAME = re.compile(r"run-(\d{5,})-epoch-(\d+)-rank-(\d{5,})-of-(\d{5,})-from-(\d+)\.steps")

UNWRITABLE = (OSError, SnapshotError, TypeError, ValueError, RecursionError)
"""A full disk, say, or a state that is not JSON."""


class RecordName(NamedTuple):
    """A file's name: the number of the opening, the epoch, the rank, and the first step."""

    run: int
    epoch: int
    rank: int
    world_size: int
    first: int

    def __str__(self) -> str:
        rank = f"rank-{self.rank:05}-of-{self.world_size:05}"
        return f"run-{self.run:05}-epoch-{self.epoch}-{rank}-from-{self.first}.steps"

    @classmethod
    def all_in(cls, directory: Path) -> list[RecordName]:
        """Return the records in a directory, sorted. Raises `OSError`."""
        found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
        return sorted(cls(*map(int, match.groups())) for match in found if match)


def record_path(path: object, what: str) -> Path:
    """Return the path of a record. Raises `PlanTypeError`: it is no path; `PlanError`: it is empty."""
    if not isinstance(path, str | os.PathLike):
        raise PlanTypeError(f"{what} is the path of a directory, got {type_and_repr(path)}")
    if not os.fspath(path):
        raise PlanError(f'{what} is the path of a directory, got an empty one; "." is the current directory')
    return Path(path)


class Recorder:
    """Where a stream records which items were in each of its steps: `pipe.open(record=sl.Recorder("steps/"))`.

    `streamline steps` prints what was recorded, `pipe.replay_steps` gives the items again: see docs/steps.md.

    Args:
      path: a local directory, of one job; made if it is missing. Each opening of each rank adds a file.

    Raises:
      PlanTypeError: `path` is no path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = record_path(path, "Recorder(path)").absolute()  # a later chdir changes nothing

    def __repr__(self) -> str:
        return f"Recorder({str(self.path)!r})"

    def check(self) -> None:
        """Make the directory, and check that it is writable. Raises `RecordError`."""
        try:
            make_directory(self.path)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError("no permission to write there")
        except OSError as error:
            raise record_error(self.path, error) from error


@dataclass(frozen=True)
class _RecordEnd:
    """The end of a record. One object, so that Ctrl-C finds the old end or the new."""

    number: int  # of the next step
    state: State | None  # after the last one, as it was recorded; None: it is not kept
    tree: Tree  # likewise, as flows write it


class StepWriter:
    """Writes the record of one opening of one rank; the file is made at its first step."""

    def __init__(self, recorder: Recorder) -> None:
        self._directory = recorder.path
        self._path = recorder.path
        self._descriptor: int | None = None
        self._owner = os.getpid()
        self._place: _RecordEnd | None = None
        self._whole = False  # whether the file ends after a frame that `_place` stands after
        self._failed = False
        self._deflate = compressobj()
        self._head_bytes = self._change_bytes = 0

    def step(
        self, number: int, before: Reference, after: Reference, snapshots: SnapshotCoordinator, *, left_out: bool
    ) -> None:
        """Record a step, unless that is done; `before`: the state before it; `left_out`: its item isn't given.

        Raises `RecordError` or `SnapshotError` at the opening's first step. If a later one can't be recorded, the log
        says so once, and nothing more is recorded.
        """
        if self._failed or (self._place is not None and number < self._place.number):
            return
        try:
            self._step(number, before, after, snapshots, LEFT_OUT if left_out else STEP)
        except UNWRITABLE as error:
            if self._place is None:
                raise (record_error(self._path, error) if isinstance(error, OSError) else error) from error
            self._failed = True
            logger.warning(
                "%s: steps from %d on can't be recorded, and the stream goes on without: %s",
                printable(str(self._path)), number, printable(str(error)),
            )  # fmt: skip

    def _step(
        self, number: int, before: Reference, after: Reference, snapshots: SnapshotCoordinator, kind: bytes
    ) -> None:
        whole, self._whole = self._whole, False
        place, chooses = self._place, snapshots.plan.chooser is not None
        if place is None:
            state = before.get()
            place = _RecordEnd(number, state, snapshots.tree(state))
        state = after.get()
        tree = snapshots.tree(state)
        found = [change(place.tree, tree)]
        if chooses and place.state is not None:
            found.append(_choices(place, state, tree, snapshots))
        if not whole or self._change_bytes > CHANGES_PER_HEAD * self._head_bytes:
            self._begin(place, snapshots)
        self._change_bytes += self._write(kind + self._compress(pack_changes(found)))
        self._place = _RecordEnd(number + 1, state if chooses else None, tree)
        self._whole = True

    def _begin(self, place: _RecordEnd, snapshots: SnapshotCoordinator) -> None:
        if self._descriptor is None:
            self._path, self._descriptor = _new_file(self._directory, snapshots, place.number)
        self._deflate = compressobj(LEVEL, wbits=-MAX_WBITS)
        snapshot = snapshots.snapshot_of(place.tree, None, place.number)
        head = BEGIN + _NUMBER.pack(place.number) + self._compress(snapshot.to_json().encode())
        self._head_bytes, self._change_bytes = self._write(head, MARKER), 0

    def _compress(self, data: bytes) -> bytes:
        return (self._deflate.compress(data) + self._deflate.flush(Z_SYNC_FLUSH))[: -len(_SYNC)]

    def _write(self, payload: bytes, marker: bytes = b"") -> int:
        assert self._descriptor is not None
        content = marker + frame(payload)
        write_all(self._descriptor, content)
        return len(content)

    def end(self, number: int) -> None:
        """Record that `number` is the first step that was not given. Called when the stream is closed."""
        place = self._place
        if place is None or place.number <= number or self._failed or self._descriptor is None:
            return
        if os.getpid() == self._owner:  # not a copy of the process that gives items
            try:
                self._write(END + _NUMBER.pack(number), b"" if self._whole else MARKER)
            except OSError as error:
                logger.warning("%s: can't be ended: %s", printable(str(self._path)), printable(str(error)))

    def close(self) -> None:
        """Close the file. Idempotent; in any thread."""
        self._failed = True
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _choices(place: _RecordEnd, after: State, tree: Tree, snapshots: SnapshotCoordinator) -> Json:
    """Return the change from the state before a step to that with its choices, or `ANOTHER_PASS`."""
    assert place.state is not None
    names = repeats_over_choices(snapshots.plan)
    if names and list(_passes(place.tree, names)) != list(_passes(tree, names)):
        return ANOTHER_PASS
    return change(place.tree, snapshots.tree(place.state, after))


def repeats_over_choices(plan: Plan) -> frozenset[str]:
    """Return the names of the `.repeat`s downstream of something that chooses an order."""
    found = set()
    for part in (*(part for _, _, part in plan.source.made_of), plan):
        chosen = False
        for stage in (*part.worker, part.merge, *part.after):
            if chosen and isinstance(stage, Repeat):
                found.add(stage.name)
            chosen = chosen or stage.chooses
    return frozenset(found)


def _passes(tree: Json, names: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield the passes of the repeats of these names, wherever they are in a state."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in names:
                yield key, value["pass"]
            yield from _passes(value, names)
    elif isinstance(tree, list):
        for value in tree:
            yield from _passes(value, names)


def _new_file(directory: Path, snapshots: SnapshotCoordinator, first: int) -> tuple[Path, int]:
    """Make the file of an opening, with a number above those of its rank and of other numbers of ranks."""
    rank, world_size = snapshots.rank.rank, snapshots.rank.world_size
    while True:
        runs = [one.run for one in RecordName.all_in(directory) if one.rank == rank or one.world_size != world_size]
        path = directory / str(RecordName(max(runs, default=0) + 1, snapshots.epoch, rank, world_size, first))
        try:
            return path, open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue  # another opening of this rank begins at the same moment


def record_error(path: Path, error: OSError, what: str = "write") -> RecordError:
    return RecordError(error.errno, f"can't {what} a record of steps: {error.strerror or error}", str(path))


# Reading --------------------------------------------------------------------------------------------------------------


class StepBlock(NamedTuple):
    """Consecutive steps of a file."""

    first: int  # the number of the first one
    head: bytes  # the snapshot before it, deflated
    steps: list[tuple[bytes, bytes]]  # the kind of each, and its change, deflated
    end: int | None  # the first step that was not given, where the record says so

    def inflate(self) -> Iterator[bytes]:
        """Yield the snapshot's text, then each step's packed changes. Raises `ValueError`: it is damaged."""
        inflate = decompressobj(wbits=-MAX_WBITS)
        try:
            for data in (self.head, *(data for _, data in self.steps)):
                yield inflate.decompress(data + _SYNC)
        except ZlibError as error:
            raise ValueError(str(error)) from error


def blocks(content: bytes) -> Iterator[StepBlock]:
    """Yield the blocks of a file's content, without damaged or cut frames."""
    for part in content.split(MARKER):
        found = list(_sound(part))
        if found and (block := _block(found)) is not None:
            yield block


def _sound(part: bytes) -> Iterator[bytes]:
    """Yield the frames up to the first one that is damaged."""
    with suppress(DamagedFrameError):
        for _, payload in frames(part, 0, last=True):
            yield payload


def _block(found: list[bytes]) -> StepBlock | None:
    head, *rest = found
    kind, size = head[:1], 1 + _NUMBER.size
    if len(head) < size or kind not in (BEGIN, END):
        return None
    (number,) = _NUMBER.unpack_from(head, 1)
    if kind == END:
        return StepBlock(number, b"", [], number)
    ends = [_NUMBER.unpack_from(payload, 1)[0] for payload in rest if payload[:1] == END]
    steps = [(payload[:1], payload[1:]) for payload in rest if payload[:1] in (STEP, LEFT_OUT)]
    return StepBlock(number, head[size:], steps, ends[-1] if ends else None)
