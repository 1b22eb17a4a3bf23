"""What a replicator's `state_dict` holds: integers, strings and lists of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec

from streamline.core.state_types import Count
from streamline.errors import SnapshotError
from streamline.snapshot.file_format import sealed, unsealed

__all__ = ["ReplicatorState"]

VERSION = 2
"""2: the snapshot's text has a checksum, of all entries. States of version 1 have none."""


@dataclass(frozen=True, kw_only=True)
class ReplicatorState:
    """Where the replicas of a pipeline stand.

    Attributes:
      taken: items that each replica's reader has taken.
      closed: the replicas that were closed on purpose.
      behind: items of the stream before the snapshot; none of those behind it was dropped from reach.
      snapshot: `Snapshot.to_json()` of the pipeline there, with what was chosen since; "": its beginning. In the dict,
        with a checksum of it and of what is beside it.
      version: of this format.
    """

    taken: Annotated[list[Count], msgspec.Meta(min_length=1)]
    closed: list[Count]
    behind: Count
    snapshot: str
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict."""
        snapshot = self.snapshot and sealed(self.snapshot, self._beside)
        return asdict(replace(self, snapshot=snapshot, version=VERSION))

    @property
    def _beside(self) -> list[Any]:
        """What the checksum in the snapshot's text is also of."""
        return [self.taken, self.closed, self.behind]

    @classmethod
    def from_dict(cls, found: object) -> ReplicatorState:
        """Return the state that `to_dict` wrote.

        Raises:
          SnapshotError: it is anything else; the message says which entry.
        """
        version = found.get("version") if isinstance(found, dict) else None
        if type(version) is int and version > VERSION:
            raise SnapshotError(
                f"the replicator's state is of format {version}, and this streamline reads up to {VERSION}: upgrade it"
            )
        try:
            state = msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise SnapshotError(f"expected what StreamReplicator.state_dict() returned: {error}") from None
        if state.version not in (1, VERSION):
            raise SnapshotError(f"not a replicator's state: its version is {state.version}, expected {VERSION}")
        if state.version == VERSION and state.snapshot:
            state = replace(state, snapshot=unsealed(state.snapshot, state._beside, "the replicator's state"))
        count = len(state.taken)
        needed = [share * count + at for at, share in enumerate(state.taken) if at not in state.closed]
        if state.behind > min(needed, default=state.behind) or any(at >= count for at in state.closed):
            raise SnapshotError("not a replicator's state: its entries contradict each other; it was edited")
        if (state.behind or any(state.taken)) and not state.snapshot:
            raise SnapshotError("not a replicator's state: it says where the stream stands, and has no snapshot")
        return state
