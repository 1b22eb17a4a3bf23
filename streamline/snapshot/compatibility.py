"""Whether a snapshot fits a plan: what differs, what of it was accepted, and the snapshot as the plan reads it.

The two fingerprints are aligned section by section (before the shard, the workers', after the merge): first entries of
the same kind and name, then, between those, entries of the same kind at the same place (renamed); the rest was added or
removed. Each stage declares which changes its state survives. A change of the number or order of items is refused if a
later stage is to read items again: it would get others.

An entry of `open(accept=)` is "NAME.what": an option ("batch.size"), "name", "added" or "removed" of a stage, or a
change of the source's data ("read_jsonl.new_files"). Names are those of the plan that is opened; of a removed stage,
its old one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cached_property
from typing import Any, Literal, get_args

from streamline.core.error_policy import counts_in, move_counts
from streamline.core.options import type_and_repr
from streamline.core.state import Json, Tree, part_json, skips_in, with_skips
from streamline.core.text import Entry, line_of, replay_refusal
from streamline.errors import PlanError, PlanTypeError, ResumeError
from streamline.plan.fingerprint import fingerprint, is_changed, sections
from streamline.plan.plan import Plan
from streamline.sharding.ranks import Rank
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.base import Source, Split
from streamline.transforms.base import Stage, stage_class

NewFiles = Literal["refuse", "next_epoch"]
"""What a resume does when files were added since its snapshot."""

SHARD_OPTIONS = ("num_shards", "mode", "drop_remainder", "interleave")


def check_accept(accept: Collection[str], plan: Plan) -> frozenset[str]:
    """Return the entries of `accept`. Raises unless the plan has what each names, whether or not it has changed."""
    if isinstance(accept, str) or not isinstance(accept, Iterable):
        raise PlanTypeError(f'open(accept=) is a list of strings, accept=["batch.size"]; got {accept!r}')
    known, uncounted = _acceptable(plan) if accept else (set(), set())
    for entry in accept:
        if not isinstance(entry, str):
            raise PlanTypeError(f'open(accept=) is a list of strings, accept=["batch.size"]; got {entry!r} in it')
        name, dot, what = entry.rpartition(".")
        if entry in known or (name and what == "removed"):
            continue
        if entry in uncounted:
            raise PlanError(f"open(accept=): {entry!r} is never compared, so it may change as it likes: leave it out")
        raise PlanError(_unknown(entry, name if dot else entry, known))
    return frozenset(accept)


def accepted_new_files(new_files: str, plan: Plan) -> frozenset[str]:
    """Return what `open(new_files=)` accepts in this plan."""
    if new_files not in (options := get_args(NewFiles)):
        wrong, got = (
            (PlanError, repr(new_files)) if isinstance(new_files, str) else (PlanTypeError, type_and_repr(new_files))
        )
        raise wrong(f"open(new_files=) is one of {', '.join(map(repr, options))}, got {got}")
    if new_files == "refuse":
        return frozenset()
    if "new_files" not in plan.source.changeable:
        raise PlanError(f"open(new_files={new_files!r}): {plan.source.kind} reads no list of files: leave it out")
    return frozenset({f"{plan.source.name}.new_files"})


def _acceptable(plan: Plan) -> tuple[set[str], set[str]]:
    """Return the changes that may be accepted in this plan, and options that are never compared."""
    source = plan.source
    known = {f"{source.name}.{what}" for what in ("name", *source.changeable, *source.options())}
    known |= {f"shard.{what}" for what in SHARD_OPTIONS}
    uncounted = {f"{source.name}.{field.name}" for field in fields(source)}
    uncounted |= {f"{plan.merge.name}.{what}" for what in ("kind", "max_skips_per_round", "max_lead")}
    for stage in plan.stages:
        mine = {stage.argument(stage.name, field.name) for field in fields(stage)}
        uncounted |= mine | {stage.argument(stage.name, "executor")}
        if stage.counted:
            refusable = ("name", "added", *stage.options, *stage.accepted_changes, *stage.refuses)
            known |= {stage.argument(stage.name, what) for what in refusable}
    return known, uncounted - known


def _unknown(entry: str, name: str, known: set[str]) -> str:
    of_name = sorted(one for one in known if one.rpartition(".")[0] == name)
    close = get_close_matches(entry, known, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else ""
    if of_name:
        return f"open(accept=): {entry!r} is nothing that {name!r} has{hint} (it has {', '.join(of_name)})"
    names = sorted({one.rpartition(".")[0] for one in known})
    return f"open(accept=): no part of this plan is called {name!r}{hint} (there are {', '.join(names)})"


def check_snapshot(option: str, snapshot: object) -> None:
    if isinstance(snapshot, Snapshot):
        return
    way = "Snapshot.from_json() makes one of JSON"
    if isinstance(snapshot, str | os.PathLike):
        way = f"load it: sl.Snapshot.load({os.fspath(snapshot)!r})"
    raise PlanTypeError(f"{option} is a Snapshot, got {type_and_repr(snapshot)}: {way}")


@dataclass(frozen=True, kw_only=True)
class Difference:
    argument: str  # how `open(accept=)` names it
    then: str  # what comes out if it is accepted; or why it can't be, and the way out
    possible: bool  # whether it can be accepted
    lines: tuple[str, ...] = ()  # of the data, what changed; what changed in the plan is shown by the pairs


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan and a snapshot of one rank, side by side."""

    plan: Plan  # over the data that the snapshot lists
    snapshot: Snapshot  # as this plan reads it: states by the plan's names, without those of stages that are gone
    pairs: tuple[Pair, ...]  # the entries of both fingerprints
    differences: tuple[Difference, ...]  # all, accepted or not
    open: tuple[Difference, ...]  # those that were not accepted, or can't be
    changed_code: tuple[str, ...] = ()  # functions that are called as before, and do something else
    unsteady: tuple[str, ...] = ()  # of those, which may change what a stage downstream reads again, as sentences


