"""What is said of an item that is left out because user code failed on it, and when a run may leave items out."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from streamline.errors import PlanError, PlanTypeError, printable
from streamline.options import check_int, is_async
from streamline.tracebacks import OURS, outside, traced_in_full

__all__ = ["MAX_ERRORS", "Decision", "ErrorReport", "Failure", "Letter", "OnError", "Policy", "trace_of"]

MAX_ERRORS = 0.01
"""Skipped items that a run bears unless it says otherwise: one in a hundred."""

FREE_ERRORS = 10
"""Errors that a rate allows in any case: of fewer, no rate can be told."""

RATE_ITEMS = 1000
"""A rate is of at least so many items: of the first ones, many may be held by stages when the first errors count."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """User code, or a record, that failed: what an `on_error` handler gets.

    Attributes:
      stage: the stage's name.
      kind: "map", "filter", "batch", "read_jsonl".
      shard: where it ran; behind the merge, the rank.
      position: of the item in the source, for a person; "" where it isn't known.
      item: what the stage was given: of a batch the list, of `from_items` the index, of a line file the line's bytes.
      error: what was raised. Behind the handler it has no `__traceback__`: frames hold on to items.
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


Letter: TypeAlias = dict[str, Any]
"""The line of a dead letter, of which `Letters` knows what stands in it."""

Decision: TypeAlias = Literal["skip", "raise"]

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Failure], Decision]


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """The items that a stream has left out so far, as far as they are consumed.

    Attributes:
      total: items.
      stages: items by stage.
      last: the last few, oldest first; of the run at hand, not of what it resumed.
      dead_letters: the file that says of each what happened; None: nobody asked for one.
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
        return f"{what}: {stages}" + (
            f"; see {printable(str(self.dead_letters))}" if self.dead_letters is not None else ""
        )


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a run does with items on which user code fails.

    Attributes:
      on_error: "raise", "skip", or a function that decides.
      max_errors: an int is a count, a float a rate; None: no limit.
      dead_letters: where skipped items are written down; None: nowhere.

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
        """Whether items may be left out at all."""
        return self.on_error != "raise"

    def too_many(self, errors: int, consumed: int) -> bool:
        """Whether `errors` skipped items beside `consumed` others are more than the run bears."""
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


def trace_of(error: BaseException) -> traceback.TracebackException:
    """Return the traceback of an exception, without its frames, from the first one on that isn't streamline's."""
    full = traced_in_full()
    trace = error.__traceback__ if full else outside(error, error.__traceback__)
    found = traceback.TracebackException(type(error), error, trace, lookup_lines=False)
    chain = [] if full else [found.__cause__, found.__context__]
    for other in chain:  # it grows meanwhile
        if other is not None:
            ours = [frame.filename.startswith(OURS) for frame in other.stack]
            first = ours.index(False) if False in ours else 0
            del other.stack[:first]
            chain += [other.__cause__, other.__context__]
    return found
