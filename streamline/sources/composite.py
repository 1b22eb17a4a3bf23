"""Sources whose items come from several pipelines: what is common to a mixture and to a zip.

Each component is a plan without shard and merge. A worker opens its shard of each of them, with its stages; so a
`.shard` behind such a source is one in each component. Stages and sources go by "component/name" in here, so that
two components may have stages of the same name. State: what the kind of source keeps, and each component's, by name.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec

from streamline.core.choices import Branch
from streamline.core.error_policy import counts_in
from streamline.core.flow import LIST_ITEMS, LONG_LIST_ITEMS, Flow, Site
from streamline.core.meters import Traffic
from streamline.core.options import given
from streamline.core.state import Json, Reference, State, Tally, Tree
from streamline.core.state_types import FingerprintEntry, check_type
from streamline.core.text import found_otherwise, line_of
from streamline.errors import PlanError, PlanTypeError, SnapshotError
from streamline.plan.fingerprint import fingerprint
from streamline.plan.plan import Plan, Shard
from streamline.plan.worker import worker_flow
from streamline.snapshot.state_checks import check_trees
from streamline.sources.base import Change, Mode, Part, Source, Split
from streamline.transforms.base import Stage
from streamline.transforms.limit import Skip, Take
from streamline.transforms.repeat import Repeat

__all__ = ["Several", "SeveralState", "grown", "known_of", "named"]


T = TypeVar("T")


GROW = ("length", "changed_files")
"""Changes of data behind which there may be more."""


class SeveralState(State):
    """Where several flows stand, and what the source keeps beside.

    Args:
      own: the source's own part.
      parts: of each component, by name.
    """

    __slots__ = ("name", "own", "parts")

    def __init__(self, name: str, own: Tree, parts: Mapping[str, Reference]) -> None:
        self.name = name
        self.own = own
        self.parts = parts

    def json(self, until: State | None = None) -> Tree:
        later = None if until is None else cast(SeveralState, until.latest)
        trees = {
            name: part.get().json(None if later is None else later.parts[name].get())
            for name, part in self.parts.items()
        }
        errors = {stage: count for tree in trees.values() for stage, count in tree.pop("errors", {}).items()}
        tree: Tree = {self.name: {**self.own_until(later), "of": trees}}
        return {**tree, "errors": errors} if errors else tree

    def own_until(self, later: Any) -> Tree:
        """Return the source's own part, with what it takes to come to a later state in the same way."""
        return self.own

    def tally(self, found: Tally) -> None:
        for part in self.parts.values():
            part.get().tally(found)

    def where(self) -> str:
        return "; ".join(f"{name}: {part.get().where()}" for name, part in self.parts.items())

    def forks(self) -> Iterator[Branch]:
        for part in self.parts.values():
            yield from part.get().forks()


class ComponentParts(msgspec.Struct):
    """Its part of a saved state: the state of each component, by name."""

    of: dict[str, Tree]


class Listed(msgspec.Struct):
    """What a snapshot lists of a component: its stages, its source first, and what it reads."""

    plan: Annotated[list[FingerprintEntry], msgspec.Meta(min_length=1)]
    data: Any


