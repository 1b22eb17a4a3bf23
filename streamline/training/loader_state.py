"""What `state_dict` holds, of a loader: strings and integers only, so that whatever saves checkpoints saves it whole.

The snapshot is one string in it: frameworks that flatten nested dicts by key, and want the same keys at a load, see one
value.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import msgspec

from streamline.core.state_types import Count, Unsigned
from streamline.errors import ResumeError, SnapshotError
from streamline.snapshot.file_format import seal, unseal
from streamline.snapshot.snapshot import Snapshot

Inside = Literal["begin", "inside", "unknown"]

VERSION = 1
"""Since streamline 0.1.0. Versions under development, before it, also wrote 2."""


@dataclass(frozen=True, kw_only=True)
class SealedState:
    """A state with a snapshot in it.

    Attributes:
      snapshot: `Snapshot.to_json()`; "": none. In the dict, with a checksum of it and of what is beside it.
      version: of this format.
    """

    of: ClassVar[str]
    snapshot: str
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict of what JSON has."""
        snapshot = self.snapshot and seal(self.snapshot, self._beside)
        return asdict(replace(self, snapshot=snapshot, version=VERSION))

    @property
    def _beside(self) -> list[Any]:
        """What the checksum in the snapshot's text is also of."""
        return [value for name, value in asdict(self).items() if name not in ("snapshot", "version")]

    @classmethod
    def from_dict(cls, found: object) -> Self:
        if not isinstance(found, dict):
            raise SnapshotError(f"a {cls.of}'s state is the dict of state_dict(), got {type(found).__name__}")
        version = found.get("version")
        if type(version) is int and version != VERSION:
            raise SnapshotError(
                f"the {cls.of}'s state is of format {version}, and this streamline reads format {VERSION}: upgrade it"
            )
        names = {field.name for field in fields(cls)}
        if found.keys() != names:
            missing, unknown = sorted(names - found.keys()), sorted(map(str, found.keys() - names))
            raise SnapshotError(f"not a {cls.of}'s state: missing entries {missing}, unknown ones {unknown}")
        try:
            state = msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise SnapshotError(f"not a {cls.of}'s state: {error}") from None
        if state.snapshot:
            state = replace(state, snapshot=unseal(state.snapshot, state._beside, f"the {cls.of}'s state"))
        if (contradiction := state._contradiction()) is not None:
            raise SnapshotError(f"not a {cls.of}'s state: {contradiction}")
        return state

    @abstractmethod
    def _contradiction(self) -> str | None:
        """Return what is wrong about the entries together."""


@dataclass(frozen=True, kw_only=True)
class LoaderState(SealedState):
    """Where a loader stands. Its snapshot is of where the pipeline stands; "" if it has never run; at "begin" it is
    from before, and says which plan and data this is about.

    Attributes:
      epoch: 0-based, the one that the next item is of.
      step: items taken in it.
      at: "begin": the pipeline begins anew with this epoch; "inside": it goes on, and another item follows; "unknown":
        it goes on, and it isn't known whether another item follows.
      steps_per_epoch: as the loader had it; 0 for none.
    """

    of: ClassVar[str] = "loader"
    epoch: Unsigned
    step: Count
    at: Inside
    steps_per_epoch: Count

    @classmethod
    def read(cls, found: object) -> tuple[LoaderState, Snapshot | None]:
        """Return the state that `state_dict` returned, with its snapshot; of a list of them, that of the whole job.

        Raises:
          SnapshotError: it is anything else; ranks are missing, or were saved at different steps.
        """
        if not isinstance(found, list | tuple) or not found:
            state = cls.from_dict(found)
            return state, state.parsed()
        states = [cls.from_dict(one) for one in found]
        snapshots = [state.parsed() for state in states]
        parts = sorted((one for one in snapshots if one is not None), key=lambda part: part.rank or 0)
        if len({(one.epoch, one.step, one.steps_per_epoch, one.at == "begin") for one in states}) > 1:
            steps = ", ".join(f"epoch {one.epoch} step {one.step}" for one in states)
            raise SnapshotError(f"the loaders' states of all ranks are of one step, these are of several: {steps}")
        if not parts:
            return states[0], None
        if len(parts) < len(states):
            raise SnapshotError("some of the loaders' states have a snapshot, and some have none")
        passes = [part.epoch for part in parts]
        if len(set(passes)) > 1:
            raise SnapshotError(
                f"the ranks are in different passes over their data ({', '.join(map(str, passes))}), since they have "
                "unequal numbers of items: their loaders' states can't be joined. On as many ranks, give each its own; "
                "for another number, give all shards as many items, with .shard(drop_remainder=True) say"
            )
        at: Inside = "inside" if all(state.at == "inside" for state in states) else "unknown"
        return replace(states[0], at=states[0].at if states[0].at == "begin" else at), Snapshot.of_job(parts)

    def _contradiction(self) -> str | None:
        if self.at != "begin" and not self.snapshot:
            return f'it is "{self.at}" an epoch, and has no snapshot'
        if self.at == "begin" and self.step:
            return f"it begins an epoch, and stands after {self.step} of its items"
        if self.steps_per_epoch and self.step >= self.steps_per_epoch:
            return f"step {self.step} of {self.steps_per_epoch}"
        snapshot = self.parsed()
        if snapshot is not None and self.at != "begin" and not self.steps_per_epoch and snapshot.epoch != self.epoch:
            return f"it is of epoch {self.epoch}, its snapshot of epoch {snapshot.epoch}"
        return None

    def parsed(self) -> Snapshot | None:
        if not self.snapshot:
            return None
        try:
            return Snapshot.from_json(self.snapshot)
        except SnapshotError as error:
            raise SnapshotError(f"the snapshot in the loader's state: {error}") from None

    def insist_on(self, steps_per_epoch: int | None) -> None:
        """Insist that a loader with this `steps_per_epoch` counts as the one did that the state is of."""
        ours, theirs = steps_per_epoch, self.steps_per_epoch or None
        if ours != theirs:
            raise ResumeError(
                f"the state is of a loader with steps_per_epoch={theirs}, this one has steps_per_epoch={ours}, and its "
                "epochs are others: make the loader as it was"
            )
