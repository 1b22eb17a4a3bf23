"""What users call: laws on a stage, laws on a pipeline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import anyio.lowlevel

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.pipeline import Pipeline
from streamline.testing.laws import ExpectedItems, bound_law, close_law, failure_law, quiescence_law, resume_law
from streamline.testing.oracle import Oracle, UnknownStageError, oracle
from streamline.testing.scripted import Abort, Script
from streamline.testing.subjects import ChainSubject, PipelineSubject, Subject, read, run
from streamline.transforms.base import Stage
from streamline.transforms.map import ConcurrentMap

LAWS = frozenset({"resume", "quiescence", "close", "failure", "bound"})

Fragment = Stage[Any, Any] | Callable[[Pipeline[Any]], Pipeline[Any]]
"""A stage, or what users write: `lambda pipe: pipe.through(pairs).batch(2)`."""


def check_resume(
    pipeline: Pipeline[Any],
    *,
    generations: int = 5,
    expected: Sequence[Any] | Pipeline[Any] | None = None,
    seed: int = 0,
    loop: str = "asyncio",
    backend: Backend | None = None,
) -> None:
    """Check that a finite pipeline delivers what it should, and that it resumes exactly, wherever it is interrupted.

    Runs it to its end, resumes it through JSON from every state on the way, and `generations` times in a row. Where
    the order is fixed, exactly the rest must come; after an unordered map or a best-effort merge the multiset must
    be whole. Also checks that states stand still between pulls, and that closing leaves nothing. Call it from plain
    code:

        def test_my_pipeline_resumes():
            check_resume(sl.from_items(range(30)).shard(3).through(pairs).batch(4, collate=None))

    Args:
      pipeline: items comparable by their `repr`; some 30 of them are enough, since the work is quadratic.
      generations: resumes in a row, at random points.
      expected: what an uninterrupted run delivers; or a pipeline, of which the oracle says what this one must deliver,
        too (the same stages over plainer data); None: what the oracle says of this one.
      seed: of the random points.
      loop: "asyncio" or "uvloop".
      backend: where workers run; None: `Inline()`. What is delivered is the same wherever they do.

    Raises:
      AssertionError: a law is broken; the message begins with its name and says where, what was expected and what came.
    """
    subject, truth, dice = PipelineSubject(pipeline, backend or Inline()), _truth_of(pipeline, expected), Random(seed)
    script = pipeline.source if isinstance(pipeline.source, Script) else None
    run(partial(resume_law, subject=subject, truth=truth, generations=generations, dice=dice), loop)
    run(partial(quiescence_law, subject=subject, dice=dice), loop)
    run(partial(close_law, subject=subject, script=script, dice=dice), loop)


def check_failure(
    pipeline: Pipeline[Any],
    error: BaseException,
    *,
    mended: Pipeline[Any] | None = None,
    seed: int = 0,
    loop: str = "asyncio",
    backend: Backend | None = None,
) -> None:
    """Check that a pipeline delivers what comes before `error`, then `error` itself for ever, and resumes after a fix.

    Args:
      pipeline: fails with `error`.
      mended: the same, without the failure; None: `pipeline` reads a `Script`, which is mended.
      backend: as `check_resume`; where errors are copied, one of the same type and words must arrive.

    Raises:
      AssertionError: as `check_resume`.
    """
    if mended is None:
        mended = replace(pipeline, source=_script_of(pipeline).mended)
    truth = _truth_of(mended, None)
    least = 0 if truth.choosing else _before_failure(pipeline) or 0
    where = backend or Inline()
    broken, fixed = PipelineSubject(pipeline, where), PipelineSubject(mended, where)
    law = partial(failure_law, broken=broken, mended=fixed, error=error, truth=truth, least=least, dice=Random(seed))
    run(law, loop)


def check_stage(
    stage: Fragment,
    items: Iterable[Any] = range(24),
    *,
    laws: Iterable[str] = LAWS,
    generations: int = 5,
    behind_choices: bool = True,
    seed: int = 0,
    loop: str = "asyncio",
) -> None:
    """Check a stage, or some in a row, against the laws: over a scripted source, pulled directly, and in a pipeline.

    Call it from plain code:

        def test_pairs_keep_the_laws():
            check_stage(lambda pipe: pipe.through(pairs))

    Args:
      stage: a `Stage`, or a function that adds stages to a pipeline.
      items: what the source gives: finite, comparable by their `repr`, without equal ones.
      laws: which of `LAWS` to check.
      generations: resumes in a row, at random points.
      behind_choices: check Resume after an unordered map, too. Not for a stage where the order of its input decides
        which items come out (a running sum): there, comparing multisets of the output's parts proves nothing.
      seed: of the random points.
      loop: "asyncio" or "uvloop".

    Raises:
      AssertionError: as `check_resume`.
    """
    wanted = set(laws)
    if unknown := wanted - LAWS:
        raise ValueError(f"expected some of {sorted(LAWS)}, got {sorted(unknown)}")
    checked = _CheckedStage(stage, tuple(items), Random(seed), loop)
    if "resume" in wanted:
        checked.resume(generations, behind_choices)
    for law in ("quiescence", "close", "failure", "bound"):
        if law in wanted:
            getattr(checked, law)()


class _CheckedStage:
    """One stage (or some) over scripted sources."""

    def __init__(self, stage: Fragment, items: tuple[Any, ...], dice: Random, loop: str) -> None:
        self._fragment = stage
        self._items = items
        self._dice = dice
        self._loop = loop
        pipe = self.pipeline(*items)
        self._whole = _delivered(pipe, loop)
        self._truth = ExpectedItems(self._whole, choosing=pipe.plan.chooser is not None)

    def pipeline(self, *entries: Any) -> Pipeline[Any]:
        """Return the stage over a script of these entries, as a pipeline."""
        pipe: Pipeline[Any] = Pipeline(Script(shards=(entries,)))
        if isinstance(self._fragment, Stage):
            return replace(pipe, stages=(self._fragment,))
        return self._fragment(pipe)

    def subjects(self, *entries: Any) -> Iterable[tuple[Subject, Script]]:
        """Yield the stage pulled directly, where it stands alone, and in a pipeline."""
        pipe = self.pipeline(*entries)
        script = _script_of(pipe)
        if pipe.sharding is None and pipe.merging is None:
            yield ChainSubject(script, pipe.stages), script
        yield PipelineSubject(pipe), script

    def resume(self, generations: int, behind_choices: bool) -> None:
        for subject, _ in self.subjects(*self._items):
            self._run(resume_law, subject=subject, truth=self._truth, generations=generations)
        pipe = self.pipeline(*self._items)
        if not behind_choices or pipe.sharding is not None or pipe.merging is not None:
            return
        truth = ExpectedItems(self._whole, choosing=True)
        jitter = ConcurrentMap[Any, Any](name="jitter", fn=Jitter(self._dice), concurrency=4, ordered=False)
        chain = ChainSubject(_script_of(pipe), [jitter, *pipe.stages])
        self._run(resume_law, subject=chain, truth=truth, generations=generations)

    def quiescence(self) -> None:
        for subject, _ in self.subjects(*self._items):
            self._run(quiescence_law, subject=subject)

    def close(self) -> None:
        for subject, script in self.subjects(*self._items):
            self._run(close_law, subject=subject, script=script)

    def failure(self) -> None:
        truth, last = self._truth, len(self._items)
        for at in sorted({0, min(1, last), last // 2, max(0, last - 1), last}):
            error = ValueError(f"scripted, before item {at}")
            entries = [*self._items[:at], Abort(error), *self._items[at:]]
            before = _before_failure(self.pipeline(*entries))
            if before is None:
                continue  # the stage asks for no more
            least = 0 if truth.choosing else before
            for (broken, _), (mended, _) in zip(self.subjects(*entries), self.subjects(*self._items), strict=True):
                self._run(failure_law, broken=broken, mended=mended, error=error, truth=truth, least=least)

    def bound(self) -> None:
        if not self._whole:
            return  # nothing comes out that a consumer could stop after
        pipe = self.pipeline(*self._items)
        per_item = max(1.0, len(self._items) / len(self._whole))
        held = pipe.max_in_flight
        many = 4 + int(4 * (held + 7) * per_item) // max(1, len(self._items))
        pipe = self.pipeline(*(self._items * many))

        def allowed(k: int) -> int:
            return int((k + held) * per_item) + (len(self._items) if per_item > 1 else 0)

        subject, script = PipelineSubject(pipe), _script_of(pipe)
        self._run(bound_law, subject=subject, script=script, allowed=allowed)

    def _run(self, law: Callable[..., Awaitable[None]], **about: Any) -> None:
        run(partial(law, dice=self._dice, **about), self._loop)


class Jitter:
    """An async function that returns its item after a random number of other tasks' turns."""

    def __init__(self, dice: Random, most: int = 5) -> None:
        self._dice = dice
        self._most = most

    async def __call__(self, item: Any) -> Any:
        for _ in range(self._dice.randrange(self._most)):
            await anyio.lowlevel.checkpoint()
        return item


