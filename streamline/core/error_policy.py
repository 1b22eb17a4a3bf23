"""The error policy: which failed items are skipped, decided in the stage and counted at consumption.

A stage that skips an item adds one to its count, which its states carry from then on, and records the failure in the
run's `Errors`. When the consumer asks for another list, the count in its state says which failures are consumed: those
are written as dead letters, reported, and compared with `max_errors`. So a resume continues the count of its snapshot,
and items that are read again are counted again.

The event loop and the consumer's thread share one queue per stage and shard, filled by the first, emptied by the other.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from streamline.core.figures import label
from streamline.core.forks import disown_in_copies
from streamline.core.meters import Meters
from streamline.core.options import check_int, is_async
from streamline.core.replay import CALL_ATTRIBUTE, Adapter, FailedCall
from streamline.core.state import (
    Reference,
    SkipCounts,
    Skipped,
    State,
    Tally,
    Tree,
    consumed_count,
    skips_in,
    with_skips,
)
from streamline.core.tracebacks import trace_of
from streamline.errors import (
    DeadLetterError,
    PlanError,
    PlanTypeError,
    StageError,
    StreamlineError,
    TooManyErrors,
    printable,
)

MAX_ERRORS = 0.01
"""The default limit: one skipped item in a hundred."""

FREE_ERRORS = 10
"""The first errors are always tolerated: so few say nothing about a rate."""

RATE_ITEMS = 1000
"""A rate is of at least so many items: at the start, stages may hold many items when the first errors count."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """User code, or a record, that failed: what an `on_error` handler gets.

    Attributes:
      stage: the stage's name.
      kind: "map", "filter", "batch", "read_jsonl".
      shard: where it ran; downstream of the merge, the rank.
      position: of the item in the source, as text; "": unknown.
      item: what the stage was given: of a batch the list, of `from_items` the index, of a line file the line's bytes.
      error: what was raised. Once the handler returns it has no `__traceback__`: frames keep items alive.
      items: how many items it counts as: of a batch, all that are in it.
    """

    stage: str
    kind: str
    shard: int
    position: str
    item: Any = field(repr=False)
    error: Exception
    items: int = 1
    trace: traceback.TracebackException = field(repr=False)

    @property
    def traceback(self) -> str:
        """The traceback as text, from the user's own frames on."""
        return "".join(self.trace.format())


DeadLetter: TypeAlias = dict[str, Any]
"""One line of the file; `DeadLetters` knows its fields."""