@dataclass(frozen=True, kw_only=True)
class Several(Source[T], ABC):
    """A source that reads components.

    Attributes:
      components: by name, in order.
    """

    modes: ClassVar[tuple[Mode, ...]] = ("custom",)
    state_type: ClassVar[Any] = ComponentParts
    listing_type: ClassVar[Any] = dict[str, Listed]

    components: tuple[tuple[str, Plan], ...]

    @property
    def names(self) -> tuple[str, ...]:
        inner = [name for _, plan in self.components for name in (*plan.source.names, *_stages(plan))]
        return (*inner, self.name)

    @property
    def in_flight(self) -> int:
        return sum(LONG_LIST_ITEMS + _in_flight(plan) for _, plan in self.components)

    @property
    def is_remote(self) -> bool:
        return any(plan.source.is_remote for _, plan in self.components)

    def resolved(self, traffic: Traffic | None = None) -> Several[T]:
        return self._with({name: plan.source.resolved(traffic) for name, plan in self.components})

    async def aresolved(self, traffic: Traffic | None = None) -> Several[T]:
        found = {}
        for name, plan in self.components:
            found[name] = (
                await plan.source.aresolved(traffic) if plan.source.is_remote else plan.source.resolved(traffic)
            )
        return self._with(found)

    def check_split(self, mode: Mode, num_shards: int) -> None:
        for _, plan in self.components:
            plan.source.check_split(plan.mode, num_shards)

    def listing(self) -> Any:
        """Return what each component is, stages included, and what it reads."""
        return {
            name: {"plan": [_counted(entry) for entry in _entries(plan)], "data": plan.source.listing()}
            for name, plan in self.components
        }

    def check_listing(self, listing: Json) -> None:
        super().check_listing(listing)
        for name, plan in self._known(listing).items():
            plan.source.check_listing(listing[name]["data"])

    def check_states(self, split: Split, listing: Json) -> None:
        for shard, own in split.own.items():
            check_type(own, self.state_type, f"the state of {self.name!r} in shard {shard}")
        for name, plan in self._known(listing).items():
            for shard, own in split.own.items():
                tree = own["of"].get(name)
                if tree is not None and listing[name]["plan"][0]["name"] not in tree:
                    raise SnapshotError(
                        f"the snapshot is damaged, or was edited: the state of {self.name!r} in shard {shard}: of "
                        f"{name!r}, it has no place in {plan.source.kind}; use an earlier one"
                    )
                check_trees(listing[name]["plan"], tree or {}, f" in shard {shard}")
            plan.source.check_states(_split_of(name, plan, split), listing[name]["data"])

    def check_within(self, split: Split) -> None:
        for name, plan in self.components:
            plan.source.check_within(_split_of(name, plan, split))

    def _known(self, listing: Json) -> dict[str, Plan]:
        """Return the components that a snapshot has a place in: those of the same names and kinds of source."""
        known = known_of(listing)
        return {
            name: plan
            for name, plan in self.components
            if name in known and known[name]["plan"][0]["kind"] == plan.source.kind
        }

    def resumed(self, listing: Json) -> Several[T]:
        known = self._known(listing)
        sources = {
            name: plan.source.resumed(listing[name]["data"]) if name in known else plan.source
            for name, plan in self.components
        }
        return self._with(sources)

    def carry_listing(self, listing: Json, now: Json) -> Json:
        known = self._known(listing)
        carried = {
            name: plan.source.carry_listing(listing[name]["data"], now[name]["data"]) for name, plan in known.items()
        }
        return {name: {**entry, "data": carried.get(name, entry["data"])} for name, entry in now.items()}

    def changes(self, listing: Json, now: Json, split: Split) -> list[Change]:
        """Return how the components of a snapshot differ from those of the same names now; others may come and go."""
        found, known = list[Change](), known_of(listing)
        for name, plan in self.components:
            if name not in known:
                continue
            its, mine = known[name]["plan"], now[name]["plan"]
            if its != mine:
                gone = [f"{name}: - {line_of(entry)}" for entry in its if entry not in mine]
                come = [f"{name}: + {line_of(entry)}" for entry in mine if entry not in its]
                then = f"a state of {name!r} says nothing about another plan: give the new one a name of its own"
                found.append(Change(what=name, lines=(*gone, *come), then=then, possible=False))
                continue
            for change in plan.source.changes(known[name]["data"], now[name]["data"], _split_of(name, plan, split)):
                lines = tuple(f"{name}: {line}" for line in change.lines)
                its_change = replace(change, what=f"{name}.{change.what}", lines=lines, steady=False)
                middle = None
                if change.possible and not change.steady:
                    middle = _in_the_middle(plan, [tree["of"].get(name, {}) for tree in split.own.values()])
                found.append(its_change if middle is None else replace(its_change, possible=False, then=middle))
        return found

    def migrate_state(self, own: Json, listing: Json, now: Json) -> Json:
        of = dict(own["of"])
        for name, plan in self._known(listing).items():
            inner = plan.source.name
            if inner in of.get(name, {}):
                there = plan.source.migrate_state(of[name][inner], listing[name]["data"], now[name]["data"])
                of[name] = {**of[name], inner: there}
        return {**own, "of": of}

    @property
    def changeable(self) -> tuple[str, ...]:  # type: ignore[override]  # each has its own components
        return tuple(f"{name}.{what}" for name, plan in self.components for what in plan.source.changeable)

    def reads_on(self, own: Json) -> str:
        if own is None:
            return "the beginning"
        return "; ".join(
            f"{name}: {plan.source.reads_on(own['of'].get(name, {}).get(plan.source.name))}"
            for name, plan in self.components
        )

    def bound(self, bind: Callable[[Plan], Plan]) -> Source[T]:
        return replace(self, components=tuple((name, bind(plan)) for name, plan in self.components))

    @property
    def plans(self) -> Sequence[Plan]:
        return [plan for _, plan in self.components]

    def __str__(self) -> str:
        return f"{self.kind} of {', '.join(name for name, _ in self.components)}"

    @property
    def made_of(self) -> Sequence[tuple[str, str, Plan]]:
        return [(name, "", plan) for name, plan in self.components]

    def flows(self, site: Site, state: Tree | None) -> dict[str, Flow[Any]]:
        """Return the flow of this shard of each component, at its part of the state; those of new ones begin."""
        own = {} if state is None else state[self.name]["of"]
        errors = {} if state is None else counts_in(state)
        found: dict[str, Flow[Any]] = {}
        for name, plan in self.components:
            at = None if name not in own else {**own[name], **({"errors": errors} if errors else {})}
            found[name] = worker_flow(replace(plan, shard=Shard(num_shards=site.num_shards)), site, at)
        return found

    def outputs(self, part: Part, shard: int, num_shards: int) -> list[float | None]:
        """Return how many items of one shard each component has; None: nobody knows yet."""
        return [_outputs(plan, shard, num_shards) for _, plan in self.components]

    def _with(self, sources: Mapping[str, Source[Any]]) -> Several[T]:
        found = tuple((name, replace(plan, source=sources[name])) for name, plan in self.components)
        return replace(self, components=found)


