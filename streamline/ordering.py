"""A pipeline's stages that say which of its items come, how often and in which order, as users write them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Never, Self, TypeVar, cast

from streamline.errors import PlanTypeError
from streamline.options import check_int, check_known, check_seed
from streamline.runnable import Runnable
from streamline.transforms.base import Stage
from streamline.transforms.limit import Skip, Take
from streamline.transforms.repeat import Repeat
from streamline.transforms.shuffle import IndexShuffle, Shuffle, ShuffleFiles

__all__ = ["Ordering"]

T = TypeVar("T")


class Ordering(Runnable[T]):
    """The part of `Pipeline` that adds these stages. Each method raises a `PlanError` as `Pipeline`'s do."""

    def take(self, count: int, *, name: str | None = None) -> Self:
        """Keep the first `count` items; before a merge, of each worker."""
        count = check_int(".take(count)", count, 0)
        return self._same(Take(name=self._name(name, "take"), count=count))

    def skip(self, count: int, *, name: str | None = None) -> Self:
        """Drop the first `count` items; before a merge, of each worker."""
        count = check_int(".skip(count)", count, 0)
        return self._same(Skip(name=self._name(name, "skip"), count=count))

    def repeat(self, times: int | None = None, *, name: str | None = None) -> Self:
        """Go through everything before it `times` times; None: for ever. Shuffles before it differ in each pass."""
        if times is not None:
            times = check_int(".repeat(times)", times, 0)
        return self._same(Repeat(name=self._name(name, "repeat"), times=times))

    def shuffle(
        self, *given: Never, window: int | None = None, seed: int = 0, name: str | None = None, **unknown: Never
    ) -> Self:
        """Permute the items: each `window` of them, or without a window the whole index of an indexable source.

        Args:
          window: items that are permuted among themselves; twice as many are held in memory, and a resume reads up to
            twice as many again. Behind `.shard`, in each worker.
          seed: with it and the epoch (and shard and window), the order is always the same.

        Raises:
          PlanError: without a window, the source has no index, or it stands behind `.shard`.
        """
        check_known(".shuffle", unknown, ("window", "seed", "name"))
        if given:
            raise PlanTypeError(
                f".shuffle takes no number by itself: .shuffle(window={given[0]!r}) permutes each {given[0]!r} items "
                f"among themselves, .shuffle(seed={given[0]!r}) the whole index by that seed"
            )
        seed = check_seed(".shuffle(seed=)", seed)
        name = self._name(name, "shuffle")
        if window is None:
            return self._same(IndexShuffle(name=name, seed=seed))
        window = check_int(".shuffle(window=)", window, 1)
        return self._same(Shuffle(name=name, window=window, seed=seed))

    def shuffle_files(self, *, seed: int = 0, name: str | None = None) -> Self:
        """Permute the list of files, by seed and epoch, before it is sharded."""
        seed = check_seed(".shuffle_files(seed=)", seed)
        return self._same(ShuffleFiles(name=self._name(name, "shuffle_files"), seed=seed))

    @abstractmethod
    def _name(self, given: str | None, default: str) -> str:
        """Return a name that no other part of this pipeline has."""

    @abstractmethod
    def _with(self, stage: Stage[Any, Any]) -> Any:
        """Return this pipeline with one more stage."""

    def _same(self, stage: Stage[T, T]) -> Self:
        return cast("Self", self._with(stage))
