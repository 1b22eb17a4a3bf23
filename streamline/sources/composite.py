"""Sources whose items come from several pipelines: what a mixture and a zip have in common.

Each component is a plan without shard and merge. A worker opens its shard of each of them, with its stages. Stages and
sources are named "component/name" here, so that two components may have stages of the same name. State: the source's
own part, and each component's, by name.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeAlias, TypeVar, cast

import msgspec

from streamline.core.capacity import LONG_LIST_ITEMS
from streamline.core.choices import Branch
from streamline.core.flow import Flow, Site
from streamline.core.meters import Traffic
from streamline.core.options import type_and_repr
from streamline.core.state import Json, Reference, State, Tally, Tree, skips_in, with_skips
from streamline.core.state_types import FingerprintEntry, check_type
from streamline.core.text import line_of
from streamline.errors import PlanError, PlanTypeError, SnapshotError, printable
from streamline.io.storage.base import FoundObject
from streamline.sources.base import Change, Mode, Part, Source, Split

T = TypeVar("T")

GROWING_CHANGES = ("length", "changed_files")
"""Changes of data after which there may be more items."""


class SeveralState(State):
    """The states of several flows, `parts` by name, and the source's own part."""

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
        skips = {stage: count for tree in trees.values() for stage, count in skips_in(tree).items()}
        parts = {name: with_skips(tree, {}) for name, tree in trees.items()}
        return with_skips({self.name: {**self.own_until(later), "of": parts}}, skips)

    def own_until(self, later: Any) -> Tree:
        """Return the source's own part, with what it takes to reach a later state in the same way."""
        return self.own

    def tally(self, found: Tally) -> None:
        for part in self.parts.values():
            part.get().tally(found)

    def where(self) -> str:
        return "; ".join(f"{name}: {part.get().where()}" for name, part in self.parts.items())

    def forks(self) -> Iterator[Branch]:
        for part in self.parts.values():
            yield from part.get().forks()


PassOf: TypeAlias = "Callable[[State], int]"
"""The pass over a component's data that its state is in, from 0 on."""


class Component(Protocol):
    """One of the pipelines: a plan without shard and merge. Frozen, pickles.

    Attributes:
      plan: for what is above sources: pictures, cache keys, the oracle.
      entries: of its fingerprint.
      mode: how its source is split.
      in_flight: the most items that it holds.
      repeats: whether a pass follows another.
      moved_by: a stage before the shard that places items by their number; None: there is none.
      misalignment: why its shards may hold other items than those of an equal split; None: they don't.
    """

    @property
    def plan(self) -> Any: ...

    @property
    def source(self) -> Source[Any]: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def entries(self) -> list[dict[str, Json]]: ...

    @property
    def mode(self) -> Mode: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def repeats(self) -> bool: ...

    @property
    def moved_by(self) -> str | None: ...

    @property
    def misalignment(self) -> str | None: ...

    def with_source(self, source: Source[Any]) -> Self: ...

    def within(self, component: str) -> Self:
        """See `Source.within`."""

    def map_plans(self, bind: Callable[[Any], Any]) -> Self:
        """Return it with its plan changed by `bind`."""

    def part(self, num_shards: int, epoch: int) -> Part:
        """Return which part of its source is read."""

    def open_shard(self, site: Site, state: Tree | None) -> Flow[Any]: ...

    def num_outputs(self, shard: int, num_shards: int) -> float | None:
        """Return how many items a shard of it has; None: not known."""

    def check_state(self, entries: list[dict[str, Json]], tree: Tree, where: str) -> None:
        """Raise a SnapshotError unless a state is of the stages of these entries."""

    def reads_again(self, tree: Tree) -> str | None:
        """Return the stage that reads changed data again from this state on; None: none does."""

    def pass_of(self, site: Site) -> PassOf | None:
        """Return the function that gives the pass of a state; None: it isn't repeated."""


class ComponentParts(msgspec.Struct):
    """Its part of a saved state: the state of each component, by name."""

    of: dict[str, Tree]


class Listed(msgspec.Struct):
    """What a snapshot lists of a component: its stages, its source first, and what it reads."""

    plan: Annotated[list[FingerprintEntry], msgspec.Meta(min_length=1)]
    data: Any


