"""What may stand where in a plan; each refusal names the stage and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from streamline.errors import PlanError, PlanTypeError
from streamline.sources.base import Mode, Source
from streamline.transforms.base import Stage
from streamline.transforms.cache import Cache
from streamline.transforms.custom import Declared, Through
from streamline.transforms.limit import Skip, Take
from streamline.transforms.repeat import Repeat
from streamline.transforms.shuffle import IndexShuffle, ShuffleFiles

__all__ = [
    "INDEX_OPS",
    "RESERVED",
    "check_before",
    "check_choices",
    "check_last",
    "check_mode",
    "check_names",
    "check_placed",
    "check_shared",
]


AnyStage = Stage[Any, Any]


INDEX_OPS = (IndexShuffle, Take, Skip, Repeat)
"""What acts on the index of a source."""


RESERVED = ("shard", "merge", "errors", "ends")
"""Names under which a plan keeps states of its own."""


def check_names(names: Sequence[object]) -> None:
    """Insist on names that keep the states of all parts of a plan apart."""
    seen: set[object] = set(RESERVED)
    for name in names:
        if not isinstance(name, str) or not name:
            raise PlanTypeError(f"a name is a string that isn't empty, got {name!r}")
        if name in RESERVED:
            raise PlanError(f"{name!r} is a name that the pipeline uses itself: give another name=")
        if name in seen:
            raise PlanError(f"there are two parts called {name!r}: names keep states apart, give one another name=")
        seen.add(name)


def check_mode(source: Source[Any], mode: Mode, drop_remainder: bool) -> None:
    """Insist on a mode that the source has."""
    if mode not in source.modes:
        raise PlanError(f".shard(mode=) of {source.kind} is one of {', '.join(source.modes)}; got {mode!r}")
    if mode == "custom" and drop_remainder:
        raise PlanError(f".shard(drop_remainder=True): {source} splits itself, so leave out the remainder in there")


def check_interleave(source: Source[Any], mode: Mode, interleave: int) -> None:
    """Insist that what is read in turn is whole files of a list."""
    if interleave == 1:
        return
    if not source.listed:
        raise PlanError(f".shard(interleave={interleave}) reads files in turn, and {source.kind} has no list of files")
    if mode != "file":
        raise PlanError(
            f'.shard(interleave={interleave}) reads whole files in turn, which is mode="file"; got mode={mode!r}: '
            "leave out one of the two"
        )


def check_before(source: Source[Any], before: Sequence[AnyStage], mode: Mode, num_shards: int) -> None:
    """Insist that what stands before the shard acts on the index, on the list of files, or on a replicated stream."""
    for stage in before:
        if mode == "replicated":
            allowed: tuple[type, ...] = (Take, Skip, Repeat, ShuffleFiles) if source.listed else (Take, Skip, Repeat)
        elif source.indexable:
            allowed = INDEX_OPS
        elif mode == "shared":
            allowed = ()
        else:
            allowed = (ShuffleFiles, Repeat)
        if isinstance(stage, allowed):
            continue
        if isinstance(stage, IndexShuffle | ShuffleFiles):
            raise PlanError(_misplaced(stage, source))
        if isinstance(stage, Take | Skip):
            raise PlanError(
                f"`.{stage.kind}` before `.shard` needs to know which items there are, and {source.kind} doesn't "
                "before it has read them: move it behind (there it counts per shard), or behind .merge"
            )
        raise PlanError(
            f"`.{stage.kind}` before `.shard({num_shards})` would run {num_shards} times per item: move it behind"
        )


def check_shared(source: Source[Any], stages: Sequence[AnyStage], *, drop_remainder: bool) -> None:
    """Refuse what needs a live source twice, or to its end; `stages` are all of the plan's."""
    if drop_remainder:
        raise PlanError(
            f".shard(drop_remainder=True) needs to know how many items there are, and {source.kind} doesn't"
        )
    for stage in stages:
        if isinstance(stage, Repeat):
            raise PlanError(
                f".repeat goes through its source anew, and {source.kind} can be read once: reconnect in the stream "
                "itself"
            )
        if isinstance(stage, Cache):
            raise PlanError(f".cache keeps a pass for the next one, and {source.kind} has only one: leave it out")
        if isinstance(stage, Through) and not isinstance(stage.fn, Declared):
            raise PlanError(
                f"a resume would run {stage.name} from its start, on items of {source.kind} that are gone by then: "
                "declare what it remembers with @sl.stage(state=dict), or @sl.stage(stateless=True)"
            )


def check_placed(source: Source[Any], stages: Sequence[AnyStage]) -> None:
    """Insist that nothing behind the shard acts on the index or on the list of files."""
    for stage in stages:
        if isinstance(stage, IndexShuffle | ShuffleFiles):
            raise PlanError(_misplaced(stage, source))


def _misplaced(stage: AnyStage, source: Source[Any]) -> str:
    if isinstance(stage, ShuffleFiles):
        if not source.listed:
            return f".shuffle_files permutes a list of files, and {source.kind} has none"
        return ".shuffle_files permutes the list of files: put it right behind the source, before .shard"
    if not source.indexable:
        return (
            f".shuffle() permutes a whole index, and {source.kind} has none: use .shuffle(window=n) behind .shard"
            f"{', and .shuffle_files() before it' if source.listed else ''}"
        )
    return (
        ".shuffle() permutes the whole index: put it before .shard, or give it a window= to permute items as they pass"
    )


def check_last(stages: Sequence[AnyStage]) -> None:
    """Insist that nothing stands behind a stage that is the last one."""
    for stage, behind in pairwise(stages):
        if stage.last:
            raise PlanError(
                f".{stage.kind} is a plan's last stage, and .{behind.kind} stands behind it: what works on the host's "
                f"memory goes before .{stage.kind}, what works on the device into the loop"
            )


def check_choices(stages: Sequence[AnyStage], merge_chooses: bool, merged_at: int) -> None:
    """Refuse a .repeat between a stage that chooses an order and one that reads again: passes keep no choices.

    Args:
      stages: the worker's and those behind the merge.
      merged_at: how many of them are the worker's.
    """
    chooser: str | None = None
    repeat: str | None = None
    for at, stage in enumerate([*stages, None]):
        if at == merged_at and merge_chooses:
            chooser = "the best-effort merge"
        if stage is None:
            return
        if isinstance(stage, Repeat) and chooser is not None:
            repeat = stage.name
        elif repeat is not None and stage.rewinds:
            raise PlanError(
                f".repeat goes through what {chooser} has chosen anew in each pass, so {stage} could not read the same "
                "items again at a resume: move .repeat before .shard"
            )
        if stage.chooses:
            chooser = str(stage)
