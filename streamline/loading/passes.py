"""What a loader iterates: a pass over its pipeline, and the iteration that hands out its items."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar

from streamline.backends.base import Backend
from streamline.core.cursor import PartIterator
from streamline.core.options import check_int
from streamline.errors import ClosedError, PlanTypeError
from streamline.loading.epochs import Epochs
from streamline.runtime.open import Opened
from streamline.runtime.sync_stream import SyncStream
from streamline.sharding.ends import EndsPolicy
from streamline.snapshot.snapshot import Snapshot

__all__ = ["Iteration", "Now", "OpenAt", "Run", "Spent", "check_begin"]


T = TypeVar("T")


class OpenAt(Protocol[T]):
    """Opens the pipeline at a snapshot, or at the beginning of an epoch; `Pipeline.open` with its other options."""

    def __call__(
        self, *, resume: Snapshot | None, epoch: int | None, backend: Backend = ..., ends: EndsPolicy = ...
    ) -> Opened[T]: ...


class Spent:
    """Whether the workers of a pass have given all that they have. Told and asked in different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False
        self._work: Callable[[], None] | None = None

    def tell(self) -> None:
        """They have. Idempotent."""
        with self._lock:
            self._told = True
            work, self._work = self._work, None
        if work is not None:
            work()

    def then(self, work: Callable[[], None]) -> None:
        """Do `work` as soon as they have, once; at once, if they have already."""
        with self._lock:
            self._work = None if self._told else work
            now = self._told
        if now:
            work()


@dataclass(frozen=True)
class Run(Generic[T]):
    """The stream that items come from, or came from.

    Attributes:
      begin: what it was opened at; None: at the beginning of `epoch`.
      epoch: the pipeline's; with `steps_per_epoch` it isn't the loader's.
      spent: whether its workers have given all that they have.
      offset: less the items that it had given when the present iteration began, plus those of that from before it.
      alive: it can still be asked for items.
    """

    stream: SyncStream[T]
    begin: Snapshot | None
    epoch: int
    spent: Spent
    offset: int = 0
    alive: bool = True

    @property
    def taken(self) -> int:
        """Items that the present iteration has given."""
        return self.offset + self.stream.count

    def stopped(self) -> Run[T]:
        """Close the stream; the snapshot stays."""
        self.stream.close()
        return replace(self, alive=False)

    def reset(self) -> Run[T]:
        """Let go of what its caches keep."""
        self.stream.reset_cache()
        return self if self.begin is None else replace(self, begin=self.stream.snapshot())

    @property
    def snapshot(self) -> Snapshot:
        """Where it stands."""
        return self.stream.snapshot() if self.begin is None or self.stream.count else self.begin

    @property
    def snapshot_before(self) -> Snapshot:
        """Where it stood right before the last item."""
        return self.stream.snapshot(1) if self.begin is None or self.stream.count > 1 else self.begin


class Now(NamedTuple, Generic[T]):
    """Accounts and stream change together: Ctrl-C may come between any two lines."""

    epochs: Epochs
    run: Run[T] | None


class Iteration(PartIterator[T]):
    """One epoch of a loader, or what is left of it.

    Args:
      part: returns what gives the next items, as `SyncStream.part`; ClosedError where another iteration has begun.
      over: told of the end; perhaps again, if Ctrl-C comes in the middle of it.
      insist: raises a ClosedError if this isn't the loader's present iteration.
    """

    def __init__(
        self, part: Callable[[], Iterator[T] | None], over: Callable[[], None], insist: Callable[[], None]
    ) -> None:
        self._part = part
        self._over = over
        self._insist = insist

    def _fetch_part(self) -> NoReturn:
        try:
            part = self._part()
        except ClosedError:
            self._insist()
            raise
        if part is None:
            self._over()
        self._go_on(part)


def check_begin(
    epoch: int | None, steps_per_epoch: int | None, fixed_epoch: bool, resume: object
) -> tuple[int | None, int | None]:
    """Insist on options of `.loader()` that are of their types; return epoch and steps.

    Raises:
      PlanError: an epoch below 0, or fewer than 1 step. PlanTypeError: something else.
    """
    if epoch is not None:
        epoch = check_int(".loader(epoch=)", epoch, 0)
    if steps_per_epoch is not None:
        steps_per_epoch = check_int(".loader(steps_per_epoch=)", steps_per_epoch, 1)
    if not isinstance(fixed_epoch, bool):
        raise PlanTypeError(f".loader(fixed_epoch=) is True or False, got {type(fixed_epoch).__name__} {fixed_epoch!r}")
    if resume is not None and not isinstance(resume, Snapshot):
        raise PlanTypeError(
            f".loader(resume=) is a Snapshot, got {type(resume).__name__}; a state_dict goes to load_state_dict()"
        )
    return epoch, steps_per_epoch
