"""`.batch`: collates `size` items into one; with `max_wait_s`, a batch that isn't full leaves after that time.

State: the upstream's after the batch's last item; items of a batch that isn't full are read again.

With `max_wait_s` the end of a batch depends on time: the sizes chosen are logged, and a resume repeats the logged sizes
before it chooses again. Without `max_wait_s` no log is needed; but since the run that resumes may have one, batches
that a stage downstream may read again are counted, and saved as if their sizes had been chosen.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, TypeVar, cast

import anyio
import msgspec

from streamline.core.blame import blame
from streamline.core.channel import Inbox
from streamline.core.choices import Branch, Log
from streamline.core.driver import behind_channel
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, StageRun
from streamline.core.meters import HoldTimer
from streamline.core.options import check_function, is_async
from streamline.core.pace import Pace, check_no_coroutines
from streamline.core.place import Lender
from streamline.core.replay import FailedCall
from streamline.core.state import Over, Reference, State, Tree, part_json
from streamline.core.state_types import Size
from streamline.errors import PlanError, ResumeError, install
from streamline.transforms.base import Stage, StageLayout
from streamline.transforms.collate import as_list, shown_collate, stack, stack_tensors

In = TypeVar("In")
Out = TypeVar("Out")

TOGETHER_ITEMS = 64
"""Small batches are made several at a time, from so many items; a larger one is pulled on its own, so that the next
one reuses warm memory (arrays of 48 KiB: 1.5 x as fast as a list of 512 at once)."""

NAMED: Mapping[str, Callable[[list[Any]], Any]] = {"stack": stack, "torch": stack_tensors}
"""The names that `collate=` takes."""


class BatchPart(msgspec.Struct, frozen=True):
    """The stage's part of a saved state: the sizes of the batches to repeat."""

    replay: list[Size]


@dataclass(frozen=True, kw_only=True)
class Batch(Stage[In, Out]):
    """Collates `size` items into one; a shorter last batch is dropped if `drop_remainder`.

    Attributes:
      counts: whether a stage downstream may read batches again; set when the plan is compiled.
    """

    kind: ClassVar[str] = "batch"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "size": "the batches from here on have the new size, from the first item that was in no batch delivered",
        "drop_remainder": "the rest at the end is treated as it says now",
        "collate": "the batches from here on are made by the new function",
        "added": "the items from here on come in batches",
        "removed": "the items from here on come one by one",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset({"drop_remainder", "collate"})
    state_type: ClassVar[Any] = BatchPart | None
    uncounted_options: ClassVar[Collection[str]] = ("max_wait_s", "counts")
    depth_change: ClassVar[int] = 1

    size: int
    drop_remainder: bool = False
    collate: Callable[[list[In]], Out]
    max_wait_s: float | None = None
    counts: bool = field(default=False, repr=False, compare=False)

    def before(self, later: Sequence[Stage[Any, Any]]) -> Batch[In, Out]:
        return replace(self, counts=any(stage.rewinds for stage in later))

    def shown_options(self) -> list[str]:
        return [*super().shown_options(), *shown_collate(self.collate)]

    @property
    def layout(self) -> StageLayout:
        if self.max_wait_s is None:
            return super().layout
        return StageLayout(holds=self.size, before=self._capacity, adopts=True)

    @classmethod
    def reshard(cls, owns: Sequence[Any]) -> None:
        return None  # sizes are for a stage downstream, which refuses

    @property
    def chooses(self) -> bool:
        return self.max_wait_s is not None

    @property
    def logs(self) -> bool:
        return self.chooses or self.counts

    @property
    def logs_sizes(self) -> bool:
        """Whether the log has the size of each batch: they don't follow from the number of the items."""
        return self.chooses

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
    def inputs_per_output(self) -> int:
        return self.size

    @property
    def output_weight(self) -> int:
        return self.size

    @property
    def _capacity(self) -> int:
        return max(2, self.size)

    def open(self, upstream: Opener[In], state: Tree | None = None) -> Flow[Out]:
        own: BatchPart | None = self.part_of(state)
        flow, site = upstream(state), upstream.site
        batches: Batches[In, Out]
        if self.max_wait_s is None and (own is None or not own.replay):
            batches = FullBatches(self, flow.state, None)
        else:
            if not isinstance(flow, Inbox):
                flow = behind_channel(flow, site, f"input of {self}", self._capacity)
            batches = WaitingBatches(self, flow, own)
        run = self.run_over(flow, site, state, own)
        # not kept by it: the first state would keep the log of every choice made since
        return ListsFlow(batches.state_after(flow.state), batches.lists(run), run, flow)


