"""`.flat_map` and `.unbatch`: one item into many.

State: the upstream's before the input that is being unfolded (a mark, `Since`), and how many of its outputs were
delivered; a resume unfolds that input again and passes over them. After its last output: the upstream's after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import length_hint
from typing import Any, ClassVar, Generic, TypeVar

from streamline.core.blame import blame
from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.meters import HoldTimer
from streamline.core.pace import Pace, check_no_coroutines
from streamline.core.replay import FailedCall
from streamline.core.state import Json, MadeStates, Over, Since, State
from streamline.core.state_types import Count
from streamline.errors import PlanTypeError
from streamline.sources.table_rows import check_not_table
from streamline.transforms.base import Stage

In = TypeVar("In")
Out = TypeVar("Out")

OF_KNOWN_LENGTH: tuple[type[Any], ...] = (type(iter([])), type(iter(())))


@dataclass(frozen=True, kw_only=True)
class FlatMap(Stage[In, Out]):
    """Replaces each item by the items of the iterable that `fn` returns for it, which may be lazy and endless."""

    kind: ClassVar[str] = "flat_map"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "fn": "inputs from here on are unfolded by the new function; of an input that was being unfolded, as many "
        "outputs as were delivered are passed over",
        "added": "the items from here on are unfolded",
        "removed": "the items from here on come as they are",
    }
    state_type: ClassVar[Any] = Count
    rewinds = True
    initial_state = 0

    fn: Callable[[In], Iterable[Out]]

    @classmethod
    def replay_cost(cls, own: Json) -> str | None:
        if not own:
            return None
        return f"unfolds one input again, and passes over the {own:,} outputs of it that were delivered"

    async def lists(self, run: StageRun[In]) -> Lists[Out]:
        mark = run.upstream.state
        skip: int = run.own
        pace = Pace(run.meter)
        while (chunk := await run.upstream.pull(run.max_items)) is not None:
            for index, item in enumerate(chunk.items):
                now = chunk.states[index]
                unfolding = _Unfolding(self, run, mark, now, skip)
                unfolding.start(item)
                while not unfolding.finished:
                    part = unfolding.list(pace)
                    if part.items or part.progress is not None:
                        yield part
                    del part  # release the outputs while the next are made
                    if unfolding.failure is not None:
                        run.skip_or_raise(unfolding.failure, item, now)
                        yield Chunk((), (), Over(self.name, 0, now))
                        break  # what came before the failure stays delivered
                    await pace.maybe_yield()
                mark, skip = now, 0
                del item, unfolding
            if chunk.progress is not None:
                mark = chunk.progress
                yield Chunk((), (), Over(self.name, skip, mark))  # at a resume, its input may be yet to come
            del chunk


class _Unfolding(Generic[In, Out]):
    """The outputs of one input, list by list."""

    def __init__(self, stage: FlatMap[In, Out], run: StageRun[In], mark: State, now: State, skip: int) -> None:
        self._stage, self._run, self._mark, self._now = stage, run, mark, now
        self._skip = skip
        self._delivered = skip
        self._drawn = 0
        self._outputs: Iterator[Out] = iter(())
        self.failure: BaseException | None = None
        self.finished = False

    def start(self, item: In) -> None:
        try:
            with HoldTimer(self._run.meter):
                outputs = self._stage.fn(item)
            check_no_coroutines(self._stage, [outputs], "await it in a .map before")
            if not isinstance(outputs, Iterable):
                raise PlanTypeError(
                    f"expected an iterable from {self._stage}, got {type(outputs).__name__}: [item] for one item, [] "
                    "for none"
                )
            check_not_table(f"{self._stage} returned", outputs)
            self._outputs = iter(outputs)
        except BaseException as error:
            self._fail(error, item)
        self._item = item

    def list(self, pace: Pace) -> Chunk[Out]:
        """Return the next outputs; after the last ones, `finished` is set, and the state needs no mark."""
        out: list[Out] = []
        if self.failure is None:
            try:
                self.finished = pace.draw(self._outputs, self._skip + self._run.max_items, out) or _is_over(
                    self._outputs
                )
            except BaseException as error:
                self._drawn += len(out)
                self._fail(error, self._item)
            self._drawn += len(out)
        passed_over = min(self._skip, len(out))
        self._skip -= passed_over
        first = self._delivered + 1
        self._delivered += len(out) - passed_over
        after = Over(self._stage.name, 0, self._now) if self.finished else None
        last = self._delivered if self.finished else None
        states = MadeStates(_state_after, self._stage.name, self._mark, self._now, last, first=first)
        return Chunk(out[passed_over:], states, after)

    def _fail(self, error: BaseException, item: In) -> None:
        call = FailedCall(self._stage.fn, item, self._drawn)
        self.failure = blame(error, str(self._stage), self._run.site, self._now, call)


def _is_over(outputs: Iterator[Any]) -> bool:
    """Whether outputs that were all drawn are known to be all: else the last one would be delivered with a mark."""
    return isinstance(outputs, OF_KNOWN_LENGTH) and not length_hint(outputs)


def _state_after(name: str, mark: State, now: State, last: int | None, delivered: int) -> State:
    """Return the state after so many outputs of one input; after the `last` one, nothing of it is unfolded again."""
    return Over(name, 0, now) if delivered == last else Over(name, delivered, Since(mark, now))


@dataclass(frozen=True, kw_only=True)
class Unbatch(FlatMap[In, Out]):
    """Replaces each batch by its items."""

    uncounted_options = ("fn",)
    kind: ClassVar[str] = "unbatch"
    depth_change: ClassVar[int] = -1
    in_flight = 1