@dataclass(frozen=True, kw_only=True)
class Several(Source[T], ABC):
    """A source that reads components, by name, in order."""

    modes: ClassVar[tuple[Mode, ...]] = ("custom",)
    state_type: ClassVar[Any] = ComponentParts
    listing_type: ClassVar[Any] = dict[str, Listed]

    components: tuple[tuple[str, Component], ...]

    @property
    def names(self) -> tuple[str, ...]:
        inner = [name for _, component in self.components for name in (*component.source.names, *component.names)]
        return (*inner, self.name)

    def within(self, component: str) -> Self:
        found = tuple((name, part.within(component)) for name, part in self.components)
        return replace(super().within(component), components=found)

    @property
    def in_flight(self) -> int:
        return sum(LONG_LIST_ITEMS + component.in_flight for _, component in self.components)

    @property
    def is_remote(self) -> bool:
        return any(component.source.is_remote for _, component in self.components)

    @property
    def local_files(self) -> tuple[FoundObject, ...]:
        return tuple(found for _, component in self.components for found in component.source.local_files)

    def resolved(self, traffic: Traffic | None = None) -> Several[T]:
        return self._with({name: component.source.resolved(traffic) for name, component in self.components})

    async def aresolved(self, traffic: Traffic | None = None) -> Several[T]:
        sources = {name: component.source for name, component in self.components}
        found = {
            name: await source.aresolved(traffic) if source.is_remote else source.resolved(traffic)
            for name, source in sources.items()
        }
        return self._with(found)

    def check_split(self, mode: Mode, num_shards: int) -> None:
        for _, component in self.components:
            component.source.check_split(component.mode, num_shards)

    def listing(self) -> Any:
        """Return what each component is, stages included, and what it reads."""
        found: dict[str, Any] = {}
        for name, component in self.components:
            plan = [{key: value for key, value in entry.items() if key != "code"} for entry in component.entries]
            found[name] = {"plan": plan, "data": component.source.listing()}
        return found

    def check_listing(self, listing: Json) -> None:
        super().check_listing(listing)
        for name, component in self._known_components(listing).items():
            component.source.check_listing(listing[name]["data"])

    def check_states(self, split: Split, listing: Json) -> None:
        for shard, own in split.own.items():
            check_type(own, self.state_type, f"the state of {self.name!r} in shard {shard}")
        for name, component in self._known_components(listing).items():
            for shard, own in split.own.items():
                tree = own["of"].get(name)
                if tree is not None and listing[name]["plan"][0]["name"] not in tree:
                    raise SnapshotError(
                        f"the snapshot is damaged, or was edited: the state of {self.name!r} in shard {shard}: of "
                        f"{name!r}, it has no place in {component.source.kind}; use an earlier one"
                    )
                component.check_state(listing[name]["plan"], tree or {}, f" in shard {shard}")
            component.source.check_states(_split_of(name, component, split), listing[name]["data"])

    def check_within(self, split: Split) -> None:
        for name, component in self.components:
            component.source.check_within(_split_of(name, component, split))

    def _known_components(self, listing: Json) -> dict[str, Component]:
        """Return the components that a snapshot has a state of: those of the same names and kinds of source."""
        known = _listed_in(listing)
        return {
            name: component
            for name, component in self.components
            if name in known and known[name]["plan"][0]["kind"] == component.source.kind
        }

    def resumed(self, listing: Json) -> Several[T]:
        known = self._known_components(listing)
        sources = {
            name: component.source.resumed(listing[name]["data"]) if name in known else component.source
            for name, component in self.components
        }
        return self._with(sources)

    def carry_listing(self, listing: Json, now: Json) -> Json:
        known = self._known_components(listing)
        carried = {
            name: component.source.carry_listing(listing[name]["data"], now[name]["data"])
            for name, component in known.items()
        }
        return {name: {**entry, "data": carried.get(name, entry["data"])} for name, entry in now.items()}

    def changes(self, listing: Json, now: Json, split: Split) -> list[Change]:
        """Return how the components of a snapshot differ from those of the same names now; others may come and go."""
        found, known = list[Change](), _listed_in(listing)
        for name, component in self.components:
            if name not in known:
                continue
            its, mine = known[name]["plan"], now[name]["plan"]
            if its != mine:
                gone = [f"{name}: - {line_of(entry)}" for entry in its if entry not in mine]
                come = [f"{name}: + {line_of(entry)}" for entry in mine if entry not in its]
                then = f"a state of {name!r} says nothing about another plan: give the new one a name of its own"
                found.append(Change(what=name, lines=(*gone, *come), then=then, possible=False))
                continue
            for change in component.source.changes(
                known[name]["data"], now[name]["data"], _split_of(name, component, split)
            ):
                lines = tuple(f"{name}: {line}" for line in change.lines)
                its_change = replace(change, what=f"{name}.{change.what}", lines=lines, steady=False)
                middle = None
                if change.possible and not change.steady:
                    trees = (tree["of"].get(name, {}) for tree in split.own.values())
                    middle = next(filter(None, map(component.reads_again, trees)), None)
                found.append(its_change if middle is None else replace(its_change, possible=False, then=middle))
        return found

    def migrate_state(self, own: Json, listing: Json, now: Json) -> Json:
        of = dict(own["of"])
        for name, component in self._known_components(listing).items():
            inner = component.source.name
            if inner in of.get(name, {}):
                there = component.source.migrate_state(of[name][inner], listing[name]["data"], now[name]["data"])
                of[name] = {**of[name], inner: there}
        return {**own, "of": of}

    @property
    def changeable(self) -> tuple[str, ...]:  # type: ignore[override]  # each has its own components
        return tuple(f"{name}.{what}" for name, component in self.components for what in component.source.changeable)

    def reads_on(self, own: Json) -> str:
        if own is None:
            return "the beginning"
        return "; ".join(
            f"{name}: {component.source.reads_on(own['of'].get(name, {}).get(component.source.name))}"
            for name, component in self.components
        )

    def map_plans(self, bind: Callable[[Any], Any]) -> Source[T]:
        return replace(self, components=tuple((name, component.map_plans(bind)) for name, component in self.components))

    def __str__(self) -> str:
        return printable(f"{self.kind} of {', '.join(name for name, _ in self.components)}")

    @property
    def made_of(self) -> Sequence[tuple[str, str, Any]]:
        return [(name, "", component.plan) for name, component in self.components]

    def flows(self, site: Site, state: Tree | None) -> dict[str, Flow[Any]]:
        """Return the flow of this shard of each component, at its part of the state; those of new ones begin."""
        own = {} if state is None else state[self.name]["of"]
        skips = {} if state is None else skips_in(state)
        found: dict[str, Flow[Any]] = {}
        for name, component in self.components:
            at = with_skips(own[name], skips) if name in own else None
            found[name] = component.open_shard(site, at)
        return found

    def outputs(self, part: Part, shard: int, num_shards: int) -> list[float | None]:
        """Return how many items of one shard each component has; None: unknown yet."""
        return [component.num_outputs(shard, num_shards) for _, component in self.components]

    def _with(self, sources: Mapping[str, Source[Any]]) -> Several[T]:
        found = tuple((name, component.with_source(sources[name])) for name, component in self.components)
        return replace(self, components=found)