def make_batch(
    stage: Stage[In, Out], collate: Callable[[list[In]], Out], held: list[In], run: StageRun[In], last: State
) -> list[Out]:
    """Return the batch that a stage makes of `held`, or nothing if it is skipped; `last`: the upstream's state."""
    try:
        with HoldTimer(run.meter):
            if collate is stack or collate is stack_tensors:
                lends: Any = collate
                made: list[Out] = [lends(held, run.site.tasks.session.services.get(Lender).place)]
            else:
                made = [collate(held)]
        check_no_coroutines(stage, made, "await it in a .map after .batch(collate=None)")
        return made
    except BaseException as error:
        run.skip_or_raise(blame(error, str(stage), run.site, last, FailedCall(collate, held)), held, last, len(held))
        return []


def collate_of(option: str, collate: object) -> Callable[[list[Any]], Any]:
    """Return the function that `collate=` names; a PlanError if it can't collate, a PlanTypeError if it is none."""
    if isinstance(collate, str) and collate not in NAMED:
        raise PlanError(f"{option} is 'stack', 'torch', None or a function, got {collate!r}")
    if collate == "torch" and find_spec("torch") is None:
        raise PlanError(f"{option}'torch' needs torch, which is not installed: {install('torch')}")
    fn: Any = NAMED[collate] if isinstance(collate, str) else as_list if collate is None else collate
    check_function(option, fn)
    if is_async(fn) or inspect.isasyncgenfunction(fn):
        raise PlanError(
            f"{option} takes a sync function: what an async one returns would be the batch. Await it in a .map after "
            f"{option.partition('(')[0]}(collate=None)"
        )
    found: Callable[[list[Any]], Any] = fn
    return found


LATE: Chunk[Any] = Chunk((), ())
"""Returned in place of a list when the batch has waited long enough."""


class BatchState(Over):
    """After a batch: the upstream's state after its last item, and how many batches were made so far."""

    __slots__ = ("_count", "_log", "_sizes")

    def __init__(self, name: str, upstream: State, log: Log, count: int, sizes: tuple[int, int] | None = None) -> None:
        super().__init__(name, None, upstream)
        self._log = log
        self._count = count  # batches made since the log's segment began
        self._sizes = sizes  # of a full batch, and of the last one; None: sizes are logged

    @property
    def _number(self) -> int:
        return self._log.start + self._count

    def json(self, until: State | None = None) -> Tree:
        later = self if until is None else cast(BatchState, until.latest)
        stop, planned = later._number, later._log.planned
        tree = self.upstream.json(None if until is None else later.upstream)
        logged = planned if later._sizes is not None else max(stop, planned)
        replay = self._log.between(self._number, logged, later._log)
        if later._sizes is not None and stop > max(self._number, planned) and self._log.leads_to(later._log):
            full, last = later._sizes
            replay += [full] * (stop - 1 - max(self._number, planned)) + [last]
        tree[self.name] = part_json(BatchPart(replay))
        return tree

    def forks(self) -> Iterator[Branch]:
        yield Branch(self.name, self._log, self._number, self._number)
        yield from self.upstream.forks()


class Batches(Generic[In, Out]):
    """One run of a batching stage: the items of its current batch, and how many batches were made.

    Args:
      begin: the upstream's state.
      own: the stage's part of the state that it is opened at; None: it has no sizes to repeat.
    """

    def __init__(self, stage: Batch[In, Out], begin: State, own: BatchPart | None) -> None:
        sizes = own.replay if own is not None else []
        self._stage = stage
        self._replay = deque(sizes)
        self._log = Log(0, sizes, len(sizes), stage.name)
        self._logs, self._logs_sizes = stage.logs or bool(sizes), stage.logs_sizes
        self._collate = stage.collate
        self._made = 0
        self._size = stage.size  # of the last batch
        self._held: list[In] = []
        self._last = Reference.to(begin)  # the upstream's state after them

    @abstractmethod
    def lists(self, run: StageRun[In]) -> Lists[Out]:
        """Yield the batches."""

    def _batch(self, run: StageRun[In], last: State, after: State | None) -> Chunk[Out]:
        """Return the current batch, or the progress over one that was skipped, and log how many items it has.

        `last`: the upstream's state after the batch's last item; `after`: its progress after that.
        """
        held, self._held = self._held, []
        made = make_batch(self._stage, self._collate, held, run, last)
        if self._replay:
            self._replay.popleft()
        elif self._logs_sizes:
            self._log.later = self._log = Log(self._made, [len(held)], self._log.planned, self._stage.name)
        self._made += 1
        self._size = len(held)
        if not made:
            return Chunk((), (), self.state_after(last if after is None else after))
        return Chunk(made, [self.state_after(last)], None if after is None else self.state_after(after))

    def _rest(self, run: StageRun[In]) -> list[Chunk[Out]]:
        """Return the last batch, if there is one that isn't full; a ResumeError if sizes are left to repeat."""
        if self._replay:
            raise ResumeError(f"{self._stage}: fewer items came than when the snapshot was taken")
        if not self._held:
            return []
        if self._stage.drop_remainder:
            return [Chunk((), (), self.state_after(run.upstream.state))]  # what was skipped among the rest counts
        return [self._batch(run, self._last.get(), run.upstream.state)]

    def state_after(self, upstream: State) -> State:
        """Return the state after the last batch, over the upstream's."""
        if not self._logs:
            return upstream
        sizes = None if self._logs_sizes else (self._stage.size, self._size)
        return BatchState(self._stage.name, upstream, self._log, self._made - self._log.start, sizes)


