"""Which epoch comes next, and how far into it: a loader's accounting. Pure: each event returns the accounts after it.

A loader is *waiting* (no iteration, or one that has run to its end), *running* (an iteration gives items), or has been
*left* (by `break` or an exception, with the rest of its epoch untouched). A state that is saved after `break` resumes
where the loop was left; the next `iter()` of the same loader goes on with the next epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class LoaderPhase(Enum):
    """What a loader is doing."""

    WAITING = "waiting"
    RUNNING = "running"
    LEFT = "left"


@dataclass(frozen=True)
class EpochPlace:
    """Right after item `step` of an epoch.

    Attributes:
      epoch: 0-based.
      step: items taken in it.
      fresh: the pipeline begins anew here; otherwise it continues from where it stands.
    """

    epoch: int
    step: int = 0
    fresh: bool = True


@dataclass(frozen=True)
class Epochs:
    """The accounts of one loader.

    Attributes:
      place: waiting: where the next iteration begins; running: where this one began; left: where it was left.
      steps: items in an epoch of a pipeline that goes on; None: an epoch is a pass over the pipeline.
      fixed: every iteration is of the same epoch.
      phase: what the loader is doing.
      given: the epoch that `set_epoch` named for the next iteration while this one runs.
      begun: an item has been taken.
    """

    place: EpochPlace
    steps: int | None = None
    fixed: bool = False
    phase: LoaderPhase = LoaderPhase.WAITING
    given: int | None = None
    begun: bool = False

    @property
    def upcoming(self) -> EpochPlace:
        """Where the next iteration begins."""
        return self.place if self.phase is LoaderPhase.WAITING else self.following

    @property
    def following(self) -> EpochPlace:
        """Where the epoch begins that follows the present one."""
        natural = self._natural
        return natural if self.given in (None, natural.epoch) else EpochPlace(self.given or 0)

    @property
    def jumps(self) -> bool:
        """Whether what follows the present epoch is another than the next."""
        return self.following.epoch != self._natural.epoch

    @property
    def _natural(self) -> EpochPlace:
        if self.fixed:
            return EpochPlace(self.place.epoch)
        return EpochPlace(self.place.epoch + 1, fresh=self.steps is None)

    def full(self, taken: int) -> bool:
        """Whether this iteration, which has given `taken` items, has given all of its steps."""
        return self.left(taken) == 0

    def left(self, taken: int) -> int | None:
        """Return how many steps this iteration has left, after `taken` items; None: a pass has as many as it has."""
        return None if self.steps is None else max(0, self.steps - self.place.step - taken)

    def at(self, taken: int) -> EpochPlace:
        """Return where a running iteration stands that has given `taken` items."""
        if self.full(taken):
            return self.following
        return replace(self.place, step=self.place.step + taken, fresh=False) if taken else self.place

    def begin(self) -> Epochs:
        return replace(self, place=self.upcoming, phase=LoaderPhase.RUNNING, given=None)

    def end(self) -> Epochs:
        """The epoch is over."""
        return replace(self, place=self.following, phase=LoaderPhase.WAITING, given=None)

    def leave(self, taken: int) -> Epochs:
        """The iteration was left after `taken` items; one that gave none has not begun its epoch."""
        if self.full(taken):
            return replace(self, begun=True).end()
        if taken:
            return replace(self, place=self.at(taken), phase=LoaderPhase.LEFT, begun=True)
        waiting = replace(self, phase=LoaderPhase.WAITING, given=None)
        return waiting if self.given is None else waiting.set_epoch(self.given)

    def set_epoch(self, epoch: int) -> Epochs:
        """Let the next iteration be of `epoch`. If it would be anyway, its place in there stays."""
        if self.fixed:
            return self
        if self.phase is LoaderPhase.RUNNING:
            return replace(self, given=epoch)
        upcoming = self.upcoming
        place = upcoming if epoch == upcoming.epoch else EpochPlace(epoch)
        return replace(self, place=place, phase=LoaderPhase.WAITING, given=None)
