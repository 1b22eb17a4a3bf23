"""The kit fails on stages that are deliberately broken, and says which law they break."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

import streamline as sl
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, StageRun
from streamline.core.state import NumberedStates, Over, Shifted, Since, State, Tally, Tree
from streamline.testing.checks import LAWS, Fragment, check_resume, check_stage
from streamline.testing.scripted import scripted
from streamline.transforms.base import Stage
from streamline.transforms.shuffle import Shuffle

AnyStage = Stage[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Sound(AnyStage):
    """What the broken ones are made from: passes items on, and keeps a count of them."""

    def begin(self, upstream: State, own: Any) -> State:
        return Over(self.name, own or 0, upstream)

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        done: int = run.own or 0
        while (chunk := await run.upstream.pull(run.max_items)) is not None:
            yield Chunk(chunk.items, NumberedStates(self.name, done + 1, chunk.states))
            done += len(chunk.items)


class OffByOne(Sound):
    """Its count, which it stops at, is one too small behind a resume."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        done: int = run.own or 0
        while done < 10 and (chunk := await run.upstream.pull(min(run.max_items, 10 - done))) is not None:
            yield Chunk(chunk.items, NumberedStates(self.name, done, chunk.states))
            done += len(chunk.items)


class StateBefore(Sound):
    """Gives each item the state that stood before it."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        before = run.upstream.state
        while (chunk := await run.upstream.pull(1)) is not None:
            if chunk.items:
                yield Chunk(chunk.items, [Over(self.name, 0, before)])
            before = chunk.end


class LosesHeld(Sound):
    """Holds two items back, and resumes behind them."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        held: list[Any] = []
        while (chunk := await run.upstream.pull(1)) is not None:
            held += chunk.items
            if len(held) > 2:
                yield Chunk([held.pop(0)], [Over(self.name, 0, chunk.end)])
        for item in held:
            yield Chunk([item], [Over(self.name, 0, run.upstream.state)])


class SwallowsFailure(Sound):
    """Takes a failure for the end."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        try:
            async for chunk in super().lists(run):
                yield chunk
        except ValueError:
            return


class WrapsFailure(Sound):
    """Raises something else than what it met."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        try:
            async for chunk in super().lists(run):
                yield chunk
        except ValueError as error:
            raise RuntimeError("wrapped") from error


class ForgetsFailure(Sound):
    """Fails once, and says that it has ended when it is asked again."""

    def open(self, upstream: Opener[Any], state: Tree | None = None) -> Flow[Any]:
        flow = super().open(upstream, state)
        pull = flow.pull
        failed = False

        async def once(limit: int = 256) -> Chunk[Any] | None:
            nonlocal failed
            if failed:
                return None
            try:
                return await pull(limit)
            except ValueError:
                failed = True
                raise

        flow.pull = once  # type: ignore[method-assign]
        return flow


class LosesAtFailure(Sound):
    """Holds an item back, and stands behind it once what comes after it has failed: only that one state is wrong."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        held: Chunk[Any] | None = None
        try:
            while (chunk := await run.upstream.pull(1)) is not None:
                if held is not None:
                    yield Chunk(held.items, [Over(self.name, 0, held.end)])
                held = chunk
        except ValueError:
            if held is not None:
                yield Chunk([], [], Over(self.name, 0, held.end))
            raise
        if held is not None:
            yield Chunk(held.items, [Over(self.name, 0, held.end)])


class ReadsAhead(Sound):
    """Reads all there is before it gives the first item."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        chunks = []
        while (chunk := await run.upstream.pull()) is not None:
            chunks.append(chunk)
        done: int = run.own or 0
        for chunk in chunks:
            yield Chunk(chunk.items, NumberedStates(self.name, done + 1, chunk.states))
            done += len(chunk.items)


class LeavesOpen(Sound):
    """Doesn't close its upstream."""

    def open(self, upstream: Opener[Any], state: Tree | None = None) -> Flow[Any]:
        flow = upstream(state)
        own = None if state is None else state[self.name]
        run = StageRun(flow, own, upstream.site)
        return ListsFlow(self.begin(flow.state, own), self.lists(run), run)


class LeavesTask(Sound):
    """Leaves a task behind that nobody ends before the stream does."""

    def open(self, upstream: Opener[Any], state: Tree | None = None) -> Flow[Any]:
        tasks = upstream.site.tasks
        flow = super().open(upstream, state)
        next_ = flow.pull

        async def pull(limit: int = 256) -> Chunk[Any] | None:
            tasks.start(anyio.sleep_forever, "of a broken stage", lambda: None)
            return await next_(limit)

        flow.pull = pull  # type: ignore[method-assign]
        return flow


class Restless(State):
    """A state that is another one each time it is read."""

    def __init__(self, name: str, upstream: State, ticks: Any) -> None:
        self.name, self.upstream, self.ticks = name, upstream, ticks

    def json(self, until: State | None = None) -> Tree:
        return {**self.upstream.json(), self.name: next(self.ticks)}

    def tally(self, found: Tally) -> None:
        self.upstream.tally(found)


class ChangesWhileQuiet(Sound):
    """Its state counts how often it was looked at."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        ticks = count()
        while (chunk := await run.upstream.pull(1)) is not None:
            yield Chunk(chunk.items, [Restless(self.name, chunk.end, ticks)])


class ChangesLater(Sound):
    """Hands out the same dict with each state, and changes it: what was handed out before changes too."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        own = {"done": run.own["done"] if run.own else 0}
        while (chunk := await run.upstream.pull(1)) is not None:
            own["done"] += len(chunk.items)
            yield Chunk(chunk.items, [Over(self.name, own, chunk.end)])