def fit_plan(plan: Plan, snapshot: Snapshot, now: Json, accept: Collection[str] = ()) -> Fit:
    """Compare a plan, its source resolved, with a rank's snapshot; `now`: today's listing, `accept`: as checked."""
    if not snapshot.fingerprint or snapshot.fingerprint[0]["kind"] != plan.source.kind:
        return _of_another_source(plan, snapshot, tuple(pair_entries(snapshot.fingerprint, fingerprint(plan))))
    plan.source.check_listing(snapshot.listing)
    going_on = replace(plan, source=plan.source.resumed(snapshot.listing))
    ours = fingerprint(going_on)
    pairs = tuple(pair_entries(snapshot.fingerprint, ours))
    comparison = _Comparison(going_on, snapshot, pairs)
    plan.source.check_states(comparison.split, snapshot.listing)
    differences = [*comparison.of_data(plan, now), *comparison.of_plan()]
    if not differences:
        going_on.source.check_within(comparison.split)
    names = {pair.its["name"]: pair.mine["name"] if pair.mine else None for pair in pairs if pair.its}
    listing = plan.source.carry_listing(snapshot.listing, now)
    code = list(_changed_code(pairs))
    renamed = _renamed(replace(snapshot, fingerprint=ours, listing=listing), names, going_on)
    return Fit(
        plan=going_on,
        snapshot=_over_todays_data(renamed, plan.source, snapshot.listing, now),
        pairs=pairs,
        differences=tuple(differences),
        open=tuple(one for one in differences if not one.possible or one.argument not in accept),
        changed_code=tuple(f"{pairs[at].name} ({key}={value})" for at, key, value in code),
        unsteady=tuple(comparison.of_code((at, key) for at, key, _ in code)),
    )


