"""Reads a recorder's files: each step's states before and after it, and the state that replays it.

A later opening replaces earlier ones from its first step on; one of another number of ranks does so for all ranks.
Damaged or cut steps are missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from streamline.core.state import Json, Tree
from streamline.core.text import some
from streamline.errors import RecordError, SnapshotError
from streamline.snapshot.changes import apply_change, unpack_changes
from streamline.snapshot.recorder import (
    ANOTHER_PASS,
    LEFT_OUT,
    RecordName,
    StepBlock,
    blocks,
    record_error,
    record_path,
)
from streamline.snapshot.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """An item that a rank's stream gave.

    Attributes:
      number: of the step, in its epoch, from 0 on.
      left_out: it was drawn, and not given: `open(skip_steps=)`.
      run: the opening that recorded it.
      head: a snapshot of that opening.
      before, after: the states, as flows write them.
      again: where a replay begins: the state before it, with the choices that were made up to the one after; None:
        unknown, since a `.repeat` began another pass with it.
    """

    number: int
    left_out: bool
    run: RecordName
    head: Snapshot
    before: Tree
    after: Tree
    again: Tree | None

    @property
    def snapshot_before(self) -> Snapshot:
        """What resumes with its item."""
        return self.head.at_state(self.before, self.number)

    @property
    def snapshot_after(self) -> Snapshot:
        """What resumes right after it."""
        return self.head.at_state(self.after, self.number + 1)

    @property
    def snapshot_again(self) -> Snapshot:
        """What gives its item again; no steps are left out."""
        assert self.again is not None
        return replace(self.head.at_state(self.again, self.number), left_out=[])

    @property
    def chosen(self) -> bool:
        """Whether a replay needs choices that only this step has."""
        return self.again is not self.before


@dataclass(frozen=True)
class _Stretch:
    """Consecutive steps in one block: those from `first` to `stop` - 1 are valid."""

    name: RecordName
    block: StepBlock
    first: int
    stop: int


class StepRecords:
    """The records of one epoch in a directory, by rank.

    Args:
      path: as it was given to the recorder.
      epoch: None: the only one that is there.

    Raises:
      RecordError: there is no record; several epochs, and none was named.
    """

    def __init__(self, path: str | os.PathLike[str], epoch: int | None = None) -> None:
        self._path = record_path(path, "the record of steps")
        try:
            names = RecordName.all_in(self._path)
        except OSError as error:
            raise record_error(self._path, error, "read") from error
        epochs = sorted({name.epoch for name in names})
        if not epochs:
            raise RecordError(f"there is no record of steps in {self._path}: no file is named run-*-epoch-*.steps")
        if epoch is None and len(epochs) > 1:
            raise RecordError(f"{self._path} has the steps of epochs {some(epochs)}: say of which, epoch={epochs[-1]}")
        self.epoch = epochs[0] if epoch is None else epoch
        if self.epoch not in epochs:
            raise RecordError(f"{self._path} has no steps of epoch {epoch}, only of {some(epochs)}")
        self._names = [name for name in names if name.epoch == self.epoch]

    @cached_property
    def _stretches(self) -> dict[int, list[_Stretch]]:
        """The valid steps of each rank, in order."""
        found: dict[int, list[_Stretch]] = {}
        for name in self._names:
            for rank, known in found.items():
                if rank == name.rank or any(one.name.world_size != name.world_size for one in known):
                    found[rank] = list(_before(known, name.first))
            for block in blocks(self._content(name)):
                known = list(_before(found.get(name.rank, ()), block.first))
                stop = block.first + len(block.steps) if block.end is None else block.end
                found[name.rank] = [*known, _Stretch(name, block, block.first, stop)] if stop > block.first else known
        return {rank: found[rank] for rank in sorted(found) if found[rank]}

    @property
    def ranks(self) -> list[int]:
        return list(self._stretches)

    def extent(self, rank: int) -> str:
        """Return the steps of a rank as text: "0..1827, 1900..2400"."""
        joined: list[list[int]] = []
        for one in self._stretches.get(rank, ()):
            if joined and joined[-1][1] == one.first:
                joined[-1][1] = one.stop
            else:
                joined.append([one.first, one.stop])
        return ", ".join(f"{first}..{stop - 1}" for first, stop in joined) or "none"

    def read(self, rank: int, first: int, last: int) -> Iterator[RecordedStep]:
        """Yield the recorded steps from `first` to `last`. Raises `RecordError`: a file can't be read."""
        for stretch in self._stretches.get(rank, ()):
            if stretch.first <= last and stretch.stop > first:
                yield from _decode_steps(stretch, max(first, stretch.first), min(last + 1, stretch.stop))

    def read_all(self, rank: int, first: int, last: int) -> list[RecordedStep]:
        """Return the steps from `first` to `last`. Raises `RecordError`: some are missing; or a file can't be read."""
        steps = list(self.read(rank, first, last))
        missing = sorted(set(range(first, last + 1)).difference(step.number for step in steps))
        if missing:
            raise RecordError(
                f"{self._path} lacks the steps {some(missing)} of rank {rank}, epoch {self.epoch}: it has "
                f"{self.extent(rank)}"
            )
        return steps

    def _content(self, name: RecordName) -> bytes:
        path = self._path / str(name)
        try:
            return path.read_bytes()
        except OSError as error:
            raise record_error(path, error, "read") from error


def _before(known: Sequence[_Stretch], number: int) -> Iterator[_Stretch]:
    """Yield the stretches of steps before `number`."""
    for one in known:
        if one.first < number:
            yield replace(one, stop=min(one.stop, number))


def _decode_steps(stretch: _Stretch, first: int, stop: int) -> Iterator[RecordedStep]:
    """Yield steps first … stop - 1 of a stretch. Raises `RecordError` at one that is damaged."""
    block = stretch.block
    try:
        found = block.inflate()
        head = Snapshot.from_json(next(found).decode())
        before = head.flow_state
        for number, (kind, _), data in zip(range(block.first, stop), block.steps, found, strict=False):
            changes = unpack_changes(data)
            after = apply_change(before, changes[0])
            again = _again(before, *changes[1:])
            if number >= first:
                yield RecordedStep(
                    number=number,
                    left_out=kind == LEFT_OUT,
                    run=stretch.name,
                    head=head,
                    before=before,
                    after=after,
                    again=again,
                )
            before = after
    except (LookupError, TypeError, ValueError, RecursionError, SnapshotError) as error:
        raise RecordError(f"{stretch.name} is damaged in the block of steps from {block.first} on: {error}") from error


def _again(before: Tree, chosen: Json = None) -> Tree | None:
    return None if chosen == ANOTHER_PASS else apply_change(before, chosen)


def in_stretches(steps: Sequence[RecordedStep]) -> Iterator[list[RecordedStep]]:
    """Yield groups of steps that one opening replays: those of one run, unless each has choices of its own."""
    for _, group in groupby(steps, key=lambda step: (step.run, step.number if step.chosen else None)):
        yield list(group)