Decision: TypeAlias = Literal["skip", "raise"]
OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Failure], Decision]


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """The items that a stream has skipped, up to the last item consumed.

    Attributes:
      total: items.
      stages: items by stage.
      last: the last few of this run, oldest first; those before a resume aren't included.
      dead_letters: the file that describes each; None: there is none.
    """

    total: int = 0
    stages: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    last: tuple[Failure, ...] = ()
    dead_letters: Path | None = None

    def __str__(self) -> str:
        if not self.total:
            return "no items were skipped"
        stages = ", ".join(f"{name} {count:,}" for name, count in self.stages.items())
        what = "1 item was skipped" if self.total == 1 else f"{self.total:,} items were skipped"
        where = "" if self.dead_letters is None else f"; see {printable(str(self.dead_letters))}"
        return f"{what}: {stages}{where}"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a run does with items on which user code fails.

    Attributes:
      on_error: "raise", "skip", or a function that decides.
      max_errors: an int is a count, a float a rate; None: no limit.
      dead_letters: where skipped items are written; None: nowhere.

    Raises:
      PlanError: an option out of range, or one that has no meaning without another.
      PlanTypeError: an option of the wrong type.
    """

    on_error: OnError = "raise"
    max_errors: int | float | None = MAX_ERRORS
    dead_letters: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _check_on_error(self.on_error)
        _check_max_errors(self.max_errors)
        letters = self.dead_letters
        if letters is not None and (not isinstance(letters, str | os.PathLike) or not os.fspath(letters)):
            raise PlanTypeError(f".open(dead_letters=) is a path that isn't empty, got {letters!r}")
        if self.skips:
            return
        if letters is not None:
            raise PlanError('.open(dead_letters=) says what was skipped: add on_error="skip", or leave it out')
        if self.max_errors != MAX_ERRORS:
            raise PlanError(
                '.open(max_errors=) bounds how many items are skipped: add on_error="skip", or leave it out'
            )

    @property
    def skips(self) -> bool:
        """Whether any item may be skipped."""
        return self.on_error != "raise"

    def too_many(self, errors: int, consumed: int) -> bool:
        """Whether `errors` skipped items beside `consumed` others exceed the limit."""
        if self.max_errors is None:
            return False
        if isinstance(self.max_errors, int):
            return errors > self.max_errors
        return errors > max(FREE_ERRORS, self.max_errors * max(RATE_ITEMS, errors + consumed))


def _check_on_error(on_error: object) -> None:
    if isinstance(on_error, str):
        if on_error not in ("raise", "skip"):
            raise PlanError(f".open(on_error=) is 'raise', 'skip' or a function of a Failure, got {on_error!r}")
    elif not callable(on_error):
        given = f"{type(on_error).__name__} {on_error!r}"
        raise PlanTypeError(f".open(on_error=) is 'raise', 'skip' or a function of a Failure, got {given}")
    elif is_async(on_error):
        raise PlanError(".open(on_error=) takes a sync function: nothing waits for an async one")


def _check_max_errors(limit: object) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        given = f"{type(limit).__name__} {limit!r}"
        raise PlanTypeError(f".open(max_errors=) is an integer (a count), a float (a rate) or None, got {given}")
    if isinstance(limit, int):
        check_int(".open(max_errors=)", limit, 0)
    elif not 0 < limit < 1:
        raise PlanError(
            f".open(max_errors=) as a float is a rate between 0 and 1, got {limit}: an int is a count, None is no limit"
        )


logger = logging.getLogger("streamline.skipping")  # as the docs call it

LAST_FAILURES = 5
"""Failures that a report shows."""

Key = tuple[int, str]


class DeadLetterSink(Protocol):
    """Where skipped items are written: `DeadLetters`, which a host process doesn't need to import."""

    @property
    def path(self) -> Path:
        """The file."""

    def letter_of(self, failure: Failure, epoch: tuple[int, ...], /) -> DeadLetter:
        """Return the line of a failure, except its number; the item is read now."""

    def append(self, letters: Iterable[DeadLetter], /) -> None:
        """Write lines after those that are there."""


