"""Steps on which user code fails for some items, by content (in every resume the same), and runs that skip them.

And pipelines with such steps over a live source.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio.lowlevel
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.base import Backend
from streamline.pipeline import Pipeline
from streamline.testing.compositions import Composition
from streamline.testing.laws import ExpectedItems
from streamline.testing.steps import DICE, Step, each, number, steps
from streamline.testing.subjects import changed
from tests.backends.kit import AnyThreads
from tests.copying_backend import Copying
from tests.sources.live_kit import Tape

__all__ = ["BACKENDS", "SKIP", "AnyPipeline", "Runs", "failing_steps", "insist", "live_pipelines"]


def check(item: Any) -> Any:
    if number(item) % 5 == 1:
        raise ValueError(f"no {item!r}, please")
    return item


async def check_slowly(item: Any) -> Any:
    for _ in range(number(item) * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return check(item)


async def check_anyhow(item: Any) -> Any:
    for _ in range(DICE.randrange(6)):
        await anyio.lowlevel.checkpoint()
    return check(item)


def not_third(item: Any) -> bool:
    return bool(number(check(item)) % 3)


def two(item: Any) -> Iterator[Any]:
    yield item
    if number(item) % 5 == 2:
        raise ValueError("the second of the two")
    yield each(lambda x: x + 100_000, item)


def together(items: list[Any]) -> list[Any]:
    if number(items) % 4 == 1:
        raise ValueError("not together")
    return items


def refuse(item: Any) -> Any:
    raise ValueError("none at all")


def noisy_check(item: Any, *, rng: Any) -> Any:
    draw = int(rng.integers(100))
    return each(lambda x: x + 10_000 * draw, check(item))


@st.composite
def failing_steps(draw: st.DrawFn) -> Step:
    """A stage that fails for some items. What it drops depends on the item, not on batches behind choices."""
    calls = draw(st.integers(1, 5))
    ordered = draw(st.booleans())
    return draw(
        st.sampled_from(
            [
                Step(".map(check)", lambda p: p.map(check), whole=True),
                Step(".map(refuse)", lambda p: p.map(refuse), whole=True),
                Step(
                    f".map(check_slowly, concurrency={calls})",
                    lambda p: p.map(check_slowly, concurrency=calls),
                    whole=True,
                ),
                Step(
                    f".map(check_anyhow, concurrency={calls}, ordered=False)",
                    lambda p: p.map(check_anyhow, concurrency=calls, ordered=False),
                    whole=True,
                ),
                Step(
                    f".map(check, executor='thread', concurrency={calls}, ordered={ordered})",
                    lambda p: p.map(check, executor="thread", concurrency=calls, ordered=ordered),
                    whole=True,
                ),
                Step(".map(noisy_check, seed=1)", lambda p: p.map(noisy_check, seed=1), ordered=True, whole=True),
                Step(".filter(not_third)", lambda p: p.filter(not_third), whole=True),
                Step(".flat_map(two)", lambda p: p.flat_map(two), whole=True, grows=2),
                Step(
                    f".batch({calls}, collate=together)",
                    lambda p: p.batch(calls, collate=together),
                    ordered=True,
                    whole=True,
                ),
            ]
        )
    )


@st.composite
def live_pipelines(draw: st.DrawFn) -> tuple[str, int, Callable[[Tape, Path], Composition]]:
    """Random pipelines over a feed, made anew over any; with what they are, and how many items are in the feed."""
    shards, length, stored = draw(st.integers(1, 4)), draw(st.integers(0, 40)), draw(st.booleans())
    step = st.one_of(steps(), failing_steps()).filter(lambda step: not step.text.startswith(".take"))
    before, behind = draw(st.lists(step, max_size=3)), draw(st.lists(step, max_size=3))
    kind = draw(st.sampled_from(["strict", "best_effort"]))

    def make(tape: Tape, journal: Path) -> Composition:
        source = sl.from_stream(tape, partitioned=True, journal=journal if stored else None)
        fed = Composition(source.shard(2 * shards), "", length).with_steps(before)
        merged = fed.pipeline.merge("best_effort", max_lead=3) if kind == "best_effort" else fed.pipeline.merge()
        return Composition(merged, "", fed.most).with_steps(behind)

    text = f"{length} items, {2 * shards} shards, {kind}, {'stored, ' * stored}{before} {behind}"
    return text, length, make


AnyPipeline = Pipeline[Any]

SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": None}

BACKENDS: list[Backend] = [sl.Inline(), Copying(2), AnyThreads(2)]


class Runs:
    """Runs of one pipeline in parts, that share a file of dead letters.

    Args:
      dice: of what may change between the parts, and of the backends; None: all is as it was, and inline.
      backends: of which there is another one in each part, by the dice.

    Attributes:
      items: what was delivered so far.
      errors: items counted as skipped so far.
    """

    def __init__(
        self, letters: Path, dice: Random | None = None, *, backends: Sequence[Backend] = BACKENDS, **options: Any
    ) -> None:
        self.letters = letters
        self._dice = dice
        self._backends = backends
        self.options = {**SKIP, "dead_letters": letters, **options}
        self.items: list[Any] = []
        self.errors = 0

    def part(self, pipe: AnyPipeline, snapshot: sl.Snapshot | None, most: int | None, ahead: int = 0) -> sl.Snapshot:
        """Deliver at most so many items more, and return the snapshot; the loop takes `ahead` more, that are lost."""
        before, options = len(self.items), dict(self.options)
        if self._dice is not None:
            pipe, options["backend"] = changed(pipe, self._dice), self._dice.choice(self._backends)
        with pipe.open(resume=snapshot, **options) as stream:
            while most is None or len(self.items) < before + most:
                try:
                    self.items.append(next(stream))
                except StopIteration:
                    break
            if ahead:
                taken = stream.snapshot()
            self.errors = stream.errors.total
            for _ in range(ahead):
                next(stream, None)
        if not ahead:
            taken = stream.snapshot()  # behind the block: of a live source, this one has all that was read
        return taken

    def lines(self, choosing: bool) -> Counter[tuple[Any, ...]]:
        """Return what the letters say; which item was the n-th is open behind choices."""
        keys = ["epoch", "shard", "stage", "n", "items"]
        if not choosing:
            keys += ["item", "message", "passes"]
        paths = self.letters.parent.glob(f"{self.letters.stem}*.jsonl")
        letters = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return Counter(tuple(str(letter[key]) for key in keys) for letter in letters)


def insist(whole: Runs, parts: Runs, choosing: bool, on_disk: bool = False) -> None:
    """Insist that parts give, count and write what a whole run does.

    Args:
      on_disk: a cache keeps what an earlier part made ahead, and skipped, on disk: it is counted, and has no line.
    """
    ExpectedItems(whole.items, choosing).insist_whole("Resume", "over all parts", [], parts.items)
    assert parts.errors == whole.errors
    if on_disk:
        assert parts.lines(choosing) <= whole.lines(choosing)
    else:
        assert parts.lines(choosing) == whole.lines(choosing)