def _of_another_source(plan: Plan, snapshot: Snapshot, pairs: tuple[Pair, ...]) -> Fit:
    """Return the fit of a snapshot whose source is of another kind, which can't be compared further."""
    kind = (pairs[0].its or {}).get("kind", "no source")
    then = (
        f"items come from elsewhere, the snapshot is of {kind} and this plan reads {plan.source.kind}: open the plan "
        "that it was taken of, or begin anew, without resume="
    )
    other = Difference(argument=f"{plan.source.name}.kind", then=then, possible=False)
    return Fit(plan=plan, snapshot=snapshot, pairs=pairs, differences=(other,), open=(other,))


def refusal(fit: Fit) -> str:
    """Say what differs, and by which argument it can be accepted; or, if something can't be, only why."""
    lines = []
    if any(pair.changes for pair in fit.pairs):
        lines.append("the snapshot was taken of another plan (- the snapshot's, + this one's):")
        for pair in fit.pairs:
            signs = (("-", pair.its), ("+", pair.mine)) if pair.changes else ((" ", pair.mine),)
            lines += [f"  {sign} {line_of(entry)}" for sign, entry in signs if entry is not None]
    if data := [line for one in fit.differences for line in one.lines]:
        lines += ["the data changed since the snapshot:", *(f"    {line}" for line in data)]
    if cannot := {one.argument: one.then for one in fit.open if not one.possible}:
        lines += ["this can't:", *(f"    {argument}: {then}" for argument, then in cannot.items())]
    elif can := {one.argument: one.then for one in fit.open}:
        lines += ["this can be accepted:", *(f'    accept=["{argument}"]: {then}' for argument, then in can.items())]
        wanted = list(dict.fromkeys(one.argument for one in fit.differences if one.possible))
        if len(wanted) > 1:
            lines.append(f"all that can be: accept={json.dumps(wanted)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Comparison:
    """What has changed, and what that means for the states of the snapshot."""

    plan: Plan
    snapshot: Snapshot
    pairs: tuple[Pair, ...]

    @cached_property
    def split(self) -> Split:
        """How the snapshot's run split the source, and its position in each shard."""
        plan, snapshot = self.plan, self.snapshot
        name = self.pairs[0].its["name"] if self.pairs[0].its else plan.source.name
        shard = next((pair.its for pair in self.pairs if pair.its and pair.its["kind"] == "shard"), {})
        interleave = (shard.get("options") or {}).get("interleave", 1)
        return Split(
            part=replace(plan.part((snapshot.epoch,)), interleave=interleave),
            num_shards=plan.shard.num_shards,
            epoch=snapshot.epoch,
            own={at: tree.get(name) for at, tree in zip(snapshot.shards, snapshot.worker_states, strict=True)},
            moved_by=plan.moved_by(),
            passes=any(stage.repeats for stage in (*plan.before, *plan.worker)),
        )

    def of_data(self, plan: Plan, now: Json) -> Iterator[Difference]:
        for change in plan.source.changes(self.snapshot.listing, now, self.split):
            middle = None if change.steady or not change.possible else self._in_the_middle(0)
            yield Difference(
                argument=f"{plan.source.name}.{change.what}",
                then=middle or change.then,
                possible=change.possible and middle is None,
                lines=change.lines,
            )

    def of_plan(self) -> Iterator[Difference]:
        for at, pair in enumerate(self.pairs):
            for what in pair.changes:
                yield self._of(at, pair, what)

    def of_code(self, functions: Iterable[tuple[int, str]]) -> Iterator[str]:
        """Yield what functions (pair number, option) that were changed may do to stages that replay."""
        for at, key in functions:
            pair = self.pairs[at]
            if key not in pair.stage.order_preserving and (found := self._first_replay(at)):
                yield (
                    f"{found[0]!r} downstream of {pair.name} {found[1]}: where the new code gives other items there, "
                    "or another number of them, some are lost or come twice"
                )

    def _of(self, at: int, pair: Pair, what: str) -> Difference:
        name = pair.name if what != "removed" or pair.its is None else pair.its["name"]
        argument = pair.stage.argument(name, what)
        then = self._consequence(pair, what)
        if then is None:
            return Difference(argument=argument, then=self._why_not(pair, what), possible=False)
        keeps_order = what == "name" or not pair.is_stage or what in pair.stage.order_preserving
        why = None if keeps_order else self._in_the_middle(at)
        return Difference(argument=argument, then=why or then, possible=why is None)

    def _consequence(self, pair: Pair, what: str) -> str | None:
        """Return what follows if a change is accepted; None: it can't be."""
        if what == "name":
            return "its state goes by the new name"
        if not pair.is_stage:
            interleaved = self.plan.mode == "interleaved"
            return "the remainder is treated as it says now" if interleaved and what == "drop_remainder" else None
        if pair.section == 0 and not self._survives_before(pair.name, what):
            return None
        if what == "removed" and self._held_items(pair) is not None:
            return None
        return pair.stage.accepted_changes.get(what)

    def _survives_before(self, name: str, what: str) -> bool:
        """Whether a change before the shard leaves every delivered item at its place."""
        if what not in ("count", "times"):
            return False
        first = 1 + [stage.name for stage in self.plan.before].index(name)
        stays = self.plan.mode == "interleaved" and self.plan.moved_by(first) is None
        return stays or not self.plan.source.indexable

    def _why_not(self, pair: Pair, what: str) -> str:
        if what == "removed" and pair.section and (held := self._held_items(pair)):
            return f"at this snapshot it {held}: finish the epoch with it, or begin anew"
        if not pair.is_stage:
            return _NOT_SHARD.get(what, "items come from elsewhere: finish the epoch as it was, or begin anew")
        if (reason := pair.stage.refuses.get(what)) is not None:
            return reason
        if pair.section == 0:
            return "before the shard it decides which item is where: finish the epoch as it was, or begin anew"
        return "a state says nothing about another one: finish the epoch as it was, or begin anew, without resume="

    def _held_items(self, pair: Pair) -> str | None:
        """Say which items would be lost with a stage that was removed; None: none."""
        return next(filter(None, map(pair.stage.held_items, self._parts(pair, pair.stage))), None)

    def _trees(self, pair: Pair) -> list[Tree]:
        return [self.snapshot.stages] if pair.section == 2 else self.snapshot.worker_states

    def _parts(self, pair: Pair, stage: type[Stage[Any, Any]]) -> list[Any]:
        """Return the stage's part of each state that has one."""
        name = pair.its["name"] if pair.its else None
        return [stage.read_part(tree[name]) for tree in self._trees(pair) if name in tree]

    def _in_the_middle(self, at: int) -> str | None:
        """Say which stage after number `at` will read again something that the change alters; None: none."""
        found = self._first_replay(at)
        return None if found is None else replay_refusal(*found)

    def _first_replay(self, at: int) -> tuple[str, str] | None:
        """Return the first stage after number `at` that replays, and what it does again."""
        for pair in self.pairs[at + 1 :]:
            if again := next(filter(None, map(pair.its_stage.replay_cost, self._parts(pair, pair.its_stage))), None):
                return str((pair.its or {}).get("name")), again
        return None


_NOT_SHARD = {
    "num_shards": "every item would be in another shard: keep the number of shards, ranks and processes may change "
    "without it",
    "mode": "every item would be in another shard: finish the epoch as it was, or begin anew",
    "interleave": "a state says where each of its files stands: finish the epoch as it was, or begin anew",
    "drop_remainder": "the blocks of the shards would move: finish the epoch as it was, or begin anew",
}


def _renamed(snapshot: Snapshot, names: dict[str, str | None], plan: Plan) -> Snapshot:
    """Return a snapshot with the states under other names; without those renamed to None.

    Skips stay under the old names, as in dead letters. A stage moved over the merge takes its count along, between the
    rank and the worker of the same number.
    """
    own: dict[str, Any] = dict(snapshot.state[snapshot.merge])
    own["workers"] = {shard: _renamed_tree(tree, names) for shard, tree in own["workers"].items()}
    after = _renamed_tree(snapshot.stages, names)
    if (worker := own["workers"].get(str(snapshot.rank))) is not None:
        worker, after = move_counts(worker, after, {stage.name for stage in plan.after})
        after, worker = move_counts(after, worker, plan.worker_names)
        own["workers"][str(snapshot.rank)] = worker
    return replace(snapshot, state=with_skips({snapshot.merge: own, **after}, skips_in(after)))


def _over_todays_data(snapshot: Snapshot, source: Source[Any], listing: Json, now: Json) -> Snapshot:
    """Return a snapshot with the source's part of each state adapted to changed data."""
    if listing == now:
        return snapshot
    name, own = source.name, snapshot.state[snapshot.merge]
    workers = dict(own["workers"])
    for shard, tree in workers.items():
        if name in tree:
            workers[shard] = {**tree, name: source.migrate_state(tree[name], listing, now)}
    return replace(snapshot, state={**snapshot.state, snapshot.merge: {**own, "workers": workers}})


def _renamed_tree(tree: Tree, names: dict[str, str | None]) -> Tree:
    return {new: own for name, own in tree.items() if (new := names.get(name, name)) is not None}


def _changed_code(pairs: tuple[Pair, ...]) -> Iterator[tuple[int, str, str]]:
    """Yield the number of the pair, the option, and the function's name."""
    for at, pair in enumerate(pairs):
        if pair.mine is None or pair.its is None:
            continue
        options, others = pair.mine["options"], pair.its.get("options") or {}
        mine, its = pair.mine.get("code") or {}, pair.its.get("code") or {}
        for key in mine.keys() & its.keys():
            if is_changed(mine[key], its[key]) and options.get(key) == others.get(key):
                yield at, key, options.get(key, "…")


# Another number of ranks ----------------------------------------------------------------------------------------------

RANK_ENTRIES = ("errors", "ends")
"""Entries of a rank's state that are no stage's: skipped items, and the agreement on ends."""


def resharded(job: Snapshot, found: Rank) -> Snapshot:
    """Return a rank's part of a job's snapshot that was taken on another number of ranks. Pure.

    The number of shards stays, and so does what was consumed of each. The stages after the merge are a rank's own: if
    one holds or counts items, or the source is live, the change is refused with a `ResumeError`.
    """
    parts = job.parts or (job,)
    if any(part.journal is not None for part in parts):
        raise ResumeError(_refusal(job, found, "a feed's items that are on their way are its own rank's"))
    if any(part.state[part.merge].get("replay") for part in parts):  # `strict_to` says what any strict merge does
        raise ResumeError(
            _refusal(job, found, f"{job.merge!r} is to repeat choices that were made between the shards of a rank")
        )
    produced = {shard: count for part in parts for shard, count in zip(part.shards, part.produced, strict=True)}
    workers = {shard: tree for part in parts for shard, tree in zip(part.shards, part.worker_states, strict=True)}
    shards = found.shards(job.num_shards)
    own: dict[str, Json] = {
        "next_worker": min(range(len(shards)), key=lambda at: (produced[shards[at]], at), default=0),
        "produced": {str(shard): produced[shard] for shard in shards},
        "replay": [],
        "workers": {str(shard): workers[shard] for shard in shards},
    }
    after = dict(_after_merge(job, parts, found))
    skipped = Counter[str]()
    for part in parts if found.rank == 0 else ():
        skipped.update(counts_in(part.state))
    state = with_skips({job.merge: own, **after}, skipped)
    return replace(parts[0], rank=found.rank, world_size=found.world_size, state=state, parts=(), keepers=())


def _after_merge(job: Snapshot, parts: tuple[Snapshot, ...], found: Rank) -> Iterator[tuple[str, Json]]:
    """Yield the state of each stage after the merge, by name."""
    entries = {entry.get("name"): entry for entry in sections(job.fingerprint)[2]}
    for name in dict.fromkeys(name for part in parts for name in part.stages if name not in RANK_ENTRIES):
        entry = entries.get(name, {})
        stage = stage_class(str(entry.get("kind")), entry.get("options") or {})
        try:
            own = stage.reshard([stage.read_part(part.state.get(name)) for part in parts])
        except ResumeError as why:
            raise ResumeError(_refusal(job, found, f"{name!r}, after the merge, {why}")) from None
        if own is not None:
            yield name, part_json(own)


def _refusal(job: Snapshot, found: Rank, why: str) -> str:
    return (
        f"the snapshot is of {job.world_size} ranks, and there are {found.world_size} ({found.found_in}); {why}: "
        f"resume with world_size={job.world_size}"
    )


# Two fingerprints side by side: which stage of the one is which of the other ------------------------------------------
Two = tuple[Entry | None, Entry | None]


@dataclass(frozen=True)
class Pair:
    """An entry of the snapshot's fingerprint and the matching one of the plan; one may be missing."""

    its: Entry | None
    mine: Entry | None
    section: int  # 0 before the shard, 1 the workers', 2 after the merge
    source: bool = False

    @property
    def name(self) -> str:
        """The current name."""
        return str((self.mine or self.its or {}).get("name"))

    @property
    def is_stage(self) -> bool:
        return not self.source and (self.mine or self.its or {}).get("kind") != "shard"

    @property
    def stage(self) -> type[Stage[Any, Any]]:
        """The class of the stage in the plan."""
        return _class_of(self.mine or self.its or {})

    @property
    def its_stage(self) -> type[Stage[Any, Any]]:
        """The class of the stage in the snapshot."""
        return _class_of(self.its or self.mine or {})

    @property
    def changes(self) -> list[str]:
        """ "added", "removed", or "name" and the changed options."""
        if self.its is None or self.mine is None:
            return ["added" if self.its is None else "removed"]
        if self.its.get("kind") != self.mine.get("kind"):
            return ["kind"]  # names and options of one say nothing about the other
        name = ["name"] * (self.its.get("name") != self.mine.get("name"))
        theirs, ours = self.its.get("options") or {}, self.mine.get("options") or {}
        missing = object()
        return name + [key for key in {**theirs, **ours} if theirs.get(key, missing) != ours.get(key, missing)]


def pair_entries(theirs: Sequence[Entry], ours: Sequence[Entry]) -> Iterator[Pair]:
    """Yield pairs of entries, in order; the sources are always the first pair."""
    yield Pair(theirs[0] if theirs else None, ours[0], 0, source=True)
    for section, (its, mine) in enumerate(zip(sections(theirs), sections(ours), strict=True)):
        yield from (Pair(*two, section) for two in _align(its, mine, _same, _kind))


def _align(theirs: list[Entry], ours: list[Entry], *keys: Callable[[Entry], Any]) -> Iterator[Two]:
    """Pair entries of the same first key; those between, by the next ones; the rest have no partner."""
    if not keys:
        yield from ((its, None) for its in theirs)
        yield from ((None, mine) for mine in ours)
        return
    key, *others = keys
    of_theirs, of_ours = list(map(key, theirs)), list(map(key, ours))
    if of_theirs == of_ours:
        yield from zip(theirs, ours, strict=True)
        return
    matcher = SequenceMatcher(None, of_theirs, of_ours, autojunk=False)
    for tag, first, stop, our_first, our_stop in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(theirs[first:stop], ours[our_first:our_stop], strict=True)
        else:
            yield from _align(theirs[first:stop], ours[our_first:our_stop], *others)


def _same(entry: Entry) -> Any:
    return (*_kind(entry), entry.get("name"))


def _kind(entry: Entry) -> Any:
    return entry.get("kind"), "window" in (entry.get("options") or {})


def _class_of(entry: Entry) -> type[Stage[Any, Any]]:
    return stage_class(str(entry.get("kind")), entry.get("options") or {})