class Errors:
    """The skipped items of one run.

    A stage asks `decide`, and calls `record_skip` before the state that counts the item. At the next chunk boundary,
    `enforce_limit` counts and writes what is consumed by then; a snapshot does so by `settle`.

    Args:
      before: of the state that the run begins at: skipped items by (shard, stage).
      dead_letters: where they are written; None: nowhere.
      size: items of the source in one that the merge takes: more than one where workers make batches.
      meters: count every item that is skipped; None: not counted.
      cached: states may count items that an earlier run skipped (a cache on disk), so every state is compared.

    Attributes:
      goes_on: items were skipped before the state that the run begins at.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        before: Mapping[Key, int] | None = None,
        dead_letters: DeadLetterSink | None = None,
        size: int = 1,
        meters: Meters | None = None,
        *,
        cached: bool = False,
    ) -> None:
        self.policy = policy or Policy()
        self._dead_letters = dead_letters
        self._size = size
        self._meters = meters
        self._totals: dict[Key, int] = dict(before or {})
        self._pending = _PendingSkips()
        self._counting = False
        self.goes_on = bool(self._totals)
        self._limit_unchecked = self.goes_on or cached
        self._cached = cached
        self._last: deque[Failure] = deque(maxlen=LAST_FAILURES)
        self._failure: StreamlineError | None = None
        self._reported = False
        self._deciding = threading.RLock()
        disown_in_copies(self)

    def disown(self) -> None:
        """Write and log nothing in this fork: the process that was copied does."""
        self._dead_letters, self._pending = None, _PendingSkips()
        self._limit_unchecked, self._reported = False, True

    def skips(self, name: str, kind: str, shard: int, epoch: tuple[int, ...], count: SkipCounts) -> Skips | None:
        """Return the skips of one stage, `count` items so far; None: it skips none, and never has."""
        if not count and not self.policy.skips:
            return None
        return Skips(self, name, kind, shard, epoch, count)

    def record_skip(self, key: Key, failure: Failure, epoch: tuple[int, ...], number: int) -> None:
        """Record a skipped item, the `number`-th of its stage and shard, before a state counts it."""
        line = None
        if self._dead_letters is not None:
            line = {**self._dead_letters.letter_of(failure, epoch), "n": number}
        more = self._pending.add(key, _PendingSkip(number, failure, line))
        if self._meters is not None:
            self._meters.stage(failure.stage, failure.kind, failure.shard).figures.errors += more

    def decide(self, failure: Failure) -> object:
        """Return the decision, "skip" or "raise", or what else a handler returned. One call at a time."""
        on_error = self.policy.on_error
        if isinstance(on_error, str):
            return on_error
        with self._deciding:
            return on_error(failure)

    def settle(self, state: State) -> None:
        """Count and write what was skipped up to `state`, which the consumer has reached."""
        if self._pending or self._limit_unchecked:
            self._count(state)

    def enforce_limit(self, state: Reference) -> None:
        """Count what was skipped up to `state`, and fail the run if that exceeds the limit; then each call raises."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # else it would grow with every raise
        if not self._pending and not self._limit_unchecked:
            return
        try:
            tally = self._count(state.get())
            self._limit_unchecked = self._cached
            if self.policy.too_many(sum(self._totals.values()), tally.taken * self._size):
                raise self._too_many()
        except StreamlineError as failure:
            self._failure = failure
            raise

    def _count(self, state: State) -> Tally:
        tally = Tally()
        state.tally(tally)
        if self._counting:  # a signal's handler takes a snapshot during this
            return tally
        self._counting = True
        try:
            self._take(tally.skipped)
        finally:
            self._counting = False
        return tally

    def _take(self, totals: Mapping[Key, int]) -> None:
        """Write what is counted now, and only then remove it: an interrupt in between loses nothing."""
        counts, counted = self._pending.up_to(totals)
        unwritten: DeadLetterError | None = None
        if self._dead_letters is not None and counted:
            try:
                self._dead_letters.append(left.line for left in counted if left.line is not None)
            except DeadLetterError as error:
                unwritten = error
        self._pending.remove(counts)
        self._last.extend(left.failure for left in counted[-LAST_FAILURES:])
        self._totals.update(totals)
        if unwritten is not None:
            raise unwritten

    def report(self) -> ErrorReport:
        """Return what is counted. From any thread."""
        stages: dict[str, int] = {}
        for (_, stage), count in dict(self._totals).items():
            stages[stage] = stages.get(stage, 0) + count
        most_first = dict(sorted(stages.items(), key=lambda entry: -entry[1]))
        path = None if self._dead_letters is None else self._dead_letters.path
        return ErrorReport(
            total=sum(stages.values()), stages=MappingProxyType(most_first), last=tuple(self._last), dead_letters=path
        )

    def close(self, state: State | None) -> None:
        """Count once more, up to the last `state`, if known, and log what was skipped. Idempotent, never raises."""
        if self._reported or not self.policy.skips:
            return
        self._reported = True
        try:
            if state is not None:
                self.settle(state)
        except DeadLetterError as error:
            logger.error("%s", error)
        report = self.report()
        if report.total:
            logger.warning("%s", report)

    def _too_many(self) -> TooManyErrors:
        limit = self.policy.max_errors
        allowed = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}, a rate,"
        last = self._last[-1] if self._last else None
        error = TooManyErrors(
            f"{self.report()}; max_errors={allowed} allows no more"
            + (f". The last, in {label(last.stage, last.kind)}: {last.error!r}" if last else " (all before the resume)")
            + ". Mend the cause (it resumes where it stands), or raise max_errors; None is no limit"
        )
        if last is not None:
            last.error.add_note(last.traceback)
            error.__cause__ = last.error
        return error


class _PendingSkip(NamedTuple):
    """A skipped item that isn't consumed yet; `number` counts those of its stage up to this one."""

    number: int
    failure: Failure
    line: DeadLetter | None


class _PendingSkips:
    """Those of all stages and shards: the event loop's thread adds, the consumer's thread removes."""

    def __init__(self) -> None:
        self._waiting: dict[Key, deque[_PendingSkip]] = {}
        self._added = 0  # items; written by the event loop's thread only
        self._removed = 0  # written by the consumer's only

    def __bool__(self) -> bool:
        return self._added != self._removed

    def add(self, key: Key, skip: _PendingSkip) -> int:
        """Add one in place of those from its number on, and return how many items more there are.

        In another pass of a repeat, numbers come again: what the earlier pass skipped after its last item is never
        consumed.
        """
        waiting, more = self._waiting.setdefault(key, deque()), skip.failure.items
        with suppress(IndexError):  # empty; perhaps the consumer's thread has just taken the last one
            while waiting[-1].number >= skip.number:
                more -= waiting.pop().failure.items
        self._added += more
        waiting.append(skip)
        return more

    def up_to(self, totals: Mapping[Key, int]) -> tuple[dict[Key, int], list[_PendingSkip]]:
        """Return how many of each stage and shard `totals` include, and those skips."""
        counts = {key: self._count_included(key, total) for key, total in totals.items()}
        return counts, [self._waiting[key][at] for key, count in counts.items() for at in range(count)]

    def _count_included(self, key: Key, total: int) -> int:
        waiting, count = self._waiting.get(key, ()), 0
        while count < len(waiting) and waiting[count].number <= total:
            count += 1
        return count

    def remove(self, counts: Mapping[Key, int]) -> None:
        for key, count in counts.items():
            for _ in range(count):
                self._removed += self._waiting[key].popleft().failure.items


