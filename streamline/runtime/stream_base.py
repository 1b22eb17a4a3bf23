"""The base class of both streams: errors, stats, trace and snapshots of a plan that runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, NoReturn, TypeVar

from streamline.core.cursor import CurrentChunk, Cursor
from streamline.core.error_policy import ErrorReport
from streamline.core.forks import disown_in_copies
from streamline.core.gate import Gate
from streamline.core.options import no_attribute
from streamline.core.state import At, State
from streamline.core.tasks import Session
from streamline.errors import PlanError
from streamline.observe.page import page_url
from streamline.observe.stats import Stats, collect, stats_of
from streamline.observe.trace import MAX_BYTES, Trace
from streamline.plan.plan import Plan
from streamline.runtime.tuning import NOT_TUNED, StreamTuning
from streamline.sharding.end_flow import Padded, padded_in
from streamline.sharding.ends import EndsReport
from streamline.snapshot.recorder import StepWriter
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.live_reader import LiveReader
from streamline.transfer.base import HandOver

if TYPE_CHECKING:
    from streamline.runtime.run import ResolvedRun

T = TypeVar("T")


class BaseStream(Cursor[T]):
    def __init__(self, resolved: ResolvedRun, session: Session | None = None) -> None:
        super().__init__(At("", None))  # until it begins
        self._resolved = resolved
        self._session = session or resolved.session()
        record = resolved.options.watch.record
        self._writer = None if record is None else StepWriter(record)
        if self._writer is not None:
            self._session.hooks.at_close(self._writer.close)
        self._by_step = self._writer is not None or resolved.leaves_out_more
        self._session.meters.on_first_list = collect
        if self._session.errors.policy.skips:
            self._session.hooks.on_chunk_boundary(self._session.errors.enforce_limit)
        disown_in_copies(self)

    def disown(self) -> None:
        """Return no more items in this fork."""
        self._forget()

    def __repr__(self) -> str:
        source, *stages = self.plan.names
        return f"<{type(self).__name__} of {source}, {', '.join(stages)}, at item {self.count:,}>"

    if not TYPE_CHECKING:  # type checkers say so sooner

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(self, name)

    @property
    def plan(self) -> Plan:
        """What runs."""
        return self._resolved.plan

    @property
    def errors(self) -> ErrorReport:
        """The items that were skipped so far because of an error, up to the last item received.

        Raises:
          DeadLetterError: one of them can't be written down.
        """
        self._session.errors.settle(self.state)
        return self._session.errors.report()

    @property
    def tuning(self) -> StreamTuning:
        """What `open(tune=)` has changed, and why. Raises `PlanError`: it isn't tuned."""
        tuning = self._resolved.options.work.tuning
        if tuning is None:
            raise PlanError(NOT_TUNED)
        return tuning

    @property
    def page(self) -> str | None:
        """The address of its live page, with the token; None: it has none, or it is closed."""
        return page_url(self._resolved.options.watch.page_place)

    def stats(self) -> Stats:
        """Return what was counted so far, and what limits the stream: see docs/seeing.md. Also after the end."""
        ends, tuning = self.ends, self._resolved.options.work.tuning
        stats, steps = stats_of(self._session.meters, self.at_hand), () if tuning is None else tuning.steps
        return replace(stats, dropped=ends.dropped, padded=ends.padded, tuning=steps)

    @property
    def padding(self) -> bool:
        """Whether the last item was given again, so that all ranks end together: `ends="pad"`."""
        return isinstance(self.state, Padded)

    @property
    def ends(self) -> EndsReport:
        """How this rank's stream ends together with those of the others, and what that costs."""
        ending, state = self._resolved.ending, self.state
        if not ending.active:
            return EndsReport(policy=ending.ends.policy, agreed="alone")
        padded = padded_in(state)
        if ending.left is not None:
            return EndsReport(
                policy=ending.ends.policy, agreed="beforehand", left=ending.left, dropped=ending.spare, padded=padded
            )
        found = self._session.services.find(EndsReport)
        return replace(found or EndsReport(policy=ending.ends.policy, agreed="on the way"), padded=padded)

    def trace(self, path: str | PathLike[str], *, max_bytes: int = MAX_BYTES) -> Trace:
        """Begin to write what every stage does and when, for https://ui.perfetto.dev; `docs/watching.md` explains it.

        It ends with the stream, or before: `with stream.trace("run.json"):`, or `.stop()`.

        Args:
          max_bytes: when the file has half of it, it becomes "run.previous.json", and another one begins; at least 1
            MiB.

        Raises:
          PlanError: another trace of this stream is being written, or a `max_bytes` that is too small.
          OSError: the file can't be made. Later ones, a full disk say, end the trace with a warning.
        """
        return self._resolved.trace(self._session, path, max_bytes)

    # Steps: the items of an epoch by number, from 0 on ----------------------------------------------------------------

    @property
    def _step(self) -> int:
        """The number of the next step; only if `first_step` is known."""
        return (self._resolved.first_step or 0) + self.count

    def _to_give(self) -> bool:
        """Whether an item is at hand, after those of steps that are left out were dropped."""
        while self._by_step and self._current.rest and self._resolved.leaves_out(self._step):
            part = super()._part_at_hand()
            self._record(left_out=True)
            deque(islice(part, 1), 0)
        return super()._to_give()

    def _part_at_hand(self) -> Iterator[T]:
        """As `Cursor`; only one item where steps are recorded or left out."""
        part = super()._part_at_hand()
        if not self._by_step:
            return part
        self._record(left_out=False)
        return islice(part, 1)

    def _record(self, *, left_out: bool) -> None:
        """Record the step of the next item, if steps are recorded. Idempotent."""
        if self._writer is not None:
            before, after = self._current.state_after, self._current.state_ahead
            self._writer.step(self._step, before, after, self._resolved.snapshots, left_out=left_out)

    def _end_record(self) -> None:
        if self._writer is not None:
            self._writer.end(self._step)

    def _prepare_last(self, hand: CurrentChunk[T]) -> None:
        """Wait for an item on its way to a device, in a list of its own."""
        hand_over = self._session.services.find(HandOver)
        if hand_over is not None:
            hand.rest[0] = hand_over.arrived(hand.rest[0])

    def _snapshot(self, gate: Gate | None, items_ago: int = 0) -> Snapshot:
        """Return the snapshot right after the last item received, or right before it.

        Args:
          gate: of the event loop that the consumer is in; None: it has a thread of its own.
        """
        state, count = self._state_and_count(items_ago)
        self._session.errors.settle(state)  # writes the dead letters that it counts
        reader = self._session.services.find(LiveReader)
        first = self._resolved.first_step
        step = None if first is None else first + count
        return self._resolved.snapshots.take(state, gate, None if reader is None else reader.journal, step)

    def _state_and_count(self, items_ago: int) -> tuple[State, int]:
        """Return the state right after the last item, or right before it, and how many items were taken by then."""
        current = self._current
        while True:
            count = current.count
            reference = current.state_before if items_ago else current.state_after
            if count == current.count:  # no item was taken meanwhile, by another thread
                return reference.get(), max(0, count - items_ago)

    def snapshot_since(self, since: State, gate: Gate) -> Snapshot:
        """Return a snapshot of an earlier state of this flow, plus the choices made since; `gate` is the caller's.

        From any thread. Not of a live source, whose journal drops what this stream's consumer has passed.
        """
        return self._resolved.snapshots.take(since, gate)