def named(option: str, pipes: object) -> dict[str, Any]:
    """Return pipelines by name; of a list, by their numbers.

    Raises:
      PlanTypeError: something else.
      PlanError: there are none.
    """
    found = dict(pipes) if isinstance(pipes, Mapping) else None
    if isinstance(pipes, list | tuple):
        found = {str(at): pipe for at, pipe in enumerate(pipes)}
    if found is None or any(not isinstance(name, str) or not name for name in found):
        raise PlanTypeError(
            f"{option} takes pipelines by name, {{'web': pipe, ...}}, or a list of them; got {given(pipes)}"
        )
    if not found:
        raise PlanError(f"{option} needs one pipeline at least")
    return found


def known_of(listing: Json) -> dict[str, Any]:
    """Return what a listing says of components; nothing, if it is another kind of source's."""
    found = listing if isinstance(listing, dict) else {}
    return {name: entry for name, entry in found.items() if isinstance(entry, dict) and "plan" in entry}


def _split_of(name: str, plan: Plan, split: Split) -> Split:
    """Return how a snapshot's run divided the source of a component, and how far it came."""
    trees = {shard: tree["of"].get(name, {}) for shard, tree in split.own.items()}
    return replace(
        split,
        part=replace(plan, shard=Shard(num_shards=split.num_shards)).part((split.epoch,)),
        own={shard: tree[plan.source.name] for shard, tree in trees.items() if plan.source.name in tree},
        passes=split.passes or any(isinstance(stage, Repeat) for stage in (*plan.before, *plan.worker)),
        moved_by=next((f".{stage.kind}()" for stage in plan.before if not isinstance(stage, Take | Skip)), None),
    )


def grown(plan: Plan, before: Json, now: Json) -> bool:
    """Whether a component may have items where it had ended: there are more than there were."""
    split = Split(part=plan.part((0,)), num_shards=1, epoch=0, own={}, moved_by=None, passes=False)
    return any(change.what.rpartition(".")[2] in GROW for change in plan.source.changes(before, now, split))


def _in_the_middle(plan: Plan, trees: Iterable[Tree]) -> str | None:
    """Say which stage of a component will read again what is not as it was; None: none."""
    for tree in trees:
        for stage in plan.worker:
            if stage.name in tree and (again := stage.replay_cost(tree[stage.name])):
                return found_otherwise(stage.name, again)
    return None


def _all(plan: Plan) -> tuple[Stage[Any, Any], ...]:
    return (*plan.before, *plan.worker)


def _stages(plan: Plan) -> list[str]:
    return [stage.name for stage in _all(plan)]


def _entries(plan: Plan) -> list[dict[str, Json]]:
    return [entry for entry in fingerprint(plan) if entry["kind"] not in ("shard", "merge")]


def _counted(entry: dict[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in entry.items() if key != "code"}


def _in_flight(plan: Plan) -> int:
    held, weight = (2 * LIST_ITEMS if plan.source.waits else 0) + plan.source.in_flight, 1
    for stage in plan.worker:
        held += stage.in_flight * weight
        weight *= stage.inputs_per_output
    return held + LIST_ITEMS * (weight - 1)


def _outputs(plan: Plan, shard: int, num_shards: int) -> float | None:
    if plan.before and not plan.source.indexable:
        return None
    items = plan.source.num_outputs(replace(plan, shard=Shard(num_shards=num_shards)).part((0,)), shard, num_shards)
    for stage in plan.worker:
        items = None if items is None else stage.num_outputs(items)
    return items
