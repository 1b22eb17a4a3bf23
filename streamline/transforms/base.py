"""The base class of stages: one step of a plan, opened over its upstream."""

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
    """One step of a plan: its options, and how to open a flow over an upstream.

    A stage that reads its upstream once overrides `lists` (and `begin` where it keeps a state of its own); one that
    opens its upstream differently overrides `open`.

    Attributes:
      name: unique in its pipeline; its part of a state is kept under it.
    """

    name: str

    accepted_changes: ClassVar[Mapping[str, str]] = {}
    """Changes between a snapshot and its resume that the user may accept (options, "added", "removed"), with what comes
    out then."""

    refuses: ClassVar[Mapping[str, str]] = {}
    """Changes that no state survives, with the reason and the way out."""

    order_preserving: ClassVar[frozenset[str]] = frozenset()
    """Of `accepted_changes`, those that keep the number and the order of the items: a stage downstream that rereads
    from an older state still finds its items where they were."""

    state_type: ClassVar[Any] = Any
    """The type of its part of a state, as `msgspec.convert` takes it; with None where the state may lack it. Checked
    before a state is opened, so a stage can rely on types and ranges."""

    counted: ClassVar[bool] = True
    """Whether a snapshot depends on it. Otherwise it changes no item, keeps none, and may be added or removed."""

    last: ClassVar[bool] = False
    """Whether it must be the last stage."""

    item_functions: ClassVar[tuple[str, ...]] = ("fn", "collate")
    """Fields with a function that is called for each item or batch: a host process can say which call ended it."""

    def settled(self) -> Stage[In, Out]:
        """Return this stage with what depends on the thread and the machine that open it resolved.

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
        """Return what `lists` is given: `flow`, opened at `state`; `own` is this stage's part of it."""
        return Run(flow, own, site, site.meter(self.name, self.kind), site.skips(self.name, self.kind, state))

    def begin(self, upstream: State, own: Any) -> State:
        """Return the state before the first item: without a state of its own, the upstream's."""
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
        """Return the index that this stage makes of the index upstream, in an epoch.

        Args:
          inner: returns the index upstream, in an epoch.

        Raises:
          PlanError: this stage doesn't act on an index, or not on this one.
        """
        raise PlanError(f".{self.kind} doesn't act on an index: move it after .shard")

    def num_outputs(self, items: float) -> float | None:
        """Return how many items come out when `items` go in; None: that depends on the items, or is unknown.

        Args:
          items: a whole number, or `math.inf` for a flow without end.
        """
        return None

    @classmethod
    def check_state(cls, own: Json, options: Mapping[str, Any], where: str) -> None:
        """Check a saved part of a state against this kind of stage and these options.

        Args:
          options: as the snapshot has them.
          where: for the message.

        Raises:
          SnapshotError: it is damaged.
        """
        check_type(own, cls.state_type, where)

    @classmethod
    def replay_cost(cls, own: Json) -> str | None:
        """Say what a resume at this part of a state (None: it has none) reads or computes again; None: nothing."""
        return None

    @classmethod
    def held_items(cls, own: Json) -> str | None:
        """Say what would be lost or would come twice if the stage were removed at this state; None: nothing."""
        return cls.replay_cost(own)

    @classmethod
    def reshard(cls, owns: Sequence[Json]) -> Json:
        """Return this stage's part for each rank of another number of ranks, where it is downstream of the merge.

        Args:
          owns: one for each former rank; None where it had none.

        Returns:
          None: the stage begins with the items from here on.

        Raises:
          ResumeError: a rank holds or counts what can't be divided anew; the message continues after the stage's name.
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
        """Whether the consumer takes from this stage's own channel, the last one of the pipeline."""
        return False

    @property
    def chooses(self) -> bool:
        """Whether another run may deliver this stage's items in another order."""
        return False

    @property
    def logs(self) -> bool:
        """Whether its states refer to a log of choices."""
        return self.chooses

    @property
    def rewinds(self) -> bool:
        """Whether a resume may reread its upstream from an older state."""
        return False

    @property
    def in_flight(self) -> int:
        """Items that this stage may hold between its input and its output."""
        return 0

    @property
    def inputs_per_output(self) -> int:
        """The most inputs that one output is made of."""
        return 1

    @property
    def output_weight(self) -> int:
        """Size of an output in inputs: a channel after this stage holds fewer of them."""
        return 1
