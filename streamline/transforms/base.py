"""What a stage is: one step of a plan, opened over what is before it."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from streamline.core.flow import Flow, Lists, ListsFlow, Opener, Run, Site
from streamline.core.state import Json, State, Tree
from streamline.core.state_types import check_type
from streamline.errors import PlanError, ResumeError
from streamline.sharding.index import Index

__all__ = ["Stage"]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True)
class Stage(ABC, Generic[In, Out]):
    """What one step of a plan does: options, and how to open a flow over an upstream.

    A stage that reads one upstream, once, writes `lists` (and `begin` where it keeps a state of its own); one that
    opens its upstream differently overrides `open`.

    Attributes:
      name: unique in its pipeline; its part of a state is kept under it.
    """

    name: str

    accepted_changes: ClassVar[Mapping[str, str]] = {}
    """What may change between a snapshot and its resume, if the user accepts it, and what comes out then: options, and
    "added" and "removed" for the stage as a whole."""

    refuses: ClassVar[Mapping[str, str]] = {}
    """What else may be found to have changed, why no state survives it, and the way out."""

    order_preserving: ClassVar[frozenset[str]] = frozenset()
    """Of `survives`, what leaves the number and the order of the items as they were: a stage behind this one that
    reads again from an older state still finds its items where they were."""

    state_type: ClassVar[Any] = Any
    """What its part of a state is, as `msgspec.convert` takes it, of None where the state may have no part of it. It is
    checked before a state is opened, so a stage can rely on types and ranges."""

    counted: ClassVar[bool] = True
    """Whether it belongs to what a snapshot is of. Otherwise it may come and go: it changes no item, and keeps none."""

    last: ClassVar[bool] = False
    """Whether nothing may stand behind it."""

    def settled(self) -> Stage[In, Out]:
        """Return this stage as it runs, with what it finds out about the thread and the machine that open it.

        Raises:
          PlanError: it can't run here.
        """
        return self

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        """Return this stage's flow, at `state` or at the beginning. No I/O: the first pull does it."""
        flow = upstream(state)
        own = None if state is None else state.get(self.name)
        run = self.run_over(flow, upstream.site, state, own)
        return ListsFlow(self.begin(flow.state, own), self.lists(run), run, flow)

    def run_over(self, flow: Flow[In], site: Site, state: Tree | None, own: Any) -> Run[In]:
        """Return what the generator of this stage's output is given: it reads `flow`, opened at `state`.

        Args:
          own: this stage's part of `state`, or what stands for it at the beginning.
        """
        return Run(flow, own, site, site.meter(self.name, self.kind), site.skips(self.name, self.kind, state))

    def begin(self, upstream: State, own: Any) -> State:
        """Return the state before the first item; for a stage without a state of its own, its upstream's."""
        return upstream

    def lists(self, run: Run[In]) -> Lists[Out]:
        """Yield this stage's output, list by list."""
        raise TypeError(f"{type(self).__name__} overrides neither open nor lists")

    @property
    def kind(self) -> str:
        """The stage's kind as users write it: "flat_map"."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    def __str__(self) -> str:
        return self.kind if self.name.startswith(self.kind) else f"{self.kind}({self.name})"

    @property
    def options(self) -> dict[str, Any]:
        """The options that change which items come out, by name; a resume insists on them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}

    def reindexed(self, inner: Callable[[tuple[int, ...]], Index], epoch: tuple[int, ...]) -> Index:
        """Return the index of an indexable source behind this stage, in an epoch.

        Args:
          inner: returns the index before this stage, in an epoch.

        Raises:
          PlanError: this stage doesn't act on an index, or not on this one.
        """
        raise PlanError(f".{self.kind} doesn't act on an index: move it behind .shard")

    def num_outputs(self, items: float) -> float | None:
        """Return how many items come out when `items` go in; None: that depends on the items, or nobody knows.

        Args:
          items: a whole number, or `math.inf` for a flow without end.
        """
        return None

    @classmethod
    def check_state(cls, own: Json, options: Mapping[str, Any], where: str) -> None:
        """Insist that a saved part of a state is one of a stage of this kind and these options.

        Args:
          options: as the snapshot has them.
          where: for the message.

        Raises:
          SnapshotError: it is damaged.
        """
        check_type(own, cls.state_type, where)

    @classmethod
    def replay_cost(cls, own: Json) -> str | None:
        """Say what of the items delivered a resume reads or computes again at this part of a state; None: nothing.

        Args:
          own: the stage's own part; None where it has none.
        """
        return None

    @classmethod
    def held_items(cls, own: Json) -> str | None:
        """Say what would be lost or would come twice if the stage were removed at this state; None: nothing."""
        return cls.replay_cost(own)

    @classmethod
    def reshard(cls, owns: Sequence[Json]) -> Json:
        """Return this stage's part for each rank of another number of them, where it stands behind the merge.

        Args:
          owns: of the ranks that there were; None of one that has none.

        Returns:
          None: it begins here, with the items from here on.

        Raises:
          ResumeError: a rank holds or counts what can't be divided anew; the message goes on behind the stage's name.
        """
        for rank, own in enumerate(owns):
            if (held := cls.held_items(own)) is not None:
                raise ResumeError(f"{held} (rank {rank})")
            if own:
                raise ResumeError(f"keeps a count of its own on each rank (rank {rank}: {own})")
        return None

    @classmethod
    def argument(cls, name: str, what: str) -> str:
        """Return how `open(accept=)` names a change of a stage called `name`: "batch.size"."""
        return f"{name}.{what}"

    @property
    def owns_output_channel(self) -> bool:
        """Whether it ends in a channel of its own, from which the consumer takes: then it is the last one."""
        return False

    @property
    def chooses(self) -> bool:
        """Whether another run may deliver this stage's items in another order."""
        return False

    @property
    def logs(self) -> bool:
        """Whether its states stand in a log of choices."""
        return self.chooses

    @property
    def rewinds(self) -> bool:
        """Whether this stage's state may go back to an older state of its upstream and read again from there."""
        return False

    @property
    def in_flight(self) -> int:
        """Items that this stage may hold between its input and its output."""
        return 0

    @property
    def inputs_per_output(self) -> int:
        """Inputs that one output may be made of, at the most."""
        return 1

    @property
    def output_weight(self) -> int:
        """By how much larger an output is than an input: a channel behind it holds fewer of them."""
        return 1
