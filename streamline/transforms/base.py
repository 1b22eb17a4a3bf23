"""The base class of stages: one step of a plan, opened over its upstream."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from streamline.core.flow import Flow, Lists, ListsFlow, Opener, Site, StageRun
from streamline.core.knobs import Knob
from streamline.core.limits import Limit
from streamline.core.state import Json, Over, State, Tree, part_json
from streamline.core.state_types import check_type
from streamline.errors import PlanError, ResumeError, printable
from streamline.sharding.index import Index

if TYPE_CHECKING:
    from streamline.sources.base import Part, Source

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """How a stage runs, for the printed plan and the picture.

    Attributes:
      holds: items in the stage's own task; None: it runs no code there.
      before: items in a channel of its own before it; None: it is pulled in one chain with what is upstream.
      adopts: whether a channel that is there already takes the place of `before`.
      after: items in a channel of its own after it, of at most `after_bytes`.
      calls: of the user's function at once.
      threads: whether they run in threads.
      limit: bounds them together with those of other stages.
    """

    holds: int | None = 0
    before: int | None = None
    adopts: bool = False
    after: int | None = None
    after_bytes: int | None = None
    calls: int = 1
    threads: bool = False
    limit: Limit | None = None


@dataclass(frozen=True, kw_only=True)
class Stage(ABC, Generic[In, Out]):
    """One step of a plan: its options, and how to open a flow over an upstream.

    A stage that reads its upstream once overrides `lists` (and `begin` where it keeps a state of its own); one that
    opens its upstream differently overrides `open`. All else has a default that suits a stage which gives other items
    than it takes, and holds none of them.

    Attributes:
      name: unique in its pipeline; its part of a state is kept under it.
    """

    name: str

    kind: ClassVar[str]
    """What snapshots and printed plans call this class: "flat_map". Saved, so it stays when the class is renamed. A
    class that sets none is called after itself."""

    accepted_changes: ClassVar[Mapping[str, str]] = {}
    """Changes between a snapshot and its resume that the user may accept (options, "added", "removed"), with what comes
    out then."""

    refuses: ClassVar[Mapping[str, str]] = {}
    """Changes that no state survives, with the reason and the way out."""

    order_preserving: ClassVar[frozenset[str]] = frozenset()
    """Of `accepted_changes`, those that keep the number and the order of the items: a stage downstream that rereads
    from an older state still finds its items where they were."""

    state_type: ClassVar[Any] = Any
    """The type of its part of a state, as `msgspec.convert` takes it: a frozen struct, a count, or `Any`: JSON.
    `StageRun.own`, and what methods are given as `own`, is of this type."""

    counted: ClassVar[bool] = True
    """Whether a snapshot depends on it. Otherwise it changes no item, keeps none, and may be added or removed."""

    last: ClassVar[bool] = False
    """Whether it must be the last stage."""

    one_to_one: ClassVar[bool] = False
    """Whether as many items come out as go in; else see `num_outputs`."""

    uncounted_options: ClassVar[Collection[str]] = ()
    """Fields that change no item."""

    before_shard: ClassVar[frozenset[Literal["index", "files", "whole", "passes"]]] = frozenset()
    """What it may act on before `.shard`: the "index" of an indexable source; a list of "files"; the "whole" flow,
    which each worker reads; each worker's "passes" over its shard. With the last two, it runs in every worker."""

    repeats: ClassVar[bool] = False
    """Whether it opens its upstream anew for each pass."""

    moves_items: ClassVar[bool] = False
    """Whether, before the shard, an item's place depends on how many items there are."""

    depth_change: ClassVar[int] = 0
    """1: its outputs are batches of its inputs; -1: its inputs are batches of its outputs."""

    own_state_counts: ClassVar[bool] = True
    """Whether its part of a state changes how many items it gives from there on."""

    keeps_only_held: ClassVar[bool] = False
    """Whether its part of a state means nothing where it holds no items; see `held_items`."""

    item_functions: ClassVar[tuple[str, ...]] = ("fn", "collate")
    """Fields with a function that is called for each item or batch: a host process can say which call ended it."""

    part_of_next: ClassVar[bool] = False
    """Whether printed plans show its options as options of the stage after it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in cls.__dict__:
            cls.kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        known = _CLASSES.setdefault(cls.kind, [])
        known.insert(0 if is_own(cls) else sum(map(is_own, known)), cls)

    @classmethod
    def answers(cls, options: Mapping[str, Any]) -> bool:
        """Whether a stage with these options is of this class, where several share a kind."""
        return True

    def settled(self) -> Stage[In, Out]:
        """Return it with what depends on the opening thread and machine resolved; a PlanError if it can't run here."""
        return self

    def before(self, later: Sequence[Stage[Any, Any]]) -> Stage[In, Out]:
        """Return this stage as it runs with these stages after it."""
        return self

    def recorded(self) -> Stage[In, Out]:
        """Return this stage as it runs, over a choosing upstream, where each output is to be given again by itself."""
        return self

    def one_call_at_a_time(self) -> Stage[In, Out]:
        """Return this stage with the user's function called for one item after the other, for `.debug()`."""
        return self

    def check_live(self, source: Source[Any]) -> None:
        """Check that it works over a live source, which is read once; a PlanError if not, with the way out."""

    def in_part(self, part: Part) -> Part:
        """Return what a worker reads of a source, with this stage, which acts on the files, before the shard."""
        return part

    def without_disk(self) -> Stage[In, Out]:
        """Return this stage with nothing written to disk, for `Pipeline.check`."""
        return self

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        """Return this stage's flow, at `state` or at the beginning. No I/O: the first pull does it."""
        flow = upstream(state)
        own = self.part_of(state)
        run = self.run_over(flow, upstream.site, state, own)
        return ListsFlow(self.begin(flow.state, own), self.lists(run), run, flow)

    def run_over(self, flow: Flow[In], site: Site, state: Tree | None, own: Any) -> StageRun[In]:
        """Return what `lists` is given: `flow`, opened at `state`; `own` is this stage's part of it."""
        return StageRun(flow, own, site, site.meter(self.name, self.kind), site.skips(self.name, self.kind, state))

    @property
    def initial_state(self) -> Any:
        """Its part of a state at the beginning; None: it keeps none, or makes it in `begin`."""
        return None

    @classmethod
    def read_part(cls, own: Json) -> Any:
        """Return a part of a state, which has been checked, as `state_type`; None: there is none."""
        return None if own is None else msgspec.convert(own, cls.state_type)

    def part_of(self, state: Tree | None) -> Any:
        """Return its part of a state, or that at the beginning where the state has none."""
        if state is None or self.name not in state:
            return deepcopy(self.initial_state)  # a dict, say, is the run's own
        return check_type(state[self.name], self.state_type, f"the state of {self.name!r}")

    def begin(self, upstream: State, own: Any) -> State:
        """Return the state before the first item: without a state of its own, the upstream's."""
        return upstream if self.initial_state is None else Over(self.name, own, upstream)

    def lists(self, run: StageRun[In]) -> Lists[Out]:
        """Yield this stage's output, list by list."""
        raise TypeError(f"{type(self).__name__} overrides neither open nor lists")

    def __str__(self) -> str:
        return self.kind if self.name.startswith(self.kind) else printable(f"{self.kind}({self.name})")

    def line(self, more: Sequence[str] = ()) -> str:
        """Return how it was written, more or less, with `more` options of the stage before: "shuffle(window=4096)"."""
        names = [] if self.name.startswith(self.kind) else [self.name]
        return f"{self.kind}({', '.join([*names, *self.shown_options(), *more])})"

    def shown_options(self) -> list[str]:
        """Return its options as in `line`: without functions, and without defaults, but with a seed always."""
        return [
            f"{field.name}={value!r}"
            for field in fields(self)
            if field.repr and field.name != "name" and not callable(value := getattr(self, field.name))
            if field.name == "seed" or value != field.default
        ]

    def in_all(self, num_workers: int) -> str:
        """Say what it comes to in all workers together, where that isn't obvious: "up to 1,600 in all"."""
        return ""

    @property
    def layout(self) -> StageLayout:
        """How it runs, for the printed plan and the picture."""
        return StageLayout(holds=self.in_flight)

    @property
    def options(self) -> dict[str, Any]:
        """The options that change which items come out, by name; a resume insists on them."""
        left_out = {"name", *self.uncounted_options}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}

    def reindexed(self, inner: Callable[[tuple[int, ...]], Index], epoch: tuple[int, ...]) -> Index:
        """Return the index that this stage makes of the index upstream, in an epoch.

        Raises:
          PlanError: this stage doesn't act on an index, or not on this one.
        """
        raise PlanError(f".{self.kind} doesn't act on an index: move it after .shard")

    def num_outputs(self, items: float) -> float | None:
        """Return how many items come out of so many (`math.inf`: no end); None: that depends on them, or is unknown."""
        return items if self.one_to_one else None

    def num_left(self, left: float, whole: float, own: Any) -> float | None:
        """Return how many items come out when `left` of `whole` go in, at a part of a state of `reshard`'s."""
        return self.num_outputs(left)

    @classmethod
    def check_state(cls, own: Json, options: Mapping[str, Any], where: str) -> None:
        """Check a saved part of a state against this kind of stage and its saved `options`; `where`: for the message.

        Raises:
          SnapshotError: it is damaged.
        """
        check_type(own, cls.state_type, where)

    @classmethod
    def replay_cost(cls, own: Any) -> str | None:
        """Say what a resume at this part of a state reads or computes again; None: nothing."""
        return None

    @classmethod
    def held_items(cls, own: Any) -> str | None:
        """Say what would be lost or would come twice if the stage were removed at this state; None: nothing."""
        return cls.replay_cost(own)

    @classmethod
    def reshard(cls, owns: Sequence[Any]) -> Any:
        """Return this stage's part for each rank of another number of ranks, where it is downstream of the merge.

        Args:
          owns: one for each former rank; None where it had none.

        Returns:
          None: the stage begins with the items from here on.

        Raises:
          ResumeError: a rank holds or counts what can't be divided anew; the message continues after the stage's name.
        """
        for rank, own in enumerate(owns):
            if own is not None and (held := cls.held_items(own)) is not None:
                raise ResumeError(f"{held} (rank {rank})")
            if own and not cls.keeps_only_held:
                raise ResumeError(f"keeps a count of its own on each rank (rank {rank}: {part_json(own)})")
        return None

    @property
    def method(self) -> str:
        """How users write it, for messages."""
        return self.kind

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
    def spills_to(self) -> str | None:
        """The folder with files that only snapshots refer to, removed once no saved one does; None: there is none."""
        return None

    @property
    def hands_over(self) -> bool:
        """Whether its outputs are ready only for the thread that takes them, as on a CUDA stream."""
        return False

    @property
    def call_limit(self) -> Limit | None:
        """What bounds its calls together with those of other stages; None: nothing does."""
        return None

    @property
    def knob(self) -> Knob | None:
        """What of it a tuner may turn while it runs, joined to the run's `KnobValues` by `open`. None: nothing."""
        return None

    def pass_number(self, before: int, own: Any) -> int:
        """Return a pass's number, counted through those of all repeats; `before`: that of the repeats downstream."""
        return before

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


_CLASSES: dict[str, list[type[Stage[Any, Any]]]] = {}
"""All stages by kind: the package's, then those of users, the latest first: one that a notebook defines again replaces
itself."""


def is_own(cls: type) -> bool:
    return cls.__module__.startswith("streamline.")


def stage_class(kind: str, options: Mapping[str, Any]) -> type[Stage[Any, Any]]:
    """Return the class of a stage of this kind and these options; `Stage` where none is known."""
    return next((cls for cls in _CLASSES.get(kind, ()) if cls.answers(options)), Stage)
