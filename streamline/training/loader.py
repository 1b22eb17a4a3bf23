"""The loader: a pipeline that can be iterated again and again, one epoch each time.

Success: an iteration ends, and the next `iter()` is the next epoch. Failure, `break`, Ctrl-C: the iteration was left,
its stream is closed, the state is right after the last item that it gave; the next `iter()` is the next epoch. An
iteration that was left before its first item has not begun: the next `iter()` is the same. Snapshot: at any time.

Which epoch comes next is decided in `streamline.training.epochs`; here it is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Generic, NoReturn, TypeVar

from streamline.backends.inline import Inline
from streamline.core.cleanup import Cleanup
from streamline.core.error_policy import ErrorReport
from streamline.core.options import check_ago, check_int
from streamline.errors import ClosedError, PlanError
from streamline.observe.stats import Stats
from streamline.plan.length import num_outputs_of_rank
from streamline.runtime.run import RESET_WITHIN, ResolvedRun, reset_caches
from streamline.runtime.tuning import NOT_TUNED, StreamTuning
from streamline.sharding.ends import EndsReport
from streamline.sharding.ranks import find_rank
from streamline.snapshot.snapshot import Snapshot
from streamline.training.epochs import EpochPlace, Epochs, LoaderPhase
from streamline.training.loader_state import Inside, LoaderState
from streamline.training.passes import Iteration, LoaderRun, Now, Passes, check_begin

T = TypeVar("T")


LEAVES_OUT = (
    ".loader(resume=): the snapshot leaves out steps that are still to come, and a loader counts what it gives: go on "
    "with pipe.open(resume=) until they have passed, and give the loader a snapshot from after them"
)


class Loader(Generic[T]):
    """Iterates a pipeline, one epoch each time; made by `pipe.loader()`.

    for epoch in range(loader.epoch, 3):
        for batch in loader:
            ...

    A loader has one iteration at a time: `iter()` ends an older one. It is used from one thread.
    """

    def __init__(
        self,
        passes: Passes[T],
        *,
        epoch: int | None,
        steps_per_epoch: int | None,
        fixed_epoch: bool,
        resume: Snapshot | None,
    ) -> None:
        epoch, steps_per_epoch = check_begin(epoch, steps_per_epoch, fixed_epoch, resume)
        for part in () if resume is None else resume.parts or (resume,):
            if any(stop > (part.step or 0) for _, stop in part.left_out):
                raise PlanError(LEAVES_OUT)
        self._passes = passes
        Cleanup(self, passes.close)  # threads that have ended may be in cycles that hold on to the pool
        at = None if resume is not None and steps_per_epoch else epoch
        self._resolved = passes.open_at(resume=resume, epoch=at).resolved
        self._loaded = _part(resume, self._resolved)
        self._unknown = resume is not None and steps_per_epoch is None
        self._closed = False
        self._token: object = None
        first = epoch or 0 if steps_per_epoch else self._resolved.epoch
        self._now = Now[T](Epochs(EpochPlace(first, fresh=resume is None), steps_per_epoch, fixed_epoch), None)

    # Epochs ---------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that is going on; while there is none, of the one that the next `iter()` begins.

        After a resume it may wait for the next item, to see whether there is another in its epoch.
        """
        return self._present.epoch

    @property
    def step(self) -> int:
        """How many items of `epoch` have been taken."""
        return self._present.step

    @property
    def _present(self) -> EpochPlace:
        self._settle()
        epochs, run = self._now
        if epochs.phase is not LoaderPhase.RUNNING or run is None:
            return epochs.upcoming
        return replace(epochs.place, step=epochs.place.step + run.taken)

    def set_epoch(self, epoch: int) -> None:
        """Let the next `iter()` be of this epoch: for trainers that say so before each.

        If it would be anyway, nothing changes: a place that was loaded stays. Otherwise the epoch begins at its
        beginning, and with `steps_per_epoch` the pipeline begins anew, too. Without effect with `fixed_epoch=True`.

        Raises:
          PlanError: it is less than 0, or no integer.
        """
        epoch = check_int("set_epoch(epoch)", epoch, 0)
        self._settle()
        epochs, run = self._now
        after = epochs.set_epoch(epoch)
        thrown = after.phase is LoaderPhase.WAITING and after.place != epochs.upcoming
        if thrown:
            self._drop(after)
        else:
            self._now = Now(after, run)
            self._passes.expect(after.following.epoch)

    @property
    def page(self) -> str | None:
        """The address of its live page, with the token that lets in, also between epochs; None: none of its own."""
        return None if self._closed else self._passes.page

    @property
    def tuning(self) -> StreamTuning:
        """What `loader(tune=)` has found in all passes, and why. Raises `PlanError`: it isn't tuned."""
        if self._passes.tuning is None:
            raise PlanError(NOT_TUNED)
        return self._passes.tuning

    def __len__(self) -> int:
        """Return the items in an epoch, on this rank.

        Raises:
          TypeError: unknown before they have been read, or there is no end.
        """
        steps = self._now.epochs.steps
        if steps is not None:
            return steps
        run, rank = self._resolved, self._resolved.rank
        if rank.found_in == "alone":
            rank = find_rank()  # a trainer may have begun its processes since, as each iteration finds out, too
        items = num_outputs_of_rank(run.plan, rank.rank, rank.world_size, run.ending.ends.policy)
        if items is None:
            raise TypeError(
                "how many items an epoch of this pipeline has isn't known before they have been read: "
                "loader(steps_per_epoch=n) has n"
            )
        if items == math.inf:
            raise TypeError("this pipeline has no end: give the loader steps_per_epoch=")
        return int(items)

    def __bool__(self) -> bool:
        return True  # else Python would ask for the length

    # Iterating ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        """Begin the next epoch, or go on in the one that was loaded; an older iteration ends.

        Raises:
          ClosedError: the loader is closed.
          What `Pipeline.open` raises; nothing has changed then, but that an older iteration was left.
        """
        if self._closed:
            raise ClosedError("the loader is closed: make another with pipe.loader()")
        self._leave()
        self._settle()
        run = self._enter()
        token = self._token = object()
        part = run.stream.part if self._now.epochs.steps is None else partial(self._part_of_steps, token)
        iteration = Iteration(part, partial(self._over, token), partial(self._insist_on, token))
        Cleanup(iteration, self._dropped, token).not_at_exit()
        epochs = self._now.epochs.begin()
        self._now = Now(epochs, run)
        self._passes.expect(epochs.following.epoch, run)
        return iteration

    def close(self) -> None:
        """End everything that this loader started, and wait until it has ended. Idempotent. The state stays."""
        self._closed = True
        self._leave()
        epochs, run = self._now
        if run is not None:
            self._now = Now(epochs, run.stopped())
        self._passes.close()

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _part_of_steps(self, token: object) -> Iterator[T] | None:
        """Return what gives the next items of an epoch of steps, and none of the one after it."""
        self._insist_on(token)
        epochs, run = self._now
        while run is not None and not epochs.full(run.taken):
            if (part := run.stream.part()) is not None:
                return islice(part, epochs.left(run.taken))
            run = self._next_pass(run)
        return None

    def _insist_on(self, token: object) -> None:
        """Refuse an iteration that isn't the present one."""
        if token is not self._token:
            raise ClosedError("this iteration was left: the loader was closed, or another iter() of it has begun")

    def _next_pass(self, run: LoaderRun[T]) -> LoaderRun[T]:
        """Begin the pipeline anew, in the same epoch of the loader."""
        if run.begin is None and not run.stream.count:
            raise PlanError(
                f"the pipeline gave no item in epoch {run.epoch}, so steps_per_epoch={self._now.epochs.steps} can't be "
                "reached"
            )
        following = replace(self._passes.open(None, run.epoch + 1), offset=run.taken)
        self._now = Now(self._now.epochs, following)
        return following

    def _over(self, token: object) -> None:
        """The iteration with this token has given all of its items."""
        self._insist_on(token)
        if self._now.epochs.phase is LoaderPhase.RUNNING:
            self._end()

    def _end(self) -> None:
        """Nothing follows in the present epoch."""
        epochs, run = self._now
        self._unknown = False
        after = replace(epochs, begun=True).end()
        if epochs.jumps:
            self._drop(after)
        elif after.place.fresh and run is not None:
            self._now = Now(after, run.stopped())
        else:
            self._now = Now(after, run)

    def _leave(self) -> None:
        """End the present iteration, if there is one, where it stands."""
        epochs, run = self._now
        self._token = None
        if epochs.phase is not LoaderPhase.RUNNING or run is None:
            return
        stopped = run.stopped()
        if run.taken:
            self._unknown = False
        over = epochs.steps is None and run.taken and run.stream.peek() is False  # closed: it doesn't wait
        self._now = Now(replace(epochs, begun=True).end() if over else epochs.leave(run.taken), stopped)

    def _dropped(self, token: object) -> None:
        """The iteration with this token is gone."""
        if self._token in (token, None):  # None: Ctrl-C has come in the middle of leaving it
            self._leave()

    # Streams --------------------------------------------------------------------------------------------------------

    def _enter(self) -> LoaderRun[T]:
        """Return the stream of the next iteration, at its place."""
        epochs, run = self._now
        place = epochs.upcoming
        if not place.fresh and run is not None and run.alive:
            return replace(run, offset=-run.stream.count)
        if run is not None:
            run.stream.close()
        return self._passes.open(None if place.fresh else self._position, place.epoch)

    def _drop(self, after: Epochs) -> None:
        """Forget where the pipeline stands: it begins anew."""
        _, run = self._now
        if run is not None:
            run.stream.close()
        self._loaded, self._unknown = None, False
        self._now = Now(after, None)

    def _settle(self) -> None:
        """Find out whether the place that was loaded is at its epoch's end: then the next epoch is the one to resume.

        It may wait for an item, which is kept.
        """
        if self._token is None:
            self._leave()  # Ctrl-C may have come in the middle of that
        epochs, run = self._now
        if not self._unknown or epochs.phase is not LoaderPhase.WAITING or self._closed:
            return
        if run is None or not run.alive:
            run = self._enter()
            self._now = Now(epochs, run)
        more = run.stream.peek()
        if more is False:
            self._end()
            self._now = Now(replace(self._now.epochs, begun=epochs.begun), self._now.run)
        elif more:
            self._unknown = False

    @property
    def _position(self) -> Snapshot | None:
        """Where the pipeline stands; None if it has never run."""
        run = self._now.run
        return self._loaded if run is None else run.snapshot

    def reset_cache(self) -> None:
        """Let the next epoch draw anew what `.cache(path=)` keeps. Between two iterations.

        Raises:
          PlanError: an epoch goes on, or with `steps_per_epoch` the pipeline; or there is no `.cache`.
          ReadError: a folder can't be written.
        """
        self._settle()
        epochs, _ = self._now
        if epochs.phase is LoaderPhase.RUNNING or not epochs.upcoming.fresh:
            raise PlanError(RESET_WITHIN)
        reset_caches(self._resolved)
        self._passes.forget_next()

    # States ---------------------------------------------------------------------------------------------------------

    def state_dict(self, batches_ago: int = 0) -> dict[str, Any]:
        """Return where the loader stands, as a dict of strings and integers: what resumes right after the last item.

        After an epoch's last item that is the next epoch's beginning. To know that it was the last, this may wait for
        the next item, or the end: the loop still gets it. After `break` or an exception, it is where it was left.

        Args:
          batches_ago: 1: what resumes with the last item, for trainers that fetch one ahead of using it; never waits.

        Raises:
          SnapshotError: a stage's state holds what JSON would lose or change.
          PlanError: `batches_ago` is neither 0 nor 1; or it is 1, and this iteration has given nothing yet.
        """
        check_ago("state_dict(batches_ago)", batches_ago)
        if batches_ago:
            place, at, position = self._one_ago()
        else:
            (place, at), position = self._standing(), self._position
        return LoaderState(
            epoch=place.epoch,
            step=place.step,
            at=at,
            steps_per_epoch=self._now.epochs.steps or 0,
            snapshot="" if position is None else position.to_json(),
        ).to_dict()

    def _one_ago(self) -> tuple[EpochPlace, Inside, Snapshot | None]:
        """Return where the last item came from."""
        epochs, run = self._now
        taken = 0 if run is None else run.taken
        if run is None or not taken or epochs.phase is not LoaderPhase.RUNNING:
            raise PlanError("state_dict(batches_ago=1): expected an iteration that has given an item, and goes on")
        place = epochs.at(taken - 1)
        return place, "begin" if place.fresh else "inside", run.snapshot_before

    def _standing(self) -> tuple[EpochPlace, Inside]:
        """Return where the next item comes from, and whether it is known that there is one."""
        epochs, run = self._now
        place, known = epochs.place, not self._unknown
        if epochs.phase is LoaderPhase.RUNNING and run is not None:
            place = epochs.at(run.taken)
        if place.fresh:
            return place, "begin"
        if epochs.steps is not None:
            return place, "inside"
        if epochs.phase is not LoaderPhase.WAITING and run is not None:
            more = run.stream.peek()
            if more is False:
                return epochs.following, "begin"
            known = more is not None
        return place, "inside" if known else "unknown"

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go to where a loader stood when it returned this from `state_dict`; the next `iter()` goes on there.

        Args:
          state_dict: this rank's; or a list of those of all ranks, which may be others in number than there are now.

        Raises:
          RuntimeError: this loader has given items already: load into a new one.
          SnapshotError: it isn't what `state_dict` returns.
          ResumeError: it is of another plan, of other data, of other ranks or of another `steps_per_epoch`.
        """
        epochs, _ = self._now
        if epochs.begun or epochs.phase is not LoaderPhase.WAITING:
            raise RuntimeError("iteration has begun: load the state into a new loader, before its first iter()")
        state, snapshot = LoaderState.read(state_dict)
        state.insist_on(epochs.steps)
        epoch = None if snapshot is not None else state.epoch
        resolved = self._passes.open_at(resume=snapshot, epoch=epoch).resolved  # refuses what doesn't fit
        self._drop(replace(epochs, place=EpochPlace(state.epoch, state.step, fresh=state.at == "begin")))
        resharded = snapshot is not None and snapshot.world_size != resolved.rank.world_size
        self._unknown = state.at == "unknown" or (state.at == "inside" and resharded and epochs.steps is None)
        self._loaded = _part(snapshot, resolved)

    def snapshot(self) -> Snapshot:
        """Return where the pipeline stands, right after the last item, for `save`. Doesn't wait for an item.

        It knows nothing of `steps_per_epoch`: with that, save `state_dict()`. After an epoch's last item it is of that
        epoch; a loader that is resumed from it goes on with the next.
        """
        position = self._position
        if position is not None:
            return position
        epoch = self._now.epochs.upcoming.epoch
        with self._passes.open_at(
            resume=None, epoch=epoch, backend=Inline(), ends="allow", tune=False
        ) as stream:  # nothing is read
            return stream.snapshot()

    # Counts ---------------------------------------------------------------------------------------------------------

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

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loader holds a thread and can't be pickled or copied: take the pipeline, and state_dict()")

    def __repr__(self) -> str:
        epochs, run = self._now
        taken = run.taken if run is not None and epochs.phase is LoaderPhase.RUNNING else 0
        phase = "closed" if self._closed else epochs.phase.value
        return f"<Loader: epoch {epochs.place.epoch}, step {epochs.place.step + taken}, {phase}>"


def _part(snapshot: Snapshot | None, resolved: ResolvedRun) -> Snapshot | None:
    """Return the part of a snapshot that a run took: a whole job's is in no state of one rank."""
    if snapshot is None or (snapshot.rank, snapshot.world_size) == (resolved.rank.rank, resolved.rank.world_size):
        return snapshot
    return resolved.start_snapshot
