"""Random pipelines, for hypothesis: every stage, over every source that can be read again, wherever a plan allows it.

Where the order of items is open (after an unordered map or a best-effort merge), only stages follow for which the
multiset of what comes out doesn't depend on it: so that comparing multisets proves something.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import anyio.lowlevel
from hypothesis import strategies as st

from streamline.constructors import concat, from_iterable, mix
from streamline.constructors import zip as side_by_side
from streamline.core.flow import Site
from streamline.errors import PlanError
from streamline.pipeline import Pipeline
from streamline.sources.base import Mode
from streamline.sources.foreign_datasets import DatasetSource
from streamline.sources.items import Items
from streamline.sources.iterable import IterableSource
from streamline.sources.mix import Stop
from streamline.testing.scripted import Script
from streamline.testing.steps import UNBATCH, Step, one_number, steps, steps_before, transfers
from streamline.training.stream_dataset import StreamDataset

KINDS = ("items", "iterable", "async iterable", "data set", "split data set", "mix", "zip", "concat", "script")
"""Sources."""

MOST_ITEMS = 100
"""Items that may come out of one, about: checking a resume at each of them takes time in the square."""


@dataclass(frozen=True, repr=False)
class Composition:
    """A random pipeline, and how it is written.

    Attributes:
      most: items that come out of it, about, at the most.
    """

    pipeline: Pipeline[Any]
    text: str
    most: int

    def __repr__(self) -> str:
        return self.text

    @property
    def chooses(self) -> bool:
        """Whether something in it chooses an order."""
        return self.pipeline.plan.chooser is not None

    def with_steps(self, steps: Sequence[Step], choosing: bool | None = None) -> Composition:
        """Add those that a plan allows, and after which the multiset is still determined."""
        found = self
        for step in steps:
            if found._takes(step):
                try:
                    longer = Composition(
                        step.apply(found.pipeline), found.text + step.text, found.most * max(1, step.grows)
                    )
                except PlanError:
                    continue
                if not (choosing is False and longer.chooses):
                    found = longer
        return found

    def _takes(self, step: Step) -> bool:
        depth = self._depth
        if self.most * step.grows > MOST_ITEMS or (step is UNBATCH and not depth):
            return False
        return not self.chooses or not (step.ordered or (step.whole and depth))

    @property
    def _depth(self) -> int:
        """How deep items are nested in lists."""
        depth = 0
        for stage in self.pipeline.stages:
            depth += (stage.kind in ("batch", "bucket_by_length") or stage.name.startswith("pairs")) - (
                stage.kind == "unbatch"
            )
            depth = 1 if stage.kind == "pack" else depth
        return depth


@st.composite
def compositions(
    draw: st.DrawFn,
    *,
    choosing: bool | None = None,
    most: int = 24,
    stages: int = 4,
    kinds: Sequence[str] = KINDS,
    more: st.SearchStrategy[Step] | None = None,
) -> Composition:
    """Random pipelines with how they are written.

    Args:
      choosing: whether something in it must choose an order; None: as it comes.
      most: items of the source, about.
      stages: before the merge, and again after it, at the most.
      kinds: of sources, those to choose from.
      more: steps to choose from beside all stages.
    """
    step = steps() if more is None else st.one_of(steps(), more)
    kind = draw(st.sampled_from(kinds))
    made = draw(
        {"script": _scripts(most), "mix": _mixtures(most), "zip": _zips(most), "concat": _concats(most)}.get(
            kind, _sources(most, kind)
        )
    )
    return draw(continued(made, choosing=choosing, stages=stages, step=step))


@st.composite
def continued(
    draw: st.DrawFn,
    made: Composition,
    *,
    choosing: bool | None = None,
    stages: int = 4,
    step: st.SearchStrategy[Step] | None = None,
) -> Composition:
    """Random pipelines that begin as `made`, a source and what stands before its workers' stages. Its items: ints.

    Args:
      made: the beginning.
      choosing, stages: as `compositions`.
      step: steps to choose from; None: all.
    """
    step = steps() if step is None else step
    made = made.with_steps(draw(st.lists(step, max_size=stages)), choosing)
    if (choosing is not False and draw(st.booleans())) or (choosing and not made.chooses):
        skips, lead = draw(st.integers(0, 3)), draw(st.integers(1, 4))
        pipe = made.pipeline.merge("best_effort", max_skips_per_round=skips, max_lead=lead)
        text = f"{made.text}.merge(best_effort, max_skips_per_round={skips}, max_lead={lead})"
    else:
        pipe, text = made.pipeline.merge(), f"{made.text}.merge()"
    whole = Composition(pipe, text, made.most).with_steps(draw(st.lists(step, max_size=stages)), choosing)
    return whole.with_steps(draw(st.lists(transfers(), max_size=1)), choosing)


def pipelines(*, choosing: bool | None = None, most: int = 24, stages: int = 4) -> st.SearchStrategy[Pipeline[Any]]:
    """Random pipelines; the arguments are those of `compositions`."""
    return compositions(choosing=choosing, most=most, stages=stages).map(lambda composition: composition.pipeline)


@st.composite
def _scripts(draw: st.DrawFn, most: int) -> Composition:
    """Shards of any sizes, each at a pace of its own."""
    shards = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(0, max(1, 2 * most // shards)), min_size=shards, max_size=shards))
    paces = tuple(draw(st.lists(st.integers(0, 3), max_size=5)))
    entries = tuple(tuple(shard + 10 * at for at in range(size)) for shard, size in enumerate(sizes))
    pipe: Pipeline[Any] = Pipeline(Script(shards=entries, schedule=paces))
    return Composition(pipe.shard(shards), f"scripted of sizes {sizes}, paces {paces}", sum(sizes))


@st.composite
def _mixtures(draw: st.DrawFn, most: int) -> Composition:
    """Several pipelines mixed, by weights that change."""
    parts = draw(_parts(most))
    names = list(parts)
    weight = st.fixed_dictionaries(dict.fromkeys(names, st.sampled_from([0, 1, 1, 5.5])))
    drawn = weight.map(lambda found: found if any(found.values()) else dict.fromkeys(names, 1))
    schedule = [(0, draw(drawn)), *((start, draw(drawn)) for start in draw(st.sampled_from([[], [5]])))]
    seed, stop = draw(st.integers(0, 9)), draw(st.sampled_from(["all", "all", "first"]))
    pipe = mix({name: part.pipeline for name, part in parts.items()}, schedule, seed=seed, stop=cast("Stop", stop))
    shards = draw(st.sampled_from([0, 1, 3]))
    text = f"mix of {parts}, {schedule}, seed={seed}, stop={stop}" + (f".shard({shards})" if shards else "")
    return Composition(pipe.shard(shards) if shards else pipe, text, sum(part.most for part in parts.values()))


@st.composite
def _zips(draw: st.DrawFn, most: int) -> Composition:
    """Several pipelines side by side."""
    parts = draw(_parts(most))
    pipe = side_by_side(*(part.pipeline for part in parts.values())).map(one_number)
    return Composition(
        pipe, f"zip of {list(parts.values())}.map(one_number)", max(part.most for part in parts.values())
    )


@st.composite
def _concats(draw: st.DrawFn, most: int) -> Composition:
    """Several pipelines one after the other."""
    parts = draw(_parts(most))
    pipe = concat(*(part.pipeline for part in parts.values()))
    shards = draw(st.sampled_from([0, 1, 3]))
    text = f"concat of {list(parts.values())}" + (f".shard({shards})" if shards else "")
    return Composition(pipe.shard(shards) if shards else pipe, text, sum(part.most for part in parts.values()))


@st.composite
def _parts(draw: st.DrawFn, most: int) -> dict[str, Composition]:
    found = {}
    for at in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, most // 2))
        items = range(100 * at, 100 * at + length)
        numbers, again = Items(name="items", items=items), IterableSource(name="it", factory=_of(items))
        pipes: list[Pipeline[Any]] = [Pipeline(numbers), Pipeline(again), concat(Pipeline(numbers), Pipeline(again))]
        whole = draw(st.integers(0, 2))
        part = Composition(pipes[whole], f"{items}" + (" twice" if whole == 2 else ""), length * (1 + (whole == 2)))
        found["abc"[at]] = part.with_steps(draw(st.lists(steps(), max_size=2)), choosing=False)
    return found


@st.composite
def _sources(draw: st.DrawFn, most: int, kind: str) -> Composition:
    """Sources that are split, with what may stand before the shard."""
    length, shards, drop = draw(st.integers(0, most)), draw(st.integers(1, 9)), draw(st.booleans())
    mode: Mode | None = None
    if kind == "items":
        pipe: Pipeline[Any] = Pipeline(Items(name="items", items=range(length)))
        mode = draw(st.sampled_from(["interleaved", "contiguous"]))
    elif kind == "data set":
        pipe = from_iterable(StreamDataset(_of(range(length))))
    elif kind == "split data set":
        pipe = Pipeline(SplitNumbers(name="split", dataset=StatefulNumbers(range(length))))
    else:
        factory = _asynchronously(length) if kind == "async iterable" else _of(range(length))
        pipe = Pipeline(IterableSource(name="iterable", factory=factory))
    made = Composition(pipe, f"{kind} of {length}", length)
    made = made.with_steps(draw(st.lists(steps_before(kind == "items"), max_size=3)))
    try:
        sharded = made.pipeline.shard(shards, mode=mode, drop_remainder=drop)
    except PlanError:
        return made
    return Composition(sharded, f"{made.text}.shard({shards}, {mode}, drop_remainder={drop})", made.most)


class StatefulNumbers:
    """An iterable dataset that knows its state."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers
        self._at = 0

    def __iter__(self) -> Iterator[int]:
        while self._at < len(self._numbers):
            self._at += 1
            yield self._numbers[self._at - 1]

    def part(self, shard: int, num_shards: int) -> StatefulNumbers:
        """Return a shard's part of it."""
        return StatefulNumbers(self._numbers[shard::num_shards])

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


@dataclass(frozen=True, kw_only=True)
class SplitNumbers(DatasetSource[int]):
    """Iterates a dataset that splits itself, without torch and Hugging Face's library."""

    kind: ClassVar[str] = "split_numbers"

    def make(self, site: Site) -> Iterable[int]:
        part: StatefulNumbers = self.for_pass(site).part(site.shard, site.num_shards)
        return part


def _of(items: range) -> Callable[[], range]:
    return lambda: items


def _asynchronously(length: int) -> Callable[[], AsyncIterator[int]]:
    async def numbers() -> AsyncIterator[int]:
        for item in range(length):
            if item % 3 == 2:
                await anyio.lowlevel.checkpoint()
            yield item

    return numbers
