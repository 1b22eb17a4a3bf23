"""What a loader tells of its present iteration, or of the last one."""

from __future__ import annotations

from typing import Generic, TypeVar

from streamline.core.error_policy import ErrorReport
from streamline.loading.passes import Now
from streamline.observe.stats import Stats
from streamline.sharding.ends import EndsReport

__all__ = ["Reports"]

T = TypeVar("T")


class Reports(Generic[T]):
    """The part of `Loader` that reads what its stream has counted."""

    _now: Now[T]

    def stats(self) -> Stats | None:
        """Return what was counted in the present iteration, or in the last one; None: there has been none.

        With `steps_per_epoch`: since the pipeline was opened, which may be epochs ago.
        """
        run = self._now.run
        return None if run is None else run.stream.stats()

    @property
    def errors(self) -> ErrorReport:
        """The items that were left out because of an error, of the same stretch as `stats`, and before a resume."""
        run = self._now.run
        return ErrorReport() if run is None else run.stream.errors

    @property
    def padding(self) -> bool:
        """Whether the last item was given again, so that all ranks end together; see `ends` of `open`."""
        run = self._now.run
        return run is not None and run.stream.padding

    @property
    def ends(self) -> EndsReport | None:
        """How the present iteration ends together with other ranks, or the last one; None: there has been none."""
        run = self._now.run
        return None if run is None else run.stream.ends
