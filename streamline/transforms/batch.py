"""Items into batches, and batches into items."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

from streamline.collate import as_list, stack, stack_tensors
from streamline.core.blame import blame, not_awaited
from streamline.core.channel import Inbox
from streamline.core.counters import HoldTimer
from streamline.core.driver import behind_channel
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, Run
from streamline.core.options import check_function, is_async
from streamline.core.pace import Pace
from streamline.core.replay import FailedCall
from streamline.core.state import Json, Reference, State, Tree
from streamline.errors import PlanError
from streamline.transforms.base import Stage
from streamline.transforms.batch_wait import Cuts, Sizes, Waiting

__all__ = ["NAMED", "TOGETHER_ITEMS", "Batch", "collate_of", "collated"]

In = TypeVar("In")
Out = TypeVar("Out")

TOGETHER_ITEMS = 64
"""Small batches are made some at a time, from so many items; a larger one is made of no more than it needs, since
what it is made of is memory that the next one finds warm (arrays of 48 KiB: 1.5 x as fast as a list of 512 at once)."""


NAMED: Mapping[str, Callable[[list[Any]], Any]] = {"stack": stack, "torch": stack_tensors}
"""What the words for `collate=` mean."""


@dataclass(frozen=True, kw_only=True)
class Batch(Stage[In, Out]):
    """Collates `size` items into one, the rest at the end too unless `drop_remainder`.

    State: the upstream's right after the batch's last item; items that wait for their batch to fill are read again.
    With `max_wait_s`, or where batches are counted, also the sizes to be repeated, see `batch_wait`.

    Attributes:
      counts: whether a stage downstream may read batches again. Of a plan; see `compiling`.
    """

    survives: ClassVar[Mapping[str, str]] = {
        "size": "the batches from here on have the new size, from the first item that was in no batch delivered",
        "drop_remainder": "the rest at the end is treated as it says now",
        "collate": "the batches from here on are made by the new function",
        "added": "the items from here on come in batches",
        "removed": "the items from here on come one by one",
    }
    steady: ClassVar[frozenset[str]] = frozenset({"drop_remainder", "collate"})
    state_type: ClassVar[Any] = Sizes | None

    size: int
    drop_remainder: bool = False
    collate: Callable[[list[In]], Out]
    max_wait_s: float | None = None
    counts: bool = field(default=False, repr=False, compare=False)

    @property
    def options(self) -> dict[str, Any]:
        counting = ("max_wait_s", "counts")  # as concurrency
        return {name: value for name, value in super().options.items() if name not in counting}

    @classmethod
    def regrouped(cls, owns: Sequence[Json]) -> Json:
        return None  # sizes are for a stage downstream, which refuses

    @property
    def chooses(self) -> bool:
        return self.max_wait_s is not None

    @property
    def logs(self) -> bool:
        return self.chooses or self.counts

    def num_outputs(self, items: float) -> float | None:
        if self.max_wait_s is not None:
            return None
        if items == math.inf:
            return items
        return items // self.size if self.drop_remainder else -(-items // self.size)

    @property
    def in_flight(self) -> int:
        return self.size if self.max_wait_s is None else self.size + self._capacity

    @property
    def gathers(self) -> int:
        return self.size

    @property
    def bulk(self) -> int:
        return self.size

    @property
    def _capacity(self) -> int:
        return max(2, self.size)

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        own = None if state is None else state.get(self.name)
        flow, site = upstream(state), upstream.site
        if self.max_wait_s is None and (own is None or not own["replay"]):
            run = self.run_over(flow, site, state, own)
            cuts = Cuts(self.name, self.size) if self.counts else None
            return ListsFlow(flow.state if cuts is None else cuts.behind(flow.state), self.lists(run, cuts), run, flow)
        inbox = flow if isinstance(flow, Inbox) else behind_channel(flow, site, f"input of {self}", self._capacity)
        run = self.run_over(inbox, site, state, own)
        waiting = Waiting(self, inbox, own)
        return ListsFlow(waiting.begin(), waiting.lists(run), run, inbox)

    async def lists(self, run: Run[In], cuts: Cuts | None = None) -> Lists[Out]:
        held: list[In] = []
        last = Reference.to(run.upstream.state)
        together = self.size * max(1, TOGETHER_ITEMS // self.size)
        pace = Pace()
        while (chunk := await run.upstream.pull(min(together, self.size * run.want) - len(held))) is not None:
            items, states, after, start = chunk.items, chunk.states, chunk.after, 0
            del chunk  # the items of a batch are many and large: none is kept longer than it is needed
            while len(items) - start >= (missing := self.size - len(held)):
                held.extend(items[start : start + missing])
                start += missing
                batch = self._batch(held, run, states[start - 1], after if start == len(items) else None, cuts)
                held = []
                if start == len(items):
                    items, start = (), 0
                yield batch
                del batch
                await pace.breathe()
            held.extend(items[start:])
            if start < len(items):
                last = Reference(states, len(items) - 1)
            elif not held and after is not None:
                yield Chunk((), (), after if cuts is None else cuts.behind(after))
            del items
        now = run.upstream.state
        if held and not self.drop_remainder:
            yield self._batch(held, run, last.get(), now, cuts)
        elif held:
            yield Chunk((), (), now if cuts is None else cuts.behind(now))  # what was skipped among the rest counts

    def collated(self, held: list[In], run: Run[In], last: State) -> list[Out]:
        """Return a batch, or none if it is left out; `last` is the upstream's state behind it."""
        return collated(self, self.collate, held, run, last)

    def _batch(self, held: list[In], run: Run[In], last: State, after: State | None, cuts: Cuts | None) -> Chunk[Out]:
        made = self.collated(held, run, last)
        if cuts is not None:
            cuts.add(len(held))
            last, after = cuts.behind(last), None if after is None else cuts.behind(after)
        return Chunk(made, [last], after) if made else Chunk((), (), last if after is None else after)


def collated(
    stage: Stage[In, Out], collate: Callable[[list[In]], Out], held: list[In], run: Run[In], last: State
) -> list[Out]:
    """Return the batch that a stage makes of `held`, or none if it is left out; `last`: the upstream's state there."""
    try:
        with HoldTimer(run.meter):
            made = [collate(held)]
        if (problem := not_awaited(str(stage), made, "await it in a .map after .batch(collate=None)")) is not None:
            raise problem
        return made
    except BaseException as error:
        run.judge(blame(error, str(stage), run.site, last, FailedCall(collate, held)), held, last, len(held))
        return []


def collate_of(option: str, collate: object) -> Callable[[list[Any]], Any]:
    """Return the function that `collate=` means.

    Raises:
      PlanError: it is none that can collate; a `PlanTypeError` if it is no function.
    """
    if isinstance(collate, str) and collate not in NAMED:
        raise PlanError(f"{option} is 'stack', 'torch', None or a function, got {collate!r}")
    if collate == "torch" and find_spec("torch") is None:
        raise PlanError(f"{option}'torch' needs torch, which is not installed: pip install 'streamline[torch]'")
    fn: Any = NAMED[collate] if isinstance(collate, str) else as_list if collate is None else collate
    check_function(option, fn)
    if is_async(fn) or inspect.isasyncgenfunction(fn):
        raise PlanError(
            f"{option} takes a sync function: what an async one returns would be the batch. Await it in a .map behind "
            f"{option.partition('(')[0]}(collate=None)"
        )
    found: Callable[[list[Any]], Any] = fn
    return found