def named(option: str, pipes: object) -> dict[str, Any]:
    """Return pipelines by name; of a list, by their numbers."""
    found = dict(pipes) if isinstance(pipes, Mapping) else None
    if isinstance(pipes, list | tuple):
        found = {str(at): pipe for at, pipe in enumerate(pipes)}
    if found is None or any(not isinstance(name, str) or not name for name in found):
        raise PlanTypeError(
            f"{option} takes pipelines by name, {{'web': pipe, ...}}, or a list of them; got {type_and_repr(pipes)}"
        )
    if not found:
        raise PlanError(f"{option} needs one pipeline at least")
    return found


def _listed_in(listing: Json) -> dict[str, Any]:
    """Return what a listing says of components; nothing, if it is of another kind of source."""
    found = listing if isinstance(listing, dict) else {}
    return {name: entry for name, entry in found.items() if isinstance(entry, dict) and "plan" in entry}


def _split_of(name: str, component: Component, split: Split) -> Split:
    """Return how a snapshot's run split the source of a component, and how far each shard was read."""
    trees = {shard: tree["of"].get(name, {}) for shard, tree in split.own.items()}
    source = component.source.name
    return replace(
        split,
        part=component.part(split.num_shards, split.epoch),
        own={shard: tree[source] for shard, tree in trees.items() if source in tree},
        passes=split.passes or component.repeats,
        moved_by=component.moved_by,
    )


def grown(component: Component, before: Json, now: Json) -> bool:
    """Whether a component that had ended may have more items now."""
    split = Split(part=component.part(1, 0), num_shards=1, epoch=0, own={}, moved_by=None, passes=False)
    return any(
        change.what.rpartition(".")[2] in GROWING_CHANGES for change in component.source.changes(before, now, split)
    )