def _truth_of(pipeline: Pipeline[Any], expected: Sequence[Any] | Pipeline[Any] | None) -> ExpectedItems:
    if isinstance(expected, Pipeline):
        return _truth_of(expected, None)
    plan, workers = pipeline.plan, None
    if expected is None and plan.merge.chooses and not plan.after and not any(stage.chooses for stage in plan.worker):
        with suppress(UnknownStageError), Oracle(pipeline) as truth:
            workers = [list(worker) for worker in truth.workers()]
    items = _delivered(pipeline, "asyncio") if expected is None else expected
    return ExpectedItems(items, plan.chooser is not None, workers)


def _delivered(pipeline: Pipeline[Any], loop: str) -> list[Any]:
    """Return what an uninterrupted run delivers: as the oracle says, or as it is found."""
    try:
        return oracle(pipeline)
    except UnknownStageError:
        return _uninterrupted(pipeline, loop)


def _script_of(pipeline: Pipeline[Any]) -> Script:
    if not isinstance(pipeline.source, Script):
        raise TypeError(f"expected a pipeline over a Script, got one over {pipeline.source}")
    return pipeline.source


def _before_failure(pipeline: Pipeline[Any]) -> int | None:
    """Return how many items come before the failure, as far as the oracle can say; None if there is no failure."""
    count = 0
    try:
        with Oracle(pipeline) as truth:
            for _ in truth:
                count += 1
    except UnknownStageError:
        return 0
    except BaseException:
        return count
    return None


def _uninterrupted(pipeline: Pipeline[Any], loop: str) -> list[Any]:
    subject = PipelineSubject(pipeline)

    async def work(tasks: Any) -> list[Any]:
        flow = subject.open(tasks, None)
        try:
            found = await read(flow, subject.write, Random(0))
        finally:
            await flow.aclose()
        if found.failure is not None:
            raise found.failure
        return found.items

    return run(work, loop)
