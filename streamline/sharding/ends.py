"""How ranks end together: the user's options, the agreement between ranks, and the report on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from streamline.core.options import type_and_repr
from streamline.core.state import Tree
from streamline.errors import PlanError, PlanTypeError
from streamline.sharding.ranks import Rank

EndsPolicy = Literal["drop", "pad", "allow"]

NAME = "ends"
"""The entry of a rank's state in which this is kept."""

TIMEOUT_S = 600.0
"""How long a consumer waits for another rank: as long as NCCL does."""


class Store(Protocol):
    """A key-value store that all ranks share: torch's `TCPStore` and its like. Called in threads; it need not wait."""

    def set(self, key: str, value: str, /) -> Any:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value that exists."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its new value, atomically."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these exist."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key."""


@dataclass(frozen=True)
class Ends:
    """How ranks end together, and over what they agree: for `open(ends=)`, where a word isn't enough.

    Args:
      policy: "drop": with the rank that has the fewest items; "pad": with the one that has the most, the others repeat
        their first ones; "allow": each with its own.
      store: where ranks agree on the number of items if it isn't known beforehand; None: torch.distributed's, if it is
        initialised. One of torch's stores, or an object with the same methods; the same one on all ranks.
      timeout_s: seconds that the consumer waits for another rank before a `RanksError` names it.

    Raises:
      PlanError: no such policy; a `timeout_s` that is no positive, finite number. PlanTypeError: of the wrong type.
    """

    policy: EndsPolicy = "drop"
    store: Store | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        words = ", ".join(f'"{word}"' for word in get_args(EndsPolicy))
        if not isinstance(self.policy, str):
            raise PlanTypeError(f".open(ends=) is one of {words}, or sl.Ends(…), got {type_and_repr(self.policy)}")
        if self.policy not in get_args(EndsPolicy):
            raise PlanError(f'.open(ends=) is one of {words}, or sl.Ends(…), got "{self.policy}"')
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float):
            raise PlanTypeError(f"sl.Ends(timeout_s=) is in seconds, got {type_and_repr(self.timeout_s)}")
        if not 0 < self.timeout_s < math.inf:
            raise PlanError(f"sl.Ends(timeout_s=) is more than 0 and finite, got {self.timeout_s}")
        missing = [name for name in ("set", "get", "add", "check", "delete_key") if not hasattr(self.store, name)]
        if self.store is not None and missing:
            raise PlanTypeError(
                f"sl.Ends(store=) is a store as torch's are, {type_and_repr(self.store)} has no {missing[0]}()"
            )


def checked_ends(ends: EndsPolicy | Ends) -> Ends:
    """Return the options that `open(ends=)` was given; a PlanError or PlanTypeError says what is wrong with them."""
    return ends if isinstance(ends, Ends) else Ends(ends)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How a rank's stream ends."""

    ends: Ends
    rank: Rank
    left: int | None = None  # items that it gives from here on; None: as many as there are, or agreed on over the store
    spare: int = 0  # items that it has beyond those
    store: Store | None = None  # None: nothing is to be agreed on while it runs
    key: str = ""  # of this stream among all that agree over a store
    padded: int = 0  # items that were padded before the state to begin at
    again: Tree | None = None  # the state in the pass for padding; None: at its beginning

    @property
    def active(self) -> bool:
        """Whether the stream may end before or after its own items."""
        return self.left is not None or self.store is not None


@dataclass(frozen=True, kw_only=True)
class EndsReport:
    """How a rank's stream ends together with the others.

    Attributes:
      policy: without effect on a rank that is alone.
      agreed: "alone": there is nothing to agree on; "beforehand": by arithmetic; "on the way": over the store.
      left: items that each rank gives, from the beginning of this stream on; None: not known beforehand.
      dropped: surplus items of this rank, as far as known: beforehand, or once the ranks have agreed.
      more: there may be more of them, which were not read.
      padded: items given again so far, those before a resume included.
    """

    policy: EndsPolicy
    agreed: Literal["alone", "beforehand", "on the way"]
    left: int | None = None
    dropped: int = 0
    more: bool = False
    padded: int = 0

    def __str__(self) -> str:
        counted = f"{self.dropped:,} dropped{' or more' * self.more}, {self.padded:,} padded"
        return f'ends="{self.policy}", agreed {self.agreed}: {counted}'


def nothing_to_pad(rank: int, ranks: int) -> str:
    """Return the message for a rank without items where others have some."""
    return (
        f'ends="pad": rank {rank} of {ranks} has no items at all, and so none that it could give again: ends="drop", '
        "or fewer ranks"
    )