class FullBatches(Batches[In, Out]):
    """One run of a stage without `max_wait_s`, and without sizes to repeat."""

    async def lists(self, run: StageRun[In]) -> Lists[Out]:
        size, pace = self._stage.size, Pace()
        together = size * max(1, TOGETHER_ITEMS // size)
        while (
            chunk := await run.pull(min(together, size * run.max_items) - len(self._held), size - len(self._held))
        ) is not None:
            items, states, after, start = chunk.items, chunk.states, chunk.progress, 0
            del chunk  # the items of a batch are many and large: none is kept longer than it is needed
            while len(items) - start >= (missing := size - len(self._held)):
                self._held.extend(items[start : start + missing])
                start += missing
                batch = self._batch(run, states[start - 1], after if start == len(items) else None)
                if start == len(items):
                    items, start = (), 0
                yield batch
                del batch
                await pace.maybe_yield()
            self._held.extend(items[start:])
            if start < len(items):
                self._last = Reference(states, len(items) - 1)
            elif not self._held and after is not None:
                yield Chunk((), (), self.state_after(after))
            del items
        rest = self._rest(run)
        while rest:
            yield rest.pop()  # held by nothing here


class WaitingBatches(Batches[In, Out]):
    """One run of a stage with `max_wait_s`, or with sizes to repeat.

    Args:
      inbox: the input; cancelling a pull of it loses nothing.
    """

    def __init__(self, stage: Batch[In, Out], inbox: Inbox[In], own: BatchPart | None) -> None:
        super().__init__(stage, inbox.state, own)
        self._inbox = inbox
        self._after: State | None = None  # progress after the last item
        self._deadline: float | None = None

    async def lists(self, run: StageRun[In]) -> Lists[Out]:
        """Yield batches, each when it is full or its time is over."""
        pace = Pace()
        while (chunk := await self._pull()) is not None:
            self._take(chunk)
            if not self._missing or (chunk is LATE):
                self._deadline = None
                yield self._batch(run, self._last.get(), self._after)
            elif not self._held and chunk.progress is not None:
                yield Chunk((), (), self.state_after(chunk.progress))
            del chunk
            await pace.maybe_yield()
        rest = self._rest(run)
        while rest:
            yield rest.pop()  # held by nothing here

    @property
    def _missing(self) -> int:
        """Items until the current batch is full, or has its logged size."""
        return (self._replay[0] if self._replay else self._stage.size) - len(self._held)

    async def _pull(self) -> Chunk[In] | None:
        """Return the next list; None at the end; `LATE` if the current batch has waited long enough."""
        if self._deadline is None or not self._inbox.nothing_pending:
            return await self._inbox.pull(self._missing)
        if anyio.current_time() < self._deadline:
            with anyio.CancelScope(deadline=self._deadline):  # no yield in here: this is a coroutine
                return await self._inbox.pull(self._missing)
        return LATE

    def _take(self, chunk: Chunk[In]) -> None:
        """Add a list to the current batch; its first item starts the clock."""
        if chunk is not LATE:
            self._after = chunk.progress
        if not chunk.items:
            return
        max_wait_s = self._stage.max_wait_s
        if not self._held and max_wait_s is not None and not self._replay:
            self._deadline = anyio.current_time() + max_wait_s
        self._held.extend(chunk.items)
        self._last = Reference(chunk.states, len(chunk.items) - 1)