class PlainMark(Shuffle[Any]):
    """Goes back to a mark, but keeps nothing of the choices made since."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        async for chunk in super().lists(run):
            states = [_without_since(chunk.states[index]) for index in range(len(chunk.items))]
            yield Chunk(chunk.items, states, chunk.progress)


def _without_since(state: State) -> State:
    assert isinstance(state, Over)
    upstream = state.upstream
    return Over(state.name, state.own, upstream.mark if isinstance(upstream, Since) else upstream)


class ForgetsOffset(Shuffle[Any]):
    """Serves a window from its beginning, whatever was served of it."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        run.own = replace(run.own, served=0)
        async for chunk in super().lists(run):
            yield chunk


class ReshufflesWindow(Shuffle[Any]):
    """Forgets the window's number, so that a resume permutes it otherwise."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        run.own = replace(run.own, window=0)
        async for chunk in super().lists(run):
            yield chunk


class IfState(Sound):
    """Passes on 5 items; a count of 0 left to pass is taken for none given."""

    def begin(self, upstream: State, own: Any) -> State:
        return Over(self.name, 5 if own is None else own, upstream)

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        left: int = run.own or 5
        while left and (chunk := await run.upstream.pull(1)) is not None:
            left -= len(chunk.items)
            yield Chunk(chunk.items, [Over(self.name, left, chunk.end)])


class DropsProgress(Sound):
    """Keeps one item in ten, and shifts the states of the others onto it."""

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        while (chunk := await run.upstream.pull()) is not None:
            kept = [index for index, item in enumerate(chunk.items) if item % 10 == 0]
            yield Chunk([chunk.items[index] for index in kept], Shifted(chunk.states, 1), chunk.end)


CASES: list[tuple[type[AnyStage], str, str]] = [
    (OffByOne, "resume", "Resume"),
    (StateBefore, "resume", "Resume"),
    (LosesHeld, "resume", "Resume"),
    (SwallowsFailure, "failure", "Failure"),
    (WrapsFailure, "failure", "Failure"),
    (ForgetsFailure, "failure", "Failure"),
    (ReadsAhead, "bound", "Bound"),
    (LeavesOpen, "close", "Close"),
    (LeavesTask, "close", "Close"),
    (ChangesWhileQuiet, "quiescence", "Quiescence"),
    (ChangesLater, "quiescence", "Quiescence"),
    (IfState, "resume", "Resume"),
    (DropsProgress, "resume", "Resume"),
]


@pytest.mark.parametrize(("stage", "law", "named"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_broken_stage_breaks_its_law(stage: type[AnyStage], law: str, named: str) -> None:
    with pytest.raises(AssertionError, match=f"^{named}: ") as caught:
        check_stage(stage(name="broken"), laws=[law])
    assert re.search("expected .* got|stands at", str(caught.value), re.DOTALL)


def test_a_state_that_only_a_failure_brings_is_resumed_from_behind_the_other_laws() -> None:
    """What Resume has read on from is not read again; a failure's own state is."""
    with pytest.raises(AssertionError, match=r"^Failure: mended, from the state after item .* expected \["):
        check_stage(LosesAtFailure(name="broken"), range(7), laws=["resume", "failure"])


@pytest.mark.parametrize("stage", [PlainMark, ForgetsOffset, ReshufflesWindow])
def test_a_broken_shuffle_breaks_resume(stage: type[Shuffle[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"^Resume: "):
        check_stage(stage(name="shuffle", window=5), laws=["resume"])


def test_a_plain_mark_is_only_wrong_behind_choices() -> None:
    check_stage(PlainMark(name="shuffle", window=5), laws=["resume"], behind_choices=False)


def test_a_sound_stage_passes() -> None:
    check_stage(Sound(name="sound"))


async def hidden(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncGenerator[int, None]:
    """Keeps its sum in its frame."""
    total = 0
    async for item in items:
        total += item
        yield total


async def late(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncGenerator[int, None]:
    """Remembers an item only when it asks for the one behind the next: too late for the safe point between."""
    last = None
    async for item in items:
        yield item + 100 * state.get("last", 0)
        if last is not None:
            state["last"] = last
        last = item


HIDING: list[Callable[..., Any]] = [hidden, late]


@pytest.mark.parametrize("fn", HIDING)
def test_a_custom_stage_that_remembers_outside_its_dict_breaks_resume(fn: Callable[..., Any]) -> None:
    declared = sl.stage(state=dict, snapshot_every=1)(fn)
    with pytest.raises(AssertionError, match=r"^Resume: "):
        check_stage(lambda pipe: pipe.through(declared), laws=["resume"], behind_choices=False)


def test_check_resume_catches_a_custom_stage_in_a_pipeline() -> None:
    declared = sl.stage(state=dict, snapshot_every=2)(hidden)
    with pytest.raises(AssertionError, match=r"^Resume: from the state after item"):
        check_resume(scripted(range(10), range(3)).through(declared))


def test_check_resume_compares_with_what_is_expected() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^Order: .* expected \[1, 2, 3, 4\], got \[0, 1, 2, 3\]"):
        check_resume(sl.from_items(range(4)), expected=[1, 2, 3, 4])


def test_an_unknown_law_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected some of"):
        check_stage(Sound(name="sound"), laws=["resum"])
    fragment: Fragment = Sound(name="sound")
    assert isinstance(fragment, Stage)
    assert len(LAWS) == 5


def test_a_state_that_is_no_json_is_refused() -> None:
    class Tuples(Sound):
        async def lists(self, run: StageRun[Any]) -> Lists[Any]:
            while (chunk := await run.upstream.pull(1)) is not None:
                yield Chunk(chunk.items, [Over(self.name, (1, 2), chunk.end)])

    with pytest.raises(AssertionError, match=r"^State: expected JSON"):
        check_stage(Tuples(name="tuples"), laws=["resume"])