class Skips:
    """The items that one stage skips in one shard; `count`: up to now, those before the opening included."""

    __slots__ = ("_consumed", "_epoch", "_errors", "_kind", "count", "name", "shard")

    def __init__(
        self, errors: Errors, name: str, kind: str, shard: int, epoch: tuple[int, ...], count: SkipCounts
    ) -> None:
        self._errors = errors
        self._kind = kind
        self._epoch = epoch
        self.name = name
        self.shard = shard
        self.count = count if isinstance(count, int) else count[0]
        self._consumed = consumed_count(count)

    @property
    def counts(self) -> SkipCounts:
        """The count as states have it."""
        return self.count if self.count >= self._consumed else [self.count, self._consumed]

    def over(self, state: State) -> State:
        """Return `state` with the count, unless that is 0."""
        return Skipped(self.name, self.shard, self.counts, state) if self.counts else state

    @property
    def active(self) -> bool:
        """Whether anything may be skipped."""
        return self._errors.policy.skips

    def decide(self, error: BaseException, item: object, position: State, items: int = 1) -> Failure | BaseException:
        """Return the failure to skip, or the exception that fails the stream.

        `position`: the state right after the item. If it is skipped, the traceback becomes text: frames keep items
        alive.
        """
        if not self.active or not isinstance(error, Exception) or isinstance(error.__cause__, GeneratorExit):
            return error
        call = vars(error).get(CALL_ATTRIBUTE)
        failure = Failure(
            stage=self.name,
            kind=self._kind,
            shard=self.shard,
            position=printable(position.where()),
            item=call.item if isinstance(call, FailedCall) and isinstance(call.fn, Adapter) else item,
            error=error,
            items=items,
            trace=trace_of(error),
        )
        refusal = self._ask_handler(failure)
        if refusal is None:
            error.__traceback__ = None
            return failure
        return refusal

    def add(self, failure: Failure) -> None:
        """Count a failure; later states must include it. One that was consumed before is not recorded again."""
        self.count += failure.items
        if self.count <= self._consumed:
            return
        self._errors.record_skip((self.shard, self.name), failure, self._epoch, self.count)

    def _ask_handler(self, failure: Failure) -> BaseException | None:
        """Ask the handler; return the exception that fails the stream, or None."""
        try:
            decision = self._errors.decide(failure)
        except BaseException as error:
            error.add_note(f"in the on_error handler, for a failure of {label(failure.stage, failure.kind)}")
            if isinstance(error, Exception):
                error.__cause__ = error.__cause__ or failure.error
                return error if not isinstance(error, StopIteration | StopAsyncIteration) else _not_an_end(error)
            return error
        if isinstance(decision, str) and decision == "skip":  # an array has no truth value
            return None
        if isinstance(decision, str) and decision == "raise":
            return failure.error
        refusal = PlanTypeError(f"the on_error handler returns 'skip' or 'raise', got {decision!r}")
        refusal.__cause__ = failure.error
        return refusal


def _not_an_end(error: Exception) -> StageError:
    wrapped = StageError(f"the on_error handler raised {type(error).__name__}, which Python would read as an end")
    wrapped.__cause__ = error
    return wrapped


def counts_in(tree: Tree) -> dict[str, int]:
    """Return the consumed counts of skipped items in a state as JSON, by stage, without those of a merge's workers."""
    return {name: consumed_count(skips) for name, skips in skips_in(tree).items()}


def move_counts(tree: Tree, to: Tree, names: Collection[str]) -> tuple[Tree, Tree]:
    """Return two states as JSON, with the counts of these stages moved from the first to the second."""
    counts = skips_in(tree)
    going = {name: count for name, count in counts.items() if name in names}
    if not going:
        return tree, to
    staying = {name: count for name, count in counts.items() if name not in names}
    return with_skips(tree, staying), with_skips(to, {**going, **skips_in(to)})
